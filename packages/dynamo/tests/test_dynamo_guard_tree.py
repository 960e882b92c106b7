"""Guards of tensors, module trees and ambient state in C++, against the readable checks of `torchdynamo.guards`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from torchdynamo import _C
from torchdynamo.guards.failure import explain_failure
from torchdynamo.guards.global_state import global_state
from torchdynamo.schemas import Guard, GuardKind, ShapeProgram, TensorGuard, WrittenMemory
from torchdynamo.sources import (
    Argument,
    Attribute,
    InstanceAttribute,
    Item,
    Scope,
    Source,
    TensorOffset,
    TensorSize,
    TensorStride,
)

X, Y = Argument(0, "x"), Argument(1, "y")


def of(tensor: torch.Tensor, **changes: Any) -> TensorGuard:
    record = TensorGuard(
        type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tuple(tensor.shape), tuple(tensor.stride())
    )
    return dataclasses.replace(record, is_parameter=isinstance(tensor, nn.Parameter), **changes)


def holds(guard: Guard, *flat: Any) -> bool:
    """The verdict of C++, checked against that of Python."""
    native = _C.GuardTree([guard], []).check(flat) is not None
    scope = Scope(flat, {}, (), (), {})
    assert (explain_failure(guard, scope) is None) is native, (guard, flat)
    return native


TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.randn(2, 3),
    lambda: torch.randn(3, 2),
    lambda: torch.randn(3, 2).t(),
    lambda: torch.randn(4, 3)[::2],
    lambda: torch.randn(2, 3, requires_grad=True),
    lambda: torch.randn(2, 3, dtype=torch.float64),
    lambda: torch.randn(2, 3, device="meta"),
    lambda: torch.randn(()),
    lambda: torch.randn(0, 3),
    lambda: torch.randn(2),
    lambda: nn.Parameter(torch.randn(2, 3)),
    lambda: torch.randn(2, 3).to(torch.bfloat16),
]


@pytest.mark.parametrize("made", range(len(TENSORS)))
def test_tensor_metadata_tells_tensors_apart(made: int) -> None:
    guard = Guard(X, GuardKind.TENSOR, of(TENSORS[made]()))
    verdicts = [holds(guard, other()) for other in TENSORS]
    assert verdicts == [index == made for index in range(len(TENSORS))]
    assert not holds(guard, 3)


def test_dynamic_entries_leaf_and_gradient() -> None:
    guard = Guard(X, GuardKind.TENSOR, of(torch.randn(2, 3), sizes=(None, 3)))
    assert holds(guard, torch.randn(9, 3)) and not holds(guard, torch.randn(9, 4))
    leaf = torch.randn(2, requires_grad=True)
    record = Guard(X, GuardKind.TENSOR, of(leaf, is_leaf=True, has_grad=False))
    assert holds(record, leaf) and not holds(record, leaf * 2)
    leaf.sum().backward()
    assert not holds(record, leaf)
    keys = torch._C._dispatch_keys(leaf).raw_repr()
    record = Guard(
        X, GuardKind.TENSOR, of(leaf.detach(), dispatch_keys=torch._C._dispatch_keys(leaf.detach()).raw_repr())
    )
    assert keys and holds(record, torch.randn(2))
    assert _C.GuardTree([record], []).check((torch.randn(2).to_sparse(),)) is None


def test_ambient_state() -> None:
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), nullcontext):
        with context():
            guard = Guard(None, GuardKind.GLOBAL_STATE, global_state())
            assert holds(guard)
        assert holds(guard) is (context is nullcontext)
    with torch.autocast("cpu", torch.bfloat16):
        guard = Guard(None, GuardKind.GLOBAL_STATE, global_state())
    with torch.autocast("cpu", torch.float16):
        assert not holds(guard)
    guard = Guard(None, GuardKind.GLOBAL_STATE, global_state())
    torch.set_default_dtype(torch.float64)
    try:
        assert not holds(guard)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert not holds(guard)
    finally:
        torch.use_deterministic_algorithms(False)
    assert holds(guard)


@pytest.mark.parametrize("a", [-7, 0, 3, 8])
@pytest.mark.parametrize("b", [-3, 2, 8])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "floordiv", "mod", "min", "max"])
def test_shape_programs_divide_as_python_does(op: str, a: int, b: int) -> None:
    python: dict[str, Callable[[int, int], int]] = {
        "add": int.__add__, "sub": int.__sub__, "mul": int.__mul__, "floordiv": int.__floordiv__,
        "mod": int.__mod__, "min": min, "max": max,
    }  # fmt: skip
    want = python[op](a, b)
    for shift in (0, 1):
        steps = (("sym", "a"), ("sym", "b"), (op, 0), ("const", want + shift), ("eq", 0))
        assert holds(Guard(None, GuardKind.SHAPE, ShapeProgram(steps, {"a": X, "b": Y}, op)), a, b) is (shift == 0)


def test_shape_programs_read_tensors() -> None:
    symbols: dict[str, Source] = {
        "s": TensorSize(X, 0),
        "t": TensorStride(X, 1),
        "o": TensorOffset(X),
        "n": TensorSize(Y, 1),
    }
    steps = (("sym", "s"), ("sym", "n"), ("le", 0), ("sym", "t"), ("const", 1), ("eq", 0), ("and", 0),
             ("sym", "o"), ("const", 5), ("eq", 0), ("not", 0), ("and", 0))  # fmt: skip
    guard = Guard(None, GuardKind.SHAPE, ShapeProgram(steps, symbols, "s <= n and t == 1 and not o == 5"))
    base = torch.randn(6, 5)
    assert holds(guard, base, torch.randn(1, 6))
    assert not holds(guard, base, torch.randn(1, 5))
    assert not holds(guard, base.t(), torch.randn(1, 6))
    assert not holds(guard, base[1:], torch.randn(1, 6))
    assert _C.GuardTree([guard], []).explain((base, torch.randn(6))) == 0
    tree = _C.GuardTree([], [TensorSize(X, 0), X, TensorStride(X, 0)])
    assert tree.check((base,)) == [6, base, 5]
    overflow = ShapeProgram((("sym", "a"), ("sym", "a"), ("mul", 0), ("const", 0), ("ge", 0)), {"a": X}, "a*a >= 0")
    assert _C.GuardTree([Guard(None, GuardKind.SHAPE, overflow)], []).check((1 << 40,)) is None
    assert _C.GuardTree([Guard(None, GuardKind.SHAPE, overflow)], []).check((1 << 70,)) is None


def test_memory_overlap() -> None:
    base = torch.randn(6, 4)
    for memory in (WrittenMemory((X,), (Y,)), WrittenMemory((X, Y), ()), WrittenMemory((Y,), (X,))):
        guard = Guard(None, GuardKind.DISTINCT_STORAGE, memory)
        assert holds(guard, base[:3], base[3:]) and holds(guard, base[3:], base[:3])
        assert holds(guard, base, base.clone())
        assert not holds(guard, base, base)
        assert not holds(guard, base[:4], base[3:])
        assert not holds(guard, base[::2], base[1::2])  # an upper bound: the address ranges cross
        assert holds(guard, base[:0], base)
    z = Argument(2, "z")
    guard = Guard(None, GuardKind.DISTINCT_STORAGE, WrittenMemory((X,), (Y, z)))
    assert holds(guard, base[:1], base[1:], base[2:])  # those that are read may overlap each other
    assert not holds(guard, base[5:], base, base[:1]) and not holds(guard, base[2:3], base[:2], base)
    tree = _C.GuardTree([guard], [])
    x, y, w = torch.randn(4), torch.randn(4), torch.randn(4)
    assert tree.check((x, y, w)) is not None and tree.check((x, y, w)) is not None
    x.data = w[1:]  # the same objects, at other addresses
    assert tree.check((x, y, w)) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(4, 4), nn.LayerNorm(4), 2.0
        self.plan = [1, 2]


def module_guards(module: nn.Module, source: Source, guards: list[Guard], inputs: list[Source]) -> None:
    guards.append(Guard(source, GuardKind.TYPE, type(module)))
    guards.append(Guard(InstanceAttribute(source, "training"), GuardKind.EQUALS, True))
    guards.append(Guard(source, GuardKind.INSTANCE_LACKS, "forward"))
    for name in ("_parameters", "_modules", "_buffers", "_forward_hooks"):
        guards.append(Guard(InstanceAttribute(source, name), GuardKind.DICT_KEYS, tuple(module.__dict__[name])))
    if isinstance(module, Block):
        guards.append(Guard(InstanceAttribute(source, "scale"), GuardKind.EQUALS, 2.0))
        guards.append(Guard(Item(InstanceAttribute(source, "plan"), 1), GuardKind.EQUALS, 2))
    for name, parameter in module._parameters.items():
        place = Item(InstanceAttribute(source, "_parameters"), name)
        guards.append(Guard(place, GuardKind.TENSOR, of(parameter)))
        inputs.append(place)
    for name, child in module._modules.items():
        assert child is not None
        module_guards(child, Item(InstanceAttribute(source, "_modules"), name), guards, inputs)


def replace_dict(module: Any) -> None:
    module[3].__dict__ = {**module[3].__dict__, "scale": 3.0}


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: m[2].norm.eval(),
    lambda m: setattr(m[1], "scale", 3.0),
    lambda m: m[1].plan.__setitem__(1, 5),
    lambda m: setattr(m[0].linear, "weight", nn.Parameter(torch.randn(4, 5))),
    lambda m: m[0].linear.weight.requires_grad_(False),
    lambda m: setattr(m[0].linear.weight, "data", torch.randn(5, 4)),
    lambda m: m[0].norm.register_forward_hook(print),
    lambda m: setattr(m[3], "forward", print),
    lambda m: m.append(Block()),
    lambda m: m.__delitem__(3),
    lambda m: m[2].register_buffer("late", torch.ones(1)),
    lambda m: setattr(m[2], "__class__", type("Other", (Block,), {})),
    lambda m: setattr(m[2], "linear", None),
    replace_dict,
]


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_module_tree(change: int) -> None:
    model = nn.Sequential(*[Block() for _ in range(4)])
    guards: list[Guard] = []
    inputs: list[Source] = []
    module_guards(model, X, guards, inputs)
    tree = _C.GuardTree(guards, inputs)
    parameters = list(model.parameters())
    for _ in range(3):
        collected = tree.check((model,))
        assert collected is not None and all(a is b for a, b in zip(collected, parameters, strict=True))
    new = nn.Parameter(torch.randn(4))
    model[1].norm.bias = new  # another object with the same metadata: still right, and collected
    parameters = list(model.parameters())
    for _ in range(3):
        collected = tree.check((model,))
        assert collected is not None and all(a is b for a, b in zip(collected, parameters, strict=True))
    CHANGES[change](model)
    assert tree.check((model,)) is None
    assert tree.check((model,)) is None
    other = nn.Sequential(*[Block() for _ in range(4)])
    assert tree.check((other,)) is not None
    del model, collected, parameters
    assert tree.check((nn.Sequential(*[Block() for _ in range(4)]),)) is not None


def test_attributes_by_protocol() -> None:
    class Lazy:
        @property
        def weight(self) -> torch.Tensor:
            return torch.ones(2)

    tree = _C.GuardTree([Guard(Attribute(X, "weight"), GuardKind.TENSOR, of(torch.ones(2)))], [Attribute(X, "weight")])
    inputs = tree.check((Lazy(),))
    assert inputs is not None and inputs[0].tolist() == [1.0, 1.0]
    assert tree.explain((object(),)) == 0
