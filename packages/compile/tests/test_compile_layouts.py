"""How results lie in memory, and values where PyTorch's own kernels choose that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile

CHANNELS_LAST = torch.channels_last


class Patches(nn.Module):
    """Pixels to tokens: the gradient of the convolution's result comes with its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).flatten(2).transpose(1, 2).contiguous().sin().sum()


@pytest.mark.parametrize("image", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize("weight", [torch.contiguous_format, CHANNELS_LAST])
def test_gradients_of_convolutions_in_mixed_layouts(image: torch.memory_format, weight: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Patches().double().to(memory_format=weight)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=image).requires_grad_()
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x), inputs)
    found = torch.autograd.grad(torchcompile.compile(model)(x), inputs)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)


class Turned(nn.Module):
    """A convolution of images whose channels come last, as a norm over channels gives them."""

    def __init__(self, sides: tuple[int, ...], groups: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.convolve = nn.Conv2d(8, 8, sides, padding="same", groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.convolve(x).sin()


@pytest.mark.parametrize("sides", [(7, 7), (1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_filters_have_eagers_strides(sides: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    """In dims of size one too, whichever library computes them, and whichever layout the images have in the program."""
    model = Turned(sides, groups).to(dtype)
    for size in (8, 16):
        x = torch.randn(2, 3, size, size, dtype=dtype, requires_grad=True)
        results = [f(x) for f in (model, torchcompile.compile(model, fullgraph=True))]
        inputs = [x, *model.parameters()]
        expected, found = (torch.autograd.grad(result.square().sum(), inputs) for result in results)
        assert [t.stride() for t in found] == [t.stride() for t in expected]
        assert results[0].stride() == results[1].stride()
    assert torchcompile.report().clean


X, GAPPED = torch.arange(16.0).view(4, 4), torch.arange(24.0).view(4, 6)[:, ::2]
LAST = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=CHANNELS_LAST)


def gapped(*strides: int) -> torch.Tensor:
    return torch.empty_strided((4, 4), strides)


def with_rows_set(t: torch.Tensor) -> torch.Tensor:
    t[1:3, ::2] = 1
    return t


RESULTS: dict[str, Callable[[], Any]] = {
    **{f"copy_ into {strides}": lambda strides=strides: gapped(*strides).copy_(X)
       for strides in ((8, 1), (1, 8), (9, 2), (4, 1), (1, 4))},
    "zero_ and fill_": lambda: (gapped(8, 1).zero_(), gapped(8, 2).fill_(3.0)),
    "a chain of writes": lambda: gapped(5, 1).copy_(X).neg_().add_(1),
    "new_empty_strided": lambda: X.new_empty_strided((4, 4), (5, 1)).copy_(X),
    "a write to a part": lambda: with_rows_set(gapped(8, 1).zero_()),
    "a view of it": lambda: gapped(8, 1).copy_(X).t(),
    "it and a view of it": lambda: (lambda t: (t, t[1:], t.t()))(gapped(8, 1).copy_(X)),
    "what is computed from it": lambda: (gapped(8, 1).copy_(X).neg(), gapped(1, 8).copy_(X).clone()),
    "slices": lambda: ((X + 1)[:, ::2], (X + 1)[1:3, 1:], (LAST + 1)[:, 1], (LAST + 1).narrow(1, 1, 2)),
    "expanded": lambda: ((X[:, :1] + 1).expand(4, 4), (X[0] + 1).broadcast_to(3, 4)),
    "as_strided": lambda: ((X + 1).as_strided((3, 3), (1, 1)), (X + 1).as_strided((3, 3), (0, 1), 2)),
    "windows": lambda: ((X + 1).unfold(1, 2, 1), (X + 1).diagonal()),
    "parts of complex numbers": lambda: (torch.complex(X, X).real, torch.complex(X, X).imag),
    "scattered slices": lambda: (
        torch.slice_scatter(GAPPED, X[:, :1], 1, 0, 1), torch.select_scatter(GAPPED, X[0], 1, 0),
        torch.diagonal_scatter(GAPPED, X[0, :3]), torch.as_strided_scatter(GAPPED, X[0, :2], (2,), (3,)),
        torch.slice_scatter(X[:1].expand(4, 4), X, 0),
    ),
    "stacked": lambda: tuple(torch.stack([LAST, LAST], d) for d in range(5)) + (torch.stack([LAST, LAST.contiguous()]),),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_lie_as_eagers(name: str, backend: str) -> None:
    program = RESULTS[name]
    eager, ours = program(), torchcompile.compile(program, backend=backend, fullgraph=True)()
    for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (eager, ours)), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride(), f"{tuple(b.shape)}: {b.stride()}, not {a.stride()}"
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_gradients_through_a_result_with_gaps() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty_strided((4, 4), (8, 1)).copy_(x).mul_(2)
        return y, y[1:] * x[1:]

    found = []
    for f in (program, torchcompile.compile(program, fullgraph=True)):
        x = X.clone().requires_grad_()
        y, z = f(x)
        (y.sin().sum() + z.sum()).backward()
        found.append((y.detach(), y.stride(), z.detach(), x.grad))
    assert found[0][1] == found[1][1] == (8, 1)
    for k in (0, 2, 3):
        torch.testing.assert_close(found[1][k], found[0][k])


WHOLE = torch.arange(12.0)
PLACES = {
    "beyond an input": (lambda x: x.as_strided((4, 4), (100, 1), 50) + 1, None),
    "beyond a result": (lambda x: (x + 1).as_strided((4, 4), (100, 1), 50) + 1, None),
    "a copy from beyond": (lambda x: torch.as_strided_copy(x, (2,), (1,), 11), None),
    "a scatter to beyond": (lambda x: torch.as_strided_scatter(x, x[:2], (2,), (1,), 11), None),
    "beyond a part, within the memory": (lambda x: x[2:4].as_strided((3, 2), (4, 1), 1) + 1, False),
    "within": (lambda x: x.as_strided((3, 2), (4, 1), 2) + 1, True),
}


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", PLACES)
def test_memory_is_read_where_there_is_some(name: str) -> None:
    """What reaches beyond the last element that is known of, eager reads or refuses."""
    program, whole = PLACES[name]
    compiled = torchcompile.compile(program, fullgraph=bool(whole))
    for x in (WHOLE, WHOLE[:12]):
        if whole is None:
            with pytest.raises(RuntimeError) as eager:
                program(x)
            with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
                compiled(x)
        else:
            torch.testing.assert_close(compiled(x), program(x))


ONES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plus": lambda x: x + 1,
    "relu": lambda x: x.relu(),
    "sum of one": lambda x: x.sum(0, keepdim=True),
    "maximum of one": lambda x: x.amax(-1, keepdim=True),
    "cumulated": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "rows": lambda x: x[:1],
    "transposed": lambda x: x.transpose(0, -1) * 2,
    "joined": lambda x: torch.cat([x, x]),
    "stacked": lambda x: torch.stack([x, x], 1),
    "rolled": lambda x: x.roll(1, 0),
    "repeated": lambda x: x.repeat(*[1] * x.dim()),
}


@pytest.mark.parametrize("name", ONES)
def test_strides_of_dims_of_size_one_are_eagers(name: str) -> None:
    """They address nothing, and a program can read them: `stride()`, NumPy's strides, what suggests a memory format."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = ONES[name](x)
        return y, y.square().sum()

    for shape in ((1,), (1, 3), (3, 1), (1, 4, 1), (2, 1, 4, 4), (1, 3, 4, 4), (2, 3, 1, 1)):
        x = torch.randn(shape, dtype=torch.float64)
        apart = torch.randn([2 * n for n in shape], dtype=torch.float64)[tuple(slice(None, None, 2) for _ in shape)]
        turned = x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
        last = [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
        compiled = torchcompile.compile(program, dynamic=False)
        for given in (x, apart, turned, *last):
            found = []
            for run in (compiled, program):
                leaf = given.detach().requires_grad_()
                y, total = run(leaf)
                found.append((y.stride(), torch.autograd.grad(total, leaf)[0].stride()))
            assert found[0] == found[1], (shape, given.stride())


def test_strides_that_differ_between_calls_are_numbers_of_each_call() -> None:
    """A cache of which a part is filled: one kernel for all rooms, forward and backward, with eager's strides."""

    def attends(keys: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys = torch.cat([keys, fresh], -2)
        weights = (keys @ keys.transpose(-1, -2)).softmax(-1)
        return weights @ keys, keys.amax(-2)

    torchcompile.reset()
    compiled = torchcompile.compile(attends)
    for room, used in ((16, 4), (16, 6), (20, 6), (24, 8), (28, 9), (33, 7), (40, 11)):
        whole, fresh = torch.randn(2, 3, room, 8, dtype=torch.float64), torch.randn(2, 3, 1, 8, dtype=torch.float64)
        ours, eager = (whole.clone()[:, :, :used].requires_grad_() for _ in range(2))
        found, expected = compiled(ours, fresh), attends(eager, fresh)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
        sum(one.square().sum() for one in found).backward()
        sum(one.square().sum() for one in expected).backward()
        torch.testing.assert_close(ours.grad, eager.grad)
        assert ours.grad.stride() == eager.grad.stride()
    assert torchcompile.report().clean and torchcompile.report().captured == 3
