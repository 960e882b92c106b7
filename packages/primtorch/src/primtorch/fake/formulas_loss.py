"""Losses with kernels of their own, and statistics: margin losses, CTC, histograms, segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primtorch.errors import DataDependentValue
from primtorch.fake.build import Fresh, Table, contiguous, refuse_fresh
from primtorch.spec import Size, TensorSpec

TABLE = Table()
NONE = 0
"""`reduction`: none, mean, sum."""


@TABLE.op("equal", "allclose")
def _equal(x: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    raise DataDependentValue(
        "whether two tensors are equal (torch.equal, torch.allclose)",
        "it is known only when the program runs",
        "Keep the comparison in a tensor, or keep this part out of the compiled region.",
    )


@TABLE.op("multi_margin_loss")
def _multi_margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> TensorSpec:
    return contiguous(x, target.shape if reduction == NONE else ())


@TABLE.op("multilabel_margin_loss_forward")
def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> tuple[TensorSpec, TensorSpec]:
    each = x.shape[:1] if x.dim() == 2 else ()
    return contiguous(x, each if reduction == NONE else ()), contiguous(x, target.shape)


@TABLE.op("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margin_loss_backward(grad: Any, x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return contiguous(x, x.shape)


def _ctc(log_probs: Any, longest: Size) -> tuple[TensorSpec, TensorSpec]:
    steps, batch = (log_probs.shape[0], log_probs.shape[1]) if log_probs.dim() == 3 else (log_probs.shape[0], 1)
    lead = (batch,) if log_probs.dim() == 3 else ()
    return contiguous(log_probs, lead), contiguous(log_probs, (*lead, steps, 2 * longest + 1))


@TABLE.op("_ctc_loss")
def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Sequence[int], *args: Any, **kwargs: Any
) -> tuple[TensorSpec, TensorSpec]:
    return _ctc(log_probs, max(target_lengths, default=0))


@TABLE.op("_ctc_loss.Tensor")
def _ctc_loss_tensor(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, fresh: Fresh = refuse_fresh,
    **kwargs: Any,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    return _ctc(log_probs, fresh(None))


@TABLE.op("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_loss_backward(grad: Any, log_probs: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return contiguous(log_probs, log_probs.shape)


@TABLE.op("segment_reduce")
def _segment_reduce(
    data: Any, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None, axis: int = 0,
    unsafe: bool = False, initial: Any = None,
) -> TensorSpec:  # fmt: skip
    if lengths is not None:
        segments = tuple(lengths.shape)
    else:
        segments = (*offsets.shape[:-1], offsets.shape[-1] - 1)
    return contiguous(data, (*segments, *data.shape[axis + 1 :]))


@TABLE.op("_segment_reduce_backward")
def _segment_reduce_backward(grad: Any, output: Any, data: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return contiguous(grad, data.shape)


@TABLE.op("histogram.bin_ct")
def _histogram(x: Any, bins: Size = 100, **options: Any) -> tuple[TensorSpec, TensorSpec]:
    return contiguous(x, (bins,)), contiguous(x, (bins + 1,))


@TABLE.op("histogram.bins_tensor")
def _histogram_edges(x: Any, bins: Any, **options: Any) -> tuple[TensorSpec, TensorSpec]:
    return contiguous(x, (bins.shape[0] - 1,)), contiguous(x, bins.shape)


@TABLE.op("_histogramdd_bin_edges")
def _histogramdd_bin_edges(x: Any, bins: Sequence[Size], **options: Any) -> list[TensorSpec]:
    return [contiguous(x, (count + 1,)) for count in bins]


@TABLE.op("_histogramdd_from_bin_cts")
def _histogramdd(x: Any, bins: Sequence[Size], **options: Any) -> TensorSpec:
    return contiguous(x, bins)


@TABLE.op("_histogramdd_from_bin_tensors")
def _histogramdd_edges(x: Any, bins: Sequence[Any], **options: Any) -> TensorSpec:
    return contiguous(x, [edges.shape[0] - 1 for edges in bins])
