"""`with` blocks of torch that the graph holds, or that generated code enters again: autocast regions, default devices,
ranges of the profiler, function modes. What opens such a block and what ends it are calls with rules of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.amp import autocast_mode
from torch.autograd.profiler import record_function as _ProfilerRange
from torch.overrides import TorchFunctionMode

from primtorch.frozen import record
from torchdynamo.calls.emissions import Emissions
from torchdynamo.graph.recorder import Recorder
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, Rule
from torchdynamo.reasons import BreakGraph


@record
class OpenBlock:
    """A `with` block of torch that the program has entered and not left: an autocast region, a default device, a range
    of the profiler.

    Attributes:
        enter, args: what enters it again, where the graph ends within.
        node: what entered it in the graph, None where a graph holds nothing of it.
    """

    context: object
    enter: Callable[..., object]
    args: tuple[object, ...]
    node: fx.Node | None = None


class OpenBlocks:
    """The blocks that the program has entered and not left, as rules of calls."""

    def __init__(self, recorder: Recorder, emissions: Emissions) -> None:
        self.recorder = recorder
        self.emissions = emissions
        self.entered: list[OpenBlock] = []  # the innermost last

    def rules(self) -> tuple[tuple[object, Rule], ...]:
        """What opens such a block and what ends it, each with what a call of it means."""
        return (
            (torch.autocast.__enter__, self.enter_autocast),
            (torch.autocast.__exit__, self.exit_autocast),
            (torch.device.__enter__, self.enter_device),
            (torch.device.__exit__, self.exit_device),
            (_ProfilerRange.__enter__, self.enter_range),
            (_ProfilerRange.__exit__, self.exit_range),
            (torch._C._push_on_torch_function_stack, self.push_mode),
            (torch._C._pop_torch_function_stack, self.pop_mode),
        )

    def enter_autocast(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`with torch.autocast(...)`: a node of the graph."""
        context = args[0]
        result = fn(*args, **kwargs)
        parameters = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
        node = self.recorder.write(autocast_mode._enter_autocast, parameters, {}, None)
        node.meta["effect"] = True
        self.entered.append(OpenBlock(context, autocast_mode._enter_autocast, parameters, node))
        return result

    def exit_autocast(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The end of the innermost autocast region. Breaks the graph where another block is open within."""
        block = self._leave(args[0], "an autocast region")
        result = fn(*args, **kwargs)
        self._close(block)
        return result

    def enter_device(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`with torch.device(...)`: calls that make tensors are recorded with the device that they get."""
        with self.recorder.set_aside():
            result = fn(*args, **kwargs)
        self.entered.append(OpenBlock(args[0], torch.device.__enter__, (args[0],)))
        self._name_device()
        return result

    def exit_device(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """Behind the block, calls that make tensors have the device of the block around it, or none."""
        self._leave(args[0], "a block with a default device")
        with self.recorder.set_aside():
            result = fn(*args, **kwargs)
        self._name_device()
        return result

    def enter_range(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A range of the profiler is no part of a graph. It is entered where the graph ends within."""
        self.entered.append(OpenBlock(args[0], fn, (args[0],)))
        return args[0]

    def exit_range(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """One that began before the graph ends behind it, for real."""
        if not self.entered and args[1] is None:
            self.emissions.do(fn, (args[0], None, None, None))
        else:
            self._leave(args[0], "a range of the profiler")

    def push_mode(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """The program enters a function mode of its own: capture asks it in torch's place, and interprets it. Where the
        graph ends within, generated code enters it for real."""
        (mode,) = args
        if not isinstance(mode, TorchFunctionMode):
            raise BreakGraph("ambient_state", f"a {type(mode).__qualname__} is put on the stack of function modes")
        self.recorder.modes.append(mode)
        self.entered.append(OpenBlock(mode, torch._C._push_on_torch_function_stack, (mode,)))

    def pop_mode(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The innermost function mode, which ends."""
        modes = self.recorder.modes
        self._leave(modes[-1] if modes else None, "a function mode")
        return modes.pop()

    def _name_device(self) -> None:
        devices = [block.context for block in self.entered if isinstance(block.context, torch.device)]
        self.recorder.default_device = devices[-1] if devices else None

    def _leave(self, context: object, what: str) -> OpenBlock:
        """The innermost block is the one of `context`, which ends."""
        if not self.entered or self.entered[-1].context is not context:
            raise BreakGraph("ambient_state", f"the end of {what} that began before the graph, or out of turn")
        return self.entered.pop()

    def _close(self, block: OpenBlock) -> None:
        node = self.recorder.write_node(autocast_mode._exit_autocast, (block.node,))
        node.meta["effect"] = True

    def close(self) -> list[OpenBlock]:
        """Ends in the graph the blocks that are still open where it ends, and gives them, the outermost first."""
        for block in reversed(self.entered):
            if block.node is not None:
                self._close(block)
        return self.entered
