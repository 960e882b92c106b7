"""Embeddings: rows of a table, and bags of them."""

from __future__ import annotations

import torch

from primtorch import prims
from primtorch.arguments import TensorLike
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Trait
from primtorch.operators.build import contiguous
from primtorch.operators.reduction import vector_norm
from primtorch.operators.refusals import is_empty, refuse
from primtorch.promotion import compute_dtype
from primtorch.samples import call, integers, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("embedding")
OP.trait(Trait.ONE_DEVICE, "embedding")


@OP.formula("embedding")
def _embedding(
    weight: TensorLike,
    indices: TensorLike,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorSpec:
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    return contiguous(weight, (*indices.shape, weight.shape[1]))


@OP.refuses("embedding")
def _refuse_embedding(weight: TensorLike, indices: TensorLike, *args: object) -> None:
    refuse(weight.dim() != 2, "'weight' must be 2-D")
    given = not any(map(is_empty, indices.shape))
    refuse(given and is_empty(weight.shape[0]), "index_select(): self indexing axis dim should be positive")
    refuse(
        indices.dtype not in (torch.int64, torch.int32),
        lambda: f"Expected tensor for argument #1 'indices' to be Long or Int; but got {indices.dtype}",
    )


@OP.rule("embedding")
def _lower_embedding(
    b: Builder,
    weight: Value,
    indices: Value,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return b.emit(prims.index, weight, (indices.to(torch.int64),), False)


@OP.formula("embedding_dense_backward")
def _embedding_backward(
    grad: TensorLike, indices: TensorLike, num_weights: Size, padding_idx: Size, scale_grad_by_freq: bool
) -> TensorSpec:
    return contiguous(grad, (num_weights, grad.shape[-1]))


@OP.rule("embedding_dense_backward")
def _lower_embedding_dense_backward(
    b: Builder, grad: Value, indices: Value, num_weights: Size, padding_idx: Size, scale_grad_by_freq: bool
) -> Value:
    """Sum the gradient's rows into the rows that they were read from; reduced precision is summed in float32."""
    indices = indices.to(torch.int64)
    g = grad.to(compute_dtype(grad.dtype))
    if scale_grad_by_freq:
        ones = b.full(indices.shape, 1, torch.int64, grad.device)
        counts = b.emit(
            prims.index_put, b.full((num_weights,), 0, torch.int64, grad.device), (indices,), ones, True, False
        )
        g = g / b.emit(prims.index, counts, (indices,), False).to(g.dtype).unsqueeze(indices.rank)
    if not isinstance(padding_idx, int) or padding_idx >= 0:
        g = b.where(indices.eq(padding_idx).unsqueeze(indices.rank), 0.0, g)
    table = b.full((num_weights, grad.shape[-1]), 0, g.dtype, grad.device)
    return b.emit(prims.index_put, table, (indices,), g, True, False).to(grad.dtype)


@OP.refuses("embedding_renorm")
def _refuse_embedding_renorm(weight: TensorLike, indices: TensorLike, max_norm: float, norm_type: float) -> None:
    refuse(weight.dim() != 2, lambda: f"Expected 2-dimensional tensor, but got {weight.dim()}-dimensional tensor")
    given = not any(map(is_empty, indices.shape))
    refuse(given and is_empty(weight.shape[0]), "select(): index out of range in an empty tensor", IndexError)


@OP.rule("embedding_renorm?")
def _lower_embedding_renorm(b: Builder, weight: Value, indices: Value, max_norm: float, norm_type: float) -> Value:
    """The rows that are read, scaled down to `max_norm` where they are longer."""
    rows = b.full((weight.shape[0],), False, torch.bool, weight.device)
    flat = indices.to(torch.int64).reshape((indices.numel(),))
    marks = b.full((indices.numel(),), True, torch.bool, weight.device)
    read = b.emit(prims.index_put, rows, (flat,), marks, False, False)
    wide = weight.compute()
    norms = vector_norm(wide, float(norm_type), (1,), True)
    scaled = (wide * (float(max_norm) / (norms + 1e-7))).to(weight.dtype)
    return b.where(read.unsqueeze(1) & (norms > float(max_norm)), scaled, weight)


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("_embedding_bag_backward")
def _embedding_bag_backward(
    grad: TensorLike,
    indices: TensorLike,
    offsets: TensorLike,
    offset2bag: TensorLike,
    bag_size: TensorLike,
    maximum_indices: TensorLike,
    num_weights: Size,
    *args: object,
) -> TensorSpec:
    return contiguous(grad, (num_weights, grad.shape[1]))


@OP.formula("_embedding_bag_dense_backward")
def _embedding_bag_dense_backward(
    grad: TensorLike,
    indices: TensorLike,
    offset2bag: TensorLike,
    bag_size: TensorLike,
    maximum_indices: TensorLike,
    num_weights: Size,
    *args: object,
) -> TensorSpec:
    return contiguous(grad, (num_weights, grad.shape[1]))


@OP.formula("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: TensorLike,
    indices: TensorLike,
    offsets: TensorLike,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: TensorLike | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[TensorSpec, ...]:
    """The bags, of which bag each index is, the bags' sizes, and of a maximum where it was found."""
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    here = Fact.KEEPS_WHAT_BAGS_NEED.on(weight.device)
    fast_sum = mode == 0 and padding_idx < 0 and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return (
        contiguous(weight, (bags, weight.shape[1])),
        contiguous(indices, (0,) if here and fast_sum and weight.stride()[1] == 1 else (indices.shape[0],)),
        contiguous(indices, (bags,)),
        contiguous(indices, (bags, weight.shape[1]) if mode == 2 else (bags,) if here else (0,)),
    )


@OP.formula("_embedding_bag_per_sample_weights_backward")
def _embedding_bag_weights_backward(
    grad: TensorLike, weight: TensorLike, indices: TensorLike, *args: object
) -> TensorSpec:
    return contiguous(grad, (indices.shape[0],))


# --- samples ---------------------------------------------------------------------------------------

_BAGS = (integers(5, below=7), listed(0, 2, 3))
_PLACES = (listed(0, 0, 1, 2, 2), listed(2, 1, 2), listed(0, 0, 0))
OP.samples("embedding", call(reals(7, 3), integers(2, 5, below=7)))
OP.samples("embedding_dense_backward", call(reals(2, 5, 3), integers(2, 5, below=7), 7, 2, False))
OP.samples("embedding_renorm", call(reals(7, 3), integers(5, below=7), 1.0, 2.0))
OP.samples("_embedding_bag", *(call(reals(7, 3), *_BAGS, False, mode) for mode in (0, 1, 2)))
OP.samples("_embedding_bag_forward_only", *(call(reals(7, 3), *_BAGS, False, mode) for mode in (0, 1)))
OP.samples("_embedding_bag_backward", call(reals(3, 3), *_BAGS, *_PLACES, 7, False, 1, False, None))
OP.samples("_embedding_bag_dense_backward", call(reals(3, 3), _BAGS[0], *_PLACES, 7, False, 1, None))
OP.samples("_embedding_bag_per_sample_weights_backward", call(reals(3, 3), reals(7, 3), *_BAGS, _PLACES[0], 0))
