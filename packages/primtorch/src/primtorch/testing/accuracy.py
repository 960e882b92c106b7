"""What a test may say of two results that were rounded differently: no fixed tolerance holds on every processor.

Either the program runs in float64, where a difference that anyone sees is no rounding's (`double_precision`), or both
results are judged by a third in float64: ours may be no further from it than eager's (`assert_as_accurate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree

FEW = 8  # ulps of the largest value: what the last operation of a program may add where eager's error is none by luck
SUMMED = 1 << 16  # ulps where the judge is no better than eager, so that eager's error is not seen


@contextmanager
def double_precision() -> Iterator[None]:
    """What is made without a dtype is float64, parameters included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_as_accurate(found: object, eager: object, exact: object, what: str = "") -> None:
    """Tensors of `found` are at most twice as far from `exact` as eager's, and a few ulps.

    Args:
        found, eager: nested results of one structure and equal dtypes; what is not floating-point has to be equal.
        exact: the same in float64 (or complex128), as the judge.
        what: to name in the message.

    Distances are the largest over a tensor, ulps those of its largest finite value. Infinities and NaNs have to be
    where eager has them. What is float64 itself has no better judge: what differs there by more than sums of some
    thousand numbers may lose is no rounding's.
    """
    ours, theirs, judges = (pytree.tree_leaves(value) for value in (found, eager, exact))
    for place, (mine, other, judge) in enumerate(zip(ours, theirs, judges, strict=True)):
        where = f"{what} result {place}".strip()
        if not isinstance(other, torch.Tensor):
            assert mine == other, f"{where}: {mine} instead of {other}"
            continue
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape), f"{where}: dtype or shape differs from eager's"
        if other.is_floating_point() or other.is_complex():
            error, allowed = _errors(mine.detach(), other.detach(), judge.detach(), where)
            assert error <= allowed, f"{where}: off by {error:.2e}, where eager's error allows {allowed:.2e}"
        else:
            assert torch.equal(mine, other), f"{where}: {mine} instead of {other}"


def _errors(mine: torch.Tensor, other: torch.Tensor, judge: torch.Tensor, where: str) -> tuple[float, float]:
    """Our largest error and what is allowed."""
    finite = torch.isfinite(other)
    same = torch.equal(torch.isfinite(mine), finite) and torch.equal(
        mine[~finite].nan_to_num(), other[~finite].nan_to_num()
    )
    assert same, f"{where}: infinities or NaNs lie elsewhere than in eager"
    known = finite & torch.isfinite(judge)
    if not bool(known.any()):
        return 0.0, 0.0
    exact = judge[known]
    error, eager_error = (float((t[known].to(exact.dtype) - exact).abs().max()) for t in (mine, other))
    ulp = torch.finfo(other.dtype).eps * float(exact.abs().max())
    ulps = SUMMED if other.dtype == judge.dtype else FEW
    return error, 2 * eager_error + ulps * ulp
