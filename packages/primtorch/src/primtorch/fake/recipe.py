"""Results of operators over symbolic sizes, kept by their arguments.

Arithmetic on SymInts crosses between C++ and Python several times an operation, so a formula over symbols costs a
hundred times one over ints. A network repeats few combinations of layouts; each is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from primtorch.arguments import TENSORS
from primtorch.frozen import record
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic.expr import IntExpr, constant
from primtorch.symbolic.shape_env import ShapeEnv
from primtorch.symbolic.sym_node import node_of


class NotRepeatable(Exception):
    """A call whose arguments cannot be compared with those of another."""


@record
class Recipe:
    """How to make a result again: a tensor (`spec`, bytes of its storage), a sequence of results, or a plain value."""

    spec: TensorSpec | None = None
    nbytes: Size | None = None
    kind: Callable[[list[Any]], Any] | None = None
    parts: tuple[Recipe, ...] = ()
    value: object = None


def recipe_of(result: object) -> Recipe:
    """The recipe of a formula's result."""
    if type(result) is TensorSpec:
        return Recipe(result, storage_bytes(result))
    if isinstance(result, tuple | list):
        return Recipe(kind=type(result), parts=tuple([recipe_of(part) for part in result]))
    return Recipe(value=result)


def call_key(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """What a result's metadata depends on.

    Raises:
        NotRepeatable: an argument is of a kind that has no key.
    """
    named = tuple([(name, _key(value)) for name, value in kwargs.items()]) if kwargs else ()
    return op, torch.get_default_dtype(), named, *map(_key, args)


ATOMS = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _key(arg: Any) -> object:
    kind = type(arg)
    if kind in ATOMS:
        return kind, arg
    if isinstance(arg, TENSORS):
        return _sizes_key(arg.shape), _sizes_key(arg.stride()), _size_key(arg.storage_offset()), arg.dtype, arg.device
    if isinstance(arg, list | tuple):
        return tuple([_key(part) for part in arg])
    if kind is torch.SymInt:
        return node_of(arg).expr
    raise NotRepeatable


def _size_key(size: Size) -> int | IntExpr:
    return size if type(size) is int else size.node.expr  # type: ignore[union-attr]


def _sizes_key(sizes: Sequence[Size]) -> tuple[int | IntExpr, ...]:
    return tuple([s if type(s) is int else s.node.expr for s in sizes])  # type: ignore[union-attr]


def storage_bytes(spec: TensorSpec) -> Size:
    """Bytes from the storage's begin to the tensor's last element: (offset + 1 + sum((size-1) * stride)) * itemsize."""
    env: ShapeEnv | None = None
    one = constant(1)
    last = one
    for size, stride in zip(spec.shape, spec.strides, strict=True):
        if type(size) is int and size == 0:
            return 0
        last = last + (_expr(size) - one) * _expr(stride)
    for size in (*spec.shape, *spec.strides, spec.offset):
        if isinstance(size, torch.SymInt):
            env = node_of(size).env
            break
    total = (last + _expr(spec.offset)) * constant(spec.dtype.itemsize)
    return total.evaluate({}) if env is None else env.size(total)


def _expr(size: Size) -> IntExpr:
    return constant(size) if type(size) is int else node_of(size)._int()  # type: ignore[arg-type]
