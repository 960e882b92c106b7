"""Captured autograd functions as modules that a graph calls: forward and backward are graphs.

Whoever runs the graph has autograd apply a real function; whoever traces it is told which operators are the function's,
or takes it whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.fx._lazy_graph_module import _LazyGraphModule

from primtorch.frozen import record
from primtorch.higher_order import HigherOrder, call_body
from primtorch.own_derivatives import CustomFunction, FunctionBackward, follower, tracer
from torchdynamo.calls.autograd_rules import Rule, Rules
from torchdynamo.reasons import BreakGraph


@record
class Carried:
    """How the graphs of a captured function fit together.

    Attributes:
        name: of the user's class.
        direct: number of inputs that are tensor arguments of `apply`; the others are read by the bodies.
        forward_inputs: for each input of the forward graph, which input of the call it is.
        outputs: number of tensors among the function's results; they come first among the forward graph's.
        saved: for each value that is kept for the backward: (whether it is a result of the forward graph, its index
            there or among the inputs of the call, whether later writes to it are an error).
        escaping: number of the forward graph's results before those that later code reads of its inside.
        non_differentiable: indices of outputs without gradient.
        materialize: absent gradients are zeros to the backward.
        once: the backward has no derivative.
        transformable: transforms of torch.func take the function: what its context keeps, it is told apart from the
            forward. `batched`: `vmap` does, by a rule made of forward and backward.
        own_vmap, own_jvp: it has such a rule of its own.
    """

    name: str
    direct: int
    forward_inputs: tuple[int, ...]
    outputs: int
    saved: tuple[tuple[bool, int, bool], ...]
    escaping: int
    non_differentiable: tuple[int, ...]
    materialize: bool
    once: bool
    transformable: bool
    batched: bool
    own_vmap: bool = False
    own_jvp: bool = False

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of outputs with a gradient."""
        return tuple(index for index in range(self.outputs) if index not in self.non_differentiable)


@record
class BackwardGraph:
    """A captured backward: `graph` takes the kept values at the places `reads`, then the gradients."""

    graph: fx.GraphModule
    reads: tuple[int, ...]

    def __call__(self, kept: Sequence[object], gradients: Sequence[object]) -> tuple[object, ...]:
        return tuple(self.graph(*(kept[place] for place in self.reads), *gradients))


