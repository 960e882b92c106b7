"""Branches and loops in a trace: one node each, over graphs of ATen overloads of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.ambient import autocast_state, set_autocast_state, unset
from primtorch.arguments import TensorLike
from primtorch.effects import tags_of
from primtorch.errors import TraceError
from primtorch.fake import PROGRAMS_FOR_FAKES, FakeMode, FakeTensor
from primtorch.functionalize import WRITTEN_INPUTS, outside_functionalization
from primtorch.higher_order import Body, HigherOrder, Transformable, call_body, handled_by, with_bodies
from primtorch.histories import with_history
from primtorch.memory import memory_of
from primtorch.own_derivatives import CustomFunction, OwnDerivative, TakesFunctions
from primtorch.schemas import UserFrame
from primtorch.spec import Size, TensorSpec, spec_of
from primtorch.symbolic import expr_of, float_expr_of
from primtorch.tracing import RecordingMode, results_of
from primtorch.unseen_writes import memory

Flat = tuple[Any, ...]


class Trace(Protocol):
    """Makes a functional graph of a program and its examples: `primtorch.trace.trace`, told who says the lines."""

    def __call__(self, fn: Callable[..., object], lines: Lines, examples: Sequence[object], /) -> fx.GraphModule: ...


class _Running(fx.Interpreter):
    """Runs a graph, and says which lines it is at."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> object:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        on_fakes = any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        return super().call_function(PROGRAMS_FOR_FAKES.get(target, target) if on_fakes else target, args, kwargs)


class Lines:
    """The lines of a program that runs: those of the nodes of the graphs that do, else what `of_python` finds."""

    def __init__(self, of_python: Callable[[], tuple[UserFrame, ...]]) -> None:
        self._of_python = of_python
        self._graphs: list[_Running] = []

    def __call__(self) -> tuple[UserFrame, ...]:
        if not self._graphs:
            return self._of_python()
        node = self._graphs[-1].node
        return () if node is None else tuple(node.meta.get("stack") or ())

    def run(self, gm: fx.GraphModule, values: Sequence[object]) -> Any:
        """What a graph gives; meanwhile lines are those of its nodes."""
        self._graphs.append(_Running(gm))
        try:
            return self._graphs[-1].run(*values, enable_io_processing=False)
        finally:
            self._graphs.pop()


