"""Hooks on the gradients of tensors: they are registered behind the graph, on the real tensors, and run as eager's do.

A hook sees the gradient when the backward comes to its tensor, whenever it was registered before that. So the graph
gives back the tensor, and generated code registers the hook on it, in the turn of the program's other effects. Where
that would be another tensor to autograd (something writes to it behind the call), or the program needs the handle that
it was given, capture begins anew, and the graph ends before the call, which is made for real (`HookOutlivesGraph`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from primtorch.fake import FakeTensor
from torchdynamo.calls.emissions import Emissions
from torchdynamo.graph.recorder import Recorder
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, Rule
from torchdynamo.reasons import BreakGraph, HookOutlivesGraph

_WAITING: tuple[str, ...] = ()


class GradientHooks:
    """The hooks that one capture registers, as rules of calls."""

    def __init__(self, recorder: Recorder, emissions: Emissions) -> None:
        self.recorder = recorder
        self.emissions = emissions
        self.refused = -1  # which of them has to be registered for real
        self._registered: list[tuple[FakeTensor, tuple[object, ...]]] = []  # each with what autograd knew it by

    def rules(self) -> Iterator[tuple[object, Rule]]:
        """The methods of tensors that hooks are registered by.

        None as yet: where the program takes the gradient in the same call, hooks that waited for the end of the graph
        missed it. Until then each ends the graph (`tensor_hook`).
        """
        for name in _WAITING:
            yield getattr(torch.Tensor, name), functools.partial(self.register, name)

    def register(self, name: str, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """A call of such a method: what stands for the handle, which is good for nothing but to be dropped."""
        tensor: Any = args[0] if args else None
        if len(self._registered) == self.refused:
            raise BreakGraph("tensor_hook", f"{name}() of a tensor that is written to, or whose handle is kept")
        if not self._may_wait(name, tensor, len(args), kwargs):
            raise BreakGraph("tensor_hook", f"{name}() of a tensor")
        place = len(self._registered)
        self._registered.append((tensor, self._known_by(tensor)))
        self.recorder.hooked = True
        self.emissions.do(getattr(torch.Tensor, name), args)
        if name == "retain_grad":
            with torch._C.DisableTorchFunction():
                tensor.retain_grad()
            return None
        handle: RemovableHandle = object.__new__(RemovableHandle)
        self.recorder.handles[id(handle)] = handle, HookOutlivesGraph(place)
        return handle

    def refuse_changed(self) -> None:
        """The graph ends. Raises HookOutlivesGraph for a tensor that is another one by now."""
        for place, (tensor, known_by) in enumerate(self._registered):
            if self._known_by(tensor) != known_by:
                raise HookOutlivesGraph(place)

    def _may_wait(self, name: str, tensor: object, given: int, kwargs: Kwargs) -> bool:
        if not isinstance(tensor, FakeTensor) or class_of(tensor) is not None or self.recorder.regions.open:
            return False
        if kwargs or given != (1 if name == "retain_grad" else 2) or not tensor.requires_grad:
            return False
        return tensor.is_leaf == (name == "register_post_accumulate_grad_hook") or name == "register_hook"

    def _known_by(self, tensor: FakeTensor) -> tuple[object, ...]:
        return self.recorder.node_of(tensor), tensor._version, tensor.requires_grad, tensor.is_leaf
