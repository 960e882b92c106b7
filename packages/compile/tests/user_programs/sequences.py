"""Language, speech and other sequences."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from user_programs import Values, Wrap, program, trained


class Rotary(nn.Module):
    """Rotary positions, with tables that grow when a longer sequence comes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("rates", 1.0 / 100 ** (torch.arange(0, width, 2) / width), persistent=False)
        self.longest, self.tables = 0, {}

    def forward(self, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
        length = x.shape[-2] + offset
        if length > self.longest:
            angles = torch.outer(torch.arange(length, dtype=self.rates.dtype), self.rates)
            self.tables = {"cos": angles.cos(), "sin": angles.sin()}
            self.longest = length
        cos, sin = self.tables["cos"][offset:length], self.tables["sin"][offset:length]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@dataclass
class Cache:
    """Keys and values of what was read."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=-2)
            self.values[layer] = torch.cat([self.values[layer], v], dim=-2)
        return self.keys[layer], self.values[layer]

    @property
    def length(self) -> int:
        return self.keys[0].shape[-2] if self.keys else 0


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = heads, layer
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(width),
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width),
        )
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.rotary = Rotary(width // heads)

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        past = cache.keys[self.layer].shape[-2] if cache is not None and self.layer < len(cache.keys) else 0
        q, k = self.rotary(q, past), self.rotary(k, past)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        mask = None
        if t > 1:
            mask = torch.ones(t, k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - t)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 17, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2, n) for n in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


@program(recompiles=True)
def decoder_trained_then_generates_with_a_cache(compiled: Wrap) -> Values:
    model = Decoder()
    net, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))
    for length in (6, 6, 9):
        tokens = torch.randint(0, 17, (3, length))
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    cache, tokens = Cache(), torch.randint(0, 17, (2, 4))
    with torch.no_grad():
        new = tokens
        for _ in range(5):
            probabilities = F.softmax(net(new, cache)[:, -1] / 0.8, dim=-1)
            best, order = probabilities.sort(descending=True)
            best = best.masked_fill(best.cumsum(-1) - best > 0.9, 0.0)
            new = order.gather(-1, torch.multinomial(best / best.sum(-1, keepdim=True), 1))
            tokens = torch.cat([tokens, new], dim=1)
        whole = net(tokens[:, :-1])[:, -1]
    return tokens, cache.length, cache.keys, whole, trained(model)


class Beam(NamedTuple):
    tokens: torch.Tensor
    scores: torch.Tensor


@program(recompiles=True)
def sequence_to_sequence_with_beams(compiled: Wrap) -> Values:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(11, 8, padding_idx=0)
            self.encode = nn.GRU(8, 8, batch_first=True, bidirectional=True)
            self.decode, self.attend, self.out = nn.GRUCell(8 + 16, 16), nn.Linear(16, 16), nn.Linear(16, 11)

        def read(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found, last = self.encode(self.source(source))
            return found, torch.cat([last[0], last[1]], dim=-1)

        def step(self, token, state, read, mask):  # type: ignore[no-untyped-def]  # as users write it
            scores = torch.einsum("bd,bsd->bs", self.attend(state), read).masked_fill(~mask, float("-inf"))
            context = torch.einsum("bs,bsd->bd", scores.softmax(-1), read)
            state = self.decode(torch.cat([self.target(token), context], -1), state)
            return self.out(state), state

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            read, state = self.read(source)
            mask, logits = source != 0, []
            for t in range(target.size(1) - 1):
                out, state = self.step(target[:, t], state, read, mask)
                logits.append(out)
            return F.cross_entropy(torch.stack(logits, 1).transpose(1, 2), target[:, 1:], ignore_index=0)

    def beams(model: Model, source: torch.Tensor, size: int, length: int) -> Beam:
        read, state = model.read(source)
        read, state = (x.repeat_interleave(size, 0) for x in (read, state))
        mask = (source != 0).repeat_interleave(size, 0)
        beam = Beam(torch.ones(size, 1, dtype=torch.long), torch.tensor([0.0] + [-1e9] * (size - 1)))
        for _ in range(length):
            logits, state = model.step(beam.tokens[:, -1], state, read, mask)
            scores = beam.scores[:, None] + logits.log_softmax(-1)
            best, flat = scores.flatten().topk(size)
            parent, token = torch.div(flat, logits.shape[-1], rounding_mode="floor"), flat % logits.shape[-1]
            beam, state = Beam(torch.cat([beam.tokens[parent], token[:, None]], 1), best), state[parent]
        return beam

    model = Model()
    net, optimizer = compiled(model), torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True)
    for _ in range(2):
        source, target = torch.randint(1, 11, (3, 5)), torch.randint(1, 11, (3, 4))
        source[0, 3:], target[1, 2:] = 0, 0
        optimizer.zero_grad()
        net(source, target).backward()
        optimizer.step()
    with torch.no_grad():
        found = compiled(beams)(model, torch.randint(1, 11, (1, 5)), 3, 4)
    return found.tokens, found.scores, trained(model)


@program()
def conditional_random_field(compiled: Wrap) -> Values:
    class Tagger(nn.Module):
        def __init__(self, tags: int = 4) -> None:
            super().__init__()
            self.embed, self.lstm, self.emit = (
                nn.Embedding(12, 6),
                nn.LSTM(6, 5, bidirectional=True),
                nn.Linear(10, tags),
            )
            self.pairs, self.start = nn.Parameter(torch.randn(tags, tags)), nn.Parameter(torch.randn(tags))

        def emissions(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.emit(self.lstm(self.embed(tokens))[0])

        def forward(self, tokens: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = self.emissions(tokens)
            total = self.start + scores[0]
            gold = self.start[tags[0]] + scores[0].gather(1, tags[0, :, None]).squeeze(1)
            for t in range(1, tokens.size(0)):
                new = torch.logsumexp(total[:, :, None] + self.pairs + scores[t][:, None, :], dim=1)
                total = torch.where(mask[t, :, None], new, total)
                step = self.pairs[tags[t - 1], tags[t]] + scores[t].gather(1, tags[t, :, None]).squeeze(1)
                gold = gold + step * mask[t]
            return (total.logsumexp(1) - gold).mean()

        def best(self, tokens: torch.Tensor) -> list[list[int]]:
            scores, history = self.emissions(tokens), []
            total = self.start + scores[0]
            for row in scores[1:]:
                total, source = (total[:, :, None] + self.pairs).max(dim=1)
                total = total + row
                history.append(source)
            paths = [total.argmax(1)]
            for source in reversed(history):
                paths.append(source.gather(1, paths[-1][:, None]).squeeze(1))
            return torch.stack(paths[::-1]).t().tolist()  # type: ignore[no-any-return]

    tagger = Tagger()
    net, optimizer = compiled(tagger), torch.optim.SGD(tagger.parameters(), 0.1)
    for _ in range(3):
        tokens, tags = torch.randint(0, 12, (5, 3)), torch.randint(0, 4, (5, 3))
        mask = torch.arange(5)[:, None] < torch.tensor([5, 3, 4])
        optimizer.zero_grad()
        net(tokens, tags, mask).backward()
        optimizer.step()
    with torch.no_grad():
        return compiled(tagger.best)(tokens), trained(tagger)


@program(recompiles=True)
def language_model_over_time(compiled: Wrap) -> Values:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(13, 8), nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
            self.out = nn.Linear(12, 13)

        def forward(self, tokens, state=None):  # type: ignore[no-untyped-def]  # as users write it
            x, state = self.lstm(self.embed(tokens), state)
            return self.out(x), state

    model = Model()
    net, optimizer, text = compiled(model), torch.optim.SGD(model.parameters(), 0.5), torch.randint(0, 13, (2, 25))
    state, total = None, 0.0
    for begin in range(0, 24, 6):
        if state is not None:
            state = tuple(s.detach() for s in state)
        logits, state = net(text[:, begin : begin + 6], state)
        loss = F.cross_entropy(logits.reshape(-1, 13), text[:, begin + 1 : begin + 7].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.25)
        optimizer.step()
        total += loss.item()
    return math.exp(total / 4), state, trained(model)


@program()
def speech_by_alignments(compiled: Wrap) -> Values:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.out = nn.Conv1d(5, 8, 5, stride=2, padding=2), nn.Linear(8, 7)
            self.register_buffer("window", torch.hann_window(8))

        def features(self, wave: torch.Tensor) -> torch.Tensor:
            spectrum = torch.stft(wave, 8, hop_length=4, window=self.window, return_complex=True)
            return (spectrum.abs().pow(2) + 1e-6).log()

        def forward(self, wave: torch.Tensor) -> torch.Tensor:
            x = self.features(wave)
            x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
            return self.out(F.relu(self.convolution(x)).permute(2, 0, 1)).log_softmax(-1)

    model = Model()
    net, optimizer = compiled(model), torch.optim.RAdam(model.parameters(), 1e-2)
    loss_of = nn.CTCLoss(zero_infinity=True)
    for _ in range(3):
        wave, words = torch.randn(3, 80), torch.randint(1, 7, (3, 4))
        scores = net(wave)
        lengths = torch.full((3,), scores.shape[0])
        optimizer.zero_grad()
        loss_of(scores, words, lengths, torch.tensor([4, 2, 3])).backward()
        optimizer.step()
    best = net(wave).argmax(-1).t()
    words = [[int(k) for n, k in enumerate(row) if k and (n == 0 or k != row[n - 1])] for row in best.tolist()]
    return words, trained(model)


@program()
def trees_read_by_a_recursion(compiled: Wrap) -> Values:
    Tree = collections.namedtuple("Tree", "left right")

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.join, self.out = nn.Embedding(9, 6), nn.Bilinear(6, 6, 6), nn.Linear(6, 2)

        def read(self, tree: int | Tree) -> torch.Tensor:
            if isinstance(tree, int):
                return self.embed.weight[tree]
            return torch.tanh(self.join(self.read(tree.left), self.read(tree.right)))

        def forward(self, trees: list[Tree]) -> torch.Tensor:
            return self.out(torch.stack([self.read(tree) for tree in trees]))

    reader = Reader()
    net, optimizer = compiled(reader), torch.optim.Adamax(reader.parameters(), 1e-2)
    trees = [Tree(Tree(1, 2), 3), Tree(4, Tree(Tree(5, 6), Tree(7, 8))), Tree(1, 1)]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(net(trees), torch.tensor([0, 1, 0])).backward()
        optimizer.step()
    return trained(reader, net(trees).argmax(1))
