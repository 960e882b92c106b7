"""Cells of closures as the program sees them: those of the outside are read with guards, writes to them kept aside."""

from __future__ import annotations

import types

from torchdynamo.outside.absences import is_empty
from torchdynamo.outside.externals import External, Externals
from torchdynamo.outside.overlays import DELETED, MISSING, Overlays
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import CellContents, ClosureCell


class Cells:
    """The cells that one capture meets.

    Args:
        function: the root function of the capture, whose own cells are known from the start.
    """

    def __init__(self, function: types.FunctionType, externals: Externals, overlays: Overlays) -> None:
        self.externals = externals
        self.overlays = overlays
        self._made: dict[int, types.CellType] = {}  # by the program itself, kept alive so that none takes its number
        for index, cell in enumerate(function.__closure__ or ()):
            source = ClosureCell(index, function.__code__.co_freevars[index])
            externals._register(cell, externals.pins.source(cell), cell).sources.add(source)

    def release(self) -> None:
        """Lets go of the program's cells."""
        self._made.clear()

    def new(self, cell: types.CellType) -> types.CellType:
        """The program made this cell itself."""
        self._made[id(cell)] = cell
        return cell

    def _external(self, cell: types.CellType) -> External | None:
        """The record of a cell that the program did not make."""
        known = self.externals.lookup(cell)
        if known is None and id(cell) not in self._made:
            known = self.externals._register(cell, self.externals.pins.source(cell, "cell"), cell)
        return known

    def get(self, cell: types.CellType) -> object:
        """The cell's contents, or MISSING when it is empty."""
        known = self._external(cell)
        if known is None:
            try:
                return cell.cell_contents
            except ValueError:
                return MISSING
        written = self.overlays.read(cell, "cell_contents", "cell")
        if written is not MISSING:
            return MISSING if written is DELETED else written
        try:
            contents = cell.cell_contents
        except ValueError:
            self.externals.guard(known.source, GuardKind.PREDICATE, is_empty)
            return MISSING
        roots = [source for source in known.sources if isinstance(source, ClosureCell)]
        return self.externals.wrap(contents, roots[0] if roots else CellContents(known.source))

    def set(self, cell: types.CellType, value: object) -> None:
        """A write to a cell: at once to one of the program's own, else kept aside."""
        if self._external(cell) is None:
            cell.cell_contents = value
        else:
            self.overlays.write(cell, "cell_contents", value, "cell")

    def delete(self, cell: types.CellType) -> None:
        """Empties a cell: at once one of the program's own, else kept aside."""
        if self._external(cell) is None:
            del cell.cell_contents
        else:
            self.overlays.write(cell, "cell_contents", DELETED, "cell")
