"""Programs as people write them around a model, each a whole small training or inference run: a table for the tests.

A program gets a `Run`: it compiles by `run.compile` what such a script compiles, and notes what it sees. It is run with
`compile` that gives its argument back, and with the real one, from one seed in float64.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Independent, MultivariateNormal, Normal
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import swa_utils
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

Program = Callable[["Run"], None]
PROGRAMS: dict[str, tuple[Program, frozenset[str]]] = {}


@dataclass
class Run:
    """One run of a program.

    Attributes:
        compile: what the program compiles by.
        notes: what it has noted: a name, tensors with what is known of them, other values.
    """

    compile: Callable[..., Any]
    notes: list[tuple[str, list[Any]]] = field(default_factory=list)

    def note(self, name: str, *values: Any) -> None:
        """Keeps values as they are now: of a tensor its numbers, dtype, layout, history and whose memory it is in."""
        leaves = pytree.tree_leaves(values)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kept: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                kept.append(leaf)
                continue
            dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
            kept += [dense.clone(), (leaf.layout, leaf.dtype, leaf.requires_grad, leaf.is_leaf, type(leaf).__name__)]
        places = [t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and t.numel()]
        self.notes.append((name, [*kept, [places.index(place) for place in places]]))

    def note_model(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Its state, gradients, and what an optimizer keeps."""
        self.note(name, model.state_dict(), [p.grad for p in model.parameters()])
        if optimizer is not None:
            self.note(f"{name}'s optimizer", [sorted(s.items()) for s in optimizer.state_dict()["state"].values()])


def program(*told: str) -> Callable[[Program], Program]:
    """Adds a program; `told`: the kinds of the ledger that it meets, besides recompilation."""

    def add(run: Program) -> Program:
        PROGRAMS[run.__name__] = run, frozenset(told)
        return run

    return add


def layers(*sizes: int, between: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    parts = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), between())]
    return nn.Sequential(*parts[:-1])


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@program()
def adversaries_with_a_gradient_penalty(run: Run) -> None:
    maker, critic = layers(3, 8, 4), layers(4, 8, 1, between=nn.LeakyReLU)
    make, judge = run.compile(maker), run.compile(critic)
    of_maker = torch.optim.Adam(maker.parameters(), 1e-2)
    of_critic = torch.optim.RMSprop(critic.parameters(), 1e-2)
    for _ in range(3):
        critic.requires_grad_(True)
        maker.requires_grad_(False)
        with torch.no_grad():
            made = make(torch.randn(5, 3))
        real, part = torch.randn(5, 4), torch.rand(5, 1)
        mixed = (part * real + (1 - part) * made).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        loss = judge(made).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        step(of_critic, loss)
        critic.requires_grad_(False)
        maker.requires_grad_(True)
        step(of_maker, -judge(make(torch.randn(5, 3))).mean())
        run.note("losses", loss, slope)
        run.note_model("maker", maker, of_maker)
        run.note_model("critic", critic, of_critic)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.choice, self.mean = layers(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.spread, self.value = nn.Parameter(torch.zeros(2)), nn.Linear(8, 1)

    def forward(self, seen: torch.Tensor) -> tuple[Categorical, Independent, torch.Tensor]:
        h = self.body(seen)
        continuous = Independent(Normal(self.mean(h), self.spread.exp()), 1)
        return Categorical(logits=self.choice(h)), continuous, self.value(h).squeeze(-1)


@program()
def clipped_policies(run: Run) -> None:
    actor = Actor()
    act, optimizer = run.compile(actor), torch.optim.Adam(actor.parameters(), 1e-2)
    seen, taken, moved = torch.zeros(6, 4), torch.zeros(6, dtype=torch.long), torch.zeros(6, 2)
    chances, worth = torch.zeros(6), torch.zeros(6)
    for _ in range(2):
        for t in range(6):  # rows of what is replayed are written in place
            seen[t] = torch.randn(4)
            with torch.no_grad():
                choice, move, value = act(seen[t])
                taken[t], moved[t] = choice.sample(), move.sample()
                chances[t] = choice.log_prob(taken[t]) + move.log_prob(moved[t])
                worth[t] = torch.randn(()) - value
        for rows in torch.randperm(6).split(4):
            choice, move, value = act(seen[rows])
            ratio = (choice.log_prob(taken[rows]) + move.log_prob(moved[rows]) - chances[rows]).exp()
            gain = torch.min(ratio * worth[rows], ratio.clamp(0.8, 1.2) * worth[rows]).mean()
            loss = value.square().mean() - gain - 0.01 * (choice.entropy() + move.entropy()).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(actor.parameters(), 0.5)
            optimizer.step()
            run.note("step", loss, norm, ratio)
    run.note_model("actor", actor, optimizer)


@program()
def targets_that_follow(run: Run) -> None:
    net = layers(4, 8, 3)
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer, replay = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), torch.zeros(8, 6)

    def push(place: int, before: torch.Tensor, action: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
        row = replay[place]
        row[:4], row[4] = before, action
        row[5:].copy_(reward)
        return row

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        batch = replay[rows]
        with torch.no_grad():
            wanted = batch[:, 5] + 0.9 * target(batch[:, :4]).max(1).values
        return F.smooth_l1_loss(net(batch[:, :4]).gather(1, batch[:, 4:5].long()).squeeze(1), wanted)

    def follow(part: float) -> None:
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), net.parameters(), strict=True):
                ours.lerp_(theirs, part)

    push, loss_of, follow = map(run.compile, (push, loss_of, follow))
    for t in range(10):
        row = push(t % 8, torch.randn(4), torch.randint(0, 3, ()), torch.randn(1))
        run.note("row", row, replay)
        if t > 4:
            step(optimizer, loss_of(torch.randint(0, t, (4,))))
            follow(0.05 if t < 8 else 0.1)
    run.note_model("net", net, optimizer)
    run.note_model("target", target)


