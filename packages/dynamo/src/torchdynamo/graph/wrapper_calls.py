"""Nodes of calls on tensors that wrap others which are no operators, and what their classes ask of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from primtorch.fake import FakeTensor
from primtorch.flattenings import Question, source_of
from primtorch.wrappers import Applied
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder


def apply(
    recorder: Recorder, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> torch.Tensor:
    """The result of a function that makes wrappers or takes them apart: one node."""
    call, tensors = Applied.of(function, args, kwargs)
    recorder.refuse_call(call.__name__)
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise BreakGraph("tensor_subclass", f"{call.__name__}() of a tensor that the graph does not know")
    with torch._C.DisableTorchFunction():
        result = recorder.wrappers.apply(call, tensors)
    hold_matches(recorder, tensors)
    if recorder.node_of(result) is None:
        recorder.write(call, tuple(tensors), {}, result)
    return result


def hold_matches(recorder: Recorder, operands: object) -> None:
    """What the classes took for granted of their tensors' parts is a condition of the graph."""
    asked, recorder.wrappers.asked = recorder.wrappers.asked, []
    for question in asked:
        with recorder.recording():
            met = _equal(recorder, operands, question)
            held = met is not None and recorder.conditions.take_for_granted(met, True)
        if not held:
            raise BreakGraph("tensor_subclass", "whether masks match, which only the data tells")


def _equal(recorder: Recorder, operands: object, question: Question) -> FakeTensor | None:
    """Whether the two parts are equal, as a value of the graph."""
    found = [recorder.wrappers.named(operands, tensor) for tensor in question.pair]
    if None in found:
        return None
    one, other = (recorder.part(*named) for named in found if named is not None)
    if one is None or other is None or source_of(one) is source_of(other):
        return None
    met = torch.eq(one, other).all()
    return met if isinstance(met, FakeTensor) else None
