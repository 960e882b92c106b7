"""Runs PyTorch's autograd engine over a traced forward, for the recorder to see what the backward does."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from aotautograd.differentiable import cumprod_backward
from aotautograd.errors import AotAutogradError
from aotautograd.functionalize import OwnTangent, reads_data
from aotautograd.history import REENTERS, leaves_behind, nodes_behind
from aotautograd.recorder import Recorder
from aotautograd.schemas import HISTORY, FunctionCall, FunctionResult
from primtorch.errors import PrimTorchError
from primtorch.functionalize import unwrap, wrap
from primtorch.memory import memory_of

aten = torch.ops.aten


def tangent_placeholders(recorder: Recorder, fakes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Puts a placeholder for each tangent before the graph's first operator; gives them back."""
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


def failing_backwards(
    recorder: Recorder,
    values: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
) -> dict[int, RuntimeError]:
    """What the backward of each value raises, for those whose does. Nothing of it stays in the graph."""
    found: dict[int, RuntimeError] = {}
    last = _last(recorder.graph)
    for place in range(len(values)):
        try:
            others = set(range(len(values))) - {place}
            trace_backward(recorder, values, tangents, leaves, leave_out=others, keep_graph=True)
        except RuntimeError as error:
            if isinstance(error, (AotAutogradError, PrimTorchError)) or _TORCHS_OWN_FAULT in str(error):
                raise
            found[place] = type(error)(str(error))
        while (node := _last(recorder.graph)) is not last:
            recorder.graph.erase_node(node)
    return found


_TORCHS_OWN_FAULT = "INTERNAL ASSERT FAILED"  # of what it does with symbolic sizes: eager raises no such error


class DataOfDerivatives(TorchFunctionMode):
    """Sees what reads a tensor's data in a derivative that is written in Python (that of an operator of the user's):
    torch would read the memory of a tensor that has none. It is refused unless the derivative is tried."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if reads_data(func, args):
            return self.recorder.answer(func, args[0], f"Tensor.{func.__name__}()")
        return func(*args, **(kwargs or {}))


def trace_backward(
    recorder: Recorder,
    values: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    leave_out: Collection[int] = (),
    keep_graph: bool = False,
    accumulate: bool = False,
    totals: dict[int, fx.Node] | None = None,
) -> tuple[list[fx.Node | None], list[bool]]:
    """A node (or None) for the gradient of each leaf, without what the values at the places `leave_out` give. With
    `accumulate`, also whether autograd keeps a copy of it as `.grad`."""
    kept = [i for i in range(len(values)) if i not in leave_out]
    values, tangents = [values[i] for i in kept], [tangents[i] for i in kept]
    if not values:
        return [None] * len(leaves), []
    by_name = True
    for node in nodes_behind(values):
        by_name &= node.name() != REENTERS  # such nodes refuse to run for named inputs
        if note_formula := _FORMULAS.get(node.name()):
            node.register_hook(functools.partial(note_formula, recorder))
    found: dict[int, fx.Node] = {}

    def note(place: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            found[place] = recorder.node_of[id(unwrap(gradient))]

    for place, leaf in enumerate(leaves):
        leaf.grad = None
        if accumulate:
            leaf.register_hook(functools.partial(note, place))
    for number, value in enumerate(values if totals is not None else ()):

        def note_total(gradient: torch.Tensor | None, number: int = number) -> None:
            if gradient is not None and totals is not None:
                totals[number] = recorder.node_of[id(unwrap(gradient))]

        value.register_hook(note_total)
    with torch.enable_grad():
        values = [OwnTangent.apply(value) for value in values]
    env = recorder.fake_mode.shape_env
    with (
        torch._C._DisableAutocast(),
        torch.autograd.set_multithreading_enabled(False),
        torch.no_grad(),
        DataOfDerivatives(recorder),
        nullcontext() if env is None else env.formulas(),
    ):
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


def _note_cumprod(recorder: Recorder, found: _Gradients, given: _Gradients) -> None:
    result, gradient = (recorder.node_of.get(id(unwrap(t))) if t is not None else None for t in (found[0], given[0]))
    if result is None or gradient is None or result is gradient:  # of one element
        return
    quotient = _behind(result, lambda node: node.target is aten.div.Tensor)
    scanned = _behind(result, lambda node: node.target is aten.cumsum.default)
    x = quotient.args[1] if quotient is not None else None
    if isinstance(x, fx.Node) and scanned is not None:
        x = _behind(x, lambda node: node.target is not aten._conj.default)
        call = FunctionCall(cumprod_backward, (gradient, x, scanned.args[1]), draws=False)
        result.meta[HISTORY] = FunctionResult(call, ())


def _note_product(recorder: Recorder, found: _Gradients, given: _Gradients, refusal: str) -> None:
    for gradient in found:
        result = recorder.node_of.get(id(unwrap(gradient))) if gradient is not None else None
        single = result and _behind(result, _counts_one)
        if result is not None and single is not None:
            checked: Callable[..., torch.Tensor] = functools.partial(_refusing, result.target, refusal)  # type: ignore[arg-type]
            call = FunctionCall(checked, (single.args[0], *result.args), draws=False)
            result.meta[HISTORY] = FunctionResult(call, ())


def _counts_one(node: fx.Node) -> bool:
    return node.target is aten.eq.Scalar and bool(node.args[1] == 1)


def _refusing(operator: Callable[..., torch.Tensor], refusal: str, zeros: torch.Tensor, *args: object) -> torch.Tensor:
    """The operator's result, whose derivative is refused where somewhere there is more than one zero."""
    refused: torch.Tensor = _Refused.apply(operator(*args), zeros, refusal)
    return refused


