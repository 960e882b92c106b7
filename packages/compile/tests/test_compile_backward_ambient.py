"""A backward is compiled when autograd's engine first asks for it: what the program has set by then is not its concern."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ambient_state import default_dtype
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchcompile
from primtorch.testing import assert_as_accurate


class Functions(TorchFunctionMode):
    """Would change what a compiler computes with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if type(result) is torch.Tensor and result.is_floating_point() else result


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "function mode": Functions,
    "dispatch mode": Operators,
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "default device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "no torch functions": torch._C.DisableTorchFunction,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda saved: saved),
}


def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (F.layer_norm((x @ w).sin(), (4,)).softmax(-1) * torch.arange(4.0)).sum()


def indexed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (F.gelu(x[[0, 0, 1]] @ w) * x[:3]).cumsum(0).sum()


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x[None], w[:, :, None]).pow(2).mean()


def _gradients(
    program: Callable[..., Any], block: AbstractContextManager[Any], twice: bool, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]
    result = program(*inputs)
    with block:
        first = torch.autograd.grad(result, inputs, create_graph=twice)
        if not twice:
            return list(first)
        with torch._C.DisableTorchFunction():
            total = first[0].square().sum() + first[1].square().sum()
        return [*first, *torch.autograd.grad(total, inputs)]


# A sum that is made under no_grad has no derivative.
CASES = [(name, twice) for name in AMBIENT for twice in (False, True) if not (twice and name == "no_grad")]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", [normalized, indexed, convolved])
@pytest.mark.parametrize(("name", "twice"), CASES)
def test_gradients_do_not_depend_on_it(name: str, program: Callable[..., Any], twice: bool, backend: str) -> None:
    block = AMBIENT[name]
    exact = _gradients(program, nullcontext(), twice, torch.float64)
    eager = _gradients(program, nullcontext(), twice)
    found = _gradients(torchcompile.compile(program, backend=backend), block(), twice)
    assert all(value.dtype is torch.float32 and value.device.type == "cpu" for value in found)
    assert_as_accurate(found, eager, exact, name)
