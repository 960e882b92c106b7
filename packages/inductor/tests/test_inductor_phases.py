"""C++ kernels whose innermost loop is another than the axis it runs over: the phases of an axis that indices divide, what
vectors leave over of a row, tiles that lanes turn over, a loop for each way a condition holds."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from image_kernels import DTYPES, LAYOUTS
from torch import Tensor

import primtorch
from torchinductor import InductorOptions, compile_graph, walks_windows
from torchinductor.codegen.base import generated
from torchinductor.ir import Apply, Kernel
from torchinductor.source import planned_operations

Program = Callable[[Tensor], tuple[Tensor, ...]]


def graph_of(program: Callable[..., object], *inputs: Tensor) -> torch.fx.GraphModule:
    return primtorch.lower(primtorch.trace(program, *inputs), walks_windows=walks_windows)


def compiled(program: Callable[..., object], *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(compile_graph(graph_of(program, *inputs), inputs, InductorOptions())(*inputs))


def texts(program: Callable[..., object], *inputs: Tensor) -> str:
    return "\n".join(generated(o, InductorOptions()).text for o in planned_operations(graph_of(program, *inputs)))  # type: ignore[arg-type]


# Each takes a source of random numbers, and gives a function of images that moves numbers by dividing places.
STEPS: dict[str, Callable[[random.Random], Callable[[Tensor], Tensor]]] = {
    "shuffled channels": lambda draw: (
        lambda x, k=draw.choice((2, 3, 4, 6)): F.channel_shuffle(x, math.gcd(x.shape[1], k))
    ),
    "pixels": lambda draw: lambda x, k=draw.choice((2, 4)): F.pixel_shuffle(x, k) if x.shape[1] % (k * k) == 0 else x,
    "blocks": lambda draw: lambda x, k=draw.choice((2, 3, 5)): x.repeat_interleave(k, draw.choice((1, 2, 3))),
    "a slice's gradient": lambda draw: _put(draw.choice((1, 2, 3)), draw.randint(0, 2), draw.choice((2, 3, 4))),
    "turned": lambda draw: (
        lambda x: (
            x.unflatten(1, (-1, math.gcd(x.shape[1], 2))).transpose(1, 2).flatten(1, 2).flip(draw.choice((1, 2, 3)))
        )
    ),
    "picked and added": lambda draw: lambda x: x[..., ::2] + x[..., 1::2] if x.shape[3] % 2 == 0 else x,
}


def _put(dim: int, start: int, step: int) -> Callable[[Tensor], Tensor]:
    def put(x: Tensor) -> Tensor:
        place = (slice(None),) * dim + (slice(start, None, step),)
        return torch.zeros_like(x).slice_scatter(x[place] + 1, dim, start, x.shape[dim], step)

    return put


@pytest.mark.parametrize("name", STEPS)
def test_moved_by_phases(name: str) -> None:
    first = random.randrange(2**31)
    for seed in range(first, first + 8):
        draw = random.Random(seed)
        layout, dtype = draw.choice(list(LAYOUTS)), draw.choice(DTYPES)
        step = STEPS[name](draw)
        shape = (2, draw.choice((12, 24, 48)), draw.randint(3, 20), draw.choice((7, 16, 24, 30, 33)))
        generator = torch.Generator().manual_seed(seed)
        x = LAYOUTS[layout](torch.randint(0, 100, shape, generator=generator).to(dtype))
        other = random.Random(seed + 1)
        rest = STEPS[other.choice(list(STEPS))](other)
        program = lambda x: (step(x), rest(step(x)))  # noqa: E731, B023
        state = draw.getstate(), other.getstate()
        wanted = program(x)
        draw.setstate(state[0]), other.setstate(state[1])
        for found, truth in zip(compiled(program, x), wanted, strict=True):
            assert torch.equal(found, truth) and found.stride() == truth.stride(), f"seed {seed}: {layout}, {dtype}"


DIVIDED: dict[str, Program] = {
    "shuffled channels": lambda x: (F.channel_shuffle(x.contiguous(memory_format=torch.channels_last), 4),),
    "bilinear": lambda x: (F.interpolate(x, scale_factor=2, mode="bilinear"),),
    "nearest": lambda x: (F.interpolate(x, scale_factor=2),),
    "a slice's gradient": lambda x: (_put(3, 1, 2)(x),),
    "pixels": lambda x: (F.pixel_shuffle(x, 2),),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_no_place_is_divided_in_the_innermost_loop(name: str) -> None:
    """Each phase loads and stores by one step, and its conditions hold for all of it or for nothing."""
    text = texts(DIVIDED[name], torch.randn(2, 64, 24, 40))
    loops = list(re.finditer(r"#pragma omp simd\n *for \(i64 (\w+) = [^{]*\{\n(.*?)\n *\}", text, re.DOTALL))
    assert loops
    for loop in loops:
        divided = re.search(rf"\[[^\]]*\([^()]*\b{loop[1]}\b[^()]*\) [/%]", loop[2])
        assert not divided, f"{name}: {loop[2]}"


SUMS: dict[str, Program] = {
    "softmax": lambda x: (x.float().softmax(1),),
    "sums": lambda x: (x.float().sum(1), x.amax(1), x.argmax(1), x.float().exp().sum(1)),
    "moments": lambda x: torch.var_mean(x.float() if x.dtype is torch.bfloat16 else x, 1),
    "logarithm": lambda x: (x.float().logsumexp(1),),
}


@pytest.mark.parametrize("name", SUMS)
def test_rows_of_every_length(name: str) -> None:
    first = random.randrange(2**31)
    for seed in range(first, first + 10):
        draw = random.Random(seed)
        dtype, columns = draw.choice((torch.float32, torch.float64, torch.bfloat16)), draw.randint(1, 200)
        x = torch.randn(13, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
        if draw.random() < 0.3:
            odd = (float("nan"),) if name == "moments" else (float("nan"), float("inf"), -float("inf"))
            x[draw.randrange(13), draw.randrange(columns)] = draw.choice(odd)  # eager's running mean is none behind inf
        exact = SUMS[name](x.double())
        for found, eager, truth in zip(compiled(SUMS[name], x), SUMS[name](x), exact, strict=True):
            assert torch.equal(found.isnan(), eager.isnan()), f"seed {seed}: {columns} of {dtype}"
            fine = truth.isfinite()
            error, theirs = (
                (t.double() - truth)[fine].abs().max().item() if fine.any() else 0.0 for t in (found, eager)
            )
            unit = torch.finfo(found.dtype if found.is_floating_point() else torch.float32).eps
            scale = truth[fine].abs().max().item() if fine.any() else 0.0
            assert error <= 2 * theirs + 16 * unit * scale, f"seed {seed}: {columns} of {dtype}"


def test_what_vectors_leave_over_of_a_row_is_a_loop() -> None:
    assert re.search(r"i1 = 48L; i1 < 56L", texts(SUMS["softmax"], torch.randn(100, 56)))
    assert "0L; i1 < " not in texts(SUMS["softmax"], torch.randn(100, 64))


@pytest.mark.parametrize("shape", [(3, 20, 7, 9), (2, 64, 16, 16), (1, 33, 20, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_across_the_order_of_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of planes, over their channels: what is read and written by channels is turned over."""
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    x = torch.randn(shape).to(dtype)
    tangent = torch.randn(shape[0], *shape[2:], shape[1]).to(dtype)

    def program(x: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = F.layer_norm(leaf.permute(0, 2, 3, 1), shape[1:2])
        return y.detach(), torch.autograd.grad(y, leaf, tangent)[0]

    eager, exact = program(x, tangent), program(x.double(), tangent.double())
    for found, theirs, truth in zip(compiled(program, x, tangent), eager, exact, strict=True):
        assert found.stride() == theirs.stride()
        unit = torch.finfo(dtype).eps * truth.abs().max().item()
        bound = 2 * (theirs.double() - truth).abs().max().item() + 32 * unit
        assert (found.double() - truth).abs().max().item() <= bound, f"seed {seed}"
    if shape[1] * 64 <= 1 << 14 and dtype is torch.float32:
        assert "turn(" in texts(program, x, tangent)


def test_parts_that_take_long_are_computed_where_they_are_taken() -> None:
    """A loop for each way in which a condition holds, as for each part of what is put together."""
    x = torch.randn(2, 12, 20, 30, dtype=torch.float64)
    program = lambda x: (torch.cat([x.relu(), x.exp(), x], 1),)  # noqa: E731
    assert "= true;" in texts(program, x)
    torch.testing.assert_close(compiled(program, x), program(x))


def test_roots_are_taken_before_they_are_repeated() -> None:
    x = torch.randn(2, 48, 14, 14).contiguous(memory_format=torch.channels_last)
    mean, var = torch.randn(48), torch.rand(48) + 0.5
    operations = planned_operations(graph_of(lambda x, m, v: F.batch_norm(x, m, v), x, mean, var))
    rooted = [
        o
        for o in operations
        if isinstance(o, Kernel) and any(op.op in ("sqrt", "rsqrt") for s in o.stages for op in s.body.of(Apply))
    ]
    assert [[axis.size.as_int() for axis in kernel.axes] for kernel in rooted] == [[48]]


def test_a_maximum_and_its_place_are_found_together() -> None:
    """By one kernel, of however many elements; the gradient asks each element whether it was the maximum."""
    x = torch.randn(2, 16, 24, 24).contiguous(memory_format=torch.channels_last)
    tangent = torch.randn(2, 16, 3, 3)

    def program(x: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = F.adaptive_max_pool2d(leaf, 3)
        return y.detach(), torch.autograd.grad(y, leaf, tangent)[0]

    operations = planned_operations(graph_of(program, x, tangent))
    assert len(operations) == 2 and not any(o.scatters for o in operations if isinstance(o, Kernel)), operations
    for found, wanted in zip(compiled(program, x, tangent), program(x, tangent), strict=True):
        assert torch.equal(found, wanted)
