"""A backward that can be differentiated: the gradients as one program of the forward's inputs and the tangents.

It is derived when a backward runs with `create_graph=True`, and compiled like any other program, so that its own
backward is again derived on demand, to any order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import Argument

from aotautograd import differentiable
from aotautograd._C import BACKWARD_TWICE
from aotautograd.errors import DoubleBackwardUnavailable
from aotautograd.flattened import flattened
from aotautograd.given_sizes import GivenSizes, name_given_sizes
from aotautograd.kept_values import KeptValues, is_dropout_mask, is_resumed, without_history
from aotautograd.missing_tangents import laid_out_as, without_tangents
from aotautograd.other_sizes import ForSizes, Taken, sizes_given
from aotautograd.partitioners import is_backward
from aotautograd.passes import is_effect, is_random, output_values, present
from aotautograd.schemas import (
    FOUND,
    HISTORY,
    UNSEEN,
    FunctionCall,
    FunctionResult,
    GradientInfo,
    History,
    JointGraph,
)
from primtorch.frozen import record
from primtorch.once import cached_property
from primtorch.printing import made_by
from primtorch.symbolic import hint_of, materialize
from primtorch.wrappers import wraps_others

aten = torch.ops.aten


@record
class GradientProgram:
    """`module` takes the forward's inputs, of which it reads those at the places `reads`, the tangents at the places
    `tangents` and the kept values named `kept`, and returns the gradients."""

    module: fx.GraphModule
    reads: frozenset[int]
    tangents: tuple[int, ...]
    kept: tuple[str, ...]
    made_gradients: tuple[GradientInfo, ...]


CompileProgram = Callable[[fx.GraphModule, Sequence[object]], Callable[..., Sequence[object]]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a backward is cut: at the tangents of the results `observed`, which have in them what comes from other
    results. With `inner`, what the others lead to at that result is all that is wanted."""

    observed: tuple[int, ...] = ()
    inner: int | None = None


