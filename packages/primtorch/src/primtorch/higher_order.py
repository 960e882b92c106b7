"""Operators that run graphs: a branch, a loop over slices, a loop while a condition holds, a part of the program.

Each is a frozen record that holds its bodies and is called with flat operands, so that a graph has it as the target of
a `call_function` node. Its operands are `sizes` numbers, then tensors; a body takes the same numbers first. A call runs
the bodies as Python would, under whatever autograd records, unless somebody who traces has asked for the call
(`handled_by`): tracing a body is the tracer's business, and so is its derivative.

A derivative is an operator of the same kinds, over bodies that compute a body again and pull the gradients back through
it (`Pullback`): what a body computes is not kept. That of a part of the program (`InvokeSubgraph`) is the tracer's: it
keeps what autograd would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from primtorch.ambient import AutocastState, autocast_state, set_autocast_state
from primtorch.arguments import TensorLike
from primtorch.errors import NoDerivative
from primtorch.ledger import Effect, Kind
from primtorch.spec import Size, TensorSpec, spec_of

Body = Callable[..., Sequence[Any]]
Values = tuple[Any, ...]


class Handler(Protocol):
    """Somebody who traces a program."""

    def __call__(self, operator: HigherOrder, operands: Values) -> Values:
        """A call of an operator in the program."""

    def run_body(self, body: Body, flat: Values) -> Sequence[object]:
        """A body of an operator, whose graph is being traced."""


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


def call_body(body: Body, flat: Values) -> Sequence[Any]:
    """Runs a body, so that whoever traces it knows the user's lines in it."""
    handler = _HANDLERS.stack[-1] if _HANDLERS.stack else None
    return body(*flat) if handler is None else handler.run_body(body, flat)


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
        again: whether bodies do again what another operator's have done.
    """

    bodies: tuple[Body, ...]
    sizes: int
    differentiable: tuple[bool, ...]
    tags: frozenset[str] = field(default=frozenset(), kw_only=True)
    again: bool = field(default=False, kw_only=True)

    labels: ClassVar[tuple[str, ...]]
    name: ClassVar[str]
    alike: ClassVar[bool] = False  # whether all bodies give results of one layout
    keeps_results: ClassVar[bool] = False  # whether its derivative reads its results, as what is kept

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *operands: object) -> Values:
        handler = _HANDLERS.stack[-1] if _HANDLERS.stack else None
        return self.run(*operands) if handler is None else handler(self, operands)

    def run(self, *operands: object) -> Values:
        """The call in Python, body by body."""
        raise NotImplementedError

    def _runners(self) -> list[Body]:
        """The bodies as they are called: a graph by its `forward`, past what a module does around that."""
        return [body.forward if isinstance(body, fx.GraphModule) else body for body in self.bodies]

    def given(self, operands: Values) -> tuple[Values, ...]:
        """What each body is given, numbers aside: tensors, or descriptors of what the loop makes of them."""
        raise NotImplementedError

    def results(self, operands: Values, found: Sequence[Sequence[TensorLike]]) -> tuple[TensorSpec, ...]:
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

    def run(self, *operands: object) -> Values:
        numbers, predicate, rest = operands[: self.sizes], operands[self.sizes], operands[self.sizes + 1 :]
        return tuple(self._runners()[0 if bool(predicate) else 1](*numbers, *rest))

    def given(self, operands: Values) -> tuple[Values, ...]:
        return (operands[self.sizes + 1 :],) * len(self.bodies)

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        return tuple(map(spec_of, found[0]))

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        first = self.sizes + 1
        wanted = self._needed(operands, needs, first)
        pull = [
            Pullback(body, len(operands) - 1, tuple(i - 1 for i in wanted), self.differentiable, autocast_state())
            for body in self.bodies
        ]
        operator = Cond(tuple(pull), self.sizes, (True,) * len(wanted), again=True)
        return Derivative(operator, (*operands, *tangents), wanted)


@dataclass(frozen=True, eq=False, repr=False)
class Scan(HigherOrder):
    """A loop over the slices of tensors along their first dimension.

    Operands: numbers, what the body closes over, `carries` tensors, `mapped` tensors of one length. The body takes them
    with a slice in the place of each mapped tensor, and gives the next carries, then a row of each further result.
    Results: the last carries, then the rows, stacked. Carries are row-major. With `reverse` the last slice is the
    first; a row stands where its slice does.
    """

    carries: int = field(kw_only=True)
    mapped: int = field(kw_only=True)
    reverse: bool = field(default=False, kw_only=True)

    labels = ("step",)
    name = "scan"

    def run(self, *operands: object) -> Values:
        (step,) = self._runners()
        around, carry, mapped = self._parts(operands)
        carry = tuple(value.contiguous() for value in carry)
        length = mapped[0].shape[0]
        rows: list[Sequence[torch.Tensor]] = [()] * length
        for place in reversed(range(length)) if self.reverse else range(length):
            found = step(*around, *carry, *(value[place] for value in mapped))
            carry = tuple(value.contiguous() for value in found[: self.carries])
            rows[place] = found[self.carries :]
        return (*carry, *map(torch.stack, zip(*rows, strict=True)))

    def _parts(self, operands: Values) -> tuple[Values, Values, Values]:
        """(numbers and what is closed over, carries, mapped tensors)"""
        last = len(operands) - self.mapped
        return operands[: last - self.carries], operands[last - self.carries : last], operands[last:]

    def given(self, operands: Values) -> tuple[Values, ...]:
        around, carry, mapped = self._parts(operands)
        return ((*around[self.sizes :], *map(_as_carry, carry), *map(slice_of, mapped)),)

    def results(self, operands: Values, found: Sequence[Sequence[TensorLike]]) -> tuple[TensorSpec, ...]:
        length = operands[-1].shape[0]
        carry, rows = found[0][: self.carries], found[0][self.carries :]
        return (*map(_as_carry, carry), *(row_major((length, *row.shape), row) for row in rows))

    def keeping(self) -> HigherOrder:
        """Its further results are the carries that each step was given."""
        history = (*self.differentiable, *self.differentiable[: self.carries])
        return replace(self, bodies=(_Keeping(self.bodies[0], self.carries, self.mapped),), differentiable=history)

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        """The loop the other way round: it carries the gradients of the carries, and sums those of what the body closes
        over."""
        around, _, mapped = self._parts(operands)
        first, last = len(around), len(around) + self.carries
        closed = tuple(i for i in range(self.sizes, first) if needs[i])
        carried = tuple(first + i for i in range(self.carries) if self.differentiable[i])
        sliced = self._needed(operands, needs, last)
        wanted = (*closed, *carried, *sliced)
        pull = Pullback(self.bodies[0], len(operands), wanted, self.differentiable, autocast_state())
        step = _BackwardStep(pull, first, len(carried), len(closed))
        sums = tuple(torch.zeros_like(operands[i]) for i in closed)
        rows = (value.contiguous() for value in tangents[len(carried) :])  # as what is kept: no slice tells the length
        inputs = (*around, *tangents[: len(carried)], *sums, *kept, *mapped, *rows)
        operator = Scan(
            (step,),
            self.sizes,
            (True,) * len(wanted),
            carries=len(carried) + len(closed),
            mapped=len(inputs) - first - len(carried) - len(closed),
            reverse=not self.reverse,
            again=True,
        )
        return Derivative(operator, inputs, (*carried, *closed, *sliced))


@dataclass(frozen=True, eq=False, repr=False)
class _Keeping:
    """A step that gives the carries that it is given, too."""

    step: Body
    carries: int
    mapped: int

    def __call__(self, *flat: object) -> Values:
        last = len(flat) - self.mapped
        return (*call_body(self.step, flat), *flat[last - self.carries : last])


@dataclass(frozen=True, eq=False, repr=False)
class _BackwardStep:
    """The derivative of a step as a step: (what it closes over, gradients of carries, sums, carries, slices, gradients
    of rows) -> (gradients of carries, sums, gradients of slices)."""

    pull: Pullback
    around: int
    carried: int
    closed: int

    def __call__(self, *flat: object) -> Values:
        first, middle, last = self.around, self.around + self.carried, self.around + self.carried + self.closed
        inputs = (*flat[:first], *flat[last : last + self.pull.inputs - first])
        rows = flat[last + self.pull.inputs - first :]
        found = self.pull(*inputs, *flat[first:middle], *rows)
        closed, carried = found[: self.closed], found[self.closed : self.closed + self.carried]
        sums = [total + more for total, more in zip(flat[middle:last], closed, strict=True)]
        return (*carried, *sums, *found[self.closed + self.carried :])


@dataclass(frozen=True, eq=False, repr=False)
class WhileLoop(HigherOrder):
    """Steps as long as a condition, a tensor of one element, holds of the carries.

    Operands: numbers, what the bodies close over, `carries` tensors. Both bodies take them all; the results are the
    last carries, row-major.
    """

    carries: int = field(kw_only=True)

    labels = ("condition", "step")
    name = "while_loop"

    def run(self, *operands: Any) -> Values:
        first = tuple(value.contiguous() for value in operands[-self.carries :])
        *_, last = self._states(operands[: -self.carries], first)
        return tuple(value.clone() for value in last) if last is first else last

    def _states(self, around: Values, carry: Values) -> Iterator[Values]:
        """The carries before each step, and behind the last."""
        condition, step = self._runners()
        yield carry
        while bool(condition(*around, *carry)[0]):
            carry = tuple(value.contiguous() for value in step(*around, *carry))
            yield carry

    def given(self, operands: Values) -> tuple[Values, ...]:
        around, carry = operands[self.sizes : -self.carries], operands[-self.carries :]
        return ((*around, *map(_as_carry, carry)),) * 2

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        return tuple(map(_as_carry, operands[-self.carries :]))

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        first = len(operands) - self.carries
        closed = tuple(i for i in range(self.sizes, first) if needs[i])
        carried = tuple(first + i for i in range(self.carries) if self.differentiable[i])
        pull = Pullback(self.bodies[1], len(operands), (*closed, *carried), self.differentiable, autocast_state())
        operator = WhileLoopDerivative(
            (*self.bodies, pull),
            self.sizes,
            (True,) * len(pull.wanted),
            loop=replace(self),
            closed=tuple(i - self.sizes for i in closed),
            carried=len(carried),
            again=True,
        )
        return Derivative(operator, (*operands, *tangents), pull.wanted)


@dataclass(frozen=True, eq=False, repr=False)
class WhileLoopDerivative(HigherOrder):
    """The loop again, and then its steps' derivatives from the last to the first: how many there are only the data
    tells, so that nothing is kept of them.

    Operands: those of the loop, then the gradients of `carried` of its results. Results: the gradients of what is
    `closed` over (places behind the numbers), then those of the carries.
    """

    loop: WhileLoop = field(kw_only=True)
    closed: tuple[int, ...] = field(kw_only=True)
    carried: int = field(kw_only=True)

    labels = ("condition", "step", "backward_step")
    name = "while_loop_derivative"

    def run(self, *operands: object) -> Values:
        loop = replace(self.loop, bodies=self.bodies[:2], sizes=self.sizes)
        backward_step = self._runners()[2]
        around, carry, gradients = self._parts(operands)
        sums = [torch.zeros_like(around[self.sizes + i], memory_format=torch.contiguous_format) for i in self.closed]
        *before, _ = loop._states(around, tuple(value.contiguous() for value in carry))
        gradients = tuple(value.clone(memory_format=torch.contiguous_format) for value in gradients)
        for state in reversed(before):
            found = backward_step(*around, *state, *gradients)
            sums = [total + more for total, more in zip(sums, found[: len(sums)], strict=True)]
            gradients = tuple(value.contiguous() for value in found[len(sums) :])
        return (*(total.contiguous() for total in sums), *gradients)

    def _parts(self, operands: Values) -> tuple[Values, Values, Values]:
        last = len(operands) - self.carried
        first = last - self.loop.carries
        return operands[:first], operands[first:last], operands[last:]

    def given(self, operands: Values) -> tuple[Values, ...]:
        around, carry, gradients = self._parts(operands)
        of_loop = (*around[self.sizes :], *map(_as_carry, carry))
        return of_loop, of_loop, (*of_loop, *map(_as_carry, gradients))

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        around, _, gradients = self._parts(operands)
        return tuple(map(_as_carry, (*(around[self.sizes + i] for i in self.closed), *gradients)))


def _as_carry(value: TensorLike) -> TensorSpec:
    return row_major(value.shape, value)


@dataclass(frozen=True, eq=False, repr=False)
class InvokeSubgraph(HigherOrder):
    """A part of the program that the program calls several times: `region(*operands)`.

    Calls of one body share it, so that it is traced, lowered and compiled once for operands that are alike. A body as
    captured may do what a program may: write to its operands, give views of them. One that was traced is functional.
    """

    labels = ("region",)
    name = "invoke_subgraph"

    def run(self, *operands: object) -> Values:
        return tuple(self._runners()[0](*operands))

    def given(self, operands: Values) -> tuple[Values, ...]:
        return (operands[self.sizes :],)

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        return tuple(map(spec_of, found[0]))


REGION_IN_PLACE = Kind(
    "region_in_place",
    "a call of a function marked with nested_compile_region is compiled as a part of the graph around it, and not once"
    " for all calls: the function does what a graph of its own cannot, or its results are tied to what is around it",
    "nothing, as its values are the same; for one compilation let the function take and return tensors, and give no"
    " result that another of its results is computed from",
    Effect.PLAIN,
)


def slice_of(value: object) -> TensorSpec:
    """The metadata of a slice along the first dim."""
    spec = spec_of(value)
    return TensorSpec(spec.shape[1:], spec.strides[1:], spec.dtype, spec.device)


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
    casts: AutocastState

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
                found = call_body(self.body, tuple(inputs))
            finally:
                set_autocast_state(before)
            results = [value for value, has in zip(found, self.differentiable, strict=True) if has]
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            wanted = [inputs[place] for place in self.wanted]
            pulled: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                of, by = zip(*pairs, strict=True)
                pulled = torch.autograd.grad(of, wanted, by, allow_unused=True, create_graph=again)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, pulled, strict=True))


def row_major(shape: Sequence[Size], like: TensorLike) -> TensorSpec:
    """A tensor of this shape laid out row by row, of the dtype and device of `like`."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step = step * size
    return TensorSpec(tuple(shape), tuple(reversed(strides)), like.dtype, torch.device(like.device))


def with_bodies(operator: HigherOrder, bodies: Sequence[Body], **changed: Any) -> HigherOrder:
    """The operator over other bodies that compute the same."""
    return replace(operator, bodies=tuple(bodies), **changed)
