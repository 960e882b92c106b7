"""A graph that a back end cannot compile runs as it was captured, with the right values and gradients; it is counted,
explained and warned of, and the options say when it raises."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcompile
import torchinductor
from aotautograd import api as aot
from torchcompile.options import InvalidArgument
from torchdynamo import Unsupported


@pytest.fixture(autouse=True)
def nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planted in a stage is met by a process that runs that stage."""
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path / "cache"))
    torchcompile.reset()


class Broken(RuntimeError):
    """Stands for any error of a stage."""


def fails(*args: Any, **kwargs: Any) -> Any:
    raise Broken("a stage is at fault")


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y.mul_(2)
    z = (x * y).sin()
    return z, z[0].exp()


def inputs() -> list[torch.Tensor]:
    x, y = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4).unbind()
    return [x.clone().requires_grad_(), y.clone()]


# What fails -> how: the stage of tracing, of lowering and code generation, of the backward alone.
def _trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "trace_joint", fails)


def _lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "lower_joint", fails)


def _generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchinductor, "compile_graph", fails)


def _backward(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_graph = torchinductor.compile_graph

    def compile(gm: Any, *args: Any, **kwargs: Any) -> Any:
        return (fails if type(gm).__name__ == "Backward" else compile_graph)(gm, *args, **kwargs)

    monkeypatch.setattr(torchinductor, "compile_graph", compile)


STAGES = {"trace": _trace, "lower": _lower, "generate": _generate, "backward": _backward}
CASES = [*(("inductor", stage) for stage in STAGES), ("aot_eager", "trace")]


@pytest.mark.expected_eager("graph_not_compiled")
@pytest.mark.parametrize(("backend", "stage"), CASES)
def test_the_captured_graph_runs(backend: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STAGES[stage](monkeypatch)
    compiled = torchcompile.compile(program, backend=backend)
    for again in range(2):
        given, wanted = inputs(), inputs()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = compiled(*given)
            (results[0].sum() + results[1].sum()).backward()
        assert sum("graph_not_compiled" in str(w.message) for w in told) == (0 if again else 1)
        expected = program(*wanted)
        (expected[0].sum() + expected[1].sum()).backward()
        torch.testing.assert_close(results, expected)
        torch.testing.assert_close(given, wanted)
        torch.testing.assert_close(given[0].grad, wanted[0].grad)
    report = torchcompile.report()
    assert report.captured == 1 and not report.breaks
    (event,) = report.fallbacks
    assert event.kind.id == "graph_not_compiled" and "a stage is at fault" in event.detail


@pytest.mark.parametrize(("backend", "stage"), CASES)
def test_strict_raises_the_error_itself(backend: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STAGES[stage](monkeypatch)
    compiled = torchcompile.compile(program, backend=backend, options={"strict": True})
    with pytest.raises(Broken, match="at fault"):
        compiled(*inputs())[0].sum().backward()


@pytest.mark.parametrize(("backend", "stage"), CASES)
def test_fullgraph_refuses_what_is_no_compiled_program(
    backend: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    STAGES[stage](monkeypatch)
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    with pytest.raises(Unsupported, match="graph_not_compiled") as raised:
        compiled(*inputs())[0].sum().backward()
    assert isinstance(raised.value.__cause__, Broken)


@pytest.fixture
def forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has compiled the program, and called no backward."""
    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    torchcompile.compile(program)(*inputs())
    torchcompile.reset()


def _gradient(run: Any) -> torch.Tensor:
    """That of the first input, where both results are used, and the program writes to the second input."""
    given = inputs()
    first, second = run(*given)
    (first.sum() + second.sum()).backward()
    assert given[0].grad is not None
    return given[0].grad


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.expected_eager("graph_not_compiled")
def test_behind_a_forward_that_was_found(stage: str, forward_is_found: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that no process has compiled: nothing is traced or lowered to the joint graph for it, and where it is
    not compiled it runs as it was captured, as in the process that traces it."""
    STAGES[stage](monkeypatch)
    compiled = torchcompile.compile(program)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = _gradient(compiled)
    torch.testing.assert_close(found, _gradient(program))
    fails = stage in ("generate", "backward")
    assert sum("graph_not_compiled" in str(w.message) for w in told) == fails
    assert [event.kind.id for event in torchcompile.report().fallbacks] == ["graph_not_compiled"] * fails


@pytest.mark.parametrize("stage", ["generate", "backward"])
@pytest.mark.parametrize(
    ("settings", "error"), [({"options": {"strict": True}}, Broken), ({"fullgraph": True}, Unsupported)]
)
def test_behind_a_forward_that_was_found_it_raises_where_asked(
    stage: str, settings: Any, error: type[Exception], forward_is_found: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    STAGES[stage](monkeypatch)
    with pytest.raises(error):
        _gradient(torchcompile.compile(program, **settings))


def test_errors_of_a_back_end_of_the_callers_own_are_for_the_caller() -> None:
    with pytest.raises(Broken, match="at fault"):
        torchcompile.compile(program, backend=fails)(*inputs())
    assert not torchcompile.report().fallbacks


def _calls(x: torch.Tensor, operator: str, **options: Any) -> list[str]:
    """The lines of compiled programs that call an operator."""
    texts: list[str] = []
    compile_graph = torchinductor.compile_graph

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = compile_graph(*args, **kwargs)
        texts.append(str(made.program))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchinductor, "compile_graph", noted)
        torchcompile.compile(lambda v: torch.nn.functional.gelu(v) * 2, options=options)(x).sum().backward()
    return [line for text in texts for line in text.splitlines() if operator in line]


@pytest.mark.parametrize(
    "named",
    [
        [torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default],
        (torch.ops.aten.gelu, torch.ops.aten.gelu_backward),
        ["aten::gelu", "aten.gelu_backward.default"],
    ],
)
def test_preserved_operators_are_called(named: Any) -> None:
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert not _calls(x, "gelu")
    torchcompile.reset()
    plain = x.grad.clone()
    x.grad = None
    assert len(_calls(x, "gelu", preserve=named)) == 2
    torch.testing.assert_close(x.grad, plain)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("aten::gelu", "a list of operators"),
        (["aten::no_such_operator"], "takes operators"),
        ([torch.nn.functional.gelu], "takes operators"),
        ([torch.ops.aten.relu_.default], "writes to an argument"),
        ([torch.ops.aten.linear.default], "a program of other operators"),
    ],
)
def test_what_cannot_be_preserved_is_refused(named: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        torchcompile.compile(torch.sin, options={"preserve": named})
