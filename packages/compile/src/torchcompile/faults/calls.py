"""Whole calls held to the function as it was written: capture, and the guards that say which call a graph is for.

Beside the compiled function there is one whose graphs run by eager's own operators. Each call is run by it, and as it
was written, on copies; what differs then is no stage's behind capture.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from primtorch.frozen import record
from primtorch.ledger import Event, Ledger
from primtorch.schemas import TORCH, UserFrame
from primtorch.testing import assert_as_accurate
from torchcompile.errors import WrongResult
from torchcompile.events import NOT_VERIFIED
from torchcompile.faults.children import Death, Teller, in_child, possible
from torchcompile.faults.edit import values_of
from torchcompile.faults.examine import WATCHING
from torchcompile.faults.find import fault_at
from torchcompile.faults.judge import copied
from torchcompile.faults.schemas import Fault, Finding, Program, Run
from torchcompile.faults.surroundings import CannotRepeat, Outcome, Surroundings, name_of, outcome
from torchdynamo import disable
from torchdynamo.errors import InternalError
from torchdynamo.events import frame_of
from torchinductor.program import Value

Backend = Callable[[fx.GraphModule, list[Value]], Run]
Capture = Callable[[Backend, Callable[..., object]], Callable[..., object]]  # compiles a function with a back end

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
CALL_SECONDS = 300.0  # that a call may take to be captured
ALONE_SECONDS = 15.0  # and one operator of it
_PARTS = ("result", "argument after the call", "tensor that it reaches", "gradient")


@dataclass
class Captured:
    """A function whose graphs run as they were captured, and the graphs of its latest call."""

    capture: Capture
    function: Callable[..., object]
    graphs: list[Program] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compiled = self.capture(self._look, self.function)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.graphs.clear()
        return self._compiled(*args, **kwargs)

    def _look(self, gm: fx.GraphModule, inputs: list[Value]) -> Run:
        def run(*values: object) -> Sequence[object]:
            self.graphs.append(Program(gm, tuple(map(copied, values))))
            found: Sequence[object] = gm.forward(*values)
            return found

        return run


def verified(
    function: Callable[..., object], compiled: Callable[..., object], capture: Capture, ledger: Ledger
) -> Callable[..., object]:
    """`compiled`, whose calls are held to `function` first. Those that cannot be run again unnoticed are not, and the
    ledger is told: where an object of the program's own classes comes in, or random numbers are drawn."""
    captured, name = Captured(capture, function), getattr(function, "__qualname__", "call")
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = (frame_of(code),) if code is not None else ()

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        fault, at = None, WATCHING.watch.at if WATCHING.watch is not None else lambda what: None
        at("eager")
        try:
            fault = _fault_of(captured, args, kwargs)
        except CannotRepeat as error:
            ledger.add(Event(NOT_VERIFIED, name, str(error), place))
        if fault is not None:
            watch = WATCHING.watch
            if watch is not None:
                watch.calls.append(fault)
            raise WrongResult(f"{name}: {fault}")
        at("compiled")
        try:
            return compiled(*args, **kwargs)
        finally:
            at("program")

    return disable(call, reason="its calls are verified")


def _fault_of(captured: Captured, args: tuple[object, ...], kwargs: dict[str, object]) -> Fault | None:
    """What a call shows to be wrong.

    Raises:
        CannotRepeat: nothing can be said of it.
    """
    function = captured.function
    around = Surroundings.of(function, args, kwargs)
    try:
        expected = outcome(function, args, kwargs, around)
    except Exception as error:  # the program's own
        raise CannotRepeat(f"eager raises {type(error).__name__}") from None
    if expected.drew:
        raise CannotRepeat("it draws random numbers")
    if WATCHING.watch is not None and possible():
        WATCHING.watch.at("capture")
        died = in_child(lambda tell: _runs(captured, args, kwargs, around, tell), CALL_SECONDS)
        if isinstance(died, Death) and died.at == "capture":
            finding = Finding("capture", died.kind, died.what)
            refused = _first_refused(finding, _seen(function, args, kwargs, around), captured.capture)
            return refused or Fault(finding, "", frame=died.frame)
    try:
        difference = _difference(outcome(captured, args, kwargs, around), expected)
    except InternalError as error:
        raised = error.__cause__ or error
        finding = Finding("capture", type(raised).__name__, str(raised).partition("\n")[0])
        seen = _seen(function, args, kwargs, around)
        return _first_refused(finding, seen, captured.capture) or _raised(finding, str(error))
    except Exception as error:
        finding = Finding("capture", type(error).__name__, str(error).partition("\n")[0])
        return Fault(finding, "")
    if difference is None and expected.strange is not None:
        raise CannotRepeat(f"it gives an object of class {name_of(expected.strange)}, which is not compared")
    if difference is None:
        return None
    stale = list(captured.graphs)
    fresh = Captured(captured.capture, function)
    try:
        wrong_anew = _difference(outcome(fresh, args, kwargs, around), expected)
    except Exception as error:
        wrong_anew = str(error)
    if wrong_anew is None:
        return _with_place(Finding("guards", "wrong", difference), _first_other(stale, fresh.graphs))
    known = _seen(function, args, kwargs, around).values
    return _with_place(Finding("capture", "wrong", difference), _first_unknown(fresh.graphs, known))


