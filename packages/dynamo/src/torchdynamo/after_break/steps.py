"""How each instruction that may break the graph is executed: by a Python statement of the same meaning, in `RULES`."""

from __future__ import annotations

import dis
import importlib
import sys
import types
from collections.abc import Callable, Sequence

import torch

from torchdynamo.after_break.place import Lines, Place, Step, indented, passing
from torchdynamo.after_break.suspended import closes
from torchdynamo.calls import torch_calls
from torchdynamo.interpreter.iterators import native_type
from torchdynamo.interpreter.protocol import NULL
from torchdynamo.marks import MarkKind, mark_of
from torchdynamo.outside import imports
from torchdynamo.reasons import OF_EACH_LENGTH

_RANGE = type(iter(range(0)))
_END = object()  # what `next` of an exhausted iterator gives


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
    of_loop = isinstance(condition, torch.SymBool) and place.stopped.graph_break.reason in OF_EACH_LENGTH
    asked = place.codegen.condition(condition) if of_loop else place.codegen.value(condition)
    lines = [f"r = True if {asked} else False"]
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
    kind = native_type(stack[-1])
    step.counts = "r" if kind is _RANGE else "r_0" if kind is enumerate else ""
    if unpacking:
        lines += [f"if r is not {end}:", *indented(unpacking)]
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
    lines = ["try:", f"    {passing(place, error)}", "except BaseException:", f"    {without_top}", "    raise"]
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


def _map_add(place: Place) -> Step:
    value, key = place.pop(), place.pop()
    target = place.codegen.value(place.stack[-(place.instruction.arg or 1)])
    return Step([f"{target}[{key}] = {value}"], place.stack, [])


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

RULES: dict[str, Callable[[Place], Step | None]] = {
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
    "MAP_ADD": _map_add,
    "DICT_UPDATE": _extend("update"),
    "DELETE_ATTR": _delete_attribute,
    "DELETE_SUBSCR": _delete_subscript,
}


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
