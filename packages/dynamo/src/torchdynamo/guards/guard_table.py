"""Guards as text for a person."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import torch

from torchdynamo.guards.shown import short, short_text
from torchdynamo.guards.source_text import source_text
from torchdynamo.schemas import AmbientRead, GlobalState, Guard, ShapeProgram, TensorGuard, WrittenMemory
from torchdynamo.sources import is_source


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
            return f"{call_text(payload)} == {_without_address(payload.value)}"
        case WrittenMemory():
            written = ", ".join(map(source_text, payload.written))
            return f"{short_text(written)} apart from {len(payload.others)} others" if payload.others else written
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
    if is_source(payload):
        return source_text(payload)
    return short(payload, 200)


def _tensor_text(want: TensorGuard) -> str:
    """dtype[sizes] and what else is checked; `?` for an entry that a SHAPE guard speaks of."""
    sizes, strides = (", ".join("?" if x is None else str(x) for x in xs) for xs in (want.sizes, want.strides))
    parts = [f"{str(want.dtype).removeprefix('torch.')}[{sizes}]", f"strides ({strides})", str(want.device)]
    parts += ["requires grad"] * want.requires_grad
    parts += [] if want.is_leaf is None else ["leaf" if want.is_leaf else "not a leaf"]
    parts += [] if want.has_grad is None else ["with .grad" if want.has_grad else "without .grad"]
    parts += ["no hooks"] * want.no_hooks
    parts += [] if want.type is torch.Tensor else [f"type {want.type.__name__}"]
    return ", ".join(parts)


def call_text(read: AmbientRead) -> str:
    """The call that a guard on ambient state makes, without addresses."""
    name = getattr(read.function, "__qualname__", repr(read.function))
    return f"{name}({', '.join(map(_without_address, read.args))})"


def _without_address(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
