"""Custom `torch.autograd.Function`s in the graph: forward and backward captured, run by a real autograd function.

`Fn.apply(...)` is interpreted: its forward first, then its backward, on fake gradients. Each becomes a nested graph,
and the graph gets one `call_module` of a `CapturedFunction`. What cannot be carried that way breaks the graph.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from primtorch.higher_order import call_body
from primtorch.own_derivatives import CustomFunction, tracer
from primtorch.spec import TensorSpec
from torchdynamo.calls.autograd_rules import Rule, Rules, own_rules
from torchdynamo.calls.effects import effects_so_far
from torchdynamo.graph.jagged import is_jagged
from torchdynamo.graph.regions import Region
from torchdynamo.interpreter.protocol import Args, InterpreterApi, Kwargs, World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

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


@dataclass(frozen=True, slots=True)
class Carried:
    """How the graphs of a captured function fit together.

    Attributes:
        name: of the user's class.
        direct: number of inputs that are tensor arguments of `apply`; the others are read by the bodies.
        forward_inputs: for each input of the forward graph, which input of the call it is.
        outputs: number of tensors among the function's results; they come first among the forward graph's.
        saved: for each input of the backward graph before the gradients: (whether it is a result of the forward
            graph, its index there or among the inputs of the call, whether later writes to it are an error).
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


class CapturedFunction(nn.Module):
    """An autograd function made from captured graphs; a call gives its tensor results and what escapes from inside.

    Attributes:
        rules: the function's own rules by what they were asked for; `record` makes them as long as capture goes on.
        turns: the backward turns grad mode off or on, as it was where it was captured.
        no_second_derivative: why the operators of the backward do not say what its derivative is; else empty.
    """

    def __init__(
        self,
        forward_graph: fx.GraphModule,
        backward_graph: fx.GraphModule,
        carried: Carried,
        record: weakref.ref[Rules] | None = None,
    ) -> None:
        super().__init__()
        self.rules: dict[Hashable, Rule] = {}
        self.record = record
        self.forward_graph = forward_graph
        self.backward_graph = backward_graph
        self.carried = carried
        self.turns = any(node.target is torch._C._set_grad_enabled for node in backward_graph.graph.nodes)
        self.no_second_derivative = _no_second_derivative(self)
        base = _CarrierOnce if carried.once else _CarrierOfTurns if self.turns else _Carrier
        self.function: Any = type(carried.name, (base,), {})
        above = (_Transformable, base) if carried.transformable else (base,)
        own: dict[str, Any] = {"vmap": staticmethod(_vmap)} if carried.own_vmap else {}
        if carried.own_jvp:
            own["jvp"] = staticmethod(_jvp)
        self.transformed: Any = type(carried.name, above, {"generate_vmap_rule": carried.batched, **own})

    def forward(self, *inputs: object) -> object:
        """The function's results, and what escapes from inside."""
        direct, escaping = self.carried.direct, self.carried.escaping
        traced = tracer()
        found = traced.custom_function(self._custom(), inputs) if traced is not None else None
        if found is not None:
            return found
        if not torch._C._are_functorch_transforms_active():
            return self.function.apply(self, inputs[direct:], *inputs[:direct])
        values = self.transformed.apply(self, inputs[direct:], *inputs[:direct])
        return (*values[: self.carried.outputs], *values[escaping:]) if self.carried.transformable else values

    def _custom(self) -> CustomFunction:
        """The function for who traces the graph that calls it."""
        carried, forward, backward = self.carried, self.forward_graph, self.backward_graph
        return CustomFunction(
            name=carried.name,
            forward=lambda *inputs: call_body(forward, tuple(inputs[index] for index in carried.forward_inputs)),
            backward=lambda *given: call_body(backward, given),
            direct=carried.direct,
            outputs=carried.outputs,
            saved=tuple((own, index) for own, index, _ in carried.saved),
            non_differentiable=carried.non_differentiable,
            materialize=carried.materialize,
            once=carried.once,
            turns=self.turns,
        )

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
        ctx: _Context, module: CapturedFunction, others: tuple[object, ...], *direct: object
    ) -> tuple[object, ...]:
        carried = module.carried
        inputs = (*direct, *others)
        values = module.forward_graph(*(inputs[index] for index in carried.forward_inputs))
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
            return (None,) * (2 + carried.direct)
        kept = _kept_apart(ctx) if hasattr(ctx, "kept") else _kept(ctx, carried)
        return (None, None, *ctx.module.backward_graph(*kept, *given))


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
    def forward(module: CapturedFunction, others: tuple[object, ...], *direct: object) -> tuple[object, ...]:  # type: ignore[override]
        inputs = (*direct, *others)
        return tuple(module.forward_graph(*(inputs[index] for index in module.carried.forward_inputs)))

    @staticmethod
    def setup_context(
        ctx: _Context,
        inputs: tuple[CapturedFunction, tuple[object, ...], *tuple[object, ...]],
        output: tuple[object, ...],
    ) -> None:
        module, others, *direct = inputs
        carried = module.carried
        given = (*direct, *others)
        saved = [(output[index] if own else given[index]) for own, index, _ in carried.saved]
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        ctx.kept = [None if isinstance(value, torch.Tensor) else value for value in saved]
        if carried.own_jvp:
            ctx.save_for_forward(*direct, *output[: carried.outputs])  # type: ignore[no-untyped-call, arg-type]
        ctx.set_materialize_grads(carried.materialize)
        ctx.module = module
        apart = [output[index] for index in carried.non_differentiable] + list(output[carried.outputs :])
        ctx.mark_non_differentiable(*(value for value in apart if isinstance(value, torch.Tensor)))


