"""Small random programs over a world of state, and changes to that world between their calls.

A program is a list of statements, each of which reads or writes a part of one world: an object with attributes, its
classes, globals, a closure, containers, modules, tensors and their aliases, and torch's ambient state. A history is a
list of changes to that world, one before each call. `disagreement` runs a program eagerly and compiled through one
history and tells where the two part.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import random
import textwrap
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import soundness_operators as operators
import torch
from ambient_state import default_dtype, deterministic, left_behind, precision, threads
from soundness_statements import CHANGES, STATEMENTS

import torchdynamo


class Marked(torch.Tensor):
    """A subclass without behaviour of its own."""


@dataclass(frozen=True)
class Config:
    depth: int = 2
    name: str = "n"


class Slotted:
    __slots__ = ("v",)


def _modules() -> tuple[type, type, type]:
    """Classes of their own for each world, for changes to them."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.step = 2.0, 0
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, r: torch.Tensor) -> torch.Tensor:
            return r * self.weight * self.scale + (1 if self.training else 0)

    class Slower(Layer):
        def forward(self, r: torch.Tensor) -> torch.Tensor:
            return r + self.weight / 2

    class Outer(torch.nn.Module):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inside = Layer()
            self.register_buffer("shift", torch.ones(3))

        def forward(self, r: torch.Tensor) -> torch.Tensor:
            return self.inside(r) + self.shift

    return Layer, Slower, Outer


def _classes() -> dict[str, Any]:
    class Base:
        gain = 2
        count = 0

        def scale(self, r: torch.Tensor) -> torch.Tensor:
            return r * self.gain  # type: ignore[no-any-return]

        def greet(self, n: int) -> int:
            return n + 1

        @property
        def twice(self) -> Any:
            return self.number * 2  # type: ignore[attr-defined]

        @property
        def level(self) -> Any:
            return self._level

        @level.setter
        def level(self, value: Any) -> None:
            self._level = value * 2

    class Mixin:
        def greet(self, n: int) -> int:
            return n + 30

    class Derived(Base, Mixin):
        pass

    class Other(Base):
        gain = 17

    class Fallback:
        def __init__(self) -> None:
            self.table = {"anything": 14}

        def __getattr__(self, name: str) -> Any:
            return self.__dict__["table"][name]

    class Mode(enum.Enum):
        A = 1
        B = 2

    return {c.__name__: c for c in (Base, Mixin, Derived, Other, Fallback, Mode)}


def _times(n: int, m: int) -> int:
    return n * m


def _fill(s: Any, classes: dict[str, Any], layer: type, outer: type) -> None:
    """The attributes of the object that programs read."""
    s.number, s.ratio, s.flag, s.missing, s._level = 1, 1.25, True, None, 4
    s.items, s.shared, s.pair, s.names = [1, 2], [3], (1, 2), {"x"}
    s.table, s.inner = {"a": 1, "bb": 2}, types.SimpleNamespace(depth=1)
    s.queue = collections.deque([1], maxlen=3)
    s.order = collections.OrderedDict(p=1, qq=2)
    s.default = collections.defaultdict(int)
    s.config, s.mode, s.slotted, s.fallback = Config(), classes["Mode"].A, Slotted(), classes["Fallback"]()
    s.slotted.v, s.ref = 5, weakref.ref(s.config)
    s.bound, s.part = s.greet, functools.partial(_times, 3)
    s.iterator, s.generator = iter([1, 2, 3]), (n for n in [1, 2])
    s.weight, s.other, s.layer = torch.ones(3), torch.full((3,), 2.0), layer()
    s.net = torch.nn.Sequential(layer(), outer())
    s.base = torch.arange(3.0)
    s.view, s.big, s.array = s.base[1:], torch.arange(9.0).reshape(3, 3), s.base.numpy()
    s.spare, s.twin, s.by, s.some = Slotted(), Config(), {s.slotted: 5}, {s.slotted}
    s.spare.v = 6


