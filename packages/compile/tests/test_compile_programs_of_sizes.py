"""Operators that torch's own code computes from sizes as numbers, or with a look at data that sizes tell, are one graph
for all sizes: values and gradients as near to float64's as eager's, in several dtypes and layouts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchcompile
import torchinductor.codegen.cpp.plan
from primtorch.ledger import LEDGER, Effect, of

Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor], Tensor]

# Each takes an image (rows, columns) and another one of the same sizes.
PROGRAMS: dict[str, Program] = {
    "cov": lambda x, y: x.cov(),
    "cov, all degrees": lambda x, y: torch.cov(x, correction=0),
    "cov of a row": lambda x, y: torch.cov(x[0]),
    "cov, weighted": lambda x, y: torch.cov(x, aweights=y[0].abs() + 0.5),
    "cov, repeated": lambda x, y: torch.cov(x, fweights=(y[0] > 0).long() + 1, correction=2),
    "cov, both": lambda x, y: torch.cov(x, fweights=(y[0] > 0).long() + 1, aweights=y[1].abs() + 0.5),
    "corrcoef": lambda x, y: torch.corrcoef(x),
    "block_diag": lambda x, y: torch.block_diag(x, y[0], y.t()),
    "take_along_dim": lambda x, y: torch.take_along_dim(x, y.argsort(1), 1),
    "take_along_dim, broadcast": lambda x, y: torch.take_along_dim(x, y[:1].argsort(1), 1),
    "take_along_dim, flat": lambda x, y: torch.take_along_dim(x.contiguous(), y.flatten().argsort()),
    "masked_select": lambda x, y: x.masked_select(y > 0),
    "masked_select, broadcast": lambda x, y: x[0].masked_select(y > 0),
    "multi_dot": lambda x, y: torch.linalg.multi_dot([x, y.t(), x]),
    "multi_dot of vectors": lambda x, y: torch.linalg.multi_dot([x[:, 0], y, x[0]]),
    "multi_dot of four": lambda x, y: torch.linalg.multi_dot([x, y.t(), x[:, :3], y[:3]]),
    "multi_dot of five": lambda x, y: torch.linalg.multi_dot([x[0], y.t(), x, y.t()[:, :2], x[:2, 0]]),
    "gradient": lambda x, y: torch.cat([g.flatten() for g in torch.gradient(x, spacing=0.5)]) * y.max(),
    "gradient of a dim": lambda x, y: torch.gradient(x * y, spacing=[0.75], dim=1, edge_order=2)[0],
    "gradient of dims": lambda x, y: sum(torch.gradient(x * y, spacing=[2.0, 3.0], dim=[-1, 0])),
    "unsafe_chunk": lambda x, y: torch.cat([part.sum(0, keepdim=True) for part in x.unsafe_chunk(2)]),
    "mvlgamma": lambda x, y: (x.abs() + 3).mvlgamma(2),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, (y[:, 0] > 0).to(y.dtype) * 2 - 1),
    "polygamma_": lambda x, y: (x.abs() + 1).polygamma_(1),
    "written": lambda x, y: x.mul(2).sin_().neg_() + y.clone().tanh_().sgn_(),
    "padded by its kernel": lambda x, y: F.conv1d(x[None], y[:3, None, :3].repeat(x.shape[0], 1, 1)[: x.shape[0]],
                                                  padding="same", groups=x.shape[0]),
    "strides of sizes": lambda x, y: F.conv2d(x[None, None], y[None, None, :3, :3], stride=x.shape[0] // 3),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by rows": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: F.pad(x, (1, 39 - x.shape[1]))[:, 1 : 1 + x.shape[1]],
}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).abs().max())


def with_gradient(program: Program, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = x.detach(), y.detach()
    x.requires_grad_()
    found = program(x, y)
    steps = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape).to(found.dtype)
    return found, torch.autograd.grad((found * steps).sum(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_sizes(name: str, dtype: torch.dtype) -> None:
    seed = random.randrange(2**31)
    draw, layout = random.Random(seed), random.Random(seed + 1).choice(sorted(LAYOUTS))
    generator = torch.Generator().manual_seed(seed)
    program = PROGRAMS[name]
    torchcompile.reset()
    LEDGER.clear()
    compiled = torchcompile.compile(program, dynamic=True, fullgraph=True, options={"strict": True})
    for _ in range(3):
        rows = draw.randint(6, 11)
        sizes = rows, draw.choice([n for n in range(6, 14) if n != rows])
        x, y = (LAYOUTS[layout](torch.randn(sizes, generator=generator).to(dtype)) for _ in range(2))
        where = f"seed {seed}: {name} of {sizes} {layout}, {dtype}"
        wanted, exact = with_gradient(program, x, y), with_gradient(program, x.double(), y.double())
        found = with_gradient(compiled, x, y)
        assert found[0].stride() == wanted[0].stride(), where
        for ours, theirs, truth in zip(found, wanted, exact, strict=True):
            assert ours.shape == theirs.shape and ours.dtype is theirs.dtype, where
            unit = torch.finfo(dtype).eps * max(1.0, float(truth.detach().abs().max()))
            assert error(ours, truth) <= 2 * error(theirs, truth) + 8 * unit, where
    assert not of(LEDGER.events, Effect.FALLBACK, Effect.BREAK), f"seed {seed}: {LEDGER.events}"
    versions = 3 if "multi_dot" in name else 1  # which order of the products is cheaper
    assert len(of(LEDGER.events, Effect.RECOMPILE)) < versions, f"seed {seed}: {LEDGER.events}"


@pytest.mark.parametrize("window", [7, 10])
def test_spectra_of_signals_of_any_length(window: int) -> None:
    def program(x: Tensor) -> Tensor:
        hann = torch.hann_window(window, dtype=x.dtype)
        return torch.stft(x, 10, 3, window, hann, onesided=True, return_complex=True).abs()

    LEDGER.clear()
    compiled = torchcompile.compile(program, dynamic=True, fullgraph=True, options={"strict": True})
    for length in (40, 57, 31):
        x = torch.randn(2, length, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), program(x))
    assert not of(LEDGER.events, Effect.FALLBACK, Effect.BREAK, Effect.RECOMPILE), LEDGER.events


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "frequencies below zero": lambda x: torch.cov(x, fweights=(x[0] * 0).long() - 1),
    "weights below zero": lambda x: torch.cov(x, aweights=-x[0].abs()),
    "weights of nothing": lambda x: torch.cov(x, aweights=x[0] * 0),
    "too many weights": lambda x: torch.cov(x, aweights=x.flatten().abs()),
    "truth values": lambda x: torch.cov(x > 0),
}


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_of_weights(name: str) -> None:
    x = torch.randn(3, 7)
    with pytest.raises(RuntimeError) as wanted:
        REFUSED[name](x)
    with pytest.raises(RuntimeError) as found:
        torchcompile.compile(REFUSED[name], dynamic=True)(x)
    assert str(found.value).splitlines()[0] == str(wanted.value).splitlines()[0]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("dynamic", [True, None])
def test_too_few_observations_are_warned_of_as_by_eager(dynamic: bool | None) -> None:
    compiled = torchcompile.compile(lambda x: x.cov(correction=9), dynamic=dynamic)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        found = compiled(torch.randn(3, 5))
    assert found.isinf().all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_derivatives_are_those_of_eagers_program(name: str) -> None:
    """A gradient of ours is differentiated as it is written: it has to have eager's slope, not its values alone."""
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    run = torchcompile.compile(PROGRAMS[name], dynamic=True, backend="aot_eager")
    for rows, columns in ((7, 9), (7, 9), (8, 6)):
        x, y = (torch.randn(rows, columns, dtype=torch.float64, generator=generator) for _ in range(2))
        found = []
        for call in (run, PROGRAMS[name]):
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(call(leaf, y).square().sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.sin().sum(), leaf, allow_unused=True)[0])
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8, msg=lambda m: f"seed {seed}: {m}")


