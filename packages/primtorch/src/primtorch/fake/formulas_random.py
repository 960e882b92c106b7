"""Operators that draw random numbers with the shape of an argument."""

from __future__ import annotations

from typing import Any

import torch

from primtorch.fake.build import Table
from primtorch.fake.layout import contiguous_strides, dense_like
from primtorch.spec import TensorSpec

TABLE = Table()


@TABLE.op(
    "bernoulli", "bernoulli.p", "bernoulli.Tensor", "uniform", "normal_functional", "exponential", "geometric", "cauchy",
    "log_normal", "random", "random.from", "random.to", "_standard_gamma", "poisson",
)  # fmt: skip
def _random_like(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@TABLE.op("rrelu_with_noise_functional")
def _rrelu(x: Any, noise: Any, *args: Any, **kwargs: Any) -> tuple[TensorSpec, TensorSpec]:
    return _random_like(x), _random_like(noise)


@TABLE.op("multinomial")
def _multinomial(x: Any, num_samples: Any, replacement: bool = False, *, generator: Any = None) -> TensorSpec:
    shape = (*x.shape[:-1], num_samples)
    return TensorSpec(shape, contiguous_strides(shape), torch.int64, x.device)
