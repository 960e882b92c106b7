"""NumPy on numbers in captured programs: one graph, and eager's values and types."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from world_cases import Case, case, cases_of, check

import torchdynamo


@case()
def numbers(x: torch.Tensor, _: Any) -> Any:
    found = [np.sqrt(x.shape[-1]), np.log2(8), np.float32(0.1), np.ceil(2.5), int(np.prod(x.shape)), np.bool_(True)]
    return x / found[0] * found[2] - np.int64(3) + found[1] * x, np.exp(-1.0) * x, found, x.masked_fill(x > 0, -np.inf)


@case()
def arguments(x: torch.Tensor, _: Any) -> Any:
    n = np.int64(2)
    return (
        x.view(n, -1),
        torch.zeros(n, int(n)),
        x[n - 1],
        x.sum(np.int32(1)),
        torch.full((n,), np.float64(0.5)),
        x.reshape(np.prod(x.shape)),
    )


@case()
def tensors_of_numbers(x: torch.Tensor, _: Any) -> Any:
    weights = [np.exp(-((k - 1) ** 2) / 2.0) for k in range(3)]
    made = [torch.tensor(np.sqrt(3)), torch.tensor([np.float32(1), 2]), torch.tensor(np.int16(4)), torch.Tensor(weights),
            torch.tensor(np.array([True, False])), torch.as_tensor(np.float64(2), dtype=torch.float32)]  # fmt: skip
    return x * made[3] / made[3].sum(), made


@case()
def tensors_of_arrays(x: torch.Tensor, _: Any) -> Any:
    grid = np.stack(np.meshgrid(np.arange(3), np.linspace(0, 1, 2))).astype(np.float32)
    grid[0] += 1
    rows = torch.from_numpy(np.array([[1.0, 2.0, 3.0]])).float()
    rows *= 2
    inverse = np.linalg.inv(np.array([[1.0, 2.0], [3.0, 4.0]]))
    return (
        torch.from_numpy(grid) + x,
        rows + x,
        torch.as_tensor(inverse, dtype=torch.float32) @ x,
        torch.LongTensor(np.mgrid[0:2, 0:2]),
    )


@case()
def arrays_returned(x: torch.Tensor, _: Any) -> Any:
    a = np.arange(6.0).reshape(2, 3).T
    part = a[1:]
    part[0] = 9
    return x * a[1, 1], a, part, a.shape


@case(lambda: {"scale": np.float64(0.25), "heads": np.int64(2), "zero": np.float64(-0.0), "nan": np.float64("nan")})
def scalars_of_the_outside(x: torch.Tensor, s: dict[str, Any]) -> Any:
    return x * s["scale"], x.view(s["heads"], -1), x / s["zero"], torch.isnan(x + s["nan"]), s["heads"], s["zero"]


@case(breaks=None)
def memory_shared_with_a_tensor(x: torch.Tensor, _: Any) -> Any:
    def written_array(x: torch.Tensor) -> Any:
        a = np.arange(3.0)
        t = torch.from_numpy(a)
        a[0] = 7
        return x + t

    def written_tensor(x: torch.Tensor) -> Any:
        a = np.arange(3.0)
        t = torch.as_tensor(a)
        t += 1
        return x + float(a[0])

    def both_returned(x: torch.Tensor) -> Any:
        a = np.arange(3.0)
        t = torch.from_numpy(a)
        torchdynamo.graph_break()
        a[0] = 7
        return x + t

    return written_array(x), written_tensor(x), both_returned(x)


@case(breaks=None)
def random_numbers(x: torch.Tensor, _: Any) -> Any:
    np.random.seed(3)
    return x * np.random.rand(), np.random.randint(5)


@case(lambda: np.array([1.0, 2.0, 3.0]))
def arrays_of_the_outside(x: torch.Tensor, a: Any) -> Any:
    return x * 2 + torch.from_numpy(a).float()


@pytest.mark.parametrize("found", cases_of(__name__))
def test_numpy(found: Case) -> None:
    if found.breaks is None:
        check_values(found)
    else:
        check(found)


def check_values(found: Case) -> None:
    """What breaks is right as well, however often it breaks."""
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(found.program)
    for _ in range(found.calls):
        x = torch.randn(2, 3)
        for a, b in zip(found.program(x, None), compiled(x, None), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


UNARY: tuple[Callable[[Any], Any], ...] = (
    np.sqrt, np.exp, np.abs, np.cumsum, np.sum, np.mean, np.asarray, np.float32, np.ravel, np.transpose, np.sign,
    lambda a: np.asarray(a).astype(np.float16), lambda a: np.asarray(a, dtype=np.int32), lambda a: np.asarray(a) * 2 + 1,
    lambda a: np.asarray(a)[..., None], lambda a: np.max(a), lambda a: np.diff(np.ravel(a), append=1),
    lambda a: np.where(np.asarray(a) > 1, a, 0), lambda a: np.clip(a, 0, 2), lambda a: np.asarray(a).tolist(),
)  # fmt: skip
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    np.add, np.maximum, np.hypot, np.outer, lambda a, b: np.asarray(a).sum() * b, lambda a, b: np.concatenate([np.ravel(a), np.ravel(b)]),
    lambda a, b: (np.asarray(a).shape, b)[1],
)  # fmt: skip


@pytest.mark.parametrize("repeat", range(20))
def test_random_expressions_of_numbers(repeat: int) -> None:
    """Expressions of NumPy's functions give eager's values and dtypes in a graph without a break."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    steps = [(generator.random(), generator.choice(UNARY), generator.choice(BINARY)) for _ in range(5)]
    start = generator.choice([3, 0.5, (1.0, 4.0), range(3), [[1, 2], [3, 4]]])

    def program(x: torch.Tensor) -> Any:
        value: Any = start
        for choice, unary, binary in steps:
            value = unary(value) if choice < 0.7 else binary(value, x.shape[0])
        made = torch.tensor(value)
        return x * np.float64(np.sum(value) % 7), made, made.sum() + x.sum(), value

    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    x = torch.randn(2, 3)
    with np.errstate(all="ignore"):
        expected = program(x)
        found = compiled(x)
        again = compiled(x)
    for a, b in ((expected, found), (expected, again)):
        for one, other in zip(a[:3], b[:3], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, check_stride=True)
        assert type(a[3]) is type(b[3])
        assert np.asarray(a[3]).dtype == np.asarray(b[3]).dtype
        np.testing.assert_array_equal(a[3], b[3])
    assert torchdynamo.stats().graphs == 1
    assert not torchdynamo.stats().breaks
