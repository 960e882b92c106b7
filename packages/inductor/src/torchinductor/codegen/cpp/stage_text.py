"""One stage as text: nested loops, each with the statements that depend on it and on nothing within it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchinductor.codegen.cpp.plan import Layout, Loop
from torchinductor.ir import Stage


class Value(NamedTuple):
    """A value in generated code: its text (a name or literal), its type, and the depth of loops it depends on."""

    text: str
    dtype: torch.dtype
    depth: int


class StageText:
    """The statements of a stage, by where they stand."""

    def __init__(self, layout: Layout, stage: Stage) -> None:
        self.layout = layout
        self.loops: tuple[Loop, ...] = layout.inner if stage.kind == "inner" else layout.outer
        self.lines: list[list[str]] = [[] for _ in range(len(self.loops) + 1)]  # by depth
        self.declared: list[str] = []  # before the stage's block
        self.opening: list[str] = []  # before the innermost loop
        self.closing: list[str] = []  # after the innermost loop
        self.finishing: list[str] = []  # after all loops
        self.reductions: list[str] = []  # clauses of the simd pragma
        self.sequential = False  # whether the innermost loop's iterations need each other

    @property
    def inside(self) -> list[str]:
        """The statements of the innermost loop."""
        return self.lines[-1]

    @property
    def lane(self) -> str:
        """The number of the current lane of accumulators."""
        return f"{self.layout.lanes} - {self.layout.lanes}_b"

    def write(self) -> list[str]:
        lines = [*self.declared, "{", *self._nest(0)]
        lines += [f"  {line}" for line in self.finishing]
        return [*lines, "}"]

    def _nest(self, depth: int) -> list[str]:
        pad = "  " * (depth + 1)
        lines = [pad + line for line in self.lines[depth]]
        if depth == len(self.loops):
            return lines
        last, lanes = depth == len(self.loops) - 1, self.layout.lanes is not None
        block = depth == len(self.loops) - 2 if lanes else last
        if block:
            lines += [pad + line for line in self.opening]
        if last and self.layout.simd and not self.sequential:
            clauses = "".join(f" {c}" for c in self.reductions)
            lines.append(f"{pad}#pragma omp simd{clauses}")
        lines.append(f"{pad}{self.loops[depth].head} {{")
        lines += self._nest(depth + 1)
        lines.append(f"{pad}}}")
        if block:
            lines += [pad + line for line in self.closing]
        return lines
