"""Kernels over images whose sizes are symbols: they give eager's values at any sizes, whatever the example's were, and
their loops are as those of numbers."""

from __future__ import annotations

import platform
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from image_kernels import vectors_of
from torch import Tensor

import primtorch
from primtorch.fake import FakeMode
from primtorch.symbolic import ShapeEnv
from torchinductor import InductorOptions, compile_graph
from torchinductor.codegen.cpp.build import find_compiler
from torchinductor.compile import CompiledGraph

Program = Callable[[Tensor], Tensor]
LAYOUTS = {"by rows": torch.contiguous_format, "channels last": torch.channels_last}
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 17, 33)


class OverSymbols:
    """A program that was compiled once for images whose dims `dims` have any sizes."""

    def __init__(self, program: Program, example: Tensor, dims: Sequence[int]) -> None:
        self.env, self.dims = ShapeEnv(), dims
        symbols = {d: self.env.symbol(example.shape[d], f"size{d}", min=0) for d in dims}
        mode = FakeMode(self.env)
        with mode:
            fake = mode.from_tensor(example, dynamic=symbols)
            gm = primtorch.lower(primtorch.trace(lambda *args: program(args[-1]), *symbols.values(), fake))
        self.compiled: CompiledGraph = compile_graph(gm, (), InductorOptions())

    def takes(self, x: Tensor) -> bool:
        """Whether the sizes are among those that the program was compiled for."""
        values = {f"s{k}": x.shape[d] for k, d in enumerate(self.dims)}
        return all(guard.expr.evaluate(values) for guard in self.env.guards)

    def __call__(self, x: Tensor) -> Tensor:
        (result,) = self.compiled(*(x.shape[d] for d in self.dims), x)
        assert isinstance(result, Tensor)
        return result

    @property
    def text(self) -> str:
        """The kernels, without what all have before them."""
        (text,) = self.compiled.sources.values()
        return text[text.index('extern "C" int') :]


