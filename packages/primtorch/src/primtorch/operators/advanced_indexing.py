"""Advanced indexing: indices and masks for several dimensions, to read and to write."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import Number, Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.errors import DataDependent
from primtorch.families import Family, Trait
from primtorch.layout import (
    broadcast,
    contiguous_strides,
    iterator_strides,
    product,
    same_shape,
)
from primtorch.operators.build import Fresh, as_dense, contiguous, refuse_fresh, strided
from primtorch.operators.refusals import refuse
from primtorch.prims.indexing import indexed_shape
from primtorch.samples import call, integers, listed, reals, truths
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import depends_on_data

OP = Family("advanced_indexing")
OP.trait(
    Trait.INDICES_ANYWHERE,
    "_index_put_impl_ _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate "
    "index index_put index_put_",
)
OP.trait(
    Trait.TO_FIRST,
    "_unsafe_index.Tensor _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate index.Tensor "
    "index_put",
)
OP.trait(Trait.OVERLAPS, "index_put")


def _is_mask(index: TensorLike | Value | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def integer_indices(b: Builder, indices: Sequence[Value | None], count: Size | None = None) -> tuple[Value | None, ...]:
    """int64 indices; a mask becomes the positions of its true elements, whose number only the data knows: `count`
    where the graph has a symbol for it."""
    out: list[Value | None] = []
    for index in indices:
        if index is None or index.dtype is torch.int64:
            out.append(index)
        elif _is_mask(index):
            saved, b.val = b.val, None
            if count is not None:
                b.val = TensorSpec((count, index.rank), (1, count), torch.int64, index.device)
            positions = b.emit(prims.nonzero, index)
            b.val = saved
            out.extend(positions.select(1, d) for d in range(index.rank))
        else:
            out.append(index.to(torch.int64))
    return tuple(out)


def _selected(b: Builder, indices: Sequence[Value | None]) -> Size | None:
    """The size that the result has where one mask alone selects."""
    tensors = [i for i in indices if i is not None]
    if len(tensors) != 1 or not _is_mask(tensors[0]) or b.val is None:
        return None
    size: Size = b.val.shape[list(indices).index(tensors[0])]
    return size


def _index_strides(shape: Sizes, operands: tuple[tuple[Sizes, Sizes], ...]) -> Sizes:
    # The order of dims follows from comparing strides, which a data-dependent size has no answer for.
    if any(map(depends_on_data, shape)):
        return contiguous_strides(shape)
    return iterator_strides(shape, operands)


def _expand_masks(indices: Sequence[TensorLike | None], fresh: Fresh) -> list[TensorLike | None]:
    """Boolean masks become one index per masked dim, all of one data-dependent length."""
    out: list[TensorLike | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            out.append(index)
            continue
        count = fresh(product(index.shape), of=index)
        column = TensorSpec((count,), (max(index.dim(), 1),), torch.int64, index.device)
        out.extend([column] * index.dim())
    return out


@OP.formula("index.Tensor", "_unsafe_index.Tensor")
def _index(x: TensorLike, indices: Sequence[TensorLike | None], *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    plain = _expand_masks(indices, fresh)
    plain += [None] * (x.dim() - len(plain))
    given = {d: index for d, index in enumerate(plain) if index is not None}
    used = list(given)
    shape, strides = tuple(x.shape), x.stride()
    if not used:
        return as_dense(x)
    common: Sizes = ()
    for d in used:
        common = broadcast(common, tuple(given[d].shape))
    # Indices that are not adjacent move to the front.
    adjacent = used == list(range(used[0], used[-1] + 1))
    order = [d for d in range(len(plain)) if plain[d] is None]
    lead = used[0] if adjacent else 0
    before, after = order[:lead], order[lead:]
    out: Sizes = (*(shape[d] for d in before), *common, *(shape[d] for d in after))
    # The kernel iterates over the output with the indexed dims' stride in the source set to 0.
    source = (*(strides[d] for d in before), *(0 for _ in common), *(strides[d] for d in after))
    operands: list[tuple[Sizes, Sizes]] = [(out, source)]
    for d in used:
        own = tuple(given[d].shape)
        lead_ones = (1,) * (len(common) - len(own))
        index_shape = (*(1 for _ in before), *lead_ones, *own, *(1 for _ in after))
        index_strides = (*(0 for _ in before), *(0 for _ in lead_ones), *given[d].stride(), *(0 for _ in after))
        operands.append((index_shape, index_strides))
    return strided(x, out, _index_strides(out, tuple(operands)))


@OP.refuses("index.Tensor", "_unsafe_index.Tensor")
def _refuse_index(x: TensorLike, indices: Sequence[TensorLike | None], **options: object) -> None:
    _refuse_indices(x, indices, asks=True)
    refuse(not indices, "at least one index must be provided", IndexError)
    nothing = Fact.REFUSES_NO_INDICES.on(x.device) and _selects_nothing(indices)
    refuse(nothing, "index: at least one index must be given")


def _selects_nothing(indices: Sequence[TensorLike | None]) -> bool:
    """Whether no dimension is indexed: a mask without dimensions indexes none."""
    return all(index is None or (_is_mask(index) and not index.dim()) for index in indices)


def _refuse_indices(x: TensorLike, indices: Sequence[TensorLike | None], *, asks: bool) -> None:
    """What advanced indexing refuses of the indices, to read and to write; how many a mask selects is left open.

    asks: whether a size that depends on data may be asked for. What is not asked is seen when the program runs.
    """
    common: Sizes = ()
    rank, at = x.dim(), 0
    refuse(
        len(indices) > rank, lambda: f"too many indices for tensor of dimension {rank} (got {len(indices)})", IndexError
    )
    for index in indices:
        if index is None or not _is_mask(index):
            at += 1
        if index is None:
            continue
        if _is_mask(index):
            _refuse_mask(x, at, index, asks)
            at += index.dim()
            continue
        refuse(
            index.dtype not in (torch.int64, torch.int32),
            "tensors used as indices must be long, int, byte or bool tensors",
            IndexError,
        )
        if asks or not any(map(depends_on_data, index.shape)):
            common = _common_shape(common, index, indices)
    refuse(at > rank, lambda: f"too many indices for tensor of dimension {rank} (got {at})", IndexError)


def _refuse_mask(x: TensorLike, at: int, mask: TensorLike, asks: bool) -> None:
    """A mask over x's dims from `at` on has their sizes."""
    for d, size in enumerate(mask.shape):
        refuse(at + d >= x.dim(), lambda: f"too many indices for tensor of dimension {x.dim()}", IndexError)
        own = x.shape[at + d]
        refuse(
            (asks or not (depends_on_data(size) or depends_on_data(own))) and size != own,
            lambda: (
                f"The shape of the mask {list(mask.shape)} at index {d} does not match the shape of the indexed tensor "
                f"{list(x.shape)} at index {at + d}"
            ),
            IndexError,
        )


