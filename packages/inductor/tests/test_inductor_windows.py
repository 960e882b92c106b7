"""What is read through windows: loads under masks, computed once where many of them make one value."""

from __future__ import annotations

import pytest
import torch

import primtorch
from torchinductor import InductorOptions
from torchinductor.codegen.base import generated
from torchinductor.ir import Apply, Kernel, Load
from torchinductor.source import planned_operations

Tensor = torch.Tensor
aten = torch.ops.aten
WINDOW = ([3, 3], [2, 2], [1, 1])


def kernels(fn: object, inputs: tuple[Tensor, ...], device: str) -> list[Kernel]:
    operations = planned_operations(primtorch.lower(primtorch.trace(fn, *inputs)), device)
    assert all(isinstance(o, Kernel) for o in operations), operations
    return operations  # type: ignore[return-value]


def masked(kernel: Kernel) -> int:
    return sum(op.mask is not None for stage in kernel.stages for op in stage.body.of(Load))


def pooled() -> tuple[Tensor, ...]:
    x = torch.randn(4, 64, 56, 56).to(memory_format=torch.channels_last)
    values, indices = aten.max_pool2d_with_indices(x, *WINDOW)
    return torch.randn_like(values), x, indices


def gradient(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return aten.max_pool2d_with_indices_backward(grad, x, *WINDOW, [1, 1], False, indices)


def normalised(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """As behind a batch norm and relu: sums of the gradient, then the gradient again."""
    scale, shift = x[0, :, 0, 0, None, None].exp(), x[0, :, 1, 0, None, None]
    passed = torch.where(((x - shift) * scale + shift) * scale - shift > 0, gradient(grad, x, indices), 0)
    return passed - passed.mean((0, 2, 3), keepdim=True) * x


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gradient_of_a_pool_is_one_loop_with_its_reader(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    (kernel,) = kernels(lambda *inputs: gradient(*inputs) * inputs[1].cos(), pooled(), device)
    assert not kernel.scatters
    assert masked(kernel) == 8  # of four windows the index and the gradient


def test_what_reads_windows_is_not_computed_again() -> None:
    pytest.importorskip("triton")
    assert [masked(kernel) for kernel in kernels(normalised, pooled(), "cuda") if masked(kernel)] == [8]


def test_what_is_loaded_under_a_mask_is_zero_outside() -> None:
    x = torch.randn(4, 5)
    for value, chosen in ((0.0, 0), (-0.0, 1), (1.0, 1)):
        (kernel,) = kernels(lambda x: aten.constant_pad_nd(x, [1, 2], value), (x,), "cpu")  # noqa: B023
        wheres = [op for stage in kernel.stages for op in stage.body.of(Apply) if op.op == "where"]
        assert len(wheres) == chosen, value


def test_loops_read_whole_rows_or_none() -> None:
    """Where a mask holds for all of the innermost loop, no iteration asks for it before it reads."""
    (kernel,) = kernels(gradient, pooled(), "cpu")
    text = generated(kernel, InductorOptions()).text
    assert " ? p" not in text
    assert text.count("= keep(p") == 8
