"""Calls of captured autograd functions and of their backwards in a trace: what derivatives of it call again.

A joint graph has the operators of a function alone. What of them has no history, and what another function's derivative
is, they do not say. So the results are noted as those of a call (`schemas.FunctionResult`): of the function, or of its
backward as autograd runs it in grad mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from aotautograd.inputs import dense_spec
from aotautograd.passes import is_effect
from aotautograd.recorder import Recorder
from aotautograd.schemas import HISTORY, FunctionCall, FunctionResult, History
from primtorch.functionalize import unwrap, wrap
from primtorch.higher_order import HigherOrder
from primtorch.memory import memory_of, path_of_views
from primtorch.own_derivatives import AppliedFunction, FunctionBackward

aten = torch.ops.aten

Values = tuple[Any, ...]
Run = Callable[[], Values]


def applied(
    recorder: Recorder, function: AppliedFunction, inputs: Values, places: Sequence[int], run: Run, drawn: bool
) -> Values:
    """What `run` makes within a call of `function`; those at `places` have the function's history."""
    if not recorder.follows_history:
        return run()
    args, before, last = recorder.nodes_of(inputs), recorder.drawn, _last(recorder.graph)
    results = run()
    made = set(_since(recorder.graph, last))
    nodes = recorder.nodes_of(results)
    draws = drawn or recorder.drawn != before
    call = FunctionCall(function, args, draws, nodes if draws else ())
    for place, node in enumerate(nodes):
        if isinstance(node, fx.Node) and node in made and not (place not in places and HISTORY in node.meta):
            node.meta[HISTORY] = FunctionResult(call, (place,)) if place in places else History.NONE
    return results


def pulled_back(
    recorder: Recorder, interpret: Callable[[fx.GraphModule, Values], Values], backward: FunctionBackward,
    given: Values, run: Run,
) -> Values:  # fmt: skip
    """What a backward gives. What is handed on as it was given keeps its history, if the backward leaves it that.

    Where the program itself differentiates, in grad mode, `interpret` runs the graph: each node says what history it
    has, since derivatives read what is computed in between.
    """
    if not recorder.follows_history or torch._C._are_functorch_transforms_active():
        return run()
    if recorder.phase != "backward":
        recorded = torch.is_grad_enabled() and not backward.once
        return interpret(backward.body, given) if recorded else run()
    args, last = recorder.nodes_of(given), _last(recorder.graph)
    found = tuple(run())
    made = set(_since(recorder.graph, last))
    read = tuple(0 if place in backward.unread else arg for place, arg in enumerate(args))
    if backward.once:  # whether its results have a derivative the gradients say, read or not
        read = (*read[: backward.kept], *args[backward.kept :])
    call = FunctionCall(backward, read, draws=False)
    results = []
    for place, value in enumerate(found):
        node = recorder.node_of[id(unwrap(value))] if isinstance(value, torch.Tensor) else None
        if node is not None and node not in made and backward.once:
            inner = aten.alias.default(unwrap(value))
            value, node = wrap(inner), recorder.node_of[id(inner)]
            made.add(node)
        if node is not None and node in made:
            node.meta[HISTORY] = FunctionResult(call, (place,))
        results.append(value)
    for node in made:
        if is_effect(node):
            node.meta[HISTORY] = FunctionResult(call, ())
    return tuple(results)


def called(
    recorder: Recorder, operator: HigherOrder, operands: Values, results: Sequence[torch.Tensor], draws: bool
) -> None:
    """Notes the results of an operator over graphs that apply functions: of the graph's bodies, which are traced, no
    derivative is to be taken, but of those that the program has."""
    call = FunctionCall(operator, recorder.nodes_of(operands), draws)
    for place, result in enumerate(results):
        recorder.node_of[id(result)].meta[HISTORY] = FunctionResult(call, (place,))


def with_own_histories(
    recorder: Recorder, gradients: Sequence[fx.Node | None], tangents: Collection[fx.Node]
) -> list[fx.Node | None]:
    """The gradients, as memory of their own where they are views that a function's backward gives, of a tangent or of
    what other gradients are views of: what one makes of that outside of the graph has the history of that."""
    owners = Counter(memory_of(g) for g in dict.fromkeys(gradients) if g is not None)
    owners.update(tangents)
    copies: dict[fx.Node, fx.Node] = {}
    for gradient in gradients:
        if gradient is None or owners[memory_of(gradient)] == 1 or gradient in copies:
            continue
        if any(isinstance(node.meta.get(HISTORY), FunctionResult) for node in path_of_views(gradient)[1:]):
            fake = recorder.fake_mode.from_spec(dense_spec(gradient.meta["val"]))
            copies[gradient] = recorder.record(aten.clone.default, (gradient,), {}, fake)
    return [g if g is None else copies.get(g, g) for g in gradients]


def _last(graph: fx.Graph) -> fx.Node:
    # Not every release's list of nodes, reversed, is an iterator itself.
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


def _since(graph: fx.Graph, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes behind one."""
    for node in reversed(graph.nodes):
        if node is last:
            return
        yield node
