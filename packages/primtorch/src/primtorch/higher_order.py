"""Operators that run graphs: branches and loops (`control_flow`), attention, a part of the program.

Each is a frozen record that holds its bodies and is called with flat operands, so that a graph has it as the target of
a `call_function` node. Its operands are `sizes` numbers, then tensors; a body takes the same numbers first. A call runs
the bodies as Python would, under whatever autograd records, unless somebody who traces has asked for the call
(`handled_by`): tracing a body is the tracer's business, and so is its derivative.

A derivative is an operator of the same kinds, over bodies that compute a body again and pull the gradients back through
it (`Pullback`): what a body computes is not kept. That of a part of the program (`InvokeSubgraph`) is the tracer's: it
keeps what autograd would. What the transforms of `torch.func` make of a call is such an operator as well, where it has
rules for them (`Transformable`); others show them each operator of their bodies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction

from primtorch.ambient import AutocastState, autocast_state, set_autocast_state
from primtorch.arguments import TensorLike
from primtorch.errors import NoDerivative
from primtorch.frozen import record
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


def current_handler() -> Handler | None:
    """Who takes the calls of this thread."""
    return _HANDLERS.stack[-1] if _HANDLERS.stack else None


def call_body(body: Body, flat: Values) -> Sequence[Any]:
    """Runs a body, so that whoever traces it knows the user's lines in it."""
    handler = _HANDLERS.stack[-1] if _HANDLERS.stack else None
    return body(*flat) if handler is None else handler.run_body(body, flat)


@record
class Derivative:
    """The derivative of a call: the operator, its operands, and for each result the operand that it belongs to, or
    None."""

    operator: HigherOrder
    operands: Values
    places: tuple[int | None, ...]


@record
class Batch:
    """What `vmap` says of a batch: its size, and how random numbers are drawn for its elements."""

    size: Size
    randomness: str


