"""Cuts a joint graph into a forward and a backward: which values to keep, which to compute again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import Argument

from aotautograd.analysis import is_view
from aotautograd.errors import InvalidJoint
from aotautograd.gradients import symbols_of
from aotautograd.inputs import sizes_of, spec_of_clone
from aotautograd.passes import eliminate_dead_code, has_effect, is_effect, output_values
from aotautograd.schemas import PHASE, JointGraph, Partition, SavedReport
from primtorch.memory import memory_of, viewed
from primtorch.nodes import copy_node
from primtorch.schemas import DONATED
from primtorch.symbolic import depends_on_data, expr_of, hint_of, materialize, shape_env_of

aten = torch.ops.aten

DATA_DEPENDENT_HINT = 4096  # what a size that only the data tells counts as, where bytes are estimated


def is_backward(node: fx.Node) -> bool:
    """Whether a node was recorded while autograd's engine ran."""
    return node.meta.get(PHASE) == "backward"


def is_tensor(node: fx.Node) -> bool:
    """Whether a node gives one tensor: no number, and no tuple of tensors."""
    value = node.meta.get("val")
    return hasattr(value, "dtype") and hasattr(value, "shape")


def mark_phases(joint: JointGraph) -> None:
    """Gives a phase to the nodes that a pass made without one: what depends on a tangent belongs to the backward."""
    first = joint.metadata.num_placeholders
    for i, node in enumerate(joint.module.graph.nodes):
        if node.op == "placeholder":
            node.meta[PHASE] = "forward" if i < first else "backward"
        elif PHASE not in node.meta:
            late = any(is_backward(n) for n in node.all_input_nodes)
            node.meta[PHASE] = "backward" if late else "forward"


def default_partition(joint: JointGraph) -> Partition:
    """Keeps what autograd keeps: every forward value that the backward reads. A view is taken again from its base."""
    mark_phases(joint)
    saved: dict[fx.Node, None] = {}
    for node in joint.module.graph.nodes:
        if not is_backward(node) or node.op == "placeholder":
            continue
        for source in _sources(node):
            if is_backward(source) or source.op == "get_attr":
                continue
            if is_tensor(source):
                saved.setdefault(_memory_of(source))
            elif not is_symbol(source):
                saved.setdefault(source)
    return split(joint, list(saved))


def _sources(node: fx.Node) -> Iterable[fx.Node]:
    if node.op == "output":
        gradients = node.args[0]
        assert isinstance(gradients, (tuple, list))
        return [g for g in gradients if isinstance(g, fx.Node)]
    return node.all_input_nodes


def _memory_of(node: fx.Node) -> fx.Node:
    while is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if not is_tensor(source):  # an item of a list of views: step over the list
            source = source.all_input_nodes[0]
        node = source
    return node


def split(joint: JointGraph, saved: Sequence[fx.Node]) -> Partition:
    """The two graphs, given the forward values to keep.

    What the backward needs and is not kept is computed again from what is. Raises InvalidJoint if that would draw
    random numbers a second time.
    """
    graph = joint.module.graph
    count = joint.num_forward_outputs
    outputs = output_values(graph)
    forward_values, gradients = outputs[:count], outputs[count:]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    primals, tangents = inputs[: joint.metadata.num_placeholders], inputs[joint.metadata.num_placeholders :]
    symbol_nodes = [*(p for p in primals if is_symbol(p)), *_sizes_that_depend_on_data(graph)]
    symbol_nodes += _derived_sizes(graph, symbol_nodes, tangents, symbols_of(joint.metadata.made_gradients))
    late_effects = [n for n in graph.nodes if is_backward(n) and is_effect(n)]
    backward_nodes = _needed((*gradients, *late_effects), {*saved, *tangents, *symbol_nodes})
    kept = dict.fromkeys(n for n in saved if n in backward_nodes)
    given = set(primals)
    symbols = _symbols_used(symbol_nodes, (*backward_nodes, *tangents), symbols_of(joint.metadata.made_gradients))
    for node in backward_nodes:
        if node in given and node not in kept and node not in symbols:
            kept[node] = None
        elif node.op == "call_function" and has_effect(node) and not is_backward(node) and node not in kept:
            raise InvalidJoint(f"{node.format_node()} would run again in the backward", node.meta.get("stack", ()))
    tensors = [n for n in kept if is_tensor(n)]
    scalars = symbols + [n for n in kept if not is_tensor(n) and n not in symbols]
    changeable = {*unsafe_inputs(joint), *_returned_for_writing(joint, forward_values)}
    copies = {n for n in tensors if memory_of(n) in changeable}
    effects = [n for n in graph.nodes if n.op == "call_function" and not is_backward(n) and has_effect(n)]
    forward = extract(joint.module, primals, (*forward_values, *tensors, *scalars), "Forward", effects, copies, count)
    backward = extract(joint.module, (*scalars, *tensors, *tangents), gradients, "Backward", late_effects, copies)
    _donate(backward, tensors, copies, forward_values)
    _recompute_late(backward)
    recomputed = sum(
        1 for n in backward_nodes if n.op == "call_function" and not is_backward(n) and n not in kept and is_tensor(n)
    )
    own = [n for n in tensors if n.op != "placeholder"]
    report = SavedReport(len(tensors), len(scalars), sum(map(nbytes, own)), len(tensors) - len(own), recomputed)
    return Partition(
        forward, backward, len(tensors), len(scalars), report, tuple(n.name for n in tensors), joint.metadata
    )


