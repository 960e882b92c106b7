"""What a process keeps of a traced program so that another one can run what was compiled of it, without a trace."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from aotautograd.schemas import (
    BackwardOutline,
    Example,
    GradientInfo,
    InputInfo,
    JointGraph,
    Outline,
    OutputInfo,
    Partition,
    ProgramMetadata,
    SavedReport,
    ViewStep,
)
from primtorch import symbolic
from primtorch.spec import TensorSpec, of_numbers
from primtorch.symbolic import FloatExpr, IntExpr, ShapeEnv, symbol
from primtorch.symbolic.expr import intern_symbol

RecordT = TypeVar("RecordT")
# Records in which symbolic numbers stand.
_HOLDERS = (TensorSpec, ProgramMetadata, InputInfo, OutputInfo, GradientInfo, ViewStep, Outline, BackwardOutline)
_HELD = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _HOLDERS}
_PLAIN = frozenset((bool, int, str, type(None), torch.dtype, torch.device))  # what stays what it is


def outline_of(joint: JointGraph, parts: Partition | None, reads: frozenset[int]) -> Outline | None:
    """The outline of a program; None where it has more to say than an outline holds: numbers that were taken out of
    tensors, derivatives that raise."""
    if joint.guard is not None or joint.failing or joint.metadata.assumptions:
        return None
    if parts is None:
        placeholders = _placeholders(joint.module)
        return None if placeholders is None else Outline(spelt(joint.metadata), forward=placeholders)
    forward, backward = _placeholders(parts.forward), _placeholders(parts.backward)
    if forward is None or backward is None:
        return None
    saved = tuple(value.name if value.op == "placeholder" else "" for value in parts.saved_values)
    symbols = parts.num_saved_symbols
    return Outline(spelt(joint.metadata), reads, forward, backward, parts.saved_names, saved, symbols)


def _placeholders(module: fx.GraphModule) -> tuple[tuple[str, Example], ...] | None:
    found: list[tuple[str, Example]] = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            value = TensorSpec.of(value)
        if not isinstance(value, (TensorSpec, torch.SymInt, torch.SymFloat, int, float)):
            return None
        example: Any = spelt(value)
        found.append((node.name, example))
    return tuple(found)


def partition_of(outline: Outline, env: ShapeEnv | None) -> Partition:
    """The two halves as the run time reads them: what they take, and which inputs are kept as they are."""
    forward, backward = fx.Graph(), fx.Graph()
    taken = {name: _placeholder(forward, name, value, env) for name, value in outline.forward}
    computed = forward.call_function(torch.empty, (0,)) if "" in outline.saved or outline.symbols else None
    forward.output((*(taken.get(name, computed) for name in outline.saved), *[computed] * outline.symbols))
    for name, value in outline.backward:
        _placeholder(backward, name, value, env)
    backward.output(())
    return Partition(
        _LazyGraphModule({}, forward),  # nobody runs them
        _LazyGraphModule({}, backward),
        len(outline.saved),
        outline.symbols,
        SavedReport(len(outline.saved), outline.symbols, 0, 0, 0),
        outline.saved_names,
        bound(outline.metadata, env),
    )


def _placeholder(graph: fx.Graph, name: str, value: Example, env: ShapeEnv | None) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = bound(value, env)
    return node


# -- symbolic numbers ----------------------------------------------------------------------------


def agree(made: Outline | None, kept: Outline, env: ShapeEnv | None) -> bool:
    """Whether an outline says what another one said, by what is known of the sizes: a trace learns that some are equal,
    and the next one has one name for them."""
    return made is not None and _settled(made, env) == _settled(kept, env)


def _settled(outline: Outline, env: ShapeEnv | None) -> Outline:
    if env is None:
        return outline
    names = _NamesOfData(env)
    found: Outline = _through(outline, names.in_number)
    places = tuple((names.of_symbol(name), place, dim) for name, place, dim in found.metadata.symbol_places)
    slots = tuple((names.of_symbol(name), slot) for name, slot in found.metadata.number_slots)
    metadata = dataclasses.replace(found.metadata, symbol_places=places, number_slots=slots)
    return dataclasses.replace(found, metadata=metadata)


class _NamesOfData:
    """Calls symbols that only the data tells by their order in an outline: each trace makes its own."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.names: dict[str, str] = {}

    def in_number(self, value: object) -> object:
        """A symbolic number under these names; another value as it is."""
        if isinstance(value, FloatExpr):
            return FloatExpr(self._name(value.text)) if value.value is None else value
        if not isinstance(value, IntExpr):
            return value
        known = self.env.simplify(value)
        names = sorted(known.symbols(), key=lambda name: (len(name), name))  # u9 before u10
        return known.substitute({intern_symbol(name): symbol(self._name(name)) for name in names})

    def of_symbol(self, name: str) -> str:
        return str(self.in_number(symbol(name)))

    def _name(self, name: str) -> str:
        return self.names.setdefault(name, f"data{len(self.names)}") if name.startswith("u") else name


def spelt(record: RecordT) -> RecordT:
    """A record whose symbolic numbers are the expressions that they stand for: it belongs to no environment."""
    if isinstance(record, TensorSpec) and of_numbers(record):  # nearly all that there is
        return record
    found: RecordT = _through(record, symbolic.spelt)
    return found


def bound(record: RecordT, env: ShapeEnv | None) -> RecordT:
    """What `spelt` spelt out, with numbers of an environment that knows the symbols."""
    if env is None:
        return record
    found: RecordT = _through(record, lambda value: symbolic.bound(value, env))
    return found


def _through(value: object, change: Callable[[Any], Any]) -> Any:
    """A value with `change` applied to what is in its records and sequences; the value itself where nothing changes."""
    changed = change(value)
    if changed is not value:
        return changed
    kind = type(value)
    if kind is tuple or kind is list:
        items = [item if type(item) in _PLAIN else _through(item, change) for item in value]
        return value if all(map(operator.is_, items, value)) else kind(items)
    found = {}
    for name in _HELD.get(kind, ()):
        old = getattr(value, name)
        if type(old) not in _PLAIN and (new := _through(old, change)) is not old:
            found[name] = new
    return dataclasses.replace(value, **found) if found else value
