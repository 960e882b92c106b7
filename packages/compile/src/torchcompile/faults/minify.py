"""`python -m torchcompile minify script.py`: the first fault of a script, reduced to a file that shows it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from primtorch.ledger import Event
from torchcompile.faults.examine import Watch
from torchcompile.faults.reduce import Progress
from torchcompile.faults.schemas import Fault
from torchcompile.faults.scripts import SourceReduction, lines_of, run_script, write_script


@dataclass(frozen=True, slots=True)
class Minified:
    """What became of a script.

    Attributes:
        fault: None where everything compiled computes what eager does.
        path: the file that shows the fault alone; None where none can.
        lines: of the program that are left.
        ended: what the script raised, "" for nothing.
        left_out: what could not be held to eager.
    """

    fault: Fault | None
    path: Path | None = None
    lines: int = 0
    ended: str = ""
    left_out: tuple[Event, ...] = ()


def minify_script(path: Path, arguments: Sequence[str], folder: Path, progress: Progress) -> Minified:
    """Runs a script, finds the first compiled graph or call that is wrong or fails, and reduces it."""
    path = path.resolve()
    progress(f"running {path.name}; everything that it compiles is held to eager")
    watch = Watch(folder, progress)
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
