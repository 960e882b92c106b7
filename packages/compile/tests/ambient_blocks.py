"""Every context manager that torch has, found by listing its modules, with what makes one for a test."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.backends
import torch.nn.attention
import torch.utils.flop_counter
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

MODULES = (
    "torch.overrides", "torch.utils._python_dispatch", "torch", "torch.amp", "torch.autograd", "torch.autograd.forward_ad", "torch.autograd.graph",
    "torch.autograd.profiler", "torch.compiler", "torch.cpu", "torch.cpu.amp", "torch.func", "torch.fx",
    "torch.library", "torch.masked", "torch.nn", "torch.nn.attention", "torch.nn.functional", "torch.nn.utils",
    "torch.nn.utils.parametrize", "torch.nn.utils.stateless", "torch.optim", "torch.profiler",
    "torch.random", "torch.serialization", "torch.sparse", "torch.utils",
    "torch.utils.checkpoint", "torch.utils.deterministic", "torch.utils.flop_counter", "torch.utils.module_tracker",
    *(f"torch.backends.{module.name}" for module in pkgutil.iter_modules(torch.backends.__path__)),
    *(f"torch.nn.attention.{module.name}" for module in pkgutil.iter_modules(torch.nn.attention.__path__)),
)  # fmt: skip
_OF_A_GENERATOR = contextlib.contextmanager(lambda: iter(())).__code__


def listed() -> dict[str, Any]:
    """The context managers of torch's public modules, each under the first name that it is found by."""
    found: dict[int, tuple[str, Any]] = {}
    for name in MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue  # of a vendor whose library is not here
        for attribute, value in vars(
            getattr(module, "m", module)
        ).items():  # `m`: where a module is replaced by an object
            of_torch = str(getattr(value, "__module__", "")).startswith("torch")
            is_block = isinstance(value, type) and hasattr(value, "__enter__")
            is_function = isinstance(value, types.FunctionType) and value.__code__ is _OF_A_GENERATOR
            if of_torch and not attribute.startswith("_") and (is_block or is_function):
                found.setdefault(id(value), (f"{name}.{attribute}", value))
    return dict(found.values())


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Computing(TorchDispatchMode):
    """Implements an operator by others of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            return _product(*args)
        return func(*args, **(kwargs or {}))


def _product(a: Any, b: Any) -> Any:
    made = a * b
    made.view(-1).mul_(2)
    return made / 2


def _same(value: Any) -> Any:
    return value


Make = Callable[[], AbstractContextManager[Any]]

BLOCKS: dict[str, Make] = {
    "torch.no_grad": torch.no_grad,
    "torch.enable_grad": torch.enable_grad,
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "torch.inference_mode": torch.inference_mode,
    "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch.cpu.amp.autocast": lambda: torch.autocast("cpu", dtype=torch.float16),  # the other name warns
    "torch.device": lambda: torch.device("cpu"),
    "torch.DisableTorchFunction": torch._C.DisableTorchFunction,
    "torch.DisableTorchFunctionSubclass": torch._C.DisableTorchFunctionSubclass,
    "torch.ExcludeDispatchKeyGuard": lambda: torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    ),
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "without functionalization": lambda: torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    ),
    "without dispatch to Python": torch._C._DisableTorchDispatch,
    "torch.cpu.StreamContext": lambda: torch.cpu.StreamContext(None),
    "torch.autograd.detect_anomaly": torch.autograd.detect_anomaly,
    "torch.autograd.set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "torch.autograd.set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
    "torch.autograd.enforce_grad_layout_policy": lambda: torch.autograd.enforce_grad_layout_policy(True),
    "torch.autograd.forward_ad.dual_level": torch.autograd.forward_ad.dual_level,
    "torch.autograd.graph.allow_mutation_on_saved_tensors": graph.allow_mutation_on_saved_tensors,
    "torch.autograd.graph.disable_saved_tensors_hooks": lambda: graph.disable_saved_tensors_hooks("a test"),
    "torch.autograd.graph.save_on_cpu": graph.save_on_cpu,
    "torch.autograd.graph.saved_tensors_hooks": lambda: saved_tensors_hooks(_same, _same),
    "torch.autograd.profiler.profile": torch.autograd.profiler.profile,
    "torch.autograd.profiler.record_function": lambda: torch.autograd.profiler.record_function("a test"),
    "torch.profiler.profile": torch.profiler.profile,
    "torch.backends.cuda.sdp_kernel": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], True),
    "torch.nn.attention.sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "torch.backends.cudnn.flags": lambda: torch.backends.cudnn.flags(enabled=False),
    "torch.backends.mkldnn.flags": lambda: torch.backends.mkldnn.flags(enabled=False),
    "torch.backends.nnpack.flags": lambda: torch.backends.nnpack.flags(enabled=False),
    "torch.backends.opt_einsum.flags": lambda: torch.backends.opt_einsum.flags(enabled=False),
    "torch.backends.mkl.verbose": lambda: torch.backends.mkl.verbose(0),
    "torch.backends.mkldnn.verbose": lambda: torch.backends.mkldnn.verbose(0),
    "torch.nn.utils.parametrize.cached": parametrize.cached,
    "torch.overrides.TorchFunctionMode": Passing,
    "torch.utils._python_dispatch.TorchDispatchMode": Dispatching,
    "a mode that computes": Computing,
    "torch.random.fork_rng": torch.random.fork_rng,
    "torch.serialization.safe_globals": lambda: torch.serialization.safe_globals([]),
    "torch.serialization.skip_data": torch.serialization.skip_data,
    "torch.sparse.check_sparse_tensor_invariants": torch.sparse.check_sparse_tensor_invariants,
    "torch.utils.checkpoint.set_checkpoint_early_stop": lambda: checkpoint.set_checkpoint_early_stop(False),
    "torch.utils.checkpoint.set_checkpoint_debug_enabled": lambda: checkpoint.set_checkpoint_debug_enabled(True),
    "torch.utils.flop_counter.FlopCounterMode": lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
}
# Those that no program of a test can enter, and why.
LEFT_OUT: dict[str, str] = {
    "torch.Stream": "of an accelerator",
    "torch.autograd.graph.RemovableHandle": "the end of a hook",
    "torch.autograd.graph.node_creation_hook": "tells of autograd's nodes, of which compiled code makes others",
    "torch.autograd.profiler.emit_itt": "needs the vendor's library",
    "torch.autograd.profiler.emit_nvtx": "needs the vendor's library",
    "torch.backends.miopen.flags": "of a vendor",
    "torch.nn.attention.flex_attention.setup_compilation_env": "of another compiler",
    "torch.optim.swap_in_optimizer_params_and_state": "of one optimizer",
    "torch.overrides.BaseTorchFunctionMode": "the base of function modes",
    "torch.utils._python_dispatch.BaseTorchDispatchMode": "the base of dispatch modes",
    "torch.overrides.enable_reentrant_dispatch": "inside of a dispatch mode's own method",
    "torch.serialization.mkdtemp": "of the tests of saving",
    "torch.serialization.set_default_mmap_options": "of reading files",
    "torch.utils.checkpoint.GraphExecGroup": "of torch's own machinery",
    "torch.utils.checkpoint.LoggingTensorMode": "of torch's own tests",
    "torch.utils.checkpoint.capture_logs": "of torch's own tests",
    "torch.utils.flop_counter.ModuleTracker": "hooks on modules, no state",
}
