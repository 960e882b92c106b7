"""Writes through views that leave gaps in their base: functionalization, as back ends use it, loses what lies in them.

A back end turns a write to a view into a new value of the base, put together from the view's. From windows with gaps
(`unfold` with a step above their size), or from an `as_strided` that starts over at another view's memory, it cannot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from primtorch.fake import FakeTensor

__all__ = ["gap_behind", "memory_of", "reads_memory_of"]


def gap_behind(node: fx.Node | None) -> str | None:
    """What in the chain of views that ends at `node` leaves gaps; None if a write to it is no trouble."""
    while node is not None and node.op.startswith("call"):
        below = node.args[0] if node.args else None
        if not isinstance(below, fx.Node) or not _shares_memory(node, below):
            return None
        name = _name(node)
        if name == "unfold" and _has_gaps(node, below):
            return "windows that do not cover their base"
        if name == "as_strided" and not _is_whole(below):
            return "as_strided() of a view"
        node = below
    return None


def reads_memory_of(name: str, node: fx.Node | None, written: list[torch.Tensor]) -> bool:
    """Whether the call reads the memory behind an input with gaps that the graph has written to."""
    if name not in ("as_strided", "as_strided_copy") or node is None or node.op != "placeholder":
        return False
    value = node.meta.get("val")
    return not _is_whole(node) and any(t is value or memory_of(t) is memory_of(value) for t in written)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def memory_of(value: object) -> object:
    """What tensors of one memory have in common; a value that is none stands for itself."""
    return value.memory if isinstance(value, FakeTensor) else value


def _shares_memory(node: fx.Node, below: fx.Node) -> bool:
    mine, theirs = node.meta.get("val"), below.meta.get("val")
    return isinstance(mine, FakeTensor) and isinstance(theirs, FakeTensor) and mine.memory is theirs.memory


def _is_whole(node: fx.Node) -> bool:
    """Whether the value is all of its memory, as it lies there."""
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor):
        return False
    below = node.args[0] if node.op != "placeholder" and node.args else None
    return value.is_contiguous() and not (isinstance(below, fx.Node) and _shares_memory(node, below))


def _has_gaps(node: fx.Node, below: fx.Node) -> bool:
    given: dict[str, Any] = {**dict(zip(("dimension", "size", "step"), node.args[1:], strict=False)), **node.kwargs}
    size, step = given["size"], given["step"]
    length = below.meta["val"].shape[given["dimension"]] if below.meta["val"].dim() else 1
    return bool(step > size) or bool((length - size) % step != 0)
