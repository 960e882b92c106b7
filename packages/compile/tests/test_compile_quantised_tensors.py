"""Quantised tensors as values of a graph: static models, inputs and results, views, writes, breaks between graphs. What is
computed is eager's to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import feature_matrix_run  # noqa: F401  (finds the folders of what is shared)
import pytest
import torch
import torch.nn.functional as F
from feature_matrix import BACKENDS
from torch import nn
from torch.ao.nn import quantized as nnq
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub, convert, fuse_modules, get_default_qconfig, prepare
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import torchcompile

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("backend", BACKENDS)]


def quantised(*shape: int, scale: float = 0.1, zero: int = 3, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(*shape), scale, zero, dtype)


def by_channel(*shape: int, axis: int = 0) -> torch.Tensor:
    scales, zeros = torch.rand(shape[axis]) + 0.1, torch.arange(shape[axis])
    return torch.quantize_per_channel(torch.randn(*shape), scales, zeros, axis, torch.qint8)


def same(ours: Any, theirs: Any) -> None:
    """Bits, metadata and meaning."""
    assert type(ours) is type(theirs)
    if isinstance(ours, (tuple, list)):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif not isinstance(ours, torch.Tensor):
        assert ours == theirs
    else:
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert ours.is_quantized == theirs.is_quantized and ours.requires_grad == theirs.requires_grad
        if not ours.is_quantized:
            assert torch.equal(ours, theirs)
            return
        assert ours.qscheme() == theirs.qscheme() and torch.equal(ours.int_repr(), theirs.int_repr())
        if ours.qscheme() is torch.per_tensor_affine:
            assert (ours.q_scale(), ours.q_zero_point()) == (theirs.q_scale(), theirs.q_zero_point())
        else:
            assert torch.equal(ours.q_per_channel_scales(), theirs.q_per_channel_scales())
            assert torch.equal(ours.q_per_channel_zero_points(), theirs.q_per_channel_zero_points())
            assert ours.q_per_channel_axis() == theirs.q_per_channel_axis()


def graphs() -> int:
    return len(torchcompile.report().graphs)


# -- models ------------------------------------------------------------------------------------------


class Images(nn.Module):
    """What a static model of images is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = QuantStub(), DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.deep, self.down = nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=2), nn.Conv2d(8, 8, 1, stride=2)
        self.pool, self.mean, self.own_norm = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8)
        self.add, self.cat, self.mul, self.more = (FloatFunctional() for _ in range(4))
        self.swish, self.gate, self.elu = nn.Hardswish(), nn.Sigmoid(), nn.ELU()
        self.back = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.first, self.second = nn.Linear(16, 5), nn.Linear(5, 4)
        self.last = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv(self.enter(x))))
        y = self.elu(self.swish(self.add.add_relu(self.deep(x), self.own_norm(self.down(x)))))
        z = self.cat.cat([self.pool(y), self.pool(F.interpolate(y, scale_factor=2))[:, :, ::2, ::2]], 1)
        z = self.mul.mul(z, self.gate(self.mean(z)))
        z = self.more.add_scalar(self.relu(z), 0.5)
        flat = torch.flatten(self.mean(z), 1)
        leave: torch.Tensor = self.leave(self.last(self.second(F.relu(self.first(flat)))))
        return leave


def static(model: nn.Module, x: torch.Tensor, fused: list[list[str]] | None = None) -> nn.Module:
    model.eval()
    if fused:
        model = fuse_modules(model, fused)
    model.qconfig = get_default_qconfig("x86")  # type: ignore[assignment]
    for part in model.modules():
        if isinstance(part, nn.ConvTranspose2d):
            part.qconfig = torch.ao.quantization.default_qconfig  # type: ignore[assignment]
    prepared = prepare(model)
    prepared(x)
    return convert(prepared)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [True, False])
def test_a_static_model_of_images(backend: str, dynamic: bool | None, grad: bool) -> None:
    """One graph for all sizes of a batch; gradients, of which a quantised model has none, are no part of it."""
    model = static(Images(), torch.randn(4, 3, 16, 16), [["conv", "norm"]])
    compiled = torchcompile.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.set_grad_enabled(grad):
        for rows in (4, 4, 6, 9):
            x = torch.randn(rows, 3, 16, 16)
            same(compiled(x), model(x))
    assert graphs() <= 2


