"""Functions of shapes, of places and of new arrays as torch calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.rules import Rule, dim_of, known, refuse_complex, truths
from torchdynamo.arrays.values import Array, Model, dtype_of, model_of
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.arrays.world import ArrayWorld

Dims: TypeAlias = int | Sequence[int]

# -- views: of the memory of an array where NumPy's result is one ------------------------------


def _lies(n: ArrayWorld, a: object) -> torch.Tensor:
    """The elements to be viewed: an array's memory, where it goes along positive strides."""
    return a.value() if isinstance(a, Array) else n.tensor(a)


def _reshaped(n: ArrayWorld, asked: Model, a: object, order: str) -> torch.Tensor:
    if order != "C":
        raise BreakGraph("numpy", f"order={order!r}")
    return _lies(n, a).reshape(asked.shape)


def _reshape(n: ArrayWorld, asked: Model, a: object, shape: object, order: str = "C") -> object:
    return _reshaped(n, asked, a, order)


def _reshape_method(n: ArrayWorld, asked: Model, a: object, *shape: object, order: str = "C") -> object:
    return _reshaped(n, asked, a, order)


def _ravel(n: ArrayWorld, asked: Model, a: object, order: str = "C") -> object:
    return _reshaped(n, asked, a, order)


def _permuted(n: ArrayWorld, asked: Model, a: object, order: Sequence[int]) -> object:
    """The dims in another order, the reversed ones among them."""
    if not isinstance(a, Array):
        return n.tensor(a).permute(tuple(order))
    order = [int(dim) % len(order) for dim in order]
    return Array(n, asked, a.tensor.permute(order), frozenset(order.index(dim) for dim in a.flipped))


def _transpose(n: ArrayWorld, asked: Model, a: object, axes: Sequence[int] | None = None) -> object:
    return _permuted(n, asked, a, range(asked.ndim)[::-1] if axes is None else axes)


def _transpose_method(n: ArrayWorld, asked: Model, a: object, *axes: Any) -> object:
    listed = axes[0] if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))) else axes or None
    return _transpose(n, asked, a, listed)


def _matrix_transpose(n: ArrayWorld, asked: Model, a: object) -> object:
    return _swapaxes(n, asked, a, -1, -2)


def _swapaxes(n: ArrayWorld, asked: Model, a: object, axis1: SupportsIndex, axis2: SupportsIndex) -> object:
    order = list(range(asked.ndim))
    first, second = dim_of(axis1), dim_of(axis2)
    order[first], order[second] = order[second], order[first]
    return _permuted(n, asked, a, order)


def _moveaxis(n: ArrayWorld, asked: Model, a: object, source: Dims, destination: Dims) -> object:
    whence, where = ([int(dim) % asked.ndim for dim in numpy.atleast_1d(dims)] for dims in (source, destination))
    order = [dim for dim in range(asked.ndim) if dim not in whence]
    for place, dim in sorted(zip(where, whence, strict=True)):
        order.insert(place, dim)
    return _permuted(n, asked, a, order)


def _expand_dims(n: ArrayWorld, asked: Model, a: object, axis: Dims | None) -> object:
    x = _lies(n, a)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    for dim in sorted(dim_of(one) % asked.ndim for one in axes):
        x = x.unsqueeze(dim)
    return x


def _squeeze(n: ArrayWorld, asked: Model, a: object, axis: Dims | None = None) -> object:
    x = _lies(n, a)
    if axis is None:
        return x.reshape(asked.shape) if x.is_contiguous() else x.squeeze()
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    return x.squeeze(tuple(dim_of(one) for one in axes))


def _broadcast_to(n: ArrayWorld, asked: Model, a: object, shape: object) -> object:
    return _lies(n, a).expand(asked.shape)


def _diagonal(n: ArrayWorld, asked: Model, a: object, offset: int = 0, axis1: int = 0, axis2: int = 1) -> torch.Tensor:
    return torch.diagonal(_lies(n, a), dim_of(offset), dim_of(axis1), dim_of(axis2))


def _real(n: ArrayWorld, asked: Model, a: object) -> object:
    x = _lies(n, a)
    return torch.real(x) if x.is_complex() else x


def _imag(n: ArrayWorld, asked: Model, a: object) -> object:
    x = _lies(n, a)
    return torch.imag(x) if x.is_complex() else torch.zeros_like(x)


