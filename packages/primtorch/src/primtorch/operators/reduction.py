"""Reductions and norms of vectors."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from primtorch import prims
from primtorch.arguments import Dims, TensorLike
from primtorch.builder import Builder, Value
from primtorch.errors import DataDependentValue
from primtorch.families import Family, Formula, Rule, Trait
from primtorch.layout import certainly, product, reduced_dims, wrap_dim
from primtorch.operators.build import contiguous, elementwise
from primtorch.operators.elementwise import same, truth
from primtorch.operators.refusals import is_empty, refuse
from primtorch.prims import Prim
from primtorch.promotion import compute_dtype, float_of, integer_sum_dtype, real_of, result_type
from primtorch.samples import after, call, listed, reals, truths
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import hint_of

OP = Family("reduction")
OP.trait(Trait.CONVERTS_OUT, "all any logsumexp max.unary_out mean min.unary_out nansum prod std sum var")
OP.trait(Trait.TRUTH_OUT, "all any")
OP.trait(
    Trait.OVERLAPS,
    "all amax amin any argmax argmin hash_tensor linalg_vector_norm nansum prod std sum var",
)


def accumulated(x: Value, dtype: torch.dtype | None) -> Value:
    """Operand of a sum: integers and bool are summed in int64."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64
    return x.to(dtype)


def full_formula(dtype_rule: Callable[[torch.dtype], torch.dtype]) -> Formula:
    """Formulas of reductions over all dims, to 0-d; `dtype_rule` gives the dtype where none is asked for."""

    def formula(x: TensorLike, *, dtype: torch.dtype | None = None) -> TensorSpec:
        return contiguous(x, (), dtype or dtype_rule(x.dtype))

    return formula


OP.formula("sum prod")(full_formula(integer_sum_dtype))


