"""Max pools in training: values, gradients of both orders are eager's, whoever reads the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from primtorch.testing import assert_as_accurate
from torchinductor import CppBackend

Tensor = torch.Tensor
LAST = torch.channels_last


def relu_before(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 3, 2, 1)


def normalised_before(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(F.batch_norm(x, None, None, training=True)), 3, 2, 1).sin()


def two_readers(x: Tensor) -> Tensor:
    y = x.sin()
    return F.max_pool2d(y, 2).sum() + F.max_pool2d(y, (3, 2), (1, 2), (1, 0), ceil_mode=True).square().sum()


def with_indices(x: Tensor) -> tuple[Tensor, Tensor]:
    y, at = F.max_pool2d(x * 2, 3, 2, return_indices=True)
    return y.cos(), at


def apart(*shape: int) -> Tensor:
    """Random numbers of which no two are so near that rounding could decide which is the largest."""
    count = math.prod(shape)
    return torch.randperm(count).reshape(shape) * (6 / max(count, 1)) - 3


PROGRAMS: dict[str, tuple[Callable[..., object], Tensor]] = {
    "relu, then a pool": (relu_before, apart(2, 5, 9, 8).to(memory_format=LAST)),
    "a batch norm, then a pool": (normalised_before, apart(3, 16, 10, 12).to(memory_format=LAST)),
    "by rows": (normalised_before, apart(3, 4, 10, 12)),
    "one channel": (relu_before, apart(3, 1, 7, 6).to(memory_format=LAST)),
    "two pools of one value": (two_readers, apart(2, 4, 9, 10).to(memory_format=LAST)),
    "indices are results": (with_indices, apart(2, 4, 9, 10).to(memory_format=LAST)),
    "without a batch": (lambda x: F.max_pool2d(x.exp(), 3, 2, 1), apart(3, 9, 8)),
    "along a line": (lambda x: F.max_pool1d(x.exp(), 3, 2, 1, ceil_mode=True), apart(2, 3, 11)),
    "of volumes": (
        lambda x: F.max_pool3d(x.exp(), 3, 2, 1),
        apart(2, 3, 5, 6, 7).to(memory_format=torch.channels_last_3d),
    ),
    "dilated": (lambda x: F.max_pool2d(x.exp(), 3, 3, 1, 2), apart(2, 8, 12, 11).to(memory_format=LAST)),
    "of nothing": (relu_before, apart(0, 4, 8, 8).to(memory_format=LAST)),
}


def first_of(result: object) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # type: ignore[return-value]


def gradients(fn: Callable[..., object], x: Tensor) -> tuple[object, ...]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    result = fn(leaf)
    (grad,) = torch.autograd.grad(first_of(result).double().square().sum(), leaf)
    return result, grad


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str, dynamic: bool) -> None:
    fn, x = PROGRAMS[name]
    compiled = torchcompile.compile(fn, fullgraph=True, dynamic=dynamic)
    for sample in (x, apart(*x.shape[:-1], x.shape[-1] + 3)):
        exact = gradients(fn, sample.double())
        torch.testing.assert_close(gradients(compiled, sample.double()), exact)
        assert_as_accurate(gradients(compiled, sample), gradients(fn, sample), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_added_in_more(dtype: torch.dtype) -> None:
    """Eager adds the gradients of overlapping windows in sixteen bits; the truth is that of the same maxima."""
    x = torch.randn(2, 8, 20, 20).to(dtype).to(memory_format=LAST)

    def fn(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 1, 1)

    found, eager, truth = (
        gradients(f, sample)[1]
        for f, sample in ((torchcompile.compile(fn, fullgraph=True), x), (fn, x), (fn, x.double()))
    )
    error, allowed = ((g.double() - truth).abs().max() for g in (found, eager))  # type: ignore[union-attr]
    assert error <= allowed


@pytest.mark.usefixtures("double")
@pytest.mark.expected_eager()
def test_second_derivatives() -> None:
    fn, x = PROGRAMS["a batch norm, then a pool"]
    for sample in (x.double(), x.double().contiguous()):
        found = []
        for f in (torchcompile.compile(fn), fn):
            leaf = sample.clone(memory_format=torch.preserve_format).requires_grad_()
            (grad,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)  # type: ignore[attr-defined]
            found.append(torch.autograd.grad(grad.square().sum(), leaf))
        torch.testing.assert_close(*found)


def test_deterministic_algorithms_need_no_call() -> None:
    fn, x = PROGRAMS["relu, then a pool"]
    torch.use_deterministic_algorithms(True)
    try:
        compiled = torchcompile.compile(fn, fullgraph=True)
        torch.testing.assert_close(gradients(compiled, x), gradients(fn, x))
        assert sum(graph.aten_calls for graph in torchcompile.report().graphs) == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("walks", [True, False])
def test_the_device_says_whether_windows_are_walked(
    walks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CppBackend.traits.walks_windows
    monkeypatch.setattr(CppBackend, "traits", replace(CppBackend.traits, walks_windows=walks))
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    torchcompile.compile(lambda x: F.max_pool2d(x, 3, 2, 1), options={"dump": str(tmp_path)})(x).sum().backward()
    (prims,) = tmp_path.glob("*_prims.py")
    assert ("scatter_add" in prims.read_text()) is walks
