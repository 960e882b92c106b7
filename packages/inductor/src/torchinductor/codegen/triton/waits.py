"""Where the threads of a program wait for each other before they store over an operand.

An element of a tile is loaded and stored by the same iteration, but not always by the same thread: a tile of fewer
elements than threads is loaded several times over, the compiler may lay out a load and a store differently, and another
stage's loads differently again. No wait is needed where one thread loads the element and what is stored comes of that
load, so that nothing is stored before it is there.
"""

from __future__ import annotations

from typing import NamedTuple

from torchinductor.ir import Body, Op

from .plan import Plan


class Waits(NamedTuple):
    stages: frozenset[int]  # stages before which the threads wait
    stores: frozenset[str]  # buffers before each store to which they wait


def waits_of(plan: Plan) -> Waits:
    """The waits that a kernel's `in_place` pairs ask for."""
    stages: set[int] = set()
    stores: set[str] = set()
    for written, read in plan.kernel.in_place:
        for number, stage in enumerate(plan.kernel.stages):
            store = next((op for op in stage.body.ops if op.name == "store" and op.attr[0] == written), None)
            if store is None:
                continue
            loads = {i for i, op in enumerate(stage.body.ops) if op.name == "load" and op.attr[0] == read}
            if loads and not (loads <= _sources(stage.body, store) and _one_thread_each(plan, store)):
                stores.add(written)
            elif any(read in earlier.body.reads for earlier in plan.kernel.stages[:number]):
                stages.add(number)
    return Waits(frozenset(stages), frozenset(stores))


def _sources(body: Body, op: Op) -> set[int]:
    """The values that an operation's operands are computed from."""
    found: set[int] = set()
    waiting = list(op.args)
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += body.ops[value].args
    return found


def _one_thread_each(plan: Plan, store: Op) -> bool:
    """Whether the store's tile is the program's whole tile, with an element or more for each thread."""
    moves = store.attr[1].symbols()
    dims = ((plan.x, plan.x_block), (plan.y, plan.y_block), (plan.r, plan.r_block))
    walked = all(block == 1 or any(a.name in moves for a in axes) for axes, block in dims)
    return walked and plan.x_block * plan.y_block * plan.r_block >= 32 * plan.warps
