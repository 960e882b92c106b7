"""Options of `compile`, built once at the call and passed down. The only place that reads the environment."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from torchcompile.errors import InvalidArgument, unknown
from torchcompile.torch_options import OF_TORCH, TORCH_OPTIONS, translated

# Environment variable -> option that it sets when the call does not.
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "TORCHCOMPILE_DUMP": "dump",
        "TORCHCOMPILE_CACHE": "cache",
        "TORCHCOMPILE_VERIFY": "verify",
        "TORCHCOMPILE_CHECK_KERNELS": "check_kernels",
        "TORCHCOMPILE_KEEP_FRAMES": "keep_frames",
        "CXX": "cxx",
    }
)


@dataclass(frozen=True)
class CompileOptions:
    """What `options={...}` may hold; the names are this record's fields."""

    dump: str | None = field(
        default=None, metadata={"doc": "folder for a readable file of every stage (TORCHCOMPILE_DUMP)"}
    )
    cache: str | None = field(
        default=None,
        metadata={
            "doc": "folder in which kernels and compiled programs are kept for other processes (TORCHCOMPILE_CACHE; "
            "~/.cache/torchcompile when not given); None keeps nothing"
        },
    )
    keep_frames: bool = field(
        default=True,
        metadata={
            "doc": "keep what capture made of a call in the cache folder, too: another process whose code, modules and "
            "arguments are the same captures nothing (TORCHCOMPILE_KEEP_FRAMES=0 keeps none)"
        },
    )
    cxx: str | None = field(
        default=None,
        metadata={"doc": "C++ compiler, with or without flags (CXX); None looks for g++, c++, clang++"},
    )
    partitioner: Literal["min_cut", "default"] = field(
        default="min_cut", metadata={"doc": "how saved activations are chosen"}
    )
    memory_budget: float | int = field(
        default=1.0,
        metadata={"doc": "part, from 0 to 1, of what min_cut keeps at 1 that may be kept; the rest is computed again"},
    )
    eager_random: bool = field(
        default=False, metadata={"doc": "draw eager's own random numbers, not those of the generator in the kernels"}
    )
    precision: Literal["fused", "eager"] = field(
        default="fused",
        metadata={
            "doc": "where bfloat16 and float16 are rounded: by casts that the program wrote and where values are "
            "stored, with float32 arithmetic in between, or after each operation as in eager"
        },
    )
    cuda_graphs: bool = field(default=False, metadata={"doc": "replay graphs on an NVIDIA GPU as one CUDA graph"})
    templates: bool = field(
        default=False,
        metadata={"doc": "generate matrix products on an NVIDIA GPU with what follows them, instead of calling cuBLAS"},
    )
    tune_products: bool = field(
        default=False,
        metadata={
            "doc": "time cuBLAS and several kernels of cuBLASLt for each matrix product on an NVIDIA GPU where it is "
            "first run, and take the fastest from then on, in other processes too (results may then differ in their "
            "last bits from machine to machine)"
        },
    )
    shared_kernels: bool = field(
        default=True,
        metadata={
            "doc": "kernels for a GPU that differ in sizes, strides and other numbers alone are one kernel that is "
            "given these; False compiles each for itself, with its numbers as constants: a first call may take several "
            "times as long"
        },
    )
    progress: bool | None = field(
        default=None,
        metadata={
            "doc": "a live line on the terminal while graphs are compiled; None: where standard error is one; True: "
            "elsewhere, too, as a line for each graph that is built"
        },
    )
    recompile_limit: int = field(default=8, metadata={"doc": "graphs a function may have before it runs eagerly"})
    on_recompile: Literal["continue", "warn", "error", "eager"] = field(
        default="continue", metadata={"doc": "what a recompilation does beside being counted"}
    )
    replicated_rounds: int = field(
        default=32,
        metadata={
            "doc": "from how many modules that are built alike a loop over them is compiled round by round where "
            "DistributedDataParallel trains the model: one round is compiled, for all, which costs the fusion over its "
            "edges; 0: never"
        },
    )
    preserve: tuple[OpOverload, ...] = field(
        default=(),
        metadata={
            "doc": "operators that stay calls of themselves, in forward and backward: overloads, all overloads of a "
            "packet, custom operators, or names like 'aten::gelu'"
        },
    )
    strict: bool = field(
        default=False,
        metadata={"doc": "an error of capture or of a named back end raises; else what it is about runs eagerly"},
    )
    never_slower: bool = field(
        default=False,
        metadata={
            "doc": "time graphs of few operators, or in which nothing is fused, beside eager at their second call, and "
            "keep eager where it is faster; the last bits of results then depend on the clock"
        },
    )
    verify: bool = field(
        default=False,
        metadata={
            "doc": "hold each graph to eager when it is compiled, and each call, values and gradients, judged by "
            "float64: one that differs raises WrongResult, which names the stage at fault and the first operator that "
            "differs; what would end the process, or hang, runs in a child first, and eagerly here "
            "(TORCHCOMPILE_VERIFY=1)"
        },
    )
    minify_on_error: bool = field(
        default=False,
        metadata={
            "doc": "where a stage raises an error, a stage or a kernel ends the process (each graph is tried in a "
            "child first), or `verify` finds a difference, the graph is reduced, and a file that shows it alone is "
            "written into the dump folder, or the current one"
        },
    )
    check_kernels: bool = field(
        default=False,
        metadata={
            "doc": "check kernels after every pass, not only after the last one; part of `verify` "
            "(TORCHCOMPILE_CHECK_KERNELS=1)"
        },
    )


