"""The ledger: whatever did not run as one compiled program, once, as records that are counted, explained and tested.

Each package keeps a table of the kinds that its stages write, and writes events to a `Ledger`. Ledgers form a chain:
that of one compiled function passes its events on to `LEDGER`, the process's own, which reports are made of. A ledger
that refuses (`fullgraph=True`) raises in the place of an event, before anything has run otherwise than asked.
"""

from __future__ import annotations

import enum
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace

from primtorch import forks
from primtorch.frozen import record
from primtorch.schemas import TORCH, UserFrame, calling_frames
from primtorch.warned import warn_at


class Effect(enum.Enum):
    """How what ran differs from one compiled program that runs once. The value is the heading in reports."""

    BREAK = "graph break"  # a detour: compiled code on both sides of what runs eagerly
    FALLBACK = "fallback to eager"  # a function or a graph ran eagerly as a whole
    MENDED = "ran differently"  # compiled code ran, in another way than planned
    RERUN = "ran twice"  # the program's own exception: the call ran again, eagerly, so that it is eager's
    RECOMPILE = "recompilation"  # one more version of a function
    CHOSEN = "eager by choice"  # compiled, timed as the options ask, and kept eager where that is faster
    UNVERIFIED = "not verified"  # ran compiled as asked, and what `verify` was to hold to eager could not be
    PLAIN = "ran as it is"  # nothing in it to compile, part of a break that is told of, or of a compiled program


# What `fullgraph=True` raises for, and what a program that counts as clean has none of.
REFUSED = frozenset({Effect.BREAK, Effect.FALLBACK, Effect.MENDED})


@record
class Kind:
    """One way in which a program's run is not what was asked for.

    Attributes:
        id: a name for tables and tests.
        explanation: what happens, and why.
        remedy: what the user can do.
    """

    id: str
    explanation: str = field(repr=False)
    remedy: str = field(repr=False)
    effect: Effect


def kinds(*table: Kind) -> types.MappingProxyType[str, Kind]:
    """A table of kinds by id. Raises ValueError for an id that is there twice."""
    found = {kind.id: kind for kind in table}
    if len(found) != len(table):
        raise ValueError(f"a kind is there twice: {', '.join(kind.id for kind in table)}")
    return types.MappingProxyType(found)


def own_line(frames: Sequence[UserFrame]) -> UserFrame | None:
    """The innermost line outside of torch, or the innermost one."""
    own = (frame for frame in reversed(frames) if not frame.file.startswith(TORCH))
    return next(own, frames[-1] if frames else None)


@record
class Event:
    """Something that happened.

    Attributes:
        what: the function or the graph that it happened to.
        detail: this case: the message of an error, the call that broke the graph.
        frames: the user's lines, outermost first; for what happens to a function as a whole, where it is defined.
        count: how often it was met: at each call, or once where compiled code goes that way from then on.
    """

    kind: Kind
    what: str
    detail: str = ""
    frames: tuple[UserFrame, ...] = ()
    count: int = 1

    @property
    def effect(self) -> Effect:
        """How what ran differs from one compiled program."""
        return self.kind.effect

    @property
    def line(self) -> UserFrame | None:
        """The innermost line outside of torch, or the innermost one."""
        return own_line(self.frames)

    @property
    def where(self) -> str:
        """The user's line as "file:line", or "?"."""
        line = self.line
        return f"{line.file}:{line.line}" if line is not None else "?"

    @property
    def short(self) -> str:
        """Kind, what, detail and line on one line."""
        detail = self.detail.partition("\n")[0]
        return f"{': '.join(filter(None, (self.kind.id, self.what, detail)))} ({self.where})"

    def __str__(self) -> str:
        """What, why and where, with the remedy, as text for a person."""
        of = self.what if self.effect is not Effect.BREAK else ""
        lines = [
            f"{self.effect.value} [{self.kind.id}]: {': '.join(filter(None, (of, self.detail)))}",
            f"  why: {self.kind.explanation}",
            f"  what to do: {self.kind.remedy}",
        ]
        if self.frames:
            lines += ["  where (outermost first):", *(f"    {frame}" for frame in self.frames)]
        return "\n".join(lines)


def warn_of(event: Event) -> None:
    """Warns of an event, at the user's line: its own, or the innermost of those that call the compiler."""
    line = event.line or own_line(calling_frames())
    if line is None:  # a thread of the compiler's own
        warnings.warn(str(event), stacklevel=2)
    else:
        warn_at(str(event), line)


class Ledger:
    """Events in the order in which each first happened, equal ones counted. Safe under threads.

    Bounded: of each kind `limit` different events are kept; what else happens is counted as one more, without detail.

    Args:
        parent: takes every event, too.
        refuse: makes the error that is raised in the place of an event of an effect in `REFUSED`; None to accept all.
    """

    def __init__(
        self,
        parent: Ledger | None = None,
        refuse: Callable[[Event], Exception] | None = None,
        *,
        limit: int = 256,
    ) -> None:
        self.parent = parent
        self.refuse = refuse
        self.limit = limit
        self._lock = forks.lock()
        self._counts: dict[Event, int] = {}  # by the event with count 1
        self._kept: dict[Kind, int] = {}  # different events of each kind
        self.told = 0
        """How often anything was told, since the process began: what a stage has told is what it grew by."""

    def add(self, event: Event, cause: BaseException | None = None) -> None:
        """Writes an event, or raises the error that stands for it, with its cause."""
        if self.refuse is not None and event.effect in REFUSED:
            raise self.refuse(event) from cause
        once = replace(event, count=1)
        with self._lock:
            self.told += 1
            if once not in self._counts:
                kept = self._kept.get(event.kind, 0)
                if kept < self.limit:
                    self._kept[event.kind] = kept + 1
                else:
                    once = Event(event.kind, "", f"more than {self.limit} of this kind: no more is kept of the others")
            self._counts[once] = self._counts.get(once, 0) + event.count
        if self.parent is not None:
            self.parent.add(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """What was told so far, in the order of its first time."""
        with self._lock:
            return tuple(replace(event, count=count) for event, count in self._counts.items())

    def copy(self) -> Ledger:
        """The events as they are now, in a ledger without a parent."""
        result = Ledger(limit=self.limit)
        with self._lock:
            result._counts, result._kept = dict(self._counts), dict(self._kept)
        return result

    def clear(self) -> None:
        """Forgets all events here; ledgers that they were passed on to keep them."""
        with self._lock:
            self._counts.clear()
            self._kept.clear()


def of(events: Iterable[Event], *effects: Effect) -> tuple[Event, ...]:
    """The events of these effects."""
    return tuple(event for event in events if event.effect in effects)


def total(events: Sequence[Event]) -> int:
    """How often they happened, together."""
    return sum(event.count for event in events)


def event_tables(events: Sequence[Event]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, rows) of two tables for each effect that was met: the events, and what their kinds mean."""
    tables = []
    for effect in Effect:
        met = of(events, effect)
        if not met:
            continue
        title = effect.value.capitalize()
        rows = [[str(event.count), event.kind.id, f"{event.what}\n{event.where}", event.detail] for event in met]
        tables.append((title, ["count", "kind", "of, at", "detail"], rows))
        meanings = [[kind.id, kind.explanation, kind.remedy] for kind in dict.fromkeys(event.kind for event in met)]
        tables.append((f"{title}: what it means", ["kind", "why", "what to do"], meanings))
    return tables


# Of this process. No setting: nothing that runs asks what is in it.
LEDGER = Ledger()
