"""Fusion does not change results: random pointwise, reduction, view and gather graphs against the prims' references."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prim_graphs import build

import primtorch
from torchinductor import Account, InductorOptions, compile_graph
from torchinductor.indexing import as_expr
from torchinductor.ir import Axis
from torchinductor.scheduling.unify import unify

SHAPES = [(4, 6), (6, 4), (24,), (2, 3, 4), (4, 1), (1, 6), (2, 2, 6)]


def step(p, values, choice, a, b):
    """One more value from earlier ones."""
    x, y = values[a % len(values)], values[b % len(values)]
    n = len(x.shape)
    match choice:
        case "tanh" | "exp" | "neg" | "abs" | "sigmoid":
            x = p.sigmoid(x) if choice == "exp" else x
            return getattr(p, choice)(x)
        case "add" | "mul" | "maximum":
            if x.shape != y.shape:
                total = 1
                for s in x.shape:
                    total *= s
                other = 1
                for s in y.shape:
                    other *= s
                y = p.reshape(y, x.shape) if total == other else p.mul(x, 0.5)
            return getattr(p, choice)(x, y)
        case "sum" | "amax":
            dims = (b % n,) if b % 3 else tuple(range(n))
            reduced = getattr(p, choice)(x, dims, True)
            return p.sub(x, p.expand(reduced, x.shape)) if b % 2 else reduced
        case "var":
            var, mean = p.var_mean(x, (n - 1,), 0.0, True)
            return p.mul(p.sub(x, p.expand(mean, x.shape)), p.expand(p.rsqrt(p.add(var, 1.0)), x.shape))
        case "permute":
            return p.permute(x, tuple(reversed(range(n))))
        case "reshape":
            total = 1
            for s in x.shape:
                total *= s
            fits = [s for s in SHAPES if torch.Size(s).numel() == total]
            return p.reshape(x, fits[b % len(fits)]) if fits else x
        case "flip":
            return p.flip(x, (b % n,))
        case "cat":
            return p.cat((x, x), b % n)
        case "slice":
            return p.slice(x, b % n, 0, (x.shape[b % n] + 1) // 2, 1)
        case "cumsum":
            return p.cumsum(x, b % n)
    raise AssertionError(choice)


CHOICES = [
    "tanh",
    "exp",
    "neg",
    "abs",
    "sigmoid",
    "add",
    "mul",
    "maximum",
    "sum",
    "amax",
    "var",
    "permute",
    "reshape",
    "flip",
    "cat",
    "slice",
    "cumsum",
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=14),
    st.integers(0, 2**31),
)
def test_random_graphs(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((4, 6), (24,), (2, 3, 4))]

    def fn(p, *values):
        values = list(values)
        for choice, a, b in steps:
            made = step(p, values, choice, a, b)
            if torch.Size(made.shape).numel() <= 400:
                values.append(made)
        return tuple(values[3:][-4:]) or (p.neg(values[0]),)

    gm = build(fn, *inputs)
    want = gm(*inputs)
    for fuse in (True, False):
        got = compile_graph(gm, inputs, InductorOptions(fuse=fuse, parallel_grain=64))(*inputs)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)
            assert g.stride() == w.stride() or 1 in g.shape


def test_spaces_without_points_are_not_one_space():
    def space(*sizes):
        return [Axis(f"i{k}", as_expr(n), False) for k, n in enumerate(sizes)]

    assert unify(space(0, 5), space(0, 5, 3, 4)) is None
    assert unify(space(0, 5), space(0, 5)) is not None
    assert unify(space(6, 5), space(2, 3, 5)) is not None


# A row with a value at one place: its sum is that value, wherever the place is. And rows that are none such.
PLACES = torch.tensor([2, -100, 0, 5, 6, -1])
ROWS = {
    "along rows": (lambda v, x, at, i: torch.where(i == at[:, None], v[:, None], 0.0).sum(1), True),
    "kept": (lambda v, x, at, i: torch.where(at[:, None] == i, v[:, None], 0.0).sum(-1, keepdim=True) * x, True),
    "along columns": (lambda v, x, at, i: torch.where(i[:, None] == at, v * 2, 0.0).sum(0), True),
    "an expression's place": (
        lambda v, x, at, i: torch.where(i == (at + 1)[:, None], v[:, None].exp(), 0.0).sum(1),
        True,
    ),
    "of it all": (lambda v, x, at, i: torch.where(i == at[:, None], v[:, None], 0.0).sum(), False),
    "a value of the place": (lambda v, x, at, i: torch.where(i == at[:, None], x, 0.0).sum(1), False),
    "not zero elsewhere": (lambda v, x, at, i: torch.where(i == at[:, None], v[:, None], 1.0).sum(1), False),
    "another place": (lambda v, x, at, i: torch.where(i + 1 == at[:, None], v[:, None], 0.0).sum(1), False),
    "the greatest": (lambda v, x, at, i: torch.where(i == at[:, None], v[:, None], 0.0).amax(1), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_one_value_is_not_summed(name):
    program, known = ROWS[name]

    def run(v, x, at):
        return program(v, x, at, torch.arange(6))

    v = torch.tensor([1.5, 2.5, float("nan"), -3.5, 4.5, float("inf")], dtype=torch.float64)
    given, stages = (v, torch.randn(6, 6, dtype=torch.float64), PLACES), {}
    compiled = compile_graph(
        primtorch.lower(primtorch.trace(run, *given)), given, account=Account(dump=stages.__setitem__)
    )
    torch.testing.assert_close(compiled(*given)[0], run(*given), equal_nan=True)
    assert ("reduce_" not in stages["scheduled.txt"]) == known