def _split(
    n: ArrayWorld, asked: Sequence[numpy.ndarray], a: object, indices_or_sections: object, axis: SupportsIndex = 0
) -> object:
    return _pieces(n, asked, a, dim_of(axis))


def _pieces(n: ArrayWorld, asked: Sequence[numpy.ndarray], a: object, axis: int) -> list[object]:
    """The parts along an axis, as long as NumPy's are."""
    found, start = [], 0
    for piece in asked:
        if piece.size == 0 and piece.ndim and piece.shape[axis] == 0:
            start_here, length = 0, 0
        else:
            start_here, length = start, piece.shape[axis]
        key = (slice(None),) * (axis % piece.ndim) + (slice(start_here, start_here + length),)
        found.append(n.getitem(a, key) if isinstance(a, Array) else n.tensor(a)[key])
        start += length
    if start != model_of(a).shape[axis]:
        raise BreakGraph("numpy", "a split into parts that overlap, or leave something out")
    return found


def _hsplit(n: ArrayWorld, asked: Sequence[numpy.ndarray], a: object, indices_or_sections: object) -> object:
    return _pieces(n, asked, a, 0 if model_of(a).ndim == 1 else 1)


def _vsplit(n: ArrayWorld, asked: Sequence[numpy.ndarray], a: object, indices_or_sections: object) -> object:
    return _pieces(n, asked, a, 0)


def _flip(n: ArrayWorld, asked: Model, m: object, axis: Dims | None = None) -> object:
    ndim = model_of(m).ndim
    axes = range(ndim) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    named = {int(one) % ndim for one in axes}
    return n.getitem(m, tuple(slice(None, None, -1 if dim in named else None) for dim in range(ndim)))


def _fliplr(n: ArrayWorld, asked: Model, m: object) -> object:
    return _flip(n, asked, m, 1)


def _flipud(n: ArrayWorld, asked: Model, m: object) -> object:
    return _flip(n, asked, m, 0)


def _atleast(n: ArrayWorld, asked: Model, a: object) -> object:
    return a if asked is model_of(a) else _lies(n, a).reshape(asked.shape)


def _asarray(n: ArrayWorld, asked: Model, a: object, dtype: object = None, *, copy: bool | None = None) -> object:
    if isinstance(a, Array) and asked is a.model:
        return a
    return n.tensor(a)


def _array(n: ArrayWorld, asked: Model, object: object, dtype: object = None, *, copy: bool | None = True) -> object:
    return _asarray(n, asked, object, dtype)


def _ascontiguousarray(n: ArrayWorld, asked: Model, a: object, dtype: object = None) -> object:
    return _asarray(n, asked, a)


def _copy(n: ArrayWorld, asked: Model, a: object, order: str = "C") -> object:
    return n.tensor(a)


def _cast(n: ArrayWorld, asked: Model, a: object) -> object:
    """`numpy.float32(a)`."""
    if model_of(a).dtype.kind in "fc" and asked.dtype.kind in "iu":
        _refuse_narrow(asked)
    return n.tensor(a, asked.dtype)


def _astype(n: ArrayWorld, asked: Model, a: Array, dtype: object, *, copy: bool = True) -> object:
    if asked is a.model:
        return a
    if a.model.dtype.kind in "fc" and asked.dtype.kind in "iu":
        _refuse_narrow(asked)
    return n.tensor(a, asked.dtype)


def _refuse_narrow(asked: Model) -> None:
    """What a float above the range of whole numbers of 8 or 16 bits becomes is a matter of the machine's code."""
    if asked.dtype.itemsize < 4:
        raise BreakGraph("numpy", f"a conversion of floats to {asked.dtype}")


def _view(n: ArrayWorld, asked: Model, a: object) -> object:
    return n.getitem(a, ...)


# -- joined and repeated -----------------------------------------------------------------------


def _parts(n: ArrayWorld, asked: Model, arrays: Array | Sequence[object]) -> list[torch.Tensor]:
    if isinstance(arrays, Array):
        arrays = [arrays[index] for index in range(len(arrays))]
    return [n.tensor(part, asked.dtype) for part in arrays]


def _concatenate(
    n: ArrayWorld,
    asked: Model,
    arrays: Array | Sequence[object],
    axis: SupportsIndex | None = 0,
    *,
    dtype: object = None,
) -> object:
    parts = _parts(n, asked, arrays)
    if axis is None:
        return torch.cat([part.reshape(-1) for part in parts])
    return torch.cat(parts, dim_of(axis))


