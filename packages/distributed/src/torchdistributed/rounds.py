"""Deep replicated models: a loop over many modules that are built alike is compiled round by round.

A graph of all layers takes as long to compile as there are layers. Under DistributedDataParallel its backward is cut at
the ends of buckets in any case, so that little is fused over a layer's edge. Where one round is a graph of its own, all
rounds share it, and a model of more layers takes hardly longer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from torchdistributed.replicas import active_replica

_SHARE: Final = 4  # of a model's parameters a loop has to go over at least one in so many
_HOOKS: Final = tuple(
    f"_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre")
)  # each module's own, which no two rounds have in common
_PLAIN: Final[frozenset[type]] = frozenset(
    {bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@dataclass(frozen=True, slots=True)
class ReplicaRounds:
    """Says whether a loop over modules is compiled round by round.

    Attributes:
        least: from how many modules on that are built alike.
    """

    least: int

    def __call__(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are the layers of a model that DistributedDataParallel trains now: enough of each form, which
        together hold a fair part of its parameters (the experts of one layer do not)."""
        if len(modules) < self.least or not torch.is_grad_enabled():
            return False
        replicated = active_replica()
        if replicated is None:
            return False
        forms = set(map(form_of, modules))
        if len(forms) * self.least > len(modules):
            return False
        held = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
        return _SHARE * sum(held.values()) >= sum(parameter.numel() for parameter in replicated.module.parameters())


def form_of(module: nn.Module) -> Hashable:
    """Equal for modules that are built alike, so that a graph of one mostly fits the other (guards say whether it does):
    class, mode, parameters' and buffers' metadata, plain attributes but for ints, of which a layer has its number, and
    the forms of its parts. A module with hooks has a form of its own."""
    parts = vars(module)
    if any(parts.get(hooks) for hooks in _HOOKS):
        return id(module)
    tensors = (*parts["_parameters"].items(), *parts["_buffers"].items())
    return (
        type(module),
        tuple((name, _metadata(tensor)) for name, tensor in tensors),
        tuple((name, _of_value(value)) for name, value in parts.items() if not name.startswith("_")),
        tuple((name, form_of(part) if part is not None else None) for name, part in parts["_modules"].items()),
    )


def _metadata(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def _of_value(value: object) -> Hashable:
    """What two modules have to have in common of an attribute: its class, and of what is plain its value."""
    kind: Any = type(value)
    return (kind, value) if kind in _PLAIN else kind
