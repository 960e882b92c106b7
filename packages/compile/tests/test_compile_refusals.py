"""A compiled program raises where eager refuses its indices, its masks and its values, and with the same error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchcompile

BACKENDS = ("eager", "aot_eager", "inductor")

pytestmark = pytest.mark.expected_eager(
    "data_dependent_shape", "exception", "graph_raised", "program_raised", "tensor_to_number"
)


def truths(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def places(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


CALLS = {
    "a short mask": ((truths(1),), torch.zeros(())),
    "a mask of another size": ((truths(4),), torch.zeros(1, 3)),
    "a mask of another size behind": ((slice(None), truths(5)), torch.zeros(5, 1)),
    "a mask of another size beside places": ((places(2), truths(4)), torch.zeros(1)),
    "a mask of too many dims": ((truths(5, 3, 1),), torch.zeros(())),
    "too many places": ((places(2), places(2), places(2)), torch.zeros(2)),
    "places that fit no others": ((places(2), places(4)), torch.zeros(1)),
    "places that no mask has as many of": ((places(2), truths(3)), torch.zeros(1)),
    "values of another size": ((places(2),), torch.zeros(2, 4)),
    "values of too many dims": ((places(2),), torch.zeros(2, 2, 3)),
    "more values than the mask selects": ((truths(5),), torch.zeros(6, 3)),
    "values of another size for a mask": ((truths(5),), torch.zeros(5, 4)),
    "fitting": ((truths(5),), torch.zeros(5, 3)),
}


def assigned(x: torch.Tensor, index: tuple[object, ...], values: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[index] = values
    return y + 1


def accumulated(x: torch.Tensor, index: tuple[object, ...], values: torch.Tensor) -> torch.Tensor:
    index = tuple(i for i in index if isinstance(i, torch.Tensor))
    return (x * 2).index_put(index, values, accumulate=True) + 1


def read(x: torch.Tensor, index: tuple[object, ...], values: torch.Tensor) -> torch.Tensor:
    return (x * 2)[index] + values


def handled(x: torch.Tensor, index: tuple[object, ...], values: torch.Tensor) -> torch.Tensor:
    y = x * 2
    try:
        y[index] = values
    except IndexError:
        y = y + 10
    except RuntimeError:
        y = y + 20
    return y + 1


def outcome(program: Callable[..., torch.Tensor], *given: object) -> tuple[object, ...]:
    try:
        return (program(*given).tolist(),)
    except Exception as error:  # of any type: it is what is compared
        return type(error), str(error).partition("\n")[0].partition(" [")[0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("program", (assigned, accumulated, read, handled), ids=lambda program: program.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_indices_raise_as_in_eager(backend: str, program: Callable[..., torch.Tensor], name: str) -> None:
    index, values = CALLS[name]
    given = torch.arange(15.0).reshape(5, 3), index, values
    compiled = torchcompile.compile(program, backend=backend)
    expected = outcome(program, *given)
    assert outcome(compiled, *given)[0] == expected[0]
    assert outcome(compiled, *given)[0] == expected[0]  # a later call


def nothing() -> torch.Tensor:
    """A tensor without data."""
    return torch.ones(3, device="meta")


OUT_OF_NOTHING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to a device": lambda x: nothing().to("cpu") + x,
    "to another's": lambda x: nothing().to(x) + x,
    "cpu": lambda x: nothing().cpu() * x,
    "type": lambda x: nothing().type(torch.FloatTensor),
    "there and back": lambda x: x.to("meta").sin().to("cpu"),
    "copy_": lambda x: x.clone().copy_(nothing()),
    "an item": lambda x: x.clone().index_put((places(1),), nothing()[:1].to("cpu")),
    "a slice": lambda x: x.clone().slice_scatter(nothing()[:2].cpu(), 0, 0, 2),
    "made like it elsewhere": lambda x: torch.zeros_like(nothing(), device="cpu") + x,
}


@pytest.mark.parametrize("name", OUT_OF_NOTHING)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_data_is_not_copied_to_where_there_is_some(backend: str, name: str) -> None:
    compiled = torchcompile.compile(OUT_OF_NOTHING[name], backend=backend)
    x = torch.arange(3.0)
    assert outcome(compiled, x) == outcome(OUT_OF_NOTHING[name], x)
