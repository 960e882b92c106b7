"""Derivatives of higher order where sizes are symbols: right at every size, and told where one is made again.

What a derivative is made of is traced when it is asked for first, long after capture has guarded sizes: whatever that
trace takes for granted of them is to be checked at the next call, too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchcompile
from primtorch.ledger import LEDGER

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]


class Of(nn.Module):
    """A function of the input, scaled by a parameter."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


Draw = Callable[[int], torch.Tensor]
ROWS: Draw = lambda n: torch.randn(n, 5)
LINES: Draw = lambda n: torch.randn(n, 3, n + 3)
PICTURES: Draw = lambda n: torch.randn(n, 3, n + 3, n + 5)

NETS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 1)), ROWS),
    "batch norm of pictures": (lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Tanh()), PICTURES),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 3, 2)), LINES),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 3, stride=2), nn.Tanh()), PICTURES),
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)), ROWS),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True), nn.SiLU()), LINES),
    "average pool": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Tanh(), nn.AdaptiveAvgPool2d(2)), PICTURES),
    "upsample": (lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh()), PICTURES),
    "softmax": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(0), nn.LogSoftmax(1)), ROWS),
    "mean": (lambda: Of(lambda x: x.mean(0).exp() * x.std(1).sum()), ROWS),
    "variance": (lambda: Of(lambda x: x.var(0) * x.sum() / x.shape[0] + x.prod(0) + x.cumsum(0)), ROWS),
    "cat": (lambda: Of(lambda x: torch.cat([x, x.sin(), x.flip(0)]).sort(0)[0]), ROWS),
    "matmul": (lambda: Of(lambda x: x.t() @ x @ x.t()), ROWS),
}


def derivatives(net: nn.Module, call: Callable[..., Any], x: torch.Tensor, order: int) -> list[torch.Tensor | None]:
    """Each derivative by `x` up to that order, and what the last backward leaves in the parameters."""
    x = x.clone().requires_grad_()
    value = call(x).sin().sum()
    found: list[torch.Tensor | None] = [value.detach()]
    for _ in range(order - 1):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(slope.detach())
        value = slope.square().sum()
    net.zero_grad()
    value.backward()
    return [*found, x.grad, *(p.grad for p in net.parameters())]


def check(name: str, order: int, backend: str) -> None:
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    make, draw = NETS[name]
    net = make()
    other = copy.deepcopy(net)
    compiled = torchcompile.compile(other, backend=backend, dynamic=True)
    for size in random.Random(seed).sample(range(2, 8), 3):
        x = draw(size)
        expected, found = derivatives(net, net, x, order), derivatives(other, compiled, x, order)
        assert [t is None for t in found] == [t is None for t in expected], f"seed {seed}, size {size}"
        for a, b in zip(found, expected, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, msg=lambda m, size=size: f"seed {seed}, size {size}: {m}")  # type: ignore[misc]


@pytest.mark.parametrize("name", NETS)
def test_second_derivatives(name: str) -> None:
    check(name, 2, "aot_eager")


def test_third_derivatives() -> None:
    """Torch's formula fixes sizes in the derivative before it: those of the trial, not of the first call."""
    check("transposed", 3, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", NETS)
def test_derivatives(name: str, order: int, backend: str) -> None:
    check(name, order, backend)


@pytest.mark.parametrize(("name", "order"), [("batch norm", 2), ("mean", 3)])
def test_derivatives_of_generated_kernels(name: str, order: int) -> None:
    check(name, order, "inductor")


def told() -> int:
    return sum(event.count for event in LEDGER.events if event.kind.id == "made_for_other_sizes")


def test_what_is_made_again_is_told_and_kept() -> None:
    """Torch's formula of this derivative reads sizes as numbers: one program for each size, made once."""
    torchcompile.reset()
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh())
    compiled = torchcompile.compile(net, backend="aot_eager", dynamic=True)
    before = told()
    for size, is_new in ((4, False), (6, True), (4, False), (6, False), (3, True)):
        derivatives(net, compiled, torch.randn(size, 5), 2)
        assert (told() > before) == is_new, size
        before = told()


def test_looking_at_what_autograd_keeps_fixes_no_size() -> None:
    """A mean's node keeps the sizes; who looks whether it was freed reads them as numbers."""
    torchcompile.reset()
    compiled = torchcompile.compile(lambda x: x.mean(0).exp(), backend="aot_eager", dynamic=True)
    for size in (4, 6, 3):
        compiled(torch.randn(size, 5, requires_grad=True)).sum().backward()
    assert told() == 0 and not torchcompile.report().recompiles


def _flipped(x: torch.Tensor) -> torch.Tensor:
    return (x.flip(0) * x).masked_fill(x > 0.5, 0.5) * x


def _sorted(x: torch.Tensor) -> torch.Tensor:
    x = torch.stack([x, x.sin()], 1).flatten(0, 1)
    x = torch.where(x > 0, x, x * x)
    return (x - x.sum(0, keepdim=True)).sort(0)[0] * x


