"""Every part of PyTorch's language has eager's values and gradients, and breaks the graph for no reason but those told."""

from __future__ import annotations

import pytest
import torch
from reach_programs import PARTS
from torch.utils import _pytree as pytree

import torchcompile
from primtorch.ledger import REFUSED


def alike(found: object, wanted: object) -> None:
    torch.testing.assert_close(leaves_of(found), leaves_of(wanted), rtol=1e-9, atol=1e-12)


def leaves_of(tree: object) -> list[object]:
    """Nested tensors by their values and offsets: no two have the same sizes."""
    leaves = []
    for leaf in pytree.tree_leaves(tree):
        nested = isinstance(leaf, torch.Tensor) and leaf.layout is torch.jagged
        leaves += [leaf.values(), leaf.offsets()] if nested else [leaf]
    return leaves


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_the_language(name: str) -> None:
    part = PARTS[name]
    wanted = part.run(lambda program: part.judge or program)
    found = part.run(lambda program: torchcompile.compile(program, backend="aot_eager"))
    for (values, gradients), (eagers, of_eager) in zip(found, wanted, strict=True):
        alike(values, eagers)
        assert [g is None for g in gradients] == [g is None for g in of_eager]
        alike(gradients, of_eager)
    told = {event.kind.id for event in torchcompile.report().events if event.effect in REFUSED}
    assert told <= set(part.breaks)


@pytest.mark.expected_eager(...)
def test_nested_tensors_made_before_change_nothing_that_is_told() -> None:
    """torch numbers their sizes and keeps them in registries: capture reads none of these."""
    told = []
    for _ in range(2):
        torchcompile.reset()
        PARTS["nested jagged"].run(lambda program: torchcompile.compile(program, backend="aot_eager"))
        told.append([(e.kind.id, e.detail) for e in torchcompile.report().events if e.effect in REFUSED])
        kept = [torch.nested.nested_tensor([torch.zeros(2), torch.zeros(n)], layout=torch.jagged) for n in range(1, 9)]
    assert told[0] == told[1] and kept[0].is_nested
