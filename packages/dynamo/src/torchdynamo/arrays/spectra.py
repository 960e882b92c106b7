"""Transforms of Fourier, convolutions and differences along an axis as torch calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.rules import Rule, dim_of, dims, known
from torchdynamo.arrays.values import Array, Model, dtype_of, model_of
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.arrays.world import ArrayWorld

Lengths = int | Sequence[int] | None


def _values(n: ArrayWorld, asked: Model, a: object) -> torch.Tensor:
    """The elements in the precision of the result: whole numbers and those of half precision as NumPy widens them."""
    found: torch.Tensor = n.tensor(a)
    bits = asked.dtype.itemsize // (2 if asked.dtype.kind == "c" else 1)
    real = {2: torch.float16, 4: torch.float32, 8: torch.float64}.get(bits)
    if real is None or not found.numel():
        raise BreakGraph("numpy", f"a transform to {asked.dtype}, or of no elements")
    return found.to(real.to_complex() if found.is_complex() else real)


_OTHER_WAY = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


def _along_one(name: str) -> Rule:
    """Of a real array torch gives `ifft` as the conjugate of what it computes, which no array can be."""

    def program(
        world: ArrayWorld,
        asked: Model,
        a: object,
        n: int | None = None,
        axis: SupportsIndex = -1,
        norm: str | None = None,
    ) -> object:
        x, length, dim = _values(world, asked, a), None if n is None else int(n), dim_of(axis)
        if name == "hfft":
            return torch.fft.irfft(torch.conj_physical(x), length, dim, _OTHER_WAY[norm])
        if name == "ihfft":
            return torch.conj_physical(torch.fft.rfft(x, length, dim, _OTHER_WAY[norm]))
        x = x.to(x.dtype.to_complex()) if name == "ifft" else x
        return getattr(torch.fft, name)(x, length, dim, norm)

    return Rule(program)


def _along_several(name: str, last_two: bool) -> Rule:
    def program(
        n: ArrayWorld,
        asked: Model,
        a: object,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: str | None = None,
    ) -> object:
        if s is not None and (axes is None or -1 in s):
            raise BreakGraph("numpy", f"numpy.fft.{name}() of these lengths")
        over = (-2, -1) if axes is None and last_two else axes
        x = _values(n, asked, a)
        x = x.to(x.dtype.to_complex()) if name in ("ifft2", "ifftn") else x
        return getattr(torch.fft, name)(x, s, over, norm)

    return Rule(program)


def _shifted(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, x: object, axes: Lengths = None) -> object:
        given = n.tensor(x)
        return getattr(torch.fft, name)(given, dims(axes, given))  # type: ignore[arg-type]

    return Rule(program)


def _correlated(x: torch.Tensor, y: torch.Tensor, mode: str) -> torch.Tensor:
    """Sums of products of a vector and of a shorter one that is moved along it; nothing is added beyond its ends."""
    length = int(y.shape[0])
    before = {"full": length - 1, "same": length // 2, "valid": 0}[mode]
    behind = {"full": length - 1, "same": length - 1 - length // 2, "valid": 0}[mode]
    windows, within = (
        torch.nn.functional.pad(part, [before, behind]).unfold(0, length, 1)
        for part in (x, torch.ones_like(x, dtype=torch.bool))
    )
    return torch.where(within, windows * y, torch.zeros_like(y)).sum(-1)


def _vectors(n: ArrayWorld, asked: Model, a: object, v: object, mode: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The longer one, the shorter one, and whether that is the first."""
    if asked.dtype.kind != "f" or asked.dtype.itemsize < 4 or mode not in ("full", "same", "valid"):
        raise BreakGraph("numpy", f"a convolution of elements of {asked.dtype}")
    x, y = n.tensor(a, asked.dtype), n.tensor(v, asked.dtype)
    x, y = (part.reshape(1) if not part.dim() else part for part in (x, y))
    return (y, x, True) if x.shape[0] < y.shape[0] else (x, y, False)


def _convolve(n: ArrayWorld, asked: Model, a: object, v: object, mode: str = "full") -> object:
    x, y, _ = _vectors(n, asked, a, v, mode)
    return _correlated(x, y.flip(0), mode)


