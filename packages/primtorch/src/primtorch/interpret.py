"""Running a lowered graph on a backend: an object with one callable for each prim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from primtorch.prims import Prim


class References:
    """The backend that computes each prim by its reference."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, backend: Any) -> None:
        super().__init__(gm)
        self.backend = backend

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, Prim):
            return getattr(self.backend, target.name, target)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def interpret(gm: fx.GraphModule, backend: Any = None) -> Callable[..., Sequence[Any]]:
    """A callable that runs `gm` on `backend`.

    Args:
        backend: `backend.add(a, b)` computes the prim `add`, and so on; the reference stands in for a prim it lacks.
            None runs references only. A backend may use its own tensor type throughout.
    """
    runner = _Run(gm, References() if backend is None else backend)
    return lambda *inputs: runner.run(*inputs, enable_io_processing=False)
