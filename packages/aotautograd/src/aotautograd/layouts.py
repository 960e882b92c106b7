"""Written tensors keep their layout.

A functional operator lays out its result as it likes, a write leaves the strides of what is written as they are. Where
the order of dimensions differs, the new value is copied into that of the old one; where there are gaps between
elements, into memory with such gaps. An input's gaps are not made in a graph, because its new value is written back
into it: the traced tensor says that it has them, so that the program finds out what it would in eager (that it is not
contiguous, that a view is impossible), and its value is dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import torch

from aotautograd.inputs import dense_spec
from primtorch.functionalize import unwrap
from primtorch.layout import written_alike
from primtorch.spec import Size
from primtorch.symbolic import hint_of

aten = torch.ops.aten

# (value, strides) -> a traced tensor for the same value that says that it has these strides
WithStrides = Callable[[torch.Tensor, Sequence[Size]], torch.Tensor]


class KeptLayouts:
    """The layouts of a program's inputs, and of what a call of it writes. Row-major ones are nobody's concern: an
    operator gives that to a result whose first operand has it."""

    def __init__(self, inputs: Iterable[object], with_strides: WithStrides) -> None:
        self.inputs = [t for t in inputs if _of_interest(t)]
        self.with_strides = with_strides

    def before(self, written: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors whose memory the call may write, each with its present value."""
        found = {id(t): t for t in self.inputs}
        for t in written:
            both = (t, t._base) if t._is_view() and t._base is not None else (t,)
            if any(map(_of_interest, both)):
                found.update((id(one), one) for one in both if torch._is_functional_tensor(one))
        # A view's new value comes from its base, so that is put in order first.
        ordered = sorted(found.values(), key=torch.Tensor._is_view)
        return [(outer, unwrap(outer)) for outer in ordered]

    def after(self, noted: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gives the new values the layout of the old ones."""
        for outer, old in noted:
            new = unwrap(outer)
            if new is old or not written_alike(old.shape, new.shape):
                continue
            if not written_alike(old.stride(), new.stride()):
                torch._functionalize_replace(outer, self._laid_out(outer, new, old))
                torch._functionalize_commit_update(outer)
            elif not written_alike(outer.stride(), new.stride()):
                torch._functionalize_replace(outer, new)

    def _laid_out(self, outer: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if not (_without_gaps(old) or any(t is outer or t is outer._base for t in self.inputs)):
            return _with_gaps(new, old)
        dense = dense_spec(old).strides
        if not written_alike(dense, new.stride()):
            with torch.no_grad():
                place = unwrap(aten.empty_strided.default(old.shape, dense, dtype=old.dtype, device=old.device))
                new = unwrap(aten.copy.default(place, new))
        return new if written_alike(old.stride(), dense) else self.with_strides(new, old.stride())


def _without_gaps(t: torch.Tensor) -> bool:
    return written_alike(t.stride(), dense_spec(t).strides)


def _with_gaps(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The new value in memory of its own, with the gaps of the old one's."""
    shape, strides = old.shape, old.stride()
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    with torch.no_grad():
        memory = unwrap(aten.empty.memory_format([extent], dtype=old.dtype, device=old.device))
        filled = unwrap(aten.as_strided_scatter.default(memory, new, shape, strides, 0))
        return unwrap(aten.as_strided.default(filled, shape, strides, 0))


def _of_interest(t: object) -> TypeGuard[torch.Tensor]:
    return isinstance(t, torch.Tensor) and torch._is_functional_tensor(t) and not _row_major(t)


def _row_major(t: torch.Tensor) -> bool:
    """Decided without a guard. The stride of a dimension with one element is a caller's to see, too."""
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        elements = hint_of(size, 2)
        if hint_of(stride, expected) != expected:
            return False
        expected *= max(elements, 1)
    return True
