"""Gaussian-process regression written with NumPy and PyTorch, compiled as one graph.

    python examples/gaussian_process.py

Measurements are cleaned and standardised by NumPy, the posterior is computed by NumPy's linear algebra, and the samples
that are drawn from it are tensors: eager and compiled, which is one graph from array to array.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchcompile

Array = np.ndarray[Any, np.dtype[np.float64]]


def standardised(raw: Array) -> tuple[Array, Array, Array]:
    """Measurements with outliers clipped, of mean 0 and deviation 1, and what undoes it."""
    middle = np.median(raw)
    spread = np.median(np.abs(raw - middle))
    kept = np.clip(raw, middle - 2 * spread, middle + 2 * spread)
    mean, deviation = kept.mean(), kept.std()
    return (kept - mean) / deviation, mean, deviation


def kernel(a: Array, b: Array, length: float) -> Array:
    """Matern 3/2: how alike the process is at two places."""
    distance = np.abs(a[:, None] - b[None, :]) * np.sqrt(3) / length
    return (1 + distance) * np.exp(-distance)


def posterior(x: Array, raw: Array, places: Array, noise: torch.Tensor) -> tuple[Array, Array, torch.Tensor, Array]:
    """Mean and deviation at places, samples of the process there, and the evidence for each of some lengths."""
    y, mean, deviation = standardised(raw)
    lengths = (0.3, 0.6, 1.2)
    evidence = np.zeros(len(lengths))
    for place, length in enumerate(lengths):
        among = kernel(x, x, length) + 0.05 * np.eye(len(x))
        sign, logdet = np.linalg.slogdet(among)
        evidence[place] = -0.5 * (y @ np.linalg.solve(among, y) + sign * logdet)
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()

    means, covariance = np.zeros_like(places), np.zeros((len(places), len(places)))
    for weight, length in zip(weights, lengths, strict=True):
        among = kernel(x, x, length) + 0.05 * np.eye(len(x))
        across = kernel(places, x, length)
        means += weight * (across @ np.linalg.solve(among, y))
        covariance += weight * (kernel(places, places, length) - across @ np.linalg.solve(among, across.T))

    root = torch.from_numpy(np.linalg.cholesky(covariance + 1e-6 * np.eye(len(places))))
    samples = torch.from_numpy(means) + noise @ root.T
    samples = samples * torch.as_tensor(deviation) + torch.as_tensor(mean)
    return means * deviation + mean, np.sqrt(np.diagonal(covariance)) * deviation, samples, weights


def milliseconds(run: Callable[[], Any], rounds: int = 10) -> float:
    run()
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    return (time.perf_counter() - began) / rounds * 1e3


def main() -> None:
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 4, 60))
    raw = np.sin(2 * x) * 3 + 10 + rng.normal(0, 0.3, 60)
    raw[7] = 90.0  # an outlier
    places = np.linspace(0, 4, 40)
    noise = torch.from_numpy(rng.normal(size=(8, 40)))
    compiled = torchcompile.compile(posterior)
    expected, found = posterior(x, raw, places, noise), compiled(x, raw, places, noise)
    for one, other in zip(expected, found, strict=True):
        assert type(one) is type(other)
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-6, atol=1e-8)
    times = [milliseconds(lambda f=f: f(x, raw, places, noise)) for f in (posterior, compiled)]  # type: ignore[misc]
    report = torchcompile.report()
    assert report.clean and report.captured == 1, report
    error = np.abs(found[0] - (np.sin(2 * places) * 3 + 10)).max()
    print(f"largest error of the mean {error:.2f}, weights of the lengths {np.round(found[3], 2)}")
    print(f"in one graph, eager {times[0]:.2f} ms, compiled {times[1]:.2f} ms")


if __name__ == "__main__":
    main()
