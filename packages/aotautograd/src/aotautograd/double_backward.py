"""A backward that can be differentiated: the gradients as one program of the forward's inputs and the tangents.

It is derived when a backward runs with `create_graph=True`, and compiled like any other program, so that its own
backward
is again derived on demand, to any order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from aotautograd.errors import DoubleBackwardUnavailable
from aotautograd.inputs import sizes_of
from aotautograd.missing_tangents import without_tangents
from aotautograd.partitioners import is_unbacked
from aotautograd.passes import is_random, output_values
from aotautograd.schemas import GradientInfo, JointGraph
from primtorch.printing import made_by
from primtorch.symbolic import expr_of, hint_of

aten = torch.ops.aten

# Their results depend on the argument's metadata, not on its values.
_METADATA_ONLY = frozenset(
    {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like}
)


@dataclass(frozen=True, slots=True)
class GradientProgram:
    """`module` takes the forward's inputs, the tangents at the places `tangents` and the kept values named `kept`, and
    returns the gradients."""

    module: fx.GraphModule
    tangents: tuple[int, ...]
    kept: tuple[str, ...]
    made_gradients: tuple[GradientInfo, ...]


CompileProgram = Callable[[fx.GraphModule, Sequence[object]], Callable[..., Sequence[object]]]


class GradientsOnDemand:
    """Computes a joint graph's gradients so that autograd can follow.

    Derives and compiles that at its first use for each pattern of `requires_grad`.
    """

    def __init__(self, joint: JointGraph, saved_names: Sequence[str], compile_program: CompileProgram) -> None:
        self.joint = joint
        self.saved_names = tuple(saved_names)
        self.compile_program = compile_program
        self.reads = inputs_read(joint, saved_names)
        self.programs: dict[tuple[int, ...], GradientProgram] = {}
        self.compiled: dict[object, Callable[..., Sequence[object]]] = {}

    def __call__(
        self, inputs: Sequence[object], saved: Sequence[object], tangents: Sequence[object], missing: Sequence[int]
    ) -> tuple[Sequence[object], tuple[GradientInfo, ...]]:
        """The results of the gradient program, and how the gradients are made of them.

        `tangents` has zeros for the missing ones; gradients that only those lead to are None.
        """
        key = tuple(missing)
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = gradient_program(self.joint, self.saved_names, key)
        place = {name: i for i, name in enumerate(self.saved_names)}
        primals = self._readable(inputs, saved, place)
        values = [*primals, *(tangents[i] for i in program.tangents), *(saved[place[name]] for name in program.kept)]
        pattern = (key, *(isinstance(v, torch.Tensor) and v.requires_grad for v in values))
        run = self.compiled.get(pattern)
        if run is None:
            run = self.compiled[pattern] = self.compile_program(program.module, values)
        return run(*values), program.made_gradients

    def _readable(self, inputs: Sequence[object], saved: Sequence[object], place: dict[str, int]) -> list[object]:
        """The inputs' values before the program ran; for one that it wrote, the copy that the forward kept, if it
        did."""
        nodes = [n for n in self.joint.module.graph.nodes if n.op == "placeholder"]
        values = list(inputs)
        for i, (value, node) in enumerate(zip(inputs, nodes, strict=False)):
            if value is not None:
                continue
            if i not in self.reads:
                spec = node.meta["val"]
                sizes = [hint_of(s) for s in spec.shape]
                values[i] = torch.empty((), dtype=spec.dtype, device=spec.device).expand(sizes)
            elif node.name in place and not node.meta["val"].requires_grad:
                values[i] = saved[place[node.name]]
            else:
                raise DoubleBackwardUnavailable(
                    f"a derivative of the backward needs the value that input {node.name} had "
                    "before the program wrote it"
                )
        return values


def gradient_program(joint: JointGraph, saved_names: Sequence[str], missing: Sequence[int] = ()) -> GradientProgram:
    """The gradients of a joint graph of ATen operators, with the forward computed again from the inputs.

    Without what only the `missing` tangents lead to.

    Random values are not drawn again: they, or what was made of them alone, come from what the forward kept. Raises
    DoubleBackwardUnavailable if that is not enough.
    """
    nodes = list(joint.module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    kept, masks = _drawn_by_forward(nodes, inputs, saved_names)
    gradients = output_values(joint.module.graph)[joint.num_forward_outputs :]
    needed = _needed(gradients, {*kept, *masks.values()})
    for node in needed:
        if is_random(node) and node not in masks and node not in kept:
            raise DoubleBackwardUnavailable(
                f"a derivative of the backward needs the random value {node.format_node()}, "
                "which the forward did not keep",
                node.meta.get("stack", ()),
            )
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (*inputs, *kept, *masks.values()):
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
        if _depends_on_data(node.meta["val"]):  # the program finds the size anew: it is what the values at hand have
            del env[node].meta["val"]
    for node in nodes:
        if node in needed and node not in env:
            _copy(graph, node, env, masks)
    graph.output(tuple(env[g] if isinstance(g, fx.Node) else g for g in gradients))
    module = fx.GraphModule(joint.module, graph, "Gradients")
    made_by(module, "double_backward", joint.module)
    names = [n.name for n in inputs[joint.metadata.num_placeholders :]]
    variant = without_tangents(module, names, missing, joint.metadata.made_gradients)
    taken = tuple(i for i in range(len(names)) if i not in missing or i in variant.zeros)
    return GradientProgram(
        variant.module, taken, tuple(n.name for n in (*kept, *masks.values())), variant.made_gradients
    )


def inputs_read(joint: JointGraph, saved_names: Sequence[str]) -> frozenset[int]:
    """Places of the forward's inputs that the gradient program reads."""
    nodes = list(joint.module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    kept, masks = _drawn_by_forward(nodes, inputs, saved_names)
    needed = _needed(output_values(joint.module.graph)[joint.num_forward_outputs :], {*kept, *masks.values()})
    return frozenset(i for i, n in enumerate(inputs[: joint.metadata.num_placeholders]) if n in needed)


def _drawn_by_forward(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], saved_names: Sequence[str]
) -> tuple[list[fx.Node], dict[Argument, fx.Node]]:
    """What the forward kept of its random values: values made of draws alone, and the mask of each dropout."""
    saved = set(saved_names)
    drawn = _depends_on_draws(nodes)
    candidates = [n for n in nodes if n.name in saved and n.op != "placeholder" and n in drawn]
    values = _depends_on_values(nodes, inputs) if candidates else set()
    masks = {n.args[0]: n for n in candidates if _is_dropout_mask(n)}
    return [n for n in candidates if n not in values], masks


