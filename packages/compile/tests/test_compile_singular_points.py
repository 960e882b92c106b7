"""Where operators are singular: zeros, equal elements, ends of domains. Values and two derivatives are eager's in float64,
NaN and infinity included, and where eager refuses a derivative so does compiled code."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import torchcompile

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager(...)]

Program = Callable[..., Any]


def compiled(program: Program, backend: str) -> Program:
    options = {"eager_random": True} if backend == "inductor" else {}
    return torchcompile.compile(program, backend=backend, options=options)


def as_real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def two_derivatives(program: Program, args: Any, kwargs: Any, seed: int) -> list[list[Tensor | None] | Exception]:
    """The results, their derivative by all that requires one along a drawn direction, and that one's derivative."""
    leaves: list[Tensor] = []

    def own(t: Tensor) -> Tensor:
        copy = t.detach().clone().requires_grad_(t.requires_grad)
        leaves.extend([copy] if t.requires_grad else [])
        return copy

    args, kwargs = pytree.tree_map_only(Tensor, own, (args, kwargs))
    torch.manual_seed(seed)
    drawn = torch.Generator().manual_seed(seed)
    found: list[list[Tensor | None] | Exception] = []
    try:
        values = [t for t in pytree.tree_leaves(program(*args, **kwargs)) if isinstance(t, Tensor)]
        found.append(list(values))
        for order in range(2):
            along = [as_real(t) for t in values if t.requires_grad]
            total = sum((t * torch.randn(t.shape, generator=drawn)).sum() for t in along)
            if not along:
                break
            slopes = torch.autograd.grad(total, leaves, create_graph=order == 0, allow_unused=True)
            found.append(list(slopes))
            values = [g for g in slopes if g is not None]
    except Exception as error:  # of any kind: it is what is compared
        found.append(error)
    return found


def compare(got: Sequence[Any], expected: Sequence[Any], where: str) -> None:
    """A program that is refused at its second derivative may be refused as soon as it is asked for its first."""
    refused = isinstance(expected[-1], Exception)
    assert not refused or type(got[-1]) is type(expected[-1]), f"{where}: eager refuses {expected[-1]!r}, found {got}"
    for a, b in zip(got[: len(got) - refused], expected, strict=False):
        assert not isinstance(a, Exception), f"{where}: {a!r}"
        for x, y in zip(a, b, strict=True):
            if x is None or y is None:  # no derivative: nothing, or zeros
                assert all(t is None or not t.any() for t in (x, y)), where
            else:
                torch.testing.assert_close(
                    x.detach(), y.detach(), rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m: f"{where}: {m}"
                )


def points() -> Iterator[Tensor]:
    """Three numbers, each set of them zero; equal numbers; ones, an end of many domains."""
    for zeros in itertools.product((False, True), repeat=3):
        yield torch.tensor([0.7, -1.3, 2.1]).masked_fill(torch.tensor(zeros), 0.0)
    yield torch.tensor([0.6, 0.6, 0.6])
    yield torch.ones(3)
    yield torch.tensor([0.7, 0.7, -1.0])


def pairs(x: Tensor) -> Tensor:
    return torch.complex(x, x.flip(0))


