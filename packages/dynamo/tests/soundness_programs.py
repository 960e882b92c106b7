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
import random
import textwrap
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torchdynamo

# Statements over `s` (an object), `k` (a closure's list), globals and the arguments `x` and `y`; they change `r`.
STATEMENTS = (
    # attributes, constants, properties, descriptors
    "r = r + s.number",
    "r = r * s.ratio",
    "r = r + s.twice",
    "r = r + s.gain",
    "r = s.scale(r)",
    "r = r + getattr(s, 'extra', 0)",
    "r = r + (1 if hasattr(s, 'extra') else 2)",
    "r = r + (3 if s.flag else 5)",
    "r = r + (2 if s.missing is None else 3)",
    "r = r + s.inner.depth",
    "r = r + (5 if isinstance(s.inner, dict) else 6)",
    "r = r + s.config.depth + len(s.config.name)",
    "r = r + s.mode.value",
    "r = r + (1 if s.mode is Mode.A else 2)",
    "r = r + s.slotted.v",
    "r = r + s.fallback.anything",
    "r = r + s.level",
    "s.level = 3",
    "r = r + Base.count",
    "type(s).count += 1",
    "r = r + s.bound(1)",
    "r = r + s.part(2)",
    "r = r + s.greet(1)",
    "r = r + (1 if isinstance(s, Mixin) else 2)",
    "r = r + type(s).__mro__.__len__()",
    "r = r + (1 if s.ref() is s.config else 2)",
    "r = r + s.ref().depth",
    "r = r + len(vars(s.inner))",
    "s.number += 1",
    "s.last = r",
    "r = r + (s.last if hasattr(s, 'last') else 0)",
    "s.inner.late = s.number",
    "del s.inner.depth",
    # containers
    "r = r + len(s.items)",
    "r = r + sum(s.items)",
    "r = r + (s.items[0] if s.items else 9)",
    "for i in s.items: r = r * 1.5 + i",
    "r = r + sum(v for v in s.table.values())",
    "r = r + (s.table['a'] if 'a' in s.table else -1)",
    "r = r + s.table.get('b', 4)",
    "for key in s.table: r = r + len(key)",
    "r = r + len(list(s.table)[0]) * [*s.table.values()][-1]",
    "r = r + (7 if 'x' in s.names else 11)",
    "r = r + len(s.queue)",
    "r = r + s.pair[1]",
    "r = r + hash(s.pair) % 7",
    "for key, v in s.order.items(): r = r * 2 + v + len(key)",
    "r = r + s.default['z']",
    "r = r + (1 if s.items is s.shared else 2)",
    "r = r + copy.deepcopy(s.inner).depth",
    "r = r + copy.copy(s.items)[-1]",
    "r = r + next(s.iterator, 0)",
    "r = r + sum(s.generator)",
    "s.items.append(1)",
    "s.items[0] = 4",
    "s.table['n'] = s.number",
    "s.order.move_to_end('p')",
    "s.queue.append(3)",
    "s.names.add('y')",
    "del s.table['a']",
    "try:\n    r = r + s.table['q']\nexcept KeyError:\n    r = r + 3",
    # globals, closures, functions
    "r = r + GLOBAL",
    "r = r + helper(r, 1)",
    "r = r + TABLE['g']",
    "r = r + k[0]",
    "r = r + len(k)",
    "r = r + cell",
    "r = r + bump()",
    "r = r + remember(1)",
    "r = r + (lambda n=s.number: n)()",
    "k.append(2)",
    "TABLE['g'] += 1",
    "global GLOBAL\nGLOBAL += 1",
    # modules
    "r = s.layer(r)",
    "r = r + (1 if s.layer.training else 2)",
    "r = s.net(r)",
    "for p in s.net.parameters(): r = r + p.sum()",
    "for n, b in s.net.named_buffers(): r = r + b.sum() + len(n)",
    "r = r + len(s.net) + len(list(s.net.modules()))",
    "s.layer.step += 1",
    "r = r + s.layer.step",
    "s.layer.train(not s.layer.training)",
    # tensors, metadata, aliases
    "r = r + s.weight",
    "r = r + s.weight.shape[0]",
    "r = r + (1 if s.weight.requires_grad else 2) + (1 if s.weight.is_leaf else 2)",
    "r = r + (s.weight.grad.sum() if s.weight.grad is not None else 1)",
    "r = r + (4 if s.weight is s.other else 6)",
    "r = r + (1 if id(s.weight) == id(s.other) else 2)",
    "r = r + getattr(s.weight, 'tag', 0)",
    "s.weight.tag = 3",
    "r = r + (1 if x is y else 2)",
    "r = r + y.sum()",
    "r = r + y.dim() + (1 if y.dtype == torch.float64 else 2)",
    "r = r + (1 if y.is_contiguous() else 2) + y.stride()[0]",
    "r = r + (1 if y.is_conj() or y.is_neg() else 2) + y.real.sum()",
    "r = r + s.base[1] + s.view.sum()",
    "r = r + s.view.storage_offset() + s.big.stride(0)",
    "r = r + s.big.t()[0].sum() + (1 if s.big.is_contiguous() else 2)",
    "r = r + float(s.array[0])",
    "r = r + y.sum().item()",
    "r = r + (1 if type(y) is torch.Tensor else 2)",
    "s.view.mul_(2)",
    "s.base.add_(1)",
    "y.add_(1)",
    "x.mul_(2)",
    "y[0] = 5",
    "v = x[1:]; v += 1; r = r + v.sum()",
    "with torch.no_grad(): s.weight.mul_(2)",
    "s.weight.add_(1) if not s.weight.requires_grad else None",
    "s.weight = s.weight + 1",
    # ambient state
    "r = r + (1 if torch.is_grad_enabled() else 2)",
    "r = r + (1 if torch.is_inference_mode_enabled() else 2)",
    "r = r + (1 if torch.zeros(1).dtype == torch.float64 else 2)",
    "r = r + (1 if torch.get_default_dtype() == torch.float64 else 2)",
    "r = r + (1 if torch.is_autocast_enabled('cpu') else 2)",
    "r = r + (1 if torch.mm(s.big, s.big.t()).dtype == torch.bfloat16 else 2)",
    "r = r + (1 if torch.are_deterministic_algorithms_enabled() else 2)",
    "r = r + len(torch.get_float32_matmul_precision())",
    "r = r + torch.get_num_threads()",
    "r = r + (1 if torch.get_default_device().type == 'meta' else 2)",
)
CHANGES = (
    "pass",
    "s.number = 5",
    "s.number = 5.0",
    "s.number = True",
    "s.ratio = 0.5",
    "s.ratio = -0.0",
    "type(s).gain = 8",
    "s.gain = 3",
    "Base.gain = 6",
    "Base.count = 50",
    "type(s).scale = lambda self, r: r - 1",
    "Base.scale.__code__ = (lambda self, r: r + 40).__code__",
    "type(s).twice = property(lambda self: 77)",
    "Base.twice = property(lambda self: 78)",
    "Base.twice.fget.__code__ = (lambda self: 79).__code__",
    "Base.level = property(lambda self: 80, Base.level.fset)",
    "Derived.__bases__ = (Mixin, Base)",
    "Mixin.greet = lambda self, n: n + 90",
    "del s.inner.depth",
    "s.inner.depth = 4",
    "s.inner = types.SimpleNamespace(depth=9)",
    "s.inner = {'depth': 3}",
    "s.inner.__dict__ = {'depth': 12}",
    "s.__dict__ = dict(s.__dict__, number=31)",
    "s.__class__ = Other",
    "s.extra = 13",
    "s.__dict__.pop('extra', None)",
    "s.flag = not s.flag",
    "s.missing = 0",
    "s.config = dataclasses.replace(s.config, depth=21)",
    "s.ref = weakref.ref(s.config)",
    "object.__setattr__(s.config, 'depth', 22)",
    "s.mode = Mode.B",
    "s.slotted.v = 6",
    "s.fallback.table['anything'] = 15",
    "type(s.fallback).__getattr__ = lambda self, name: 16",
    "s.level = 10",
    "s.bound = types.MethodType(lambda self, n: n + self.number * 3, s)",
    "s.part = functools.partial(s.part.func, 7)",
    "s.items.append(4)",
    "s.items.clear()",
    "s.items[:1] = [9, 8]",
    "s.items.reverse()",
    "s.items[0] = 1.0",
    "s.items = s.shared",
    "s.items = tuple(s.items)",
    "s.table['a'] = 6",
    "s.table.pop('a', None)",
    "s.table['b'] = 2",
    "s.table = dict(reversed(s.table.items()))",
    "s.table['a'] = s.table.pop('a', 3)",
    "s.table['q'] = 2",
    "s.order.move_to_end('p')",
    "s.order['p'] += 1",
    "s.default['z'] = 8",
    "s.default.default_factory = lambda: 5",
    "s.names ^= {'x'}",
    "s.queue.appendleft(0)",
    "s.queue = collections.deque(s.queue, maxlen=1)",
    "s.pair = (4, 5, 6)",
    "s.iterator = iter([7, 8])",
    "s.generator = (n for n in [2, 3])",
    "g['GLOBAL'] = 21",
    "g['helper'] = lambda r, n: r * n",
    "g['helper'].__defaults__ = (5,)",
    "g['helper'].__kwdefaults__ = {'extra': 6}",
    "g['helper'].__code__ = (lambda r, n, m=2, *, extra=1: r - n).__code__",
    "g['remember'].__defaults__[0].append(9)",
    "g['TABLE']['g'] = 30",
    "g['TABLE'] = {'g': 31}",
    "g['Base'] = types.SimpleNamespace(count=70)",
    "k[0] = 6",
    "k.append(1)",
    "f.__closure__[f.__code__.co_freevars.index('cell')].cell_contents = 12",
    "f.__code__ = f.__code__.replace(co_name='renamed')",
    "s.weight = s.weight * 2",
    "s.weight = s.other",
    "s.weight = torch.ones(3, requires_grad=True)",
    "s.weight = torch.ones(1)",
    "s.weight = torch.ones(3, dtype=torch.float64)",
    "s.weight.data.mul_(3)",
    "s.weight.data = torch.full((3,), 5.0)",
    "s.weight.grad = torch.ones(s.weight.shape, dtype=s.weight.dtype)",
    "s.weight.requires_grad_(not s.weight.requires_grad)",
    "s.weight.tag = 11",
    "s.view = s.base[:2]",
    "s.view = torch.ones(2)",
    "s.base = s.view",
    "s.big = s.big.t().contiguous().t()",
    "s.big = torch.ones(3, 4)[:, 1:]",
    "s.array[0] = 19",
    "a[1] = a[0]",
    "a[1] = a[0][:2]",
    "a[0] = s.base",
    "a[1] = s.view",
    "a[1] = torch.ones(3, 2).t()[0]",
    "a[1] = torch.ones(3, dtype=torch.float64)",
    "a[1] = torch.ones(3, dtype=torch.complex64).conj()",
    "a[1] = torch.ones(3, dtype=torch.complex64).conj().imag",
    "a[1] = torch.ones(2, 3)",
    "a[1] = torch.ones(3).as_subclass(Marked)",
    "a[0] = torch.ones(2, 3)",
    "a[0] = torch.ones(3, requires_grad=True)",
    "s.layer.eval()",
    "s.layer.train()",
    "s.layer.register_forward_hook(lambda m, i, o: o + 1)",
    "s.layer.register_forward_pre_hook(lambda m, i: (i[0] * 2,))",
    "s.layer._forward_hooks.clear()",
    "s.layer.scale = 4.0",
    "s.layer.step = 8",
    "s.layer.weight = torch.nn.Parameter(torch.full((3,), 2.0))",
    "s.layer.weight.requires_grad_(False)",
    "s.layer.forward = lambda r: r - 3",
    "s.layer.__class__ = Slower",
    "Layer.forward = lambda self, r: r + self.scale",
    "s.net[0].scale = 3.5",
    "s.net[1].inside.weight.data.mul_(2)",
    "s.net[1].shift = torch.full((3,), 6.0)",
    "s.net.append(Layer())",
    "s.net[0] = s.net[1]",
    "del s.net[0]",
    "s.net[0].weight = s.net[1].inside.weight",
    "s.net.register_buffer('late', torch.ones(2))",
    "ambient ^= {'no_grad'}",
    "ambient ^= {'inference'}",
    "ambient ^= {'autocast'}",
    "ambient ^= {'float64'}",
    "ambient ^= {'deterministic'}",
    "ambient ^= {'precision'}",
    "ambient ^= {'threads'}",
    "ambient ^= {'meta'}",
    "ambient ^= {'cpu'}",
)


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


