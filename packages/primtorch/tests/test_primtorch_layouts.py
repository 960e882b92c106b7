"""Formulas beside the real calls of torch's operator database, for operands that lie otherwise in memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from formula_check import LAYOUTS, FormulaCheck, RuleCheck, run
from torch.testing._internal.common_methods_invocations import op_db

from primtorch.fake import FakeMode

# Whose rule lays out the result of row-major operands otherwise than eager: their formulas have to say it.
RESTRIDED = frozenset(
    f"aten.{name}.default"
    for name in "ones_like zeros_like slice_backward select_backward unfold_backward kthvalue clone repeat _conj "
    "_upsample_bilinear2d_aa max_pool2d_with_indices_backward max_pool3d_with_indices_backward".split()
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


# Tensors with a dim of size 1, whose stride says nothing of where the elements lie.
OF_ONE = (
    ((1, 8, 4, 4), (8, 1, 32, 8)), ((1, 8, 4, 4), (128, 1, 32, 8)), ((8, 1), (1, 8)), ((1, 8), (1, 1)),
    ((2, 1, 3, 4), (12, 1, 4, 1)), ((2, 1, 3), (3, 99, 1)), ((1, 4, 1), (1, 1, 1)), ((3, 1, 2), (1, 7, 3)),
    ((1, 2, 3, 4), (1, 12, 4, 1)),
)  # fmt: skip
BINARY = (
    "add sub mul div fmod remainder floor_divide pow gt eq le rsub true_divide clamp_min float_power copysign xlogy"
)
UNARY = "exp neg abs relu sigmoid silu hardtanh relu6 nan_to_num isinf isnan leaky_relu floor clone square"
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.clamp(0, 1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "roll": lambda x: x.roll(1, 1),
    "batch_norm": lambda x: F.batch_norm(x, torch.ones(x.shape[1]), torch.ones(x.shape[1])),
    "loss": lambda x: F.binary_cross_entropy_with_logits(x, x, reduction="none"),
}


def _calls_of_one() -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    for name in UNARY.split():
        yield name, getattr(torch, name, None) or getattr(F, name)
    for name in BINARY.split():
        function = getattr(torch, name)
        yield f"{name}, number", lambda x, f=function: f(x, 2)
        yield f"{name}, itself", lambda x, f=function: f(x, x)
        yield f"{name}, 0-d", lambda x, f=function: f(x, torch.tensor(2.0))
        yield f"{name}, by rows", lambda x, f=function: f(torch.ones(x.shape), x)
    yield from OTHERS.items()


def test_strides_of_dims_of_size_one() -> None:
    """What comes next may ask them: interpolate chooses its memory format by all strides."""
    found = []
    for name, call in _calls_of_one():
        for shape, strides in OF_ONE:
            x = torch.empty_strided(shape, strides).fill_(1.0)
            mode = FakeMode()
            fake = mode.from_tensor(x)
            with mode:
                given = call(fake).stride()
            if tuple(given) != call(x).stride():
                found.append(f"{name} {shape} {strides}: {tuple(given)}, eager {call(x).stride()}")
    assert not found, "\n".join(found)


PAIRED = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.soft_margin_loss,
    lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y, x[0].abs(), reduction, y[0]),
    lambda x, y, reduction: torch.dist(x, y),
)  # fmt: skip


@pytest.mark.parametrize("kind", [FormulaCheck, RuleCheck], ids=["formulas", "rules"])
def test_losses_of_two_dtypes(kind: type[FormulaCheck]) -> None:
    check, dtypes = kind(), (torch.float32, torch.float64, torch.bfloat16)
    for loss in PAIRED:
        for one in dtypes:
            for other in dtypes:
                for reduction in ("none", "mean"):
                    x, y = torch.rand(4, 3, dtype=one), torch.rand(4, 3, dtype=other)
                    with contextlib.suppress(RuntimeError), check:  # those that eager does not take together
                        loss(x, y, reduction=reduction)  # type: ignore[operator]
    assert not check.failed, dict(check.failed)
    assert len(check.checked) > 6