class CapturedFunction(nn.Module):
    """An autograd function made from captured graphs; a call gives its tensor results and what escapes from inside.

    Attributes:
        backward: as autograd runs it for a first derivative alone (made of `backward_graph`).
        recorded: as it runs it in grad mode, for derivatives of the derivative; the same where the function neither
            turns grad mode nor asks for it.
        rules: the function's own rules by what they were asked for; `record` makes them as long as capture goes on.
        second: what a derivative of the backward is taken of, where its operators do not say that; else None.
    """

    def __init__(
        self,
        forward_graph: fx.GraphModule,
        backward: BackwardGraph,
        recorded: BackwardGraph | None,
        carried: Carried,
        record: weakref.ref[Rules] | None = None,
    ) -> None:
        super().__init__()
        self.rules: dict[Hashable, Rule] = {}
        self.record = record
        self.forward_graph = forward_graph
        self.backward_graph = backward.graph
        if recorded is not None:
            self.recorded_graph = recorded.graph
        self._reads, self._recorded_reads = backward.reads, None if recorded is None else recorded.reads
        self.carried = carried
        self._called_again = recorded is not None or _hides_history(self)
        self._second: tuple[fx.GraphModule, FunctionBackward] | None = None
        base = _CarrierOnce if carried.once else _Carrier
        self.function: Any = type(carried.name, (base,), {})
        above = (_Transformable, base) if carried.transformable else (base,)
        own: dict[str, Any] = {"vmap": staticmethod(_vmap)} if carried.own_vmap else {}
        if carried.own_jvp:
            own["jvp"] = staticmethod(_jvp)
        self.transformed: Any = type(carried.name, above, {"generate_vmap_rule": carried.batched, **own})

    # Who traces the program may put other graphs in the place of these, and they are read where they are called.
    @property
    def backward(self) -> BackwardGraph:
        """The backward as autograd runs it for a first derivative."""
        return BackwardGraph(self.backward_graph, self._reads)

    @property
    def recorded(self) -> BackwardGraph:
        """The backward as autograd runs it in grad mode."""
        if self._recorded_reads is None:
            return self.backward
        return BackwardGraph(self.recorded_graph, self._recorded_reads)

    @property
    def second(self) -> FunctionBackward | None:
        """What a derivative of the backward calls, or None where its operators are enough."""
        if not self._called_again:
            return None
        graph = self.recorded.graph
        if self._second is None or self._second[0] is not graph:
            self._second = graph, _second(self)
        return self._second[1]

    def forward(self, *inputs: object) -> object:
        """The function's results, and what escapes from inside."""
        direct, escaping = self.carried.direct, self.carried.escaping
        traced = tracer()
        found = traced.custom_function(self._custom(), inputs) if traced is not None else None
        if found is not None:
            return found
        if not torch._C._are_functorch_transforms_active():
            return self.function.apply(self, inputs[direct:], None, *inputs[:direct])
        values = self.transformed.apply(self, inputs[direct:], None, *inputs[:direct])
        return (*values[: self.carried.outputs], *values[escaping:]) if self.carried.transformable else values

    def resumed(self, values: tuple[Any, ...], *inputs: object) -> object:
        """What a call gives whose forward has made `values`."""
        direct = self.carried.direct
        return self.function.apply(self, inputs[direct:], values, *inputs[:direct])

    def _custom(self) -> CustomFunction:
        """The function for who traces the graph that calls it."""
        carried, forward, backward = self.carried, self.forward_graph, self.backward
        return CustomFunction(
            name=carried.name,
            forward=lambda *inputs: call_body(forward, tuple(inputs[index] for index in carried.forward_inputs)),
            backward=lambda *given: call_body(backward.graph, given),
            direct=carried.direct,
            outputs=carried.outputs,
            saved=tuple(carried.saved[place][:2] for place in backward.reads),
            non_differentiable=carried.non_differentiable,
            materialize=carried.materialize,
            once=carried.once,
            turns=self._recorded_reads is not None,
        )

    def pulled_back(self, kept: Sequence[object], gradients: tuple[object, ...]) -> tuple[object, ...]:
        """What the backward gives of what is kept, where it runs."""
        graph = self.recorded if torch.is_grad_enabled() else self.backward
        second = self.second
        follows = follower() if second is not None else None
        if follows is None or second is None:
            return graph(kept, gradients)
        given = (*(kept[place] for place in self.recorded.reads), *gradients)
        return follows.pulled_back(second, given, lambda: graph(kept, gradients))

    def rule(self, asked: Hashable, make: Callable[[Rules], Rule]) -> Rule:
        """The rule for what is asked, recorded where it is the first time.

        Raises:
            BreakGraph: the rule cannot be a graph.
        """
        if asked not in self.rules:
            record = self.record() if self.record is not None else None
            if record is None:
                raise BreakGraph("autograd_function", f"a rule of {self.carried.name} that capture has not seen")
            self.rules[asked] = make(record)
        return self.rules[asked]


class _Context(BackwardCFunction):
    """What a call keeps for its derivative: beside the saved tensors what is unchecked, or under transforms `kept`."""

    module: CapturedFunction
    unchecked: list[object]  # what the program may write to in between
    kept: list[object]  # None in the place of each saved tensor


class _Carrier(torch.autograd.Function):
    """What runs at each call. Only the arguments of the user's `apply` are inputs that autograd knows of."""

    @staticmethod
    def forward(
        ctx: _Context,
        module: CapturedFunction,
        others: tuple[object, ...],
        given: tuple[Any, ...] | None,
        *direct: object,
    ) -> tuple[object, ...]:
        carried = module.carried
        inputs = (*direct, *others)

        def run() -> tuple[Any, ...]:
            if given is not None:
                return tuple(value.view_as(value) if isinstance(value, torch.Tensor) else value for value in given)
            return tuple(module.forward_graph(*(inputs[index] for index in carried.forward_inputs)))

        follows = follower()
        drawn = given is not None
        values = run() if follows is None else follows.applied(module, inputs, carried.differentiable, run, drawn)
        saved: list[Any] = [(values[index] if own else inputs[index]) for own, index, _ in carried.saved]
        ctx.save_for_backward(*(v for v, (_, _, checked) in zip(saved, carried.saved, strict=True) if checked))
        ctx.unchecked = [v for v, (_, _, checked) in zip(saved, carried.saved, strict=True) if not checked]
        ctx.set_materialize_grads(carried.materialize)
        ctx.module = module
        results = (*values[: carried.outputs], *values[carried.escaping :])
        apart = [results[index] for index in carried.non_differentiable] + list(results[carried.outputs :])
        ctx.mark_non_differentiable(*(value for value in apart if isinstance(value, torch.Tensor)))
        return results

    @staticmethod
    def backward(ctx: _Context, *gradients: object) -> tuple[object, ...]:
        carried = ctx.module.carried
        given = gradients[: carried.outputs]
        if any(gradient is None for gradient in given):
            return (None,) * (3 + carried.direct)
        kept = _kept_apart(ctx) if hasattr(ctx, "kept") else _kept(ctx, carried)
        return (None, None, None, *ctx.module.pulled_back(kept, given))


