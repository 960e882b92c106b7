"""Traces a program's forward and backward into one functional ATen graph.

The program runs on functional tensors around fake ones. PyTorch's own autograd engine computes the backward; a mode at
the bottom of the dispatcher records every ATen operator that arrives there.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _Namespace
from torch.utils import _pytree as pytree

from aotautograd.analysis import analyse, returns_alias
from aotautograd.assumptions import ExampleValues, example_values, guard_graph
from aotautograd.draws import NEVER, Draws, draws_numbers, place_of_probability
from aotautograd.errors import AotAutogradError, UnsupportedMutation, user_location
from aotautograd.functionalize import InPlaceCalls, NonLeaf, OwnTangent, without_saved_tensor_hooks
from aotautograd.gradients import arrange, share_memory
from aotautograd.history import leaves_behind, recomputes_by_reentry
from aotautograd.inputs import ProgramInputs, bind_inputs, dense_spec
from aotautograd.overlap import Rebased
from aotautograd.schemas import PHASE, JointGraph, KeptMemory, ProgramMetadata
from primtorch.ambient import preserved
from primtorch.errors import DataDependent, DataDependentValue, PrimTorchError
from primtorch.fake import FakeMode, FakeTensor, propagate
from primtorch.functional_forms import adopting, is_refusal
from primtorch.functionalize import functional_region, unwrap, wrap
from primtorch.memory import memory_of
from primtorch.printing import made_by
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import expr_of, materialize

aten = torch.ops.aten

_set_arguments: Any = vars(fx.Node)["args"].__set__  # past a Python function that looks at each assignment

_ATOMS = frozenset(
    {int, float, bool, type(None), str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


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


class Recorder:
    """A dispatch mode (a plain class: see `__enter__`) that records operators on tensors that have a node.

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
        self.phase = "forward"
        self.sequence_starts: list[int] = []  # autograd sequence number when each user node began, and its stack
        self.sequence_stacks: list[tuple[UserFrame, ...]] = []
        self.written_cast = False  # whether the user node is a conversion of dtype
        self.sequence_autocast: list[bool] = []  # whether conversions within the user node are autocast's
        self.of_autocast = False  # of the forward operator whose backward runs
        self.operators = 0
        self.placeholder_names: set[str] = set()
        self.draws = Draws()

    # The dispatcher asks a mode for these two. A subclass of TorchDispatchMode would answer them as well, but its first
    # dispatch imports a whole other compiler.
    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return False

    def __enter__(self) -> Recorder:
        torch._C._push_on_torch_dispatch_stack(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)  # type: ignore[arg-type]

    def track(self, t: torch.Tensor, node: fx.Node) -> None:
        self.node_of[id(t)] = node
        self.alive.append(t)

    def with_strides(self, value: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
        """Another fake tensor for the value of `value`'s node."""
        fake = self.fake_mode.from_spec(TensorSpec(tuple(value.shape), tuple(strides), value.dtype, value.device))
        self.track(fake, self.node_of[id(value)])
        return fake

    def placeholder(self, name: str, value: Any) -> fx.Node:
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
        self.written_cast = written_cast
        self.sequence_autocast.append(torch._C._is_any_autocast_enabled() and not written_cast)
        self.sequence_starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.sequence_stacks.append(stack)

    def lift(self, a: Any) -> Any:
        """An argument of an operator as an argument of a node."""
        kind = type(a)
        if kind in _ATOMS:
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

    def size(self, size: Any) -> Any:
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
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators += 1
        called = _operator_of(func)
        nodes = self.node_of
        node_args = tuple([(nodes.get(id(a)) if type(a) is FakeTensor else None) or self.lift(a) for a in args])
        node_kwargs = {k: self.lift(v) for k, v in kwargs.items()} if kwargs else {}
        if self.fake_constants:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        if self.phase == "backward":
            self._find_forward_stack()
        if called.rule is not None:
            out: Any = called.rule(self, func, node_args, node_kwargs, args, kwargs or {})
            if out is not NotImplemented:
                return out
        random = draws_numbers(called.probability, args, kwargs)
        if random and self.phase == "backward":
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
        if len(self.symbols) != known_symbols and self.fix_sizes and self.values is not None:
            return self._fix(node, self.values)
        self._attach(node, out)
        if len(self.symbols) != known_symbols:
            self._name_sizes(node)
        return out

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> fx.Node:
        node = self._node(func, args, kwargs)
        self._attach(node, out)
        return node

    def _node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node("call_function", target, (), {}, _operator_of(target).name)
        # Given to create_node, they would be walked once more in search of symbolic sizes, which `lift` has replaced.
        _set_arguments(node, args)
        if kwargs:
            node.kwargs = kwargs
        return node

    def _attach(self, node: fx.Node, out: Any) -> None:
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

    def _fix(self, node: fx.Node, values: ExampleValues) -> Any:
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

    def _describe(self, node: fx.Node, value: Any) -> None:
        meta = node.meta
        meta["val"] = value
        meta["stack"] = self.stack
        meta[PHASE] = self.phase
        if node.target is aten._to_copy.default and self._cast_by_autocast():
            meta["autocast"] = True
        if self.phase == "backward" and torch.is_grad_enabled():  # of a checkpoint: derivatives run without
            meta["recomputed"] = True

    def _cast_by_autocast(self) -> bool:
        """Whether a conversion of dtype is one that autocast put into the program, or the derivative of one."""
        if self.phase == "backward":
            return self.of_autocast
        return torch._C._is_any_autocast_enabled() and not self.written_cast

    def _as_fake(self, t: torch.Tensor) -> torch.Tensor:
        return self.fake_constants.get(id(t), t)

    def _find_forward_stack(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None or not self.sequence_starts:
            return
        place = bisect_right(self.sequence_starts, node._sequence_nr()) - 1
        if place >= 0:
            self.stack = self.sequence_stacks[place]
            self.of_autocast = self.sequence_autocast[place]


def _record_batch_norm(
    recorder: Recorder,
    func: Any,
    node_args: tuple[Any, ...],
    node_kwargs: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """native_batch_norm in training mode writes its running statistics, which its schema does not say."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training or mean is None:
        return NotImplemented
    functional = aten._native_batch_norm_legit_functional.default
    results = functional(x, weight, bias, mean, var, training, momentum, eps)
    recorder.record(functional, node_args, node_kwargs, results)
    for statistic, value in ((mean, results[3]), (var, results[4])):
        old = recorder.node_of[id(statistic)]
        if old.op == "call_function" and returns_alias(old.target):
            raise UnsupportedMutation(
                "batch_norm in training mode updates running statistics that are a view of another tensor",
                recorder.stack,
            )
        recorder.node_of[id(statistic)] = recorder.node_of[id(value)]
        recorder.written.add(id(statistic))
    return tuple(results[:3])


def _record_conjugate(recorder: Recorder, func: Any, *rest: Any) -> Any:
    """A derivative may conjugate a number that the program multiplied by: it is no tensor of the graph yet."""
    number = rest[0][0]
    if not isinstance(number, (int, float, complex)):
        return NotImplemented
    args, kwargs = (complex(number).conjugate(),), {"dtype": torch.complex128}
    out = aten.scalar_tensor.default(*args, **kwargs)
    recorder.record(aten.scalar_tensor.default, args, kwargs, out)
    return out


def _record_item(recorder: Recorder, func: Any, node_args: tuple[Any, ...], *rest: Any) -> Any:
    """A number or a truth value taken out of a tensor. A whole number stays a symbol, unless a branch asks for it."""
    tensor, values = rest[1][0], recorder.values
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if whole and not recorder.fix_sizes:
        return NotImplemented
    if isinstance(tensor, FakeTensor) and tensor.memory.constant is not None:
        return NotImplemented
    if recorder.phase == "backward":
        return _check_truth(recorder, tensor, node_args[0])
    return NotImplemented if values is None else values.assume(node_args[0], "value")


def _record_equal(
    recorder: Recorder,
    func: Any,
    node_args: tuple[Any, ...],
    node_kwargs: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Whether two tensors are equal, or close: a comparison in the graph, and its value."""
    x, y = args[:2]
    if x.dtype != y.dtype or (recorder.values is None and recorder.phase == "forward"):
        return NotImplemented
    if func is aten.equal.default and x.shape != y.shape:
        return False
    with recorder:
        alike = aten.eq.Tensor(x, y) if func is aten.equal.default else torch.isclose(*args, **kwargs)
        every = alike.all()
    node = recorder.node_of[id(every)]
    if recorder.phase == "backward":
        return _check_truth(recorder, every, node)
    return recorder.values.assume(node, "value")  # type: ignore[union-attr]


def _record_index(
    recorder: Recorder,
    func: Any,
    node_args: tuple[Any, ...],
    node_kwargs: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Where sizes are those of the example, a mask's is known without the tensor that it indexes: that of `nonzero`."""
    tensor, indices = args
    if not recorder.fix_sizes or not any(i is not None and i.dtype is torch.bool for i in indices):
        return NotImplemented
    with recorder:
        columns = [
            column
            for i in indices
            for column in (i.nonzero().unbind(1) if i is not None and i.dtype is torch.bool else (i,))
        ]
        return func(tensor, columns)


def _check_truth(recorder: Recorder, tensor: torch.Tensor, node: fx.Node) -> Any:
    """A derivative that asks for a truth value checks its arguments (that of svd does). What depends on gradients has
    no value ahead of time: it is taken for true, and the backward raises where it is not."""
    if tensor.dtype is not torch.bool:
        return NotImplemented
    name = type(torch._C._current_autograd_node()).__name__
    message = f"a condition that {name} checks does not hold: the gradient is not defined for these inputs"
    recorder.record(aten._assert_async.msg, (node, message + user_location(recorder.stack)), {}, None)
    return True


def _record_real_view(
    recorder: Recorder, func: Any, node_args: tuple[Any, ...], kwargs: dict[str, Any], args: tuple[Any, ...], *rest: Any
) -> Any:
    """A graph conjugates lazily where the program did, and such a tensor has no view as real numbers."""
    node = node_args[0]
    while node.target is not aten._conj.default:
        if not (isinstance(node, fx.Node) and node.op == "call_function" and returns_alias(node.target)):
            return NotImplemented
        node = node.args[0]
    plain = aten.resolve_conj.default(args[0])
    out = func(plain)
    recorder.record(func, (recorder.record(aten.resolve_conj.default, node_args, {}, plain),), {}, out)
    return out


def _refuse_sparse(recorder: Recorder, func: Any, *rest: Any) -> Any:
    raise AotAutogradError(
        f"{func} makes a sparse tensor, and values of a graph are dense; without sparse=True the gradient is, too",
        recorder.stack,
    )


def _refuse_sparse_bag(
    recorder: Recorder,
    func: Any,
    node_args: tuple[Any, ...],
    node_kwargs: dict[str, Any],
    args: tuple[Any, ...],
    *rest: Any,
) -> Any:
    return _refuse_sparse(recorder, func) if args[_BAG_IS_SPARSE] else NotImplemented


_BAG_IS_SPARSE = [a.name for a in aten._embedding_bag_backward.default._schema.arguments].index("sparse")


def _refuse_resize(recorder: Recorder, func: Any, *rest: Any) -> Any:
    raise UnsupportedMutation(
        "a tensor is resized in the graph, and a functional graph has no memory to resize; "
        "make a new tensor of that size, or keep the call out of the compiled region",
        recorder.stack,
    )


# Operators that are not recorded as they come. NotImplemented means that this call is.
_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _record_batch_norm,
    aten._conj.default: _record_conjugate,
    aten._conj_physical.default: _record_conjugate,
    aten._local_scalar_dense.default: _record_item,
    aten.index.Tensor: _record_index,
    aten.equal.default: _record_equal,
    aten.allclose.default: _record_equal,
    aten.view_as_real.default: _record_real_view,
    aten._embedding_bag_backward.default: _refuse_sparse_bag,
    **dict.fromkeys(
        (
            aten._sparse_coo_tensor_unsafe.default,
            aten._sparse_coo_tensor_with_dims_and_tensors.default,
            aten.sparse_coo_tensor.indices_size,
        ),
        _refuse_sparse,
    ),
    aten.resize.default: _refuse_resize,
    aten.resize_.default: _refuse_resize,
    aten.resize_as.default: _refuse_resize,
}


@dataclass(frozen=True, slots=True)
class _Operator:
    """What a recorder asks about an overload at each call."""

    target: Any
    name: str  # of its nodes
    rule: Callable[..., Any] | None
    probability: int
    writes: bool


def _operator_of(target: Any) -> _Operator:
    # By identity, for an overload's hash is a function in Python. The record keeps it alive.
    known = _OPERATORS.get(id(target))
    if known is None:
        overload = isinstance(target, OpOverload)
        known = _OPERATORS[id(target)] = _Operator(
            target,
            fx.Graph()._target_to_str(target).replace(".", "_"),  # as fx would write it
            _SPECIAL.get(target),
            place_of_probability(target) if overload else NEVER,
            overload and target._schema.is_mutable,
        )
    return known


_OPERATORS: dict[int, _Operator] = {}


def trace_joint(program: fx.GraphModule | Callable[..., Any] | Rebased, example_inputs: Sequence[Any]) -> JointGraph:
    """The joint graph of `program`, a function of flat inputs to a flat sequence of outputs.

    The forward is traced under the ambient grad and autocast state, the backward with autocast off. There is a backward
    if an output has a history that leads to an input.

    Numbers that the program takes out of tensors, and sizes that depend on data where it branches on them, are those of
    the example inputs; `JointGraph.guard` and `ProgramMetadata.assumptions` say for which inputs the graph holds.

    Raises:
        AotAutogradError: what a functional graph cannot express, with the user's line.
        DataDependentValue: a number that is not known ahead of time: of random values, of gradients, or because the
            example inputs have no data.
    """
    if torch.is_inference_mode_enabled():  # its tensors count no writes and have no views to follow
        with torch.inference_mode(False), torch.no_grad():
            return trace_joint(program, example_inputs)
    manner = _Manner()
    while True:
        try:
            with preserved():
                return adopting(lambda manner=manner: _trace(program, example_inputs, manner))  # type: ignore[misc]
        except DataDependent:
            if manner.fix_sizes:
                raise
            manner = replace(manner, fix_sizes=True)
        except _TraceAgain as found:
            manner = replace(manner, **found.manner)


@dataclass(frozen=True, slots=True)
class _Manner:
    """How to trace, where it is not the plain way: a trace may find out that another one is needed."""

    fix_sizes: bool = False  # sizes that depend on data are those of the examples
    apart: bool = False  # the backward of some output raises: each is tried alone, and those that raise are left out
    accumulate: bool = False  # autograd writes `.grad` too, which tells who gets the memory that gradients share
    restrided: frozenset[int] = frozenset()  # inputs that are given other sizes or strides: the program gets aliases


class _TraceAgain(Exception):
    """A trace is of no use; the next one is to differ in these fields of `_Manner`."""

    def __init__(self, **manner: Any) -> None:
        super().__init__(manner)
        self.manner = manner


def _trace(program: Any, example_inputs: Sequence[Any], manner: _Manner) -> JointGraph:
    bound = bind_inputs(program, example_inputs)
    recorder = Recorder(bound.fake_mode, manner.fix_sizes)
    starts = _make_placeholders(recorder, bound)
    without_grad = not torch.is_grad_enabled()
    recorder.values = example_values(bound, list(recorder.graph.nodes), example_inputs, recorder.constants)
    with _tracing(recorder, bound.fake_mode):
        flat, leaves = _wrap_inputs(bound, starts)
        given = _aliased(flat, manner.restrided)
        with InPlaceCalls(given, recorder.with_strides, symbolic=bool(recorder.symbol_nodes)):
            outputs = _run_program(recorder, program, given)
        restrided = manner.restrided | {p for p in starts if torch._functionalize_has_metadata_mutation(flat[p])}  # type: ignore[attr-defined]
        if restrided != manner.restrided:
            raise _TraceAgain(restrided=restrided)
        analysis = analyse(recorder.node_of, recorder.written, bound, starts, flat, given, outputs, recorder.size)
        specs = [dense_spec(unwrap(value)) for _, value in analysis.differentiable]
    tangents = _tangent_placeholders(recorder, [bound.fake_mode.from_spec(spec) for spec in specs])
    results: tuple[fx.Node | None, ...] = ()
    failing: dict[int, str] = {}
    metadata = replace(analysis.metadata, enables_grad=without_grad and _has_history(analysis.metadata))
    if tangents:
        values = [value for _, value in analysis.differentiable]
        with _tracing(recorder, bound.fake_mode):
            try:
                if manner.apart:
                    failing = _failing_backwards(recorder, values, tangents, list(leaves.values()))
                gradients, cloned = _trace_backward(
                    recorder, values, tangents, list(leaves.values()), leave_out=failing, accumulate=manner.accumulate
                )
            except RuntimeError as error:
                if manner.apart or isinstance(error, (AotAutogradError, PrimTorchError)) or is_refusal(error):
                    raise
                # An output's backward raises what eager's would, which is for it to say, if it is run at all.
                raise _TraceAgain(apart=True) from error
        numbers = {recorder.node_of[id(t)]: number for number, t in enumerate(tangents)}
        if not manner.accumulate and share_memory(gradients, numbers):
            raise _TraceAgain(accumulate=True)
        places = _reached(list(leaves.values()), gradients, values)
        results, made = arrange([gradients[i] for i in places], numbers, [cloned[i] for i in places] if cloned else ())
        slots = tuple(slot for slot, _ in analysis.differentiable)
        inputs = tuple(leaves)
        metadata = replace(metadata, tangents=slots, gradients=tuple(inputs[i] for i in places), made_gradients=made)
        metadata = replace(metadata, kept=_kept_memory(recorder.graph, metadata, analysis.values))
    recorder.graph.output((*analysis.values, *results))
    module = _LazyGraphModule(dict(recorder.constants), recorder.graph, "Joint")  # its code is seldom run
    made_by(module, "trace_joint")
    assumed = recorder.values.assumed if recorder.values is not None else {}
    if not assumed:
        return JointGraph(module, metadata, failing=failing)
    guard = guard_graph(module, metadata.num_placeholders, assumed)
    return JointGraph(module, replace(metadata, assumptions=tuple(assumed.values())), guard, failing)


def _reached(
    leaves: Sequence[torch.Tensor], gradients: Sequence[fx.Node | None], values: Sequence[torch.Tensor]
) -> Sequence[int]:
    """The places of the leaves that the backward leads to: hooks of others do not run. A derivative of the user's that
    gives None leads there as well. Where it leads to no input, but to leaves within the program, all of them stand for
    those: what the program returns requires a gradient."""
    everywhere = range(len(leaves))
    if None not in gradients:
        return everywhere
    reached = leaves_behind(values)
    return [i for i in everywhere if gradients[i] is not None or id(leaves[i]) in reached] or everywhere


def _kept_memory(graph: fx.Graph, metadata: ProgramMetadata, outputs: Sequence[Any]) -> KeptMemory:
    """What autograd kept is what operators of the backward read. It is to be asked before a pass changes the graph: a
    copy of an input that the program made stands for itself here."""
    read = {
        memory_of(source)
        for node in graph.nodes
        if node.op == "call_function" and node.meta.get(PHASE) == "backward"
        for source in node.all_input_nodes
    }
    placeholders = (n for n in graph.nodes if n.op == "placeholder")
    inputs = {
        i for i, node in zip(metadata.placeholders, placeholders, strict=False) if node in read and type(i) is int
    }
    values = {i for i, v in enumerate(outputs) if isinstance(v, fx.Node) and memory_of(v) in read}
    return KeptMemory(frozenset(inputs), frozenset(values))


def _has_history(metadata: ProgramMetadata) -> bool:
    """Whether something that the program returns or writes was made in grad mode. (A view that was taken under no_grad
    says that it requires a gradient where its base does.)"""
    values = any(output.requires_grad for output in metadata.forward_outputs)
    return values or any(o.requires_grad and o.outside_history < len(o.steps) for o in metadata.outputs)


@contextlib.contextmanager
def _tracing(recorder: Recorder, fake_mode: FakeMode) -> Iterator[None]:
    # The vendor's batch norm and recurrent kernels have private formats of saved values; without them the ordinary
    # operators arrive.
    # Anomaly mode would look for NaN in values that are not there yet.
    anomaly = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False) if anomaly else contextlib.nullcontext(),
        torch.backends.cudnn.flags(enabled=False),
        without_saved_tensor_hooks(),
        recorder.draws,
        fake_mode,
        recorder,
        functional_region(),
    ):
        try:
            yield
        finally:
            if torch._C._is_any_autocast_enabled():  # its cache would keep casts of fake weights
                torch.clear_autocast_cache()


def _make_placeholders(recorder: Recorder, bound: ProgramInputs) -> dict[int, torch.Tensor]:
    """Placeholders in their order; returns the fake tensor of each tensor input."""
    fakes: dict[int, torch.Tensor] = {}
    for name, place, value in bound.placeholders():
        recorder.placeholder(name, value)
        if isinstance(value, torch.Tensor):
            assert isinstance(place, int)
            fakes[place] = value
    return fakes


def _wrap_inputs(bound: ProgramInputs, fakes: dict[int, torch.Tensor]) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """The flat inputs to run the program on, and the leaves to differentiate by."""
    flat: list[Any] = list(bound.values)
    leaves: dict[int, torch.Tensor] = {}
    for place, fake in fakes.items():
        outer = wrap(fake)
        if bound.requires_grad[place]:
            outer.requires_grad_()
            leaves[place] = outer
            if not bound.is_leaf[place]:
                with torch.enable_grad():
                    outer = NonLeaf.apply(outer)
        flat[place] = outer
        bound.versions[place] = outer._version
        bound.storages[place] = outer.untyped_storage()._cdata
    return flat, leaves


def _aliased(flat: Sequence[Any], places: frozenset[int]) -> list[Any]:
    """The inputs with aliases in some places, whose sizes and strides may change while the inputs keep theirs."""
    with torch.enable_grad():
        return [aten.alias.default(value) if place in places else value for place, value in enumerate(flat)]


def _run_program(recorder: Recorder, program: Any, flat: Sequence[Any]) -> list[Any]:
    if isinstance(program, Rebased):
        inputs = program.inputs_of(flat)
        return program.outputs_of(flat, inputs, _run_program(recorder, program.program, inputs))
    if isinstance(program, fx.GraphModule):
        return _interpret(recorder, program, flat)
    recorder.user_node(())
    outputs = program(*flat)
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _interpret(recorder: Recorder, module: fx.GraphModule, flat: Sequence[Any]) -> list[Any]:
    """Runs the graph node by node, so that each operator knows the user's line."""
    values: dict[fx.Node, Any] = {}
    inputs = iter(flat)
    for node in module.graph.nodes:
        stack = node.meta.get("stack") or ()
        recorder.user_node(stack, _is_cast(node))
        try:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], values.__getitem__)
                return list(results) if isinstance(results, (tuple, list)) else [results]
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(module)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "call_function":
                    values[node] = node.target(*args, **kwargs)
                elif node.op == "call_method":
                    values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
                else:
                    values[node] = module.get_submodule(node.target)(*args, **kwargs)
        except Exception as error:
            if stack and not isinstance(error, AotAutogradError):
                error.add_note("while tracing" + user_location(stack))
            raise
    raise AotAutogradError("the graph has no output node")


