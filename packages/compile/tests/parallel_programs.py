"""Models that `parallelize_module` has changed, and DTensors by hand: eagerly and compiled."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import aotautograd
import torchcompile
import torchdynamo
from primtorch.communication import communicates

WIDTH, HEADS, WORDS = 16, 4, 32


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            layer(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.feed = nn.LayerNorm(WIDTH), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = self.words(given)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


_LAYERS = {
    **{f"attention.{name}": ColwiseParallel for name in "qkv"},
    "attention.out": RowwiseParallel,
    "feed.up": ColwiseParallel,
    "feed.down": RowwiseParallel,
}


def by_tensor(model: Words, mesh: Any) -> Words:
    for block in model.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in _LAYERS.items()})
    return model


def _by_sequence(model: Words, mesh: Any, words: Any) -> Words:
    """Norms and sums are of a part of the positions on each rank."""
    last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"words": words, "norm": SequenceParallel(), "out": last})
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in model.blocks:
        plan: dict[str, Any] = {
            name: style(**({"output_layouts": Shard(1)} if style is RowwiseParallel else {}))
            for name, style in _LAYERS.items()
        }
        plan |= dict.fromkeys(("attention", "feed"), PrepareModuleInput(**gathered))
        parallelize_module(block, mesh, {**plan, "before": SequenceParallel(), "between": SequenceParallel()})
    return model


def by_sequence(model: Words, mesh: Any) -> Words:
    cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    return _by_sequence(model, mesh, cut)


def with_words(model: Words, mesh: Any) -> Words:
    """The table of words is shared out, too."""
    return _by_sequence(model, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))


MODELS = {"by_tensor": by_tensor, "by_sequence": by_sequence, "with_words": with_words}


def trains_as_eager(name: str, backend: str) -> tuple[list[str], int]:
    """Five steps: losses, gradients with their layouts, parameters. What broke the graph, and how many were captured."""
    torchcompile.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = Words().double()
    models = [MODELS[name](copy.deepcopy(base), mesh) for _ in range(2)]
    runs = [models[0], torchcompile.compile(models[1], backend=backend)]
    steps = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for step in range(5):
        given = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(step))
        losses = []
        for run, optimizer in zip(runs, steps, strict=True):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(run(given).flatten(0, 1), given.flatten()))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], msg=lambda m, step=step: f"step {step}: {m}")
        for (which, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            _same(found.grad, expected.grad, f"step {step}, gradient of {which}")
        for optimizer in steps:
            optimizer.step()
    for (which, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        _same(found, expected, which)
    report = torchcompile.report()
    return [f"{event.kind.id}: {event.detail}" for event in report.breaks], report.captured


def _same(found: Any, expected: Any, what: str) -> None:
    assert type(found) is type(expected), what
    if isinstance(expected, DTensor):
        assert found.placements == expected.placements, f"{what}: {found.placements}, eagerly {expected.placements}"
        found, expected = found.to_local(), expected.to_local()
    torch.testing.assert_close(found, expected, msg=lambda m: f"{what}: {m}")


def by_hand(backend: str) -> None:
    """Layouts that the program chooses, in one graph; another mesh or other placements are captured anew."""

    def program(x: torch.Tensor, weight: Any, mesh: Any, cut: tuple[Any, ...]) -> tuple[Any, ...]:
        own = DTensor.from_local(x, mesh, cut)
        whole = own.redistribute(placements=[Replicate()], async_op=True)
        product = torch.nn.functional.linear(whole.sin(), weight)
        assert isinstance(product, DTensor) and product.device_mesh.ndim == 1 and len(own.placements) == 1
        parts = DTensor.from_local(x * (dist.get_rank() + 1), mesh, [Partial()])
        return product, parts.full_tensor(), own.to_local(grad_placements=cut) * 2, whole.sum().full_tensor()

    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    meshes = [init_device_mesh("cpu", (dist.get_world_size(),)) for _ in range(2)]
    for call, (mesh, dim) in enumerate([(meshes[0], 0), (meshes[0], 0), (meshes[0], 1), (meshes[1], 0)]):
        torch.manual_seed(call)
        table = torch.randn(6, 4 if dim == 0 else 4 * dist.get_world_size(), dtype=torch.float64)
        given = torch.randn(2, 4, dtype=torch.float64) + dist.get_rank()
        results = []
        for run in (program, compiled):
            x = given.clone().requires_grad_()
            weight = distribute_tensor(table, mesh, [Shard(0)]).requires_grad_()
            out = run(x, weight, mesh, (Shard(dim),))
            sum(getattr(one, "full_tensor", lambda one=one: one)().square().sum() for one in out).backward()
            results.append((*out, x.grad, weight.grad))
        for place, (expected, found) in enumerate(zip(*results, strict=True)):
            _same(found, expected, f"call {call}, result {place}")
    assert torchcompile.report().clean


def without_gradients() -> list[str]:
    """Inference, and the collectives that the graph of plain tensors holds."""
    torchcompile.reset()
    model = by_sequence(Words().double().eval(), init_device_mesh("cpu", (dist.get_world_size(),)))
    found: list[str] = []

    def keep(gm: Any, inputs: Any) -> Any:
        found.extend(str(node.target).split(".")[-2] for node in gm.graph.nodes if communicates(node.target))
        return gm.forward

    given = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        expected = model(given)
        torch.testing.assert_close(torchcompile.compile(model, fullgraph=True)(given), expected)
        run = torchdynamo.optimize(lambda gm, inputs: aotautograd.aot_module(gm, inputs, fw_compiler=keep))(model)
        torch.testing.assert_close(run(given), expected)
    return found


def _cut_again(x: Any, weight: Any) -> tuple[Any, ...]:
    across = weight.redistribute(placements=[Shard(1)]).to_local(grad_placements=[Shard(1)])
    return across * 3, weight.sum(0).redistribute(placements=[Shard(0)]), x.detach().full_tensor() + x.full_tensor()


def _product(x: Any, weight: Any) -> tuple[Any, ...]:
    y = F.linear(x, weight)
    return y, y.redistribute(placements=[Replicate()]).to_local() * 2, (x @ weight.t()).relu().sum(0).full_tensor()


def _rows(x: Any, weight: Any) -> tuple[Any, ...]:
    return torch.cat([x, x * 2]).full_tensor(), (x * x).softmax(-1), x[:, :2].full_tensor(), x.transpose(0, 1) + 1


def _halved(x: Any, weight: Any) -> tuple[Any, ...]:
    with torch.autocast("cpu", torch.bfloat16):
        return (F.linear(x, weight).full_tensor().double(),)


def uneven(backend: str) -> None:
    """Parts of other sizes on each rank, or of none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for program in (_cut_again, _product, _rows, _halved):
        torchcompile.reset()
        compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
        for rows, columns, dim in ((5, 4, 0), (1, 4, 0), (4, 6, 1)):
            torch.manual_seed(rows)
            table, given = torch.randn(rows, columns).double(), torch.randn(6, columns).double()
            results = []
            for run in (program, compiled):
                weight = distribute_tensor(table, mesh, [Shard(dim)]).requires_grad_()
                x = distribute_tensor(given, mesh, [Shard(0)]).requires_grad_()
                out = run(x, weight)
                sum(getattr(one, "full_tensor", lambda one=one: one)().square().sum() for one in out).backward()
                results.append((*out, x.grad, weight.grad))
            for place, (expected, found) in enumerate(zip(*results, strict=True)):
                where = f"{program.__name__} of {rows} rows, result {place}"
                if expected is not None:
                    assert found.stride() == expected.stride(), where
                    _same(found, expected, where)
