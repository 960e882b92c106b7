"""NumPy on values that capture knows: numbers, and arrays that the program made of numbers.

Such calls run as they are; what they give is a value of the capture, like a Python list. An array that becomes a tensor
is a constant of the compiled code, copied at each call. Arrays of the outside world are not known: no guard watches
what they hold.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Mapping
from typing import TypeGuard

import torch

try:
    import numpy
except ImportError:  # torch does without
    numpy = None  # type: ignore[assignment]

from torchdynamo.graph.torch_functions import home_of
from torchdynamo.reasons import BreakGraph

# Functions whose result depends on more than their arguments, or that do more than return it.
_NOT_PURE: frozenset[str] = frozenset(
    {
        "save", "savez", "savez_compressed", "savetxt", "load", "loadtxt", "genfromtxt", "fromfile", "fromregex",
        "memmap", "seterr", "geterr", "seterrcall", "geterrcall", "errstate", "setbufsize", "getbufsize",
        "set_printoptions", "get_printoptions", "printoptions", "show_config", "show_runtime", "info", "test",
        "frombuffer", "from_dlpack", "get_include", "nditer", "shares_memory", "may_share_memory", "tofile", "dump",
    }
)  # fmt: skip
_PURE_MODULES: frozenset[str] = frozenset(
    {"numpy", "numpy.linalg", "numpy.fft", "numpy.lib._index_tricks_impl", "numpy.lib.index_tricks"}
)
_KINDS = "biufc"  # of dtypes: truth values and numbers

_SLOTS = (types.WrapperDescriptorType, types.MethodWrapperType)
_OPERATORS = frozenset(
    f"__{reverse}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
    for reverse in ("", "r")
)
# Immutable scalars that a guard compares exactly.
SCALARS: frozenset[type] = frozenset(
    ()
    if numpy is None
    else (
        numpy.bool_, numpy.float64, numpy.int8, numpy.int16, numpy.int32, numpy.int64, numpy.uint8, numpy.uint16,
        numpy.uint32, numpy.uint64, numpy.str_, numpy.bytes_,
    )
)  # fmt: skip
# The types of dtypes of truth values and numbers.
DTYPES: frozenset[type] = frozenset(() if numpy is None else (type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdgFDG"))
_NEVER: tuple[type, ...] = ()
_GENERIC: type[numpy.generic] | tuple[type, ...] = _NEVER if numpy is None else numpy.generic
ARRAY: type[numpy.ndarray] | tuple[type, ...] = _NEVER if numpy is None else numpy.ndarray
_ATOMS: tuple[type, ...] = (int, float, complex, str, bytes, type(None), type(Ellipsis), types.NotImplementedType)
_GRIDS: tuple[type, ...] = _NEVER
FOLDER: tuple[str, ...] = ()  # of its code
if numpy is not None:
    _INDEXED = (numpy.mgrid, numpy.ogrid, numpy.r_, numpy.c_, numpy.s_, numpy.index_exp)
    _GRIDS = (numpy.dtype, *map(type, _INDEXED))
    FOLDER = (os.path.dirname(numpy.__file__) + os.sep,)


def address(array: numpy.ndarray | numpy.generic) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def is_scalar(value: object) -> TypeGuard[numpy.generic]:
    """Whether a value is a NumPy scalar: a number or a truth value."""
    return numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _KINDS


def is_array(value: object) -> TypeGuard[numpy.ndarray]:
    """Whether a value is a plain array of numbers or truth values."""
    return type(value) is ARRAY and value.dtype.kind in _KINDS


def number(value: numpy.generic) -> object:
    """A NumPy scalar as torch takes it: a Python number of the same value, of truth a float."""
    if value.dtype.kind == "c":  # torch warns, and takes the real part
        raise BreakGraph("numpy", "a complex scalar as a number")
    return float(value) if value.dtype.kind == "b" else value.item()


def leaves_to_tensors(fn: object, args: tuple[object, ...]) -> bool:
    """Whether a call is that of a scalar's operator (`scalar.__sub__(tensor)`), which NumPy leaves to the tensor's."""
    owner = getattr(fn, "__self__", args[0] if args else None)
    return isinstance(fn, _SLOTS) and fn.__name__ in _OPERATORS and is_scalar(owner)


def belongs(fn: object) -> bool:
    """Whether a callable is NumPy's: a function, a ufunc, a type, or a method of an array or a scalar."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, (_GENERIC, ARRAY)):
        return True
    if isinstance(inspect.getattr_static(type(fn), "__call__", None), types.FunctionType):  # `poly1d` in Python
        return False
    kind = getattr(fn, "__objclass__", None)
    if isinstance(fn, types.FunctionType):
        module = home_of(fn)
    else:
        module = kind.__module__ if isinstance(kind, type) else getattr(fn, "__module__", None) or type(fn).__module__
    return isinstance(module, str) and (module == "numpy" or module.startswith("numpy."))


