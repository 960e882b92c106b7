"""What a graph costs without running it: kernels to launch, calls, and the bytes that they move.

A device that computes much faster than it loads takes as long as its bytes do, so that a fusion that is lost shows here
on a machine that does not have the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import product
from torchinductor.ir import Bundle, Kernel, Template, by_form, loops_of
from torchinductor.lowering.context import ExternCall, Operation

NO_SIZES: Mapping[str, int] = MappingProxyType({})


@record
class Traffic:
    """Launches and bytes of planned operations.

    Attributes:
        kernels: generated kernels.
        moved: bytes that they read and write, each place once a kernel.
        calls: ATen calls.
    """

    kernels: int = 0
    moved: int = 0
    calls: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.kernels + other.kernels, self.moved + other.moved, self.calls + other.calls)


def traffic_of(operations: Iterable[Operation]) -> Traffic:
    """The traffic of operations of known sizes (a size that is not known counts as one)."""
    kernels = moved = calls = 0
    for operation in operations:
        if isinstance(operation, Bundle):
            kernels += 1
            moved += sum(sum(bytes_of(part).values()) for part in operation.parts)
        elif isinstance(operation, (Kernel, Template)):
            kernels += 1
            moved += sum(bytes_of(loops_of(operation)).values())
        else:
            calls += isinstance(operation, ExternCall)
    return Traffic(kernels, moved, calls)


def bytes_of(kernel: Kernel, sizes: Mapping[str, int] = NO_SIZES) -> dict[str, int]:
    """The bytes of each buffer that a kernel touches, by the buffer's name: what its indices reach, at most all.

    Sizes that are symbols are those of `sizes`; others count as one.
    """
    counts = _counted(kernel, sizes) if sizes else _counted_alone(kernel)
    return dict(zip(kernel.arguments, counts, strict=True))


def _counted(kernel: Kernel, sizes: Mapping[str, int] = NO_SIZES) -> tuple[int, ...]:
    touched: dict[str, dict[IntExpr, int]] = {name: {} for name in kernel.arguments}
    for stage in kernel.stages:
        for (place, index), over in stage.body.places.items():
            if place not in kernel.rows:
                points = value_of(product(a.size for a in kernel.axes if a.name in over), sizes) or 1
                touched[place][index] = points
    result: list[int] = []
    for name, places in touched.items():
        buffer = kernel.buffers[name]
        whole = value_of(buffer.span, sizes)
        reached = sum(places.values())
        result.append((reached if whole is None else min(reached, whole)) * buffer.dtype.itemsize)
    return tuple(result)


_counted_alone = by_form(_counted)


def value_of(size: int | IntExpr, sizes: Mapping[str, int]) -> int | None:
    """A size's value; None where it is not known."""
    known = size if isinstance(size, int) else size.as_int()
    if known is None and isinstance(size, IntExpr) and size.symbols() <= sizes.keys():
        known = size.evaluate(sizes)
    return known
