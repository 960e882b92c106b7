"""Code after a graph break: the breaking instruction for real, then the rest of the function.

The generated code executes the one instruction by a Python statement of the same meaning (`_RULES`), and the resume
function that follows it is compiled in its turn. Where the instruction stands inside of a `try` or `with`, the
statement is guarded: an exception enters the user's own handler, by a resume function that runs uncompiled.
An instruction without a rule is left to a resume function entered at the instruction itself, uncompiled.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchdynamo.capture import Stopped
from torchdynamo.codegen import Codegen
from torchdynamo.interpreter.decode import ExceptionEntry
from torchdynamo.interpreter.protocol import NULL
from torchdynamo.reasons import BreakGraph
from torchdynamo.resume import StackSlot
from torchdynamo.torch_calls import runs_unhooked

Resume = Callable[[int, tuple[StackSlot, ...], tuple[str, ...], bool], Any]
Lines = list[str]

_END = object()  # what `next` of an exhausted iterator gives


@dataclass(slots=True)
class Step:
    """How the breaking instruction is executed.

    Attributes:
        lines: statements that execute it.
        stack: the values below its operands, which stay on the stack.
        pushed: what it puts on the stack: names that `lines` bind, or NULL.
        calls: whether it may call the user's own functions.
        branches: (condition, code offset, stack, pushed) where it may go instead of to the next instruction.
    """

    lines: Lines
    stack: list[Any]
    pushed: list[Any] = field(default_factory=lambda: ["r"])
    calls: bool = True
    branches: list[tuple[str, int, list[Any], list[Any]]] = field(default_factory=list)


@dataclass(slots=True)
class Place:
    """The instruction that breaks, its operands on the stack, and who writes the code."""

    codegen: Codegen
    stopped: Stopped
    resume: Resume
    instruction: dis.Instruction
    stack: list[Any]

    def pop(self) -> str:
        return self.codegen.value(self.stack.pop())

    def enter(self, offset: int, stack: list[Any], pushed: list[Any], compiled: bool) -> str:
        """The statement that goes on at `offset` of the function's code."""
        entries = [*stack, *pushed]
        slots = tuple(StackSlot.NULL if entry is NULL else StackSlot.VALUE for entry in entries)
        values = [self.codegen.value(value) for value in stack if value is not NULL]
        values += [name for name in pushed if name is not NULL]
        values += [self.codegen.value(value) for value in self.stopped.locals.values()]
        entry = self.codegen.pin(self.resume(offset, slots, tuple(self.stopped.locals), compiled))
        return f"return {entry}(({''.join(f'{value}, ' for value in values)}))"

    def handler(self) -> ExceptionEntry | None:
        """Where an exception raised by the instruction goes in the user's frame."""
        offset = self.stopped.frame.decoded.offsets[self.stopped.index]
        entries = self.stopped.frame.decoded.exceptions
        return next((entry for entry in entries if entry.start <= offset < entry.end), None)


def continue_after(codegen: Codegen, stopped: Stopped, resume: Resume, run: str | None) -> Lines:
    """Statements that end the generated function.

    Args:
        resume: gives the callable that enters the code at (offset, stack, locals), compiled or plain.
        run: expression of a context in which the user's own functions are called, or None.
    """
    codegen.keep_iterators = True
    frame = stopped.frame
    decoded = frame.decoded
    if frame.interpreter.handled_exception() is not None:
        raise BreakGraph("rebuild", "the break is inside of an exception handler")
    name = dis.opname[decoded.opcodes[stopped.index]]
    place = Place(codegen, stopped, resume, _instruction(stopped, name), list(stopped.stack))
    rule = _RULES.get(name)
    if rule is not None:
        step = rule(place)
        if step is not None:
            return _compiled_rest(place, step, run)
    index = stopped.index
    while dis.opname[decoded.opcodes[index]] in ("CALL", "PRECALL") and frame.keyword_names:
        index -= 1  # the names of keyword arguments are no stack entry: enter where they are pushed
    rest = place.enter(decoded.offsets[index], stopped.stack, [], False)
    return [rest] if run is None else [f"with {run}:", f"    {rest}"]