def unsafe_inputs(joint: JointGraph) -> set[fx.Node]:
    """Placeholders that may hold other values when the backward runs: the program writes to them, or the caller may,
    as eager's autograd does not keep them: a parameter that autocast converts is one, of which eager keeps what it was
    converted to. What is saved of them is a copy.
    """
    metadata = joint.metadata
    written = {info.index for info in metadata.inputs if info.mutates_data}
    nodes = (n for n in joint.module.graph.nodes if n.op == "placeholder")
    placeholders = list(zip(nodes, metadata.placeholders, strict=False))
    unsafe = {node for node, index in placeholders if index in written}
    if metadata.kept is not None:
        kept = metadata.kept.inputs
        unsafe |= {node for node, index in placeholders if index not in kept and is_tensor(node)}
    return unsafe


def _returned_for_writing(joint: JointGraph, outputs: Sequence[Argument]) -> set[fx.Node]:
    """The memory of results that eager's autograd does not keep: the caller may write to it before the backward."""
    kept = joint.metadata.kept
    if kept is None:
        return set()
    returned = zip(outputs, joint.metadata.forward_outputs, strict=True)
    memory = {
        i: memory_of(v) for i, (v, info) in enumerate(returned) if info.kind == "value" and isinstance(v, fx.Node)
    }
    return {node for i, node in memory.items() if i not in kept.outputs} - {
        memory[i] for i in kept.outputs & memory.keys()
    }


def _donate(
    backward: fx.GraphModule, saved: Sequence[fx.Node], copies: Set[fx.Node], results: Sequence[Argument]
) -> None:
    """Marks what the backward may write over: memory that the forward has made, and handed to nobody."""
    known = {memory_of(result) for result in results if isinstance(result, fx.Node)}
    own = {n.name for n in saved if n in copies or not (memory_of(n) in known or _seen_by_others(memory_of(n)))}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in own:
            node.meta[DONATED] = True


def _seen_by_others(node: fx.Node) -> bool:
    """Whether a value is the caller's, or operators have it that are not torch's: on streams of their own, perhaps."""
    if node.op != "call_function":
        return True
    waiting = [node]
    makers = node.all_input_nodes if node.target is operator.getitem else ()
    while waiting:
        known = waiting.pop()
        users = [user for user in known.users if user.op == "call_function"]
        if not all(map(_is_torchs, (known, *makers, *users))):
            return True
        waiting += [user for user in users if viewed(user) is known]
    return False


def _is_torchs(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "aten") in ("aten", "prims")


def _recompute_late(backward: fx.GraphModule) -> None:
    """Moves what is computed again to just before its first use, so that its memory is not held before that."""
    graph = backward.graph
    *body, output = (n for n in graph.nodes if n.op != "placeholder")
    placed: set[fx.Node] = set()
    for wanted in (*(n for n in body if is_backward(n)), output):
        work = [wanted]
        while work:
            node = work[-1]
            before = [n for n in node.all_input_nodes if n.op != "placeholder" and n not in placed]
            if before and node not in placed:
                work.extend(reversed(before))
                continue
            work.pop()
            if node not in placed and node is not output:
                placed.add(node)
                output.prepend(node)
    backward.recompile()


def nbytes(node: fx.Node) -> int:
    """Size of a node's tensor in bytes; symbols count as their hints, sizes that depend on data as a few thousand."""
    value = node.meta["val"]
    size: int = value.dtype.itemsize
    for s in value.shape:
        size *= hint_of(s, DATA_DEPENDENT_HINT)
    return size


