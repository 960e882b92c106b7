"""Ranks whose graphs would call collectives in different orders are told so, in place of waiting for each other.

When a compiled graph that holds collectives runs for the first time, each rank writes into the group's store what it is
about to call, under the number of collectives that the group has seen so far: the first one that comes says what is
called, and the others hold theirs to it. Later runs write and ask nothing. Ranks that have nothing to write (they run
eagerly, or what they have compiled before) are waited for no longer than `_PATIENCE`, and not again and again. Some
back ends count what two ranks send to each other, so that one number is several places of the common order: nobody is
held to what others wrote who are past it.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import fx

from torchdistributed.errors import CollectivesDiffer
from torchdynamo import collective_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PATIENCE: Final = 5.0  # seconds in which the other ranks come to a graph, or have no such graph
_FRUITLESS: Final = 2  # times that they did not come, after which they are not waited for
_SETTLING: Final = 1.0  # seconds in which a rank is past what it has called, where others have called it too
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # seconds between questions
_TORCH = os.path.dirname(torch.__file__) + os.sep
# What each rank gives and takes may differ in size.
_OF_ANY_SIZE = frozenset({"all_to_all_single", "all_to_all"})
_OF_EACH_RANK = frozenset({"parts"})  # arguments that one rank has and others have not


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that all ranks of a group make together. `what`: all in which they have to agree."""

    group: str
    what: str
    where: str


def collectives_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """The collectives that a graph calls, in order."""
    return tuple(found for node in graph.nodes if (found := _collective(node)) is not None)