def _stack(
    n: ArrayWorld, asked: Model, arrays: Array | Sequence[object], axis: SupportsIndex = 0, *, dtype: object = None
) -> object:
    return torch.stack(_parts(n, asked, arrays), dim_of(axis))


def _joined(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, tup: Array | Sequence[object]) -> object:
        return getattr(torch, name)(_parts(n, asked, tup))

    return Rule(program)


def _append(n: ArrayWorld, asked: Model, arr: object, values: object, axis: SupportsIndex | None = None) -> object:
    return _concatenate(n, asked, (arr, values), axis)


def _repeat(n: ArrayWorld, asked: Model, a: object, repeats: int, axis: SupportsIndex | None = None) -> object:
    x = n.tensor(a)
    if numpy.ndim(repeats):
        raise BreakGraph("numpy", "a number of repeats for each element")
    return torch.repeat_interleave(
        x.reshape(-1) if axis is None else x, int(repeats), 0 if axis is None else dim_of(axis)
    )


def _tile(n: ArrayWorld, asked: Model, A: object, reps: Dims) -> object:
    return torch.tile(n.tensor(A), tuple(numpy.atleast_1d(reps).tolist()))


def _roll(
    n: ArrayWorld, asked: Model, a: object, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None = None
) -> object:
    return torch.roll(n.tensor(a), shift) if axis is None else torch.roll(n.tensor(a), shift, axis)


def _pad(
    n: ArrayWorld, asked: Model, array: object, pad_width: object, mode: str = "constant", *, constant_values: float = 0
) -> object:
    known(constant_values)
    if mode != "constant" or numpy.ndim(constant_values):
        raise BreakGraph("numpy", f"numpy.pad() of mode {mode!r}")
    x = n.tensor(array)
    widths = numpy.broadcast_to(numpy.asarray(pad_width), (x.dim(), 2)).tolist()
    value = numpy.asarray(constant_values).astype(asked.dtype).item()
    return torch.nn.functional.pad(x, [width for pair in reversed(widths) for width in pair], value=value)


# -- places ------------------------------------------------------------------------------------


def _where(n: ArrayWorld, asked: Model, condition: object, x: object, y: object) -> object:
    return torch.where(truths(n.tensor(condition)), n.tensor(x, asked.dtype), n.tensor(y, asked.dtype))


def _clip(
    n: ArrayWorld,
    asked: Model,
    a: object,
    a_min: object = None,
    a_max: object = None,
    *,
    min: object = None,
    max: object = None,
) -> object:
    x = n.tensor(a, asked.dtype)
    low, high = a_min if a_min is not None else min, a_max if a_max is not None else max
    refuse_complex(x)
    x = x if low is None else torch.maximum(x, n.tensor(low, asked.dtype))
    return x if high is None else torch.minimum(x, n.tensor(high, asked.dtype))


def _take(n: ArrayWorld, asked: Model, a: object, indices: Any, axis: SupportsIndex | None = None) -> object:
    """NumPy counts negative indices from the end."""
    x = n.tensor(a)
    x, dim = (x.reshape(-1), 0) if axis is None else (x, dim_of(axis) % x.dim())
    if not isinstance(indices, Array) and numpy.asarray(indices).ndim == 0:
        return x.select(dim, int(indices))
    index = n.tensor(indices, numpy.dtype("int64"))
    return x[(slice(None),) * dim + (index,)]


def _take_along_axis(n: ArrayWorld, asked: Model, arr: object, indices: object, axis: SupportsIndex = -1) -> object:
    x, index = n.tensor(arr), n.tensor(indices, numpy.dtype("int64"))
    if axis is None or x.dim() != index.dim():
        raise BreakGraph("numpy", "numpy.take_along_axis() without an axis")
    dim = dim_of(axis) % x.dim()
    shape = [max(a, b) if d != dim else -1 for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True))]
    index = torch.where(index < 0, index + int(x.shape[dim]), index)
    return torch.gather(x.expand(shape), dim, index.expand([s if s >= 0 else -1 for s in shape]))


def _sort(
    n: ArrayWorld, asked: Model, a: object, axis: SupportsIndex = -1, *, kind: object = None, stable: object = None
) -> torch.Tensor:
    x = n.tensor(a)
    refuse_complex(x)
    if axis is None:
        return torch.sort(x.reshape(-1), 0)[0]
    return torch.sort(x, dim_of(axis))[0]


