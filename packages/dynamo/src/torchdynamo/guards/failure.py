"""Which guard does not hold for a call, and why.

The C++ guard tree checks the same records on the hot path. The evaluator here is the readable
reference for it, and tells which guard failed and why when a recompile is explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from primtorch.frozen import record
from torchdynamo._C import gradient_hooks
from torchdynamo.guards.global_state import global_state
from torchdynamo.guards.guard_table import call_text
from torchdynamo.guards.memory_guards import overlapping
from torchdynamo.guards.shape_program import run_program, same_constant
from torchdynamo.guards.shown import short
from torchdynamo.guards.source_text import source_text
from torchdynamo.schemas import AmbientRead, GlobalState, Guard, GuardKind, ShapeProgram, TensorGuard, WrittenMemory
from torchdynamo.sources import CONTAINERS, Scope, instance_dict, own_keys, own_length, resolve


def _has_instance(obj: object, name: str) -> bool:
    try:
        return name in instance_dict(obj)
    except AttributeError:
        return False


def _truth(value: object) -> bool:
    return bool(own_length(value)) if isinstance(value, CONTAINERS) else bool(value)


_CHECKS: dict[GuardKind, Callable[[Any, Any], bool]] = {
    GuardKind.TYPE: lambda value, payload: type(value) is payload,
    GuardKind.IDENTITY: lambda value, payload: value is payload,
    GuardKind.EQUALS: same_constant,
    GuardKind.LENGTH: lambda value, payload: own_length(value) == payload,
    GuardKind.DICT_KEYS: lambda value, payload: own_keys(value) == payload,
    GuardKind.SET_ITEMS: lambda value, payload: frozenset(value) == payload,
    GuardKind.INSTANCE_HAS: _has_instance,
    GuardKind.INSTANCE_LACKS: lambda value, payload: not _has_instance(value, payload),
    GuardKind.KEY_ABSENT: lambda value, payload: payload not in value,
    GuardKind.BOOL: lambda value, payload: _truth(value) is payload,
    GuardKind.PREDICATE: lambda value, payload: bool(payload(value)),
}


def tensor_mismatch(value: torch.Tensor, want: TensorGuard) -> str | None:
    """What differs between a tensor and its guard, or None."""
    kind: type = type(value)
    if kind is not want.type:
        return f"type {kind.__name__}, expected {want.type.__name__}"
    for name in ("dtype", "device", "requires_grad"):
        if getattr(value, name) != getattr(want, name):
            return f"{name} {getattr(value, name)}, expected {getattr(want, name)}"
    if value.dim() != len(want.sizes):
        return f"{value.dim()} dimensions, expected {len(want.sizes)}"
    for dim, (size, expected) in enumerate(zip(value.shape, want.sizes, strict=True)):
        if expected is not None and size != expected:
            return f"size {size} at dim {dim}, expected {expected}"
    for dim, (stride, expected) in enumerate(zip(value.stride(), want.strides, strict=True)):
        if expected is not None and stride != expected:
            return f"stride {stride} at dim {dim}, expected {expected}"
    if want.is_leaf is not None and value.is_leaf is not want.is_leaf:
        return f"is_leaf {value.is_leaf}, expected {want.is_leaf}"
    if want.has_grad is not None and (value.grad is not None) is not want.has_grad:
        return f"has grad: {value.grad is not None}, expected {want.has_grad}"
    if want.no_hooks and gradient_hooks(value):
        return "hooks on its gradient, expected none"
    return None


def explain_failure(guard: Guard, scope: Scope) -> str | None:
    """Why `guard` does not hold in `scope`, or None when it holds."""
    if guard.kind is GuardKind.GLOBAL_STATE:
        now = global_state()
        if now == guard.payload:
            return None
        return "ambient state changed: " + ", ".join(_differences(guard.payload, now))
    if guard.kind is GuardKind.AMBIENT:
        read: AmbientRead = guard.payload
        value = read.function(*read.args)
        return None if same_constant(value, read.value) else f"{call_text(read)} is {value!r}, was {read.value!r}"
    with torch._C.DisableTorchFunctionSubclass():
        return _explain_objects(guard, scope)


def _explain_objects(guard: Guard, scope: Scope) -> str | None:
    if guard.kind is GuardKind.SHAPE:
        shape: ShapeProgram = guard.payload
        try:
            values = {name: resolve(source, scope) for name, source in shape.symbols.items()}
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            return f"{shape.text}: cannot be read ({error})"
        if run_program(shape.program, values):
            return None
        sizes = (f"{source_text(source)} = {values[name]}" for name, source in sorted(shape.symbols.items()))
        return f"{shape.text} does not hold for {', '.join(sizes)}"
    if guard.kind is GuardKind.DISTINCT_STORAGE:
        return _explain_memory(guard.payload, scope)
    assert guard.source is not None
    where = source_text(guard.source)
    try:
        value = resolve(guard.source, scope)
        return _explain_value(guard, where, value, scope)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        return f"{where} cannot be read ({type(error).__name__}: {error})"


def _differences(before: GlobalState, now: GlobalState) -> Iterator[str]:
    for name in GlobalState.__slots__:
        new, old = getattr(now, name), getattr(before, name)
        if name == "switches":
            for (switch, after), (_, earlier) in zip(new, old, strict=True):
                if after != earlier:
                    yield f"{switch} is {_shown(switch, after)}, was {_shown(switch, earlier)}"
        elif new != old:
            yield f"{name} is {new}, was {old}"


def _shown(switch: str, value: int) -> str:
    keys = torch._C.DispatchKeySet
    return str(keys.from_raw_repr(value)) if switch.startswith("dispatch keys") else str(value)


def _explain_memory(memory: WrittenMemory, scope: Scope) -> str | None:
    try:
        written, others = ([resolve(source, scope) for source in part] for part in (memory.written, memory.others))
        found = overlapping(written, others)
    except (LookupError, AttributeError, TypeError, RuntimeError) as error:
        return f"memory that is written cannot be read ({type(error).__name__}: {error})"
    if found is None:
        return None
    first, second = (source_text((*memory.written, *memory.others)[place]) for place in sorted(found))
    return f"{first}, which is written, and {second} share memory"


def _explain_value(guard: Guard, where: str, value: object, scope: Scope) -> str | None:
    if guard.kind is GuardKind.TENSOR:
        if not isinstance(value, torch.Tensor):
            return f"{where} is a {type(value).__name__}, expected a tensor"
        mismatch = tensor_mismatch(value, guard.payload)
        return None if mismatch is None else f"tensor {where} has {mismatch}"
    if guard.kind is GuardKind.SAME_OBJECT:
        if value is resolve(guard.payload, scope):
            return None
        return f"{where} is no longer the same object as {source_text(guard.payload)}"
    if guard.kind is GuardKind.DISTINCT_OBJECT:
        same = value is resolve(guard.payload, scope)
        return f"{where} is now the same object as {source_text(guard.payload)}" if same else None
    if guard.kind is GuardKind.ALL_DISTINCT:
        seen = {id(value): where}
        for source in guard.payload:
            first = seen.setdefault(id(resolve(source, scope)), source.expression())
            if first != source.expression():
                return f"{first} and {source.expression()} are now the same object"
        return None
    if _CHECKS[guard.kind](value, guard.payload):
        return None
    if guard.kind is GuardKind.PREDICATE:
        return f"{guard.payload.__name__}({where}) is no longer true"
    if guard.kind in _PRESENCE:
        return f"{where} {_PRESENCE[guard.kind]} {guard.payload!r}"
    wanted, found = guard.payload, _COMPARED.get(guard.kind, lambda value: value)(value)
    return f"{where}: {guard.kind.value} {short(wanted)} expected, got {short(found)}"


# What a guard compares of the value, where that is not the value itself.
_COMPARED: dict[GuardKind, Callable[[Any], object]] = {
    GuardKind.TYPE: type,
    GuardKind.LENGTH: own_length,
    GuardKind.DICT_KEYS: own_keys,
    GuardKind.SET_ITEMS: frozenset,
    GuardKind.BOOL: _truth,
}
_PRESENCE = {
    GuardKind.INSTANCE_HAS: "no longer has the attribute",
    GuardKind.INSTANCE_LACKS: "now has the attribute",
    GuardKind.KEY_ABSENT: "now has the key",
}


@record
class Failure:
    """A guard that does not hold: what it wants and what it finds, as text.

    Attributes:
        hidden: a file that is none of the program's, in which the value was handed on.
    """

    guard: Guard
    text: str
    hidden: str | None = None

    def __str__(self) -> str:
        frame = next((frame for frame in reversed(self.guard.user_frames) if frame.file != self.hidden), None)
        return self.text if frame is None else f"{self.text} (read at {frame.file}:{frame.line} in {frame.function})"


def first_failure(guards: Iterable[Guard], scope: Scope) -> Failure | None:
    """The first guard of `guards` that does not hold, explained; None when all hold."""
    for guard in guards:
        text = explain_failure(guard, scope)
        if text is not None:
            return Failure(guard, text)
    return None
