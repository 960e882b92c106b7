"""A dispatch mode that records ATen calls as an FX graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

from primtorch.dispatch_mode import DispatchMode
from primtorch.effects import written_tensors
from primtorch.errors import TraceError
from primtorch.fake import FakeTensor
from primtorch.higher_order import HigherOrder, handled_by
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec, spec_of
from primtorch.symbolic import materialize


class RecordingMode(DispatchMode):
    """Records each dispatched call as a node while it runs.

    Args:
        run: computes a call's result from (overload, args, kwargs); by default the call itself.
        frames: the user's frames to put on a node.
        before_write: told of each tensor that a call is about to write to.
        follows_history: what is computed where autograd records nothing is detached in the graph, and what is
            written there to a tensor that has a history raises TraceError.
    """

    def __init__(
        self,
        run: Callable[[OpOverload, tuple[object, ...], dict[str, object]], object] | None = None,
        frames: Callable[[], tuple[UserFrame, ...]] | None = None,
        before_write: Callable[[torch.Tensor], None] | None = None,
        follows_history: bool = False,
    ) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._run = run
        self._frames = frames
        self._before_write = before_write
        self.follows_history = follows_history
        self.symbols: dict[str, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique only while their tensors live

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Make `node` the one that gives `tensor`."""
        # A real tensor's metadata may be changed in place later; a descriptor says what it was here.
        node.meta.setdefault("val", tensor if isinstance(tensor, FakeTensor) else TensorSpec.of(tensor))
        node.meta.setdefault("stack", ())
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def placeholder(self, tensor: torch.Tensor | torch.SymInt | torch.SymFloat, name: str) -> fx.Node:
        """An input: a tensor, or a symbol, of which numbers among the arguments are computed in the graph."""
        node = self.graph.placeholder(name)
        if not isinstance(tensor, torch.Tensor):
            self.symbols[str(tensor)] = node
            node.meta.update(val=tensor, stack=())
            return node
        self.track(tensor, node)
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
        nodes = tuple(self.node_of(a) for a in args)
        node_options = {k: self.node_of(v) for k, v in options.items()}
        for written in written_tensors(func, args, options):
            if self.follows_history:
                self._refuse_unseen(written, (*args, *options.values()))
            if self._before_write is not None:
                self._before_write(written)
        out = self._run(func, args, options) if self._run is not None else func(*args, **options)
        node = self.graph.call_function(func, nodes, node_options)
        node.meta["stack"] = self._frames() if self._frames is not None else ()
        self._track_results(out, node)
        if self.follows_history and not torch.is_grad_enabled() and not func._schema.is_mutable:
            for part in out if isinstance(out, (tuple, list)) else (out,):
                self.detach(part)
        return out

    def _refuse_unseen(self, written: torch.Tensor, operands: Sequence[object]) -> None:
        """Raises at a write that autograd does not record, to memory of a tensor that has a history: its gradients go
        on as if nothing had been written, and a graph without writes cannot say that."""
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in operands):
            return
        memory = _memory(written)
        if any(t.requires_grad and _memory(t) == memory for t in self._alive):
            line = f" ({frames[-1]})" if self._frames is not None and (frames := self._frames()) else ""
            raise TraceError(
                f"the program writes to a tensor that has a history where autograd records nothing{line}: a graph of "
                "operators would differentiate the write. Compute a new tensor instead, or trace under torch.no_grad()"
            )

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
        node.meta["stack"] = self._frames() if self._frames is not None else ()
        self._track_results(found, node)
        return found

    def read_size(self, tensor: torch.Tensor, dim: int) -> None:
        """Makes a tensor's size a number of the graph, by the name of its symbol."""
        node = self.graph.call_function(torch.ops.aten.sym_size.int, (self.node_of(tensor), dim))
        node.meta.update(val=tensor.shape[dim], stack=self._frames() if self._frames is not None else ())
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


def _memory(tensor: torch.Tensor) -> object:
    """What tensors have in common that share memory."""
    if isinstance(tensor, FakeTensor):
        return tensor.memory
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def results_of(graph: fx.GraphModule) -> list[TensorSpec]:
    """Descriptors of what a body of an operator over graphs gives."""
    (output,) = graph.graph.find_nodes(op="output")
    return [spec_of(node.meta["val"]) for node in output.args[0]]
