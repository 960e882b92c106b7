"""`export(f)(*args)`: the call as one graph to take away, by the user's own names."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, cast

import torch
from torch import fx

from primtorch.calls import Leaf, Measure, Number, Result, State
from primtorch.fake import FakeTensor
from primtorch.functionalize import WRITTEN_APART, WRITTEN_INPUTS
from primtorch.histories import with_history
from primtorch.lower import lower
from primtorch.symbolic import expr_of, float_expr_of
from primtorch.symbolic.expr import Program
from primtorch.trace import trace
from torchdynamo import torch_compilers_marks
from torchdynamo._C import Entry
from torchdynamo.api import optimize, owner_of
from torchdynamo.arrays.values import Array, TensorAt
from torchdynamo.capture import Finished
from torchdynamo.convert import Generated, Whole, capture_whole
from torchdynamo.errors import NotExportable, TorchDynamoError, Unsupported
from torchdynamo.explain import bound_arguments, explain
from torchdynamo.exported.program import (
    ArrayOf,
    Checks,
    Constant,
    Exported,
    Reference,
    Relation,
    Signature,
    in_order,
)
from torchdynamo.exported.structure import Structure, flatten
from torchdynamo.function import Function
from torchdynamo.guards.source_text import source_text
from torchdynamo.reasons import describe
from torchdynamo.schemas import CaptureOptions, Guard, GuardKind, ShapeProgram, TensorGuard
from torchdynamo.size_marks import SMALLEST, mark_dynamic
from torchdynamo.sources import Reading, Scope, Source, TensorOffset, TensorSize, TensorStride, resolve

Decompositions = Literal["prims", "core_aten"]


@dataclass(frozen=True, slots=True)
class Dim:
    """A size that varies, from `min` to `max`. Sizes of one name are one size."""

    name: str
    min: int | None = None
    max: int | None = None


def export(
    function: Callable[..., object],
    *,
    dynamic: bool | None = None,
    dynamic_shapes: Mapping[str, object] | None = None,
    aten_graph: bool = False,
    decompositions: Decompositions | None = None,
    all_breaks: bool = True,
) -> Callable[..., Exported]:
    """`export(f)(*args)` captures the call as one graph, which is called as `f` is.

    Args:
        dynamic: True: all sizes of at least 2 vary.
        dynamic_shapes: by the parameter's name, which sizes vary: `{dim: "batch"}` or `{dim: Dim("batch", 2, 64)}` (a
            `torch.export.Dim` is one, too) for a tensor, a list, dict or tuple of these for a container of tensors.
        aten_graph: the graph is of ATen's operators, and functional; without, of torch's functions.
        decompositions: the graph is of ATen's operators that this set of operators is left of.
        all_breaks: where the call leaves the graph, run it for real to find all the places.

    Raises:
        Unsupported: the call leaves the graph; `breaks` are all places, the message tells lines, reasons, remedies.
        NotExportable: the call takes, gives or does what has no place in a graph to take away.
        SizeNotDynamic: a size of `dynamic_shapes` cannot vary, or not in its range.
    """

    def run(*args: object, **kwargs: object) -> Exported:
        call = _Call(function, args, kwargs, dynamic)
        marked = _mark(call, dynamic_shapes or {})
        try:
            exported = call.capture(marked.ties, aten_graph or decompositions is not None)
        except Unsupported as error:
            if not all_breaks:
                raise
            raise _all_breaks(function, args, kwargs, error) from error
        finally:
            marked.undo()
        return exported if decompositions is None else _lowered(exported, decompositions)

    return run


def _all_breaks(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], first: Unsupported
) -> Unsupported:
    """The error that names all places where a call leaves the graph."""
    try:
        breaks = tuple(dict.fromkeys(explain(function)(*args, **kwargs).breaks))
    except Exception:  # the program's own, behind the first break
        breaks = ()
    if not breaks:
        return first
    places = "\n".join(f"{number}. {describe(one)}" for number, one in enumerate(breaks, 1))
    error = Unsupported(f"the call leaves the graph at {len(breaks)} place{'s' * (len(breaks) > 1)}:\n{places}")
    error.breaks = breaks
    return error


# -- the call ------------------------------------------------------------------------------------


class _Sentinel:
    """Stands for a leaf of the call: a source that leads to it reads that leaf."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Call:
    """The example call: its leaves, and the function under capture."""

    def __init__(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], dynamic: bool | None
    ) -> None:
        while isinstance(function, functools.partial):
            args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
        self.parameters = _by_position(function)
        self.leaves, self.structure = flatten(in_order(self.parameters, args, kwargs))
        options = CaptureOptions(fullgraph=True, dynamic=dynamic, strict=True)
        compiled = optimize(_no_backend, options=options)(function)
        self.leading = (compiled.__self__,) if isinstance(compiled, types.MethodType) else ()
        self.owner = owner_of(compiled)
        found = self.owner.compiled()
        assert found is not None
        self.compiled = found
        self.flat = self.bound(self.leaves)
        self.scope = Scope.of(self.owner.function, self.bound(map(_Sentinel, range(len(self.leaves)))), ())
        self.state: dict[str, torch.Tensor] = {}
        self.arrays: dict[int, tuple[int, ...]] = {}  # leaves that are arrays: see `Checks`

    def bound(self, leaves: Iterable[object]) -> tuple[object, ...]:
        args, kwargs = self.structure.build(leaves)
        return bound_arguments(self.compiled, (*self.leading, *args), kwargs)

    def capture(self, ties: Mapping[str, list[Measure]], aten: bool) -> Exported:
        """Interprets the call as `optimize` would, under its locks."""
        taken: list[Whole[tuple[Structure, list[Reference], list[Result]]] | Entry] = []

        def take(state: Function, flat: tuple[object, ...]) -> None:
            taken.append(capture_whole(state, flat, self._results))

        self.owner.convert = take
        for _ in range(2):
            self.owner.miss(self.compiled, self.flat)
            if not taken:
                raise TorchDynamoError("nothing is captured while something else records or counts each operator")
            found = taken.pop()
            if not isinstance(found, Entry):
                exported = self._exported(found, ties)
                return _of_aten(exported, found) if aten else exported
            found.code([], *self.flat)  # the first call of a lazy module; or it raises what the program raises
        raise TorchDynamoError("the call raises where it is captured, and does not where it is run")

    # -- references ---------------------------------------------------------------------------

    def place(self, source: Source, pinned: Sequence[object]) -> Leaf | None:
        """The leaf that a source reads; None where it reads something else.

        Raises:
            NotExportable: it reads what hangs on a leaf, which the graph's caller does not give.
        """
        if isinstance(source, Reading) and isinstance(source.read, TensorAt):
            of_array = self.place(source.base, pinned)
            if of_array is not None:
                self.arrays[of_array.index] = tuple(sorted(source.read.flipped))
            return of_array
        try:
            found = resolve(source, replace(self.scope, pinned=pinned))
        except Exception as error:  # what stands for a leaf has nothing of it
            raise NotExportable(
                f"the program reads {source_text(source)}, which is no argument but hangs on one"
            ) from error
        return Leaf(found.index) if isinstance(found, _Sentinel) else None

    def reference(self, source: Source, tensor: torch.Tensor, pinned: Sequence[object]) -> Leaf | State:
        found = self.place(source, pinned)
        if found is not None:
            return found
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise NotExportable(f"{source_text(source)} is a tensor of a class of its own, {type(tensor).__name__}")
        return self.named(source_text(source), tensor)

    def named(self, name: str, tensor: torch.Tensor) -> State:
        known = next((key for key, one in self.state.items() if one is tensor), None)
        if known is None:
            known = name
            while known in self.state:
                known += "_"
            self.state[known] = tensor
        return State(known)

    def measure(self, source: Source, whole: Whole[Any]) -> Measure:
        """A number that a source reads."""
        for kind, name in ((TensorSize, "size"), (TensorStride, "stride"), (TensorOffset, "offset")):
            if isinstance(source, kind):
                base: Source = source.base
                examples = (item.example for item in whole.finished.inputs if item.source == base)
                tensor = next((example for example in examples if isinstance(example, torch.Tensor)), None)
                at: Leaf | State | None = self.place(base, whole.pinned)
                if at is None and tensor is not None:
                    at = self.reference(base, tensor, whole.pinned)
                if at is not None:
                    return Measure(at, name, getattr(source, "dim", 0))
        at = self.place(source, whole.pinned)
        if at is None:
            raise NotExportable(f"{source_text(source)} varies, and is none of the call's arguments")
        return Measure(at, "value")

    # -- results ------------------------------------------------------------------------------

    def _results(self, generated: Generated) -> tuple[Structure, list[Reference], list[Result]]:
        """What the program returned, as it is known before the graph is finished."""
        ending, codegen = generated.capture.ending, generated.codegen
        assert isinstance(ending, Finished)
        if codegen.effects or codegen.emptied:
            names = ", ".join(dict.fromkeys(source_text(known.source) for known in codegen.written))
            raise NotExportable(
                "the program does more than to compute: it "
                + (f"writes to {names}" if names else "logs, warns, or changes the state of the process")
                + "; return what it writes, or do it outside of the exported function"
            )
        if any(generated.capture.outside.externals.lookup(t) for t in generated.capture.outside.recorder.restrided):
            raise NotExportable("the program gives a tensor from outside another shape in place")
        leaves, structure = flatten(ending.value)
        conditions = generated.capture.outside.recorder.conditions
        met = [cast(Result, self._result(t, generated)) for t in conditions.met.values()]
        return structure, [self._result(leaf, generated) for leaf in leaves], met

    def _result(self, value: object, generated: Generated) -> Reference:
        codegen, outside = generated.codegen, generated.capture.outside
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            expr = expr_of(value) if isinstance(value, torch.SymInt) else float_expr_of(value)
            if outside.shape_env.roots(expr.symbols()) <= outside.symbol_sources.keys():
                return Number(outside.shape_env.spelt_out(expr.program()))
        known = outside.externals.lookup(value)
        original = value if known is None else known.original
        for index, leaf in enumerate(self.leaves):
            if leaf is original and (isinstance(original, torch.Tensor) or isinstance(value, Array)):
                return Leaf(index)
        if isinstance(value, Array):
            return self._array(value, generated)
        if isinstance(original, torch.Tensor) and not isinstance(original, FakeTensor):
            return self.named("constant" if known is None else source_text(known.source), original)
        if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
            plain = bool(value) if isinstance(value, torch.SymBool) else original
            if type(plain).__module__.startswith(("torchdynamo.", "primtorch.")):
                raise NotExportable(f"the program returns a {type(plain).__name__}, which is no tensor and no constant")
            return Constant(plain)
        text = codegen.value(value)
        if re.fullmatch(r"o\d+", text):
            return Result(int(text[1:]))
        if isinstance(value, torch.Tensor):
            raise NotExportable("the program returns a tensor of a class of its own")
        return Constant(int(text) if isinstance(value, torch.SymInt) else float(text))

    def _array(self, array: Array, generated: Generated) -> ArrayOf:
        inputs = generated.capture.outside.tensors
        where = next((source for source, _, fake in inputs if fake is array.tensor), None)
        leaf = self.place(where, generated.capture.outside.externals.pins.objects) if where is not None else None
        tensor = leaf or self._result(array.tensor, generated)
        if not isinstance(tensor, (Leaf, State, Result)):
            raise NotExportable("the program returns an array that no graph makes")
        flipped, strides, writeable, scalar = array.world.leaving(array)
        return ArrayOf(tensor, flipped, strides, writeable, scalar)

    # -- the whole ----------------------------------------------------------------------------

    def _exported(
        self, whole: Whole[tuple[Structure, list[Reference], list[Result]]], ties: Mapping[str, list[Measure]]
    ) -> Exported:
        structure, results, met = whole.result
        env, sources = whole.outside.shape_env, whole.outside.symbol_sources
        feeds: list[Reference] = []
        for item in whole.finished.inputs:
            if isinstance(item.example, torch.Tensor):
                if item.source is None:
                    raise NotExportable("the graph takes a tensor that is made before it")
                feeds.append(self.reference(item.source, item.example, whole.pinned))
            else:
                of = item.example
                expr = expr_of(of) if isinstance(of, torch.SymInt) else float_expr_of(of)
                feeds.append(Number(env.spelt_out(expr.program())))
        for feed, item in zip(feeds, whole.finished.inputs, strict=True):
            if isinstance(feed, Leaf) and type(item.example) not in (torch.Tensor, torch.nn.Parameter):
                raise NotExportable(f"an argument is a tensor of a class of its own, {type(item.example).__name__}")
        asked = [str(n) for of in (*feeds, *results) if isinstance(of, Number) for op, n in of.program if op == "sym"]
        symbols = {name: self.measure(sources[name], whole) for name in dict.fromkeys(asked)}
        checks = self._checks(whole, ties)
        return Exported(
            graph=whole.graph,
            guards=whole.finished.guards,
            signature=Signature(self.parameters, self.structure, structure, tuple(results)),
            feeds=tuple(feeds),
            state=self.state,
            checks=checks,
            symbols=symbols,
            met=tuple(met),
            assertions=tuple(whole.outside.recorder.conditions.places),
            inputs=tuple(item.source for item in whole.finished.inputs if item.source is not None),
        )

    def _checks(self, whole: Whole[Any], ties: Mapping[str, list[Measure]]) -> Checks:
        """What of the guards speaks of the call, and what the names of sizes say."""
        guards, relations = whole.finished.guards, []
        names = self._names(guards, whole.pinned)
        tensors: dict[int, TensorGuard] = {}
        pairs: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        inputs = {item.source: place for place, item in enumerate(whole.finished.inputs)}
        written: tuple[int, ...] = ()
        others: tuple[int, ...] = ()
        for guard in guards:
            place = self._leaf_of(guard, whole.pinned)
            if isinstance(guard.source, TensorOffset):
                offset = self.measure(guard.source, whole)
                program: Program = (("sym", "offset"), ("const", guard.payload), ("eq", 0))
                relations.append(
                    Relation(program, {"offset": offset}, f"{source_text(guard.source)} == {guard.payload}")
                )
            elif guard.kind is GuardKind.TENSOR and place is not None:
                tensors[place.index] = guard.payload
            elif guard.kind is GuardKind.SHAPE:
                relations.append(self._relation(guard.payload, whole))
            elif guard.kind in _PAIRS and place is not None:
                of = guard.payload if isinstance(guard.payload, tuple) else (guard.payload,)
                found = [p for p in (place, *(self.place(s, whole.pinned) for s in of)) if p is not None]
                pairs[_PAIRS[guard.kind]] += [(a.index, b.index) for a, b in combinations(found, 2)]
            elif guard.kind is GuardKind.DISTINCT_STORAGE:
                written = tuple(inputs[s] for s in guard.payload.written if s in inputs)
                others = tuple(inputs[s] for s in guard.payload.others if s in inputs)
        numbers = [m.of for r in relations for m in r.symbols.values() if m.kind == "value"]
        varies = {of.index for of in numbers if isinstance(of, Leaf)}
        constants = {
            index: leaf
            for index, leaf in enumerate(self.leaves)
            if not isinstance(leaf, torch.Tensor) and index not in varies and index not in self.arrays
        }
        for name, measures in ties.items():
            relations += [_equal(name, measures[0], other, names) for other in measures[1:]]
        return Checks(
            names,
            tensors,
            constants,
            tuple(relations),
            tuple(pairs[True]),
            tuple(pairs[False]),
            written,
            others,
            arrays=self.arrays,
        )

    def _leaf_of(self, guard: Guard, pinned: Sequence[object]) -> Leaf | None:
        """The leaf that a guard speaks of. Where a tensor begins in its memory is a number that a call tells."""
        told = guard.source is None or isinstance(guard.source, TensorOffset)
        return None if told else self.place(cast(Source, guard.source), pinned)

    def _names(self, guards: Sequence[Guard], pinned: Sequence[object]) -> tuple[str, ...]:
        found: dict[int, str] = {}
        for guard in guards:
            place = self._leaf_of(guard, pinned)
            if place is not None and guard.source is not None:
                found.setdefault(place.index, source_text(guard.source))
        return tuple(found.get(index, f"leaf {index}") for index in range(len(self.leaves)))

    def _relation(self, shape: ShapeProgram, whole: Whole[object]) -> Relation:
        symbols = {name: self.measure(source, whole) for name, source in shape.symbols.items()}
        return Relation(shape.program, symbols, shape.text)


