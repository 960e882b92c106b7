"""Programs over nested (jagged) and masked tensors: of the first the graph has values and offsets, the second break it at
the program's own line. Each has eager's values and gradients whatever the lengths are, and whatever nested tensors were
made before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import MaskedTensor, as_masked_tensor, masked_tensor

import torchcompile
from primtorch.ledger import REFUSED, Effect
from torchdynamo.api import owner_of

Program = Callable[..., Any]

LENGTHS = ((2, 3), (1, 4), (3, 3, 1), (2, 3))
# A call of torch's C code with such a tensor may be what breaks first: what runs before it decides.
TOLD = {"special_tensor", "tensor_subclass", "unsplit_frame", "c_function", "tensor_to_number", "data_dependent_shape"}


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        program: of a nested or masked tensor made outside, or, if it makes one itself, of what that is made of.
        outside: whether the tensor comes from outside.
        gradient: whether the results are differentiated by the values; torch has no derivative of some on nested tensors.
        breaks: whether it is no one graph: it asks for the lengths' numbers.
    """

    program: Program
    outside: bool = True
    gradient: bool = True
    breaks: bool = False


def offsets_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)  # type: ignore[no-any-return]


def made(values: torch.Tensor, offsets: torch.Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(values * 2, offsets).sin().values() + 1


def made_of_rows(values: torch.Tensor, offsets: torch.Tensor) -> Any:
    rows = [values[:1] * 2, values[1:]]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).cos().values() * 3


def attention(t: Any) -> Any:
    heads = t.unflatten(-1, [2, 2]).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2).values()


def same_lengths(t: Any) -> Any:
    return ((t * 2) + t).values() if (t * 2).shape == t.shape else t.values()


NESTED = {
    "pointwise": Case(lambda t: ((t.sin() + t) * 2).values()),
    "linear": Case(lambda t: nn.functional.linear(t, torch.ones(3, 4, dtype=t.dtype)).values()),
    "matmul": Case(lambda t: (t @ torch.ones(4, 2, dtype=t.dtype)).relu().values()),
    "layer_norm": Case(lambda t: nn.functional.layer_norm(t, (4,)).values()),
    "softmax": Case(lambda t: t.softmax(-1).values()),
    "sum over a row": Case(lambda t: t.sum(-1).values(), gradient=False),
    "sum over the lengths": Case(lambda t: t.sum(1), gradient=False),
    "mean over the lengths": Case(lambda t: t.mean(1) * 2, gradient=False),
    "padded": Case(lambda t: t.to_padded_tensor(0.0) + 1),
    "softmax over the lengths": Case(lambda t: t.softmax(1).values(), breaks=True),
    "unbind": Case(lambda t: (t.unbind()[0] * 2, t.unbind()[-1].sin())),
    "attention": Case(attention),
    "its lengths": Case(lambda t: (t.offsets().diff() * 2, t.values() * 2)),
    "a condition on its lengths": Case(same_lengths),
    "handed back": Case(lambda t: (t * 2).values() + (lambda kept: kept.values())(t)),
    "made": Case(made, outside=False),
    "made of rows": Case(made_of_rows, outside=False),
}


def mask_of(values: torch.Tensor) -> torch.Tensor:
    return torch.arange(values.numel()).view(values.shape) % 3 != 1


def masked(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return masked_tensor(values.detach(), mask_of(values))  # type: ignore[no-any-return]


MASKED = {
    "as_masked_tensor": Case(lambda v, o: as_masked_tensor(v * 2, mask_of(v)).sin().to_tensor(0.0) + 1, outside=False),
    "masked_tensor": Case(lambda v, o: masked_tensor(v.detach() * 2, mask_of(v)).sum(1).to_tensor(0.0), False, False),
    "the class": Case(lambda v, o: MaskedTensor(v.detach() * 2, mask_of(v)).amax(0).to_tensor(0.0) + 1, False, False),
    "pointwise": Case(lambda t: ((t * 2).exp() + t).to_tensor(0.0), gradient=False),
    "reductions": Case(lambda t: (t.sum().get_data(), t.mean(-1).to_tensor(1.0)), gradient=False),
    "its mask": Case(lambda t: (t.get_mask().logical_not(), t.get_data() * 2), gradient=False),
}
CASES = {
    **{f"nested: {name}": (case, nested) for name, case in NESTED.items()},
    **{f"masked: {name}": (case, masked) for name, case in MASKED.items()},
}


def results(case: Case, program: Program, make: Program, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(sum(lengths), 4, dtype=torch.float64, generator=generator, requires_grad=case.gradient)
    offsets = offsets_of(lengths)
    found = program(make(values, offsets)) if case.outside else program(values, offsets)
    leaves = list(found) if isinstance(found, (tuple, list)) else [found]
    total: Any = sum(leaf.sum() for leaf in leaves if leaf.requires_grad)
    return [*leaves, *(torch.autograd.grad(total, values) if case.gradient else ())]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors", "ignore:It is not recommended to create")
@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", CASES)
def test_a_program_over_ragged_or_masked_tensors(name: str) -> None:
    case, make = CASES[name]
    kept = [nested(torch.zeros(sum(n), 4), offsets_of(n)) for n in LENGTHS]  # torch numbers their sizes
    wanted = [results(case, case.program, make, lengths) for lengths in LENGTHS]
    program = torchcompile.compile(case.program, backend="aot_eager")
    found = [results(case, program, make, lengths) for lengths in LENGTHS]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    events = [event for event in owner_of(program).stats.ledger.events if event.effect in REFUSED]
    assert {event.kind.id for event in events} <= TOLD and kept[0].is_nested, list(map(str, events))
    breaks = [event.where for event in events if event.effect is Effect.BREAK]
    assert bool(breaks) == case.breaks, list(map(str, events))
    assert all(inspect.getsourcefile(results) in where for where in breaks)
