"""Torch's optimizers and gradient scalers: their fused kernels stand for loops and operators, which a compiler fuses by
itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.optim import adagrad, adam, sgd

from torchdynamo.graph.lists_of_tensors import is_over_lists
from torchdynamo.interpreter.state import FrameState
from torchdynamo.reasons import BreakGraph

# What calls a fused kernel -> the loop of the same meaning, with the same arguments.
LOOPS: Mapping[Callable[..., object], Callable[..., object]] = MappingProxyType(
    {
        adam._fused_adam: adam._single_tensor_adam,
        sgd._fused_sgd: sgd._single_tensor_sgd,
        adagrad._fused_adagrad: adagrad._single_tensor_adagrad,
    }
)


def loop_for(
    fused: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> Callable[..., object]:
    """The loop that `fused(*args, **kwargs)` stands for. Breaks where a gradient scaler takes part."""
    scaled = [kwargs.get(name) for name in ("grad_scale", "found_inf")]
    names = fused.__code__.co_varnames[: fused.__code__.co_argcount]
    scaled += [value for name, value in zip(names, args, strict=False) if name in ("grad_scale", "found_inf")]
    if any(value is not None for value in scaled):
        raise BreakGraph("operator_without_meta", f"{fused.__name__} under a gradient scaler")
    return LOOPS[fused]


def hands_over_tensors(function: object, frames: Sequence[FrameState]) -> bool:
    """Whether one of torch's optimizers calls an operator over lists. Where it is compiled, its step counts and what it
    computes of them are tensors: the operators' C++ would refuse these in a list of numbers before it asks a mode."""
    called_in = frames[-1].function.__module__ or "" if frames else ""
    return called_in.startswith("torch.optim.") and is_over_lists(getattr(function, "__name__", ""))


def unscale(gradients: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """`torch._amp_foreach_non_finite_check_and_unscale_`: divides by the scale, and says whether all is finite."""
    for gradient in gradients:
        infinite = torch.logical_not(torch.isfinite(gradient)).any()
        found.copy_(torch.where(infinite, torch.ones_like(found), found))
        wide = gradient.to(torch.promote_types(gradient.dtype, inverse.dtype))
        gradient.copy_(wide * inverse.reshape(()))


def update_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """`torch._amp_update_scale_`: less where something was infinite, more after many steps where nothing was."""
    infinite, due = found.reshape(scale.shape) != 0, tracker + 1 == interval
    grown = scale * growth
    grown = torch.where(torch.logical_and(due, torch.isfinite(grown)), grown, scale)
    tracker.copy_(torch.where(torch.logical_or(infinite, due), torch.zeros_like(tracker), tracker + 1))
    return scale.copy_(torch.where(infinite, scale * backoff, grown))


# Operators of gradient scalers -> what they are made of.
OF_SCALERS: Mapping[Callable[..., object], Callable[..., object]] = MappingProxyType(
    {
        torch._amp_foreach_non_finite_check_and_unscale_: unscale,
        torch._amp_update_scale_: update_scale,
    }
)