def gradient(program: Program) -> Program:
    """The gradient of a program's results, each by another weight."""

    def run(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        result = program(leaf)
        return torch.autograd.grad(result, leaf, (result.detach() * 3).cos())[0]

    return run


def drawn(draw: random.Random) -> Program:
    """A program of a few steps that move, select or pool numbers."""
    by, dim, side, two = draw.randint(-9, 9), draw.randrange(1, 4), draw.randint(1, 3), draw.randint(1, 2)
    sides, mode = [draw.randint(0, 3) for _ in range(4)], draw.choice(("reflect", "replicate", "circular"))
    compare, turned = draw.choice((torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)), draw.random() < 0.5

    def selected(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[dim]).view([-1 if d == dim else 1 for d in range(4)])
        return torch.where(compare(6 - place if turned else place, by), x, x + 1)

    steps: tuple[Program, ...] = (
        lambda x: x.roll(by, dim),
        lambda x: F.pad(x, sides, value=2.0),
        lambda x: F.pad(x, sides, mode=mode),
        lambda x: F.pad(x, [-1, side, side, -1]),
        lambda x: torch.cat([x.abs(), x, x * 2], dim),
        selected,
        lambda x: x.flip(dim),
        lambda x: x.tril(by),
        lambda x: x[:, :, side - 1 :, ::two],
        lambda x: F.max_pool2d(x, 3, two, 1, two),
        lambda x: F.avg_pool2d(x, 3, two, 1, count_include_pad=turned),
        lambda x: F.max_pool2d(x, two + 1),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
        lambda x: x.flatten(2).flip(2).unflatten(2, x.shape[2:]),
        lambda x: x.index_select(dim, torch.arange(0, x.shape[dim], two)),
    )
    chosen = [draw.choice(steps) for _ in range(draw.randint(1, 3))]

    def program(x: Tensor) -> Tensor:
        for step in chosen:
            x = step(x)
        return x

    return program


def images(layout: str, draw: random.Random, count: int) -> list[Tensor]:
    """Of sizes of which the first are the example's."""
    first = (3, 4, draw.choice((42, 44)), draw.choice((40, 47)))  # large enough for every step three times
    shapes = [first, *((draw.choice((1, 2, 5)), 4, draw.choice(SIZES), draw.choice(SIZES)) for _ in range(count))]
    made = [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    return [x.contiguous(memory_format=LAYOUTS[layout]) for x in made]


@pytest.mark.parametrize("backward", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_drawn_gives_eagers_values_at_any_sizes(layout: str, backward: bool) -> None:
    seed, ran = random.randrange(2**32), 0
    for number in range(seed, seed + 12):
        draw = random.Random(number)
        program = drawn(draw)
        program = gradient(program) if backward else program
        example, *others = images(layout, draw, 24)
        compiled = OverSymbols(program, example, (0, 2, 3))
        for x in (example, *others):
            if not compiled.takes(x):
                continue
            found, wanted = compiled(x), program(x)
            torch.testing.assert_close(found, wanted, msg=lambda m, x=x, n=number: f"seed {n}, {tuple(x.shape)}: {m}")
            ran += 1
    assert ran > 24, "nearly no sizes but the examples' were allowed"


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 9, 30])
def test_borders_as_wide_as_the_image_and_wider(mode: str, size: int) -> None:
    """Where the order of a loop's parts is another one than for large sizes."""
    compiled = OverSymbols(lambda x: F.pad(x, (2, 3, 1, 0), mode=mode), torch.randn(2, 3, 8, 20), (2, 3))
    x = torch.arange(6.0 * size * size).view(2, 3, size, size)
    if compiled.takes(x):
        assert torch.equal(compiled(x), F.pad(x, (2, 3, 1, 0), mode=mode))
    else:
        assert size <= 3


@pytest.mark.parametrize("by", [-40, -5, -1, 0, 1, 4, 5, 6, 40])
def test_what_is_rolled_further_than_it_is_long(by: int) -> None:
    compiled = OverSymbols(lambda x: x.roll((by, 1), (3, 2)), torch.randn(2, 3, 8, 20), (2, 3))
    for size in (1, 2, 3, 4, 5, 6, 39, 40, 41):
        x = torch.arange(12.0 * size).view(2, 3, 2, size)
        assert not compiled.takes(x) or torch.equal(compiled(x), x.roll((by, 1), (3, 2))), size


ROWS: dict[str, Program] = {
    "padded max pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "activations joined": lambda x: torch.cat([x.relu(), x.sigmoid(), x], 1),
    "rows of activations joined": lambda x: torch.cat([x.relu(), x.sigmoid(), x], 2),
    "roll": lambda x: x.roll((3, 5), (2, 3)),
    "reflected border": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
    "replicated border": lambda x: F.pad(x, (2, 2, 2, 2), mode="replicate"),
}
CHANNELS: dict[str, Program] = {
    "strided max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "padded average pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "bilinear, enlarged": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, reduced": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
}
CASES = [
    *((name, layout) for layout in LAYOUTS for name in ROWS if name[:4] != "rows" or layout == "by rows"),
    *((name, "channels last") for name in CHANNELS),
]


def _simd_loops(lines: Sequence[str], along: str) -> list[tuple[str, range]]:
    """The loops that end so and are to be vectors, but for those for odd sizes, and the lines of each, counted from one."""
    found = []
    for n, line in enumerate(lines):
        head = re.match(rf"( *)for \(i64 (\w+) = .*; \2 < .*{along}; \2\+\+\) {{", line)
        if head and "#pragma omp simd" in lines[n - 1] and "} else {" not in lines[n - 2]:
            found.append((line.strip(), range(n + 1, lines.index(f"{head[1]}}}", n) + 2)))
    return found


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instructions are x86's")
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loops_are_vectors(name: str, layout: str, tmp_path: Path) -> None:
    """The compiler says which loops it made vectors of: all but those for sizes of another order."""
    (compiler, *rest) = find_compiler(None)
    if "g++" not in Path(compiler).name:
        pytest.skip("what another compiler says is not known")
    x = torch.randn(2, 64, 28, 28).contiguous(memory_format=LAYOUTS[layout])
    compiled = OverSymbols((ROWS | CHANNELS)[name], x, (0, 2, 3))
    (text,) = compiled.compiled.sources.values()
    vectors, told = vectors_of(text, [compiler, *rest], tmp_path)
    start = text[: text.index('extern "C" int')].count("\n")
    along = "" if layout == "by rows" else "64L"
    loops = [(head, places) for head, places in _simd_loops(text.splitlines(), along) if places[0] > start]
    assert loops
    scalar = [head for head, places in loops if not vectors & set(places)]
    assert not scalar, f"{name}: {scalar}\n{compiled.text}\n{told}"


GRADIENTS: dict[str, Program] = {
    "global max pool": lambda x: F.adaptive_max_pool2d(x, 1),
    "amax": lambda x: x.amax((2, 3)),
    "bilinear to half": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bilinear to 5": lambda x: F.interpolate(x, (5, 4), mode="bilinear", align_corners=True),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "average pool of three": lambda x: F.avg_pool2d(x, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_stay_in_the_images_order(name: str, layout: str) -> None:
    """What they are scattered into lies as the images do: nothing is turned over, and nothing looks for its row."""
    program, seed = gradient(GRADIENTS[name]), random.randrange(2**32)
    torch.manual_seed(seed)
    example = torch.randn(2, 6, 12, 10, dtype=torch.float64).contiguous(memory_format=LAYOUTS[layout])
    compiled = OverSymbols(program, example, (0, 2, 3))
    for shape in ((2, 6, 12, 10), (1, 6, 8, 6), (3, 6, 5, 7), (2, 6, 30, 4)):
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=LAYOUTS[layout])
        if compiled.takes(x):
            found, wanted = compiled(x), program(x)
            torch.testing.assert_close(found, wanted, msg=lambda m, shape=shape: f"seed {seed}, {shape}: {m}")
            assert found.stride() == wanted.stride()
    assert "turn(" not in compiled.text, compiled.text
    kernels = re.findall(r"^ *// (\w+)$", compiled.text, re.MULTILINE)
    assert "copy_strided" not in kernels or not {"scatter_add", "index_put"} & set(kernels), kernels


def test_what_a_kernel_is_not_told_is_not_asked() -> None:
    """How many images there are, of which one is read: no index has that number."""
    program: Program = lambda x: F.pad(x[2, :, 0, :4], (0, 0, 1, 2))
    compiled = OverSymbols(program, torch.randn(5, 3, 8, 20), (0, 2, 3))
    x = torch.randn(4, 3, 6, 9)
    assert torch.equal(compiled(x), program(x))


def test_rows_are_read_by_groups_without_a_division() -> None:
    compiled = OverSymbols(lambda x: x.flatten(2) * x.sum(3, keepdim=True).expand(x.shape).flatten(2),
                           torch.randn(2, 3, 8, 20), (2, 3))  # fmt: skip
    assert not re.search(r"\[[^]]*[/%]", compiled.text), compiled.text
