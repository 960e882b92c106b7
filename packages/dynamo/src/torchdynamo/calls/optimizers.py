"""Torch's optimizers: their fused kernels stand for loops over the parameters, which a compiler fuses by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.optim import adagrad, adam, sgd

from torchdynamo.reasons import BreakGraph

# What calls a fused kernel -> the loop of the same meaning, with the same arguments.
LOOPS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        adam._fused_adam: adam._single_tensor_adam,
        sgd._fused_sgd: sgd._single_tensor_sgd,
        adagrad._fused_adagrad: adagrad._single_tensor_adagrad,
    }
)


def loop_for(fused: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The loop that `fused(*args, **kwargs)` stands for. Breaks where a gradient scaler takes part."""
    scaled = [kwargs.get(name) for name in ("grad_scale", "found_inf")]
    names = fused.__code__.co_varnames[: fused.__code__.co_argcount]
    scaled += [value for name, value in zip(names, args, strict=False) if name in ("grad_scale", "found_inf")]
    if any(value is not None for value in scaled):
        raise BreakGraph("operator_without_meta", f"{fused.__name__} under a gradient scaler")
    return LOOPS[fused]
