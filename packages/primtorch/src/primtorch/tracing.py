"""A dispatch mode that records ATen calls as an FX graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from primtorch.dispatch_mode import DispatchMode
from primtorch.effects import written_tensors
from primtorch.errors import TraceError
from primtorch.fake import FakeTensor
from primtorch.higher_order import HigherOrder, handled_by
from primtorch.histories import step_of, untold, with_history
from primtorch.layout import written_alike
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec, spec_of
from primtorch.symbolic import materialize
from primtorch.unseen_writes import memory, owner_of_history, refuse_second_history


class RecordingMode(DispatchMode):
    """Records each dispatched call as a node while it runs.

    Args:
        run: computes a call's result from (overload, args, kwargs); by default the call itself.
        frames: the user's frames to put on a node.
        before_write: told of each tensor that a call is about to write to.
        follows_history: what is computed where autograd records nothing is detached in the graph, and what is
            written there leaves gradients as they are (`unseen_writes`).
        captured: the program is a graph, which makes no leaves of its own.
    """

    def __init__(
        self,
        run: Callable[[OpOverload, tuple[object, ...], dict[str, object]], object] | None = None,
        frames: Callable[[], tuple[UserFrame, ...]] | None = None,
        before_write: Callable[[torch.Tensor], None] | None = None,
        follows_history: bool = False,
        captured: bool = False,
    ) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._run = run
        self._frames = frames
        self._before_write = before_write
        self.follows_history = follows_history
        self.captured = captured
        self.symbols: dict[str, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []  # ids stay unique only while their tensors live
        self.seen_writes: list[object] = []  # memories
        self.unseen_writes: list[object] = []  # and those that autograd did not see
        self._with_history: set[fx.Node] = set()
        self._parted: list[object] = []

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Make `node` the one that gives `tensor`."""
        # A real tensor's metadata may be changed in place later; a descriptor says what it was here.
        node.meta.setdefault("val", tensor if isinstance(tensor, FakeTensor) else TensorSpec.of(tensor))
        node.meta.setdefault("stack", ())
        self._nodes[id(tensor)] = node
        self.alive.append(tensor)

    def placeholder(self, tensor: torch.Tensor | torch.SymInt | torch.SymFloat, name: str) -> fx.Node:
        """An input: a tensor, or a symbol, of which numbers among the arguments are computed in the graph."""
        node = self.graph.placeholder(name)
        if not isinstance(tensor, torch.Tensor):
            self.symbols[str(tensor)] = node
            node.meta.update(val=tensor, stack=())
            return node
        self.track(tensor, node)
        if tensor.requires_grad:
            self._with_history.add(node)
        return node

    def node_of(self, value: object) -> Any:
        """The argument with nodes in place of tensors; a tensor never seen becomes a constant of the graph."""
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            if node is None:
                name = f"constant_{len(self.constants)}"
                self.constants[name] = value
                node = self.graph.get_attr(name)
                self.track(value, node)
            return node
        if isinstance(value, (list, tuple)):
            return [self.node_of(v) for v in value]
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and self.symbols:
            return materialize(self.graph, value, self.symbols)
        return value

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        options = dict(kwargs or {})
        operands = [t for t in pytree.tree_leaves((args, options)) if isinstance(t, torch.Tensor)]
        write = self._follow(func, operands, written_tensors(func, args, options)) if self.follows_history else None
        given = self.node_of if write is None else write.source
        nodes = tuple(given(a) for a in args)
        node_options = {k: given(v) for k, v in options.items()}
        if self._before_write is not None:
            for written in written_tensors(func, args, options):
                self._before_write(written)
        seen = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
        out = self._run(func, args, options) if self._run is not None else func(*args, **options)
        node = self.graph.call_function(func, nodes, node_options)
        node.meta["stack"] = self.frames()
        self._track_results(out, node)
        if write is not None:
            write.done()
        elif self.follows_history:
            self._note_history(func, out, seen)
        return out

    # -- histories --------------------------------------------------------------------------

    def _follow(self, func: OpOverload, operands: list[torch.Tensor], written: list[torch.Tensor]) -> _Unseen | None:
        """Before a call: what has no history any more is detached. Returns the call's write if autograd does not see
        it."""
        for tensor in operands:
            self.settle(tensor)
        for tensor in written:
            if memory(tensor) in self._parted:
                raise TraceError(
                    f"the program writes to memory that it has two names for, one of which a graph of operators has as "
                    f"a copy{self.line()}: clone one of them"
                )
        if not written or _has_own_autograd(func):
            return None
        derived = torch._C._current_autograd_node()
        if derived is not None and derived.name().endswith(
            "CopySlices"
        ):  # it writes to parts of gradients, as views of them
            raise TraceError(
                "the program takes the derivative of a write to a part of a tensor, which a graph of operators has no "
                f"form for{self.line()}: make a new tensor of the parts, or keep it out of the graph"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
            for tensor in written:
                refuse_second_history(self.alive, tensor, self.line())
                self.seen_writes.append(memory(tensor))
                aliases = (alias for alias in self.alive if memory(alias) == memory(tensor))
                self._with_history.update(self._nodes[id(alias)] for alias in aliases)
            return None
        return _Unseen(self, written)

    def settle(self, tensor: torch.Tensor) -> None:
        """Has the graph say what is known of a tensor's history where the program reads it.

        Raises:
            TraceError: its history is from a function of which the graph has but the operators of the forward.
        """
        node = self._nodes.get(id(tensor))
        if node is None:
            return
        if not tensor.requires_grad:
            if node in self._with_history:
                self.detach(tensor)
            return
        if node.target is torch.ops.aten.detach.default:
            self._nodes[id(tensor)] = self._unpacked(tensor, node)
        name = untold(tensor)
        if name is not None and not _has_own_autograd(_called(node)):
            raise TraceError(
                f"{name} has a derivative of its own, which a graph of operators does not have here{self.line()}: "
                "leave aten_graph out, or trace under torch.no_grad()"
            )

    def _unpacked(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """What autograd kept, or has computed again, and gives to a derivative: it does so past the history, and then
        has that of the tensor that the graph knows."""
        step = step_of(tensor)
        for known in self.alive:
            if known is tensor or not known.requires_grad:
                continue
            if step is None:  # of inputs no more is told than where they lie
                same = self.captured and step_of(known) is None and memory(known) == memory(tensor)
                same = same and written_alike(known.shape, tensor.shape)
                same = same and written_alike(known.stride(), tensor.stride())
            else:
                same = step_of(known) is step and known.output_nr == tensor.output_nr
            if same:
                return self._nodes[id(known)]
        return node

    def _note_history(self, func: OpOverload, out: object, seen: bool) -> None:
        """Behind a call: what is computed where nothing is recorded is detached; what has a history may lose it."""
        for part in out if isinstance(out, (tuple, list)) else (out,):
            node = self._nodes.get(id(part))
            if node is None:
                continue
            if seen or _has_own_autograd(func):  # whose forward runs where nothing is recorded
                self._with_history.add(node)
            elif not torch.is_grad_enabled() and not func._schema.is_mutable:
                self.detach(part)

    def frames(self) -> tuple[UserFrame, ...]:
        """The user's frames of the call that is recorded."""
        return self._frames() if self._frames is not None else ()

    def line(self) -> str:
        """The user's line, for a message."""
        return f" ({frames[-1]})" if (frames := self.frames()) else ""

    def part(self, tensor: torch.Tensor) -> None:
        """From here on nobody may write to a tensor's memory: the graph has copies of it where the program has
        aliases."""
        self._parted.append(memory(tensor))

    def detach(self, value: object) -> None:
        """From here on a tensor is one without a history, in the graph."""
        node = self._nodes.get(id(value))
        if node is None or not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return
        if node.target is not torch.ops.aten.detach.default:
            detached = self.graph.call_function(torch.ops.aten.detach.default, (node,))
            detached.meta["stack"] = node.meta["stack"]
            self.track(value, detached)

    def call_graphs(self, operator: HigherOrder, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Records the call of an operator whose bodies are functional graphs, and gives its results: of fakes by what
        the bodies say, else by running them."""
        fake_mode = next((value.fake_mode for value in operands if isinstance(value, FakeTensor)), None)
        if fake_mode is None:
            with self.paused(), handled_by(None):
                found = tuple(operator.run(*operands))
        else:
            bodies = [results_of(body) for body in operator.bodies]  # type: ignore[arg-type]
            found = tuple(map(fake_mode.from_spec, operator.results(tuple(operands), bodies)))
        node = self.graph.call_function(operator, tuple(self.node_of(value) for value in operands))
        node.meta["stack"] = self.frames()
        self._track_results(found, node)
        return found

    def read_size(self, tensor: torch.Tensor, dim: int) -> None:
        """Makes a tensor's size a number of the graph, by the name of its symbol."""
        node = self.graph.call_function(torch.ops.aten.sym_size.int, (self.node_of(tensor), dim))
        node.meta.update(val=tensor.shape[dim], stack=self.frames())
        self.symbols[str(tensor.shape[dim])] = node

    def _track_results(self, out: object, node: fx.Node) -> None:
        if isinstance(out, torch.Tensor):
            self.track(out, node)
            return
        if not isinstance(out, (tuple, list)):
            node.meta["val"] = out
            if isinstance(out, (torch.SymInt, torch.SymFloat)):  # a number out of a tensor
                self.symbols.setdefault(str(out), node)
            return
        node.meta["val"] = tuple(
            TensorSpec.of(o) if isinstance(o, torch.Tensor) and not isinstance(o, FakeTensor) else o for o in out
        )
        for i, part in enumerate(out):
            if isinstance(part, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (node, i))
                item.meta["stack"] = node.meta["stack"]
                self.track(part, item)

    def finish(self, outputs: object) -> fx.GraphModule:
        """The recorded graph with these outputs (nested tuples and lists of tensors and numbers)."""
        self.graph.output(
            self.node_of(outputs) if not isinstance(outputs, tuple) else tuple(self.node_of(o) for o in outputs)
        )
        root = torch.nn.Module()
        for name, tensor in self.constants.items():
            root.register_buffer(name, tensor, persistent=False)
        return _LazyGraphModule(root, self.graph)  # its Python is seldom run


class _Unseen:
    """A write that autograd does not see, of a call that is about to be recorded."""

    def __init__(self, mode: RecordingMode, written: list[torch.Tensor]) -> None:
        self.mode = mode
        self.written = {id(tensor) for tensor in written}
        self.owners: list[tuple[fx.Node, fx.Node]] = []  # of histories, as they were before the write
        places: list[object] = []
        for tensor in written:
            owner = owner_of_history(mode.alive, tensor, mode.line())
            mode.unseen_writes.append(memory(tensor))
            if owner is None or memory(owner) in places:
                continue
            places.append(memory(owner))
            node = mode.node_of(owner)
            self.owners.append((node, self._call(torch.ops.aten.clone.default, node)))

    def source(self, value: object) -> Any:
        """An argument of the call: what is read has no history."""
        if isinstance(value, (list, tuple)):
            return [self.source(item) for item in value]
        node = self.mode.node_of(value)
        if not isinstance(value, torch.Tensor) or id(value) in self.written or not value.requires_grad:
            return node
        return self._call(torch.ops.aten.detach.default, node)

    def done(self) -> None:
        """Behind the write: the values are new, the histories the old ones."""
        for node, before in self.owners:
            self._call(torch.ops.aten.copy_.default, node, self._call(with_history, node, before))

    def _call(self, target: OpOverload, *nodes: fx.Node) -> fx.Node:
        node = self.mode.graph.call_function(target, nodes)
        node.meta.update(val=nodes[0].meta["val"], stack=self.mode.frames())
        return node


def _has_own_autograd(func: object) -> bool:
    """Whether an operator has a derivative that was registered for it, so that its kernel runs within an autograd
    function."""
    if not isinstance(func, OpOverload) or func.namespace in ("aten", "prims"):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Autograd"))


def _called(node: fx.Node) -> object:
    return node.args[0].target if node.target is operator.getitem and isinstance(node.args[0], fx.Node) else node.target


def results_of(graph: fx.GraphModule) -> list[TensorSpec]:
    """Descriptors of what a body of an operator over graphs gives."""
    (output,) = graph.graph.find_nodes(op="output")
    return [spec_of(node.meta["val"]) for node in output.args[0]]
