"""Operators, modes and a tensor subclass of a user's own, for random soundness programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("soundness::tripled", mutates_args=())
def tripled(t: torch.Tensor) -> torch.Tensor:
    return t * 3


@tripled.register_fake
def _(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t)


tripled.register_autograd(lambda ctx, grad: grad * 3)


@torch.library.custom_op("soundness::halves", mutates_args=())
def halves(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return t / 2, t / 2 + 1


@halves.register_fake
def _(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return t / 2, t / 2


@torch.library.custom_op("soundness::bumped_", mutates_args=("t",))
def bumped_(t: torch.Tensor) -> None:
    t.add_(1)


NOTES = [0]  # how often `noted` has run


@torch.library.custom_op("soundness::noted", mutates_args=())
def _noted(t: torch.Tensor) -> None:
    NOTES[0] += 1


def noted(t: torch.Tensor) -> None:
    """An operator without a result, run for its effect: nothing of it may be left out or run again."""
    _noted(t.detach())


@torch.library.custom_op("soundness::written_out", mutates_args=("out",))
def _written_out(t: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(t * 2)


def written_out(t: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(t)
    _written_out(t.detach(), made)
    return made + out.sum()


class Special(torch.Tensor):
    """A subclass that changes what functions mean."""

    factor = 3

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.Tensor.mul, torch.Tensor.add, torch.add):
            with torch._C.DisableTorchFunctionSubclass():
                return (result * cls.factor).as_subclass(cls)
        return result


class Swapped(TorchFunctionMode):
    """Calls of one function are another's."""

    into: Any = torch.cos

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (type(self).into if func is torch.sin else func)(*args, **(kwargs or {}))


class Logged(TorchFunctionMode):
    """Counts the additions that it sees."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.add, torch.Tensor.mul):
            self.log.append(len(self.log))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def without_grad(t: torch.Tensor) -> torch.Tensor:
    """A decorated function, with a break."""
    made = t * 2
    print(end="")
    return made + torch.is_grad_enabled()


def under_no_grad(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """A generator that is suspended within a context manager."""
    with torch.no_grad():
        yield t * 2
        yield t * 3


def attend(t: torch.Tensor) -> torch.Tensor:
    q = t.reshape(1, 1, *t.shape)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q).sum()


def anomaly() -> Any:
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)


def attention() -> Any:
    return sdpa_kernel(SDPBackend.MATH)


NAMES: dict[str, Any] = {
    name: globals()[name]
    for name in (
        "tripled", "halves", "bumped_", "noted", "written_out", "Logged", "without_grad", "under_no_grad", "attend",
        "sdpa_kernel", "SDPBackend",
    )
}  # fmt: skip
