"""What autograd recorded behind a program's values: the nodes that its engine would run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from aotautograd._C import BACKWARD_TWICE


def has_history(t: torch.Tensor) -> bool:
    """Whether a gradient for the tensor leads somewhere. Asking that of some views raises: they have none."""
    with contextlib.suppress(RuntimeError):
        return t.grad_fn is not None
    return False


def refuses_history(t: torch.Tensor) -> bool:
    """Whether autograd raises when it is asked for the history: of views whose base was written to behind their back,
    under no_grad or beside the operator that gave several of them."""
    try:
        _ = t.grad_fn
    except RuntimeError:
        return True
    return False


def nodes_behind(values: Sequence[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """Every node of the values' history, once."""
    work = [v.grad_fn for v in values]
    seen: set[torch.autograd.graph.Node] = set()
    while work:
        node = work.pop()
        if node is not None and node not in seen:
            seen.add(node)
            work.extend([source for source, _ in node.next_functions])
            yield node


REENTERS = "CheckpointFunctionBackward"
"""The name of the nodes that `torch.utils.checkpoint` with `use_reentrant=True` makes."""


def leaves_behind(value: torch.Tensor) -> set[int]:
    """The ids of the leaves that a backward comes to, be it with a gradient or without: hooks on them run."""
    leaves = (node for node in nodes_behind([value]) if node.name() == "torch::autograd::AccumulateGrad")
    return {id(node.variable) for node in leaves}  # type: ignore[attr-defined]  # nodes of leaves alone have it


def freed_behind(value: torch.Tensor) -> set[torch.autograd.graph.Node]:
    """The nodes behind it that a backward has freed, so that another one raises there, whatever they kept: a factor
    that is a number is a saved tensor, too."""
    return {node for node in nodes_behind([value]) if any(_is_freed(node, name) for name in _saved_by(type(node)))}


def last_to_keep(values: Sequence[torch.Tensor]) -> int:
    """Autograd's number of the last node behind values that keeps tensors; -1: none does."""
    return max((node._sequence_nr() for node in nodes_behind(values) if _keeps_tensors(type(node))), default=-1)


@functools.lru_cache(1024)
def _keeps_tensors(kind: type) -> bool:
    """Whether a kind of node has saved tensors; an autograd function's may have some."""
    return any(name.startswith("_raw_saved_") or name == "saved_tensors" for name in dir(kind))


@functools.lru_cache(1024)
def _saved_by(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _is_freed(node: torch.autograd.graph.Node, name: str) -> bool:
    try:
        getattr(node, name)
    except RuntimeError as error:
        return str(error) == BACKWARD_TWICE
    return False
