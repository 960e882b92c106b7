"""Where an operator's operands may be: all on one device, but for what eager moves by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from primtorch.arguments import TENSORS, TensorLike
from primtorch.effects import said_writes
from primtorch.families import Formula, Trait, has_trait, operator_named

_ANYWHERE_STARTS = ("_foreach", "_fused", "_amp", "_scaled_dot_product", "_flash_attention", "_efficient_attention",
                    "_cudnn", "set")  # fmt: skip


def on_one_device(op: OpOverload, formula: Formula) -> Formula:
    """The formula behind a check that the operands are where eager takes them.

    Pointwise formulas find the common device of their operands themselves, as TensorIterator does.
    """
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten" or has_trait(Trait.ANYWHERE, name) or name.startswith(_ANYWHERE_STARTS):
        return formula
    if operator_named(op.name().removeprefix("aten::")).elementwise:
        return formula
    kinds = [str(a.type) for a in op._schema.arguments]
    if sum("Tensor" in kind for kind in kinds) < 2 and not any("List" in kind and "Tensor" in kind for kind in kinds):
        return formula
    indexed, strict = has_trait(Trait.INDICES_ANYWHERE, name), has_trait(Trait.ONE_DEVICE, name)
    check = _check_indexed if indexed else _check_strictly if strict else _check
    written = any(place == 0 for place, _ in said_writes(op))

    @functools.wraps(formula)
    def both(*args: object, **kwargs: object) -> object:
        first: torch.device | None = None
        for operand in _tensors((*args, *kwargs.values()) if kwargs else args):
            device = operand.device
            if first is None:
                first = device
            elif device is not first and device != first:
                check((*args, *kwargs.values()), written)
                break
        return formula(*args, **kwargs)

    return both


def _tensors(args: Sequence[object]) -> Iterator[TensorLike]:
    for arg in args:
        if isinstance(arg, TENSORS):
            yield arg
        elif isinstance(arg, list | tuple):
            for part in arg:
                if isinstance(part, TENSORS):
                    yield part


def _check_strictly(args: Sequence[object], written: bool) -> None:
    """One device for all; a tensor on `meta` has no place, and goes with any."""
    _refuse_two([t.device for t in _tensors(args)])


def _check(args: Sequence[object], written: bool) -> None:
    """One device for all but 0-d CPU tensors, which are read and not written."""
    operands = list(_tensors(args))
    _refuse_two([t.device for i, t in enumerate(operands) if (written and i == 0) or t.shape or t.device.type != "cpu"])


def _refuse_two(devices: Sequence[torch.device]) -> None:
    placed = [d for d in devices if d.type != "meta"]
    for other in placed[1:]:
        if other != placed[0]:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{placed[0]} and {other}!"
            )


def _check_indexed(args: Sequence[Any], written: bool) -> None:
    """Masks and indices beside the indexed tensor or on the CPU, values beside it or of 0 dims."""
    home = args[0].device
    for operand in args[1:]:
        if isinstance(operand, list | tuple):
            wrong = any(isinstance(i, TENSORS) and i.device not in (home, torch.device("cpu")) for i in operand)
            if wrong and home.type != "meta":
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({home})"
                )
        elif isinstance(operand, TENSORS) and operand.shape:
            _refuse_two([home, operand.device])
