"""Functions that an operator runs in the program's stead, captured as graphs of their own.

A body is interpreted once, whatever the operator makes of it when the graph runs. So it has to be a function of
tensors: what it changes of anything else would be changed at capture, and never again.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from primtorch import ambient
from primtorch.fake import FakeTensor
from primtorch.frozen import record
from primtorch.spec import TensorSpec
from torchdynamo.calls.effects import effects_so_far
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.interpreter.protocol import InterpreterApi, World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph
from torchdynamo.sources import own_items

REASON = "higher_order_operator"


def refusal(detail: str) -> BreakGraph:
    """The break of an operator over functions."""
    return BreakGraph(REASON, detail)


@record
class Recorded:
    """A body that was interpreted: its nodes, the nodes around it that it reads, and its results.

    Attributes:
        numbers, tensors: what it reads, in the order in which it first does.
        results, specs, history: of each result its node, what it is, and whether it requires a gradient.
        tree: what they are the leaves of.
    """

    nodes: list[fx.Node]
    numbers: list[fx.Node]
    tensors: list[fx.Node]
    results: list[fx.Node]
    specs: list[TensorSpec]
    history: list[bool]
    tree: pytree.TreeSpec


class Bodies:
    """Records bodies, and makes graphs of them."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.recorder = outside.recorder

    def record(
        self,
        what: str,
        function: Callable[..., object],
        make_args: Callable[[], tuple[object, ...]],
        copied: bool = False,
    ) -> Recorded:
        """Interprets `function`. `make_args` gives its arguments; stand-ins among them are inputs of the body. With
        `copied`, the body gives copies of what the function returns, which may be what it is given.

        Raises:
            BreakGraph: the body does more than to compute new tensors, or raises.
        """
        recorder = self.recorder
        mark = recorder.regions.mark()
        before, said = effects_so_far(self.outside), self.outside.emitted
        written, restrided = len(recorder.written), len(recorder.restrided)
        held, state = list(_contents(function, self.outside)), ambient.snapshot()
        self.interpreter.tail_call = False
        try:
            with recorder.regions.body():
                value = self.world.call(function, make_args(), {})
                if copied and isinstance(value, FakeTensor):
                    value = value.clone()
            nodes = recorder.regions.since(mark)
        except BreakGraph as error:
            wrapped = refusal(f"in {what}, {error.reason}: {error.detail}")
            wrapped.positions = error.positions
            raise wrapped from error
        except Exception as error:
            raise refusal(f"{what} raises {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        left = ambient.changed(state).keys() - {"dispatch keys"}  # of the thread: no program's, but of what runs it
        if left:
            ambient.restore(state)
            raise refusal(f"{what} changes {', '.join(sorted(left))}")
        changed = any(_items(thing) != items for thing, items in held)
        if changed or effects_so_far(self.outside, before) != before or self.outside.emitted != said:
            raise refusal(f"{what} changes objects outside of it")
        own = set(nodes)
        leaves, tree = pytree.tree_flatten(value)
        if not leaves or not all(isinstance(leaf, FakeTensor) for leaf in leaves):
            raise refusal(f"{what} returns something else than tensors")
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own)
        numbers = [node for node in read if isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat))]
        tensors = [node for node in read if isinstance(node.meta["val"], torch.Tensor)]
        if len(numbers) + len(tensors) < len(read):
            raise refusal(f"{what} reads something else than tensors and numbers of what is around it")
        if any(_of_a_class(node.meta.get("val")) for node in (*nodes, *tensors)):
            raise refusal(f"{what} has to do with a tensor subclass")
        later = (*recorder.written[written:], *recorder.restrided[restrided:])
        del recorder.written[written:], recorder.restrided[restrided:]
        with torch._C.DisableTorchFunction():
            given = {id(node.meta["val"].memory) for node in (*tensors, *_stand_ins(nodes))}
            if any(recorder.node_of(t) not in own or id(memory_of(t)) in given for t in later):
                raise refusal(f"{what} writes to a tensor that was made before")
            results = self._own_results(what, leaves, own, given)
            specs, history = [TensorSpec.of(leaf) for leaf in leaves], list(map(self.has_history, leaves))
        return Recorded(nodes, numbers, tensors, results, specs, history, tree)

    def _own_results(
        self, what: str, leaves: Sequence[FakeTensor], own: set[fx.Node], given: set[int]
    ) -> list[fx.Node]:
        """The nodes of a body's results, each of which is memory of its own."""
        taken = set(given)
        results: list[fx.Node] = []
        for leaf in leaves:
            node = self.recorder.node_of(leaf)
            if node is None or node not in own or id(leaf.memory) in taken:
                raise refusal(f"{what} returns a tensor that is given to it, or a view, or one tensor twice; clone it")
            taken.add(id(leaf.memory))
            results.append(node)
        return results

    def has_history(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a derivative. Within a function that is transformed any may have one: nobody else knows
        what the transform derives by."""
        if self.recorder.regions.transforms:
            return tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad

    def stand_in(self, spec: TensorSpec, requires_grad: bool) -> FakeTensor:
        """A tensor that the operator hands to a body."""
        return self.recorder.stand_in("of_body", spec, requires_grad)

    def discard(self, body: Recorded) -> None:
        """Takes a body out of the graph that is recorded again."""
        for node in reversed(body.nodes):
            self.recorder.graph.erase_node(node)

    def graph(self, body: Recorded, inputs: Sequence[fx.Node], repeated: int = 1) -> tuple[fx.GraphModule, bool]:
        """The body as a graph of `inputs` and then its stand-ins, and whether it has an effect. `repeated`: how often
        the graph gives the body's results."""
        regions = self.recorder.regions
        region = regions.outline(body.nodes, inputs)
        region.outputs = [region.copies[node] for node in body.results] * repeated
        region.sealed = refusal("a value of a body is used outside of it")
        return regions.finished_sealed(region), region.has_effect


def _of_a_class(value: object) -> bool:
    return any(isinstance(leaf, FakeTensor) and class_of(leaf) is not None for leaf in pytree.tree_leaves(value))


def _stand_ins(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "placeholder"]


def _items(thing: object) -> object:
    """What an object holds, by identity."""
    if isinstance(thing, types.CellType):
        return list(map(id, _held(thing)))
    if isinstance(thing, dict):
        return [(id(key), id(item)) for key, item in dict.items(thing)]
    if isinstance(thing, (set, frozenset)):
        return set(map(id, own_items(thing)))
    if isinstance(thing, (list, collections.deque)):
        return list(map(id, own_items(thing)))
    return [(name, id(item)) for name, item in _slots(thing)]


def _held(cell: types.CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _slots(thing: object) -> Iterator[tuple[str, object]]:
    for kind in type(thing).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(thing)
                except AttributeError:
                    continue


def _contents(root: object, outside: Outside) -> Iterator[tuple[object, object]]:
    """What a function can reach that the program made itself and could change: each with what it holds."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or outside.externals.lookup(thing) is not None or isinstance(thing, _LEFT_ALONE):
            continue
        if len(seen) > _MOST:
            raise refusal("a function that holds very much")
        if hasattr(type(thing), "__next__"):
            raise refusal("a function that holds an iterator")
        seen.add(id(thing))
        if not isinstance(thing, _FIXED):
            yield thing, _items(thing)
        waiting += _parts(thing)


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, types.FunctionType):
        return (*(thing.__closure__ or ()), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    if isinstance(thing, types.MethodType):
        return thing.__self__, thing.__func__
    if isinstance(thing, functools.partial):
        return thing.func, *thing.args, *thing.keywords.values()
    if isinstance(thing, types.CellType):
        return _held(thing)
    if isinstance(thing, dict):
        return list(dict.values(thing))
    if isinstance(thing, (list, set, tuple, frozenset, collections.deque)):
        return list(own_items(thing))
    try:
        namespace = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        namespace = {}
    return namespace, *(item for _, item in _slots(thing))


_FIXED = (types.FunctionType, types.MethodType, functools.partial, tuple, frozenset)
_LEFT_ALONE = (
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, nn.Module, type, types.ModuleType,
    types.BuiltinFunctionType, str, bytes, int, float, complex, type(None),
)  # fmt: skip
_MOST = 10_000
