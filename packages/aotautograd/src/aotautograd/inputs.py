"""Binds a program's example inputs to fake values: whole programs from capture, or any callable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from aotautograd.errors import InvalidJoint
from aotautograd.schemas import SymbolSource
from primtorch.fake import FakeMode
from primtorch.frozen import record
from primtorch.layout import dense_like
from primtorch.spec import TensorSpec, spec_of
from primtorch.symbolic import ShapeEnv, expr_of, hint_of, shape_env_of


@record
class Computed:
    """An example of an input that the program around this one computes: it is no leaf."""

    requires_grad: bool
    is_leaf: bool = False


@dataclass(slots=True)
class ProgramInputs:
    """The flat inputs of a program, faked. `values[i]` is a fake tensor, a SymInt, a SymFloat or a constant."""

    fake_mode: FakeMode
    values: list[object]
    names: list[str]
    requires_grad: dict[int, bool]
    is_leaf: dict[int, bool]
    symbols: list[tuple[SymbolSource, torch.SymInt]]  # symbols in sizes that no SymInt input carries
    versions: dict[int, int] = field(default_factory=dict)  # `_version` of each wrapped input before the program ran

    storages: dict[int, int] = field(default_factory=dict)  # identity of each wrapped input's storage, likewise

    def placeholders(self) -> Iterator[tuple[str, int | SymbolSource, object]]:
        """(name, source, value) of each placeholder: symbolic numbers first, then tensors. Constants are baked in."""
        for source, value in self.symbols:
            yield source.name, source, value
        for i, v in enumerate(self.values):
            if isinstance(v, (torch.SymInt, torch.SymFloat)):
                yield self.names[i], i, v
        for i, v in enumerate(self.values):
            if isinstance(v, torch.Tensor):
                yield self.names[i], i, v

    def symbol_places(self) -> tuple[tuple[str, int, int | None], ...]:
        """Where the value of each symbol is read: (name, flat input, dimension or None)."""
        derived: list[tuple[str, int, int | None]] = [(s.name, s.input, s.dim) for s, _ in self.symbols]
        given = ((str(expr_of(v)), i, None) for i, v in enumerate(self.values) if isinstance(v, torch.SymInt))
        return (*derived, *given)


def bind_inputs(program: object, example_inputs: Sequence[object]) -> ProgramInputs:
    """Fakes the inputs. A graph's placeholders say their fake values in meta["val"]; the examples say requires_grad."""
    examples = list(example_inputs)
    described = examples
    names = [f"primals_{i}" for i in range(len(examples))]
    if isinstance(program, fx.GraphModule):
        nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
        if len(nodes) != len(examples):
            raise InvalidJoint(
                f"the graph has {len(nodes)} placeholders, and {len(examples)} example inputs were given"
            )
        described = [n.meta.get("val", e) for n, e in zip(nodes, examples, strict=True)]
        names = [n.name for n in nodes]
    fake_mode = FakeMode(_shape_env(described) or ShapeEnv())
    values: list[object] = []
    requires_grad: dict[int, bool] = {}
    is_leaf: dict[int, bool] = {}
    for i, (value, example) in enumerate(zip(described, examples, strict=True)):
        if isinstance(value, (torch.Tensor, TensorSpec)):
            judge = example if isinstance(example, (torch.Tensor, Computed)) else value
            requires_grad[i] = judge.requires_grad
            is_leaf[i] = bool(getattr(judge, "is_leaf", True))
            value = fake_mode.from_spec(spec_of(value))
        values.append(value)
    return ProgramInputs(fake_mode, values, names, requires_grad, is_leaf, _uncarried_symbols(values))


def sizes_of(value: object) -> Iterator[torch.SymInt]:
    """Every SymInt in a value's metadata."""
    if isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, (torch.Tensor, TensorSpec)):
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            if isinstance(size, torch.SymInt):
                yield size
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from sizes_of(item)


def _shape_env(values: Sequence[object]) -> ShapeEnv | None:
    for value in values:
        if isinstance(value, torch.SymFloat):
            return shape_env_of(value)
        for size in sizes_of(value):
            return shape_env_of(size)
    return None


def _uncarried_symbols(values: Sequence[object]) -> list[tuple[SymbolSource, torch.SymInt]]:
    carried = {str(expr_of(v)) for v in values if isinstance(v, torch.SymInt)}
    needed: set[str] = set()
    found: list[tuple[SymbolSource, torch.SymInt]] = []
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        for inner in sizes_of(value):
            needed |= expr_of(inner).symbols()
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                name = str(expr_of(size))
                if name.isidentifier() and name not in carried:
                    carried.add(name)
                    found.append((SymbolSource(name, i, dim), size))
    if needed - carried:
        raise InvalidJoint(f"no input gives the value of the symbols {sorted(needed - carried)}")
    return found


def spec_of_clone(value: torch.Tensor | TensorSpec) -> TensorSpec:
    """What a clone of the value is: dense, in the order of its memory, also where its elements share a place."""
    shape = tuple(value.shape)
    return TensorSpec(shape, dense_like(shape, tuple(value.stride())), value.dtype, value.device)


def dense_spec(value: torch.Tensor | TensorSpec) -> TensorSpec:
    """The spec of a tensor that fills its memory without gaps, with its dimensions in the order of `value`'s.

    A size that depends on data counts as large.
    """
    spec = spec_of(value)
    large = 1 << 40
    order = sorted(range(spec.dim()), key=lambda d: (hint_of(spec.strides[d], large), hint_of(spec.shape[d], large)))
    strides: list[int | torch.SymInt] = list(spec.strides)
    step: int | torch.SymInt = 1
    for d in order:
        size = spec.shape[d]
        if hint_of(size, large) != 1 or hint_of(strides[d], large) == 0:
            strides[d] = step
            step = step * size
    return TensorSpec(spec.shape, tuple(strides), spec.dtype, spec.device)
