"""Rules for elementwise, conversion, creation and random prims: all become lazy computations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from primtorch.eager_kernels import Fact
from primtorch.prims import philox
from primtorch.symbolic import FloatExpr
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import Index, as_expr, contiguous_strides, dot, exprs, variable
from torchinductor.ir import REDUCED_PRECISION, compute_dtype
from torchinductor.lowering.context import Context, SeedCall
from torchinductor.lowering.values import Load, Ops, Size, Sizes, TensorValue
from torchinductor.ops import ELEMENTWISE, Fault

Number = bool | int | float | IntExpr | FloatExpr


def _operand(arg: TensorValue | Number, dtype: torch.dtype) -> Load:
    if isinstance(arg, TensorValue):
        return arg.load
    if isinstance(arg, IntExpr):
        return lambda index, ops: ops.index_expr(arg, dtype)
    if isinstance(arg, FloatExpr):
        return lambda index, ops: _run_time_float(arg, dtype, ops)
    return lambda index, ops: ops.constant(arg, dtype)


def _run_time_float(number: FloatExpr, dtype: torch.dtype, ops: Ops) -> int:
    """A float that the kernel is given: its 64 bits are one of the kernel's symbols."""
    if number.value is not None:
        return ops.constant(number.value, dtype)
    bits = ops.index_expr(variable(number.text), torch.int64)
    return ops.to_dtype(ops.bitcast(bits, torch.float64, torch.int64), dtype, torch.float64)


def elementwise(name: str) -> Callable[..., TensorValue]:
    """The rule of a prim that `OpsHandler.apply` knows under the same name."""
    info = ELEMENTWISE[name]

    def rule(ctx: Context, *args: TensorValue | Number) -> TensorValue:
        tensors = [a for a in args if isinstance(a, TensorValue)]
        typed = [a for a in args[1:] if isinstance(a, TensorValue)] if info.result == "second" else tensors
        first = typed[0]
        loads = [_operand(a, first.dtype) for a in args]
        dtype = torch.bool if info.result == "bool" else first.dtype
        rounds = ctx.options.round_like_eager and dtype in REDUCED_PRECISION

        def load(index: Index, ops: Ops) -> int:
            value = ops.apply(name, *[f(index, ops) for f in loads])
            return ops.to_dtype(value, dtype, torch.float32) if rounds else value

        return ctx.lazy(first.shape, dtype, first.device, load, of=tensors, heavy=info.heavy)

    return rule


def whole_division(name: str) -> Callable[..., TensorValue]:
    """The rule of a division that rounds, or its rest: integers by zero are a fault on the CPU, as in eager."""
    plain = elementwise(name)

    def rule(ctx: Context, a: TensorValue | Number, b: TensorValue | Number) -> TensorValue:
        like = a if isinstance(a, TensorValue) else b
        assert isinstance(like, TensorValue)
        dtype, harmless = like.dtype, isinstance(b, (bool, int)) and b != 0
        if dtype.is_floating_point or harmless or not Fact.DIVISION_BY_ZERO_RAISES.on(like.device):
            return plain(ctx, a, b)
        divisor = _operand(b, dtype)

        def load(index: Index, ops: Ops) -> int:
            value = divisor(index, ops)
            return ops.require(value, ops.apply("ne", value, ops.constant(0, dtype)), Fault.DIVISION)

        of = [b] if isinstance(b, TensorValue) else []
        result = plain(ctx, a, ctx.lazy(like.shape, dtype, like.device, load, of=of))
        ctx.realize(result)  # all of it is computed, whatever part is read
        return result

    return rule


def convert_element_type(ctx: Context, t: TensorValue, dtype: torch.dtype, rounded: bool = False) -> TensorValue:
    """The value in another dtype; rounded to a 16-bit one where the program wrote that, or options ask for it."""
    if dtype == t.dtype:
        return t
    # A float32 value that becomes bfloat16 in the middle of a kernel keeps its digits; the store rounds.
    fused = not (rounded or ctx.options.round_like_eager)
    keeps = dtype in REDUCED_PRECISION and t.dtype == torch.float32 and fused

    def load(index: Index, ops: Ops) -> int:
        value = t.load(index, ops)
        return value if keeps else ops.to_dtype(value, dtype, t.dtype)

    narrower = t if t.dtype.itemsize < dtype.itemsize else None
    return ctx.lazy(t.shape, dtype, t.device, load, of=[t], cost=0, narrower=narrower)


