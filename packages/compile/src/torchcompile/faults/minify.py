"""`python -m torchcompile minify script.py`: the first fault of a script, reduced to a file that shows it alone.

The script runs in a child: one that dies is told of by what it said last that it would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primtorch.frozen import record
from primtorch.ledger import Event
from primtorch.schemas import UserFrame
from torchcompile.events import NOT_VERIFIED
from torchcompile.faults.children import Death, Teller, in_child, possible
from torchcompile.faults.examine import Next, Watch
from torchcompile.faults.reduce import Progress
from torchcompile.faults.schemas import Fault, Finding, Stage
from torchcompile.faults.scripts import SourceReduction, lines_of, run_script, write_script


@record
class Minified:
    """What became of a script.

    Attributes:
        fault: None where everything compiled computes what eager does.
        path: the file that shows the fault alone; None where none can.
        lines: of the program that are left.
        ended: what the script raised, or how it died in its own code or eager's; "" for neither.
        died: whether it did.
        left_out: what could not be held to eager.
    """

    fault: Fault | None
    path: Path | None = None
    lines: int = 0
    ended: str = ""
    left_out: tuple[Event, ...] = ()
    died: bool = False

    def row(self) -> list[object]:
        """It as JSON writes it; see `of`."""
        fault = None if self.fault is None else self.fault.row()
        left_out = [
            [event.what, event.detail, [[f.file, f.line, f.function] for f in event.frames], event.count]
            for event in self.left_out
        ]
        return [fault, None if self.path is None else str(self.path), self.lines, self.ended, left_out]

    @classmethod
    def of(cls, row: list[Any]) -> Minified:
        """What a row says."""
        fault, path, lines, ended, left_out = row
        events = tuple(
            Event(NOT_VERIFIED, what, detail, tuple(UserFrame(*frame) for frame in frames), count)
            for what, detail, frames, count in left_out
        )
        found = None if fault is None else Fault.of(fault)
        return cls(found, None if path is None else Path(path), lines, ended, events)


def minify_script(path: Path, arguments: Sequence[str], folder: Path, progress: Progress) -> Minified:
    """Runs a script, finds the first compiled graph or call that is wrong or fails, and reduces it.

    Raises:
        ChildFailed: the script was ended by what is no error of its own, such as an interrupt.
    """
    path, folder = path.resolve(), folder.resolve()
    progress(f"running {path.name}; everything that it compiles is held to eager")
    if not possible():
        return _minified(path, arguments, Watch(folder, progress))

    def minified(tell: Teller) -> list[object]:
        return _minified(path, arguments, Watch(folder, tell.progress, at=tell.at)).row()

    found = in_child(minified, None, progress, quiet=False)
    return _dead(found, path) if isinstance(found, Death) else Minified.of(found)


_OWN_CODE = {"eager": "eager's own run of a function that it compiles", "program": "its own code"}


def _dead(death: Death, path: Path) -> Minified:
    """What is told of a script that died outside of what is tried in a child of its own first."""
    at: Next = death.at or "program"  # type: ignore[assignment]
    how = f"{death.what} ({death.kind})"
    if at in _OWN_CODE:
        where = f", at {death.frame.file}:{death.frame.line}" if death.frame is not None else ""
        return Minified(None, ended=f"{how} in {_OWN_CODE[at]}{where}: it is no fault of torchcompile's", died=True)
    stage: Stage = "capture" if at == "capture" else "kernels"
    what = f"{death.what}, and not in a process of its own, on one thread"
    return Minified(
        Fault(Finding(stage, death.kind, what), "", frame=death.frame), None, len(lines_of(path.read_text()))
    )


def _minified(path: Path, arguments: Sequence[str], watch: Watch) -> Minified:
    folder, progress = watch.folder, watch.progress
    error = run_script(path, arguments, watch)
    ended = "" if error is None else f"{type(error).__name__}: {error}"
    if watch.found:
        found = watch.found[0]
        return Minified(found.fault, found.path, found.lines, ended)
    if not watch.calls:
        return Minified(None, ended=ended, left_out=watch.left_out)
    fault = watch.calls[0]
    progress(f"stage {fault.stage}: {fault.finding.what}")
    smallest = SourceReduction(path, arguments, fault, progress)()
    if smallest is None:
        return Minified(fault, None, len(lines_of(path.read_text())), ended)
    text, shown = smallest
    return Minified(shown, write_script(folder, text, shown), len(lines_of(text)), ended)
