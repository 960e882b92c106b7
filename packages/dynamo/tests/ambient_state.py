"""State of the process that programs depend on, changed within a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def state_of_process() -> dict[str, Any]:
    """What a program may leave changed behind."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch function": torch._C._is_torch_function_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "multithreading": torch._C._is_multithreading_enabled(),
        "saved tensors hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.enabled,
        "attention": (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


@contextlib.contextmanager
def left_behind() -> Iterator[Callable[[], list[tuple[str, Any]]]]:
    """Gives a function that tells the state of the process now, and takes back what the block leaves behind."""
    grad, dtype, threads_before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield lambda: list(state_of_process().items())
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads_before:
            torch.set_num_threads(threads_before)


def take_modes_off(before: dict[str, Any]) -> None:
    """Makes a process usable again in which modes were left on the stacks."""
    while torch._C._len_torch_function_stack() > before["function modes"]:
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack() > before["dispatch modes"]:
        torch._C._pop_torch_dispatch_stack()
    torch.set_grad_enabled(before["grad"])
    torch.set_anomaly_enabled(*before["anomaly"])
    torch._C._set_multithreading_enabled(before["multithreading"])
    torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
