"""Rows of several lengths, one after the other, and the same rows side by side with padding."""

from __future__ import annotations

from collections.abc import Sequence

from primtorch.arguments import Number, TensorLike
from primtorch.families import Family
from primtorch.operators.build import Fresh, contiguous, refuse_fresh
from primtorch.samples import call, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("ragged")


@OP.formula("_jagged_to_padded_dense_forward")
def _padded(
    values: TensorLike, offsets: Sequence[TensorLike], max_lengths: Sequence[Size], padding_value: Number = 0.0
) -> TensorSpec:
    return contiguous(values, (offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:]))


@OP.formula("_padded_dense_to_jagged_forward")
def _packed(
    dense: TensorLike, offsets: Sequence[TensorLike], total_L: Size | None = None, *, fresh: Fresh = refuse_fresh
) -> TensorSpec:
    total = fresh(None) if total_L is None else total_L
    return contiguous(dense, (total, *dense.shape[1 + len(offsets) :]))


# --- samples ---------------------------------------------------------------------------------------
OP.samples(
    "_jagged_to_padded_dense_forward",
    call(reals(5, 3), [listed(0, 2, 5)], [3]),
    call(reals(5, 3, 2), [listed(0, 2, 2, 5)], [2], 1.5),
)
OP.samples(
    "_padded_dense_to_jagged_forward",
    call(reals(2, 3, 4), [listed(0, 2, 5)], 5),
    call(reals(3, 3), [listed(0, 2, 2, 5)]),
)
