"""A program that eager refuses for its dtypes raises eager's error at eager's line; its handlers see that error."""

from __future__ import annotations

import itertools
import os
import random
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchcompile

x, wide, half, whole = torch.ones(3, 3), torch.ones(3, 3).double(), torch.ones(3, 3).half(), torch.ones(3, 3).long()
truths, complexes, bits = whole.bool(), wide.cfloat(), torch.ones(3, 3).bfloat16()
image, large = torch.ones(2, 3, 40, 40).int(), torch.ones(300, 400).short()

REFUSED: dict[str, Callable[..., Any]] = {
    "addmm": lambda: torch.addmm(whole, x, x),
    "bitwise": lambda: torch.bitwise_and(x, x),
    "softmax": lambda: (whole + 1).softmax(-1),
    "abs": lambda: truths.abs(),
    "layer norm": lambda: F.layer_norm(x * 2, (3,), weight=whole[0]),
    "inverse of half": lambda: torch.linalg.inv(half + half),
    "product of float and bfloat16": lambda: x @ bits,
    "convolution of ints": lambda: F.conv2d(image, torch.ones(4, 3, 3, 3), padding=1),
    "convolution of bools": lambda: F.conv2d(image.bool(), torch.ones(4, 3, 3, 3).bool()),
    "out": lambda: torch.add(x, x, out=whole.clone()),
    "out of complex": lambda: torch.mul(complexes, 2, out=x.clone()),
    "in place": lambda: whole.clone().div_(2),
    "in place with reals": lambda: complexes.clone().abs_(),
    "comparison": lambda: complexes < x,
    "two devices": lambda: (x + 1) * torch.ones(3, 3, device="meta"),
    "a whole number's gradient": lambda: (whole + 1).requires_grad_(),
    "many elements": lambda: large.logcumsumexp(1),
    "grid": lambda: F.grid_sample(image.float(), torch.zeros(2, 5, 5, 2).double(), align_corners=False),
}  # fmt: skip


def told(call: Callable[[], Any]) -> tuple[type, str, int]:
    """The class and the text of what a call raises, and the line of this file that it comes from."""
    try:
        call()
    except Exception as error:  # of any type: it is what is compared
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        return type(error), str(error), lines[-1]
    raise AssertionError("it was taken")


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", REFUSED)
def test_the_error_is_eagers(name):
    program = REFUSED[name]
    compiled = torchcompile.compile(program)
    expected = told(program)
    assert told(compiled) == expected
    assert told(compiled) == expected


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", REFUSED)
def test_handlers_meet_what_eager_raises(name):
    program = REFUSED[name]

    def handled() -> torch.Tensor:
        try:
            program()
        except NotImplementedError:
            return torch.zeros(2) + 1
        except RuntimeError as error:
            return torch.zeros(len(str(error))) + 2
        except Exception:
            return torch.zeros(2) + 3
        return torch.zeros(2)

    torch.testing.assert_close(torchcompile.compile(handled)(), handled())


TAKEN: dict[str, Callable[..., Any]] = {
    "the sum of one bool in place": lambda: torch.tensor(True).cumsum_(0),
    "targets of another dtype": lambda: F.binary_cross_entropy_with_logits(wide, x),
    "margins of another dtype": lambda: F.soft_margin_loss(bits, x),
    "a fill of a complex number": lambda: x.masked_fill(truths, torch.tensor(2 + 0j)),
    "a triangle of another dtype": lambda: torch.linalg.solve_triangular(x, whole, upper=True),
}


@pytest.mark.expected_eager("operator_without_meta", "nothing_to_compile")
@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_taken(name):
    program = TAKEN[name]
    got, expected = torchcompile.compile(program)(), program()
    torch.testing.assert_close(got, expected)
    assert got.dtype is expected.dtype


