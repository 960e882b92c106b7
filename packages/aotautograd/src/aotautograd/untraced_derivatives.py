"""Operators whose derivative cannot be traced: it reads data. The graph calls their pullback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import BackwardCFunction

from aotautograd.backward import DataOfDerivatives
from aotautograd.recorder import Recorder
from primtorch.effects import is_foreign, tensor_arguments
from primtorch.errors import DataDependent
from primtorch.functionalize import unwrap, wrap
from primtorch.pullbacks import GIVEN, NONE_GIVEN, NOT_ASKED, call_pullback, has_pullback, is_pullback

_given: dict[tuple[OpOverload, tuple[bool, ...]], tuple[int, ...]] = {}
"""What derivatives have given, by the operator and by which tensors required a gradient."""


def with_pullback(target: object) -> OpOverload | None:
    """The operator that a graph's target calls, if it is somebody's own and has a pullback."""
    if isinstance(target, OpOverloadPacket) and target.overloads() == ["default"]:
        target = target.default
    own = isinstance(target, OpOverload) and is_foreign(target) and has_pullback(target)
    return target if own else None  # type: ignore[return-value]


def call_untraced(recorder: Recorder, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Calls an operator so that its derivative is a call of its pullback."""
    tensors = [t for t, _ in tensor_arguments(op, args, kwargs)]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return op(*args, **kwargs)
    found = _Untraced.apply(_Call(recorder, op, args, kwargs), *tensors)
    returns = op._schema.returns
    if len(returns) > 1:
        return tuple(found)
    return found[0] if str(returns[0].type) == "Tensor" else list(found)


class _Call:
    """A call of an operator on functional tensors, and autograd's record of it alone."""

    def __init__(
        self, recorder: Recorder, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self.recorder, self.op, self.args, self.kwargs = recorder, op, args, kwargs
        self.leaves: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []
        self.wanted: tuple[int, ...] = ()

    def on(self, tensors: Sequence[torch.Tensor]) -> tuple[list[object], dict[str, object]]:
        """The arguments with other tensors in the place of theirs."""
        rest = iter(tensors)

        def other(value: object) -> object:
            if isinstance(value, (list, tuple)):
                return type(value)(map(other, value))
            return next(rest) if isinstance(value, torch.Tensor) else value

        return [other(value) for value in self.args], {
            argument.name: other(self.kwargs[argument.name])
            for argument in self.op._schema.arguments
            if argument.name in self.kwargs
        }

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, computed of tensors that nothing leads to."""
        self.leaves = [wrap(unwrap(t)).requires_grad_(t.requires_grad) for t in tensors]
        with torch.set_grad_enabled(not is_pullback(self.op)):
            args, kwargs = self.on(self.leaves)
            found = self.op(*args, **kwargs)
            self.results = list(found) if isinstance(found, (list, tuple)) else [found]
            self.recorder.note_derivative(found, self.op)
            self.wanted = self._wanted()
        return [wrap(unwrap(result)) for result in self.results]

    def differentiable(self) -> Iterator[bool]:
        """Of each result, whether autograd goes on to it."""
        return (is_pullback(self.op) or result.requires_grad for result in self.results)

    def kept(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of arguments and results that autograd kept: what is written to them makes the derivative wrong."""
        nodes = (result.grad_fn for result in self.results if result.grad_fn is not None)
        kept = {id(unwrap(t)) for node in nodes for t in getattr(node, "saved_tensors", ()) if t is not None}
        return [t for t in tensors if id(unwrap(t)) in kept]

    def _wanted(self) -> tuple[int, ...]:
        """What the derivative gives for each tensor: what it gives for the example inputs.

        Raises:
            DataDependent: it cannot be told, for there are no example inputs, or it reads the gradients' data.
        """
        required = tuple(leaf.requires_grad for leaf in self.leaves)
        if is_pullback(self.op):
            return tuple(GIVEN if one else NOT_ASKED for one in required)
        known = _given.get((self.op, required))
        if known is None:
            gradients = iter(self._tried())
            kinds = (((NONE_GIVEN if next(gradients) is None else GIVEN) if one else NOT_ASKED) for one in required)
            known = _given[self.op, required] = tuple(kinds)
        return known

    def _tried(self) -> Sequence[torch.Tensor | None]:
        """Runs the derivative on the values of the example inputs where it reads data; no node of it stays."""
        recorder = self.recorder
        last = _last(recorder.graph)
        results = [result for result in self.results if result.requires_grad]
        try:
            with recorder.trying(), torch.no_grad(), DataOfDerivatives(recorder):
                found: Sequence[torch.Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
                    tuple(results),
                    tuple(torch.ones_like(result) for result in results),
                    keep_graph=True,
                    create_graph=False,
                    inputs=tuple(leaf for leaf in self.leaves if leaf.requires_grad),
                    allow_unreachable=True,
                    accumulate_grad=False,
                )
                return found
        except DataDependent:
            raise
        except Exception as error:  # of what no example tells
            raise recorder.reads_data(f"the derivative of {self.op}") from error
        finally:
            while (node := _last(recorder.graph)) is not last:
                recorder.graph.erase_node(node)


def _last(graph: fx.Graph) -> fx.Node:
    last: Iterator[fx.Node] = iter(reversed(graph.nodes))  # not every release's list, reversed, is an iterator itself
    return next(last)


class _Context(BackwardCFunction):
    """What is kept of a call for its derivative."""

    call: _Call


class _Untraced(torch.autograd.Function):
    """A call whose derivative is its pullback."""

    @staticmethod
    def forward(ctx: _Context, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = call.run(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        own = zip(results, call.differentiable(), strict=True)
        ctx.mark_non_differentiable(*(result for result, differentiable in own if not differentiable))
        ctx.save_for_backward(*call.kept([*tensors, *results]))
        return tuple(results)

    @staticmethod
    def backward(ctx: _Context, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        _ = ctx.saved_tensors  # raises what autograd does where one was written to, or the backward has run
        args, kwargs = call.on([wrap(unwrap(leaf)) for leaf in call.leaves])
        results = [wrap(unwrap(result)) for result in call.results]
        found = iter(call_pullback(call.op, tangents, results, args, kwargs, call.wanted))
        return (None, *(next(found) if kind == GIVEN else None for kind in call.wanted))
