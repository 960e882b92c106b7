"""What is kept for the backward of max pools: a byte for each window, and nothing of what was pooled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from aotautograd import min_cut, partition, trace_joint
from aotautograd.api import simplify
from aotautograd.lowering import Lowering, lower_joint
from aotautograd.maxima import mask_at_maxima
from aotautograd.schemas import Partition
from primtorch.spec import TensorSpec

Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor], Tensor]


def block(pool: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor] = F.relu) -> Program:
    """Convolution, activation, pool, convolution: both convolutions read only what is pooled, or an input."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        convolution = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
        return convolution(pool(act(convolution(x, weight, padding=1))), weight)

    return run


def operands(rank: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(3, 3, *[3] * rank, requires_grad=True)
    return torch.randn(2, 3, *[12] * rank), weight


def parts_of(program: Program, rank: int) -> tuple[int, Partition]:
    joint = simplify(trace_joint(lambda *inputs: [program(*inputs)], list(operands(rank))))
    moved = mask_at_maxima(joint)
    return moved, partition(simplify(lower_joint(joint, Lowering("prims"))), min_cut())


def kept(parts: Partition) -> list[TensorSpec]:
    """Tensors that the backward is given, beside tangents."""
    inputs = [n for n in parts.backward.graph.nodes if n.op == "placeholder"]
    return [n.meta["val"] for n in inputs[: parts.num_saved_tensors]]


POOLS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "1d": (1, lambda x: F.max_pool1d(x, 2)),
    "2d": (2, lambda x: F.max_pool2d(x, 2)),
    "overlapping": (2, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "dilated": (2, lambda x: F.max_pool2d(x, 3, 1, 1, 2)),
    "3d": (3, lambda x: F.max_pool3d(x, 2)),
    "adaptive": (2, lambda x: F.adaptive_max_pool2d(x, 5)),
    "adaptive, 1d": (1, lambda x: F.adaptive_max_pool1d(x, 6)),
    "adaptive, 3d": (3, lambda x: F.adaptive_max_pool3d(x, 6)),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_byte_is_kept_for_a_window(name: str) -> None:
    rank, pool = POOLS[name]
    moved, parts = parts_of(block(pool), rank)
    assert moved == 1
    pooled = pool(operands(rank)[0]).shape
    assert [spec.dtype for spec in kept(parts) if not spec.dtype.is_floating_point] == [torch.uint8]
    own = [spec for spec in kept(parts) if spec.shape not in (operands(rank)[0].shape, operands(rank)[1].shape)]
    assert sorted((spec.numel(), spec.dtype.itemsize) for spec in own) == [(pooled.numel(), 1), (pooled.numel(), 4)]
    wide = [spec for spec in kept(parts) if spec.shape == operands(rank)[0].shape]
    assert len(wide) == 1, "of that size there is the convolution's input alone"


def test_windows_of_more_places_take_more() -> None:
    _, parts = parts_of(block(lambda x: F.max_pool1d(F.pad(x, (0, 1200)), 257)), 1)
    assert [spec.dtype for spec in kept(parts) if not spec.dtype.is_floating_point] == [torch.int32]


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (F.relu, True),
    "relu6": (F.relu6, True),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.0), True),
    "threshold to more": (lambda x: F.threshold(x, 0.5, 1.0), False),
    "leaky": (F.leaky_relu, False),
    "sigmoid": (torch.sigmoid, False),
    "relu of a norm": (lambda x: F.relu(F.batch_norm(x, None, None, training=True)), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_the_result_tells_are_taken_of_it(name: str) -> None:
    act, moves = MASKS[name]
    assert parts_of(block(lambda x: F.max_pool2d(x, 2), act), 2)[0] == moves


def twice(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2) + x[..., ::2, ::2]


def test_what_others_read_is_masked_where_it_is() -> None:
    assert parts_of(block(twice), 2)[0] == 0


def test_the_program_returns_what_it_returned() -> None:
    """The mask may be a gradient that the graph returns, and what it is of views."""

    def run(x: Tensor) -> list[Tensor]:
        return [F.max_pool1d(F.relu(x), 2)]

    x = torch.randn(2, 3, 8, requires_grad=True)
    joint = simplify(trace_joint(run, [x]))
    assert mask_at_maxima(joint) == 1
    tangent = torch.randn(2, 3, 4)
    (found,) = joint.module(x.detach(), tangent)[joint.num_forward_outputs :]
    (eager,) = torch.autograd.grad(run(x), x, [tangent])
    assert torch.equal(found, eager)
    assert not any(_is_mask(n) and n.meta["val"].shape == x.shape for n in joint.module.graph.nodes)


def _is_mask(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.threshold_backward.default