def _sort_in_place(n: ArrayWorld, asked: Model, a: Array, axis: SupportsIndex = -1) -> None:
    n.write(a, _sort(n, asked, a, axis))


def _argsort(
    n: ArrayWorld, asked: Model, a: object, axis: SupportsIndex = -1, *, kind: object = None, stable: object = None
) -> object:
    """Of equal elements NumPy leaves open which comes first, unless it is told to be stable."""
    x = n.tensor(a)
    refuse_complex(x)
    if not stable and kind not in ("stable", "mergesort"):
        raise BreakGraph("numpy", "numpy.argsort() that is not stable")
    return torch.sort(x.reshape(-1) if axis is None else x, dim=0 if axis is None else dim_of(axis), stable=True)[1]


def _diff(world: ArrayWorld, asked: Model, a: object, n: int = 1, axis: SupportsIndex = -1) -> object:
    return torch.diff(world.tensor(a), dim_of(n), dim_of(axis))


def _triangle(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, m: object, k: SupportsIndex = 0) -> object:
        return getattr(torch, name)(n.tensor(m), dim_of(k))

    return Rule(program)


def _diag(n: ArrayWorld, asked: Model, v: object, k: int = 0) -> object:
    return torch.diag(n.tensor(v), dim_of(k)) if model_of(v).ndim == 1 else _diagonal(n, asked, v, k)


def _trace(
    n: ArrayWorld,
    asked: Model,
    a: object,
    offset: SupportsIndex = 0,
    axis1: SupportsIndex = 0,
    axis2: SupportsIndex = 1,
) -> object:
    return torch.diagonal(n.tensor(a, asked.dtype), dim_of(offset), dim_of(axis1), dim_of(axis2)).sum(-1)


def _meshgrid(n: ArrayWorld, asked: Sequence[numpy.ndarray], *xi: object, indexing: str = "xy") -> object:
    if indexing not in ("xy", "ij"):
        raise BreakGraph("numpy", "numpy.meshgrid()")
    found = []
    for place, x in enumerate(xi):
        dim = 1 - place if indexing == "xy" and place < 2 and len(xi) > 1 else place
        shape = [-1 if other == dim else 1 for other in range(len(xi))]
        found.append(n.tensor(x).reshape(shape).expand(tuple(asked[place].shape)).clone())
    return found


def _searchsorted(n: ArrayWorld, asked: Model, a: object, v: object, side: str = "left") -> torch.Tensor:
    dtype = _common(a, v)
    return torch.searchsorted(n.tensor(a, dtype), n.tensor(v, dtype), side=side)


def _common(*values: object) -> numpy.dtype:
    """The dtype that holds what is in all of these, as arrays."""
    return numpy.result_type(*(model_of(v) if isinstance(v, Array) else numpy.asarray(v) for v in values))


def _digitize(n: ArrayWorld, asked: Model, x: object, bins: object, right: bool = False) -> object:
    known(bins)  # NumPy asks them for their order
    edges = numpy.asarray(bins)
    found = _searchsorted(n, asked, edges[::-1] if _falls(edges) else edges, x, "left" if right else "right")
    return len(edges) - found if _falls(edges) else found


def _falls(edges: numpy.ndarray) -> bool:
    return len(edges) > 1 and bool(edges[0] > edges[-1])


def _isin(
    n: ArrayWorld,
    asked: Model,
    element: object,
    test_elements: object,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: str | None = None,
) -> object:
    dtype = _common(element, test_elements)
    x, among = n.tensor(element, dtype), n.tensor(test_elements, dtype)
    refuse_complex(x)
    found = torch.isin(x, among) & ~torch.isnan(x)  # which is in no array
    return ~found if invert else found


def _ediff1d(n: ArrayWorld, asked: Model, ary: object) -> object:
    return torch.diff(n.tensor(ary, asked.dtype).reshape(-1))


def _delete(n: ArrayWorld, asked: Model, arr: object, obj: Any, axis: SupportsIndex | None = None) -> object:
    known(obj)
    x = n.tensor(arr)
    x, dim = (x.reshape(-1), 0) if axis is None else (x, dim_of(axis) % x.dim())
    left = numpy.delete(numpy.arange(int(x.shape[dim])), obj)
    return x.index_select(dim, n.tensor(left))