@program()
def noise_taken_away(run: Run) -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.first = layers(8, 8, 8, between=nn.SiLU), nn.Conv2d(1, 8, 3, padding=1)
            self.norm, self.drop, self.last = nn.GroupNorm(2, 8), nn.Dropout(0.1), nn.Conv2d(8, 1, 3, padding=1)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            angles = t[:, None].double() * torch.exp(-torch.arange(4.0))
            when = self.time(torch.cat([angles.sin(), angles.cos()], -1))
            return self.last(self.drop(F.silu(self.norm(self.first(x)) + when[:, :, None, None])))

    model = Denoiser()
    averaged = copy.deepcopy(model).requires_grad_(False).eval()
    denoise, shown = run.compile(model), run.compile(averaged)
    left, own = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = torch.randint(0, 50, (x.shape[0],), generator=own)
        noise = torch.randn(x.shape, generator=own)
        kept = left.gather(0, t).view(-1, 1, 1, 1)
        return kept.sqrt() * x + (1 - kept).sqrt() * noise, t, noise

    @torch.no_grad()
    def average(part: float) -> None:
        torch._foreach_mul_(list(averaged.parameters()), part)
        torch._foreach_add_(list(averaged.parameters()), list(model.parameters()), alpha=1 - part)

    draw, average = run.compile(draw), run.compile(average)
    for _ in range(3):
        x, t, noise = draw(torch.randn(3, 1, 6, 6))
        step(optimizer, F.mse_loss(denoise(x, t), noise))
        average(0.9)
        run.note("drawn", x, t, noise, own.get_state())
    with torch.inference_mode():
        run.note("shown", shown(torch.randn(2, 1, 6, 6), torch.full((2,), 7)))
    run.note_model("model", model, optimizer)
    run.note_model("averaged", averaged)


@program("data_dependent_shape", "library_code", "tensor_to_number")
def packed_sequences(run: Run) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 6, padding_idx=0), nn.Linear(10, 10)
            self.encode, self.decode = nn.LSTM(6, 5, bidirectional=True, batch_first=True), nn.LSTMCell(6, 10)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
            h, (last, cell) = self.encode(packed)
            state, outputs = tuple(s.transpose(0, 1).reshape(len(x), -1) for s in (last, cell)), []
            for t in range(y.shape[1]):
                state = self.decode(self.embed(y[:, t]), state)
                outputs.append(self.out(state[0]))
            return torch.stack(outputs, 1), *pad_packed_sequence(h, batch_first=True)

    model = Translator()
    translate, optimizer = run.compile(model), torch.optim.Adam(model.parameters(), 1e-2)
    for lengths in ([4, 2, 3], [5, 5, 1]):
        x, y = torch.randint(1, 10, (3, max(lengths))), torch.randint(1, 10, (3, 3))
        found, h, sizes = translate(x, torch.tensor(lengths), y)
        step(optimizer, F.cross_entropy(found.flatten(0, 1), y.flatten()))
        run.note("found", found, h, sizes)
    run.note_model("model", model, optimizer)


