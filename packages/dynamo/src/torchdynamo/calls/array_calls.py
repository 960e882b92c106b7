"""Calls with arrays of NumPy whose elements are not known: NumPy's functions, and what torch makes of arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    import numpy
except ImportError:  # torch does without
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.values import Array, arrays_in
from torchdynamo.arrays.world import ArrayWorld, name_of
from torchdynamo.calls.redirect import Redirect
from torchdynamo.calls.torch_calls import TENSOR_TYPES
from torchdynamo.graph import numpy_values, torch_functions
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs
from torchdynamo.outside.overlays import MISSING
from torchdynamo.reasons import BreakGraph

T = TypeVar("T")


class ArrayCalls:
    """Rules for calls with arrays among their arguments."""

    def __init__(self, world: ArrayWorld) -> None:
        self.world = world

    @property
    def concerned(self) -> bool:
        """Whether the program has arrays of this kind at all."""
        return self.world.used

    def handle(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """The result of a call that has arrays among its arguments, else MISSING."""
        args, kwargs = self._current(args), self._current(kwargs)
        owner = self.world.current(getattr(fn, "__self__", None))
        if isinstance(owner, Array):  # a method that was bound while the array was known
            return self.world.method(owner, fn.__name__, args, kwargs)
        if not arrays_in((args, kwargs)):
            return MISSING
        rule = _RULES.get(id(fn))
        if rule is not None:
            return rule(self.world, fn, args, kwargs)
        if numpy_values.belongs(fn):
            return self.world.call(fn, args, kwargs)
        method = getattr(fn, "__name__", "") if isinstance(getattr(fn, "__self__", None), torch.Tensor) else None
        if method == "new_tensor":
            return _copied(self.world, fn, args, kwargs)
        if method is not None or (callable(fn) and not isinstance(fn, type) and torch_functions.is_leaf(fn)):
            of_numbers = "iu" if getattr(fn, "__name__", "") in _INDEXING else "iufb"  # a truth value is a mask there
            if not all(a.is_scalar and a.model.dtype.kind in of_numbers for a in arrays_in((args, kwargs))):
                raise BreakGraph("numpy", f"call of {name_of(fn)} with an array")
            return Redirect(fn, self.world.as_numbers(args), self.world.as_numbers(kwargs))
        return MISSING

    def _current(self, given: T) -> T:
        value: Any = given
        if type(value) in (tuple, list):
            made = type(value)(map(self._current, value))
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else given
        if type(value) is dict:
            value = {key: self._current(part) for key, part in value.items()}
        else:
            value = self.world.current(value)
        given = value
        return given

    def of_tensor(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`tensor.numpy(force=...)`."""
        if len(args) != 1 or kwargs.keys() - {"force"} or numpy is None:
            raise BreakGraph("numpy", "numpy() of a tensor")
        return self.world.of_tensor(args[0], bool(kwargs.get("force")))


_INDEXING = ("__getitem__", "__setitem__")


def _shared(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """`torch.from_numpy`, `torch.as_tensor`, `torch.asarray`: the array's memory, where nothing else is asked for."""
    if len(args) != 1 or not isinstance(args[0], Array) or kwargs.keys() - {"dtype", "device"}:
        raise BreakGraph("numpy", f"call of {name_of(fn)} with an array")
    if args[0].is_scalar and fn is not torch.from_numpy:
        return _as(args[0].tensor.clone(), kwargs)
    return _as(world.tensor_of(args[0]), kwargs)


def _copied(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """`torch.tensor`, `Tensor.new_tensor`: a copy."""
    if len(args) != 1 or kwargs.keys() - {"dtype", "device", "requires_grad"}:
        raise BreakGraph("numpy", f"call of {name_of(fn)} with an array")
    if not isinstance(args[0], Array):
        raise BreakGraph("numpy", f"call of {name_of(fn)} with a list of arrays")
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.Tensor):
        kwargs = {"dtype": owner.dtype, "device": owner.device, **kwargs}
    made = _as(world.copied(args[0]), kwargs)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _of_type(world: ArrayWorld, fn: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """`torch.Tensor(array)`, `torch.FloatTensor(array)`: the array's memory, where it is of that dtype."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Array) or args[0].is_scalar:
        raise BreakGraph("numpy", f"call of {name_of(fn)} with an array")
    return world.tensor_of(args[0]).to(torch.get_default_dtype() if fn is torch.Tensor else fn.dtype)


def _as(tensor: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
    wanted = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    return tensor.to(**wanted) if wanted else tensor


def _ufunc(name: str) -> Callable[..., object]:
    """A builtin function, on arrays one of NumPy's."""

    def rule(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        if any(isinstance(arg, torch.Tensor) for arg in args):
            raise BreakGraph("numpy", f"{name}() of an array and a tensor")
        return world.call(getattr(numpy, name), args, kwargs)

    return rule


def _length(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> object:
    return len(*args) if not kwargs and isinstance(args[0], Array) else MISSING


def _rows(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> object:
    return fn(list(world.iterate(args[0]))) if not kwargs and isinstance(args[0], Array) else MISSING


def _over_rows(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> object:
    """A function of `itertools`, over the rows of an array."""
    if not any(isinstance(arg, Array) and not arg.is_scalar for arg in args):
        return MISSING
    rows = (list(world.iterate(arg)) if isinstance(arg, Array) and not arg.is_scalar else arg for arg in args)
    return Redirect(fn, tuple(rows), kwargs)


def _refused(world: ArrayWorld, fn: Callee, args: Args, kwargs: Kwargs) -> object:
    """A question about elements: it raises, or breaks."""
    return fn(*args) if len(args) == 1 and not kwargs and isinstance(args[0], Array) else MISSING


def _number(world: ArrayWorld, fn: Any, args: Args, kwargs: Kwargs) -> object:
    """`float` or `int` of an array of one element."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Array) or args[0].model.size != 1:
        return _refused(world, fn, args, kwargs)
    return world.number(args[0], f"__{fn.__name__}__")


_ITERTOOLS: tuple[object, ...] = (
    itertools.accumulate, itertools.chain,
    itertools.combinations, itertools.combinations_with_replacement, itertools.cycle, itertools.dropwhile,
    itertools.filterfalse, itertools.groupby, itertools.islice, itertools.pairwise, itertools.permutations,
    itertools.product, itertools.takewhile, itertools.zip_longest,
    *(getattr(itertools, name) for name in ("batched",) if hasattr(itertools, name)),  # from Python 3.12 on
)  # fmt: skip
_TABLE: tuple[tuple[object, Callable[..., object]], ...] = (
    *((maker, _shared) for maker in numpy_values.MAKERS),
    (torch.tensor, _copied),
    *((kind, _of_type) for kind in TENSOR_TYPES),
    (abs, _ufunc("absolute")),
    (divmod, _ufunc("divmod")),
    (pow, _ufunc("power")),
    (len, _length),
    (list, _rows),
    (tuple, _rows),
    *((kind, _number) for kind in (int, float)),
    *((function, _over_rows) for function in _ITERTOOLS),
    *((kind, _refused) for kind in (bool, complex, hash, str, repr)),
)
_RULES: dict[int, Callable[..., object]] = {id(function): rule for function, rule in _TABLE}
