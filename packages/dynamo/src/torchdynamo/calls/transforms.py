"""Function transforms of `torch.func` in the graph: the function as a nested graph that the transform is given.

The function is interpreted like any other, on stand-ins for the tensors that the transform hands it; what it records
becomes a nested graph, called by a `TransformedGraph`, which gives it to the real transform at each call. So batching
rules, derivatives and their order are torch's, in capture (on fake tensors) as in every back end.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from primtorch.dispatch_mode import DispatchMode
from primtorch.errors import NoDerivative
from primtorch.fake import METADATA, FakeMode, wants_sizes
from primtorch.frozen import record
from primtorch.higher_order import HigherOrder, Transformable, handled_by
from primtorch.spec import TensorSpec
from torchdynamo.calls.autograd_functions import grad_mode
from torchdynamo.calls.captured_functions import CapturedFunction
from torchdynamo.graph.scalars import concrete
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

Tensors = tuple[torch.Tensor, ...]
Body = Callable[..., tuple[Tensors, Tensors]]  # of the stand-ins: (values, auxiliary values)


def _as_they_are(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@record
class Transform:
    """A transform over flat lists of tensors.

    Attributes:
        name: what the graph calls it.
        apply: (body, the call's tensors) -> the transformed call's results, flat.
        values: how many of the body's results are values; the others are auxiliary, and left alone.
    """

    name: str
    apply: Callable[[Body, Tensors], Sequence[torch.Tensor]]
    values: int


class TransformedGraph(nn.Module):
    """Runs a transform of `body`, whose first `closed_over` inputs are read by it and no arguments of the function.

    Attributes:
        own_derivatives: whether the body calls autograd functions, which derive otherwise than their operators do.
    """

    def __init__(self, body: fx.GraphModule, transform: Transform, closed_over: int) -> None:
        super().__init__()
        self.body = body
        self.transform = transform
        self.closed_over = closed_over
        self.own_derivatives = any(isinstance(module, CapturedFunction) for module in body.modules())

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The transform's results: values, then what the function gives beside them."""
        around, tensors = inputs[: self.closed_over], inputs[self.closed_over :]

        def body(*inner: object) -> tuple[Tensors, Tensors]:
            results = self.body.forward(*around, *inner)
            return tuple(results[: self.transform.values]), tuple(results[self.transform.values :])

        return tuple(self.transform.apply(body, tensors))


@record
class Recorded:
    """A function that was interpreted on stand-ins: its nodes, and its results as trees.

    Attributes:
        values, aux: the leaves, all of them tensors; `of_values`, `of_aux`: what they are the leaves of.
    """

    nodes: list[fx.Node]
    values: list[torch.Tensor]
    of_values: pytree.TreeSpec
    aux: list[torch.Tensor]
    of_aux: pytree.TreeSpec


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the program asked of a transform: the variables that the function it gave has of it."""

    func: Callee
    argnums: object = 0
    has_aux: bool = False
    in_dims: object = 0
    out_dims: object = 0
    randomness: str = "error"
    chunk_size: int | None = None

    @staticmethod
    def of(function: FunctionType, world: World) -> _Asked:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        known: dict[str, Any] = {name: world.load_cell(cells[name]) for name in _Asked.__slots__ if name in cells}
        return _Asked(**{name: value if name == "func" else concrete(value) for name, value in known.items()})


@record
class _Call:
    """A transformed call in the graph: its module, its inputs as nodes and as fakes, its results as fakes."""

    module: TransformedGraph
    inputs: list[fx.Node]
    values: list[object]
    results: list[torch.Tensor]


@record
class _Pullback:
    """What `vjp` or, with `along`, `linearize` gave beside the call's results: `size` leaves of a tree `of_values`."""

    call: _Call
    given: _Given
    of_values: pytree.TreeSpec
    size: int
    along: bool = False


class Transforms:
    """Captures calls of transformed functions of one capture."""

    def __init__(self, outside: Outside, world: World) -> None:
        self.outside = outside
        self.world = world
        self.recorder = outside.recorder
        self.pullbacks: dict[FunctionType, _Pullback] = {}

    def call(self, function: FunctionType, args: Args, kwargs: Kwargs) -> object:
        """A call of what a transform made of a function, or of what `vjp` gave."""
        pullback = self.pullbacks.get(function)
        if pullback is not None:
            return (self.push if pullback.along else self.pull)(pullback, *args, **kwargs)
        return _WRAPPERS[id(function.__code__)](self, _Asked.of(function, self.world), args, kwargs)

    # -- the transforms ---------------------------------------------------------------------

    def grad(self, asked: _Asked, args: Args, kwargs: Kwargs) -> object:
        """`torch.func.grad(func, argnums, has_aux)(*args, **kwargs)`."""
        gradients, (_, aux) = self._grad_and_value("grad", asked, args, kwargs)
        return (gradients, aux) if asked.has_aux else gradients

    def grad_and_value(self, asked: _Asked, args: Args, kwargs: Kwargs) -> object:
        """`torch.func.grad_and_value(func, argnums, has_aux)(*args, **kwargs)`."""
        gradients, (value, aux) = self._grad_and_value("grad_and_value", asked, args, kwargs)
        return gradients, (value, aux) if asked.has_aux else value

    def _grad_and_value(
        self, name: str, asked: _Asked, args: Args, kwargs: Kwargs
    ) -> tuple[object, tuple[object, object]]:
        given = _Given(args, asked.argnums)
        body = self._record(asked.func, given, kwargs, asked.has_aux, derives=True)
        count = len(given.tensors)

        def apply(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            def scalar(*inner: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
                (value,), aux = flat(*inner)
                return value, aux

            gradients, (value, aux) = torch.func.grad_and_value(scalar, tuple(range(count)), has_aux=True)(*tensors)
            return *gradients, value, *aux

        if len(body.values) != 1:
            raise _refusal(f"{name}() of a function that does not return one tensor")
        results = self._write(Transform(name, apply, 1), body, given.tensors).results
        value, aux = results[count], pytree.tree_unflatten(results[count + 1 :], body.of_aux)
        return given.like_arguments(results[:count]), (pytree.tree_unflatten([value], body.of_values), aux)

    def vmap(self, asked: _Asked, args: Args, kwargs: Kwargs) -> object:
        """`torch.vmap(func, in_dims, out_dims, randomness, chunk_size=chunk_size)(*args, **kwargs)`."""
        dims = pytree._broadcast_to_and_flatten(asked.in_dims, pytree.tree_structure(args))
        if dims is None or not isinstance(asked.in_dims, (int, tuple)):
            raise _refusal(f"in_dims={asked.in_dims!r} of {len(args)} arguments")
        given = _Given(args, None, [dim is not None for dim in dims])
        mapped = tuple(dim for dim in dims if dim is not None)
        kept = iter(mapped)
        body = self._record(asked.func, given, kwargs, inner=lambda tensor: tensor.select(next(kept), 0))
        results = pytree._broadcast_to_and_flatten(asked.out_dims, body.of_values)
        if results is None or any(type(dim) is not int for dim in (*results, *mapped) if dim is not None):
            raise _refusal(f"out_dims={asked.out_dims!r}")

        def apply(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            values = lambda *inner: flat(*inner)[0]
            run = torch.vmap(values, mapped, tuple(results), asked.randomness, chunk_size=asked.chunk_size)
            return run(*tensors)

        found = self._write(Transform("vmap", apply, len(body.values)), body, given.tensors).results
        return pytree.tree_unflatten(found, body.of_values)

    def jvp(
        self, func: Callee, primals: object, tangents: object, *, strict: bool = False, has_aux: bool = False
    ) -> object:
        """`torch.func.jvp(func, primals, tangents, strict=strict, has_aux=has_aux)`."""
        given, along = _Given(primals, None), _Given(tangents, None)
        count = len(given.tensors)
        if strict or given.tree != along.tree or not count:
            raise _refusal("jvp() whose tangents are no tree of tensors like the primals, or strict=True")
        body = self._record(func, given, {}, has_aux)

        def apply(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            value, tangent, aux = torch.func.jvp(flat, tensors[:count], tensors[count:], has_aux=True)
            return *value, *tangent, *aux

        found = self._write(Transform("jvp", apply, len(body.values)), body, [*given.tensors, *along.tensors]).results
        size = len(body.values)
        value, tangent = (
            pytree.tree_unflatten(part, body.of_values) for part in (found[:size], found[size : 2 * size])
        )
        aux = (pytree.tree_unflatten(found[2 * size :], body.of_aux),) if has_aux else ()
        return value, tangent, *aux

    def vjp(self, func: Callee, *primals: object, has_aux: bool = False) -> object:
        """`torch.func.vjp(func, *primals, has_aux=has_aux)`.

        A call of the pullback runs the nested graph anew: where the graph is traced, the values are computed once.
        """
        given = _Given(primals, None)
        body = self._record(func, given, {}, has_aux, derives=True)
        size = len(body.values)
        run = Transform("vjp", lambda flat, tensors: [value for part in flat(*tensors) for value in part], size)
        call = self._write(run, body, given.tensors)
        value = pytree.tree_unflatten(call.results[:size], body.of_values)
        pullback = self._pullback(_Pullback(call, given, body.of_values, size))
        aux = (pytree.tree_unflatten(call.results[size:], body.of_aux),) if has_aux else ()
        return value, pullback, *aux

    def linearize(self, func: Callee, *primals: object) -> object:
        """`torch.func.linearize(func, *primals)`. The values are computed once where the graph is traced, as of `vjp`.

        Eager's function keeps a part of the history of its primals, which depends on how it was folded.
        """
        given = _Given(primals, None)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given.tensors):
            raise _refusal("linearize() at what requires a gradient")
        body = self._record(func, given, {})
        size = len(body.values)
        call = self._write(Transform("linearize", lambda flat, tensors: flat(*tensors)[0], size), body, given.tensors)
        value = pytree.tree_unflatten(call.results, body.of_values)
        return value, self._pullback(_Pullback(call, given, body.of_values, size, along=True))

    def push(self, record: _Pullback, *tangents: object) -> object:
        """A call of the function that `linearize` gave."""
        leaves, tree = pytree.tree_flatten(tangents)
        given = record.given.tensors
        if tree != record.given.tree or not all(map(_alike, leaves, given)):
            raise _refusal("tangents that are no tree of tensors like the primals")

        def apply(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            _, tangent, _ = torch.func.jvp(flat, tensors[: len(given)], tensors[len(given) :], has_aux=True)
            return tangent  # type: ignore[no-any-return]

        return pytree.tree_unflatten(self._again(record, "pushforward", apply, leaves), record.of_values)

    def _again(
        self, record: _Pullback, name: str, apply: Callable[[Body, Tensors], Sequence[torch.Tensor]], leaves: list[Any]
    ) -> list[torch.Tensor]:
        """Another transform of a call's function, at the same values."""
        call = record.call
        module = TransformedGraph(call.module.body, Transform(name, apply, record.size), call.module.closed_over)
        node = self.recorder.regions.call_module(module, [*call.inputs, *map(self._node, leaves)], name)
        return self.finish(node, module, [*call.values, *leaves])

    def _pullback(self, record: _Pullback) -> FunctionType:
        def pullback(cotangents: object, retain_graph: bool = True, create_graph: bool | None = None) -> object:
            raise AssertionError(f"{record} was called outside of the capture that it is of")

        made = cast(FunctionType, pullback)
        self.pullbacks[made] = record
        return made

    def pull(self, record: _Pullback, cotangents: object, *_: object, **__: object) -> object:
        """A call of the function that `vjp` gave. It never frees what it reads, whatever `retain_graph` says."""
        leaves, tree = pytree.tree_flatten(cotangents)
        if tree != record.of_values or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise _refusal("cotangents that are no tree of tensors like the function's results")
        count = len(record.given.tensors)

        def apply(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            _, pull, _ = torch.func.vjp(flat, *tensors[:count], has_aux=True)
            gradients: Sequence[torch.Tensor] = pull(tensors[count:])
            return gradients

        return record.given.like_arguments(self._again(record, "pullback", apply, leaves))

    def jacobian(self, asked: _Asked, args: Args, kwargs: Kwargs, name: str) -> object:
        """`torch.func.jacrev(func, argnums, ...)(*args)`, or `jacfwd`."""
        more = {"chunk_size": asked.chunk_size} if name == "jacrev" else {"randomness": asked.randomness}
        given = _Given(args, asked.argnums)
        body = self._record(asked.func, given, {}, asked.has_aux, derives=name == "jacrev")
        count = len(given.tensors)

        def apply(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            transform = getattr(torch.func, name)(flat, tuple(range(count)), has_aux=True, **more)
            rows, aux = transform(*tensors)
            return *(column for row in rows for column in row), *aux

        found = self._write(Transform(name, apply, len(body.values)), body, given.tensors).results
        rows = [given.like_arguments(found[i * count : (i + 1) * count]) for i in range(len(body.values))]
        jacobian = pytree.tree_unflatten(rows, body.of_values)
        aux = pytree.tree_unflatten(found[len(body.values) * count :], body.of_aux)
        return (jacobian, aux) if asked.has_aux else jacobian

    # -- the nested graph -------------------------------------------------------------------

    def _record(
        self,
        func: Callee,
        given: _Given,
        kwargs: Kwargs,
        has_aux: bool = False,
        derives: bool = False,
        inner: Callable[[torch.Tensor], torch.Tensor] = _as_they_are,
    ) -> Recorded:
        """Interprets the function on stand-ins, with the metadata of `inner` of the tensors that are given.

        derives: whether autograd records what the function does: its arguments then require gradients, to whoever asks.
        """
        regions, written = self.recorder.regions, len(self.recorder.written)
        mark = regions.mark()
        stand_ins = [self._stand_in(tensor, inner, derives) for tensor in given.tensors]
        regions.transforms += 1
        try:
            with grad_mode(derives or torch.is_grad_enabled()), self.recorder.conditions.refused(), regions.body():
                result: Any = self.world.call(func, given.with_tensors(stand_ins), kwargs)
        except BreakGraph as error:
            reason = error.reason if error.reason == "symbolic_size" else "function_transform"
            wrapped = BreakGraph(reason, f"in the transformed function, {error.reason}: {error.detail}")
            wrapped.positions = error.positions
            raise wrapped from error
        finally:
            regions.transforms -= 1
        if has_aux and not (type(result) is tuple and len(result) == 2):
            raise _refusal("has_aux=True, and the function does not return a pair")
        values, of_values = pytree.tree_flatten(result[0] if has_aux else result)
        aux, of_aux = pytree.tree_flatten(result[1] if has_aux else ())
        if not values or not all(isinstance(leaf, torch.Tensor) for leaf in (*values, *aux)):
            raise _refusal("the function returns something else than tensors")
        nodes = regions.since(mark)
        own = set(nodes)
        if any(self.recorder.node_of(tensor) not in own for tensor in self.recorder.written[written:]):
            raise _refusal("the function writes to a tensor that was made before")
        del self.recorder.written[written:]
        return Recorded(nodes, values, of_values, aux, of_aux)

    def _stand_in(
        self, tensor: torch.Tensor, inner: Callable[[torch.Tensor], torch.Tensor], derives: bool
    ) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            spec = TensorSpec.of(inner(tensor))
        return self.recorder.stand_in("of_function", spec, derives)

    def _write(self, transform: Transform, body: Recorded, tensors: Sequence[torch.Tensor]) -> _Call:
        """The node of the transformed call, and its results as fakes."""
        regions = self.recorder.regions
        results = [self._node(tensor) for tensor in (*body.values, *body.aux)]
        inputs = [self._node(tensor) for tensor in tensors]
        own = set(body.nodes)
        region = regions.outline(body.nodes, [node for node in results if node not in own])
        region.outputs = [region.copies[node] for node in results]
        region.sealed = BreakGraph("function_transform", "a value of a transformed function is used outside of it")
        values = [*(node.meta["val"] for node in region.inputs), *tensors]
        module = TransformedGraph(regions.finished_sealed(region), transform, len(region.inputs))
        inputs = [*region.inputs, *inputs]
        node = regions.call_module(module, inputs, transform.name, region)
        return _Call(module, inputs, values, self.finish(node, module, values))

    def finish(self, node: fx.Node, module: TransformedGraph, values: Sequence[object]) -> list[torch.Tensor]:
        """What a transformed call gives for fakes. They are results of the node, but for those that it was given."""
        recorder = self.recorder
        try:
            with torch._C.DisableTorchFunction(), _Loops() as loops, handled_by(_Bodies(self.outside.mode, loops)):
                found = list(module(*values))
        except Exception as error:  # eager's, or of what transforms cannot do with sizes that are symbols
            if wants_sizes(error):
                detail = f"{module.transform.name}() of tensors with a size that varies"
                raise BreakGraph("symbolic_size", detail) from error
            if isinstance(error, BreakGraph):  # of a rule that an autograd function has of its own
                raise _refusal(f"{module.transform.name}(): {error.detail}") from error
            text = str(error).partition("\n")[0]
            raise _refusal(f"{module.transform.name}(): {type(error).__name__}: {text}") from error
        for name in loops.looped():
            recorder.looped.setdefault(name, recorder.user_frames())
        if module.own_derivatives and not recorder.regions.transforms and any(fake.requires_grad for fake in found):
            raise _refusal("autograd functions under a transform, of what has a history: nobody knows theirs behind it")
        recorder.annotate(node, tuple(found))
        for place, fake in enumerate(found):
            if recorder.node_of(fake) is not None:  # an argument, which transforms give back as the object that it is
                continue
            item = recorder.graph.call_function(operator.getitem, (node, place))
            recorder.annotate(item, fake)
            recorder.remember(fake, item)
        return found

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        return self.recorder.known_node(tensor, "function_transform")


class _Bodies:
    """Calls of operators over graphs, on fakes: what their bodies give is known, and which of them run is not."""

    def __init__(self, mode: FakeMode, loops: _Loops) -> None:
        self.mode = mode
        self.loops = loops

    def __call__(self, operator: HigherOrder, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fakes of a call's results."""
        if not isinstance(operator, Transformable):
            return operator.run(*operands)
        numbers, before = operands[: operator.sizes], self.loops.draws
        given = operator.given(operands)
        found = [
            self.run_body(body, (*numbers, *map(self._fake, tensors)))
            for body, tensors in zip(operator.bodies, given, strict=True)
        ]
        if operator.again and self.loops.draws != before:
            raise NoDerivative(f"a body of {operator.name} draws random numbers, and its derivative would draw others")
        return tuple(map(self._fake, operator.results(operands, found)))

    def run_body(self, body: Callable[..., Sequence[Any]], flat: tuple[object, ...]) -> Sequence[Any]:
        """A body's results."""
        return body.forward(*flat) if isinstance(body, fx.GraphModule) else body(*flat)

    def _fake(self, value: object) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else self.mode.from_spec(cast(TensorSpec, value))


class _Loops(DispatchMode):
    """Counts operators that `vmap` has no rule for: it calls them for each element of a batch. And those that draw
    random numbers."""

    def __init__(self) -> None:
        self.counts: Counter[OpOverload] = Counter()
        self.draws = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[object, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        if not _has_batching_rule(func) and any(isinstance(arg, torch.Tensor) for arg in args):
            self.counts[func] += 1
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))

    def looped(self) -> list[str]:
        """The names of those that were called more than once."""
        return [str(func) for func, count in self.counts.items() if count > 1]


@functools.cache
def _has_batching_rule(func: OpOverload) -> bool:
    if func in METADATA:  # the dispatcher has no operator for some of these questions
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "FuncTorchBatched")  # type: ignore[no-any-return]


class _Given:
    """The arguments of a transformed call, and the tensors among them that the transform works on.

    Args:
        argnums: the positions of those arguments, all of whose leaves are tensors; None for all of them.
        chosen: for each leaf of the arguments, whether the transform works on it; by `argnums` where not given.
    """

    def __init__(self, args: object, argnums: object, chosen: Sequence[bool] | None = None) -> None:
        if type(args) is not tuple or not args:
            raise _refusal("arguments that are no tuple")
        numbers = range(len(args)) if argnums is None else argnums if isinstance(argnums, tuple) else (argnums,)
        if not numbers or not all(type(n) is int and -len(args) <= n < len(args) for n in numbers):
            raise _refusal(f"argnums={argnums!r}")
        self.numbers = tuple(n % len(args) for n in numbers)
        self.one = argnums is not None and not isinstance(argnums, tuple)
        if len(set(self.numbers)) < len(self.numbers):
            raise _refusal(f"argnums={argnums!r}")
        self.leaves, self.tree = pytree.tree_flatten(args)
        sizes = [len(pytree.tree_leaves(arg)) for arg in args]
        starts = [sum(sizes[:n]) for n in range(len(args))]
        self.chosen = (
            [place for n in self.numbers for place in range(starts[n], starts[n] + sizes[n])]
            if chosen is None
            else [place for place, is_chosen in enumerate(chosen) if is_chosen]
        )
        self.trees = [pytree.tree_structure(args[n]) for n in self.numbers]
        self.tensors = [self.leaves[place] for place in self.chosen]
        if not self.tensors or not all(isinstance(leaf, torch.Tensor) for leaf in self.tensors):
            raise _refusal("a transformed argument that is no tensor")

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
        """The arguments with others in the place of the tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.chosen, tensors, strict=True):
            leaves[place] = tensor
        made: tuple[object, ...] = pytree.tree_unflatten(leaves, self.tree)
        return made

    def like_arguments(self, tensors: Sequence[object]) -> object:
        """One value for each tensor, as the arguments of `argnums` hold them."""
        rest = iter(tensors)
        trees = [pytree.tree_unflatten([next(rest) for _ in range(tree.num_leaves)], tree) for tree in self.trees]
        return trees[0] if self.one else tuple(trees)


def _alike(tangent: object, primal: torch.Tensor) -> bool:
    """Whether a tangent is one of a primal's."""
    facts = (primal.shape, primal.dtype, primal.device)
    return isinstance(tangent, torch.Tensor) and (tangent.shape, tangent.dtype, tangent.device) == facts


def _refusal(why: str) -> BreakGraph:
    return BreakGraph("function_transform", why)


def _wrapped_by(transform: Callee) -> CodeType | None:
    """The code of the functions that a transform returns."""
    names = ("wrapper", "wrapped", "wrapper_fn")
    return next((code for code in transform.__code__.co_consts if getattr(code, "co_name", "") in names), None)


# By the identity of the code: code is compared by its contents otherwise, and at length.
_WRAPPERS: dict[int, Callable[[Transforms, _Asked, Args, Kwargs], object]] = {
    id(_wrapped_by(torch.func.grad)): Transforms.grad,
    id(_wrapped_by(torch.func.grad_and_value)): Transforms.grad_and_value,
    id(_wrapped_by(torch.func.vmap)): Transforms.vmap,
    id(_wrapped_by(torch.func.jacrev)): functools.partial(Transforms.jacobian, name="jacrev"),
    id(_wrapped_by(torch.func.jacfwd)): functools.partial(Transforms.jacobian, name="jacfwd"),
}

# They only make a function of a function.
MAKERS: tuple[object, ...] = (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian)


def is_transformed(function: FunctionType) -> bool:
    """Whether a function is what a transform made of another one."""
    return id(function.__code__) in _WRAPPERS
