"""Runs a program on real tensors and on their fakes, recording each operator's result, and compares the two records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from primtorch.fake import FakeMode
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, hint_of

# Indexing with nothing left to slice gives an alias.
IGNORED = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"}


def described(value: Any) -> Any:
    """A result with each tensor as a tuple of concrete metadata."""

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor | TensorSpec):
            shape = tuple(map(hint_of, x.shape))
            # The stride of a dim of size 1 says nothing.
            strides = tuple(hint_of(t) for s, t in zip(shape, x.stride(), strict=True) if s != 1)
            return (shape, strides, x.dtype, str(x.device), hint_of(x.storage_offset()))
        return hint_of(x) if isinstance(x, torch.SymInt) else None

    return pytree.tree_map(leaf, value)


class Recorder:
    """A dispatch mode that notes every operator and its result's metadata."""

    is_infra_mode = classmethod(lambda cls: False)

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> Recorder:
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = described((args, kwargs))
        out = func(*args, **(kwargs or {}))
        # Indexing in Python skips a slice that changes nothing when its bounds are ints, and cannot when they are symbols.
        slices = func in (torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default)
        idle = slices and described(args[0]) == described(out)
        if str(func) not in IGNORED and not idle:
            self.calls.append((str(func), inputs, described(out)))
        return out


def compare(real: Sequence[tuple[str, Any, Any]], fake: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """What differs, in words; empty when nothing does."""
    problems = []
    for position, (a, b) in enumerate(zip(real, fake, strict=False)):
        if a[0] != b[0]:
            problems.append(f"#{position}: real runs {a[0]}, fake runs {b[0]}")
            break
        if a[2] != b[2]:
            problems.append(f"#{position} {a[0]}{a[1]}:\n    real {a[2]}\n    fake {b[2]}")
    if not problems and len(real) != len(fake):
        problems.append(f"real runs {len(real)} operators, fake {len(fake)}")
    return problems


def replay(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic: Mapping[int, Mapping[int, int]] | None = None,
    autocast: bool = False,
    loss: Callable[[Any], torch.Tensor] = lambda out: out.sum(),
) -> tuple[list[str], int, ShapeEnv]:
    """Forward and backward of the model on real tensors and on fakes.

    Args:
        dynamic: for an input (its position among the flattened tensors): dim -> index of a symbol.

    Returns:
        (differences, number of operators, the environment of symbols).
    """

    def run(parameters: Mapping[str, torch.Tensor], inputs: tuple[Any, Any]) -> Recorder:
        # Random decisions in Python (layer drop) must fall alike on both sides.
        torch.manual_seed(0)
        with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = torch.func.functional_call(model, dict(parameters), inputs[0], inputs[1])
            value = loss(out)
        with recorder:
            value.backward()
        return recorder

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    env = ShapeEnv()
    mode = FakeMode(env)
    symbols: dict[int, torch.SymInt] = {}
    converted: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            converted.append(leaf)
            continue
        dims: dict[int, torch.SymInt] = {}
        for dim, index in (dynamic or {}).get(position, {}).items():
            if index not in symbols:
                symbols[index] = env.symbol(leaf.shape[dim], f"input {position}, dim {dim}")
            dims[dim] = symbols[index]
        converted.append(mode.from_tensor(leaf, dynamic=dims))
    fakes = {name: mode.from_tensor(t) for name, t in state.items()}
    with mode:
        fake = run(fakes, pytree.tree_unflatten(converted, tree))
    before = {name: t.clone() for name, t in model.named_buffers()}
    real = run(state, (args, dict(kwargs)))
    with torch.no_grad():
        for name, t in model.named_buffers():
            t.copy_(before[name])
    model.zero_grad()
    return compare(real.calls, fake.calls), len(real.calls), env
