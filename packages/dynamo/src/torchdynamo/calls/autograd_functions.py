"""Custom `torch.autograd.Function`s in the graph: forward and backward captured, run by a real autograd function.

`Fn.apply(...)` is interpreted: its forward first, then its backward, on fake gradients. Each becomes a nested graph,
and the graph gets one `call_module` of a `CapturedFunction`. What cannot be carried that way breaks the graph.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from primtorch.spec import TensorSpec
from torchdynamo.calls.autograd_rules import Rules, own_rules
from torchdynamo.calls.captured_functions import BackwardGraph, CapturedFunction, Carried, refuse_derivative
from torchdynamo.calls.effects import effects_so_far
from torchdynamo.graph.jagged import is_jagged
from torchdynamo.graph.regions import Region
from torchdynamo.interpreter.protocol import Args, InterpreterApi, Kwargs, World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

DERIVATIVES = 3  # how many backwards are captured, of functions that are each called in the backward of another

_ONCE = once_differentiable(lambda ctx: None).__code__
_NO_SETUP = torch.autograd.function._SingleLevelFunction.setup_context
_NO_BACKWARD = torch.autograd.function._SingleLevelFunction.backward


class FunctionContext:
    """`ctx` as forward and backward see it while they are captured."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[object, ...] = ()
        self.saved_variables: tuple[object, ...] = ()  # the same, by an older name
        self.to_save: tuple[object, ...] = ()
        self.for_forward: tuple[object, ...] | None = None
        self.non_differentiable: tuple[object, ...] = ()
        self.dirty_tensors: tuple[object, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: object) -> None:
        """Keeps what the backward reads as `saved_tensors`."""
        self.to_save = self.saved_tensors = self.saved_variables = tensors

    def save_for_forward(self, *tensors: object) -> None:
        """Keeps what a forward-mode derivative reads as `saved_tensors`."""
        self.for_forward = tensors

    def mark_non_differentiable(self, *tensors: object) -> None:
        """Notes results without history."""
        self.non_differentiable = tensors

    def mark_dirty(self, *tensors: object) -> None:
        """Notes inputs that the forward writes to."""
        self.dirty_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Whether gradients that are missing are zeros."""
        self.materialize_grads = value


class _Derivative(FunctionCtx):
    """What is kept of a captured call: the captured derivative."""

    region: Region
    has_second_derivative: bool


class _Result(torch.autograd.Function):
    """Gives the fakes that a captured forward made the history that the function's results have."""

    @staticmethod
    def forward(
        ctx: _Derivative,
        results: tuple[object, ...],
        apart: tuple[torch.Tensor, ...],
        backward: Region,
        once: bool,
        *direct: object,
    ) -> tuple[object, ...]:
        ctx.mark_non_differentiable(*apart)
        ctx.region = backward
        ctx.has_second_derivative = not once
        return results

    @staticmethod
    def backward(ctx: _Derivative, *gradients: object) -> tuple[object, ...]:
        """On fakes, for a derivative that the program takes itself."""
        region = ctx.region
        if any(gradient is None for gradient in gradients):
            return (None, None, None, None, *(None for _ in region.outputs))
        values: dict[fx.Node, Any] = {}
        given = iter((*(node.meta["val"] for node in region.inputs), *gradients))
        for node in region.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                raise RuntimeError(f"a fake tensor has no {node.op}")
        return (None, None, None, None, *(None if node is None else values[node] for node in region.outputs))


