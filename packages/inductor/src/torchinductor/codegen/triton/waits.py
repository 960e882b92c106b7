"""Where the threads of a program wait for each other before they store over an operand.

An element of a tile is loaded and stored by the same iteration, but not always by the same thread: a tile of fewer
elements than threads is loaded several times over, the compiler may lay out a load and a store differently, and another
stage's loads differently again. No wait is needed where one thread loads the element and what is stored comes of that
load, so that nothing is stored before it is there.
"""

from __future__ import annotations

from typing import NamedTuple

from torchinductor.ir import Kernel, Load, Store, slice_of

from .plan import Layout


class Waits(NamedTuple):
    """Where a kernel's threads wait."""

    stages: frozenset[int]  # stages before which the threads wait
    stores: frozenset[str]  # buffers before each store to which they wait


def waits_of(kernel: Kernel) -> Waits:
    """The waits that a kernel's `in_place` pairs ask for."""
    stages: set[int] = set()
    stores: set[str] = set()
    for written, read in kernel.in_place:
        for number, stage in enumerate(kernel.stages):
            store = next((op for op in stage.body.of(Store) if op.buffer == written), None)
            if store is None:
                continue
            ops = stage.body.ops
            loads = {i for i, op in enumerate(ops) if isinstance(op, Load) and op.buffer == read}
            alone = loads <= slice_of(ops, store.operands) and _one_thread_each(kernel.laid_out(Layout), store)
            if loads and not alone:
                stores.add(written)
            elif any(read in earlier.body.reads for earlier in kernel.stages[:number]):
                stages.add(number)
    return Waits(frozenset(stages), frozenset(stores))


def _one_thread_each(layout: Layout, store: Store) -> bool:
    """Whether the store's tile is the program's whole tile, with an element or more for each thread."""
    moves = store.index.symbols()
    dims = ((layout.x, layout.x_block), (layout.y, layout.y_block), (layout.r, layout.r_block))
    walked = all(block == 1 or any(a.name in moves for a in axes) for axes, block in dims)
    return walked and layout.x_block * layout.y_block * layout.r_block >= 32 * layout.warps
