"""The table of formulas: own ones by name, in-place and out= variants derived from the functional ones, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.errors import NoFormula
from primtorch.fake import (
    formulas_attention,
    formulas_contraction,
    formulas_creation,
    formulas_fourier,
    formulas_indexing,
    formulas_linalg,
    formulas_loss,
    formulas_nn,
    formulas_pointwise,
    formulas_random,
    formulas_reduction,
    formulas_shape,
    formulas_view,
    formulas_window,
)
from primtorch.fake.build import Formula, contiguous
from primtorch.fake.checks import checked
from primtorch.fake.layout import broadcast
from primtorch.fake.promotion import TENSORS, category
from primtorch.fake.structured import has_native_meta, meta_formula

_FAMILIES = (
    formulas_pointwise,
    formulas_reduction,
    formulas_view,
    formulas_shape,
    formulas_indexing,
    formulas_nn,
    formulas_contraction,
    formulas_linalg,
    formulas_attention,
    formulas_window,
    formulas_creation,
    formulas_random,
    formulas_fourier,
    formulas_loss,
)
NAMED: dict[str, Formula] = {
    name: checked(name, formula) for family in _FAMILIES for name, formula in family.TABLE.items()
}

RESTRIDING = frozenset(
    [
        "t_",
        "transpose_",
        "squeeze_",
        "squeeze_.dim",
        "squeeze_.dims",
        "unsqueeze_",
        "as_strided_",
        "resize_",
        "resize_as_",
        "set_.source_Tensor",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor_storage_offset",
    ]
)
"""In-place operators that change their argument's own shape."""
_RESTRIDED_AS = {"transpose_": "transpose.int"}

