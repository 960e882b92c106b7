"""Tensors that can be no input of a graph: a program holds them and hands them on in its graph, and breaks at their use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo


def _of_no_history() -> torch.Tensor:
    """A view that was given another shape where autograd was not told: to ask for its history raises."""
    base = torch.ones(3, 3, requires_grad=True) * 2
    with torch.no_grad():
        return base[:2].t_()


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "coo with history": lambda: torch.eye(3).to_sparse().requires_grad_() * 2,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conjugated": lambda: torch.full((3, 3), 1 + 2j).conj(),
    "negated": lambda: torch.full((3, 3), 1 + 2j).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor((3, 3)),
    "no history": _of_no_history,
}


class Holder:
    kept: Any = None


def hands_on(x: torch.Tensor, t: torch.Tensor, holder: Holder) -> Any:
    same = [t, {"t": t}]
    if t is None or not isinstance(t, torch.Tensor) or same[0] is not t:
        return x
    holder.kept = (t, x + 1)
    return x.sin() + 1, same, t


def uses(x: torch.Tensor, t: torch.Tensor, holder: Holder) -> Any:
    y = x.sin() + 1
    z = t.detach() * 2
    return y * 2, z, holder


def asks(x: torch.Tensor, t: torch.Tensor, holder: Holder) -> Any:
    y = x.sin() + 1
    return (y * 2 if t.layout is torch.strided else y * 3), t.requires_grad, t.dtype, t.is_sparse


def alive_across_a_break(x: torch.Tensor, t: torch.Tensor, holder: Holder) -> Any:
    y = x.sin()
    torchdynamo.graph_break()
    for _ in range(2):
        y = y * 2
    return y, t, holder


def described(value: Any) -> Any:
    if isinstance(value, Holder):
        return described(value.kept)
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return (value.layout, value.dtype, str(value.detach())) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("program", "graphs", "reasons"),
    [
        (hands_on, 1, set()),
        (uses, 2, {"special_tensor"}),
        (asks, 2, {"special_tensor"}),
        (alive_across_a_break, 2, {"graph_break"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_its_use_leaves_the_graph(program: Any, graphs: int, reasons: set[str], kind: str) -> None:
    made: list[Any] = []
    compiled = torchdynamo.optimize(lambda gm, inputs: made.append(gm) or gm.forward)(program)
    for _ in range(2):
        given, x = KINDS[kind](), torch.rand(2)
        ours, eagers = Holder(), Holder()
        found, wanted = compiled(x, given, ours), program(x, given, eagers)
        assert described([found, ours]) == described([wanted, eagers])
        assert ours.kept is None or ours.kept[0] is given
    assert len(made) == graphs
    assert {b.reason for b in torchdynamo.stats().break_details} == reasons
    assert not [event for event in torchdynamo.stats().events if event.kind.id in ("unsplit_frame", "capture_fault")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_tensor_in_its_place_is_compiled_anew(kind: str) -> None:
    made: list[Any] = []
    compiled = torchdynamo.optimize(lambda gm, inputs: made.append(gm) or gm.forward)(uses)
    x, dense = torch.rand(2), torch.ones(3, 3)
    for given in (KINDS[kind](), dense, KINDS[kind](), dense):
        assert described(compiled(x, given, Holder())) == described(uses(x, given, Holder()))
    assert len(made) == 3  # one with the dense tensor within


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_a_copy_is_of_the_same_kind(kind: str) -> None:
    """What `copy` makes a tensor of sets the bits that say how its memory is read."""

    def copies(x: torch.Tensor, t: torch.Tensor) -> Any:
        return x.sin() + 1, copy.copy(t), copy.deepcopy(t)

    x, given = torch.rand(2), KINDS[kind]()
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(copies)
    assert described(compiled(x, given)) == described(copies(x, given))
