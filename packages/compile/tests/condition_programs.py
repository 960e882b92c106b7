"""Programs that raise where a condition on data is not met. In a file of their own: pytest rewrites `assert` in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchdynamo

Program = Callable[[torch.Tensor], Any]
LOG: list[str] = []


def asserted(x: torch.Tensor) -> Any:
    assert (x < 1e3).all()
    return x.sin()


def asserted_with_text(x: torch.Tensor) -> Any:
    y = x.exp()
    assert not torch.isinf(y).any(), f"values up to {x.max().item()} of {tuple(x.shape)}"
    return y * 2


def raised(x: torch.Tensor) -> Any:
    if x.max() > 1e3:
        raise ValueError("too large", x.shape)
    return x * 2


def raised_within(x: torch.Tensor) -> Any:
    def checked(y: torch.Tensor) -> torch.Tensor:
        if not (y < 1e3).all():
            text = "too large"
            raise OverflowError(text)
        return y

    return checked(x.cos() * 0 + x).sum()


def several(x: torch.Tensor) -> Any:
    assert x.sum() < 1e9 and x.max() < 1e3
    y = x.tanh()
    assert y.isfinite().all()
    return y


def a_number(x: torch.Tensor) -> Any:
    count = (x < 1e3).sum()
    assert count
    assert x.max() - 1e3 < 0
    return x / count


def handled(x: torch.Tensor) -> Any:
    try:
        assert (x < 1e3).all()
    except AssertionError:
        return x / 1e6
    return x * 3


def cleaned_up(x: torch.Tensor) -> Any:
    LOG.append("entered")
    try:
        assert (x < 1e3).all()
        return x + len(LOG)
    finally:
        LOG.append("left")


def dropped(x: torch.Tensor) -> Any:
    y = F.dropout(x, 0.5)
    assert (x < 1e3).all()
    return y + torch.rand(3, dtype=x.dtype)


def before_a_break(x: torch.Tensor) -> Any:
    assert (x < 1e3).all()
    y = x * 2
    torchdynamo.graph_break()
    assert y.sum() < 1e9
    return y + 1


def distribution(x: torch.Tensor) -> Any:
    scale = 1e3 - x  # has to be positive
    normal = torch.distributions.Normal(x, scale, validate_args=True)
    return normal.log_prob(x + 1)


class Contrary(torch.Tensor):
    """A tensor whose truth is not its value's."""

    def __bool__(self) -> bool:
        return not super().__bool__()


def contrary(x: torch.Tensor) -> Any:
    assert (x > 1e3).all().as_subclass(Contrary)
    return x * 2


def under_checkpoint(x: torch.Tensor) -> Any:
    def part(y: torch.Tensor) -> torch.Tensor:
        assert (y < 1e3).all()
        return y.sin()

    return checkpoint(part, x, use_reentrant=False)


PROGRAMS: tuple[Program, ...] = (
    asserted, asserted_with_text, raised, raised_within, several, a_number, handled, cleaned_up, dropped,
    before_a_break, distribution, under_checkpoint,
)  # fmt: skip


class Written(nn.Module):
    """What has been written when the condition is not met may not be written again."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        assert (x < 1e3).all()
        return x * self.steps


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if g.max() > 1e3:
            raise ValueError("a gradient too large")
        return g * 2
