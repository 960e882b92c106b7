"""Operators that run graphs: a branch, a loop over slices, a loop while a condition holds.

Each is a frozen record that holds its bodies and is called with flat operands, so that a graph has it as the target of
a `call_function` node. Its operands are `sizes` numbers, then tensors; a body takes the same numbers first. A call runs
the bodies as Python would, under whatever autograd records, unless somebody who traces has asked for the call
(`handled_by`): tracing a body is the tracer's business, and so is its derivative.

A derivative is an operator of the same kinds, over bodies that compute a body again and pull the gradients back through
it (`Pullback`): what a body computes is not kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from primtorch.ambient import autocast_state, set_autocast_state
from primtorch.errors import NoDerivative
from primtorch.spec import TensorSpec

Body = Callable[..., Sequence[Any]]
Values = tuple[Any, ...]
Handler = Callable[["HigherOrder", Values], Values]


class _Handlers(threading.local):
    """Who takes the calls of this thread, the innermost last; None: nobody, they run."""

    def __init__(self) -> None:
        self.stack: list[Handler | None] = []


_HANDLERS = _Handlers()


@contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """A block in which calls of these operators go to `handler`, whoever makes them."""
    _HANDLERS.stack.append(handler)
    try:
        yield
    finally:
        _HANDLERS.stack.pop()


@dataclass(frozen=True, slots=True)
class Derivative:
    """The derivative of a call: the operator, its operands, and for each result the operand that it belongs to."""

    operator: HigherOrder
    operands: Values
    places: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class HigherOrder:
    """An operator over bodies.

    Attributes:
        bodies: graphs, or callables like them; `labels` says what each is for.
        sizes: how many of the operands are numbers; they come first, and every body takes them.
        differentiable: for each result, whether it has a history where an operand that requires a gradient is given.
        tags: "random", "effect": what a body does beside giving results.
    """

    bodies: tuple[Body, ...]
    sizes: int
    differentiable: tuple[bool, ...]
    tags: frozenset[str] = field(default=frozenset(), kw_only=True)

    labels: ClassVar[tuple[str, ...]]
    name: ClassVar[str]
    alike: ClassVar[bool] = False  # whether all bodies give results of one layout

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *operands: Any) -> Values:
        handler = _HANDLERS.stack[-1] if _HANDLERS.stack else None
        return self.run(*operands) if handler is None else handler(self, operands)

    def run(self, *operands: Any) -> Values:
        """The call in Python, body by body."""
        raise NotImplementedError

    def given(self, operands: Values) -> tuple[Values, ...]:
        """What each body is given, numbers aside: tensors, or descriptors of what the loop makes of them."""
        raise NotImplementedError

    def results(self, operands: Values, found: Sequence[Sequence[Any]]) -> tuple[TensorSpec, ...]:
        """Descriptors of the results, from what each body gives."""
        raise NotImplementedError

    def keeping(self) -> HigherOrder:
        """The same operator, whose further results are what its derivative reads beside the operands."""
        return self

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        """Of a call: `kept` are the further results of `keeping`, `tangents` the gradients of the differentiable
        results, `needs` tells of each operand whether its gradient is asked for."""
        raise NoDerivative(f"{self.name} has no derivative")

    def _needed(self, operands: Values, needs: Sequence[bool], first: int) -> tuple[int, ...]:
        """Places of the operands from `first` on whose gradients are asked for."""
        return tuple(i for i in range(first, len(operands)) if needs[i])


@dataclass(frozen=True, eq=False, repr=False)
class Cond(HigherOrder):
    """`if_true(*operands) if predicate else if_false(*operands)`; the predicate, of one element, is read once."""

    labels = ("if_true", "if_false")
    name = "cond"
    alike = True

    def run(self, *operands: Any) -> Values:
        numbers, predicate, rest = operands[: self.sizes], operands[self.sizes], operands[self.sizes + 1 :]
        return tuple(self.bodies[0 if bool(predicate) else 1](*numbers, *rest))

    def given(self, operands: Values) -> tuple[Values, ...]:
        return (operands[self.sizes + 1 :],) * len(self.bodies)

    def results(self, operands: Values, found: Sequence[Sequence[Any]]) -> tuple[TensorSpec, ...]:
        return tuple(map(spec_of, found[0]))

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        first = self.sizes + 1
        wanted = self._needed(operands, needs, first)
        pull = [
            Pullback(body, len(operands) - 1, tuple(i - 1 for i in wanted), self.differentiable, autocast_state())
            for body in self.bodies
        ]
        operator = Cond(tuple(pull), self.sizes, (True,) * len(wanted))
        return Derivative(operator, (*operands, *tangents), wanted)


@dataclass(frozen=True, eq=False, repr=False)
class Pullback:
    """A body's vector-Jacobian product: (inputs, gradients of the differentiable results) -> gradients of inputs.

    Attributes:
        inputs: how many inputs the body has, numbers included.
        wanted: places of the inputs whose gradients are given; zeros where the results do not depend on one.
        differentiable: for each result, whether it has a gradient.
        casts: the state of autocast in which the body runs.
    """

    body: Body
    inputs: int
    wanted: tuple[int, ...]
    differentiable: tuple[bool, ...]
    casts: Any

    def __call__(self, *flat: Any) -> Values:
        again = torch.is_grad_enabled()  # somebody takes a derivative of this one
        inputs, gradients = list(flat[: self.inputs]), flat[self.inputs :]
        with torch.enable_grad():
            for place in self.wanted:
                given = inputs[place]
                inputs[place] = given.view_as(given) if given.requires_grad else given.detach().requires_grad_()
            before = autocast_state()
            set_autocast_state(self.casts)
            try:
                found = self.body(*inputs)
            finally:
                set_autocast_state(before)
            results = [value for value, has in zip(found, self.differentiable, strict=True) if has]
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            wanted = [inputs[place] for place in self.wanted]
            pulled: Sequence[Any] = [None] * len(wanted)
            if pairs and wanted:
                of, by = zip(*pairs, strict=True)
                pulled = torch.autograd.grad(of, wanted, by, allow_unused=True, create_graph=again)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, pulled, strict=True))


def spec_of(value: Any) -> TensorSpec:
    return value if isinstance(value, TensorSpec) else TensorSpec.of(value)


def row_major(shape: Sequence[Any], like: Any) -> TensorSpec:
    """A tensor of this shape laid out row by row, of the dtype and device of `like`."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step = step * size
    return TensorSpec(tuple(shape), tuple(reversed(strides)), like.dtype, torch.device(like.device))


def with_bodies(operator: HigherOrder, bodies: Sequence[Body], **changed: Any) -> HigherOrder:
    """The operator over other bodies that compute the same."""
    return replace(operator, bodies=tuple(bodies), **changed)
