"""Code after a graph break: the breaking instruction for real, then the rest of the program.

The generated code executes the one instruction by a Python statement of the same meaning (`steps.py`), and what follows
is compiled in its turn (`place.py`): a resume function of the innermost frame, called from within a resume function of
the frame that called it, and so on outwards. The statement is guarded: an exception is raised again within the resume
functions, at the user's line and under the user's own handlers. An instruction without a rule is left to a resume
function entered at the instruction itself, uncompiled.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress

from primtorch.frozen import record
from torchdynamo._C import Hook, hook_enabled
from torchdynamo.after_break import steps
from torchdynamo.after_break.place import (
    Lines,
    Next,
    Place,
    Resume,
    Step,
    carried,
    indented,
    passing,
    start_of,
)
from torchdynamo.after_break.resume import Entrance, Entry, origin_of
from torchdynamo.after_break.steps import RULES
from torchdynamo.after_break.stopped import Stopped, StoppedFrame
from torchdynamo.emit.codegen import GENERATED, Codegen


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


def has_rule(stopped: Stopped) -> bool:
    """Whether the breaking instruction has a statement of the same meaning."""
    here = stopped.frames[-1]
    return dis.opname[here.frame.decoded.opcodes[here.index]] in RULES


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
    rule = RULES.get(name)
    if rule is not None:
        step = rule(place)
        if step is not None:
            run = None if hook is None else f"{codegen.pin(hook_enabled)}({codegen.pin(hook)})"
            return _compiled_rest(place, step, run)
    index = here.index
    while dis.opname[decoded.opcodes[index]] in ("CALL", "PRECALL") and here.frame.keyword_names:
        index -= 1  # the names of keyword arguments are no stack entry: enter where they are pushed
    if hook is not None:
        place.around = functools.partial(Hooked, hook)
    return [f"return {place.enter(start_of(here, index), here.stack, [], compiled=False)}"]


@record
class Hooked:
    """Enters a continuation that runs as it is, for the functions that it calls."""

    hook: Hook
    entry: Callable[[list[object]], object]

    def __call__(self, state: list[object]) -> object:
        with hook_enabled(self.hook):
            return self.entry(state)


def _instruction(here: StoppedFrame, name: str) -> dis.Instruction:
    offset = here.frame.decoded.offsets[here.index]
    code = here.frame.function.__code__
    return next(i for i in dis.get_instructions(code) if i.offset >= offset and i.opname == name)


def _compiled_rest(place: Place, step: Step, run: str | None) -> Lines:
    """The step, guarded; what goes on after an exception; what goes on after each outcome."""
    if step.returns:
        return [f"return {place.back(step.pushed)}"]
    following = start_of(place.here, place.here.index + step.executed) if step.executed else 0
    if not step.lines:
        return [f"return {place.enter(following, step.stack, step.pushed)}"]
    lines = _hooked(step.lines, run) if step.calls else step.lines
    handled = [error for frame in reversed(place.stopped.frames) for error in frame.handled.values()]
    for error in handled:  # innermost first; as the program would find it with sys.exc_info()
        raised = place.codegen.value(error)
        handling = indented([f"{raised}.__traceback__ = kept", *lines])
        lines = [f"kept = {raised}.__traceback__", "try:", f"    {passing(place, raised)}"]
        lines += ["except BaseException:", *handling]
    place.stack, place.counts = step.stack, step.counts
    lines = ["failed = None", "try:", *indented(lines), "except BaseException as error:", "    failed = error"]
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
    lines += indented(["try:", *indented(handed), "finally:", f"    del {gone}"])
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
        names = () if handles else carried(frame, 0, Entry.LEAVE, {})
        raiser = place.resume(function, Entrance(0, (), names, Entry.LEAVE, where), False, (), ())
        values = place.codegen.items(frame.locals[name] for name in names)
        found.append(f"({place.codegen.pin(raiser)}, [{values}])")
        if handles:
            break
    return found


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
        while caller is not None and caller.f_code.co_filename.startswith(_OWN_CODE):
            with suppress(RuntimeError):  # it is still running
                caller.clear()
            caller = caller.f_back
        trace = trace.tb_next
    del error, trace  # they lead to this frame's callers


def _hooked(lines: Lines, run: str | None) -> Lines:
    return lines if run is None else [f"with {run}:", *indented(lines)]


_OWN_CODE = (GENERATED, __file__, steps.__file__)
