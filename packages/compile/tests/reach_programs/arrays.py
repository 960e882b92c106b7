"""NumPy's arrays within the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .record import part

NUMPY = "NumPy"


@part(NUMPY, "from and to arrays", gradient=False)
def through_numpy(x: torch.Tensor) -> Any:
    return torch.from_numpy(np.sin(x.numpy()) + 1) * 2


@part(
    NUMPY,
    "a function of arrays",
    calls=lambda: [(np.linspace(0.0, 1.0, 6),), (np.linspace(0.0, 2.0, 6),)],
    gradient=False,
)
def of_arrays(a: Any) -> Any:
    return (np.exp(a) * a[::-1]).cumsum()


@part(
    NUMPY,
    "spectra, convolutions and quantiles",
    calls=lambda: [(np.linspace(0.0, 1.0, 6) ** 2,), (np.linspace(0.0, 2.0, 8) ** 2,)],
    gradient=False,
)
def of_signals(a: Any) -> Any:
    smooth = np.convolve(a, np.array([0.25, 0.5, 0.25]), "same")
    return np.abs(np.fft.rfft(smooth)), np.percentile(a, [25, 75]), np.gradient(a)


@part(
    NUMPY,
    "a table by its values",
    calls=lambda: [(np.linspace(0.0, 1.0, 6).reshape(2, 3),), (np.linspace(0.0, 2.0, 6).reshape(2, 3),)],
    gradient=False,
)
def tabulated(a: Any) -> Any:
    return np.digitize(a, [0.25, 0.5]), np.isin(a, [0.0, 1.0]), np.ediff1d(a), np.delete(a, 1, axis=1)


@part(
    NUMPY,
    "what the data says the length of",
    "data_dependent_shape",
    calls=lambda: [(np.array([0.0, 1, 2, 0, 3, 1]),), (np.array([1.0, 0, 0, 0, 3, 1]),)],
    gradient=False,
    why="NumPy is asked for the shape of each array, and can say none that depends on the data; instead: the same of"
    " tensors (torch.nonzero, torch.unique, x[x > 0]), whose lengths the graph tells",
)
def of_unknown_length(a: Any) -> Any:
    return a[a > 0], np.unique(a), np.nonzero(a)


@part(
    NUMPY,
    "numbers of an array",
    calls=lambda: [(np.linspace(0.0, 1.0, 6),), (np.linspace(0.0, 2.0, 6),)],
    gradient=False,
)
def numbers_of_arrays(a: Any) -> Any:
    mean = float(a.mean())
    return a - mean, a.max().item() * 2, np.add(a, mean, out=np.empty(len(a)))
