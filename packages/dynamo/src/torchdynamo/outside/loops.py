"""Loops whose number of rounds is another at each call: over a list, a tuple or a dict of another length, over a range,
over the rows of a tensor, or as long as numbers allow it.

A loop is unrolled, and the number of its rounds guarded, until there are versions for two of them. From then on the
graph ends at the loop's head, in each version: a round is a part of the program of its own, with code that all rounds
share, and what there is to iterate over is advanced for real between them (`Rounds`).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import nn

from primtorch.fake import FakeTensor
from primtorch.schemas import UserFrame
from primtorch.symbolic import ShapeEnv
from primtorch.symbolic.relation import Connective, Relation
from torchdynamo.graph.jagged import stands_for_one
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.iterators import Rounds, Start
from torchdynamo.interpreter.loop_tests import SourcePlace, loop_tests, place_of
from torchdynamo.interpreter.protocol import MISSING, Escape, InterpreterObject
from torchdynamo.interpreter.state import FrameState
from torchdynamo.outside.growing_lists import (
    GROWING,
    Ends,
    GrowingDict,
    GrowingList,
    GrowingTuple,
    GrowingView,
    ItemsVary,
    MakesView,
    Refusal,
    refuse_growing,
)
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import RoundByRound

# What is known of loops: for each, the values that the numbers had which its rounds depend on, in a version each.
KnownLoops = Mapping[SourcePlace, Set[tuple[object, ...]]]


class Unrolled(Escape):
    """What would be a round is none of a function's own: all that begins at `place` stays in one graph."""

    def __init__(self, place: tuple[UserFrame, ...]) -> None:
        super().__init__(place)
        self.place = place


class OpenRange(InterpreterObject):
    """A range of numbers that are known only at each call. The program may loop over it; what else it asks of it ends
    the graph."""

    native = range

    def __init__(self, numbers: tuple[object, ...]) -> None:
        self.numbers = numbers

    def __getattr__(self, name: str) -> NoReturn:
        raise self.refusal()

    def refusal(self) -> BreakGraph:
        """What is raised where the program asks for more."""
        return BreakGraph("loop_of_each_length", "a range of numbers that are others at each call")


for _name in ("iter", "len", "getitem", "contains", "reversed", "eq", "hash", "bool", "repr"):
    setattr(OpenRange, f"__{_name}__", Refusal(f"__{_name}__"))


