"""The ambient state of the thread, as guards compare it."""

from __future__ import annotations

import weakref

import torch
import torch.overrides
from torch.utils._device import DeviceContext

from primtorch.ambient import settle
from torchdynamo._C import kernel_switches
from torchdynamo.schemas import GlobalState


def global_state() -> GlobalState:
    """Ambient state of this thread, as the guard compares it."""
    settle()
    devices = ("cpu", "cuda")
    return GlobalState(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=torch.get_default_dtype(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        torch_function_modes=torch._C._len_torch_function_stack(),
        switches=kernel_switches(),
    )


def function_modes() -> tuple[object, ...]:
    """The torch-function modes that are on: a default device by its device, others by their identity."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[attr-defined]
    return tuple(m.device if isinstance(m, DeviceContext) else weakref.ref(m) for m in modes)
