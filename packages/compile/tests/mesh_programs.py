"""Models and functions that get another device mesh than the one that they were captured with: copies, other orders of the
same ranks, two meshes at once, and tensor-parallel blocks that are sharded over the other dim of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_programs import MODELS, WORDS, Words
from parallel_programs import _same as same
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

import torchcompile


def _turned(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in the other order: each rank holds another part."""
    return DeviceMesh("cpu", mesh.mesh.flip(0))


MESHES: Mapping[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "the same": lambda mesh: mesh,
    "an equal one": lambda mesh: init_device_mesh("cpu", tuple(mesh.mesh.shape)),
    "a copy": copy.deepcopy,
    "turned": _turned,
}


def _shares(x: torch.Tensor, mesh: DeviceMesh) -> tuple[Any, ...]:
    own = DTensor.from_local(x, mesh, [Shard(0)])
    return own.full_tensor(), own.redistribute(placements=[Shard(1)]).to_local(), own.sum(0)


def _collects(x: torch.Tensor, mesh: DeviceMesh) -> tuple[Any, ...]:
    return functional.all_gather_tensor(x, 0, (mesh, 0)), x + mesh.get_local_rank(), x * mesh.size()


def _other_meshes(program: Callable[..., tuple[Any, ...]], backend: str) -> None:
    """A function is called with one mesh after another."""
    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(12, dtype=torch.float64).reshape(2, 6) + 100 * dist.get_rank()
    for which, other in MESHES.items():
        _compare(compiled(x, other(mesh)), program(x, other(mesh)), which)
    _nothing_was_left_to_eager()


def _other_layouts(backend: str) -> None:
    """A function is called with tensors of one mesh after another; the mesh is an attribute of them."""
    torchcompile.reset()

    def program(weight: Any, x: torch.Tensor) -> tuple[Any, ...]:
        return weight.full_tensor() * x.sum(), (weight * 2).redistribute(placements=[Shard(1)]), weight.to_local().sum()

    compiled = torchcompile.compile(program, backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    x = torch.ones(3, dtype=torch.float64)
    for which, other in MESHES.items():
        weight = distribute_tensor(whole, other(mesh), [Shard(0)])
        _compare(compiled(weight, x), program(weight, x), which)
        _compare(compiled(copy.deepcopy(weight), x), program(weight, x), f"{which}, copied")
    _nothing_was_left_to_eager()


def _at_once(backend: str) -> None:
    """Two meshes in one function, given in one order and the other."""
    torchcompile.reset()

    def program(x: torch.Tensor, one: DeviceMesh, other: DeviceMesh) -> tuple[Any, ...]:
        first, second = DTensor.from_local(x, one, [Shard(0)]), DTensor.from_local(x, other, [Shard(0)])
        parts = DTensor.from_local(x, other, [Partial()])
        return (
            first.full_tensor() + 2 * second.full_tensor(),
            second.redistribute(placements=[Replicate()]),
            parts.sum(),
        )

    compiled = torchcompile.compile(program, backend=backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    meshes = (mesh, _turned(mesh))
    x = torch.arange(12, dtype=torch.float64).reshape(2, 6) + 100 * dist.get_rank()
    for pair in (meshes, meshes[::-1], meshes, (mesh, mesh)):
        _compare(compiled(x, *pair), program(x, *pair), str(pair))
    _nothing_was_left_to_eager()


def _nothing_was_left_to_eager() -> None:
    report = torchcompile.report()
    assert report.captured and not report.ran_eagerly, str(report)


def _compare(found: Any, expected: Any, what: str) -> None:
    for place, (left, right) in enumerate(zip(found, expected, strict=True)):
        if isinstance(right, DTensor):
            assert left.device_mesh == right.device_mesh, what
        same(_waited(left), _waited(right), f"{what}, result {place}")


def _waited(value: Any) -> Any:
    return getattr(value, "wait", lambda: value)()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


def _share_out(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        shared = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(shared))


def _moved(backend: str) -> None:
    """A model with DTensors for parameters is trained, copied, and moved to other meshes."""
    torchcompile.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = distribute_module(Net().double(), mesh, _share_out)
    twin = copy.deepcopy(model)
    runs: list[tuple[str, Any, Any]] = [("first", torchcompile.compile(model, backend=backend), twin)]
    runs.append(("copy", copy.deepcopy(runs[0][1]), copy.deepcopy(twin)))
    for which, run, eager in runs:
        _train(which, run, eager, mesh)
    for which, other in MESHES.items():
        onto = other(mesh)
        for module in (model, twin):
            for part in (module.first, module.second):
                _move(part, onto)
        _train(f"moved to {which}", runs[0][1], twin, onto)
    _nothing_was_left_to_eager()


def _move(module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        whole = parameter.full_tensor().detach()  # type: ignore[attr-defined]
        module.register_parameter(key, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))


def _train(which: str, run: Any, eager: Any, mesh: DeviceMesh) -> None:
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(4, 6, dtype=torch.float64)
        losses = []
        for model in (run, eager):
            model.zero_grad()
            losses.append(model(distribute_tensor(x, mesh, [Replicate()])).square().sum())
            losses[-1].full_tensor().backward()
        where = f"{which}, step {step}"
        same(losses[0], losses[1], where)
        for (name, expected), found in zip(eager.named_parameters(), run.parameters(), strict=True):
            same(found.grad, expected.grad, f"{where}, gradient of {name}")
            with torch.no_grad():
                found -= 0.1 * found.grad
                expected -= 0.1 * expected.grad


PROGRAMS: Mapping[str, Callable[[str], None]] = {
    "shares": partial(_other_meshes, _shares),
    "collects": partial(_other_meshes, _collects),
    "layouts": _other_layouts,
    "at_once": _at_once,
    "moved": _moved,
}


def in_two_ways(name: str, wrap: str, backend: str) -> dict[str, int]:
    """Blocks of a transformer are cut over pairs of ranks, and what a rank has of them is sharded over the pairs."""
    torchcompile.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pairs", "pair"))
    base = Words().double()
    models: list[Any] = [MODELS[name](copy.deepcopy(base), mesh["pair"]) for _ in range(2)]
    if wrap == "blocks":
        torchcompile.compile_in_place(*models[1].blocks, backend=backend)
    for model in models:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["pairs"])
        fully_shard(model, mesh=mesh["pairs"])
    runs = [models[0], torchcompile.compile(models[1], backend=backend) if wrap == "whole" else models[1]]
    steps = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for step in range(5):
        drawn = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("pairs"))
        given = torch.randint(WORDS, (2, 8), generator=drawn)
        losses = []
        for run, optimizer in zip(runs, steps, strict=True):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(run(given).flatten(0, 1), given.flatten()))
            losses[-1].backward()
        same(losses[1], losses[0], f"step {step}, loss")
        for (which, expected), found in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            same(found[1].grad, expected.grad, f"step {step}, gradient of {which}")
        for optimizer in steps:
            optimizer.step()
    for (which, expected), found in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        same(found[1], expected, which)
    report = torchcompile.report()
    return {"captured": report.captured} | {event.kind.id: event.count for event in report.events}
