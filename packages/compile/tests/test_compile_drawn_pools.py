"""Max pools of drawn windows, layouts and dtypes, with masks before them: results and gradients are eager's to the bit.

Gradients are small whole numbers, so that sums of them are exact in any dtype and order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from torchinductor import CppBackend

Tensor = torch.Tensor
SEED = random.randrange(2**32)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
    "threshold": lambda x: F.threshold(x, 0.25, -1.0),
    "threshold, and more": lambda x: F.threshold(x, -0.25, 1.0),
    "leaky": lambda x: F.leaky_relu(x, 0.5),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "nothing": lambda x: x * 1,
    "relu of a function": lambda x: F.relu(x.neg()),
    "relu of a norm": lambda x: F.relu(F.batch_norm(x, None, None, training=True) if x.dim() > 2 else x),
}
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 0.25, -0.5, 6.0)


@dataclass(frozen=True)
class Drawn:
    """A program of a pool, and what it is called with."""

    text: str
    program: Callable[[Tensor], tuple[Tensor, ...]]
    x: Tensor
    dynamic: bool
    walks: bool


def _window(draw: random.Random, rank: int) -> dict[str, object]:
    kernel = [draw.choice((1, 2, 3, 3, 4)) for _ in range(rank)]
    if rank < 3 and draw.random() < 0.1:
        kernel = [17 if rank == 2 else 257] * rank  # of more than 256 places
    dilation = [draw.choice((1, 1, 2)) for _ in range(rank)]
    return {
        "kernel_size": kernel,
        "stride": draw.choice((None, [draw.randint(1, 3) for _ in range(rank)])),
        "padding": [draw.randint(0, k // 2) for k in kernel],
        "dilation": dilation,
        "ceil_mode": draw.random() < 0.5,
    }


def _input(draw: random.Random, rank: int, sides: list[int], special: tuple[float, ...] = SPECIAL) -> Tensor:
    shape = [draw.choice((0, 1, 2, 2)), draw.choice((1, 3, 8, 19)), *sides]
    t = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)), dtype=torch.float64)
    if draw.random() < 0.7:
        t = (t * 4).round() / 4  # ties
    for value in draw.sample(special, draw.randint(0, len(special))):
        if t.numel():
            places = torch.tensor([draw.randrange(t.numel()) for _ in range(1 + t.numel() // 16)])
            t.view(-1)[places] = value
    if draw.random() < 0.25:  # windows of the lowest value alone, or of it and of NaNs
        t[torch.rand(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31))) < 0.9] = -float("inf")
    t = t.to(draw.choice(FLOATS))
    if rank in LAST and draw.random() < 0.5:
        t = t.contiguous(memory_format=LAST[rank])
    elif draw.random() < 0.3:
        t = t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return t[0] if t.shape[0] and draw.random() < 0.2 else t


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    rank = draw.choice((1, 2, 2, 3))
    before, indices = draw.choice(list(BEFORE)), draw.random() < 0.3
    kind = draw.choice(("max", "max", "max", "adaptive"))
    while True:
        window = _window(draw, rank)
        sides = [draw.randint(3, 11) for _ in range(rank)]
        if max(window["kernel_size"]) > 16:  # type: ignore[call-overload]
            sides = [300 if rank == 1 else 40 for _ in range(rank)]
        spans = zip(window["kernel_size"], window["dilation"], window["padding"], sides, strict=True)  # type: ignore[call-overload]
        if all(d * (k - 1) < side + 2 * p for k, d, p, side in spans):
            break
    if kind == "adaptive":
        window = {"output_size": [draw.randint(1, side) for side in sides]}
    pool = getattr(F, f"{'adaptive_' if kind == 'adaptive' else ''}max_pool{rank}d")
    twice = draw.random() < 0.2

    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = BEFORE[before](x)
        found = pool(y, **window, return_indices=indices)
        results = found if indices else (found,)
        return (*results, y.abs()) if twice else results

    # Of several NaNs in a window an adaptive pool names another than eager, whose hardtanh passes a gradient at some.
    numbers = kind == "adaptive" or before in ("relu6", "hardtanh")
    x = _input(draw, rank, sides, tuple(v for v in SPECIAL if v == v) if numbers else SPECIAL)
    text = (
        f"seed {seed}: {kind} pool of {rank} dims {window} behind {before} of {x.dtype} {tuple(x.shape)} {x.stride()}"
    )
    return Drawn(text, program, x, draw.random() < 0.3, draw.random() < 0.7)


def _run(fn: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, seed: int) -> tuple[Tensor, ...]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    results = fn(leaf)
    generator = torch.Generator().manual_seed(seed)
    floats = [r for r in results if r.dtype.is_floating_point]
    tangents = [torch.randint(-3, 4, r.shape, generator=generator).to(r.dtype) for r in floats]
    (grad,) = torch.autograd.grad(floats, leaf, tangents)
    return (*(r.detach() for r in results), grad)


@pytest.mark.parametrize("number", range(16))
def test_drawn_pools(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = SEED + number
    case = drawn(seed)
    monkeypatch.setattr(CppBackend, "traits", replace(CppBackend.traits, walks_windows=case.walks))
    eager = _run(case.program, case.x, seed)
    found = _run(torchcompile.compile(case.program, fullgraph=True, dynamic=case.dynamic), case.x, seed)
    exact = "relu of a norm" not in case.text
    for mine, other in zip(found[:-1], eager[:-1], strict=True):
        assert not other.numel() or mine.stride() == other.stride(), case.text
    for mine, other in zip(found, eager, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape, case.text
        if exact:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{case.text}\n{m}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["by rows", "channels last", "no batch, channels last"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_windows_of_the_lowest_value(rank: int, layout: str, dtype: torch.dtype) -> None:
    """Which element they name is where eager's kernels begin, which depends on the layout and on the channel."""
    if rank not in LAST and "last" in layout:
        pytest.skip("no such layout")
    generator, pool = torch.Generator().manual_seed(rank), getattr(F, f"max_pool{rank}d")

    def program(x: Tensor) -> tuple[Tensor, ...]:
        return (*pool(x, 3, 2, 1, return_indices=True), *pool(x, 2, 1, 1, 2, return_indices=True))

    torchcompile.reset()
    compiled = torchcompile.compile(program, fullgraph=True)
    for channels in (3, 19, 37):  # the second is a symbol
        x = torch.full((2, channels, *(5, 4, 6)[:rank]), -float("inf"), dtype=dtype)
        for value, share in ((1.5, 0.02), (float("nan"), 0.02), (float("inf"), 0.01)):
            x[torch.rand(x.shape, generator=generator) < share] = value
        if "last" in layout:
            x = x.contiguous(memory_format=LAST[rank])
        if "no batch" in layout:
            x = x[0]
        found, eager = _run(compiled, x, 1), _run(program, x, 1)
        assert [t.stride() for t in found[:-1]] == [t.stride() for t in eager[:-1]]
        for mine, other in zip(found, eager, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


LAYOUTS = ("last", "odd", "last, odd", "any order", "expanded", "a part", "plain")
IN_ORDER = ("a part", "plain")


def _laid_out(draw: random.Random, x: Tensor, layouts: tuple[str, ...]) -> Tensor:
    """In one of these layouts: with channels last, dims in any order, dims of one element with strides that say nothing,
    elements that share a place."""
    steps = [1, 2, 7, x.shape[1], max(x.numel(), 1)]
    odd = lambda t: t.as_strided(t.shape, [draw.choice(steps) if n == 1 else s for n, s in zip(t.shape, t.stride())])  # noqa: B905, E731
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    match draw.choice(layouts):
        case "last":
            return x.contiguous(memory_format=last)
        case "odd":
            return odd(x)
        case "last, odd":
            return odd(x.contiguous(memory_format=last))
        case "any order":
            order = draw.sample(range(x.dim()), x.dim())
            return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
        case "expanded":
            one = x
            for d in draw.sample(range(x.dim()), draw.randint(1, x.dim() - 1)):
                one = one.narrow(d, 0, 1)
            return one.expand(x.shape)
        case "a part":
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.contiguous()


def _pool(draw: random.Random, sides: list[int]) -> tuple[str, Callable[[Tensor], Tensor]]:
    rank, kind = len(sides), draw.choice(("max", "avg", "adaptive_max", "adaptive_avg"))
    if kind.startswith("adaptive"):
        out = [draw.randint(1, n) for n in sides]
        return f"{kind} to {out}", lambda x: getattr(F, f"{kind}_pool{rank}d")(x, out)
    kernel = [draw.randint(1, min(3, n)) for n in sides]
    window = (kernel, [draw.randint(1, 2) for _ in sides], [draw.randint(0, k // 2) for k in kernel])
    return f"{kind} of {window}", lambda x: getattr(F, f"{kind}_pool{rank}d")(x, *window)


@pytest.mark.parametrize(("backend", "count"), [("aot_eager", 60), ("inductor", 6)])
def test_strides_of_gradients(backend: str, count: int) -> None:
    """Those of eager's, of leaves and of derivatives that the program takes. (Of a volume without a batch they follow
    from the layout of the result's gradient, which is taken to be the result's.)"""
    for seed in range(SEED, SEED + count):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        sides = [draw.choice((1, 2, 3, 5)) for _ in range(draw.choice((1, 2, 2, 3, 3)))]
        x = torch.randn([draw.choice((1, 1, 2)), draw.choice((1, 1, 3, 4)), *sides], generator=generator)
        x = x if draw.random() < 0.8 else x[0]
        name, pool = _pool(draw, sides)
        # Eager has no max_pool3d of a volume without a batch whose strides are those of an image with channels last.
        in_order = x.dim() == 4 and len(sides) == 3 and name.startswith("max")
        x = _laid_out(draw, x, IN_ORDER if in_order else LAYOUTS)
        batched, leaf, behind = x.dim() == len(sides) + 2, draw.random() < 0.5, draw.random() < 0.3
        expands = batched and draw.random() < 0.5
        program = (lambda x, pool=pool: pool(x * 2)) if behind else pool  # type: ignore[misc]
        torchcompile.reset()
        compiled = torchcompile.compile(program, backend=backend, dynamic=draw.choice((True, False, None)))
        found = []
        for call in (program, compiled):
            given = x.detach().requires_grad_()
            result = call(given)
            total = result.sum() if expands else result.square().sum()
            if leaf:
                total.backward()  # type: ignore[no-untyped-call]
            slope = given.grad if leaf else torch.autograd.grad(total, given)[0]
            assert slope is not None
            found.append((result.detach(), slope))
        text = f"seed {seed}: {name} of {tuple(x.shape)} {x.stride()}, {leaf=}, {behind=}, {expands=}"
        for ours, theirs in zip(*found[::-1], strict=True):
            assert ours.stride() == theirs.stride(), text
            torch.testing.assert_close(ours, theirs, msg=lambda m, text=text: f"{text}\n{m}")  # type: ignore[misc]
