"""The C++ functionalization of PyTorch, as a region and four verbs.

Inside the region a program may write in place and take views; what reaches a dispatch mode below is functional.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def functional_region() -> Iterator[None]:
    """Views are replayed as views (`reapply_views`), so the graph keeps `view`, not `view_copy`."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def is_wrapped(t: object) -> bool:
    return isinstance(t, torch.Tensor) and torch._is_functional_tensor(t)


def wrap(inner: torch.Tensor) -> torch.Tensor:
    """A functional tensor around `inner`, with no autograd history."""
    outer: torch.Tensor = torch._to_functional_tensor(inner)
    return outer


def unwrap(outer: torch.Tensor) -> torch.Tensor:
    """The present value, after pending writes through aliases."""
    if not torch._is_functional_tensor(outer):
        return outer
    torch._sync(outer)
    inner: torch.Tensor = torch._from_functional_tensor(outer)
    return inner


def storage_was_replaced(outer: torch.Tensor) -> bool:
    """True after `set_` or a `.data` assignment."""
    return bool(torch._functionalize_was_storage_changed(outer))


class NonLeaf(torch.autograd.Function):
    """Gives a non-leaf input its own history without recording an operator, so that it may be written in grad mode."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return wrap(unwrap(leaf))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
