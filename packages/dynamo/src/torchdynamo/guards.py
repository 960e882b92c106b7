"""The guards of one capture: collected without repeats, checked in Python, explained to a person.

The C++ guard tree checks the same records on the hot path. The evaluator here is the readable
reference for it, and tells which guard failed and why when a recompile is explained.
"""

from __future__ import annotations

import math
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
import torch.overrides
from torch.utils._device import DeviceContext

from primtorch.schemas import UserFrame
from primtorch.symbolic import SCALAR_OPS, UNARY_OPS
from torchdynamo._C import kernel_switches
from torchdynamo.schemas import AmbientRead, GlobalState, Guard, GuardKind, ShapeProgram, TensorGuard, WrittenMemory
from torchdynamo.source_text import source_text
from torchdynamo.sources import (
    Argument,
    Attribute,
    CellContents,
    ClosureCell,
    DictKeyAt,
    Global,
    InstanceAttribute,
    InstanceDict,
    Item,
    Pinned,
    Referent,
    Source,
    TensorOffset,
    TensorSize,
    TensorStride,
    TypeOf,
)


@dataclass(frozen=True, slots=True)
class Scope:
    """What sources are resolved against: one call of the captured function."""

    flat: Sequence[Any]
    globals: Mapping[str, Any]
    closure: tuple[Any, ...]
    pinned: Sequence[Any]
    modules: Mapping[str, Any]


class GuardSet:
    """Guards in the order in which the program asked; the first mention of each wins."""

    def __init__(self) -> None:
        self._guards: dict[tuple[Any, ...], Guard] = {}

    def add(self, source: Source | None, kind: GuardKind, payload: Any, user_frames: tuple[UserFrame, ...]) -> None:
        key = (source, kind, _payload_key(payload))
        if key not in self._guards:
            self._guards[key] = Guard(source, kind, payload, user_frames)

    def guards(self) -> tuple[Guard, ...]:
        return tuple(self._guards.values())

    def __len__(self) -> int:
        return len(self._guards)


def _payload_key(payload: Any) -> Any:
    """Equal keys only for payloads that check the same thing (1, 1.0 and True differ)."""
    if isinstance(payload, (str, int, float, complex, bytes)):
        return (type(payload), repr(payload))
    if isinstance(payload, frozenset):
        return (type(payload), frozenset(map(_payload_key, frozenset.__iter__(payload))))
    if isinstance(payload, tuple):
        return (type(payload), tuple(map(_payload_key, tuple.__iter__(payload))))
    return id(payload)


def resolve(source: Source, scope: Scope) -> Any:
    """The object at `source` in `scope`. Raises what the failing step raises."""
    match source:
        case Argument(index=index):
            return scope.flat[index]
        case Global(name=name, module=None):
            return scope.globals[name]
        case Global(name=name, module=module):
            return scope.modules[str(module)].__dict__[name]
        case ClosureCell(index=index):
            return scope.closure[index].cell_contents
        case Pinned(key=key):
            return scope.pinned[key]
        case Attribute(base=base, name=name):
            return getattr(resolve(base, scope), name)
        case InstanceAttribute(base=base, name=name):
            return instance_dict(resolve(base, scope))[name]
        case CellContents(base=base):
            return resolve(base, scope).cell_contents
        case InstanceDict(base=base):
            return instance_dict(resolve(base, scope))
        case Item(base=base, key=key):
            return base_item(resolve(base, scope), key)
        case DictKeyAt(base=base, index=index):
            return own_keys(resolve(base, scope))[index]
        case TypeOf(base=base):
            return type(resolve(base, scope))
        case Referent(base=base):
            return resolve(base, scope)()
        case TensorSize(base=base, dim=dim):
            return resolve(base, scope).shape[dim]
        case TensorStride(base=base, dim=dim):
            return resolve(base, scope).stride(dim)
        case TensorOffset(base=base):
            return resolve(base, scope).storage_offset()
    raise TypeError(f"not a source: {source!r}")


def instance_dict(obj: Any) -> Mapping[str, Any]:
    """`obj.__dict__` by the type's own slot, whatever the class says about `__getattribute__`."""
    return object.__getattribute__(obj, "__dict__")  # type: ignore[no-any-return]


def own_keys(container: dict[Any, Any]) -> tuple[Any, ...]:
    """The keys in their order, by the built-in class: an OrderedDict keeps an order of its own."""
    return tuple((OrderedDict if isinstance(container, OrderedDict) else dict).keys(container))


def base_item(container: Any, key: Any) -> Any:
    """An item by the lookup of the built-in base class."""
    lookup: Any = next((base.__getitem__ for base in (dict, list, tuple) if isinstance(container, base)), None)
    return container[key] if lookup is None else lookup(container, key)


