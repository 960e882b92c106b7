"""Derivatives that the program takes itself, in the graph: `torch.autograd.grad` and `backward`.

A graph calls `torch.autograd.grad` where the program runs autograd's engine: a node like any other. Whoever runs the
graph, or traces it, runs torch's engine over what the graph has computed so far: so values, what is freed, and what is
recorded for derivatives of a higher order are torch's, and the joint graph holds the derivative's operators. What
`backward` does besides, to `.grad`, is a write that the program makes: it is seen by what follows and done behind the
graph.

In a graph only what the graph has computed is known. Where the engine would run on into a history that began outside,
or would call a hook, the graph ends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from primtorch.fake import FakeTensor
from primtorch.frozen import record
from torchdynamo._C import gradient_hooks
from torchdynamo.calls.autograd_functions import grad_mode
from torchdynamo.graph.derivatives import OUTSIDE, accumulates, nodes_behind
from torchdynamo.graph.recorder import tensors_in
from torchdynamo.graph.scalars import concrete
from torchdynamo.graph.tensor_classes import PLAIN_TENSORS
from torchdynamo.interpreter.protocol import Args, Kwargs, World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

T = TypeVar("T")


@record
class Asked:
    """A call of the engine, by the names of `torch.autograd.grad`. Without `inputs`: by the leaves that it reaches."""

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...] | None
    grad_outputs: tuple[Any, ...] | None
    retain_graph: bool
    create_graph: bool
    allow_unused: bool
    is_grads_batched: bool = False
    materialize_grads: bool = False


class Engine:
    """Captures calls of autograd's engine of one capture."""

    def __init__(self, outside: Outside, world: World) -> None:
        self.outside = outside
        self.world = world
        self.recorder = outside.recorder

    # -- what the program calls -------------------------------------------------------------

    def grad(self, fn: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        """`torch.autograd.grad(outputs, inputs, ...)`."""
        given = _bound(fn, args, kwargs)
        inputs = given["inputs"]
        names = list(self._items(inputs)) if isinstance(inputs, dict) else None
        if names is not None:
            inputs = tuple(self.world.getitem(inputs, name) for name in names)
        create = _flag(given, "create_graph")
        materialize = _flag(given, "materialize_grads")
        asked = Asked(
            outputs=self._tensors(given["outputs"]),
            inputs=self._tensors(inputs),
            grad_outputs=None if given["grad_outputs"] is None else self._items(given["grad_outputs"]),
            retain_graph=create if given["retain_graph"] is None else _flag(given, "retain_graph"),
            create_graph=create,
            allow_unused=materialize if given["allow_unused"] is None else _flag(given, "allow_unused"),
            is_grads_batched=_flag(given, "is_grads_batched"),
            materialize_grads=materialize,
        )
        if not given["only_inputs"]:
            raise _refusal("only_inputs=False")
        asked = self._checked(asked)
        found = self._differentiate(asked, asked.inputs or ())
        return found if names is None else dict(zip(names, found, strict=True))

    def method(self, fn: Callable[..., object], args: Args, kwargs: Kwargs) -> None:
        """`tensor.backward(gradient, retain_graph, create_graph, inputs)`."""
        given = _bound(fn, args, kwargs)
        self._backward((given["self"],), given["gradient"], given)

    def backward(self, fn: Callable[..., object], args: Args, kwargs: Kwargs) -> None:
        """`torch.autograd.backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)`."""
        given = _bound(fn, args, kwargs)
        if given["grad_variables"] is not None:
            raise _refusal("grad_variables, the older name of grad_tensors")
        self._backward(self._tensors(given["tensors"]), given["grad_tensors"], given)

    def _backward(self, outputs: tuple[torch.Tensor, ...], gradients: object, given: Mapping[str, object]) -> None:
        create = _flag(given, "create_graph")
        asked = Asked(
            outputs=outputs,
            inputs=None if given["inputs"] is None else self._tensors(given["inputs"]),
            grad_outputs=None if gradients is None else self._items(gradients),
            retain_graph=create if given["retain_graph"] is None else _flag(given, "retain_graph"),
            create_graph=create,
            allow_unused=True,
        )
        leaves = self._leaves(asked)
        asked = self._checked(asked, leaves)
        present = [self._present(leaf, create) for leaf in leaves]
        kept = self._told(lambda: _rehearsed(asked, leaves, [before is not None for before in present]))
        found = self._differentiate(asked, leaves)
        for leaf, before, keeping, gradient in zip(leaves, present, kept, found, strict=True):
            if gradient is not None:
                accumulate = self._accumulate_with_history if create else self._accumulate
                accumulate(leaf, before, keeping, gradient)

    # -- what is differentiated -------------------------------------------------------------

    def _items(self, given: object) -> tuple[Any, ...]:
        """One tensor (or None), or the items of an iterable of the program's."""
        if given is None or isinstance(given, torch.Tensor):
            return (given,)
        found: Any = self.world.call(tuple, (given,), {})
        return tuple(found)

    def _tensors(self, given: object) -> tuple[torch.Tensor, ...]:
        items = self._items(given)
        if not items or not all(isinstance(item, torch.Tensor) for item in items):
            raise _refusal("what is differentiated, or by what, is no tensor")
        return items

    def _leaves(self, asked: Asked) -> tuple[torch.Tensor, ...]:
        """The leaves whose `.grad` a backward writes, each once."""
        if asked.inputs is not None:
            if not all(tensor.is_leaf and tensor.requires_grad for tensor in asked.inputs):
                raise _refusal("backward(inputs=...) of tensors that are no leaves")
            leaves = list({id(tensor): tensor for tensor in asked.inputs}.values())
        else:
            leaves = [node.variable for node in nodes_behind(asked.outputs) if accumulates(node)]
        if not leaves:
            raise _refusal("no leaf requires a gradient")
        return tuple(leaves)

    def _checked(self, asked: Asked, leaves: Sequence[torch.Tensor] = ()) -> Asked:
        """The call, of tensors that the graph knows. Breaks where the engine would go beyond the graph, or call
        something of the program's. `leaves`: those that a backward reaches."""
        adopt = self.recorder.adopt_all
        outputs, inputs, gradients = adopt(asked.outputs), adopt(asked.inputs), adopt(asked.grad_outputs)
        self.recorder.refuse_call("grad")
        asked = replace(asked, outputs=outputs, inputs=inputs, grad_outputs=gradients)
        by = leaves or inputs or ()
        if any(self.outside.type_of(t) not in PLAIN_TENSORS for t in tensors_in((outputs, by, gradients))):
            raise _refusal("of a tensor subclass")
        self.recorder.data_writes.refuse(by)
        self._refuse(asked, by)
        return asked

    def _refuse(self, asked: Asked, inputs: Sequence[torch.Tensor]) -> None:
        watched = self.outside.ambient(engine_is_watched, ())
        if watched is not None:
            raise _refusal(str(watched))
        if self.recorder.regions.open:
            raise _refusal("within a function that becomes a graph of its own")
        given = [fake for _, _, fake in self.outside.tensors]
        by = {id(tensor) for tensor in inputs}
        from_outside = {
            id(fake.grad_fn): fake for fake in given if fake.requires_grad and not fake.is_leaf and id(fake) in by
        }
        entries = {id(fake) for fake in given if id(fake) in by}
        reached = []
        for node in nodes_behind(asked.outputs):
            if node.name() == OUTSIDE:
                fake = from_outside.get(id(node))
                if asked.inputs is None or entries - {id(fake)}:
                    raise _refusal("what is differentiated depends on a tensor whose history began outside")
                reached += [] if fake is None else [fake]
            elif accumulates(node):
                if self.outside.externals.lookup(node.variable) is not None:
                    reached.append(node.variable)
            elif node.name() in _GRAPHS and asked.create_graph and not node.has_second_derivative:
                raise _refusal(f"create_graph=True through {_GRAPHS[node.name()]}")
        self._refuse_hooks([tensor for tensor in reached if id(tensor) in by])

    def _refuse_hooks(self, tensors: Sequence[torch.Tensor]) -> None:
        sources = set()
        for tensor in tensors:
            known = self.outside.externals.lookup(tensor)
            if known is None:
                continue
            if gradient_hooks(known.original):
                raise _refusal(f"a hook is called with the gradient of {known.source.expression()}")
            if _has_grad_dtype(known.original):
                raise _refusal(f"the gradient of {known.source.expression()} has a dtype of its own")
            sources.add(known.source)
        self.outside.externals.guards.refuse_hooks(sources)

    def _told(self, run: Callable[[], T]) -> T:
        """What the engine gives on fakes. What it raises is eager's, or of what cannot be told of tensors without data:
        either way it is for the program to meet."""
        try:
            with torch._C.DisableTorchFunction(), torch.autograd.set_multithreading_enabled(False):
                return run()
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise _refusal(f"{type(error).__name__}: {text}") from error

    def _differentiate(self, asked: Asked, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The gradients: results of a node that runs the engine."""
        how: dict[str, Any] = {
            "grad_outputs": asked.grad_outputs,
            "retain_graph": asked.retain_graph,
            "create_graph": asked.create_graph,
            "allow_unused": asked.allow_unused,
            "is_grads_batched": asked.is_grads_batched,
            "materialize_grads": asked.materialize_grads,
        }
        if any(node.name() == _OF_BODIES for node in nodes_behind(asked.outputs)):
            how["materialize_grads"] = how["allow_unused"] = True  # the branch that runs need not use all operands
        how = {name: value for name, value in how.items() if value is not _DEFAULTS[name]}
        found = self._told(lambda: torch.autograd.grad(asked.outputs, inputs, **how))
        if not all(gradient is None or isinstance(gradient, FakeTensor) for gradient in found):
            raise _refusal("whose gradients are of a tensor subclass")
        node = self.recorder.write(torch.autograd.grad, (asked.outputs, inputs), how, found)
        if not asked.retain_graph:
            node.meta["effect"] = True  # a later derivative raises
        return found

    # -- .grad ------------------------------------------------------------------------------

    def _present(self, leaf: torch.Tensor, with_history: bool) -> torch.Tensor | None:
        before = self.world.getattr(leaf, "grad")
        if before is not None and (not isinstance(before, torch.Tensor) or (before.requires_grad and not with_history)):
            raise _refusal("a .grad that has a history of its own")
        return before

    def _accumulate(
        self, leaf: torch.Tensor, before: torch.Tensor | None, keeping: Keeping, gradient: torch.Tensor
    ) -> None:
        """What autograd does with the gradient of a leaf: it adds it to `.grad`; where there is none, it becomes that
        itself, or a copy of it does."""
        if before is not None:
            before.add_(gradient)
            return
        if keeping.copied:
            gradient = gradient.new_empty_strided(leaf.shape, keeping.strides).copy_(gradient)
        if tuple(gradient.stride()) != tuple(keeping.strides):
            raise _refusal("a gradient whose strides differ from one run of the engine to the next")
        self.outside.tensor_set(leaf, "grad", gradient)

    def _accumulate_with_history(
        self, leaf: torch.Tensor, before: torch.Tensor | None, keeping: Keeping, gradient: torch.Tensor
    ) -> None:
        """The same where gradients are differentiated: `.grad` becomes the sum, or a copy."""
        with grad_mode(True):
            kept = gradient.clone() if before is None else before + gradient
        if before is None and tuple(kept.stride()) != tuple(keeping.strides):
            raise _refusal("a gradient that autograd keeps with other strides")
        self.outside.tensor_set(leaf, "grad", kept)


def _bound(fn: Callable[..., object], args: Args, kwargs: Kwargs) -> Mapping[str, Any]:
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise _refusal(str(error)) from error
    bound.apply_defaults()
    return bound.arguments


def _flag(given: Mapping[str, object], name: str) -> bool:
    return bool(concrete(given[name]))


_DEFAULTS = {name: p.default for name, p in inspect.signature(torch.autograd.grad).parameters.items()}
_DEFAULTS["allow_unused"] = False


def _has_grad_dtype(tensor: torch.Tensor) -> bool:
    """Whether the gradient of a leaf is to have another dtype than the leaf, or any."""
    with torch._C.DisableTorchFunction():
        return tensor.is_leaf and getattr(tensor, "grad_dtype", tensor.dtype) is not tensor.dtype


def engine_is_watched() -> str | None:
    """What takes part in all that the engine does, or in what autograd saves for it, besides torch."""
    if torch.is_anomaly_enabled():
        return "in anomaly mode"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # type: ignore[attr-defined]
        return "under hooks for saved tensors"
    return None


# What is captured as graphs of its own.
_OF_BODIES = "_HistoryBackward"
_GRAPHS = {"_ResultBackward": "a torch.autograd.Function that has a first derivative alone", _OF_BODIES: "a while_loop"}


# -- what becomes of gradients ---------------------------------------------------------------


@record
class Keeping:
    """How a leaf keeps a gradient as `.grad` where it had none: as a copy of it, or itself, with these strides."""

    copied: bool
    strides: tuple[int | torch.SymInt, ...]


def _rehearsed(asked: Asked, leaves: Sequence[torch.Tensor], present: Sequence[bool]) -> list[Keeping]:
    """What autograd does with the gradients, seen in a backward of the fakes, whose histories stay as they are.

    A gradient that somebody else holds as well is copied: that depends on the order in which the engine runs.
    """
    came: dict[int, object] = {}

    def note(place: int, gradient: FakeTensor) -> None:
        came[place] = gradient.memory

    for leaf, has_one in zip(leaves, present, strict=True):
        leaf.grad = torch.empty_like(leaf).detach() if has_one else None
    hooks = [leaf.register_hook(functools.partial(note, place)) for place, leaf in enumerate(leaves)]
    try:
        inputs = None if asked.inputs is None else list(leaves)
        torch.autograd.backward(asked.outputs, asked.grad_outputs, retain_graph=True, inputs=inputs)
        made: list[Any] = [leaf.grad for leaf in leaves]
        return [
            Keeping(g is not None and g.memory is not came[place], () if g is None else g.stride())
            for place, g in enumerate(made)
        ]
    finally:
        for leaf, hook in zip(leaves, hooks, strict=True):
            hook.remove()
            leaf.grad = None


def _refusal(why: str) -> BreakGraph:
    return BreakGraph("backward", why)
