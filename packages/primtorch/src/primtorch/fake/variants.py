"""Formulas of in-place, out= and `_copy` variants, from those of the functional operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch.arguments import TENSORS, TensorLike
from primtorch.effects import RESTRIDES
from primtorch.errors import NoFormula
from primtorch.families import Formula, Trait, elementwise_packets, has_trait, operator_named
from primtorch.layout import broadcast, contiguous_strides
from primtorch.operators.build import contiguous
from primtorch.promotion import category
from primtorch.spec import TensorSpec

RESTRIDING = frozenset(
    {
        *RESTRIDES, "squeeze_.dim", "squeeze_.dims", "resize_", "resize_as_", "set_.source_Tensor",
        "set_.source_Storage_storage_offset", "set_.source_Tensor_storage_offset",
    }
)  # fmt: skip
"""In-place operators that change their argument's own shape."""
_RESTRIDED_AS = dict.fromkeys(("transpose_", "swapaxes_", "swapdims_"), "transpose.int")
_WRITTEN_AS = {"pow.Scalar": "pow.Tensor_Scalar", "pow.Tensor": "pow.Tensor_Tensor", "normal": "normal_functional"}
"""In-place overloads that are named otherwise than the functional ones: `pow.Scalar` has a number to the power."""

Find = Callable[[OpOverload], Formula]


def derived(op: OpOverload, named: Callable[[str], Formula | None], find: Find) -> Formula | None:
    """The formula of a variant, or None for what is none.

    Args:
        named: the formula of a name, if it has one; `find` the formula of any overload, or NoFormula.
    """
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    if not schema.is_mutable:
        return _view_copy(name, schema.overload_name)
    outs = out_names(op)
    if outs:
        functional = _functional_of_out(op, outs, find)
        return None if functional is None else _out_variant(functional, outs, op)
    if name.endswith("_") and not name.endswith("__"):
        suffix = f".{schema.overload_name}" if schema.overload_name else ""
        if name + suffix in RESTRIDING:
            return named(_RESTRIDED_AS.get(name, name[:-1] + suffix))
        functional_name = name[:-1] + suffix
        own = named(_WRITTEN_AS.get(functional_name, functional_name))
        return _in_place(own or _functional_of_in_place(op, find), op)
    return None


def out_names(op: OpOverload) -> tuple[str, ...]:
    """The out= arguments, in the order of the results."""
    return tuple(a.name for a in op._schema.arguments if a.is_out)


def is_fresh(op: OpOverload) -> bool:
    """Whether the formula takes a source of sizes that depend on data."""
    name: str = op.name().removeprefix("aten::")
    return operator_named(name).fresh or (bool(out_names(op)) and operator_named(name.partition(".")[0]).fresh)


def _view_copy(name: str, overload: str) -> Formula | None:
    """`view_copy` and the like: the view's result in fresh row-major memory."""
    if not name.endswith("_copy"):
        return None
    viewed = operator_named(name.removesuffix("_copy") + (f".{overload}" if overload else ""))
    if viewed.family != "view" or viewed.formula is None:
        return None
    found = viewed.formula

    def copied(*args: object, **kwargs: object) -> object:
        result = found(*args, **kwargs)
        return (
            contiguous(result, result.shape)
            if isinstance(result, TENSORS)
            else [contiguous(r, r.shape) for r in result]
        )

    return copied


def _functional_of_out(op: OpOverload, outs: Sequence[str], find: Find) -> Formula | None:
    """The formula of the overload of the same operator whose arguments are those of `op` without the out ones."""
    return _with_arguments(op.overloadpacket, [a for a in op._schema.arguments if a.name not in outs], find)


def _functional_of_in_place(op: OpOverload, find: Find) -> Formula | None:
    """The formula of what gives as a result what `op` writes, whatever its overload is named."""
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::")[:-1], None)
    return None if packet is None else _with_arguments(packet, op._schema.arguments, find)


def _with_arguments(packet: OpOverloadPacket, arguments: Sequence[Any], find: Find) -> Formula | None:
    wanted = [(a.name, str(a.type)) for a in arguments]
    for other in packet.overloads():
        candidate = getattr(packet, other)
        if (
            not out_names(candidate)
            and [(a.name, str(a.type)) for a in candidate._schema.arguments][: len(wanted)] == wanted
        ):
            try:
                return find(candidate)
            except NoFormula:
                continue
    return None


