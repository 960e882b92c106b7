"""Code after a graph break: the breaking instruction for real, then the rest of the program.

The generated code executes the one instruction by a Python statement of the same meaning (`_RULES`), and what follows
is compiled in its turn: a resume function of the innermost frame, called from within a resume function of the frame
that called it, and so on outwards. The statement is guarded: an exception is raised again within the resume functions,
at the user's line and under the user's own handlers. An instruction without a rule is left to a resume function
entered at the instruction itself, uncompiled.
"""

from __future__ import annotations

import dis
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torchdynamo import imports, torch_calls
from torchdynamo.capture import Stopped, StoppedFrame
from torchdynamo.codegen import Codegen
from torchdynamo.interpreter.protocol import NULL
from torchdynamo.interpreter.state import HandlerSlot
from torchdynamo.liveness import live_slots
from torchdynamo.marks import MarkKind, mark_of
from torchdynamo.resume import Entrance, Entry, StackSlot, origin_of

# (function, entrance, compiled, frames inside) -> what enters the function there. What goes on inside of it is named so
# that each chain of frames has a compiled continuation of its own, not a version of one.
Resume = Callable[[types.FunctionType, Entrance, bool, tuple[types.FunctionType, ...]], Any]
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
    """

    lines: Lines
    stack: list[Any]
    pushed: list[Any] = field(default_factory=lambda: ["r"])
    calls: bool = True
    branches: list[tuple[str, int, list[Any], list[Any]]] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    executed: int = 1
    again: bool = False
    raised: tuple[str, ...] = ()


class Next:
    """What a compiled continuation returns when the program goes on in another one."""

    __slots__ = ("entry", "state")

    def __init__(self, entry: Callable[[Any], Any], state: tuple[Any, ...]) -> None:
        self.entry = entry
        self.state = state


def go_on(entry: Callable[[Any], Any], state: tuple[Any, ...]) -> Any:
    """Runs a program from one continuation to the next, however many, at one depth of the stack."""
    waiting = [state]  # emptied by the call: a traceback through here keeps nothing that a continuation was given
    del state
    result = entry(waiting.pop())
    while type(result) is Next:
        entry, waiting = result.entry, [result.state]
        del result
        result = entry(waiting.pop())
    return result


@dataclass(slots=True)
class Place:
    """The instruction that breaks, its operands on the stack, and who writes the code.

    `hand_over` is an expression of what is called with a continuation and its argument: `go_on`, or in the code of a
    continuation itself `Next`.
    """

    codegen: Codegen
    stopped: Stopped
    resume: Resume
    hand_over: str
    instruction: dis.Instruction
    stack: list[Any]

    @property
    def here(self) -> StoppedFrame:
        return self.stopped.frames[-1]

    def pop(self) -> str:
        return self.codegen.value(self.stack.pop())

    def enter(
        self,
        offset: int,
        stack: list[Any],
        pushed: list[Any],
        compiled: bool = True,
        bound: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The call that goes on at `offset` of the innermost frame's code, and behind it in the frames outside."""
        return self._chain(offset, Entry.NEXT, stack, pushed, compiled, bound)

    def arrive(self, name: str) -> str:
        """The call that goes on in the handler of the exception `name`, in the innermost frame that has one."""
        frames = self.stopped.frames
        while not _handles(frames[-1]):
            frames = frames[:-1]
        stack = self.stack if frames[-1] is self.here else frames[-1].stack
        return self._chain(0, Entry.RAISE, stack, [name], True, {}, frames)

    def leave(self, name: str, entry: Entry) -> str:
        """The call that raises the exception `name` where the instruction stands, and passes all the frames."""
        return self._chain(0, entry, [], [name], False, {})

    def _chain(
        self,
        offset: int,
        entry: Entry,
        stack: list[Any],
        pushed: list[Any],
        compiled: bool,
        bound: Mapping[str, str],
        frames: Sequence[StoppedFrame] | None = None,
    ) -> str:
        *outer, inner = frames or self.stopped.frames
        function, state = self._state(inner, offset, entry, stack, pushed, compiled and not outer, bound, ())
        within: tuple[types.FunctionType, ...] = ()
        for depth in range(len(outer) - 1, -1, -1):
            caller = outer[depth]
            following = _start(caller, caller.index + 1)
            within = (*within, function)
            inside = [self.codegen.pin(function), state]
            function, state = self._state(
                caller, following, Entry.CALL, caller.stack, inside, compiled and not depth, {}, within
            )
        return f"{self.hand_over}({self.codegen.pin(function)}, {state})"

    def _state(
        self,
        frame: StoppedFrame,
        offset: int,
        entry: Entry,
        stack: list[Any],
        pushed: list[Any],
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
        return self.resume(function, entrance, compiled, within), f"({''.join(f'{value}, ' for value in values)})"

    def _stack_value(self, frame: StoppedFrame, place: int) -> str:
        return self.codegen.value(frame.handled.get(place, frame.stack[place]))

    def guarded(self) -> bool:
        """Whether any of the frames has a handler for what the instruction raises."""
        return any(map(_handles, self.stopped.frames))


def _start(frame: StoppedFrame, index: int) -> int:
    """Where the code is entered at instruction number `index`: at its first EXTENDED_ARG."""
    code, offset = frame.frame.function.__code__.co_code, frame.frame.decoded.offsets[index]
    while offset and code[offset - 2] == dis.EXTENDED_ARG:
        offset -= 2
    return offset


def _handles(frame: StoppedFrame) -> bool:
    """Whether the frame has a handler for what its instruction raises."""
    decoded = frame.frame.decoded
    return decoded.handler(decoded.offsets[frame.index]) is not None


def _kind_of_slot(value: Any) -> StackSlot:
    if isinstance(value, HandlerSlot):
        return StackSlot.HANDLER
    return StackSlot.NULL if value is NULL else StackSlot.VALUE


def _carried(frame: StoppedFrame, offset: int, entry: Entry, bound: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that the code at `offset`, or the handler of an exception before it, may still use."""
    decoded, code = frame.frame.decoded, frame.frame.function.__code__
    live: frozenset[int] = frozenset()
    if entry in (Entry.LEAVE, Entry.PASS):
        return ()
    if entry is not Entry.RAISE:
        live = live_slots(decoded, decoded.index_of[offset], code.co_names)
    handler = decoded.handler(decoded.offsets[frame.index]) if entry is not Entry.NEXT else None
    if handler is not None:
        live |= live_slots(decoded, handler.target, code.co_names)
    kept = {name for slot, name in enumerate(decoded.local_names) if slot in live}
    kept |= {name for name, value in frame.locals.items() if isinstance(value, types.CellType)}
    return tuple(name for name in decoded.local_names if name in kept and (name in frame.locals or name in bound))


def has_rule(stopped: Stopped) -> bool:
    """Whether the breaking instruction has a statement of the same meaning."""
    here = stopped.frames[-1]
    return dis.opname[here.frame.decoded.opcodes[here.index]] in _RULES


def continue_after(codegen: Codegen, stopped: Stopped, resume: Resume, run: str | None, continues: bool) -> Lines:
    """Statements that end the generated function.

    Args:
        continues: the generated function is itself a continuation.
        resume: gives the callable that enters a function's code, compiled or plain.
        run: expression of a context in which the user's own functions are called, or None.
    """
    codegen.keep_iterators = True
    here = stopped.frames[-1]
    decoded = here.frame.decoded
    name = dis.opname[decoded.opcodes[here.index]]
    hand_over = codegen.pin(Next if continues else go_on)
    place = Place(codegen, stopped, resume, hand_over, _instruction(here, name), list(here.stack))
    rule = _RULES.get(name)
    if rule is not None:
        step = rule(place)
        if step is not None:
            return _compiled_rest(place, step, run)
    index = here.index
    while dis.opname[decoded.opcodes[index]] in ("CALL", "PRECALL") and here.frame.keyword_names:
        index -= 1  # the names of keyword arguments are no stack entry: enter where they are pushed
    place.hand_over = codegen.pin(go_on)  # the hook is on until it returns
    rest = f"return {place.enter(_start(here, index), here.stack, [], compiled=False)}"
    return _hooked([rest], run)


def _instruction(here: StoppedFrame, name: str) -> dis.Instruction:
    offset = here.frame.decoded.offsets[here.index]
    code = here.frame.function.__code__
    return next(i for i in dis.get_instructions(code) if i.offset >= offset and i.opname == name)


def _compiled_rest(place: Place, step: Step, run: str | None) -> Lines:
    """The step, guarded; what goes on after an exception; what goes on after each outcome."""
    lines = _hooked(step.lines, run) if step.calls else step.lines
    handled = [error for frame in reversed(place.stopped.frames) for error in frame.handled.values()]
    for error in handled:  # innermost first; as the program would find it with sys.exc_info()
        raised = place.codegen.value(error)
        parts = f"{raised}.__traceback__, {raised}.__context__"
        handling = _indented([f"{parts} = kept", *lines])
        lines = [f"kept = {parts}", "try:", f"    raise {raised}", "except BaseException:", *handling]
    place.stack = step.stack
    lines = ["failed = None", "try:", *_indented(lines), "except BaseException as error:", "    failed = error"]
    lines += ["if failed is not None:"]
    without_top = "failed.__traceback__ = failed.__traceback__.tb_next"  # the generated function's own entry
    if place.guarded():
        frames = place.codegen.pin(_raisers(place)[step.again :])
        handed = [f"{place.codegen.pin(raised_in)}(failed, {frames})", f"return {place.arrive('failed')}"]
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
    following = _start(place.here, place.here.index + step.executed)
    return [*lines, f"return {place.enter(following, step.stack, step.pushed, bound=step.bound)}"]


def _raisers(place: Place) -> tuple[Any, ...]:
    """Plain functions that raise at the user's line in the frames that an exception passes, innermost first."""
    found = []
    for frame in reversed(place.stopped.frames):
        decoded, function = frame.frame.decoded, frame.frame.function
        at = decoded.offsets[frame.index]
        origin = origin_of(function)
        if origin is not None:
            function, where = origin.function, origin.at(at)
        else:
            where = at
        found.append(place.resume(function, Entrance(0, (), (), Entry.LEAVE, where), False, ()))
        if decoded.handler(at) is not None:
            break
    return tuple(found)


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


def call_on(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_LINES_TO_CALL = 1  # from the `def` of `call_on`


def call_from(lines: Sequence[types.FunctionType], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that looks at who called it, such as a logger's: it finds the program's own frames."""
    for line in reversed(lines[1:]):
        function, args, kwargs = line, (function, args, kwargs), {}
    return lines[0](function, args, kwargs)


def raised_in(error: BaseException, frames: Sequence[Callable[[Any], Any]]) -> None:
    """Makes the traceback of `error` what it is where the program's frames let it pass."""
    context = error.__context__
    for frame in frames:
        try:
            frame((error,))
        except BaseException as raised:
            below = raised.__traceback__
            error.__traceback__ = below.tb_next if below is not None else None
            del below  # it holds this frame
    error.__context__ = context
    del error, context  # its traceback leads to this frame


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


def _raise(place: Place) -> Step:
    """Bare `raise` finds the handled exception, since the statement runs in its handler."""
    argument = place.instruction.arg or 0
    cause = f" from {place.pop()}" if argument == 2 else ""
    raised = (place.pop(),) if argument else ()
    line = " ".join(("raise", *raised)) + cause
    return Step([line], place.stack, [], calls=False, executed=0, again=not argument, raised=raised)


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
    "UNPACK_EX": _unpack_rest,
    "RAISE_VARARGS": _raise,
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