def make_world(statements: Sequence[str]) -> dict[str, Any]:
    """A fresh world and the program `f` in it."""
    classes = _classes()
    classes["Swapped"] = type("Swapped", (operators.Swapped,), {})  # changes write to them
    classes["Special"] = type("Special", (operators.Special,), {})
    layer, slower, outer = _modules()
    s: Any = classes["Derived"]()
    _fill(s, classes, layer, outer)
    s.special = torch.ones(3).as_subclass(classes["Special"])
    names: dict[str, Any] = {
        "torch": torch, "copy": copy, "collections": collections, "itertools": itertools, "torchdynamo": torchdynamo,
        "contextlib": contextlib, "GLOBAL": 1, "TABLE": {"g": 3}, **operators.NAMES, **classes,
    }  # fmt: skip
    first = "global GLOBAL\n" * any("global GLOBAL" in statement for statement in statements)
    body = first + "r = x + 0\n" + "\n".join(s.removeprefix("global GLOBAL\n") for s in statements)
    source = (
        "def helper(r, n, m=2, *, extra=1): return r + n * m * extra\n"
        "def remember(v, seen=[]):\n    seen.append(v)\n    return len(seen)\n"
        "def make(cell, k):\n"
        "    def bump():\n        nonlocal cell\n        cell += 1\n        return cell\n"
        "    def f(x, y, s):\n" + textwrap.indent(body, " " * 8) + "\n        cell, k, bump\n        return r\n"
        "    return f\n"
    )
    exec(source, names)
    f = names["make"](1, k := [1])
    return {
        "s": s, "g": names, "k": k, "f": f, "Layer": layer, "Slower": slower, "Marked": Marked, **classes,
        "torch": torch, "types": types, "weakref": weakref, "collections": collections, "dataclasses": dataclasses,
        "functools": functools, "copy": copy,
        "a": [torch.arange(3.0), torch.ones(3)], "ambient": set(), "protocol": set(),
    }  # fmt: skip


_AMBIENT: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": default_dtype,
    "deterministic": deterministic,
    "precision": precision,
    "threads": threads,
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
    "sdpa": operators.attention,
    "anomaly": operators.anomaly,
    "hooks": operators.hooks,
    "swapped": operators.Swapped,
}


def _text(value: Any) -> Any:
    """What can be compared of a value, without addresses."""
    if isinstance(value, torch.Tensor):
        kind = (type(value).__name__, str(value.dtype), str(value.device), tuple(value.shape), value.requires_grad)
        return (*kind, None if value.is_meta else repr(value.detach().tolist()))
    if isinstance(value, dict):
        return [(key, _text(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, *map(_text, value)]
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, types.SimpleNamespace):
        return _text(vars(value))
    return (type(value).__name__, repr(value)) if isinstance(value, (int, float, str, type(None))) else None


_OBSERVED = ("number", "items", "shared", "table", "inner", "queue", "order", "default", "names", "weight", "other",
             "base", "view", "big", "last", "_level", "extra", "special")  # fmt: skip


def outcome(world: dict[str, Any], run: Any) -> Any:
    """What a call gives: the result or the kind of error, gradients, and the state that it leaves."""
    s, a = world["s"], world["a"]
    at = lambda name: s.__dict__.get(name)  # whatever its class says; a change may have taken it away
    operators.NOTES[0] = 0
    torch.manual_seed(0)
    with left_behind() as state_after, contextlib.ExitStack() as stack:
        for name in sorted(world["ambient"]):
            stack.enter_context(_AMBIENT[name]())
        try:
            result = run(*a, s)
            shown = [_text(result), result is a[0], result is at("weight")]
            if isinstance(result, torch.Tensor) and result.requires_grad and not result.is_meta:
                _differentiate(result, world)
        except Exception as error:
            if isinstance(error, torchdynamo.TorchDynamoError):
                raise
            shown = [type(error).__name__]
        shown += [state_after(), operators.NOTES[0]]
    tensors = [a[0], a[1], at("weight"), getattr(at("layer"), "weight", None)]
    gradients = [_text(t.grad) if isinstance(t, torch.Tensor) and t.is_leaf else None for t in tensors]
    state = [(name, _text(s.__dict__.get(name))) for name in _OBSERVED]
    layer = [getattr(at("layer"), name, None) for name in ("step", "training")]
    rest = [world["k"], world["g"]["TABLE"], world["g"]["GLOBAL"], *layer, getattr(type(s), "count", None), a]
    seen = [world["g"]["remember"].__defaults__, getattr(at("weight"), "tag", None)]
    return shown, gradients, state, _text(rest), _text(seen)


def _differentiate(result: torch.Tensor, world: dict[str, Any]) -> None:
    """A backward as training loops run it: gradients are added to those of earlier calls, unless they are zeroed."""
    protocol, layer = world["protocol"], world["s"].__dict__.get("layer")
    leaves = [t for t in layer.parameters() if t.grad is not None] if isinstance(layer, torch.nn.Module) else []
    if "zero" in protocol:
        for t in leaves:
            t.grad = None
    loss = result.sum()
    if "twice" in protocol:
        loss.backward(retain_graph=True)
    loss.backward()
    if "clip" in protocol:
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)