def _runs(
    captured: Captured, args: tuple[object, ...], kwargs: dict[str, object], around: Surroundings, tell: Teller
) -> None:
    """Captures a call in a child. What it raises it will raise again."""
    tell.at("capture")
    with contextlib.suppress(Exception):
        outcome(captured, args, kwargs, around)


def _difference(found: Outcome, expected: Outcome) -> str | None:
    for what, ours, theirs in zip(_PARTS, found.values, expected.values, strict=True):
        if len(ours) != len(theirs):
            return f"{len(ours)} of {what} instead of {len(theirs)}"
        try:
            assert_as_accurate(ours, theirs, theirs, what)
        except AssertionError as error:
            return str(error)
    return None


def _with_place(finding: Finding, place: tuple[Program, fx.Node] | None) -> Fault:
    return Fault(finding, "") if place is None else fault_at(finding, place[0], place[1].name)


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


def _raised(finding: Finding, message: str) -> Fault:
    """The user's line in an error of capture names its place."""
    found = _FRAME.findall(message)
    if not found:
        return Fault(finding, "")
    file, line, function = found[-1]
    text = linecache.getline(file, int(line)).strip()
    return Fault(finding, text, (), text, UserFrame(file, int(line), function))


def _first_other(stale: Sequence[Program], fresh: Sequence[Program]) -> tuple[Program, fx.Node] | None:
    """The first operator that a new capture of the call has and the graph that served it has not."""
    for old, new in zip(stale, fresh, strict=False):
        for a, b in zip(old.module.graph.nodes, new.module.graph.nodes, strict=False):
            if (a.op, str(a.target), str(a.args), str(a.kwargs)) != (b.op, str(b.target), str(b.args), str(b.kwargs)):
                return (new, b) if b.op != "output" else (old, a)
    return _last(fresh)


def _last(graphs: Sequence[Program]) -> tuple[Program, fx.Node] | None:
    calls = [(program, node) for program in graphs for node in program.calls]
    return calls[-1] if calls else None


@record
class _Call:
    """A call of torch, and the program's line."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    frame: UserFrame | None


class _Seen(TorchFunctionMode):
    """Each call of torch that a program makes, and each tensor that it gives, as it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.values: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.calls.append(_Call(func, args, kwargs or {}, _line()))
        result = func(*args, **(kwargs or {}))
        self.values += [t.detach().clone() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result


def _line() -> UserFrame | None:
    """The innermost line that is neither torch's nor this package's."""
    frame = sys._getframe(2)
    found: types.FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith((TORCH, _OWN)):
        found = found.f_back
    return None if found is None else UserFrame(found.f_code.co_filename, found.f_lineno, found.f_code.co_name)


def _seen(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], around: Surroundings
) -> _Seen:
    seen = _Seen()
    with seen:
        outcome(function, args, kwargs, around)
    return seen


def _first_refused(finding: Finding, seen: _Seen, capture: Capture) -> Fault | None:
    """The first call that capture fails at by itself."""
    tried: set[object] = set()
    for call in seen.calls:
        name = getattr(call.function, "__name__", "")
        if call.function in tried or name.startswith("__"):
            continue
        tried.add(call.function)

        def alone(*args: object, _call: _Call = call) -> object:
            return _call.function(*args, **_call.kwargs)

        captured = functools.partial(capture(lambda gm, inputs: gm.forward, alone), *call.args)
        if _refusal(captured, finding) == finding.kind:
            line = linecache.getline(call.frame.file, call.frame.line).strip() if call.frame is not None else ""
            return Fault(finding, name, (), f"{name}: {line}", call.frame)
    return None


def _refusal(call: Callable[[], object], finding: Finding) -> str | None:
    """How a call of what capture gives fails; None where it does not, or for a reason of the call's own."""

    def run(tell: Teller | None = None) -> str | None:
        try:
            call()
        except InternalError as error:
            return type(error.__cause__ or error).__name__
        except Exception:  # a call that is none by itself
            pass
        return None

    if not finding.ends:
        return run()
    found = in_child(run, ALONE_SECONDS)
    return found.kind if isinstance(found, Death) else found


def _first_unknown(graphs: Sequence[Program], known: Sequence[torch.Tensor]) -> tuple[Program, fx.Node] | None:
    """The first operator of the graphs whose value the program does not compute."""
    for program in graphs:
        values = values_of(program)
        for node in program.calls:
            value = values.get(node.name)
            if isinstance(value, torch.Tensor) and not any(map(functools.partial(_same, value.detach()), known)):
                return program, node
    return _last(graphs)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.allclose(one, other, equal_nan=True) if one.is_floating_point() else torch.equal(one, other)