def _instruction(stopped: Stopped, name: str) -> dis.Instruction:
    offset = stopped.frame.decoded.offsets[stopped.index]  # of its first EXTENDED_ARG
    code = stopped.frame.function.__code__
    return next(i for i in dis.get_instructions(code) if i.offset >= offset and i.opname == name)


def _compiled_rest(place: Place, step: Step, run: str | None) -> Lines:
    decoded = place.stopped.frame.decoded
    lines = step.lines
    if run is not None and step.calls:
        lines = [f"with {run}:", *_indented(lines)]
    handler = place.handler()
    if handler is not None:
        pushed = [str(place.instruction.offset // 2)] * handler.lasti + ["failed"]
        offset = decoded.offsets[handler.target]
        rest = place.enter(offset, place.stopped.stack[: handler.depth], pushed, False)
        into_handler = [rest] if run is None else [f"with {run}:", f"    {rest}"]
        lines = ["failed = None", "try:", *_indented(lines), "except BaseException as error:", "    failed = error"]
        lines += ["if failed is not None:", *_indented(into_handler)]
    for condition, offset, stack, pushed in step.branches:
        lines = [*lines, f"if {condition}:", f"    {place.enter(offset, stack, pushed, True)}"]
    following = decoded.offsets[place.stopped.index + 1]
    return [*lines, place.enter(following, step.stack, step.pushed, True)]


def _indented(lines: Lines) -> Lines:
    return [f"    {line}" for line in lines]


# -- rules ------------------------------------------------------------------------------------


def _call(place: Place) -> Step:
    codegen, stack, argument = place.codegen, place.stack, place.instruction.arg or 0
    names: tuple[str, ...] = place.stopped.frame.keyword_names
    if place.instruction.opname == "CALL_FUNCTION_EX":
        keywords = stack.pop() if argument & 1 else {}
        star = stack.pop()
        second, first = stack.pop(), stack.pop()
        callee = second if first is NULL else first
        arguments = [f"*{codegen.value(star)}", f"**{codegen.value(keywords)}"]
    else:
        if place.instruction.opname == "CALL_KW":
            names = stack.pop()
        values = stack[len(stack) - argument :]
        del stack[len(stack) - argument :]
        second, first = stack.pop(), stack.pop()
        bound = [value for value in (first, second) if value is not NULL]
        callee, values = bound[0], bound[1:] + values
        split = len(values) - len(names)
        arguments = [codegen.value(value) for value in values[:split]]
        arguments += [f"{key}={codegen.value(value)}" for key, value in zip(names, values[split:], strict=True)]
    call = f"r = {codegen.value(callee)}({', '.join(arguments)})"
    plain = runs_unhooked(callee)
    return Step([call], stack, calls=not plain)


def _branch(place: Place) -> Step:
    stack, name = place.stack, place.instruction.opname
    condition = stack.pop()
    kept = [condition] if "OR_POP" in name else []
    test = "not r" if "FALSE" in name else "r"
    target = place.instruction.argval
    lines = [f"r = True if {place.codegen.value(condition)} else False"]
    return Step(lines, stack, [], branches=[(test, target, stack + kept, [])])


def _for_iter(place: Place) -> Step:
    stack = place.stack
    target = place.instruction.argval
    for name in ("END_FOR", "POP_TOP") if sys.version_info >= (3, 13) else ("END_FOR",):
        if dis.opname[place.stopped.frame.function.__code__.co_code[target]] == name:
            target += 2  # the iterator is off the stack already
    end = place.codegen.pin(_END)
    lines = [f"r = next({place.codegen.value(stack[-1])}, {end})"]
    return Step(lines, stack, branches=[(f"r is {end}", target, stack[:-1], [])])


def _before_with(place: Place) -> Step:
    manager = place.pop()
    lines = [f"leave = {manager}.__exit__", f"r = {manager}.__enter__()"]
    return Step(lines, place.stack, ["leave", "r"])


def _binary(place: Place) -> Step:
    b, a, symbol = place.pop(), place.pop(), place.instruction.argrepr
    lines = [f"r = {a}", f"r {symbol} {b}"] if symbol.endswith("=") else [f"r = {a} {symbol} {b}"]
    return Step(lines, place.stack)


def _compare(place: Place) -> Step:
    b, a = place.pop(), place.pop()
    as_bool = place.instruction.argrepr.startswith("bool(")
    compared = f"{a} {place.instruction.argval} {b}"
    return Step([f"r = bool({compared})" if as_bool else f"r = {compared}"], place.stack)


def _contains(place: Place) -> Step:
    container, item = place.pop(), place.pop()
    return Step([f"r = {item} {'not in' if place.instruction.arg else 'in'} {container}"], place.stack)


def _unary(symbol: str) -> Callable[[Place], Step]:
    return lambda place: Step([f"r = {symbol}{place.pop()}"], place.stack)


def _subscript(place: Place) -> Step:
    key, container = place.pop(), place.pop()
    return Step([f"r = {container}[{key}]"], place.stack)


def _store_subscript(place: Place) -> Step:
    key, container, value = place.pop(), place.pop(), place.pop()
    return Step([f"{container}[{key}] = {value}"], place.stack, [])


def _slice(place: Place) -> Step:
    stop, start, container = place.pop(), place.pop(), place.pop()
    return Step([f"r = {container}[{start}:{stop}]"], place.stack)


def _store_slice(place: Place) -> Step:
    stop, start, container, value = (place.pop() for _ in range(4))
    return Step([f"{container}[{start}:{stop}] = {value}"], place.stack, [])


def _load_attribute(place: Place) -> Step:
    owner, name = place.pop(), place.instruction.argval
    method = place.instruction.opname == "LOAD_METHOD" or (
        sys.version_info >= (3, 12) and bool((place.instruction.arg or 0) & 1)
    )
    pushed: list[Any] = ["r"]
    if method:
        pushed = ["r", NULL] if sys.version_info >= (3, 13) else [NULL, "r"]
    return Step([f"r = getattr({owner}, {name!r})"], place.stack, pushed)


def _store_attribute(place: Place) -> Step:
    owner, value = place.pop(), place.pop()
    return Step([f"setattr({owner}, {place.instruction.argval!r}, {value})"], place.stack, [])


def _format(place: Place) -> Step:
    flags = place.instruction.arg or 0
    spec = place.pop() if flags & 4 else "''"
    value = place.pop()
    convert = ("", "str", "repr", "ascii")[flags & 3]
    return Step([f"r = format({convert}({value}), {spec})"], place.stack)


def _format_simple(place: Place) -> Step:
    return Step([f"r = format({place.pop()}, '')"], place.stack)


def _format_with_spec(place: Place) -> Step:
    spec, value = place.pop(), place.pop()
    return Step([f"r = format({value}, {spec})"], place.stack)


def _convert(place: Place) -> Step:
    convert = ("", "str", "repr", "ascii")[place.instruction.arg or 0]
    return Step([f"r = {convert}({place.pop()})"], place.stack)


def _unpack(place: Place) -> Step:
    names = [f"r{index}" for index in range(place.instruction.arg or 0)]
    left = "".join(f"{name}, " for name in names)
    return Step([f"({left}) = {place.pop()}" if names else f"() = {place.pop()}"], place.stack, list(reversed(names)))


_BRANCHES = (
    "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP",
)  # fmt: skip

_RULES: dict[str, Callable[[Place], Step | None]] = {
    **dict.fromkeys(("CALL", "CALL_KW", "CALL_FUNCTION_EX"), _call),
    **dict.fromkeys(_BRANCHES, _branch),
    "FOR_ITER": _for_iter,
    "BEFORE_WITH": _before_with,
    "BINARY_OP": _binary,
    "COMPARE_OP": _compare,
    "CONTAINS_OP": _contains,
    "UNARY_NEGATIVE": _unary("-"),
    "UNARY_INVERT": _unary("~"),
    "UNARY_POSITIVE": _unary("+"),
    "UNARY_NOT": _unary("not "),
    "TO_BOOL": lambda place: Step([f"r = True if {place.pop()} else False"], place.stack),
    "BINARY_SUBSCR": _subscript,
    "STORE_SUBSCR": _store_subscript,
    "BINARY_SLICE": _slice,
    "STORE_SLICE": _store_slice,
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), _load_attribute),
    "STORE_ATTR": _store_attribute,
    "FORMAT_VALUE": _format,
    "FORMAT_SIMPLE": _format_simple,
    "FORMAT_WITH_SPEC": _format_with_spec,
    "CONVERT_VALUE": _convert,
    "UNPACK_SEQUENCE": _unpack,
}