class Arrays:
    """The arrays of one capture."""

    def __init__(self, is_outside: Callable[[object], bool]) -> None:
        self.is_outside = is_outside  # whether a value stands for an object that the program did not make
        self.shared: dict[int, numpy.ndarray] = {}  # arrays whose memory is a tensor's, by identity of who owns it

    def is_known(self, value: object) -> bool:
        """Whether a value consists of numbers and arrays made of numbers."""
        if isinstance(value, _ATOMS):
            return True
        if is_scalar(value):  # no guard compares what is left
            return type(value) in SCALARS or not self.is_outside(value)
        if is_array(value):
            return not self.is_outside(value) and not self.is_shared(value)
        if isinstance(value, (tuple, list, set, frozenset)):
            return all(map(self.is_known, value))
        if type(value) is dict:
            return all(map(self.is_known, value)) and all(map(self.is_known, value.values()))
        if isinstance(value, slice):
            return all(map(self.is_known, (value.start, value.stop, value.step)))
        return isinstance(value, (_GRIDS, range)) or (isinstance(value, type) and issubclass(value, _NUMBER_TYPES))

    def runs(self, fn: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Whether a call of NumPy depends on known values alone."""
        if getattr(fn, "__name__", "") in _NOT_PURE:
            return False
        owner = getattr(fn, "__self__", None)
        if not isinstance(owner, (_GENERIC, ARRAY)):
            kind = getattr(fn, "__objclass__", None)
            module = kind.__module__ if isinstance(kind, type) else getattr(fn, "__module__", None) or "numpy"
            if module not in _PURE_MODULES:
                return False
            owner = None
        return all(map(self.is_known, (owner, *args, *kwargs.values())))

    def tensor(self, make: Callable[[object], torch.Tensor], data: object) -> torch.Tensor:
        """The tensor that torch makes of numbers and arrays, with memory of its own and an array's strides. Raises what
        torch raises."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return make(data)

    def is_shared(self, array: numpy.ndarray) -> bool:
        """Whether a tensor of the graph has the array's memory."""
        return bool(self.shared) and id(memory_of(array)) in self.shared

    def refuse_shared(self, array: numpy.ndarray) -> None:
        """What is written to the tensor, or to the array, changes both: the tensor of the graph is a copy."""
        if self.is_shared(array):
            raise BreakGraph("numpy", "an array is used after a tensor has got its memory")


def copied(array: numpy.ndarray) -> numpy.ndarray:
    """A copy of the same strides, those of dims of size 1 included."""
    made = array.copy("K")
    return made if made.strides == array.strides else numpy.lib.stride_tricks.as_strided(made, strides=array.strides)


def memory_of(array: numpy.ndarray) -> numpy.ndarray:
    """The array that owns the memory of an array."""
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


def holds(data: object) -> bool:
    """Whether nested lists hold an array or a scalar of NumPy."""
    if isinstance(data, (list, tuple)):
        return any(map(holds, data))
    return isinstance(data, (_GENERIC, ARRAY))


# What makes a tensor of numbers without copying an array.
MAKERS: tuple[object, ...] = (torch.from_numpy, torch.as_tensor, torch.asarray)
_NUMBER_TYPES = (bool, int, float, complex, *(() if numpy is None else (numpy.generic,)))