class Loops:
    """The loops of one capture.

    Attributes:
        known: of earlier captures.
        fixed: those whose number of rounds is guarded in this one, in the same form.
        frames: those of the interpreter.
        round_by_round: says of modules that a loop goes over in which round the graph ends, if it does.
        unrolled: the user's stacks where it does not all the same.
    """

    def __init__(
        self,
        known: KnownLoops,
        in_rounds: bool,
        env: ShapeEnv,
        length_of: Callable[[Any], int | torch.SymInt],
        lookup: Callable[[object], Any],
        user_frames: Callable[[], tuple[UserFrame, ...]],
    ) -> None:
        """
        in_rounds: a round may be going on where the function begins.
        """
        self.known = known
        self._length_of, self._lookup, self._user_frames = length_of, lookup, user_frames
        self.fixed: dict[SourcePlace, set[tuple[object, ...]]] = {}
        self._in_rounds = in_rounds
        self._env = env
        self.frames: Sequence[FrameState] = ()
        self.round_by_round: RoundByRound | None = None
        self.unrolled: Set[tuple[UserFrame, ...]] = frozenset()
        self._begun: dict[int, tuple[Start, tuple[UserFrame, ...]]] = {}  # what begins loops over modules, and where
        self._lengths: set[str] = set()  # symbols that are the lengths of what there is a version for
        self._asked: dict[tuple[FrameState, SourcePlace], set[str]] = {}

    @property
    def watches(self) -> bool:
        """Whether conditions of known numbers matter, too: the loop that this goes on with may have begun with them."""
        return self._in_rounds and bool(self.known)

    def release(self) -> None:
        """Lets go of the frames."""
        self.frames = ()
        self._asked.clear()
        self._begun.clear()

    # -- iteration --------------------------------------------------------------------------

    def begun(self, obj: Any, begin: Callable[[Any], object] = iter) -> Any:
        """An iterator over what has another length at each call, and any other object as it is."""
        if type(obj) is OpenRange:
            return self._rounds(begin, obj, "a range")
        if type(obj) is FakeTensor and self._is_long(obj):
            return self._rounds(begin, obj, "the rows of a tensor")
        table = _table(obj)
        if isinstance(table, GROWING) and table.ends:
            return self._rounds(begin, obj, f"the {type(table).__name__} at {table.source.expression()}")
        if self.round_by_round is not None and begin is iter and type(obj) in _HOLD_MODULES:
            return self._over_modules(obj)
        return obj

    def _over_modules(self, obj: Any) -> Any:
        modules, place = list(obj), self._user_frames()
        if not modules or place in self.unrolled or not all(isinstance(module, nn.Module) for module in modules):
            return obj
        assert self.round_by_round is not None
        ahead = self.round_by_round(modules)
        if ahead is None:
            return obj
        over = f"{len(modules)} modules ({type(modules[0]).__qualname__})"
        rounds = self._rounds(iter, obj, over, "repeated_modules", ahead)
        self._begun[id(rounds.iterator)] = rounds.iterator, place
        return rounds

    def _rounds(
        self,
        begin: Callable[[Any], object],
        obj: object,
        over: str,
        reason: str = "loop_of_each_length",
        ahead: int = 0,
    ) -> Rounds:
        return Rounds(Start(begin, obj, lambda start: self.refuse(Rounds(start, over, reason)), ahead), over, reason)

    def refuse(self, rounds: Rounds) -> NoReturn:
        """The next of its items is asked for. That is a round where a loop of a function asks: of a generator, and of C
        code, all that they do is done in one instruction of who asks for it."""
        frame, whole = self.frames[-1], rounds.iterator
        of_loop = dis.opname[frame.decoded.opcodes[frame.index - 1]] == "FOR_ITER"
        if not (of_loop and frame.function.__code__.co_flags & inspect.CO_GENERATOR == 0) and isinstance(whole, Start):
            if id(whole) in self._begun:
                raise Unrolled(self._begun[id(whole)][1])
            table = _table(whole.iterable)
            if isinstance(table, GROWING):
                raise table.refusal()
        raise BreakGraph(rounds.reason, f"the next round of a loop over {rounds.over}")

    def _is_long(self, tensor: FakeTensor) -> bool:
        """Whether a tensor has another number of rows at each call."""
        rows = tensor.shape[0] if tensor.dim() and class_of(tensor) is None and not stands_for_one(tensor) else 0
        return isinstance(rows, torch.SymInt) and self._varies(rows)

    def at_item(self, obj: object, key: object) -> None:
        """An item is read or written. Raises where it is that of a list whose number differs between rounds."""
        if self._in_rounds and type(obj) in (list, tuple) and isinstance(key, torch.SymInt):
            known = self._lookup(obj)
            if known is not None and type(obj) is list:
                raise ItemsVary(known.source)
            raise BreakGraph("list_of_each_length", "the item of a list at a number that another round has another of")

    def call(self, fn: object, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        """The result of a call that is about lengths, or MISSING. Others may not have what grows."""
        if fn is len and len(args) == 1 and isinstance(args[0], (GrowingList, GrowingTuple)):
            length = self._length_of(args[0])
            if args[0].ends and isinstance(length, torch.SymInt):
                self._lengths |= length.node.expr.symbols()
            return length
        if fn is range and not kwargs and set(map(type, args)) in _NUMBERS and self._varies(*args):
            return OpenRange(args)
        if fn is reversed and len(args) == 1 and not kwargs:
            begun = self.begun(args[0], reversed)
            if begun is not args[0]:
                return begun
        if type(fn) is MakesView and args and type(args[0]) is GrowingDict:
            return fn(*args, **kwargs)
        if not (any(fn is one for one in _ITERATES) and any(isinstance(arg, GROWING) and arg.ends for arg in args)):
            refuse_growing(fn, args, kwargs)
        return MISSING

    def _varies(self, *numbers: int | torch.SymInt) -> bool:
        """Whether there is a version for other numbers where the program is, which are to be those of a loop's rounds.
        If not, this capture is that version."""
        nodes = [number.node for number in numbers if isinstance(number, torch.SymInt)]
        if not all(node.has_hint() for node in nodes):
            return False  # a number of the data
        frame = self.frames[-1]
        place = place_of(frame.decoded, frame.function.__code__, frame.index - 1)
        hints = tuple(node.hint for node in nodes)
        if self._has_others(place, hints, {name for node in nodes for name in node.expr.symbols()}):
            return True
        self.fixed.setdefault(place, set()).add(hints)
        return False

    def _has_others(self, place: SourcePlace, hints: tuple[object, ...], symbols: Set[str]) -> bool:
        """Whether there are versions for another number of rounds at a place, or for another length of a list whose
        length is among these symbols."""
        known = self.known.get(place)
        if known is not None and (self._in_rounds or hints not in known):
            return True
        return not symbols.isdisjoint(self._lengths)

    # -- conditions -------------------------------------------------------------------------

    def at_test(self, frame: FrameState, value: object) -> None:
        """A conditional jump is about to ask for a truth. Raises BreakGraph where it is that of such a loop."""
        symbolic = isinstance(value, torch.SymBool)
        if not symbolic and not (self.watches and type(value) is bool):
            return
        place = loop_tests(frame.decoded, frame.function.__code__).get(frame.index - 1)
        if place is None:
            return
        if not symbolic:
            if place in self.known:
                raise BreakGraph("loop_of_each_length", _WHILE)
            return
        truth: Any = value
        condition = truth.node.expr
        if not truth.node.has_hint() or not can_be_written(condition):
            return
        symbols = condition.symbols()
        hints = tuple(self._env.symbols[name].hint for name in sorted(symbols))
        if self._has_others(place, hints, symbols):
            raise BreakGraph("loop_of_each_length", _WHILE)
        asked = self._asked.setdefault((frame, place), set())
        asked.add(str(condition))
        if len(asked) > 1:  # another condition in each round, so a version for each number of them
            self.fixed.setdefault(place, set()).add(hints)


def _table(obj: object) -> object:
    return obj.table if type(obj) is GrowingView else obj


def varies(value: object) -> bool:
    """Whether a value is another one at each call: a number, or what a loop over it goes through."""
    grows = isinstance(value, GROWING) and value.ends is not Ends.NOTHING
    return grows or isinstance(value, (torch.SymInt, torch.SymFloat, OpenRange))


def can_be_written(condition: object) -> bool:
    """Whether the text of a condition is Python."""
    if isinstance(condition, Connective):
        return can_be_written(condition.left) and can_be_written(condition.right)
    return isinstance(condition, Relation)


_NUMBERS = ({torch.SymInt}, {torch.SymInt, int})  # types of those of a range that are others at each call
_HOLD_MODULES = frozenset({type({}.values()), list, tuple})  # of a ModuleList, a Sequential, a part of one
_ITERATES = (enumerate, zip, map, filter, iter)
_WHILE = "the next round of a loop that lasts as long as a number says"