class AutogradFunctions:
    """Captures calls of `Fn.apply` of one capture."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.recorder = outside.recorder
        self.backwards = 0  # how many backwards the program is within
        self.asked = 0  # how often it has asked for grad mode
        self.rules: list[Rules] = []  # of calls under transforms, which ask for them as long as capture goes on

    def apply(self, kind: type[torch.autograd.Function], args: Args, kwargs: Kwargs) -> object:
        """`kind.apply(*args, **kwargs)`."""
        self.interpreter.tail_call = False
        try:
            if kind.setup_context is not _NO_SETUP:
                forward: Any = kind.forward
                self.outside.function_defaults(forward)
                bound = inspect.signature(forward).bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
            if kwargs:
                raise BreakGraph("autograd_function", "apply takes no keyword arguments here")
            if any(map(is_jagged, args)):
                raise BreakGraph("autograd_function", "an argument is a nested tensor")
            return self._apply(kind, args)
        except BreakGraph as error:
            name = f"{kind.__qualname__}.apply"
            detail = error.detail if error.reason == "autograd_function" else f"{error.reason}: {error.detail}"
            wrapped = BreakGraph("autograd_function", detail if detail.startswith(name) else f"{name}: {detail}")
            wrapped.positions = error.positions
            raise wrapped from error

    def _apply(self, kind: type[torch.autograd.Function], args: tuple[object, ...]) -> object:
        within = self.backwards > 0  # its derivative is a further one, which the program may ask for
        transformed = self.recorder.regions.transforms > 0  # by which, no tensor tells
        needs = tuple(
            isinstance(a, torch.Tensor) and (a.requires_grad or ((within or transformed) and a.is_floating_point()))
            for a in args
        )
        context = FunctionContext(needs)
        if not transformed and not (any(needs) and (torch.is_grad_enabled() or within)):
            return self._without_gradient(kind, context, args)
        mark = self.recorder.regions.mark()
        with grad_mode(False), self.recorder.conditions.refused(), self.recorder.regions.body():
            value = _forward(self.world, kind, context, args)
        return _Capture(self, kind, context, args, mark).result(value)

    def _without_gradient(
        self, kind: type[torch.autograd.Function], context: FunctionContext, args: tuple[object, ...]
    ) -> object:
        """The forward as a part of the graph around it."""
        enabled = torch.is_grad_enabled()
        if enabled:
            torch._C._set_grad_enabled(False)
        try:
            value = _forward(self.world, kind, context, args)
            if context.dirty_tensors:
                return value
            given = {id(a) for a in args if isinstance(a, torch.Tensor)}
            alias = lambda v: v.detach() if isinstance(v, torch.Tensor) and id(v) in given else v
            return tuple(map(alias, value)) if type(value) is tuple else alias(value)
        finally:
            if enabled:
                torch._C._set_grad_enabled(True)

    @contextmanager
    def backward(self, recorded: bool) -> Iterator[None]:
        """A block of a backward, which runs without history of its own, or in grad mode."""
        self.backwards += 1
        try:
            with grad_mode(recorded):
                yield
        finally:
            self.backwards -= 1


def _forward(world: World, kind: type[torch.autograd.Function], context: FunctionContext, args: Args) -> object:
    forward = world.getattr(kind, "forward")
    if kind.setup_context is _NO_SETUP:
        return world.call(forward, (context, *args), {})
    value = world.call(forward, args, {})
    world.call(world.getattr(kind, "setup_context"), (context, args, value), {})
    return value


@contextmanager
def grad_mode(on: bool) -> Iterator[None]:
    """Grad mode set without a node for it: what runs the block in eager sets it by itself."""
    enabled = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(on)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)


class _Capture:
    """One call whose forward has been recorded: the backward, the two nested graphs, the results."""

    def __init__(
        self,
        owner: AutogradFunctions,
        kind: type[torch.autograd.Function],
        context: FunctionContext,
        args: tuple[object, ...],
        mark: frozenset[fx.Node],
    ) -> None:
        self.owner, self.kind, self.context, self.args, self.mark = owner, kind, context, args, mark
        self.world = owner.world
        self.outside = owner.outside
        self.recorder = owner.recorder
        self.direct = [argument for argument in args if isinstance(argument, torch.Tensor)]

    def result(self, value: object) -> object:
        """What `apply` gives, where the forward gave `value`."""
        if self.context.dirty_tensors:
            raise BreakGraph("autograd_function", "mark_dirty: let its forward return a new tensor")
        items = value if type(value) is tuple else (value,)
        outputs = [item for item in items if isinstance(item, torch.Tensor)]
        regions = self.recorder.regions
        direct = [self._node(tensor) for tensor in self.direct]
        made = set(regions.since(self.mark))
        if any(self._node(output) not in made and self._node(output) not in direct for output in outputs):
            raise BreakGraph("autograd_function", "a result that is neither made by the forward nor an argument")
        if not self.context.materialize_grads and len(outputs) > 1:
            raise BreakGraph("autograd_function", "set_materialize_grads(False) with several results")
        saved = {self._node(tensor) for tensor in self.context.to_save if isinstance(tensor, torch.Tensor)}
        saved |= {self._node(output) for output in outputs}
        results = [self._node(output) for output in outputs]
        backward, recorded = self._backwards(outputs)
        read = list(dict.fromkeys([*backward.inputs, *(recorded or backward).inputs]))
        forward_nodes = regions.since(self.mark)
        made = set(forward_nodes)
        forward = regions.outline(forward_nodes, [*direct, *(n for n in read if n not in made)])
        inputs = [*direct, *(node for node in forward.inputs if node not in direct)]
        kept = [node for node in read if node in made and node not in results]
        carried = self._carried(forward, read, inputs, saved, outputs, [*results, *kept])
        make = self._maker(carried, read, backward, recorded)
        call = regions.call(forward, inputs, self.kind.__name__, make)
        self.recorder.annotate(call, ())
        given = self._with_history(outputs, backward)
        for node, fake in zip(results, given, strict=True):
            self.recorder.remember(fake, forward.item(forward.copies[node], fake))
        for node in kept:
            forward.keep(forward.copies[node])
        rest = iter(given)
        replaced = tuple(next(rest) if isinstance(item, torch.Tensor) else item for item in items)
        return replaced if type(value) is tuple else replaced[0]

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        return self.recorder.known_node(tensor, "autograd_function")

    # -- backward ---------------------------------------------------------------------------

    def _backwards(self, outputs: Sequence[torch.Tensor]) -> tuple[Region, Region | None]:
        """The backward as it runs for a first derivative, and in grad mode where that makes a difference."""
        asked = self.owner.asked
        plain = self._backward(outputs, recorded=False)
        turns = any(node.target is torch._C._set_grad_enabled for node in plain.graph.nodes)
        again = (turns or self.owner.asked != asked) and not self._is_once()
        return plain, self._backward(outputs, recorded=True) if again else None

    def _backward(self, outputs: Sequence[torch.Tensor], recorded: bool) -> Region:
        regions, recorder, kind = self.recorder.regions, self.recorder, self.kind
        function = self.world.getattr(kind, "backward")
        if kind.backward is _NO_BACKWARD:
            function = self.world.getattr(kind, "vjp")
        if getattr(kind.backward, "__code__", None) is _ONCE:
            function = vars(kind.backward)["__wrapped__"]
        before, said = effects_so_far(self.outside), self.outside.emitted
        written = len(recorder.written)
        mark = regions.mark()
        specs = map(TensorSpec.of, outputs)
        gradients = [recorder.stand_in(f"gradient_{n}", spec, recorded) for n, spec in enumerate(specs)]
        recorder.of_unknown_history.update(node for g in gradients if (node := recorder.node_of(g)) is not None)
        try:
            with self.owner.backward(recorded), recorder.conditions.refused(), regions.body():
                beyond = self.owner.backwards > DERIVATIVES
                value = self._beyond() if beyond else self.world.call(function, (self.context, *gradients), {})
        except Exception as error:
            raise BreakGraph("autograd_function", f"its backward raises {type(error).__name__}: {error}") from error
        if effects_so_far(self.outside, before) != before or self.outside.emitted != said:
            raise BreakGraph("autograd_function", "its backward changes objects outside of it")
        nodes = regions.since(mark)
        own = set(nodes)
        if any(recorder.node_of(tensor) not in own for tensor in recorder.written[written:]):
            raise BreakGraph("autograd_function", "its backward writes to a tensor made before")
        del recorder.written[written:]
        results = [self._gradient_node(r) for r in self._by_tensor_argument(value)]
        region = regions.outline(nodes, [n for n in results if n is not None and n not in own])
        region.outputs = [None if node is None else region.copies[node] for node in results]
        return region

    def _beyond(self) -> tuple[None, ...]:
        """In the place of a backward within as many others as are captured: a node that refuses to run."""
        node = self.recorder.write_node(refuse_derivative, (self.kind.__qualname__, DERIVATIVES))
        node.meta["effect"] = True
        return (None,) * len(self.args)

    def _by_tensor_argument(self, value: Any) -> list[object]:
        """The gradients that a backward gave, those of tensor arguments."""
        given = list(value) if type(value) in (tuple, list) else [value]
        while len(given) > len(self.args) and given[-1] is None:
            given.pop()
        if len(given) != len(self.args):
            raise BreakGraph("autograd_function", f"{len(given)} gradients for {len(self.args)} arguments")
        for argument, gradient in zip(self.args, given, strict=True):
            if gradient is not None and not isinstance(argument, torch.Tensor):
                raise BreakGraph("autograd_function", "a gradient for an argument that is no tensor")
        return [g for argument, g in zip(self.args, given, strict=True) if isinstance(argument, torch.Tensor)]

    def _gradient_node(self, gradient: object) -> fx.Node | None:
        if gradient is None:
            return None
        if not isinstance(gradient, torch.Tensor):
            raise BreakGraph("autograd_function", f"its backward returns a {type(gradient).__name__}")
        return self._node(gradient)

    def _is_once(self) -> bool:
        """Whether the backward has no derivative."""
        return getattr(self.kind.backward, "__code__", None) is _ONCE

    # -- results ----------------------------------------------------------------------------

    def _with_history(self, outputs: Sequence[torch.Tensor], backward: Region) -> tuple[torch.Tensor, ...]:
        """The results as they are behind the call: with `requires_grad` and a `grad_fn` where eager's have them."""
        apart = tuple(t for t in self.context.non_differentiable if isinstance(t, torch.Tensor))
        recorded = torch.is_grad_enabled() or not self.recorder.regions.transforms
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(recorded):
            given = _Result.apply(tuple(outputs), apart, backward, self._is_once(), *self.direct)  # type: ignore[no-untyped-call]
        return tuple(given)

    def _carried(
        self,
        forward: Region,
        read: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        saved: set[fx.Node],
        outputs: Sequence[torch.Tensor],
        results: Sequence[fx.Node],
    ) -> Carried:
        places = {node: index for index, node in reversed(list(enumerate(inputs)))}
        of_forward = {node: index for index, node in reversed(list(enumerate(results)))}
        rows = tuple(
            (False, places[node], node in saved) if node in places else (True, of_forward[node], node in saved)
            for node in read
        )
        apart = {id(t) for t in self.context.non_differentiable}
        own_vmap, own_jvp = own_rules(self.kind)
        return Carried(
            name=self.kind.__name__,
            direct=len(self.direct),
            forward_inputs=tuple(places[node] for node in forward.inputs),
            outputs=len(outputs),
            saved=rows,
            escaping=len(results),
            non_differentiable=tuple(index for index, output in enumerate(outputs) if id(output) in apart),
            materialize=self.context.materialize_grads,
            once=self._is_once(),
            transformable=self.kind.setup_context is not _NO_SETUP,
            batched=bool(self.kind.generate_vmap_rule),
            own_vmap=own_vmap,
            own_jvp=own_jvp,
        )

    def _maker(
        self, carried: Carried, read: Sequence[fx.Node], backward: Region, recorded: Region | None
    ) -> Callable[[fx.GraphModule, Region], nn.Module]:
        regions = self.recorder.regions
        place_of = {node: place for place, node in enumerate(read)}
        has_rules = regions.transforms and (carried.own_vmap or carried.own_jvp)
        rules = self._rules(carried.outputs) if has_rules else None

        def finished(region: Region) -> BackwardGraph:
            return BackwardGraph(regions.finished(region), tuple(place_of[node] for node in region.inputs))

        def make(graph: fx.GraphModule, region: Region) -> nn.Module:
            again = None if recorded is None else finished(recorded)
            return CapturedFunction(graph, finished(backward), again, carried, rules)

        return make

    def _rules(self, results: int) -> weakref.ref[Rules]:
        needs = self.context.needs_input_grad
        rules = Rules(self.outside, self.world, self.kind, self.args, results, lambda: FunctionContext(needs))
        self.owner.rules.append(rules)
        return weakref.ref(rules)