def _in_place(formula: Formula | None, op: OpOverload) -> Formula:
    """The written argument, checked against the functional result where that is known (random_ has none); nothing
    where the operator gives nothing."""
    if not op._schema.returns:
        return lambda *args, **kwargs: None
    if formula is None:
        return lambda target, *args, **kwargs: target
    functional = formula

    def in_place(target: TensorLike, *args: object, **kwargs: object) -> TensorLike:
        result = functional(target, *args, **kwargs)
        own = tuple(target.shape)
        if result.shape != own and (len(result.shape) > len(own) or broadcast(own, result.shape) != own):
            raise RuntimeError(f"output with shape {list(own)} doesn't match the broadcast shape {list(result.shape)}")
        if result.dtype is not target.dtype:
            _check_conversion(result.dtype, target.dtype)
        return target

    in_place.__name__ = op.name()
    return in_place


def _moved(made: object, target: object) -> object:
    """What a factory makes, on the device of its out=."""
    return replace(made, device=target.device) if isinstance(made, TensorSpec) and isinstance(target, TENSORS) else made


def _out_variant(formula: Formula, outs: Sequence[str], op: OpOverload) -> Formula:
    """The out= tensors; where one has another shape than the result, a description of what it becomes."""
    name = op._schema.name.removeprefix("aten::")
    fresh = is_fresh(op)
    names = name, f"{name}.{op._schema.overload_name}"
    exact = has_trait(Trait.EXACT_OUT, *names) or not (
        name in elementwise_packets() or has_trait(Trait.CONVERTS_OUT, *names)
    )

    def out_variant(*args: object, **kwargs: object) -> object:
        targets = [kwargs.pop(out) for out in outs]
        results = formula(*args, **kwargs)
        if has_trait(Trait.DTYPE_OF_OUT, name) or not any(isinstance(arg, TENSORS) for arg in args):
            results = _moved(results, targets[0])
        if len(targets) == 1 and isinstance(targets[0], list | tuple):  # a list of pieces
            expected, given = len(results), len(targets[0])
            if expected != given:
                raise RuntimeError(f"{name} expected an out= argument of size {expected}, got size {given}")
            for result, target in zip(results, targets[0], strict=True):
                _written(result, target)
            return None
        pairs = zip((results,) if isinstance(results, TENSORS) else results, targets, strict=True)
        written = [_written(result, target) for result, target in pairs]
        return written[0] if len(written) == 1 else tuple(written)

    def _written(result: object, target: object) -> object:
        if not isinstance(result, TENSORS) or not isinstance(target, TENSORS):
            return target
        if target.dtype is not result.dtype and not has_trait(Trait.DTYPE_OF_OUT, name):
            if has_trait(Trait.TRUTH_OUT, name):
                if target.dtype not in (torch.bool, torch.uint8):
                    raise RuntimeError(f"{name} only supports bool tensor for result, got: {target.dtype}")
            elif exact:
                raise RuntimeError(
                    f"Expected out tensor to have dtype {_scalar_name(result.dtype)}, but got "
                    f"{_scalar_name(target.dtype)} instead"
                )
            else:
                _check_conversion(
                    result.dtype, target.dtype, TypeError if has_trait(Trait.TYPE_ERROR_OUT, name) else RuntimeError
                )
        if target.device != result.device:
            raise RuntimeError(
                f"Expected out tensor to be on device {result.device}, but it is on {target.device} instead"
            )
        shape = tuple(result.shape)
        if not fresh and tuple(target.shape) == shape:
            return target
        strides = contiguous_strides(shape) if has_trait(Trait.ROWS_OUT, name) else result.stride()
        return TensorSpec(shape, strides, target.dtype, target.device, target.storage_offset())

    out_variant.__name__ = op.name()
    return out_variant


def _check_conversion(result: torch.dtype, target: torch.dtype, error: type[Exception] = RuntimeError) -> None:
    """Eager converts a result on its way out, but not from a kind of number into a lesser one."""
    rank, kept = category(result), category(target)
    if (rank > 1 and rank > kept) or (rank == 1 and kept == 0):
        raise error(
            f"result type {_scalar_name(result)} can't be cast to the desired output type {_scalar_name(target)}"
        )


def _scalar_name(dtype: torch.dtype) -> str:
    names = {
        "float32": "Float",
        "float64": "Double",
        "int64": "Long",
        "int32": "Int",
        "float16": "Half",
        "uint8": "Byte",
    }
    text = str(dtype).removeprefix("torch.")
    return names.get(text, text.capitalize())