def _correlate(n: ArrayWorld, asked: Model, a: object, v: object, mode: str = "valid") -> object:
    x, y, swapped = _vectors(n, asked, a, v, mode)
    found = _correlated(x, y, mode)
    return found.flip(0) if swapped else found


def _trapezoid(
    n: ArrayWorld, asked: Model, y: object, x: object = None, dx: float = 1.0, axis: SupportsIndex = -1
) -> object:
    known(dx)
    if any(model_of(value).dtype.kind != "f" for value in (y, x) if value is not None):
        raise BreakGraph("numpy", "numpy.trapezoid() of whole numbers")  # whose sums are those of their dtype
    given = n.tensor(y, asked.dtype)
    if x is not None:
        return torch.trapezoid(given, n.tensor(x, asked.dtype), dim=dim_of(axis))
    return torch.trapezoid(given, dx=float(dx), dim=dim_of(axis))


def _gradient(n: ArrayWorld, asked: Any, f: object, *spacing: float, axis: SupportsIndex | None = None) -> object:
    """Differences of the neighbours of each element, and of the one neighbour at the ends."""
    each = list(asked) if isinstance(asked, (tuple, list)) else [asked]
    if not each:  # along no dim
        return asked
    if len(spacing) > 1 or any(numpy.ndim(one) for one in spacing):
        raise BreakGraph("numpy", "numpy.gradient() of several distances")
    step = float(spacing[0]) if spacing else 1.0
    given = n.tensor(f, each[0].dtype)
    axes = range(given.dim()) if axis is None else (dim_of(axis),)
    found = [_slope(given, dim, step) for dim in axes]
    return type(asked)(found) if isinstance(asked, (tuple, list)) else found[0]


def _slope(x: torch.Tensor, dim: int, step: float) -> torch.Tensor:
    size = int(x.shape[dim])
    part = lambda start, length: x.narrow(dim, start, length)
    inner = (part(2, size - 2) - part(0, size - 2)) / (2.0 * step)
    first = (part(1, 1) - part(0, 1)) / step
    last = (part(size - 1, 1) - part(size - 2, 1)) / step
    return torch.cat([first, inner, last], dim)


def _conjugate(n: ArrayWorld, asked: Model, x: object) -> object:
    given = x.value() if isinstance(x, Array) else n.tensor(x)
    return torch.conj_physical(given) if given.is_complex() else given.clone()


def _angle(n: ArrayWorld, asked: Model, z: object, deg: bool = False) -> object:
    given = n.tensor(z)
    real = dtype_of(asked.dtype)
    parts = (torch.imag(given), torch.real(given)) if given.is_complex() else (torch.zeros_like(given), given)
    found = torch.atan2(*(part.to(real) for part in parts))
    return found * (180 / numpy.pi) if deg else found


def _has_imaginary_part(wanted: bool) -> Rule:
    def program(n: ArrayWorld, asked: Model, x: object) -> object:
        given = n.tensor(x)
        zero = torch.imag(given) == 0 if given.is_complex() else torch.ones_like(given, dtype=torch.bool)
        return ~zero if wanted else zero

    return Rule(program)


SPECTRA: dict[str, Rule] = {  # of numpy.fft
    **{name: _along_one(name) for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")},
    **{name: _along_several(name, last_two=True) for name in ("fft2", "ifft2", "rfft2", "irfft2")},
    **{name: _along_several(name, last_two=False) for name in ("fftn", "ifftn", "rfftn", "irfftn")},
    "fftshift": _shifted("fftshift"), "ifftshift": _shifted("ifftshift"),
}  # fmt: skip
SIGNALS: dict[str, Rule] = {
    "convolve": Rule(_convolve), "correlate": Rule(_correlate), "trapezoid": Rule(_trapezoid),
    "gradient": Rule(_gradient), "angle": Rule(_angle), "iscomplex": _has_imaginary_part(wanted=True),
    "isreal": _has_imaginary_part(wanted=False),
}  # fmt: skip
CONJUGATES: dict[str, Rule] = {"conj": Rule(_conjugate), "conjugate": Rule(_conjugate)}  # methods
