"""Formulas on operands that are transposed, spaced, expanded or channels_last, against one real call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from primtorch.fake import formula_of
from primtorch.spec import TensorSpec

aten = torch.ops.aten
x, y = torch.randn(4, 5).t(), torch.randn(4, 5).t()
spaced, expanded = torch.randn(4, 10)[:, ::2].t(), torch.randn(5, 1).expand(5, 4)
cube = torch.randn(2, 3, 4).permute(2, 1, 0)
image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
turned = torch.randn(2, 3, 8, 8).permute(0, 1, 3, 2)
mask, swapped_mask = torch.rand(5, 4) > 0.5, (torch.rand(4, 5) > 0.5).t()
few, zeros, one = torch.tensor([0, 2]), torch.zeros(5, 4, dtype=torch.int64), torch.ones(())

# Overload, its arguments.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "scatter": (aten.scatter.src, (x, 0, zeros, y)),
    "scatter: a number": (aten.scatter.value, (x, 0, zeros, 1.0)),
    "scatter_add": (aten.scatter_add.default, (x, 0, zeros, y)),
    "scatter_reduce": (aten.scatter_reduce.two, (x, 0, zeros, y, "sum")),
    "index_add": (aten.index_add.default, (x, 0, few, y[:2])),
    "index_copy": (aten.index_copy.default, (x, 0, few, y[:2])),
    "index_reduce": (aten.index_reduce.default, (x, 0, few, y[:2], "amax")),
    "index_fill": (aten.index_fill.int_Scalar, (x, 0, few, 1.0)),
    "index_put": (aten.index_put.default, (x, [few], y[:2])),
    "put": (aten.put.default, (x, few, one.expand(2))),
    "index": (aten.index.Tensor, (x, [few])),
    "index: one place": (aten.index.Tensor, (x, [torch.tensor(1, dtype=torch.int32)])),
    "index: one element": (aten.index.Tensor, (x[0], [torch.tensor(1, dtype=torch.int32)])),
    "gather": (aten.gather.default, (x, 0, zeros)),
    "masked_fill": (aten.masked_fill.Scalar, (x, mask, 1.0)),
    "masked_fill: swapped mask": (aten.masked_fill.Scalar, (x, swapped_mask, 1.0)),
    "masked_fill: broadcast": (aten.masked_fill.Tensor, (x[0], mask, one)),
    "masked_scatter": (aten.masked_scatter.default, (x, mask, y)),
    "where": (aten.where.self, (mask, x, y)),
    "diag_embed": (aten.diag_embed.default, (x,)),
    "diag_embed: other dims": (aten.diag_embed.default, (cube, 1, 0, 2)),
    "renorm": (aten.renorm.default, (cube, 2, 0, 0.1)),
    "roll": (aten.roll.default, (x, [1], [0])),
    "roll: two dims": (aten.roll.default, (x, [1, 1], [0, 1])),
    "roll: flattened": (aten.roll.default, (x, [1])),
    "roll: channels_last": (aten.roll.default, (image, [1], [1])),
    "flip": (aten.flip.default, (spaced, [0])),
    "flip: expanded": (aten.flip.default, (expanded, [0])),
    "cat": (aten.cat.default, ([x, y],)),
    "addr": (aten.addr.default, (x, torch.randn(5), torch.randn(4))),
    "addr: a row": (aten.addr.default, (torch.randn(4), torch.randn(5), torch.randn(4))),
    "addmm": (aten.addmm.default, (x, torch.randn(5, 3), torch.randn(3, 4))),
    "mse_loss_backward": (aten.mse_loss_backward.default, (one, x, y, 1)),
    "smooth_l1_loss_backward": (aten.smooth_l1_loss_backward.default, (one, x, y, 1, 1.0)),
    "huber_loss_backward": (aten.huber_loss_backward.default, (one, x, y, 1, 1.0)),
    "soft_margin_loss_backward": (aten.soft_margin_loss_backward.default, (one, x, y, 1)),
    "log_sigmoid": (aten.log_sigmoid_forward.default, (x,)),
    "log_sigmoid_backward": (aten.log_sigmoid_backward.default, (y, x, x)),
    "log_sigmoid_backward: dense": (aten.log_sigmoid_backward.default, (y.contiguous(), x, x)),
    "ldexp": (aten.ldexp.Tensor, (cube, cube[:1, 0])),
    "ldexp: integers": (aten.ldexp.Tensor, (x.half(), zeros)),
    "ldexp: an expanded number": (aten.ldexp.Tensor, (cube[:, :1, :1].expand(4, 3, 2), torch.ones(2, 3, 4).long().permute(2, 1, 0))),
    "ldexp: expanded": (aten.ldexp.Tensor, (cube.contiguous(), cube[..., :1].expand(4, 3, 2))),
    "bernoulli": (aten.bernoulli.default, (x.sigmoid(),)),
    "bernoulli: one p": (aten.bernoulli.p, (x, 0.5)),
    "bernoulli: a tensor of p": (aten.bernoulli.Tensor, (x, y.sigmoid())),
    "poisson": (aten.poisson.default, (x.abs(),)),
    "gamma": (aten._standard_gamma.default, (x.abs() + 1,)),
    "uniform": (aten.uniform.default, (x,)),
    "dropout": (aten.native_dropout.default, (x, 0.5, True)),
    "cumsum": (aten.cumsum.default, (x, 0)),
    "cummax": (aten.cummax.default, (x, 0)),
    "logcumsumexp": (aten.logcumsumexp.default, (x, 0)),
    "sort": (aten.sort.default, (x,)),
    "topk": (aten.topk.default, (x, 2)),
    "kthvalue": (aten.kthvalue.default, (x, 2)),
    "median": (aten.median.dim, (x, 0)),
    "softmax": (aten._softmax.default, (x, 0, False)),
    "softmax_backward": (aten._softmax_backward_data.default, (x, y, 0, torch.float32)),
    "sum": (aten.sum.dim_IntList, (cube, [0])),
    "amax": (aten.amax.default, (cube, [0])),
    "argmax": (aten.argmax.default, (cube, 0)),
    "std": (aten.std.correction, (cube, [0])),
    "vector_norm": (aten.linalg_vector_norm.default, (cube, 2, [0])),
    "tril": (aten.tril.default, (cube,)),
    "glu": (aten.glu.default, (x, 1)),
    "glu_backward": (aten.glu_backward.default, (x[:, :2], x, 1)),
    "prelu": (aten._prelu_kernel.default, (x, x[0])),
    "pad": (aten.constant_pad_nd.default, (x, [1, 1])),
    "select_backward": (aten.select_backward.default, (x[0], [5, 4], 0, 1)),
    "max_pool2d": (aten.max_pool2d_with_indices.default, (turned, [2, 2])),
    "upsample": (aten.upsample_nearest2d.default, (turned, [4, 4])),
    "layer_norm": (aten.native_layer_norm.default, (x, [4], None, None, 1e-5)),
    "batch_norm": (aten.native_batch_norm.default, (image, None, None, None, None, True, 0.1, 1e-5)),
    "nll_loss2d": (aten.nll_loss2d_forward.default, (image, torch.zeros(2, 4, 5).long(), None, 0, -100)),
    "searchsorted": (aten.searchsorted.Tensor, (torch.sort(x)[0], x)),
    "complex": (aten.complex.default, (x, y)),
    "trunc": (aten.trunc.default, (spaced,)),
}  # fmt: skip


def _meaning(results: Any) -> list[tuple[Any, ...]]:
    tensors = [t for t in (results if isinstance(results, (tuple, list)) else [results]) if hasattr(t, "stride")]
    return [
        (tuple(t.shape), tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1), t.dtype) for t in tensors
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(CALLS))
def test_layout_is_that_of_the_real_call(name: str) -> None:
    op, args = CALLS[name]
    described = [
        [TensorSpec.of(part) for part in arg]
        if isinstance(arg, list) and isinstance(arg[0], torch.Tensor)
        else (TensorSpec.of(arg) if isinstance(arg, torch.Tensor) else arg)
        for arg in args
    ]
    assert _meaning(formula_of(op)(*described)) == _meaning(op(*args))
