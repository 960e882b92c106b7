"""Records that cross a boundary: between capture, the guard tree in C++, and the back end."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from primtorch.frozen import record
from primtorch.schemas import UserFrame
from torchdynamo.sources import Source

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Sequence[object]]]
Dump = Callable[[str, str], None]
RoundByRound = Callable[[Sequence[torch.nn.Module]], int | None]
Rehearsal = Callable[[Callable[[], object]], "str | None"]


class GuardKind(enum.Enum):
    """What a guard checks of the object at its source. The comment gives the payload."""

    __hash__ = object.__hash__  # each is one object; that of Enum is a function in Python

    TYPE = "type"  # the exact type
    IDENTITY = "identity"  # the object itself (held weakly where it can be)
    EQUALS = "equals"  # a constant: same exact type and equal (nan equals nan; 0.0 is not -0.0)
    LENGTH = "length"  # int: len() of an exact or subclassed list, tuple, dict, set, deque
    DICT_KEYS = "dict_keys"  # tuple of the keys in order
    SET_ITEMS = "set_items"  # frozenset of constants
    INSTANCE_HAS = "instance_has"  # name: it is in the instance's __dict__
    INSTANCE_LACKS = "instance_lacks"  # name: it is not in the instance's __dict__ (or there is no __dict__)
    KEY_ABSENT = "key_absent"  # constant key: not in the dict
    BOOL = "bool"  # truth value of a container, None or number
    TENSOR = "tensor"  # TensorGuard
    SAME_OBJECT = "same_object"  # Source: the object is that one
    DISTINCT_OBJECT = "distinct_object"  # Source: the object is not that one
    ALL_DISTINCT = "all_distinct"  # tuple of Sources: these objects and the source's own are all different ones
    DISTINCT_STORAGE = "distinct_storage"  # WrittenMemory; the guard's own source is None
    SHAPE = "shape"  # ShapeProgram: relation between sizes of inputs; the guard's own source is None
    GLOBAL_STATE = "global_state"  # GlobalState; the guard's own source is None
    AMBIENT = "ambient"  # AmbientRead; the guard's own source is None
    PREDICATE = "predicate"  # a Python callable object -> bool; the slow last resort


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """Metadata of a tensor; None in `sizes` or `strides` marks a dynamic entry (a SHAPE guard speaks of it)."""

    type: type
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    is_leaf: bool | None = None
    has_grad: bool | None = None
    dispatch_keys: int | None = None  # raw repr of the key set, None: not compared
    is_parameter: bool = False
    no_hooks: bool = False  # nothing of the program's runs where a gradient comes to the tensor


@record
class ShapeProgram:
    """A boolean expression over integers, as a postfix program (see `primtorch.symbolic.BoolExpr.program`)."""

    program: tuple[tuple[str, Any], ...]  # ("sym", name) reads symbols[name]
    symbols: Mapping[str, Source]  # where each symbol is read: TensorSize, TensorStride, or the source of an int
    text: str


@record
class WrittenMemory:
    """Tensors whose memory the graph writes to, and those that it only reads: no written one overlaps another."""

    written: tuple[Source, ...]
    others: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class GlobalState:
    """Ambient state that capture read; compared as a whole on each call."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # (device type, enabled, dtype) for each device type known
    autocast_cache: bool
    default_dtype: torch.dtype
    deterministic: bool
    torch_function_modes: int
    switches: tuple[tuple[str, int], ...]  # what decides between kernels, by name


@record
class AmbientRead:
    """State of the process that the program asked for: `function(*args)` gave the constant `value`."""

    function: Callable[..., object]
    args: tuple[object, ...]
    value: object


@record
class Guard:
    """One check. `user_frames` tells where the program read what is checked."""

    source: Source | None
    kind: GuardKind
    payload: Any
    user_frames: tuple[UserFrame, ...] = field(default=(), compare=False)


@record
class GraphBreak:
    """Why capture stopped, and where."""

    reason: str  # id in `torchdynamo.reasons.REASONS`
    detail: str
    user_frames: tuple[UserFrame, ...]


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options of `optimize`. Built once at the API and passed down.

    Attributes:
        fullgraph: raise where the graph would break, or anything would run eagerly or otherwise than planned.
        dynamic: True: sizes are symbolic from the start; None: after the first change; False: never.
        recompile_limit: compiled versions of one function, beyond which calls that none fits run as they are written.
        on_recompile: "continue", "warn", "error" or "eager": what a call does that no version fits, before the limit.
        strict: an internal error in capture raises instead of running the frame eagerly.
        round_by_round: asked of modules that a loop goes over; where it says a number, so many rounds stay with what is
            in front of the loop, the graph ends at the head of the next, and a round is a graph of its own, which
            rounds over modules that are built alike share. None: the loop stays in one graph.
        rehearse: is handed each capture before this process makes it, to be made where it may do harm; says how that
            ended the other process. The function then runs as it is written, and that is told.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    recompile_limit: int = 8
    on_recompile: str = "continue"
    strict: bool = False
    round_by_round: RoundByRound | None = None
    rehearse: Rehearsal | None = None
