"""Models under DistributedDataParallel, trained eagerly and compiled, by each rank for itself."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchcompile
import torchdynamo

STEPS = 5
Arguments = Callable[[int], tuple[Any, ...]]


class Layers(nn.Module):
    """Layers of several sizes, so that small buckets hold one or a few parameters."""

    def __init__(self, sizes: tuple[int, ...] = (6, 8, 8, 4, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Branches(nn.Module):
    """Its second branch is used in some steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden + self.second(x).sigmoid() if both else hidden)


class Normed(nn.Module):
    """Buffers that each forward writes, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(self.norm(self.inner(x)).relu()) * (1 + 0.1 * self.calls)


class Tied(nn.Module):
    """One weight in the first layer and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Frozen(Layers):
    """A layer in the middle does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class Ignored(Layers):
    """A parameter that each rank keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["layers.1.bias"]


class Checkpointed(Layers):
    """Each layer is computed again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


class Halved(torch.autograd.Function):
    """Passes on half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.cos() / 2


class OwnFunction(Layers):
    """A derivative of its own behind each layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Halved.apply(layer(x))  # type: ignore[no-untyped-call]
        return x


class Reentrant(Layers):
    """Each layer is computed again in a backward within the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class Outputs(Layers):
    """A dict with a loss, as many libraries give it; one of its tensors is not used."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        hidden = super().forward(x)
        return {"loss": (hidden * scale).pow(2).sum(), "hidden": [hidden, hidden.detach()]}


class Broken(Layers):
    """Its graph breaks in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 1:
                torchdynamo.graph_break()
        return x


class Tokens(nn.Module):
    """Tables that are registered first, one of which ends the model as well, and layers that are added to what they get."""

    def __init__(self, tied: bool = True, breaks: bool = False, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(layers))
        self.out = nn.Linear(8, 40, bias=False)
        self.breaks = breaks
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words((x.abs() * 20).long() % 40) + self.places.weight
        for place, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if self.breaks and place == 1:
                torchdynamo.graph_break()
        return self.out(x)


def _nothing(model: Any) -> None:
    pass


def twice(state: list[int], bucket: Any) -> Any:
    """Twice the sum over the ranks."""
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0] * 2)


def _in_bfloat16(state: None, bucket: Any) -> Any:
    """The mean over the ranks; what is sent has eight bits of precision. (Torch's own hook of this kind wants NCCL.)"""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True).get_future()
    return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _low_rank(model: Any) -> None:
    """PowerSGD from the third step on."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


for _hook in (twice, _in_bfloat16):  # torch asks for the types themselves
    _hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def _loss(result: Any) -> torch.Tensor:
    return result["loss"] if isinstance(result, dict) else result.pow(2).sum()


def _plain(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    for step in range(STEPS):
        _step(run, model, optimizer, case, found, step)


def _step(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any], step: int) -> None:
    optimizer.zero_grad()
    loss = _loss(run(*case.batch(step)))
    loss.backward()
    found += [loss.detach().clone(), *_gradients(model)]
    optimizer.step()


def accumulated(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """Two batches a step; the first is not synchronised."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with run.no_sync():
            _loss(run(*case.batch(2 * step))).backward()
        found += _gradients(model)
        loss = _loss(run(*case.batch(2 * step + 1)))
        loss.backward()
        found += [loss.detach().clone(), *_gradients(model)]
        optimizer.step()


