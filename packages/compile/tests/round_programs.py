"""Deep models under DistributedDataParallel, whose loops over layers are compiled round by round: trained eagerly and
compiled, by each rank for itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import replica_programs
import torch
from replica_programs import Replicas
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchcompile
import torchdynamo

DEPTH, LEAST = 6, 4
OPTIONS = {"replicated_rounds": LEAST, "eager_random": True, "precision": "eager"}


class Block(nn.Module):
    """A layer of many."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm, self.layer, self.number = nn.LayerNorm(6), nn.Linear(6, 6), number

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return x + self.layer(self.norm(x)).tanh() * scale


class Deep(nn.Module):
    """An embedding, layers, a head."""

    kind: Callable[[int], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks, self.head = nn.ModuleList(type(self).kind(i) for i in range(DEPTH)), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counted(Deep):
    """The number of a round is counted, and read."""

    def forward(self, x: torch.Tensor) -> Any:
        x, total = self.first(x), 0
        for place, block in enumerate(self.blocks):
            x = block(x, 1.0 + place)
            total += place
        return self.head(x) * total


class NumberedBlock(Block):
    """It reads its own number, of which every second goes another way."""

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        x = super().forward(x, 1 + self.number)
        return x.sin() if self.number % 2 else x


class Numbered(Deep):
    kind = NumberedBlock


class Part(Deep):
    """A part of the layers, the rest is for later."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks[: DEPTH - 1]:
            x = block(x)
        return self.head(self.blocks[-1](x.cos()))


class Zipped(Deep):
    """A parameter for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((6,), 1.0 + i) for i in range(DEPTH))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x, scale)
        return self.head(x)


class InSequence(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.first(x)).sin())


class Checkpointed(Deep):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Collected(Deep):
    """All hidden states are results."""

    def forward(self, x: torch.Tensor) -> Any:
        x, states, last = self.first(x), [], ()
        for block in self.blocks:
            states.append(x)
            x = block(x)
            last += (x,)  # type: ignore[assignment]
        found = torch.stack(states).mean(0) + torch.stack(last).sum(0)
        return {"loss": self.head(found).pow(2).sum(), "states": states}


class TwoLoops(Deep):
    """An encoder and a decoder, which looks at what the encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.encoded(self.first(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            for block in self.second:
                x = block(x, y)
        return self.head(x)

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class BufferedBlock(Block):
    """It counts its calls, in a buffer and in Python, and has running statistics."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.statistics, self.calls = nn.BatchNorm1d(6), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen += x.detach().mean()
        return super().forward(self.statistics(x)) * (1 + 0.1 * self.seen)


class Buffered(Deep):
    kind = BufferedBlock


class DroppedBlock(Block):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Dropped(Deep):
    kind = DroppedBlock


class OtherBlock(Block):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(x.cos())


class TwoKinds(Deep):
    """Every second layer is another one: four of each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block, OtherBlock)[i % 2]() for i in range(2 * LEAST))


class Tied(Deep):
    """Layers share a weight, and one of them comes twice."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.layer.weight = self.blocks[0].layer.weight
        self.blocks.append(self.blocks[1])


class BrokenBlock(Block):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        x = self.norm(x)
        torchdynamo.graph_break()
        return x + self.layer(x).tanh()


class Broken(Deep):
    kind = BrokenBlock


class Skipped(Deep):
    """Layers are left out, and the loop ends early."""

    def forward(self, x: torch.Tensor, left_out: int = 0, most: int = DEPTH) -> Any:
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            if place == left_out:
                continue
            if place >= most:
                break
            x = block(x)
        else:
            x = x * 2
        return self.head(x)


class Comprehended(Deep):
    """What goes over the layers is no loop of a function's own."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        beside = [block(x) for block in self.blocks]
        total = sum(block(x).mean() for block in self.blocks)
        for block in list(self.blocks):
            x = block(x)
        return self.head(x + torch.stack(beside).sum(0)) * total


class Tokens(Deep):
    """Its table is the head, too, and as large as four and a half of its layers."""

    def __init__(self, depth: int = 2 * LEAST) -> None:
        super().__init__()
        self.first = nn.Embedding(40, 6)  # type: ignore[assignment]
        self.blocks, self.head = nn.ModuleList(Block(i) for i in range(depth)), nn.Linear(6, 40, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward((x.abs() * 20).long() % 40)


class Hooked(Deep):
    """A layer has a hook: it is like no other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_hook(lambda module, args, result: result * 2)


_SMALL = {"bucket_cap_mb": 1.5e-4}  # a layer takes two buckets
_ROUNDS = {"repeated_modules"}