# --- losses of two dtypes, forward and backward ------------------------------------------------------
# Not uint8: eager takes 1 from it, and negates it, with the result 255.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "huber of elements": lambda a, b: F.huber_loss(a, b, reduction="none"),
    "bce": F.binary_cross_entropy,
    "bce weighed": lambda a, b: F.binary_cross_entropy(a, a * 0.5, weight=b),
    "logits": F.binary_cross_entropy_with_logits,
    "logits weighed": lambda a, b: F.binary_cross_entropy_with_logits(a, a, weight=b),
    "logits weighed where true": lambda a, b: F.binary_cross_entropy_with_logits(a, a, pos_weight=b),
    "kl": F.kl_div,
    "poisson": F.poisson_nll_loss,
    "soft margin": F.soft_margin_loss,
    "hinge": F.hinge_embedding_loss,
    "classes": lambda a, b: F.cross_entropy(a, b[:, 0]),
    "probabilities": F.cross_entropy,
    "cosine": lambda a, b: F.cosine_embedding_loss(a, a * 2, b[:, 0]),
    "triplet": lambda a, b: F.triplet_margin_loss(a, b, a * 2),
}


def numbers(dtype: torch.dtype, seed: int, whole: bool) -> torch.Tensor:
    drawn = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    if not (dtype.is_floating_point or dtype is torch.bool):
        drawn = drawn * 2
    return (drawn > 0.5 if whole or dtype is torch.bool else drawn).to(dtype)


def step(loss: Callable[..., torch.Tensor], pair: list[torch.Tensor]) -> list[object]:
    """The loss and its gradients, each with its dtype; what was raised, and whether that was by the backward."""
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in pair]
    seen: list[object] = []
    try:
        found = loss(*given)
        seen.append(found.detach())
        if found.requires_grad:
            found.sum().backward()
            seen += [t.grad for t in given]
    except Exception as error:
        seen += [type(error), str(error)]
    return seen


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_two_dtypes_is_in_the_graph(name: str) -> None:
    """`TORCHCOMPILE_PAIRS=all` runs every pair; what eager refuses, forward or backward, is refused in its words."""
    seed = random.randrange(1 << 30)
    pairs = list(itertools.product(DTYPES, DTYPES))
    if os.environ.get("TORCHCOMPILE_PAIRS") != "all":
        pairs = random.Random(seed).sample(pairs, 8)
    for of_x, of_target in pairs:
        pair = [numbers(of_x, seed, False), numbers(of_target, seed + 1, whole=not of_target.is_floating_point)]
        expected = step(LOSSES[name], pair)
        torchcompile.reset()
        refused = bool(expected) and isinstance(expected[-1], str)
        found = step(torchcompile.compile(LOSSES[name], fullgraph=not refused), pair)
        where = f"{of_x} and {of_target}, seed {seed}"
        assert len(found) == len(expected), f"{where}: {expected} and {found}"
        narrow = min(
            (t.dtype for t in pair if t.is_floating_point()), key=lambda d: -torch.finfo(d).eps, default=torch.float32
        )
        eps = torch.finfo(narrow).eps
        for a, b in zip(found, expected, strict=True):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                assert a.dtype is b.dtype, where
                torch.testing.assert_close(
                    a, b, rtol=8 * eps, atol=8 * eps, equal_nan=True, msg=lambda m, where=where: f"{where}: {m}"
                )
            else:
                assert a == b, f"{where}: {expected} and {found}"


@pytest.mark.parametrize("within", [False, True])
def test_no_derivative_is_asked_with_made_up_places(within: bool) -> None:
    """Its kernel trusts lengths and places that the forward has checked, and reads where made-up ones say."""
    scores = torch.randn(50, 3, 20, dtype=torch.float32, requires_grad=True)
    targets = torch.randint(1, 20, (3, 30))

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return torch._ctc_loss(scores.log_softmax(-1), targets, (50, 50, 50), (30, 25, 20))[0].sum()

    expected = torch.autograd.grad(loss(scores), scores)[0]
    if within:  # the program's own derivative is a part of its forward
        found = torchcompile.compile(lambda s: torch.autograd.grad(loss(s), s)[0])(scores)
    else:
        found = torch.autograd.grad(torchcompile.compile(loss)(scores), scores)[0]
    exact = scores.detach().double().requires_grad_()
    truth = torch.autograd.grad(loss(exact), exact)[0]
    assert (found - truth).norm() <= 2 * (expected - truth).norm() + 1e-6 * truth.norm()