def _kept_gradients(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """`zero_grad(set_to_none=False)`: gradients stay the tensors that they are."""
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = _loss(run(*case.batch(step)))
        loss.backward()
        found += [loss.detach().clone(), *_gradients(model)]
        optimizer.step()


def unequal(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """Each rank runs out of batches before the one ahead of it."""
    with run.join():
        for step in range(STEPS - dist.get_rank()):
            _step(run, model, optimizer, case, found, step)


def autocast(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(run(*case.batch(step)))
        loss.backward()
        found += [loss.detach().clone(), *_gradients(model)]
        optimizer.step()


def evaluated(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """Between steps the model is evaluated without gradients."""
    for step in range(STEPS):
        _step(run, model, optimizer, case, found, step)
        model.eval()
        with torch.no_grad():
            found.append(_loss(run(*case.batch(step + 100))))
        model.train()


def _clipped(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(run(*case.batch(step)))
        loss.backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()


def _scaled(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """Losses are scaled; the third step's gradients overflow, and it is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(run(*case.batch(step))) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found += [*_gradients(model), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        scaler.step(optimizer)
        scaler.update()
        found.append(torch.tensor(scaler.get_scale()))


def _refrozen(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """A layer learns, then does not, then learns again."""
    layer = model.module.layers[1]
    for step in range(STEPS):
        layer.requires_grad_(step not in (1, 2))
        _step(run, model, optimizer, case, found, step)


def _thawed(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """A layer that the replicas do not know of learns from the third step on, by each rank for itself."""
    for step in range(STEPS):
        model.module.layers[1].requires_grad_(step > 1)
        _step(run, model, optimizer, case, found, step)


def _interrupted(run: Any, model: Any, optimizer: Any, case: Replicas, found: list[Any]) -> None:
    """Between steps a forward raises on all ranks, the model is evaluated by a function that breaks, and another
    model is compiled and trained."""
    others = [nn.Sequential(nn.Linear(6, 3), nn.Tanh()).to(case.dtype) for _ in range(STEPS)]
    for step in range(STEPS):
        _step(run, model, optimizer, case, found, step)
        with pytest.raises(RuntimeError):
            run(torch.zeros(2, 5, dtype=case.dtype))
        model.eval()
        with torch.no_grad():
            found.append(torchcompile.compile(evaluated_in_parts, backend="aot_eager")(run, *case.batch(step + 100)))
        model.train()
        other = torchcompile.compile(others[step], backend="aot_eager")
        other(*case.batch(step)[:1]).sum().backward()
        found += _gradients(others[step])


def evaluated_in_parts(run: Any, *batch: Any) -> torch.Tensor:
    first = _loss(run(*batch))
    torchdynamo.graph_break()
    return first + _loss(run(*batch)) * 2


def _gradients(model: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@dataclass(frozen=True)
class Replicas:
    """A model, and how it is trained. `batch(step)` differs between ranks."""

    make: Callable[[], nn.Module] = Layers
    more: Arguments = lambda step: ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = _nothing
    train: Callable[..., None] = _plain
    dtype: torch.dtype = torch.float64
    alike: bool = True  # the replicas are one model at the end

    def batch(self, step: int) -> tuple[Any, ...]:
        torch.manual_seed(10 * step + dist.get_rank())
        return torch.randn(4 if step < 3 else 3, 6, dtype=self.dtype), *self.more(step)


_SMALL: Mapping[str, Any] = {"bucket_cap_mb": 1e-4}  # buckets of some hundred bytes

CASES: Mapping[str, Replicas] = {
    "plain": Replicas(),
    "small_buckets": Replicas(settings=_SMALL),
    "unused": Replicas(Branches, lambda step: (step % 2 == 1,), {"find_unused_parameters": True}),
    "unused_small": Replicas(Branches, lambda step: (step % 2 == 1,), {"find_unused_parameters": True, **_SMALL}),
    "no_sync": Replicas(settings=_SMALL, train=accumulated),
    "no_sync_views": Replicas(settings={**_SMALL, "gradient_as_bucket_view": True}, train=accumulated),
    "kept_gradients": Replicas(settings={"gradient_as_bucket_view": True}, train=_kept_gradients),
    "join": Replicas(settings=_SMALL, train=unequal),
    "join_unused": Replicas(Branches, lambda s: (s % 2 == 1,), {"find_unused_parameters": True}, train=unequal),
    "autocast": Replicas(settings=_SMALL, train=autocast, dtype=torch.float32),
    "views": Replicas(settings={"gradient_as_bucket_view": True}),
    "half_hook": Replicas(prepare=lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "bfloat16_hook": Replicas(prepare=lambda m: m.register_comm_hook(None, _in_bfloat16)),
    "user_hook": Replicas(settings=_SMALL, prepare=lambda m: m.register_comm_hook([], twice)),
    "static": Replicas(settings={"static_graph": True, **_SMALL}),
    "static_checkpointed": Replicas(Checkpointed, settings={"static_graph": True}),
    "checkpointed": Replicas(Checkpointed, settings=_SMALL),
    "tied": Replicas(Tied, settings=_SMALL),
    "tables": Replicas(Tokens, settings=_SMALL),
    "tables_apart": Replicas(lambda: Tokens(tied=False), settings=_SMALL, train=accumulated),
    "tables_broken": Replicas(lambda: Tokens(breaks=True), settings=_SMALL),
    "tables_unused": Replicas(Tokens, settings={"find_unused_parameters": True, **_SMALL}),
    "frozen": Replicas(Frozen, settings=_SMALL),
    "ignored": Replicas(Ignored, settings=_SMALL, alike=False),
    "buffers": Replicas(Normed, settings=_SMALL),
    "own_buffers": Replicas(Normed, settings={"broadcast_buffers": False}),
    "outputs": Replicas(Outputs, lambda step: (1.0 + step,), {"find_unused_parameters": True}),
    "broken": Replicas(Broken, settings=_SMALL),
    "evaluated": Replicas(Normed, settings=_SMALL, train=evaluated),
    "scaled": Replicas(settings=_SMALL, train=_scaled),
    "interrupted": Replicas(settings=_SMALL, train=_interrupted),
    "unused_by_rank": Replicas(Branches, lambda s: ((s + dist.get_rank()) % 2 == 1,), {"find_unused_parameters": True}),
    "unused_by_rank_small": Replicas(
        Branches, lambda s: (s % 3 == dist.get_rank(),), {"find_unused_parameters": True, **_SMALL}
    ),
    "low_rank_hook": Replicas(prepare=_low_rank),
    "own_function": Replicas(OwnFunction, settings=_SMALL),
    "reentrant": Replicas(Reentrant, settings=_SMALL),
    "refrozen": Replicas(settings={"find_unused_parameters": True, **_SMALL}, train=_refrozen),
    "thawed": Replicas(Frozen, settings=_SMALL, train=_thawed, alike=False),
    "clipped": Replicas(settings=_SMALL, train=_clipped),
}


def _outer(model: nn.Module, settings: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    replicated = DistributedDataParallel(model, **settings)
    return torchcompile.compile(replicated, backend=backend), replicated


def _in_place(model: nn.Module, settings: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    """Each part of the model is compiled for itself."""
    torchcompile.compile_in_place(*(m for m in model.modules() if isinstance(m, nn.Linear)), backend=backend)
    return eager(model, settings, backend)


def _inner(model: nn.Module, settings: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    replicated = DistributedDataParallel(torchcompile.compile(model, backend=backend), **settings)
    return replicated, replicated


def eager(model: nn.Module, settings: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    replicated = DistributedDataParallel(model, **settings)
    return replicated, replicated


def _both(model: nn.Module, settings: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    return _outer(torchcompile.compile(model, backend=backend), settings, backend)


def before(model: nn.Module, settings: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    """The model is compiled, and called, before it is replicated."""
    compiled = torchcompile.compile(model, backend=backend)
    first = next(model.parameters())
    compiled(torch.zeros(2, first.shape[1], dtype=first.dtype))
    return eager(compiled, settings, backend)


WRAPPINGS = {"outer": _outer, "inner": _inner}
INDUCTOR = (
    "plain",
    "unused_small",
    "no_sync_views",
    "autocast",
    "user_hook",
    "tied",
    "tables",
    "buffers",
    "outputs",
    "broken",
)
PARTS = ("small_buckets", "unused", "checkpointed")  # with their parts compiled one by one, too


def trained(case: Replicas, wrap: Any, backend: str) -> list[Any]:
    """Losses and gradients of each step, then the parameters, buffers and the optimizer's state."""
    torchcompile.reset()
    torch.manual_seed(0)
    run, model = wrap(case.make().to(case.dtype), case.settings, backend)
    case.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found: list[Any] = []
    case.train(run, model, optimizer, case, found)
    found += [value.detach().clone() for value in model.state_dict().values()]
    for state in optimizer.state.values():
        found += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    if case.alike:
        for parameter in model.parameters():
            others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(others, parameter.detach())
            assert all(torch.equal(other, others[0]) for other in others)
    return found


def trains_as_eager(name: str, backend: str) -> dict[str, dict[str, int]]:
    """Both wrappings give what eager gives; how often each event is in the ledger, by wrapping."""
    warnings.simplefilter("ignore")
    case = CASES[name]
    expected = trained(case, eager, backend)
    events: dict[str, dict[str, int]] = {}
    wrappings = WRAPPINGS if name not in PARTS else {**WRAPPINGS, "parts": _in_place, "both": _both}
    for wrapping, wrap in wrappings.items():
        found = trained(case, wrap, backend)
        report = torchcompile.report()
        assert report.captured > 0 or report.ran_eagerly
        counts: Counter[str] = Counter()
        for event in report.events:
            counts[event.kind.id] += event.count
        events[wrapping] = dict(counts)
        for place, (left, right) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                left, right, equal_nan=True, msg=lambda text, p=place: f"{name}, {wrapping}, value {p}: {text}"
            )
    return events
