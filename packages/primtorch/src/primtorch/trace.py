"""A function and example inputs become a graph of ATen overloads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.errors import TraceError
from primtorch.schemas import UserFrame
from primtorch.tracing import RecordingMode

_TORCH = torch.__file__.rpartition("/")[0]
_OURS = __file__.rpartition("/")[0]


def _user_frames() -> tuple[UserFrame, ...]:
    """The frames of the program being traced, outermost first: neither torch's nor this package's."""
    frames: list[UserFrame] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is trace.__code__:
            break
        if not code.co_filename.startswith((_TORCH, _OURS)):
            frames.append(UserFrame(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(frames))


def trace(fn: Callable[..., Any], *examples: Any) -> fx.GraphModule:
    """Run `fn` on the examples once and record every ATen call, gradients included.

    The graph takes the tensors among the examples (pytree order) and returns fn's tensors as a flat tuple. It is
    functional where the program is. Tensors that fn reads from elsewhere become constants.

    Raises:
        TraceError: fn returns something that is not a tensor, a number or None.
    """
    leaves, _ = pytree.tree_flatten(examples)
    mode = RecordingMode(frames=_user_frames)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            mode.placeholder(leaf, f"input_{i}")
    with mode:
        outputs = fn(*examples)
    flat, _ = pytree.tree_flatten(outputs)
    for out in flat:
        if out is not None and not isinstance(out, (torch.Tensor, int, float, bool)):
            raise TraceError(f"fn returned a {type(out).__name__}; expected tensors, numbers or None in containers")
    return mode.finish(tuple(flat))
