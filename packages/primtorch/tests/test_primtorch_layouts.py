"""Formulas beside the real calls of torch's operator database, for operands that lie otherwise in memory."""

from __future__ import annotations

import random

import pytest
import torch
from formula_check import LAYOUTS, RuleCheck, run
from torch.testing._internal.common_methods_invocations import op_db

# Whose rule lays out the result of row-major operands otherwise than eager: their formulas have to say it.
RESTRIDED = frozenset(
    f"aten.{name}.default"
    for name in "ones_like zeros_like slice_backward select_backward unfold_backward kthvalue clone repeat _conj "
    "_upsample_bilinear2d_aa".split()
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_give_what_the_formulas_say(layout: str) -> None:
    seed = random.randrange(1 << 30)
    names = random.Random(seed).sample([op.name for op in op_db], 25)
    check, total, _, _ = run(names, [torch.float32], 3, layout, RuleCheck)
    assert total and not check.failed, f"seed {seed}: { {name: calls[:2] for name, calls in check.failed.items()} }"
    if layout == "contiguous":
        assert not set(+check.restrided) - RESTRIDED, f"seed {seed}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slice_of_the_operator_database(layout: str) -> None:
    seed = random.randrange(1 << 30)
    names = random.Random(seed).sample([op.name for op in op_db], 40)
    check, total, _, _ = run(names, [torch.float32], 3, layout)
    assert total and not check.failed, f"seed {seed}: { {name: calls[:2] for name, calls in check.failed.items()} }"


@pytest.mark.filterwarnings("ignore")
def test_images_that_are_channels_last() -> None:
    images = [op.name for op in op_db if any(part in op.name for part in ("conv", "pool", "interp", "pixel", "pad"))]
    check, total, _, _ = run(images, [torch.float32], 4, "channels_last")
    assert total and not check.failed, dict(check.failed)
