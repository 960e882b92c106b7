"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import Number, PerDim, Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.errors import NoFormula
from primtorch.families import Family, Trait
from primtorch.layout import (
    broadcast,
    broadcast_shapes,
    product,
    wrap_dim,
)
from primtorch.operators.activation import lower_gelu
from primtorch.operators.build import contiguous, elementwise, per_dim, strided
from primtorch.operators.convolution_layouts import Convolution, filter_gradient_strides, result_strides
from primtorch.operators.normalization import like
from primtorch.operators.refusals import is_empty, refuse
from primtorch.prims.window import pooled_size
from primtorch.promotion import compute_dtype
from primtorch.samples import after, call, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("contraction")
OP.trait(
    Trait.ONE_DEVICE,
    "addbmm addmm addmv addr baddbmm bmm convolution convolution_overrideable dot mm mv vdot",
)
OP.trait(Trait.CONVERTS_OUT, "addr")
OP.trait(Trait.OVERLAPS, "addmv_ baddbmm_ bmm linear mm mv")


# --- matrix products -----------------------------------------------------------------------------
def _check_inner(a: TensorLike, b: TensorLike) -> None:
    if a.dtype is not b.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({a.shape[0]}x{a.shape[-1]} and {b.shape[-2]}x{b.shape[-1]})"
        )


@OP.formula("mm")
def matrix_product(a: TensorLike, b: TensorLike) -> TensorSpec:
    """(n, k) by (k, m) gives (n, m), contiguous. Raises RuntimeError for other ranks and sizes."""
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError("mm: both arguments must be matrices")
    _check_inner(a, b)
    return contiguous(a, (a.shape[0], b.shape[1]))


@OP.formula("bmm")
def _bmm(a: TensorLike, b: TensorLike) -> TensorSpec:
    if a.dim() != 3 or b.dim() != 3:
        raise RuntimeError("batch1 must be a 3D tensor")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise RuntimeError(
            f"Expected size for first two dimensions of batch2 tensor to be: [{a.shape[0]}, {a.shape[2]}] but got: "
            f"[{b.shape[0]}, {b.shape[1]}]."
        )
    if a.dtype is not b.dtype:
        raise RuntimeError(f"expected scalar type {a.dtype} but found {b.dtype}")
    return contiguous(a, (a.shape[0], a.shape[1], b.shape[2]))


def grouped_product(
    a: TensorLike, b: TensorLike, offsets: TensorLike | None, dtype: torch.dtype | None = None
) -> TensorSpec:
    """Products of groups, whose rows, columns or inner sizes end at `offsets` in what is a matrix, or are one matrix of
    a batch. A row of the result begins at a multiple of 16 bytes."""
    if a.dim() == 3:
        lead: Sizes = (a.shape[0], a.shape[1]) if b.dim() == 3 else (a.shape[1],)
    else:
        lead = (a.shape[0],) if b.dim() == 3 or offsets is None else (offsets.shape[0], a.shape[0])
    dtype = dtype or a.dtype
    apart = 16 // dtype.itemsize
    row = (b.shape[-1] + apart - 1) // apart * apart
    strides = (row, 1) if len(lead) == 1 else (lead[1] * row, row, 1)
    return strided(a, (*lead, b.shape[-1]), strides, dtype)


def refuse_groups(a: TensorLike, b: TensorLike, offsets: TensorLike | None) -> None:
    """What every product of groups refuses by sizes."""
    for name, operand in (("mat_a", a), ("mat_b", b)):
        refuse(operand.dim() not in (2, 3), f"{name} has to be 2 or 3d")
    flat = a.dim() == 2 or b.dim() == 2
    if a.dim() == 3 or b.dim() == 3:
        refuse(a.shape[-1] != b.shape[-2], "contraction dimension of mat_a and mat_b must match")
    refuse(
        (offsets is not None) != flat,
        "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d",
    )
    if offsets is not None:
        refuse(offsets.dim() != 1, "offs has to be 1D")
        refuse(offsets.dtype is not torch.int32, "Offsets have to be int32")
    batches = [t.shape[0] for t in (a, b) if t.dim() == 3]
    groups = batches[:1] if offsets is None else [offsets.shape[0]]
    refuse(any(size != groups[0] for size in batches), "matrix batch sizes have to match")


