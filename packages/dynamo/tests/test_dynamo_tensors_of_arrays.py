"""Tensors made of NumPy arrays: eager's strides, memory and errors, whatever the array's layout and whether capture knows
its elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torchdynamo

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda a: a, "transposed": lambda a: a.T, "new first": lambda a: a[None], "new middle": lambda a: a[:, None],
    "new moved": lambda a: a[None].swapaxes(0, 1), "backwards": lambda a: a[::-1], "steps": lambda a: a[::2],
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)), "row": lambda a: a[1], "column": lambda a: a[:, :1],
    "column transposed": lambda a: a[:, 1:2].T, "Fortran": np.asfortranarray, "element": lambda a: a[1:2, 1:2],
    "empty": lambda a: a[:0], "empty transposed": lambda a: a[:, 1:1].T,
}  # fmt: skip
MAKERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "tensor": torch.tensor, "as_tensor": torch.as_tensor, "from_numpy": torch.from_numpy, "asarray": torch.asarray,
    "Tensor": torch.Tensor, "FloatTensor": torch.FloatTensor, "DoubleTensor": torch.DoubleTensor,
    "new_tensor": lambda a: torch.zeros(1).new_tensor(a),
    "tensor of a dtype": lambda a: torch.tensor(a, dtype=torch.float64), "tensor of two": lambda a: torch.tensor([a, a]),
}  # fmt: skip


def seen(call: Callable[[torch.Tensor], tuple[torch.Tensor, Any]], x: torch.Tensor, own: bool) -> tuple[object, ...]:
    """What a program gives. In dims of size 1 a tensor that has an array's memory keeps the strides that torch's views
    give, which lead to the same elements."""
    try:
        made, array = call(x)
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    strides = made.stride() if own else tuple(s for s, size in zip(made.stride(), made.shape, strict=True) if size != 1)
    return made.dtype, tuple(made.shape), strides, made.tolist(), np.asarray(array).tolist()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable", "ignore:Creating a tensor from a list")
@pytest.mark.parametrize("maker", MAKERS)
def test_strides_memory_and_errors(maker: str) -> None:
    for known, (layout, lay_out) in itertools.product((True, False), LAYOUTS.items()):

        def program(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
            array = np.arange(12, dtype=np.float32).reshape(4, 3) if known else x.clone().numpy()  # noqa: B023
            made = MAKERS[maker](lay_out(array))  # noqa: B023
            if layout != "broadcast":  # noqa: B023 - there, elements are one another
                made.add_(1)
            return made, array

        own = known or "tensor" in maker.split()
        torchdynamo.reset()
        compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
        for _ in range(2):
            x = torch.randn(4, 3)
            expected = seen(program, x, own)
            assert seen(compiled, x, own) == expected, f"{maker} of {layout}, known: {known}"
        reasons = {reason for _, reason, _ in torchdynamo.stats().breaks}
        assert reasons <= ({"exception"} if isinstance(expected[0], type) else {"numpy"}), (
            f"{maker} of {layout}, known: {known}"
        )
