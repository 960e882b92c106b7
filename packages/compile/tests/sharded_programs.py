"""Models whose parameters are sharded, trained eagerly and compiled, by each rank for itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replica_programs import STEPS, Checkpointed, Layers, evaluated_in_parts
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torchcompile

SIZES = (6, 8, 8, 4, 2)
Between = Callable[[Any, torch.optim.Optimizer, int], list[Any]]  # a backward and the step of the optimizer


class Sequences(nn.Module):
    """Layers with a norm before each pair of them, over sequences."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((6, 8), (8, 6), (6, 4), (4, 6)))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, norm in enumerate(self.norms):
            x = x + self.layers[2 * place + 1](torch.tanh(self.layers[2 * place](norm(x))))
        return x


def _nothing(model: nn.Module, backend: str) -> nn.Module:
    return model


def _whole(model: nn.Module, backend: str) -> nn.Module:
    return torchcompile.compile(model, backend=backend)


def _blocks(model: nn.Module, backend: str) -> nn.Module:
    torchcompile.compile_in_place(*model.layers, backend=backend)  # type: ignore[misc]
    return model


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def _shard_mixed(model: nn.Module) -> nn.Module:
    return _shard(model, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64))


def _shard_in_bfloat16(model: nn.Module) -> nn.Module:
    """Computed in bfloat16, reduced in float32."""
    return _shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def _offloaded(model: nn.Module) -> nn.Module:
    return _shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _kept_gathered(model: nn.Module) -> nn.Module:
    return _shard(model, reshard_after_forward=False)


def _gathered_ahead(model: nn.Module) -> nn.Module:
    """Each layer asks for the parameters of the next before it computes."""
    layers = list(_shard(model).layers)  # type: ignore[arg-type]
    for layer, following in zip(layers, layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
    return model


def _flat(model: nn.Module, **settings: Any) -> nn.Module:
    def is_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, nn.Linear)

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu, auto_wrap_policy=is_unit, **settings)


def _resharded_mixed(model: nn.Module) -> nn.Module:
    """Gathered for the forward, kept in pairs of ranks, and gathered again from these for the backward."""
    mixed = MixedPrecisionPolicy(torch.float32, torch.float64)
    return _shard(model, mp_policy=mixed, reshard_after_forward=2 if dist.get_world_size() > 2 else True)


def _flat_mixed(model: nn.Module) -> nn.Module:
    return _flat(model, mixed_precision=MixedPrecision(torch.float32, torch.float64))


def _tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"layers.{i}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(len(model.layers))}  # type: ignore[arg-type]
    return parallelize_module(model, mesh, plan)


def _sequence_parallel(model: nn.Module) -> nn.Module:
    """Norms on parts of the sequence, layers on the whole of it, parts of each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {"": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))}
    for place in range(2):
        plan[f"norms.{place}"] = SequenceParallel()
        plan[f"layers.{2 * place}"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{2 * place + 1}"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


def _in_two_ways(model: nn.Module) -> nn.Module:
    """Each layer is cut over pairs of ranks, and what a rank has of it is sharded over the pairs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("pairs", "pair"))
    plan = {f"layers.{i}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(len(model.layers))}  # type: ignore[arg-type]
    parallelize_module(model, mesh["pair"], plan)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh["pairs"])
    return fully_shard(model, mesh=mesh["pairs"])


