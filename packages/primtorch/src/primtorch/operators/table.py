"""All operators, by name."""

from __future__ import annotations

from primtorch.families import Family, Operator
from primtorch.operators import (
    activation,
    attention,
    contraction,
    creation,
    elementwise,
    fft,
    indexing,
    linalg,
    loss,
    normalization,
    random,
    reduction,
    resampling,
    scan,
    shape,
    sort,
    special,
    view,
    window,
)

FAMILIES: tuple[Family, ...] = tuple(
    module.OP
    for module in (
        elementwise,
        special,
        activation,
        reduction,
        scan,
        sort,
        view,
        shape,
        creation,
        indexing,
        window,
        resampling,
        contraction,
        attention,
        normalization,
        loss,
        linalg,
        fft,
        random,
    )
)


def _records() -> dict[str, Operator]:
    found: dict[str, Operator] = {}
    for family in FAMILIES:
        for operator in family.operators():
            known = found.setdefault(operator.name, operator)
            if known is not operator:
                raise ValueError(f"{operator.name} stands in two families: {known.family} and {operator.family}")
    return found


OPERATORS: dict[str, Operator] = _records()
ELEMENTWISE = frozenset(name.partition(".")[0] for name, operator in OPERATORS.items() if operator.elementwise)
"""What TensorIterator computes, by name without overload."""
