"""Ways to train: two-step optimizers, averages, queues, experts, adapters, checkpoints, callbacks."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from user_programs import Values, Wrap, program, trained


class Sharpness(torch.optim.Optimizer):
    """Steps by the gradient at the worst point nearby."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack(
            [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        ).norm()
        for group in self.param_groups:
            for p in group["params"]:
                step = p.grad * (group["rho"] / (norm + 1e-12))
                p.add_(step)
                self.state[p]["climbed"] = step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        self.climb()
        self.zero_grad()
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["climbed"])
        self.base.step()
        self.zero_grad()


@program()
def steps_by_the_sharpest_point_nearby(compiled: Wrap) -> Values:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(approximate="tanh"), nn.Linear(8, 3))
    net, optimizer, losses = compiled(model), Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), []
    for _ in range(3):
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y, label_smoothing=0.05)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses, trained(model)


class Sign(torch.optim.Optimizer):
    """Steps by the sign of a momentum."""

    def __init__(
        self, parameters: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(state["momentum"].mul(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                state["momentum"].mul_(second).add_(p.grad, alpha=1 - second)


@program(recompiles=True)
def own_optimizer_in_one_compiled_step(compiled: Wrap) -> Values:
    model = nn.Sequential(nn.Linear(4, 6), nn.Mish(), nn.Linear(6, 1))
    optimizer = Sign(model.parameters())

    @compiled
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).squeeze(-1), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for number in range(5):
        if number == 3:
            optimizer.param_groups[0]["lr"] *= 0.1
        x = torch.randn(8, 4)
        losses.append(step(x, x.sum(1)).item())
    saved = copy.deepcopy(optimizer.state_dict())
    return losses, trained(model), saved["state"]


@program()
def pairs_against_a_queue(compiled: Wrap) -> Values:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def follow(self) -> None:
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1

        @torch.no_grad()
        def enqueue(self, keys: torch.Tensor) -> None:
            place = int(self.place)
            self.queue[:, place : place + keys.shape[0]] = keys.T
            self.place[0] = (place + keys.shape[0]) % self.queue.shape[1]

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q = F.normalize(self.query(a), dim=1)
            with torch.no_grad():
                k = F.normalize(self.key(b), dim=1)
            near = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
            far = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
            return torch.cat([near, far], 1) / 0.2, k

    model = Contrast()
    net, optimizer = compiled(model), torch.optim.SGD(model.query.parameters(), 0.1)
    for _ in range(4):
        x = torch.randn(4, 6)
        model.follow()
        logits, keys = net(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        model.enqueue(keys)
    return trained(model)


@program()
def experts_chosen_by_a_router(compiled: Wrap) -> Values:
    class Mixture(nn.Module):
        def __init__(self, width: int = 6, experts: int = 4) -> None:
            super().__init__()
            self.router = nn.Linear(width, experts, bias=False)
            self.up, self.down = (
                nn.Parameter(torch.randn(experts, width, 8)),
                nn.Parameter(torch.randn(experts, 8, width)),
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            flat = x.reshape(-1, x.shape[-1])
            chances = self.router(flat).softmax(-1)
            weight, chosen = chances.topk(2, -1)
            weight = weight / weight.sum(-1, keepdim=True)
            places = F.one_hot(chosen, chances.shape[-1])
            room = flat.shape[0] * 2 // chances.shape[-1]
            rank = (places.flatten(0, 1).cumsum(0) - 1).view_as(places)
            weight = weight * ((places * rank).sum(-1) < room)
            out = torch.zeros_like(flat)
            for e in range(chances.shape[-1]):
                of = (weight * (chosen == e)).sum(-1)
                out = out + of[:, None] * (F.silu(flat @ self.up[e]) @ self.down[e])
            balance = (places.double().mean((0, 1)) * chances.mean(0)).sum() * chances.shape[-1]
            return out.view_as(x), balance

    model = Mixture()
    net, optimizer = compiled(model), torch.optim.Adafactor(model.parameters())
    for _ in range(3):
        x = torch.randn(2, 4, 6)
        out, balance = net(x)
        optimizer.zero_grad()
        (F.mse_loss(out, x) + 0.01 * balance).backward()
        optimizer.step()
    return trained(model, balance)


class LowRank(nn.Module):
    """What is added to a weight."""

    def __init__(self, rows: int, columns: int, rank: int = 2) -> None:
        super().__init__()
        self.a, self.b, self.on = nn.Parameter(torch.randn(rank, columns)), nn.Parameter(torch.zeros(rows, rank)), True

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a / 2 if self.on else weight


@program(recompiles=True)
def adapters_put_on_and_merged(compiled: Wrap) -> Values:
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    model.requires_grad_(False)
    for layer in (model.linear1, model.linear2):
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    tuned = [p for p in model.parameters() if p.requires_grad]
    net, optimizer, out = compiled(model), torch.optim.AdamW(tuned, 1e-2), []
    x = torch.randn(2, 5, 8)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    for module in model.modules():
        if isinstance(module, LowRank):
            module.on = False
    out.append(net(x).detach())
    for module in model.modules():
        if isinstance(module, LowRank):
            module.on = True
    parametrize.remove_parametrizations(model.linear1, "weight", leave_parametrized=True)
    out.append(net(x).detach())
    return out, trained(model)


@program()
def inner_loops_and_an_outer_one(compiled: Wrap) -> Values:
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    def task_loss(parameters, seen, new):  # type: ignore[no-untyped-def]  # as users write it
        for _ in range(2):
            slopes = torch.func.grad(loss_of)(parameters, *seen)
            parameters = {name: p - 0.1 * slopes[name] for name, p in parameters.items()}
        return loss_of(parameters, *new)

    of, optimizer = compiled(task_loss), torch.optim.Adam(start.values(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            height, phase = torch.rand(2)
            (x, new) = torch.randn(5, 1), torch.randn(5, 1)
            wave = lambda z: height * torch.sin(z + phase)  # noqa: E731, B023
            of(start, (x, wave(x)), (new, wave(new))).backward()
        optimizer.step()
    return start, {name: p.grad for name, p in start.items()}


@program()
def losses_balanced_by_their_gradients(compiled: Wrap) -> Values:
    trunk, heads = nn.Linear(5, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
    weights = nn.Parameter(torch.ones(3))

    def losses_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(trunk(x))
        return torch.stack([F.mse_loss(head(hidden).squeeze(-1), y[:, n]) for n, head in enumerate(heads)])

    of, first = compiled(losses_of), None
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], 1e-2)
    of_weights = torch.optim.SGD([weights], 0.1)
    for _ in range(3):
        losses = of(torch.randn(6, 5), torch.randn(6, 3))
        first = losses.detach() if first is None else first
        optimizer.zero_grad()
        (weights * losses).sum().backward(retain_graph=True)
        norms = torch.stack(
            [
                torch.autograd.grad(weights[n] * losses[n], trunk.weight, retain_graph=True, create_graph=True)[
                    0
                ].norm()
                for n in range(3)
            ]
        )
        speed = (losses.detach() / first) / (losses.detach() / first).mean()
        of_weights.zero_grad()
        weights.grad = torch.autograd.grad((norms - (norms.mean() * speed**0.5).detach()).abs().sum(), weights)[0]
        of_weights.step()
        optimizer.step()
        with torch.no_grad():
            weights.mul_(3 / weights.sum())
    return weights, trained(trunk), trained(heads)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bits: int) -> torch.Tensor:
        low, high = x.min(), x.max()
        scale = (high - low).clamp(min=1e-8) / (2**bits - 1)
        ctx.save_for_backward(x)
        return ((x - low) / scale).round() * scale + low

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return slope * (x.abs() < 1), None


@program()
def quantised_while_it_trains(compiled: Wrap) -> Values:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(StraightThrough.apply(x, 8), StraightThrough.apply(self.weight, 4), self.bias)

    model = nn.Sequential(Layer(5, 8), nn.Hardswish(), nn.Dropout(0.2), Layer(8, 3))
    model[0].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
    net, optimizer = compiled(model), torch.optim.SGD(model.parameters(), 0.1, weight_decay=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        F.multi_margin_loss(net(torch.randn(6, 5)), torch.randint(0, 3, (6,))).backward()
        optimizer.step()
    return trained(model)


@dataclass
class Meter:
    """A running mean."""

    total: float = 0.0
    count: int = 0
    history: list[float] = field(default_factory=list)

    def update(self, value: float, count: int = 1) -> None:
        self.total, self.count = self.total + value * count, self.count + count
        self.history.append(self.mean)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


class Timer:
    """Callbacks of a trainer."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seen.append(f"{name}: {time.perf_counter() - begin >= 0}")


@program(recompiles=True)
def trainer_with_callbacks_and_checkpoints(compiled: Wrap) -> Values:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.body, self.drop = nn.LayerNorm(6), nn.Linear(6, 6), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(F.gelu(self.body(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.out = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
            return self.out(x.mean(1))

    data = TensorDataset(torch.randn(10, 3, 6), torch.randint(0, 2, (10,)))
    loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    net, timer, meter, file = compiled(model), Timer(), Meter(), io.BytesIO()
    for epoch in range(3):
        model.train()
        for number, (x, y) in enumerate(loader):
            with timer.section("forward"):
                loss = F.cross_entropy(net(x), y) / 2
            with timer.section("backward"):
                loss.backward()
            if number % 2 or number == len(loader) - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
            meter.update(loss.item(), len(x))
        model.eval()
        with torch.inference_mode(), timer.section("evaluation"):
            schedule.step(sum(F.cross_entropy(net(x), y, reduction="sum") for x, y in loader).item())
        if epoch == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        elif epoch == 1:
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    return meter.history, timer.seen, optimizer.param_groups[0]["lr"], trained(model)


@program()
def weights_made_by_another_net(compiled: Wrap) -> Values:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = ((4, 6), (6, 2))
            self.make = nn.ModuleList(nn.Linear(3, a * b + b) for a, b in self.sizes)

        def forward(self, code: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            for n, ((a, b), make) in enumerate(zip(self.sizes, self.make, strict=True)):
                weight, bias = make(code).split([a * b, b], -1)
                x = torch.baddbmm(bias[:, None], x, weight.view(-1, a, b))
                x = x if n == len(self.sizes) - 1 else F.relu(x)
            return x

    model = Hyper()
    net, optimizer = compiled(model), torch.optim.Adam(model.parameters(), 1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 3), torch.randn(4, 5, 4)).logsumexp(-1).sum().backward()
        optimizer.step()
    return trained(model)


@program(breaks=1)
def sparse_rows_and_bags(compiled: Wrap) -> Values:
    words, bags = nn.Embedding(20, 5, sparse=True), nn.EmbeddingBag(20, 5, mode="mean")
    out = nn.Linear(10, 1)

    def loss_of(tokens: torch.Tensor, flat: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.cat([words(tokens).amax(1), bags(flat, offsets)], 1)
        return F.binary_cross_entropy_with_logits(out(found).squeeze(-1), y)

    of = compiled(loss_of)
    rare, rest = (
        torch.optim.SparseAdam(words.parameters(), 1e-2),
        torch.optim.Adagrad([*bags.parameters(), *out.parameters()], 0.1),
    )
    for _ in range(3):
        for optimizer in (rare, rest):
            optimizer.zero_grad()
        of(torch.randint(0, 20, (3, 4)), torch.randint(0, 20, (9,)), torch.tensor([0, 4, 6]), torch.rand(3)).backward()
        for optimizer in (rare, rest):
            optimizer.step()
    return list(words.parameters()), trained(bags), trained(out)


@program()
def teacher_and_student(compiled: Wrap) -> Values:
    make = functools.partial(lambda width: nn.Sequential(nn.Linear(5, width), nn.PReLU(), nn.Linear(width, 4)))
    teacher, student = make(12).eval().requires_grad_(False), make(6)
    caught: list[torch.Tensor] = []
    handle = student[1].register_forward_hook(lambda module, args, out: caught.append(out))
    learn, know = compiled(student), compiled(teacher)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    for x in itertools.islice(iter(lambda: torch.randn(6, 5), None), 3):
        with torch.no_grad():
            wanted = know(x)
        found = learn(x)
        soft = F.kl_div((found / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean") * 4
        optimizer.zero_grad()
        (soft + 1e-3 * caught.pop().abs().mean()).backward()
        optimizer.step()
        schedule.step()
    handle.remove()
    return schedule.get_last_lr(), trained(student, learn(x))
