"""Pooling, resampling, matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value, same_size
from primtorch.decompose.table import RuleTable
from primtorch.prims import Prim
from primtorch.promotion import compute_dtype

aten = torch.ops.aten
RULES = RuleTable()


def _each(values: Any, rank: int, default: Sequence[Any] | None = None) -> tuple[Any, ...]:
    """One entry a spatial dimension from eager's int, one-element list or empty list."""
    if isinstance(values, (int, torch.SymInt)):
        return (values,) * rank
    if not values and default is not None:
        return tuple(default)
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def _batched(x: Value, rank: int) -> tuple[Value, bool]:
    return (x, False) if x.rank == rank + 2 else (x.unsqueeze(0), True)


# --- pooling -------------------------------------------------------------------------------------
def _max_pool(rank: int) -> Any:
    def rule(
        b: Builder,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        kernel = _each(kernel, rank)
        image, single = _batched(x, rank)
        values, indices = b.emit(
            prims.max_pool,
            image,
            kernel,
            _each(stride, rank, kernel),
            _each(padding, rank),
            _each(dilation, rank),
            ceil_mode,
        )
        return (values.squeeze(0), indices.squeeze(0)) if single else (values, indices)

    return rule


def _max_pool_backward(rank: int) -> Any:
    def rule(
        b: Builder,
        grad: Value,
        x: Value,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Value,
    ) -> Value:
        lead = x.shape[: x.rank - rank]
        count: Any = 1
        for size in x.shape[x.rank - rank :]:
            count = count * size
        windows: Any = 1
        for size in grad.shape[x.rank - rank :]:
            windows = windows * size
        compute = compute_dtype(grad.dtype)
        zeros = b.full((*lead, count), 0, compute, grad.device)
        out = b.emit(
            prims.scatter_add,
            zeros,
            len(lead),
            indices.reshape((*lead, windows)),
            grad.to(compute).reshape((*lead, windows)),
        )
        return out.reshape(x.shape).to(grad.dtype)  # type: ignore[no-any-return]

    return rule


RULES.add(aten.max_pool2d_with_indices.default, _max_pool(2))
RULES.add(aten.max_pool3d_with_indices.default, _max_pool(3))
RULES.add(aten.max_pool2d_with_indices_backward.default, _max_pool_backward(2))
RULES.add(aten.max_pool3d_with_indices_backward.default, _max_pool_backward(3))


def _avg_pool(rank: int) -> Any:
    def rule(
        b: Builder,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        kernel = _each(kernel, rank)
        image, single = _batched(x, rank)
        out = b.emit(
            prims.avg_pool,
            image.compute(),
            kernel,
            _each(stride, rank, kernel),
            _each(padding, rank),
            ceil_mode,
            count_include_pad,
            divisor_override,
        ).to(x.dtype)
        return out.squeeze(0) if single else out  # type: ignore[no-any-return]

    return rule


def _window_counts(
    b: Builder, size: Any, out: Any, kernel: Any, stride: Any, padding: Any, include_pad: bool, device: torch.device
) -> Value:
    """(out,) number of elements that each window along one dimension counts."""
    start = b.iota(out, device, start=-padding, step=stride)
    stop = (start + kernel).minimum(size + padding)
    if not include_pad:
        start, stop = start.maximum(0), stop.minimum(size)
    return stop - start  # type: ignore[no-any-return]


def _spread(b: Builder, grad: Value, dim: int, size: Any, kernel: Any, stride: Any, padding: Any) -> Value:
    """Sum over the windows along `dim` that cover each input position: dilate by the stride, then add k shifts."""
    out = grad.shape[dim]
    length = out * stride
    if not same_size(stride, 1):
        spaced = grad.unsqueeze(dim + 1)
        low = (0,) * spaced.rank
        high = tuple(stride - 1 if d == dim + 1 else 0 for d in range(spaced.rank))
        spaced = b.emit(prims.pad, spaced, low, high, b.number(0, grad))
        grad = spaced.reshape((*grad.shape[:dim], length, *grad.shape[dim + 1 :]))
    before = kernel - 1
    after = size + padding - length  # position i reads padded[i + padding : i + padding + kernel]
    low = tuple(before if d == dim else 0 for d in range(grad.rank))
    high = tuple(torch.sym_max(after, 0) if d == dim else 0 for d in range(grad.rank))
    padded = b.emit(prims.pad, grad, low, high, b.number(0, grad))
    total: Value | None = None
    for k in range(kernel):
        part = padded.slice(dim, padding + k, padding + k + size)
        total = part if total is None else total + part
    assert total is not None
    return total


def _avg_pool_backward(rank: int) -> Any:
    def rule(
        b: Builder,
        grad: Value,
        x: Value,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        kernel = _each(kernel, rank)
        stride, padding = _each(stride, rank, kernel), _each(padding, rank)
        first = x.rank - rank
        g = grad.compute()
        if divisor_override is not None:
            g = g / divisor_override
        else:
            for d in range(rank):
                counts = _window_counts(
                    b,
                    x.shape[first + d],
                    grad.shape[first + d],
                    kernel[d],
                    stride[d],
                    padding[d],
                    count_include_pad,
                    x.device,
                )
                g = g / counts.to(g.dtype).unsqueeze(*range(1, rank - d))
        for d in range(rank):
            g = _spread(b, g, first + d, x.shape[first + d], kernel[d], stride[d], padding[d])
        return g.to(grad.dtype)

    return rule


RULES.add(aten.avg_pool1d.default, _avg_pool(1))
RULES.add(aten.avg_pool2d.default, _avg_pool(2))
RULES.add(aten.avg_pool3d.default, _avg_pool(3))
RULES.add(aten.avg_pool2d_backward.default, _avg_pool_backward(2))
RULES.add(aten.avg_pool3d_backward.default, _avg_pool_backward(3))


def _averaging(b: Builder, size: Any, out: Any, like: Value) -> Value:
    """(out, size) matrix whose row i averages the window [floor(i*size/out), ceil((i+1)*size/out))."""
    i = b.iota(out, like.device)
    start, stop = (i * size) // out, ((i + 1) * size + (out - 1)) // out
    j = b.iota(size, like.device).unsqueeze(0)
    inside = (j >= start.unsqueeze(1)) & (j < stop.unsqueeze(1))
    return inside.to(like.dtype) / (stop - start).to(like.dtype).unsqueeze(1)  # type: ignore[no-any-return]


def times(b: Builder, x: Value, dim: int, matrix: Value) -> Value:
    """Multiply dimension `dim` (size n) by a matrix (m, n)."""
    order = [d for d in range(x.rank) if d != dim] + [dim]
    moved = x.permute(order)
    rows: Any = 1
    for size in moved.shape[:-1]:
        rows = rows * size
    flat = b.emit(prims.mm, moved.reshape((rows, x.shape[dim])), matrix.transpose(0, 1))
    out = flat.reshape((*moved.shape[:-1], matrix.shape[0]))
    return out.permute([order.index(d) for d in range(x.rank)])  # type: ignore[no-any-return]


def _adaptive_avg_pool(rank: int) -> Any:
    def rule(b: Builder, x: Value, output_size: Any) -> Value:
        first = x.rank - rank
        sizes = tuple(x.shape[first + d] if s is None else s for d, s in enumerate(_each(output_size, rank)))
        wide = x.compute()
        if all(isinstance(s, int) and s == 1 for s in sizes):
            return wide.mean(tuple(range(first, x.rank)), True).to(x.dtype)
        for d in range(rank):
            if not same_size(sizes[d], x.shape[first + d]):
                wide = times(b, wide, first + d, _averaging(b, x.shape[first + d], sizes[d], wide))
        return wide.to(x.dtype)

    return rule


def _adaptive_avg_pool_backward(rank: int) -> Any:
    def rule(b: Builder, grad: Value, x: Value) -> Value:
        first = x.rank - rank
        g = grad.compute()
        if all(isinstance(grad.shape[first + d], int) and grad.shape[first + d] == 1 for d in range(rank)):
            count: Any = 1
            for size in x.shape[first:]:
                count = count * size
            return (g / count).expand(x.shape).to(grad.dtype)  # type: ignore[no-any-return]
        for d in range(rank):
            if not same_size(grad.shape[first + d], x.shape[first + d]):
                matrix = _averaging(b, x.shape[first + d], grad.shape[first + d], g)
                g = times(b, g, first + d, matrix.transpose(0, 1))
        return g.to(grad.dtype)

    return rule


RULES.add(aten._adaptive_avg_pool2d.default, _adaptive_avg_pool(2))
RULES.add(aten._adaptive_avg_pool3d.default, _adaptive_avg_pool(3))
RULES.add(aten._adaptive_avg_pool2d_backward.default, _adaptive_avg_pool_backward(2))
RULES.add(aten._adaptive_avg_pool3d_backward.default, _adaptive_avg_pool_backward(3))


# --- resampling ----------------------------------------------------------------------------------
def _nearest_index(b: Builder, size: Any, out: Any, scale: float | None, exact: bool, device: torch.device) -> Value:
    ratio = 1 / scale if scale is not None and scale > 0 else size / out
    position = b.iota(out, device).to(torch.float32)
    place = (position + 0.5) * ratio if exact else position * ratio
    return place.map(prims.floor).to(torch.int64).minimum(size - 1)


def _nearest_indices(
    b: Builder, spatial: Sequence[Any], out: Sequence[Any], scales: Sequence[Any], exact: bool, device: torch.device
) -> list[Value]:
    rank = len(out)
    return [
        _nearest_index(b, spatial[d], out[d], scales[d], exact, device).unsqueeze(*range(1, rank - d))
        for d in range(rank)
    ]


def _nearest(rank: int, exact: bool) -> Any:
    def rule(b: Builder, x: Value, output_size: Sequence[Any], *scales: Any) -> Value:
        indices = _nearest_indices(b, x.shape[2:], output_size, scales or (None,) * rank, exact, x.device)
        return b.emit(prims.index, x, (None, None, *indices), False)  # type: ignore[no-any-return]

    return rule


def _nearest_backward(rank: int, exact: bool) -> Any:
    def rule(b: Builder, grad: Value, output_size: Sequence[Any], input_size: Sequence[Any], *scales: Any) -> Value:
        indices = _nearest_indices(b, input_size[2:], output_size, scales or (None,) * rank, exact, grad.device)
        g = grad.compute()
        zeros = b.full(input_size, 0, g.dtype, g.device)
        return b.emit(prims.index_put, zeros, (None, None, *indices), g, True, False).to(grad.dtype)  # type: ignore[no-any-return]

    return rule


for _rank in (1, 2, 3):
    for _name, _exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
        RULES.add(getattr(aten, f"{_name}{_rank}d").default, _nearest(_rank, _exact))
        RULES.add(getattr(aten, f"{_name}{_rank}d_backward").default, _nearest_backward(_rank, _exact))


def _linear_weights(
    b: Builder, size: Any, out: Any, align_corners: bool, scale: float | None, like: Value
) -> tuple[Value, Value, Value]:
    """For each output position the two source positions and the weight of the second."""
    position = b.iota(out, like.device).to(like.dtype)
    if align_corners:
        place = position * ((size - 1) / (out - 1) if not same_size(out, 1) else 0.0)
    else:
        ratio = 1 / scale if scale is not None and scale > 0 else size / out
        place = ((position + 0.5) * ratio - 0.5).maximum(0.0)
    low = place.map(prims.floor).to(torch.int64).minimum(size - 1)
    high = (low + 1).minimum(size - 1)
    return low, high, (place - low.to(like.dtype)).maximum(0.0).minimum(1.0)


def refuse_bytes(x: Value) -> None:
    if not x.dtype.is_floating_point:
        raise NotImplementedError(
            f"interpolating an image of {x.dtype}: eager computes these in fixed point with a "
            "rounding of its own; convert the image to float32 first"
        )


def _linear(rank: int) -> Any:
    def rule(b: Builder, x: Value, output_size: Sequence[Any], align_corners: bool, *scales: Any) -> Value:
        refuse_bytes(x)
        out = x.compute()
        for d in range(rank):
            dim = 2 + d
            low, high, weight = _linear_weights(
                b, x.shape[dim], output_size[d], align_corners, scales[d] if scales else None, out
            )
            lead = (None,) * dim
            weight = weight.unsqueeze(*range(1, out.rank - dim)) if out.rank - dim > 1 else weight
            first = b.emit(prims.index, out, (*lead, low), False)
            second = b.emit(prims.index, out, (*lead, high), False)
            out = first * (1.0 - weight) + second * weight
        return out.to(x.dtype)

    return rule


def _linear_backward(rank: int) -> Any:
    def rule(
        b: Builder,
        grad: Value,
        output_size: Sequence[Any],
        input_size: Sequence[Any],
        align_corners: bool,
        *scales: Any,
    ) -> Value:
        g = grad.compute()
        for d in reversed(range(rank)):
            dim = 2 + d
            low, high, weight = _linear_weights(
                b, input_size[dim], output_size[d], align_corners, scales[d] if scales else None, g
            )
            lead = (None,) * dim
            weight = weight.unsqueeze(*range(1, g.rank - dim)) if g.rank - dim > 1 else weight
            shape = (*g.shape[:dim], input_size[dim], *g.shape[dim + 1 :])
            zeros = b.full(shape, 0, g.dtype, g.device)
            out = b.emit(prims.index_put, zeros, (*lead, low), g * (1.0 - weight), True, False)
            g = b.emit(prims.index_put, out, (*lead, high), g * weight, True, False)
        return g.to(grad.dtype)

    return rule


for _rank, _name in ((1, "upsample_linear1d"), (2, "upsample_bilinear2d"), (3, "upsample_trilinear3d")):
    RULES.add(getattr(aten, _name).default, _linear(_rank))
    RULES.add(getattr(aten, f"{_name}_backward").default, _linear_backward(_rank))


# --- matrix products -----------------------------------------------------------------------------
def _whole(prim: Prim) -> Any:
    return lambda b, *args, **kwargs: b.emit(prim, *args, **kwargs)


RULES.add(aten.mm.default, _whole(prims.mm))
RULES.add(aten.bmm.default, _whole(prims.bmm))
RULES.add(aten.convolution.default, _whole(prims.convolution))
RULES.add(aten.convolution_backward.default, _whole(prims.convolution_backward))


@RULES(aten.addmm.default)
def _addmm(b: Builder, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return b.emit(prims.addmm, bias, x, y, **_scales(beta, alpha))  # type: ignore[no-any-return]


@RULES(aten.baddbmm.default)
def _baddbmm(b: Builder, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return b.emit(prims.baddbmm, bias, x, y, **_scales(beta, alpha))  # type: ignore[no-any-return]


def _scales(beta: Any, alpha: Any) -> dict[str, Any]:
    return {name: v for name, v in (("beta", beta), ("alpha", alpha)) if not (isinstance(v, (int, float)) and v == 1)}


@RULES(aten._addmm_activation.default)
def _addmm_activation(
    b: Builder, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Value:
    out = _addmm(b, bias, x, y, beta=beta, alpha=alpha)
    return _gelu_tanh(out) if use_gelu else out.maximum(0)


def _gelu_tanh(x: Value) -> Value:
    t = x.compute()
    inner = (t + t * t * t * 0.044715) * 0.7978845608028654
    return (t * 0.5 * (inner.map(prims.tanh) + 1.0)).to(x.dtype)


@RULES(aten.mv.default)
def _mv(b: Builder, x: Value, v: Value) -> Value:
    return b.emit(prims.mm, x, v.unsqueeze(1)).squeeze(1)  # type: ignore[no-any-return]


@RULES(aten.dot.default)
def _dot(b: Builder, x: Value, y: Value) -> Value:
    return (x.compute() * y.compute()).sum((0,)).to(x.dtype)


@RULES(aten.vdot.default)
def _vdot(b: Builder, x: Value, y: Value) -> Value:
    return _dot(b, x.map(prims.conj) if x.dtype.is_complex else x, y)  # type: ignore[no-any-return]


@RULES(aten.addmv.default)
def _addmv(b: Builder, bias: Value, x: Value, v: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    product = _scaled(b, _mv(b, x, v).compute(), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return product.to(x.dtype)
    return (_scaled(b, bias.compute(), beta) + product).to(x.dtype)


def _scaled(b: Builder, x: Value, factor: Any) -> Value:
    return x if isinstance(factor, (int, float)) and factor == 1 else b.binary(prims.mul, x, factor)


@RULES(aten.addr.default)
def _addr(b: Builder, x: Value, u: Value, v: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    dtype = torch.promote_types(x.dtype, torch.promote_types(u.dtype, v.dtype))
    compute = compute_dtype(dtype)
    outer = _scaled(b, u.to(compute).unsqueeze(1) * v.to(compute).unsqueeze(0), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return outer.to(dtype)
    return (_scaled(b, x.to(compute), beta) + outer).to(dtype)


@RULES(aten.addbmm.default)
def _addbmm(b: Builder, x: Value, u: Value, v: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    product = _scaled(b, b.emit(prims.bmm, u, v).compute().sum((0,)), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return product.to(u.dtype)
    return (_scaled(b, x.compute(), beta) + product).to(u.dtype)
