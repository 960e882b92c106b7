"""In-place changes of a tensor's shape, strides, memory and history leave the caller's tensors as eager does.

The list of methods is torch's own: every operator tagged `inplace_view` has samples here, and so has what else changes
a tensor without writing to its elements.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile

Change = Callable[[torch.Tensor], Any]


def _half(x: torch.Tensor) -> tuple[int, ...]:
    return (max(x.numel() // 2, 1),)


def _assign_data(x: torch.Tensor) -> None:
    x.data = torch.full((4,), 2.0, dtype=x.dtype)


# By the operator's name without overload; `dims` of the samples are those of tensors with three.
SAMPLES: dict[str, tuple[Change, ...]] = {
    "as_strided_": (lambda x: x.as_strided_((2, 2), (1, 2)), lambda x: x.as_strided_((2,), (1,), 1)),
    "detach_": (lambda x: x.detach_(),),
    "rename_": (lambda x: x.rename_(*"abcdef"[: x.dim()]).rename_(None),),
    "resize_": (lambda x: x.resize_(_half(x)), lambda x: x.resize_(1, 2)),
    "resize_as_": (lambda x: x.resize_as_(torch.ones(2)),),
    "set_": (lambda x: x.set_(torch.ones(3, 2, dtype=x.dtype)), lambda x: x.set_()),
    "squeeze_": (lambda x: x.squeeze_(), lambda x: x.squeeze_(1), lambda x: x.squeeze_((0, 1)), torch.squeeze),
    "swapaxes_": (lambda x: x.swapaxes_(0, 2),),
    "swapdims_": (lambda x: x.swapdims_(0, 1),),
    "t_": (lambda x: x[0].t_(), lambda x: x.squeeze_(1).t_()),
    "transpose_": (lambda x: x.transpose_(0, 1), lambda x: x.transpose_(-1, 0)),
    "unsqueeze_": (lambda x: x.unsqueeze_(0), lambda x: x.unsqueeze_(-1).add_(1)),
    "data": (_assign_data,),
    "requires_grad_": (lambda x: x.requires_grad_(), lambda x: setattr(x, "requires_grad", True)),
    "swap_tensors": (lambda x: torch.utils.swap_tensors(x, torch.ones(3, dtype=x.dtype)),),
    "two": (lambda x: x.unsqueeze_(0).transpose_(1, 3).mul_(2), lambda x: x.mul_(2).squeeze_(1).transpose_(0, 1)),
}
CHANGES = [(name, number) for name, samples in SAMPLES.items() for number in range(len(samples))]

# What the change is made to, from what the caller gives.
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda x: x,
    "view": lambda x: x[0:2],
    "alias": lambda x: x.view_as(x),
    "intermediate": lambda x: x * 2,
}
# What the caller gives. The numbers are whole, so that every result is exact.
GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
    "strided": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "history": lambda x: x.requires_grad_() * 3,
    "leaf": lambda x: x.requires_grad_(),
    "parameter": lambda x: nn.Parameter(x),
}


def _numbers(rows: int) -> torch.Tensor:
    return torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 1, 2)


def _outcome(function: Callable[..., Any], given: str, rows: int) -> Any:
    """What a caller can see after the call: results, the argument, its history, gradients; or the error's type."""
    start = _numbers(rows)
    x = GIVEN[given](start)
    other = x.detach()
    try:
        result, changed, shape = function(x)
        seen = [_description(t) for t in (result, changed, x, other)]
        same = changed is x
        if result.requires_grad:
            result.sum().backward()
        after = x.detach() * 2
    except Exception as error:
        return type(error)
    gradients = [None if t.grad is None or not t.is_leaf else t.grad.tolist() for t in (start, x) if t.is_leaf]
    return seen, shape, same, gradients, _description(after), _version(x), _version(other)


def _description(t: torch.Tensor) -> tuple[Any, ...]:
    values = t.detach().tolist()
    strides = [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]
    return t.shape, strides, t.storage_offset(), values, t.requires_grad, t.is_leaf, type(t), t.grad_fn is None


def _version(t: torch.Tensor) -> int:
    return t._version


def _program(change: Change, place: str, grad: bool) -> Callable[[torch.Tensor], Any]:
    find = PLACES[place]

    def program(x: torch.Tensor) -> Any:
        y = find(x)
        before = y.shape
        with torch.set_grad_enabled(grad):
            change(y)
        return y * 3 + 1, y, (before, y.shape, x.shape)

    return program


def test_every_operator_of_the_kind_has_a_sample() -> None:
    names = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten" or not packet.endswith("_"):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch.Tag.inplace_view in op.tags:
            names.add(packet)
    assert names <= SAMPLES.keys()


@pytest.mark.expected_eager(
    "exception", "leaf", "overlapping_inputs", "program_raised", "tensor_metadata_write", "write_through_gaps",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize(("name", "number"), CHANGES)
def test_changes_are_seen_as_in_eager(name: str, number: int, backend: str) -> None:
    seed = random.randrange(1 << 30)
    cases = list(itertools.product(PLACES, GIVEN, (True, False)))
    wrong = []
    for place, given, grad in random.Random(seed).sample(cases, 4):
        program = _program(SAMPLES[name][number], place, grad)
        torchcompile.reset()
        compiled = torchcompile.compile(program, backend=backend)
        for rows in (3, 3, 4, 5):  # again, then with a size that varies
            expected, found = _outcome(program, given, rows), _outcome(compiled, given, rows)
            if expected != found:
                wrong.append((place, given, grad, rows, expected, found))
                break
    assert not wrong, f"seed {seed}: " + "\n".join(map(str, wrong))


def test_reshaping_in_place_stays_in_one_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.unsqueeze_(0).transpose_(0, 1)
        return x * 2

    x, y = torch.ones(3, 4), torch.ones(3, 4)
    compiled = torchcompile.compile(program, fullgraph=True)
    assert torch.equal(compiled(x), program(y))
    assert x.shape == y.shape and x.stride() == y.stride()


def test_inputs_of_one_memory_at_different_places() -> None:
    """The compiled code serves inputs wherever they lie in their memory."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x.transpose_(0, 1)
        return x + 1

    base, other = torch.arange(24.0).reshape(4, 3, 2), torch.arange(24.0).reshape(4, 3, 2)
    compiled = torchcompile.compile(program)
    for row in range(4):
        x, y = base[row], other[row]
        assert torch.equal(compiled(x), program(y))
        assert x.shape == y.shape and x.storage_offset() == y.storage_offset() and torch.equal(x, y)
