"""Templates: kernels that a back end makes by a design of its own, around bodies that it is given.

A template says what it does as plain loops, so that passes take it as they take a kernel, and each back end could
generate it as one. The kind "matmul" is a product and what is made of it at once ("attention" is `ir.attention`,
"filter_gradient" `ir.filter_gradient`):

    result(outer axes) = epilogue(sum over the inner axis of left(axes) * right(axes))

The factors' elements are computed by prologues (conversions, as a rule) from memory that the template does not write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from primtorch.frozen import record
from primtorch.once import cached_property
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import product
from torchinductor.ir.body import Body
from torchinductor.ir.kernel import Axis, Kernel
from torchinductor.ir.operations import Apply, Bitcast, Constant, IndexExpr, Load, Reduce, ToDtype, slice_of

TemplateKind = Literal["matmul", "attention", "filter_gradient"]

# What a prologue consists of: what can be computed again for each tile that wants it.
PROLOGUE = (Load, Constant, IndexExpr, ToDtype, Bitcast, Apply)


@record
class Region:
    """A tensor in memory."""

    buffer: str
    shape: tuple[IntExpr, ...]
    strides: tuple[IntExpr, ...]
    offset: IntExpr


@record
class Operand:
    """A factor of a product: what computes its element, over the template's axes, and which of the values that is."""

    prologue: Body
    value: int

    @property
    def dtype(self) -> torch.dtype:
        """The type that it is multiplied in."""
        return self.prologue.ops[self.value].dtype

    @property
    def axes(self) -> frozenset[str]:
        """The names of the axes (and of size symbols) that it varies over."""
        return frozenset(name for expr in self.prologue.indices for name in expr.symbols())


@dataclass(frozen=True)
class Template:
    """Loops of a known form (`ir.verify` has the rules): an inner stage of one sum of products, then outer stages.

    Attributes:
        kind: which of a back end's designs it is for.
        loops: the same work as a kernel. Its `layout` is the back end's plan.
    """

    kind: TemplateKind
    loops: Kernel

    @property
    def name(self) -> str:
        """The loops' name."""
        return self.loops.name

    @property
    def device(self) -> torch.device:
        """The device whose back end makes it."""
        return self.loops.device

    @property
    def reads(self) -> tuple[str, ...]:
        """Buffers that prologues and epilogue load from."""
        return self.loops.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Buffers that the epilogue stores to."""
        return self.loops.writes

    @property
    def arguments(self) -> tuple[str, ...]:
        """The buffers in the order in which the code takes their pointers."""
        return self.loops.arguments

    @property
    def in_place(self) -> tuple[tuple[str, str], ...]:
        """(written, read) pairs of buffers that lie in one place."""
        return self.loops.in_place

    @property
    def total(self) -> Reduce:
        """The sum of products: its dtype is what products are added up in."""
        return next(self.loops.stages[0].body.of(Reduce))

    @cached_property
    def operands(self) -> tuple[Operand, Operand]:
        """The left factor and the right one."""
        body = self.loops.stages[0].body
        left, right = body.ops[self.total.value].operands
        return _operand(body, left), _operand(body, right)

    @property
    def epilogue(self) -> tuple[Body, ...]:
        """What is made of the sum, which these bodies take by the key of `total`."""
        return tuple(stage.body for stage in self.loops.stages[1:])

    @property
    def depth(self) -> Axis:
        """The axis that products are summed up over."""
        return self.loops.inner[0]

    @property
    def rows(self) -> tuple[Axis, ...]:
        """Outer axes that only the left factor varies over."""
        left, right = (operand.axes for operand in self.operands)
        return tuple(a for a in self.loops.outer if a.name in left - right)

    @property
    def columns(self) -> tuple[Axis, ...]:
        """Outer axes that only the right factor varies over."""
        left, right = (operand.axes for operand in self.operands)
        return tuple(a for a in self.loops.outer if a.name in right - left)

    @property
    def batch(self) -> tuple[Axis, ...]:
        """The other outer axes: one product each."""
        return tuple(a for a in self.loops.outer if a not in self.rows and a not in self.columns)

    def __str__(self) -> str:
        sizes = " x ".join(str(product(a.size for a in axes)) for axes in (self.rows, self.columns, (self.depth,)))
        count = f"{product(a.size for a in self.batch)} of " if self.batch else ""
        kinds = ", ".join(str(dtype)[6:] for dtype in (*(o.dtype for o in self.operands), self.total.dtype))
        return f"template {self.kind}: {count}{sizes} in {kinds}\n{self.loops}"


def loops_of(operation: Kernel | Template) -> Kernel:
    """What an operation does, as loops."""
    return operation.loops if isinstance(operation, Template) else operation


def _operand(body: Body, value: int) -> Operand:
    """The part of a body that computes a value."""
    order = sorted(slice_of(body.ops, [value]))
    number = {old: new for new, old in enumerate(order)}
    return Operand(Body(tuple(body.ops[p].renumbered(number.__getitem__) for p in order)), number[value])
