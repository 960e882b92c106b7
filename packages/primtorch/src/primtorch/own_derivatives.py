"""Functions with a derivative of their own (`torch.autograd.Function`) as operators over two graphs.

`OwnDerivative` has the forward and the backward for bodies. Whoever has captured such a function offers it to the trace
that it runs in (`TakesFunctions.custom_function`), which makes a node of it where a derivative may be asked for; a
graph that runs calls it as one step of autograd's. What autograd would keep for the backward are operands and results
of the call.

A trace that runs such a function has its operators, and is told of the calls (`FollowsFunctions`): what a derivative of
them is taken of, the operators do not say. That of a backward is taken of a `FunctionBackward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction, once_differentiable

from primtorch.arguments import TensorLike
from primtorch.frozen import record
from primtorch.higher_order import Body, Derivative, Handler, HigherOrder, InvokeSubgraph, Values, current_handler
from primtorch.once import cached_property
from primtorch.spec import TensorSpec, spec_of


@record
class CustomFunction:
    """A function as it was captured.

    Attributes:
        name: of the class.
        forward: of inputs; gives the results, then what the backward reads beside them and the inputs.
        backward: of what is saved, then a gradient for each result; gives one, or None, for each of the first inputs.
        direct: how many inputs have gradients; they come first.
        outputs: how many of what the forward gives are results.
        saved: for each input of the backward before the gradients whether it is what the forward gives, and its index
            there or among the inputs.
        non_differentiable: indices of results without a history.
        materialize: a gradient that is missing is zeros; else there is no gradient.
        once: the backward has no derivative.
        turns: the backward turns gradients off or on within: it was captured where none are recorded.
    """

    name: str
    forward: Callable[..., Sequence[Any]]
    backward: Callable[..., Sequence[Any]]
    direct: int
    outputs: int
    saved: tuple[tuple[bool, int], ...]
    non_differentiable: tuple[int, ...]
    materialize: bool
    once: bool
    turns: bool = False


class TakesFunctions(Handler):
    """Somebody who traces a program and keeps such functions whole."""

    def custom_function(self, function: CustomFunction, inputs: Values) -> Values | None:
        """What the function gives; None: it is to be run as it is."""
        raise NotImplementedError

    def with_history(self, value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """The values of the one, with the history of the other."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class FunctionBackward:
    """A captured backward as autograd runs it where a derivative of it may be asked for: in grad mode.

    Attributes:
        body: of what is saved, then a gradient for each result; gives one, or None, for each input that has gradients.
        kept: how many of what it is given are saved; the gradients follow.
        once: its results have no derivative, which raises.
    """

    body: fx.GraphModule
    kept: int
    once: bool

    @property
    def __name__(self) -> str:
        return "function_backward"

    @cached_property
    def unread(self) -> frozenset[int]:
        """Places of what the body does not read."""
        return frozenset(i for i, n in enumerate(self.body.graph.find_nodes(op="placeholder")) if not n.users)

    def __call__(self, *given: Any) -> Values:
        return self.run(self.body, given)

    def run(self, body: Body, given: Values) -> Values:
        """What `body`, or one that does the same, gives: with the histories that eager's results have."""
        saved, gradients = given[: self.kept], given[self.kept :]
        return run_once(body, saved, gradients) if self.once else tuple(body(*saved, *gradients))


@runtime_checkable
class AppliedFunction(Protocol):
    """An autograd function that a graph calls."""

    def __call__(self, *inputs: Any) -> Any: ...

    def resumed(self, values: Values, *inputs: Any) -> Any:
        """The call whose forward has made `values`: random ones are not drawn again."""


class FollowsFunctions(Handler):
    """Somebody who traces a program by its operators, and is told which of them are an autograd function's."""

    def applied(
        self, function: AppliedFunction, inputs: Values, places: Sequence[int], run: Callable[[], Values], drawn: bool
    ) -> Values:
        """What `run` makes within a call of `function`: at `places` results that have a history, if the call has one;
        all else has none. `drawn`: it is made of what has been drawn before."""
        raise NotImplementedError

    def pulled_back(self, backward: FunctionBackward, given: Values, run: Callable[[], Values]) -> Values:
        """What a function's backward gives, which `run` makes where no derivative of it is taken."""
        raise NotImplementedError


def applies_functions(body: object) -> bool:
    """Whether a body of an operator over graphs, or what a derivative has made of it, calls such functions."""
    if isinstance(body, nn.Module):
        return any(isinstance(module, AppliedFunction) for module in body.modules())
    parts = fields(body) if is_dataclass(body) else ()
    return any(applies_functions(getattr(body, part.name)) for part in parts)


def follower() -> FollowsFunctions | None:
    """Who traces the program that runs, and is to be told of functions."""
    handler = current_handler()
    return handler if isinstance(handler, FollowsFunctions) else None


def tracer() -> TakesFunctions | None:
    """Who traces the program that runs, and keeps functions whole."""
    handler = current_handler()
    return handler if isinstance(handler, TakesFunctions) else None