def _common_shape(common: Sizes, index: TensorLike, indices: Sequence[TensorLike | None]) -> Sizes:
    try:
        return broadcast(common, tuple(index.shape))
    except DataDependent:
        raise
    except RuntimeError:
        shapes = ", ".join(str(list(i.shape)) for i in indices if i is not None)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from None


@OP.rule("index.Tensor", "_unsafe_index.Tensor?")
def _lower_index(b: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    return b.emit(prims.index, x, integer_indices(b, indices, _selected(b, indices)), True)


def _unit(rank: int, dim: int) -> tuple[int, ...]:
    return tuple(int(d == dim) for d in range(rank))


def _counted(b: Builder, values: Value, lead: int, mask: Value) -> Value:
    """At the k-th true element of the mask the k-th value along dim `lead`; any value elsewhere."""
    count = values.shape[lead]
    flat = mask.reshape((mask.numel(),)).to(torch.int64)
    found = flat.sum((0,))
    fits = found.eq(count)
    if not isinstance(count, int):
        fits = fits | b.full((), count, torch.int64, mask.device).eq(1)
    shown = ", ".join(map(str, values.shape))
    message = f"shape mismatch: value tensor of shape [{shown}] cannot be broadcast to what the mask selects"
    b.emit(prims.assert_async, fits, message)
    if not isinstance(count, int) or count == 0:  # an element to read where there is none
        values = b.emit(prims.pad, values, (0,) * values.rank, _unit(values.rank, lead), 0)
    last = max(count - 1, 0) if isinstance(count, int) else count - 1
    place = (b.emit(prims.cumsum, flat, 0) - 1).minimum(last).maximum(0)
    picked = b.emit(prims.index, values, (*(None,) * lead, place), False)
    return picked.reshape((*values.shape[:lead], *mask.shape, *values.shape[lead + 1 :]))


def _masked_put(b: Builder, x: Value, lead: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """x with `values` where the mask is true, over its dims from `lead` on: no size depends on how many those are.

    The k-th true element, in row-major order, takes the k-th of the values, or the only one. That there are as many is
    checked when the program runs.
    """
    if mask.dtype is not torch.bool:
        mask = mask.ne(0)
    before, behind = x.shape[:lead], x.shape[lead + mask.rank :]
    surplus = values.rank - (lead + 1 + len(behind))
    if surplus > 0:  # eager lets leading dimensions of size 1 go
        values = values.reshape(values.shape[surplus:])
    at = values.rank - len(behind) - 1  # where the values are counted
    count = values.shape[at] if at >= 0 else 1
    if isinstance(count, int) and count == 1:
        picked = values.squeeze(at) if at >= 0 else values
        picked = picked.reshape((*picked.shape[:at], *(1,) * mask.rank, *picked.shape[at:])) if at > 0 else picked
    else:
        picked = _counted(b, values.expand((*before, count, *behind)), lead, mask)
    whole = mask.reshape((*(1,) * lead, *mask.shape, *(1,) * len(behind)))
    if accumulate:
        picked = x | picked if x.dtype is torch.bool else x + picked
    return b.where(whole, picked, x)


@OP.formula("index_put", "_unsafe_index_put", "_index_put_impl")
def _updated(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return as_dense(x)


@OP.refuses("index_put", "_unsafe_index_put", "_index_put_impl")
def _refuse_index_put(
    x: TensorLike,
    indices: Sequence[TensorLike | None],
    values: TensorLike,
    accumulate: bool = False,
    unsafe: bool = False,
) -> None:
    _refuse_indices(x, indices, asks=False)
    given = [index for index in indices if index is not None]
    if given and all(map(_is_mask, given)) and not accumulate and all(type(s) is int and s == 1 for s in values.shape):
        return  # eager fills where the mask is true, with one value of any rank
    refuse(_selects_nothing(indices), "index_put: at least one index must be given")
    if any(depends_on_data(size) for index in given if not _is_mask(index) for size in index.shape):
        return
    shape = _written_shape(x, indices)
    wrong = values.dim() > len(shape) or any(
        size is not None
        and not (depends_on_data(size) or depends_on_data(own))
        and own is not size
        and own not in (1, size)
        for own, size in zip(reversed(values.shape), reversed(shape), strict=False)
    )
    refuse(
        wrong,
        lambda: (
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {['?' if size is None else size for size in shape]}"
        ),
    )


def _written_shape(x: TensorLike, indices: Sequence[TensorLike | None]) -> list[Size | None]:
    """The shape of x[indices], with None for a size that the data of a mask tell."""
    plain = _expand_masks(indices, lambda *size, **of: 1)
    shape: list[Size | None] = [*indexed_shape(x.shape, plain)]
    if any(map(_is_mask, indices)):
        used = [d for d, index in enumerate(plain) if index is not None]
        lead = used[0] if used[-1] - used[0] + 1 == len(used) else 0
        last = lead + max(index.dim() for index in plain if index is not None) - 1
        if type(shape[last]) is not int or shape[last] == 1:  # how many there are, unless another index says it
            shape[last] = None
    return shape


@OP.rule("index_put", "_unsafe_index_put?")
def _lower_index_put(
    b: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False, unsafe: bool = False
) -> Value:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and _is_mask(given[0]):
        return _masked_put(b, x, list(indices).index(given[0]), given[0], values, accumulate)
    whole = integer_indices(b, indices)
    shape = indexed_shape(x.shape, whole)
    surplus = values.rank - len(shape)
    if surplus > 0:  # eager lets leading dimensions of size 1 go
        values = values.reshape(values.shape[surplus:])
    return b.emit(prims.index_put, x, whole, values.expand(shape), accumulate, True)


def _clamped(x: Value, indices: Sequence[Value | None]) -> tuple[Value | None, ...]:
    return tuple(
        None if i is None else i.to(torch.int64).maximum(-x.shape[d]).minimum(x.shape[d] - 1)
        for d, i in enumerate(indices)
    )


@OP.formula("_unsafe_masked_index")
def _masked_index(x: TensorLike, mask: TensorLike, indices: Sequence[TensorLike | None], fill: Number) -> TensorSpec:
    out = _index(x, indices)
    shape = broadcast(tuple(out.shape), tuple(mask.shape))
    return out if same_shape(shape, out.shape) else contiguous(x, shape)


@OP.refuses("_unsafe_masked_index")
def _refuse_masked_index(x: TensorLike, mask: TensorLike, indices: Sequence[TensorLike | None], fill: Number) -> None:
    _refuse_indices(x, indices, asks=True)


@OP.rule("_unsafe_masked_index")
def _lower_unsafe_masked_index(
    b: Builder, x: Value, mask: Value, indices: Sequence[Value | None], fill: Number
) -> Value:
    """x at the indices, clamped into range, where the mask is true; `fill` elsewhere."""
    out = b.emit(prims.index, x, _clamped(x, indices), True)
    return b.where(mask, out, fill)


@OP.formula("_unsafe_masked_index_put_accumulate")
def _masked_index_put(
    x: TensorLike, mask: TensorLike, indices: Sequence[TensorLike | None], values: TensorLike
) -> TensorSpec:
    return as_dense(x)


@OP.refuses("_unsafe_masked_index_put_accumulate")
def _refuse_masked_index_put(
    x: TensorLike, mask: TensorLike, indices: Sequence[TensorLike | None], values: TensorLike
) -> None:
    kept = contiguous(values, broadcast(tuple(values.shape), tuple(mask.shape)))
    _refuse_index_put(x, indices, kept, True)


@OP.rule("_unsafe_masked_index_put_accumulate")
def _lower_unsafe_masked_index_put(
    b: Builder, x: Value, mask: Value, indices: Sequence[Value | None], values: Value
) -> Value:
    places = _clamped(x, indices)
    kept = b.where(mask, values, 0).expand(indexed_shape(x.shape, places))
    return b.emit(prims.index_put, x, places, kept, True, True)


# --- samples ---------------------------------------------------------------------------------------

OP.samples(
    "index.Tensor _unsafe_index.Tensor",
    call(reals(5, 4), [integers(6, below=5)]),
    call(reals(5, 4, 3), [None, integers(2, 1, below=4), integers(3, below=3)]),
)
OP.samples(
    "index_put _unsafe_index_put _index_put_impl",
    call(reals(5, 4), [listed(3, 0)], reals(2, 4)),
    call(reals(5, 4), [listed(3, 3)], reals(4), True),
)
OP.samples("_unsafe_masked_index", call(reals(5, 4), truths(6), [integers(6, below=5), integers(6, below=4)], 0))
OP.samples("_unsafe_masked_index_put_accumulate", call(reals(5), truths(6), [integers(6, below=5)], reals(6)))