class GradientsOnDemand:
    """Computes a joint graph's gradients so that autograd can follow.

    Derives and compiles that at its first use for each pattern of `requires_grad`.

    Args:
        saved_names: of nodes of the joint graph, for each saved tensor; empty where it is not known there.
        kept_values: makes what finds values of the joint graph in the saved tensors, called at the first use.
        taken: what the joint graph's trace took for granted of sizes.
        compile_apart: compiles a program whose tangents may be tensors around others.
    """

    def __init__(
        self,
        joint: JointGraph,
        saved_names: Sequence[str],
        compile_program: CompileProgram,
        kept_values: Callable[[], KeptValues],
        taken: Taken,
        compile_apart: CompileProgram,
    ) -> None:
        self.compile_apart = compile_apart
        self.joint = joint
        self.flat: JointGraph | None = None  # without calls of regions
        self.saved_names = tuple(saved_names)
        self.compile_program = compile_program
        self.make_kept_values = kept_values
        self.taken = taken
        self.kept_values: ForSizes[KeptValues] = ForSizes(taken, "values that the forward kept")
        self.programs: dict[object, GradientProgram] = {}
        self.given: dict[object, GivenSizes] = {}  # of the programs
        self.compiled: dict[object, ForSizes[Callable[..., Sequence[object]]]] = {}

    @cached_property
    def reads(self) -> frozenset[int]:
        """Places of the forward's inputs that it may read."""
        return inputs_read(self.joint, self.saved_names)

    def __call__(
        self, inputs: Sequence[object], saved: Sequence[object], tangents: Sequence[object], missing: Sequence[int]
    ) -> tuple[Sequence[object], tuple[GradientInfo, ...]]:
        """The results of the gradient program, and how the gradients are made of them.

        `tangents` has zeros for the missing ones; gradients that only those lead to are None.
        """
        return self._run(inputs, saved, tangents, tuple(missing), Cut())

    def cut(
        self,
        inputs: Sequence[object],
        saved: Sequence[object],
        tangents: Sequence[Any],
        missing: Sequence[int],
        observed: tuple[int, ...],
        inner: int | None,
    ) -> object:
        """The same where the tangents of the results `observed` have in them what comes from other results; or what
        comes to the result `inner` from others, None where nothing does."""
        outside = [torch.zeros_like(tangents[i]) for i in observed]  # of which no part is left
        results, made = self._run(inputs, saved, [*tangents, *outside], tuple(missing), Cut(observed, inner))
        return (results, made) if inner is None else results[-1]

    def _run(
        self,
        inputs: Sequence[object],
        saved: Sequence[object],
        tangents: Sequence[object],
        missing: tuple[int, ...],
        cut: Cut,
    ) -> tuple[Sequence[object], tuple[GradientInfo, ...]]:
        sizes = sizes_given(self.joint.module, inputs)
        kept_values = self.kept_values(sizes, self.make_kept_values)
        key = (missing, cut, torch.is_grad_enabled(), kept_values.names)
        program = self.programs.get(key)
        if program is None:
            self.flat = self.flat or flattened(self.joint)
            program = self.programs[key] = gradient_program(self.flat, kept_values.names, missing, cut)
        primals = self._readable(inputs, saved, program.reads)
        # They have no history: one that is the input which the program has detached is that input here.
        kept = [v.detach() if isinstance(v, torch.Tensor) else v for v in kept_values(program.kept, saved, sizes)]
        values = [*primals, *(tangents[i] for i in program.tangents), *kept]
        if key not in self.given:
            found = self.joint.module.meta.get(FOUND, {})
            self.given[key] = name_given_sizes(program.module, values, found, sizes)
        sizes |= self.given[key].of(values, sizes)
        values = [*self.given[key].inputs(sizes), *values]
        around = any(map(wraps_others, tangents))
        pattern = (key, around, *(isinstance(v, torch.Tensor) and v.requires_grad for v in values))
        compiled = self.compiled.setdefault(pattern, ForSizes(self.taken, "a derivative of the backward"))
        if around:
            run = compiled(sizes, lambda: self.compile_apart(program.module, [_as_plain(v) for v in values]))
        else:
            run = compiled(sizes, lambda: self.compile_program(program.module, values))
        return run(*values), program.made_gradients

    def _readable(self, inputs: Sequence[object], saved: Sequence[object], reads: Collection[int]) -> list[object]:
        """The inputs' values before the program ran; of one that it wrote, the copy that the forward kept."""
        place = {name: i for i, name in enumerate(self.saved_names)}
        nodes = [n for n in self.joint.module.graph.nodes if n.op == "placeholder"]
        written = {info.index for info in self.joint.metadata.inputs if info.mutates_data}
        values = list(inputs)
        for i, (value, node) in enumerate(zip(inputs, nodes, strict=False)):
            if value is not None:
                continue
            if i not in reads:
                spec = node.meta["val"]
                sizes = [hint_of(s) for s in spec.shape]
                values[i] = torch.empty((), dtype=spec.dtype, device=spec.device).expand(sizes)
            elif self.joint.metadata.placeholders[i] not in written:
                raise RuntimeError(BACKWARD_TWICE)  # a backward has freed it
            elif node.name in place and not node.meta["val"].requires_grad:
                values[i] = saved[place[node.name]]
            else:
                raise DoubleBackwardUnavailable(
                    f"a derivative of the backward needs the value that input {node.name} had "
                    "before the program wrote it",
                    next((user.meta["stack"] for user in node.users if user.meta.get("stack")), ()),
                )
        return values


