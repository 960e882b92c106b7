"""Lowering: an ATen graph becomes a graph of one opset, node by node, without running anything."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import Argument

from primtorch.arguments import Sizes
from primtorch.builder import as_spec, nowhere, with_settled
from primtorch.decompose import Builder, Opset, Results, Rule, TakenWhole, Value, decompositions
from primtorch.decompose.core_aten import as_core_aten
from primtorch.decompose.devices import devices_of, placed
from primtorch.effects import has_effect
from primtorch.environment import environment_of
from primtorch.errors import DataDependent, NotClosed
from primtorch.higher_order import HigherOrder, with_bodies
from primtorch.layout import certainly_equal, is_dense, same_shape
from primtorch.memory import memory_of
from primtorch.prims import Prim, as_strided, copy_strided
from primtorch.printing import graph_text
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import SCALAR_FUNCTIONS, settled

aten = torch.ops.aten
SIZE_FUNCTIONS = frozenset(
    {
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.neg,
        operator.truediv,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.pow,
        torch.sym_max,
        torch.sym_min,
        torch.sym_int,
        torch.sym_float,
        torch.sym_not,
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
        *SCALAR_FUNCTIONS,
    }
)


def lower(
    gm: fx.GraphModule,
    opset: Opset = "prims",
    preserve: Sequence[OpOverload] = (),
    *,
    fresh: Sequence[bool] = (),
    walks_windows: Callable[[torch.device], bool] = nowhere,
    dump: Callable[[str, str], None] | None = None,
) -> fx.GraphModule:
    """Rewrite a functional graph of ATen overloads into `opset`.

    Each node keeps the meta of the node it comes from, and has its own `meta["val"]`: a `TensorSpec` (a tuple of them,
    a size). Equal calls are recorded once. Outputs keep the strides of the ATen graph's outputs. What eager moves from
    one device to another by itself is moved by `device_put`. An operator that has no rule stays a call of itself.

    Args:
        preserve: overloads that stay whole.
        fresh: for each of the graph's first results, whether its memory has to be its own. Results whose calls turn out
            to be equal are one value in the opset; of those that are fresh each but one is a copy. None of these first
            results is an input, unless it was one in ATen.
        walks_windows: devices on which a pooling's gradient is added up window by window: not gathered, position by
            position, from the windows.
        dump: called with (file name, text) of the result.

    Raises:
        NotClosed: the graph mutates a value, or calls something that is no operator.
    """
    lowering = _Lowering(gm, opset, decompositions(opset, preserve), frozenset(preserve), fresh, walks_windows)
    env = environment_of(gm)
    with env.asked_by(lambda: lowering.b.meta["stack"]) if env is not None else contextlib.nullcontext():  # type: ignore[arg-type, return-value]
        lowered = lowering.run()
    if dump is not None:
        dump(f"{opset}.py", graph_text(lowered, opset))
    return lowered


class _Lowering:
    def __init__(
        self,
        gm: fx.GraphModule,
        opset: Opset,
        rules: Mapping[OpOverload, Rule],
        preserve: frozenset[OpOverload],
        fresh: Sequence[bool],
        walks_windows: Callable[[torch.device], bool],
    ) -> None:
        self.gm = gm
        self.rules = rules
        self.preserve = preserve
        self.fresh = fresh
        self.opset = opset
        self.bodies: dict[fx.GraphModule, fx.GraphModule] = {}  # of operators over graphs, lowered: calls may share one
        self.graph = fx.Graph()
        self.b = Builder(self.graph, as_core_aten if opset == "core_aten" else None, walks_windows)
        self.env: dict[fx.Node, Any] = {}
        self.one_device = len({d for node in gm.graph.nodes for d in devices_of(node.meta.get("val"))}) < 2

    def run(self) -> fx.GraphModule:
        steps = {
            "placeholder": self.placeholder,
            "get_attr": self.get_attr,
            "call_function": self.call_function,
            "output": self.output,
        }
        for node in self.gm.graph.nodes:
            step = steps.get(node.op)
            if step is None:
                raise self.not_closed(node, f"a {node.op} node has no place in a functional ATen graph")
            if node.op == "call_function" and not node.users and _is_question(node.target):
                continue  # the program has its answer; what it did with it is the rest of the graph
            self.b.meta = {"stack": ()} | {k: v for k, v in node.meta.items() if k != "val"}
            self.env[node] = step(node)
        _remove_dead(self.graph)
        # Its Python source is written and compiled when somebody calls it; compilers only read the graph.
        lowered = _LazyGraphModule(self.gm, self.graph)
        lowered.meta.update(self.gm.meta)
        return lowered

    # --- nodes -----------------------------------------------------------------------------------
    def placeholder(self, node: fx.Node) -> object:
        made = self.graph.placeholder(str(node.target))
        made.meta.update(node.meta)
        val = node.meta.get("val")
        if val is None or (isinstance(val, (bool, int, float, str)) and not isinstance(val, torch.SymInt)):
            return val if val is not None else made
        if not isinstance(val, (torch.SymInt, torch.SymFloat)):
            made.meta["val"] = val = with_settled(as_spec(val))
        return self.b.result(made, val)

    def get_attr(self, node: fx.Node) -> object:
        made = self.graph.get_attr(str(node.target))
        made.meta.update(node.meta)
        val = node.meta.get("val")
        if val is None:
            val = operator.attrgetter(str(node.target))(self.gm)
            self.one_device = False  # it was not counted
        if not isinstance(val, (torch.Tensor, TensorSpec)):
            return made
        made.meta["val"] = with_settled(as_spec(val))
        return self.b.result(made, made.meta["val"])

    def call_function(self, node: fx.Node) -> object:
        target: Any = node.target
        if target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self.env[node.args[0]][node.args[1]]
        if target in SIZE_FUNCTIONS:
            return self.size(node)
        args = (
            fx.map_arg(node.args, self.env.__getitem__)
            if _nested(node.args)
            else tuple([self.env[a] if isinstance(a, fx.Node) else a for a in node.args])
        )
        kwargs = fx.map_arg(node.kwargs, self.env.__getitem__) if node.kwargs else {}
        if target in _MEMORY_READERS:
            args, kwargs = self.over_memory(node, args, kwargs)
        self.b.source, self.b.val = node, node.meta.get("val")
        if isinstance(target, Prim):
            return self.b.call(target, args, kwargs)
        if isinstance(target, HigherOrder):
            return self.over_graphs(node, target, args)
        rule = self.rules.get(target)
        if rule is None:
            return self.keep(node, args, kwargs)
        try:
            if not (self.one_device or isinstance(rule, TakenWhole)):
                args, kwargs = placed(self.b, target, args, kwargs, node.meta.get("val"))
            result = rule(self.b, *args, **kwargs)
        except NotClosed:
            raise
        except Exception as error:
            if isinstance(error, DataDependent):
                error.frames = tuple(node.meta.get("stack", ()))
            error.add_note(
                f"while lowering node {node.name}: {node.format_node()}"
                + "".join(f"\n  {frame}" for frame in node.meta.get("stack", ()))
            )
            raise
        self.check(node, result)
        return result

    def over_graphs(self, node: fx.Node, operator: HigherOrder, args: tuple[object, ...]) -> object:
        """The operator over lowered bodies, with its operands laid out as the bodies have them."""
        for body in operator.bodies:
            assert isinstance(body, fx.GraphModule)
            if body not in self.bodies:
                count = sum(len(n.args[0]) for n in body.graph.nodes if n.op == "output")  # type: ignore[arg-type]
                preserve, fresh = tuple(self.preserve), (True,) * count
                made = lower(body, self.opset, preserve, fresh=fresh, walks_windows=self.b.walks_windows)
                self.bodies[body] = made
        lowered = with_bodies(operator, [self.bodies[body] for body in operator.bodies])  # type: ignore[index]
        return self.b.record(lowered, self.as_traced(node, args), {}, _described(node.meta["val"]), node.name)

    def as_traced(
        self, node: fx.Node, args: Sequence[object], which: Callable[[Sizes, Sizes], bool] = lambda shape, strides: True
    ) -> tuple[object, ...]:
        """The node's arguments, tensors with the strides that they have in the ATen graph, where `which` says so."""
        return tuple(
            self.b.emit(copy_strided, value, strides)
            if isinstance(source, fx.Node)
            and isinstance(value, Value)
            and not _same_strides(value.spec, strides := tuple(source.meta["val"].stride()))
            and which(value.spec.shape, strides)
            else value
            for source, value in zip(node.args, args, strict=True)
        )

    def over_memory(self, node: fx.Node, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        """The arguments of an operator that names places in memory, with its tensor laid out as in the ATen graph.

        Values of the opset may have other strides there. A view's operator names places of the memory that it is a view
        of, which may lie outside of the view: it is given the owner of that memory.
        """
        view: Any = node.args[0]
        owner = view if node.target is aten.as_strided_scatter.default else memory_of(view)
        if not isinstance(self.env[owner], Value) or owner.meta["val"].dtype != view.meta["val"].dtype:
            owner = view
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        value, val = self.env[owner], owner.meta["val"]
        offset = given.get("storage_offset")
        if offset is None:
            offset = view.meta["val"].storage_offset()
        if not _same_strides(value.spec, tuple(val.stride())):
            value = self.b.emit(copy_strided, value, tuple(val.stride()))
        given |= {"self": value, "storage_offset": offset - val.storage_offset() + value.spec.offset}
        return tuple(given[name] for name in names), {}

    def size(self, node: fx.Node) -> object:
        """A size computed in the graph: its SymInt says all; a node is made where something needs one."""
        val = node.meta.get("val")
        if val is None or isinstance(val, torch.SymBool):
            args = fx.map_arg(node.args, self.env.__getitem__)
            return node.target(*[a.spec if isinstance(a, Value) else a for a in args])  # type: ignore[operator]
        return settled(val)

    def keep(self, node: fx.Node, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """An operator that stays a call of itself: preserved, a member of the opset, or one without a rule."""
        target = node.target
        if not isinstance(target, OpOverload) or target._schema.is_mutable:
            raise self.not_closed(node, _why_no_rule(target))
        val = node.meta.get("val")
        if val is None and target._schema.returns:
            raise self.not_closed(node, "is kept whole, but the node has no meta['val'] that describes its result")
        if target in self.preserve and torch.Tag.nondeterministic_seeded in target.tags:
            args = self.as_traced(node, args, is_dense)  # ATen draws in the order of memory
        return self.b.record(target, args, kwargs, _described(val), node.name)

    def check(self, node: fx.Node, result: Any) -> None:
        """A rule's result has the dtype and shape that ATen gives; a difference is a wrong rule."""
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, torch.SymFloat)) or isinstance(result, Results) or val is None:
            return
        pairs = zip(val, result, strict=False) if isinstance(val, (tuple, list)) else ((val, result),)
        for wanted, got in pairs:
            if not isinstance(got, Value) or wanted is None or isinstance(wanted, (int, float)):
                continue
            if got.spec.dtype != wanted.dtype or not same_shape(got.spec.shape, tuple(wanted.shape)):
                raise self.not_closed(node, f"its rule gives {got.spec}, ATen {as_spec(wanted)}")

    def output(self, node: fx.Node) -> None:
        wanted: Any = node.args[0]
        owners: dict[fx.Node, fx.Node] = {}
        first = tuple(
            self.apart(item, owners, fresh) if isinstance(item, fx.Node) else item
            for item, fresh in zip(wanted, self.fresh, strict=False)
        )
        rest = fx.map_arg(wanted[len(first) :] if first else wanted, self.exported)
        results = (*first, *rest) if first else rest
        made = self.graph.output(results)
        made.meta.update(node.meta)

    def apart(self, node: fx.Node, owners: dict[fx.Node, fx.Node], fresh: bool) -> Argument:
        """An output in memory that is no input's, and where it is `fresh`, no other fresh one's.

        `owners`: for a value that is returned already, the memory of the ATen graph that it stands for.
        """
        made = self.exported(node)
        if not isinstance(made, fx.Node) or not isinstance(self.env[node], Value):
            return made
        ours, theirs = memory_of(made), memory_of(node)
        taken = ours.op != "call_function" and theirs.op == "call_function"
        if fresh:
            taken = taken or owners.setdefault(ours, theirs) is not theirs
        if not taken:
            return made
        value = self.env[node] if self.env[node].node is made else Value(self.b, made, made.meta["val"])
        copy = self.copied(value, ours)
        if fresh:
            owners[memory_of(copy)] = theirs
        return copy

    def copied(self, value: Value, owner: fx.Node) -> fx.Node:
        """A value in memory of its own. Elements that share memory go on sharing it: the owner of theirs is copied."""
        spec = value.spec
        shared = any(
            isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1)
            for size, stride in zip(spec.shape, spec.strides, strict=True)
        )
        if not shared:
            return self.b.emit_anew(copy_strided, value, spec.strides).node  # type: ignore[no-any-return]
        base = as_spec(owner.meta["val"])
        memory = self.b.emit_anew(copy_strided, Value(self.b, owner, base), base.strides)
        return self.b.emit(as_strided, memory, spec.shape, spec.strides, spec.offset - base.offset).node

    def exported(self, node: fx.Node) -> Argument:
        """An output in the strides that ATen gives it, those of dims of size 1 included, which a program can read."""
        value = self.env[node]
        val = node.meta.get("val")
        if isinstance(value, Value):
            if val is not None and not isinstance(val, (int, float)):
                strides = tuple(val.stride())
                if not (_same_strides(value.spec, strides) and _same_steps(value.spec, strides)):
                    value = self.b.emit(copy_strided, value, strides)
            return value.node
        if isinstance(value, Results):
            return value.node
        exported: Argument = self.b._nodes(value)
        return exported

    def not_closed(self, node: fx.Node, reason: str) -> NotClosed:
        return NotClosed(str(node.target), reason, node.name, node.meta.get("stack", ()))