def test_a_model_converted_as_a_graph(backend: str) -> None:
    """`convert_fx` reads scales from buffers."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 4)).eval()
    x = torch.randn(4, 3, 8, 8)
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    prepared = prepare_fx(model, mapping, (x,))
    prepared(x)
    converted = convert_fx(prepared)
    compiled = torchcompile.compile(converted, backend=backend, fullgraph=True)
    for rows in (4, 7, 9):
        x = torch.randn(rows, 3, 8, 8)
        same(compiled(x), converted(x))


@pytest.mark.parametrize("kind", [nnq.Conv1d, nnq.Conv2d, nnq.Conv3d, nnq.ConvTranspose1d, nnq.ConvTranspose2d])
def test_convolutions(backend: str, kind: Any) -> None:
    """Each packs its weights in an object of its own; another of the same sizes may come in its place."""
    dims = int(kind.__name__[-2])
    layer = kind(4, 6, 3, stride=2, padding=1)

    def pack() -> None:
        shape = (4, 6, *[3] * dims) if "Transpose" in kind.__name__ else (6, 4, *[3] * dims)
        layer.set_weight_bias(torch.quantize_per_tensor(torch.randn(*shape), 0.1, 0, torch.qint8), torch.randn(6))

    pack()
    layer.scale, layer.zero_point = 0.2, 5
    compiled = torchcompile.compile(layer, backend=backend, fullgraph=True)
    for rows in (2, 2, 3):
        x = quantised(rows, 4, *[9] * dims)
        same(compiled(x), layer(x))
        pack()
        same(compiled(x), layer(x))
    assert graphs() <= 2


# -- programs ----------------------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "there and back": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8).dequantize() + x,
    "32 bits": lambda x: torch.quantize_per_tensor(x, 0.001, 3, torch.qint32).dequantize() + x,
    "a scale that is a tensor": lambda x: torch.quantize_per_tensor(
        x, torch.tensor(0.1) * 2, torch.tensor(3), torch.quint8
    ).dequantize(),
    "a scale of the data": lambda x: torch.quantize_per_tensor(x, x.detach().abs().max() / 127, 0, torch.qint8),
    "by names": lambda x: torch.quantize_per_tensor(input=x, scale=0.1, zero_point=3, dtype=torch.qint8),
    "by range": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False),
    "by channel": lambda x: torch.quantize_per_channel(
        x, torch.rand(x.shape[1], generator=None) * 0 + 0.1, torch.arange(5), 1, torch.qint8
    ),
    "by channel and back": lambda x: torch.quantize_per_channel(
        x, torch.full((5,), 0.1), torch.zeros(5), 1, torch.quint8
    ).dequantize(),
    "questions": lambda x: _answers(torch.quantize_per_tensor(x, 0.1, 3, torch.qint8)),
    "questions by channel": lambda x: _answers(
        torch.quantize_per_channel(x, torch.full((5,), 0.1), torch.arange(5), 1, torch.qint8)
    ),
    "its scale goes on": lambda x: x * torch.quantize_per_tensor(x, x.detach().max() / 9, 0, torch.qint8).q_scale(),
    "made of integers": lambda x: torch._make_per_tensor_quantized_tensor((x * 9).to(torch.int8), 0.1, 3),
    "rows of channels last": lambda x: torch.relu(
        torch.quantize_per_tensor(x[:, :, None, None].expand(-1, -1, 4, 4), 0.1, 3, torch.quint8).contiguous(
            memory_format=torch.channels_last
        )
    ),
    "views": lambda x: [
        view(torch.quantize_per_tensor(x, 0.1, 3, torch.qint8))
        for view in (
            torch.t,
            lambda q: q[1:, ::2],
            lambda q: q.unbind(1)[0],
            lambda q: q.view(-1),
            lambda q: q.chunk(2),
        )
    ],
    "written in place": lambda x: F.relu(torch.quantize_per_tensor(x, 0.1, 3, torch.qint8), inplace=True),
    "under no_grad": torch.no_grad()(lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8).dequantize()),
    "compared": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8) > 0.2,
    "several of a call": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8).max(1),
    "sums of scaled": lambda x: torch.ops.quantized.cat(
        [torch.quantize_per_tensor(x, s, 3, torch.quint8) for s in (0.1, float(x.detach().max()) / 9)], 0, 0.2, 4
    ),
}


def _answers(q: torch.Tensor) -> Any:
    shared = (q.is_quantized, q.qscheme(), q.dtype, q.shape, q.dim(), q.int_repr(), q.is_contiguous(), q.requires_grad)
    if q.qscheme() is torch.per_tensor_affine:
        return *shared, q.q_scale(), q.q_zero_point()
    return *shared, q.q_per_channel_scales(), q.q_per_channel_zero_points(), q.q_per_channel_axis()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(backend: str, name: str, grad: bool) -> None:
    """One graph, for a size and for all."""
    program = PROGRAMS[name]
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    for rows in (4, 4, 6, 8):
        x = torch.randn(rows, 5)
        mine, other = x.clone().requires_grad_(grad), x.clone().requires_grad_(grad)
        ours, theirs = compiled(mine), program(other)
        same(ours, theirs)
        if isinstance(ours, torch.Tensor) and ours.requires_grad:
            ours.sum().backward()
            theirs.sum().backward()
            assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)


def test_inputs_are_guarded(backend: str) -> None:
    """By dtype, scheme, axis; a scale or zero point that changes becomes an input."""

    def program(q: torch.Tensor) -> Any:
        kinds = {torch.qint8: 1, torch.quint8: 2, torch.qint32: 3}
        return q.dequantize() * kinds[q.dtype], q[1:]

    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    for scale, zero in ((0.1, 3), (0.2, 3), (0.3, 4), (0.4, 5), (0.5, 6)):
        q = quantised(4, 5, scale=scale, zero=zero)
        same(compiled(q), program(q))
    assert graphs() <= 3
    for q in (quantised(4, 5, dtype=torch.qint8), quantised(4, 5, dtype=torch.qint32)):
        same(compiled(q), program(q))

    def channels(q: torch.Tensor) -> Any:
        if q.qscheme() is torch.per_tensor_affine:
            return q.dequantize() + 1
        return q.dequantize() + q.q_per_channel_axis()

    compiled = torchcompile.compile(channels, backend=backend, fullgraph=True)
    for q in (by_channel(4, 5), by_channel(4, 5), by_channel(4, 5, axis=1), quantised(4, 5), by_channel(6, 5)):
        same(compiled(q), channels(q))
    plain = torchcompile.compile(lambda x: torch.relu(x), backend=backend, fullgraph=True)
    for x in (torch.randn(4), quantised(4), torch.randn(4), quantised(4, scale=0.2)):
        same(plain(x), torch.relu(x))


def test_an_input_and_its_views(backend: str) -> None:
    """An input comes back as itself; a view of it lies in its memory, and a write to it is seen."""

    def program(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return q, q[1:], F.relu(q)

    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    q = quantised(4, 5)
    ours = compiled(q)
    assert ours[0] is q
    assert ours[1].data_ptr() == q.data_ptr() + 5 and ours[2].data_ptr() != q.data_ptr()
    same(ours, program(q))

    def writes(q: torch.Tensor) -> torch.Tensor:
        F.relu(q, inplace=True)
        return q.dequantize() * 2

    compiled_writes = torchcompile.compile(writes, backend=backend, fullgraph=True)
    mine, other = q.clone(), q.clone()
    same(compiled_writes(mine), writes(other))
    same(mine, other)


class Holder(nn.Module):
    """A module with quantised buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", quantised(4, 5))
        self.register_buffer("rows", by_channel(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.levels.dequantize().t() + (x @ self.rows.dequantize().t())  # type: ignore[operator]


def test_buffers(backend: str) -> None:
    """They are inputs: another one comes in their place."""
    model = Holder()
    compiled = torchcompile.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(3, 5, requires_grad=True)
    for _ in range(3):
        for mine, other in zip((compiled(x),), (model(x),), strict=True):
            torch.testing.assert_close(mine, other)
        model.levels, model.rows = quantised(4, 5, scale=0.2), by_channel(4, 5)


@pytest.mark.expected_eager("graph_break")
def test_over_a_break(backend: str) -> None:
    """A quantised tensor goes from graph to graph."""

    def program(x: torch.Tensor) -> Any:
        q = torch.quantize_per_tensor(x, x.abs().max() / 127, 3, torch.qint8)
        rows = torch.quantize_per_channel(x, torch.full((5,), 0.1), torch.zeros(5).long(), 1, torch.qint8)
        torchcompile.graph_break()
        q = torch.relu(q)
        torchcompile.graph_break()
        return q, q.dequantize() + rows.dequantize(), rows

    compiled = torchcompile.compile(program, backend=backend)
    for size in (4, 4, 6):
        x = torch.randn(size, 5)
        same(compiled(x), program(x))


@pytest.mark.expected_eager("special_tensor", "tensor_repr", "tensor_to_number", "program_raised")
def test_what_stays_outside(backend: str) -> None:
    """What graphs do not hold is told, and does what eager does."""

    def views(q: torch.Tensor) -> Any:
        return torch.relu(q).repeat(2, 1).dequantize() + 1, str(torch.relu(q)), torch.stack([q, q])

    compiled = torchcompile.compile(views, backend=backend)
    q = quantised(4, 5)
    same(compiled(q), views(q))
    assert {event.kind.id for event in torchcompile.report().events} >= {"special_tensor", "tensor_repr"}

    def refused(q: torch.Tensor) -> torch.Tensor:
        return q + q

    with pytest.raises((NotImplementedError, RuntimeError)) as theirs:
        refused(q)
    with pytest.raises((NotImplementedError, RuntimeError)) as ours:
        torchcompile.compile(refused, backend=backend)(q)
    assert type(ours.value) is type(theirs.value)

    def halves(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.quantize_per_tensor(x, 0.1, 3, torch.quint4x2)
        return made.dequantize() + 1

    x = torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = halves(x)
        except (RuntimeError, NotImplementedError):
            return
        same(torchcompile.compile(halves, backend=backend)(x), expected)
