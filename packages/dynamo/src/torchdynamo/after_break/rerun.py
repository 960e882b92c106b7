"""What happens when a compiled graph raises: the call runs again as it was written.

A graph raises from the middle of generated code, outside of the program's `with` blocks and handlers. But it runs
before anything else that the generated code does: what the program writes, breaks and returns comes behind it. So the
call can begin anew, and eager's own run raises the exception where the program's exits, handlers and tracebacks are
eager's. What a graph may have done until it raised is put back (random generators, grad mode, autocast); where it has
written to an input it cannot begin anew, and where the exception is no operator's (what a signal's handler or a hook
for saved tensors raises) it need not come again. Such an exception is raised where the function was entered: a
continuation leaves the blocks that were open across the break, and its handlers see it.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import _StopRecomputationError

from primtorch import ambient, communication
from primtorch.frozen import record
from primtorch.interrupts import interrupt_behind
from primtorch.ledger import Event, Kind, Ledger
from primtorch.wrappers import lies_over_ranks, whole_of
from torchdynamo.after_break.resume import Entrance, StackSlot, make_resume, origin_of
from torchdynamo.after_break.resume import Entry as How
from torchdynamo.errors import TorchDynamoError, is_of_compiler
from torchdynamo.events import CONDITION_NOT_MET, GRAPH_RAISED, RAISE_WAS_HANDLED, RAISED_AT_ENTRY, of_function
from torchdynamo.graph.conditions import ConditionNotMet
from torchdynamo.interpreter.decode import flat_size

# What the nodes of a graph change for those behind them, and leave changed where one of those raises.
_GRAD = tuple(state for state in ambient.AMBIENT if state.name == "grad mode")
_AUTOCAST = tuple(state for state in ambient.AMBIENT if state.name.startswith("autocast"))
_CHOICES = {state.write: state for state in ambient.ATTENTION}


@record
class Before:
    """What a graph with effects may change before it raises."""

    generators: tuple[tuple[torch.Generator, torch.Tensor], ...]
    states: tuple[tuple[ambient.Ambient, object], ...]
    written: tuple[object, ...]

    def put_back(self) -> None:
        """Gives generators and ambient states what they had before the graph ran."""
        for generator, state in self.generators:
            generator.set_state(state)
        for known, then in self.states:
            if known.write is not None and not known.same(then, known.read()):
                known.write(then)


@dataclass(frozen=True, slots=True)
class Rerun:
    """Takes over from the generated code of one compiled version whose graph raised.

    Attributes:
        written: which of the graph's inputs the program writes to.
        states: what else the graph switches, besides grad mode.
        communicates: the graph holds collectives. Other ranks do not call them a second time.
    """

    function: types.FunctionType
    ledger: Ledger
    written: tuple[int, ...]
    states: tuple[ambient.Ambient, ...]
    communicates: bool

    def begin(self, inputs: Sequence[object]) -> Before:
        """Called before a graph with effects runs."""
        states = tuple((state, state.read()) for state in (*_GRAD, *self.states))
        return Before(_generators(), states, self._metadata(inputs))

    def _metadata(self, inputs: Sequence[Any]) -> tuple[object, ...]:
        return tuple(map(_metadata, (inputs[place] for place in self.written)))

    def __call__(
        self, failed: list[BaseException], before: Before | None, inputs: Sequence[object], flat: Sequence[object]
    ) -> object:
        """Raises what the program raises, or returns what it returns where one of its handlers goes on.

        Args:
            failed: what the graph raised. It is taken out, so that no frame of its traceback holds it.
            flat: the arguments of the call, one for each slot.
        """
        error: BaseException | None = failed.pop()
        assert error is not None
        try:
            once = _is_of_hook(error) or interrupt_behind(error) is not None
            told = isinstance(error, TorchDynamoError) or is_of_compiler(error)  # to the user, whatever eager would do
            again = isinstance(error, Exception) and not told and not once
            if before is not None:
                before.put_back()
                again = again and _unwritten(before.written, self._metadata(inputs))
            if again and isinstance(error, ConditionNotMet):
                event = Event(CONDITION_NOT_MET, self.function.__qualname__, str(error), error.places[0])
                error = None
                return self._raising(event, flat)
            if again and not self.communicates:
                self._tell(GRAPH_RAISED, error)
                error = None
                args, kwargs = unflatten(self.function.__code__, flat)
                return self.function(*args, **kwargs)
            if not isinstance(error, _StopRecomputationError):  # with it a checkpoint ends what it has seen enough of
                self._tell(RAISED_AT_ENTRY, error)
            return raise_at_entry(self.function, flat, error)
        finally:
            error = None  # its traceback holds this frame

    def _raising(self, event: Event, flat: Sequence[object]) -> object:
        """The call where a condition is not met, behind which the program raises; tells of it by `event`."""
        args, kwargs = unflatten(self.function.__code__, flat)
        try:
            result = self.function(*args, **kwargs)
        except BaseException:
            self.ledger.add(event)
            raise
        self.ledger.add(replace(event, kind=RAISE_WAS_HANDLED))
        return result

    def _tell(self, kind: Kind, error: BaseException) -> None:
        self.ledger.add(of_function(kind, self.function, f"{type(error).__name__}: {error}"))


def _is_of_hook(error: BaseException) -> bool:
    """Whether the program's hook for saved tensors raised it, which need not do so a second time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    code = getattr(hooks[0], "__code__", None) if hooks is not None else None
    return code is not None and any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def has_effects(graph: fx.GraphModule) -> bool:
    """Whether a captured graph may change anything before it raises: inputs, generators, states of the thread."""
    return any(node.meta.get("effect") for node in _nodes(graph))


