"""Operators that take functions of the program (`torch.cond` and its like) in the graph: nodes with graphs inside.

The functions are captured as bodies; what they read of their surroundings becomes operands. The node calls a record of
`primtorch.higher_order`, which runs the bodies as Python would: no operator of torch is asked, which would bring a
compiler of its own. What eager refuses breaks the graph, and is refused by eager.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.fake import FakeTensor
from primtorch.higher_order import Cond, HigherOrder
from primtorch.spec import TensorSpec
from torchdynamo.calls.bodies import Bodies, Recorded, refusal
from torchdynamo.interpreter.protocol import InterpreterApi, World
from torchdynamo.outside.outside import Outside

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class HigherOrderCalls:
    """Captures calls of these operators of one capture."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.recorder = outside.recorder
        self.bodies = Bodies(outside, world, interpreter)

    def takes(self, function: Any) -> bool:
        return _name(function) in _RULES

    def call(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        try:
            given = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise refusal(str(error)) from error
        return _RULES[_name(function)](self, *given.args, **given.kwargs)

    # -- the operators ----------------------------------------------------------------------

    def cond(self, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        """`torch.cond(pred, true_fn, false_fn, operands)`. A predicate that is no tensor chooses at capture."""
        if isinstance(pred, (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)):
            self.interpreter.tail_call = False
            return self.world.call(true_fn if self.world.truth(pred) else false_fn, tuple(operands), {})
        if not isinstance(pred, FakeTensor) or pred.dtype is not torch.bool or pred.dim() > 0:
            raise refusal("a predicate that is no 0-d bool tensor")
        if not isinstance(operands, (tuple, list)) or not _tensors_only(operands):
            raise refusal("operands that are no tuple of tensors")
        chosen = self._node(pred)
        branches = [
            self.bodies.record("the true branch", true_fn, lambda: tuple(operands)),
            self.bodies.record("the false branch", false_fn, lambda: tuple(operands)),
        ]
        first, second = branches
        if first.tree != second.tree:
            raise refusal("the branches return different structures")
        for a, b in zip(first.specs, second.specs, strict=True):
            _refuse_unlike("the branches return tensors of different", a, b, strides=True)
        numbers, tensors = _read(branches)
        graphs, effects = zip(*(self.bodies.graph(body, [*numbers, *tensors]) for body in branches), strict=True)
        history = tuple(a or b for a, b in zip(first.history, second.history, strict=True))
        operator = Cond(graphs, len(numbers), history)
        results = self._write(operator, [*numbers, chosen, *tensors], first.specs, any(effects))
        return pytree.tree_unflatten(results, first.tree)

    # -- the node ---------------------------------------------------------------------------

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        node = self.recorder.node_of(tensor)
        if node is None:
            raise refusal("a tensor that capture did not see being made")
        return node

    def _write(
        self, operator: HigherOrder, operands: Sequence[fx.Node], specs: Sequence[TensorSpec], effect: bool
    ) -> list[torch.Tensor]:
        """The node of a call, and its results: tensors with the history that they have behind it."""
        recorder = self.recorder
        nodes = [recorder.regions.visible(node) for node in operands]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            made = [self.outside.mode.from_spec(spec) for spec in specs]
        if any(operator.differentiable):
            made = list(_History.of(operator, made, [node.meta["val"] for node in nodes]))
        node = recorder.write(operator, tuple(nodes), {}, tuple(made))
        if effect:
            node.meta["effect"] = True
        return made


class _History(torch.autograd.Function):
    """Gives fakes the history that the results of a call have."""

    @classmethod
    def of(cls, operator: HigherOrder, made: Sequence[torch.Tensor], operands: Sequence[Any]) -> Any:
        given = [value for value in operands if isinstance(value, torch.Tensor)]
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            return cls.apply(tuple(made), operator.differentiable, *given)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, made: tuple[torch.Tensor, ...], differentiable: tuple[bool, ...], *given: Any) -> Any:
        ctx.mark_non_differentiable(*(t for t, has in zip(made, differentiable, strict=True) if not has))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("a fake tensor's backward was run during capture")


def _tensors_only(tree: Any) -> bool:
    return all(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(tree))


def _refuse_unlike(what: str, a: TensorSpec, b: TensorSpec, strides: bool = False) -> None:
    """Breaks the graph where two tensors have not the same metadata. A comparison of symbols is a guard."""
    questions: tuple[tuple[str, Any, Any], ...] = (
        ("dtypes", a.dtype, b.dtype),
        ("devices", a.device, b.device),
        ("numbers of dimensions", a.dim(), b.dim()),
        ("shapes", a.shape, b.shape),
    )
    for name, one, other in (*questions, *((("strides", a.strides, b.strides),) if strides else ())):
        if not bool(one == other):
            raise refusal(f"{what} {name}: {one} and {other}")


def _read(bodies: Sequence[Recorded]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The numbers and the tensors that bodies read of their surroundings, each once."""
    numbers = dict.fromkeys(node for body in bodies for node in body.numbers)
    tensors = dict.fromkeys(node for body in bodies for node in body.tensors)
    return list(numbers), list(tensors)


def _name(function: Any) -> str:
    """Where torch keeps an operator's function; it may say of itself that it is of another module."""
    return f"{function.__globals__.get('__name__')}:{function.__name__}"


# By their names: torch has them in modules that a program need not have imported.
_RULES: dict[str, Callable[..., Any]] = {
    "torch._higher_order_ops.cond:cond": HigherOrderCalls.cond,
}
