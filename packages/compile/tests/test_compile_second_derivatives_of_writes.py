"""Values that are written, or detached, where autograd does not see it: three derivatives are eager's, or eager raises."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchcompile
from aotautograd.errors import DoubleBackwardUnavailable

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]

Tensor = torch.Tensor
Write = Callable[[Tensor, Tensor], Any]  # of the tensor, and of another of its size that needs a gradient

WRITES: dict[str, Write] = {
    "mul": lambda z, x: z.mul_(1.5),
    "mul by what needs a gradient": lambda z, x: z.mul_(x),
    "clamp": lambda z, x: z.clamp_(min=0.5),
    "copy": lambda z, x: z.copy_(torch.arange(z.numel()).reshape(z.shape).sin()),
    "copy of what needs a gradient": lambda z, x: z.copy_(x),
    "fill": lambda z, x: z.fill_(1.3),
    "a row": lambda z, x: z[0].add_(0.7),
    "a slice": lambda z, x: z[1:].mul_(1.7),
    "through a shape": lambda z, x: z.view(-1)[2:].mul_(1.2),
    "mask": lambda z, x: z.__setitem__(z < 1, 0.7),
    "item": lambda z, x: z.__setitem__(0, 0.3),
    "part": lambda z, x: z.__setitem__(slice(1, None), x[:-1]),
    "index": lambda z, x: z.__setitem__(torch.tensor([0, 1]), x[1]),
    "foreach": lambda z, x: torch._foreach_mul_([z], 1.1),
    "out": lambda z, x: torch.mul(z.detach(), 3, out=z),
    "augmented": lambda z, x: z.__iadd__(1.5),
    "relu": lambda z, x: F.relu(z, inplace=True),
    "twice": lambda z, x: z.mul_(1.5).add_(x),
    "none": lambda z, x: None,
}


def disabled(z: Tensor, x: Tensor, write: Write) -> None:
    torch.set_grad_enabled(False)
    try:
        write(z, x)
    finally:
        torch.set_grad_enabled(True)


def without_grad(z: Tensor, x: Tensor, write: Write) -> None:
    with torch.no_grad():
        write(z, x)


def of_data(z: Tensor, x: Tensor, write: Write) -> None:
    write(z.data, x.detach())


def of_data_with_history(z: Tensor, x: Tensor, write: Write) -> None:
    write(z.data, x)


def of_alias(z: Tensor, x: Tensor, write: Write) -> None:
    write(z.detach(), x.detach())


def seen(z: Tensor, x: Tensor, write: Write) -> None:
    write(z, x)


WAYS = (disabled, without_grad, of_data, of_data_with_history, of_alias, seen)

STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: (x * 2).clone(),
    "scaled": lambda x: x * 2,
    "saved": lambda x: x.exp(),
    "square": lambda x: x * x,
    "transposed": lambda x: (x * 2).mT.contiguous().mT,
    "leaf": lambda x: x,
    "without history": lambda x: x.detach() * 2,
}

USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "none": lambda z, x: 0.0,
    "sum": lambda z, x: (z + 1).sum(),
    "product": lambda z, x: (z * x).sum() ** 2,
    "function": lambda z, x: (z.exp() * x).sum(),
    "matrix product": lambda z, x: (z.mT @ x).sin().sum(),
}

READS: dict[str, Callable[..., Tensor]] = {
    "base": lambda z, v, d, x: (z**3).sum(),
    "view": lambda z, v, d, x: (v**3).sum(),
    "new view": lambda z, v, d, x: (z[:, 1:] ** 2 * x[:, 1:]).sum(),
    "alias": lambda z, v, d, x: (d**2 * x).sum(),
    "all": lambda z, v, d, x: (z**2 * d * x).sum() + (v**3).sum(),
    "twice": lambda z, v, d, x: (z * z).sum() * z.sin().sum(),
}

Step = tuple[str, Callable[[Tensor, Tensor, Write], None], Write]


def drawn(rng: random.Random) -> tuple[str, Callable[[Tensor], Tensor], bool]:
    """What a program is, the program, and whether its derivatives may be refused: where something is written that
    autograd does not see, or read by `.data`."""
    start, read, alias = rng.choice(sorted(STARTS)), rng.choice(sorted(READS)), rng.choice(("detach", "data"))
    used = rng.choice(sorted(USES)) if rng.random() < 0.5 else "none"
    late, by_view = rng.random() < 0.5, rng.random() < 0.3
    steps: list[Step] = []
    ways = WAYS if rng.random() < 0.6 else WAYS[:2]
    for _ in range(rng.choice((1, 1, 2, 3))):
        name, way = rng.choice(sorted(WRITES)), rng.choice(ways)
        steps.append((f"{way.__name__}: {name}", way, WRITES[name]))

    def program(x: Tensor) -> Tensor:
        z = STARTS[start](x)
        v, d = z[1:], z.detach() if alias == "detach" else z.data
        before = USES[used](z, x)
        for _, way, write in steps:
            if by_view:
                way(v, x[1:] if start != "leaf" else x[1:].detach().sin(), write)
            else:
                way(z, x if start != "leaf" else x.detach().sin(), write)
        if late:
            v = z[1:]
        return READS[read](z, v, d, x) + before

    may_refuse = alias == "data" or any(way is not seen for _, way, _ in steps)
    names = ", ".join(name for name, _, _ in steps)
    return f"{start}; {alias}; {'view ' if by_view else ''}{names}; {read}; {used=} {late=}", program, may_refuse


def derivatives(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    found: list[Tensor | None] = [call(x)]
    for function in (torch.sum, torch.cos, torch.sin):
        value = found[-1]
        if value is None or not value.requires_grad:
            break
        found += torch.autograd.grad(function(value).sum(), x, create_graph=True, allow_unused=True)
    return [None if t is None else t.detach().clone() for t in found]


def compare(names: str, program: Callable[[Tensor], Tensor], may_refuse: bool, backend: str) -> None:
    torch.manual_seed(3)
    values = torch.randn(3, 4)
    try:
        expected = derivatives(program, values.clone().requires_grad_())
    except RuntimeError:  # a saved value was written, a leaf in grad mode, a view of no_grad
        return
    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend)
    try:
        found = derivatives(compiled, values.clone().requires_grad_())
    except DoubleBackwardUnavailable:
        if not may_refuse:
            raise
        x = values.clone().requires_grad_()
        value = compiled(x)
        found = [value, *torch.autograd.grad(value.sum(), x, allow_unused=True)]
        expected = expected[:2]
    for order, pair in enumerate(itertools.zip_longest(found, expected)):
        a, b = (torch.zeros(values.shape if order else ()) if t is None else t for t in pair)
        torch.testing.assert_close(a, b, msg=lambda m, order=order: f"{names}: derivative {order}: {m}")  # type: ignore[misc]


@pytest.mark.parametrize("turn", range(6))
def test_drawn_writes(turn: int) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for place in range(12):
        names, program, may_refuse = drawn(rng)
        compare(f"seed {seed}, program {place}: {names}", program, may_refuse, "aot_eager" if place % 6 else "inductor")


def detached(x: Tensor) -> Tensor:
    z = x * 2
    d = z.detach()
    z.mul_(2)
    return (d * z**2).sum()


def a_row_detached(x: Tensor) -> Tensor:
    z = x * 2
    d = z[1:].detach()
    z.mul_(2)
    return (d * z[1:] ** 2).sum()


def two_views(x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    v = z[1:]
    z[1:] = x[1:]
    return (v**3 * z[1:]).sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", [detached, a_row_detached, two_views], ids=lambda p: p.__name__)
def test_writes_that_autograd_sees_are_followed(program: Callable[[Tensor], Tensor], backend: str) -> None:
    compare(program.__name__, program, False, backend)
