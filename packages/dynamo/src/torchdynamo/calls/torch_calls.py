"""How capture treats functions of torch and of the standard library: tables, no logic of a call."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import os
import posix
import sys
import threading
import types
import typing
import warnings

import torch
import torch.utils.checkpoint
from torch.autograd.function import FunctionMeta

from torchdynamo.graph.leaving import is_higher_order, reason_to_leave, transforms
from torchdynamo.graph.torch_functions import home_of
from torchdynamo.outside import imports
from torchdynamo.outside.externals import is_constant

# Answers that a compiled program gets: what these questions mean inside of capture.
ANSWERS: dict[object, object] = {
    torch.compiler.is_compiling: True,
    torch.compiler.is_dynamo_compiling: True,
    torch.compiler.is_exporting: False,
    torch.compiler.cudagraph_mark_step_begin: None,  # replays overwrite nothing that is held
    torch.is_vulkan_available: False,
    torch._C._get_tracing_state: None,
    torch._C._log_api_usage_once: None,
    torch._C._is_tracing: False,
}
# Types that are called with sizes, or with numbers, to make a tensor on the CPU; torch.Tensor has the default dtype.
TENSOR_TYPES: tuple[object, ...] = (
    torch.Tensor, torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor, torch.LongTensor,
    torch.IntTensor, torch.ShortTensor, torch.CharTensor, torch.ByteTensor, torch.BoolTensor,
)  # fmt: skip
# Functions of torch that ask whether another compiler runs; recognised by name so that it is not imported.
ANSWERS_BY_NAME: dict[tuple[str, str], object] = {
    ("torch._jit_internal", "is_scripting"): False,
    ("torch.jit", "is_scripting"): False,
    ("torch.jit._trace", "is_tracing"): False,
    ("torch.onnx", "is_in_onnx_export"): False,
    ("torch._utils", "is_compiling"): True,
    ("torch.distributed._functional_collectives", "_are_we_tracing"): True,  # they are waited for at once
    ("torch._dynamo.external_utils", "is_compiling"): True,
    ("torch._utils_internal", "justknobs_check"): True,
    ("torch.fx._symbolic_trace", "is_fx_tracing"): False,
    ("torch.fx._symbolic_trace", "is_fx_symbolic_tracing"): False,
}

# Questions about the state of the process; the answer is guarded.
AMBIENT_READS: tuple[object, ...] = (
    torch.get_num_threads, torch.get_num_interop_threads, torch._C._autograd._profiler_enabled,
    torch.get_float32_matmul_precision, torch.get_default_device, torch.get_deterministic_debug_mode,
    torch.is_deterministic_algorithms_warn_only_enabled, torch.cuda.current_device, torch.cuda.device_count,
)  # fmt: skip

# Python functions run natively: pure on classes, functions and constants, and large to interpret.
NATIVE_FUNCTIONS: frozenset[object] = frozenset(
    {
        inspect.signature, inspect.getfullargspec, inspect.isfunction, inspect.ismethod, inspect.isclass,
        inspect.unwrap, inspect.isgeneratorfunction, inspect.iscoroutinefunction,
        dataclasses.fields, dataclasses.is_dataclass, typing.get_origin, typing.get_args, typing.get_type_hints,
        typing.cast, typing.ForwardRef.__init__, copy.Error, warnings.catch_warnings.__init__,
        torch.finfo, torch.iinfo,
        FunctionMeta.__init__,  # a class made here takes the next of torch's numbers for them, here as it would there
        *(m for kind in (torch.SymInt, torch.SymFloat, torch.SymBool) for m in vars(kind).values() if callable(m)),
    }
)  # fmt: skip
# What makes log records, with their level; None where it is the first argument.
LOG_LEVELS: dict[object, int | None] = {
    getattr(owner, name): level
    for owner in (logging.Logger, logging)
    for name, level in (
        ("debug", logging.DEBUG), ("info", logging.INFO), ("warning", logging.WARNING), ("error", logging.ERROR),
        ("critical", logging.CRITICAL), ("log", None),
    )
}  # fmt: skip
LOG_QUESTIONS: tuple[object, ...] = tuple(
    getattr(logging.Logger, name) for name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers")
)
WARNING_FILTERS: tuple[object, ...] = (warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings)


def looks_at_callers(function: object) -> bool:
    """Whether a function finds out from which line it is called: those of loggers, and of warnings."""
    function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None)
    return module in ("logging", "warnings", "_warnings", "inspect", "traceback") or function is sys._getframe


# C code that depends on its arguments alone (and on what they hold), by the module of the function or type.
PURE_C_MODULES: frozenset[str] = frozenset(
    {
        "builtins", "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools", "collections",
        "_collections", "_collections_abc", "re", "_sre", "string", "_string", "_struct", "struct", "copy", "types",
        "enum", "_abc", "abc", "_bisect", "_heapq", "_json", "json", "_weakref", "weakref", "typing", "_typing",
        "_contextvars", "contextvars", "_statistics", "decimal", "_decimal", "fractions", "datetime", "_datetime",
        "inspect", "dataclasses", "copyreg", "array", "unicodedata", "zlib", "binascii", "_hashlib", "posixpath", "sys",
        "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3", "_blake2", "_random",
    }
)  # fmt: skip

# Functions of other C modules that depend on their arguments alone: text of paths.
PURE_C_FUNCTIONS: tuple[object, ...] = (
    os.fspath,
    threading.Lock,  # noqa: TID251 - the program's
    type(threading.RLock()),  # noqa: TID251 - the program's
    *(getattr(posix, name) for name in ("_path_normpath", "_path_splitroot_ex") if hasattr(posix, name)),
)


def pickles_by_value(value: object) -> bool:
    """Whether what `pickle` writes of a value follows from what its parts are equal to: it writes a part that it meets
    again as a reference, so that no text, bytes or tuple may come twice. Lists and dicts are taken as the value itself
    alone, since whether two of them are one object is not known."""
    parts = [*value, *value.values()] if type(value) is dict else value if type(value) is list else (value,)
    met: set[tuple[type, object]] = set()
    todo = list(parts)  # type: ignore[call-overload]
    while todo:
        part = todo.pop()
        if type(part) in (bool, int, float, type(None)):
            continue
        if type(part) not in (str, bytes, tuple) or not is_constant(part) or (type(part), part) in met:
            return False
        met.add((type(part), part))
        todo.extend(part if type(part) is tuple else ())
    return True


# Locks of the library's own making, like that of `functools.cached_property` in 3.11: given back where capture ends.
LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))  # noqa: TID251 - the program's

# Run text as code, with the variables of the function that calls them.
FRAME_READERS: tuple[object, ...] = (eval, exec)
# Modules that write the methods of a class as text.
MAKERS_OF_CLASSES: frozenset[str] = frozenset({"dataclasses", "collections", "attr._make"})

# Modules whose `__repr__` wrappers ask for the thread's number, to notice an object that contains itself.
REPR_MODULES: frozenset[str] = frozenset({"dataclasses", "reprlib"})


def runs_unhooked(function: object) -> bool:
    """Whether a call that leaves the graph runs as it is with all that it calls.

    What is compiled would save other tensors than a checkpoint expects, and a context of autograd or a tensor of a
    function transform means something to the eager program alone. Autograd's engine runs what compilers made, which may
    be compiled there and then: a compiler is no part of the program, nor is the code of a module that is imported.
    Higher-order operators trace what they are given.
    """
    if is_higher_order(function) or imports.is_import(function):
        return True
    if isinstance(function, types.MethodType) and function.__func__ in _UNHOOKED:
        return True
    if isinstance(function, types.BuiltinFunctionType):
        return True
    if isinstance(function, types.FunctionType):
        compiles = reason_to_leave(function, home_of(function)) == "compiler"
        return compiles or function in _UNHOOKED or transforms(function)
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


_UNHOOKED: frozenset[object] = frozenset(
    {torch.utils.checkpoint.checkpoint, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)
