"""Joins two reductions over the same values, the second of which needs the first's result, into one pass.

* the maximum of v, then the sum of exp(v - maximum): each lane keeps its own maximum and a sum relative to it
  (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018);
* the sum of v, then the sum of (v - mean)^2: each lane keeps its own mean and squares about it (Welford 1962), and the
  lanes are combined as Chan, Golub and LeVeque (1979) do.

A joined reduction is recorded as kind `sum_exp KEY` or `moments KEY`, KEY being the first reduction's key. It pays
where a row does not stay in registers, so that the second pass would read it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchinductor.indexing import product
from torchinductor.ir import Body, Kernel, Op, Stage, compute_dtype

JOINED = ("sum_exp", "moments")
Form = tuple[object, ...]


def joined_kind(kind: str) -> tuple[str, str] | None:
    """(joined kind, key of the reduction that it rides on); None for an ordinary kind."""
    head, _, key = kind.partition(" ")
    return (head, key) if head in JOINED else None


def join_passes(kernel: Kernel) -> Kernel:
    """The kernel with every such pair of neighbouring stages made one."""
    stages: list[Stage] = []
    length = product(a.size for a in kernel.inner).as_int()
    for stage in kernel.stages:
        previous = stages[-1] if stages else None
        joined = None
        if previous is not None and previous.kind == stage.kind == "inner":
            joined = _join(previous.body, stage.body, length)
        if joined is None:
            stages.append(stage)
        else:
            stages[-1] = Stage("inner", joined)
    return replace(kernel, stages=tuple(stages)) if len(stages) < len(kernel.stages) else kernel


def _join(first: Body, second: Body, length: int | None) -> Body | None:
    reduction = _only_reduction(second)
    if reduction is None:
        return None
    forms = _forms(second.ops)
    known = _forms(first.ops)
    for position, op in enumerate(first.ops):
        if op.name != "reduce" or len(op.args) != 1:
            continue
        kind, key = op.attr
        value = known[op.args[0]]
        if compute_dtype(first.ops[op.args[0]].dtype) is not compute_dtype(second.ops[reduction.args[0]].dtype):
            continue
        summed = forms[reduction.args[0]]
        name = None
        if kind == "amax" and summed == _call("exp", _call("sub", value, _carried(key))):
            name = "sum_exp"
        elif kind == "sum" and any(
            summed == _call("mul", d, d) for d in (_call("sub", value, mean) for mean in _means(key, forms, length))
        ):
            name = "moments"
        if name is not None:
            made = Op("reduce", op.dtype, op.args, (f"{name} {key}", reduction.attr[1]))
            return Body((*first.ops[: position + 1], made, *_moved(first.ops[position + 1 :], position)))
    return None


def _moved(ops: Sequence[Op], after: int) -> list[Op]:
    """Operations whose values' numbers grow by one beyond `after`, because one was put there."""
    return [op._replace(args=tuple(a + (a > after) for a in op.args)) for op in ops]


def _only_reduction(body: Body) -> Op | None:
    """The sum that is all that a body is for."""
    effects = [op for op in body.ops if op.name in ("reduce", "store", "scan")]
    if len(effects) != 1 or effects[0].name != "reduce" or effects[0].attr[0] != "sum":
        return None
    return effects[0]


def _call(name: str, *operands: Form) -> Form:
    return ("apply", name, *operands)


def _carried(key: str) -> Form:
    return ("carried", key)


def _means(key: str, forms: Sequence[Form], length: int | None) -> list[Form]:
    """The forms in which a body divides the carried sum by the number of values."""
    found: list[Form] = []
    for form in forms:
        if form[:1] != ("apply",) or len(form) != 4 or form[2] != _carried(key) or not isinstance(form[3], tuple):
            continue
        other = form[3]
        if length is None or other[0] != "constant" or not isinstance(other[1], float):
            continue
        if (form[1] == "div" and other[1] == length) or (form[1] == "mul" and abs(other[1] * length - 1) < 1e-6):
            found.append(form)
    return found


def _forms(ops: Sequence[Op]) -> list[Form]:
    """Each value as the tree of how it is computed, so that values of two bodies can be compared."""
    forms: list[Form] = []
    indirect: dict[str, Form] = {}
    for op in ops:
        operands = tuple(forms[a] for a in op.args)
        match op.name:
            case "apply" | "to_dtype" | "bitcast":
                forms.append(
                    ("apply", op.attr, *operands) if op.name == "apply" else (op.name, op.dtype, op.attr, *operands)
                )
            case "require":
                forms.append(operands[0])
            case "constant":
                forms.append(("constant", op.attr, op.dtype))
            case "carried":
                forms.append(_carried(op.attr))
            case "load":
                buffer, index = op.attr
                places = tuple(indirect[s] for s in sorted(index.symbols()) if s in indirect)
                forms.append(("load", buffer, index, places, *operands))
            case "indirect":
                indirect[op.attr[0]] = (op.attr, *operands)
                forms.append(("indirect", op.attr, *operands))
            case "index_expr":
                forms.append(("index", op.attr, op.dtype))
            case _:
                forms.append((op.name, len(forms), object()))  # equal to nothing
    return forms