@dataclass(frozen=True, eq=False, repr=False)
class OwnDerivative(HigherOrder):
    """A function over its two graphs. Results are the function's, then what only the backward reads.

    Attributes:
        title: the class's name.
        outputs: how many results are the function's.
        saved: what the backward takes before the gradients: whether it is a result, and its index among the results or
            the tensors of the call.
        places: for each result of the backward the index of its tensor of the call.
        materialize, once, turns: see `CustomFunction`. Of a backward that turns grad mode the graph has the operators,
            which say nothing of its derivative: that is refused.
    """

    title: str = field(kw_only=True)
    outputs: int = field(kw_only=True)
    saved: tuple[tuple[bool, int], ...] = field(kw_only=True)
    places: tuple[int, ...] = field(kw_only=True)
    materialize: bool = field(default=True, kw_only=True)
    once: bool = field(default=False, kw_only=True)
    turns: bool = field(default=False, kw_only=True)

    labels = ("forward", "backward")
    name = "own_derivative"
    keeps_results: ClassVar[bool] = True

    def __call__(self, *operands: object) -> Values:
        handler = tracer()
        if handler is not None:
            return handler(self, operands)
        recorded = torch.is_grad_enabled() and any(isinstance(o, torch.Tensor) and o.requires_grad for o in operands)
        if recorded or torch._C._are_functorch_transforms_active():
            return self.differentiated(operands)
        return self.run(*operands)

    def run(self, *operands: object) -> Values:
        with torch.no_grad():
            return tuple(self._runners()[0](*operands))

    def given(self, operands: Values) -> tuple[Values, ...]:
        tensors = operands[self.sizes :]
        return tensors, ()  # the backward's are made when the forward is known

    def results(self, operands: Values, found: Sequence[Sequence[TensorLike]]) -> tuple[TensorSpec, ...]:
        return tuple(map(spec_of, found[0]))

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        numbers, tensors = operands[: self.sizes], operands[self.sizes :]
        saved = [kept[index] if own else tensors[index] for own, index in self.saved]
        of = [result for result, has in zip(kept, self.differentiable, strict=True) if has]
        gradients = [_laid_out(tangent, spec_of(result)) for tangent, result in zip(tangents, of, strict=True)]
        of_title = self.title if self.turns else ""
        operator = _Backward((self.bodies[1],), self.sizes, (), kept=len(saved), once=self.once, turning=of_title)
        places = tuple(self.sizes + place for place in self.places)
        return Derivative(operator, (*numbers, *saved, *gradients), places)

    def unasked(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        return not self.materialize and any(gradient is None for gradient in gradients[: self.outputs])


@dataclass(frozen=True, eq=False, repr=False)
class _Backward(InvokeSubgraph):
    """The call of a backward, over numbers, what was saved (`kept` tensors), and the gradients. `turning`: the title of
    one that turns grad mode, else empty."""

    kept: int = field(default=0, kw_only=True)
    once: bool = field(default=False, kw_only=True)
    turning: str = field(default="", kw_only=True)

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        if self.turning:
            raise RuntimeError(_WHY.format(self.turning))
        return super().derivative(operands, kept, tangents, needs)

    def run(self, *operands: Any) -> Values:
        first = self.sizes + self.kept
        body = self._runners()[0]
        if self.turning and not self.once:
            with torch.no_grad():
                results = tuple(body(*operands))
            sources = [t for t in operands[self.sizes :] if t.requires_grad] if torch.is_grad_enabled() else []
            return tuple(_Refused.apply(self.turning, t, *sources) for t in results) if sources else results  # type: ignore[no-untyped-call]
        return run_once(body, operands[:first], operands[first:]) if self.once else tuple(body(*operands))


def run_once(body: Body, saved: Values, gradients: Values) -> Values:
    """A backward whose results raise where they are differentiated: whether they are, the gradients say."""
    found = _run_once(None, lambda *given: tuple(body(*saved, *given)), *gradients)
    return found if isinstance(found, tuple) else (found,)  # torch takes a single one out of its tuple


_WHY = (
    "{}: its backward turns grad mode off or on, and the graph has no derivative of it. Use detach() there, or mark it"
    " with once_differentiable"
)


class _Refusal(BackwardCFunction):
    title: str


class _Refused(torch.autograd.Function):
    """A gradient that depends on others by a derivative that nobody has."""

    @staticmethod
    def forward(ctx: _Refusal, title: str, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.title = title
        return value.view_as(value)

    @staticmethod
    def backward(ctx: _Refusal, gradient: torch.Tensor) -> tuple[object, ...]:
        raise RuntimeError(_WHY.format(ctx.title))


@once_differentiable
def _run_once(ctx: None, body: Callable[..., Values], *gradients: torch.Tensor) -> Values:
    return body(*gradients)


def _laid_out(tangent: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A gradient with the strides that the backward was traced for."""
    if tuple(tangent.stride()) == tuple(spec.strides):
        return tangent
    return torch.empty_strided(spec.shape, spec.strides, dtype=tangent.dtype, device=tangent.device).copy_(tangent)