_PAIRS = {GuardKind.SAME_OBJECT: True, GuardKind.DISTINCT_OBJECT: False, GuardKind.ALL_DISTINCT: False}


def _no_backend(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Sequence[object]]:
    return graph.forward


_no_backend.takes_floats = True  # type: ignore[attr-defined]


def _by_position(function: Callable[..., object]) -> tuple[str, ...]:
    """The names of parameters that may be passed by position."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def _equal(name: str, a: Measure, b: Measure, names: Sequence[str]) -> Relation:
    text = " == ".join(f"{names[m.of.index]}.shape[{m.dim}]" for m in (a, b) if isinstance(m.of, Leaf))
    return Relation((("sym", "a"), ("sym", "b"), ("eq", 0)), {"a": a, "b": b}, f"{name}: {text}")


def _dim_of(asked: object) -> Dim:
    """What is said of a size: a name, a `Dim`, or a `torch.export.Dim`."""
    if isinstance(asked, (str, Dim)):
        return Dim(asked) if isinstance(asked, str) else asked
    foreign = torch_compilers_marks.dimension(asked)
    if foreign is None:
        raise TypeError(f"dynamic_shapes has {asked!r} for a size: give it a name, or Dim(name, min, max)")
    return Dim(*foreign)


# -- sizes by name -------------------------------------------------------------------------------


class _Marks:
    """Marks that an export puts on the caller's tensors, and takes off again."""

    def __init__(self) -> None:
        self.ties: dict[str, list[Measure]] = {}
        self._before: list[tuple[torch.Tensor, object]] = []
        self._dims: dict[str, Dim] = {}

    def add(self, tensor: torch.Tensor, place: int, dim: int, asked: object) -> None:
        named = _dim_of(asked)
        known = self._dims.setdefault(named.name, named)
        if known.min != named.min or known.max != named.max:
            named = known if isinstance(asked, str) else _conflict(known, named)
        if named.min is not None and named.min < SMALLEST:
            raise ValueError(
                f"dynamic_shapes: {named} has min={named.min}: a graph whose sizes vary takes none below {SMALLEST}. "
                f"Say min={SMALLEST}, and export a graph of its own for each smaller size"
            )
        before = getattr(tensor, "_torchdynamo_sizes", None)
        mark_dynamic(tensor, dim, named.min, named.max)
        self._before.append((tensor, before))
        self.ties.setdefault(named.name, []).append(Measure(Leaf(place), "size", dim % tensor.dim()))

    def undo(self) -> None:
        for tensor, before in reversed(self._before):
            if before is None:
                del tensor._torchdynamo_sizes  # type: ignore[attr-defined]
            else:
                tensor._torchdynamo_sizes = before  # type: ignore[attr-defined]


