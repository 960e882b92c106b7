"""Sharded models, a step of which is interrupted by an exception: eagerly and compiled, by each rank for itself.

After each good step comes a failed one, which all ranks catch, and at the end some good steps more. What FSDP makes of a
failed step is eager's: parameters may stay gathered, and gradients unreduced, until the user says `reset_iter_state`.
Compiled code is to leave it in the same state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torchcompile

BLOCKS, WIDTH, GOOD = 4, 6, 2


class Interrupted(Exception):
    """What a failed step raises."""


class _Raises(torch.autograd.Function):
    """Its derivative raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise Interrupted("derivative")


def _raising(gradient: torch.Tensor) -> torch.Tensor:
    raise Interrupted("hook")


class Block(nn.Module):
    """Two layers and a table, between which a step may fail; `fails` says where."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.table = nn.Parameter(torch.randn(3, 8))
        self.fails = ""

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x)) + self.table[place]
        if self.fails == "statement":
            raise Interrupted("statement")
        if self.fails == "inner_hook":
            y.register_hook(_raising)
        if self.fails == "derivative":
            y = _Raises.apply(y)  # type: ignore[no-untyped-call]
        return x + self.second(y)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        for block, place in zip(self.blocks, places, strict=True):
            x = block(x, place)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and trained."""

    shard: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1  # backwards of a step, of which the last is reduced
    resets: bool = False  # the user tells FSDP that the step was lost


SETTINGS: Mapping[str, Setting] = {
    "plain": Setting(),
    "reset": Setting(resets=True),
    "kept_gathered": Setting({"reshard_after_forward": False}),
    "mixed": Setting({"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)}),
    "bfloat16": Setting({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, resets=True),
    "accumulated": Setting(accumulate=2),
    "accumulated_reset": Setting(accumulate=2, resets=True),
}


def _fails(where: str) -> Callable[[Any, int], Any]:
    """The block fails, and what makes it good again."""

    def begin(model: Any, place: int) -> Any:
        block = model.blocks[place]
        block.fails = where
        return lambda: setattr(block, "fails", "")

    return begin


def _pre_hook(model: Any, place: int) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        raise Interrupted("pre hook")

    return model.blocks[place].register_forward_pre_hook(hook).remove


def _post_hook(model: Any, place: int) -> Any:
    """A hook of the gradient of a block's result."""
    return (
        model.blocks[place].register_forward_hook(lambda module, args, out: out.register_hook(_raising) and None).remove
    )


def _backward_hook(model: Any, place: int) -> Any:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        raise Interrupted("backward hook")

    return model.blocks[place].register_full_backward_hook(hook).remove


def _nowhere(model: Any, place: int) -> Any:
    return lambda: None


FAILURES: Mapping[str, Callable[[Any, int], Any]] = {
    "statement": _fails("statement"),
    "index": _nowhere,  # of the table, which the operator refuses
    "pre_hook": _pre_hook,
    "post_hook": _post_hook,
    "backward_hook": _backward_hook,
    "inner_hook": _fails("inner_hook"),
    "derivative": _fails("derivative"),
    "loss": _nowhere,  # raised between the forward and the backward
}


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _trained(wrap: str, setting: Setting, failure: str, place: int, backend: str) -> list[Any]:
    """Of each attempt at a step the loss and the gradients, or the error; parameters at the end."""
    torchcompile.reset()
    torch.manual_seed(0)
    model: Any = Blocks().double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrap == "blocks":
        torchcompile.compile_in_place(*model.blocks, backend=backend)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **setting.shard)
    fully_shard(model, mesh=mesh, **setting.shard)
    run = torchcompile.compile(model, backend=backend) if wrap == "whole" else model
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found: list[Any] = []
    for step, fails in enumerate([False, True, False, True, *[False] * GOOD]):
        optimizer.zero_grad()
        for part in range(setting.accumulate):
            last = part == setting.accumulate - 1
            model.set_requires_gradient_sync(last)
            found.append(_attempt(run, model, failure if fails and last else "", place, 10 * step + part))
            if isinstance(found[-1], str) and setting.resets and hasattr(model, "reset_iter_state"):  # torch 2.13
                model.reset_iter_state()
        found.append([None if p.grad is None else _local(p.grad).clone() for p in model.parameters()])
        if not fails:
            optimizer.step()
    return [*found, [_local(p).detach().clone() for p in model.parameters()]]


def _attempt(run: Any, model: Any, failure: str, place: int, seed: int) -> Any:
    """The loss behind a backward, or what was raised."""
    torch.manual_seed(100 * seed + dist.get_rank())
    places = [torch.randint(3, (4,)) for _ in range(BLOCKS)]
    if failure == "index":
        places[place][1] = 7
    good = FAILURES[failure](model, place) if failure else lambda: None
    try:
        loss = run(torch.randn(4, WIDTH, dtype=torch.float64), places).pow(2).sum()
        if failure == "loss":
            raise Interrupted("loss")
        loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        good()
    return loss.detach().clone()


def as_eager(wrap: str, setting: str, failure: str, place: int, backend: str) -> list[str]:
    """What a training with failed steps gives is what it gives eagerly. What was raised, in order."""
    warnings.simplefilter("ignore")
    expected = _trained("", SETTINGS[setting], failure, place, backend)
    found = _trained(wrap, SETTINGS[setting], failure, place, backend)
    assert torchcompile.report().captured >= 2, str(torchcompile.report())
    where = f"{wrap}, {setting}, {failure} in block {place}"
    tolerances = {"rtol": 2e-2, "atol": 2e-2} if setting == "bfloat16" else {}
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        if isinstance(right, str):
            assert left == right, f"{where}, value {number}: {left}, eagerly {right}"
            continue
        torch.testing.assert_close(left, right, msg=lambda m, n=number: f"{where}, value {n}: {m}", **tolerances)
    return [value for value in expected if isinstance(value, str)]
