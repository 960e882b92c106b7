"""How each input's gradient is made of what the backward returns, so that gradients share memory where autograd's do.

Autograd hands one tensor to several inputs, views of one tensor to others, and the gradient of an output as it came.
The backward graph returns each piece of memory once, and none that it was given; the autograd node makes the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import fx

from aotautograd.inputs import sizes_of
from aotautograd.replay import replay_of
from aotautograd.schemas import GradientInfo, GradientSource, ViewStep
from primtorch.memory import memory_of, path_of_views
from primtorch.symbolic import expr_of

aten = torch.ops.aten


def arrange(
    gradients: Sequence[fx.Node | None], tangents: Mapping[fx.Node, int], cloned: Sequence[bool] = ()
) -> tuple[tuple[fx.Node | None, ...], tuple[GradientInfo, ...]]:
    """What a graph returns for these gradients, and how they are made of that.

    There is a result for each gradient (None where it is made otherwise), then what several are views of. Two gradients
    of one node are one tensor, two views of one node are two tensors over one memory. `tangents` gives the number of
    each tangent's placeholder; `cloned` says of which gradients autograd keeps a copy as `.grad`.
    """
    results = list(gradients)
    infos = [GradientInfo("result", place) for place in range(len(gradients))]
    members: dict[fx.Node, list[int]] = defaultdict(list)
    paths = {place: path_of_views(node) for place, node in enumerate(gradients) if node is not None}
    for place, path in paths.items():
        members[path[0]].append(place)

    def made(source: Literal["result", "tangent"], slot: int, place: int, depth: int) -> None:
        steps = tuple(view_step(n) for n in paths[place][depth + 1 :])
        if source == "tangent":  # it comes in any layout
            steps = tuple(replace(s, op=aten.reshape.default) if s.op is aten.view.default else s for s in steps)
        infos[place] = GradientInfo(source, slot, steps, bool(cloned) and cloned[place])

    for memory, places in members.items():
        if memory in tangents:
            for place in places:
                results[place] = None
                made("tangent", tangents[memory], place, 0)
        elif len(places) > 1:
            depth = _common_depth([paths[place] for place in places])
            base = paths[places[0]][depth]
            holder = next((p for p in places if paths[p][-1] is base), len(results))
            if holder == len(results):
                results.append(base)
            for place in places:
                if place != holder:
                    results[place] = None
                made("result", holder, place, depth)
    return tuple(results), tuple(infos)


def share_memory(gradients: Sequence[fx.Node | None], tangents: Iterable[fx.Node], is_leaf: Iterable[bool]) -> bool:
    """Whether a leaf's gradient lies in the memory of another tensor among the gradients, or is or views a tangent.
    Which of them become `.grad` themselves then depends on the order in which autograd ran."""
    different = {g for g in gradients if g is not None}
    owners = Counter([*map(memory_of, different), *tangents])
    leaves = zip(gradients, is_leaf, strict=True)
    return any(g is not None and at_leaf and owners[memory_of(g)] > 1 for g, at_leaf in leaves)


def _common_depth(paths: Sequence[Sequence[fx.Node]]) -> int:
    """How far the paths go together, up to a tensor."""
    depth = 0
    while all(len(p) > depth + 1 and p[depth + 1] is paths[0][depth + 1] for p in paths):
        depth += 1
    while isinstance(paths[0][depth].meta["val"], (tuple, list)):
        depth -= 1
    return depth


def view_step(node: fx.Node) -> ViewStep:
    """The view that a node takes of its first argument."""
    value = lambda n: n.meta["val"]
    args, kwargs = fx.map_arg(node.args[1:], value), fx.map_arg(node.kwargs, value)
    return ViewStep(node.target, tuple(args), tuple(kwargs.items()))  # type: ignore[arg-type]


def symbols_of(infos: Sequence[GradientInfo]) -> set[str]:
    """The symbols in the sizes of the views that make gradients."""
    arguments = [value for info in infos for step in info.steps for value in (*step.args, *dict(step.kwargs).values())]
    return {name for size in sizes_of(arguments) for name in expr_of(size).symbols()}


def sources_of(infos: Sequence[GradientInfo], kept_symbols: Sequence[str]) -> tuple[GradientSource, ...]:
    """What a run needs to make the gradients. `kept_symbols` names the sizes that the forward keeps."""
    return tuple(
        GradientSource(
            info.source == "tangent", info.slot, _views(info.steps, kept_symbols) if info.steps else None, info.cloned
        )
        for info in infos
    )


def _views(
    steps: Sequence[ViewStep], kept_symbols: Sequence[str]
) -> Callable[[torch.Tensor, Sequence[int]], torch.Tensor]:
    replay = replay_of(steps, spell=expr_of)
    return lambda base, kept: replay(base, dict(zip(kept_symbols, kept, strict=True)))
