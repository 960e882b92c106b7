"""Resume functions: a function's own bytecode, entered at a given instruction with a given stack and locals.

Calling convention
------------------
`make_resume(function, entrance)` returns a function of ONE argument, a list, which it empties:

    resume([*stack values, *entry values, *local values])

* Whoever calls it keeps nothing alive so: what the code gives up is gone where it would be gone in the function itself.
* Stack values: one for each `stack` slot that is not NULL, from the bottom of the value stack to its top.
  Iterators, bound `__exit__` methods of `with` blocks that are open, half-built lists: all are ordinary values.
* `StackSlot.HANDLER` is the slot that `PUSH_EXC_INFO` puts *below* the exception when a handler is entered. Its
  value in the list is the exception which that handler is handling, even where the exception itself is no longer on
  the stack; bare `raise`, `sys.exc_info()` and implicit chaining then see it, and leaving the handler restores what
  was handled where the resume function is called.
* Entry values: none for `Entry.NEXT`. For `Entry.CALL` a callable and the one argument that it is called with, in the
  place of the instruction at `at`: its result is pushed, its exceptions go to that instruction's handler, and its
  line is in tracebacks. So the frames of a stack of calls go on inside of each other. For `Entry.RAISE` an exception
  that arrives there (its traceback has the function already), for `Entry.LEAVE` one that is raised there and leaves,
  for `Entry.PASS` one that leaves and was raised there before.
* Local values: the raw contents of the local slots named in `locals`, in that order. For a cell or free variable
  this is the cell object, which stays shared with every other closure that has it. A slot not named is unset.

How it works: the bytecode is kept verbatim, and a prologue in front of it unpacks the list into the very slots and
stack positions that the original used, then jumps. Jumps are relative from Python 3.11 on, so none changes; the
exception and line tables are moved by the prologue's length. Names, lines and columns in tracebacks are the user's.
Local slots keep their numbers: the one argument arrives in slot 0 and is replaced by slot 0's own value at the end.
`origin_of` tells which function a resume function goes on with, so that it can be made to go on elsewhere in its turn.
"""

from __future__ import annotations

import dis
import enum
import opcode
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType

_SUSPENDS = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_STAR_ARGUMENTS = 0x04 | 0x08  # CO_VARARGS, CO_VARKEYWORDS
_NO_LOCATION = 15  # kind of a line table entry that maps its code units to no line
_LINE_ONLY = 13  # kind of a line table entry without columns


class StackSlot(enum.Enum):
    """What one position of the value stack holds at the resumed instruction."""

    VALUE = "value"
    NULL = "null"
    HANDLER = "handler"


class Entry(enum.Enum):
    """What a resume function does before it goes on."""

    NEXT = "next"
    CALL = "call"
    RAISE = "raise"
    LEAVE = "leave"  # raises past the function's own handlers
    PASS = "pass"  # the same, of an exception whose traceback has the function already


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where and how a function's code is entered.

    Attributes:
        offset: byte offset of the instruction to go on at (0 for an exception, which does not go on).
        stack: what the value stack holds there, without the result of a call.
        locals: the names of the slots that are set.
        at: byte offset of the instruction that the call or the exception of `entry` stands for.
    """

    offset: int
    stack: tuple[StackSlot, ...] = ()
    locals: tuple[str, ...] = ()
    entry: Entry = Entry.NEXT
    at: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """What a resume function was made of; its own code is the function's, `shift` bytes later."""

    function: FunctionType
    entrance: Entrance
    shift: int

    def offset(self, offset: int) -> int:
        """Where the function goes on that is behind byte `offset` of the resume function."""
        return offset - self.shift if offset >= self.shift else self.entrance.offset

    def at(self, offset: int) -> int:
        """The function's instruction that is executed at byte `offset` of the resume function."""
        return offset - self.shift if offset >= self.shift else self.entrance.at


_ORIGINS: weakref.WeakKeyDictionary[FunctionType, Origin] = weakref.WeakKeyDictionary()
_WRITTEN: dict[int, CodeType] = {}  # by the identity of resume functions' code: there may be two that are equal


def origin_of(function: FunctionType) -> Origin | None:
    """The origin of a resume function; None for any other function."""
    return _ORIGINS.get(function)


def written_code(code: CodeType) -> CodeType:
    """The code that the program has for this: of a resume function's, that of the function which it goes on with."""
    return _WRITTEN.get(id(code), code)


def make_resume(function: FunctionType, entrance: Entrance) -> FunctionType:
    """A function that goes on with `function`'s code as `entrance` says. The module docstring gives its convention.

    Raises ValueError when the code suspends (a generator or coroutine), when the offset is none of
    `instruction_starts`, or when a name in `locals` is not a variable of the code.
    """
    code = make_resume_code(function.__code__, entrance)
    # The real cells arrive in the list; these only satisfy the function's constructor.
    closure = tuple(CellType() for _ in code.co_freevars) or None
    resumed = FunctionType(code, function.__globals__, function.__name__, None, closure)
    resumed.__qualname__ = function.__qualname__
    resumed.__module__ = function.__module__
    shift = len(code.co_code) - len(function.__code__.co_code)
    _ORIGINS[resumed] = Origin(_without_closure(function), entrance, shift)
    _WRITTEN[id(code)] = written_code(function.__code__)
    weakref.finalize(code, _WRITTEN.pop, id(code)).atexit = False
    return resumed


