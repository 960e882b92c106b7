"""Programs broken off before every instruction and gone on with: each must give what it gives whole.

Run as a script, by an interpreter that may have neither pytest nor torch.

The state before an instruction is read from the running frame (opcode trace events; the frame's layout through
ctypes), so the reference is CPython itself.
"""

from __future__ import annotations

import ctypes
import dis
import importlib.util
import sys
import threading
import traceback
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any


def load_resume() -> Any:
    """`torchdynamo.after_break.resume` by its path: it needs nothing else, and this interpreter may have no torch."""
    path = Path(__file__).parents[1] / "src" / "torchdynamo" / "after_break" / "resume.py"
    spec = importlib.util.spec_from_file_location("resume_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


resume = load_resume()
StackSlot, instruction_starts, make_resume = resume.StackSlot, resume.instruction_starts, resume.make_resume
Entrance = resume.Entrance
slot_names = resume.slot_names

POINTER = ctypes.sizeof(ctypes.c_void_p)
# Byte offset of `localsplus` inside _PyInterpreterFrame, alike in 3.11, 3.12 and 3.13.
LOCALSPLUS = 9 * POINTER
F_FRAME = 3 * POINTER  # in PyFrameObject: after refcount, type, f_back


class Unset:
    pass


def effect(instruction: dis.Instruction, jump: bool) -> int:
    if sys.version_info < (3, 12) and instruction.opname in ("PRECALL", "CALL"):
        # dis takes the arguments off at PRECALL; the interpreter does at CALL
        return 0 if instruction.opname == "PRECALL" else -1 - int(instruction.arg or 0)
    argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    return dis.stack_effect(instruction.opcode, argument, jump=jump)


def stack_depths(code: CodeType) -> dict[int, int]:
    """Height of the value stack before each instruction that can be reached."""
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    following = dict(zip(instructions, [*instructions][1:], strict=False))
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    depths = {0: 0}
    waiting = [0]

    def reach(offset: int, depth: int) -> None:
        if offset not in depths:
            depths[offset] = depth
            waiting.append(offset)

    while waiting:
        offset = waiting.pop()
        instruction, depth = instructions[offset], depths[offset]
        for entry in handlers:
            if entry.start <= offset < entry.end:
                reach(entry.target, entry.depth + entry.lasti + 1)
        if instruction.opcode in dis.hasjrel:
            reach(instruction.argval, depth + effect(instruction, jump=True))
        if instruction.opname not in ENDS and offset in following:
            reach(following[offset], depth + effect(instruction, jump=False))
    return depths


ENDS = {"RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD", "JUMP_BACKWARD"} | {
    "JUMP_BACKWARD_NO_INTERRUPT"
}


def raw_slots(frame: FrameType, top: int) -> list[Any]:
    """The frame's `top` first slots (locals, then value stack); Unset for NULL.

    Read from memory, where the interpreter keeps them between instructions; only the stack's height is elsewhere.
    """
    base = ctypes.c_void_p.from_address(id(frame) + F_FRAME).value
    assert base is not None
    out: list[Any] = []
    for i in range(top):
        place = base + LOCALSPLUS + i * POINTER
        empty = ctypes.c_void_p.from_address(place).value is None
        out.append(Unset if empty else ctypes.py_object.from_address(place).value)
    return out


class Breaker:
    """Runs a function to the `steps`-th instruction, and there calls the resume function with the frame's state."""

    def __init__(self, function: FunctionType, steps: int) -> None:
        self.function, self.steps, self.count = function, steps, 0
        self.starts = instruction_starts(function.__code__)
        self.depths = stack_depths(function.__code__)
        self.handlers: list[tuple[int, BaseException]] = []
        self.previous: tuple[str, int] = ("", 0)
        self.outcome: Any = None
        self.done = False

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not self.function.__code__:
            return None
        frame.f_trace = self.trace  # 3.13 heeds the next line only in a frame that is traced already
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and not self.done:
            self.step(frame)
        return self.trace

    def step(self, frame: FrameType) -> None:
        code, offset = frame.f_code, frame.f_lasti
        slots = raw_slots(frame, len(slot_names(code)) + self.depths[offset])
        stack = slots[len(slot_names(code)) :]
        self.follow_handlers(code, offset, stack)
        if offset not in self.starts or dis.opname[code.co_code[offset]] in ("MAKE_CELL", "COPY_FREE_VARS"):
            return
        self.count += 1
        if self.count == self.steps:
            self.done = True
            self.resume(offset, slots, stack)

    def follow_handlers(self, code: CodeType, offset: int, stack: list[Any]) -> None:
        name, argument = self.previous
        if name == "POP_EXCEPT" and self.handlers:
            self.handlers.pop()  # it may have popped a copy: the slot is a value like any other from now on
        if name == "SWAP":
            a, b = len(stack) - 1, len(stack) - argument
            self.handlers = [({a: b, b: a}.get(place, place), error) for place, error in self.handlers]
        self.handlers = [(place, error) for place, error in self.handlers if place < len(stack)]
        if name == "PUSH_EXC_INFO":
            self.handlers.append((len(stack) - 2, stack[-1]))
        self.previous = dis.opname[code.co_code[offset]], code.co_code[offset + 1]

    def resume(self, offset: int, slots: list[Any], stack: list[Any]) -> None:
        handlers = dict(self.handlers)
        kinds, values = [], []
        for place, value in enumerate(stack):
            if place in handlers:
                kinds.append(StackSlot.HANDLER)
                values.append(handlers[place])
            elif value is Unset:
                kinds.append(StackSlot.NULL)
            else:
                kinds.append(StackSlot.VALUE)
                values.append(value)
        names = [(n, v) for n, v in zip(slot_names(self.function.__code__), slots, strict=False) if v is not Unset]
        function = make_resume(self.function, Entrance(offset, tuple(kinds), tuple(n for n, _ in names)))
        state = [*values, *(v for _, v in names)]
        sys.settrace(None)

        def run() -> None:
            self.outcome = outcome(function, (state,))

        thread = threading.Thread(target=run)  # where no exception is being handled, as in the function's own caller
        thread.start()
        thread.join()


def outcome(function: Any, args: tuple[Any, ...]) -> Any:
    try:
        return "returned", repr(function(*args))  # at once: what goes on beside it may change the value
    except Exception as error:
        lines = [entry.lineno for entry in traceback.extract_tb(error.__traceback__) if entry.filename == __file__]
        context = error.__context__
        return type(error), str(error), lines[-1], type(context), str(context)


def loops(n: int) -> list[int]:
    out = []
    for i in range(n):
        if i == 3:
            continue
        j = i
        while j > 0:
            out.append(i * j)
            j -= 2
        else:
            out.append(-1)
    return out


class Manager:
    def __init__(self, log: list[str], swallow: bool) -> None:
        self.log, self.swallow = log, swallow

    def __enter__(self) -> Manager:
        self.log.append("enter")
        return self

    def __exit__(self, *error: object) -> bool:
        self.log.append(f"exit {error[1]}")
        return self.swallow


def withs(fail: bool) -> list[str]:
    log: list[str] = []
    with Manager(log, True) as outer, Manager(log, False):
        log.append(str(outer.swallow))
        if fail:
            raise ValueError("inside")
        log.append("after")
    return log


def tries(n: int) -> list[Any]:
    log: list[Any] = []
    for i in range(n):
        try:
            try:
                log.append(10 // (i - 1))
                if i == 2:
                    {}["missing"]
            except ZeroDivisionError as error:
                log.append(repr(error))
                log.append(repr(sys.exc_info()[1]))
                try:
                    raise
                except ArithmeticError:
                    log.append("again")
            finally:
                log.append("finally")
        except KeyError:
            log.append(repr(sys.exc_info()[1]))
        else:
            log.append("else")
    log.append(sys.exc_info()[1])
    return log


def chains() -> None:
    try:
        [][1]
    except IndexError:
        del_me = 3
        del del_me
        raise RuntimeError("second")


def returns_in_handler(x: int) -> Any:
    for i in range(x):
        try:
            if i == 1:
                return i / 0
        except ZeroDivisionError as error:
            return [str(error), i]
        finally:
            x += 1
    return None


def closures(a: int, b: int = 2) -> list[int]:
    total = a

    def add(k: int) -> int:
        nonlocal total
        total += k * b
        return total

    steps = [add(i) for i in range(3)]
    b = 5
    steps.append(add(total))
    shown = {k: (lambda: k + total)() for k in (1, 2)}
    return [*steps, *shown.values(), total, b]


def stars(first: int, *rest: int, key: str = "k", **more: int) -> Any:
    parts = (first, *rest, *more.values())
    merged = {**more, "key": key, **dict(zip("xyz", rest, strict=False))}
    return max(*parts, key=lambda v: -v), merged, f"{first!r:>4}|{key}|{rest[0] if rest else None}", parts[1:][::-1]


def comprehensions(n: int) -> Any:
    x = 100
    squares = [x * x for x in range(n) if x % 2]
    pairs = {(a, b): a + b for a in range(2) for b in squares}
    funcs = [lambda: x for x in range(2)]
    return squares, pairs, {x for x in squares}, x, [f() for f in funcs], sum(v for v in squares)


def matches(value: Any) -> Any:
    match value:
        case {"a": first, **rest}:
            return first, rest
        case [int(p), *others] if p > 1:
            return p, others
        case str() as text:
            return text.upper().strip().split("B")
    return None


def unset(flag: bool) -> int:
    if flag:
        later = 1
    return later + 1


def nothing() -> Any:
    return [len("abc"), sum([1, 2])]


class Base:
    def method(self, x: int) -> int:
        return x + 1


class Derived(Base):
    def method(self, x: int) -> int:
        y = super().method(x) * 2
        return y + super().method(y)

    def bare(self) -> int:
        return super().method(3)

    def celled(self) -> int:
        return (lambda: self.method(1))() + super().method(2)


def free_only() -> Any:
    captured = [1, 2]

    def inner() -> Any:
        return [v + len(captured) for v in captured]

    return inner


def chained(a: int, b: int) -> Any:
    c = a < b < 10 or not a
    d = (a, b)[a < b] if c else [a, b, *range(2)][1:3]
    a, b = b, a
    x = y = a + b
    assert x, "no"
    return c, d, a, b, y, a if b else c, {*range(a)}, print


CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (loops, (6,), {}),
    (withs, (False,), {}),
    (withs, (True,), {}),
    (tries, (4,), {}),
    (chains, (), {}),
    (returns_in_handler, (3,), {}),
    (closures, (1,), {}),
    (stars, (1, 2, 3), {"key": "q", "z": 9}),
    (comprehensions, (6,), {}),
    (matches, ({"a": 1, "b": 2},), {}),
    (matches, ([3, 4, 5],), {}),
    (matches, ("abc ",), {}),
    (unset, (True,), {}),
    (unset, (False,), {}),
    (nothing, (), {}),
    (Derived.method, (Derived(), 3), {}),
    (Derived.bare, (Derived(),), {}),
    (Derived.celled, (Derived(),), {}),
    (free_only(), (), {}),
    (chained, (1, 2), {}),
]


def check(case: int) -> int:
    """Number of places at which the program was broken off."""
    function, args, kwargs = CASES[case]
    expected = outcome(lambda: function(*args, **kwargs), ())
    steps = 0
    while True:
        steps += 1
        breaker = Breaker(function, steps)
        sys.settrace(breaker.trace)
        try:
            outcome(lambda: function(*args, **kwargs), ())  # what is left of the broken run is of no interest
        finally:
            sys.settrace(None)
        if not breaker.done:
            break
        assert breaker.outcome == expected, f"{function.__qualname__} broken at instruction {steps}"
    return steps - 1


def caller(x: int, log: list[Any]) -> Any:
    try:
        y = fail(
            x,
        )
    except ValueError as error:
        log.append((error.args, sys.exc_info()[1] is error))
        raise KeyError("handled")
    finally:
        log.append("finally")
    return y + x


def fail(x: int) -> int:
    raise ValueError(x)


def check_entries() -> int:
    """A call, an exception that arrives and one that leaves, in the place of the call of `fail` in `caller`."""
    code, entry = caller.__code__, resume.Entry
    calls = [i for i in dis.get_instructions(code) if i.opname == "CALL"]
    at, following = calls[0].offset, next(i.offset for i in dis.get_instructions(code) if i.offset > calls[0].offset)
    line = next(i.positions.lineno for i in calls[:1] if i.positions is not None)

    def enter(kind: Any, values: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        log: list[Any] = []
        entrance = Entrance(following if kind is entry.CALL else 0, (), ("x", "log"), kind, at)
        function = make_resume(caller, entrance)
        origin = resume.origin_of(function)
        assert origin.function.__code__ is code and origin.offset(origin.shift + following) == following
        assert origin.at(origin.shift - 2) == at
        try:
            return function([*values, 5, log]), log
        except Exception as error:
            lines = [e.lineno for e in traceback.extract_tb(error.__traceback__) if e.name == "caller"]
            return (type(error), lines, error.__context__), log

    given = ValueError(3)
    assert enter(entry.CALL, (lambda state: state[0] * 2, (4,))) == (13, ["finally"])
    (kind, lines, context), log = enter(entry.CALL, (lambda state: fail(state[0]), (3,)))
    assert kind is KeyError and lines == [line + 5] and log == [((3,), True), "finally"]
    assert [e.lineno for e in traceback.extract_tb(context.__traceback__) if e.name == "caller"] == [line]
    (kind, lines, context), log = enter(entry.RAISE, (given,))
    assert kind is KeyError and context is given and log == [((3,), True), "finally"]
    assert given.__traceback__ is None  # it has been through this function already
    (kind, lines, context), log = enter(entry.LEAVE, (given,))
    assert (kind, lines, log) == (ValueError, [line], [])
    return 4


if __name__ == "__main__":
    check_entries()
    print(sum(check(case) for case in range(len(CASES))))
