"""Every generated prim against its reference, over dtypes, odd strides, empty and 0-d tensors; float64 is the judge."""

import math
import zlib

import pytest
import torch
from prim_graphs import build

from torchinductor import InductorOptions, compile_graph
from torchinductor.lowering.graph import RULES

F = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
I = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
B = (torch.bool,)
SHAPES = [(7, 33), (0, 4), (), (2, 3, 5)]
OPTIONS = InductorOptions(native_executor=False)


def seed_of(*key):
    return zlib.crc32(repr(key).encode())


def make(shape, dtype, generator, low=-3.0, high=3.0, strided=False):
    wide = (*shape[:-1], shape[-1] * 2) if shape and strided else shape
    if dtype == torch.bool:
        t = torch.rand(wide, generator=generator) > 0.5
    elif dtype.is_floating_point:
        t = (torch.rand(wide, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)
    else:
        low, high = (0 if dtype == torch.uint8 else int(max(low, -100))), int(min(high, 100))
        t = torch.randint(low, max(high, low + 1) + 1, wide, generator=generator).to(dtype)
    return t[..., ::2].transpose(0, -1).contiguous().transpose(0, -1) if shape and strided else t


def check(fn, *inputs, options=OPTIONS, kernels=None, exact=False, times=2.0):
    """Compiled against the references; floats may differ from float64 by `times` the worst of eager's own errors in that
    result and a few ulps."""
    gm = build(fn, *inputs)
    compiled = compile_graph(gm, inputs, options)
    results = compiled(*inputs)
    eager = gm(*inputs)
    if kernels is not None:
        assert compiled.stats.kernels == kernels, str(compiled.program)
    wide = [t.double() if t.dtype.is_floating_point else t for t in inputs]
    try:
        truth = build(fn, *wide)(*wide) if not exact else eager
    except (TypeError, RuntimeError, ValueError):
        truth = eager
    for got, want, exact_value in zip(results, eager, truth, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert got.stride() == want.stride() or 0 in got.shape or 1 in got.shape, (got.stride(), want.stride())
        if not want.dtype.is_floating_point or exact:
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want)), (got, want)
            continue
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan), (got, want)
        inf = want.isinf()
        assert torch.equal(got[inf], want[inf]), (got, want)
        fine = ~nan & ~inf & exact_value.isfinite()
        judge = exact_value.double()[fine]
        eps = torch.finfo(want.dtype).eps
        scale = judge.abs().max() if judge.numel() else 0.0
        own = (want.double()[fine] - judge).abs().max() if judge.numel() else 0.0
        if want.dtype == torch.float64:  # the judge is eager itself, whose error nobody knows
            own = max(own, 8 * eps * scale)
        allowed = times * own + 6 * eps * judge.abs() + 0.01 * eps * scale
        excess = (got.double()[fine] - judge).abs() - allowed
        assert not excess.numel() or excess.max() <= 0, (got[fine][excess.argmax()], judge[excess.argmax()])
    return compiled


