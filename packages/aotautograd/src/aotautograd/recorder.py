"""Records the operators that arrive at the bottom of the dispatcher as nodes of a graph."""

from __future__ import annotations

import contextlib
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.graph import _Namespace
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from aotautograd.assumptions import ExampleValues, TriedValues
from aotautograd.draws import NEVER, Draws, draws_numbers, place_of_probability
from aotautograd.errors import AotAutogradError, UnsupportedMutation
from aotautograd.inputs import sizes_of
from aotautograd.passes import is_random
from aotautograd.schemas import HISTORY, PHASE, FunctionCall, FunctionResult, History
from aotautograd.unseen_writes import UnseenWrites
from primtorch.dispatch_mode import DispatchMode
from primtorch.errors import DataDependentValue
from primtorch.fake import METADATA, FakeMode, FakeTensor, propagate
from primtorch.fake.recipe import ATOMS
from primtorch.frozen import record
from primtorch.functionalize import unwrap
from primtorch.higher_order import HigherOrder
from primtorch.nodes import new_node
from primtorch.schemas import UserFrame
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import depends_on_data, expr_of, materialize

aten = torch.ops.aten


class Call(NamedTuple):
    """A call of an overload: its arguments as they are in the graph, and as they are."""

    func: OpOverload
    node_args: tuple[Any, ...]
    node_kwargs: dict[str, Argument]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Rule: TypeAlias = Callable[..., object]
"""rule(recorder, call): the result of an operator that is not recorded as it comes, or NotImplemented, which means that
this call is."""

R = TypeVar("R", bound=Rule)

_RULES: dict[object, Rule] = {}


def special(*overloads: object) -> Callable[[R], R]:
    """Makes a function the rule of overloads. To be called before any of them is recorded."""

    def register(rule: R) -> R:
        _RULES.update(dict.fromkeys(overloads, rule))
        return rule

    return register


class _Names(_Namespace):
    """Names of nodes as fx numbers them. What was a base of names before needs no second look at its characters."""

    def create_name(self, candidate: str, obj: object | None) -> str:
        number = self._base_count.get(candidate)
        if number is None or obj is not None:
            return super().create_name(candidate, obj)
        name = candidate
        while name in self._used_names:
            number += 1
            name = f"{candidate}_{number}"
        self._used_names.add(name)
        self._base_count[candidate] = number
        return name