ENDS_OF_DOMAINS = ("log", "acos", "asin", "acosh", "atanh", "erfinv", "logit")
PROGRAMS: dict[str, Program] = {
    "cumprod": lambda x: x.cumprod(0),
    "cumprod of rows": lambda x: x.expand(2, 3).cumprod(1),
    "cumprod of complex": lambda x: pairs(x).cumprod(0),
    "two cumprods": lambda x: (x.cumprod(0) * x.flip(0).cumprod(0)).cumprod(0),
    "prod": lambda x: x.prod(),
    "prod of columns": lambda x: x.reshape(3, 1).expand(3, 2).prod(0),
    "prod of complex": lambda x: pairs(x).prod(0),
    "scattered product": lambda x: torch.ones(2).scatter_reduce(0, torch.tensor([0, 0, 1]), x, "prod"),
    "indexed product": lambda x: torch.ones(2).index_reduce(0, torch.tensor([0, 0, 1]), x, "prod"),
    "cumsum and logcumsumexp": lambda x: x.cumsum(0) + x.logcumsumexp(0),
    "norms": lambda x: torch.stack([x.norm(p) for p in (0, 1, 1.5, 2, 3, float("inf"))]),
    "sqrt": lambda x: x.abs().sqrt() + x.sqrt() + x.rsqrt(),
    "powers": lambda x: torch.stack([x**p for p in (0, 0.5, 1, 1.5, 2, 3, -1)]),
    "powers of tensors": lambda x: x ** torch.tensor([0.0, 1.0, 2.0]) + x**x + 0.0 ** x.abs(),
    "atan2": lambda x: torch.atan2(x, x.flip(0)) + torch.atan2(x, x * 0),
    "hypot": lambda x: torch.hypot(x, x.flip(0)) + torch.hypot(x, x),
    "masked division": lambda x: torch.where(x != 0, 1 / x, 0 * x),
    "guarded division": lambda x: torch.where(x != 0, 1 / torch.where(x != 0, x, 1.0), 0.0),
    "std of one": lambda x: x[:1].std(correction=0) + x[:1].var(correction=0),
    "std of one, corrected": lambda x: torch.stack([x[:1].std(), x[:1].var()]),
    "distances": lambda x: torch.cdist(x[:, None], x[:, None] * 1),
    "distances of 1": lambda x: torch.cdist(x[:, None], x[:, None] * 1, p=1),
    "distances of 1.5": lambda x: torch.cdist(x[:, None], x[:, None] * 1, p=1.5),
    "distances of infinity": lambda x: torch.cdist(x[:, None], x[:, None] * 1, p=float("inf")),
    "pdist": lambda x: F.pdist(x[:, None]),
    "sinc": lambda x: x.sinc(),
    "xlogy": lambda x: torch.xlogy(x, x.flip(0)) + torch.special.xlog1py(x, x - 1) + torch.special.entr(x),
    "ties": lambda x: torch.stack([torch.maximum(x, x.flip(0)), x.amax() + x, x.amin() + x, x.median() + x, x.max() + x]),
    "kinks": lambda x: torch.stack([x.abs(), x.relu(), x.clamp(0, 1), F.elu(x), F.hardshrink(x), F.huber_loss(x, x) + x]),
    "complex": lambda x: torch.stack([pairs(x).abs(), pairs(x).angle(), pairs(x).sqrt().real, pairs(x).sgn().imag]),
    "normalised": lambda x: F.normalize(x, dim=0) + F.cosine_similarity(x, x.flip(0) * 1, dim=0),
    "layer norm of one": lambda x: F.layer_norm(x[:1], (1,)) + F.rms_norm(x, (3,)),
    **{name: lambda x, name=name: getattr(x, name)() for name in ENDS_OF_DOMAINS},
}  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_zeros_in_every_position(name: str, backend: str) -> None:
    program = PROGRAMS[name]
    run = compiled(program, backend)
    for x in points():
        args = (x.requires_grad_(),)
        expected = two_derivatives(program, args, {}, 0)
        compare(two_derivatives(run, args, {}, 0), expected, f"{name} at {x.tolist()}")