def _without_closure(function: FunctionType) -> FunctionType:
    """The same code and names, holding nothing that the function's cells hold."""
    bare = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        None,
        tuple(CellType() for _ in function.__code__.co_freevars) or None,
    )
    bare.__qualname__, bare.__module__ = function.__qualname__, function.__module__
    return bare


def make_resume_code(code: CodeType, entrance: Entrance) -> CodeType:
    """The code object of `make_resume`."""
    if code.co_flags & _SUSPENDS:
        raise ValueError(f"{code.co_qualname} suspends: a generator or coroutine cannot be resumed as a function")
    if entrance.offset not in instruction_starts(code):
        raise ValueError(f"no instruction of {code.co_qualname} starts at byte {entrance.offset}")
    slots = slot_names(code)
    places = [_slot_index(slots, name, code) for name in entrance.locals]
    shell = _one_argument(code)
    unpack = _unpack(entrance, places, len(code.co_consts))
    entry, jump = _ENTRIES[entrance.entry], _jump(entrance.offset)
    units = [len(part) // 2 for part in (unpack, entry, jump)]
    count = sum(slot is not StackSlot.NULL for slot in entrance.stack) + _VALUES[entrance.entry] + len(places)
    return shell.replace(
        co_code=unpack + entry + jump + code.co_code,
        co_consts=(*code.co_consts, *range(count), None),
        co_stacksize=max(code.co_stacksize, len(entrance.stack) + 8),
        co_linetable=_prologue_lines(code, entrance, units) + code.co_linetable,
        co_exceptiontable=_exception_table(code, entrance, units),
    )


def slot_names(code: CodeType) -> tuple[str, ...]:
    """Names of the local slots in order: locals, then the cells that are no locals, then free variables."""
    local = set(code.co_varnames)
    return (*code.co_varnames, *(name for name in code.co_cellvars if name not in local), *code.co_freevars)


def instruction_starts(code: CodeType) -> frozenset[int]:
    """Byte offsets at which the code can be entered: where an instruction, with the EXTENDED_ARGs before it, begins.

    Between KW_NAMES and its CALL (3.11, 3.12) the interpreter holds the names outside the stack: no entry there.
    """
    starts = set()
    prefixed = names_held = False
    for instruction in dis.get_instructions(code):
        if not prefixed and not names_held:
            starts.add(instruction.offset)
        prefixed = instruction.opname == "EXTENDED_ARG"
        names_held = instruction.opname == "KW_NAMES" or (names_held and instruction.opname != "CALL")
    return frozenset(starts)


def _slot_index(slots: Sequence[str], name: str, code: CodeType) -> int:
    if name not in slots:
        raise ValueError(f"{name!r} is not a variable of {code.co_qualname}")
    return len(slots) - 1 - slots[::-1].index(name) if name in code.co_freevars else slots.index(name)


def _one_argument(code: CodeType) -> CodeType:
    """The same code with slot 0 as its only parameter and no slot moved."""
    plain = code.replace(
        co_argcount=0, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=code.co_flags & ~_STAR_ARGUMENTS
    )
    if code.co_varnames:
        return plain.replace(co_argcount=1, co_posonlyargcount=1)
    if code.co_cellvars:  # a cell that is also a parameter keeps its place in front
        first = code.co_cellvars[0]
    elif code.co_freevars:  # no cell and no local: the free variables become cells, in the same slots
        first = code.co_freevars[0]
        plain = plain.replace(co_cellvars=code.co_freevars, co_freevars=())
    else:
        first = "state"
    return plain.replace(co_varnames=(first,), co_nlocals=1, co_argcount=1, co_posonlyargcount=1)


def _instruction(name: str, argument: int = 0) -> bytes:
    """One instruction with the EXTENDED_ARGs and inline caches that it needs."""
    number = dis.opmap[name]
    prefixes = []
    for shift in (24, 16, 8):
        if argument >> shift:
            prefixes += [dis.EXTENDED_ARG, argument >> shift & 0xFF]
    return bytes([*prefixes, number, argument & 0xFF]) + b"\0\0" * _cache_units(name)


def _cache_units(name: str) -> int:
    entries = opcode._inline_cache_entries  # type: ignore[attr-defined]
    return int(entries.get(name, 0)) if isinstance(entries, dict) else int(entries[dis.opmap[name]])


def _unpack(entrance: Entrance, places: Sequence[int], first_index: int) -> bytes:
    """Unpacks the list in slot 0, and empties it: the stack from its bottom, what the entry takes, the locals."""
    out = bytearray(_instruction("RESUME"))
    values = _VALUES[entrance.entry]
    held = sum(slot is not StackSlot.NULL for slot in entrance.stack)
    count = held + values + len(places)
    following = iter(range(first_index, first_index + count))

    def load(index: int) -> bytes:
        return _instruction("LOAD_FAST", 0) + _instruction("LOAD_CONST", index) + _instruction("BINARY_SUBSCR")

    for slot in entrance.stack:
        if slot is StackSlot.NULL:
            out += _instruction("PUSH_NULL")
            continue
        out += load(next(following))
        if slot is StackSlot.HANDLER:  # leaves what was handled before below the exception, and makes it current
            out += _instruction("PUSH_EXC_INFO") + _instruction("POP_TOP")
    operands = [load(next(following)) for _ in range(values)]
    if entrance.entry is Entry.CALL:  # the empty slot lies above the callee from 3.13 on, below it before
        operands.insert(1 if sys.version_info >= (3, 13) else 0, _instruction("PUSH_NULL"))
    out += b"".join(operands)
    indices = dict(zip(places, following, strict=False))
    for place, index in indices.items():
        if place:
            out += load(index) + _instruction("STORE_FAST", place)
    out += load(indices[0]) if 0 in indices else b""
    out += _instruction("LOAD_FAST", 0) + _instruction("LOAD_CONST", first_index + count) * 2
    out += _instruction("BUILD_SLICE", 2) + _instruction("DELETE_SUBSCR")
    out += _instruction("STORE_FAST" if 0 in indices else "DELETE_FAST", 0)
    return bytes(out)


# How many values of the list each entry takes, and what it executes on them.
_VALUES = {Entry.NEXT: 0, Entry.CALL: 2, Entry.RAISE: 1, Entry.LEAVE: 1, Entry.PASS: 1}
_ENTRIES = {
    Entry.NEXT: b"",
    Entry.CALL: (_instruction("PRECALL", 1) if "PRECALL" in dis.opmap else b"") + _instruction("CALL", 1),
    Entry.RAISE: _instruction("RERAISE", 0),
    Entry.LEAVE: _instruction("RAISE_VARARGS", 1),
    Entry.PASS: _instruction("RERAISE", 0),
}


def _jump(offset: int) -> bytes:
    """A jump from the end of the prologue to byte `offset` of the original code, which follows it."""
    return _instruction("JUMP_FORWARD", offset // 2)


def _prologue_lines(code: CodeType, entrance: Entrance, units: Sequence[int]) -> bytes:
    """The line table of the prologue: its entry is at the line of the instruction that it stands for."""
    unpack, entry, jump = units
    line = None
    if entry:
        spans = code.co_lines()
        line = next((found for start, end, found in spans if start <= entrance.at < end and found is not None), None)
    if line is None:
        return _no_lines(unpack + entry + jump)
    delta = line - code.co_firstlineno
    return _no_lines(unpack) + _lines(entry, delta) + _lines(jump, -delta)


def _no_lines(units: int) -> bytes:
    """Line table entries that map `units` code units to no line."""
    out = bytearray()
    while units > 0:
        length = min(units, 8)
        out.append(0x80 | _NO_LOCATION << 3 | length - 1)
        units -= length
    return bytes(out)


def _lines(units: int, delta: int) -> bytes:
    """Line table entries that map `units` code units to the line `delta` lines after that of the entry before."""
    out = bytearray()
    while units > 0:
        length = min(units, 8)
        out.append(0x80 | _LINE_ONLY << 3 | length - 1)
        number = abs(delta) << 1 | (delta < 0)  # groups of six bits, the lowest first
        while number >= 64:
            out.append(number & 63 | 64)
            number >>= 6
        out.append(number)
        units -= length
        delta = 0
    return bytes(out)


def _exception_table(code: CodeType, entrance: Entrance, units: Sequence[int]) -> bytes:
    """Every range and target moved behind the prologue, whose entry has the handler of what it stands for."""
    unpack, entry, _ = units
    shift = sum(units)
    numbers = _read_varints(code.co_exceptiontable)
    out = bytearray()
    for start, length, target, depth in zip(numbers, numbers, numbers, numbers, strict=False):
        if entry and entrance.entry in (Entry.CALL, Entry.RAISE) and start <= entrance.at // 2 < start + length:
            # One code unit earlier: 3.13 looks for the handler of a callee's exception in front of the call. The last
            # instruction of the unpacking is there, which raises nothing.
            out = bytearray(_write_varints((unpack - 1, entry + 1, target + shift, depth))) + out
        out += _write_varints((start + shift, length, target + shift, depth))
    return bytes(out)


def _read_varints(table: bytes) -> Iterator[int]:
    """Big-endian groups of six bits; bit 6 says that more follow (bit 7 marks an entry's first byte)."""
    position = 0
    while position < len(table):
        value = table[position] & 63
        while table[position] & 64:
            position += 1
            value = value << 6 | table[position] & 63
        position += 1
        yield value


def _write_varints(numbers: Iterable[int]) -> bytes:
    out = bytearray()
    for number in numbers:
        groups = [number & 63]
        while number := number >> 6:
            groups.append(number & 63 | 64)
        out += bytes(reversed(groups))
    out[0] |= 0x80
    return bytes(out)


if not (3, 11) <= sys.version_info < (3, 14):
    raise ImportError("resume functions are written for the bytecode of Python 3.11 to 3.13")