def _sorted_rows(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()).sort(0)[0]


def _of_some(x: torch.Tensor) -> torch.Tensor:
    x = x[x.sum(1) > 0]
    x = torch.cat([x, x.cos()]).softmax(0)
    return x * x.sum(1, keepdim=True)


# Each takes rows and a mask of them, and has results or parts of them whose sizes the mask tells.
OF_DATA: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked_select": lambda x, m: x.masked_select(m).exp(),
    "two masks": lambda x, m: x[m] * x.exp()[m],
    "rows": lambda x, m: x[m[:, 0]].sin() @ x.t(),
    "rows, turned": lambda x, m: x[m[:, 0]].t().exp(),
    "places": lambda x, m: x.sin()[m.nonzero()[:, 0]] * 2,
    "twice as many": lambda x, m: torch.cat([x[m], x[m].cos()]).sin(),
    "and others": lambda x, m: torch.cat([x[m[:, 0]], x]).sin(),
    "a column": lambda x, m: (x[m[:, 0]] * x[:, :1][m[:, 0]]).tanh(),
    "every other": lambda x, m: x[m].sin()[::2],
    "a softmax": lambda x, m: x[m].softmax(0),
    "within": lambda x, m: (x[m[:, 0]].t() @ x[m[:, 0]].cos()).sin(),
    "added": lambda x, m: torch.zeros_like(x).index_add(0, m.nonzero()[:, 0], x[m.nonzero()[:, 0]].sin()),
    "a layer norm": lambda x, m: F.layer_norm(x[m[:, 0]], (5,), x[0], x[1]).tanh(),
    "a linear layer": lambda x, m: F.linear(x[m[:, 0]], x[:3], x[0, :3]).sin(),
    "a batch": lambda x, m: x[m[:, 0]].unsqueeze(1) @ x[:, None].mT[m[:, 0]],
    "a variance": lambda x, m: x[m[:, 0]].var(1) * x[m[:, 0]].sum(),
    "of length one": lambda x, m: F.normalize(x[m[:, 0]].exp()),
    "scattered": lambda x, m: x.masked_scatter(m, x.sin()[m] * 2),
    "put": lambda x, m: x.index_put((m,), x[m].exp()),
    "padded": lambda x, m: F.pad(x[m], (1, 2)).sin(),
    "flipped": lambda x, m: x[m[:, 0]].flip(0).exp() * x[m[:, 0]],
    "convolved": lambda x, m: F.conv1d(x[m[:, 0]].unsqueeze(1), x[:2, None, :3]).tanh(),
    "reshaped": lambda x, m: x[m[:, 0]].reshape(-1).exp(),
    "joined": lambda x, m: torch.cat([x[m[:, 0]].reshape(-1), x.flatten()[m.flatten()].exp()]).sin(),
    "joined and doubled": lambda x, m: torch.cat([x[m[:, 0]], x[m[:, 1]].sin()]).repeat(2, 1).tanh(),
    "normal columns": lambda x, m: F.normalize(torch.cat([x[m[:, 0]], x[~m[:, 0]].cos()]).exp()).reshape(-1, 1),
    "all but the first": lambda x, m: torch.cat([x[:, 0].repeat_interleave(m.sum(1))[1:], x[:, 0]]).sin(),
    "half of them, twice": lambda x, m: x.sin()[m][::2].softmax(0).repeat(2),
    "joined and flipped": lambda x, m: _flipped(torch.cat([x[m[:, 0]], x[~m[:, 0]].cos()])),
    "all but the first, reshaped": lambda x, m: x[m[:, 0]][1:].reshape(-1).sin().unsqueeze(0).tanh(),
    "repeated and sorted": lambda x, m: _sorted(x[:, 0].repeat_interleave(m.sum(1) * m[:, 0])),
    "joined, less the mean": lambda x, m: _sorted_rows(torch.cat([x[m[:, 0]], x[~m[:, 0]].cos()]).exp()).repeat(2, 1),
    "some of them": lambda x, m: _of_some(x[m[:, 0]]),
    "running sums": lambda x, m: x[m[:, 0]].cumsum(0) * x[m[:, 0]].cumsum(1),
    "running products": lambda x, m: x[m[:, 0]].cumprod(1).sin(),
    "running maxima": lambda x, m: x[m[:, 0]].exp().cummax(0)[0] * x[m[:, 0]],
    "only counted": lambda x, m: (x[m] + x.exp()[m]).sum(),
}


def derivatives_of_data(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, mask: torch.Tensor, order: int
) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    found = [program(leaf, mask)]
    total = found[0].square().sum()
    for left in range(order - 1, -1, -1):
        (slope,) = torch.autograd.grad(total, leaf, create_graph=left > 0, allow_unused=True)
        if slope is None:
            break
        found.append(slope)
        total = slope.sin().sum()
    return found


