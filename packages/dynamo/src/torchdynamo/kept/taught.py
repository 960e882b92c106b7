"""What captures of a function have taught: which numbers become symbols, where its graphs end. A frame that another
process finds teaches what its capture taught there, so that the calls that follow are captured, or found, as there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from primtorch.frozen import record
from torchdynamo.function import Function
from torchdynamo.interpreter.loop_tests import SourcePlace
from torchdynamo.kept.contents import NotKept
from torchdynamo.kept.rows import Reader, Row, Writer
from torchdynamo.sources import Pinned, Source, TensorSize, TensorStride, base_of

# Attributes of a function under capture: sets of sources, sets of the user's stacks, flags.
_SOURCES = ("changed", "fixed", "shared", "varied")
_STACKS = ("plain_texts", "refused", "unread", "unrolled", "sizes")
_FLAGS = ("guards_floats", "breaks_at_data", "asks_data", "whole_rounds", "unrolls", "lazy")
_OF_ALL = ("in_rounds", "finds_layers")  # flags of all the parts of a program


@record
class Taught:
    """All of it, as it is at one time."""

    sources: Mapping[str, Set[Source]]
    stacks: Mapping[str, Set[Any]]
    flags: Set[str]
    lengths: Mapping[Source, Set[int]]
    loops: Mapping[SourcePlace, Set[tuple[object, ...]]]

    @staticmethod
    def to(state: Function) -> Taught:
        """What the function has been taught until now."""
        nested = state.nested
        flags = {name for name in _FLAGS if getattr(state, name)}
        return Taught(
            {name: frozenset(getattr(state, name)) for name in _SOURCES},
            {name: frozenset(getattr(state, name)) for name in _STACKS},
            flags | {name for name in _OF_ALL if getattr(nested, name, False)},
            {source: frozenset(lengths) for source, lengths in state.read_lengths.items()},
            {} if nested is None else {place: frozenset(numbers) for place, numbers in nested.loops.items()},
        )

    def text(self, state: Function) -> str:
        """What of it has a say in how a call is captured, whichever process was taught it."""
        sources = {name: sorted(_expressions(found)) for name, found in self.sources.items() if found}
        if state.options.dynamic is False:  # of lists and tuples it says which have another length
            sized = (TensorSize, TensorStride)
            sources["changed"] = sorted(_expressions(s for s in self.sources["changed"] if not isinstance(s, sized)))
        lengths = sorted((*_expressions([source]), sorted(found)) for source, found in self.lengths.items())
        raised = sorted((kind.__qualname__, line) for kind, line in state.raised)
        compiled = state.compiled()
        versions = len(compiled.entries) if compiled is not None and sources.get("changed") else 0
        stacks = {name: sorted(map(repr, found)) for name, found in self.stacks.items() if found}
        loops = sorted((repr(place), sorted(map(repr, numbers))) for place, numbers in self.loops.items())
        return repr((sources, stacks, sorted(self.flags), lengths, loops, raised, versions))

    def since(self, before: Taught, writer: Writer) -> Row:
        """What has come since then, as a row. Raises NotKept for what means something in this process alone."""
        sources = [
            [name, [_written(source, writer) for source in sorted(found - before.sources[name], key=str)]]
            for name, found in self.sources.items()
        ]
        stacks = [
            [name, [writer.stack(stack) for stack in sorted(found - before.stacks[name], key=str)]]
            for name, found in self.stacks.items()
        ]
        lengths = [
            [_written(source, writer), sorted(found - before.lengths.get(source, frozenset()))]
            for source, found in self.lengths.items()
        ]
        loops = [
            [place, sorted(numbers, key=str)]
            for place, numbers in self.loops.items()
            if before.loops.get(place) != numbers
        ]
        return [
            [row for row in sources if row[1]], [row for row in stacks if row[1]], sorted(self.flags - before.flags),
            [row for row in lengths if row[1]], loops,
        ]  # fmt: skip


def teach(state: Function, row: Row, reader: Reader) -> None:
    """Teaches a function what a frame's capture taught it in another process."""
    sources, stacks, flags, lengths, loops = row
    for name, places in sources:
        _among(name, _SOURCES)
        getattr(state, name).update(reader.sources[place] for place in places)
    for name, places in stacks:
        _among(name, _STACKS)
        getattr(state, name).update(map(reader.stack, places))
    for name in flags:
        _among(name, (*_FLAGS, *_OF_ALL))
        setattr(state.nested if name in _OF_ALL else state, name, True)
    for place, numbers in lengths:
        state.read_lengths.setdefault(reader.sources[place], set()).update(numbers)
    for place, numbers in loops:
        assert state.nested is not None
        state.nested.loops.setdefault(tuple(place), set()).update(map(tuple, numbers))


def _among(name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise NotKept(f"nobody is taught {name!r}")


def _written(source: Source, writer: Writer) -> int:
    root: Source = source
    while (base := base_of(root)) is not None:
        root = base
    if isinstance(root, Pinned):
        raise NotKept(f"{source.expression()} is told apart by what one version holds")
    return writer.source(source)


def _expressions(sources: Iterable[Source]) -> list[str]:
    """Raises NotKept where an address is in one."""
    found = [source.expression() for source in sources]
    if any(" at 0x" in text for text in found):
        raise NotKept("an address is in what was taught")
    return found