class _Refusing(BackwardCFunction):
    """What is kept of a refused derivative."""

    refusal: str


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Refusing, value: torch.Tensor, zeros: torch.Tensor, refusal: str) -> torch.Tensor:
        ctx.save_for_backward(zeros)
        ctx.refusal = refusal
        return value.view_as(value)

    @staticmethod
    def backward(ctx: _Refusing, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (zeros,) = ctx.saved_tensors
        torch._assert_async((zeros <= 1).all(), ctx.refusal)
        return gradient, None, None


def _behind(node: fx.Node, holds: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The nearest of what a node is computed from, itself included, of which this holds."""
    work, seen = [node], {node}
    for source in work:
        if holds(source):
            return source
        work.extend(n for n in source.all_input_nodes if n not in seen)
        seen.update(source.all_input_nodes)
    return None


_Gradients: TypeAlias = Sequence[torch.Tensor | None]
_REFUSED = "Double backward is unsupported for {0} when >1 zeros in {0} are scattered to the same position in self"

# Derivatives whose formula is another in grad mode, by what autograd calls their nodes: notes in the graph what a
# derivative of them is to be taken of.
_FORMULAS: Mapping[str, Callable[[Recorder, _Gradients, _Gradients], None]] = {
    "CumprodBackward0": _note_cumprod,
    "ScatterReduceBackward0": functools.partial(_note_product, refusal=f"scatter_reduce(): {_REFUSED.format('src')}"),
    "IndexReduceBackward0": functools.partial(_note_product, refusal=f"index_reduce(): {_REFUSED.format('source')}"),
}


def led_to_by(
    graph: fx.Graph,
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[fx.Node | None],
    values: Sequence[torch.Tensor],
    tangents: Mapping[fx.Node, int],
) -> tuple[tuple[int, ...], ...]:
    """For each leaf, the tangents from which the backward comes to it: hooks of others do not run. A derivative of the
    user's that gives None leads there as well; what is computed by reentry, only the graph tells."""
    sources = _sources(graph, tangents)
    every = (1 << len(values)) - 1
    found = [0 if gradient is None else sources[gradient] for gradient in gradients]
    if any(of_leaf != every for of_leaf in found):
        behind = [leaves_behind(value) for value in values]
        for place, leaf in enumerate(leaves):
            found[place] |= sum(1 << number for number, ids in enumerate(behind) if id(leaf) in ids)
    return tuple(tuple(n for n in range(len(values)) if of_leaf >> n & 1) for of_leaf in found)


def _sources(graph: fx.Graph, tangents: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The numbers of the tangents that a node is computed from, as bits."""
    sources: dict[fx.Node, int] = {}
    for node in graph.nodes:
        number = tangents.get(node)
        sources[node] = functools.reduce(
            operator.or_, (sources[n] for n in node.all_input_nodes), 0 if number is None else 1 << number
        )
    return sources


def leading(
    graph: fx.Graph, totals: dict[int, fx.Node], tangents: Mapping[fx.Node, int]
) -> tuple[tuple[int, ...], ...]:
    """For each tangent, those of other results that lead to its result, and leaves in `totals` the sums of all."""
    found: list[tuple[int, ...]] = []
    sources = _sources(graph, tangents) if totals else {}
    for number in range(len(tangents)):
        node = totals.get(number)
        bits = sources[node] & ~(1 << number) if node is not None else 0
        found.append(tuple(n for n in range(len(tangents)) if bits >> n & 1))
        if not bits:
            totals.pop(number, None)
    return tuple(found)
