"""Interpolation and averages of windows of drawn sizes, and their gradients: as near to float64 as eager's, and made of
what lies at few places."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import primtorch
import torchcompile
import torchinductor
from torchinductor import InductorOptions, compile_graph
from torchinductor.codegen.cpp.writer import write
from torchinductor.ir import Bundle, Kernel
from torchinductor.source import planned_operations

Tensor = torch.Tensor
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
AVERAGE: dict[int, Callable[[Tensor, list[int]], Tensor]] = {
    3: F.adaptive_avg_pool1d,
    4: F.adaptive_avg_pool2d,
    5: F.adaptive_avg_pool3d,
}
FACTORS = (2, 3, 4, 0.5, 0.25, 1.5, 0.75, 2 / 3, 0.4, 1 / 3)


@dataclass(frozen=True)
class Drawn:
    text: str
    program: Callable[[Tensor], Tensor]
    x: Tensor


def drawn(seed: int, dtype: torch.dtype) -> Drawn:
    draw = random.Random(seed)
    rank = draw.choice((3, 4, 4, 4, 5))
    most = 9 if rank == 5 else 40 if draw.random() < 0.3 else 14
    sides = [draw.randint(1, most) for _ in range(rank - 2)]
    out = [draw.randint(1, most) if draw.random() < 0.8 else side for side in sides]
    x = torch.randn(2, draw.choice((1, 3, 17)), *sides, generator=torch.Generator().manual_seed(seed)).to(dtype)
    layout = draw.choice(("by rows", "last", "transposed", "sliced"))
    if layout == "last" and rank in LAST:
        x = x.contiguous(memory_format=LAST[rank])
    elif layout == "transposed":
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    elif layout == "sliced":
        x = torch.cat([x, x], -1)[..., : sides[-1]]
    kinds = ("average", "to a size", "by a factor")
    # Eager has none of bfloat16, and takes other elements than it should where one side is 1 and the other changes.
    filtered = rank == 4 and dtype is not torch.bfloat16 and min(*sides, *out) > 1
    kind = draw.choice((*kinds, "antialiased") if filtered else kinds)
    text = f"seed {seed}: {kind} of {tuple(x.shape)} {layout}, {dtype}"
    if kind == "average":
        return Drawn(f"{text} to {out}", lambda x: AVERAGE[rank](x, out), x)
    how = {"mode": LINEAR[rank], "align_corners": draw.random() < 0.4}
    if kind == "antialiased":
        how |= {"mode": draw.choice(("bilinear", "bicubic")), "antialias": True}
    if kind in ("to a size", "antialiased"):
        return Drawn(f"{text} to {out}, {how}", lambda x: F.interpolate(x, size=out, **how), x)
    factors = tuple(draw.choice([f for f in FACTORS if int(side * f)]) for side in sides)
    again = draw.random() < 0.3
    program = lambda x: F.interpolate(x, scale_factor=factors, recompute_scale_factor=again, **how)  # noqa: E731
    return Drawn(f"{text} by {factors}, {how}, {again}", program, x)


def with_gradient(program: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def both(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = program(x)
        return y.detach(), torch.autograd.grad(y, x, tangent)[0]

    return both


def lowered(function: Callable[..., object], *inputs: Tensor) -> torch.fx.GraphModule:
    return primtorch.lower(primtorch.trace(function, *inputs), walks_windows=torchinductor.walks_windows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_as_near_to_float64_as_eager(dtype: torch.dtype) -> None:
    first = random.randrange(2**31)
    for seed in range(first, first + 40):
        case = drawn(seed, dtype)
        tangent = torch.randn_like(case.program(case.x))
        function = with_gradient(case.program)
        found = compile_graph(lowered(function, case.x, tangent), (case.x, tangent), InductorOptions())(case.x, tangent)
        eager, exact = function(case.x, tangent), function(case.x.double(), tangent.double())
        for ours, theirs, truth in zip(found, eager, exact, strict=True):
            assert isinstance(ours, Tensor) and ours.stride() == theirs.stride(), case.text
            unit = torch.finfo(dtype).eps * max(truth.abs().max().item(), 1.0)
            # What eager computes in float64 has its positions rounded to units of the sides.
            units = 16 + (8 * max(*case.x.shape[2:], *tangent.shape[2:]) if dtype is torch.float64 else 0)
            bound = 2 * (theirs.double() - truth).abs().max().item() + units * unit
            assert (ours.double() - truth).abs().max().item() <= bound, case.text


def test_what_a_window_does_not_have_may_be_infinite() -> None:
    """It is not multiplied by zero: neither in an average, nor in its gradient."""
    first = random.randrange(2**31)
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        sides, out = ([draw.randint(2, 12) for _ in range(2)] for _ in range(2))
        x, tangent = torch.randn(1, 5, *sides, dtype=torch.float64), torch.randn(1, 5, *out, dtype=torch.float64)
        for t in (x, tangent):
            t.view(-1)[draw.randrange(t.numel())] = float("inf")
            t.view(-1)[draw.randrange(t.numel())] = float("nan")
        x = x.contiguous(memory_format=torch.channels_last) if draw.random() < 0.5 else x
        function = with_gradient(lambda x: F.adaptive_avg_pool2d(x, out))  # noqa: B023
        found = compile_graph(lowered(function, x, tangent), (x, tangent), InductorOptions())(x, tangent)
        for ours, theirs in zip(found, function(x, tangent), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, msg=lambda m: f"seed {seed}: {m}")  # noqa: B023


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear, enlarged": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, reduced": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bilinear, by its corners": lambda x: F.interpolate(x, (20, 33), mode="bilinear", align_corners=True),
    "windows of two sizes": lambda x: F.adaptive_avg_pool2d(x, 5),
    "more windows than elements": lambda x: F.adaptive_avg_pool2d(x, 40),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_scattered_or_looked_up(name: str, last: bool, device: str) -> None:
    """Nor multiplied by a matrix of zeros."""
    if device == "cuda":
        pytest.importorskip("triton")
    x = torch.randn(2, 16, 28, 28)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    tangent = torch.randn_like(CALLS[name](x))
    operations = planned_operations(lowered(with_gradient(CALLS[name]), x, tangent), device)
    kernels = [part for o in operations for part in (o.parts if isinstance(o, Bundle) else (o,))]
    for kernel in kernels:
        assert isinstance(kernel, Kernel) and not kernel.scatters, kernel
        assert not any(stage.body.faults for stage in kernel.stages), kernel


def test_sums_of_short_rows_lie_where_vectors_may() -> None:
    """The sums of a row are an array, which the compiler writes by vectors: a function's frame that is not aligned as
    they are ended the process, at rows of 20 elements."""
    first = random.randrange(2**31)
    for seed in range(first, first + 8):
        draw = random.Random(seed)
        sides, out = (
            (draw.randint(8, 24), 20 if seed == first else draw.randint(8, 24)),
            [draw.randint(2, 4) for _ in "hw"],
        )
        mode = draw.choice(("bilinear", "bicubic"))
        x, tangent = torch.randn(6, 3, *sides), torch.randn(6, 3, *out)
        function = with_gradient(lambda x: F.interpolate(x, out, mode=mode, antialias=True))  # noqa: B023
        graph = lowered(function, x, tangent)
        operations = planned_operations(graph, "cpu")
        texts = [write(part) for o in operations for part in (o.parts if isinstance(o, Bundle) else (o,))]  # type: ignore[arg-type]
        summed = [text for text in texts if re.search(r"^ *float \w+\[", text, re.MULTILINE)]
        assert summed and all("ALIGNED_FRAME" in text for text in summed), f"seed {seed}"
        found = compile_graph(graph, (x, tangent), InductorOptions())(x, tangent)
        eager, exact = function(x, tangent), function(x.double(), tangent.double())
        for ours, theirs, truth in zip(found, eager, exact, strict=True):
            bound = 2 * (theirs.double() - truth).abs().max().item() + 16 * torch.finfo(x.dtype).eps
            assert isinstance(ours, Tensor)
            assert (ours.double() - truth).abs().max().item() <= bound, f"seed {seed}: {mode} of {sides} to {out}"


@pytest.mark.parametrize("last", [False, True])
def test_what_a_filter_reaches_is_gathered(last: bool) -> None:
    """It is neither scattered nor multiplied by a matrix of zeros, and no kernel computes weights for each pixel."""
    x = torch.randn(2, 16, 28, 28)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    program = lambda x: F.interpolate(x, (12, 40), mode="bicubic", antialias=True)  # noqa: E731
    operations = planned_operations(lowered(with_gradient(program), x, torch.randn_like(program(x))), "cpu")
    kernels = [part for o in operations for part in (o.parts if isinstance(o, Bundle) else (o,))]
    assert all(isinstance(kernel, Kernel) and not kernel.scatters for kernel in kernels)
    of_places = [kernel for kernel in kernels if "trunc" in str(kernel)]
    assert of_places and all(math.prod(int(str(a.size)) for a in kernel.axes) < 28 * 40 for kernel in of_places)


def test_sizes_that_change_and_sizes_that_do_not() -> None:
    """A size that is a symbol keeps the program for all sizes; one that is a number is counted with."""
    torchcompile.reset()
    compiled = torchcompile.compile(with_gradient(lambda x: F.interpolate(x, (9, 7), mode="bilinear")), dynamic=True)
    for n in (5, 8, 13):
        x, tangent = torch.randn(2, 3, n, n + 1, dtype=torch.float64), torch.randn(2, 3, 9, 7, dtype=torch.float64)
        wanted = with_gradient(lambda x: F.interpolate(x, (9, 7), mode="bilinear"))(x, tangent)
        torch.testing.assert_close(compiled(x, tangent), wanted)
