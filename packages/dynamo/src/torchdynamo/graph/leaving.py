"""What leaves the graph, in one table: for each reason, the calls that a graph has no place for."""

from __future__ import annotations

import builtins
import datetime
import decimal
import inspect
import os
import sys
import types
from dataclasses import dataclass

import torch
import torch.func
import torch.nn.parallel
import torch.nn.utils.rnn
import torch.utils.hooks

from torchdynamo.reasons import REASONS


@dataclass(frozen=True, slots=True)
class Leaving:
    """Calls that leave the graph for one reason.

    Attributes:
        functions: by identity.
        named: "module:name", of what is not imported for this.
        modules: all functions of these modules.
        packages: all functions of modules whose names begin so.
        files: all Python functions written there, but for checks of their arguments.
        methods: torch's functions and methods of this name, called with a tensor.
        torch_names: the same, with or without one.
    """

    reason: str
    functions: tuple[object, ...] = ()
    named: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    torch_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise KeyError(self.reason)


_FUNC = os.path.dirname(torch.func.vjp.__code__.co_filename)  # what is in `torch.func` itself only wraps functions

_TABLE = (
    Leaving("print", (print,)),
    Leaving(
        "c_function",
        (
            input, open, compile, builtins.breakpoint, torch.save, torch.load,
            sys.getrecursionlimit, sys.setrecursionlimit,  # another one while a program is captured
            sys.getswitchinterval, sys.setswitchinterval, decimal.getcontext, decimal.setcontext, decimal.localcontext,
            datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today,
            *(f for name, f in vars(torch._C).items() if name == "_cuda_jiterator_compile_and_launch_kernel"),
        ),
        modules=("time", "torch.cuda.jiterator"),  # this launches kernels over memory, and no mode is asked
    ),
    Leaving(
        "tensor_to_number",
        methods=(
            "item", "tolist", "numpy", "__int__", "__float__", "__index__", "__complex__", "__array__", "__dlpack__",
            "data_ptr", "untyped_storage", "storage", "__reduce_ex__", "__deepcopy__",
        ),
    ),
    Leaving("tensor_repr", methods=("__repr__", "__str__", "__format__")),
    Leaving(
        "data_dependent_branch",
        (inspect.unwrap(torch.optim.LBFGS.step),),  # at each round of its search, over lists that grow
        methods=("__bool__", "__contains__", "is_nonzero", "equal", "allclose"),
    ),
    Leaving(
        "data_dependent_shape", (torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence)
    ),
    Leaving("backward", (torch.autograd.backward, torch.autograd.grad), methods=("backward",)),
    Leaving(
        "tensor_hook",
        (torch.utils.hooks.RemovableHandle.remove,),
        methods=("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    ),
    Leaving(
        "tensor_metadata_write",
        (
            torch.utils.swap_tensors, torch._C._set_conj, torch._C._set_neg,
            torch._C._set_tensor_metadata,  # type: ignore[attr-defined]
        ),
        methods=("set_", "resize_", "resize_as_", "share_memory_", "rename_"),
    ),
    Leaving(
        "special_tensor",
        modules=("torch.nested",),
        packages=("torch.nested._internal",),  # it numbers sizes and keeps tensors by their identity, in registries
    ),
    Leaving(
        "random_state",
        (torch.seed, torch.initial_seed),
        modules=("random", "torch.cuda.random"),
        torch_names=("manual_seed", "seed", "initial_seed", "set_rng_state", "get_rng_state"),
    ),
    Leaving(
        "ambient_state",
        (
            torch.set_default_dtype, torch.set_default_device, torch.set_num_threads, torch.set_num_interop_threads,
            torch.set_float32_matmul_precision, torch.use_deterministic_algorithms,
            torch.set_deterministic_debug_mode, torch.set_flush_denormal, torch.set_warn_always,
            torch._C._autograd._push_saved_tensors_default_hooks, torch._C._autograd._pop_saved_tensors_default_hooks,
        ),
        torch_names=("set_default_dtype", "set_default_device", "_set_default_dtype"),
    ),
    Leaving(
        "function_transform",
        files=tuple(os.path.join(_FUNC, name) for name in ("eager_transforms.py", "vmap.py", "pyfunctorch.py")),
    ),
    Leaving(
        "distributed",
        (torch.nn.parallel.DistributedDataParallel.forward,),
        packages=("torch.distributed.", "torch._C._distributed_c10d"),  # a method of a process group, `wait`
    ),
    Leaving(
        "compiler",
        (torch.compile, torch.compiler.set_stance, torch.compiler.reset),
        named=(
            *(f"torchdynamo.api:{name}" for name in ("optimize", "decorate", "new_ledger", "reset", "stats")),
            *(f"torchdynamo.stance:set_stance{name}" for name in ("", ".__init__", ".__enter__", ".__exit__")),
        ),
        modules=("torchcompile.api",),
    ),
    Leaving("graph_break", named=("torch._dynamo.decorators:graph_break", "torch._dynamo.decorators:skip_frame")),
    Leaving("import", modules=("importlib", "pkgutil", "runpy"), packages=("importlib.", "_frozen_importlib")),
    Leaving("coroutine", packages=("asyncio.",)),
)  # fmt: skip

_FUNCTIONS, _NAMED, _MODULES, _PACKAGES, _FILES, _METHODS, _TORCH_NAMES = (
    {key: row.reason for row in _TABLE for key in getattr(row, column)} for column in Leaving.__slots__[1:]
)

# Of the packages whose functions are called outside of graphs: modules that wrap a module of this process alone.
_NO_COLLECTIVES = "torch.distributed.algorithms._checkpoint."

# The decorator `torch.compiler.nested_compile_region`: it wraps a function, and calls none.
_MARKS_OF_REGIONS = frozenset({"mark_compile_region", "mark_compile_region.<locals>.wrap"})

# Blocks of C++ whose beginning or end changes the ambient state. A device is one too, of which calls know the meaning.
STATE_BLOCKS: tuple[type, ...] = tuple(
    kind
    for kind in vars(torch._C).values()
    if isinstance(kind, type) and hasattr(kind, "__enter__") and kind not in (torch.device, torch._C.Stream)
)


def reason_to_leave(function: object, module: str) -> str | None:
    """Why a call of a function of this module leaves the graph, whatever its arguments, or None."""
    if module.startswith(_NO_COLLECTIVES):
        return None
    reason = _FUNCTIONS.get(function) or _MODULES.get(module)
    reason = reason or _NAMED.get(f"{module}:{getattr(function, '__name__', '')}")
    if reason is None and is_higher_order(function):
        return "higher_order_operator"
    return reason or next((why for package, why in _PACKAGES.items() if module.startswith(package)), None)


def reason_of_name(name: str, with_tensor: bool) -> str | None:
    """Why a call of torch's function or method of this name leaves the graph, or None."""
    return _TORCH_NAMES.get(name) or (_METHODS.get(name) if with_tensor else None)


def transforms(function: types.FunctionType) -> bool:
    """Whether a function of torch runs the program it is given on tensors of its own (`torch.func`)."""
    code = function.__code__
    return code.co_filename in _FILES and not code.co_name.startswith("_check")  # of its arguments


def is_higher_order(function: object) -> bool:
    """An operator that takes functions of the program (`torch.cond`, `while_loop`, `associative_scan`), or what calls
    one in the program's stead."""
    if isinstance(function, types.FunctionType):  # torch.cond says of itself that it is of `torch`
        home = str(function.__globals__.get("__name__"))
        return home.startswith("torch._higher_order_ops") and function.__qualname__ not in _MARKS_OF_REGIONS
    return isinstance(function, torch._ops.HigherOrderOperator)
