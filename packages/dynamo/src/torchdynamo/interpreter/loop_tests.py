"""Which conditional jumps decide whether a loop has another round."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torchdynamo.interpreter.decode import DecodedCode

# A file, and positions in it: a part of the source, however often and wherever its code is.
SourcePlace: TypeAlias = tuple[object, ...]


def place_of(decoded: DecodedCode, code: types.CodeType, index: int) -> SourcePlace:
    """The part of the source that an instruction is of."""
    if decoded.positions is None:
        decoded.positions = list(code.co_positions())
    return (decoded.filename, *decoded.positions[decoded.offsets[index] // 2])


def loop_tests(decoded: DecodedCode, code: types.CodeType) -> Mapping[int, SourcePlace]:
    """The conditional jumps by which a loop goes on or ends, and those that Python puts in front of a `while` loop for
    its first round: by their number, the condition in the source, which these have in common.

    A way out of a loop into a `raise` is none of its ends.
    """
    if decoded.tests is None:
        ends = {place_of(decoded, code, index) for index in _ends(decoded)}
        jumps = (index for index in range(len(decoded.opcodes)) if ends and _is_conditional(decoded, index))
        places = ((index, place_of(decoded, code, index)) for index in jumps)
        decoded.tests = {index: place for index, place in places if place in ends}
    return decoded.tests


def _ends(decoded: DecodedCode) -> Iterator[int]:
    count = len(decoded.opcodes)
    back = [(index, head) for index in range(count) for head in decoded.following(index) if head <= index]
    if not back:
        return
    before: list[list[int]] = [[] for _ in range(count + 1)]
    for index in range(count):
        for following in decoded.following(index):
            before[following].append(index)
    for index, head in back:
        rounds = _rounds(before, index, head)
        for jump in rounds:
            ways = decoded.following(jump)
            out = [way for way in ways if way not in rounds]
            if _is_conditional(decoded, jump) and 0 < len(out) < len(ways) and not decoded.raises(out[0]):
                yield jump


def _rounds(before: list[list[int]], last: int, head: int) -> set[int]:
    """The instructions of a loop: whatever leads to its jump back without passing its head."""
    found, todo = {head}, [last]
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            todo += before[index]
    return found


def _is_conditional(decoded: DecodedCode, index: int) -> bool:
    return dis.opname[decoded.opcodes[index]].startswith("POP_JUMP")