# A mode is a named set of options.
MODES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "default": MappingProxyType({}),
        "reduce-overhead": MappingProxyType({"cuda_graphs": True}),
        "max-autotune": MappingProxyType({"tune_products": True, "cuda_graphs": True}),
        "max-autotune-no-cudagraphs": MappingProxyType({"tune_products": True}),
    }
)


def resolve(mode: str | None, options: Mapping[str, object] | None) -> CompileOptions:
    """The options of one `compile` call: environment, then the mode's, then the call's own. Raises InvalidArgument."""
    if mode is not None and mode not in MODES:
        raise unknown("mode", mode, MODES)
    if options is not None and not isinstance(options, Mapping):
        raise InvalidArgument(f"options is a mapping of names to values, not {type(options).__name__}")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    values: dict[str, Any] = {"cache": os.path.join(home, "torchcompile")}
    hints = typing.get_type_hints(CompileOptions)
    for variable, name in ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text:
            values[name] = text != "0" if hints[name] is bool else text
    values.update(MODES[mode or "default"])
    for name, value in translated(options or {}, hints).items():
        if name not in hints:
            raise unknown("option", name, hints, TORCH_OPTIONS, OF_TORCH)
        values[name] = _checked(name, value, hints[name])
    return CompileOptions(**values)


def _checked(name: str, value: object, accepted: object) -> object:
    """`value` if it is of the option's type; a path given as `Path` becomes a string."""
    if name == "preserve":
        return preserved_operators(value)
    if isinstance(value, Path):
        value = str(value)
    choices = typing.get_args(accepted)
    if typing.get_origin(accepted) is Literal:
        if value not in choices:
            raise unknown(f"value of option {name!r}:", value, map(str, choices))
        return value
    types: tuple[type, ...] = choices or (cast("type", accepted),)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join("None" if t is type(None) else t.__name__ for t in types)
        raise InvalidArgument(f"option {name!r} takes {names}, not {value!r}")
    if name == "memory_budget" and not 0 <= value <= 1:  # type: ignore[operator]
        raise InvalidArgument(f"option {name!r} is a part between 0 and 1, not {value!r}")
    if name == "replicated_rounds" and value < 0:  # type: ignore[operator]
        raise InvalidArgument(f"option {name!r} is a number of modules, or 0, not {value!r}")
    if name == "recompile_limit" and value < 1:  # type: ignore[operator]
        raise InvalidArgument(f"option {name!r} is at least 1, not {value!r}; `disable=True` compiles nothing")
    return value


def preserved_operators(given: object) -> tuple[OpOverload, ...]:
    """The overloads that the option `preserve` names.

    Raises:
        InvalidArgument: one is no operator, or never reaches lowering: it writes to an argument, or is a program of
            other operators.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(f"option 'preserve' takes a list of operators, not {given!r}")
    return tuple(dict.fromkeys(overload for item in given for overload in _overloads(item)))


def _overloads(item: object) -> Sequence[OpOverload]:
    found = _named(item) if isinstance(item, str) else item
    if isinstance(found, CustomOpDef):
        found = found._opoverload
    if isinstance(found, OpOverloadPacket):
        every = [getattr(found, name) for name in found.overloads()]
        return [overload for overload in every if _why_not_kept(overload) is None]
    if not isinstance(found, OpOverload):
        raise InvalidArgument(
            f"option 'preserve' takes operators (torch.ops.aten.gelu.default, 'aten::gelu'), not {item!r}"
        )
    reason = _why_not_kept(found)
    if reason is not None:
        raise InvalidArgument(f"option 'preserve': {found} {reason}")
    return [found]


def _named(name: str) -> object:
    """The operator of a name: "ns::name", "ns::name.overload", "ns.name" or "ns.name.overload"."""
    found: object = torch.ops
    for part in name.replace("::", ".").split("."):
        found = getattr(found, part, None)
    return found


def _why_not_kept(overload: OpOverload) -> str | None:
    if overload._schema.is_mutable:
        return "writes to an argument: graphs hold its functional form"
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        return "is a program of other operators to PyTorch itself: name those"
    return None


def describe() -> list[tuple[str, str, str]]:
    """(name, default, meaning) of each option, for the reference page."""
    return [(f.name, repr(f.default), f.metadata["doc"]) for f in dataclasses.fields(CompileOptions)]