def _depends_on_data(value: object) -> bool:
    return any(is_unbacked(name) for size in sizes_of(value) for name in expr_of(size).symbols())


def _depends_on_values(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(inputs)
    for n in nodes:
        if getattr(n.target, "overloadpacket", None) in _METADATA_ONLY:
            continue
        if any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def _depends_on_draws(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for n in nodes:
        if n.op == "call_function" and (is_random(n) or any(a in found for a in n.all_input_nodes)):
            found.add(n)
    return found


def _is_dropout_mask(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    is_dropout = isinstance(source, fx.Node) and source.target is aten.native_dropout.default
    return is_dropout and bool(node.args[1] == 1)


def _needed(gradients: Sequence[object], known: set[fx.Node]) -> set[fx.Node]:
    """Every node that the gradients depend on; not what is behind the known ones."""
    found: set[fx.Node] = set()
    work = [g for g in gradients if isinstance(g, fx.Node)]
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            if node not in known:
                work.extend(_sources(node))
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node's copy in the gradient program reads: see `_copy`."""
    if node.target is aten._native_batch_norm_legit_functional.default:
        return [a for a in (*node.args[:3], *node.args[5:]) if isinstance(a, fx.Node)]
    return node.all_input_nodes


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], masks: dict[Argument, fx.Node]) -> None:
    source = node.args[0] if node.target is operator.getitem else None
    if source in masks:  # the value of a dropout whose mask is known
        dropped, p = env[source.args[0]], source.args[1]  # type: ignore[index, union-attr]
        kept = graph.call_function(torch.mul, (dropped, env[masks[source]]))
        env[node] = graph.call_function(torch.mul, (kept, 1.0 / (1.0 - p) if p != 1 else 0.0))  # type: ignore[operator]
    elif node in masks:
        return
    elif node.target is aten._native_batch_norm_legit_functional.default:
        # Normalises as it does with running statistics, which have been updated once already; and it has a derivative.
        x, weight, bias, _, _, training, momentum, eps = fx.map_arg(node.args, env.__getitem__)  # type: ignore[misc]
        env[node] = graph.call_function(
            aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)
        )
    else:
        env[node] = graph.node_copy(node, env.__getitem__)
        return
    env[node].meta["stack"] = node.meta.get("stack", ())
