"""Matrix products as kernels: tiny ones as loops like any other, others as templates where these are asked for and the
device's back end takes them; elsewhere they are calls of ATen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchinductor.indexing import ZERO, Index, dot, is_one, product
from torchinductor.ir import Kernel, Recorder, Stage, Template, space, space_index
from torchinductor.lowering.context import Context
from torchinductor.lowering.values import Lazy, TensorValue

# A value that is not stored yet is computed in the prologue where it is a conversion or the like: this many operations
# on one buffer. Everything else is computed once and stored.
_SIMPLE = 2


def _product(
    ctx: Context,
    a: TensorValue,
    b: TensorValue,
    bias: TensorValue | None = None,
    beta: object = 1,
    alpha: object = 1,
) -> TensorValue | None:
    """(batch..., n, k) x (batch..., k, m) as a kernel or template that stores beta * bias + alpha * product; None for a
    call of ATen."""
    tiny = _is_tiny(ctx, a, b)
    if not tiny and not ctx.options.templates:
        return None
    if not a.dtype.is_floating_point or a.dtype.itemsize == 1 or any(v.dtype != a.dtype for v in (b, bias) if v):
        return None
    shape = (*a.shape[:-1], b.shape[-1])
    if any(size.as_int() in (0, 1) for size in (*shape[-2:], a.shape[-1])) or 0 in [s.as_int() for s in shape]:
        return None
    if not all(isinstance(number, (int, float)) for number in (alpha, beta)):
        return None
    axes = space((*shape, a.shape[-1]), (len(shape),))
    *outer, k = space_index((*shape, a.shape[-1]))
    ranges = {axis.name: axis.size for axis in axes}
    for operand in (a, b):
        if isinstance(operand.data, Lazy) and (operand.heavy or operand.cost > _SIMPLE or len(operand.reads) != 1):
            ctx.realize(operand)
    inner, key = Recorder(ranges), ctx.new_name("r")
    factors = [_factor(a, (*outer[:-1], k), inner), _factor(b, (*outer[:-2], k, outer[-1]), inner)]
    inner.reduce("sum", key, inner.apply("mul", *factors))
    epilogue = Recorder(ranges)
    dtype = inner.dtype(factors[0])
    result = epilogue.carried(key, dtype)
    if alpha != 1:
        result = epilogue.apply("mul", result, epilogue.constant(float(alpha), dtype))  # type: ignore[arg-type]
    if bias is not None and beta != 0:
        added = bias.load(_broadcast(bias, tuple(outer)), epilogue)
        if beta != 1:
            added = epilogue.apply("mul", added, epilogue.constant(float(beta), dtype))  # type: ignore[arg-type]
        result = epilogue.apply("add", added, result)
    buffer = ctx.new_buffer(shape, a.dtype, a.device)
    epilogue.store(buffer.name, dot(tuple(outer), buffer.strides), result)
    stages = (Stage("inner", inner.body()), Stage("outer", epilogue.body()))
    if tiny:
        ctx.kernel(a.device, axes, stages)
        return ctx.strided(buffer)
    template = Template("matmul", Kernel(ctx.new_name("op"), a.device, axes, stages, ctx.buffers, ctx.origin()))
    if not ctx.takes(template):
        return None
    ctx.operations.append(template)
    return ctx.strided(buffer)


def _is_tiny(ctx: Context, a: TensorValue, b: TensorValue) -> bool:
    """Whether the host would take longer to ask a library for the product than the device to compute it."""
    count = product((*a.shape, b.shape[-1])).as_int()
    return count is not None and count <= ctx.traits_of(a.device).tiny_product


def _factor(value: TensorValue, index: Index, recorder: Recorder) -> int:
    """The element of a factor, rounded as its tensor is."""
    loaded = value.load(index, recorder)
    return recorder.to_dtype(loaded, value.dtype, recorder.dtype(loaded))


def _broadcast(value: TensorValue, index: Index) -> Index:
    """The index of the element that a value broadcast to the index's rank has there."""
    own = index[len(index) - len(value.shape) :]
    return tuple(ZERO if is_one(size) else i for size, i in zip(value.shape, own, strict=True))


def _added(
    ctx: Context, bias: TensorValue, a: TensorValue, b: TensorValue, *, beta: object = 1, alpha: object = 1
) -> TensorValue | None:
    return _product(ctx, a, b, bias, beta, alpha)


PRODUCTS: Mapping[str, Callable[..., TensorValue | None]] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _added,
    "baddbmm": _added,
}
"""By prim: its result by a kernel or template, or None where it is to be an ATen call."""