@record
class Transformed:
    """What a transform makes of a call.

    Attributes:
        operator, operands: a call of another operator.
        dims: of a batch, where it lies in each result.
        tangents: of a forward-mode derivative, which results are the tangents of those that are differentiable.
    """

    operator: HigherOrder
    operands: Values
    dims: tuple[int, ...] = ()
    tangents: slice = field(default_factory=lambda: slice(None))


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

    def unasked(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether a call has no derivative where these gradients of its results are there, None for those that are
        not; else the missing ones are zeros."""
        return False

    def differentiated(self, operands: Values) -> Values:
        """The call as one step of autograd's, with the derivative behind it."""
        results: Values = _Differentiated.apply(self, self.keeping(), *operands)  # type: ignore[no-untyped-call]
        return results[: len(self.differentiable)]

    def batched(self, operands: Values, dims: Sequence[int | None], batch: Batch) -> Transformed:
        """Of a call: the call of another operator for all elements of a batch. `dims` tells of each operand where the
        batch lies in it. The results have it where `dims` of what is returned says."""
        raise NoDerivative(f"{self.name} has no rule for batches")

    def pushed(self, operands: Values, tangents: Values) -> Transformed:
        """Of a call: another one, which gives the tangents of the differentiable results. `tangents`: those of the
        operands, None where one has none."""
        raise NoDerivative(f"{self.name} has no forward-mode derivative")

    def _needed(self, operands: Values, needs: Sequence[bool], first: int) -> tuple[int, ...]:
        """Places of the operands from `first` on whose gradients are asked for."""
        return tuple(i for i in range(first, len(operands)) if needs[i])


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


class Transformable(HigherOrder):
    """An operator whose call is one step for the transforms of `torch.func`, which otherwise see into its bodies.

    Where nobody traces, and no transform maps over a batch, the bodies run as Python does: data can be asked for.
    """

    in_place: ClassVar[bool] = False  # whether a trace has its bodies' operators, and no node of the call

    def __call__(self, *operands: object) -> Values:
        if torch._C._are_functorch_transforms_active():
            sees = not _HANDLERS.stack or _HANDLERS.stack[-1] is None
            return self.run(*operands) if sees and not _maps() else self.differentiated(operands)
        if not self.in_place:
            return super().__call__(*operands)
        tensors = (value for value in operands if isinstance(value, torch.Tensor))
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return self.differentiated(operands) if recorded else self.run(*operands)


def _maps() -> bool:
    """Whether a transform that is active maps over a batch."""
    vmap = torch._C._functorch.TransformType.Vmap
    return any(level.key() == vmap for level in torch._C._functorch.get_interpreter_stack() or ())


class _Context(BackwardCFunction):
    """What is kept of a call for its derivative, beside the tensors."""

    operator: HigherOrder
    keeping: HigherOrder  # the operator with what its derivative reads among its results
    numbers: Values  # the operands before the tensors
    casts: AutocastState
    specs: list[TensorSpec]  # of the results
    count: int  # of the operands among the saved tensors


class _Differentiated(torch.autograd.Function):
    """A call, and behind it the call of its derivative. What is kept for that is a result like the others: it has a
    derivative of its own, for whoever differentiates twice."""

    told = True  # a trace has a node of the call

    @staticmethod
    def forward(operator: HigherOrder, keeping: HigherOrder, *operands: object) -> Values:
        given = set(map(id, operands))
        return tuple(value.clone() if id(value) in given else value for value in keeping(*operands))

    @staticmethod
    def setup_context(ctx: _Context, inputs: Values, output: Values) -> None:
        ctx.operator, ctx.keeping, *operands = inputs
        ctx.numbers, tensors = tuple(operands[: ctx.operator.sizes]), operands[ctx.operator.sizes :]
        ctx.casts, ctx.count = autocast_state(), len(tensors)
        ctx.specs = [spec_of(value) for value in output]
        ctx.save_for_backward(*tensors, *_kept(ctx.operator, output))
        ctx.save_for_forward(*tensors)  # type: ignore[no-untyped-call]
        apart = [value for value, has in zip(output, ctx.keeping.differentiable, strict=True) if not has]
        ctx.mark_non_differentiable(*apart)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[object, ...]:
        if ctx.operator.unasked(gradients):
            return (None,) * (2 + len(ctx.needs_input_grad[2:]))
        count = len(ctx.operator.differentiable)
        twice = any(gradient is not None for gradient in gradients[count:])
        operator = ctx.keeping if twice else ctx.operator
        # A pullback that `vjp` gave is called behind it: what was kept is wrapped for a level that is no more.
        saved = tuple(map(torch._C._functorch.unwrap_if_dead, ctx.saved_tensors))
        operands = (*ctx.numbers, *saved[: ctx.count])
        tangents = tuple(
            torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) if gradient is None else gradient
            for gradient, spec, has in zip(gradients, ctx.specs, operator.differentiable, strict=False)
            if has
        )
        with casting(ctx.casts):  # the body runs again as it ran
            derivative = operator.derivative(operands, saved[ctx.count :], tangents, ctx.needs_input_grad[2:])
        results: list[object] = [None] * len(operands)
        for place, gradient in zip(derivative.places, derivative.operator(*derivative.operands), strict=True):
            if place is not None:
                results[place] = gradient
        return None, None, *results

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], operator: HigherOrder, keeping: HigherOrder, *operands: object
    ) -> tuple[Values, tuple[int, ...]]:
        made = keeping.batched(operands, in_dims[2:], Batch(info.batch_size, info.randomness))
        return made.operator(*made.operands), made.dims

    @staticmethod
    def jvp(ctx: _Context, *tangents: torch.Tensor | None) -> Values:
        operands = (*ctx.numbers, *ctx.saved_tensors)
        differentiable = ctx.keeping.differentiable
        with casting(ctx.casts):
            made = ctx.keeping.pushed(operands, tangents[2:])
        found = made.operator(*made.operands)
        rest = iter(found[made.tangents])
        return tuple(next(rest) if has else None for has in differentiable)


def _kept(operator: HigherOrder, results: Values) -> Values:
    """What a call's derivative reads beside the operands."""
    return results if operator.keeps_results else results[len(operator.differentiable) :]


@contextmanager
def casting(state: AutocastState) -> Iterator[None]:
    """A block in a state of autocast."""
    before = autocast_state()
    set_autocast_state(state)
    try:
        yield
    finally:
        set_autocast_state(before)


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
