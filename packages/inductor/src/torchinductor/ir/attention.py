"""Attention as a template: one kernel around what the program does to a score.

What is no product of matrices, a score's function and its mask, are bodies over the variables `POSITIONS`, which take
the score as `carried(SCORE)` and the gradient of what becomes of it as `carried(GRADIENT)`. The loops of the template
only tell which memory is touched: no loops of the loop IR have sums within a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primtorch.frozen import record
from torchinductor.ir.body import Body
from torchinductor.ir.template import Region, Template

POSITIONS = ("b", "h", "q", "k")  # batch, head of the query, query, key
SCORE, GRADIENT = "score", "gradient"

Direction = Literal["forward", "queries", "keys"]
"""What is computed: the results, the gradient by queries, or those by keys and values."""


@record
class Function:
    """A body over positions, and which of its values is the result."""

    body: Body
    value: int


@record
class Tables:
    """Which tiles of scores are looked at: for each line of tiles how many, and their places.

    Attributes:
        rows, columns: queries and keys of a tile.
        partial, full: (counts, places) of tiles that the mask cuts, and of those that it leaves whole.
    """

    rows: int
    columns: int
    partial: tuple[Region, Region]
    full: tuple[Region, Region] | None


@dataclass(frozen=True, kw_only=True)
class Attention(Template):
    """One kernel of an attention or of its derivative.

    Attributes:
        scale: what products are multiplied by.
        score, mask, pullback: what becomes of a score, whether it counts, and the gradient by it, each if there is one.
            The pullback of "queries" adds to the gradients of what the functions close over.
        tables: by queries, or for "keys" by keys.
        results: the result and the logarithms of the sums; for "queries" the gradient; for "keys" both gradients.
        given: of a derivative: the gradient of the result, the logarithms, and for each row what its scores' gradients
            are less.
    """

    direction: Direction
    query: Region
    key: Region
    value: Region
    results: tuple[Region, ...]
    given: tuple[Region, ...] = ()
    scale: float
    score: Function | None = None
    mask: Function | None = None
    pullback: Function | None = None
    tables: Tables | None = None

    @property
    def functions(self) -> tuple[Function, ...]:
        """Those that there are."""
        return tuple(function for function in (self.score, self.mask, self.pullback) if function is not None)

    def __str__(self) -> str:
        sizes = " x ".join(map(str, (*self.query.shape, self.key.shape[2])))
        functions = (("score", self.score), ("mask", self.mask), ("pullback", self.pullback))
        names = ", ".join(name for name, function in functions if function is not None)
        return f"template attention, {self.direction}: {sizes}, with {names or 'no functions'}\n{self.loops}"