UNARY = {
    "abs": (F + I, -3, 3),
    "neg": (F + I[:4], -3, 3),
    "sign": (F + I, -3, 3),
    "floor": (F, -3, 3),
    "ceil": (F, -3, 3),
    "round": (F, -3, 3),
    "trunc": (F, -3, 3),
    "bitwise_not": (I + B, -9, 9),
    "exp": (F, -5, 5),
    "exp2": (F, -5, 5),
    "expm1": (F, -3, 3),
    "log": (F, -0.5, 5),
    "log2": (F, 0, 5),
    "log10": (F, 0, 5),
    "log1p": (F, -1.1, 5),
    "sqrt": (F, -1, 9),
    "rsqrt": (F, 0, 9),
    "reciprocal": (F, -3, 3),
    "sin": (F, -9, 9),
    "cos": (F, -9, 9),
    "tan": (F, -1, 1),
    "asin": (F, -1.1, 1),
    "acos": (F, -1.1, 1),
    "atan": (F, -3, 3),
    "sinh": (F, -3, 3),
    "cosh": (F, -3, 3),
    "tanh": (F, -3, 3),
    "asinh": (F, -3, 3),
    "acosh": (F, 0.5, 5),
    "atanh": (F, -1, 1),
    "sigmoid": (F, -9, 9),
    "erf": (F, -3, 3),
    "erfc": (F, -3, 3),
    "isnan": (F, -3, 3),
    "isinf": (F, -3, 3),
    "isfinite": (F, -3, 3),
    "signbit": (F + I, -3, 3),
}
BINARY = {
    "add": F + I + B,
    "sub": F + I,
    "mul": F + I + B,
    "div": F,
    "floor_div": F + I,
    "trunc_div": F[:2] + I,
    "fmod": F + I,
    "remainder": F + I,
    "pow": F + (torch.int64, torch.int32),
    "maximum": F + I,
    "minimum": F + I,
    "fmax": F,
    "fmin": F,
    "atan2": F[:2],
    "copysign": F,
    "hypot": F[:2],
    "nextafter": F[:2],
    "gcd": I,
    "lcm": (torch.int64, torch.int32),
    "bitwise_and": I + B,
    "bitwise_or": I + B,
    "bitwise_xor": I + B,
    "shift_left": I,
    "shift_right": I,
    "eq": F + I + B,
    "ne": F + I + B,
    "lt": F + I,
    "le": F + I,
    "gt": F + I,
    "ge": F + I,
}


def specials(dtype):
    return torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5], dtype=dtype)


def unary_case(name, dtype, shape, strided):
    _, low, high = UNARY[name]
    g = torch.Generator().manual_seed(seed_of(name, dtype, shape))
    return make(shape, dtype, g, low, high, strided)


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(name):
    # One graph for all dtypes and shapes: a C++ build each would be most of the time.
    cases = [unary_case(name, d, s, strided) for d in UNARY[name][0] for s in SHAPES for strided in (False, True)]
    cases += [specials(d) for d in UNARY[name][0] if d.is_floating_point]
    check(lambda p, *ts: tuple(getattr(p, name)(t) for t in ts), *cases)


@pytest.mark.parametrize("name", sorted(BINARY))
def test_binary(name):
    pairs = []
    g = torch.Generator().manual_seed(seed_of(name))
    for dtype in BINARY[name]:
        for shape in SHAPES:
            a, b = make(shape, dtype, g, strided=True), make(shape, dtype, g)
            if name in ("floor_div", "trunc_div", "fmod", "remainder") and not dtype.is_floating_point:
                b = torch.where(b == 0, torch.ones_like(b), b)
            if name == "pow":
                a, b = (a.abs(), b) if dtype.is_floating_point else (a, b.abs())
            if name.startswith("shift"):
                b = b.abs()
            pairs += [a, b]
        if dtype.is_floating_point:
            s = specials(dtype)
            pairs += [s.repeat(9), s.repeat_interleave(9)]

    def graph(p, *ts):
        return tuple(getattr(p, name)(a, b) for a, b in zip(ts[::2], ts[1::2], strict=True))

    check(graph, *pairs, exact=name in ("nextafter", "floor_div", "fmod", "remainder", "trunc_div"))


def test_scalars_and_where():
    x, c = torch.randn(5, 9), torch.rand(5, 9) > 0.5
    n = torch.arange(45).reshape(5, 9)
    check(
        lambda p, x, c, n: (
            p.add(x, 2.5),
            p.sub(1, x),
            p.where(c, x, 0.0),
            p.where(c, 1.5, x),
            p.lt(n, 7),
            p.mul(n, -3),
            p.pow(x, 2.0),
            p.pow(x, 3.0),
            p.floor_div(n, 4),
        ),
        x,
        c,
        n,
    )


def test_conversions():
    g = torch.Generator().manual_seed(1)
    sources = [make((4, 9), d, g, 0, 50) for d in F + I + B]
    everything = F + I + B
    check(lambda p, *ts: tuple(p.convert_element_type(t, d) for t in ts for d in everything if d != t.dtype), *sources)
    check(
        lambda p, a, b, c: (
            p.bitcast(a, torch.int32),
            p.bitcast(b, torch.int16),
            p.bitcast(p.bitcast(c, torch.int16), torch.float16),
        ),
        torch.randn(9),
        torch.randn(9).bfloat16(),
        torch.randn(9).half(),
    )


