"""Everything that capture reads is guarded: one table row for each kind of state that changes between two calls.

Each row is a program, its arguments, and a change. After the change compiled code gives what eager gives, and what it
gave before is no longer right; where the change matters to the program, a second version was made or the call left the
graph.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ambient_state import default_dtype, deterministic, precision, threads
from torch import nn

import torchdynamo

LEVEL = 1


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Scale:
    factor = 2

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @property
    def twice(self) -> int:
        return self.factor * 2

    @staticmethod
    def fixed() -> int:
        return 5

    @classmethod
    def made(cls) -> int:
        return cls.factor + 1


class Mixed:
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x - 100


class Child(Scale):
    pass


class Marked(torch.Tensor):
    pass


@dataclass
class Row:
    """`program(x, s)` before and after `change(args)`, where args is [x, s]."""

    name: str
    program: Callable[..., Any]
    change: Callable[[list[Any]], Any]
    make: Callable[[], Any] = field(default=lambda: types.SimpleNamespace(v=1))
    x: Callable[[], torch.Tensor] = field(default=lambda: torch.arange(4.0))
    ambient: Callable[[], Any] | None = None  # a context in which the second call runs
    undo: Callable[[], Any] = field(default=lambda: None)


def space(**values: Any) -> Callable[[], Any]:
    return lambda: types.SimpleNamespace(**{key: v() if callable(v) else v for key, v in values.items()})


def put(index: int, value: Callable[[], Any]) -> Callable[[list[Any]], None]:
    return lambda args: args.__setitem__(index, value())


def attribute(name: str, value: Any) -> Callable[[list[Any]], None]:
    return lambda args: setattr(args[1], name, value)


def reads_global(x: torch.Tensor, s: Any) -> Any:
    return x + LEVEL


def closure() -> tuple[Callable[..., Any], Callable[[int], None]]:
    depth = 3

    def program(x: torch.Tensor, s: Any) -> torch.Tensor:
        return x * depth

    def change(value: int) -> None:
        nonlocal depth
        depth = value

    return program, change


def helper(x: torch.Tensor, by: int = 2, *, plus: int = 1) -> torch.Tensor:
    return x * by + plus


def other_body(x: torch.Tensor, by: int = 2, *, plus: int = 1) -> torch.Tensor:
    return x - by


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.scale = 2.0
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.scale + self.shift
        return y + 1 if self.training else y


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(4.0)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("other", torch.ones(4))


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def asks_precision(x: torch.Tensor, s: Any) -> Any:
    return x + len(torch.get_float32_matmul_precision())


def asks_autocast_cache(x: torch.Tensor, s: Any) -> Any:
    return x + (1 if torch.is_autocast_cache_enabled() else 2)


def product_kind(x: torch.Tensor, s: Any) -> Any:
    return torch.mm(x[None], x[:, None]).dtype, x + 1


def metadata(x: torch.Tensor, s: Any) -> Any:
    return x + x.dim() + x.shape[0] + x.stride(-1) + (1 if x.is_contiguous() else 2), x.dtype, x.requires_grad


def writes(x: torch.Tensor, s: Any) -> Any:
    x.add_(1)
    return x + s.v


def hooked(args: list[Any]) -> None:
    args[1].inner[0].register_forward_hook(lambda module, inputs, out: out + 7)


def pre_hooked(args: list[Any]) -> None:
    args[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))


def calls_net(x: torch.Tensor, s: Any) -> Any:
    return s(x)


def based() -> types.SimpleNamespace:
    base = torch.ones(4)
    return types.SimpleNamespace(base=base, v=base.view(2, 2))


def modules_hooked(args: list[Any]) -> None:
    HANDLES.append(nn.modules.module.register_module_forward_hook(lambda module, inputs, out: out * 2))


def modules_unhooked() -> None:
    while HANDLES:
        HANDLES.pop().remove()


HANDLES: list[Any] = []
_closure_program, _closure_change = closure()

ROWS = [
    # types, identities, constants
    Row("int constant", lambda x, s: x + s.v, attribute("v", 5)),
    Row("int becomes float", lambda x, s: (x + s.v, type(s.v) is int), attribute("v", 1.0)),
    Row("bool is not int", lambda x, s: (x, isinstance(s.v, bool)), attribute("v", True)),
    Row("negative zero", lambda x, s: torch.full((2,), s.v), attribute("v", -0.0), space(v=0.0)),
    Row("string", lambda x, s: x + len(s.v), attribute("v", "longer"), space(v="a")),
    Row("None", lambda x, s: x + (1 if s.v is None else 2), attribute("v", 0), space(v=None)),
    Row("dtype", lambda x, s: x.to(s.v), attribute("v", torch.float64), space(v=torch.float16)),
    Row("enum member", lambda x, s: x + s.v.value, attribute("v", Color.BLUE), space(v=Color.RED)),
    Row("type", lambda x, s: x + isinstance(s.v, dict), attribute("v", {}), space(v=list)),
    Row("class of an instance", lambda x, s: s.apply(x), attribute("__class__", Mixed), Scale),
    Row("identity", lambda x, s: x + (s.a is s.b), lambda a: setattr(a[1], "b", a[1].a), space(a=object, b=object)),
    Row("id", lambda x, s: x + (id(s.a) == id(s.b)), lambda a: setattr(a[1], "b", a[1].a), space(a=Scale, b=Scale)),
    Row("id of a parameter", lambda x, s: x + (id(s.weight) == id(s.other)), lambda a: setattr(a[1], "other", a[1].weight),
        lambda: (lambda net: net.register_parameter("other", torch.nn.Parameter(torch.ones(2, 2))) or net)(torch.nn.Linear(2, 2))),
    Row("weak reference", lambda x, s: x + (s.r() is None), lambda a: setattr(a[1], "o", 0),
        lambda: (lambda o: types.SimpleNamespace(o=o, r=weakref.ref(o)))(Scale())),
    # containers
    Row("list length", lambda x, s: x + len(s.v), lambda a: a[1].v.append(1), space(v=list)),
    Row("list item", lambda x, s: x + s.v[0], lambda a: a[1].v.__setitem__(0, 9), space(v=lambda: [1])),
    Row("truth of a container", lambda x, s: x + (1 if s.v else 2), lambda a: a[1].v.append(1), space(v=list)),
    Row("dict value", lambda x, s: x + s.v["a"], lambda a: a[1].v.update(a=9), space(v=lambda: {"a": 1})),
    Row("dict key absent", lambda x, s: x + s.v.get("b", 1), lambda a: a[1].v.update(b=9), space(v=lambda: {"a": 1})),
    Row("dict order", lambda x, s: x * len(next(iter(s.v))), lambda a: a[1].v.update(a=a[1].v.pop("a")),
        space(v=lambda: {"a": 1, "bb": 2})),
    Row("OrderedDict order", lambda x, s: x * len(next(iter(s.v))), lambda a: a[1].v.move_to_end("a"),
        space(v=lambda: collections.OrderedDict(a=1, bb=2))),
    Row("default factory", lambda x, s: x + s.v["z"], lambda a: setattr(a[1].v, "default_factory", lambda: 7) or a[1].v.clear(),
        space(v=lambda: collections.defaultdict(int))),
    Row("set", lambda x, s: x + ("q" in s.v), lambda a: a[1].v.add("q"), space(v=set)),
    Row("deque", lambda x, s: x + sum(s.v), lambda a: a[1].v.appendleft(4), space(v=lambda: collections.deque([1]))),
    Row("tuple in a list", lambda x, s: x + s.v[0][1], lambda a: a[1].v.__setitem__(0, (1, 9)), space(v=lambda: [(1, 2)])),
    Row("array of C", lambda x, s: x + s.v[0], lambda a: a[1].v.__setitem__(0, 9), space(v=lambda: array.array("i", [1]))),
    Row("number of ctypes", lambda x, s: x + s.v.value, lambda a: setattr(a[1].v, "value", 9), space(v=lambda: ctypes.c_int(1))),
    Row("getter of an item", lambda x, s: x + s.v((1, 9)), attribute("v", operator.itemgetter(1)),
        space(v=lambda: operator.itemgetter(0))),
    Row("proxy of a dict", lambda x, s: x + s.v["a"], lambda a: a[1].d.update(a=9),
        lambda: (lambda d: types.SimpleNamespace(d=d, v=types.MappingProxyType(d)))({"a": 1})),
    # attributes, classes
    Row("attribute absent", lambda x, s: x + getattr(s, "late", 1), attribute("late", 8)),
    Row("attribute deleted", lambda x, s: x + hasattr(s, "v"), lambda a: delattr(a[1], "v")),
    Row("__dict__ replaced", lambda x, s: s.apply(x), lambda a: setattr(a[1], "__dict__", {"factor": 11}), Scale),
    Row("class attribute", lambda x, s: s.apply(x), lambda a: setattr(Scale, "factor", 9), Scale,
        undo=lambda: setattr(Scale, "factor", 2)),
    Row("attribute before the class's", lambda x, s: s.apply(x), attribute("factor", 8), Child),
    Row("attribute of a class before the base's", lambda x, s: s.apply(x), lambda a: setattr(Child, "factor", 9), Child,
        undo=lambda: delattr(Child, "factor")),
    Row("method", lambda x, s: s.apply(x), lambda a: setattr(Child, "apply", lambda self, x: x - 1), Child,
        undo=lambda: delattr(Child, "apply")),
    Row("property", lambda x, s: x + s.twice, lambda a: setattr(Scale, "twice", property(lambda self: 77)), Scale,
        undo=functools.partial(setattr, Scale, "twice", Scale.__dict__["twice"])),
    Row("static method", lambda x, s: x + s.fixed(), lambda a: setattr(Scale, "fixed", staticmethod(lambda: 6)), Scale,
        undo=functools.partial(setattr, Scale, "fixed", Scale.__dict__["fixed"])),
    Row("class method", lambda x, s: x + s.made(), lambda a: setattr(Scale, "made", classmethod(lambda cls: 60)), Scale,
        undo=functools.partial(setattr, Scale, "made", Scale.__dict__["made"])),
    Row("base classes", lambda x, s: s.apply(x), lambda a: setattr(Child, "__bases__", (Mixed, Scale)), Child,
        undo=lambda: setattr(Child, "__bases__", (Scale,))),
    # globals, closures, functions
    Row("global", reads_global, lambda a: globals().update(LEVEL=6), undo=lambda: globals().update(LEVEL=1)),
    Row("closure", _closure_program, lambda a: _closure_change(8)),
    Row("global function", lambda x, s: helper(x), lambda a: globals().update(helper=other_body),
        undo=functools.partial(globals().update, helper=helper)),
    Row("__code__", lambda x, s: helper(x), lambda a: setattr(helper, "__code__", other_body.__code__),
        undo=functools.partial(setattr, helper, "__code__", helper.__code__)),
    Row("__defaults__", lambda x, s: helper(x), lambda a: setattr(helper, "__defaults__", (9,)),
        undo=lambda: setattr(helper, "__defaults__", (2,))),
    Row("__kwdefaults__", lambda x, s: helper(x), lambda a: setattr(helper, "__kwdefaults__", {"plus": 9}),
        undo=lambda: setattr(helper, "__kwdefaults__", {"plus": 1})),
    Row("bound method", lambda x, s: s.v(x), lambda a: setattr(a[1], "v", Mixed().apply), space(v=lambda: Scale().apply)),
    Row("partial function", lambda x, s: s.v(x), attribute("v", functools.partial(helper, by=7)),
        lambda: types.SimpleNamespace(v=functools.partial(helper, by=3))),
    # modules
    Row("training", calls_net, lambda a: a[1].eval(), Net),
    Row("module attribute", calls_net, attribute("scale", 5.0), Net),
    Row("parameter replaced", calls_net,
        lambda a: setattr(a[1].inner[0], "weight", nn.Parameter(torch.eye(4))), Net),
    Row("parameter's data", calls_net, lambda a: a[1].inner[0].weight.data.zero_(), Net),
    Row("parameter frozen", calls_net, lambda a: [p.requires_grad_(False) for p in a[1].parameters()], Net),
    Row("buffer replaced", calls_net, attribute("shift", torch.full((4,), 9.0)), Net),
    Row("submodule replaced", calls_net, lambda a: a[1].inner.__setitem__(1, nn.Tanh()), Net),
    Row("module lacks a name: attribute", lambda x, s: x + hasattr(s.inner, "late"), lambda a: setattr(a[1].inner, "late", 1), Net),
    Row("module lacks a name: parameter", lambda x, s: x + hasattr(s.inner, "late"), lambda a: a[1].inner.register_parameter("late", nn.Parameter(torch.ones(1))), Net),
    Row("module lacks a name: buffer", lambda x, s: x + hasattr(s.inner, "late"), lambda a: a[1].inner.register_buffer("late", torch.ones(1)), Net),
    Row("module lacks a name: submodule", lambda x, s: x + hasattr(s.inner, "late"), lambda a: a[1].inner.add_module("late", nn.Tanh()), Net),
    Row("module lacks a name: of the class", lambda x, s: x + hasattr(s.inner, "late"), lambda a: setattr(nn.Sequential, "late", 1), Net,
        undo=lambda: delattr(nn.Sequential, "late")),
    Row("submodule added", calls_net, lambda a: a[1].inner.append(nn.Tanh()), Net),
    Row("submodule removed", calls_net, lambda a: a[1].inner.__delitem__(1), Net),
    Row("forward hook", calls_net, hooked, Net),
    Row("forward pre-hook", calls_net, pre_hooked, Net),
    Row("hook on all modules", calls_net, modules_hooked, Net, undo=modules_unhooked),
    Row("forward on the instance", calls_net, lambda a: setattr(a[1].inner[1], "forward", lambda x: x * 5), Net),
    Row("tied weights", lambda x, s: x + len(list(s.parameters())),
        lambda a: setattr(a[1][0], "weight", a[1][1].weight), lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
    Row("__call__ of a module's class", calls_net, lambda a: setattr(Net, "__call__", lambda self, x: x * 40), Net,
        undo=lambda: delattr(Net, "__call__")),
    Row("__getattribute__ of a class", lambda x, s: s.apply(x),
        lambda a: setattr(Child, "__getattribute__", lambda self, name: lambda x: x - 30), Child,
        undo=lambda: delattr(Child, "__getattribute__")),
    Row("truth of an object", lambda x, s: x + (1 if s else 2), lambda a: setattr(Child, "__bool__", lambda self: False),
        Child, undo=lambda: delattr(Child, "__bool__")),
    Row("equality of objects", lambda x, s: x + (s.a == s.b), lambda a: setattr(a[1], "b", a[1].a), space(a=Scale, b=Scale)),
    Row("equality of lists of objects", lambda x, s: x + ([s.a] == [s.b]), lambda a: setattr(a[1], "b", a[1].a),
        space(a=Scale, b=Scale)),
    Row("object among others", lambda x, s: x + (s.a in [s.b]), lambda a: setattr(a[1], "b", a[1].a), space(a=Scale, b=Scale)),
    Row("set of objects", lambda x, s: x + len({s.a, s.b}), lambda a: setattr(a[1], "b", a[1].a), space(a=Scale, b=Scale)),
    Row("set of tensors", lambda x, s: x + len({x, s.v}), lambda a: setattr(a[1], "v", a[0]), space(v=lambda: torch.ones(4))),
    Row("object as a key", lambda x, s: x + s.by.get(s.b, 5), lambda a: setattr(a[1], "b", a[1].a),
        lambda: (lambda a: types.SimpleNamespace(a=a, b=Scale(), by={a: 1}))(Scale())),
    Row("built-in hidden by a global", lambda x, s: x + len(s.v), lambda a: globals().update(len=lambda v: 50),
        space(v=list), undo=lambda: globals().pop("len")),
    # tensors
    Row("size", metadata, put(0, lambda: torch.arange(6.0))),
    Row("number of dims", metadata, put(0, lambda: torch.ones(4, 4))),
    Row("strides", metadata, put(0, lambda: torch.ones(4, 2)[:, 0])),
    Row("tensor dtype", metadata, put(0, lambda: torch.arange(4, dtype=torch.float64))),
    Row("requires_grad", metadata, put(0, lambda: torch.arange(4.0, requires_grad=True))),
    Row("requires_grad of a view's base", lambda x, s: (x + s.v.sum(), s.v.requires_grad),
        lambda a: a[1].base.requires_grad_(), based),
    Row("device", lambda x, s: (x + 1).device, put(0, lambda: torch.empty(4, device="meta"))),
    Row("layout", lambda x, s: x.layout, put(0, lambda: torch.eye(2).to_sparse()), x=lambda: torch.eye(2)),
    Row("leaf", lambda x, s: (x.is_leaf, x + 1), put(0, lambda: torch.arange(4.0, requires_grad=True) * 1),
        x=lambda: torch.arange(4.0, requires_grad=True)),
    Row("gradient there", lambda x, s: x + (x.grad is None), lambda a: setattr(a[0], "grad", torch.ones(4)),
        x=lambda: torch.arange(4.0, requires_grad=True)),
    Row("storage offset", lambda x, s: x + x.storage_offset(), put(0, lambda: torch.arange(6.0)[2:])),
    Row("subclass", lambda x, s: (type(x), x + 1), put(0, lambda: torch.arange(4.0).as_subclass(Marked))),
    Row("conjugated", lambda x, s: (x.is_conj(), x * 2), put(0, lambda: torch.ones(4, dtype=torch.complex64).conj()),
        x=lambda: torch.ones(4, dtype=torch.complex64)),
    Row("negated", lambda x, s: (x.is_neg(), x * 2), put(0, lambda: torch.ones(4, dtype=torch.complex64).conj().imag)),
    Row("tensor's own attribute", lambda x, s: x + getattr(x, "tag", 0), lambda a: setattr(a[0], "tag", 5)),
    Row("written alias", writes, lambda a: setattr(a[1], "v", a[0]), space(v=lambda: torch.ones(4))),
    Row("written overlap", writes, lambda a: setattr(a[1], "v", a[0][:1]), space(v=lambda: torch.ones(1))),
    Row("written buffer's memory", lambda x, s: (s.shift.add_(x), s.other + 1),
        lambda a: setattr(a[1].other, "data", a[1].shift.data), Buffers),
    Row("same tensor twice", lambda x, s: x + (x is s.v), lambda a: setattr(a[1], "v", a[0]), space(v=lambda: torch.ones(4))),
    # ambient state
    Row("grad mode", lambda x, s: x + torch.is_grad_enabled(), lambda a: None, ambient=torch.no_grad),
    Row("inference mode", lambda x, s: x + torch.is_inference_mode_enabled(), lambda a: None, ambient=torch.inference_mode),
    Row("inference tensor", lambda x, s: x + x.is_inference(), put(0, inference_tensor)),
    Row("autocast", product_kind, lambda a: None, ambient=lambda: torch.autocast("cpu", torch.bfloat16)),
    Row("autocast's cache", asks_autocast_cache, lambda a: None,
        ambient=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)),
    Row("default dtype", lambda x, s: torch.ones(2), lambda a: None, ambient=default_dtype),
    Row("deterministic algorithms", lambda x, s: x + torch.are_deterministic_algorithms_enabled(), lambda a: None,
        ambient=deterministic),
    Row("default device", lambda x, s: torch.ones(2).device, lambda a: None, ambient=lambda: torch.device("meta")),
    Row("float32 matmul precision", asks_precision, lambda a: None, ambient=precision),
    Row("number of threads", lambda x, s: x + torch.get_num_threads(), lambda a: None, ambient=threads),
    Row("torch function mode", lambda x, s: x + 1, lambda a: None, ambient=Doubling),
]  # fmt: skip


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_neg().resolve_conj()
        data = None if value.is_meta else str(dense.tolist())
        return type(value), value.dtype, value.device, value.layout, value.requires_grad, data
    return [shown(item) for item in value] if isinstance(value, (tuple, list)) else value


# Right without another version: what the graph takes as inputs, what is read for real behind a break, and what the
# program does not show.
SAME = {
    "array of C",
    "proxy of a dict",
    "parameter frozen",
    "torch function mode",
    "parameter's data",
    "parameter replaced",
    "buffer replaced",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_change_between_calls_is_seen(row: Row) -> None:
    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(row.program)
    torch.manual_seed(0)
    mine = [row.x(), row.make()]
    torch.manual_seed(0)
    theirs = [row.x(), row.make()]
    try:
        for _ in range(2):
            first = shown(row.program(*theirs))
            assert shown(compiled(*mine)) == first
        entries = len(compiled.entries)
        row.change(theirs)
        row.change(mine)
        with row.ambient() if row.ambient is not None else contextlib.nullcontext():
            for _ in range(2):
                second = shown(row.program(*theirs))
                assert shown(compiled(*mine)) == second
        assert row.name in SAME or second != first, "the change shows in the result"
        left = torchdynamo.api.owner_of(compiled).eager
        assert row.name in SAME or left or len(compiled.entries) > entries
    finally:
        row.undo()


def test_an_input_of_a_call_in_inference_mode_is_what_it_was_made_as() -> None:
    def program(x: torch.Tensor) -> tuple[bool, bool, bool]:
        return x.is_inference(), torch.is_inference(x), (x + 1).is_inference()

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for x in (torch.ones(2), inference_tensor()):
        assert compiled(x) == program(x)
        with torch.inference_mode():
            assert compiled(x) == program(x)
