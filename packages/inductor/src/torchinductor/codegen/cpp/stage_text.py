"""One stage as text: nested loops, each with the statements that depend on it and on nothing within it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from torchinductor.codegen.cpp.expressions import index_text
from torchinductor.codegen.cpp.loop_parts import Part, Places, substituted
from torchinductor.codegen.cpp.plan import Layout, Loop
from torchinductor.indexing import Ranges, number
from torchinductor.ir import Stage

_MOST_PARTS = 6  # of the innermost loop
_MOST_LINES = 600  # of all of its parts
_MOST_SETTLED = 2  # conditions for which there are loops of their own
_VECTOR = 64  # bytes of the widest
_LEAST_VECTOR = 8  # elements of the narrowest that is worth a part


class Value(NamedTuple):
    """A value in generated code: its text (a name or literal), its type, and the depth of loops it depends on.

    `short`: it is surely a bfloat16's, which nothing was computed with: it is written as it is, a NaN with its bits.
    """

    text: str
    dtype: torch.dtype
    depth: int
    short: bool = False


class StageText:
    """The statements of a stage, by where they stand."""

    def __init__(self, layout: Layout, stage: Stage, ranges: Ranges, narrowest: int) -> None:
        self.layout = layout
        self.loops: tuple[Loop, ...] = layout.inner if stage.kind == "inner" else layout.outer
        self.lines: list[list[str]] = [[] for _ in range(len(self.loops) + 1)]  # by depth
        self.values: list[list[str]] = [[] for _ in self.lines]  # those of them that only compute
        self.first: list[list[str]] = self.lines  # what is written into until there is a second pass
        self.second: list[list[str]] = []  # by depth: what is done over a block once more, before the next block
        self.declared: list[str] = []  # before the stage's block
        self.opening: list[str] = []  # before a block: all iterations of the innermost loop, or all rows of lanes
        self.between: list[str] = []  # before the second pass over a block
        self.closing: list[str] = []  # after a block
        self.finishing: list[str] = []  # after all loops
        self.reductions: list[str] = []  # clauses of the simd pragma
        self.sequential = False  # whether the innermost loop's iterations need each other
        self.settled: dict[str, None] = {}  # conditions before the innermost loop on what is computed at length there
        self.narrowest = narrowest  # bytes of the smallest elements that are read or written
        self.cuts: set[int] = set()  # where a condition on the innermost loop's variable changes
        self.places = self._places(ranges)  # the same where sizes are symbols

    def _places(self, ranges: Ranges) -> Places | None:
        """Those of the innermost loop, if it can be written in parts."""
        loop = self.loops[-1] if self.loops else None
        if loop is None or loop.axis is None or not self.layout.simd or self.layout.tile is not None:
            return None
        whole = loop.start == "0" and loop.step == 1 and loop.stop == index_text(ranges[loop.axis], {})
        return Places(loop.axis, ranges[loop.axis]) if whole else None

    @property
    def inside(self) -> list[str]:
        """The statements of the innermost loop."""
        return self.lines[-1]

    @property
    def lane(self) -> str:
        """The number of the current lane of accumulators."""
        return f"{self.layout.lanes} - {self.layout.lanes}_b"

    @property
    def block(self) -> Loop:
        """The loop over a block."""
        return self.loops[self._block]

    @property
    def _block(self) -> int:
        return len(self.loops) - (1 if self.layout.lanes is None and not self.layout.narrow else 2)

    def pass_again(self) -> None:
        """What is written from here on runs over a block once more, where what was computed so far is known again."""
        deep = self._block + 1
        self.second = self.lines = [*self.lines[:deep], *map(list, self.values[deep:])]

    def write(self) -> list[str]:
        """The lines of the stage, without the frame's indentation."""
        lines = [*self.declared, "{", *self._nest(0, self.first)]
        lines += [f"  {line}" for line in self.finishing]
        return [*lines, "}"]

    def _nest(self, depth: int, statements: list[list[str]]) -> list[str]:
        pad = "  " * (depth + 1)
        lines = [pad + line for line in statements[depth]]
        if depth == len(self.loops):
            return lines
        block = depth == self._block
        if block:
            lines += [pad + line for line in self.opening]
        lines += self._loop(depth, statements)
        if block and self.second:
            lines += [pad + line for line in self.between]
            lines += self._loop(depth, self.second)
        if block:
            lines += [pad + line for line in self.closing]
        return lines

    def _loop(self, depth: int, statements: list[list[str]]) -> list[str]:
        pad, pragma, inside = "  " * (depth + 1), [], self._nest(depth + 1, statements)
        if depth == len(self.loops) - 1 and self.layout.simd and not self.sequential:
            pragma = [f"{pad}#pragma omp simd" + "".join(f" {c}" for c in self.reductions)]
            if self.places is not None and self.places.shorter:
                return self._by_places(pad, pragma, statements, self.places)
        parts = self._parts() if pragma else []
        loops = [(pragma if part.most != 1 else [], part) for part in parts] or [(pragma, self.loops[depth])]
        lines = [line for before, loop in loops for line in (*before, f"{pad}{loop.head} {{", *inside, f"{pad}}}")]
        names = tuple(self.settled) if pragma and not self.reductions else ()
        fits = len(names) <= _MOST_SETTLED and len(lines) << len(names) <= _MOST_LINES
        return self._versions(pad, lines, names) if fits else lines

    def _versions(self, pad: str, lines: list[str], names: tuple[str, ...]) -> list[str]:
        """A loop for each way in which conditions hold for all of it: none computes what another one selects."""
        if not names:
            return lines
        made: list[str] = []
        for head, holds in ((f"if ({names[0]}) {{", "true"), ("} else {", "false")):
            made += [f"{pad}{head}", f"{pad}  const bool {names[0]} = {holds};"]
            made += [f"  {line}" for line in self._versions(pad, lines, names[1:])]
        return [*made, f"{pad}}}"]

    def _by_places(self, pad: str, pragma: list[str], statements: list[list[str]], places: Places) -> list[str]:
        """The innermost loop in parts between places that symbols tell, and as a whole for sizes for which these are in
        another order."""
        places.found |= dict.fromkeys(map(number, self.cuts))
        found: list[Part | None] = [*places.parts()]
        if len(found) > _MOST_PARTS or len(found) * len(statements[-1]) > _MOST_LINES:
            found = [None]
        lines: list[str] = []
        for part in found:
            loop = self.loops[-1]
            if part is not None:
                loop = replace(loop, start=index_text(part.begin, {}), stop=index_text(part.end, {}), most=part.count)
            inside = substituted(statements[-1], places.shorter, part)
            before = pragma if loop.most != 1 else []
            lines += [*before, f"{pad}{loop.head} {{", *(f"{pad}  {line}" for line in inside), f"{pad}}}"]
        lines = [f"{pad}{line}" for line in places.opening] + lines + [f"{pad}{line}" for line in places.closing]
        checks = places.conditions() if found[0] is not None else [*places.assumed]
        if not checks:
            return lines
        whole = [*pragma, f"{pad}{self.loops[-1].head} {{", *(f"{pad}  {line}" for line in statements[-1]), f"{pad}}}"]
        test = " && ".join(f"({index_text(check, {})} >= 0)" for check in checks)
        return [f"{pad}if ({test}) {{", *lines, f"{pad}}} else {{", *whole, f"{pad}}}"]

    def _parts(self) -> list[Loop]:
        """The innermost loop in parts in which no condition on its variable changes, so that the compiler knows them
        all: a loop with conditional loads takes several times as long. None where parts would be many, or the loop's
        end is not known."""
        loop = self.loops[-1]
        if loop.most is None or loop.start != "0" or loop.step != 1 or self.layout.tile is not None:
            return []
        cuts = self.cuts | (self._rests(loop.most) if self.reductions else set())
        ends = [0, *sorted(cut for cut in cuts if 0 < cut < loop.most), loop.most]
        if not 2 < len(ends) <= _MOST_PARTS + 1 or len(ends) * len(self.lines[-1]) > _MOST_LINES:
            return []
        return [replace(loop, start=f"{a}L", stop=f"{b}L", most=b - a) for a, b in pairwise(ends)]

    def _rests(self, length: int) -> set[int]:
        """Where whole vectors end, the widest first: what these leave over of a row that is summed up g++ 12 takes one
        by one, which for 8 of 56 elements takes longer than all the others."""
        vector, found = _VECTOR // self.narrowest, set()
        while vector >= _LEAST_VECTOR:
            found.add(length - length % vector)
            vector //= 2
        return found