def _as_plain(value: object) -> object:
    """A plain tensor of a wrapper's metadata, to trace with."""
    if not isinstance(value, torch.Tensor) or not wraps_others(value):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def gradient_program(
    joint: JointGraph, known: Collection[str], missing: Sequence[int] = (), cut: Cut = Cut()
) -> GradientProgram:
    """The gradients of a joint graph of ATen operators, with the forward computed again from the inputs.

    Without what only the `missing` tangents lead to, and cut at results that others are computed from.

    Random values are not drawn again: they, or what was made of them alone, come from what the forward kept, as do the
    other `known` values, which have no history. Raises DoubleBackwardUnavailable if that is not enough.
    """
    if UNSEEN in joint.module.meta:
        raise DoubleBackwardUnavailable(
            "a derivative of the backward needs the history of a tensor that the program writes where autograd does "
            "not see it (under no_grad, through .data or a detached alias), or reads by .data; write to a copy, and "
            "read by detach()",
            joint.module.meta[UNSEEN],
        )
    nodes = list(joint.module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    totals = {_total(joint, i): i for i in cut.observed}
    needed, kept, masks = _taken(joint, known, list(totals))
    gradients = output_values(joint.module.graph)[joint.num_forward_outputs :]
    for node in needed.difference(kept):
        why = _why_not(node, masks)
        if why:
            raise DoubleBackwardUnavailable(f"a derivative of the backward needs {why}", node.meta.get("stack", ()))
    graph = fx.Graph()
    env: dict[object, fx.Node] = {}
    for node in (*inputs, *kept, *masks.values()):
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
    tangents = inputs[joint.metadata.num_placeholders :]
    come = {i: env[tangents[i]] for i in cut.observed}
    outside: list[str] = []
    for i in cut.observed:  # until its sum is made, the tangent is what comes from outside of the program: nothing
        env[tangents[i]] = graph.placeholder(f"{tangents[i].name}_outside")
        env[tangents[i]].meta.update(tangents[i].meta)
        outside.append(env[tangents[i]].name)
    made: dict[int, fx.Node] = {}
    _refuse_wrappers(nodes)
    ends = _last_made(nodes, needed)
    for node in nodes:
        if node in needed and node not in env:
            _copy(graph, node, env, masks)
        if node in ends:
            _resume(graph, ends[node], env)
        if node in totals:
            made[totals[node]], env[node] = env[node], _as_laid_out(graph, node, come[totals[node]])
    found = [env[g] if isinstance(g, fx.Node) else g for g in gradients]
    if cut.inner is not None:
        found = [*[None] * len(found), made.get(cut.inner)]
    graph.output(tuple(found))
    module = _LazyGraphModule(joint.module, graph, "Gradients")
    made_by(module, "double_backward", joint.module)
    names = [*(n.name for n in tangents), *outside]
    missing = (*missing, *range(len(tangents), len(names)))
    variant = without_tangents(module, names, missing, joint.metadata.made_gradients)
    for node in variant.module.graph.nodes:  # those that stand for a sum without its missing parts among them
        node.target = differentiable.OPERATORS.get(node.target, node.target)
    variant.module.recompile()
    used = {n.name for n in variant.module.graph.nodes if n.op == "placeholder" and n.users}
    taken = tuple(i for i in range(len(names)) if i not in missing or i in variant.zeros)
    return GradientProgram(
        variant.module,
        _places(joint, {n for n in inputs if n.name in used}),
        taken,
        tuple(n.name for n in (*kept, *masks.values())),
        variant.made_gradients,
    )


def _total(joint: JointGraph, tangent: int) -> fx.Node:
    """The sum of a result's tangent and of what other results lead to at it."""
    found = present(joint.totals[tangent])
    if found is None:
        raise DoubleBackwardUnavailable("the gradient of a result that leads to no input", ())
    return found


def _as_laid_out(graph: fx.Graph, total: fx.Node, tangent: fx.Node) -> fx.Node:
    found = laid_out_as(graph, total, tangent)
    if found is None:
        raise DoubleBackwardUnavailable("the gradient of a result, whose layout is symbolic, as hooks see it", ())
    return found


def _why_not(node: fx.Node, masks: Mapping[Argument, fx.Node]) -> str:
    """What of a node's value or of its history the forward's operators, run again, would not give."""
    if is_random(node) and node not in masks:
        return f"the random value {node.format_node()}, which the forward did not keep"
    match node.meta.get(HISTORY):
        case FunctionResult(call=call) if (call.draws and not call.given) or None in _arguments(call):
            return f"the history of {node.name}, a result of an autograd function whose call cannot be made again"
        case History.WRITTEN if not is_backward(node):
            return f"the history that {node.name} had before it was written under no_grad, or detached in place"
        case _:
            return ""


def inputs_read(joint: JointGraph, known: Collection[str]) -> frozenset[int]:
    """Places of the forward's inputs that the gradient program reads."""
    totals = [total for total in map(present, joint.totals.values()) if total is not None]
    return _places(joint, _taken(joint, known, totals)[0])


def _places(joint: JointGraph, needed: Set[fx.Node]) -> frozenset[int]:
    inputs = [n for n in joint.module.graph.nodes if n.op == "placeholder"]
    return frozenset(i for i, n in enumerate(inputs[: joint.metadata.num_placeholders]) if n in needed)


def _taken(
    joint: JointGraph, known: Collection[str], also: Sequence[fx.Node] = ()
) -> tuple[set[fx.Node], list[fx.Node], dict[Argument, fx.Node]]:
    """What the gradients depend on; what of it is known; the mask of each dropout, where that is known."""
    values = [n for n in without_history(joint) if n.name in known]
    masks: dict[Argument, fx.Node] = {n.args[0]: n for n in values if is_dropout_mask(n)}
    gradients = output_values(joint.module.graph)[joint.num_forward_outputs :]
    checks = [n for n in joint.module.graph.nodes if is_backward(n) and is_effect(n)]
    needed = _needed([*gradients, *checks, *also], set(values))
    masks = {dropout: mask for dropout, mask in masks.items() if dropout in needed or mask in needed}
    of_masks = set(masks.values())
    return needed, [n for n in values if n in needed and n not in of_masks], masks


def _needed(gradients: Sequence[object], known: set[fx.Node]) -> set[fx.Node]:
    """Every node that the gradients depend on; not what is behind the known ones."""
    found: set[fx.Node] = set()
    work = [g for g in gradients if isinstance(g, fx.Node)]
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            work.extend(_sources(node) if node not in known else _behind_call(node))
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node's copy in the gradient program reads: see `_copy`."""
    if node.target is aten._native_batch_norm_legit_functional.default:
        return [a for a in (*node.args[:3], *node.args[5:]) if isinstance(a, fx.Node)]
    history = node.meta.get(HISTORY)
    if isinstance(history, FunctionResult):
        args = [a for a in _arguments(history.call) if isinstance(a, fx.Node)]
        return [*node.all_input_nodes, *_behind_call(node)] if history.call.given else args
    return node.all_input_nodes


def _behind_call(node: fx.Node) -> list[fx.Node]:
    """What a call reads that is resumed, where a node is its result, whose value is known or made by operators."""
    if not is_resumed(node):
        return []
    call = node.meta[HISTORY].call
    return [a for a in (*_arguments(call), *_given(call)) if isinstance(a, fx.Node)]


def _given(call: FunctionCall) -> tuple[object, ...]:
    return tuple(present(v) if isinstance(v, fx.Node) else v for v in call.given)


def _refuse_wrappers(nodes: Iterable[fx.Node]) -> None:
    """Raises where the operators of a call's backward do not say what its derivative is, and nothing calls it again:
    torch's own code over tensors that wrap others."""
    for node in nodes:
        history = node.meta.get(HISTORY)
        why = getattr(history.call.target, "no_second_derivative", "") if isinstance(history, FunctionResult) else ""
        if why:
            raise DoubleBackwardUnavailable(
                f"a derivative of the backward needs that of a function's, and {why}; keep the function out of what is "
                "compiled, with torchcompile.disable",
                node.meta.get("stack", ()),
            )


def _last_made(nodes: Sequence[fx.Node], needed: Set[fx.Node]) -> dict[fx.Node, FunctionCall]:
    """The calls that are resumed, by the nodes behind which all is there that their forwards have made."""
    order = {node: place for place, node in enumerate(nodes)}
    calls = dict.fromkeys(node.meta[HISTORY].call for node in nodes if node in needed and is_resumed(node))
    ends: dict[fx.Node, FunctionCall] = {}
    for call in calls:
        ends[max((v for v in _given(call) if isinstance(v, fx.Node)), key=order.__getitem__)] = call
    return ends


def _arguments(call: FunctionCall) -> tuple[object, ...]:
    """A call's arguments in the graph as it is now; None for a tensor that is not in it any more."""
    return tuple(present(a) if isinstance(a, fx.Node) else a for a in call.args)


def _copy(graph: fx.Graph, node: fx.Node, env: dict[object, fx.Node], masks: dict[Argument, fx.Node]) -> None:
    source = node.args[0] if node.target is operator.getitem else None
    if source in masks:  # the value of a dropout whose mask is known
        dropped, p = env[source.args[0]], source.args[1]  # type: ignore[index, union-attr]
        kept = graph.call_function(torch.mul, (dropped, env[masks[source]]))
        env[node] = graph.call_function(torch.mul, (kept, 1.0 / (1.0 - p) if p != 1 else 0.0))  # type: ignore[operator]
    elif node in masks:
        return
    elif isinstance(node.meta.get(HISTORY), FunctionResult) and not is_resumed(node):
        result: FunctionResult = node.meta[HISTORY]
        if result.call not in env:
            env[result.call] = _copy_call(graph, result.call, env)
        env[node] = env[result.call]
        for place in result.path:
            env[node] = graph.call_function(operator.getitem, (env[node], place))
            env[node].meta["val"] = node.meta["val"]
    elif (factors := differentiable.factors(node)) is not None:
        matrix, make = factors
        env[node] = graph.call_function(make, (env[matrix],))
    elif node.target is aten._native_batch_norm_legit_functional.default:
        # Normalises as it does with running statistics, which have been updated once already; and it has a derivative.
        read = fx.map_arg((*node.args[:3], *node.args[5:]), env.__getitem__)
        env[node] = graph.call_function(aten._native_batch_norm_legit.no_stats, read)  # type: ignore[arg-type]
    else:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.meta.get(HISTORY) is History.NONE:
            env[node] = graph.call_function(torch.Tensor.detach, (env[node],))
        return
    env[node].meta["stack"] = node.meta.get("stack", ())


def _copy_call(graph: fx.Graph, call: FunctionCall, env: Mapping[object, fx.Node]) -> fx.Node:
    return graph.call_function(call, _copied(graph, _arguments(call), env))


def _copied(graph: fx.Graph, values: tuple[object, ...], env: Mapping[object, fx.Node]) -> tuple[Argument, ...]:
    symbols = {str(n.meta["val"]): n for n in graph.find_nodes(op="placeholder") if _is_number(n.meta.get("val"))}
    copies = fx.map_arg(values, env.__getitem__)  # type: ignore[type-var, arg-type]
    return tuple(materialize(graph, v, symbols) if _is_number(v) else v for v in copies)  # type: ignore[call-overload]


def _resume(graph: fx.Graph, call: FunctionCall, env: dict[object, fx.Node]) -> None:
    """Gives what a call has made the call's history."""
    values = _given(call)
    made = tuple(graph.call_function(torch.Tensor.detach, (env[v],)) if isinstance(v, fx.Node) else v for v in values)
    resumed = FunctionCall(call.target.resumed, (), draws=True)  # type: ignore[attr-defined]
    args: tuple[Any, ...] = (made, *_copied(graph, _arguments(call), env))
    results = graph.call_function(resumed, args)
    for value in values:
        history = value.meta.get(HISTORY) if isinstance(value, fx.Node) else None
        if isinstance(value, fx.Node) and isinstance(history, FunctionResult) and history.call is call:
            env[value] = graph.call_function(operator.getitem, (results, *history.path))
            env[value].meta.update(val=value.meta["val"], stack=value.meta.get("stack", ()))


def _is_number(value: object) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))
