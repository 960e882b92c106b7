"""What a traced forward did to its inputs, and how its outputs alias inputs and each other.

Functionalization has turned aliasing into data flow: a tensor that is a view of another is, in the graph, a chain of
view
operators on the other's present value. So every relation is read off the graph.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

from aotautograd.errors import UnsupportedAlias, UnsupportedMutation
from aotautograd.functionalize import is_wrapped, storage_was_replaced
from aotautograd.gradients import view_step
from aotautograd.history import has_history, refuses_history
from aotautograd.inputs import ProgramInputs
from aotautograd.schemas import (
    ForwardKind,
    ForwardOutput,
    InputInfo,
    OutputInfo,
    OutputKind,
    ProgramMetadata,
    Values,
    ViewStep,
)
from primtorch.functionalize import unwrap
from primtorch.memory import returns_alias
from primtorch.symbolic import expr_as_given, shape_env_of

aten = torch.ops.aten
_autograd = torch._C._autograd
_NON_LEAF = "NonLeafBackward"  # of `aotautograd.functionalize.NonLeaf`, behind an input that is no leaf
_Emit = Callable[[ForwardKind, fx.Node, int | None, torch.Tensor | None], int]


@dataclass(slots=True)
class Analysis:
    """What a traced forward does to its inputs, and where in its graph each of its outputs is."""

    metadata: ProgramMetadata
    values: list[Argument] = field(default_factory=list)  # node (or constant) of each forward output
    differentiable: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (forward output, value with history)


@dataclass(slots=True)
class _Candidate:
    """A tensor output: where its chain of views begins."""

    place: int
    value: torch.Tensor
    path: tuple[fx.Node, ...]  # from the value that owns the memory to the output itself

    @property
    def node(self) -> fx.Node:
        return self.path[-1]

    def steps_from(self, depth: int) -> tuple[ViewStep, ...]:
        """The views to take of `path[depth]` to get the output."""
        return tuple(view_step(n) for n in self.path[depth + 1 :])


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares memory with its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return returns_alias(node.target)


def analyse(
    node_of: Mapping[int, fx.Node],
    written: set[int],
    bound: ProgramInputs,
    starts: Mapping[int, torch.Tensor],
    flat: Values,
    given: Values,
    outputs: Values,
    size_node: Callable[[torch.SymInt | torch.SymFloat], Argument],
) -> Analysis:
    """Judges a forward that has run. `starts` holds the inner tensors that the inputs began with, `flat` their
    functional wrappers, `given` what the program got for them: aliases of those whose sizes and strides it changes in
    place; `size_node` gives the node of a SymInt."""
    inputs: list[InputInfo] = []
    result: list[Argument] = []
    forward: list[ForwardOutput] = []
    differentiable: list[tuple[int, torch.Tensor]] = []
    final: dict[fx.Node, int] = {}

    def emit(kind: ForwardKind, node: Argument, place: int | None, outer: torch.Tensor | None) -> int:
        slot = len(result)
        tangent = None
        if outer is not None and outer.requires_grad and has_history(outer):
            tangent = len(differentiable)
            differentiable.append((slot, outer))
        result.append(node)
        forward.append(ForwardOutput(kind, place, tangent is not None, tangent))
        return slot

    for place, start in starts.items():
        _refuse_other_storage(place, bound.storages[place], (flat[place], given[place]))
        info = _input_info(place, bound, start, flat[place], written)
        node = node_of[id(unwrap(flat[place]))]
        if given[place] is not flat[place]:
            info = _restrided(info, node, given[place], node_of)
        inputs.append(info)
        final.setdefault(node, place)
        if info.mutates_data:
            emit("updated_input", node, place, flat[place] if info.mutation_in_grad_mode else None)
    infos: list[OutputInfo | None] = [None] * len(outputs)
    groups: dict[fx.Node, list[_Candidate]] = defaultdict(list)
    first_seen: dict[int, int] = {}
    symbols: list[tuple[int, Argument]] = []
    for place, value in enumerate(outputs):
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            symbols.append((place, size_node(value)))
        elif not isinstance(value, torch.Tensor):
            infos[place] = OutputInfo(OutputKind.CONSTANT, value=value)
        elif id(value) in first_seen:
            infos[place] = OutputInfo(OutputKind.CONSTANT, same_as=first_seen[id(value)])
        else:
            first_seen[id(value)] = place
            candidate = _Candidate(place, value, path_of_views(node_of[id(unwrap(value))], final))
            root = candidate.path[0]
            if root in final and _is_made_by_function(candidate, 0, None):
                infos[place] = _with_own_history(OutputKind.VIEW_OF_INPUT, final[root], candidate, 0, emit, node_of)
            elif root in final:
                infos[place] = _alias_of_input(candidate, final[root], given)
            else:
                groups[root].append(candidate)
    for members in groups.values():
        _emit_group(members, emit, infos, node_of)
    for place, number in symbols:
        infos[place] = OutputInfo(OutputKind.VALUE, emit("symbol", number, None, None))
    made = tuple(o for o in infos if o is not None)
    replayed = [*(o.steps for o in made), *(i.metadata_steps for i in inputs)]
    numbers = _numbers_of_data(replayed, {name for name, _, _ in bound.symbol_places()}).items()
    metadata = ProgramMetadata(
        num_inputs=len(bound.values),
        placeholders=tuple(source for _, source, _ in bound.placeholders()),
        inputs=tuple(inputs),
        outputs=made,
        number_slots=tuple((name, emit("symbol", size_node(number), None, None)) for name, number in numbers),
        forward_outputs=tuple(forward),  # those numbers among them
        tangents=(),
        gradients=(),
        complex_inputs=tuple(place for place, start in starts.items() if start.is_complex()),
        symbol_places=bound.symbol_places(),
    )
    return Analysis(metadata, result, differentiable)


def _numbers_of_data(
    replayed: Iterable[Sequence[ViewStep]], known: set[str]
) -> dict[str, torch.SymInt | torch.SymFloat]:
    """The symbols in views that a run takes anew which no input gives, each as a number of the program: the forward
    computes them of data, and has to return them."""
    found: dict[str, torch.SymInt | torch.SymFloat] = {}
    for steps in replayed:
        for size in tree_leaves([(step.args, step.kwargs) for step in steps]):
            env = shape_env_of(size) if isinstance(size, torch.SymInt) else None
            if env is not None:
                found |= {name: env.named(name) for name in sorted(expr_as_given(size).symbols() - known)}
    return found


def _refuse_other_storage(place: int, storage: int, tensors: Sequence[torch.Tensor]) -> None:
    if any(storage_was_replaced(t) or t.untyped_storage()._cdata != storage for t in tensors):
        raise UnsupportedMutation(f"input {place} was given another storage (set_ or .data assignment) in the graph")


def _input_info(
    place: int, bound: ProgramInputs, start: torch.Tensor, outer: torch.Tensor, written: set[int]
) -> InputInfo:
    inner = unwrap(outer)
    hidden = id(inner) in written
    data = hidden or (bool(torch._functionalize_has_data_mutation(outer)) and inner is not start)  # type: ignore[attr-defined]
    history = outer.grad_fn
    unchanged = history is None or type(history).__name__ == _NON_LEAF
    return InputInfo(
        index=place,
        requires_grad=bound.requires_grad[place],
        is_leaf=bound.is_leaf[place],
        mutates_data=data,
        mutation_in_grad_mode=data and outer.requires_grad and not unchanged,
        version_bumps=outer._version - bound.versions[place],
    )


def _restrided(info: InputInfo, node: fx.Node, given: torch.Tensor, node_of: Mapping[int, fx.Node]) -> InputInfo:
    """An input of which the program changed the sizes or strides of an alias, `given`; `node` is its own value."""
    path = path_of_views(node_of[id(unwrap(given))], {node: info.index})
    if path[0] is not node:
        raise UnsupportedMutation(
            f"input {info.index} is given another shape in place in a way that no views of it express",
            path[-1].meta.get("stack", ()),
        )
    leaf = info.requires_grad and info.is_leaf  # eager allows the change under no_grad alone
    steps = tuple(view_step(n) for n in path[1:])
    return replace(info, metadata_steps=steps, metadata_under_no_grad=leaf)


def path_of_views(node: fx.Node, ends: Mapping[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The nodes from the value that `node` is a view of (or from one of `ends`) to `node`."""
    path = [node]
    while path[-1] not in ends and is_view(path[-1]):
        base = path[-1].args[0]
        assert isinstance(base, fx.Node)
        path.append(base)
    return tuple(reversed(path))


