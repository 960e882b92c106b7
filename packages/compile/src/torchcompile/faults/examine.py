"""What is done at a fault: it is told, by an error or beside one; reduced and written to a file where that is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from primtorch import forks
from primtorch.frozen import record
from primtorch.ledger import Event, Ledger, warn_of
from torchcompile.errors import CompilerDied, WrongResult
from torchcompile.events import NOT_VERIFIED
from torchcompile.faults.children import ChildFailed, Death, in_child, possible
from torchcompile.faults.find import Reproducer, locate, minify
from torchcompile.faults.judge import Judge, apart
from torchcompile.faults.reduce import Progress
from torchcompile.faults.schemas import Fault, Finding, Makers, Program, Run
from torchcompile.faults.stages import SILENCE, look_at, observe
from torchcompile.faults.standalone import outline

# What a process that is watched does: the program's own code, a call in eager, its capture, what was compiled of it.
Next: TypeAlias = Literal["program", "eager", "capture", "compiled"]


@dataclass(eq=False)
class Watch:
    """Looks for the first fault of a program that runs: everything compiled meanwhile is verified.

    Attributes:
        folder: where reproducers are written.
        backend: what compiles meanwhile, where it is not to be what the program asks for.
        found: graphs that are wrong or fail.
        calls: of whole calls, the faults of capture and guards.
        left_out: what could not be held to eager.
        at: is told what will be done next, in case that the process dies of it: see `Next`.
    """

    folder: Path
    progress: Progress
    backend: str | None = None
    found: list[Reproducer] = field(default_factory=list)
    calls: list[Fault] = field(default_factory=list)
    left_out: tuple[Event, ...] = ()
    at: Callable[[Next], None] = lambda what: None


class _Watching:
    """The process's watch. One at a time."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._lock = forks.lock()

    @contextmanager
    def by(self, watch: Watch) -> Iterator[None]:
        with self._lock:
            self.watch = watch
            try:
                yield
            finally:
                self.watch = None


WATCHING = _Watching()


@dataclass(frozen=True)
class Examiner:
    """Examines the graphs of one `compile`.

    Attributes:
        folder: where reproducers are written, None for nowhere.
        ledger: is told of graphs that could not be held to eager.
    """

    makers: Makers
    verify: bool
    folder: Path | None
    ledger: Ledger

    @property
    def active(self) -> bool:
        """Whether graphs are held to eager, or failures written as reproducers."""
        return self.verify or self.folder is not None

    def tried(self, program: Program, title: str) -> CompilerDied | None:
        """Compiles and runs a graph in a child, before this process does: what ends that would have ended this."""
        if not possible():
            return None
        stages = self.makers.up_to
        finding = look_at(program, stages, list(stages)[-1:])
        if isinstance(finding, Death):
            self._tell_death(program, title, finding)
            return None
        if finding is None or not finding.ends:
            return None
        finding = observe(program, stages) or finding
        told = str(locate(program, self.makers, finding)) if self.folder is None else str(finding)
        return CompilerDied(f"{title}: {told}")

    def hold(self, program: Program, run: Run, title: str) -> None:
        """Holds a compiled graph to eager.

        Raises:
            WrongResult: it differs.
        """
        finding = self._difference(program, run, title) if self.verify else None
        if finding is None:
            return
        found = self._reproduced(program)
        fault = found.fault if found is not None else locate(program, self.makers, finding)
        raise WrongResult(f"{title}: {fault}{_where(found)}")

    def _difference(self, program: Program, run: Run, title: str) -> Finding | None:
        with apart():
            try:
                judge = Judge(program)
            except Exception as error:  # the program's own
                self._tell(program, title, f"eager raises {type(error).__name__}")
                return None
            if judge.draws:
                self._tell(program, title, "it draws random numbers")
                return None
            try:
                difference = judge.difference(run)
            except Exception as error:
                difference = f"{type(error).__name__}: {error}"
        if difference is None:
            return None
        return observe(program, self.makers.up_to) or Finding(list(self.makers.up_to)[-1], "wrong", difference)

    def _tell_death(self, program: Program, title: str, death: Death) -> None:
        """Says that the program will end by itself, before it does."""
        if WATCHING.watch is not None:
            WATCHING.watch.at("eager")
        warn_of(self._tell(program, title, f"eager's own run of it {death.kind}: {death.what}"))

    def _tell(self, program: Program, title: str, why: str) -> Event:
        stacks = (node.meta.get("stack") for node in program.calls)
        event = Event(NOT_VERIFIED, title, why, next(filter(None, stacks), ()))
        self.ledger.add(event)
        return event

    def at_failure(self, program: Program) -> Callable[[], str]:
        """What to call when a stage has raised an error, now or in a later backward: it gives what to add to the
        error's message, where the reproducer is. It holds no tensor of the program's."""
        if self.folder is None:
            return str
        held, state = outline(program), _state()

        # In a thread of its own: autograd's engine may be running in this one, by which a trace knows a backward.
        def failed() -> str:
            with ThreadPoolExecutor(1) as apart:
                return _where(apart.submit(_under, state, lambda: self._reproduced(held.program())).result())

        return failed

    def _reproduced(self, program: Program) -> Reproducer | None:
        if self.folder is None:
            return None
        watch = WATCHING.watch
        found = minify(program, self.makers, self.folder, watch.progress if watch is not None else lambda text: None)
        if watch is not None and found is not None:
            watch.found.append(found)
        return found


def rehearse(capture: Callable[[], object]) -> str | None:
    """Makes a capture in a child, before this process does: how it ended that, None where it did not."""
    if not possible() or WATCHING.watch is not None:  # who looks for a fault is a child itself, and is to die of it
        return None
    try:
        found = in_child(lambda tell: (capture(), None)[1], SILENCE)
    except ChildFailed:
        return None
    return f"{found.kind}: {found.what}" if isinstance(found, Death) else None


def _where(found: Reproducer | None) -> str:
    if found is None:
        return ""
    if found.path is None:
        return (
            f"\nreduced to {found.lines} operators; they, or the back end, are the program's own objects: no file can"
        )
    return f"\nreduced to {found.lines} operators: {found.path}"


@record
class _State:
    """What a graph was compiled under."""

    grad: bool
    autocast: bool
    dtype: torch.dtype


def _state() -> _State:
    return _State(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


def _under(state: _State, call: Callable[[], Reproducer | None]) -> Reproducer | None:
    with torch.set_grad_enabled(state.grad), torch.autocast("cpu", state.dtype, enabled=state.autocast):
        return call()
