"""A backward in stages: gradients are those of one backward, and those of a stage are there before the next one runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from aotautograd import aot_module, run_graph
from aotautograd.events import BACKWARD_NOT_CUT
from primtorch.ledger import LEDGER

OPSETS = (None, "prims")


def layers(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return [x]


def shared(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """Gradients that are one memory, views of one memory, and the tangent itself; one that a later stage reads."""
    y = torch.tanh(x @ a) + b
    return [y @ a.T @ c + b, c + c, b.view(2, 3) * 2]


def several(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    """Outputs that not every backward uses, several results of one operator, and statistics."""
    first, second = torch.split(x @ a, 3, 1)
    value, place = (second * b).max(0)
    normed = torch.nn.functional.layer_norm(first, (3,), c[0], c[1])
    return [normed.sin(), value, place]


def drawn(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    return [torch.nn.functional.dropout(torch.nn.functional.dropout(x @ a) @ b, 0.3) @ c]


def written(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    y = x @ a
    y.mul_(2).add_(1)
    y[0] = (y[1].clone() @ b).tanh()
    return [y @ c, y.T]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "layers": (layers, ((4, 6), (6, 6), (6, 6), (6, 2))),
    "shared": (shared, ((4, 6), (6, 6), (6,), (6, 6))),
    "several": (several, ((4, 6), (6, 6), (3,), (2, 3))),
    "drawn": (drawn, ((4, 6), (6, 6), (6, 6), (6, 6))),
    "written": (written, ((4, 6), (6, 6), (6, 6), (6, 6))),
}
STAGES = ([[3], [2], [1]], [[2, 3], [1, 0]], [[1], [0, 3], [2]], [[0], [1, 2, 3]])


def _inputs(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in PROGRAMS[name][1]]


def _compiled(name: str, stages: Sequence[Sequence[int]], opset: Any, inputs: list[torch.Tensor], **more: Any) -> Any:
    settings = {"decompositions": opset, "eager_random": True, "stages": stages, **more}
    return aot_module(PROGRAMS[name][0], inputs, fw_compiler=run_graph, **settings)


def _loss(outputs: Sequence[torch.Tensor], used: Sequence[int]) -> torch.Tensor:
    return sum((outputs[i] * outputs[i].detach().cos()).sum() for i in used)  # type: ignore[return-value]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_one_backward(name: str, opset: Any) -> None:
    used = [[0]] if name in ("layers", "drawn") else [[0], [0, 1], [1]]
    for stages in STAGES:
        results = []
        for run in (PROGRAMS[name][0], None):
            inputs = _inputs(name)
            call = run or _compiled(name, stages, opset, inputs)
            found: list[Any] = []
            for outputs_used in used:
                torch.manual_seed(1)
                outputs = call(*inputs)
                loss = _loss(outputs, outputs_used)
                found.append(torch.autograd.grad(loss, inputs[1:2], retain_graph=True, allow_unused=True))
                loss.backward(retain_graph=True)
                loss.backward()
                found.append([None if t.grad is None else t.grad.clone() for t in inputs])
            results.append(found)
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("opset", OPSETS)
def test_a_stage_is_done_before_the_next_begins(opset: Any) -> None:
    events: list[str] = []

    def compiler(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        run = run_graph(gm, inputs)

        def call(given: list[Any]) -> Any:
            events.append("graph")
            return run(given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    inputs = _inputs("layers")
    compiled = _compiled("layers", [[3], [2], [1]], opset, inputs, bw_compiler=compiler)
    for place, tensor in enumerate(inputs):
        tensor.register_post_accumulate_grad_hook(lambda t, place=place: events.append(f"gradient {place}"))
    compiled(*inputs)[0].sum().backward()
    assert events == ["graph", "gradient 3", "graph", "gradient 2", "graph", "gradient 0", "gradient 1"]


@pytest.mark.parametrize("groups", [[range(8)], [[5, 1, 6, 2, 7]], [[7, 0, 3], [6, 5, 4, 2, 1]]])
def test_gradients_of_a_group_come_in_its_order(groups: Sequence[Sequence[int]]) -> None:
    inputs = [torch.ones(3, requires_grad=True) for _ in range(8)]
    compiled = aot_module(lambda *given: [sum(t.sin() for t in given)], inputs, fw_compiler=run_graph, stages=groups)
    came: list[int] = []
    for place, tensor in enumerate(inputs):
        tensor.register_post_accumulate_grad_hook(lambda t, place=place: came.append(place))
    for _ in range(2):
        compiled(*inputs)[0].sum().backward()
        ahead, last = [place for group in groups[:-1] for place in group], list(groups[-1])
        assert came[: len(ahead)] == ahead and came[-len(last) :] == last and sorted(came) == list(range(8))
        came.clear()


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", ["layers", "shared", "several", "written"])
def test_hooks_write_to_gradients_and_parameters(name: str, opset: Any) -> None:
    """What a later stage reads is not what an earlier one has handed on."""

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.grad.mul_(3)  # type: ignore[union-attr]
            parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]

    for stages in STAGES:
        results = []
        for run in (PROGRAMS[name][0], None):
            inputs = _inputs(name)
            call = run or _compiled(name, stages, opset, inputs)
            for tensor in inputs:
                tensor.register_post_accumulate_grad_hook(step)
            _loss(call(*inputs), [0] if name == "layers" else [0, 1]).backward()
            results.append([(t.detach(), t.grad) for t in inputs])
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("opset", OPSETS)
def test_second_derivatives(opset: Any) -> None:
    results = []
    for run in (layers, None):
        inputs = _inputs("layers")
        call = run or _compiled("layers", STAGES[0], opset, inputs)
        first = torch.autograd.grad(_loss(call(*inputs), [0]), inputs, create_graph=True)
        sum(g.pow(2).sum() for g in first).backward()  # type: ignore[union-attr]
        results.append([*first, *(t.grad for t in inputs)])
    torch.testing.assert_close(results[1], results[0])


def test_memory_is_freed_between_stages() -> None:
    """What a stage was the last to read is gone when the next one begins."""
    alive: list[int] = []
    kept: list[torch._C._WeakTensorRef] = []

    def compiler(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        run = run_graph(gm, inputs)

        def call(given: list[Any]) -> Any:
            alive.append(sum(not ref.expired() for ref in kept))
            return run(given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    inputs = _inputs("layers")
    compiled = _compiled("layers", [[3], [2], [1]], None, inputs, bw_compiler=compiler)
    result = compiled(*inputs)[0]
    leaves = {t.data_ptr() for t in inputs}
    saved = [t for t in result.grad_fn.saved_tensors if t.data_ptr() not in leaves]
    kept += [torch._C._WeakTensorRef(t) for t in saved]
    del saved
    result.sum().backward()
    assert alive == sorted(alive, reverse=True) and alive[-1] < alive[0]


def test_a_call_that_raises_within_a_backward_is_forgotten() -> None:
    """A checkpoint ends a recomputation by an exception of its hook for saved tensors; the nodes made by then go."""
    results = []
    for run in (several, None):
        inputs = _inputs("several")
        call = run or _compiled("several", [[3], [2], [1]], None, inputs)
        outputs = checkpoint(lambda *given, call=call: call(*given)[0], *inputs, use_reentrant=False)
        (outputs * outputs).sum().backward()
        results.append([t.grad for t in inputs])
    torch.testing.assert_close(results[1], results[0])


class Selecting(torch.autograd.Function):
    """Both gradients are made of elements of which only the data tells how many they are."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = tangents[0][tangents[0] > 0].exp()
        return tangents[0] * chosen.sum(), tangents[0] * chosen.square().sum()