def _alias_of_input(output: _Candidate, place: int, flat: Sequence[object]) -> OutputInfo:
    if output.value is flat[place]:
        return OutputInfo(OutputKind.INPUT, place, requires_grad=output.value.requires_grad)
    return _view(OutputKind.VIEW_OF_INPUT, place, output, 0)


def _view(kind: OutputKind, slot: int, output: _Candidate, depth: int) -> OutputInfo:
    """An output that is made of the value at `depth` of its path by views."""
    steps = output.steps_from(depth) or (_same_memory(output.value),)
    if refuses_history(output.value):
        in_grad_mode = _autograd._get_creation_meta(output.value) != _autograd.CreationMeta.NO_GRAD_MODE
        return OutputInfo(kind, slot, steps, requires_grad=in_grad_mode, stale=True)
    _refuse_detached_history(output, steps)
    if not has_history(output.value):
        return OutputInfo(kind, slot, steps)
    outside_history = _outside_history(output.value, steps)
    return OutputInfo(kind, slot, steps, requires_grad=True, outside_history=outside_history)


def _is_made_by_function(output: _Candidate, depth: int, base: torch.Tensor | None) -> bool:
    """Whether an autograd function, which has a derivative of its own, is on the way from the value at `depth` of the
    output's path (`base`, if that is a tensor of the program) to the output: one that gives back what it got. Or the
    output is a tensor of its own, which was given that memory."""
    if refuses_history(output.value):
        return False
    if len(output.path) - depth > 1 and not output.value._is_view():
        return has_history(output.value)
    node, begin = output.value.grad_fn, None if base is None else base.grad_fn
    for _ in range(len(output.path) - depth):
        if node is None or node is begin:
            return False
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return type(node).__name__ != _NON_LEAF
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


