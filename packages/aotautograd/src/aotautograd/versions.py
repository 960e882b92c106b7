"""What a change in place does to a tensor beside its elements: the count of changes, and sizes and strides."""

from __future__ import annotations

from collections.abc import Callable

import torch


def version_of(t: torch.Tensor) -> int:
    """`_version`, or 0 for an inference tensor, which counts no writes."""
    return 0 if t.is_inference() else t._version


def set_version(t: torch.Tensor, version: int) -> None:
    """What a write has added to the counter of the tensor, and of those that share it, is what eager would have."""
    if not t.is_inference() and t._version != version:
        torch._C._autograd._unsafe_set_version_counter((t,), (version,))


def restride(target: torch.Tensor, view: torch.Tensor, *, seen: bool) -> None:
    """Gives a tensor the sizes and strides of a view of its memory; with `seen` autograd sees it.

    The change has been counted. A view remembers the version in which it got its history, and takes it again from its
    base behind a later one: that must not be a version that is still to come.
    """
    version = version_of(target)
    set_version(target, max(version - 1, 0))
    with torch.set_grad_enabled(seen):
        target.as_strided_(view.shape, view.stride(), view.storage_offset())
    set_version(target, version)


def before_last_change(base: torch.Tensor, view_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view of a tensor as one that was taken before the tensor's last change: autograd sees that it is stale."""
    version = version_of(base)
    set_version(base, max(version - 1, 0))
    view = view_of(base)
    set_version(base, max(version, 1))
    return view
