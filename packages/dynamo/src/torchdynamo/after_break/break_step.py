"""Code after a graph break: the breaking instruction for real, then the rest of the program.

The generated code executes the one instruction by a Python statement of the same meaning (`_RULES`), and what follows
is compiled in its turn: a resume function of the innermost frame, called from within a resume function of the frame
that called it, and so on outwards. The statement is guarded: an exception is raised again within the resume functions,
at the user's line and under the user's own handlers. An instruction without a rule is left to a resume function
entered at the instruction itself, uncompiled.
"""

from __future__ import annotations

import dis
import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torchdynamo._C import Hook, hook_enabled
from torchdynamo.after_break.liveness import live_slots
from torchdynamo.after_break.resume import Entrance, Entry, StackSlot, make_resume, origin_of
from torchdynamo.after_break.stopped import Stopped, StoppedFrame
from torchdynamo.after_break.suspended import closes
from torchdynamo.calls import torch_calls
from torchdynamo.emit.codegen import GENERATED, Codegen
from torchdynamo.interpreter.decode import ExceptionEntry
from torchdynamo.interpreter.protocol import NULL
from torchdynamo.interpreter.state import HandlerSlot
from torchdynamo.marks import MarkKind, mark_of
from torchdynamo.outside import imports

# (function, entrance, compiled, frames inside) -> what enters the function there. What goes on inside of it is named so
# that each chain of frames has a compiled continuation of its own, not a version of one.
Resume = Callable[[types.FunctionType, Entrance, bool, tuple[types.FunctionType, ...]], object]
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
        bound: variables that it sets, by the names that `lines` bind.
        executed: how many instructions it stands for; 0 when it always raises.
        raised: the expressions of what it raises, if it can only raise.
        again: what it raises was raised in the frame before: the traceback has it.
        returns: it leaves its frame, and what it pushes is the result of the call.
    """

    lines: Lines
    stack: list[Any]
    pushed: list[Any] = field(default_factory=lambda: ["r"])
    calls: bool = True
    branches: list[tuple[str, int, list[object], list[object]]] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    executed: int = 1
    again: bool = False
    raised: tuple[str, ...] = ()
    returns: bool = False


class Next:
    """What generated code returns when the program goes on in a continuation.

    The frame of the generated code is gone by then: whatever only its variables held is given up before the program
    goes on.

    Attributes:
        state: emptied by the continuation.
        error: what the breaking instruction has raised.
    """

    __slots__ = ("entry", "error", "state")

    def __init__(
        self, entry: Callable[[object], object], state: list[object], error: BaseException | None = None
    ) -> None:
        self.entry = entry
        self.state = state
        self.error = error


def started(compiled: Callable[..., object]) -> Callable[..., object]:
    """Runs a program from its beginning through its continuations, however many, at one depth of the stack."""

    def run(inputs: list[object], *flat: object) -> object:
        result = compiled(inputs, *flat)
        while type(result) is Next:
            if result.error is not None:
                empty_callers(result.error)
                result.error = None
            result = result.entry(result.state)
        return result

    return run


@dataclass(slots=True)
class Place:
    """The instruction that breaks, its operands on the stack, and who writes the code."""

    codegen: Codegen
    stopped: Stopped
    resume: Resume
    instruction: dis.Instruction
    stack: list[Any]
    around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lambda entry: entry  # what enters a continuation

    @property
    def here(self) -> StoppedFrame:
        """The innermost frame."""
        return self.stopped.frames[-1]

    def pop(self) -> str:
        """An expression for the top of the stack, which is taken off."""
        return self.codegen.value(self.stack.pop())

    def enter(
        self,
        offset: int,
        stack: list[object],
        pushed: list[object],
        compiled: bool = True,
        bound: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The call that goes on at `offset` of the innermost frame's code, and behind it in the frames outside."""
        return self._chain(offset, Entry.NEXT, stack, pushed, compiled, bound)

    def back(self, pushed: list[object]) -> str:
        """The call that goes on behind the innermost frame's own."""
        *frames, _ = self.stopped.frames
        caller = frames[-1]
        following = _start(caller, caller.index + 1)
        return self._chain(following, Entry.NEXT, caller.stack, pushed, True, {}, frames)

    def arrive(self, name: str) -> str:
        """The call that goes on in the handler of the exception `name`, in the innermost frame that has one."""
        frames = self.stopped.frames
        while (handler := _handler(frames[-1])) is None:
            frames = frames[:-1]
        stack = self.stack if frames[-1] is self.here else frames[-1].stack
        return self._chain(0, Entry.RAISE, stack[: handler.depth], [name], True, {}, frames, name)

    def leave(self, name: str, entry: Entry) -> str:
        """The call that raises the exception `name` where the instruction stands, and passes all the frames."""
        return self._chain(0, entry, [], [name], False, {}, error=name)

    def _chain(
        self,
        offset: int,
        entry: Entry,
        stack: list[object],
        pushed: list[object],
        compiled: bool,
        bound: Mapping[str, str],
        frames: Sequence[StoppedFrame] | None = None,
        error: str | None = None,
    ) -> str:
        *outer, inner = frames or self.stopped.frames
        function, state = self._state(inner, offset, entry, stack, pushed, compiled and not outer, bound, ())
        within: tuple[types.FunctionType, ...] = ()
        for depth in range(len(outer) - 1, -1, -1):
            caller = outer[depth]
            following = _start(caller, caller.index + 1)
            within = (*within, function)
            inside: list[object] = [self.codegen.pin(function), state]
            function, state = self._state(
                caller, following, Entry.CALL, caller.stack, inside, compiled and not depth, {}, within
            )
        raised = f", {error}" if error is not None else ""
        return f"{self.codegen.pin(Next)}({self.codegen.pin(self.around(function))}, {state}{raised})"

    def _state(
        self,
        frame: StoppedFrame,
        offset: int,
        entry: Entry,
        stack: list[object],
        pushed: list[object],
        compiled: bool,
        bound: Mapping[str, str],
        within: tuple[types.FunctionType, ...],
    ) -> tuple[Any, str]:
        """The resume function of one frame, and an expression of its argument."""
        at = frame.frame.decoded.offsets[frame.index]
        entries = [*stack, *pushed] if entry is Entry.NEXT else stack
        slots = tuple(map(_kind_of_slot, entries))
        values = [self._stack_value(frame, place) for place, slot in enumerate(stack) if slot is not NULL]
        values += [name for name in pushed if name is not NULL]
        names = _carried(frame, offset, entry, bound)
        values += [bound[name] if name in bound else self.codegen.value(frame.locals[name]) for name in names]
        function = frame.frame.function
        origin = origin_of(function)
        if origin is not None:  # go on with the function itself, not with what resumes it
            function, offset, at = origin.function, origin.offset(offset), origin.at(at)
        if entry is Entry.NEXT:
            at = 0
        entrance = Entrance(offset if entry in (Entry.NEXT, Entry.CALL) else 0, slots, names, entry, at)
        return self.resume(function, entrance, compiled, within), f"[{', '.join(values)}]"

    def _stack_value(self, frame: StoppedFrame, place: int) -> str:
        return self.codegen.value(frame.handled.get(place, frame.stack[place]))

    def guarded(self) -> bool:
        """Whether any of the frames has a handler for what the instruction raises."""
        return any(_handler(frame) is not None for frame in self.stopped.frames)