_MEMORY_READERS = frozenset({aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default})


def _same_strides(spec: TensorSpec, strides: Sequence[Size]) -> bool:
    return all(
        a is b or (isinstance(size, int) and size == 1) or certainly_equal(a, b)
        for size, a, b in zip(spec.shape, spec.strides, strides, strict=True)
    )


def _same_steps(spec: TensorSpec, strides: Sequence[Size]) -> bool:
    """Whether strides of dims of size 1 are written alike; nothing is asked of what nothing depends on."""
    return all(
        a is b or str(a) == str(b)
        for size, a, b in zip(spec.shape, spec.strides, strides, strict=True)
        if isinstance(size, int) and size == 1
    )


def _is_question(target: object) -> bool:
    """An operator that gives Python numbers or bools, whose answer a recorded program used outside of the graph."""
    return (
        isinstance(target, OpOverload)
        and not has_effect(target)
        and all(str(r.type) in ("bool", "number", "int", "float") for r in target._schema.returns)
    )


def _nested(args: Iterable[object]) -> bool:
    return any(isinstance(a, (tuple, list, dict, slice)) for a in args)


def _remove_dead(graph: fx.Graph) -> None:
    """Remove what no output needs. An assertion stays, and a draw of ATen's own, which moves the generator on."""
    for node in reversed(graph.nodes):
        if (
            not node.users
            and node.op not in ("placeholder", "output")
            and not (isinstance(node.target, Prim) and node.target.name == "assert_async")
            and not (isinstance(node.target, OpOverload) and _stays(node.target))
            and not (isinstance(node.target, HigherOrder) and node.target.tags)
        ):
            graph.erase_node(node)


def _stays(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or has_effect(op)


def _described(val: object) -> object:
    """What a node says of its result, with descriptors in place of tensors."""
    if isinstance(val, (tuple, list)):
        return tuple(map(_described, val))
    return as_spec(val) if isinstance(val, (torch.Tensor, TensorSpec)) else val


def _why_no_rule(target: object) -> str:
    if not isinstance(target, OpOverload):
        return "is not an operator; trace the program to ATen first"
    return (
        "writes to its arguments, and lowering takes functional graphs; functionalise the program first "
        "(aotautograd does)"
    )