def check_of_data(name: str, backend: str, order: int) -> None:
    """A derivative is made when it is asked for first, of tensors of that call: of the next call's sizes, too. The first
    may be of one row, or of none. Numbers are small: the sine of a large slope is its rounding errors."""
    seed = random.randrange(1 << 30)
    torchcompile.reset()
    draw, program = torch.Generator().manual_seed(seed), OF_DATA[name]
    compiled = torchcompile.compile(program, backend=backend, dynamic=random.Random(seed).choice((True, None)))
    for rows, some in random.Random(seed).sample(((7, 3), (7, 2), (9, 5), (8, 0), (8, 1), (8, 8)), 6):
        x, mask = torch.rand(rows, 5, generator=draw) * 2 - 1, torch.rand(rows, 5, generator=draw) < 0.5
        if some < 2:
            mask[:] = False
        mask[:, 0] = torch.randperm(rows, generator=draw) < some
        wanted, found = (derivatives_of_data(call, x, mask, order) for call in (program, compiled))
        assert len(found) == len(wanted), f"seed {seed}, {some} of {rows} rows"
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                a, b, equal_nan=True, msg=lambda m, where=(some, rows): f"seed {seed}, {where}: {m}"
            )  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", OF_DATA)
def test_sizes_that_the_data_tells(name: str, order: int) -> None:
    check_of_data(name, "aot_eager", order)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("columns", [None, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize(
    "name",
    [
        *("reshaped", "twice as many", "padded", "joined", "joined and doubled", "half of them, twice"),
        *("all but the first", "all but the first, reshaped"),
    ],
)
def test_what_a_size_is_computed_from_is_known(name: str, columns: bool | None, order: int) -> None:
    """A tangent of `5*u0` elements, or of `s1*u0`, tells `u0`: what is computed again has as many rows, whatever their
    number, and one program serves all of them but one row and none, at which broadcasts and layouts differ."""
    seed = random.randrange(1 << 30)
    torchcompile.reset()
    draw, program = torch.Generator().manual_seed(seed), OF_DATA[name]
    compiled = torchcompile.compile(program, backend="aot_eager", dynamic=columns)
    for some in random.Random(seed).sample(range(3, 10), 4):
        x, mask = torch.rand(10, 5, generator=draw) * 2 - 1, torch.zeros(10, 5, dtype=torch.bool)
        mask[torch.randperm(10, generator=draw)[:some]] = True
        wanted, found = (derivatives_of_data(call, x, mask, order) for call in (program, compiled))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, some=some: f"seed {seed}, {some} rows: {m}")  # type: ignore[misc]
    assert told() == 0, f"seed {seed}"


@pytest.mark.parametrize(
    "name", ["two masks", "twice as many", "every other", "a layer norm", "scattered", "joined and flipped"]
)
def test_sizes_that_the_data_tells_in_kernels(name: str) -> None:
    check_of_data(name, "inductor", 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", OF_DATA)
def test_sizes_that_the_data_tells_in_all_kernels(name: str, order: int) -> None:
    check_of_data(name, "inductor", order)


@pytest.mark.parametrize("transposed", [False, True])
def test_windows_of_sizes(transposed: bool) -> None:
    """Strides, padding and dilation are sizes of other tensors, in derivatives by image and weights up to the third; to
    the second where there is padding of the result, of which eager has no more."""
    seed = random.randrange(1 << 30)
    torchcompile.reset()
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rank, groups = draw.choice((1, 2)), draw.choice((1, 2))

    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *sizes: torch.Tensor) -> torch.Tensor:
        stride, padding, dilation = (t.shape[0] for t in sizes)
        names = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if transposed:
            names["output_padding"] = stride - 2
        call = getattr(F, f"conv{'_transpose' if transposed else ''}{rank}d")
        found: torch.Tensor = call(x, weight, bias, **names)
        return found.tanh()

    compiled = torchcompile.compile(program, backend="aot_eager", dynamic=True)
    for _ in range(3):
        sizes = [torch.empty(draw.randint(2, 4)) for _ in range(3)]
        spatial, kernel = ([draw.randint(low, high) for _ in range(rank)] for low, high in ((9, 12), (2, 3)))
        leaves = [
            torch.randn(shape, generator=generator)
            for shape in ((2, 2 * groups, *spatial), (2 * groups, 2, *kernel), (2 * groups,))
        ]
        found = []
        for call in (program, compiled):
            given = [leaf.clone().requires_grad_() for leaf in leaves]
            value: torch.Tensor = call(*given, *sizes)
            made = [value]
            for left in range(1 if transposed else 2, -1, -1):
                value = sum(t.square().sum() for t in made[-3:])  # type: ignore[assignment]
                made += torch.autograd.grad(value, given, create_graph=left > 0)
            found.append(made)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, msg=lambda m: f"seed {seed}: {m}")
