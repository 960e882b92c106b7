"""Records torch calls: a torch-function mode that runs each call on fake tensors and writes one FX node for it.

The mode sees every torch function, method, operator and property, also those that C code reaches
(`sum([x, y])`, `list(x)`), because torch asks the mode before anything else. A call gets a node when
it makes a tensor or has an effect; a question about metadata (`x.shape`, `x.dim()`) is answered from the
fake tensor and leaves no trace but the guards on the inputs' metadata.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils._device import _device_constructors

from primtorch import errors as primtorch_errors
from primtorch.effects import RESTRIDES, has_effect, is_inplace, overload_of, unsaid_writes, written_tensors
from primtorch.fake import PROGRAMS_FOR_FAKES, FakeMode, FakeTensor, wants_sizes
from primtorch.nodes import new_node
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import materialize
from primtorch.warned import called_at
from primtorch.wrappers import Relaid
from torchdynamo.graph import dense_values, numpy_values, wrapper_calls
from torchdynamo.graph import known_tensors as constants
from torchdynamo.graph.choices import Choices
from torchdynamo.graph.conditions import Conditions
from torchdynamo.graph.data_writes import DataWrites
from torchdynamo.graph.derivatives import CALL, cut_for, tensors_of
from torchdynamo.graph.jagged import Jagged, stands_for_one
from torchdynamo.graph.leaving import reason_of_name
from torchdynamo.graph.lists_of_tensors import is_over_lists, record_each, record_scaled, takes_factor
from torchdynamo.graph.nested_regions import NestedRegions
from torchdynamo.graph.places import at_places
from torchdynamo.graph.quantised import Quantised
from torchdynamo.graph.regions import Regions
from torchdynamo.graph.taken_numbers import TAKING, TakenNumbers
from torchdynamo.graph.targets import function_name, target_of
from torchdynamo.graph.tensor_classes import (
    PLAIN_TENSORS,
    class_of,
    is_capturable,
    overriding,
    remember_class,
)
from torchdynamo.graph.view_writes import gap_behind, memory_of, reads_memory_of
from torchdynamo.graph.wrapper_tensors import Wrappers
from torchdynamo.interpreter.protocol import MISSING
from torchdynamo.reasons import BreakGraph
from torchdynamo.sources import Computed, Source

T = TypeVar("T")

# Methods that torch's own code does not do for every fake.
METHODS_OF_FAKES: dict[object, Callable[..., object]] = {
    torch.Tensor.new: FakeTensor.new,  # type: ignore[attr-defined]
    torch.Tensor.new_tensor: FakeTensor.new_tensor,
}

# Calls with an effect and no tensor result.
_EFFECTS = frozenset({"_set_grad_enabled", "_assert_async"})

# What a DTensor's class keeps a state for beside the tensors: random numbers of each rank; masks, in placements.
_MASKING = frozenset({"embedding", "embedding_bag", "gather", "scatter_add"})
# Calls that may draw from the generator: a later draw depends on them even when nothing uses their result.
_RANDOM = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli",
        "poisson", "multinomial", "binomial", "dropout", "native_dropout", "dropout1d", "dropout2d", "dropout3d",
        "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax",
        "fractional_max_pool2d", "fractional_max_pool3d", "scaled_dot_product_attention",
        "multi_head_attention_forward",
    }
)  # fmt: skip
_DRAWN_INTO = frozenset(
    f"{name}_"
    for name in ("normal", "uniform", "random", "bernoulli", "exponential", "geometric", "cauchy", "log_normal")
)

_SEEDED = torch.Tag.nondeterministic_seeded

# Whether a tensor is a view that conjugates or negates when it is read. Inputs are none, of others it is not known.
_LAZY_BITS = frozenset({"is_conj", "is_neg"})


def _is_made(node: fx.Node | None) -> bool:
    return node is not None and node.op != "placeholder"


# What a tensor's place in its memory matters to.
_USE_OFFSETS = frozenset({"storage_offset", "as_strided", "as_strided_", "as_strided_scatter"})

# Modules whose functions are torch's Python-level API; others are recorded under the same rule.
_SETTERS = frozenset({"__set__", "__delete__"})


class Recorder:
    """The graph under construction. Use as a context manager around interpretation."""

    def __init__(
        self,
        mode: FakeMode,
        user_frames: Callable[[], tuple[UserFrame, ...]],
        adopt: Callable[[torch.Tensor], torch.Tensor],
        guard_offset: Callable[[FakeTensor], None],
    ) -> None:
        self.graph = fx.Graph()
        self.regions = Regions(self.graph)
        self.nested = NestedRegions(self.regions)
        self.conditions = Conditions(user_frames)
        self.taken = TakenNumbers(self)
        self.choices = Choices(self)
        self.data_writes = DataWrites(self)
        self.mode = mode
        self.user_frames = user_frames
        self.adopt = adopt  # turns a real tensor that reached a call unseen into an input's fake
        self.guard_offset = guard_offset  # called with a tensor whose place in its memory the program uses
        self.symbol_nodes: dict[str, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._placeholders: dict[int, fx.Node] = {}  # of inputs that other nodes stand for by now
        self._without_gradient: dict[fx.Node, FakeTensor] = {}  # inputs that came so
        self._alive: list[torch.Tensor] = []
        self._last_placeholder: fx.Node | None = None
        self.written: list[torch.Tensor] = []  # fakes that the program wrote to in place
        self.refused: Collection[tuple[UserFrame, ...]] = ()  # where calls break the graph: no back end takes them
        self.on_write: Callable[[Iterable[torch.Tensor]], None] | None = None  # told of them as they are written
        self.restrided: list[torch.Tensor] = []  # fakes that it gave another shape in place
        self.of_unknown_history: set[fx.Node] = set()  # stand-ins of which each run tells whether they have one
        self.leaves: list[torch.Tensor] = []  # fakes at which a history begins, and which the program made
        self.works: dict[int, tuple[object, int]] = {}  # what stands for collectives that were begun, by identity
        self.refused_leaf = -1  # which of them the graph ends before
        self.calls = 0  # number of nodes that compute
        self.cut_at: int | None = None  # number of calls behind which the graph has to end
        self.by_places = False  # an index of one integer is a place in the graph, and no number
        self.default_device: torch.device | None = None  # of the innermost block of the program with one
        self.wrappers = Wrappers(mode)
        self.jagged = Jagged(self)
        self.looped: dict[str, tuple[UserFrame, ...]] = {}  # operators that `vmap` loops over, and where
        self.quantised = Quantised(self)
        self.overrides_off = 0  # blocks of the program's that switch `__torch_function__` of classes off
        self.modes: list[object] = []  # function modes that the program has entered, the innermost last
        self.mode_override: Callable[..., object] = _no_override
        self.override: Callable[..., object] = _no_override  # what a call means to the classes that torch would ask
        self.draws = 0  # calls so far that may draw random numbers
        self.draw: Callable[..., object] = _no_draw  # what a call means that is given a generator

    # -- entering and leaving ---------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self.mode.__enter__()
        torch._C._push_on_torch_function_stack(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch._C._pop_torch_function_stack()
        self.mode.__exit__(kind, value, traceback)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block in which the stack of function modes is the program's own."""
        torch._C._pop_torch_function_stack()
        try:
            yield
        finally:
            torch._C._push_on_torch_function_stack(self)

    def release(self) -> None:
        """Forgets which node stands for which tensor; the graph is finished."""
        self._nodes.clear()
        self._alive.clear()
        self.jagged.release()
        self.quantised.release()
        self.written.clear()
        self.leaves.clear()
        self.works.clear()
        self.on_write = None
        self.restrided.clear()
        self.conditions.release()

    # -- inputs -----------------------------------------------------------------------------

    def add_input(self, fake: object, source: Source | Computed, name: str) -> fx.Node:
        """A placeholder for a tensor or a SymInt; the driver orders them at the end."""
        anchor = self._last_placeholder
        with self.graph.inserting_after(anchor) if anchor is not None else self._at_start():
            node = self.graph.placeholder(name)
        node.target = node.name
        self._last_placeholder = node
        node.meta.update(val=fake, source=source.expression(), stack=self.user_frames())
        if isinstance(fake, torch.Tensor):
            self.remember(fake, node)
            if isinstance(fake, FakeTensor) and not fake.requires_grad:
                self._without_gradient[node] = fake
        return node

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        first = next(iter(self.graph.nodes), None)
        if first is None:
            yield
        else:
            with self.graph.inserting_before(first):
                yield

    def remember(self, fake: torch.Tensor, node: fx.Node) -> None:
        """The tensor is the value of the node, and stays alive as long as the recorder."""
        self._nodes[id(fake)] = node
        self._alive.append(fake)

    def has_unknown_history(self, fake: torch.Tensor) -> bool:
        """Whether a value is computed from what each run tells whether it requires a gradient."""
        work = [self.node_of(fake)] if self.of_unknown_history else []
        seen: set[fx.Node] = set()
        while work:
            node = work.pop()
            if node in self.of_unknown_history:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                work.extend(node.all_input_nodes)
        return False

    def node_of(self, fake: torch.Tensor) -> fx.Node | None:
        """The node whose value a tensor is, as the graph that is open sees it; None for one that was not recorded."""
        node = self._nodes.get(id(fake))
        return None if node is None else self.regions.visible(node)

    def known_node(self, fake: torch.Tensor, reason: str) -> fx.Node:
        """The node of a tensor that a call needs in the graph; where there is none, the graph breaks for `reason`."""
        node = self.node_of(fake)
        if node is None:
            raise BreakGraph(reason, "a tensor that capture did not see being made")
        return node

    def all_known(self, given: T, reason: str) -> T:
        """What a call gave, the tensors in it being of the graph; else the graph breaks for `reason`."""
        for tensor in tensors_in(given):
            if isinstance(tensor, FakeTensor):
                self.known_node(tensor, reason)
        return given

    def has_derivative(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the same memory requires a gradient."""
        return any(one.requires_grad and memory_of(one) is memory_of(tensor) for one in self._alive)

    def as_it_came(self, fake: FakeTensor) -> FakeTensor:
        """An input's fake, as it was before the program gave it another shape in place."""
        return self.placeholder_of(fake).meta["val"]  # type: ignore[no-any-return]

    def placeholder_of(self, fake: torch.Tensor) -> fx.Node:
        """The node by which an input came."""
        return self._placeholders.get(id(fake)) or self._nodes[id(fake)]

    def replace_node(self, fake: FakeTensor, node: fx.Node) -> None:
        """Another node stands for a tensor from here on; the one that made it says what it was."""
        before = self._nodes[id(fake)]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            was = FakeTensor(fake.spec, self.mode, fake.memory, fake.requires_grad)
        for made in (before, *before.users):
            if made is not node and made.meta.get("val") is fake:
                made.meta["val"] = was
        if before.op == "placeholder":
            self._placeholders.setdefault(id(fake), before)
        self._nodes[id(fake)] = node

    # -- recording --------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if self.modes:
            return self._ask_mode(func, types, args, kwargs)
        kinds = () if self.overrides_off else overriding(args, kwargs)
        if kinds:
            torch._C._push_on_torch_function_stack(self)
            try:
                return self.override(kinds, func, args, kwargs)
            finally:
                torch._C._pop_torch_function_stack()
        name = function_name(func)
        if self.jagged.are_in(args, kwargs):
            return self._record_of_jagged(name, func, args, dict(kwargs or {}))
        if self.quantised.takes(name, args, kwargs):
            self._refuse_special(name, func, "a quantised tensor")
            return self.quantised.run(name, func, args, dict(kwargs or {}))
        known = constants.answer(name, args)
        if known is not None and not kwargs:
            return known[0]
        if name in TAKING and len(args) == 1 and not kwargs:
            taken = self.take_number(name, args[0])
            if taken is not MISSING:
                return taken
        if name == "backward":
            self.derive(dict(kwargs or {}).get("inputs"))
        with_tensor = bool(tensors_in(args))
        reason = reason_of_name(name, with_tensor)
        if reason is not None:
            raise BreakGraph(reason, f"{name}() of a tensor" if with_tensor else f"torch {name}()")
        if name in _LAZY_BITS and _is_made(self._nodes.get(id(args[0]))):
            raise BreakGraph("unsupported_read", f"{name}() of a tensor that the program made")
        if getattr(func, "__name__", "") in _SETTERS:
            raise BreakGraph("tensor_metadata_write", f"assignment to the tensor attribute {name!r}")
        args, keywords = self.adopt_all(args), self.adopt_all(dict(kwargs or {}))
        if self.default_device is not None and func in _device_constructors() and keywords.get("device") is None:
            keywords["device"] = self.default_device
        if any(isinstance(value, torch.Generator) for value in (*args, *keywords.values())):
            return self.draw(func, args, keywords)
        if is_over_lists(name):
            return record_each(self.record, name, args, keywords)
        if takes_factor(name, keywords):
            return record_scaled(self.record, func, args, keywords)
        return self.record(func, args, keywords)

    def _record_of_jagged(
        self, name: str, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        self._refuse_special(name, func, "a nested tensor")
        return self.jagged.run(name, func, args, kwargs)

    def _refuse_special(self, name: str, func: object, what: str) -> None:
        """Breaks at what no graph does to a tensor that is taken apart."""
        reason = reason_of_name(name, with_tensor=True)
        if reason is not None:
            raise BreakGraph(reason, f"{name}() of {what}")
        if getattr(func, "__name__", "") in _SETTERS:
            raise BreakGraph("tensor_metadata_write", f"assignment to the tensor attribute {name!r}")
        self.refuse_call(name)

    def take_number(self, name: str, tensor: object) -> object:
        """A number out of a tensor, or MISSING where the graph has to end before it."""
        with self.recording():
            return self.taken.take(name, self.adopt_all(tensor))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A block within a call whose own calls are recorded, too."""
        torch._C._push_on_torch_function_stack(self)
        try:
            yield
        finally:
            torch._C._pop_torch_function_stack()

    def _assumed(self) -> int:
        """How many facts operators have assumed of numbers that only the data tells."""
        return len(self.mode.shape_env.assumptions) if self.mode.shape_env is not None else 0

    def _hold(self, first: int) -> None:
        """Has the graph assert the facts from `first` on."""
        assert self.mode.shape_env is not None
        facts = self.mode.shape_env.assumptions[first:]
        with self.recording():
            self.taken.hold(facts)

    def _ask_mode(self, func: object, types: Sequence[type], args: tuple[object, ...], kwargs: object) -> object:
        """What the innermost function mode of the program makes of a call, with that mode put aside as torch does."""
        mode = self.modes.pop()
        torch._C._push_on_torch_function_stack(self)
        try:
            return self.mode_override(mode, func, types, args, kwargs)
        finally:
            torch._C._pop_torch_function_stack()
            self.modes.append(mode)

    def derive(self, by: object) -> None:
        """The program takes derivatives by the tensors `by`. Those that it computed have to be inputs of a graph."""
        cut_for([self._nodes.get(id(tensor)) for tensor in tensors_of(by) if tensor.requires_grad])

    def refuse_call(self, name: str) -> None:
        """Breaks where the graph has to end before its next call."""
        if self.cut_at is not None and self.calls >= self.cut_at:
            raise BreakGraph("backward", "a derivative by what was computed last is taken later")
        if self.refused and self.user_frames() in self.refused:
            raise BreakGraph("data_dependent_shape", f"{name}() needs a size that only the data tells")

    def record(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        """Runs `func` on fakes and writes its node if it makes tensors or has an effect."""
        if self.by_places and func is torch.Tensor.__getitem__:
            func, args = at_places(self.record, func, args)
        name = function_name(func)
        self.refuse_call(name)
        if name == "detach_" and class_of(args[0]) is not None:
            raise BreakGraph("tensor_metadata_write", "detach_() of a tensor whose class was given to a view")
        begins = _makes_leaf(name, args, kwargs)
        if begins and (
            self.regions.open or any(map(class_of, tensors_in(args))) or len(self.leaves) == self.refused_leaf
        ):
            raise BreakGraph("leaf", f"{name}() gives a tensor that requires a gradient")
        self._refuse_gaps(name, args, kwargs)
        args = constants.sizes_as_numbers(name, args)
        if self.wrappers.are_in(args, kwargs):
            return self._record_of_wrappers(name, func, args, kwargs)
        operands = [(tensor, _version(tensor)) for tensor in tensors_in((args, kwargs))]
        if name in _USE_OFFSETS:
            for tensor, _ in operands:
                if isinstance(tensor, FakeTensor):
                    self.guard_offset(tensor)
        if name in RESTRIDES:
            self._keep_metadata(operands[0][0])
        outs = [(t, t.spec) for t in tensors_in(kwargs.get("out")) if isinstance(t, FakeTensor)]
        refusable, assumed = self.mode.refusable, self._assumed()
        try:
            known = constants.of_numbers(name, func, args, kwargs, self.mode)
            if known is not None:  # in the graph it is a tensor made from its number
                func, args, kwargs = torch.tensor, (constants.number(known),), {"dtype": known.dtype}
            run = METHODS_OF_FAKES.get(func) or PROGRAMS_FOR_FAKES.get(func, func)
            result: Any = called_at(self.user_frames(), run, args, kwargs) if known is None else known
        except FAKE_ERRORS as error:
            if isinstance(error, primtorch_errors.DataDependent):
                self.taken.asked(error, as_size=True)
            raise as_break(error) from error
        except RuntimeError as error:
            if _NO_DATA in str(error):
                raise BreakGraph("tensor_to_number", f"{name}() reads a tensor's values") from error
            if wants_sizes(error):
                raise BreakGraph("symbolic_size", f"{name}() of a tensor with a size that varies") from error
            raise
        self._refuse_resized(outs)
        if self.taken.made and self._assumed() > assumed:
            self._hold(assumed)
        if begins:
            self.leaves.append(result)
        constants.fold(name, func, args, kwargs, result)
        constants.fold_uniform(name, args, result)
        constants.remember_uniform(name, result)
        overload = overload_of(func, args, kwargs)
        dense_values.refuse(name, func, overload, args, kwargs)
        written = {id(tensor): tensor for tensor, version in operands if _version(tensor) != version}
        if overload is not None:  # an operator of somebody's own need not count its writes
            written |= {id(tensor): tensor for tensor in written_tensors(overload, args, kwargs)}
        written |= {id(tensor): tensor for tensor in unsaid_writes(func, args, kwargs)}
        effect = bool(written) or is_inplace(name) or name in _EFFECTS
        if overload is not None and has_effect(overload) and name not in _EFFECTS and name not in _RANDOM:
            effect, self.conditions.can_begin_anew = True, False
        if not effect and isinstance(result, torch.Tensor) and id(result) in self._nodes:
            return result  # an operand came back unchanged (`contiguous`, dropout in eval): nothing to compute
        self.draws += name in _RANDOM or name in _DRAWN_INTO or any(t is _SEEDED for t in getattr(overload, "tags", ()))
        if effect or tensors_in(result):
            node = self.write(func, args, kwargs, result)
            node.meta["refusable"] = self.mode.refusable > refusable
            if effect or name in _RANDOM:
                node.meta["effect"] = True
                if name not in RESTRIDES:
                    self._wrote(written.values())
        if written:
            self._keep_without_gradient()
        return result

    def _record_of_wrappers(
        self, name: str, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A call with tensors that wrap others: their classes say what it gives."""
        if is_inplace(name) or name in _EFFECTS or "out" in kwargs:
            raise BreakGraph("tensor_subclass", f"{name}() of a tensor that wraps others")
        if (name in _RANDOM or name in _MASKING) and self.wrappers.of_ranks(args, kwargs):
            raise BreakGraph("distributed", f"{name}() of a DTensor")
        try:
            with torch._C.DisableTorchFunction():
                result = self.wrappers.run(name, func, args, kwargs)
        except FAKE_ERRORS as error:
            raise as_break(error) from error
        wrapper_calls.hold_matches(self, (args, kwargs))
        if not tensors_in(result) or (isinstance(result, torch.Tensor) and id(result) in self._nodes):
            return result
        node = self.write(func, args, kwargs, result)
        if name in _RANDOM:
            node.meta["effect"] = True
        return result

    def make_wrapper(self, kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The program calls a class whose tensors wrap others."""
        with torch._C.DisableTorchFunction():  # the class's own calls are none of the graph
            result = self.wrappers.make(kind, args, kwargs)
        if id(result) not in self._nodes:
            self.write(kind, args, kwargs, result)
        return result

    def relaid(self, call: Relaid, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in another layout: one node."""
        self.refuse_call(call.__name__)
        with torch._C.DisableTorchFunction():
            result = self.wrappers.relaid(call, tensor)
        if id(result) not in self._nodes:
            self.write(call, (tensor,), {}, result)
        return result

    def part(self, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        """The part of a wrapper that has this name."""
        with torch._C.DisableTorchFunction():
            found = self.wrappers.part(tensor, name)
        if found is not None and id(found) not in self._nodes:
            node = self.graph.call_function(getattr, (self.argument(tensor), name))
            self.annotate(node, found)
            self._bind(found, node)
        return found

    def as_subclass(self, tensor: torch.Tensor, cls: type) -> torch.Tensor:
        """Another view of the tensor, which has the class. No mode and no class is asked about it."""
        if cls is torch.nn.Parameter or (cls not in PLAIN_TENSORS and not is_capturable(cls)):
            raise BreakGraph("tensor_subclass", f"a {cls.__qualname__} is made")
        made: torch.Tensor = self.record(torch.ops.aten.alias.default, (tensor,), {})
        remember_class(made, cls)
        return made

    def _wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        self.choices.written(tensors)
        parts = {id(memory) for memory in self.wrappers.memories}
        if parts and any(id(memory_of(tensor)) in parts for tensor in tensors):
            raise BreakGraph("tensor_subclass", "a write to the memory of a tensor that another wraps")
        if self.on_write is not None:
            self.on_write(tensors)
        self.written += tensors

    def _keep_without_gradient(self) -> None:
        """Inputs that came without a gradient say so, also where they need one from here on: what is compiled for them
        is not for inputs that came with one."""
        for node, fake in [*self._without_gradient.items()]:
            if fake.requires_grad:
                del self._without_gradient[node]
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    before = FakeTensor(fake.spec, self.mode, fake.memory)
                if node.meta["val"] is fake:
                    node.meta["val"] = before

    def _keep_metadata(self, tensor: torch.Tensor) -> None:
        """The node that made a tensor says what it was, before the tensor gets another shape in place."""
        node = self._nodes.get(id(tensor))
        if node is None or not isinstance(tensor, FakeTensor):
            return
        if tensor.requires_grad and not torch.is_grad_enabled():
            raise BreakGraph("tensor_metadata_write", "a change of shape that autograd is not told of")
        self._refuse_both(tensor, self.written)
        self.restrided.append(tensor)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            before = FakeTensor(tensor.spec, self.mode, tensor.memory, tensor.requires_grad)
        for made in (node, *node.users):
            if made.meta.get("val") is tensor:  # an earlier change of this kind gave it back, too
                made.meta["val"] = before

    def _refuse_resized(self, outs: list[tuple[FakeTensor, TensorSpec]]) -> None:
        """A graph cannot hold a write to an input that gives it another size, too."""
        for tensor, before in outs:
            node = self._nodes.get(id(tensor))
            if node is not None and node.op == "placeholder" and str(tuple(tensor.shape)) != str(before.shape):
                node.meta["val"] = FakeTensor(before, self.mode, tensor.memory, tensor.requires_grad)
                raise BreakGraph("tensor_metadata_write", "out= gives an input another size")

    def _refuse_both(self, tensor: torch.Tensor, earlier: list[torch.Tensor]) -> None:
        """Of an input's memory, a graph cannot hold a write to its elements and a change of shape in place."""
        memory = memory_of(tensor)
        inputs = (node.meta["val"] for node in self.graph.nodes if node.op == "placeholder")
        if any(memory_of(t) is memory for t in earlier) and any(memory_of(value) is memory for value in inputs):
            raise BreakGraph("tensor_metadata_write", "an input is given other elements and, in place, another shape")

    def _refuse_gaps(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, FakeTensor):
            return
        node = self.node_of(target)
        if "out" in kwargs or is_inplace(name):
            if self.restrided and name not in RESTRIDES:
                self._refuse_both(target, self.restrided)
            gap = gap_behind(node)
            if gap is not None:
                raise BreakGraph("write_through_gaps", f"{name}() writes through {gap}")
        elif reads_memory_of(name, node, self.written):
            raise BreakGraph("write_through_gaps", f"{name}() reads the memory of an input that was written")

    def stand_in(self, name: str, spec: TensorSpec, requires_grad: bool = False) -> FakeTensor:
        """A tensor that a part of the graph is given: a placeholder within it."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            fake = self.mode.from_spec(spec, requires_grad=requires_grad)
        node = self.graph.create_node("placeholder", name)
        node.meta["nested"] = True
        self.annotate(node, fake)
        self.remember(fake, node)
        return fake

    def write(
        self, func: Callable[..., object] | str, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> fx.Node:
        """One node for a call whose result is known."""
        kind, target, args = target_of(func, args)
        node = new_node(self.graph, kind, target, self.argument(args), self.argument(kwargs))
        self.annotate(node, result)
        node.meta[CALL] = self.calls
        self.calls += 1
        self._bind(result, node)
        return node

    def write_node(self, target: Callable[..., object], args: tuple[fx.node.Argument, ...]) -> fx.Node:
        """A call whose arguments are nodes already, without a value."""
        node = self.graph.call_function(target, args)
        self.annotate(node, None)
        return node

    def record_leaf(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A user's function as one node: run on fakes, its inner calls unrecorded."""
        operands = [(tensor, _version(tensor)) for tensor in tensors_in((args, kwargs))]
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        node = self.write(func, args, kwargs, result)
        written = [tensor for tensor, version in operands if _version(tensor) != version]
        self._wrote(written)
        if written or not tensors_in(result):  # called for what it does
            node.meta["effect"] = True
            self.conditions.can_begin_anew = False
        return result

    def annotate(self, node: fx.Node, value: object) -> None:
        """Gives a node its value's metadata and the user's frames."""
        node.meta["val"] = value
        node.meta["stack"] = self.user_frames()

    def _bind(self, result: object, node: fx.Node) -> None:
        if isinstance(result, torch.Tensor):
            if id(result) not in self._nodes:
                self.remember(result, node)
        elif isinstance(result, (tuple, list)):
            for index, element in enumerate(result):
                if tensors_in(element):
                    item = self.graph.call_function(operator.getitem, (node, index))
                    self.annotate(item, element)
                    self._bind(element, item)

    def argument(self, value: object) -> Any:
        """A call's argument as FX writes it: nodes for tensors and symbolic sizes, containers rebuilt."""
        if isinstance(value, torch.Tensor):
            node = self.node_of(value)
            if node is None:
                raise BreakGraph("unsupported_read", "a tensor that capture did not see being made")
            return node
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            try:
                return materialize(self.graph, value, self.symbol_nodes)
            except KeyError as error:
                detail = f"the number {value}: it is known only when the program runs"
                raise BreakGraph("data_dependent_shape", detail) from error
        if isinstance(value, torch.SymBool):
            return bool(value)  # guarded: graphs take symbolic numbers alone
        if isinstance(value, torch.Size):
            return tuple(self.argument(item) for item in value)
        if isinstance(value, tuple):
            items = [self.argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if isinstance(value, (set, frozenset)):
            return type(value)(self.argument(item) for item in value)
        if numpy_values.is_scalar(value):
            return numpy_values.number(value)
        if isinstance(value, type(torch.FloatTensor)):  # the name of a tensor type is a literal, and means the same
            return f"{value.__module__}.{value.__name__}"
        if isinstance(value, enum.IntFlag) and value.name not in type(value).__members__:  # FX writes members by name
            return int(value)
        if isinstance(value, type):
            return _DTYPES_OF_TYPES.get(value, value)
        if type(value).__module__ == "numpy":
            raise BreakGraph("numpy", f"a torch function takes a numpy.{type(value).__qualname__}")
        return value

    def adopt_all(self, given: T) -> T:
        """Real tensors among the arguments become inputs; everything else stays the same object."""
        value: Any = given
        if isinstance(value, torch.Tensor) and not _is_of_graph(value):
            value = self.adopt(value)
        elif type(value) in (tuple, list) and _has_real_tensor(value):
            value = type(value)(self.adopt_all(item) for item in value)
        elif type(value) is dict and _has_real_tensor(tuple(value.values())):
            value = {key: self.adopt_all(item) for key, item in value.items()}
        given = value
        return given


def _no_override(kinds: tuple[type, ...], func: object, args: tuple[object, ...], kwargs: object) -> object:
    raise BreakGraph("tensor_subclass", f"{function_name(func)}() of a {kinds[0].__qualname__}")


def _no_draw(func: object, args: object, kwargs: object) -> object:
    raise BreakGraph("random_state", f"{function_name(func)}() is given a generator")


# What torch takes Python's types for, where it wants a dtype.
_DTYPES_OF_TYPES = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}


def _makes_leaf(name: str, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether a history begins at the call's result: what is differentiated by it must be an input of a graph."""
    if name == "requires_grad_":
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        return bool(wanted) and not args[0].requires_grad
    return kwargs.get("requires_grad") is True


# What a tensor without data cannot do, as a reason to break.
FAKE_ERRORS = (primtorch_errors.DataDependentShape, primtorch_errors.DataDependentValue, primtorch_errors.NoFormula)


_NO_DATA = "data is not allocated yet"  # what C++ says of a fake tensor that it wants to read


def as_break(error: BaseException) -> BreakGraph:
    """The graph break that stands for an error of the fakes."""
    reasons = ("data_dependent_shape", "tensor_to_number", "operator_without_meta")
    reason = next(reason for kind, reason in zip(FAKE_ERRORS, reasons, strict=True) if isinstance(error, kind))
    return BreakGraph(reason, str(error).partition("\n")[0])


def _version(tensor: torch.Tensor) -> int:
    """Number of writes so far; tensors of inference mode do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in a value of tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def _has_real_tensor(value: object) -> bool:
    return any(not _is_of_graph(tensor) for tensor in tensors_in(value))


def _is_of_graph(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or stands_for_one(tensor)
