"""Code after a graph break: the breaking instruction for real, then the rest of the function.

A call and a branch are executed by the generated code, and the resume function that follows is compiled in
its turn. Any other instruction, and a call inside of a `try` or `with`, whose handlers belong to the user's
frame, is left to a resume function entered at the instruction itself, which runs uncompiled.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from typing import Any

from torchdynamo.capture import Stopped
from torchdynamo.codegen import Codegen
from torchdynamo.interpreter.protocol import NULL
from torchdynamo.reasons import BreakGraph
from torchdynamo.resume import StackSlot

Resume = Callable[[int, tuple[StackSlot, ...], tuple[str, ...], bool], Any]

_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})


def continue_after(codegen: Codegen, stopped: Stopped, resume: Resume, run: str | None) -> list[str]:
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
    argument = decoded.arguments[stopped.index]
    offset = decoded.offsets[stopped.index]
    protected = any(entry.start <= offset < entry.end for entry in decoded.exceptions)
    if name in _CALLS and not protected:
        return _call(codegen, stopped, resume, name, argument, run)
    if "JUMP" in name and ("TRUE" in name or "FALSE" in name):
        return _branch(codegen, stopped, resume, name)
    index = stopped.index
    while dis.opname[decoded.opcodes[index]] in ("CALL", "PRECALL") and frame.keyword_names:
        index -= 1  # the names of keyword arguments are no stack entry: enter where they are pushed
    rest = _enter(codegen, resume, decoded.offsets[index], stopped.stack, [], stopped.locals, False)
    return [rest] if run is None else [f"with {run}:", f"    {rest}"]


def _enter(
    codegen: Codegen,
    resume: Resume,
    offset: int,
    stack: list[Any],
    pushed: list[str],
    local_values: dict[str, Any],
    compiled: bool,
) -> str:
    slots = tuple(StackSlot.NULL if value is NULL else StackSlot.VALUE for value in stack)
    slots += (StackSlot.VALUE,) * len(pushed)
    values = [codegen.value(value) for value in stack if value is not NULL] + pushed
    values += [codegen.value(value) for value in local_values.values()]
    entry = codegen.pin(resume(offset, slots, tuple(local_values), compiled))
    return f"return {entry}(({''.join(f'{value}, ' for value in values)}))"


def _call(codegen: Codegen, stopped: Stopped, resume: Resume, name: str, argument: int, run: str | None) -> list[str]:
    stack = list(stopped.stack)
    names: tuple[str, ...] = stopped.frame.keyword_names
    if name == "CALL_FUNCTION_EX":
        keywords = stack.pop() if argument & 1 else {}
        star = stack.pop()
        second, first = stack.pop(), stack.pop()
        callee = second if first is NULL else first
        arguments = [f"*{codegen.value(star)}", f"**{codegen.value(keywords)}"]
    else:
        if name == "CALL_KW":
            names = stack.pop()
        values = stack[len(stack) - argument :]
        del stack[len(stack) - argument :]
        second, first = stack.pop(), stack.pop()
        bound = [value for value in (first, second) if value is not NULL]
        callee, values = bound[0], bound[1:] + values
        split = len(values) - len(names)
        arguments = [codegen.value(value) for value in values[:split]]
        arguments += [f"{key}={codegen.value(value)}" for key, value in zip(names, values[split:], strict=True)]
    call = f"{codegen.value(callee)}({', '.join(arguments)})"
    index = stopped.index + 1
    after = stopped.frame.decoded.offsets[index]
    tail = _enter(codegen, resume, after, stack, ["r"], stopped.locals, True)
    if run is None or isinstance(callee, types.BuiltinFunctionType):
        return [f"r = {call}", tail]
    return [f"with {run}:", f"    r = {call}", tail]


def _branch(codegen: Codegen, stopped: Stopped, resume: Resume, name: str) -> list[str]:
    stack = list(stopped.stack)
    condition = stack.pop()
    decoded = stopped.frame.decoded
    offset = decoded.offsets[stopped.index]
    found = next(
        i for i in dis.get_instructions(stopped.frame.function.__code__) if i.offset >= offset and "JUMP" in i.opname
    )
    target = found.argval
    following = decoded.offsets[stopped.index + 1]
    kept = [condition] if "OR_POP" in name else []
    jumps = _enter(codegen, resume, target, stack + kept, [], stopped.locals, True)
    falls = _enter(codegen, resume, following, stack, [], stopped.locals, True)
    test = codegen.value(condition)
    if "FALSE" in name:
        test = f"not {test}"
    return [f"if {test}:", f"    {jumps}", falls]
