"""Does a backend compute the set? Each prim's samples run on it and on the references."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primtorch.prims import PRIMS
from primtorch.testing.samples import Case, cases

_DRAWN = frozenset({name for name, prim in PRIMS.items() if "effect" in prim.tags} | {"empty_strided"})
"""Values are drawn, or are nobody's business."""
_FIRST = frozenset({"ctc_loss"})
"""Results after the first have parts that nobody reads, with whatever memory held."""
_TOLERANCE = {
    torch.float32: 2e-5,
    torch.float64: 1e-9,
    torch.complex64: 2e-5,
    torch.complex128: 1e-9,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


@dataclass(frozen=True)
class Report:
    """What a backend has. `wrong` pairs a case's name with what differs."""

    passed: int
    missing: tuple[str, ...]
    wrong: tuple[tuple[str, str], ...]

    @property
    def complete(self) -> bool:
        """Whether no prim is missing and none is wrong."""
        return not self.missing and not self.wrong

    def __str__(self) -> str:
        lines = [
            f"{self.passed} samples right, {len(self.wrong)} wrong; {len(self.missing)} of {len(PRIMS)} prims missing"
        ]
        if self.missing:
            lines.append("missing: " + ", ".join(self.missing))
        return "\n".join([*lines, *(f"wrong: {name}: {why}" for name, why in self.wrong)])


def _mapped(function: Callable[[torch.Tensor], object], value: object) -> object:
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)(_mapped(function, v) for v in value) if isinstance(value, (tuple, list)) else value


def _same(value: object) -> Any:
    return value


def check_case(
    backend: object,
    case: Case,
    *,
    to_backend: Callable[[torch.Tensor], object] = _same,
    from_backend: Callable[[Any], torch.Tensor] = _same,
) -> None:
    """Run one sample on the backend.

    Raises:
        AssertionError: dtype, shape or values differ from the reference's.
    """
    kwargs = case.kwargs
    want = case.prim(*case.args, **kwargs)
    got = getattr(backend, case.prim.name)(
        *_mapped(to_backend, case.args), **{k: _mapped(to_backend, v) for k, v in kwargs.items()}
    )
    wanted, have = ([v] if not isinstance(v, (tuple, list)) else list(v) for v in (want, got))
    assert len(wanted) == len(have), f"{len(have)} results, not {len(wanted)}"
    if case.prim.name in _FIRST:
        wanted, have = wanted[:1], have[:1]
    for expected, result in zip(wanted, have, strict=True):
        if not isinstance(expected, torch.Tensor):
            assert expected == result, f"{result}, not {expected}"
            continue
        tensor = from_backend(result)
        assert tensor.dtype == expected.dtype, f"dtype {tensor.dtype}, not {expected.dtype}"
        assert tensor.shape == expected.shape, f"shape {tuple(tensor.shape)}, not {tuple(expected.shape)}"
        if case.prim.name not in _DRAWN:
            tolerance = _TOLERANCE.get(expected.dtype, 0.0)
            torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _chosen(dtypes: Collection[torch.dtype] | None, only: Sequence[str] | None) -> list[Case]:
    names = list(PRIMS) if only is None else list(only)
    return [case for name in names for case in cases(name) if dtypes is None or _within(case, dtypes)]


def _within(case: Case, dtypes: Collection[torch.dtype]) -> bool:
    used: list[torch.dtype] = [a for a in case.args if isinstance(a, torch.dtype)]
    _mapped(lambda t: used.append(t.dtype), (case.args, tuple(case.kwargs.values())))
    return all(d in dtypes for d in used)


def conformance(
    backend: object,
    *,
    to_backend: Callable[[torch.Tensor], object] = _same,
    from_backend: Callable[[Any], torch.Tensor] = _same,
    dtypes: Collection[torch.dtype] | None = None,
    only: Sequence[str] | None = None,
) -> Report:
    """Run every prim's samples on a backend: an object with a callable attribute for each prim it has.

    Args:
        to_backend: makes the backend's tensor of a torch tensor; `from_backend` the reverse.
        dtypes: those the backend has; samples of others are left out.
        only: names of prims to run; all by default.
    """
    names = list(PRIMS) if only is None else list(only)
    missing = tuple(name for name in names if getattr(backend, name, None) is None)
    passed, wrong = 0, []
    for case in _chosen(dtypes, [name for name in names if name not in missing]):
        try:
            check_case(backend, case, to_backend=to_backend, from_backend=from_backend)
        except Exception as error:  # a kernel may fail in any way; each is reported
            wrong.append(
                (str(case), f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
            )
        else:
            passed += 1
    return Report(passed, missing, tuple(wrong))


def parameters(
    dtypes: Collection[torch.dtype] | None = None, only: Sequence[str] | None = None
) -> list[tuple[str, Case]]:
    """(id, case) pairs for `pytest.mark.parametrize`; run each with `check_case`."""
    return [(str(case), case) for case in _chosen(dtypes, only)]
