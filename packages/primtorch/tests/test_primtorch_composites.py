"""Our programs of `matmul` and `cross_entropy` against torch's: the same operators in the same order, with results laid out alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_replay import Recorder

from primtorch.fake.composites import cross_entropy_of_probabilities, kron, matmul


def operand(rng: random.Random, shape: list[int]) -> torch.Tensor:
    """Of any strides: permuted, or with gaps, or broadcast."""
    order = list(range(len(shape)))
    if rng.random() < 0.4:
        rng.shuffle(order)
    x = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    if rng.random() < 0.2:
        x = torch.randn([2 * size for size in shape])[tuple(slice(None, None, 2) for _ in shape)]
    elif rng.random() < 0.1:
        x = x[..., :1].expand(shape) if shape and shape[-1] else x
    return x.detach().requires_grad_(rng.random() < 0.4)


def operands(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    inner = rng.choice([4, 4, 4, 1, 0])
    batch = [rng.choice([1, 2, 3, 3, 0]), rng.choice([1, 2, 3])]
    made = []
    for core in ([rng.choice([1, 3, 5]), inner], [inner, rng.choice([1, 3, 5])]):
        dims = rng.choice([1, 2, 3, 3, 4])
        lead = [size if rng.random() < 0.7 else 1 for size in batch][4 - max(dims, 2) :]
        made.append(operand(rng, [inner] if dims == 1 else lead + core))
    return made[0], made[1]


def record(product: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    with Recorder() as recorder:
        try:
            out = product(x, y)
        except RuntimeError as error:
            return type(error), str(error)
    calls = [(name, made) for name, _, made in recorder.calls]
    if 2 < x.dim() < y.dim() and calls[0][0] == "aten.transpose.int":
        del calls[0]  # torch transposes the right operand before it sees that it has no use for that
    return calls, out.shape, out.stride(), out.dtype, out.requires_grad, torch.equal(out, torch.matmul(x, y))


@pytest.mark.parametrize("part", range(8))
def test_matmul_is_torchs(part: int) -> None:
    seed = random.randrange(2**30)  # drawn here: workers have to collect the same names
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for number in range(150):
        x, y = operands(rng)
        with torch.set_grad_enabled(rng.random() < 0.5):
            assert record(matmul, x, y) == record(torch.matmul, x, y), (seed, number, x.shape, y.shape)


def test_matmul_refuses_what_torch_refuses() -> None:
    for x, y in ((torch.ones(()), torch.ones(2)), (torch.ones(2, 3), torch.ones(2, 2)), (torch.ones(3), torch.ones(4))):
        assert record(matmul, x, y) == record(torch.matmul, x, y)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (3,), (1, 3)])
def test_cross_entropy_of_probabilities_is_torchs(shape: tuple[int, ...]) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    for kind, reduction, smoothing, weighted in itertools.product(kinds, range(3), (0.0, 0.1), (False, True)):
        scores, target = torch.randn(shape, dtype=kind, requires_grad=True), torch.rand(shape, dtype=kind)
        weight = torch.rand(3, dtype=kind) if weighted else None
        with Recorder() as expected:
            loss = torch.ops.aten.cross_entropy_loss(scores, target, weight, reduction, -100, smoothing)
        with Recorder() as found:
            own = cross_entropy_of_probabilities(scores, target, weight, reduction, smoothing)
        assert found.calls == expected.calls
        assert torch.equal(own, loss)


def kron_of(product: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    with Recorder() as recorder:
        try:
            out = product(x, y)
        except RuntimeError as error:
            return type(error), str(error)
    return (
        [call[0] for call in recorder.calls],
        out.shape,
        out.stride(),
        out.requires_grad,
        out.detach().flatten().tolist(),
    )


def test_kron_is_torchs() -> None:
    seed = random.randrange(2**30)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for number in range(200):
        x, y = (operand(rng, [rng.choice([0, 1, 2, 3]) for _ in range(rng.choice([0, 1, 2, 3]))]) for _ in range(2))
        assert kron_of(kron, x, y) == kron_of(torch.kron, x, y), (seed, number, x.shape, y.shape)
