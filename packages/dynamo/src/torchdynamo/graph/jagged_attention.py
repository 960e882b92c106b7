"""`scaled_dot_product_attention` of nested tensors on the CPU, where torch's code computes it row by row: by padding.

Torch takes the rows apart and multiplies each by itself, for which it asks for the numbers of their lengths. A graph
has queries, keys and values side by side with padding, and a mask of the keys that there are: the same values, for any
lengths and any number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from primtorch.eager_kernels import Fact
from primtorch.fake import FakeTensor
from torchdynamo.interpreter.protocol import MISSING

if TYPE_CHECKING:
    from torch.nested._internal.nested_tensor import NestedTensor

    from torchdynamo.graph.jagged import Jagged

_PAD = torch.ops.aten._jagged_to_padded_dense_forward.default
_PACK = torch.ops.aten._padded_dense_to_jagged_forward.default


def attention(
    nested: Jagged,
    query: NestedTensor,
    key: NestedTensor,
    value: NestedTensor,
    attn_mask: object = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> object:
    """The nested tensor of the results; MISSING where torch's own code is to say what becomes of the call."""
    given = (query, key, value)
    if attn_mask is not None or dropout_p or is_causal or not all(map(nested.is_one, given)):
        return MISSING
    if not all(_is_of_heads(one) for one in given) or len({(one.dtype, one.device.type) for one in given}) > 1:
        return MISSING
    if torch.is_autocast_enabled("cpu") or not torch.backends.cuda.math_sdp_enabled():
        return MISSING
    if key._size[2] != value._size[2] or not bool(query.shape[0] == key.shape[0]):
        return MISSING
    if not bool(query.shape[1] == key.shape[1]) or not bool(key.shape[1] == value.shape[1]):
        return MISSING
    rows = [_values(nested, one) for one in given]
    if not all(one.is_contiguous() for one in rows):
        return MISSING
    asked = _longest(nested, query)
    known = asked if key._offsets is query._offsets else _longest(nested, key)
    if asked is None or known is None:
        return MISSING
    offsets, longest = [one._offsets for one in given], (asked, known, known)
    q, k, v = (_padded(nested, *parts) for parts in zip(rows, offsets, longest, strict=True))
    recorder = nested.recorder
    with recorder.recording():
        there = torch.arange(known, device=key.device) < key._offsets.diff()[:, None]
        dense = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None, :], scale=scale)
        flat = torch.cat(dense.unbind(1), -1)
    packed = nested.convert(_PACK, (flat, [query._offsets], rows[0].shape[0]))
    with recorder.recording():
        values = packed.reshape(rows[0].shape[0], rows[0].shape[1], rows[2].shape[2])
    made = nested.around(values, query._offsets, None, 1, nested.lengths_kept(query))
    return nested.run("transpose", torch.Tensor.transpose, (made, 1, 2), {})


def _is_of_heads(one: NestedTensor) -> bool:
    """Whether it is (batch, heads, ragged length, features), as torch's code takes it."""
    plain = one.dim() == 4 and one._ragged_idx == 2 and one._lengths is None
    return plain and Fact.ATTENDS_RAGGED_BY_LOOPS.on(one.device)


def _values(nested: Jagged, one: NestedTensor) -> FakeTensor:
    """(all rows, heads, features)"""
    turned = nested.run("transpose", torch.Tensor.transpose, (one, 1, 2), {})
    return nested.run("values", type(one).values, (turned,), {})  # type: ignore[return-value]


def _longest(nested: Jagged, one: NestedTensor) -> int | None:
    """The length to pad the rows to: that which it keeps of its longest one, else one that the graph reads, if any."""
    kept = nested.lengths_kept(one).get("max_seqlen")
    if kept is not None:
        return kept
    recorder = nested.recorder
    with recorder.recording():  # at least two, as the sizes of a graph are: nothing is to depend on whether it is one
        number = recorder.taken.take("item", (one._offsets.diff().max() - 2).clamp(min=0))
    return None if number is MISSING else number + 2


def _padded(nested: Jagged, values: FakeTensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    """(rows, heads, longest, features)"""
    recorder = nested.recorder
    heads, features = map(int, values.shape[1:])
    with recorder.recording():
        flat = values.reshape(values.shape[0], heads * features)
    made = nested.convert(_PAD, (flat, [offsets], [longest], 0.0))
    with recorder.recording():  # a view of so many heads would ask how many rows there are
        return torch.stack(made.split(features, -1), 1)