def test_a_backward_that_stays_whole_is_told() -> None:
    LEDGER.clear()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        inputs = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        program = lambda a, b: [Selecting.apply(a, b).sin()]  # noqa: E731
        call = aot_module(program, inputs, fw_compiler=run_graph, stages=[[1], [0]]) if compiled else program
        call(*inputs)[0].sum().backward()
        results.append([t.grad for t in inputs])
    torch.testing.assert_close(results[1], results[0])
    assert [event.kind for event in LEDGER.events] == [BACKWARD_NOT_CUT]


@pytest.mark.parametrize("trial", range(6))
def test_gradients_come_in_the_order_that_was_asked_for(trial: int) -> None:
    """Whatever else autograd's engine has ready beside them: operators of the program's own around the compiled ones."""
    seed = random.SystemRandom().randrange(2**31)
    chance = random.Random(seed)
    count = chance.randint(2, 9)
    places = chance.sample(range(1, count + 1), count)
    cuts = sorted(chance.sample(range(1, count), chance.randint(0, min(3, count - 1))))
    stages = [places[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    inputs = [torch.randn(3, dtype=torch.float64, requires_grad=place > 0) for place in range(count + 1)]
    outputs = chance.randint(1, 2)

    def program(*given: torch.Tensor) -> list[torch.Tensor]:
        whole = given[0]
        for each in given[1:]:
            whole = torch.tanh(whole * each + each)
        return [whole, *(given[1] * given[place] for place in range(2, outputs + 1))]

    compiled = aot_module(program, inputs, fw_compiler=run_graph, eager_random=True, stages=stages)
    came: list[int] = []
    for place in places:
        inputs[place].register_post_accumulate_grad_hook(lambda _, place=place: came.append(place))
    for _ in range(2):
        others = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(chance.randint(0, 5))]
        results = compiled(*inputs)
        loss = sum((result * other.sin()).sum() for result in results for other in (*others, torch.ones(3)))
        loss.backward()  # type: ignore[union-attr]
        assert came == places, (seed, stages, outputs)
        came.clear()


def test_a_gradient_that_is_an_earlier_one_repeated_is_dense() -> None:
    """It is a copy in the later stage, since the earlier one belongs to others by then: of no place twice."""
    layouts: list[list[tuple[int, ...]]] = []

    def compiler(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        copies = [node for node in results if getattr(node, "target", None) is torch.ops.aten.clone.default]
        layouts.append([tuple(node.meta["val"].stride()) for node in copies])
        return run_graph(graph, inputs)

    def program(x: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return [((x.sum(0) + torch.tanh(a)) @ weight).sin()]

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3, 6), (3, 6), (6, 6))]
        more: dict[str, Any] = {"bw_compiler": compiler, "decompositions": "prims", "stages": [[2], [1]]}
        call: Any = aot_module(program, inputs, fw_compiler=run_graph, **more) if compiled else program
        call(*inputs)[0].sum().backward()
        results.append([t.grad for t in inputs])
    torch.testing.assert_close(results[1], results[0])
    assert layouts == [[], [(18, 6, 1)]]