EQUAL_SETS = [
    ((49,), (0,)),
    ((3, 49), (1,)),
    ((49, 3), (0,)),
    ((5, 7, 11), (0, 2)),
    ((2, 3000), (1,)),
    ((3000, 2), (0,)),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_equal_elements_have_no_deviation(dtype: torch.dtype, dynamic: bool) -> None:
    """A mean that is a sum divided misses equal elements by its rounding; the root of so small a variance has a slope.
    The elements are as well those that a mask chose."""
    drawn = torch.Generator().manual_seed(random.randrange(1 << 30))
    programs: dict[str, Program] = {
        "std": lambda x, dims: x.std(dims),
        "std_mean": lambda x, dims: torch.std_mean(x, dims, keepdim=True),
        "std_mean of products": lambda x, dims: torch.std_mean(x * 1.5, dims),
        "chosen": lambda x, dims: x[x == x].std(),
    }
    for shape, dims in EQUAL_SETS:
        kept = [1 if d in dims else s for d, s in enumerate(shape)]
        one = torch.rand(kept, generator=drawn, dtype=torch.float64) * 10
        for name, program in programs.items():
            x = (one.flatten()[0] if name == "chosen" else one).expand(shape).to(dtype).requires_grad_()
            result = torchcompile.compile(program, dynamic=dynamic)(x, dims)
            spread, mean = result if isinstance(result, tuple) else (result, None)
            assert not spread.any(), (name, shape, spread)
            if mean is not None and not dtype.is_complex:
                assert torch.equal(mean, (x * 1.5 if "products" in name else x).amax(dims, name == "std_mean"))
            (slope,) = torch.autograd.grad(spread.sum(), x)
            assert not slope.any(), (name, shape, slope)


@pytest.mark.parametrize("dynamic", [False, True])
def test_third_derivatives_of_a_cumulative_product(dynamic: bool) -> None:
    seed = random.randrange(1 << 30)
    drawn = torch.Generator().manual_seed(seed)

    def third(call: Program, x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(second.cos().sum(), x)[0]

    program = lambda x: x.cumprod(1)
    run = torchcompile.compile(program, backend="aot_eager", dynamic=dynamic)
    for length in (1, 2, 5, 9):
        # The cosine's slope by rounding is as large as what it is of: products of nine numbers are kept from growing.
        sizes, signs = (torch.rand(3, length, generator=drawn) for _ in range(2))
        x = (sizes * 0.75 + 0.5) * (signs - 0.5).sign()
        x = x.masked_fill(torch.rand(x.shape, generator=drawn) < 0.4, 0.0).requires_grad_()
        torch.testing.assert_close(third(run, x), third(program, x), rtol=1e-9, atol=1e-9, msg=lambda m: f"{seed}: {m}")


class Checked(torch.autograd.Function):
    """Its derivative is refused for numbers below zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        torch._assert_async((x >= 0).all(), "below zero")
        return 2 * gradient * x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_derivative_asserts_is_asked_at_every_order(backend: str) -> None:
    run = compiled(lambda x: Checked.apply(x).sin(), backend)
    for order in (1, 2):
        for least in (0.5, -0.5):
            x = torch.tensor([least, 1.0], requires_grad=True)
            y = run(x).sum()
            try:
                for _ in range(order):
                    (slope,) = torch.autograd.grad(y, x, create_graph=True)
                    y = slope.sum()
            except RuntimeError as error:
                assert "below zero" in str(error) and least < 0
            else:
                assert least > 0


# --- drawn ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Apart:
    """Why an operator of the database is not compared."""

    why: str


SINGULAR = Apart("eager asks the data whether a matrix is singular, and takes another formula or refuses")
DRAWS = Apart("its second derivative needs what the forward drew: refused, with an error that says so")
WRITES = Apart("its second derivative needs what the forward wrote over: refused, with an error that says so")
NOT_DENSE = Apart("results that are not strided")
OTHER: dict[str, Apart] = {
    **dict.fromkeys(("det", "logdet", "linalg.det", "linalg.slogdet", "linalg.solve_ex", "linalg.inv_ex"), SINGULAR),
    **dict.fromkeys(("nn.functional.rrelu", "nn.functional.fractional_max_pool2d"), DRAWS),
    "nn.functional.fractional_max_pool3d": DRAWS,
    **dict.fromkeys(("_batch_norm_with_update", "_native_batch_norm_legit"), WRITES),
    "nn.functional.gaussian_nll_loss": WRITES,  # under no_grad
    **dict.fromkeys(("to_sparse", "sparse.mm", "sparse.sampled_addmm"), NOT_DENSE),
    "linalg.eig": Apart("eager asks the data whether the loss depends on the phase of the vectors"),
    "logit": Apart("beyond `eps` eager's second derivative is 0 times infinity, and ours is 0"),
    "quantile": Apart("eager asks the data whether the quantiles are in [0, 1]"),
    "nanquantile": Apart("eager asks the data whether the quantiles are in [0, 1]"),
}
ELEMENTS = (0.0, 0.0, 0.0, 1.0, -1.0, 0.5, 2.0)


def singular(t: Tensor, drawn: random.Random) -> Tensor:
    """Zeros, or special numbers, in the place of all elements or of some; or one number for many elements."""
    manner = drawn.choice(("some", "all", "ties", "zeros"))
    flat = t.detach().clone().reshape(-1)
    for place in range(flat.numel()):
        if manner == "zeros":
            flat[place] = 0.0
        elif manner == "all" or drawn.random() < 0.4:
            flat[place] = drawn.choice(ELEMENTS)
        elif manner == "ties":
            flat[place] = flat[0]
    return flat.reshape(t.shape).requires_grad_()


def operators() -> list[Any]:
    found = [op for op in database.op_db if op.name not in OTHER and op.supports_autograd]
    return [op for op in found if torch.float64 in op.supported_backward_dtypes("cpu")]


def size(sample: Any) -> int:
    return sum(t.numel() for t in pytree.tree_leaves((sample.input, sample.args)) if isinstance(t, Tensor))


def check(op: Any, backend: str, seed: int, samples: int) -> None:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    given = [s for s in op.sample_inputs("cpu", torch.float64, requires_grad=True) if size(s) < 200]
    for sample in drawn.sample(given, min(samples, len(given))):
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda t: singular(t, drawn) if t.requires_grad and t.is_floating_point() else t,
            ((sample.input, *sample.args), sample.kwargs),
        )
        expected, again = (two_derivatives(op.op, args, kwargs, seed) for _ in range(2))
        where = f"{op.name} {op.variant_test_name}, seed {seed}"
        try:
            compare(again, expected, where)
        except AssertionError:
            continue  # eager's own results differ from call to call
        torchcompile.reset()
        run = compiled(lambda *a, **k: op.op(*a, **k), backend)
        compare(two_derivatives(run, args, kwargs, seed), expected, where)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_drawn_operators(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TORCHCOMPILE_SINGULAR=all` runs the whole database, `TORCHCOMPILE_SEED` with other numbers."""
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    seed = int(os.environ.get("TORCHCOMPILE_SEED") or random.randrange(1 << 30))
    every = os.environ.get("TORCHCOMPILE_SINGULAR") == "all"
    found = operators()
    wrong: list[str] = []
    for op in found if every else random.Random(seed).sample(found, 40 if backend == "aot_eager" else 10):
        try:
            check(op, backend, seed, 2 if every else 1)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
