"""Code objects decoded once: instructions with resolved operands, jump targets as indices, the exception table.

`co_code` is read (never the adaptive copy), so that specialised and instrumented code looks as compiled.
"""

from __future__ import annotations

import dis
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Handler = Callable[[Any, Any], object]  # called with the frame and the operand that it decodes

_CACHE = dis.opmap["CACHE"]
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_LOAD_FAST = dis.opmap["LOAD_FAST"]
_BUILD_TUPLE = dis.opmap["BUILD_TUPLE"]
_RETURN_VALUE = dis.opmap["RETURN_VALUE"]
_RESUME = dis.opmap["RESUME"]
_HAS_NAME = frozenset(dis.hasname)
_HAS_CONST = frozenset(dis.hasconst)
_HAS_JUMP = frozenset(dis.hasjrel)
_RAISE = dis.opmap["RAISE_VARARGS"]
# What ends a stretch of instructions that follow one another.
_GOES_ELSEWHERE = _HAS_JUMP | {
    code for name, code in dis.opmap.items() if name.startswith(("RETURN_", "YIELD_", "RERAISE"))
}
_LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_NOT_RUN_HERE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Instruction(NamedTuple):
    """One instruction as the run loop wants it."""

    handler: Handler
    operand: Any


class ExceptionEntry(NamedTuple):
    """A range of offsets and where an exception raised there goes."""

    start: int
    end: int
    target: int  # index of the handler's first instruction
    depth: int  # stack entries kept
    lasti: bool  # the offset of the raising instruction is pushed first


@dataclass(slots=True, eq=False)
class DecodedCode:
    """What a frame needs of a code object."""

    name: str
    filename: str
    program: list[Instruction]
    opcodes: list[int]
    arguments: list[int]
    offsets: list[int]  # of each instruction; a jump goes to its first EXTENDED_ARG
    index_of: dict[int, int]
    exceptions: tuple[ExceptionEntry, ...]
    local_names: tuple[str, ...]  # in the order of the frame's slots
    simple_arguments: int  # number of arguments when all are positional, else -1
    is_coroutine: bool
    binder: types.CodeType
    line_table: list[tuple[int, int, int | None]]
    lines: dict[int, int] = field(default_factory=dict)
    live: list[int] | None = None  # slots that are read later, as bits, for each instruction; filled in when asked
    raising: dict[int, bool] = field(default_factory=dict)  # what `raises` has said
    positions: list[tuple[int | None, ...]] | None = None  # in the source, of each code unit; filled in when asked
    tests: dict[int, tuple[object, ...]] | None = None  # what `loop_tests` has found

    def handler(self, offset: int) -> ExceptionEntry | None:
        """Where an exception raised at `offset` goes."""
        return next((entry for entry in self.exceptions if entry.start <= offset < entry.end), None)

    def raises(self, index: int) -> bool:
        """Whether what begins at an instruction ends in a `raise`, with no jump and no return before it."""
        known = self.raising.get(index)
        if known is None:
            ends = (op for op in self.opcodes[index:] if op == _RAISE or op in _GOES_ELSEWHERE)
            known = self.raising[index] = next(ends, None) == _RAISE
        return known

    def following(self, index: int) -> list[int]:
        """The instructions that may come next, where nothing is raised."""
        op = self.opcodes[index]
        name = dis.opname[op]
        if name in _LEAVES:
            return []
        found = [] if name.startswith("JUMP_") and "IF" not in name else [index + 1]
        return [*found, self.program[index].operand] if op in _HAS_JUMP else found

    def line(self, index: int) -> int:
        """The source line of an instruction."""
        offset = self.offsets[index]
        known = self.lines.get(offset)
        if known is None:
            found = (line for start, end, line in self.line_table if start <= offset < end and line is not None)
            known = self.lines[offset] = next(found, 0)
        return known


class CodeCache:
    """Decoded code by code object. Identity is the key: hashing a code object reads all of it."""

    def __init__(self, handlers: Mapping[int, Handler], missing: Callable[[int], Handler]) -> None:
        self._handlers = handlers
        self._missing = missing
        self._entries: dict[int, tuple[weakref.ref[types.CodeType], DecodedCode]] = {}

    def get(self, code: types.CodeType) -> DecodedCode:
        """The decoded code, which is kept as long as the code lives."""
        entry = self._entries.get(id(code))
        if entry is not None and entry[0]() is code:
            return entry[1]
        decoded = decode(code, self._handlers, self._missing)
        key, entries = id(code), self._entries
        entries[key] = (weakref.ref(code, lambda _: entries.pop(key, None)), decoded)
        return decoded


