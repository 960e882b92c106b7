"""`tensor.data = value`: the tensor becomes another view of the value's memory, and keeps what autograd knows of it.

In the graph another node stands for the tensor from there on. Where it has a history, or one begins at it, that is
`with_data`, through which gradients go on to what the tensor was. Behind the graph a tensor of the outside is given its
new memory for real.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import fx

from primtorch.fake import FakeTensor
from primtorch.own_derivatives import tracer
from torchdynamo.graph.derivatives import tensors_of
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder


class _WithData(torch.autograd.Function):
    """The second tensor's values, with the first one's history."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value).data  # no view to autograd: the tensor may be written to

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def with_data(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What the tensor is once it was given the value's memory."""
    traced = tracer()
    with torch.enable_grad():  # the history is the tensor's, whether or not one is recorded where this is done
        if traced is not None:
            return traced.with_history(value, tensor)
        return _WithData.apply(tensor, value)  # type: ignore[no-any-return]


class DataWrites:
    """Those of one capture."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._with_history: dict[int, FakeTensor] = {}

    def write(self, tensor: torch.Tensor, value: object) -> torch.Tensor:
        """Gives a tensor the memory of another one. Returns a view of that, which nobody differentiates."""
        recorder = self.recorder
        given = recorder.adopt_all(value)
        if not isinstance(tensor, FakeTensor) or not isinstance(given, FakeTensor):
            raise _refusal("of what is no plain tensor")
        if recorder.regions.open or recorder.modes or torch.is_inference_mode_enabled():
            raise _refusal("within a block of its own")
        if class_of(tensor) or class_of(given) or recorder.wrappers.are_in((tensor, given), {}):
            raise _refusal("of a tensor subclass")
        if not _alike(tensor, given):
            raise _refusal(f"{given.spec} for {tensor.spec}")
        if _is_saved(recorder.node_of(tensor)):
            raise _refusal("which a derivative may read that was asked for before")
        data: torch.Tensor = recorder.record(torch.Tensor.detach, (given,), {})
        node = recorder.node_of(data)
        if tensor.requires_grad:
            node = recorder.write_node(with_data, (recorder.argument(tensor), recorder.argument(data)))
            node.meta["val"] = tensor
        assert node is not None
        recorder.replace_node(tensor, node)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            tensor.data = given
        if tensor.requires_grad:
            self._with_history[id(memory_of(tensor))] = tensor
        return data

    def refuse(self, tensors: Iterable[torch.Tensor]) -> None:
        """Derivatives by such a tensor: what was computed before would be forgotten."""
        mine = {id(tensor) for tensor in self._with_history.values()}
        if any(id(tensor) in mine for tensor in tensors):
            raise BreakGraph("backward", "a derivative by a tensor whose data was set")


def _is_saved(node: fx.Node | None) -> bool:
    """Whether autograd may have kept the tensor: it reads what it kept when it gets there, with the data of then."""
    return node is not None and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor is not node.meta["val"]
        for user in node.users
        for tensor in tensors_of(user.meta.get("val"))
    )


def _alike(tensor: FakeTensor, given: FakeTensor) -> bool:
    """Whether both have the same metadata; of sizes that vary it is guarded."""
    one, other = tensor.spec, given.spec
    if (one.dtype, one.device, len(one.shape)) != (other.dtype, other.device, len(other.shape)):
        return False
    pairs = zip((*one.shape, *one.strides), (*other.shape, *other.strides), strict=True)
    return all(bool(mine == theirs) for mine, theirs in pairs)


def _refusal(why: str) -> BreakGraph:
    return BreakGraph("tensor_metadata_write", f"assignment to the tensor attribute 'data', {why}")
