"""Branches and loops as operators over graphs, with their derivatives and what transforms make of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from primtorch.ambient import autocast_state
from primtorch.arguments import TensorLike
from primtorch.body_transforms import Batched, Pullback, Pushforward, batch_first, in_batch
from primtorch.errors import NoDerivative
from primtorch.higher_order import (
    Batch,
    Body,
    Derivative,
    HigherOrder,
    Transformable,
    Transformed,
    Values,
    call_body,
    row_major,
    slice_of,
)
from primtorch.spec import TensorSpec, spec_of


@dataclass(frozen=True, eq=False, repr=False)
class Cond(Transformable):
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
        operator = replace(self, bodies=tuple(pull), differentiable=(True,) * len(wanted), again=True)
        return Derivative(operator, (*operands, *tangents), wanted)

    def pushed(self, operands: Values, tangents: Values) -> Transformed:
        first = self.sizes + 1
        wanted = tuple(i for i in range(first, len(operands)) if tangents[i] is not None)
        places = tuple(i - 1 for i in wanted)
        push = tuple(
            _Tangents(Pushforward(body, len(operands) - 1, places, self.differentiable, autocast_state()))
            for body in self.bodies
        )
        operator = replace(self, bodies=push, differentiable=(True,) * sum(self.differentiable), again=True)
        return Transformed(operator, (*operands, *(tangents[i] for i in wanted)))

    def batched(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        """Where the batch has one predicate, the branch is chosen for all of it; else each element takes its own
        branch's results, and both are run."""
        first, out = self.sizes + 1, (0,) * len(self.differentiable)
        numbers, predicate, rest = operands[: self.sizes], operands[self.sizes], operands[first:]
        if dims[self.sizes] is None:
            moved = (*numbers, *map(batch_first, rest, dims[first:]))
            within = (*dims[: self.sizes], *(None if dim is None else 0 for dim in dims[first:]))
            made = replace(self, bodies=tuple(Batched(body, within, batch) for body in self.bodies))
            return Transformed(made, (*numbers, predicate, *moved[self.sizes :]), out)
        return self._chosen_for_each(operands, dims, batch)

    def _chosen_for_each(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        numbers, tensors = operands[: self.sizes], operands[self.sizes :]
        whole = tuple(in_batch(value, dim, batch) for value, dim in zip(tensors, dims[self.sizes :], strict=True))
        within = (*(None for _ in numbers), *(0 for _ in tensors[1:]))
        made = ChosenForEach(
            tuple(Batched(body, within, batch) for body in self.bodies),
            self.sizes,
            self.differentiable,
            again=self.again,
        )
        return Transformed(made, (*numbers, *whole), (0,) * len(self.differentiable))


@dataclass(frozen=True, eq=False, repr=False)
class ChosenForEach(Cond):
    """A branch for each element of a batch: the predicate, and all that the branches are given, are of the batch.

    Its derivative chooses, too: what the other branch would have for a gradient (a NaN, where it is not defined) is
    not added.
    """

    in_place = True

    def run(self, *operands: object) -> Values:
        numbers, rest = operands[: self.sizes], operands[self.sizes + 1 :]
        predicate = cast(torch.Tensor, operands[self.sizes])
        pairs = zip(*(body(*numbers, *rest) for body in self._runners()), strict=True)
        return tuple(
            torch.where(predicate.reshape(*predicate.shape, *(1,) * (a.dim() - predicate.dim())), a, b)
            for a, b in pairs
        )

    def batched(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        return self._chosen_for_each(operands, dims, batch)


@dataclass(frozen=True, eq=False, repr=False)
class _Tangents:
    """The tangents alone of what is pushed through a body."""

    push: Pushforward

    def __call__(self, *flat: object) -> Values:
        return self.push(*flat)[1]


@dataclass(frozen=True, eq=False, repr=False)
class Scan(Transformable):
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

    def pushed(self, operands: Values, tangents: Values) -> Transformed:
        """The same loop, which carries the carries' tangents behind them."""
        around, carry, mapped = self._parts(operands)
        first, last = len(around), len(around) + len(carry)
        closed = _known(tangents, self.sizes, first)
        carried = tuple(first + i for i in range(self.carries) if self.differentiable[i])
        sliced = _known(tangents, last, len(operands))
        wanted = (*closed, *carried, *sliced)
        push = Pushforward(self.bodies[0], len(operands), wanted, self.differentiable, autocast_state())
        counts = (first, len(closed), self.carries, len(carried), self.mapped)
        inputs = (
            *around,
            *(tangents[i] for i in closed),
            *carry,
            *(_tangent(operands, tangents, i) for i in carried),
            *mapped,
            *(tangents[i] for i in sliced),
        )
        rows = sum(self.differentiable[self.carries :])
        operator = Scan(
            (_PushedStep(push, counts),),
            self.sizes,
            (*self.differentiable[: self.carries], *(True,) * (len(carried) + rows)),
            carries=self.carries + len(carried),
            mapped=self.mapped + len(sliced),
            reverse=self.reverse,
            again=True,
        )
        return Transformed(operator, inputs, tangents=slice(self.carries, None))

    def batched(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        """The same loop over slices for the whole batch, whose carries are."""
        around, carry, mapped = self._parts(operands)
        around_dims, carry_dims, mapped_dims = self._parts(tuple(dims))
        carry = tuple(in_batch(value, dim, batch) for value, dim in zip(carry, carry_dims, strict=True))
        mapped = tuple(batch_first(value, dim, 1) for value, dim in zip(mapped, mapped_dims, strict=True))
        within = (
            *(None if dim is None else 0 for dim in around_dims),
            *(0,) * self.carries,
            *(None if dim is None else 0 for dim in mapped_dims),
        )
        made = replace(self, bodies=(Batched(self.bodies[0], within, batch),))
        rows = len(self.differentiable) - self.carries
        operands = (*map(batch_first, around, around_dims), *carry, *mapped)
        return Transformed(made, operands, (*(0,) * self.carries, *(1,) * rows))


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
class _PushedStep:
    """A step with tangents: (what it closes over, tangents of it, carries, tangents, slices, tangents) -> (carries,
    their tangents, tangents of rows). `counts`: how many there are of each, but for the last."""

    push: Pushforward
    counts: tuple[int, int, int, int, int]

    def __call__(self, *flat: object) -> Values:
        ends = list(itertools.accumulate(self.counts, initial=0))
        around, closed, carry, carried, mapped = (flat[a:b] for a, b in itertools.pairwise(ends))
        found, tangents = self.push(*around, *carry, *mapped, *closed, *carried, *flat[ends[-1] :])
        return (*found[: len(carry)], *tangents)


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
class WhileLoop(Transformable):
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

    def pushed(self, operands: Values, tangents: Values) -> Transformed:
        """The same loop, which carries the carries' tangents behind them."""
        around, carry = operands[: -self.carries], operands[-self.carries :]
        first = len(around)
        closed = _known(tangents, self.sizes, first)
        carried = tuple(first + i for i in range(self.carries) if self.differentiable[i])
        push = Pushforward(self.bodies[1], len(operands), (*closed, *carried), self.differentiable, autocast_state())
        counts = (first, len(closed), self.carries, len(carried), 0)
        operator = WhileLoop(
            (_OfPrimals(self.bodies[0], counts), _PushedStep(push, counts)),
            self.sizes,
            (*self.differentiable, *(True,) * len(carried)),
            carries=self.carries + len(carried),
            again=True,
        )
        tangents_of = tuple(_tangent(operands, tangents, i) for i in carried)
        inputs = (*around, *(tangents[i] for i in closed), *carry, *tangents_of)
        return Transformed(operator, inputs, tangents=slice(self.carries, None))

    def batched(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        """Steps as long as the condition holds of any element; the carries of the others stay as they are."""
        around, around_dims = operands[: -self.carries], dims[: -self.carries]
        carry = tuple(
            in_batch(value, dim, batch)
            for value, dim in zip(operands[-self.carries :], dims[-self.carries :], strict=True)
        )
        within = (*(None if dim is None else 0 for dim in around_dims), *(0,) * self.carries)
        condition, step = self.bodies
        step = _WhileItHolds(condition, step, self.sizes, self.carries, self.differentiable)
        bodies = (_OfAny(Batched(condition, within, batch)), Batched(step, within, batch))
        inputs = (*map(batch_first, around, around_dims), *carry)
        return Transformed(replace(self, bodies=bodies), inputs, (0,) * self.carries)


@dataclass(frozen=True, eq=False, repr=False)
class _OfPrimals:
    """The condition of a loop whose carries have tangents, which it does not ask for. `counts`: of `_PushedStep`."""

    condition: Body
    counts: tuple[int, int, int, int, int]

    def __call__(self, *flat: object) -> Sequence[object]:
        first, closed, carries, *_ = self.counts
        return call_body(self.condition, (*flat[:first], *flat[first + closed : first + closed + carries]))


@dataclass(frozen=True, eq=False, repr=False)
class _OfAny:
    """Whether a condition holds of any element of a batch."""

    condition: Batched

    def __call__(self, *flat: object) -> Values:
        return (self.condition(*flat)[0].any(),)


@dataclass(frozen=True, eq=False, repr=False)
class _WhileItHolds:
    """A step where the condition holds of the carries, and the carries where it does not."""

    condition: Body
    step: Body
    sizes: int
    carries: int
    differentiable: tuple[bool, ...]

    def __call__(self, *flat: Any) -> Values:
        (holds,) = call_body(self.condition, flat)
        stay = lambda *given: tuple(value.clone() for value in given[-self.carries :])
        chosen = Cond((self.step, stay), self.sizes, self.differentiable)
        return chosen(*flat[: self.sizes], holds, *flat[self.sizes :])


@dataclass(frozen=True, eq=False, repr=False)
class WhileLoopDerivative(Transformable):
    """The loop again, and then its steps' derivatives from the last to the first: how many there are only the data
    tells, so that nothing is kept of them.

    Operands: those of the loop, then the gradients of `carried` of its results. Results: the gradients of what is
    `closed` over (places behind the numbers), then those of the carries, and with `values` the loop's results.

    Its own derivatives are those of the loop with tangents: by symmetry, the derivative of J^T g along v is the
    gradient of g J v.
    """

    loop: WhileLoop = field(kw_only=True)
    closed: tuple[int, ...] = field(kw_only=True)
    carried: int = field(kw_only=True)
    values: bool = field(default=False, kw_only=True)

    labels = ("condition", "step", "backward_step")
    name = "while_loop_derivative"

    def run(self, *operands: object) -> Values:
        loop, backward_step = self._traced(), self._runners()[2]
        around, carry, gradients = self._parts(operands)
        sums = [torch.zeros_like(around[self.sizes + i], memory_format=torch.contiguous_format) for i in self.closed]
        *before, last = loop._states(around, tuple(value.contiguous() for value in carry))
        gradients = tuple(value.clone(memory_format=torch.contiguous_format) for value in gradients)
        for state in reversed(before):
            found = backward_step(*around, *state, *gradients)
            sums = [total + more for total, more in zip(sums, found[: len(sums)], strict=True)]
            gradients = tuple(value.contiguous() for value in found[len(sums) :])
        values = tuple(value.clone() for value in last) if self.values else ()
        return (*(total.contiguous() for total in sums), *gradients, *values)

    def batched(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        """The derivative of the loop for the batch, each of whose elements has gradients of its own."""
        whole = [
            value if place < self.sizes else in_batch(value, dim, batch)
            for place, (value, dim) in enumerate(zip(operands, dims, strict=True))
        ]
        last = len(operands) - self.carried
        loop = self._traced().batched(tuple(whole[:last]), [None] * self.sizes + [0] * (last - self.sizes), batch)
        needs = [place - self.sizes in self.closed for place in range(last)]
        made = loop.operator.derivative(loop.operands, (), tuple(whole[last:]), needs)
        operator = replace(cast(WhileLoopDerivative, made.operator), values=self.values)
        return Transformed(operator, made.operands, (0,) * len(self.differentiable))

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        """Gradients of what the loop is given, and as the tangents at its end those of the gradients it is given."""
        self._refuse_another()
        first, last = self._ends(operands)
        of_loop: list[object] = [None] * last
        carried = [first + i for i in range(self.loop.carries) if self.loop.differentiable[i]]
        for place, tangent in zip((*(self.sizes + i for i in self.closed), *carried), tangents, strict=True):
            of_loop[place] = tangent
        along = self._traced().pushed(operands[:last], tuple(of_loop))
        zeros = tuple(torch.zeros_like(operands[last + i]) for i in range(self.carried))
        made = self._pulled(along, (*zeros, *operands[last:]), [i for i in range(self.sizes, first) if needs[i]])
        places: list[int | None] = [*made.places[: len(made.places) - 2 * self.carried], *carried]
        places += [None] * self.carried  # of the tangents along which the derivative is taken
        if not any(needs[last:]):
            return Derivative(made.operator, made.operands, tuple(places))
        ends = (*(None for _ in range(self.loop.carries)), *range(last, len(operands)))
        differentiable = (*made.operator.differentiable, *along.operator.differentiable)
        operator = replace(cast(WhileLoopDerivative, made.operator), values=True, differentiable=differentiable)
        return Derivative(operator, made.operands, (*places, *ends))

    def pushed(self, operands: Values, tangents: Values) -> Transformed:
        self._refuse_another()
        _, last = self._ends(operands)
        along = self._traced().pushed(operands[:last], tangents[:last])
        of_gradients = tuple(_tangent(operands, tangents, last + i) for i in range(self.carried))
        made = self._pulled(along, (*of_gradients, *operands[last:]), [self.sizes + i for i in self.closed])
        return Transformed(made.operator, made.operands, tangents=slice(len(self.closed) + self.carried))

    def _pulled(self, along: Transformed, gradients: Values, closed: Sequence[int]) -> Derivative:
        """The derivative of the loop with tangents, by its carries and what is closed over at these places."""
        needs = [place in closed for place in range(len(along.operands))]
        return along.operator.derivative(along.operands, (), gradients, needs)

    def _traced(self) -> WhileLoop:
        """The loop over the bodies that there are now, with the numbers that they take."""
        return replace(self.loop, bodies=self.bodies[:2], sizes=self.sizes)

    def _refuse_another(self) -> None:
        if self.values:
            raise NoDerivative("while_loop has no third derivative")

    def _ends(self, operands: Values) -> tuple[int, int]:
        """Where the carries begin, and the gradients."""
        last = len(operands) - self.carried
        return last - self.loop.carries, last

    def _parts(self, operands: Values) -> tuple[Values, Values, Values]:
        first, last = self._ends(operands)
        return operands[:first], operands[first:last], operands[last:]

    def given(self, operands: Values) -> tuple[Values, ...]:
        around, carry, gradients = self._parts(operands)
        of_loop = (*around[self.sizes :], *map(_as_carry, carry))
        return of_loop, of_loop, (*of_loop, *map(_as_carry, gradients))

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        around, carry, gradients = self._parts(operands)
        values = carry if self.values else ()
        return tuple(map(_as_carry, (*(around[self.sizes + i] for i in self.closed), *gradients, *values)))


def _as_carry(value: TensorLike) -> TensorSpec:
    return row_major(value.shape, value)


def _known(tangents: Sequence[object], first: int, last: int) -> tuple[int, ...]:
    """The places of the tangents that there are."""
    return tuple(i for i in range(first, last) if tangents[i] is not None)


def _tangent(operands: Values, tangents: Values, place: int) -> Any:
    return torch.zeros_like(operands[place]) if tangents[place] is None else tangents[place]
