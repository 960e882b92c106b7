"""Numbers that the program takes out of its tensors: `n = x.sum().item()`, `int(t)`, `float(t)`, `x.tolist()`.

The graph has a node that reads the number, and the program goes on with a symbol for it: u0, u1, ... for an int, uf0,
uf1, ... for a float. It may compute with it, make tensors of it, use it as a size, hand it to the caller. Where it
branches on it, formats it or gives it to C code, the value has to be there: capture begins anew, and the graph ends
before the number is taken.

A number that is used as a size is not negative. Which one is a size, a first capture finds out; the next takes for
granted that it is not negative (`conditions.py`), and the graph tells those who trace it by a call of `torch._check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from primtorch.errors import DataDependent
from primtorch.fake import FakeTensor
from primtorch.schemas import UserFrame
from primtorch.symbolic import settled
from primtorch.symbolic.expr import symbol as symbol_of
from primtorch.symbolic.relation import COMPARE, BoolExpr, FloatRelation, Relation
from primtorch.symbolic.shape_env import ShapeGuard
from primtorch.symbolic.sym_node import SymNode, node_of
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.protocol import MISSING, Escape

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder

Place = tuple[UserFrame, ...]
Number = torch.SymInt | torch.SymFloat

# Methods that take numbers, and the type of what they give; None: the tensor's own.
TAKING: dict[str, type | None] = {"item": None, "tolist": None, "__int__": int, "__index__": int, "__float__": float}
_MOST = 64  # numbers of one list

# The operations of a fact's postfix program, on tensors of one element.
_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in COMPARE},
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def _full(number: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), number, dtype=dtype)


def _fake(tensor: torch.Tensor) -> FakeTensor:
    assert isinstance(tensor, FakeTensor)
    return tensor


class NumberAsked(Escape):
    """The program needs the value of numbers that it took from tensors.

    Attributes:
        places: the user's stack where each was taken.
        as_size: an operator asked, which may be content to know that the number is a size.
    """

    def __init__(self, places: Collection[Place], as_size: bool) -> None:
        super().__init__(places)
        self.places = frozenset(places)
        self.as_size = as_size


class TakenNumbers:
    """Those of one capture.

    Attributes:
        refused: where taking one breaks the graph.
        sizes: where one is taken for a size.
        made: the user's stack where each was taken, by the symbol.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.refused: Collection[Place] = ()
        self.sizes: Collection[Place] = ()
        self.made: dict[str, Place] = {}
        self._tensors: dict[str, torch.Tensor] = {}  # whole numbers, as what the graph makes of them

    def take(self, name: str, tensor: object) -> Any:
        """The number, or a list of them; MISSING where the graph has to end before it is taken."""
        if not isinstance(tensor, FakeTensor) or class_of(tensor) is not None or self.recorder.regions.open:
            return MISSING
        if self.recorder.modes:  # which would see what it comes down to
            return MISSING
        shape = tuple(map(settled, tensor.spec.shape))
        if not all(type(size) is int for size in shape) or self.recorder.user_frames() in self.refused:
            return MISSING
        if tensor.dtype is torch.bool or tensor.is_complex() or tensor.device.type == "meta":
            return MISSING  # the way into a branch; a number that graphs do not know
        if name != "tolist":
            return self._number(tensor, TAKING[name]) if math.prod(shape) == 1 else MISSING
        return self._list(tensor) if 0 < math.prod(shape) <= _MOST else MISSING

    def _list(self, tensor: torch.Tensor) -> object:
        return self._number(tensor, None) if tensor.dim() == 0 else [self._list(row) for row in tensor.unbind(0)]

    def _number(self, tensor: torch.Tensor, kind: type | None) -> object:
        whole = not tensor.is_floating_point()
        if kind is int and not whole:
            if not self.recorder.conditions.take_for_granted(_fake(torch.isfinite(tensor)), True):
                return MISSING
            tensor, whole = tensor.to(torch.int64), True
        elif kind is float and whole:
            tensor, whole = tensor.to(torch.float64), False
        place = self.recorder.user_frames()
        env = self.recorder.mode.shape_env
        assert env is not None
        is_size = whole and place in self.sizes
        if is_size and not self.recorder.conditions.take_for_granted(_fake(torch.ge(tensor, 0)), True):
            return MISSING
        number: Number = env.unbacked(min=-(2**63)) if whole else env.unbacked_float()
        symbol = str(number.node.expr)
        node = self.recorder.graph.call_method("item", (self.recorder.argument(tensor),))
        self.recorder.annotate(node, number)
        self.recorder.calls += 1
        self.recorder.symbol_nodes[symbol] = node
        self.made[symbol] = place
        if whole:
            self._tensors[symbol] = _full(number, torch.int64)
        if is_size:
            self._learn(number.node.ge(number.node.wrap_int(0)))
        return number

    # -- what is known of them -----------------------------------------------------------------

    def check(self, truth: torch.SymBool) -> bool:
        """The program asserts a relation of such numbers: whether the graph takes it for granted from here on."""
        node = node_of(truth)
        expr = node.expr
        if (
            self.recorder.modes
            or node.hint is not None
            or not isinstance(expr, (Relation, FloatRelation))
            or not self._of(expr.symbols())
            or not self._grant(expr)
        ):
            return False
        self._learn(node)
        return True

    def hold(self, facts: Sequence[ShapeGuard]) -> None:
        """Has the graph assert what an operator's own code in C++ has assumed of such numbers.

        Raises:
            NumberAsked: it cannot.
        """
        for fact in facts:
            places = self._of(fact.expr.symbols())
            if places and not self._grant(fact.expr):
                raise NumberAsked(places, as_size=False)

    def _grant(self, expr: BoolExpr) -> bool:
        """Takes a fact for granted, which the graph asserts."""
        met = self._in_floats(expr) if isinstance(expr, FloatRelation) else self._computed(expr)
        return met is not None and self.recorder.conditions.take_for_granted(_fake(met), True)

    def _computed(self, expr: BoolExpr) -> torch.Tensor | None:
        """Whether a fact about whole numbers holds, as a tensor. It is computed of what the numbers were read from, for
        of two that are equal by now the environment keeps one."""
        stack: list[torch.Tensor] = []
        for op, operand in expr.program():
            if op == "sym":
                stack.append(self._value(str(operand)))
            elif op == "const":
                stack.append(_full(operand, torch.int64))
            elif op == "neg":
                stack.append(torch.neg(stack.pop()))
            elif op in _OPERATIONS:
                right, left = stack.pop(), stack.pop()
                stack.append(_OPERATIONS[op](left, right))
            else:
                return None
        return stack[0]

    def _value(self, symbol: str) -> torch.Tensor:
        env = self.recorder.mode.shape_env
        assert env is not None
        known = self._tensors.get(symbol)
        return _full(env.number(symbol_of(symbol)), torch.int64) if known is None else known

    def _in_floats(self, expr: FloatRelation) -> torch.Tensor | None:
        if expr.op not in COMPARE or not expr.holds:
            return None
        env = self.recorder.mode.shape_env
        assert env is not None
        sides = (env.number(expr.left), env.number(expr.right))
        left, right = (_full(side, torch.float64) for side in sides)
        return getattr(torch, expr.op)(left, right)  # type: ignore[no-any-return]

    def _learn(self, node: SymNode) -> None:
        """Tells the relation to the environment, and to that of whoever traces the graph."""
        expr: Any = node.expr
        sides = [self.recorder.argument(node.env.number(side)) for side in (expr.left, expr.right)]
        truth = self.recorder.graph.call_function(COMPARE[expr.op], tuple(sides))
        self.recorder.annotate(truth, torch.SymBool(node))
        check = self.recorder.write_node(torch._check, (truth,))
        check.meta["effect"] = True
        node.env.assume(expr, node.env.assumptions)

    # -- what is asked of them -----------------------------------------------------------------

    def _of(self, symbols: Collection[str]) -> set[Place]:
        env = self.recorder.mode.shape_env
        assert env is not None
        return {self.made[name] for name in env.roots(set(symbols)) if name in self.made}

    def places_of(self, error: BaseException) -> frozenset[Place]:
        """Where the numbers were taken that an error is about: those whose values it asks for, or any where C code does
        not take a symbol for a number."""
        if isinstance(error, DataDependent):
            return frozenset(self._of(error.symbols))
        return frozenset(self.made.values())

    def asked(self, error: DataDependent, as_size: bool) -> None:
        """An error says that the value of a number is needed: raises NumberAsked if it is one of these."""
        places = self._of(error.symbols)
        if places:
            raise NumberAsked(places, as_size) from error
