"""Operators that take functions of the program (`torch.cond` and its like) in the graph: nodes with graphs inside.

The functions are captured as bodies; what they read of their surroundings becomes operands. The node calls a record of
`primtorch.higher_order`, which runs the bodies as Python would: no operator of torch is asked, which would bring a
compiler of its own. What eager refuses breaks the graph, and is refused by eager.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from primtorch.control_flow import Cond, Scan, WhileLoop
from primtorch.fake import FakeTensor
from primtorch.higher_order import HigherOrder, row_major, slice_of
from primtorch.spec import TensorSpec
from torchdynamo.calls import attention
from torchdynamo.calls.bodies import REASON, Bodies, Recorded, refusal
from torchdynamo.interpreter.protocol import Args, Callee, InterpreterApi, Kwargs, World
from torchdynamo.outside.outside import Outside

Stand = Sequence[tuple[TensorSpec, bool]]  # what stands for tensors in a body: what each is, and whether it has history


class HigherOrderCalls:
    """Captures calls of these operators of one capture."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.recorder = outside.recorder
        self.bodies = Bodies(outside, world, interpreter)

    def takes(self, function: types.FunctionType) -> bool:
        """Whether the function is one of these operators."""
        return _name(function) in _RULES

    def call(self, function: types.FunctionType, args: Args, kwargs: Kwargs) -> object:
        """The operator's call as a node of the graph. Breaks the graph where its arguments do not bind."""
        try:
            given = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise refusal(str(error)) from error
        return _RULES[_name(function)](self, *given.args, **given.kwargs)

    # -- the operators ----------------------------------------------------------------------

    def cond(self, pred: object, true_fn: Callee, false_fn: Callee, operands: Any = ()) -> object:
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

    def map(self, f: Callee, xs: object, *args: object) -> object:
        """`map(f, xs, *args)`: f of each slice of `xs` along its first dimension."""
        leaves, tree = pytree.tree_flatten(xs)
        leaves = self._sliceable(leaves)
        slices = [(_slice(leaf), leaf.requires_grad) for leaf in leaves]
        body = self.bodies.record("the mapped function", f, lambda: (self._stand_ins(tree, slices), *args))
        results = self._scan(body, [], leaves, body.history)
        return pytree.tree_unflatten(results, body.tree)

    def scan(self, combine_fn: Callee, init: object, xs: object, *, dim: int = 0, reverse: bool = False) -> object:
        """`scan(combine_fn, init, xs, dim=dim, reverse=reverse)`."""
        carry, of_carry = pytree.tree_flatten(init)
        leaves, of_xs = pytree.tree_flatten(xs)
        if not carry or not _tensors_only(carry):
            raise refusal("an initial carry that is no tree of tensors")
        moved, dim = self._moved(leaves, dim)
        slices = [(_slice(leaf), leaf.requires_grad) for leaf in moved]

        def record(carries: Stand) -> Recorded:
            make = lambda: (self._stand_ins(of_carry, carries), self._stand_ins(of_xs, slices))
            return self.bodies.record("the step", combine_fn, make)

        def parts(body: Recorded) -> tuple[object, object]:
            found = pytree.tree_unflatten(range(len(body.specs)), body.tree)
            if type(found) is not tuple or len(found) != 2 or pytree.tree_structure(found[0]) != of_carry:
                raise refusal("the step returns no pair of a carry like the one that it is given, and a row")
            return found

        body, history = self._settled(carry, record, lambda body: pytree.tree_leaves(parts(body)[0]))
        results = self._scan(body, carry, moved, (*history, *body.history[len(carry) :]), reverse=bool(reverse))
        of_rows = pytree.tree_structure(parts(body)[1])
        rows = [row.movedim(0, dim) if 0 < dim < row.dim() else row for row in results[len(carry) :]]
        return pytree.tree_unflatten(results[: len(carry)], of_carry), pytree.tree_unflatten(rows, of_rows)

    def associative_scan(
        self, combine_fn: Callee, xs: object, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> object:
        """`associative_scan(combine_fn, xs, dim, reverse, combine_mode)`, as a loop that carries its last row."""
        leaves, tree = pytree.tree_flatten(xs)
        if combine_mode != "generic" and (combine_mode != "pointwise" or any(x.device.type == "cpu" for x in leaves)):
            raise refusal(f"combine_mode={combine_mode!r} of these tensors")
        moved, dim = self._moved(leaves, dim)
        if any(leaf.shape[0] < 2 for leaf in moved):
            raise refusal("a single slice, which the operator returns as it is")
        first, rest = (-1, slice(None, -1)) if reverse else (0, slice(1, None))
        carry, others = [leaf[first] for leaf in moved], [leaf[rest] for leaf in moved]
        slices = [(_slice(leaf), leaf.requires_grad) for leaf in others]

        def record(carries: Stand) -> Recorded:
            make = lambda: (self._stand_ins(tree, carries), self._stand_ins(tree, slices))
            body = self.bodies.record("the combining function", combine_fn, make)
            if body.tree != tree:
                raise refusal("the combining function returns another structure than it is given")
            return body

        body, history = self._settled(carry, record, lambda body: range(len(body.specs)))
        found = self._scan(body, carry, others, (*history, *history), reverse=bool(reverse), repeated=2)
        rows = []
        for start, row in zip(carry, found[len(carry) :], strict=True):
            whole = torch.cat([row, start[None]] if reverse else [start[None], row])
            rows.append(whole.movedim(0, dim) if dim else whole)
        return pytree.tree_unflatten(rows, tree)

    def while_loop(self, cond_fn: Callee, body_fn: Callee, carried_inputs: Iterable[object]) -> object:
        """`while_loop(cond_fn, body_fn, carried_inputs)`."""
        carry, tree = pytree.tree_flatten(tuple(carried_inputs))
        if not carry or not _tensors_only(carry):
            raise refusal("carried inputs that are no tensors")

        def record(carries: Stand) -> Recorded:
            make = lambda: tuple(self._stand_ins(tree, carries))
            body = self.bodies.record("the body of the loop", body_fn, make)
            if pytree.tree_structure(tuple(pytree.tree_unflatten(range(len(body.specs)), body.tree))) != tree:
                raise refusal("the body of the loop returns another structure than it is given")
            return body

        body, history = self._settled(carry, record, lambda body: range(len(body.specs)))
        carries = [(_carry(value), known) for value, known in zip(carry, history, strict=True)]
        condition = self.bodies.record("the condition", cond_fn, lambda: tuple(self._stand_ins(tree, carries)))
        asked = condition.specs[0]
        if len(condition.specs) != 1 or asked.dtype is not torch.bool or asked.dim() > 0:
            raise refusal("the condition returns no 0-d bool tensor")
        numbers, tensors = _read([condition, body])
        starts = [self._node(value) for value in carry]
        graphs, effects = zip(
            *(self.bodies.graph(part, [*numbers, *tensors]) for part in (condition, body)), strict=True
        )
        operator = WhileLoop(graphs, len(numbers), tuple(history), carries=len(carry))
        results = self._write(operator, [*numbers, *tensors, *starts], [spec for spec, _ in carries], any(effects))
        return pytree.tree_unflatten(results, tree)

    # -- attention ----------------------------------------------------------------------------

    def flex_attention(self, *args: Any, **kwargs: Any) -> object:
        """`flex_attention(query, key, value, score_mod, block_mask, ...)`."""
        return attention.flex_attention(self.bodies, self._node, self._write, *args, **kwargs)

    def create_mask(self, *args: object, **kwargs: object) -> object:
        """`create_mask(mod_fn, B, H, Q_LEN, KV_LEN, device)`, which `create_block_mask` begins with."""
        return attention.create_mask(self.bodies, *args, **kwargs)

    # -- loops ------------------------------------------------------------------------------

    def _moved(self, leaves: Sequence[Any], dim: int) -> tuple[list[torch.Tensor], int]:
        """Tensors with the dimension that a loop runs over in the first place, and its number."""
        if not leaves or not _tensors_only(leaves) or type(dim) is not int:
            raise refusal("an operand to scan that is no tree of tensors, or a dimension that is no int")
        rank = leaves[0].dim()
        if not -rank <= dim < rank or any(leaf.dim() <= dim % rank for leaf in leaves):
            raise refusal(f"dimension {dim} of tensors without it")
        dim %= rank
        return self._sliceable([leaf.movedim(dim, 0) if dim else leaf for leaf in leaves]), dim

    def _sliceable(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Row-major, so that the layout of a slice says nothing of the size that the loop runs over."""
        if not leaves or not _tensors_only(leaves) or any(leaf.dim() == 0 for leaf in leaves):
            raise refusal("an operand to take slices of that is no tree of tensors with dimensions")
        if any(leaf.shape[0] != leaves[0].shape[0] for leaf in leaves) or leaves[0].shape[0] == 0:
            raise refusal("operands of different lengths, or of none")
        return [leaf.contiguous() for leaf in leaves]

    def _stand_ins(self, tree: pytree.TreeSpec, described: Stand) -> Any:
        return pytree.tree_unflatten([self.bodies.stand_in(spec, history) for spec, history in described], tree)

    def _settled(
        self,
        carry: Sequence[torch.Tensor],
        record: Callable[[Stand], Recorded],
        places: Callable[[Recorded], Iterable[int]],
    ) -> tuple[Recorded, list[bool]]:
        """A step recorded for carries that require a gradient where any step's do, and which do. `places`: of the next
        carries among its results."""
        derives = torch.is_grad_enabled() or self.recorder.regions.transforms > 0
        history = [derives and self.bodies.has_history(value) for value in carry]
        specs = [_carry(value) for value in carry]
        while True:
            body = record(list(zip(specs, history, strict=True)))
            found = list(places(body))
            for spec, place in zip(specs, found, strict=True):
                _refuse_unlike("a carry comes back with different", spec, body.specs[place])
            then = [known or body.history[place] for known, place in zip(history, found, strict=True)]
            if then == history:
                return body, history
            self.bodies.discard(body)
            history = then

    def _scan(
        self,
        body: Recorded,
        carry: Sequence[torch.Tensor],
        mapped: Sequence[torch.Tensor],
        history: Sequence[bool],
        reverse: bool = False,
        repeated: int = 1,
    ) -> list[torch.Tensor]:
        """The node of a loop over slices, and its results."""
        starts = [self._node(value) for value in (*carry, *mapped)]
        inputs = [*body.numbers, *body.tensors]
        graph, effect = self.bodies.graph(body, inputs, repeated)
        operator = Scan(
            (graph,), len(body.numbers), tuple(history), carries=len(carry), mapped=len(mapped), reverse=reverse
        )
        operands = [*inputs, *starts]
        with torch._C.DisableTorchFunction():
            specs = operator.results(tuple(node.meta["val"] for node in operands), [body.specs * repeated])
        return self._write(operator, operands, specs, effect)

    # -- the node ---------------------------------------------------------------------------

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        return self.recorder.known_node(tensor, REASON)

    def _write(
        self, operator: HigherOrder, operands: Sequence[fx.Node], specs: Sequence[TensorSpec], effect: bool
    ) -> list[torch.Tensor]:
        """The node of a call, and its results: tensors with the history that they have behind it."""
        recorder = self.recorder
        nodes = [recorder.regions.visible(node) for node in operands]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            made: list[torch.Tensor] = [self.outside.mode.from_spec(spec) for spec in specs]
        if any(operator.differentiable):
            made = list(_History.of(operator, made, [node.meta["val"] for node in nodes]))
        node = recorder.write(operator, tuple(nodes), {}, tuple(made))
        if effect:
            node.meta["effect"] = True
        return made


class _Behind(BackwardCFunction):
    """What the history of a call's results keeps."""

    given: tuple[torch.Tensor, ...]
    has_second_derivative: bool
    orders: tuple[bool, ...]  # whether the call's derivative has one, that one's, ...; the last is that of all others


class _History(torch.autograd.Function):
    """Gives fakes the history that the results of a call have."""

    @classmethod
    def of(
        cls, operator: HigherOrder, made: Sequence[torch.Tensor], operands: Sequence[object]
    ) -> tuple[torch.Tensor, ...]:
        given = [value for value in operands if isinstance(value, torch.Tensor)]
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            orders = (True, False) if isinstance(operator, WhileLoop) else (True,)
            with_history: tuple[torch.Tensor, ...] = cls.apply(tuple(made), operator.differentiable, orders, *given)
            return with_history

    @staticmethod
    def forward(
        ctx: _Behind,
        made: tuple[torch.Tensor, ...],
        differentiable: tuple[bool, ...],
        orders: tuple[bool, ...],
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.given, ctx.orders, ctx.has_second_derivative = given, orders, orders[0]
        ctx.mark_non_differentiable(*(t for t, has in zip(made, differentiable, strict=True) if not has))
        return made

    @staticmethod
    def backward(ctx: _Behind, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """On fakes, for a derivative that the program takes itself: the results of another such call."""
        wanted: tuple[bool, ...] = ctx.needs_input_grad[3:]
        with torch.no_grad():
            made = tuple(
                torch.empty_like(t, memory_format=torch.contiguous_format)
                for t, is_wanted in zip(ctx.given, wanted, strict=True)
                if is_wanted
            )
        if torch.is_grad_enabled():
            made = _History.apply(made, (True,) * len(made), ctx.orders[1:] or ctx.orders, *ctx.given, *gradients)  # type: ignore[no-untyped-call]
        rest = iter(made)
        return (None, None, None, *(next(rest) if is_wanted else None for is_wanted in wanted))


def _slice(tensor: torch.Tensor) -> TensorSpec:
    with torch._C.DisableTorchFunction():
        return slice_of(tensor)


def _carry(tensor: torch.Tensor) -> TensorSpec:
    with torch._C.DisableTorchFunction():
        return row_major(tensor.shape, tensor)


def _tensors_only(tree: object) -> bool:
    return all(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(tree))


def _refuse_unlike(what: str, a: TensorSpec, b: TensorSpec, strides: bool = False) -> None:
    """Breaks the graph where two tensors have not the same metadata. A comparison of symbols is a guard."""
    questions: tuple[tuple[str, object, object], ...] = (
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


def _name(function: types.FunctionType) -> str:
    """Where torch keeps an operator's function; it may say of itself that it is of another module."""
    return f"{function.__globals__.get('__name__')}:{function.__name__}"


# By their names: torch has them in modules that a program need not have imported.
_RULES: dict[str, Callable[..., object]] = {
    "torch._higher_order_ops.associative_scan:associative_scan": HigherOrderCalls.associative_scan,
    "torch._higher_order_ops.cond:cond": HigherOrderCalls.cond,
    "torch._higher_order_ops.map:map": HigherOrderCalls.map,
    "torch._higher_order_ops.scan:scan": HigherOrderCalls.scan,
    "torch._higher_order_ops.while_loop:while_loop": HigherOrderCalls.while_loop,
    "torch.nn.attention.flex_attention:create_mask": HigherOrderCalls.create_mask,
    "torch.nn.attention.flex_attention:flex_attention": HigherOrderCalls.flex_attention,
}