def _vmap(
    info: Any, in_dims: tuple[Any, ...], module: CapturedFunction, others: tuple[object, ...], *direct: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    """The function's own `vmap`: of its results alone, which is all that its context can keep."""
    carried, dims = module.carried, in_dims[2:]
    if others or carried.escaping > carried.outputs:
        raise BreakGraph("autograd_function", f"the vmap of {carried.name}, which keeps or reads more than it is given")
    asked = ("vmap", *dims, *(tensor.dim() for tensor in direct))
    rule = module.rule(asked, lambda rules: rules.vmap(info, dims, direct))
    return tuple(rule.graph(*direct)), rule.dims


def _jvp(ctx: _Context, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The function's own `jvp`."""
    carried, saved, given = ctx.module.carried, ctx.saved_tensors, tangents[2:]
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


class _CarrierOfTurns(_Carrier):
    @staticmethod
    def backward(ctx: _Context, *gradients: object) -> tuple[object, ...]:
        recorded = torch.is_grad_enabled()
        with torch.no_grad():
            found = _Carrier.backward(ctx, *gradients)
        kept = _kept_apart(ctx) if hasattr(ctx, "kept") else _kept(ctx, ctx.module.carried)
        sources = [t for t in (*gradients, *kept) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not recorded or not sources:
            return found
        why = f"{ctx.module.carried.name}: {ctx.module.no_second_derivative}; {_REMEDY}"
        return tuple(_Refused.apply(why, t, *sources) if isinstance(t, torch.Tensor) else t for t in found)  # type: ignore[no-untyped-call]


class _Refusal(BackwardCFunction):
    why: str


class _Refused(torch.autograd.Function):
    """A tensor that depends on others by a derivative that nobody has."""

    generate_vmap_rule = True

    @staticmethod
    def forward(why: str, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: _Refusal, inputs: tuple[str, *tuple[torch.Tensor, ...]], output: torch.Tensor) -> None:
        ctx.why = inputs[0]

    @staticmethod
    def backward(ctx: _Refusal, gradient: torch.Tensor) -> tuple[object, ...]:
        raise RuntimeError(ctx.why)


_DETACHING = frozenset({"detach", "detach_", "alias"})
_REMEDY = "a compiled program has no derivative of it. Keep the function out of it with torchcompile.disable"


def _no_second_derivative(module: CapturedFunction) -> str:
    """Why a trace of the backward, which has its operators, would be differentiated otherwise than eager does."""
    carried, backward = module.carried, module.backward_graph
    if carried.once:
        return "its backward may be differentiated once"
    if module.turns:
        return "its backward turns grad mode off or on"
    if any(own and index >= carried.outputs for own, index, _ in carried.saved):
        return "its backward reads what the forward computed inside, which has no history"
    for node in backward.graph.nodes:
        if node.op == "call_module" and isinstance(backward.get_submodule(str(node.target)), CapturedFunction):
            return "its backward calls another function with a derivative of its own"
        if getattr(node.target, "__name__", str(node.target)) in _DETACHING:
            return "its backward detaches a value"
    return ""


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
        self._backwards = 0  # how many backwards the program is within
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
        within = self._backwards == 1  # its derivative is the second one, which the program may ask for
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
    def backward(self) -> Iterator[None]:
        """A block of a backward, which runs without history of its own."""
        self._backwards += 1
        try:
            with grad_mode(False):
                yield
        finally:
            self._backwards -= 1


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
        backward = self._backward(outputs)
        forward_nodes = regions.since(self.mark)
        made = set(forward_nodes)
        forward = regions.outline(forward_nodes, [*direct, *(n for n in backward.inputs if n not in made)])
        inputs = [*direct, *(node for node in forward.inputs if node not in direct)]
        kept = [node for node in backward.inputs if node in made and node not in results]
        make = self._maker(forward, backward, inputs, saved, outputs, [*results, *kept])
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

    def _backward(self, outputs: Sequence[torch.Tensor]) -> Region:
        regions, recorder, kind = self.recorder.regions, self.recorder, self.kind
        function = self.world.getattr(kind, "backward")
        if kind.backward is _NO_BACKWARD:
            function = self.world.getattr(kind, "vjp")
        if getattr(kind.backward, "__code__", None) is _ONCE:
            function = vars(kind.backward)["__wrapped__"]
        before, said = effects_so_far(self.outside), self.outside.emitted
        written = len(recorder.written)
        mark = regions.mark()
        gradients = [self._gradient(output, number) for number, output in enumerate(outputs)]
        try:
            with self.owner.backward(), recorder.conditions.refused(), regions.body():
                value = self.world.call(function, (self.context, *gradients), {})
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

    def _gradient(self, output: torch.Tensor, number: int) -> torch.Tensor:
        return self.recorder.stand_in(f"gradient_{number}", TensorSpec.of(output))

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

    def _maker(
        self,
        forward: Region,
        backward: Region,
        inputs: Sequence[fx.Node],
        saved: set[fx.Node],
        outputs: Sequence[torch.Tensor],
        results: Sequence[fx.Node],
    ) -> Callable[[fx.GraphModule, Region], nn.Module]:
        regions = self.recorder.regions
        places = {node: index for index, node in reversed(list(enumerate(inputs)))}
        of_forward = {node: index for index, node in reversed(list(enumerate(results)))}
        rows = tuple(
            (False, places[node], node in saved) if node in places else (True, of_forward[node], node in saved)
            for node in backward.inputs
        )
        apart = {id(t) for t in self.context.non_differentiable}
        own_vmap, own_jvp = own_rules(self.kind)
        rules = self._rules(len(outputs)) if regions.transforms and (own_vmap or own_jvp) else None
        carried = Carried(
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

        def make(graph: fx.GraphModule, region: Region) -> nn.Module:
            return CapturedFunction(graph, regions.finished(backward), carried, rules)

        return make

    def _rules(self, results: int) -> weakref.ref[Rules]:
        needs = self.context.needs_input_grad
        rules = Rules(self.outside, self.world, self.kind, self.args, results, lambda: FunctionContext(needs))
        self.owner.rules.append(rules)
        return weakref.ref(rules)
