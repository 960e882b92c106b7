"""What the tangents of a backward lead to, and what it keeps without some of them: as the walks from each say."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from aotautograd.missing_tangents import BackwardVariants, _led_to_by


def graph_of(rng: random.Random, tangents: int, saved: int, calls: int) -> fx.GraphModule:
    """A backward of sums of what comes before, which returns some of them, and None."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"saved_{i}") for i in range(saved)]
    late = [graph.placeholder(f"tangent_{i}") for i in range(tangents)]
    for _ in range(calls):
        pool = rng.choice((nodes, nodes, late, [*nodes, *late]))
        made = graph.call_function(torch.add, (rng.choice(pool), rng.choice([*nodes, *late])))
        (late if any(source in late for source in made.all_input_nodes) else nodes).append(made)
    graph.output((rng.choice(late), rng.choice([*nodes, *late]), None))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    return fx.GraphModule({}, graph)


def reached(graph: fx.Graph, names: set[str]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in names or (node.op == "call_function" and any(n in found for n in node.all_input_nodes)):
            found.add(node)
    return found


def saved_for(graph: fx.Graph, nodes: set[fx.Node], tangents: list[str], saved: list[str]) -> tuple[int, ...]:
    late = reached(graph, set(tangents)) - nodes
    found: set[fx.Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in found and node not in late:
            found.add(node)
            work.extend(node.all_input_nodes)
    return tuple(i for i, name in enumerate(saved) if name in {node.name for node in found})


@pytest.mark.parametrize("seed", [random.randrange(1 << 30) for _ in range(6)], ids=lambda seed: "seed")
def test_what_is_needed_without_tangents(seed: int) -> None:
    rng = random.Random(seed)
    module = graph_of(rng, 3, 4, rng.randrange(4, 30))
    graph, names, saved = module.graph, [f"tangent_{i}" for i in range(3)], [f"saved_{i}" for i in range(4)]
    led_to = _led_to_by(graph, names)
    for place, name in enumerate(names):
        assert {node for node, places in led_to.items() if place in places} == reached(graph, {name}), seed
    parts: Any = SimpleNamespace(backward=module, tangent_names=names, saved_placeholders=saved)
    metadata: Any = SimpleNamespace(made_gradients=(), refused_behind=(frozenset(), frozenset({0}), frozenset()))
    variants = BackwardVariants(parts, metadata, (frozenset(), frozenset(), frozenset()))
    groups = [g for count in range(3) for g in itertools.combinations(range(3), count)]
    for missing, earlier in itertools.product(groups, groups):
        present = [i for i in range(3) if i not in missing]
        gone, here, before = (reached(graph, {names[i] for i in group}) for group in (missing, present, earlier))
        refused = (1 in present and 0 in earlier) or bool(saved_for(graph, here & before, names, saved))
        _, keeps, told = variants.needs(missing, earlier)
        assert tuple(keeps) == saved_for(graph, gone - here - before, names, saved), (seed, missing, earlier)
        assert told is refused, (seed, missing, earlier)