def global_state() -> GlobalState:
    """Ambient state of this thread, as the guard compares it."""
    devices = ("cpu", "cuda")
    return GlobalState(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        autocast_cache=torch.is_autocast_cache_enabled(),
        default_dtype=torch.get_default_dtype(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        torch_function_modes=torch._C._len_torch_function_stack(),
        switches=kernel_switches(),
    )


def function_modes() -> tuple[Any, ...]:
    """The torch-function modes that are on: a default device by its device, others by their identity."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[attr-defined]
    return tuple(m.device if isinstance(m, DeviceContext) else weakref.ref(m) for m in modes)


def same_constant(a: Any, b: Any) -> bool:
    """Same exact type and equal; nan equals nan, 0.0 is not -0.0, recursively in tuples and frozensets."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1.0, a) == math.copysign(1.0, b))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_constant, a, b))
    return bool(a == b)


def _has_instance(obj: Any, name: str) -> bool:
    try:
        return name in instance_dict(obj)
    except AttributeError:
        return False


def _truth(value: Any) -> bool:
    return bool(len(value)) if isinstance(value, (list, tuple, dict, set, frozenset)) else bool(value)


_CHECKS: dict[GuardKind, Callable[[Any, Any], bool]] = {
    GuardKind.TYPE: lambda value, payload: type(value) is payload,
    GuardKind.IDENTITY: lambda value, payload: value is payload,
    GuardKind.EQUALS: same_constant,
    GuardKind.LENGTH: lambda value, payload: len(value) == payload,
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
    return None


def run_program(program: Iterable[tuple[str, Any]], symbols: Mapping[str, int | float]) -> Any:
    """Evaluates a postfix program of `primtorch.symbolic` over numbers; False where its arithmetic raises."""
    try:
        return _run_program(program, symbols)
    except (ArithmeticError, ValueError, TypeError):
        return False


def _run_program(program: Iterable[tuple[str, Any]], symbols: Mapping[str, int | float]) -> Any:
    stack: list[Any] = []
    kept: dict[int, Any] = {}
    for op, operand in program:
        if op in ("const", "fconst"):
            stack.append(operand)
        elif op == "keep":
            kept[operand] = stack[-1]
        elif op == "kept":
            stack.append(kept[operand])
        elif op == "sym":
            stack.append(symbols[operand])
        elif op in _UNARY:
            stack.append(_UNARY[op](stack.pop()))
        else:
            right = stack.pop()
            stack.append(_BINARY[op](stack.pop(), right))
    return stack.pop()


_UNARY: dict[str, Callable[[Any], Any]] = {
    **{op.name: op.function for op in SCALAR_OPS.values() if op.name in UNARY_OPS},
    "neg": lambda a: -a,
    "not": lambda a: not a,
    "defined": lambda a: not isinstance(a, complex),
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{op.name: op.function for op in SCALAR_OPS.values() if op.name not in UNARY_OPS},
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
}
_BINARY |= {f"f{op}": _BINARY[op] for op in ("eq", "ne", "lt", "le", "gt", "ge")} | {"fsame": same_constant}


def overlapping(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Places in `(*written, *others)` of two tensors, one of them written, whose address ranges touch.

    That is an upper bound of true overlap. The ranges are met in the order in which they begin.
    """
    ranges = sorted(
        (str(tensor.device), *_address_range(tensor), place)
        for place, tensor in enumerate((*written, *others))
        if tensor.numel() and tensor.data_ptr()
    )
    furthest = furthest_written = ("", 0, -1)  # device, end, place of the ranges so far
    for device, begin, end, place in ranges:
        ahead = furthest if place < len(written) else furthest_written
        if ahead[0] == device and begin < ahead[1]:
            return ahead[2], place
        if (device, end) > furthest[:2]:
            furthest = (device, end, place)
        if place < len(written) and (device, end) > furthest_written[:2]:
            furthest_written = (device, end, place)
    return None


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


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
        return None if same_constant(value, read.value) else f"{_call_text(read)} is {value!r}, was {read.value!r}"
    if guard.kind is GuardKind.SHAPE:
        shape: ShapeProgram = guard.payload
        try:
            values = {name: resolve(source, scope) for name, source in shape.symbols.items()}
        except (LookupError, AttributeError, TypeError) as error:
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
    keys: Any = torch._C.DispatchKeySet
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


def _call_text(read: AmbientRead) -> str:
    name = getattr(read.function, "__qualname__", repr(read.function))
    return f"{name}({', '.join(map(repr, read.args))})"


def _explain_value(guard: Guard, where: str, value: Any, scope: Scope) -> str | None:
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
    return f"{where}: {guard.kind.value} {_short(wanted)} expected, got {_short(found)}"


# What a guard compares of the value, where that is not the value itself.
_COMPARED: dict[GuardKind, Callable[[Any], Any]] = {
    GuardKind.TYPE: type,
    GuardKind.LENGTH: len,
    GuardKind.DICT_KEYS: own_keys,
    GuardKind.SET_ITEMS: frozenset,
    GuardKind.BOOL: _truth,
}
_PRESENCE = {
    GuardKind.INSTANCE_HAS: "no longer has the attribute",
    GuardKind.INSTANCE_LACKS: "now has the attribute",
    GuardKind.KEY_ABSENT: "now has the key",
}


def _short(value: Any, limit: int = 80) -> str:
    return _short_text(repr(value) if not isinstance(value, torch.Tensor) else f"tensor{tuple(value.shape)}", limit)


def _short_text(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True, slots=True)
class Failure:
    """A guard that does not hold: what it wants and what it finds, as text."""

    guard: Guard
    text: str

    def __str__(self) -> str:
        frame = self.guard.user_frames[-1] if self.guard.user_frames else None
        return self.text if frame is None else f"{self.text} (read at {frame.file}:{frame.line} in {frame.function})"


def first_failure(guards: Iterable[Guard], scope: Scope) -> Failure | None:
    """The first guard of `guards` that does not hold, explained; None when all hold."""
    for guard in guards:
        text = explain_failure(guard, scope)
        if text is not None:
            return Failure(guard, text)
    return None


def guard_rows(guards: Iterable[Guard]) -> list[tuple[str, str, str, str]]:
    """A row for each guard: what is read, what is checked of it, what it has to be, the user's line that asked."""
    rows = []
    for guard in guards:
        where = source_text(guard.source) if guard.source is not None else ""
        frame = guard.user_frames[-1] if guard.user_frames else None
        asked = f"{PurePath(frame.file).name}:{frame.line}" if frame is not None else ""
        rows.append((where, guard.kind.value, _payload_text(guard.payload), asked))
    return rows


def print_guards(guards: Iterable[Guard]) -> str:
    """`guard_rows` as a table."""
    rows = guard_rows(guards)
    first = min(max((len(row[0]) for row in rows), default=0), 72)
    second = max((len(row[1]) for row in rows), default=0)
    lines = (
        f"{where:{first}}  {kind:{second}}  {text}{asked and '  # ' + asked}".rstrip()
        for where, kind, text, asked in rows
    )
    return "".join(f"{line}\n" for line in lines)


def _payload_text(payload: Any) -> str:
    """A payload without addresses and paths, which tell a reader nothing and differ from run to run."""
    match payload:
        case ShapeProgram():
            return payload.text
        case TensorGuard():
            return _tensor_text(payload)
        case AmbientRead():
            return f"{_call_text(payload)} == {payload.value!r}"
        case WrittenMemory():
            written = ", ".join(map(source_text, payload.written))
            return f"{_short_text(written)} apart from {len(payload.others)} others" if payload.others else written
        case GlobalState():
            casts = ", ".join(f"{device} {dtype}" for device, enabled, dtype in payload.autocast if enabled)
            parts = [
                "grad mode on" if payload.grad_enabled else "grad mode off",
                f"autocast {casts}" if casts else "no autocast",
                f"default dtype {str(payload.default_dtype).removeprefix('torch.')}",
            ]
            parts += ["inference mode"] * payload.inference_mode + ["deterministic algorithms"] * payload.deterministic
            parts += [f"{payload.torch_function_modes} function modes"] * bool(payload.torch_function_modes)
            return ", ".join(parts)
        case types.ModuleType():
            return f"module {payload.__name__}"
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            return f"{payload.__module__}.{payload.__qualname__}"
        case int() | float() | complex() | str() | bytes() | None | tuple() | frozenset():
            return _short(payload, 200)
    if hasattr(payload, "expression"):
        return source_text(payload)
    text = _short(payload, 200)
    return f"an object of {type(payload).__module__}.{type(payload).__qualname__}" if " at 0x" in text else text


def _tensor_text(want: TensorGuard) -> str:
    """dtype[sizes] and what else is checked; `?` for an entry that a SHAPE guard speaks of."""
    sizes, strides = (", ".join("?" if x is None else str(x) for x in xs) for xs in (want.sizes, want.strides))
    parts = [f"{str(want.dtype).removeprefix('torch.')}[{sizes}]", f"strides ({strides})", str(want.device)]
    parts += ["requires grad"] * want.requires_grad
    parts += [] if want.is_leaf is None else ["leaf" if want.is_leaf else "not a leaf"]
    parts += [] if want.has_grad is None else ["with .grad" if want.has_grad else "without .grad"]
    parts += [] if want.type is torch.Tensor else [f"type {want.type.__name__}"]
    return ", ".join(parts)
