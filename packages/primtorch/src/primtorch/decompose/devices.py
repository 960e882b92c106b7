"""Operands on several devices: eager moves some of them by itself, a graph of prims says so with `device_put`.

Eager lets a 0-d CPU tensor meet tensors of another device, lets indices stay on the CPU, and copies between devices
where an operator writes a tensor into another. Whatever else is on two devices it refuses, and so do the fakes' checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from primtorch import prims
from primtorch.builder import Builder, Value
from primtorch.families import Trait, has_trait

_CPU = torch.device("cpu")


def placed(
    b: Builder, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, object], result: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one ATen call with its tensors on the device where it computes.

    Args:
        result: the node's `meta["val"]`. An operator computes where its result is.
    """
    if isinstance(op, OpOverload) and has_trait(Trait.TO_FIRST, op.name().removeprefix("aten::")):
        home = args[0].device

        def move(leaf: object) -> object:
            return b.emit(prims.device_put, leaf, home) if isinstance(leaf, Value) and leaf.device != home else leaf
    else:
        home = next((d for d in devices_of((result, args, kwargs)) if d.type != "cpu"), _CPU)
        if home == _CPU:
            return args, dict(kwargs)

        def move(leaf: object) -> object:
            lone = isinstance(leaf, Value) and not leaf.spec.shape and leaf.device == _CPU
            return b.emit(prims.device_put, leaf, home) if lone else leaf

    return pytree.tree_map(move, args), pytree.tree_map(move, dict(kwargs))


def devices_of(tree: object) -> Iterator[torch.device]:
    """The devices of the tensors, values and descriptors in a tree."""
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from devices_of(part)
    elif isinstance(tree, Mapping):
        yield from devices_of(tuple(tree.values()))
    else:
        device = getattr(tree, "device", None)
        if isinstance(device, torch.device):
            yield device