def _conflict(known: Dim, other: Dim) -> Dim:
    raise ValueError(f"dynamic_shapes: {known} and {other} have one name and different ranges")


def _mark(call: _Call, shapes: Mapping[str, object]) -> _Marks:
    marks = _Marks()
    try:
        args, kwargs = call.structure.build(_Sentinel(index) for index in range(len(call.leaves)))
        given = {**dict(zip(call.parameters, args, strict=False)), **kwargs}
        for name, asked in shapes.items():
            if name not in given:
                told = ", ".join(given) or "none"
                raise ValueError(f"dynamic_shapes: the call has no argument {name!r}; it has {told}")
            _mark_value(given[name], asked, call.leaves, marks, name)
    except BaseException:
        marks.undo()
        raise
    return marks


def _mark_value(value: Any, asked: Any, leaves: Sequence[object], marks: _Marks, where: str) -> None:
    if asked is None:
        return
    if isinstance(value, _Sentinel):
        tensor = leaves[value.index]
        if not isinstance(tensor, torch.Tensor) or not isinstance(asked, Mapping):
            raise ValueError(f"dynamic_shapes: {where} is a {type(tensor).__name__}; expected a tensor, and its dims")
        for dim, one in asked.items():
            if one is not None:
                marks.add(tensor, value.index, dim, one)
    elif isinstance(asked, Mapping):
        for key, one in asked.items():
            item = value[key] if isinstance(value, Mapping) else getattr(value, key)
            _mark_value(item, one, leaves, marks, f"{where}[{key!r}]")
    elif isinstance(asked, (list, tuple)) and len(asked) == len(value):
        for place, (item, one) in enumerate(zip(value, asked, strict=True)):
            _mark_value(item, one, leaves, marks, f"{where}[{place}]")
    else:
        raise ValueError(f"dynamic_shapes: {where} is a {type(value).__name__} of {len(value)}, asked was {asked!r}")


