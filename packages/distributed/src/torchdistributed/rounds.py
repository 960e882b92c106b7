"""Deep replicated models: a loop over many modules that are built alike is compiled round by round.

A graph of all layers takes as long to compile as there are layers. Under DistributedDataParallel its backward is cut at
the ends of buckets in any case, so that little is fused over a layer's edge. Where one round is a graph of its own, all
rounds share it, and a model of more layers takes hardly longer.

That rounds may share a graph is for guards to say, at every call. Here it is foreseen: rounds that differ in what
guards compare need a version each, of which a function has no more than its limit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from torchdistributed.replicas import active_replica, weights_behind_tables

_SHARE: Final = 4  # of a model's parameters a loop has to go over at least one in so many
_AHEAD: Final = 4  # of a loop's rounds at most one in so many is compiled with what is in front of it
_MOST_FORMS: Final = 3  # each takes a version or more of those that a function may have
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCHS_OWN: Final = frozenset(vars(nn.Module())) - {"training"}  # what calls do not read, but for hooks
_PLAIN: Final[frozenset[type]] = frozenset(
    {bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@dataclass(frozen=True, slots=True)
class ReplicaRounds:
    """Says whether a loop over modules is compiled round by round, and from which round on.

    Attributes:
        least: from how many modules on that are built alike.
    """

    least: int

    def __call__(self, modules: Sequence[nn.Module]) -> int | None:
        """None, but where these are the layers of a model that DistributedDataParallel trains now: of few forms, and
        with a fair part of its parameters (the experts of one layer have not). Then how many first rounds are compiled
        with what is in front of the loop: those whose weights wait for a table's gradient, which one graph has to
        compute (`tables_before_weights`)."""
        if len(modules) < self.least or not torch.is_grad_enabled():
            return None
        replicated = active_replica()
        if replicated is None:
            return None
        apart = forms(modules)
        if apart > _MOST_FORMS or len(modules) - apart + 1 < self.least:
            return None
        held = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
        whole: int = sum(parameter.numel() for parameter in replicated.module.parameters())
        if _SHARE * sum(held.values()) < whole:
            return None
        waiting = set(map(id, weights_behind_tables(replicated)))
        last = (at for at, module in enumerate(modules, 1) if any(id(p) in waiting for p in module.parameters()))
        return min(max(last, default=0), len(modules) // _AHEAD)


def forms(modules: Sequence[nn.Module]) -> int:
    """How many forms modules have. Those of one form are built alike: their classes, modes, attributes and parts, and
    the metadata of their tensors; but for ints by which they are numbered in this order. One with hooks is like no
    other."""
    numbers: dict[object, list[tuple[int, tuple[int, ...]]]] = {}
    for place, module in enumerate(modules):
        form = _Form()
        form.add_module(module)
        numbers.setdefault(tuple(form.parts), []).append((place, tuple(form.numbers)))
    return sum(1 if _are_numbered(alike) else len(alike) for alike in numbers.values())


def _are_numbered(modules: Sequence[tuple[int, Sequence[int]]]) -> bool:
    """Whether each of the ints of modules, which come with their places, is one number in all, or counts them."""
    places = [place for place, _ in modules]
    return all(
        len(set(values)) == 1 or len({value - place for place, value in zip(places, values, strict=True)}) == 1
        for values in zip(*(found for _, found in modules), strict=True)
    )


@dataclass(slots=True)
class _Form:
    """What guards compare of a module, in the order of its parts, and the ints among it."""

    parts: list[object] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    met: dict[int, int] = field(default_factory=dict)  # by identity, in the order of their coming

    def add_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        hooked = any(attributes.get(hooks) for hooks in _HOOKS)
        self.parts.append(id(module) if hooked else type(module))
        for registry in _REGISTRIES:
            self.add(attributes[registry])
        for name in sorted(attributes.keys() - _TORCHS_OWN):
            self.parts.append(name)
            self.add(attributes[name])

    def add(self, value: Any) -> None:
        kind = type(value)
        self.parts.append(kind)
        if kind is int:
            self.numbers.append(value)
        elif kind in _PLAIN:
            self.parts.append(value)
        elif id(value) in self.met:
            self.parts.append(self.met[id(value)])
        else:
            self.met[id(value)] = len(self.met)
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.add_module(value)
        elif isinstance(value, torch.Tensor):
            self.parts += (tuple(value.shape), value.dtype, value.device, value.requires_grad)
        elif isinstance(value, (tuple, list)):
            self._add_all(value)
        elif isinstance(value, Mapping):
            self._add_all([*value.keys(), *value.values()])
        elif type(value) is functools.partial:
            self._add_all((value.func, value.args, value.keywords))
        else:
            self.parts.append(id(value))

    def _add_all(self, values: Sequence[object]) -> None:
        self.parts.append(len(values))
        for value in values:
            self.add(value)