def test_creation_and_random():
    cpu = torch.device("cpu")
    seed = torch.tensor(123456789012345)
    check(
        lambda p, s: (
            p.full((3, 4), 2.5, torch.float16, cpu),
            p.full((), True, torch.bool, cpu),
            p.iota(7, 3, -2, torch.int32, cpu),
            p.random_bits(s, (5, 11)),
            p.random_bits(s, (5, 11), 1, 64),
            p.random_bits(s, (), 0, 64),
            p.random_uniform(s, (300,), 3),
            *[p.random_uniform(s, (7, 9), 2, d) for d in (torch.float64, torch.float16, torch.bfloat16)],
        ),
        seed,
        exact=True,
    )


REDUCED = [
    ((8, 70), (1,)),
    ((70, 8), (0,)),
    ((4, 5, 6), (0, 2)),
    ((4, 5, 6), (1,)),
    ((3, 1, 5), (1,)),
    ((7, 9), (0, 1)),
    ((600, 130), (0,)),
    ((2, 3000), (1,)),
    ((), ()),
]


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "any", "all", "argmax", "argmin"])
def test_reductions(name):
    g = torch.Generator().manual_seed(seed_of(name))
    dtypes = (
        B
        if name in ("any", "all")
        else (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    )
    if name == "prod":
        dtypes = dtypes[:2]
    inputs, plans = [], []
    for dtype in dtypes:
        for shape, dims in REDUCED:
            if name.startswith("arg") and len(dims) > 1:
                dims = ()
            if name == "prod" and math.prod(shape) > 500:
                continue
            for keep in (False, True):
                t = make(shape, dtype, g, 0.5 if name == "prod" else -3, 1.5 if name == "prod" else 3, strided=keep)
                if dtype.is_floating_point and name.startswith(("a", "s")) and keep and t.numel() > 50:
                    t[tuple(s // 2 for s in t.shape)] = math.nan
                inputs.append(t)
                plans.append((dims, keep))
    check(lambda p, *ts: tuple(getattr(p, name)(t, d, k) for t, (d, k) in zip(ts, plans, strict=True)), *inputs)


def test_empty_reductions():
    t = torch.empty(0, 5)
    check(lambda p, t: (p.sum(t, (0,)), p.prod(t, (0,)), p.sum(t, (1,))), t)


def test_var_mean():
    g = torch.Generator().manual_seed(2)
    cases = [((8, 70), (1,)), ((70, 8), (0,)), ((4, 5, 6, 7), (0, 2, 3)), ((3, 1, 5), (1,)), ((2, 4000), (1,))]
    inputs = [make(s, d, g) + 10 for d in F[:3] for s, _ in cases]

    def graph(p, *ts):
        return tuple(
            x
            for t, (_, dims) in zip(ts, cases * 3, strict=True)
            for c in (0.0, 1.0)
            for x in p.var_mean(t, dims, c, True)
        )

    check(graph, *inputs)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
def test_scans(name):
    g = torch.Generator().manual_seed(seed_of(name))
    dtypes = (torch.float32, torch.float64, torch.bfloat16) + (() if name == "logcumsumexp" else (torch.int64,))
    cases = [((5, 40), 1), ((40, 5), 0), ((3, 4, 5), 1), ((), 0), ((3, 1), 1)]
    inputs = [make(s, d, g, 0.5, 1.5) for d in dtypes for s, _ in cases]

    def graph(p, *ts):
        outs = [getattr(p, name)(t, dim) for t, (_, dim) in zip(ts, cases * len(dtypes), strict=True)]
        return tuple(x for o in outs for x in (o if isinstance(o, tuple) else (o,)))

    check(graph, *inputs, times=3)


def test_views():
    x = torch.randn(4, 6, 10)
    y = torch.randn(6, 10)

    def graph(p, x, y):
        e = p.exp(x)
        return (
            p.permute(e, (2, 0, 1)),
            p.reshape(e, (24, 10)),
            p.reshape(p.permute(e, (1, 0, 2)), (12, 20)),
            p.slice(e, 1, 1, 5, 2),
            p.flip(e, (0, 2)),
            p.roll(e, (3, -1), (0, 2)),
            p.diagonal(e, 1, 0, 2),
            p.diagonal(x, -2, 1, 2),
            p.unfold(e, 2, 3, 2),
            p.expand(y, (3, 6, 10)),
            p.mul(x, p.expand(y, (4, 6, 10))),
            p.unsqueeze(e, (0, 3)),
            p.squeeze(p.unsqueeze(x, (1,)), (1,)),
            p.as_strided(x, (3, 5), (7, 2), 4),
            p.reshape(p.slice(x, 2, 0, 5, 1), (120,)),
            p.add(p.reshape(e, (240,)), 1.0),
            p.copy_strided(x, (1, 40, 4)),
            p.as_strided_scatter(x, p.as_strided(p.neg(x), (3, 5), (7, 2), 4), (3, 5), (7, 2), 4),
        )

    check(graph, x, y)


def test_shape_prims():
    a, b, c = torch.randn(3, 4), torch.randn(3, 2), torch.randn(3, 0)

    def graph(p, a, b, c):
        return (
            p.cat((a, b, c), 1),
            p.cat((p.exp(a), a), 0),
            p.cat((a, b, a, b, a, b), 1),
            p.pad(a, (1, 0), (2, 3), 1.5),
            p.pad(p.exp(a), (-1, 2), (0, -1), 0.0),
            p.slice_scatter(a, b, 1, 1, 4, 2),
            p.slice_scatter(p.exp(a), p.slice(a, 0, 0, 2, 1), 0, 1, 3, 1),
        )

    check(graph, a, b, c)


def test_indexing():
    t, w = torch.randn(6, 5, 4), torch.randn(50, 16)
    i, j = torch.tensor([0, -1, 3, 2]), torch.tensor([[1], [3], [0]])
    ids = torch.randint(0, 50, (7, 9))
    along = torch.randint(0, 5, (6, 3, 4))

    def graph(p, t, w, i, j, ids, along):
        return (
            p.index(t, (i,), True),
            p.index(t, (i, j), True),
            p.index(t, (i, None, j), True),
            p.index(p.exp(t), (None, j), True),
            p.index(w, (ids,), False),
            p.gather(t, 1, along),
            p.gather(p.exp(t), 1, along),
        )

    check(graph, t, w, i, j, ids, along)


def test_a_gather_at_computed_places_is_padded():
    """Behind the padding the places lie outside of the tensor, and are followed nowhere."""
    t = torch.randn(6, 5)

    def graph(p, t):
        places = p.sub(p.iota(6, 5, -1, torch.int64, torch.device("cpu")), 0)
        return p.pad(p.index(t, (places,), False), (2, 0), (7, 0), 0.0)

    check(graph, t)


def test_indices_out_of_bounds():
    table = torch.randn(5, 4)
    graphs = {
        "index": lambda p, t, i: p.index(t, (i,), True),
        "unwrapped": lambda p, t, i: p.index(t, (i,), False),
        "gather": lambda p, t, i: p.gather(t, 0, p.expand(p.unsqueeze(i, (1,)), (3, 4))),
        "index_put": lambda p, t, i: p.index_put(t, (i,), p.slice(t, 0, 0, 3, 1), True, True),
        "put unwrapped": lambda p, t, i: p.index_put(t, (i,), p.slice(t, 0, 0, 3, 1), True, False),
        "scatter": lambda p, t, i: p.scatter(t, 0, p.expand(p.unsqueeze(i, (1,)), (3, 4)), p.slice(t, 0, 0, 3, 1)),
        "reduced": lambda p, t, i: p.sum(p.index(p.exp(t), (i,), True), (0, 1)),
    }
    good = torch.tensor([0, 4, 2])
    for name, graph in graphs.items():
        gm = build(graph, table, good)
        for native in (False, True):
            compiled = compile_graph(gm, (), InductorOptions(native_executor=native))
            compiled(table, good)
            wraps = name in ("index", "index_put", "reduced")
            for bad in (5, -6 if wraps else -1, 2**62, -(2**62)):
                with pytest.raises(IndexError, match="out of bounds"):
                    compiled(table, torch.tensor([0, bad, 2]))
            compiled(table, good)
        if name == "index":
            empty = compile_graph(build(graph, table[:0], good), (), OPTIONS)
            with pytest.raises(IndexError):
                empty(table[:0], good)


def test_scatters():
    t = torch.randn(6, 5)
    base = torch.zeros(50, 16)
    ids, values = torch.randint(0, 50, (70,)), torch.randn(70, 16)
    unique = torch.randperm(6)[:4]
    along = torch.stack([torch.randperm(5)[:3] for _ in range(6)])
    src = torch.randn(6, 3)
    half = torch.randn(50, 16).half()

    def graph(p, t, base, ids, values, unique, along, src, half):
        return (
            p.index_put(base, (ids,), values, True, False),
            p.index_put(t, (unique,), p.neg(p.slice(t, 0, 0, 4, 1)), False, False),
            p.scatter(t, 1, along, src),
            p.scatter_add(p.exp(t), 1, along, p.exp(src)),
            p.index_put(half, (ids,), p.convert_element_type(values, half.dtype), True, False),
        )

    check(graph, t, base, ids, values, unique, along, src, half)


def test_pools():
    x = torch.randn(2, 3, 11, 13)
    nan = x.clone()
    nan[0, 0, 3, 3] = math.nan
    last = x.to(memory_format=torch.channels_last)
    line = torch.randn(2, 3, 17)

    def graph(p, x, nan, last, line):
        return (
            *p.max_pool(x, (3, 3), (2, 2), (1, 1), (1, 1), False),
            *p.max_pool(nan, (2, 2), (2, 2), (0, 0), (1, 1), True),
            *p.max_pool(last, (3, 3), (1, 1), (1, 1), (2, 2), False),
            *p.max_pool(line, (3,), (2,), (1,), (1,), False),
            p.avg_pool(x, (3, 3), (2, 2), (1, 1), False, True, None),
            p.avg_pool(x, (3, 3), (2, 2), (1, 1), True, False, None),
            p.avg_pool(x, (2, 2), (2, 2), (0, 0), False, True, 3),
            p.avg_pool(x, (11, 13), (11, 13), (0, 0), False, True, None),
            p.avg_pool(p.exp(line), (4,), (4,), (2,), True, False, None),
        )

    check(graph, x, nan, last, line)


def test_opaque():
    a, b = torch.randn(4, 5), torch.randn(6, 5)

    def graph(p, a, b):
        m = p.mm(p.exp(a), p.permute(b, (1, 0)))
        return (m, p.add(m, 1.0), *p.sort(m, 1, False, True), p.lgamma(p.exp(a)))

    compiled = check(graph, a, b)
    assert compiled.stats.aten_calls >= 3


def test_kernel_counts():
    x, w = torch.randn(64, 300) + 1, torch.randn(300)  # errors are relative: a mean near zero is all rounding

    def softmax(p, x, w):
        e = p.exp(p.sub(x, p.expand(p.amax(x, (1,), True), x.shape)))
        return p.div(e, p.expand(p.sum(e, (1,), True), x.shape))

    check(softmax, x, w, kernels=1)

    def layer_norm(p, x, w):
        var, mean = p.var_mean(x, (1,), 0.0, True)
        y = p.mul(p.sub(x, p.expand(mean, x.shape)), p.expand(p.rsqrt(p.add(var, 1e-5)), x.shape))
        return p.mul(y, p.expand(w, x.shape)), mean, var

    check(layer_norm, x, w, kernels=1)
    check(lambda p, x, w: (p.exp(x), p.sin(x), p.add(x, p.expand(w, x.shape))), x, w, kernels=1)
    check(lambda p, x, w: p.sum(p.exp(x), (0,)), x, w, kernels=1)


def test_every_rule_has_a_test():
    source = open(__file__).read()
    missing = [name for name in RULES if f'"{name}"' not in source and f"p.{name}(" not in source]
    assert not [m for m in missing if m not in ("random_seed", "empty_strided")], missing