def _kept(ctx: _Context, carried: Carried) -> list[object]:
    reads = any(known for _, _, known in carried.saved)  # else a second backward is no error
    checked, unchecked = iter(ctx.saved_tensors if reads else ()), iter(ctx.unchecked)
    return [next(checked if known else unchecked) for _, _, known in carried.saved]


def _kept_apart(ctx: _Context) -> list[object]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if value is None else value for value in ctx.kept]


class _Transformable(_Carrier):
    """What runs under transforms, which wrap what the forward gives before the context keeps it: all of the graph's
    results are the function's."""

    @staticmethod
    def forward(  # type: ignore[override]
        module: CapturedFunction, others: tuple[object, ...], given: None, *direct: object
    ) -> tuple[object, ...]:
        inputs = (*direct, *others)
        return tuple(module.forward_graph(*(inputs[index] for index in module.carried.forward_inputs)))

    @staticmethod
    def setup_context(
        ctx: _Context,
        inputs: tuple[CapturedFunction, tuple[object, ...], None, *tuple[object, ...]],
        output: tuple[object, ...],
    ) -> None:
        module, others, _, *direct = inputs
        carried = module.carried
        read = (*direct, *others)
        saved = [(output[index] if own else read[index]) for own, index, _ in carried.saved]
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        ctx.kept = [None if isinstance(value, torch.Tensor) else value for value in saved]
        if carried.own_jvp:
            ctx.save_for_forward(*direct, *output[: carried.outputs])  # type: ignore[no-untyped-call, arg-type]
        ctx.set_materialize_grads(carried.materialize)
        ctx.module = module
        apart = [output[index] for index in carried.non_differentiable] + list(output[carried.outputs :])
        ctx.mark_non_differentiable(*(value for value in apart if isinstance(value, torch.Tensor)))


def _vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    module: CapturedFunction,
    others: tuple[object, ...],
    given: None,
    *direct: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    """The function's own `vmap`: of its results alone, which is all that its context can keep."""
    carried, dims = module.carried, in_dims[3:]
    if others or carried.escaping > carried.outputs:
        raise BreakGraph("autograd_function", f"the vmap of {carried.name}, which keeps or reads more than it is given")
    asked = ("vmap", *dims, *(tensor.dim() for tensor in direct))
    rule = module.rule(asked, lambda rules: rules.vmap(info, dims, direct))
    return tuple(rule.graph(*direct)), rule.dims


def _jvp(ctx: _Context, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The function's own `jvp`."""
    carried, saved, given = ctx.module.carried, ctx.saved_tensors, tangents[3:]
    direct, results = saved[: carried.direct], saved[carried.direct :]
    asked = ("jvp", *(tangent is None for tangent in given), *(tensor.dim() for tensor in saved))
    rule = ctx.module.rule(asked, lambda rules: rules.jvp(direct, results, given))
    found = dict(zip(rule.given, rule.graph(*saved, *(t for t in given if t is not None)), strict=True))
    return tuple(found.get(place) for place in range(carried.escaping))


class _CarrierOnce(_Carrier):
    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: object) -> tuple[object, ...]:
        return _Carrier.backward(ctx, *gradients)


def refuse_derivative(name: str, order: int) -> None:
    """What a graph calls in the place of a backward that is not captured."""
    raise RuntimeError(
        f"{name}: a compiled program has {order} derivatives of functions that the backward of another calls. Keep the "
        "function out of it with torchcompile.disable"
    )


_DETACHING = frozenset({"detach", "detach_", "alias"})


def _hides_history(module: CapturedFunction) -> bool:
    """Whether a trace of the backward, which has its operators, would be differentiated otherwise than eager does."""
    carried, nodes = module.carried, module.backward_graph.graph.nodes
    inside = any(own and index >= carried.outputs for own, index, _ in carried.saved)
    return carried.once or inside or any(map(_hides, nodes))


def _hides(node: fx.Node) -> bool:
    """Whether a call has other histories than its operators: a graph of its own, what detaches."""
    if node.op == "call_module" or isinstance(node.target, HigherOrder):
        return True
    name = getattr(node.target, "__name__", node.target)
    return name in _DETACHING or _reads_data(node)


def _second(module: CapturedFunction) -> FunctionBackward:
    recorded = module.recorded
    return FunctionBackward(_detaching(recorded.graph), len(recorded.reads), module.carried.once)


def _detaching(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with `detach()` for reads of `.data`: the same values without history, as a node of a trace."""
    if not any(map(_reads_data, module.graph.nodes)):
        return module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))  # type: ignore[arg-type]
    for node in filter(_reads_data, list(graph.nodes)):
        node.op, node.target, node.args = "call_method", "detach", node.args[:1]
    return _LazyGraphModule(module, graph, "Region")


def _reads_data(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1:] == ("data",)