def test_zeros_in_a_cumulated_product() -> None:
    """The gradient has a case for each: no zero, the first one, what comes behind."""
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    compiled = torchcompile.compile(lambda x: x.cumprod(1), dynamic=True)
    for columns in (6, 9):
        x = torch.randn(8, columns, dtype=torch.float64, generator=generator)
        for row in range(1, 8):
            x[row, torch.randperm(columns, generator=generator)[: (row + 1) // 2]] = 0
        tangent = torch.randn(8, columns, dtype=torch.float64, generator=generator)
        grads = []
        for function in (compiled, lambda x: x.cumprod(1)):
            leaf = x.clone().requires_grad_()
            grads += torch.autograd.grad(function(leaf), leaf, tangent)
        torch.testing.assert_close(grads[0], grads[1], msg=lambda m: f"seed {seed}: {m}")


def test_a_stride_that_some_sizes_have_none_of() -> None:
    """The order of loops asks how large strides often are: there may be a size at which they are divided by zero."""
    less = torchinductor.codegen.cpp.plan._OFTEN

    def program(x: Tensor, y: Tensor) -> Tensor:
        rows = x.view(-1, y.shape[0] - less)
        return rows.t().contiguous().sin() + rows.t()

    LEDGER.clear()
    compiled = torchcompile.compile(program, dynamic=True, fullgraph=True, options={"strict": True})
    for width, count in ((6, 5), (4, 9)):
        x, y = torch.randn(width * count, dtype=torch.float64), torch.randn(less + width)
        torch.testing.assert_close(compiled(x, y), program(x, y))
    assert not of(LEDGER.events, Effect.FALLBACK), LEDGER.events
