"""Running a lowered graph on a backend: an object with one callable for each prim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, Target

from primtorch.prims import Prim


class References:
    """The backend that computes each prim by its reference."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, backend: object) -> None:
        super().__init__(gm)
        self.backend = backend

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]) -> object:
        value = super().get_attr(target, args, kwargs)
        convert = getattr(self.backend, "from_torch", None)
        return convert(value) if convert is not None and isinstance(value, torch.Tensor) else value

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        if isinstance(target, Prim):
            return getattr(self.backend, target.name, target)(*args, **kwargs)
        if target is torch.ops.aten.sym_size.int:  # the backend's tensors need not be torch's
            return args[0].shape[args[1]]
        return super().call_function(target, args, kwargs)


def interpret(gm: fx.GraphModule, backend: object = None) -> Callable[..., Sequence[object]]:
    """A callable that runs `gm` on `backend`: it takes the graph's inputs in order, and gives its outputs.

    Args:
        gm: a graph of prims, as `lower` makes it.
        backend: `backend.add(a, b)` computes the prim `add`, and so on; the reference stands in for a prim it lacks.
            None runs references only. A backend may use its own tensor type throughout; constants of the graph go
            through its `from_torch` then.
    """
    runner = _Run(gm, References() if backend is None else backend)
    return lambda *inputs: runner.run(*inputs, enable_io_processing=False)