def _collective(node: fx.Node) -> Collective | None:
    overload = collective_of(node.target)
    if overload is None:
        return None
    names = [argument.name for argument in overload._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given = {key: value for key, value in given.items() if key not in _OF_EACH_RANK}
    name = overload._schema.name.partition("::")[2].rstrip("_")
    parts = [part for a in given.values() for part in (a if isinstance(a, (list, tuple)) else (a,))]
    tensors = [part for part in parts if isinstance(part, fx.Node)]
    said = [str(value) for key, value in given.items() if key != "group_name" and isinstance(value, (int, str))]
    said += [_shown(node.meta.get("val"), name not in _OF_ANY_SIZE) for node in tensors]
    return Collective(str(given["group_name"]), f"{name}({', '.join(filter(None, said))})", _line(node))


def _shown(value: object, sized: bool) -> str:
    """A tensor as all ranks have to have it; sizes that are symbols may be any."""
    if not hasattr(value, "dtype"):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    shape = tuple(getattr(value, "shape", ()))
    plain = sized and all(isinstance(size, int) for size in shape)
    return f"{dtype}{list(shape)}" if plain else dtype


def _line(node: fx.Node) -> str:
    frames = node.meta.get("stack", ())
    of_user = [frame for frame in frames if not frame.file.startswith(_TORCH)] or list(frames)
    return f"{of_user[-1].file}:{of_user[-1].line} in {of_user[-1].function}" if of_user else "an unknown line"


def agreed(run: Callable[..., Sequence[object]], graph: fx.GraphModule) -> Callable[..., Sequence[object]]:
    """`run`, which runs `graph`, with its first call held to what the other ranks call.

    Raises, at that call:
        CollectivesDiffer: another rank is about to call other collectives.
    """
    if not dist.is_available():
        return run
    collectives = collectives_of(graph.graph)
    return Agreed(run, collectives) if collectives else run


class Agreed:
    """What runs a graph with collectives."""

    def __init__(self, run: Callable[..., Sequence[object]], collectives: Sequence[Collective]) -> None:
        self._boxed_call = getattr(run, "_boxed_call", False)
        self._run = run
        self._collectives: Sequence[Collective] = collectives

    def __call__(self, *inputs: object) -> Sequence[object]:
        if not self._collectives or not dist.is_initialized():
            return self._run(*inputs)
        collectives, self._collectives = self._collectives, ()
        meetings = list(_meetings(collectives))
        for meeting in meetings:
            meeting.hold()
        try:
            results = self._run(*inputs)
        except RuntimeError as error:  # the connection is gone, or the group's time limit came
            for meeting in meetings:
                meeting.explain(error)
            raise
        for meeting in meetings:
            meeting.end()
        return results


def _meetings(collectives: Sequence[Collective]) -> Iterator[Meeting]:
    """One for each group of several ranks, in the order in which they are called first."""
    world = dist.distributed_c10d
    for name in dict.fromkeys(collective.group for collective in collectives):
        group = world._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
        if group.size() < 2:
            continue
        try:
            number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:  # a back end that does not count
            continue
        prefix = f"torchcompile/{_GROUPS.number(dist.group.WORLD)}/{name}/{number}"
        store = world.PrefixStore(prefix, world._get_default_store())
        yield Meeting(store, group, [c for c in collectives if c.group == name])


class _Numbered:
    """How often processes have come together: groups of another time have the names of earlier ones."""

    def __init__(self) -> None:
        self._last: weakref.ref[object] | None = None
        self._count = 0

    def number(self, group: object) -> int:
        if self._last is None or self._last() is not group:
            self._last = weakref.ref(group)
            self._count += 1
            _fruitless.clear()
        return self._count


_GROUPS = _Numbered()
_fruitless: dict[str, int] = {}  # by group: how often others did not come


class Meeting:
    """The ranks of one group, each about to call collectives, at one place of their common order."""

    def __init__(self, store: Store, group: dist.ProcessGroup, collectives: Sequence[Collective]) -> None:
        self.store, self.group, self.name = store, group, collectives[0].group
        self.rows = [(c.what, c.where) for c in collectives]

    def hold(self) -> None:
        """Raises `CollectivesDiffer` where another rank is about to call something else."""
        own = json.dumps([self.group.rank(), self.rows])
        try:
            rank, rows = json.loads(self.store.compare_set("calls", "", own))
            difference = first_difference(rows, self.rows)
            if difference is not None:
                if self._is_past():
                    return
                self.store.set("differ", self._told(rank, rows, difference))
            self.store.add("came", 1)
            self._wait()
        except dist.DistError:
            return  # the store is gone, and whoever kept it: the collective says so

    def _wait(self) -> None:
        """Until all ranks have come, one that differs, or for a while."""
        pause, end = _FIRST_PAUSE, time.monotonic() + _PATIENCE
        while True:
            complete = self.store.add("came", 0) >= self.group.size()
            self._raise_if_told(None)
            if complete:
                _fruitless.pop(self.name, None)
                return
            if _fruitless.get(self.name, 0) >= _FRUITLESS:
                return
            if time.monotonic() > end:
                _fruitless[self.name] = _fruitless.get(self.name, 0) + 1
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _is_past(self) -> bool:
        """Whether those who came here before are through: then this is another place of the order."""
        end = time.monotonic() + _SETTLING
        while not self.store.check(["past"]):
            if self.store.check(["differ"]) or time.monotonic() > end:
                return False
            time.sleep(_FIRST_PAUSE)
        return True

    def end(self) -> None:
        """Behind the graph's run: this rank is past what it wrote."""
        try:
            self.store.set("past", "")
        except dist.DistError:
            return

    def explain(self, error: Exception) -> None:
        """Raises `CollectivesDiffer` from an error that came of it."""
        try:
            self._raise_if_told(error)
        except dist.DistError:
            return

    def _raise_if_told(self, cause: Exception | None) -> None:
        if self.store.check(["differ"]):
            raise CollectivesDiffer(self.store.get("differ").decode()) from cause

    def _told(self, rank: int, rows: Sequence[Sequence[str]], place: int) -> str:
        (what, where), (own, here) = rows[place], self.rows[place]
        return (
            f"ranks call collectives of the group {self.name!r} in different orders: as number {place + 1} of a graph"
            f" rank {rank} calls {what} at {where}, and rank {self.group.rank()} calls {own} at {here}."
            " They would wait for each other until the group's time limit. All ranks of a group have to call the same"
            " collectives in one order: move those that depend on the rank or on data out of its condition, or give"
            " them a group of the ranks that call them"
        )


def first_difference(rows: Sequence[Sequence[str]], others: Sequence[Sequence[str]]) -> int | None:
    """The place of the first collective in which two sequences differ; one may go on behind the other's end: graphs
    break elsewhere."""
    for place, ((what, _), (other, _)) in enumerate(zip(rows, others, strict=False)):
        if what != other:
            return place
    return None
