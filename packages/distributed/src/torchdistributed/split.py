"""Cuts a captured graph where DDP's buckets end, so that a bucket is reduced while the rest of backward runs.

Autograd fires a parameter's hook when the compiled backward that produces its gradient returns. One
graph for the whole model would return all gradients at its end, and nothing would overlap. After the
split each piece holds the parameters of one bucket, and its backward returns them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx.passes.split_module import split_module

from torchdistributed.buckets import Bucket
from torchdistributed.errors import BucketPlanError


def assign_pieces(graph: torch.fx.Graph, owner: Mapping[str, int]) -> dict[torch.fx.Node, int]:
    """The piece (0 runs first in forward) of each computing node.

    `owner` maps a placeholder's name to the bucket that holds that parameter (bucket 0 is the last part
    of forward). A node cannot run before the pieces that its inputs come from, and the use of a parameter
    opens that parameter's piece for it and for all that comes later in program order; so pieces are
    contiguous runs of the program and edges only lead forward.
    """
    if not owner:
        return {node: 0 for node in graph.nodes if node.op not in ("placeholder", "output")}
    last = max(owner.values())
    pieces: dict[torch.fx.Node, int] = {}
    current = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        used = [last - owner[arg.name] for arg in node.all_input_nodes if arg.name in owner]
        # A shared parameter's second use does not reopen an earlier piece.
        current = max([current, *used])
        pieces[node] = current
    return pieces


def split_at_buckets(
    gm: torch.fx.GraphModule, buckets: Sequence[Bucket], placeholder_of: Mapping[str, str]
) -> torch.fx.GraphModule:
    """A graph of submodules, one a bucket, that computes what `gm` does.

    `placeholder_of` maps a parameter's name to the placeholder that carries it in `gm`. Raises
    `BucketPlanError` for a placeholder that the graph does not have. Parameters that the graph does not
    use are left out of the assignment. A graph that takes derivatives itself stays whole: autograd's
    engine runs through all that comes before.
    """
    if any(node.target is torch.autograd.grad for node in gm.graph.nodes):
        return gm
    names = {node.name for node in gm.graph.nodes if node.op == "placeholder"}
    owner: dict[str, int] = {}
    for bucket in buckets:
        for parameter in bucket.names:
            placeholder = placeholder_of.get(parameter)
            if placeholder is None:
                continue
            if placeholder not in names:
                raise BucketPlanError(
                    f"parameter {parameter!r} is said to be placeholder {placeholder!r}, "
                    f"which the graph does not have; its placeholders are {sorted(names)}"
                )
            owner[placeholder] = bucket.index
    pieces = assign_pieces(gm.graph, owner)
    # Pieces that no node fell into would be empty modules: number only those in use, in order.
    rank = {piece: i for i, piece in enumerate(sorted(set(pieces.values())))}
    if len(rank) <= 1:
        return gm
    return split_module(gm, gm, lambda node: rank[pieces[node]], keep_original_order=True)  # type: ignore[arg-type]
