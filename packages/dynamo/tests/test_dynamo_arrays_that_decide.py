"""Arrays in the places where NumPy wants sizes, axes, counts and cuts: their data decides what the result is, which a
model of them cannot tell. Values are NumPy's, and what leaves the graph is a break, no fault of capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_programs import captured, judge

import torchdynamo

Program = Callable[[Any, Any], Any]


def an_item_is_written(a: Any, v: Any) -> Any:
    a[v[0] - 1, v[1]] = 7
    return a


def a_slice_is_written(a: Any, v: Any) -> Any:
    a[:, v[0] : v[1] + 1] = -1
    return a


def a_mask_is_written(a: Any, v: Any) -> Any:
    a[a > v[1]] = a[a > v[1]] * 2
    return a


def a_mask_is_added_to(a: Any, v: Any) -> Any:
    a[a > v[1]] += 7
    return a


def rows_of_a_mask_are_written(a: Any, v: Any) -> Any:
    a[a[:, 0] > v[1], 1:] = np.arange(3.0)
    return a


def pieces_between_places(a: Any, v: Any) -> Any:
    return [piece.sum() for piece in np.split(a[0], np.flatnonzero(a[0] > v[1]))]


PROGRAMS: dict[str, Program] = {
    "split": lambda a, v: np.split(a, v, axis=1),
    "split at a list": lambda a, v: np.split(a, [v[0], v[1]], axis=1),
    "array_split": lambda a, v: np.array_split(a, v, axis=1),
    "array_split into": lambda a, v: np.array_split(a, v[1], axis=1),
    "hsplit": lambda a, v: np.hsplit(a, v),
    "vsplit": lambda a, v: np.vsplit(a, v),
    "split along": lambda a, v: np.array_split(a, 2, axis=v[0] - 1),
    "reshape": lambda a, v: np.reshape(a, (v[1], -1)),
    "reshape, a method": lambda a, v: a.reshape(v[1], -1),
    "reshape to an array": lambda a, v: a.reshape(np.array([v[1] * 2, -1])),
    "roll": lambda a, v: np.roll(a, v[0]),
    "roll of two": lambda a, v: np.roll(a, v, axis=(0, 1)),
    "pad": lambda a, v: np.pad(a, v),
    "pad of two": lambda a, v: np.pad(a, ((v[0], 0), (0, v[1]))),
    "tile": lambda a, v: np.tile(a, v),
    "repeat": lambda a, v: np.repeat(a, v[1]),
    "repeat each": lambda a, v: a[:2].repeat(v, axis=0),
    "transpose": lambda a, v: np.transpose(a, v - 1),
    "moveaxis": lambda a, v: np.moveaxis(a, v[0] - 1, v[1] - 1),
    "sum": lambda a, v: np.sum(a, axis=v[0] - 1),
    "sum, a method": lambda a, v: a.sum(v[0] - 1),
    "std": lambda a, v: np.std(a, ddof=v[0]),
    "zeros": lambda a, v: np.zeros(v) + a.sum(),
    "full": lambda a, v: np.full(v, 2.0) * a.sum(),
    "arange": lambda a, v: np.arange(v[1]) * a.sum(),
    "linspace": lambda a, v: np.linspace(0, 1, v[1]) + a.sum(),
    "from": lambda a, v: a[v[0] :] * 2,
    "to": lambda a, v: a[:, : v[1]] * 2,
    "by": lambda a, v: a[:, :: v[1]] * 2,
    "eye": lambda a, v: np.eye(3, k=v[0]) * a.sum(),
    "triu": lambda a, v: np.triu(a, v[0]),
    "diag": lambda a, v: np.diag(a, v[0]),
    "diagonal": lambda a, v: np.diagonal(a, v[0]) * 2,
    "expand_dims": lambda a, v: np.expand_dims(a, v[0]),
    "squeeze": lambda a, v: np.squeeze(a[:, None], v[0]),
    "rot90": lambda a, v: np.rot90(a, v[0]),
    "flip": lambda a, v: np.flip(a, v[0] - 1),
    "matrix_power": lambda a, v: np.linalg.matrix_power(a[:3, :3], v[1]),
    "norm": lambda a, v: np.linalg.norm(a[0], v[1]),
    "round": lambda a, v: np.round(a / 7, v[1]),
    "vander": lambda a, v: np.vander(a[0], v[1]),
    "concatenate": lambda a, v: np.concatenate([a, a], axis=v[0] - 1),
    "stack": lambda a, v: np.stack([a, a], axis=v[0]),
    "cumsum": lambda a, v: np.cumsum(a, axis=v[0] - 1),
    "sort": lambda a, v: np.sort(-a, axis=v[0] - 1),
    "take along": lambda a, v: np.take(a, [0, 1], axis=v[0] - 1),
    "delete": lambda a, v: np.delete(a[0], v),
    "resize": lambda a, v: np.resize(a, v),
    "diff": lambda a, v: np.diff(a, n=v[1]),
    "fft": lambda a, v: np.fft.fft(a, n=v[1]),
    "tensordot": lambda a, v: np.tensordot(a, a, axes=v[1]) if v.size else a,
    "quantile": lambda a, v: np.quantile(a, v[0] / 4),
    "sorted": lambda a, v: [float(n) for n in sorted(v)],
    "largest": lambda a, v: a * max(v),
    "in order": lambda a, v: a * 2 if v[0] < v[1] < 9 else a,
    **{
        program.__name__.replace("_", " "): program
        for program in (
            an_item_is_written,
            a_slice_is_written,
            a_mask_is_written,
            a_mask_is_added_to,
            rows_of_a_mask_are_written,
            pieces_between_places,
        )
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_arrays_decide_is_as_they_are(name: str) -> None:
    compiled = captured(PROGRAMS[name])
    for places in ([1, 2], [1, 3], [2, 3], [2, 1], [1, 2]):
        judge(PROGRAMS[name], compiled, lambda places=places: (np.arange(12.0).reshape(3, 4), np.array(places)))
    stats = torchdynamo.stats()
    assert not stats.fallbacks, stats.fallbacks
    assert stats.breaks or stats.graphs == 1
