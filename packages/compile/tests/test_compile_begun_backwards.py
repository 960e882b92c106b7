"""A backward is begun while other processes build the forward's kernels: what is likely, and what comes otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import torchcompile
from torchinductor import BuildFailed, CppBackend, InductorOptions, KernelSource, codegen_for, register_codegen
from torchinductor.codegen.base import Building, Built

pytestmark = pytest.mark.warm


class Apart(CppBackend):
    """Builds as a back end does that leaves the work to other processes, and notes the order of things."""

    builds_apart = True

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refused = 0  # the number of the program whose kernels are not built

    def begin(self, sources: Sequence[KernelSource], options: InductorOptions) -> Building:
        number = 1 + sum(text.startswith("begin") for text in self.done)
        self.done.append(f"begin {number}")

        def finish() -> Built:
            self.done.append(f"finish {number}")
            if number == self.refused:
                raise BuildFailed("the compiler is not in the mood")
            return self.build(sources, options)

        return Building(finish, apart=True)


@pytest.fixture
def apart() -> Iterator[Apart]:
    torchcompile.reset()
    own, mine = codegen_for("cpu"), Apart()
    register_codegen("cpu", mine)
    yield mine
    register_codegen("cpu", own)
    torchcompile.reset()


def step(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
    leaves = [a.detach().clone().requires_grad_() for a in args]
    result = function(*leaves)
    result.sum().backward()
    return [result.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


def as_eager(function: Callable[..., torch.Tensor], compiled: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    for mine, theirs in zip(step(compiled, *args), step(function, *args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp() * x


def test_the_backward_is_begun_before_the_forward_is_waited_for(apart: Apart) -> None:
    compiled = torchcompile.compile(wave, fullgraph=True)
    as_eager(wave, compiled, numbers(6, 5))
    assert apart.done == ["begin 1", "begin 2", "finish 1", "finish 2"]
    as_eager(wave, compiled, numbers(6, 5))
    assert len(apart.done) == 4


def test_nothing_is_begun_where_there_is_no_backward(apart: Apart) -> None:
    with torch.no_grad():
        torchcompile.compile(wave, fullgraph=True)(numbers(6, 5).requires_grad_())
    assert apart.done == ["begin 1", "finish 1"]


def with_scores(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = x.sin() * x
    return scores, (scores.cos() ** 2).mean()


@pytest.mark.parametrize(("wanted", "begun"), [("loss", 2), ("scores", 3), ("both", 3)])
def test_a_loss_is_where_a_backward_is_expected_to_start(apart: Apart, wanted: str, begun: int) -> None:
    compiled = torchcompile.compile(with_scores, fullgraph=True)

    def chosen(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            scores, loss = function(x)
            return {"loss": loss, "scores": scores, "both": scores * loss}[wanted]

        return run

    as_eager(chosen(with_scores), chosen(compiled), numbers(4, 3))
    assert sum(text.startswith("begin") for text in apart.done) == begun
    as_eager(chosen(with_scores), chosen(compiled), numbers(4, 3))


def test_sizes_that_vary_are_asked_when_the_backward_is_needed(apart: Apart) -> None:
    compiled = torchcompile.compile(wave, fullgraph=True, dynamic=True)
    as_eager(wave, compiled, numbers(6, 5))
    assert apart.done[:2] == ["begin 1", "finish 1"]
    as_eager(wave, compiled, numbers(7, 3))


@pytest.mark.parametrize("refused", [1, 2])
def test_kernels_that_are_not_built_are_told_where_they_are_needed(apart: Apart, refused: int) -> None:
    apart.refused = refused
    compiled = torchcompile.compile(wave, options={"cache": None})
    with pytest.warns(UserWarning, match="not in the mood"):
        as_eager(wave, compiled, numbers(6, 5))
    assert len(torchcompile.report().fallbacks) == 1


def test_a_backward_that_cannot_be_begun_is_compiled_where_it_is_needed(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = apart.generate, []

    def once(*args: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise KeyError("as if a rule were wrong")
        return generate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(apart, "generate", once)
    as_eager(wave, torchcompile.compile(wave, fullgraph=True), numbers(6, 5))
    assert apart.done == ["begin 1", "finish 1", "begin 2", "finish 2"]
    assert not torchcompile.report().fallbacks


def test_a_forward_that_nobody_follows_leaves_no_trace(apart: Apart) -> None:
    compiled = torchcompile.compile(wave, fullgraph=True)
    torch.testing.assert_close(compiled(numbers(6, 5).requires_grad_()).shape, torch.Size([6, 5]))
    assert apart.done == ["begin 1", "begin 2", "finish 1"]