def _round(n: ArrayWorld, asked: Model, a: object, decimals: SupportsIndex = 0) -> object:
    x, places = n.tensor(a, asked.dtype), dim_of(decimals)
    if not x.is_floating_point():
        if places < 0 or x.dtype == torch.bool or x.is_complex():
            raise BreakGraph("numpy", "numpy.round()")
        return x.clone()
    if places == 0:
        return torch.round(x)
    scale = 10.0 ** abs(places)
    return torch.round(x * scale) / scale if places > 0 else torch.round(x / scale) * scale


def _nan_to_num(
    n: ArrayWorld,
    asked: Model,
    x: object,
    copy: bool = True,
    nan: float = 0.0,
    posinf: float | None = None,
    neginf: float | None = None,
) -> object:
    if not copy or not n.tensor(x).is_floating_point():
        raise BreakGraph("numpy", "numpy.nan_to_num()")
    known(nan, posinf, neginf)
    return torch.nan_to_num(n.tensor(x), nan, posinf, neginf)


def _isclose(
    n: ArrayWorld, asked: Model, a: object, b: object, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> object:
    known(rtol, atol)
    dtype = numpy.result_type(model_of(a), model_of(b), 1.0)
    x, y = torch.broadcast_tensors(n.tensor(a, dtype), n.tensor(b, dtype))
    near = (torch.abs(x - y) <= atol + rtol * torch.abs(y)) & torch.isfinite(y) | (x == y)
    return near | (torch.isnan(x) & torch.isnan(y)) if equal_nan else near


def _rot90(n: ArrayWorld, asked: Model, m: object, k: int = 1, axes: Sequence[int] = (0, 1)) -> object:
    """Views of the array: it is turned by reversing dims and exchanging them."""
    ndim, times = model_of(m).ndim, int(k) % 4
    first, second = (int(axis) % ndim for axis in axes)
    if times == 0:
        return n.getitem(m, ...) if isinstance(m, Array) else n.tensor(m)
    if times == 2:
        return _flip(n, asked, _flip(n, asked, m, first), second)
    order = list(range(ndim))
    order[first], order[second] = order[second], order[first]
    turned = n.call(numpy.transpose, (m if times == 3 else _flip(n, asked, m, second), order), {})
    return turned if times == 1 else _flip(n, asked, turned, second)


def _fix(n: ArrayWorld, asked: Model, x: object) -> object:
    given = n.tensor(x, asked.dtype)
    return torch.trunc(given) if given.is_floating_point() else given.clone()


def _sinc(n: ArrayWorld, asked: Model, x: object) -> object:
    return torch.sinc(n.tensor(x, asked.dtype))


def _i0(n: ArrayWorld, asked: Model, x: object) -> object:
    return torch.i0(n.tensor(x, asked.dtype))


def _vander(world: ArrayWorld, asked: Model, x: object, N: int | None = None, increasing: bool = False) -> object:
    return torch.vander(world.tensor(x, asked.dtype), None if N is None else int(N), bool(increasing))


def _choose(
    n: ArrayWorld, asked: Model, a: object, choices: Array | Sequence[object], *, mode: str = "raise"
) -> object:
    """Indices that are out of range raise: torch's gather does, too."""
    if mode != "raise":
        raise BreakGraph("numpy", "numpy.choose() of this mode")
    index = n.tensor(a, numpy.dtype("int64"))
    stacked = torch.stack([part.expand(tuple(asked.shape)) for part in _parts(n, asked, choices)])
    return torch.gather(stacked, 0, index.expand(tuple(asked.shape)).unsqueeze(0)).squeeze(0)


def _on_first_choice(function: Callable[..., object]) -> Callable[..., object]:
    """NumPy is asked with indices that it has for certain."""
    return lambda a, *args, **kwargs: function(numpy.zeros_like(a), *args, **kwargs)


# -- new arrays --------------------------------------------------------------------------------


def _filled(value: object) -> Rule:
    def program(
        n: ArrayWorld,
        asked: Model,
        a: object,
        dtype: object = None,
        order: str = "K",
        subok: bool = True,
        shape: object = None,
    ) -> torch.Tensor:
        return _new(asked, value)

    return Rule(program)


def _new(asked: Model, value: object) -> torch.Tensor:
    number = numpy.asarray(value).astype(asked.dtype).item()
    return torch.full(tuple(asked.shape), number, dtype=dtype_of(asked.dtype), device="cpu")


def _full_like(n: ArrayWorld, asked: Model, a: object, fill_value: object, dtype: object = None) -> object:
    return n.tensor(fill_value, asked.dtype).expand(tuple(asked.shape)).clone()


def _full(n: ArrayWorld, asked: Model, shape: object, fill_value: object, dtype: object = None) -> object:
    return n.tensor(fill_value, asked.dtype).expand(tuple(asked.shape)).clone()


def _linspace(
    n: ArrayWorld, asked: Model, start: object, stop: object, num: int = 50, *, endpoint: bool = True
) -> object:
    if asked.dtype not in (numpy.float64, numpy.float32) or int(num) < 2 or not endpoint:
        raise BreakGraph("numpy", "numpy.linspace() of an array")
    first, last = n.tensor(start, asked.dtype), n.tensor(stop, asked.dtype)
    steps = torch.arange(int(num), dtype=dtype_of(asked.dtype), device="cpu").reshape(
        -1, *[1] * max(first.dim(), last.dim())
    )
    found = steps * ((last - first) / (int(num) - 1)) + first
    return torch.cat([found[:-1], last.expand(found.shape[1:]).unsqueeze(0)])


def _fill(n: ArrayWorld, asked: Model, a: Array, value: object) -> None:
    n.write(a, n.tensor(value))


CAST = Rule(_cast)  # of the types of scalars
SHAPES: dict[str, Rule] = {  # functions and methods
    "ravel": Rule(_ravel), "swapaxes": Rule(_swapaxes), "squeeze": Rule(_squeeze), "diagonal": Rule(_diagonal),
    "repeat": Rule(_repeat), "take": Rule(_take), "clip": Rule(_clip), "argsort": Rule(_argsort),
    "trace": Rule(_trace), "round": Rule(_round), "copy": Rule(_copy),
}  # fmt: skip
SHAPE_METHODS: dict[str, Rule] = {
    "reshape": Rule(_reshape_method), "transpose": Rule(_transpose_method), "flatten": Rule(_ravel),
    "astype": Rule(_astype), "view": Rule(_view), "sort": Rule(_sort_in_place, writes=True),
    "fill": Rule(_fill, writes=True), "T": Rule(_transpose), "mT": Rule(_matrix_transpose), "real": Rule(_real),
    "imag": Rule(_imag),
}  # fmt: skip
SHAPING: dict[str, Rule] = {  # functions alone
    "reshape": Rule(_reshape), "transpose": Rule(_transpose), "permute_dims": Rule(_transpose),
    "matrix_transpose": Rule(_matrix_transpose), "moveaxis": Rule(_moveaxis), "expand_dims": Rule(_expand_dims),
    "broadcast_to": Rule(_broadcast_to), "real": Rule(_real), "imag": Rule(_imag), "split": Rule(_split),
    "array_split": Rule(_split), "hsplit": Rule(_hsplit), "vsplit": Rule(_vsplit), "flip": Rule(_flip),
    "fliplr": Rule(_fliplr), "flipud": Rule(_flipud), "atleast_1d": Rule(_atleast), "atleast_2d": Rule(_atleast),
    "atleast_3d": Rule(_atleast),
    "asarray": Rule(_asarray), "array": Rule(_array), "ascontiguousarray": Rule(_ascontiguousarray),
    "asanyarray": Rule(_asarray), "concatenate": Rule(_concatenate), "stack": Rule(_stack), "hstack": _joined("hstack"),
    "vstack": _joined("vstack"), "dstack": _joined("dstack"), "column_stack": _joined("column_stack"),
    "append": Rule(_append), "tile": Rule(_tile), "roll": Rule(_roll), "pad": Rule(_pad), "where": Rule(_where),
    "take_along_axis": Rule(_take_along_axis), "sort": Rule(_sort), "diff": Rule(_diff), "tril": _triangle("tril"),
    "triu": _triangle("triu"), "diag": Rule(_diag), "meshgrid": Rule(_meshgrid), "searchsorted": Rule(_searchsorted),
    "rot90": Rule(_rot90), "fix": Rule(_fix), "sinc": Rule(_sinc), "i0": Rule(_i0), "vander": Rule(_vander),
    "choose": Rule(_choose, _on_first_choice), "nan_to_num": Rule(_nan_to_num),
    "digitize": Rule(_digitize), "isin": Rule(_isin), "ediff1d": Rule(_ediff1d), "delete": Rule(_delete),
    "isclose": Rule(_isclose), "zeros_like": _filled(0), "ones_like": _filled(1),
    "empty_like": _filled(0), "full_like": Rule(_full_like), "full": Rule(_full), "linspace": Rule(_linspace),
}  # fmt: skip
