"""The record that describes one primitive, and the checks that every meta shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.errors import PrimError
from primtorch.families import operators
from primtorch.frozen import record
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import ShapeEnv, shape_env_of, size_of_data

Meta: TypeAlias = Callable[..., Any]
Reference: TypeAlias = Callable[..., Any]


@record
class Pointwise:
    """The ATen operators that are a prim behind broadcasting and type promotion.

    Args:
        overloads: their names, as families of operators read them: "mul.Tensor|Scalar".
        to_float: integers become the default float.
        to_bool: the result is bool, and the operands are compared in their promoted dtype.
        exact: the result needs no rounding, so that reduced precision stays.
    """

    overloads: str
    to_float: bool = False
    to_bool: bool = False
    exact: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Prim:
    """One primitive: what it is called, what it means, what its result looks like, how eager computes it.

    `meta(*args)` takes `TensorSpec` where the schema says Tensor and returns the results' specs;
    `reference(*args)` takes real tensors. Both take the arguments in the order of `schema`.
    When `aten` is set, the arguments and the results are exactly that overload's, so that
    `prim.aten(*node.args, **node.kwargs)` is a valid call. `pointwise` says which operators are this prim behind
    broadcasting and promotion: their formulas and rules follow from it.
    """

    schema: str
    family: str
    doc: str
    meta: Meta
    reference: Reference
    tags: frozenset[str] = field(default_factory=frozenset)
    aten: OpOverload | None = None
    pointwise: Pointwise | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.schema.partition("(")[0])

    # FX prints a call by `__module__` and `__name__`, pickle saves it by them: `primtorch.prims.add`.
    __module__ = "primtorch.prims"

    @property
    def operands(self) -> int:
        """How many tensors it takes."""
        return self.schema.partition("->")[0].count("Tensor")

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the reference on real tensors."""
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"prims.{self.name}"

    def __reduce__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FormulaOf:
    """The meta of an operator taken whole: its formula, which is found when it is first asked for."""

    operator: str

    def __call__(self, *args: object, **kwargs: object) -> Any:
        operator = operators()[self.operator]
        assert operator.formula is not None, f"{self.operator} is taken whole and has no formula"
        if operator.fresh:
            kwargs["fresh"] = partial(fresh_size, args)
        return operator.formula(*args, **kwargs)


def meta_of(overload: OpOverload) -> Meta:
    """The meta function of a prim that is an ATen overload: the formula of that operator."""
    return FormulaOf(overload.name().removeprefix("aten::"))


def fresh_size(operands: Sequence[object], maximum: Size | None, minimum: Size = 0, of: object = None) -> torch.SymInt:
    """A size known only when the program runs, in the operands' shape environment if they have one."""
    sizes = (size for spec in operands if isinstance(spec, TensorSpec) for size in spec.shape)
    env = next(filter(None, map(shape_env_of, sizes)), None) or ShapeEnv()
    return size_of_data(env, minimum, maximum)


def require(condition: bool, prim: str, message: Callable[[], str]) -> None:
    """Raise `PrimError` with a message that is built only when it is needed."""
    if not condition:
        raise PrimError(f"{prim}: {message()}")


def require_dim(prim: str, dim: int, rank: int) -> None:
    """Raises PrimError for a dim that is negative or not there."""
    if not 0 <= dim < max(rank, 1):
        raise PrimError(f"{prim}: dimension {dim} is out of range for a tensor of rank {rank} (dims are non-negative)")


def require_dims(prim: str, dims: Sequence[int], rank: int) -> None:
    """Raises PrimError for dims that are negative, not there or named twice."""
    for dim in dims:
        require_dim(prim, dim, rank)
    if len(set(dims)) != len(dims):
        raise PrimError(f"{prim}: a dimension occurs twice in {tuple(dims)}")


def spec_like(
    spec: TensorSpec, shape: Sequence[Size], strides: Sequence[Size], dtype: torch.dtype | None = None, offset: Size = 0
) -> TensorSpec:
    """A tensor on the device of `spec`, of its dtype unless another is given."""
    return TensorSpec(tuple(shape), tuple(strides), dtype or spec.dtype, spec.device, offset)