def _apply(change: str, world: dict[str, Any]) -> str:
    """Runs a change; one that does not fit what earlier ones left has no effect beyond its first half."""
    try:
        exec(change, world)
    except Exception as error:
        return type(error).__name__
    return ""


def out_of_place(graph: Any) -> Any:
    """A back end that runs graphs as functional ones do: on copies of the inputs, which are written back at the end.

    Two inputs that share memory come apart here: a version must not be used for such a call if it writes to one.
    """

    def run(*inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if torch.is_inference_mode_enabled() or any(map(_is_bound_to_its_place, tensors)):
            return graph(*inputs)
        copies = {id(t): _copied(t) for t in tensors}
        versions = {key: made._version for key, made in copies.items()}
        storages = {key: made.untyped_storage() for key, made in copies.items()}
        owners = {storages[id(t)]._cdata: t for t in tensors}
        results = graph(*[copies.get(id(x), x) for x in inputs])
        homes = {copies[id(t)].untyped_storage().data_ptr(): t for t in tensors if t.numel()}
        for t in tensors:
            made = copies[id(t)]
            owner = owners.get(made.untyped_storage()._cdata, t)
            if owner is not t:  # `set_` put it into the memory of another input
                t.set_(owner.untyped_storage(), made.storage_offset(), made.shape, made.stride())
            elif made._version != versions[id(t)] or not torch.equal(_memory(made), _memory(t)):
                if (made.shape, made.stride()) != (t.shape, t.stride()):
                    t.as_strided_(made.shape, made.stride(), made.storage_offset())
                t.copy_(made)
        return [_at_home(result, copies, tensors, homes) for result in results]

    return run


def _is_bound_to_its_place(tensor: torch.Tensor) -> bool:
    """Whether a copy would mean something else: to autograd, or because elements share their memory."""
    repeated = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.requires_grad or tensor.is_inference() or tensor.device.type != "cpu" or repeated


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same layout in memory of its own."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        storage = tensor.untyped_storage().clone()
        return made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes behind a tensor: in the kernel of an operator no version counts what is written."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _at_home(result: Any, copies: dict[int, Any], tensors: list[Any], homes: dict[int, Any]) -> Any:
    """A result that is an input's copy, or a view of it, as the input or a view of that."""
    if not isinstance(result, torch.Tensor) or result.requires_grad or result.is_meta or not result.numel():
        return result
    for tensor in tensors:
        if result is copies[id(tensor)]:
            return tensor
    home = homes.get(result.untyped_storage().data_ptr())
    if home is None:
        return result
    place = (result.size(), result.stride(), result.storage_offset())
    return home.detach() if place == (home.size(), home.stride(), home.storage_offset()) else home.as_strided(*place)


def disagreement(statements: Sequence[str], changes: Sequence[str], limit: int = 8) -> str | None:
    """Where the compiled program parts from the eager one, or None."""
    eager, traced = make_world(statements), make_world(statements)
    options = torchdynamo.CaptureOptions(strict=True, recompile_limit=limit)
    compiled = torchdynamo.optimize(lambda gm, inputs: out_of_place(gm.forward), options=options)(traced["f"])
    for step, change in enumerate(("pass", *changes, "pass")):
        if _apply(change, eager) != _apply(change, traced):
            return f"step {step}, the change {change!r} itself"
        want = outcome(eager, eager["f"])
        try:
            got = outcome(traced, compiled)
        except torchdynamo.TorchDynamoError as error:
            return f"step {step}, after {change!r}: {type(error).__name__}: {error}"
        if got != want:
            mine, theirs = next((a, b) for a, b in zip(_parts(got), _parts(want), strict=True) if a != b)
            return f"step {step}, after {change!r}: compiled {mine}, eager {theirs}"
    return None


def _parts(outcome: Any) -> list[Any]:
    """An outcome as a flat list, so that a report shows the first difference alone."""
    shown, gradients, state, rest, seen = outcome
    return [shown, *gradients, *state, rest, seen]


def random_program(seed: int) -> tuple[list[str], list[str]]:
    """Statements and changes drawn from a seed."""
    rng = random.Random(seed)
    return rng.choices(STATEMENTS, k=rng.randint(1, 5)), rng.choices(CHANGES, k=rng.randint(1, 4))