def bitcast(ctx: Context, t: TensorValue, dtype: torch.dtype) -> TensorValue:
    """The same bits in a dtype of the same width."""
    return ctx.lazy(
        t.shape, dtype, t.device, lambda index, ops: ops.bitcast(t.load(index, ops), dtype, t.dtype), of=[t]
    )


def full(ctx: Context, shape: Sizes, value: Number, dtype: torch.dtype, device: torch.device) -> TensorValue:
    """One number everywhere; no memory."""
    load = _operand(value, dtype)
    return ctx.lazy(exprs(shape), dtype, torch.device(device), load, cost=0)


def iota(ctx: Context, length: Size, start: Size, step: Size, dtype: torch.dtype, device: torch.device) -> TensorValue:
    """start + i * step of `length` elements, in a dtype."""
    first, by = as_expr(start), as_expr(step)

    def load(index: Index, ops: Ops) -> int:
        return ops.index_expr(first + index[0] * by, dtype)

    return ctx.lazy((as_expr(length),), dtype, torch.device(device), load, cost=0)


def empty_strided(ctx: Context, shape: Sizes, strides: Sizes, dtype: torch.dtype, device: torch.device) -> TensorValue:
    """Memory that nobody writes, in a layout given in elements."""
    return ctx.strided(ctx.new_buffer(exprs(shape), dtype, torch.device(device), exprs(strides)))


def random_seed(ctx: Context, device: torch.device) -> TensorValue:
    """A 0-d int64 drawn from the device's generator."""
    buffer = ctx.new_buffer((), torch.int64, torch.device(device))
    ctx.operations.append(SeedCall(ctx.new_name("seed"), buffer.name, buffer.device))
    return ctx.strided(buffer)


def _bits(seed: TensorValue, shape: Index, stream: int, width: int) -> Load:
    strides = contiguous_strides(shape)

    def narrow(index: Index, ops: Ops) -> int:
        return ops.random_bits(seed.load((), ops), ops.simplify(dot(index, strides)), stream)

    def wide(index: Index, ops: Ops) -> int:
        first = dot(index, strides) * as_expr(2)
        low, high = (ops.random_bits(seed.load((), ops), ops.simplify(first + as_expr(k)), stream) for k in (0, 1))
        return ops.apply("bitwise_or", ops.apply("shift_left", high, ops.constant(32, torch.int64)), low)

    return wide if width == 64 else narrow


def random_bits(ctx: Context, seed: TensorValue, shape: Sizes, stream: int = 0, width: int = 32) -> TensorValue:
    """int64 words of Philox, of 32 or 64 bits, one an element."""
    sizes = exprs(shape)
    return ctx.lazy(sizes, torch.int64, seed.device, _bits(seed, sizes, stream, width), of=[seed], cost=20, heavy=True)


def random_uniform(
    ctx: Context, seed: TensorValue, shape: Sizes, stream: int = 0, dtype: torch.dtype = torch.float32
) -> TensorValue:
    """Floats in [0, 1) of as many digits as the dtype has."""
    sizes, kept, width = exprs(shape), philox.digits(dtype), 64 if dtype is torch.float64 else 32
    bits = _bits(seed, sizes, stream, width)

    def load(index: Index, ops: Ops) -> int:
        high = ops.apply("shift_right", bits(index, ops), ops.constant(width - kept, torch.int64))
        if width == 64:  # the shift keeps the sign
            high = ops.apply("bitwise_and", high, ops.constant(2**kept - 1, torch.int64))
        kind = compute_dtype(dtype)
        return ops.apply("mul", ops.to_dtype(high, kind, torch.int64), ops.constant(2.0**-kept, kind))

    return ctx.lazy(sizes, dtype, seed.device, load, of=[seed], cost=20, heavy=True)


_NO_PRIM = frozenset(("fma", "relu", "logical_not"))

RULES: Mapping[str, Callable[..., TensorValue]] = {
    **{name: elementwise(name) for name in ELEMENTWISE if name not in _NO_PRIM},
    **{name: whole_division(name) for name in ("floor_div", "trunc_div", "fmod", "remainder")},
    "convert_element_type": convert_element_type,
    "bitcast": bitcast,
    "full": full,
    "iota": iota,
    "empty_strided": empty_strided,
    "random_seed": random_seed,
    "random_bits": random_bits,
    "random_uniform": random_uniform,
}
