"""Joins two reductions over the same values, the second of which needs the first's result, into one pass.

* the maximum of v, then the sum of exp(v - maximum): each lane keeps its own maximum and a sum relative to it
  (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018);
* the sum of v, then the sum of (v - mean)^2: each lane keeps its own mean and squares about it (Welford 1962), and the
  lanes are combined as Chan, Golub and LeVeque (1979) do.

A joined reduction is of kind `sum_exp` or `moments`, `about` the first reduction's key. It pays where the values do not
stay in registers or near caches, so that the second pass would read them again; that is for a back end to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchinductor.indexing import product
from torchinductor.ir import (
    Apply,
    Bitcast,
    Body,
    Carried,
    Constant,
    IndexExpr,
    Indirect,
    Kernel,
    Load,
    Op,
    Reduce,
    Require,
    Scan,
    Stage,
    Store,
    ToDtype,
    compute_dtype,
)
from torchinductor.ops import ReductionKind

Form: TypeAlias = tuple[object, ...]
"""How a value is computed, as a tree: values of two bodies are the same where their forms are equal."""


Taken: TypeAlias = Callable[[Body, Reduce], bool]
"""Whether a back end takes a joined reduction beside what the body that would hold it does."""


def join_passes(kernel: Kernel, taken: Taken = lambda body, joined: True) -> Kernel:
    """The kernel with every such pair of stages made one. Outer stages between the two come after it: what the second
    one loads, they do not store."""
    stages: list[Stage] = []
    length = product(a.size for a in kernel.inner).as_int()
    for stage in kernel.stages:
        place = max((p for p, earlier in enumerate(stages) if earlier.kind == "inner"), default=None)
        joined = None
        if place is not None and stage.kind == "inner" and not _writes(stages[place + 1 :]) & stage.body.reads:
            joined = _join(stages[place].body, stage.body, length, taken)
        if place is None or joined is None:
            stages.append(stage)
        else:
            stages[place] = Stage("inner", joined)
    return replace(kernel, stages=tuple(stages)) if len(stages) < len(kernel.stages) else kernel


def _writes(stages: Sequence[Stage]) -> frozenset[str]:
    return frozenset().union(*(stage.body.writes for stage in stages))


def _join(first: Body, second: Body, length: int | None, taken: Taken) -> Body | None:
    reduction = _only_reduction(second)
    if reduction is None:
        return None
    forms = _forms(second.ops)
    known = _forms(first.ops)
    summed = forms[reduction.value]
    for position, op in enumerate(first.ops):
        if not isinstance(op, Reduce) or op.position is not None:
            continue
        if compute_dtype(first.ops[op.value].dtype) is not compute_dtype(second.ops[reduction.value].dtype):
            continue
        kind = _joined_kind(op, known[op.value], summed, forms, length)
        if kind is None:
            continue
        made = Reduce(op.dtype, kind, reduction.key, op.value, about=op.key)
        if taken(first, made):
            return Body((*first.ops[: position + 1], made, *_moved(first.ops[position + 1 :], position)))
    return None


def _joined_kind(
    first: Reduce, value: Form, summed: Form, forms: Sequence[Form], length: int | None
) -> ReductionKind | None:
    """The reduction that sums up `summed` in one pass with the first one, which is of `value`."""
    if first.kind == "amax" and summed == _call("exp", _call("sub", value, _carried(first.key))):
        return "sum_exp"
    if first.kind == "sum":
        gaps = (_call("sub", value, mean) for mean in _means(first.key, forms, length))
        if any(summed == _call("mul", gap, gap) for gap in gaps):
            return "moments"
    return None


def _moved(ops: Sequence[Op], after: int) -> list[Op]:
    """Operations whose values' numbers grow by one beyond `after`, because one was put there."""
    return [op.renumbered(lambda a: a + (a > after)) for op in ops]


def _only_reduction(body: Body) -> Reduce | None:
    """The sum that is all that a body is for."""
    effects = [op for op in body.ops if isinstance(op, (Reduce, Store, Scan))]
    if len(effects) != 1 or not isinstance(effects[0], Reduce) or effects[0].kind != "sum":
        return None
    return effects[0]


def _call(name: str, *operands: Form) -> Form:
    return (Apply, name, *operands)


def _carried(key: str) -> Form:
    return (Carried, key)


def _means(key: str, forms: Sequence[Form], length: int | None) -> list[Form]:
    """The forms in which a body divides the carried sum by the number of values."""
    found: list[Form] = []
    for form in forms:
        if form[:1] != (Apply,) or len(form) != 4 or form[2] != _carried(key) or not isinstance(form[3], tuple):
            continue
        other = form[3]
        if length is None or other[0] is not Constant or not isinstance(other[1], float):
            continue
        if (form[1] == "div" and other[1] == length) or (form[1] == "mul" and abs(other[1] * length - 1) < 1e-6):
            found.append(form)
    return found


def _forms(ops: Sequence[Op]) -> list[Form]:
    """The form of each operation's value."""
    forms: list[Form] = []
    indirect: dict[str, Form] = {}
    for op in ops:
        operands = tuple(forms[a] for a in op.operands)
        match op:
            case Apply():
                forms.append((Apply, op.op, *operands))
            case ToDtype() | Bitcast():
                forms.append((type(op), op.dtype, op.source, *operands))
            case Require():
                forms.append(operands[0])
            case Constant():
                forms.append((Constant, op.value, op.dtype))
            case Carried():
                forms.append(_carried(op.key))
            case Load():
                places = tuple(indirect[s] for s in sorted(op.index.symbols()) if s in indirect)
                forms.append((Load, op.buffer, op.index, places, *operands))
            case Indirect():
                indirect[op.symbol] = (op.size, *operands)
                forms.append((Indirect, op.size, *operands))
            case IndexExpr():
                forms.append((IndexExpr, op.expr, op.dtype))
            case _:
                forms.append((type(op), len(forms), object()))  # equal to nothing
    return forms