def _interrupted(run: Any, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    """Gradients are clipped, a forward raises on all ranks, the model is evaluated by a function that breaks, and
    another model is compiled and trained."""
    norm = nn.utils.clip_grad_norm_(run.parameters(), 0.5)
    with pytest.raises(RuntimeError):
        run(torch.zeros(2, 5, dtype=torch.float64))
    run.eval()
    with torch.no_grad():
        evaluated = torchcompile.compile(evaluated_in_parts, backend="aot_eager")(
            run, torch.ones(2, 6, dtype=torch.float64)
        )
    run.train()
    torch.manual_seed(step)
    other = nn.Linear(6, 3).double()
    torchcompile.compile(other, backend="aot_eager")(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return [whole.clone(), evaluated, other.weight.grad]


def _restored(run: Any, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    """A step is taken, and taken back: parameters and the optimizer's state are loaded as they were."""
    if not optimizer.state:
        return []
    states = copy.deepcopy(get_state_dict(run, optimizer))
    optimizer.step()
    taken = [_local(p).clone() for p in run.parameters()]
    set_state_dict(run, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return taken


@dataclass(frozen=True)
class Sharded:
    """How a model is sharded, and in which order that and compiling it come."""

    shard: Callable[[nn.Module], nn.Module]
    wrap: Callable[[nn.Module, str], nn.Module]
    first: bool = False  # compiled before it is sharded
    make: Callable[..., nn.Module] = Layers
    accumulate: int = 1
    between: Between | None = None
    same_batch: bool = False
    scaled: bool = False
    shape: tuple[int, ...] = (4, 6)


CASES: Mapping[str, Sharded] = {
    "whole": Sharded(_shard, _whole),
    "blocks_first": Sharded(_shard, _blocks, first=True),
    "mixed": Sharded(_shard_mixed, _whole),
    "kept_gathered": Sharded(_kept_gathered, _whole),
    "gathered_ahead": Sharded(_gathered_ahead, _whole, accumulate=2),
    "gathered_ahead_blocks": Sharded(_gathered_ahead, _blocks, first=True, between=_interrupted),
    "offloaded": Sharded(_offloaded, _whole),
    "checkpointed": Sharded(_shard, _whole, make=Checkpointed),
    "accumulated_blocks": Sharded(_shard, _blocks, accumulate=2),
    "interrupted": Sharded(_shard, _whole, accumulate=2, between=_interrupted),
    "restored": Sharded(_shard, _whole, between=_restored),
    "restored_blocks": Sharded(_shard, _blocks, first=True, between=_restored),
    "scaled": Sharded(_shard, _whole, scaled=True),
    "scaled_blocks": Sharded(_shard_in_bfloat16, _blocks, accumulate=2, scaled=True),
    "flat": Sharded(_flat, _whole),
    "flat_blocks": Sharded(_flat, _blocks, first=True),
    "flat_mixed": Sharded(_flat_mixed, _whole),
    "flat_mixed_accumulated": Sharded(_flat_mixed, _whole, accumulate=2),
    "resharded_mixed": Sharded(_resharded_mixed, _whole, accumulate=2),
    "flat_accumulated": Sharded(_flat, _whole, accumulate=2),
    "tensor_parallel": Sharded(_tensor_parallel, _whole, same_batch=True),
    "tensor_parallel_blocks": Sharded(_tensor_parallel, _blocks, same_batch=True),
    "in_two_ways": Sharded(_in_two_ways, _whole, same_batch=True),
    "sequence_parallel": Sharded(_sequence_parallel, _whole, make=Sequences, same_batch=True, shape=(2, 4, 6)),
    "sequence_parallel_blocks": Sharded(_sequence_parallel, _blocks, make=Sequences, same_batch=True, shape=(2, 4, 6)),
}


def _local(value: Any) -> Any:
    """This rank's part of a tensor."""
    if isinstance(value, ShardedTensor):
        return value.local_tensor() if value.local_shards() else torch.zeros(0)
    return value.to_local() if isinstance(value, DTensor) else value


def _trained(case: Sharded, wrap: Callable[[nn.Module, str], nn.Module], backend: str) -> list[Any]:
    torchcompile.reset()
    torch.manual_seed(0)
    model = case.make(SIZES).double() if case.make is Layers else case.make().double()
    run = case.shard(wrap(model, backend)) if case.first else wrap(case.shard(model), backend)
    optimizer = torch.optim.AdamW(run.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled, init_scale=2.0**10, growth_interval=2)
    found: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        overflow = float("inf") if case.scaled and step == 2 and dist.get_rank() == 1 else 1.0
        for part in range(case.accumulate):
            torch.manual_seed(100 * step + 10 * part + (0 if case.same_batch else dist.get_rank()))
            if case.accumulate > 1 and hasattr(run, "set_requires_gradient_sync"):
                run.set_requires_gradient_sync(part == case.accumulate - 1)
            loss = run(torch.randn(case.shape, dtype=torch.float64)).pow(2).sum() * overflow
            scaler.scale(loss).backward()
            found.append(loss.detach().clone())
        found += [None if p.grad is None else _local(p.grad).clone() for p in run.parameters()]
        if case.between is not None:
            found += case.between(run, optimizer, step)
        scaler.step(optimizer)
        scaler.update()
        found.append(torch.tensor(scaler.get_scale()))
    found += [_local(value).clone() for state in optimizer.state.values() for value in state.values()]
    full = get_model_state_dict(run, options=StateDictOptions(full_state_dict=True))
    found += [value.detach().clone() for value in full.values()]
    sharded = copy.deepcopy(get_model_state_dict(run))
    found += [_local(value).clone() for value in sharded.values() if isinstance(value, torch.Tensor)]
    with torch.no_grad():
        for parameter in run.parameters():
            parameter.zero_()
    set_model_state_dict(run, sharded)
    torch.manual_seed(1)
    found.append(run(torch.randn(case.shape, dtype=torch.float64)).detach().clone())
    return found


def trains_as_eager(name: str, backend: str) -> dict[str, int]:
    """A sharded model gives what it gives eagerly; how often each event is in the ledger."""
    warnings.simplefilter("ignore")
    case = CASES[name]
    expected = _trained(case, _nothing, backend)
    found = _trained(case, case.wrap, backend)
    report = torchcompile.report()
    assert report.captured > 0 or report.ran_eagerly
    for place, (left, right) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(left, right, equal_nan=True, msg=lambda text, p=place: f"{name}, value {p}: {text}")
    counts: dict[str, int] = {"captured": report.captured}
    for event in report.events:
        counts[event.kind.id] = counts.get(event.kind.id, 0) + event.count
    return counts
