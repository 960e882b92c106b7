"""Rules for functions of NumPy, each over dtypes, shapes, layouts and elements that are not finite: NumPy's results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_programs import captured, check, judge

import torchdynamo


def arrays() -> list[np.ndarray]:
    """Arrays of each kind, along all strides; two have elements that are not finite."""
    draw = np.random.default_rng(0).standard_normal
    shapes: tuple[tuple[int, ...], ...] = ((6,), (4, 3), (3, 3), (2, 3, 4), (1,), ())
    dtypes = ("float64", "float32", "int64", "uint8", "complex128")
    found = [(3 * draw(shape)).astype(dtype) for shape, dtype in itertools.product(shapes, dtypes)]
    found += [draw((4, 3))[::-1], draw((4, 6))[:, ::2], draw((3, 4)).T, draw(5), draw((4, 3))]
    found[-2][2], found[-1][1, 1] = np.inf, np.nan
    return found


def turned_and_written(a: Any) -> Any:
    b = a.copy()
    turned = np.rot90(b)
    turned[0] = 1
    return b, turned


def into_itself(a: Any) -> Any:
    found = np.multiply(a, 2, out=a)
    return found is a, a


def into_a_part(a: Any) -> Any:
    b = a.copy()
    np.negative(b[:2], out=b[:2])
    return b


def into_memory(a: Any) -> Any:
    out = np.empty(a.shape)
    return np.add(a, 1.5, out=out) is out, out


def named(name: str, *args: object, **named: object) -> Callable[[Any], Any]:
    """A call of a function of NumPy's with an array before these arguments."""
    function: Any = np
    for part in name.split("."):
        function = getattr(function, part)
    return lambda a: function(a, *args, **named)


SPECTRA = [named(f"fft.{name}") for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")]
SPECTRA += [named(f"fft.{name}", 5, norm="forward") for name in ("fft", "ifft", "irfft", "hfft", "ihfft")]
SPECTRA += [named(f"fft.{name}", axis=0, norm="ortho") for name in ("fft", "rfft", "hfft")]
SPECTRA += [named(f"fft.{name}") for name in ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")]
SPECTRA += [named("fft.fft2", (3, 5), (0, 1)), named("fft.fftshift"), named("fft.ifftshift", axes=0)]
MODES = ("full", "same", "valid")
SIGNALS = [lambda a, m=mode: np.convolve(a, a[:3], m) for mode in MODES]
SIGNALS += [lambda a, m=mode: np.convolve(a[:2], a, m) for mode in MODES]
SIGNALS += [lambda a, m=mode: np.correlate(a, a[:4], m) for mode in MODES]
SIGNALS += [lambda a, m=mode: np.correlate(a[:2], a, m) for mode in MODES]
SIGNALS += [named("gradient"), named("gradient", 0.5, axis=0), named("trapezoid"), named("trapezoid", dx=0.5, axis=0)]
SIGNALS += [named("angle"), named("angle", deg=True), lambda a: a.conj(), named("iscomplex"), named("isreal")]
ORDERED = [named("quantile", q) for q in (0.3, 0, 1.0, [0.1, 0.5])]
ORDERED += [named("quantile", [0.2, 0.7], axis=0, keepdims=True), named("percentile", [25, 75], axis=-1)]
ORDERED += [named("percentile", 50), named("nanmean"), named("nanmean", axis=0, keepdims=True)]
LINEAR = [named("linalg.svd", compute_uv=False), named("linalg.pinv"), named("linalg.norm", "nuc")]
LINEAR += [named("linalg.norm", 2), named("linalg.norm", -2, keepdims=True)]
LINEAR += [lambda a: np.linalg.multi_dot([a, a.T, a])]
SHAPES = [*(named("rot90", times) for times in (1, 2, 3, -1, 4)), turned_and_written, named("fix"), named("sinc")]
SHAPES += [named("i0"), named("vander"), named("vander", 3, increasing=True)]
SHAPES += [
    lambda a: np.choose((a > 0).astype(np.int64), [a, a * 2]),
    lambda a: np.choose((a * 9).astype(np.int64), [a, 1]),
]
WRITTEN = [
    into_itself,
    into_a_part,
    into_memory,
    named("exp", out=None),
    lambda a: np.greater(a, 0, out=np.empty(a.shape)),
]
WRITTEN += [lambda a: np.add(a, 1.5, out=np.empty(a.shape, np.int64)), lambda a: np.add(a, 1, out=np.empty((7, 2)))]
PROGRAMS = [*SPECTRA, *SIGNALS, *ORDERED, *LINEAR, *SHAPES, *WRITTEN]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rule_gives_what_numpy_gives(program: Callable[..., Any]) -> None:
    """What it does not take breaks the graph: it is no fault of capture."""
    kept = 0
    for array in arrays():
        judge(program, captured(program), lambda array=array: (array.copy("K"),))
        stats = torchdynamo.stats()
        assert not stats.fallbacks, stats.fallbacks
        kept += not stats.breaks
    assert kept > 0


def numbers(a: Any) -> Any:
    mean = float(a.mean())
    np.add(a, mean, out=a)
    a *= mean
    return a - mean, a.max().item() * 2, int(a.argmax()) + 1, a[:1].item(), a[:2].tolist()


def test_numbers_of_arrays_are_symbols() -> None:
    check(numbers, lambda: (np.arange(-2.0, 6.0) / 4,), lambda: (np.arange(7.0, -1.0, -1.0),))  # all sums are exact


def test_numbers_that_numpy_refuses() -> None:
    for program in (lambda a: float(a), lambda a: a.item(), lambda a: int(a), lambda a: a.item(1)):
        judge(program, captured(program), lambda: (np.arange(3.0),))
