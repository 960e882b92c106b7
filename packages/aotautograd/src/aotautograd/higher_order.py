"""Operators over graphs (`primtorch.higher_order`) in a trace: their bodies become functional graphs of their own.

Where a traced program calls one, its bodies are traced for the operands' metadata, and one node calls the operator over
these graphs. Autograd sees one node, too: its backward is a call of the derivative, which is such an operator again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from aotautograd import own_functions
from aotautograd.errors import AotAutogradError
from aotautograd.inputs import sizes_of
from aotautograd.nested_regions import Regions
from aotautograd.passes import (
    eliminate_common_subexpressions,
    eliminate_dead_code,
    is_effect,
    is_random,
    output_values,
    remove_no_ops,
)
from aotautograd.recorder import Recorder, is_cast
from aotautograd.schemas import JointGraph, OutputKind
from primtorch.ambient import autocast_state, set_autocast_state, unset
from primtorch.arguments import TensorLike
from primtorch.fake import FakeTensor
from primtorch.functionalize import unwrap, wrap
from primtorch.higher_order import Body, HigherOrder, InvokeSubgraph, Values, call_body, handled_by, with_bodies
from primtorch.own_derivatives import AppliedFunction, FollowsFunctions, FunctionBackward, applies_functions
from primtorch.printing import made_by
from primtorch.schemas import UserFrame
from primtorch.spec import Size, TensorSpec, spec_of
from primtorch.symbolic import expr_of, float_expr_of

Trace = Callable[[Callable[..., object], Sequence[object]], JointGraph]


class TracedCalls(FollowsFunctions):
    """Takes the calls of a program that `recorder` records; `trace` traces a body. `regions` takes those of regions,
    unless all are traced in place."""

    def __init__(self, recorder: Recorder, trace: Trace, regions: Regions | None) -> None:
        self.recorder = recorder
        self.trace = trace
        self.regions = regions

    def region(self, operator: InvokeSubgraph, operands: tuple[object, ...]) -> tuple[Any, ...] | None:
        """The results of a region's call; None where it is to be traced in place."""
        if self.regions is None or torch._C._are_functorch_transforms_active():
            return None
        return self.regions.call(operator, operands)

    def __call__(self, operator: HigherOrder, operands: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        if isinstance(operator, InvokeSubgraph):
            found = self.region(operator, operands)
            return tuple(self.run_body(operator.bodies[0], operands)) if found is None else found  # type: ignore[arg-type]
        if torch._C._are_functorch_transforms_active():  # their tensors stand for others: they see each operator
            return operator.run(*operands)
        tensors = operands[operator.sizes :]
        if any(operator.differentiable) and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return operator.differentiated(operands)
        return self.emit(operator, operands)

    def applied(
        self, function: AppliedFunction, inputs: Values, places: Sequence[int], run: Callable[[], Values], drawn: bool
    ) -> Values:
        return own_functions.applied(self.recorder, function, inputs, places, run, drawn)

    def pulled_back(self, backward: FunctionBackward, given: Values, run: Callable[[], Values]) -> Values:
        return own_functions.pulled_back(self.recorder, self._interpreted, backward, given, run)

    def _interpreted(self, graph: fx.GraphModule, given: Values) -> Values:
        stack = self.recorder.stack
        found = tuple(self.run_body(graph, given))
        self.recorder.user_node(stack)  # the node that it is run within goes on
        return found

    def run_body(self, body: Body, flat: tuple[object, ...]) -> Sequence[object]:
        """Node by node, as the program around it: each operator knows the user's line."""
        if not isinstance(body, fx.GraphModule):
            return body(*flat)
        try:
            return _Body(body, self.recorder).run(*flat, enable_io_processing=False)  # type: ignore[no-any-return]
        finally:
            self.recorder.user_node(())

    def emit(self, operator: HigherOrder, operands: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Writes the node of a call, and gives its results."""
        recorder = self.recorder
        numbers, tensors = operands[: operator.sizes], [unwrap(t) for t in operands[operator.sizes :]]
        inner = (*numbers, *tensors)
        symbols = self._symbols(inner)
        graphs: list[fx.GraphModule] = []
        for body, given in zip(operator.bodies, operator.given(inner), strict=True):
            alike = _results_of(graphs[0]) if graphs and operator.alike else ()
            graphs.append(self._graph(body, symbols, numbers, given, alike))
        found = [_results_of(graph) for graph in graphs]
        specs = operator.results(inner, found)
        tags = _tags(graphs)
        if operator.again and tags:
            raise AotAutogradError(
                "the body of an operator over graphs draws random numbers or has an effect, and its derivative would "
                "run it again",
                recorder.stack,
            )
        traced = with_bodies(operator, graphs, sizes=len(symbols), tags=tags)
        args = (*(recorder.size(symbol) for symbol in symbols), *(recorder.lift(t) for t in tensors))
        fakes = tuple(recorder.fake_mode.from_spec(spec) for spec in specs)
        recorder.call_graphs(traced, args, fakes)
        if recorder.follows_history and any(map(applies_functions, operator.bodies)):
            own_functions.called(recorder, operator, operands, fakes, "random" in tags)
        return tuple(map(wrap, fakes))

    def _symbols(self, operands: Iterable[object]) -> list[torch.SymInt | torch.SymFloat]:
        """A number for each symbol in the operands' sizes, which every body takes."""
        known = {str(v): v for v in operands if isinstance(v, (torch.SymInt, torch.SymFloat))}
        names = {name for value in operands for size in sizes_of(value) for name in expr_of(size).symbols()}
        names |= {name for v in operands if isinstance(v, torch.SymFloat) for name in float_expr_of(v).symbols()}
        nodes = self.recorder.symbol_nodes
        return [known[name] if name in known else nodes[name].meta["val"] for name in sorted(names)]

    def _graph(
        self,
        body: Body,
        symbols: Sequence[object],
        numbers: Sequence[object],
        given: Sequence[object],
        alike: Sequence[TensorLike],
    ) -> fx.GraphModule:
        """A body as a functional graph of the symbols and the tensors. Its results are memory of their own, laid out
        as those of `alike` where there are any."""
        casts = autocast_state()

        def program(*flat: object) -> list[torch.Tensor]:
            found = call_body(body, (*numbers, *flat[len(symbols) :]))
            wanted: Sequence[tuple[Size, ...] | None] = [spec.stride() for spec in alike] or [None] * len(found)
            return [_own(value, strides) for value, strides in zip(found, wanted, strict=True)]

        with unset(torch.get_default_dtype()), torch.no_grad(), handled_by(None):
            set_autocast_state(casts)
            joint = self.trace(program, [*symbols, *map(_described, given)])
        if any(
            o.kind is not OutputKind.VALUE or o.slot != place for place, o in enumerate(joint.metadata.outputs)
        ) or any(i.mutates_data or i.mutates_metadata for i in joint.metadata.inputs):
            raise AotAutogradError("the body of an operator over graphs writes to its operands", self.recorder.stack)
        return _simplified(joint, self.recorder.stack)


class _Body(fx.Interpreter):
    """Runs a body's graph."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # the trace says where an error is from
        self.recorder = recorder

    def run_node(self, node: fx.Node) -> object:
        recorder = self.recorder
        recorder.user_node(node.meta.get("stack") or (), is_cast(node))
        value = super().run_node(node)
        if recorder.follows_history and node.op.startswith("call_"):
            recorder.note_history(value, None, ())
        return value


def _results_of(graph: fx.GraphModule) -> list[FakeTensor | TensorSpec]:
    """What a body gives."""
    return [node.meta["val"] for node in output_values(graph.graph) if isinstance(node, fx.Node)]


def _described(value: object) -> TensorSpec:
    """A body's input as a tensor that begins where its memory does."""
    spec = spec_of(value)
    return TensorSpec(spec.shape, spec.strides, spec.dtype, spec.device)


def _own(value: torch.Tensor, strides: Sequence[Size] | None) -> torch.Tensor:
    if strides is None or tuple(value.stride()) == tuple(strides):
        return value.clone()
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _simplified(joint: JointGraph, stack: tuple[UserFrame, ...]) -> fx.GraphModule:
    graph = joint.module.graph
    eliminate_dead_code(graph)
    remove_no_ops(graph, output_values(graph))
    eliminate_common_subexpressions(graph, output_values(graph))
    eliminate_dead_code(graph)
    for node in graph.nodes:
        if node.op == "call_function" and not node.meta.get("stack"):
            node.meta["stack"] = stack
    joint.module.recompile()
    made_by(joint.module, "simplify")
    return joint.module


def _tags(graphs: Sequence[fx.GraphModule]) -> frozenset[str]:
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    tags = {"random"} if any(map(is_random, nodes)) else set()
    return frozenset(tags | ({"effect"} if any(map(is_effect, nodes)) else set()))
