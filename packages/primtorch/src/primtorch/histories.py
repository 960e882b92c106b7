"""`with_history(value, history)`: the values of one tensor with the history of another.

A graph of operators says by it what a write does that autograd does not see (`with torch.no_grad(): y.mul_(3)`,
`y.data.add_(1)`): y has new values, and its gradient goes where it went before. The result is memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from primtorch.fake.tensor import FakeMode, FakeTensor, register_special
from primtorch.spec import TensorSpec

NAMESPACE = "primtorch_histories"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("with_history(Tensor value, Tensor history) -> Tensor")


def _values(value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _fake(mode: FakeMode, value: torch.Tensor, history: torch.Tensor) -> FakeTensor:
    return mode.from_spec(TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device))


class _WithHistory(torch.autograd.Function):
    """Gradients pass to the history as they are, of any order."""

    told = True  # to whoever records below autograd: the operator's node says what its history is

    @staticmethod
    def forward(ctx: object, value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            found: torch.Tensor = with_history(value, history)
        return found

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, gradient


_library.impl("with_history", _values, "CompositeExplicitAutograd")
_library.impl("with_history", _WithHistory.apply, "Autograd")
with_history: Any = torch.ops.primtorch_histories.with_history.default
register_special(with_history, _fake)


def step_of(tensor: torch.Tensor) -> Any:
    """A tensor's `grad_fn`; None where eager has none to give, as of a view made under no_grad of what is written."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def untold(tensor: torch.Tensor) -> str | None:
    """The name of the autograd function in Python that gave a tensor its history, where no operator's node says it."""
    step = step_of(tensor)
    made_by = getattr(type(step), "_forward_cls", None)
    if made_by is None or not isinstance(step, BackwardCFunction) or getattr(made_by, "told", False):
        return None
    return str(made_by.__name__)