class TracedBodies(TakesFunctions):
    """Takes the calls of operators over graphs for a mode that records. Regions are traced in place, and so is what
    torch.func's transforms see into; attention is the operators that it is made of. Functions with a derivative of
    their own are kept whole where one is recorded."""

    def __init__(self, mode: RecordingMode, lines: Lines, trace: Trace) -> None:
        self.mode = mode
        self.lines = lines
        self.trace = trace

    def __call__(self, operator: HigherOrder, operands: Flat) -> Flat:
        if isinstance(operator, OwnDerivative):  # over graphs that are traced
            return self.mode.call_graphs(operator, operands)
        if not isinstance(operator, Transformable) or torch._C._are_functorch_transforms_active():
            return operator.run(*operands)
        tensors = operands[operator.sizes :]
        if any(operator.differentiable) and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return operator.differentiated(operands)
        symbols = self._symbols(operands)
        return self.mode.call_graphs(self._over_graphs(operator, operands, symbols), (*symbols, *tensors))

    def run_body(self, body: Body, flat: Flat) -> Sequence[object]:
        """What a body gives, each operator in it of the user's line."""
        return self.lines.run(body, flat) if isinstance(body, fx.GraphModule) else body(*flat)  # type: ignore[no-any-return]

    def custom_function(self, function: CustomFunction, inputs: Flat) -> Flat | None:
        direct = inputs[: function.direct]
        recorded = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in direct)
        if torch._C._are_functorch_transforms_active() or not (recorded and self.mode.follows_history):
            return None
        tensors = tuple(value for value in inputs if isinstance(value, torch.Tensor))
        numbers = tuple(value for value in inputs if isinstance(value, (torch.SymInt, torch.SymFloat)))
        symbols = self._symbols((*numbers, *tensors))
        operator, aliased = self._own_derivative(function, inputs, symbols)
        for place in aliased:
            self.mode.part(tensors[place])
        results = operator.differentiated((*symbols, *tensors))
        return results[: operator.outputs]

    def with_history(self, value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = with_history(value, history)
        self.mode.part(value)
        self.mode.part(found)
        return found

    def _own_derivative(
        self, function: CustomFunction, inputs: Flat, symbols: Sequence[object]
    ) -> tuple[OwnDerivative, list[int]]:
        """The operator, and which of its tensors are memory that the function gives again."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        fake_mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None) or FakeMode()
        split = _Split(function, inputs)
        with self.mode.paused(), outside_functionalization(), fake_mode:
            fakes = [fake_mode.from_spec(_described(value)) for value in tensors]
            forward = self._graph(split.forward, (), symbols, fakes, None)
            specs = results_of(forward)
            history = tuple(
                place < split.outputs
                and place not in split.non_differentiable
                and (spec.dtype.is_floating_point or spec.dtype.is_complex)
                for place, spec in enumerate(specs)
            )
            given = [specs[index] if own else _described(tensors[index]) for own, index in split.saved]
            given += [spec for spec, has in zip(specs, history, strict=True) if has]
            fakes = [fake_mode.from_spec(spec) for spec in given]
            split.specs, split.has_history = specs, history
            backward = self._graph(
                split.backward, (), symbols, fakes, None, recorded=not (function.once or function.turns)
            )
        graphs = (forward, backward)
        operator = OwnDerivative(
            graphs,
            len(symbols),
            history,
            tags=frozenset(tag for graph in graphs for node in graph.graph.nodes for tag in tags_of(node.target)),
            title=function.name,
            outputs=split.outputs,
            saved=tuple(split.saved),
            places=tuple(split.places),
            materialize=function.materialize,
            once=function.once,
            turns=function.turns,
        )
        return operator, split.aliased

    def _symbols(self, operands: Flat) -> list[Any]:
        """A number for each symbol in what the operands' sizes are, which every body takes."""
        known = {str(value): value for value in operands if isinstance(value, (torch.SymInt, torch.SymFloat))}
        sizes = [v for v in operands if isinstance(v, torch.SymInt)]
        for value in operands:
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and str(size) not in self.mode.symbols:
                    self.mode.read_size(value, dim)
            sizes += [n for n in (*value.shape, *value.stride()) if isinstance(n, torch.SymInt)]
        names = {name for size in sizes for name in expr_of(size).symbols()}
        names |= {name for v in operands if isinstance(v, torch.SymFloat) for name in float_expr_of(v).symbols()}
        return [known[name] if name in known else self.mode.symbols[name].meta["val"] for name in sorted(names)]

    def _over_graphs(self, operator: HigherOrder, operands: Flat, symbols: Sequence[object]) -> HigherOrder:
        """The operator over functional graphs of the symbols and the tensors."""
        fake_mode = next((t.fake_mode for t in operands if isinstance(t, FakeTensor)), None) or FakeMode()
        numbers, graphs = operands[: operator.sizes], list[fx.GraphModule]()
        with self.mode.paused(), outside_functionalization(), fake_mode:
            for body, given in zip(operator.bodies, operator.given(operands), strict=True):
                alike = results_of(graphs[0]) if graphs and operator.alike else None
                fakes = [fake_mode.from_spec(_described(value)) for value in given]
                graphs.append(self._graph(body, numbers, symbols, fakes, alike))
        tags = frozenset(tag for graph in graphs for node in graph.graph.nodes for tag in tags_of(node.target))
        if operator.again and tags:
            raise TraceError(
                "the body of an operator over graphs draws random numbers or has an effect, and its derivative would "
                "run it again"
            )
        return with_bodies(operator, graphs, sizes=len(symbols), tags=tags)

    def _graph(
        self,
        body: Body,
        numbers: Flat,
        symbols: Sequence[object],
        fakes: Sequence[FakeTensor],
        alike: Sequence[TensorLike] | None,
        recorded: bool = False,
    ) -> fx.GraphModule:
        """A body's graph. Its results are memory of their own, laid out as those of `alike`. `recorded`: it says what
        has no history, as it may be differentiated operator by operator."""
        casts = autocast_state()

        def program(*flat: Any) -> list[torch.Tensor]:
            found = call_body(body, (*numbers, *flat[len(symbols) :]))
            layouts = [None] * len(found) if alike is None else [spec.stride() for spec in alike]
            return [_own(value, strides) for value, strides in zip(found, layouts, strict=True)]

        with unset(torch.get_default_dtype()), torch.set_grad_enabled(recorded), handled_by(None):
            set_autocast_state(casts)
            for fake in fakes:
                fake.requires_grad_(recorded and (fake.dtype.is_floating_point or fake.dtype.is_complex))
            graph = self.trace(program, self.lines, [*symbols, *fakes])
        if graph.meta.get(WRITTEN_INPUTS):
            raise TraceError("the body of an operator over graphs writes to its operands")
        _without_copies(graph)
        return graph


class _Split:
    """A function's two bodies as programs of tensors alone: numbers that the forward keeps are the backward's."""

    def __init__(self, function: CustomFunction, inputs: Flat) -> None:
        self.function, self.inputs = function, inputs
        self.outputs = function.outputs
        self.non_differentiable = function.non_differentiable
        self.aliased: list[int] = []
        self.saved: list[tuple[bool, int]] = []
        self.places: list[int] = []  # of what the backward gives
        self.specs: Sequence[TensorSpec] = ()
        self.has_history: Sequence[bool] = ()
        self._numbers: list[object] = []  # for each input of the backward, what it is if it is no tensor
        self._is_tensor: list[bool] = []

    def _inputs(self, tensors: Sequence[torch.Tensor]) -> list[object]:
        rest = iter(tensors)
        return [next(rest) if isinstance(value, torch.Tensor) else value for value in self.inputs]

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        given = self._inputs(tensors)
        values = list(self.function.forward(*given))
        kept = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        own = {memory(value) for place, value in enumerate(values) if place in kept[: self.outputs]}  # type: ignore[arg-type]
        self.aliased = [place for place, tensor in enumerate(tensors) if memory(tensor) in own]
        at = {place: index for index, place in enumerate(kept)}
        of_input = {i: sum(isinstance(v, torch.Tensor) for v in given[:i]) for i in range(len(given))}
        self.saved, self._numbers = [], []
        for own_value, index in self.function.saved:
            value = values[index] if own_value else given[index]
            if isinstance(value, torch.Tensor):
                self.saved.append((own_value, at[index] if own_value else of_input[index]))
            self._numbers.append(None if isinstance(value, torch.Tensor) else value)
        self._is_tensor = [
            isinstance(values[index] if own_value else given[index], torch.Tensor)
            for own_value, index in self.function.saved
        ]
        return [values[place] for place in kept]

    def backward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(tensors)
        saved = [
            next(rest) if is_tensor else number
            for is_tensor, number in zip(self._is_tensor, self._numbers, strict=True)
        ]
        gradients = [
            next(rest) if has else tensors[-1].new_zeros(spec.shape, dtype=spec.dtype, device=spec.device)
            for spec, has in zip(self.specs[: self.outputs], self.has_history, strict=False)
        ]
        found = list(self.function.backward(*saved, *gradients))
        self.places = [place for place, gradient in enumerate(found) if gradient is not None]
        return [found[place] for place in self.places]


def _described(value: object) -> TensorSpec:
    """A body's input as a tensor that begins where its memory does."""
    spec = spec_of(value)
    return TensorSpec(spec.shape, spec.strides, spec.dtype, spec.device)


def _own(value: torch.Tensor, strides: Sequence[Size] | None) -> torch.Tensor:
    if strides is None or tuple(value.stride()) == tuple(strides):
        return value.clone()
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _without_copies(graph: fx.GraphModule) -> None:
    """Leaves results be that are memory of their own without a copy."""
    (output,) = graph.graph.find_nodes(op="output")
    results, taken = list(output.args[0]), set[fx.Node]()
    for place, node in enumerate(results):
        source = node.args[0] if node.target is torch.ops.aten.clone.default else None
        if not isinstance(source, fx.Node) or node.kwargs:
            continue
        memory = memory_of(source)
        if memory.op != "call_function" or memory in taken or spec_of(source.meta["val"]) != spec_of(node.meta["val"]):
            continue
        taken.add(memory)
        results[place] = source
    output.args = (tuple(results),)
    graph.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or bool(tags_of(n.target)))
    graph.recompile()