def _with_own_history(
    kind: OutputKind, slot: int, output: _Candidate, depth: int, emit: _Emit, node_of: Mapping[int, fx.Node]
) -> OutputInfo:
    """An output that lies in the memory of an input or of another output, and whose gradient goes another way than
    that of a view: the forward returns a copy, of which the wrapper takes the history alone."""
    with torch.no_grad():
        copy = unwrap(output.value).clone()
    history = emit("value", node_of[id(copy)], None, output.value)
    apart = not output.value._is_view()
    return OutputInfo(kind, slot, output.steps_from(depth), requires_grad=True, history=history, apart=apart)


def _outside_history(output: torch.Tensor, steps: Sequence[ViewStep]) -> int:
    """How many of an output's views were taken under no_grad. The history of what is taken of them in grad mode begins
    there, and leads nowhere."""
    node, history = output.grad_fn, 0
    while node is not None:
        if len(node.next_functions) != 1:
            return 0
        node, history = node.next_functions[0][0], history + 1
    of_last = 0
    while of_last < len(steps) and history:
        of_last += 1
        history -= steps[-of_last].op is not operator.getitem  # an item has the history of the list that it is from
    return len(steps) - of_last


def _refuse_detached_history(output: _Candidate, steps: Sequence[ViewStep]) -> None:
    """A replayed `detach` cuts the history that a later write gave to the detached tensor."""
    if has_history(output.value) and any(s.op is aten.detach.default for s in steps):
        raise UnsupportedAlias(
            f"output {output.place} is a detached alias to which the program then wrote a value that needs a gradient; "
            "write to a clone of it",
            output.node.meta.get("stack", ()),
        )


def _same_memory(value: torch.Tensor) -> ViewStep:
    return ViewStep(aten.alias.default if value.requires_grad else aten.detach.default, ())


def _emit_group(
    members: list[_Candidate],
    emit: _Emit,
    infos: list[OutputInfo | None],
    node_of: Mapping[int, fx.Node],
) -> None:
    """Outputs that share one intermediate's memory: the forward returns that, and the wrapper takes the views."""
    if len(members) == 1:
        only = members[0]
        if refuses_history(only.value):
            raise UnsupportedAlias(
                f"output {only.place} is a view of an intermediate that the program then wrote to; autograd refuses "
                "to say its history; return a clone of it",
                only.node.meta.get("stack", ()),
            )
        slot = emit("value", only.node, None, only.value)
        infos[only.place] = OutputInfo(OutputKind.VALUE, slot, requires_grad=only.value.requires_grad)
        return
    shared = 1  # length of the paths' common beginning
    while all(len(m.path) > shared and m.path[shared] is members[0].path[shared] for m in members):
        shared += 1
    wholes = [m for m in members if len(m.path) == shared]
    whole = next((m for m in wholes if not _is_made_by_function(m, 0, None)), wholes[0] if wholes else None)
    if whole is not None and _is_view_under_no_grad(whole.value) and any(has_history(m.value) for m in members):
        whole = None  # it has no history that the others' could begin with
    depth = shared - 1
    if whole is not None:
        outer: torch.Tensor | None = whole.value
    else:
        depth, outer = _base_with_history(depth, members, node_of)
    slot = emit("value", members[0].path[depth], None, outer)
    for m in members:
        if m is whole:
            infos[m.place] = OutputInfo(OutputKind.VALUE, slot, requires_grad=m.value.requires_grad)
        elif _is_made_by_function(m, depth, outer):
            infos[m.place] = _with_own_history(OutputKind.VIEW_OF_VALUE, slot, m, depth, emit, node_of)
        else:
            infos[m.place] = _view(OutputKind.VIEW_OF_VALUE, slot, m, depth)


def _is_view_under_no_grad(value: torch.Tensor) -> bool:
    return value.requires_grad and not has_history(value) and value._is_view()


def _base_with_history(
    depth: int, members: Sequence[_Candidate], node_of: Mapping[int, fx.Node]
) -> tuple[int, torch.Tensor | None]:
    """The tensor of the program that all members are views of, and its place on their common path (at most `depth`). No
    tensor if no member needs its gradient."""
    common = members[0].path[: depth + 1]
    needs = [m for m in members if has_history(m.value)]
    for m in needs:
        base = m.value._base
        if base is not None and is_wrapped(base):
            node = node_of.get(id(unwrap(base)))
            if node in common:
                return common.index(node), base
    if needs:
        raise UnsupportedAlias(
            f"outputs {[m.place for m in members]} are views of one intermediate that is not an output itself, "
            "and its gradient cannot be reached; return the intermediate too, or clone the views",
            common[0].meta.get("stack", ()),
        )
    return 0, None
