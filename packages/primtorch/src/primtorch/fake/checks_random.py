"""What draws refuse: limits out of order or out of the dtype, parameters that no distribution has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from primtorch.fake.check_table import WHOLE, CheckTable, refuse

CHECKS = CheckTable()


def _draw(name: str, default: Sequence[float], right: Callable[..., bool], message: str) -> None:
    def check(x: Any, *given: float, generator: Any = None, **named: float) -> None:
        values = [*given, *named.values()]
        refuse(not right(*values, *default[len(values) :]), lambda: f"{name} expects {message}")

    CHECKS[name] = check


_draw("cauchy", (0.0, 1.0), lambda median, sigma: sigma > 0, "sigma > 0.0")
_draw("log_normal", (1.0, 2.0), lambda mean, std: std > 0, "std > 0.0")
_draw("exponential", (1.0,), lambda rate: rate > 0, "lambda > 0.0")
_draw("geometric", (), lambda p: 0 < p < 1, "p to be in (0, 1)")
_draw("uniform", (0.0, 1.0), lambda low, high: low <= high, "from <= to")
_draw("normal_functional", (0.0, 1.0), lambda mean, std: std >= 0, "std >= 0.0")
_draw("bernoulli.p", (), lambda p: 0 <= p <= 1, "p to be in [0, 1]")


def _drawn_integers(low: Any, high: Any, dtype: torch.dtype) -> None:
    """The limits of `random_`: in order, and within the dtype."""
    refuse(
        high is not None and low >= high,
        lambda: f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}",
    )
    if dtype.is_floating_point:
        least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    refuse(not least <= low <= most, lambda: f"from is out of bounds for {dtype}")
    refuse(high is not None and not least <= high - 1 <= most, lambda: f"to - 1 is out of bounds for {dtype}")


@CHECKS.of("randint", "randint.generator")
def _randint(high: Any, size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
    _drawn_integers(0, high, dtype or torch.int64)


@CHECKS.of("randint.low", "randint.low_generator")
def _randint_low(low: Any, high: Any, size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
    _drawn_integers(low, high, dtype or torch.int64)


@CHECKS.of("randint_like")
def _randint_like(x: Any, high: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
    _drawn_integers(0, high, dtype or x.dtype)


@CHECKS.of("randint_like.low_dtype")
def _randint_like_low(x: Any, low: Any, high: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
    _drawn_integers(low, high, dtype or x.dtype)


@CHECKS.of("random.from")
def _random_from(x: Any, low: Any, high: Any, *, generator: Any = None) -> None:
    _drawn_integers(low, high, x.dtype)


@CHECKS.of("random.to")
def _random_to(x: Any, high: Any, *, generator: Any = None) -> None:
    _drawn_integers(0, high, x.dtype)


@CHECKS.of("random")
def _random(x: Any, *, generator: Any = None) -> None:
    wide = x.dtype in (torch.uint16, torch.uint32, torch.uint64)
    refuse(wide, lambda: f"random_ is not implemented for {x.dtype}", NotImplementedError)


def _fraction(dtype: torch.dtype | None) -> None:
    refuse(dtype in WHOLE, lambda: f"a uniform or normal draw is not implemented for {dtype}", NotImplementedError)


@CHECKS.of("rand", "randn")
def _rand(size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
    _fraction(dtype)


@CHECKS.of("rand_like", "randn_like")
def _rand_like(x: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
    _fraction(dtype or x.dtype)


@CHECKS.of("normal.Tensor_float", "normal.float_float")
def _normal(mean: Any, std: Any = 1.0, *args: Any, **options: Any) -> None:
    refuse(std < 0, lambda: f"normal expects std >= 0.0, but found std {std}")


@CHECKS.of("multinomial")
def _multinomial(x: Any, num_samples: Any, replacement: bool = False, *, generator: Any = None) -> None:
    refuse(x.dim() not in (1, 2), "prob_dist must be 1 or 2 dim")
    refuse(
        not x.dtype.is_floating_point,
        lambda: f"multinomial only supports floating-point dtypes for input, got {x.dtype}",
    )
    refuse(num_samples <= 0, "cannot sample n_sample <= 0 samples")
    refuse(
        not replacement and num_samples > x.shape[-1],
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )
    refuse(type(x.shape[-1]) is int and x.shape[-1] > 2**24, "number of categories cannot exceed 2^24")
