"""C++ kernels over images in several layouts: what only moves numbers gives the same numbers, and the compiler makes
vectors of the loops."""

from __future__ import annotations

import platform
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from image_kernels import DTYPES, LAYOUTS, vectors_of
from torch import Tensor

import primtorch
from torchinductor import InductorOptions, compile_graph
from torchinductor.codegen.cpp.build import find_compiler


def compiled(program: Callable[..., object], *inputs: Tensor) -> tuple[Tensor, ...]:
    gm = primtorch.lower(primtorch.trace(program, *inputs))
    return tuple(compile_graph(gm, inputs, InductorOptions())(*inputs))


# Each takes an image and a source of random numbers, and gives a function of images that moves or selects numbers.
Step = Callable[[torch.Size, random.Random], Callable[[Tensor], Tensor]]


def _padded(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    sides = [draw.randint(-1, 3) for _ in range(4)]
    return lambda x: F.pad(x, sides, value=draw.randint(0, 3)) if min(x.shape[2:]) > 3 else x


def _rolled(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    by, dim = draw.randint(-9, 9), draw.randrange(4)
    return lambda x: x.roll(by, dim)


def _joined(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    dim, parts = draw.choice((1, 2, 3)), draw.randint(2, 6)
    return lambda x: torch.cat([x + k for k in range(parts)], dim)


def _selected(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    """One of two numbers by where the element is."""
    compare = draw.choice((torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne))
    dim, edge, turned = draw.randrange(1, 4), draw.randint(-1, 12), draw.random() < 0.5

    def step(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[dim]).view([-1 if d == dim else 1 for d in range(4)])
        place = 10 - place if turned else place
        return torch.where(compare(place, edge), x, draw.choice((x + 1, torch.zeros((), dtype=x.dtype))))

    return step


def _pooled(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    stride, dilation = draw.randint(1, 2), draw.randint(1, 2)
    floats = lambda x: x.is_floating_point() and min(x.shape[2:]) > 5
    return lambda x: F.max_pool2d(x, 3, stride, 1, dilation) if floats(x) else x


def _grouped(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    """Each channel beside its group's, or the groups' channels by turns."""
    groups = draw.choice([n for n in range(1, shape[1] + 1) if shape[1] % n == 0])
    turned, dim = draw.random() < 0.5, draw.choice((2, 3))

    def step(x: Tensor) -> Tensor:
        if turned:
            return F.channel_shuffle(x, groups)
        apart = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        return (apart + apart.amax((2, dim + 1), keepdim=True)).reshape(x.shape)

    return step


def _bordered(shape: torch.Size, draw: random.Random) -> Callable[[Tensor], Tensor]:
    """With a border that is told by the places alone, or a part of the image by such places."""
    mode, sides, dim = draw.choice(("reflect", "replicate", "circular")), [draw.randint(-1, 3) for _ in range(4)], 3
    scale, shift, low, high = draw.choice((1, -1)), draw.randint(-3, 50), draw.randint(0, 3), draw.randint(3, 5)

    def step(x: Tensor) -> Tensor:
        if min(x.shape[2:]) < 6:
            return x
        if draw.random() < 0.5:
            return F.pad(x.double(), sides, mode=mode).to(x.dtype)
        place = scale * torch.arange(x.shape[dim]) + shift
        return x[..., (x.shape[dim] - high - (place - x.shape[dim] // 2).abs()).clamp(low, x.shape[dim] - 1)]

    return step


STEPS: tuple[Step, ...] = (
    _padded, _rolled, _joined, _selected, _pooled, _grouped, _bordered,
    lambda shape, draw: lambda x: x.flip(draw.choice((1, 2, 3))),
    lambda shape, draw: lambda x: x[:, :, draw.randint(0, 1) :: draw.randint(1, 2)],
    lambda shape, draw: lambda x: x.tril(draw.randint(-2, 2)),
    lambda shape, draw: lambda x: x.clamp(1, 5),
    lambda shape, draw: lambda x: x.permute(0, 1, 3, 2),
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_moves_numbers_gives_the_same(layout: str) -> None:
    seed = random.randrange(2**32)
    for number in range(seed, seed + 12):
        draw = random.Random(number)
        shape = (2, draw.choice((3, 8, 17, 32)), draw.randint(6, 20), draw.randint(6, 40))
        dtype = draw.choice(DTYPES)
        x = LAYOUTS[layout](torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(number)).to(dtype))
        steps = [draw.choice(STEPS) for _ in range(draw.randint(1, 4))]

        def program(x: Tensor, steps: list[Step] = steps, number: int = number) -> tuple[Tensor, ...]:
            draw = random.Random(number)
            for step in steps:
                x = step(x.shape, draw)(x)
            return (x,)

        (found,), (wanted,) = compiled(program, x), program(x)
        assert torch.equal(found, wanted) and found.stride() == wanted.stride(), f"seed {number}, {layout}, {dtype}"


def test_numbers_that_are_none_and_zeros_with_a_sign() -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([nan, -inf, inf, 0.0, -0.0, 1.0, -1.0, 3.0])
    a, b = (t.flatten() for t in torch.meshgrid(values, values, indexing="ij"))
    x = a.repeat(20).view(20, 64)
    y = b.repeat(20).view(20, 64)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        bounds = [x.clamp(-1, 1), x.clamp(min=0.0), x.relu(), x.clamp(max=nan)]
        return *bounds, torch.maximum(x, y), torch.minimum(x, y), F.hardtanh(x)

    for found, wanted in zip(compiled(program, x, y), program(x, y), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_sums_over_short_rows_within_long_columns() -> None:
    """Of whole numbers, which no order of additions rounds."""
    seed = random.randrange(2**32)
    for number in range(seed, seed + 12):
        draw = random.Random(number)
        groups, short, long = draw.randint(1, 5), draw.randint(1, 40), draw.choice((3, 33, 700, 1025))
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(-8, 9, (2, long, groups, short), generator=generator).float()

        def program(x: Tensor) -> tuple[Tensor, ...]:
            total = x.sum((1, 3), keepdim=True)
            return total, (x - total.sign()).sum((1, 3)), (x * 2).bfloat16().sum((1, 3), dtype=torch.float32), x + total

        for found, wanted in zip(compiled(program, x), program(x), strict=True):
            assert torch.equal(found, wanted), f"seed {number}: {groups} groups of {short} in {long}"


def test_a_buffer_that_a_kernel_has_to_itself_is_joined() -> None:
    """Parts that are written and read by one kernel are in no memory."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        parts = torch.cat([x.sin(), x.cos(), x * 2, x + 1, x.exp(), x.abs()])
        return (parts[:n] * parts[n : 2 * n] + parts[2 * n : 3 * n] - parts[3 * n : 4 * n] * parts[5 * n :],)

    x = torch.randn(300, 8, dtype=torch.float64)
    torch.testing.assert_close(compiled(program, x), program(x))


CHANNELS = 64
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded max pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "strided max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "padded average pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "activations joined": lambda x: torch.cat([x.relu(), x.sigmoid(), x], 1),
    "roll": lambda x: x.roll((3, 5), (2, 3)),
    "bilinear, enlarged": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, reduced": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bilinear, by two thirds": lambda x: F.interpolate(x, size=(19, 20), mode="bilinear"),
    "windows of two sizes": lambda x: F.adaptive_avg_pool2d(x, 5),
    "windows of one size": lambda x: F.adaptive_avg_pool2d(x, 7),
    "reflected border": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
}


GROUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 4),
    "shuffled channels": lambda x: F.channel_shuffle(x, 4),
    "scaled by groups": lambda x: (x.unflatten(1, (4, 16)) * x[:, :4, None].sigmoid()).flatten(1, 2),
}


def _loops_of_rows(lines: list[str], least: int) -> Iterator[tuple[str, range]]:
    """The kernels' innermost loops over so many channels or more, and the lines of each, counted from one."""
    for n, line in enumerate(lines):
        found = re.match(r"( *)for \(i64 \w+ = (\d+)L?; \w+ < (\d+)L; \w+\+\+\) {", line)
        if found and "#pragma omp simd" in lines[n - 1] and int(found[3]) - int(found[2]) >= least:
            yield line.strip(), range(n + 1, lines.index(f"{found[1]}}}", n) + 2)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instructions are x86's")
@pytest.mark.parametrize("name", [*ROWS, *GROUPS])
def test_rows_of_channels_are_vectors(name: str, tmp_path: Path) -> None:
    """The compiler says which loops it made vectors of: all that go over the channels of a place, or of a group there."""
    (compiler, *rest) = find_compiler(None)
    if "g++" not in Path(compiler).name:
        pytest.skip("what another compiler says is not known")
    x = torch.randn(2, CHANNELS, 28, 28).contiguous(memory_format=torch.channels_last)
    gm = primtorch.lower(primtorch.trace(lambda x: ((ROWS | GROUPS)[name](x),), x))
    (text,) = compile_graph(gm, (x,), InductorOptions()).sources.values()
    vectors, told = vectors_of(text, [compiler, *rest], tmp_path)
    loops = list(_loops_of_rows(text.splitlines(), CHANNELS // 4 if name in GROUPS else CHANNELS))
    assert loops
    for head, places in loops:
        variable = re.findall(r"\w+", head)[2]
        divided = re.compile(rf"\([^()]*\b{variable}\b[^()]*\) [/%]")
        lines = [text.splitlines()[place - 1] for place in places]
        assert not [line for line in lines if divided.search(line)], f"{head}: a group is looked for at each channel"
    scalar = [head for head, places in loops if not vectors & set(places)]
    assert not scalar, f"{name}: {scalar}\n{told}"


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_borders_are_places_that_nobody_looks_up(mode: str) -> None:
    """By rows too the loop is cut where the image begins and ends, and each part reads memory by one step."""
    x = torch.randn(2, 3, 20, 40)
    gm = primtorch.lower(primtorch.trace(lambda x: (F.pad(x, (3, 2, 1, 1), mode=mode),), x))
    (text,) = compile_graph(gm, (x,), InductorOptions()).sources.values()
    kernel = text[text.index('extern "C" int') :]
    assert "bad" not in kernel and "(const i64*)" not in kernel
    assert kernel.count("#pragma omp simd") == 3