def is_symbol(node: fx.Node) -> bool:
    """Whether a node gives a number, not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, int, float))


def _needed(values: Iterable[object], stops: set[fx.Node]) -> dict[fx.Node, None]:
    """Every node that `values` depend on, `stops` included but not what is behind them."""
    found: dict[fx.Node, None] = {}
    work = [v for v in values if isinstance(v, fx.Node)]
    while work:
        node = work.pop()
        if node in found:
            continue
        found[node] = None
        if node not in stops:
            work.extend(node.all_input_nodes)
    return found


def _sizes_that_depend_on_data(graph: fx.Graph) -> list[fx.Node]:
    """A node of the forward for each symbol that no input carries; where a graph reads none, it gets one."""
    found: dict[str, fx.Node] = {}
    carriers: dict[str, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node):
            continue
        value = node.meta.get("val")
        if depends_on_data(value):
            found.setdefault(str(value), node)
        elif is_tensor(node):
            for dim, size in enumerate(value.shape):
                if depends_on_data(size):
                    carriers.setdefault(str(expr_of(size)), (node, dim))
    for name, (node, dim) in carriers.items():
        if name.isidentifier() and name not in found:
            with graph.inserting_after(node):
                read = found[name] = graph.call_function(aten.sym_size.int, (node, dim))
            read.meta.update(node.meta, val=node.meta["val"].shape[dim])
    return [node for name, node in found.items() if name.isidentifier()]


def _derived_sizes(
    graph: fx.Graph, given: Sequence[fx.Node], tangents: Sequence[fx.Node], names: set[str]
) -> list[fx.Node]:
    """A node for each symbol of the tangents' sizes, and of `names`, that is computed from others and has none: of two
    that are computed alike from equal numbers a graph has one."""
    nodes = {str(node.meta["val"]): node for node in given}
    made: list[fx.Node] = []
    sizes = [size for node in tangents for size in sizes_of(node.meta.get("val"))]
    for env in {id(env): env for env in map(shape_env_of, sizes) if env is not None}.values():
        wanted = {name for size in sizes for name in expr_of(size).symbols()} | names
        for name in sorted(wanted - nodes.keys()):
            definition = env.definitions.get(name)
            if definition is None:
                continue
            number = env.named(name)
            node = materialize(graph, number, nodes)
            assert isinstance(node, fx.Node) and callable(node.target)
            with graph.inserting_after(node):
                nodes[name] = graph.call_function(node.target, node.args)
            nodes[name].meta.update(node.meta, val=number)
            made.append(nodes[name])
    return made


def _symbols_used(symbol_nodes: Sequence[fx.Node], nodes: Iterable[fx.Node], names: set[str]) -> list[fx.Node]:
    """The nodes that give `names` and every symbol which occurs in the nodes' metadata, or that a node reads."""
    if not symbol_nodes:
        return []
    names = set(names)
    direct = set(nodes)
    for node in direct:
        for size in sizes_of(node.meta.get("val")):
            names |= expr_of(size).symbols()
    return [n for n in symbol_nodes if n in direct or str(n.meta["val"]) in names]


def extract(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Argument],
    name: str,
    effects: Sequence[fx.Node] = (),
    copies: Set[fx.Node] = frozenset(),
    count: int | None = None,
) -> fx.GraphModule:
    """The part of a graph that computes `outputs` from `inputs` and runs `effects`.

    Outputs from place `count` on that are in `copies` are cloned: the caller is about to overwrite the original.
    Without `count` the inputs that are in `copies` are such clones.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed = _needed((*outputs, *effects), set(inputs))
    for node in inputs:
        new = graph.placeholder(node.name)
        new.meta.update(node.meta)
        if count is None and node in copies:
            new.meta["val"] = spec_of_clone(node.meta["val"])
        env[node] = new
    for node in module.graph.nodes:
        if node in needed and node not in env and node.op not in ("placeholder", "output"):
            env[node] = copy_node(graph, node, env)
    results: list[Argument] = []
    for i, value in enumerate(outputs):
        if not isinstance(value, fx.Node):
            results.append(value)
            continue
        result = env[value]
        if count is not None and i >= count and value in copies:
            result = graph.call_function(aten.clone.default, (result,))
            result.meta.update(value.meta, val=spec_of_clone(value.meta["val"]))
        results.append(result)
    graph.output(tuple(results))
    eliminate_dead_code(graph)
    return _LazyGraphModule(module, graph, name)  # compilers seldom run its Python
