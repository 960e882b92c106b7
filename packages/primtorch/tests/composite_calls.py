"""Calls every composite of ATen on fakes over symbols: `python composite_calls.py START` prints each number before its call.

What a composite's C++ makes of tensors without memory is seen by the process alone that runs it. Arguments come from the
schema, in several ranks, types and sizes; most calls raise, and none may end the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from primtorch.fake.tensor import FakeMode, FakeTensor
from primtorch.spec import TensorSpec
from primtorch.symbolic.shape_env import ShapeEnv

EAGER_DIES = {"_thnn_differentiable_gru_cell_backward"}  # of gates that are no multiple of three, with memory too


def composites() -> list[OpOverload]:
    """Every overload whose program is C++ over other operators, in one order."""
    key, found = "CompositeImplicitAutograd", []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is not None and packet not in EAGER_DIES:
                found.append(op)
    return found


class Drawn:
    """Arguments of one rank and type, integers and truths by a number."""

    def __init__(self, rank: int, dtype: torch.dtype, number: int) -> None:
        self.rank, self.dtype, self.number = rank, dtype, number
        self.env = ShapeEnv()
        self.mode = FakeMode(self.env)

    def fake(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        sizes = tuple(self.env.symbol(size, f"size {size}") for size in (3, 4, 5)[:rank])
        strides: list[Any] = [1] * rank
        for dim in reversed(range(rank - 1)):
            strides[dim] = strides[dim + 1] * sizes[dim + 1]
        return FakeTensor(TensorSpec(sizes, tuple(strides), dtype, torch.device("cpu")), self.mode)

    def value(self, kind: Any, first: bool) -> object:
        match kind.kind():
            case "OptionalType":
                tensor = kind.getElementType().kind() == "TensorType"
                return self.value(kind.getElementType(), first) if tensor and self.number else None
            case "TensorType":
                return self.fake(self.rank, self.dtype) if first else self.fake(1, torch.int64)
            case "ListType" if kind.getElementType().kind() in ("TensorType", "OptionalType"):
                return [self.fake(min(self.rank, 2), self.dtype)] * 4
            case "ListType":
                return [self.value(kind.getElementType(), first)] * (1 + self.number)
            case "BoolType":
                return bool(self.number)
            case "FloatType":
                return 0.5
            case "StringType":
                return "mean"
            case "DeviceObjType":
                return torch.device("cpu")
            case "IntType" | "SymIntType" | "NumberType":
                return 1 + self.number
        return 6  # a dtype

    def arguments(self, op: OpOverload) -> tuple[list[object], dict[str, object]]:
        args: list[object] = []
        kwargs: dict[str, object] = {}
        first = True
        for argument in op._schema.arguments:
            tensor = argument.type.kind() == "TensorType"
            if argument.has_default_value() and not tensor:
                continue
            value = self.value(argument.type, first)
            first = first and not tensor
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs


def draws() -> Iterator[Drawn]:
    for rank in (1, 2, 3):
        for dtype in (torch.int64, torch.float32):
            for number in (0, 1):
                yield Drawn(rank, dtype, number)


if __name__ == "__main__":
    for place, op in enumerate(composites()):
        if place < int(sys.argv[1]):
            continue
        print(place, flush=True)
        for drawn in draws():
            args, kwargs = drawn.arguments(op)
            try:
                op(*args, **kwargs)
            except Exception:
                continue
    print("done")