def decode(code: types.CodeType, handlers: Mapping[int, Handler], missing: Callable[[int], Handler]) -> DecodedCode:
    """Code as instructions with their handlers, jumps as places in the list, and what frames need beside them."""
    raw = code.co_code
    opcodes: list[int] = []
    arguments: list[int] = []
    offsets: list[int] = []
    following: list[int] = []  # offset after the instruction and its caches: jumps count from there
    index_of: dict[int, int] = {}
    extended, start = 0, -1
    for offset in range(0, len(raw), 2):
        op = raw[offset]
        if op == _CACHE:
            following[-1] = offset + 2
            continue
        if start < 0:
            start = offset
        argument = raw[offset + 1] | extended
        if op == _EXTENDED_ARG:
            extended = argument << 8
            continue
        index_of[start] = index_of[offset] = len(opcodes)
        opcodes.append(op)
        arguments.append(argument)
        offsets.append(offset)
        following.append(offset + 2)
        extended, start = 0, -1
    program = []
    for index, (op, argument) in enumerate(zip(opcodes, arguments, strict=True)):
        operand: object = argument
        if op in _HAS_JUMP:
            backward = "BACKWARD" in dis.opname[op]
            operand = index_of[following[index] + (-2 if backward else 2) * argument]
        elif op in _HAS_CONST:
            operand = code.co_consts[argument]
        elif op in _HAS_NAME:
            operand = _NAME_OPERAND.get(dis.opname[op], _plain_name)(code.co_names, argument)
        program.append(Instruction(handlers.get(op) or missing(op), operand))
    simple = flat_size(code) == code.co_argcount
    return DecodedCode(
        name=code.co_name,
        filename=code.co_filename,
        program=program,
        opcodes=opcodes,
        arguments=arguments,
        offsets=offsets,
        index_of=index_of,
        exceptions=tuple(_exception_table(code.co_exceptiontable, index_of)),
        local_names=slot_names(code),
        simple_arguments=code.co_argcount if simple else -1,
        is_coroutine=bool(code.co_flags & _NOT_RUN_HERE),
        binder=_binder(code),
        line_table=list(code.co_lines()),
    )


def slot_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of the frame's slots in order: locals, then the cells that are no locals, then free variables."""
    own = set(code.co_varnames)
    return (*code.co_varnames, *(name for name in code.co_cellvars if name not in own), *code.co_freevars)


# Some operands carry flags beside the name's index.
def _plain_name(names: tuple[str, ...], argument: int) -> object:
    return names[argument]


def _name_and_bit(names: tuple[str, ...], argument: int) -> object:
    return names[argument >> 1], argument & 1


def _super_name(names: tuple[str, ...], argument: int) -> object:
    return names[argument >> 2], argument & 1, argument & 2


def _is_312() -> bool:
    return "LOAD_SUPER_ATTR" in dis.opmap


_NAME_OPERAND: dict[str, Callable[[tuple[str, ...], int], object]] = {
    "LOAD_GLOBAL": _name_and_bit,
    "LOAD_ATTR": _name_and_bit if _is_312() else _plain_name,
    "LOAD_SUPER_ATTR": _super_name,
}


def _exception_table(table: bytes, index_of: dict[int, int]) -> list[ExceptionEntry]:
    """Entries are four integers in base 64, most significant first; bit 6 marks that more follows."""
    numbers: list[int] = []
    value = 0
    for byte in table:
        value = value << 6 | byte & 63
        if not byte & 64:
            numbers.append(value)
            value = 0
    entries = []
    for start, length, target, packed in zip(*(iter(numbers),) * 4, strict=True):
        entry = ExceptionEntry(start * 2, (start + length) * 2, index_of[target * 2], packed >> 1, bool(packed & 1))
        entries.append(entry)
    return entries


def flat_size(code: types.CodeType) -> int:
    """Number of argument slots, those of `*args` and `**kwargs` included."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _binder(code: types.CodeType) -> types.CodeType:
    """Code with the signature of `code` that returns its arguments as a tuple.

    CPython itself then binds the arguments, with its own error messages.
    """
    flags = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) | inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
    count = flat_size(code)
    body = bytearray((_RESUME, 0))
    for op, argument in (*((_LOAD_FAST, i) for i in range(count)), (_BUILD_TUPLE, count)):
        if argument > 255:
            body += bytes((_EXTENDED_ARG, argument >> 8))
        body += bytes((op, argument & 255))
    body += bytes((_RETURN_VALUE, 0))
    return code.replace(
        co_code=bytes(body),
        co_flags=flags,
        co_nlocals=count,
        co_varnames=code.co_varnames[:count],
        co_cellvars=(),
        co_freevars=(),
        co_names=(),
        co_consts=(None,),
        co_exceptiontable=b"",
        co_linetable=b"",
        co_stacksize=count + 1,
    )