def _tensors(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The functional tensors in tuples and lists, with their places."""
    if isinstance(value, (tuple, list)):
        for place, item in enumerate(value):
            yield from _tensors(item, (*path, place))
    elif isinstance(value, torch.Tensor) and torch._is_functional_tensor(value):
        yield path, value


class Recorder(DispatchMode):
    """Records operators on tensors that have a node.

    `written` holds the inner tensors that an operator changed without saying so in its schema.
    """

    def __init__(self, fake_mode: FakeMode, fix_sizes: bool = False) -> None:
        self.values: ExampleValues | None = None  # what Python numbers are read from
        self.fix_sizes = fix_sizes  # whether sizes and integers that depend on data become numbers too
        self.graph = fx.Graph()
        self.graph._graph_namespace = _Names()
        self.fake_mode = fake_mode
        self.node_of: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []  # ids in node_of stay valid while their tensors live
        self.symbol_nodes: dict[str, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.fake_constants: dict[int, torch.Tensor] = {}
        self.symbols = fake_mode.shape_env.symbols if fake_mode.shape_env is not None else {}
        self.written: set[int] = set()
        self.stack: tuple[UserFrame, ...] = ()
        self.unseen = UnseenWrites()
        self.phase = "forward"
        self.sequence_starts: list[int] = []  # autograd sequence number when each user node began, and its stack
        self.sequence_stacks: list[tuple[UserFrame, ...]] = []
        self.written_cast = False  # whether the user node is a conversion of dtype
        self.sequence_autocast: list[bool] = []  # whether conversions within the user node are autocast's
        self.of_autocast = False  # of the forward operator whose backward runs
        self.operators = 0
        self.follows_history = False  # whether what has no history is marked
        self.of_user_node: set[fx.Node] = set()  # what its operators have made so far
        self.placeholder_names: set[str] = set()
        self.draws = Draws()
        self.drawn = 0  # how many operators have drawn random numbers, or have been given those of the forward
        self.derived = ""  # the node of autograd that ran last, if it did within this user node or the backward
        self.derivatives: dict[str, OpOverload] = {}  # operators of somebody's own by their nodes of autograd
        self.untraced: frozenset[OpOverload] = frozenset()  # operators whose derivatives cannot be traced
        self.examples: TriedValues | None = None  # what they are tried on
        self.answers = False  # whether derivatives are told the example's values where they read data

    def track(self, t: torch.Tensor, node: fx.Node) -> None:
        """Says which node gives a tensor, and keeps the tensor alive, since its id stands for it."""
        self.node_of[id(t)] = node
        self.alive.append(t)

    def with_strides(self, value: torch.Tensor, strides: Sequence[Size]) -> torch.Tensor:
        """Another fake tensor for the value of `value`'s node."""
        fake = self.fake_mode.from_spec(TensorSpec(tuple(value.shape), tuple(strides), value.dtype, value.device))
        self.track(fake, self.node_of[id(value)])
        return fake

    def placeholder(self, name: str, value: object) -> fx.Node:
        """Adds an input to the graph, under this name or the next free one; a tensor among them is tracked."""
        while name in self.placeholder_names:  # a program that is itself a gradient has tangents among its inputs
            name += "_"
        self.placeholder_names.add(name)
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        node.meta["stack"] = ()
        node.meta[PHASE] = self.phase
        if isinstance(value, torch.Tensor):
            self.track(value, node)
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            self.symbol_nodes.setdefault(str(value), node)
        return node

    def user_node(self, stack: tuple[UserFrame, ...], written_cast: bool = False) -> None:
        """Operators from here on belong to this line of the user's program; so will their backward."""
        self.stack = stack
        self.of_user_node.clear()
        self.derived = ""
        self.written_cast = written_cast
        self.sequence_autocast.append(torch._C._is_any_autocast_enabled() and not written_cast)
        self.sequence_starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.sequence_stacks.append(stack)

    def nodes_of(self, args: Sequence[object]) -> tuple[Argument, ...]:
        """The arguments of a user's call with the nodes of the tensors among them."""
        return tuple(self.node_of.get(id(unwrap(a))) if isinstance(a, torch.Tensor) else a for a in args)

    def note_history(self, value: object, function: Callable[..., object] | None, args: tuple[object, ...]) -> None:
        """Notes what autograd has recorded of the result of a user's node, where that is not each operator's own.

        Args:
            function: what was called with `args` (nodes for tensors), if that may be an autograd function.
        """
        call: FunctionCall | None = None
        for path, tensor in _tensors(value):
            node = self.node_of.get(id(torch._from_functional_tensor(tensor)))
            if node not in self.of_user_node:  # it hands an earlier value on
                self.unseen.handed_on(tensor, self.stack)
                continue
            if not tensor.requires_grad:
                node.meta[HISTORY] = History.NONE
            elif not torch.is_grad_enabled():
                node.meta[HISTORY] = History.WRITTEN
            elif isinstance(node.meta.get(HISTORY), FunctionResult):  # a function within has said so
                continue
            elif function is not None and isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
                call = call or FunctionCall(function, args, any(map(is_random, self.of_user_node)))
                node.meta[HISTORY] = FunctionResult(call, path)

    def without_histories(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values of a block in which autograd records nothing, each by a node of its own: what is handed on as it was
        given has no history behind it either."""
        found = [aten.alias.default(value) if isinstance(value, torch.Tensor) else value for value in values]
        for value in found:
            if isinstance(value, torch.Tensor):
                self.node_of[id(unwrap(value))].meta[HISTORY] = History.NONE
        return tuple(found)

    def note_detached(self, value: torch.Tensor) -> None:
        """Notes that a tensor has lost its history in place: some use of its value has it, and others have not."""
        node = self.node_of.get(id(unwrap(value)))
        if node is not None and node.op != "placeholder":
            node.meta[HISTORY] = History.WRITTEN

    def lift(self, a: Any) -> Any:
        """An argument of an operator as an argument of a node."""
        kind = type(a)
        if kind in ATOMS:
            return a
        if isinstance(a, torch.Tensor):
            node = self.node_of.get(id(a))
            return node if node is not None else self.constant(a)
        if kind is list or kind is fx.immutable_collections.immutable_list:
            return [self.lift(x) for x in a]
        if kind is tuple or kind is torch.Size:
            return tuple([self.lift(x) for x in a])
        if kind is torch.SymInt or kind is torch.SymFloat:
            return self.size(a)
        return a

    def size(self, size: torch.SymInt | torch.SymFloat) -> fx.Node | int | float:
        """A symbolic int or float as a node, or the number that it is known to be."""
        try:
            return materialize(self.graph, size, self.symbol_nodes)
        except KeyError as error:
            remedy = "Keep this part out of the compiled region."
            raise DataDependentValue(
                f"the size {size}", "it is known only when the program runs", remedy, self.stack
            ) from error

    def constant(self, t: torch.Tensor) -> fx.Node:
        """A real tensor that the program closes over becomes an attribute of the graph."""
        if isinstance(t, FakeTensor):
            raise AotAutogradError(
                f"a fake tensor of shape {tuple(t.shape)} from outside of the program was used in it; "
                "pass it as an input",
                self.stack,
            )
        name = f"_constant{len(self.constants)}"
        self.constants[name] = t
        node = self.graph.create_node("get_attr", name)
        fake = self.fake_mode.from_tensor(t)
        node.meta["val"] = fake
        node.meta["stack"] = self.stack
        node.meta[PHASE] = self.phase
        self.fake_constants[id(t)] = fake
        self.track(t, node)
        self.track(fake, node)
        return node

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.operators += 1
        called = _operator_of(func)
        if called.asks_metadata:
            return propagate(self.fake_mode, func, args, kwargs or {})
        nodes = self.node_of
        node_args = tuple([(nodes.get(id(a)) if type(a) is FakeTensor else None) or self.lift(a) for a in args])
        node_kwargs = {k: self.lift(v) for k, v in kwargs.items()} if kwargs else {}
        if self.fake_constants:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        deriving = self.deriving()
        if deriving:
            self._find_forward_operator()
        if called.rule is not None:
            out = called.rule(self, Call(func, node_args, node_kwargs, args, kwargs or {}))
            if out is not NotImplemented:
                return out
        random = draws_numbers(called.probability, args, kwargs)
        self.drawn += random
        if random and deriving:
            drawn = self.draws.repeated(func)
            if drawn is not None:
                return drawn
        known_symbols = len(self.symbols)
        out = propagate(self.fake_mode, func, args, kwargs or {})  # what a call of `func` would come to
        if random and self.phase == "forward":
            self.draws.drew(func, out)
        if called.writes:
            raise UnsupportedMutation(f"{func} writes to its arguments and has no functional form", self.stack)
        node = self._node(func, node_args, node_kwargs)
        if self.fix_sizes and self.values is not None and any(map(depends_on_data, sizes_of(out))):
            return self._fix(node, self.values)  # a size that it has in common with another's result is no new symbol
        self._attach(node, out)
        if len(self.symbols) != known_symbols:
            self._name_sizes(node)
        return out

    def record(self, func: Target, args: tuple[object, ...], kwargs: dict[str, Argument], out: object) -> fx.Node:
        """Adds a call to the graph and tracks what it gave; gives the node."""
        node = self._node(func, args, kwargs)
        self._attach(node, out)
        return node

    def call_graphs(self, target: HigherOrder, args: tuple[object, ...], out: object) -> fx.Node:
        """The node of an operator over graphs. It is looked up nowhere, and lives as long as the graph."""
        node = new_node(self.graph, "call_function", target, args, {}, target.name)
        self._attach(node, out)
        return node

    def _node(self, target: Target, args: tuple[object, ...], kwargs: dict[str, Argument]) -> fx.Node:
        return new_node(self.graph, "call_function", target, args, kwargs, _operator_of(target).name)

    def _attach(self, node: fx.Node, out: object) -> None:
        """Says what a new node gives, and that these tensors come from it."""
        self._describe(node, out)
        if isinstance(out, torch.Tensor):
            self.track(out, node)
        elif isinstance(out, (tuple, list)):
            for i, o in enumerate(out):
                if isinstance(o, (torch.Tensor, tuple, list)):
                    self._attach(self._node(operator.getitem, (node, i), {}), o)
        elif isinstance(out, torch.SymInt):
            self.symbol_nodes.setdefault(str(expr_of(out)), node)
        elif isinstance(out, torch.SymFloat):
            self.symbol_nodes.setdefault(str(out), node)

    def _name_sizes(self, node: fx.Node) -> None:
        """Nodes for the new symbols in an operator's sizes, which depend on data."""
        for item in (node, *node.users):
            value = item.meta["val"]
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                name = str(size)
                if isinstance(size, torch.SymInt) and name in self.symbols and name not in self.symbol_nodes:
                    read = self._node(aten.sym_size.int, (item, dim), {})
                    self._describe(read, size)
                    self.symbol_nodes[name] = read

    def _fix(self, node: fx.Node, values: ExampleValues) -> object:
        """The result of an operator whose sizes depend on data, with the sizes that the example inputs give."""
        node.meta["stack"] = self.stack
        real = values(node)
        describe = lambda t: self.fake_mode.from_spec(TensorSpec.of(t))
        out = describe(real) if isinstance(real, torch.Tensor) else type(real)(map(describe, real))
        self._attach(node, out)
        for item in (node, *node.users):
            if isinstance(item.meta["val"], torch.Tensor):
                values.assume(item, "shape")
        return out

    def _describe(self, node: fx.Node, value: object) -> None:
        meta = node.meta
        if self.follows_history:
            self.of_user_node.add(node)
            if node.target is aten.detach.default:
                self._note_detach(node)
        meta["val"] = value
        meta["stack"] = self.stack
        meta[PHASE] = self.phase
        if node.target is aten._to_copy.default and self._cast_by_autocast():
            meta["autocast"] = True
        if torch.is_grad_enabled() and self.deriving():  # of a checkpoint: derivatives run without, but for higher ones
            meta["recomputed"] = True

    def _note_detach(self, node: fx.Node) -> None:
        """Functionalization takes a detached value anew where what it is of was written. A checkpoint hands on what it
        has made again by one, and autograd gives that the history that it had."""
        if not self.deriving():
            node.meta[HISTORY] = History.NONE
        elif isinstance(source := node.args[0], fx.Node) and HISTORY in source.meta:
            node.meta[HISTORY] = source.meta[HISTORY]

    def _cast_by_autocast(self) -> bool:
        """Whether a conversion of dtype is one that autocast put into the program, or the derivative of one."""
        if self.deriving():
            return self.of_autocast
        return torch._C._is_any_autocast_enabled() and not self.written_cast

    def _as_fake(self, t: torch.Tensor) -> torch.Tensor:
        return self.fake_constants.get(id(t), t)

    def deriving(self) -> bool:
        """Whether autograd's engine runs: for the backward, or for a derivative that the program takes itself."""
        return self.phase == "backward" or torch._C._current_autograd_node() is not None

    def reads_data(self, what: str) -> DataDependentValue:
        """The error of a derivative that reads what a tensor holds: of the line whose operator it derives."""
        self._find_forward_operator()
        remedy = "Keep the operator that it is of out of the compiled region."
        return DataDependentValue(what, "a derivative reads a tensor's data", remedy, self.stack)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Derivatives that run within are tried: see `answer`."""
        answers, self.answers = self.answers, True
        try:
            yield
        finally:
            self.answers = answers

    def answer(self, func: Callable[..., object], tensor: torch.Tensor, what: str) -> object:
        """What a derivative reads of a tensor, where it is tried on the example inputs.

        Raises:
            DataDependentValue: it is not tried, there are no examples, or they do not tell this tensor.
        """
        node = self.node_of.get(id(unwrap(tensor)))
        if not self.answers or self.examples is None or node is None:
            raise self.reads_data(what)
        return self.examples.read(func, node)

    def note_derivative(self, value: object, op: OpOverload) -> None:
        """Notes which operator of somebody's own autograd's nodes are of."""
        for _, tensor in _tensors(value):
            if tensor.grad_fn is not None:
                self.derivatives[tensor.grad_fn.name()] = op

    def _find_forward_operator(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            return
        self.derived = node.name()
        if not self.sequence_starts:
            return
        place = bisect_right(self.sequence_starts, node._sequence_nr()) - 1
        if place >= 0:
            if self.phase == "backward":  # what the program runs itself is of the line where it does
                self.stack = self.sequence_stacks[place]
            self.of_autocast = self.sequence_autocast[place]


@record
class _Operator:
    """What a recorder asks about an overload at each call."""

    target: Target
    name: str  # of its nodes
    rule: Callable[..., object] | None
    probability: int
    writes: bool
    asks_metadata: bool


def _operator_of(target: Target) -> _Operator:
    # By identity, for an overload's hash is a function in Python. The record keeps it alive.
    known = _OPERATORS.get(id(target))
    if known is None:
        overload = target if isinstance(target, OpOverload) else None
        known = _OPERATORS[id(target)] = _Operator(
            target,
            fx.Graph()._target_to_str(target).replace(".", "_"),  # as fx would write it
            _RULES.get(target),
            NEVER if overload is None else place_of_probability(overload),
            overload is not None and overload._schema.is_mutable,
            overload in METADATA,
        )
    return known


_OPERATORS: dict[int, _Operator] = {}


_CASTS = frozenset({"to", "type", "type_as", "half", "bfloat16", "float", "double", "copy_", "__setitem__"})


def is_cast(node: fx.Node) -> bool:
    """Whether a call of the user's program is a conversion of dtype, and not an operator that autocast converts for."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and name in _CASTS
