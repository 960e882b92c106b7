"""Arrays and scalars of NumPy whose elements are not known: a tensor of the graph, and what NumPy says of all else.

Beside its tensor an array has a *model*: a real array (or scalar) of the same dtype, shape, strides and flags, with
other elements. NumPy itself is asked, on the models, what an operation gives: the dtype, the layout, an array or a
scalar, a view or a copy, or the error that it raises. The tensors hold the elements.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard

import torch

from primtorch.frozen import record

try:
    import numpy
except ImportError:  # torch does without
    numpy = None  # type: ignore[assignment]

from torchdynamo.interpreter.protocol import InterpreterObject
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.arrays.world import ArrayWorld

Model: TypeAlias = "numpy.ndarray | numpy.generic"

# The dtypes that both have, by NumPy's.
TORCH_DTYPES: dict[numpy.dtype, torch.dtype] = {}
if numpy is not None:
    TORCH_DTYPES = {
        numpy.dtype(name): getattr(torch, name)
        for name in (
            "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64",
            "complex128",
        )
    }  # fmt: skip
_SCALARS_OF_TORCH = frozenset(dtype.type for dtype in TORCH_DTYPES)
NUMPY_DTYPES: dict[torch.dtype, numpy.dtype] = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}


class Array(InterpreterObject):
    """An array, or a scalar, of the program.

    Attributes:
        model: what NumPy is asked of.
        tensor: the elements, along positive strides.
        flipped: the dims along which the array has them in the opposite order.
    """

    __slots__ = ("flipped", "model", "native", "tensor", "world")

    def __init__(
        self, world: ArrayWorld, model: Model, tensor: torch.Tensor, flipped: frozenset[int] = frozenset()
    ) -> None:
        self.world = world
        self.model = model
        self.tensor = tensor
        self.flipped = flipped
        self.native = type(model)

    @property
    def is_scalar(self) -> bool:
        """Whether it stands for a NumPy scalar."""
        return not isinstance(self.model, numpy.ndarray)

    def value(self) -> torch.Tensor:
        """The elements as the program sees them."""
        return self.tensor.flip(tuple(self.flipped)) if self.flipped else self.tensor

    # What C code asks for.

    __array_ufunc__ = None  # no operator of NumPy's own takes it

    def __len__(self) -> int:
        return len(self.model)  # type: ignore[arg-type]  # of a scalar: it raises

    def __getitem__(self, key: object) -> object:
        return self.world.getitem(self, key)

    def __setitem__(self, key: object, value: object) -> None:
        self.world.setitem(self, key, value)

    def __iter__(self) -> Iterator[object]:
        return iter([self[index] for index in range(len(self))])

    def __bool__(self) -> NoReturn:  # noqa: PLE0304 - it raises
        self._refuse(bool, "data_dependent_branch", "the truth of an array")

    def __float__(self) -> NoReturn:
        self._refuse(float, "tensor_to_number", "float() of an array")

    def __int__(self) -> NoReturn:
        self._refuse(int, "tensor_to_number", "int() of an array")

    def __complex__(self) -> NoReturn:
        self._refuse(complex, "tensor_to_number", "complex() of an array")

    def __index__(self) -> NoReturn:  # noqa: PLE0305 - it raises
        self._refuse(int, "tensor_to_number", "an array as an index")

    def __hash__(self) -> int:
        if not self.is_scalar:
            return hash(self.model)  # raises: arrays have no hash
        raise BreakGraph("tensor_to_number", "the hash of a NumPy scalar")

    def __repr__(self) -> str:
        raise BreakGraph("tensor_repr", "the text of an array")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        raise BreakGraph("tensor_repr", "the text of an array")

    def __contains__(self, item: object) -> bool:
        raise BreakGraph("data_dependent_branch", "whether an array holds a value")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise BreakGraph("numpy", "C code reads an array")

    def __eq__(self, other: object) -> Any:
        return self.world.compare("==", self, other)

    def __lt__(self, other: object) -> Any:
        return self.world.compare("<", self, other)

    def __le__(self, other: object) -> Any:
        return self.world.compare("<=", self, other)

    def __gt__(self, other: object) -> Any:
        return self.world.compare(">", self, other)

    def __ge__(self, other: object) -> Any:
        return self.world.compare(">=", self, other)

    def __ne__(self, other: object) -> Any:
        return self.world.compare("!=", self, other)

    def _refuse(self, ask: Callable[[Any], object], reason: str, detail: str) -> NoReturn:
        if self.model.size != 1:
            ask(self.model)  # raises
        raise BreakGraph(reason, detail)


def _operator(symbol: str, reflected: bool) -> Callable[[Array, object], object]:
    def method(self: Array, other: object) -> object:
        return self.world.binary(symbol, *((other, self) if reflected else (self, other)))

    return method


for _symbol, _name in (
    ("+", "add"), ("-", "sub"), ("*", "mul"), ("/", "truediv"), ("//", "floordiv"), ("%", "mod"), ("**", "pow"),
    ("@", "matmul"), ("&", "and"), ("|", "or"), ("^", "xor"), ("<<", "lshift"), (">>", "rshift"),
):  # fmt: skip
    setattr(Array, f"__{_name}__", _operator(_symbol, False))
    setattr(Array, f"__r{_name}__", _operator(_symbol, True))


class ArrayMethod(InterpreterObject):
    """A method of an array, bound to it."""

    __slots__ = ("array", "name")
    native = types.BuiltinFunctionType

    def __init__(self, array: Array, name: str) -> None:
        self.array = array
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.array.world.method(self.array, self.name, args, kwargs)


def dtype_of(dtype: numpy.dtype) -> torch.dtype:
    """Torch's dtype for NumPy's. Raises BreakGraph where there is none."""
    found = TORCH_DTYPES.get(dtype)
    if found is None:
        raise BreakGraph("numpy", f"arrays of {dtype}")
    return found


def arrays_in(value: object) -> list[Array]:
    """The arrays in a value of tuples, lists, dicts and slices."""
    if isinstance(value, Array):
        return [value]
    return [array for part in _parts(value) for array in arrays_in(part)]


def _parts(value: object) -> Iterable[object]:
    if type(value) is dict:
        return value.values()
    if type(value) is slice:
        return (value.start, value.stop, value.step)
    return value if isinstance(value, (tuple, list)) else ()


def model_of(value: object) -> Any:
    """The value with models in the place of arrays."""
    if isinstance(value, Array):
        return value.model
    if isinstance(value, tuple) and arrays_in(value):
        parts = map(model_of, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if type(value) is list:
        return list(map(model_of, value))
    if type(value) is dict:
        return {key: model_of(part) for key, part in value.items()}
    if type(value) is slice:
        return slice(*map(model_of, _parts(value)))
    return value


def model_like(tensor: torch.Tensor, flipped: frozenset[int] = frozenset()) -> numpy.ndarray:
    """A model of the array that has a tensor's memory, with these dims in the opposite order."""
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    dtype = NUMPY_DTYPES[tensor.dtype]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    memory = numpy.zeros(reach, dtype)
    model = numpy.ndarray(shape, dtype, memory, 0, tuple(stride * dtype.itemsize for stride in strides))
    return forwards(model, flipped) if flipped else model