@program()
def beams_over_a_growing_cache(run: Run) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.heads, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

        def forward(self, tokens: torch.Tensor, cache: Any = None) -> Any:
            q, k, v = self.heads(self.embed(tokens)).chunk(3, -1)
            if cache is not None:
                k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
            h = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0, -1]
            return F.log_softmax(self.out(h), -1), (k, v)

    decode = run.compile(Decoder().eval())
    with torch.no_grad():
        chances, cache = decode(torch.zeros(1, 1, dtype=torch.long))
        score, first = chances[0].topk(3)
        beams, cache = first[:, None], [part.expand(3, -1, -1) for part in cache]
        for _ in range(5):
            chances, cache = decode(beams[:, -1:], cache)
            score, best = (score[:, None] + chances).view(-1).topk(3)
            beams = torch.cat([beams[best // 11], (best % 11)[:, None]], 1)
            cache = [part.index_select(0, best // 11) for part in cache]
            run.note("beams", beams, score, cache)


class Adapted(nn.Module):
    """A linear layer with a product of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y + x @ self.down.T @ self.up.T if self.enabled else y


@program()
def adapters_put_into_a_compiled_model(run: Run) -> None:
    model, x = layers(4, 6, 2), torch.randn(3, 4)
    call = run.compile(model)
    run.note("as it was", call(x))
    model.requires_grad_(False)
    for name, child in [*model.named_children()]:
        if isinstance(child, nn.Linear):
            setattr(model, name, Adapted(child))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for _ in range(2):
        step(optimizer, call(x).square().sum())
    model[0].enabled = False
    run.note("switched off", call(x))
    model[0].enabled = True
    for name, child in [*model.named_children()]:
        if isinstance(child, Adapted):
            with torch.no_grad():
                child.base.weight += child.up @ child.down
            model._modules[name] = child.base
    run.note("merged", call(x))
    model.insert(0, nn.LayerNorm(4))
    run.note("longer", call(x))
    run.note_model("model", model)


@program()
def parameters_made_of_others(run: Run) -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 6)),
        parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.Linear(6, 4),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )
    prune.l1_unstructured(model[2], "weight", 0.3)
    call, optimizer, x = run.compile(model), torch.optim.Adam(model.parameters(), 1e-2), torch.randn(5, 4)
    for number in range(3):
        step(optimizer, call(x).square().mean())
        run.note("buffers", dict(model.named_buffers()))
        if number == 1:
            prune.remove(model[2], "weight")
    model.eval()
    run.note("evaluated", call(x))
    with nn.utils.parametrize.cached():
        run.note("cached", call(x), call(x))
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    run.note("removed", call(x))
    run.note_model("model", model)


@program()
def averages_of_weights(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    call = run.compile(model)
    plain = swa_utils.AveragedModel(call)
    decayed = swa_utils.AveragedModel(call, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule, batches = swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2), [torch.randn(5, 4) for _ in range(3)]
    for x in batches:
        step(optimizer, call(x).square().mean())
        schedule.step()
        plain.update_parameters(model)
        decayed.update_parameters(call)
    swa_utils.update_bn(batches, plain)
    run.note("of both", plain(x), decayed(x), [*plain.state_dict()])
    run.note_model("plain", plain)
    run.note_model("decayed", decayed)


@program("sparse_gradient", "library_code")
def sparse_embeddings(run: Run) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bags = nn.Embedding(10, 4, sparse=True), nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
            self.out = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x).mean(1) + self.bags(x.flatten(), starts))

    model = Bags()
    call, dense = run.compile(model), torch.optim.Adagrad(model.out.parameters(), 0.1)
    sparse = torch.optim.SparseAdam([model.words.weight, model.bags.weight], 1e-2)
    for _ in range(2):
        y = call(torch.randint(0, 10, (3, 4)), torch.arange(0, 12, 4))
        y.square().sum().backward()
        run.note("gradients", y, [p.grad for p in model.parameters()])
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    run.note_model("model", model)


@program("transformed_call")
def equations_of_derivatives(run: Run) -> None:
    model = layers(2, 8, 8, 1)
    call, optimizer = run.compile(model), torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        x = torch.rand(6, 2, requires_grad=True)
        u = call(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        step(optimizer, (first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]).square().mean())
        run.note("derivatives", first, second)
    closure_runs = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        closure_runs.append(loss.item())
        return loss

    torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe").step(closure)
    run.note("jacobian", torch.func.vmap(torch.func.jacrev(call))(torch.rand(3, 2)), closure_runs)
    run.note_model("model", model, optimizer)


@program("data_dependent_branch", "library_code")
def flows_that_start_from_data(run: Run) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
            self.shift, self.log_scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
            self.register_buffer("begun", torch.tensor(False))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.begun:
                with torch.no_grad():
                    self.shift.copy_(x.mean(0))
                    self.log_scale.copy_(x.std(0).log())
                    self.begun.fill_(True)
            y = ((x - self.shift) / self.log_scale.exp()) @ self.turn
            return y, torch.linalg.slogdet(self.turn)[1] - self.log_scale.sum()

    steps = nn.ModuleList([Step(), Step()])

    def log_prob(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x))
        for one in steps:
            x, change = one(x)
            total = total + change
        return total + MultivariateNormal(torch.zeros(4), torch.eye(4)).log_prob(x)

    call, optimizer = run.compile(log_prob), torch.optim.SGD(steps.parameters(), 1e-2)
    for _ in range(3):
        found = call(torch.randn(6, 4) * 2 + 1)
        step(optimizer, -found.mean())
        run.note("found", found)
    run.note_model("steps", steps, optimizer)


@program("tensor_to_number")
def graphs_of_other_sizes(run: Run) -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.weigh, self.out = nn.Linear(4, 6), nn.Linear(12, 1), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            (start, end), h = edges, self.lift(x)
            score = F.leaky_relu(self.weigh(torch.cat([h[start], h[end]], -1)).squeeze(-1))
            highest = torch.full((len(x),), -1e9).scatter_reduce(0, end, score, "amax")
            weight = (score - highest[end]).exp()
            total = torch.zeros(len(x)).index_add(0, end, weight)
            h = torch.zeros_like(h).index_add_(0, end, (weight / (total[end] + 1e-16))[:, None] * h[start]).relu()
            pooled = torch.zeros(int(batch.max()) + 1, 6).index_add_(0, batch, h)
            return self.out(pooled / torch.bincount(batch)[:, None])

    model = Convolution()
    call, optimizer = run.compile(model), torch.optim.Adam(model.parameters(), 1e-2)
    for nodes, edges in ((5, 9), (7, 12), (4, 0), (8, 8)):
        batch = (torch.arange(nodes) >= nodes // 2).long()
        y = call(torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges)), batch)
        step(optimizer, y.square().sum())
        run.note("pooled", y)
    run.note_model("model", model, optimizer)


@program()
def optimizers_in_the_backward(run: Run) -> None:
    model = layers(4, 8, 2)
    call, order = run.compile(model), list[str]()
    optimizers = {p: torch.optim.Adam([p], 1e-2) for p in model.parameters()}
    names = {p: name for name, p in model.named_parameters()}

    def stepped(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()
        order.append(names[p])

    handles = [p.register_post_accumulate_grad_hook(stepped) for p in model.parameters()]
    for number in range(4):
        call(torch.randn(5, 4)).square().sum().backward()
        run.note_model("model", model)
        run.note("order", sorted(order))
        if number == 2:
            handles[0].remove()


@program("checkpoint")
def checkpoints_over_statistics(run: Run) -> None:
    class Block(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
            self.reentrant = reentrant

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(F.relu(self.norm(self.linear(x))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.body, x, use_reentrant=self.reentrant)

    model = nn.Sequential(Block(True), Block(False), nn.Linear(4, 2))
    call, optimizer = run.compile(model), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        step(optimizer, call(x).square().sum())
        run.note("drawn behind it", x.grad, torch.rand(1))
    run.note_model("model", model)
    model.eval()
    run.note("evaluated", call(x))


@program("tensor_to_number")
def queues_of_keys(run: Run) -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = layers(4, 6, 3), layers(4, 6, 3).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(3, 8), dim=0))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys: torch.Tensor) -> None:
            place = int(self.place)
            self.queue[:, place : place + len(keys)] = keys.T
            self.place[0] = (place + len(keys)) % 8

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            q = F.normalize(self.query(a), dim=1)
            with torch.no_grad():
                for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    ours.data = ours.data * 0.9 + theirs.data * 0.1
                shuffled = torch.randperm(len(b))
                k = F.normalize(self.key(b[shuffled]), dim=1)[torch.argsort(shuffled)]
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1)
            self.enqueue(k)
            return logits

    model = Contrast()
    call, optimizer = run.compile(model), torch.optim.SGD(model.query.parameters(), 0.1)
    for _ in range(4):
        logits = call(torch.randn(4, 4), torch.randn(4, 4))
        step(optimizer, F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))
        run.note("logits", logits, model.queue, model.place)
    run.note_model("model", model)


@program()
def threads_in_other_grad_modes(run: Run) -> None:
    model, found, errors = layers(4, 8, 3), dict[tuple[int, int], Any](), list[str]()
    call = run.compile(model)

    def work(number: int) -> None:
        try:
            for turn in range(3):
                x = torch.linspace(0, 1, (2 + number % 3) * 4).view(-1, 4)
                if number % 2:
                    with torch.no_grad():
                        found[number, turn] = call(x)
                else:
                    x.requires_grad_()
                    found[number, turn] = torch.autograd.grad(call(x).sum(), [x, *model.parameters()])
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.note("found", [found.get(key) for key in sorted(found)], errors)
