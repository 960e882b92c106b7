"""One more than an error function or a hyperbolic tangent; rows that end where a thread's elements do not; which values
may be coarse."""

from __future__ import annotations

import pytest
import torch
from interpreted import replies

import primtorch
from torchinductor.ir import Apply, Kernel
from torchinductor.source import planned_operations

pytest.importorskip("triton")

from torchinductor.codegen.triton.precision import coarse_values  # noqa: E402


def test_values_in_the_interpreter() -> None:
    """Gates are as exact as eager's, which adds one to what is rounded already, and right where they are 0 or 2."""
    found = {reply["case"]: reply for reply in replies("gates_worker.py")}
    assert len(found) == 12
    for case, reply in found.items():
        if case.startswith("rows"):
            assert reply["equal"] and reply["branches"] == (int(case.split()[-1]) % 8 != 0), reply
        else:
            eps = torch.finfo(torch.float16 if "16" in case else torch.float32).eps
            assert reply["far"] and reply["error"] <= 2 * reply["eager"] + eps, reply


def coarse(program, *inputs: torch.Tensor) -> dict[str, list[bool]]:  # type: ignore[no-untyped-def]
    """Whether the functions of a program's kernels may be coarse, in order, by name."""
    found: dict[str, list[bool]] = {}
    for kernel in planned_operations(primtorch.lower(primtorch.trace(program, *inputs)), "cuda"):
        assert isinstance(kernel, Kernel)
        for stage, values in zip(kernel.stages, coarse_values(kernel), strict=True):
            for op, value in zip(stage.body.ops, values, strict=True):
                if isinstance(op, Apply):
                    found.setdefault(op.op, []).append(value)
    return found


def test_what_is_rounded_to_16_bits_may_be_coarse() -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    assert all(coarse(lambda x: torch.softmax(x, -1), x)["div"])
    both = coarse(lambda x: ((y := torch.sigmoid(x.float())), y.to(torch.bfloat16)), x)
    assert not any(both["sigmoid"])  # it is a result in 32 bits, too
    apart = coarse(lambda x: (torch.sigmoid(x.float()), torch.exp(x)), x)
    assert not any(apart["sigmoid"]) and all(apart["exp"])


def test_sums_that_are_kept_in_32_bits() -> None:
    """A softmax's maximum and sum, which its backward reads: the sum of exponents about the maximum hides their error;
    other exponents are exact, and so is what a number that is no float depends on."""
    x = torch.randn(64, 128, dtype=torch.bfloat16)

    def kept(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.float()
        peak = wide.amax(-1, keepdim=True)
        powers = (wide - peak).exp()
        total = powers.sum(-1, keepdim=True)
        return peak, total, (powers / total).to(torch.bfloat16)

    assert all(coarse(kept, x)["exp"]) and all(coarse(kept, x)["div"])
    assert not any(coarse(lambda x: (x.float().exp().sum(-1), x + 1), x)["exp"])
    assert not any(coarse(lambda x: (x.float().exp() > 2, x.float()), x)["exp"])