_CASTS = frozenset({"to", "type", "type_as", "half", "bfloat16", "float", "double", "copy_", "__setitem__"})


def _is_cast(node: fx.Node) -> bool:
    """Whether a call of the user's program is a conversion of dtype, and not an operator that autocast converts for."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and name in _CASTS


def _tangent_placeholders(recorder: Recorder, fakes: list[torch.Tensor]) -> list[torch.Tensor]:
    recorder.phase = "backward"
    recorder.stack = ()
    body = next((n for n in recorder.graph.nodes if n.op != "placeholder"), recorder.graph._root)
    with recorder.graph.inserting_before(body):
        for number, fake in enumerate(fakes):
            recorder.placeholder(f"tangents_{number}", fake)
    return fakes


def _last(graph: fx.Graph) -> fx.Node:
    # Not every release's list of nodes, reversed, is an iterator itself.
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


def _failing_backwards(
    recorder: Recorder,
    values: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
) -> dict[int, str]:
    """What the backward of each value raises, for those whose does. Nothing of it stays in the graph."""
    found: dict[int, str] = {}
    last = _last(recorder.graph)
    for place in range(len(values)):
        try:
            others = set(range(len(values))) - {place}
            _trace_backward(recorder, values, tangents, leaves, leave_out=others, keep_graph=True)
        except RuntimeError as error:
            if isinstance(error, (AotAutogradError, PrimTorchError)):
                raise
            found[place] = str(error)
        while (node := _last(recorder.graph)) is not last:
            recorder.graph.erase_node(node)
    return found


def _trace_backward(
    recorder: Recorder,
    values: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    leave_out: Collection[int] = (),
    keep_graph: bool = False,
    accumulate: bool = False,
) -> tuple[list[fx.Node | None], list[bool]]:
    """A node (or None) for the gradient of each leaf, without what the values at the places `leave_out` give. With
    `accumulate`, also whether autograd keeps a copy of it as `.grad`."""
    kept = [i for i in range(len(values)) if i not in leave_out]
    values, tangents = [values[i] for i in kept], [tangents[i] for i in kept]
    if not values:
        return [None] * len(leaves), []
    by_name = not recomputes_by_reentry(values)  # such nodes refuse to run for named inputs
    found: dict[int, fx.Node] = {}

    def note(place: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            found[place] = recorder.node_of[id(unwrap(gradient))]

    for place, leaf in enumerate(leaves):
        leaf.grad = None
        if accumulate:
            leaf.register_hook(functools.partial(note, place))
    with torch.enable_grad():
        values = [OwnTangent.apply(value) for value in values]
    with torch._C._DisableAutocast(), torch.autograd.set_multithreading_enabled(False), torch.no_grad():
        # The engine itself: `torch.autograd.grad` would import sympy first (half a second) to compare shapes.
        given: Sequence[torch.Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
            tuple(values),
            tuple(wrap(t) for t in tangents),
            keep_graph=keep_graph,
            create_graph=False,
            inputs=tuple(leaves) if by_name else (),
            allow_unreachable=True,
            accumulate_grad=accumulate or not by_name,
        )
    if not (accumulate and by_name):  # a hook would see one part after the other of what is computed by reentry
        given = given if by_name else [leaf.grad for leaf in leaves]
        return [None if g is None else recorder.node_of[id(unwrap(g))] for g in given], []
    gradients = [found.get(place) for place in range(len(leaves))]
    cloned = [
        node is not None
        and leaf.grad is not None
        and memory_of(recorder.node_of[id(unwrap(leaf.grad))]) is not memory_of(node)
        for node, leaf in zip(gradients, leaves, strict=True)
    ]
    return gradients, cloned