@OP.formula("_grouped_mm")
def _grouped_mm(
    a: TensorLike,
    b: TensorLike,
    offsets: TensorLike | None = None,
    bias: TensorLike | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:
    return grouped_product(a, b, offsets)


@OP.refuses("_grouped_mm")
def _refuse_grouped_mm(
    a: TensorLike,
    b: TensorLike,
    offsets: TensorLike | None = None,
    bias: TensorLike | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    refuse_groups(a, b, offsets)
    refuse(bias is not None, "Bias not supported yet")
    refuse(out_dtype not in (None, a.dtype), "Grouped gemm output dtype must match `mat_a` dtype")
    _refuse_rows_apart(a)
    _refuse_rows_apart(b)


def _refuse_rows_apart(x: TensorLike) -> None:
    """Matrices have one dense dimension, and the other's stride is a multiple of 16 bytes."""
    (rows, columns), (down, along) = x.shape[-2:], x.stride()[-2:]
    if down == 1 and along >= max(1, rows):
        apart = along
    elif along == 1 and down >= max(1, columns):
        apart = down
    else:
        raise RuntimeError(f"Invalid strides/sizes, got {list(x.stride())} for strides and {list(x.shape)} for sizes")
    refuse(apart % (16 // x.dtype.itemsize) != 0, "strides should be multiple of 16 bytes")


@OP.formula("convolution", "convolution_overrideable")
def _convolution(
    x: TensorLike, weight: TensorLike, bias: TensorLike | None,
    stride: Sequence[Size], padding: Sequence[Size], dilation: Sequence[Size],
    transposed: bool, output_padding: Sequence[Size], groups: int,
) -> TensorSpec:  # fmt: skip
    spatial = x.dim() - 2
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != expected:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected input{list(x.shape)} to "
            f"have {expected} "
            f"channels, but got {x.shape[1]} channels instead"
        )
    if x.dtype is not weight.dtype:
        raise RuntimeError(f"Input type ({x.dtype}) and weight type ({weight.dtype}) should be the same")
    s, p, d = per_dim(stride, spatial), per_dim(padding, spatial), per_dim(dilation, spatial)
    o = per_dim(output_padding, spatial)
    shape: list[Size] = [x.shape[0], channels]
    for i in range(spatial):
        size, kernel = x.shape[2 + i], weight.shape[2 + i]
        if transposed:
            shape.append((size - 1) * s[i] - 2 * p[i] + d[i] * (kernel - 1) + o[i] + 1)
        else:
            shape.append(pooled_size(size, kernel, s[i], p[i], d[i], False))
    out = tuple(shape)
    if any(size <= 0 for size in out[2:]):
        raise RuntimeError(f"Calculated output size: {list(out)}. Output size is too small")
    call = Convolution(s, p, d, transposed, o, groups)
    return strided(x, out, result_strides(x, weight, out, call))


@OP.refuses("convolution", "convolution_overrideable")
def _refuse_convolution(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    output_padding: Sequence[Size],
    groups: int,
) -> None:
    refuse(groups <= 0, "non-positive groups is not supported")
    refuse(
        x.dim() != weight.dim() or x.dim() < 3,
        lambda: f"Expected {weight.dim()}D input to convolution, but got input of size: {list(x.shape)}",
    )
    refuse(
        weight.shape[0] < groups or weight.shape[0] % groups != 0,
        lambda: (
            f"Given groups={groups}, expected weight to be divisible by {groups} and at least {groups} at dimension 0, "
            f"but got weight of size {list(weight.shape)} instead"
        ),
    )
    inner = weight.shape[1:] if transposed else weight.shape[2:]
    refuse(any(map(is_empty, inner)), lambda: f"non-empty weight tensor expected, but got: {list(weight.shape)}")
    refuse(any(extra < 0 for extra in output_padding), "negative output_padding is not supported")
    refuse(
        any(map(is_empty, x.shape[2:])) and not any(map(is_empty, x.shape[:2])),
        lambda: f"Only zero batch or zero channel inputs are supported, but got input shape: {list(x.shape)}",
    )
    if transposed and Fact.REFUSES_LONG_OUTPUT_PADDING.on(x.device):
        rank = x.dim() - 2
        extents = zip(per_dim(output_padding, rank), per_dim(stride, rank), per_dim(dilation, rank), strict=True)
        refuse(
            any(extra >= s and extra >= d for extra, s, d in extents),
            "output padding must be smaller than either stride or dilation",
        )
    refuse(any(d <= 0 for d in dilation), "dilation should be greater than zero")
    refuse(any(s <= 0 for s in stride), "non-positive stride is not supported")
    refuse(any(p < 0 for p in padding), "negative padding is not supported")
    channels = weight.shape[0] if not transposed else weight.shape[1] * groups
    refuse(
        bias is not None and (bias.dim() != 1 or bias.shape[0] != channels),
        lambda: (
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {channels} elements"
        ),
    )


@OP.formula("convolution_backward")
def _convolution_backward(
    grad: TensorLike, x: TensorLike, weight: TensorLike, bias_sizes: Sequence[Size] | None,
    stride: Sequence[Size], padding: Sequence[Size], dilation: Sequence[Size], transposed: bool,
    output_padding: Sequence[Size], groups: int, output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:  # fmt: skip
    spatial = x.dim() - 2
    s, p, d, o = (per_dim(values, spatial) for values in (stride, padding, dilation, output_padding))
    call, image = Convolution(s, p, d, transposed, o, groups), tuple(x.shape)
    made = _convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups).shape
    # Sizes with symbols are those of a convolution that was traced.
    if all(type(size) is int for size in (*made, *grad.shape)) and made != tuple(grad.shape):
        raise RuntimeError(f"The gradient of a convolution's result {list(made)} has the shape {list(grad.shape)}")
    return (
        strided(x, image, result_strides(x, weight, image, call)) if output_mask[0] else None,
        strided(weight, weight.shape, filter_gradient_strides(x, weight, call)) if output_mask[1] else None,
        contiguous(grad, (weight.shape[1] * groups if transposed else weight.shape[0],)) if output_mask[2] else None,
    )


def _scales(beta: Number, alpha: Number) -> dict[str, Number]:
    return {name: v for name, v in (("beta", beta), ("alpha", alpha)) if not (isinstance(v, (int, float)) and v == 1)}


def _expand_to(x: TensorLike, shape: Sizes) -> None:
    if len(x.shape) > len(shape) or broadcast(tuple(x.shape), shape) != shape:
        raise RuntimeError(f"The expanded size {list(shape)} does not fit the tensor of sizes {list(x.shape)}")


@OP.formula("addmm", "_addmm_activation")
def _addmm(
    c: TensorLike, a: TensorLike, b: TensorLike, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> TensorSpec:
    out = matrix_product(a, b)
    _expand_to(c, out.shape)
    return out


@OP.rule("addmm")
def _lower_addmm(b: Builder, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return b.emit(prims.addmm, bias, x, y, **_scales(beta, alpha))


@OP.formula("baddbmm")
def _baddbmm(c: TensorLike, a: TensorLike, b: TensorLike, *, beta: Number = 1, alpha: Number = 1) -> TensorSpec:
    out = _bmm(a, b)
    _expand_to(c, out.shape)
    return out


@OP.rule("baddbmm")
def _lower_baddbmm(b: Builder, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return b.emit(prims.baddbmm, bias, x, y, **_scales(beta, alpha))


@OP.rule("_addmm_activation")
def lower_addmm_activation(
    b: Builder, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> Value:
    """beta * bias + alpha * (x @ y), then relu or gelu: on CUDA gelu's tanh form, as eager has it."""
    out = _lower_addmm(b, bias, x, y, beta=beta, alpha=alpha)
    if not use_gelu:
        return out.maximum(0)
    return lower_gelu(b, out, approximate="tanh" if Fact.FUSED_GELU_IS_TANH.on(x.device) else "none")


@OP.formula("mv")
def _mv(a: TensorLike, v: TensorLike) -> TensorSpec:
    refuse(a.dim() != 2 or v.dim() != 1, lambda: f"matrix @ vector expected, got {a.dim()}, {v.dim()}")
    if a.shape[1] != v.shape[0]:
        raise RuntimeError(
            f"size mismatch, got input ({a.shape[0]}), mat ({a.shape[0]}x{a.shape[1]}), vec ({v.shape[0]})"
        )
    return contiguous(a, (a.shape[0],))


@OP.rule("mv")
def _lower_mv(b: Builder, x: Value, v: Value) -> Value:
    return b.emit(prims.mm, x, v.unsqueeze(1)).squeeze(1)


@OP.formula("linear")
def _linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> TensorSpec:
    """Of `linear.out`: without `out` it is a program of other operators."""
    refuse(weight.dim() > 2, lambda: f"t() expects a tensor with <= 2 dimensions, but self is {weight.dim()}D")
    if x.shape[-1] != weight.shape[-1]:
        raise RuntimeError(f"linear(): input of {x.shape[-1]} features and weight of {weight.shape[-1]}")
    out = contiguous(x, (*x.shape[:-1], *weight.shape[:-1]))
    if bias is not None:
        _expand_to(bias, out.shape)
    return out


@OP.formula("dot", "vdot")
def _dot(a: TensorLike, b: TensorLike) -> TensorSpec:
    if a.dim() != 1 or b.dim() != 1 or a.dtype is not b.dtype or a.shape[0] != b.shape[0]:
        raise RuntimeError(
            f"dot: expected two 1D tensors of one size and dtype, got {list(a.shape)} and {list(b.shape)}"
        )
    return contiguous(a, ())


@OP.rule("dot")
def _lower_dot(b: Builder, x: Value, y: Value) -> Value:
    return (x.compute() * y.compute()).sum((0,)).to(x.dtype)


@OP.rule("vdot")
def _lower_vdot(b: Builder, x: Value, y: Value) -> Value:
    return _lower_dot(b, x.map(prims.conj) if x.dtype.is_complex else x, y)


def _scaled(b: Builder, x: Value, factor: Number) -> Value:
    return x if isinstance(factor, (int, float)) and factor == 1 else b.binary(prims.mul, x, factor)


@OP.formula("addmv")
def _addmv(c: TensorLike, a: TensorLike, v: TensorLike, *, beta: Number = 1, alpha: Number = 1) -> TensorSpec:
    out = _mv(a, v)
    _expand_to(c, out.shape)
    return out


@OP.rule("addmv")
def _lower_addmv(b: Builder, bias: Value, x: Value, v: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    product = _scaled(b, _lower_mv(b, x, v).compute(), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return product.to(x.dtype)
    return (_scaled(b, bias.compute(), beta) + product).to(x.dtype)


@OP.formula("addr")
def _addr(c: TensorLike, a: TensorLike, b: TensorLike, *, beta: Number = 1, alpha: Number = 1) -> TensorSpec:
    for name, vector in (("vec1", a), ("vec2", b)):
        refuse(vector.dim() != 1, f"addr: Expected 1-D argument {name}, but got {vector.dim()}-D")
    _expand_to(c, (a.shape[0], b.shape[0]))
    column = TensorSpec((a.shape[0], 1), (*a.stride(), 1), a.dtype, a.device)
    dtype = torch.promote_types(c.dtype, torch.promote_types(a.dtype, b.dtype))
    return elementwise((c, column, b), dtype)


@OP.rule("addr")
def _lower_addr(b: Builder, x: Value, u: Value, v: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    dtype = torch.promote_types(x.dtype, torch.promote_types(u.dtype, v.dtype))
    compute = compute_dtype(dtype)
    outer = _scaled(b, u.to(compute).unsqueeze(1) * v.to(compute).unsqueeze(0), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return outer.to(dtype)
    return (_scaled(b, x.to(compute), beta) + outer).to(dtype)


@OP.formula("addbmm")
def _addbmm(c: TensorLike, a: TensorLike, b: TensorLike, *, beta: Number = 1, alpha: Number = 1) -> TensorSpec:
    out = _bmm(a, b)
    _expand_to(c, out.shape[1:])
    return contiguous(a, out.shape[1:])


@OP.rule("addbmm")
def _lower_addbmm(b: Builder, x: Value, u: Value, v: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    product = _scaled(b, b.emit(prims.bmm, u, v).compute().sum((0,)), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return product.to(u.dtype)
    return (_scaled(b, x.compute(), beta) + product).to(u.dtype)


def batched_matmul(b: Builder, x: Value, y: Value) -> Value:
    """Batches of matrices of one dtype; batch dims broadcast."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    n = product(batch)
    left = x.expand((*batch, *x.shape[-2:])).reshape((n, *x.shape[-2:]))
    right = y.expand((*batch, *y.shape[-2:])).reshape((n, *y.shape[-2:]))
    return b.emit(prims.bmm, left, right).reshape((*batch, x.shape[-2], y.shape[-1]))


def adjoint(x: Value) -> Value:
    """(..., n, m) as (..., m, n), conjugated where it is complex."""
    turned = x.transpose(x.rank - 2, x.rank - 1)
    return turned.map(prims.conj) if x.dtype.is_complex else turned


@OP.rule("_trilinear")
def _lower_trilinear(
    b: Builder,
    x: Value,
    y: Value,
    z: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """x * y * z, each with dims of size 1 inserted, summed over `sumdim`."""
    operands = []
    for v, dims in ((x, expand1), (y, expand2), (z, expand3)):
        rank = v.rank + len(dims)
        operands.append(v.compute().unsqueeze(*(wrap_dim(d, rank) for d in dims)))
    product = operands[0] * operands[1] * operands[2]
    return product.sum(tuple(sorted(product.dim(d) for d in sumdim))).to(x.dtype)


@OP.rule("linear_backward")
def _lower_linear_backward(
    b: Builder, x: Value, grad: Value, weight: Value, output_mask: Sequence[bool]
) -> tuple[Value | None, ...]:
    rows = product(x.shape[:-1])
    g, flat = grad.reshape((rows, grad.shape[-1])), x.reshape((rows, x.shape[-1]))
    return (
        b.emit(prims.mm, g, weight).reshape(x.shape) if output_mask[0] else None,
        b.emit(prims.mm, g.transpose(0, 1), flat) if output_mask[1] else None,
        g.compute().sum((0,)).to(g.dtype) if output_mask[2] else None,
    )


def _summed_to(x: Value, shape: Sequence[Size]) -> Value:
    lead = x.rank - len(shape)
    x = x.sum(tuple(range(lead)))
    dims = tuple(d for d, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return x.sum(dims, True)


@OP.rule("matmul_backward")
def _lower_matmul_backward(
    b: Builder, grad: Value, x: Value, y: Value, mask: Sequence[bool]
) -> tuple[Value | None, ...]:
    if x.rank < 2 or y.rank < 2:
        raise NotImplementedError("matmul_backward of vectors: differentiate matmul instead")
    gx = _summed_to(batched_matmul(b, grad, adjoint(y)), x.shape) if mask[0] else None
    gy = _summed_to(batched_matmul(b, adjoint(x), grad), y.shape) if mask[1] else None
    return gx, gy


# --- products with another result dtype ------------------------------------------------------------
@OP.rule("mm.dtype?")
def _lower_mm_dtype(b: Builder, x: Value, y: Value, out_dtype: torch.dtype) -> Value:
    return b.emit(prims.mm, x.to(out_dtype), y.to(out_dtype))


@OP.rule("bmm.dtype?")
def _lower_bmm_dtype(b: Builder, x: Value, y: Value, out_dtype: torch.dtype) -> Value:
    return b.emit(prims.bmm, x.to(out_dtype), y.to(out_dtype))


@OP.rule("addmm.dtype?")
def _lower_addmm_dtype(
    b: Builder, bias: Value, x: Value, y: Value, out_dtype: torch.dtype, *, beta: Number = 1, alpha: Number = 1
) -> Value:
    return b.emit(prims.addmm, *(v.to(out_dtype) for v in (bias, x, y)), beta=beta, alpha=alpha)


@OP.rule("baddbmm.dtype?")
def _lower_baddbmm_dtype(
    b: Builder, bias: Value, x: Value, y: Value, out_dtype: torch.dtype, *, beta: Number = 1, alpha: Number = 1
) -> Value:
    return b.emit(prims.baddbmm, *(v.to(out_dtype) for v in (bias, x, y)), beta=beta, alpha=alpha)


def _plain_convolution(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: PerDim,
    padding: PerDim,
    dilation: PerDim,
    *,
    groups: Size = 1,
    extra: PerDim | None = None,
) -> Value:
    rank = weight.rank - 2
    each = [
        tuple(v) if isinstance(v, (tuple, list)) else (v,) * rank
        for v in (stride, padding, dilation, 0 if extra is None else extra)
    ]
    single = x.rank == rank + 1
    out = b.emit(
        prims.convolution, x.unsqueeze(0) if single else x, weight, bias, *each[:3], extra is not None, each[3], groups
    )
    return out.squeeze(0) if single else out


@OP.rule("_conv_depthwise2d", "conv_depthwise3d")
def _lower_conv_depthwise(
    b: Builder,
    x: Value,
    weight: Value,
    kernel_size: PerDim,
    bias: Value | None,
    stride: PerDim,
    padding: PerDim,
    dilation: PerDim,
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, dilation, groups=x.shape[1])


@OP.rule("_slow_conv2d_forward", "slow_conv3d_forward")
def _lower_slow_conv(
    b: Builder, x: Value, weight: Value, kernel_size: PerDim, bias: Value | None, stride: PerDim, padding: PerDim
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, (1,) * (weight.rank - 2))


@OP.rule("slow_conv_dilated2d", "slow_conv_dilated3d")
def _lower_slow_conv_dilated(
    b: Builder,
    x: Value,
    weight: Value,
    kernel_size: PerDim,
    bias: Value | None = None,
    stride: PerDim = 1,
    padding: PerDim = 0,
    dilation: PerDim = 1,
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, dilation)


@OP.rule("slow_conv_transpose2d", "slow_conv_transpose3d")
def _lower_slow_conv_transpose(
    b: Builder,
    x: Value,
    weight: Value,
    kernel_size: PerDim,
    bias: Value | None = None,
    stride: PerDim = 1,
    padding: PerDim = 0,
    output_padding: PerDim = 0,
    dilation: PerDim = 1,
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, dilation, extra=output_padding)


@OP.rule("_convolution")
def _lower_convolution(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: PerDim,
    padding: PerDim,
    dilation: PerDim,
    transposed: bool,
    output_padding: PerDim,
    groups: int,
    *flags: bool,
) -> Value:
    return _plain_convolution(
        b, x, weight, bias, stride, padding, dilation, groups=groups, extra=output_padding if transposed else None
    )


# --- older names and helpers -----------------------------------------------------------------------
@OP.formula("conv_tbc")
def _conv_tbc(x: TensorLike, weight: TensorLike, bias: TensorLike, pad: int = 0) -> TensorSpec:
    refuse(x.dim() != 3, "Input must have 3 dims: time, batch, in_channel")
    refuse(weight.dim() != 3, "Weight tensor must have 3 dims: kernel_width, in_channels, out_channels.")
    refuse(bias.dim() != 1, "Bias must be 1-D")
    refuse(x.shape[2] != weight.shape[1], "Input dim 2 (input channels) is not == dim 1 in the weight tensor")
    refuse(bias.shape[0] != weight.shape[2], "Bias size must equal dim 2 in the weight tensor (output channels).")
    return contiguous(x, (x.shape[0] + 2 * pad - weight.shape[0] + 1, x.shape[1], weight.shape[2]))


@OP.rule("conv_tbc")
def _lower_conv_tbc(b: Builder, x: Value, weight: Value, bias: Value, pad: int = 0) -> Value:
    """Convolution over (time, batch, channels) with a (width, in, out) weight."""
    out = b.emit(
        prims.convolution, x.permute((1, 2, 0)), weight.permute((2, 1, 0)), bias, (1,), (pad,), (1,), False, (0,), 1
    )
    return out.permute((2, 0, 1))


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("addbmm_")
def _addbmm_in_place(c: TensorLike, a: TensorLike, b: TensorLike, *, beta: Number = 1, alpha: Number = 1) -> TensorLike:
    if tuple(c.shape) != tuple(_addbmm(c, a, b).shape):
        raise NoFormula("aten::addbmm_", reason="it gives the tensor that it writes to another shape")
    return c


@OP.formula("mkldnn_rnn_layer")
def _mkldnn_rnn_layer(
    x: TensorLike,
    weight0: TensorLike,
    weight1: TensorLike,
    weight2: TensorLike,
    weight3: TensorLike,
    hx: TensorLike,
    cx: TensorLike,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: Size,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[TensorSpec | None, ...]:
    """One direction of one layer, where no gradient is needed: then there is no workspace."""
    if train or torch.is_grad_enabled():
        raise NoFormula("aten::mkldnn_rnn_layer", reason="oneDNN alone knows the size of a workspace for gradients")
    return contiguous(x, (*x.shape[:-1], hidden_size)), like(hx), like(cx), None


# --- samples ---------------------------------------------------------------------------------------

_PLANE = ((1, 1), (1, 0), (1, 2))
_SPACE = ((1, 2, 1), (0, 1, 0), (1, 1, 1))
OP.samples(
    "mm",
    call(reals(3, 5), reals(5, 4)),
    call(after(torch.t, reals(5, 3)), after(torch.t, reals(4, 5))),
    call(reals(3, 0), reals(0, 2)),
)
OP.samples("mm.dtype", call(reals(3, 5), reals(5, 4), torch.float32))
OP.samples("bmm", call(reals(2, 3, 5), reals(2, 5, 4)))
OP.samples("bmm.dtype", call(reals(2, 3, 5), reals(2, 5, 4), torch.float32))
_ADDMM = (
    call(reals(4), reals(3, 5), reals(5, 4)),
    call(reals(3, 4), reals(3, 5), reals(5, 4), beta=0.5, alpha=2.0),
)
OP.samples("addmm", *_ADDMM)
OP.samples("_addmm_activation", *_ADDMM, call(reals(4), reals(3, 5), reals(5, 4), use_gelu=True))
OP.samples("addmm.dtype", call(reals(4), reals(3, 5), reals(5, 4), torch.float32))
OP.samples("addbmm addbmm_", call(reals(3, 4), reals(2, 3, 5), reals(2, 5, 4), alpha=2))
OP.samples("baddbmm", call(reals(2, 1, 4), reals(2, 3, 5), reals(2, 5, 4), beta=0))
OP.samples("baddbmm.dtype", call(reals(2, 3, 4), reals(2, 3, 5), reals(2, 5, 4), torch.float32))
_ENDS = listed(2, 2, 7, dtype=torch.int32)
_ROWS = reals(7, 8, dtype=torch.float32)
OP.samples(
    "_grouped_mm",
    call(_ROWS, reals(3, 8, 16, dtype=torch.float32), _ENDS),
    call(_ROWS, after(torch.adjoint, reals(3, 5, 8, dtype=torch.float32)), _ENDS),
    call(after(torch.t, _ROWS), reals(7, 16, dtype=torch.float32), _ENDS),
    call(reals(3, 4, 8, dtype=torch.float32), after(torch.t, _ROWS), _ENDS),
    call(reals(3, 4, 8, dtype=torch.bfloat16), reals(3, 8, 16, dtype=torch.bfloat16)),
)
OP.samples("addmv", call(reals(3), reals(3, 5), reals(5)))
OP.samples("addr", call(reals(3, 4), reals(3), reals(4)))
OP.samples("mv", call(reals(3, 5), reals(5)))
OP.samples("dot vdot", call(reals(5), reals(5)))
OP.samples("matmul_backward", call(reals(2, 3, 4), reals(2, 3, 5), reals(5, 4), [True, True]))
OP.samples("linear_backward", call(reals(3, 5), reals(3, 4), reals(4, 5), [True, True, True]))
OP.samples("_trilinear", call(reals(3, 4), reals(3, 4), reals(4, 5), [2], [2], [0], [1]))
OP.samples(
    "convolution convolution_overrideable",
    call(reals(2, 4, 7, 8), reals(6, 4, 3, 2), reals(6), *_PLANE, False, (0, 0), 1),
)
OP.samples(
    "_convolution", call(reals(2, 4, 9), reals(6, 4, 3), None, [2], [1], [1], False, [0], 1, False, False, True, True)
)
OP.samples(
    "convolution_backward",
    call(reals(2, 6, 7, 6), reals(2, 4, 7, 8), reals(6, 4, 3, 2), [6], *_PLANE, False, (0, 0), 1, [True, True, True]),
)
OP.samples("_conv_depthwise2d", call(reals(2, 4, 7, 8), reals(4, 1, 3, 2), (3, 2), None, *_PLANE))
OP.samples("conv_depthwise3d", call(reals(1, 2, 4, 5, 4), reals(2, 1, 2, 2, 2), (2, 2, 2), None, *_SPACE))
OP.samples("conv_tbc", call(reals(7, 2, 4), reals(3, 4, 5), reals(5), 1))
OP.samples("_slow_conv2d_forward", call(reals(2, 4, 7, 8), reals(6, 4, 3, 2), (3, 2), reals(6), (1, 1), (1, 0)))
OP.samples("slow_conv3d_forward", call(reals(1, 2, 4, 5, 4), reals(3, 2, 2, 2, 2), (2, 2, 2), None, *_SPACE[:2]))
OP.samples("slow_conv_dilated2d", call(reals(2, 4, 7, 8), reals(6, 4, 3, 2), (3, 2), None, *_PLANE))
OP.samples("slow_conv_dilated3d", call(reals(1, 2, 4, 5, 4), reals(3, 2, 2, 2, 2), (2, 2, 2), None, *_SPACE))
OP.samples(
    "slow_conv_transpose2d", call(reals(2, 4, 5, 5), reals(4, 6, 3, 3), (3, 3), reals(6), (2, 2), (1, 1), (1, 0))
)
OP.samples("slow_conv_transpose3d", call(reals(1, 2, 3, 3, 3), reals(2, 3, 2, 2, 2), (2, 2, 2), None, (2, 2, 2)))
OP.samples(
    "mkldnn_rnn_layer",
    call(
        reals(3, 2, 4),
        reals(20, 4),
        reals(20, 5),
        reals(20),
        reals(20),
        reals(1, 2, 5),
        reals(1, 2, 5),
        False,
        [],
        2,
        5,
        1,
        True,
        False,
        False,
        False,
    ),
)
