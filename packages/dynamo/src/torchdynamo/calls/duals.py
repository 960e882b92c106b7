"""Dual numbers of `torch.autograd.forward_ad` in the graph: a dual tensor is its primal and a tangent beside it.

While a level is open, what the program computes of dual tensors is recorded as of any others. Where it asks for a
tangent, the nodes between the dual tensors and the value become a nested graph, of which the graph has the derivative
along the tangents (`torch.func.jvp`); whoever traces it computes the values once. A graph holds a level whole or not at
all: where it would end within, capture begins anew, and the graph ends before the level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.autograd import forward_ad

from primtorch.fake import FakeTensor
from torchdynamo.calls.transforms import Body, Tensors, Transform, TransformedGraph, Transforms
from torchdynamo.graph.recorder import tensors_in
from torchdynamo.graph.regions import graph_module
from torchdynamo.graph.targets import function_name
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, Rule
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph


class Duals:
    """The level of one capture.

    Attributes:
        entered: how many calls were recorded before the level was entered; None where none is open.
    """

    def __init__(self, outside: Outside, transforms: Transforms) -> None:
        self.outside = outside
        self.recorder = outside.recorder
        self.transforms = transforms
        self.entered: int | None = None
        self._before: frozenset[fx.Node] = frozenset()
        self._tangents: dict[fx.Node, torch.Tensor] = {}  # of the dual tensors that the program made
        self._primals: set[fx.Node] = set()  # what it took out of others: they have no tangent

    def rules(self) -> tuple[tuple[object, Rule], ...]:
        """The functions of `torch.autograd.forward_ad`, and what calls of them mean."""
        return (
            (forward_ad.enter_dual_level, self.enter),
            (forward_ad.exit_dual_level, self.exit),
            (forward_ad.make_dual, self.make),
            (forward_ad.unpack_dual, self.unpack),
        )

    def enter(self, fn: Callee, args: Args, kwargs: Kwargs) -> int:
        """Begins a level of dual numbers; the graph has one at a time."""
        recorder = self.recorder
        if self.entered is not None or recorder.regions.open or recorder.modes or args or kwargs:
            raise _refusal("a level of dual numbers within another block")
        if recorder.cut_at is not None and recorder.calls >= recorder.cut_at:
            raise _refusal("a level of dual numbers that the graph cannot hold whole")
        self.entered, self._before = recorder.calls, recorder.regions.mark()
        recorder.regions.transforms += 1
        return 0

    def exit(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        """Ends the level: tangents are gone."""
        if self.entered is None or args or kwargs.get("level") not in (None, 0):
            raise _refusal("the end of a level of dual numbers that began before the graph, or out of turn")
        self.entered = None
        self.recorder.regions.transforms -= 1
        self._tangents.clear()
        self._primals.clear()

    def make(self, fn: Callee, args: Args, kwargs: Kwargs) -> torch.Tensor:
        """`make_dual(tensor, tangent, level=None)`."""
        tensor, tangent = self._bound(("tensor", "tangent"), args, kwargs)
        if self.entered is None or self._dependent() & {self._node(tensor), self._node(tangent)}:
            raise _refusal("a dual tensor of dual tensors, or without a level")
        floats = tensor.is_floating_point() or tensor.is_complex()
        if not floats or tensor.dtype is not tangent.dtype or tensor.device != tangent.device:
            raise _refusal("a dual tensor of two that are unlike")
        one, other = tensor.spec.shape, tangent.spec.shape
        if len(one) != len(other) or not all(bool(a == b) for a, b in zip(one, other, strict=True)):
            raise _refusal("a dual tensor of two sizes")
        dual = self._view(tensor)
        if not torch.is_inference_mode_enabled():  # where autograd is not asked, and knows of no tangents
            self._tangents[self._node(dual)] = tangent
        return dual

    def unpack(self, fn: Callee, args: Args, kwargs: Kwargs) -> forward_ad.UnpackedDualTensor:
        """`unpack_dual(tensor, level=None)`."""
        (tensor,) = self._bound(("tensor",), args, kwargs)
        node = self._node(tensor)
        if self.entered is None:
            return forward_ad.UnpackedDualTensor(tensor, None)
        dependent = self._dependent()
        tangent: torch.Tensor | None
        if torch.is_inference_mode_enabled():
            tangent = None
        elif node in self._tangents:
            tangent = self._view(self._tangents[node])
        else:
            tangent = self._derived(node, dependent) if node in dependent else None
        primal = self._view(tensor)
        self._primals.add(self._node(primal))
        return forward_ad.UnpackedDualTensor(primal, tangent)

    # -- the nodes ---------------------------------------------------------------------------

    def _dependent(self) -> set[fx.Node]:
        """What has a tangent by now."""
        found = set(self._tangents)
        for node in self.recorder.graph.nodes:
            if node in self._before or node in self._primals or node in found:
                continue
            if not found.isdisjoint(node.all_input_nodes) and _has_tangent(node):
                found.add(node)
        return found

    def _derived(self, value: fx.Node, dependent: set[fx.Node]) -> torch.Tensor:
        """The tangent of a value: the derivative of all that was computed between the dual tensors and it."""
        for node in self.recorder.graph.nodes:
            if node not in self._before and node.meta.get("effect"):
                raise _refusal("a level of dual numbers in which something is written, drawn or set")
        needed, waiting = {value}, [value]
        while waiting:
            found = [n for n in waiting.pop().all_input_nodes if n in dependent and n not in needed]
            needed.update(found)
            waiting += [node for node in found if node not in self._tangents]
        duals = [node for node in self._tangents if node in needed]
        inner = [node for node in self.recorder.graph.nodes if node in needed and node not in self._tangents]
        if any(node.op == "call_module" for node in inner):
            raise _refusal("a tangent of what a graph of its own computes")
        around = list(dict.fromkeys(n for node in inner for n in node.all_input_nodes if n not in needed))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for source in (*around, *duals):
            copies[source] = graph.placeholder(source.name)
            copies[source].meta.update(val=source.meta.get("val"), stack=source.meta.get("stack", ()))
        for node in inner:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output((copies[value],))
        count, regions = len(duals), self.recorder.regions

        def along(flat: Body, tensors: Tensors) -> Sequence[torch.Tensor]:
            _, tangents, _ = torch.func.jvp(flat, tensors[:count], tensors[count:], has_aux=True)
            return tuple(tangents)

        module = TransformedGraph(
            graph_module(regions.modules, graph, "Region"), Transform("jvp", along, 1), len(around)
        )
        tangents = [self._tangents[node] for node in duals]
        inputs = [*around, *duals, *map(self._node, tangents)]
        call = regions.call_module(module, inputs, "jvp")
        (tangent,) = self.transforms.finish(call, module, [*(n.meta["val"] for n in (*around, *duals)), *tangents])
        self._primals.update((call, *call.users))
        return tangent

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # the recorder is told here already
            return self.recorder.record(torch.ops.aten.alias.default, (tensor,), {})  # type: ignore[no-any-return]

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        return self.recorder.known_node(tensor, "function_transform")

    def _bound(self, names: tuple[str, ...], args: Args, kwargs: Kwargs) -> list[FakeTensor]:
        given = dict(zip(names, args, strict=False)) | kwargs
        level = given.pop("level", None)
        tensors = [self.recorder.adopt_all(given.get(name)) for name in names]
        plain = all(isinstance(t, FakeTensor) and class_of(t) is None for t in tensors)
        if level not in (None, 0) or given.keys() != set(names) or not plain:
            raise _refusal("a dual tensor of something else than tensors")
        return tensors  # type: ignore[return-value]


# What gives a tensor that no derivative, in either direction, goes through.
_WITHOUT_TANGENT = frozenset({"detach", "data", "detach_"})


def _has_tangent(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else function_name(node.target)
    if name in _WITHOUT_TANGENT or (node.target is getattr and node.args[1] in _WITHOUT_TANGENT):
        return False
    return any(t.is_floating_point() or t.is_complex() for t in tensors_in(node.meta.get("val")))


def _refusal(why: str) -> BreakGraph:
    return BreakGraph("function_transform", why)