def _start(frame: StoppedFrame, index: int) -> int:
    """Where the code is entered at instruction number `index`: at its first EXTENDED_ARG."""
    code, offset = frame.frame.function.__code__.co_code, frame.frame.decoded.offsets[index]
    while offset and code[offset - 2] == dis.EXTENDED_ARG:
        offset -= 2
    return offset


def _handler(frame: StoppedFrame) -> ExceptionEntry | None:
    """The frame's handler for what its instruction raises."""
    decoded = frame.frame.decoded
    return decoded.handler(decoded.offsets[frame.index])


def _kind_of_slot(value: object) -> StackSlot:
    if isinstance(value, HandlerSlot):
        return StackSlot.HANDLER
    return StackSlot.NULL if value is NULL else StackSlot.VALUE


def _carried(frame: StoppedFrame, offset: int, entry: Entry, bound: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that the code at `offset`, or the handler of an exception before it, may still use; and those that
    end only where the frame does, with what that means."""
    decoded, code = frame.frame.decoded, frame.frame.function.__code__
    live: frozenset[int] = frozenset()
    kept = {name for name, value in frame.locals.items() if name not in bound and closes(value)}
    if entry in (Entry.LEAVE, Entry.PASS):
        return tuple(name for name in decoded.local_names if name in kept)
    if entry is not Entry.RAISE:
        live = live_slots(decoded, decoded.index_of[offset], code.co_names)
    handler = _handler(frame) if entry is not Entry.NEXT else None
    if handler is not None:
        live |= live_slots(decoded, handler.target, code.co_names)
    kept |= {name for slot, name in enumerate(decoded.local_names) if slot in live}
    kept |= {name for name, value in frame.locals.items() if isinstance(value, types.CellType)}
    return tuple(name for name in decoded.local_names if name in kept and (name in frame.locals or name in bound))


def has_rule(stopped: Stopped) -> bool:
    """Whether the breaking instruction has a statement of the same meaning."""
    here = stopped.frames[-1]
    return dis.opname[here.frame.decoded.opcodes[here.index]] in _RULES


def continue_after(codegen: Codegen, stopped: Stopped, resume: Resume, hook: Hook | None) -> Lines:
    """Statements that end the generated function, which is to be `started`.

    Args:
        resume: gives the callable that enters a function's code, compiled or plain.
        hook: finds the user's own functions that are called by what breaks.
    """
    codegen.keep_iterators = True
    here = stopped.frames[-1]
    decoded = here.frame.decoded
    name = dis.opname[decoded.opcodes[here.index]]
    place = Place(codegen, stopped, resume, _instruction(here, name), list(here.stack))
    rule = _RULES.get(name)
    if rule is not None:
        step = rule(place)
        if step is not None:
            run = None if hook is None else f"{codegen.pin(hook_enabled)}({codegen.pin(hook)})"
            return _compiled_rest(place, step, run)
    index = here.index
    while dis.opname[decoded.opcodes[index]] in ("CALL", "PRECALL") and here.frame.keyword_names:
        index -= 1  # the names of keyword arguments are no stack entry: enter where they are pushed
    if hook is not None:
        place.around = functools.partial(_with_hook, hook)
    return [f"return {place.enter(_start(here, index), here.stack, [], compiled=False)}"]


def _with_hook(hook: Hook, entry: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Enters a continuation that runs as it is, for the functions that it calls."""

    def entered(state: list[object]) -> object:
        with hook_enabled(hook):
            return entry(state)

    return entered


def _instruction(here: StoppedFrame, name: str) -> dis.Instruction:
    offset = here.frame.decoded.offsets[here.index]
    code = here.frame.function.__code__
    return next(i for i in dis.get_instructions(code) if i.offset >= offset and i.opname == name)


def _compiled_rest(place: Place, step: Step, run: str | None) -> Lines:
    """The step, guarded; what goes on after an exception; what goes on after each outcome."""
    if step.returns:
        return [f"return {place.back(step.pushed)}"]
    following = _start(place.here, place.here.index + step.executed) if step.executed else 0
    if not step.lines:
        return [f"return {place.enter(following, step.stack, step.pushed)}"]
    lines = _hooked(step.lines, run) if step.calls else step.lines
    handled = [error for frame in reversed(place.stopped.frames) for error in frame.handled.values()]
    for error in handled:  # innermost first; as the program would find it with sys.exc_info()
        raised = place.codegen.value(error)
        handling = _indented([f"{raised}.__traceback__ = kept", *lines])
        lines = [f"kept = {raised}.__traceback__", "try:", f"    {_passing(place, raised)}"]
        lines += ["except BaseException:", *handling]
    place.stack = step.stack
    lines = ["failed = None", "try:", *_indented(lines), "except BaseException as error:", "    failed = error"]
    lines += ["if failed is not None:"]
    without_top = "failed.__traceback__ = failed.__traceback__.tb_next"  # the generated function's own entry
    if place.guarded():
        frames = "".join(f"{raiser}, " for raiser in _raisers(place)[step.again :])
        handed = [f"{place.codegen.pin(raised_in)}(failed, ({frames}))", f"return {place.arrive('failed')}"]
    else:
        handed = [f"return {place.leave('failed', Entry.PASS if step.again else Entry.LEAVE)}"]
    handed = handed if step.again else [without_top, *handed]
    named = [name for name in dict.fromkeys((*step.raised, *map(place.codegen.value, handled))) if name.isidentifier()]
    gone = ", ".join(("failed", *named))  # their tracebacks will hold this frame
    lines += _indented(["try:", *_indented(handed), "finally:", f"    del {gone}"])
    for condition, offset, stack, pushed in step.branches:
        lines += [f"if {condition}:", f"    return {place.enter(offset, stack, pushed)}"]
    if not step.executed:
        return lines
    return [*lines, f"return {place.enter(following, step.stack, step.pushed, bound=step.bound)}"]


def _raisers(place: Place) -> list[str]:
    """Plain functions that raise at the user's line in the frames that an exception passes, innermost first.

    Each with the values of its variables: where these end with the frame, that is when nobody holds the traceback.
    """
    found = []
    for frame in reversed(place.stopped.frames):
        decoded, function = frame.frame.decoded, frame.frame.function
        at = decoded.offsets[frame.index]
        origin = origin_of(function)
        if origin is not None:
            function, where = origin.function, origin.at(at)
        else:
            where = at
        handles = decoded.handler(at) is not None
        names = () if handles else _carried(frame, 0, Entry.LEAVE, {})
        raiser = place.resume(function, Entrance(0, (), names, Entry.LEAVE, where), False, ())
        values = place.codegen.items(frame.locals[name] for name in names)
        found.append(f"({place.codegen.pin(raiser)}, [{values}])")
        if handles:
            break
    return found


def _passing(place: Place, error: str) -> str:
    """A statement that raises an exception as it is: `raise` would set its context anew."""
    return f"{place.codegen.pin(_pass_on)}([{error}])"


def _empty() -> None:
    pass


_pass_on = make_resume(types.FunctionType(_empty.__code__, {}), Entrance(0, entry=Entry.PASS))


def _lines(place: Place) -> tuple[types.FunctionType, ...]:
    """Functions that call another one from the lines where the program's frames are, outermost first."""
    found = []
    for frame in place.stopped.frames:
        code = frame.frame.function.__code__
        line = frame.frame.decoded.line(frame.index)
        own = call_on.__code__.replace(
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_firstlineno=line - _LINES_TO_CALL,
        )
        found.append(types.FunctionType(own, frame.frame.function.__globals__, code.co_name))
    return tuple(found)


def call_on(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Calls the function: what a call in tail position is, where generated code makes it."""
    return function(*args, **kwargs)


_LINES_TO_CALL = max(line for *_, line in call_on.__code__.co_lines() if line) - call_on.__code__.co_firstlineno


def call_from(lines: Sequence[types.FunctionType], function: object, *args: object, **kwargs: object) -> object:
    """Calls a function that looks at who called it, such as a logger's: it finds the program's own frames."""
    for line in reversed(lines[1:]):
        function, args, kwargs = line, (function, args, kwargs), {}
    return lines[0](function, args, kwargs)


def raised_in(error: BaseException, frames: Sequence[tuple[Callable[[object], object], list[object]]]) -> None:
    """Makes the traceback of `error` what it is where the program's frames, with these variables, let it pass."""
    context = error.__context__
    for frame, held in frames:
        try:
            frame([error, *held])
        except BaseException as raised:
            below = raised.__traceback__
            error.__traceback__ = below.tb_next if below is not None else None
            del below  # it holds this frame
    error.__context__ = context
    del error, context  # its traceback leads to this frame


def empty_callers(error: BaseException) -> None:
    """Takes the variables out of generated code's own frames that called the frames in an exception's traceback.

    These frames are over, and are held by the ones that they called: they would keep what the program gives up alive.
    """
    trace = error.__traceback__
    while trace is not None:
        caller = trace.tb_frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith((GENERATED, __file__)):
            with suppress(RuntimeError):  # it is still running
                caller.clear()
            caller = caller.f_back
        trace = trace.tb_next
    del error, trace  # they lead to this frame's callers


def _hooked(lines: Lines, run: str | None) -> Lines:
    return lines if run is None else [f"with {run}:", *_indented(lines)]


def _indented(lines: Lines) -> Lines:
    return [f"    {line}" for line in lines]


# -- rules ------------------------------------------------------------------------------------


def _call(place: Place) -> Step | None:
    codegen, stack, argument = place.codegen, place.stack, place.instruction.arg or 0
    names: tuple[str, ...] = place.here.frame.keyword_names
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
    if callee is eval or callee is exec:
        return None  # the frame that calls it has to be the program's own
    if callee is importlib.import_module and values and type(values[0]) is str:
        imports.guard_absent(codegen.externals, values[0])
    looks = torch_calls.looks_at_callers(callee)
    if looks:
        arguments.insert(0, codegen.pin(_lines(place)))
        arguments.insert(1, codegen.value(callee))
        call = f"r = {codegen.pin(call_from)}({', '.join(arguments)})"
    else:
        call = f"r = {codegen.value(callee)}({', '.join(arguments)})"
    mark = mark_of(callee.__func__ if isinstance(callee, types.MethodType) else callee)
    plain = looks or torch_calls.runs_unhooked(callee) or (mark is not None and mark.kind is MarkKind.DISABLED)
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
        if dis.opname[place.here.frame.function.__code__.co_code[target]] == name:
            target += 2  # the iterator is off the stack already
    end = place.codegen.pin(_END)
    lines = [f"r = next({place.codegen.value(stack[-1])}, {end})"]
    step = Step(lines, stack, branches=[(f"r is {end}", target, stack[:-1], [])])
    unpacking = _bind_targets(place, step)
    if unpacking:
        lines += [f"if r is not {end}:", *_indented(unpacking)]
    return step


def _bind_targets(place: Place, step: Step) -> Lines:
    """The unpacking into variables that follows: what the loop does not read again need not be handed over."""
    decoded, lines = place.here.frame.decoded, []
    while True:
        index = place.here.index + step.executed
        name, argument = dis.opname[decoded.opcodes[index]], decoded.arguments[index]
        if name == "UNPACK_SEQUENCE" and argument:
            names = [f"{step.pushed[-1]}_{item}" for item in range(argument)]
            lines.append(f"({', '.join(names)}, ) = {step.pushed.pop()}")
            step.pushed += reversed(names)
        elif name == "STORE_FAST":
            step.bound[decoded.local_names[argument]] = step.pushed.pop()
        elif name == "STORE_FAST_STORE_FAST":
            for slot in (argument >> 4, argument & 15):
                step.bound[decoded.local_names[slot]] = step.pushed.pop()
        else:
            return lines
        step.executed += 1
        if not step.pushed:
            return lines


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
    pushed: list[object] = ["r"]
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


def _raise(place: Place) -> Step | None:
    """Bare `raise` finds the handled exception, since the statement runs in its handler."""
    argument = place.instruction.arg or 0
    if not argument and not any(frame.handled for frame in place.stopped.frames):
        return None  # what a caller of the compiled function handles, or a new exception: only the run tells
    cause = f" from {place.pop()}" if argument == 2 else ""
    raised = (place.pop(),) if argument else ()
    line = " ".join(("raise", *raised)) + cause
    return Step([line], place.stack, [], calls=False, executed=0, again=not argument, raised=raised)


def _reraise(place: Place) -> Step:
    """What a `finally` block or a handler passes on. Its traceback has the frame already."""
    error = place.pop()
    without_top = f"{error}.__traceback__ = {error}.__traceback__.tb_next"
    lines = ["try:", f"    {_passing(place, error)}", "except BaseException:", f"    {without_top}", "    raise"]
    return Step(lines, place.stack, [], calls=False, executed=0, again=True, raised=(error,))


def _with_except_start(place: Place) -> Step:
    """The `__exit__` of a `with` block that an exception leaves: it lies below the exception and its slot."""
    error = place.codegen.value(place.stack[-1])
    leave = place.codegen.value(place.stack[-4])
    return Step([f"r = {leave}(type({error}), {error}, {error}.__traceback__)"], place.stack)


def _import_name(place: Place) -> Step:
    fromlist, level = place.stack[-1], place.stack[-2]
    namespace, name = place.here.frame.function.__globals__, place.instruction.argval
    imports.guard_absent(place.codegen.externals, imports.missing(name, namespace, fromlist, level))
    names, depth = place.pop(), place.pop()
    line = f"r = __import__({name!r}, {place.codegen.pin(namespace)}, None, {names}, {depth})"
    return Step([line], place.stack, calls=False)


def _import_from(place: Place) -> Step:
    module = place.codegen.value(place.stack[-1])
    return Step([f"r = {place.codegen.pin(imports.import_from)}({module}, {place.instruction.argval!r})"], place.stack)


def _unpack_rest(place: Place) -> Step:
    before, after = (place.instruction.arg or 0) & 255, (place.instruction.arg or 0) >> 8
    names = [f"r{index}" for index in range(before + 1 + after)]
    left = ", ".join(f"*{name}" if index == before else name for index, name in enumerate(names))
    return Step([f"({left}, ) = {place.pop()}"], place.stack, list(reversed(names)))


def _extend(method: str) -> Callable[[Place], Step]:
    """The operand goes into a half-built container that lies `arg` places further down."""

    def rule(place: Place) -> Step:
        value = place.pop()
        target = place.codegen.value(place.stack[-(place.instruction.arg or 1)])
        return Step([f"{target}.{method}({value})"], place.stack, [])

    return rule


def _delete_attribute(place: Place) -> Step:
    return Step([f"delattr({place.pop()}, {place.instruction.argval!r})"], place.stack, [])


def _delete_subscript(place: Place) -> Step:
    key, container = place.pop(), place.pop()
    return Step([f"del {container}[{key}]"], place.stack, [])


def _pop_top(place: Place) -> Step:
    """Where it ends what it pops. Here and below: the generated function's own variable is the last to hold that."""
    place.pop()
    return Step([], place.stack, [])


def _exchange_locals(place: Place) -> Step:
    """Stores to and deletions of variables that end what the variables held."""
    name, argument, held = place.instruction.opname, place.instruction.arg or 0, place.here.locals
    names = place.here.frame.decoded.local_names
    first, second = (names[argument >> 4], names[argument & 15]) if name.count("FAST") > 1 else (names[argument], "")
    place.codegen.items(held[slot] for slot in (first, second) if slot in held)
    pushed = []
    if name == "DELETE_FAST":
        del held[first]
    else:
        held[first] = place.stack.pop()
    if name == "STORE_FAST_STORE_FAST":
        held[second] = place.stack.pop()
    elif name == "STORE_FAST_LOAD_FAST":
        pushed.append(place.codegen.value(held[second]))
    return Step([], place.stack, pushed)


def _return(place: Place) -> Step | None:
    """Out of a frame whose variables end with it; the outermost one's end with the generated function."""
    if len(place.stopped.frames) == 1:
        return None
    value = place.pop() if place.instruction.opname == "RETURN_VALUE" else place.codegen.value(place.instruction.argval)
    place.codegen.items(value for value in place.here.locals.values() if closes(value))
    return Step([], [], [value], returns=True)


_BRANCHES = (
    "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP",
)  # fmt: skip

_STORES = ("STORE_FAST", "DELETE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")

_RULES: dict[str, Callable[[Place], Step | None]] = {
    **dict.fromkeys(("CALL", "CALL_KW", "CALL_FUNCTION_EX"), _call),
    **dict.fromkeys(_BRANCHES, _branch),
    "FOR_ITER": _for_iter,
    "POP_TOP": _pop_top,
    **dict.fromkeys(_STORES, _exchange_locals),
    **dict.fromkeys(("RETURN_VALUE", "RETURN_CONST"), _return),
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
    "UNPACK_EX": _unpack_rest,
    "RAISE_VARARGS": _raise,
    "RERAISE": _reraise,
    "WITH_EXCEPT_START": _with_except_start,
    "IMPORT_NAME": _import_name,
    "IMPORT_FROM": _import_from,
    "GET_ITER": lambda place: Step([f"r = iter({place.pop()})"], place.stack),
    "GET_LEN": lambda place: Step([f"r = len({place.codegen.value(place.stack[-1])})"], place.stack),
    "LIST_EXTEND": _extend("extend"),
    "LIST_APPEND": _extend("append"),
    "SET_UPDATE": _extend("update"),
    "SET_ADD": _extend("add"),
    "DICT_UPDATE": _extend("update"),
    "DELETE_ATTR": _delete_attribute,
    "DELETE_SUBSCR": _delete_subscript,
}
