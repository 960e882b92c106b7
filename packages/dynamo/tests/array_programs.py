"""How programs on NumPy arrays are judged: results, arguments and the memory that they share are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import torchdynamo


def run(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a program gives, or raises."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return program(*args)
        except Exception as error:
            return type(error), str(error)


def judge(program: Callable[..., Any], compiled: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> None:
    """One call, eagerly and compiled, on arguments that are made alike."""
    expected_args, args = make(), make()
    expected, found = run(program, expected_args), run(compiled, args)
    assert_same((expected, expected_args), (found, args))
    assert shared_pairs((expected, expected_args)) == shared_pairs((found, args)), "memory is shared otherwise"


def captured(program: Callable[..., Any], backend: Any = None) -> Callable[..., Any]:
    torchdynamo.reset()
    return torchdynamo.optimize(backend or (lambda graph, inputs: graph.forward))(program)


def check(program: Callable[..., Any], *makers: Callable[[], tuple[Any, ...]], breaks: bool = False) -> None:
    """Calls with the arguments of each maker, twice. Without `breaks`, each version is one graph."""
    compiled = captured(program)
    for make in makers:
        judge(program, compiled, make)
        judge(program, compiled, make)
    stats = torchdynamo.stats()
    assert bool(stats.breaks) == breaks, stats.breaks
    assert breaks or not stats.fallbacks, stats.fallbacks


def assert_same(a: Any, b: Any, tolerance: float | None = None) -> None:
    """Equal in type, dtype, shape, strides and flags; floats up to rounding, that of the coarsest of them."""
    if tolerance is None:
        sizes = [array.dtype.itemsize >> (array.dtype.kind == "c") for array in _arrays(a) if array.dtype.kind in "fc"]
        tolerance = {2: 2e-2, 4: 2e-4}.get(min(sizes, default=8), 1e-9)
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), (a, b)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (a, b)
        if isinstance(a, np.ndarray):
            assert a.strides == b.strides or not a.size, (a.strides, b.strides)
            assert a.flags.writeable == b.flags.writeable, "writeable"
        if a.dtype.kind in "fc":
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(b, a)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), (a, b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other, tolerance)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], tolerance)
    else:
        assert a == b or (a != a and b != b), (a, b)


def shared_pairs(value: Any) -> list[tuple[int, int]]:
    """Which arrays and tensors of a value share memory, by their places in it."""
    arrays = [array for array in _arrays(value) if isinstance(array, np.ndarray)]
    places = range(len(arrays))
    return [(i, j) for i in places for j in places if i < j and np.may_share_memory(arrays[i], arrays[j])]


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value.detach().float().numpy() if value.dtype == torch.bfloat16 else value.detach().numpy()
    elif isinstance(value, (np.ndarray, np.generic)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _arrays(part)
