"""Which values of a kernel may be a few units in the last place of a float32 off: all that they lead to is rounded to
16 bits."""

from __future__ import annotations

import torch

from primtorch.frozen import record
from torchinductor.ir import (
    REDUCED_PRECISION,
    Apply,
    Carried,
    Kernel,
    Load,
    Op,
    Part,
    Reduce,
    ReduceColumn,
    Require,
    Scan,
    Store,
    ToDtype,
)

Coarse = tuple[tuple[bool, ...], ...]
"""Of each operation of each stage's body."""

_ADDING = ("sum", "prod", "amax", "amin", "moments", "sum_exp")


def coarse_kernel(kernel: Kernel) -> bool:
    """Whether all that a kernel writes is rounded to 16 bits, or is no float."""
    kinds = {kernel.buffers[b].dtype for b in kernel.writes}
    return bool(kinds & REDUCED_PRECISION) and not any(k.is_floating_point for k in kinds if k not in REDUCED_PRECISION)


def coarse_values(kernel: Kernel) -> Coarse:
    """The operations whose value may be coarse. Equal values of several stages are computed once, and so alike."""
    if coarse_kernel(kernel):
        return tuple((True,) * len(stage.body.ops) for stage in kernel.stages)
    numbered = _numbered(kernel)
    precise: set[int | str] = set()
    while True:
        before = len(precise)
        for own, op in numbered.made.items():
            precise.update(_demanded(op, own, precise, numbered))
        if len(precise) == before:
            return tuple(tuple(own not in precise for own in numbers) for numbers in numbered.stages)


@record
class _Numbered:
    """A kernel's operations by numbers, which are equal where values are, whatever their stages.

    Attributes:
        stages: the numbers of each stage's operations.
        made: the operation of each number, its operands being numbers, too.
        peaks: the key of the maximum of a value, by that value's number.
        rounded: buffers of 16-bit floats that it writes.
    """

    stages: tuple[tuple[int, ...], ...]
    made: dict[int, Op]
    peaks: dict[int, str]
    rounded: frozenset[str]


def _numbered(kernel: Kernel) -> _Numbered:
    known: dict[Op, int] = {}
    stages = []
    for stage in kernel.stages:
        own: list[int] = []
        for op in stage.body.ops:
            own.append(known.setdefault(op.renumbered(own.__getitem__), len(known)))
        stages.append(tuple(own))
    peaks = {op.value: op.key for op in known if isinstance(op, Reduce) and op.kind == "amax"}
    # `kernel.buffers` has the whole graph's: to go through all for each kernel takes the square of a graph's depth.
    stored = {name for stage in kernel.stages for name in stage.body.writes} & kernel.buffers.keys()
    rounded = frozenset(name for name in stored if kernel.buffers[name].dtype in REDUCED_PRECISION)
    return _Numbered(tuple(stages), {number: op for op, number in known.items()}, peaks, rounded)


def _demanded(op: Op, own: int, precise: set[int | str], numbered: _Numbered) -> tuple[int | str, ...]:
    """The values, and keys of reductions, that an operation needs as they are, given those that are known to be."""
    match op:
        case Load():
            return op.operands
        case Store():
            rounded = op.buffer in numbered.rounded and op.mode == "set"
            return op.operands[1:] if rounded else op.operands
        case ToDtype():
            return () if op.dtype in REDUCED_PRECISION else _handed_on(op, own in precise)
        case Apply():
            return _handed_on(op, own in precise)
        case Carried():
            return (op.key,) if own in precise else ()
        case Reduce() | ReduceColumn() if op.kind in _ADDING:
            return op.operands if op.key in precise and not _below_peak(op, numbered) else ()
        case Scan() | Part() | Require():
            return op.operands if own in precise else op.operands[1:]
        case _:
            return op.operands


def _handed_on(op: Op, precise: bool) -> tuple[int, ...]:
    """A number that is no float may jump where a float moves by little."""
    return op.operands if precise or not op.dtype.is_floating_point else ()


def _below_peak(op: Reduce | ReduceColumn, numbered: _Numbered) -> bool:
    """Whether it sums up exp(v - the maximum of v): exponents are at most 0 and the sum at least 1, so that an error
    that grows with the exponent is lost in the sum's own rounding."""
    summand = numbered.made[op.value]
    if op.kind != "sum" or not isinstance(summand, Apply) or summand.op != "exp":
        return False
    gap = numbered.made[summand.args[0]]
    if not isinstance(gap, Apply) or gap.op != "sub" or gap.dtype is not torch.float32:
        return False
    peak = numbered.made[gap.args[1]]
    return isinstance(peak, Carried) and numbered.peaks.get(gap.args[0]) == peak.key