# -- graphs of operators -------------------------------------------------------------------------


def _of_aten(exported: Exported, whole: Whole[Any]) -> Exported:
    """The same with a functional graph of ATen's operators."""
    examples = [node.meta["val"] for node in exported.graph.graph.find_nodes(op="placeholder")]
    symbolic = any(not isinstance(example, torch.Tensor) for example in examples)
    if not symbolic:  # run on copies of the call's tensors: an operator without a shape rule is one of them
        inputs = [item.example for item in whole.finished.inputs]
        examples = [_copied(example) for example in inputs if isinstance(example, torch.Tensor)]
    with whole.outside.mode if symbolic else contextlib.nullcontext():
        traced = trace(exported.graph, *examples)
    if not symbolic:
        _refuse_numbers(traced)
    written = {name: tuple(traced.meta.get(name, ())) for name in (WRITTEN_INPUTS, WRITTEN_APART)}
    return replace(exported, graph=traced, written=written[WRITTEN_INPUTS], written_apart=written[WRITTEN_APART])


def _refuse_numbers(traced: fx.GraphModule) -> None:
    """Raises NotExportable where a graph that was traced on the call's tensors has numbers of theirs for constants."""
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        at = "".join(f"\n  {frame}" for frame in node.meta["stack"][-1:])
        why = "takes a number out of a tensor, which a graph of operators would have as it was for the example"
        raise NotExportable(f"the program {why}: leave aten_graph out, or let a size vary{at}")


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if torch._debug_has_internal_overlap(tensor) == 1:  # an expanded one, to which nobody can write
        return tensor.detach().requires_grad_(tensor.requires_grad)
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _lowered(exported: Exported, decompositions: Decompositions) -> Exported:
    histories = (torch.ops.aten.detach.default, with_history)  # by which a graph says what has which history
    return replace(exported, graph=lower(exported.graph, decompositions, preserve=histories))