# A program, and what the ledger is told of it beside its wrapping and the number of rows, which changes.
CASES: dict[str, tuple[Replicas, set[str]]] = {
    "plain": (Replicas(Deep), _ROUNDS),
    "small_buckets": (Replicas(Deep, settings=_SMALL), _ROUNDS),
    "counted": (Replicas(Counted, settings=_SMALL), _ROUNDS),
    "numbered": (Replicas(Numbered, settings=_SMALL), _ROUNDS),
    "part": (Replicas(Part, settings=_SMALL), _ROUNDS),
    "zipped": (Replicas(Zipped, settings=_SMALL), _ROUNDS),
    "in_sequence": (Replicas(InSequence, settings=_SMALL), _ROUNDS),
    "checkpointed": (Replicas(Checkpointed, settings=_SMALL), _ROUNDS),
    "collected": (Replicas(Collected, settings=_SMALL), _ROUNDS | {"list_of_each_length"}),
    "two_loops": (Replicas(TwoLoops, settings=_SMALL), _ROUNDS | {"ambient_state"}),
    "buffered": (Replicas(Buffered, settings=_SMALL), _ROUNDS),
    "dropped": (Replicas(Dropped, settings=_SMALL), _ROUNDS),
    "two_kinds": (Replicas(TwoKinds, settings=_SMALL), _ROUNDS),
    "tied": (Replicas(Tied, settings=_SMALL), set()),
    "broken": (Replicas(Broken, settings=_SMALL), _ROUNDS | {"graph_break"}),
    "skipped": (
        Replicas(Skipped, lambda step: (step % 2, DEPTH - step), {"find_unused_parameters": True, **_SMALL}),
        _ROUNDS,
    ),
    "comprehended": (Replicas(Comprehended, settings=_SMALL), _ROUNDS),
    "hooked": (Replicas(Hooked, settings=_SMALL), _ROUNDS),
    "tokens": (Replicas(Tokens, settings=_SMALL), _ROUNDS),
    "tokens_unused": (Replicas(Tokens, settings={"find_unused_parameters": True, **_SMALL}), _ROUNDS),
    "no_sync_views": (
        Replicas(Deep, settings={**_SMALL, "gradient_as_bucket_view": True}, train=replica_programs.accumulated),
        _ROUNDS,
    ),
    "static": (Replicas(Deep, settings={**_SMALL, "static_graph": True}), _ROUNDS),
    "static_checkpointed": (Replicas(Checkpointed, settings={**_SMALL, "static_graph": True}), _ROUNDS),
    "join": (Replicas(Deep, settings=_SMALL, train=replica_programs.unequal), _ROUNDS),
    "autocast": (Replicas(Deep, settings=_SMALL, train=replica_programs.autocast, dtype=torch.float32), _ROUNDS),
    "hook": (
        Replicas(Deep, settings=_SMALL, prepare=lambda m: m.register_comm_hook([], replica_programs.twice)),
        _ROUNDS,
    ),
    "evaluated": (Replicas(Buffered, settings=_SMALL, train=replica_programs.evaluated), _ROUNDS),
}


def _outer(model: nn.Module, settings: Any, backend: str) -> tuple[Any, Any]:
    replicated = DistributedDataParallel(model, **settings)
    return torchcompile.compile(replicated, backend=backend, options=OPTIONS), replicated


def _inner(model: nn.Module, settings: Any, backend: str) -> tuple[Any, Any]:
    replicated = DistributedDataParallel(torchcompile.compile(model, backend=backend, options=OPTIONS), **settings)
    return replicated, replicated


def trains_as_eager(name: str, backend: str) -> dict[str, set[str]]:
    """Both wrappings give what eager gives; what the ledger is told, by wrapping."""
    warnings.simplefilter("ignore")
    case = CASES[name][0]
    expected = replica_programs.trained(case, replica_programs.eager, backend)
    told: dict[str, set[str]] = {}
    for wrapping, wrap in {"outer": _outer, "inner": _inner}.items():
        found = replica_programs.trained(case, wrap, backend)
        told[wrapping] = {event.kind.id for event in torchcompile.report().events}
        for place, (left, right) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                left, right, equal_nan=True, msg=lambda text, p=place: f"{name}, {wrapping}, value {p}: {text}"
            )
    return told


def compiled_for(depth: int, kind: type[Deep] = Deep, **options: Any) -> tuple[int, int, set[str]]:
    """How many captures and graphs a model of so many layers takes, and what the ledger is told."""
    torchcompile.reset()
    model = kind()
    model.blocks = nn.ModuleList(Block(i) for i in range(depth))
    run = DistributedDataParallel(torchcompile.compile(model, options=OPTIONS | options))
    for _ in range(3):
        run(torch.ones(2, 6)).sum().backward()
    report = torchcompile.report()
    return report.captured, len(report.graphs), {event.kind.id for event in report.events}
