"""Draws of compiled programs.

By default their distributions are eager's: values, digits and limits. With `options={"eager_random": True}` every draw
is eager's, in eager's order, and the generator ends where eager's does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchcompile

pytestmark = pytest.mark.expected_eager()  # nothing, but for what tests say themselves


def creation(x):
    return torch.rand(3) + x, torch.randn(3), torch.randint(0, 10, (4,)), torch.randperm(5), torch.rand_like(x) * x


def unused(x):
    torch.rand(7)
    return F.dropout(x, 0.5) + torch.rand_like(x)


def dropouts(x):
    return (
        F.dropout1d(x[None, None] * 1.0, 0.5), F.alpha_dropout(x, 0.3), F.rrelu(x, training=True),
        F.feature_alpha_dropout(x[None, :, None], 0.5),
    )  # fmt: skip


def in_place(x):
    normal, uniform, late = torch.empty(4).normal_(1, 2), torch.empty(3).uniform_(2, 3), torch.empty(3).exponential_()
    picks = torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), 5, replacement=True)
    return normal, uniform * x, late, torch.bernoulli(torch.full((5,), 0.3)), picks


def distributions(x):
    rate = x.abs().detach()
    return F.gumbel_softmax(x[None], hard=True), torch.normal(x, 2.0), torch.normal(0.0, rate), torch.poisson(rate * 5)


def attention(x):
    q = x.view(1, 1, 1, 3)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def under_a_checkpoint(x):
    return checkpoint(lambda v: F.dropout(v.sin(), 0.5), x, use_reentrant=False) + F.dropout(x, 0.2)


def order_of_use_is_not_that_of_drawing(x):
    first, second = torch.rand(3), torch.rand(3)
    return second - x, first * x


def a_draw_waits_for_a_kernel(x):
    """Another draw does not, and kernels that fuse across both would change their order."""
    heads = torch.bernoulli(torch.sigmoid(x.detach() * 3))
    noise = torch.rand(3)
    tails = torch.bernoulli(torch.sigmoid(x.detach() * 3 + noise))
    return (x * 3).exp() * noise + heads, torch.sigmoid(x * 3) * 2, tails


def over_another(x):
    held, rows = torch.ones(2, 3), torch.ones(3, 2)
    torch.randn(2, 3, out=held)
    torch.randn((2, 3), out=rows.t())
    torch.empty(size=(3,), out=held[0]).mul_(2)
    return torch.rand(3, out=held[1]) * x, held, torch.normal(0.0, 1.0, (3, 2), out=rows)


def seeded(x):
    torch.manual_seed(4)
    return torch.rand(3) * x


def saved_and_restored(x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return first * x, torch.rand(3) - first, torch.default_generator.get_state()


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        inside = torch.rand(3)
    return inside * x, torch.rand(3)


OWN = torch.Generator()


def from_an_own_generator(x):
    OWN.manual_seed(int(x.shape[0]))
    torch.rand(2)
    first = torch.rand(3, generator=OWN)
    drawn = torch.empty(3).uniform_(-1, 1, generator=OWN)
    state = OWN.get_state()
    again = torch.randn(3, generator=OWN)
    OWN.set_state(state)
    return first * x, drawn, torch.randn(3, generator=OWN) - again, torch.rand(3), OWN.get_state()


def from_a_generator_made_within(x):
    made = torch.Generator()
    first = torch.rand(3, generator=made)
    state = made.manual_seed(5).get_state()
    second = torch.bernoulli(x.detach().sigmoid(), generator=made)
    made.set_state(state)
    weight = torch.nn.init.normal_(torch.empty(3), generator=made)
    return first * x, second, weight, torch.rand(3)


PROGRAMS: tuple[Callable[[Any], Any], ...] = (
    seeded, saved_and_restored, forked, from_an_own_generator, from_a_generator_made_within, over_another, creation, unused, dropouts, in_place, distributions, attention, under_a_checkpoint,
    order_of_use_is_not_that_of_drawing, a_draw_waits_for_a_kernel,
)  # fmt: skip


def bare(x):
    """Draws on which nothing is computed."""
    normal, late = torch.empty(4).normal_(1, 2), torch.empty(3).exponential_()
    return (
        torch.rand(3),
        torch.randn(3),
        normal,
        torch.bernoulli(torch.full((5,), 0.3)),
        late,
        torch.rand_like(x),
        x * 2,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_bare_draws_are_eagers_to_the_last_bit(backend: str, dtype: torch.dtype) -> None:
    options = {"eager_random": True, "strict": True}
    compiled = torchcompile.compile(bare, backend=backend, fullgraph=True, options=options)
    x = torch.ones(3, dtype=dtype)
    for seed in (1, 2):
        runs = []
        for f in (bare, compiled):
            torch.manual_seed(seed)
            runs.append([*f(x), torch.rand(2)])
        torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_draws_are_eagers(program: Callable[[Any], Any], backend: str) -> None:
    options = {"eager_random": True, "strict": True}
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True, options=options)
    for seed in (1, 2):
        runs = []
        for f in (program, compiled):
            x = torch.linspace(-1, 2, 3).requires_grad_()
            torch.manual_seed(seed)
            results = f(x)
            results = results if isinstance(results, tuple) else (results,)
            sum(r.sum() for r in results if r.requires_grad).backward()
            runs.append([*results, x.grad, torch.rand(2)])
        torch.testing.assert_close(runs[1], runs[0])


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "with gaps": lambda x: x[:, ::2].permute(3, 1, 0, 2),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1).transpose(0, 2),
}
OVER_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5),
    "feature_dropout": lambda x: F.dropout2d(x, 0.5),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli method of a number": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "bernoulli_ of an input": lambda x: x.detach().clone().bernoulli_(0.3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty_like(x).random_(1000),
    "random_ between": lambda x: torch.empty_like(x).random_(-5, 1000),
    "random_ of an input between": lambda x: x.detach().clone().random_(3, 2**40),
    "poisson": lambda x: torch.poisson(x.detach().exp()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "multinomial": lambda x: torch.multinomial(x.detach().flatten(1).sigmoid(), 3),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", OVER_TENSORS)
def test_draws_over_any_layout_are_eagers(draw: str, layout: str, backend: str) -> None:
    """ATen draws in the order of memory: what a draw is like depends on the strides of what it is over."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        laid_out = LAYOUTS[layout](x)
        return OVER_TENSORS[draw](laid_out), F.dropout(laid_out * 2, 0.5)

    x = torch.randn(4, 4, 4, 6, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    wanted = program(x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    got = torchcompile.compile(program, backend=backend, options={"eager_random": True, "strict": True})(x)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(*[torch.autograd.grad(second.sum(), x)[0] for _, second in (wanted, got)])


def given(x, generator):
    return torch.rand(3, generator=generator) * x


def test_another_generator_comes_in_the_place_of_an_argument() -> None:
    compiled = torchcompile.compile(given, backend="aot_eager", fullgraph=True)
    x = torch.ones(3)
    for seed in range(4):
        wanted = given(x, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiled(x, torch.Generator().manual_seed(seed)), wanted, rtol=0, atol=0)
    torch.manual_seed(3)
    wanted = given(x, torch.default_generator), torch.rand(2)
    torch.manual_seed(3)
    torch.testing.assert_close((compiled(x, torch.default_generator), torch.rand(2)), wanted, rtol=0, atol=0)
    assert not torchcompile.report().recompiles


def test_a_state_gives_the_same_draws_again_in_compiled_draws() -> None:
    first, difference, _ = torchcompile.compile(saved_and_restored, fullgraph=True)(torch.ones(3))
    assert first.ne(0).all() and difference.eq(0).all()
    drawn, other = (torchcompile.compile(seeded, fullgraph=True)(torch.ones(3)) for _ in range(2))
    torch.testing.assert_close(drawn, other, rtol=0, atol=0)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_breaks_around_and_within_a_fork(backend: str) -> None:
    def program(x):
        print(end="")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            inside = torch.rand(3)
            print(end="")
            inside = inside + torch.rand(3)
        return inside * x, torch.rand(3)

    runs = []
    for f in (program, torchcompile.compile(program, backend=backend)):
        torch.manual_seed(1)
        runs.append([f(torch.ones(3)) for _ in range(2)])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


DRAWN = 20_000


def empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(DRAWN, dtype=dtype)


def rare(dtype: torch.dtype) -> torch.Tensor:
    """Sums of what happens once in ten thousand times, or does not."""
    hits = torch.bernoulli(torch.full((DRAWN, 50), 1e-4, dtype=torch.float64))
    return (hits + torch.empty(DRAWN, 50, dtype=dtype).bernoulli_(1 - 1e-4)).sum(1)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    **{f"rand {d}": lambda d=d: torch.rand(DRAWN, dtype=d) for d in (*FLOATS, torch.complex64, torch.complex128)},
    **{f"randn {d}": lambda d=d: torch.randn(DRAWN, dtype=d) for d in (*FLOATS, torch.complex64, torch.complex128)},
    **{f"uniform {d}": lambda d=d: empty(d).uniform_(-0.5, 2) for d in (*FLOATS, torch.complex64)},
    **{f"normal {d}": lambda d=d: empty(d).normal_(2, 3) for d in (*FLOATS, torch.complex64)},
    **{f"exponential {d}": lambda d=d: empty(d).exponential_(0.5) for d in FLOATS},
    **{f"cauchy {d}": lambda d=d: empty(d).cauchy_(1, 2) for d in FLOATS[:2]},
    **{f"log_normal {d}": lambda d=d: empty(d).log_normal_() for d in FLOATS[:2]},
    **{f"geometric {d}": lambda d=d: empty(d).geometric_(1e-3) for d in (torch.int64, torch.float64, torch.float32)},
    **{f"random_ {d}": lambda d=d: empty(d).random_() for d in (*FLOATS, torch.int64, torch.int32, torch.uint8)},
    **{f"random_ from -1 {d}": lambda d=d: empty(d).random_(-1, None) for d in (*FLOATS, torch.int64, torch.int16)},
    "random_ of all integers": lambda: empty(torch.int64).random_(-(2**63), None),
    **{
        f"randint {low} {high}": lambda low=low, high=high: torch.randint(low, high, (DRAWN,))
        for low, high in (
            (0, 5), (-3, 2**16), (0, 3 << 30), (0, 2**32), (5, 2**40 + 1), (0, 2**50), (0, 3 << 60), (-5, 2**63 - 6),
            (-(2**62), 2**63 - 1), (-(2**63), 2**63 - 1),
        )
    },
    "randint in float64": lambda: torch.randint(0, 2**53, (DRAWN,), dtype=torch.float64),
    "randint_like": lambda: torch.randint_like(empty(torch.float32), 10, 2**22),
    **{f"bernoulli {d}": lambda d=d: empty(d).bernoulli_(0.3) for d in (torch.float64, torch.float32, torch.int64)},
    **{f"rare {d}": lambda d=d: rare(d) for d in (torch.float64, torch.float32)},
    "normal of tensors": lambda: torch.normal(torch.ones(DRAWN, dtype=torch.float64), torch.full((DRAWN,), 2.0)),
    "multinomial": lambda: torch.multinomial(torch.tensor([1.0, 2, 0, 3]), DRAWN, replacement=True),
    "dropout": lambda: F.dropout(torch.ones(DRAWN, dtype=torch.float64), 0.3),
}  # fmt: skip


def every_draw():
    return [draw() for draw in DRAWS.values()]


def digits(values: torch.Tensor) -> torch.Tensor:
    """The last eight bits of each value."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[values.dtype.itemsize]
    return values.view(bits).to(torch.int64) & 0xFF


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of the two empirical distribution functions (Kolmogorov and Smirnov)."""
    a, b = a.sort().values, b.sort().values
    both = torch.cat([a, b])
    below = [torch.searchsorted(t, both, right=True) / len(t) for t in (a, b)]
    return float((below[0] - below[1]).abs().max())


def test_distributions_are_eagers() -> None:
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    ours = torchcompile.compile(every_draw, fullgraph=True)()
    for name, eager, drawn in zip(DRAWS, every_draw(), ours, strict=True):
        assert drawn.dtype == eager.dtype and drawn.shape == eager.shape, name
        if eager.is_complex():
            eager, drawn = torch.view_as_real(eager).flatten(), torch.view_as_real(drawn).flatten()
        limit = 4.0 * (2 / len(eager)) ** 0.5  # exceeded once in 10^13 times by two samples of one distribution
        assert distance(eager, drawn) < limit, f"{name}: another distribution, seed {seed}"
        assert distance(digits(eager), digits(drawn)) < limit, f"{name}: other digits, seed {seed}"


def test_limits_of_draws() -> None:
    def draws():
        small = torch.rand(10**6, dtype=torch.bfloat16), torch.rand(10**6, dtype=torch.float16)
        bounded = torch.empty(10**5, dtype=torch.bfloat16).random_(), torch.empty(10**5, dtype=torch.int8).random_()
        return *small, *bounded, torch.empty(10**6).exponential_(), torch.randint(-(2**63), 2**63 - 1, (10**5,))

    brain, half, whole, signed, late, wide = torchcompile.compile(draws, fullgraph=True)()
    assert (brain.min(), brain.max()) == (0, 1 - 2**-8) and (half.min(), half.max()) == (0, 1 - 2**-11)
    assert (whole.min(), whole.max()) == (0, 256) and (signed.min(), signed.max()) == (0, 127)
    assert late.min() > 0
    assert wide.min() < -(2**63) * 0.999 and wide.max() > 2**63 * 0.999


# --- draws over whatever lies in memory --------------------------------------------------------------
WHATEVER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(1, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "expanded and transposed": lambda x: x[:, :1].expand(-1, 4, -1, -1).transpose(1, 2),
    "every second": lambda x: x[..., ::2],
    "overlapping": lambda x: x.unfold(3, 3, 1)[:, :, 0],
    "one number": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:, :0],
}
WHATEVER_DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4),
    "alpha dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.4),
    "channels": lambda x: torch.nn.functional.dropout1d(x.reshape(2, -1, 1), 0.5) if x.numel() > 1 else x * 1,
    "bernoulli": lambda x: x.sigmoid().bernoulli() * x,
    "bernoulli of": lambda x: torch.bernoulli(x.detach(), 0.3) * x,
    "bernoulli in place": lambda x: x.clone().bernoulli_(0.3) * x,
    "uniform in place": lambda x: x.clone().uniform_() * x,
    "normal of": lambda x: torch.normal(x, x.detach().abs()),
    "rand like": lambda x: torch.rand_like(x) * x,
    "randn like": lambda x: torch.randn_like(x) * x,
    "randint like": lambda x: torch.randint_like(x, 7) * x,
    "exponential": lambda x: x.clone().exponential_() * x,
    "poisson": lambda x: torch.poisson(x.detach().abs()) * x,
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3) if x.dim() == 4 else x * 1,
}  # fmt: skip


@pytest.mark.parametrize("draw", WHATEVER_DRAWS)
def test_eagers_numbers_over_whatever_lies_in_memory(draw: str) -> None:
    """With eager's generator no draw is refused for the layout of what it is over, and each gives eager's numbers."""
    for name, layout in WHATEVER.items():

        def program(x: torch.Tensor, layout: Callable[[torch.Tensor], torch.Tensor] = layout) -> torch.Tensor:
            return WHATEVER_DRAWS[draw](layout(x.sin()))

        torchcompile.reset()
        compiled = torchcompile.compile(program, options={"strict": True, "eager_random": True})
        for size in (4, 5):  # with fixed sizes and with symbols
            x = torch.linspace(-1, 1, 3 * 4 * size * 6, dtype=torch.float64).reshape(3, 4, size, 6).requires_grad_()
            seen = []
            for run in (program, compiled):
                torch.manual_seed(size)
                found = run(x)
                seen.append((found.detach(), *torch.autograd.grad(found.sum(), x), torch.rand(2)))
            torch.testing.assert_close(*seen, msg=lambda m, name=name: f"{draw} over {name}: {m}")