def is_number_of_torch(kind: type) -> bool:
    """Whether a type is that of NumPy scalars of a dtype that torch has."""
    return kind in _SCALARS_OF_TORCH


def fits_tensor(array: object) -> TypeGuard[numpy.ndarray]:
    """Whether torch can have the memory of an array of the outside, to read and to write."""
    if type(array) is not numpy.ndarray or array.dtype not in TORCH_DTYPES or not array.dtype.isnative:
        return False
    flags, size = array.flags, array.itemsize
    steps = zip(array.shape, array.strides, strict=True)
    apart = array.size == 0 or all(stride % size == 0 and (stride or n < 2) for n, stride in steps)
    return bool(flags.writeable and flags.aligned and apart)


def flipped_dims(array: numpy.ndarray) -> frozenset[int]:
    """The dims along which an array goes backwards through its memory."""
    return frozenset(dim for dim, stride in enumerate(array.strides) if stride < 0)


@record
class TensorAt:
    """Gives the tensor that has an array's memory, along positive strides. Guards read inputs by it.

    Attributes:
        flipped: the dims that have to go backwards, and no others.
    """

    flipped: frozenset[int]

    def __call__(self, array: object) -> torch.Tensor | None:
        if not self.flipped:  # torch refuses all else that does not fit, and the guard compares strides
            fits = type(array) is numpy.ndarray and array.flags.behaved
            return torch.from_numpy(array) if fits else None
        if not fits_tensor(array) or flipped_dims(array) != self.flipped:
            return None
        return torch.from_numpy(forwards(array, self.flipped))


@record
class ScalarAt:
    """Gives a tensor without dims that holds a NumPy scalar. Guards read inputs by it.

    Attributes:
        kind: the scalar's type.
    """

    kind: type

    def __call__(self, scalar: object) -> torch.Tensor | None:
        return torch.from_numpy(numpy.array(scalar)) if type(scalar) is self.kind else None


def forwards(array: numpy.ndarray, flipped: Iterable[int]) -> numpy.ndarray:
    """The view with these dims in the opposite order."""
    return array[tuple(slice(None, None, -1 if dim in flipped else None) for dim in range(array.ndim))]


def same_layout(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether strides lead to the same elements."""
    return 0 in shape or all(x == y for size, x, y in zip(shape, a, b, strict=True) if size > 1)


def array_of(
    tensor: torch.Tensor, flipped: tuple[int, ...], strides: tuple[int, ...] | None, writeable: bool
) -> object:
    """A result of the graph as the array that it stands for. Generated code calls it."""
    array = tensor.numpy()
    if flipped:
        array = forwards(array, flipped)
    if strides is not None and strides != array.strides:
        array = numpy.lib.stride_tricks.as_strided(array, strides=strides)
    if not writeable:
        array.flags.writeable = False
    return array
