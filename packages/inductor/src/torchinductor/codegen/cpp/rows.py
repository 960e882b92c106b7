"""Values that one iteration of the frame makes for itself: they stay in caches, in an array on the stack.

A buffer that only its kernel reads, each element at the place where the same iteration stored it, is written for
nothing but a later stage of the iteration. The next iteration writes over it: no memory is made, filled, read for it.
"""

from __future__ import annotations

from primtorch.symbolic.expr import IntExpr
from torchinductor.codegen.cpp.plan import Layout
from torchinductor.indexing import ONE, ZERO, number, product, variable
from torchinductor.ir import Kernel, Store

_MOST_BYTES = 256 * 1024  # of all rows of a kernel: a thread's stack and its caches have room for more


def rows_of(kernel: Kernel, layout: Layout) -> tuple[str, ...]:
    """The buffers of a kernel that can be arrays on the stack, in the order of their stores, as there is room."""
    elements = row_elements(kernel, layout)
    if elements is None or not kernel.inner:
        return ()
    room, found = _MOST_BYTES, []
    for name in (name for name in kernel.writes if name in kernel.local):
        size = elements * kernel.buffers[name].dtype.itemsize
        if size <= room and _by_rows(kernel, name):
            found.append(name)
            room -= size
    return tuple(found)


def row_elements(kernel: Kernel, layout: Layout) -> int | None:
    """How many elements one iteration of the frame has at most; None where that is not known."""
    inner = product(axis.size for axis in kernel.inner).as_int()
    return None if inner is None else inner * max(layout.lane_count, 1)


def row_place(kernel: Kernel, layout: Layout) -> IntExpr:
    """The place of the current element among those of one iteration of the frame, in the order of the loops."""
    place, step = ZERO, ONE
    for loop in reversed(layout.inner):
        if loop.axis is None:
            continue
        if loop.axis == layout.lanes:
            place, step = place + (variable(loop.var) - variable(loop.start)) * step, step * number(layout.lane_count)
        else:
            place, step = place + variable(loop.var) * step, step * kernel.ranges[loop.axis]
    return place


def _by_rows(kernel: Kernel, name: str) -> bool:
    """Whether all that is done with a buffer is to store one value a point of the inner axes, and to load it there."""
    inner = {axis.name for axis in kernel.inner}
    places = set()
    for stage in kernel.stages:
        for op in stage.body.accesses:
            if op.buffer != name:
                continue
            if stage.kind != "inner" or op.mask is not None or (isinstance(op, Store) and op.mode != "set"):
                return False
            places.add(op.index)
    (place, *others) = places
    return not others and inner <= place.symbols()
