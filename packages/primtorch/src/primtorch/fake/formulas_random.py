"""Operators that draw random numbers with the shape of an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Table, contiguous, elementwise
from primtorch.layout import contiguous_strides, dense_like
from primtorch.promotion import TENSORS
from primtorch.spec import Size, TensorSpec

TABLE = Table()


@TABLE.op("bernoulli", "bernoulli.p", "poisson", "_standard_gamma")
def _drawn(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return contiguous(x, x.shape)


@TABLE.op(
    "bernoulli.Tensor",
    "uniform",
    "normal_functional",
    "exponential",
    "geometric",
    "cauchy",
    "log_normal",
    "random",
    "random.from",
    "random.to",
)
def _random_like(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@TABLE.op("rrelu_with_noise")
def _rrelu_drawn(x: Any, noise: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return _random_like(x)


@TABLE.op("rrelu_with_noise_backward")
def _rrelu_backward(grad: Any, x: Any, noise: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return elementwise((grad, x, noise), grad.dtype)


@TABLE.op("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> TensorSpec:
    tensors = [t for t in (mean, std) if isinstance(t, TENSORS)]
    return contiguous(tensors[0], elementwise(tensors, tensors[0].dtype).shape)


@TABLE.op("normal.float_float")
def _normal_filled(mean: float, std: float, size: Sequence[Size], *, generator: Any = None,
                   dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:  # fmt: skip
    shape = tuple(size)
    place = torch.device("cpu" if device is None else device)
    return TensorSpec(shape, contiguous_strides(shape), dtype or torch.get_default_dtype(), place)


@TABLE.op("rrelu_with_noise_functional")
def _rrelu(x: Any, noise: Any, *args: Any, **kwargs: Any) -> tuple[TensorSpec, TensorSpec]:
    return _random_like(x), _random_like(noise)


@TABLE.op("multinomial")
def _multinomial(x: Any, num_samples: Any, replacement: bool = False, *, generator: Any = None) -> TensorSpec:
    shape = (*x.shape[:-1], num_samples)
    return TensorSpec(shape, contiguous_strides(shape), torch.int64, x.device)