def reduced(x: TensorLike, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> TensorSpec:
    """The output of a reduction: row-major, whatever the input's strides."""
    gone = set(dims)
    if keepdim:
        return contiguous(x, [1 if d in gone else s for d, s in enumerate(x.shape)], dtype)
    return contiguous(x, [s for d, s in enumerate(x.shape) if d not in gone], dtype)


@OP.formula("sum.dim_IntList", "nansum")
def _sum(
    x: TensorLike, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, dtype or integer_sum_dtype(x.dtype))


@OP.rule("sum", "sum.dim_IntList")
def _lower_sum(
    b: Builder, x: Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return accumulated(x, dtype).sum(reduced_dims(dim, x.rank), keepdim)


@OP.rule("nansum")
def _lower_nansum(
    b: Builder, x: Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    if x.dtype.is_floating_point:
        x = b.where(x.map(prims.isnan), 0, x)
    return _lower_sum(b, x, dim, keepdim, dtype=dtype)


def _mean_of(x: Value, dims: tuple[int, ...], keepdim: bool) -> Value:
    count = product([x.shape[d] for d in dims])
    total = x.sum(dims, keepdim)
    return total / (math.nan if isinstance(count, int) and count == 0 else count)


@OP.formula("mean.dim")
def _mean_dim(
    x: TensorLike, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    out = dtype or x.dtype
    if not (out.is_floating_point or out.is_complex):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or complex "
            f"dtype. Got: {x.dtype}"
        )
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, out)


@OP.formula("mean")
def _mean(x: TensorLike, *, dtype: torch.dtype | None = None) -> TensorSpec:
    return _mean_dim(x, None, dtype=dtype)


@OP.rule("mean", "mean.dim")
def _lower_mean(
    b: Builder, x: Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    out_dtype = dtype or x.dtype
    if not (out_dtype.is_floating_point or out_dtype.is_complex):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {out_dtype}"
        )
    dims = reduced_dims(dim, x.rank)
    return _mean_of(x.to(compute_dtype(out_dtype)), dims, keepdim).to(out_dtype)


@OP.formula("prod.dim_int")
def _prod(x: TensorLike, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, dtype or integer_sum_dtype(x.dtype))


@OP.rule("prod", "prod.dim_int")
def _lower_prod(
    b: Builder, x: Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Value:
    return accumulated(x, dtype).reduce(prims.prod, reduced_dims(dim, x.rank), keepdim)


_NOT_TRUE = "Expected Tensor with single nonzero value, but got zero"  # as eager says it


def is_known(size: Size) -> bool:
    """Whether a size, or a product of sizes, does not depend on data."""
    return isinstance(size, int) or hint_of(size, -1) >= 0


def want_some(b: Builder, x: Value, dims: tuple[int, ...]) -> None:
    """Nothing has no largest element. Sizes that are known were looked at when the program was traced."""
    count = product([x.shape[d] for d in dims])
    if not is_known(count):
        message = "Expected reduction dim to have non-zero size: the largest or smallest of no elements was asked for"
        b.emit(prims.assert_async, b.full((), count, torch.int64, x.device).ne(0), message)


@OP.formula("_assert_async", "_assert_async.msg")
def _assert_async(x: TensorLike, message: str = "") -> None:
    return None


@OP.formula("_assert_tensor_metadata")
def _assert_metadata(x: TensorLike, *asked: object, **also: object) -> None:
    return None


@OP.refuses("_assert_async", "_assert_async.msg")
def _refuse_assert_async(x: TensorLike, message: str = "") -> None:
    refuse(any(map(is_empty, x.shape)), "Boolean value of Tensor with no values is ambiguous")
    refuse(any(size != 1 for size in x.shape), "Boolean value of Tensor with more than one value is ambiguous")


@OP.rule("_assert_async", "_assert_async.msg")
def _lower_assert_async(b: Builder, x: Value, message: str = _NOT_TRUE) -> None:
    b.emit(prims.assert_async, x, message)


def _extremum(prim: Prim) -> Rule:
    def rule(b: Builder, x: Value, dim: Dims = (), keepdim: bool = False) -> Value:
        dims = reduced_dims(dim, x.rank)
        want_some(b, x, dims)
        return x.reduce(prim, dims, keepdim)

    return rule


@OP.formula("amax", "amin")
def _amax(x: TensorLike, dim: Sequence[int] = (), keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, x.dtype)


def _want_elements(x: TensorLike, dims: Sequence[int], name: str) -> None:
    for d in dims:
        at = wrap_dim(d, x.dim())
        refuse(
            bool(x.dim()) and is_empty(x.shape[at]),
            lambda: f"{name}(): Expected reduction dim {at} to have non-zero size.",
            IndexError,
        )


_OF_NOTHING = "Expected reduction dim to be specified for input.numel() == 0. Specify it with 'dim'"


@OP.refuses("amax", "amin")
def _refuse_extremum(x: TensorLike, dim: Dims = (), keepdim: bool = False) -> None:
    refuse(x.dim() > 64, "only tensors with up to 64 dims are supported")
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    refuse(any(map(is_empty, x.shape)) and not dims, _OF_NOTHING)
    _want_elements(x, dims, "amax or amin")


OP.rule("amax")(_extremum(prims.amax))
OP.rule("amin")(_extremum(prims.amin))
OP.formula("max min")(full_formula(same))


@OP.refuses("max", "min")
def _refuse_extremum_of_all(x: TensorLike) -> None:
    refuse(any(map(is_empty, x.shape)), _OF_NOTHING)


@OP.refuses("max.dim", "min.dim")
def refuse_element_along(x: TensorLike, dim: int = -1, keepdim: bool = False) -> None:
    """Raises IndexError where there is nothing along the dim to choose from."""
    _want_elements(x, (dim,), "max, min, median or mode")


@OP.formula("max.dim", "min.dim")
def max_dim(x: TensorLike, dim: int, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    """Values, and int64 places, along a dim."""
    dims = reduced_dims(dim, x.dim())
    return reduced(x, dims, keepdim, x.dtype), reduced(x, dims, keepdim, torch.int64)


OP.rule("max")(_extremum(prims.amax))
OP.rule("min")(_extremum(prims.amin))


@OP.formula("aminmax")
def _aminmax(x: TensorLike, *, dim: int | None = None, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    out = reduced(x, reduced_dims(dim, x.dim()), keepdim, x.dtype)
    return out, out


@OP.refuses("aminmax")
def _refuse_aminmax(x: TensorLike, *, dim: int | None = None, keepdim: bool = False) -> None:
    refuse(x.dim() > 64, "only tensors with up to 64 dims are supported")
    if dim is not None:
        _want_elements(x, (dim,), "aminmax")
    else:
        refuse(any(map(is_empty, x.shape)), "aminmax(): cannot compute aminmax over an empty dimension")


@OP.rule("aminmax", "_aminmax?", "_aminmax.dim?")
def _lower_aminmax(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = reduced_dims(dim, x.rank)
    want_some(b, x, dims)
    return x.reduce(prims.amin, dims, keepdim), x.reduce(prims.amax, dims, keepdim)


def _extremum_along(value: Prim, place: Prim) -> Rule:
    def rule(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if x.rank == 0:
            return x, b.full((), 0, torch.int64, x.device)
        dims = (x.dim(dim),)
        want_some(b, x, dims)
        keys = x.to(torch.uint8) if x.dtype is torch.bool else x
        return x.reduce(value, dims, keepdim), b.emit(place, keys, dims, keepdim)

    return rule


OP.rule("max.dim")(_extremum_along(prims.amax, prims.argmax))
OP.rule("min.dim")(_extremum_along(prims.amin, prims.argmin))


def _arg(prim: Prim) -> Rule:
    def rule(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if x.rank == 0:
            return b.full((), 0, torch.int64, x.device)
        want_some(b, x, reduced_dims(dim, x.rank))
        keys = x.to(torch.uint8) if x.dtype is torch.bool else x
        return b.emit(prim, keys, () if dim is None else (x.dim(dim),), keepdim)

    return rule


@OP.formula("argmax", "argmin")
def _argmax(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, torch.int64)


@OP.refuses("argmax", "argmin")
def _refuse_place_of_extremum(x: TensorLike, dim: int | None = None, keepdim: bool = False) -> None:
    refuse(dim is None and any(map(is_empty, x.shape)), _OF_NOTHING, IndexError)
    if dim is not None:
        _want_elements(x, (dim,), "argmax or argmin")


OP.rule("argmax")(_arg(prims.argmax))
OP.rule("argmin")(_arg(prims.argmin))


def _logical(prim: Prim) -> Rule:
    def rule(b: Builder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
        out = truth(x).reduce(prim, reduced_dims(dim, x.rank), keepdim)
        return out.to(torch.uint8) if x.dtype is torch.uint8 else out

    return rule


OP.formula("any all")(full_formula(lambda d: torch.uint8 if d is torch.uint8 else torch.bool))


@OP.formula("any.dim", "all.dim", "any.dims", "all.dims")
def _any(x: TensorLike, dim: Dims = None, keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool)


OP.rule("any.|dim|dims")(_logical(prims.any))
OP.rule("all.|dim|dims")(_logical(prims.all))


@OP.formula("count_nonzero", "count_nonzero.dim_IntList")
def _count_nonzero(x: TensorLike, dim: Dims = None) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), False, torch.int64)


@OP.rule("count_nonzero", "count_nonzero.dim_IntList")
def _lower_count_nonzero(b: Builder, x: Value, dim: Dims = None) -> Value:
    return truth(x).to(torch.int64).sum(reduced_dims(dim, x.rank))


# --- variance ------------------------------------------------------------------------------------
def _about_one(b: Builder, x: Value, dims: tuple[int, ...], correction: float, keepdim: bool) -> Sequence[Value]:
    """Variance and mean, by what the elements are more than one of them. Of equal elements that is 0, and so are their
    variance and the slope of their deviation, as in eager, which updates a mean (Welford 1962); a mean that is a sum
    divided misses them by its rounding. A set that may be empty is compared with its mean, which mends that as well."""
    if all(certainly(x.shape[d] >= 1) for d in dims):
        centre = x
        for d in dims:
            centre = centre.slice(d, 0, 1)
    else:
        centre = x.mean(dims, keepdim=True)
    var, rest = b.emit_several(prims.var_mean, x - centre, dims, correction, keepdim)
    return var, (centre if keepdim else centre.squeeze(*dims)) + rest


def _about_mean(b: Builder, x: Value, dims: tuple[int, ...], correction: float, keepdim: bool) -> Sequence[Value]:
    return b.emit_several(prims.var_mean, x, dims, correction, keepdim)


def _var_mean_wide(
    b: Builder, x: Value, dim: Dims, correction: float, keepdim: bool, deviation: bool = False
) -> tuple[Value, Value]:
    """`deviation`: the variance's root is taken, whose slope at 0 is another than beside it."""
    dims = reduced_dims(dim, x.rank)
    var_mean = _about_one if deviation else _about_mean
    if not x.dtype.is_complex:
        var, mean = var_mean(b, x.compute(), dims, float(correction), keepdim)
        return var, mean
    re = var_mean(b, x.compute().map(prims.real), dims, float(correction), keepdim)
    im = var_mean(b, x.compute().map(prims.imag), dims, float(correction), keepdim)
    return re[0] + im[0], b.emit(prims.complex, re[1], im[1])


def _correction(correction: float | None) -> float:
    return 1 if correction is None else correction


@OP.formula("var", "std")
def _var_all(x: TensorLike, unbiased: bool = True) -> TensorSpec:
    return contiguous(x, (), real_of(x.dtype))


@OP.formula("var.dim", "std.dim", "var.correction", "std.correction")
def _var(
    x: TensorLike,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, real_of(x.dtype))


@OP.rule("var.correction")
def _lower_var(
    b: Builder, x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    return _var_mean_wide(b, x, dim, _correction(correction), keepdim)[0].to(real_of(x.dtype))


@OP.rule("std.correction")
def _lower_std(
    b: Builder, x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    variance = _var_mean_wide(b, x, dim, _correction(correction), keepdim, deviation=True)[0]
    return variance.map(prims.sqrt).to(real_of(x.dtype))


@OP.formula("var_mean.correction", "std_mean.correction")
def _var_mean(
    x: TensorLike, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[TensorSpec, TensorSpec]:
    dims = reduced_dims(dim, x.dim())
    return reduced(x, dims, keepdim, real_of(x.dtype)), reduced(x, dims, keepdim, x.dtype)


@OP.rule("var_mean.correction")
def _lower_var_mean(
    b: Builder, x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    var, mean = _var_mean_wide(b, x, dim, _correction(correction), keepdim)
    return var.to(real_of(x.dtype)), mean.to(x.dtype)


@OP.rule("std_mean.correction")
def _lower_std_mean(
    b: Builder, x: Value, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    var, mean = _var_mean_wide(b, x, dim, _correction(correction), keepdim, deviation=True)
    return var.map(prims.sqrt).to(real_of(x.dtype)), mean.to(x.dtype)


def _unbiased_of_all(rule: Rule) -> Rule:
    return lambda b, x, unbiased=True: rule(b, x, None, correction=int(unbiased))


def _unbiased(rule: Rule) -> Rule:
    return lambda b, x, dim, unbiased=True, keepdim=False: rule(b, x, dim, correction=int(unbiased), keepdim=keepdim)


for _name, _rule in (("var", _lower_var), ("std", _lower_std)):
    OP.rule(_name)(_unbiased_of_all(_rule))
    OP.rule(f"{_name}.dim")(_unbiased(_rule))


# --- norms of vectors ------------------------------------------------------------------------------
def vector_norm(x: Value, order: float, dims: tuple[int, ...], keepdim: bool) -> Value:
    """(sum |x|^p)^(1/p) over the dims, for any order p; for 0 the number of what is not zero."""
    size = x.map(prims.abs)
    if order == math.inf:
        return size.reduce(prims.amax, dims, keepdim)
    if order == -math.inf:
        return size.reduce(prims.amin, dims, keepdim)
    if order == 0:
        return size.ne(0.0).to(size.dtype).sum(dims, keepdim)
    if order == 1:
        return size.sum(dims, keepdim)
    if order == 2:
        return (size * size).sum(dims, keepdim).map(prims.sqrt)
    return (size ** float(order)).sum(dims, keepdim) ** (1.0 / order)


_NORMS = "linalg_vector_norm norm.Scalar|ScalarOpt_dim|ScalarOpt_dim_dtype|ScalarOpt_dtype"


@OP.formula(_NORMS)
def _vector_norm(
    x: TensorLike, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, real_of(dtype or x.dtype))


@OP.refuses("linalg_vector_norm")
def _refuse_vector_norm(x: TensorLike, ord: float = 2, dim: Dims = None, *args: object, **options: object) -> None:
    if ord >= 0 and ord != math.inf:
        return  # of no elements it is zero
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim or range(x.dim())
    nothing = bool(x.dim()) and any(is_empty(x.shape[wrap_dim(d, x.dim())]) for d in dims)
    refuse(nothing, lambda: f"linalg.vector_norm cannot compute the {ord} norm of no elements: it has no identity")


@OP.rule(_NORMS)
def _lower_vector_norm(
    b: Builder,
    x: Value,
    order: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    out_dtype = dtype or x.dtype
    wide = x.to(compute_dtype(out_dtype))
    out = vector_norm(wide, 2.0 if order is None else float(order), reduced_dims(dim, x.rank), keepdim)
    return out.to(real_of(out_dtype))


@OP.formula("renorm")
def _renorm(x: TensorLike, p: float, dim: int, maxnorm: float) -> TensorSpec:
    return contiguous(x, x.shape)


@OP.refuses("renorm")
def _refuse_renorm(x: TensorLike, p: float, dim: int, maxnorm: float) -> None:
    refuse(p <= 0, "renorm: non-positive-norm not supported")
    refuse(maxnorm < 0, lambda: f"renorm: expected maxnorm to be >= 0 but got {maxnorm}")
    at = wrap_dim(dim, x.dim()) if x.dim() else 0
    refuse(
        p == math.inf and any(is_empty(size) for d, size in enumerate(x.shape) if d != at),
        "renorm: the inf norm of no elements has no identity",
    )
    refuse(x.dim() < 2, lambda: f"renorm: input needs at least 2 dimensions, got {x.dim()} dimensions")


@OP.rule("renorm")
def _lower_renorm(b: Builder, x: Value, p: float, dim: int, maxnorm: float) -> Value:
    dim = x.dim(dim)
    wide = x.compute()
    norm = vector_norm(wide, float(p), tuple(d for d in range(x.rank) if d != dim), True)
    factor = b.where(norm > float(maxnorm), float(maxnorm) / (norm + 1e-7), 1.0)
    return (wide * factor.to(wide.dtype)).to(x.dtype)


@OP.formula("dist")
def _dist(a: TensorLike, b: TensorLike, p: float = 2) -> TensorSpec:
    return contiguous(a, (), real_of(elementwise((a, b), result_type((a, b))).dtype))


@OP.refuses("dist")
def _refuse_dist(x: TensorLike, y: TensorLike, p: float = 2) -> None:
    _refuse_vector_norm(x if any(map(is_empty, x.shape)) else y, p)


@OP.rule("dist")
def _lower_dist(b: Builder, x: Value, y: Value, p: float = 2) -> Value:
    dtype = result_type((x, y))
    return _lower_vector_norm(b, x.to(dtype) - y.to(dtype), p)


@OP.formula("logsumexp")
def _logsumexp(x: TensorLike, dim: Sequence[int], keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, float_of(x.dtype))


@OP.rule("logsumexp")
def _lower_logsumexp(b: Builder, x: Value, dim: Dims, keepdim: bool = False) -> Value:
    dtype = float_of(x.dtype)
    wide = x.to(compute_dtype(dtype))
    dims = reduced_dims(dim, x.rank)
    if any(isinstance(x.shape[d], int) and x.shape[d] == 0 for d in dims):
        return wide.map(prims.exp).sum(dims, keepdim).map(prims.log).to(dtype)
    top = (
        wide.reduce(prims.amax, dims, True)
        if not wide.dtype.is_complex
        else (wide.map(prims.real).reduce(prims.amax, dims, True).to(wide.dtype))
    )
    size = top.map(prims.abs)
    shift = b.where(size.eq(math.inf), 0, top)
    out = (wide - shift).map(prims.exp).sum(dims, True).map(prims.log) + shift
    return (out if keepdim else out.squeeze(*dims)).to(dtype)


@OP.rule("_is_all_true")
def _lower_is_all_true(b: Builder, x: Value) -> Value:
    return x.reduce(prims.all, tuple(range(x.rank)))


@OP.rule("_is_any_true")
def _lower_is_any_true(b: Builder, x: Value) -> Value:
    return x.reduce(prims.any, tuple(range(x.rank)))


@OP.rule("linalg__powsum?")
def _lower_powsum(
    b: Builder,
    x: Value,
    order: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    """sum |x|^p."""
    out_dtype = dtype or (x.dtype.to_real() if x.dtype.is_complex else x.dtype)
    size = x.compute().map(prims.abs)
    dims = tuple(range(x.rank)) if dim is None else tuple(x.dim(d) for d in ((dim,) if isinstance(dim, int) else dim))
    term = size * size if order == 2 else size if order == 1 else size ** float(order)
    return term.sum(dims, keepdim).to(out_dtype)


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("equal", "allclose")
def _equal(x: TensorLike, other: TensorLike, *args: object, **kwargs: object) -> bool:
    raise DataDependentValue(
        "whether two tensors are equal (torch.equal, torch.allclose)",
        "it is known only when the program runs",
        "Keep the comparison in a tensor, or keep this part out of the compiled region.",
    )


@OP.formula("segment_reduce")
def _segment_reduce(
    data: TensorLike,
    reduce: str,
    *,
    lengths: TensorLike | None = None,
    indices: TensorLike | None = None,
    offsets: TensorLike | None = None,
    axis: int = 0,
    **options: object,
) -> TensorSpec:
    if lengths is not None:
        segments = tuple(lengths.shape)
    else:
        assert offsets is not None
        segments = (*offsets.shape[:-1], offsets.shape[-1] - 1)
    return contiguous(data, (*segments, *data.shape[axis + 1 :]))


@OP.formula("_segment_reduce_backward")
def _segment_reduce_backward(
    grad: TensorLike, output: TensorLike, data: TensorLike, *args: object, **kwargs: object
) -> TensorSpec:
    return contiguous(grad, data.shape)


@OP.formula("hash_tensor?")
def _hash_tensor(x: TensorLike, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, torch.uint64)


@OP.refuses("hash_tensor?")
def _refuse_hash_tensor(x: TensorLike, dim: Sequence[int] = (), **options: object) -> None:
    refuse(any(map(is_empty, x.shape)) and not dim, _OF_NOTHING)
    _want_elements(x, dim, "hash_tensor")


# --- samples ---------------------------------------------------------------------------------------

OP.samples("_assert_async", call(after(torch.all, truths(0))))
OP.samples("_assert_async.msg", call(after(torch.all, truths(0)), "never shown"))

OP.samples("_is_all_true _is_any_true", call(truths(3, 4)))
OP.samples("norm.ScalarOpt_dtype", call(reals(3, 4), 2, dtype=torch.float64))
OP.samples("norm.ScalarOpt_dim_dtype", call(reals(3, 4), 2, [1], True, dtype=torch.float64))
OP.samples("segment_reduce", *(call(reals(6, 2), how, lengths=listed(2, 1, 3)) for how in ("sum", "max", "mean")))
OP.samples("_segment_reduce_backward", call(reals(3, 2), reals(3, 2), reals(6, 2), "sum", lengths=listed(2, 1, 3)))
OP.samples("hash_tensor", call(reals(3, 4)), call(reals(3, 4), [1]))
