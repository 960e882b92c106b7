"""`torch.masked`: its functions on plain tensors in one graph, masked tensors as eager with each break told."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import masked

import torchcompile

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: lambda x, mask, f=getattr(masked, name): f(x, 1, mask=mask)  # type: ignore[misc]
    for name in (
        "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "logsumexp", "softmax", "log_softmax", "softmin",
        "cumsum", "cumprod", "median",
    )
} | {
    "sum of all": lambda x, mask: masked.sum(x, mask=mask),
    "mean kept": lambda x, mask: masked.mean(x, (0, 1), keepdim=True, mask=mask),
    "a row of a mask": lambda x, mask: masked.softmax(x, 1, mask=mask[:1]),
    "norm": lambda x, mask: masked.norm(x, 2.0, 1, mask=mask),
    "normalize": lambda x, mask: masked.normalize(x, 2.0, 1, mask=mask),
    "var": lambda x, mask: masked.var(x, 1, unbiased=True, mask=mask),
    "std": lambda x, mask: masked.std(x, 1, unbiased=False, mask=mask),
    "logaddexp": lambda x, mask: masked.logaddexp(x, x * 2, input_mask=mask, other_mask=mask),
}  # fmt: skip


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(5, rows, dtype=torch.float64, generator=numbers).t()  # not row-major
    mask = torch.rand(rows, 5, generator=numbers) > 0.4
    mask[0] = False
    return x.requires_grad_(), mask


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_tensor_and_a_mask_is_one_graph(name: str, dynamic: bool) -> None:
    function, seed = FUNCTIONS[name], random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(function, fullgraph=True, dynamic=dynamic)
    for call, rows in enumerate((4, 6)):
        observed = []
        for f in (function, compiled):
            x, mask = drawn(rows, seed + call)
            found = f(x, mask)
            gradient = torch.autograd.grad(found.nansum(), x)[0] if found.requires_grad else x.detach()
            observed.append((found.detach(), gradient))
        for a, b in zip(*observed, strict=True):
            assert a.dtype == b.dtype, f"seed {seed}"
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"seed {seed}: {m}")


def of_masked_tensors(x: Tensor, mask: Tensor) -> Any:
    data = masked.as_masked_tensor(x * 2, mask)
    return data.sum(1).to_tensor(0.0) + 1


@pytest.mark.expected_eager("tensor_subclass", "unsplit_frame")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_masked_tensors_run_as_eager_and_each_break_is_told() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(of_masked_tensors)
    for call, rows in enumerate((4, 6)):
        x, mask = drawn(rows, seed + call)
        torch.testing.assert_close(compiled(x, mask), of_masked_tensors(x, mask), msg=lambda m: f"seed {seed}: {m}")
    kinds = [event.kind.id for event in torchcompile.report().surprises]
    assert "tensor_subclass" in kinds, kinds
    told = "\n".join(map(str, torchcompile.report().surprises))
    assert "as_masked_tensor" in told or of_masked_tensors.__name__ in told, told


@pytest.mark.expected_eager("tensor_subclass", "unsplit_frame")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_gradient_without_memory_of_its_own_is_refused() -> None:
    """A masked tensor's gradient is one, too, and comes to what was compiled in front of it."""
    x, mask = drawn(4, 0)
    with pytest.raises(TypeError, match=r"a tensor with memory of its own, not a MaskedTensor.*torchcompile\.disable"):
        torchcompile.compile(of_masked_tensors)(x, mask).sum().backward()