def make_world(statements: Sequence[str]) -> dict[str, Any]:
    """A fresh world and the program `f` in it."""
    classes = _classes()
    layer, slower, outer = _modules()
    s: Any = classes["Derived"]()
    _fill(s, classes, layer, outer)
    names: dict[str, Any] = {
        "torch": torch, "copy": copy, "GLOBAL": 1, "TABLE": {"g": 3}, **classes,
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
        "torch": torch, "types": types, "weakref": weakref, "collections": collections, "dataclasses": dataclasses, "functools": functools,
        "a": [torch.arange(3.0), torch.ones(3)], "ambient": set(),
    }  # fmt: skip


@contextlib.contextmanager
def _default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _precision() -> Any:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_AMBIENT: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": _default_dtype,
    "deterministic": _deterministic,
    "precision": _precision,
    "threads": _threads,
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
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
             "base", "view", "big", "last", "_level", "extra")  # fmt: skip


def outcome(world: dict[str, Any], run: Any) -> Any:
    """What a call gives: the result or the kind of error, gradients, and the state that it leaves."""
    s, a = world["s"], world["a"]
    with contextlib.ExitStack() as stack:
        for name in sorted(world["ambient"]):
            stack.enter_context(_AMBIENT[name]())
        try:
            result = run(*a, s)
            shown = [_text(result), result is a[0], result is s.weight]
            if isinstance(result, torch.Tensor) and result.requires_grad and not result.is_meta:
                result.sum().backward()
        except Exception as error:
            if isinstance(error, torchdynamo.TorchDynamoError):
                raise
            shown = [type(error).__name__]
    tensors = [a[0], a[1], s.weight, s.layer.weight]
    gradients = [_text(t.grad) if isinstance(t, torch.Tensor) and t.is_leaf else None for t in tensors]
    state = [(name, _text(s.__dict__.get(name))) for name in _OBSERVED]
    rest = [world["k"], world["g"]["TABLE"], world["g"]["GLOBAL"], s.layer.step, s.layer.training, type(s).count, a]
    seen = [world["g"]["remember"].__defaults__, getattr(s.weight, "tag", None)]
    return shown, gradients, state, _text(rest), _text(seen)


def _apply(change: str, world: dict[str, Any]) -> str:
    """Runs a change; one that does not fit what earlier ones left has no effect beyond its first half."""
    try:
        exec(change, world)
    except Exception as error:
        return type(error).__name__
    return ""


def disagreement(statements: Sequence[str], changes: Sequence[str], limit: int = 8) -> str | None:
    """Where the compiled program parts from the eager one, or None."""
    eager, traced = make_world(statements), make_world(statements)
    options = torchdynamo.CaptureOptions(strict=True, recompile_limit=limit)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=options)(traced["f"])
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
