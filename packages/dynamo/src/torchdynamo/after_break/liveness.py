"""Which local slots a function's code may still read: what a break has to carry to the code behind it."""

from __future__ import annotations

import dis
from collections.abc import Sequence

from torchdynamo.interpreter.decode import DecodedCode

# Names of functions that look at all of a frame's variables; and of those that do so only while they are called, and
# there only without arguments.
_LOOK_AT_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "super", "_getframe", "currentframe", "stack"})
_LOOK_WHERE_CALLED = frozenset({"locals", "vars", "dir", "super"})
_CALLED_WITHOUT = ([("CALL", 0)], [("PRECALL", 0), ("CALL", 0)])  # what follows the load of a function, by version


def live_slots(decoded: DecodedCode, index: int, names: tuple[str, ...]) -> frozenset[int]:
    """Slots that some path from instruction number `index` reads before it writes them.

    Cells and free variables are always carried: their contents belong to other functions, too.

    Args:
        names: the global and attribute names of the code; some mean that every slot may be read.
    """
    everything = frozenset(range(len(decoded.local_names)))
    looks = () if _LOOK_AT_ALL.isdisjoint(names) else _looks(decoded)
    if looks is None:
        return everything
    mask = _analyse(decoded, looks)[index]
    return frozenset(slot for slot in everything if mask >> slot & 1)


def _looks(decoded: DecodedCode) -> Sequence[int] | None:
    """The instructions that load and call functions which look at all slots; None where such a function may be called
    anywhere, since it is kept, or gets arguments."""
    found: list[int] = []
    for index, op in enumerate(decoded.opcodes):
        operand = decoded.program[index].operand
        if op not in dis.hasname or _LOOK_AT_ALL.isdisjoint(operand if type(operand) is tuple else (operand,)):
            continue
        following = [
            (dis.opname[decoded.opcodes[at]], decoded.arguments[at])
            for at in range(index + 1, min(index + 3, len(decoded.opcodes)))
        ]
        called = next((len(way) for way in _CALLED_WITHOUT if following[: len(way)] == way), 0)
        if dis.opname[op] != "LOAD_GLOBAL" or operand[0] not in _LOOK_WHERE_CALLED or not called:
            return None
        found += range(index, index + called + 1)
    return found


def _analyse(decoded: DecodedCode, looks: Sequence[int]) -> list[int]:
    """For each instruction, the slots that are live before it, as bits. Computed once for a code object.

    Args:
        looks: instructions that read all slots.
    """
    if decoded.live is not None:
        return decoded.live
    count = len(decoded.opcodes)
    following = [decoded.following(index) for index in range(count)]
    effects = [_effect(dis.opname[op], decoded.arguments[index]) for index, op in enumerate(decoded.opcodes)]
    for index in looks:
        effects[index] = (1 << len(decoded.local_names)) - 1, 0
    live = [0] * (count + 1)
    changed = True
    while changed:
        changed = False
        for index in range(count - 1, -1, -1):
            after = 0
            for successor in following[index]:
                after |= live[successor]
            reads, writes = effects[index]
            before = reads | after & ~writes
            handler = decoded.handler(decoded.offsets[index])
            if handler is not None:  # what the instruction writes may not be written when it raises
                before |= live[handler.target]
            if before != live[index]:
                live[index] = before
                changed = True
    decoded.live = live
    return live


def _effect(name: str, argument: int) -> tuple[int, int]:
    """(slots read, slots written) as bits."""
    if "FAST" not in name:
        if "DEREF" in name or "CLOSURE" in name or name == "MAKE_CELL":
            return 1 << argument, 0
        return 0, 0
    if name in ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"):
        first, second = 1 << (argument >> 4), 1 << (argument & 15)
        reads = {"LOAD_FAST_LOAD_FAST": first | second, "STORE_FAST_LOAD_FAST": second}.get(name, 0)
        writes = {"STORE_FAST_STORE_FAST": first | second, "STORE_FAST_LOAD_FAST": first}.get(name, 0)
        return reads & ~(writes if name == "STORE_FAST_LOAD_FAST" else 0), writes
    if name == "STORE_FAST":
        return 0, 1 << argument
    return 1 << argument, 0  # loads, deletions, and the exchange around an inlined comprehension
