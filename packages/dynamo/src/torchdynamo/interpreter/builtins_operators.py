"""The `operator` module: the same operations under names."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torchdynamo.interpreter.builtin_rules import BuiltinRule, Rules
from torchdynamo.interpreter.protocol import Args, Kwargs, World

RULES = Rules()


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_INPLACE = {
    "iadd": "+", "isub": "-", "imul": "*", "itruediv": "/", "ifloordiv": "//", "imod": "%", "ipow": "**",
    "imatmul": "@", "iand": "&", "ior": "|", "ixor": "^", "ilshift": "<<", "irshift": ">>",
}  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}


def _operation(native: Callable[..., object], method: str, symbol: str | None, count: int) -> BuiltinRule:
    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if len(args) != count or kwargs:
            return native(*args, **kwargs)
        return getattr(world, method)(*(() if symbol is None else (symbol,)), *args)

    return rule


for _family, _method_name, _count in ((_OPERATORS, "binary", 2), (_INPLACE, "inplace", 2), (_COMPARISONS, "compare", 2),
                                      (_UNARY, "unary", 1)):  # fmt: skip
    for _name, _symbol in _family.items():
        RULES[getattr(operator, _name)] = _operation(getattr(operator, _name), _method_name, _symbol, _count)
for _name, _method_name, _count in (
    ("truth", "truth", 1), ("contains", "contains", 2), ("getitem", "getitem", 2), ("setitem", "setitem", 3),
    ("delitem", "delitem", 2),
):  # fmt: skip
    RULES[getattr(operator, _name)] = _operation(getattr(operator, _name), _method_name, None, _count)


@RULES.interprets(operator.not_)
def call_not(world: World, args: Args, kwargs: Kwargs) -> object:
    return not world.truth(args[0]) if len(args) == 1 and not kwargs else operator.not_(*args, **kwargs)
