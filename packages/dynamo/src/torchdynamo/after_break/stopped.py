"""Where a program stops: its frames before the instruction that breaks the graph."""

from __future__ import annotations

from typing import Any

from primtorch.frozen import record
from torchdynamo.interpreter import InterpretedFrame
from torchdynamo.schemas import GraphBreak


@record
class StoppedFrame:
    """A frame at the instruction that breaks the graph, or within the call that leads there."""

    frame: InterpretedFrame
    index: int  # of the instruction in the decoded code
    stack: list[Any]  # NULL for empty slots, `HandlerSlot` below a handled exception; a call's operands are gone
    locals: dict[str, object]
    handled: dict[int, BaseException]  # by the place of a `HandlerSlot` on the stack: what is handled there


@record
class Stopped:
    """The program just before the instruction that breaks the graph: its frames, outermost first."""

    frames: list[StoppedFrame]
    graph_break: GraphBreak