def communicates(graph: fx.GraphModule) -> bool:
    """Whether a captured graph calls collectives."""
    return any(
        communication.communicates(node.target) or any(map(_over_ranks, (node, *node.all_input_nodes)))
        for node in _nodes(graph)
        if node.op.startswith("call")
    )


def _over_ranks(node: fx.Node) -> bool:
    """Whether a value is a DTensor, whose operators may call collectives."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and lies_over_ranks(type(whole_of(value)))


def switched_states(graph: fx.GraphModule) -> tuple[ambient.Ambient, ...]:
    """What a captured graph switches, besides grad mode: autocast, the choice of attention's kernels."""
    called = {node.target for node in _nodes(graph) if node.op == "call_function"}
    casts = _AUTOCAST if torch.amp.autocast_mode._enter_autocast in called else ()
    return (*casts, *(state for setter, state in _CHOICES.items() if setter in called))


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def unflatten(code: types.CodeType, flat: Sequence[Any]) -> tuple[list[object], dict[str, object]]:
    """The arguments of a call that binds to these slots."""
    named = code.co_argcount + code.co_kwonlyargcount
    assert len(flat) == flat_size(code)
    args = list(flat[: code.co_argcount])
    kwargs = dict(zip(code.co_varnames[code.co_argcount : named], flat[code.co_argcount : named], strict=True))
    rest = list(flat[named:])
    if code.co_flags & 4:
        args += rest.pop(0)
    if code.co_flags & 8:
        kwargs.update(rest.pop(0))
    return args, kwargs


def _generators() -> tuple[tuple[torch.Generator, torch.Tensor], ...]:
    """The default generators with their states. A capturing stream's belong to what it captures."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found += torch.cuda.default_generators
    return tuple((generator, generator.get_state()) for generator in found)


def _metadata(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """What a write changes; None for a tensor that does not count its writes."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.is_inference() else (tensor._version, tensor.shape, tensor.stride())


def _unwritten(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return None not in before and before == now


def raise_at_entry(function: types.FunctionType, flat: Sequence[Any], error: BaseException) -> object:
    """Raises an exception where a call begins: in a continuation, under the handlers of where it goes on."""
    origin = origin_of(function)
    if origin is None:
        raise error
    (waiting,), entrance = flat, origin.entrance
    state = list(waiting)
    waiting.clear()
    held = sum(slot is not StackSlot.NULL for slot in entrance.stack)
    if entrance.entry is How.CALL:  # the place is in a frame inside, whose exception the others let pass
        inner = state[held]
        state[held] = lambda given: raise_at_entry(inner, (given,), error)
        return function(state)
    if entrance.entry is How.NEXT:
        at = Entrance(0, entrance.stack, entrance.locals, How.RAISE, entrance.offset)
        state.insert(held, error)
        return make_resume(origin.function, at)(state)
    raise error