Fallback: TypeAlias = Callable[[OpOverload], Formula | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an overload acts on fake tensors. `fresh`: the formula takes a source of data-dependent sizes;
    `restrides`: the first argument gets the result's shape and strides (t_, unsqueeze_, resize_).

    `alias` is the position of the argument whose memory the result shares; `mutates` are positions and keyword names
    of the arguments it writes.
    """

    formula: Formula
    restrides: bool
    fresh: bool
    alias: int | None
    mutates: tuple[int | str, ...]
    source: str


class RuleTable(dict[OpOverload, Rule]):
    """Rules by overload, found on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.fallbacks: list[Fallback] = []

    def __missing__(self, op: OpOverload) -> Rule:
        formula, source = self._find(op)
        alias, mutates = _effects(op)
        rule = self[op] = Rule(
            formula, op_key(op) in RESTRIDING, op_key(op) in formulas_indexing.DATA_DEPENDENT, alias, mutates, source
        )
        return rule

    def _find(self, op: OpOverload) -> tuple[Formula, str]:
        found = NAMED.get(op_key(op))
        if found is not None:
            return found, "formula"
        derived = _derived(op)
        if derived is not None:
            return derived, "derived"
        formula = next(filter(None, (fallback(op) for fallback in self.fallbacks)), None)
        if has_native_meta(op):
            return checked(op_key(op), meta_formula(op, formula)), "meta"
        if formula is None:
            raise NoFormula(op.name())
        return checked(op_key(op), formula), "fallback"


RULES = RuleTable()


def op_key(op: OpOverload) -> str:
    """The name under which the table knows an overload: "add.Tensor", "relu"; other namespaces keep theirs."""
    name: str = op.name()
    return name.removeprefix("aten::")


def formula_of(op: OpOverload) -> Formula:
    """The formula that gives an overload's result from descriptors.

    It takes the overload's arguments with a TensorSpec (or any tensor) for each tensor, and returns TensorSpecs.
    """
    return RULES[op].formula


def register_formula(op: OpOverload | str, formula: Formula) -> None:
    """Give an operator a formula, or replace its formula.

    Args:
        op: an overload, or its name: "add.Tensor", "mylib::myop".
    """
    key = op if isinstance(op, str) else op_key(op)
    NAMED[key] = formula
    for known in [k for k in RULES if op_key(k) == key]:
        del RULES[known]


def register_fallback(fallback: Fallback) -> None:
    """A source of formulas for operators that have none here, asked once an operator in order of registration.

    Args:
        fallback: overload -> formula, or None where it has none.
    """
    RULES.fallbacks.append(fallback)
    for op in [op for op, rule in RULES.items() if rule.source != "formula"]:
        del RULES[op]


def _effects(op: OpOverload) -> tuple[int | None, tuple[int | str, ...]]:
    """(argument that the result is a view of, arguments written), from the schema."""
    alias: int | None = None
    mutates: list[int | str] = []
    for position, argument in enumerate(op._schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        if info.is_write:
            mutates.append(argument.name if argument.kwarg_only else position)
        elif alias is None:
            alias = position
    # Its schema says nothing of the running statistics that it updates.
    if op.name() in ("aten::native_batch_norm", "aten::cudnn_batch_norm"):
        mutates += [3, 4]
    return (None if mutates else alias), tuple(mutates)


def _derived(op: OpOverload) -> Formula | None:
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    if not schema.is_mutable:
        return _view_copy(name, schema.overload_name)
    outs = [a.name for a in schema.arguments if a.is_out]
    if outs:
        functional = _functional_of_out(op, set(outs))
        return None if functional is None else _out_variant(functional, outs, op)
    if name.endswith("_") and not name.endswith("__"):
        suffix = f".{schema.overload_name}" if schema.overload_name else ""
        if name + suffix in RESTRIDING:
            return NAMED.get(_RESTRIDED_AS.get(name, name[:-1] + suffix))
        return _in_place(NAMED.get(name[:-1] + suffix), op)
    return None


def _view_copy(name: str, overload: str) -> Formula | None:
    """`view_copy` and the like: the view's result in fresh row-major memory."""
    if not name.endswith("_copy"):
        return None
    viewed = formulas_view.TABLE.get(name.removesuffix("_copy") + (f".{overload}" if overload else ""))
    if viewed is None:
        return None
    found = viewed

    def copied(*args: Any, **kwargs: Any) -> Any:
        result = found(*args, **kwargs)
        return (
            contiguous(result, result.shape)
            if isinstance(result, TENSORS)
            else [contiguous(r, r.shape) for r in result]
        )

    return copied


def _functional_of_out(op: OpOverload, outs: set[str]) -> Formula | None:
    """The formula of the overload of the same operator whose arguments are those of `op` without the out ones."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in outs]
    for other in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, other)
        arguments = candidate._schema.arguments
        if not candidate._schema.is_mutable and [(a.name, str(a.type)) for a in arguments][: len(wanted)] == wanted:
            formula = NAMED.get(op_key(candidate))
            if formula is not None:
                return formula
    return None


def _in_place(formula: Formula | None, op: OpOverload) -> Formula:
    """The written argument, checked against the functional result where that is known (random_ has none)."""
    if formula is None:
        return lambda target, *args, **kwargs: target
    functional = formula

    def in_place(target: Any, *args: Any, **kwargs: Any) -> Any:
        result = functional(target, *args, **kwargs)
        own = tuple(target.shape)
        if result.shape != own and (len(result.shape) > len(own) or broadcast(own, result.shape) != own):
            raise RuntimeError(f"output with shape {list(own)} doesn't match the broadcast shape {list(result.shape)}")
        if result.dtype is not target.dtype and category(result.dtype) > max(category(target.dtype), 1):
            raise RuntimeError(
                f"result type {_scalar_name(result.dtype)} can't be cast to the desired output type "
                f"{_scalar_name(target.dtype)}"
            )
        return target

    in_place.__name__ = op.name()
    return in_place


def _out_variant(formula: Formula, outs: list[str], op: OpOverload) -> Formula:
    def out_variant(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outs]
        results = formula(*args, **kwargs)
        for result, target in zip((results,) if isinstance(results, TENSORS) else results, targets, strict=True):
            if tuple(target.shape) != result.shape:
                raise RuntimeError(
                    f"{op.name()}: out= has shape {list(target.shape)}, the result {list(result.shape)}; fake "
                    "tensors do not resize"
                )
            if category(result.dtype) > category(target.dtype):
                raise RuntimeError(
                    f"result type {_scalar_name(result.dtype)} can't be cast to the desired output type "
                    f"{_scalar_name(target.dtype)}"
                )
        return targets[0] if len(targets) == 1 else tuple(targets)

    out_variant.__name__ = op.name()
    return out_variant


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
