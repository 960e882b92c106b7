"""`torch.cov` and `torch.corrcoef` by operators that read no data.

Torch's own program looks at tensors to see whether it has to warn or refuse: of weights that are negative or sum to
zero, and of too few observations. How many there are the sizes tell; of weights the graph takes for granted that they
are as eager wants them (`graph/conditions.py`), and begins anew, eagerly, where they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from primtorch.fake import FakeTensor
from torchdynamo.graph.recorder import Recorder
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.protocol import MISSING, Args, Kwargs

Rule = Callable[[object, Args, Kwargs], object]


def rules(recorder: Recorder) -> Iterator[tuple[object, Rule]]:
    """What stands for the functions and the methods."""

    def cov(fn: object, args: Args, kwargs: Kwargs) -> object:
        found = _covariance(recorder, *args, **kwargs) if _is_plain(args, kwargs) else None
        return MISSING if found is None else found

    def corrcoef(fn: object, args: Args, kwargs: Kwargs) -> object:
        x = (*args, *kwargs.values())[0] if len(args) + len(kwargs) == 1 else None
        found = _covariance(recorder, x) if isinstance(x, FakeTensor) and _is_plain((x,), {}) else None
        return MISSING if found is None else _correlation(found)

    for function, rule in ((torch.cov, cov), (torch.corrcoef, corrcoef)):
        yield function, rule
        yield getattr(torch.Tensor, function.__name__), rule


def _is_plain(args: Args, kwargs: Kwargs) -> bool:
    """Whether these are arguments of `cov`, and its tensors are of no other class."""
    tensors = [t for t in (*args, kwargs.get("fweights"), kwargs.get("aweights")) if t is not None]
    named = kwargs.keys() <= {"correction", "fweights", "aweights"}
    return len(args) == 1 and named and all(isinstance(t, FakeTensor) and class_of(t) is None for t in tensors)


def _covariance(
    recorder: Recorder,
    x: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """In eager's order; None where eager itself has to see to the call."""
    if not isinstance(correction, (int, torch.SymInt)) or x.dim() > 2 or x.dtype is torch.bool:
        return None
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    count = rows.shape[1]
    weights = _product_of_weights(count, fweights, aweights)
    if weights is MISSING or not count > 0:
        return None
    if weights is None:
        if not count > correction:  # eager warns
            return None
        mean = rows.sum(1) / count
        centred = rows - mean.unsqueeze(1)
        return (centred.mm(centred.t().conj()) / (count - correction)).squeeze()
    assert isinstance(weights, torch.Tensor)
    total = weights.sum()
    mean = (rows * weights).sum(1) / total
    degrees = total - correction
    if aweights is not None and correction != 0:
        degrees = total - correction * (weights * aweights).sum() / total
    given = [w.min().ge(0) for w in (fweights, aweights) if w is not None]
    for condition in (*given, total.ne(0), degrees.gt(0)):
        if not isinstance(condition, FakeTensor) or not recorder.conditions.take_for_granted(condition, True):
            return None
    centred = rows - mean.unsqueeze(1)
    return (centred.mm((centred * weights).t().conj()) / degrees).squeeze()


def _product_of_weights(count: object, *given: torch.Tensor | None) -> object:
    """Of those that there are; MISSING where eager refuses them."""
    weights: torch.Tensor | None = None
    for whole, one in zip((True, False), given, strict=True):
        if one is None:
            continue
        kind = not one.is_floating_point() and not one.is_complex() and one.dtype is not torch.bool
        fits = kind if whole else one.is_floating_point()
        if not fits or one.dim() > 1 or one.numel() != count:
            return MISSING
        weights = one if weights is None else weights * one
    return weights


def _correlation(covariance: torch.Tensor) -> torch.Tensor:
    if covariance.dim() == 0:
        return covariance / covariance
    variances = covariance.diagonal()
    deviations = (variances.real if variances.is_complex() else variances).sqrt()
    scaled = covariance / deviations.view(-1, 1) / deviations.view(1, -1)
    if not scaled.is_complex():
        return scaled.clip(-1, 1)
    return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
