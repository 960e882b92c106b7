"""Attention whose scores the program computes on: an operator over the graphs of its functions.

`FlexAttention` holds what the program does to a score and which scores it leaves out, as graphs of 0-d tensors: one
score, its batch, head, query and key. A back end makes one kernel around them; a call in Python computes all scores.
Tables of blocks say which tiles of scores need not be looked at; they repeat what the mask says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from primtorch.ambient import autocast_state
from primtorch.body_transforms import Pullback
from primtorch.errors import NoDerivative
from primtorch.frozen import record
from primtorch.higher_order import Body, Derivative, HigherOrder, Values
from primtorch.layout import iterator_like
from primtorch.spec import Size, TensorSpec, spec_of

POSITION = torch.int32  # the type of a batch, head, query and key in the functions
POSITIONS = 4


@record
class BlockTables:
    """Which tiles of scores are looked at: tables among the operands.

    For each row of tiles the number of tiles that the mask cuts, and their places; then, where `full`, the same of
    tiles that it leaves whole; then, where `by_keys`, all of this for columns of tiles.

    Attributes:
        queries, keys: the size of a tile.
    """

    queries: int
    keys: int
    full: bool
    by_keys: bool

    @property
    def by_rows(self) -> int:
        """How many tables are for rows of tiles."""
        return 4 if self.full else 2

    @property
    def count(self) -> int:
        """How many tables there are."""
        return self.by_rows * (2 if self.by_keys else 1)


@record
class AttentionParts:
    """The operands of a call by what they are for."""

    numbers: Values
    query: Any
    key: Any
    value: Any
    tables: Values
    captured: Values


@dataclass(frozen=True, eq=False, repr=False)
class FlexAttention(HigherOrder):
    """softmax(mask(score(scale * query @ key^T))) @ value, and the logarithm of the sum of the exponentials.

    Operands: numbers, query, key, value, the tables, what the functions close over. A function takes the numbers, what
    is closed over, then the score (the mask does not) and its four positions. Several heads of the query may
    share one of the keys. A query all of whose scores are left out has the result zero, and -inf.
    """

    scale: float = field(kw_only=True)
    modifies: bool = field(kw_only=True)
    masks: bool = field(kw_only=True)
    tables: BlockTables | None = field(default=None, kw_only=True)

    name = "flex_attention"
    keeps_results = True

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        """Which functions there are."""
        return (*(("score",) if self.modifies else ()), *(("mask",) if self.masks else ()))

    @property
    def score(self) -> Body | None:
        """What is done to a score."""
        return self.bodies[0] if self.modifies else None

    @property
    def mask(self) -> Body | None:
        """Whether a score counts."""
        return self.bodies[int(self.modifies)] if self.masks else None

    def parts(self, operands: Sequence[object]) -> AttentionParts:
        """The operands by what they are for."""
        first = self.sizes + 3
        last = first + (0 if self.tables is None else self.tables.count)
        given = tuple(operands)
        query, key, value = given[self.sizes : first]
        return AttentionParts(given[: self.sizes], query, key, value, given[first:last], given[last:])

    def run(self, *operands: object) -> Values:
        runners = dict(zip(self.labels, self._runners(), strict=True))
        return dense_attention(self.parts(operands), self.scale, runners.get("score"), runners.get("mask"))

    def given(self, operands: Values) -> tuple[Values, ...]:
        parts = self.parts(operands)
        device = torch.device(parts.query.device)
        positions = (_single(POSITION, device),) * POSITIONS
        score = _single(working_dtype(parts.query.dtype), device)
        found = {"score": (*parts.captured, score, *positions), "mask": (*parts.captured, *positions)}
        return tuple(found[label] for label in self.labels)

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        parts = self.parts(operands)
        query, value = spec_of(parts.query), parts.value
        shape = (*query.shape[:3], value.shape[3])
        dtype, device = query.dtype, query.device
        rows = query.shape[:3]
        strides = (rows[1] * rows[2], rows[2], 1)
        out = TensorSpec(shape, iterator_like(shape, query.strides), dtype, device)
        return out, TensorSpec(rows, strides, working_dtype(dtype), device)

    def derivative(self, operands: Values, kept: Values, tangents: Values, needs: Sequence[bool]) -> Derivative:
        if len(tangents) != 2 or len(kept) != 2:
            raise NoDerivative(f"{self.name} has a derivative by both of its results only")
        parts = self.parts(operands)
        first = len(operands) - len(parts.captured)
        captured = self._needed(operands, needs, first)
        bodies = list(self.bodies)
        if self.score is not None:
            inputs = self.sizes + 1 + POSITIONS + len(parts.captured)
            wanted = (self.sizes + len(parts.captured), *(place - first + self.sizes for place in captured))
            bodies.append(Pullback(self.score, inputs, wanted, (True,), autocast_state()))
        places = (*(self.sizes + i for i in range(3)), *captured)
        operator = FlexAttentionDerivative(
            tuple(bodies),
            self.sizes,
            (True,) * len(places),
            attention=replace(self),
            captured=tuple(place - first for place in captured),
            again=True,
        )
        return Derivative(operator, (*operands, *kept, *tangents), places)


@dataclass(frozen=True, eq=False, repr=False)
class FlexAttentionDerivative(HigherOrder):
    """The gradients of the query, the key, the value and of what is closed over at the places `captured`.

    Operands: those of the attention, its two results, their gradients. The last body, where scores are modified, pulls
    a score's gradient back.
    """

    attention: FlexAttention = field(kw_only=True)
    captured: tuple[int, ...] = field(kw_only=True)

    name = "flex_attention_derivative"

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        """Which functions there are."""
        return (*self.attention.labels, *(("pullback",) if self.attention.modifies else ()))

    @property
    def forward(self) -> FlexAttention:
        """The attention over these bodies."""
        return replace(self.attention, bodies=self.bodies[: len(self.attention.labels)], sizes=self.sizes)

    @property
    def pullback(self) -> Body | None:
        """A score's gradient: (what the score's function takes, the gradient of what it gives) -> gradients."""
        return self.bodies[-1] if self.attention.modifies else None

    def split(self, operands: Sequence[Any]) -> tuple[Values, Any, Any, Any, Any]:
        """(operands of the attention, its results, their gradients)"""
        given = tuple(operands)
        return (given[:-4], *given[-4:])

    def run(self, *operands: object) -> Values:
        given, _, _, *tangents = self.split(operands)
        attention, inputs = self.forward, list(given)
        first = self.sizes + 3 + (0 if attention.tables is None else attention.tables.count)
        wanted = [self.sizes, self.sizes + 1, self.sizes + 2, *(first + place for place in self.captured)]
        with torch.enable_grad():
            for place in wanted:
                inputs[place] = inputs[place].detach().requires_grad_()
            found = attention.run(*inputs)
            sources = [inputs[place] for place in wanted]
            pulled = torch.autograd.grad(found, sources, tangents, allow_unused=True)
        zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(sources, pulled, strict=True))
        specs = self.results(operands, ())
        return tuple(_laid_out(value, spec.strides) for value, spec in zip(zeros, specs, strict=True))

    def given(self, operands: Values) -> tuple[Values, ...]:
        found = self.forward.given(self.split(operands)[0])
        return found if self.pullback is None else (*found, (*found[0], found[0][-1 - POSITIONS]))

    def results(self, operands: Values, found: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
        parts = self.forward.parts(self.split(operands)[0])
        sources = (parts.query, parts.key, parts.value, *(parts.captured[place] for place in self.captured))
        return tuple(map(_dense, sources))


def dense_attention(
    parts: AttentionParts, scale: float, score: Callable[..., object] | None, mask: Callable[..., object] | None
) -> Values:
    """All scores at once, in their own type whatever autocast would make of it."""
    with torch.autocast(parts.query.device.type, enabled=False):
        return _dense_attention(parts, scale, score, mask)


def _dense_attention(
    parts: AttentionParts, scale: float, score: Callable[..., object] | None, mask: Callable[..., object] | None
) -> Values:
    query, key, value = parts.query, parts.key, parts.value
    dtype, batch = working_dtype(query.dtype), query.shape[0]
    heads = query.shape[1] // key.shape[1]
    key, value = (t.expand(batch, *t.shape[1:]).repeat_interleave(heads, 1).to(dtype) for t in (key, value))
    scores = query.to(dtype) @ key.transpose(-2, -1) * scale
    places = [torch.arange(size, dtype=POSITION, device=query.device) for size in scores.shape]
    if score is not None:
        scores = _over_positions(score, parts, 1)(scores, *places).to(dtype)
    if mask is not None:
        kept = _over_positions(mask, parts, 0)(*places)
        scores = torch.where(kept, scores, -math.inf)
    highest = scores.detach().amax(-1, keepdim=True)
    highest = torch.where(highest == -math.inf, 0, highest)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    out = (weights / torch.where(empty, 1, total)) @ value
    lse = torch.where(empty, -math.inf, torch.where(empty, 1, total).log() + highest).squeeze(-1)
    strides = iterator_like(tuple(out.shape), tuple(query.stride()))
    return _laid_out(out.to(query.dtype), strides), lse.contiguous()


def _over_positions(function: Callable[..., Any], parts: AttentionParts, scores: int) -> Callable[..., Any]:
    """A function of one score (or of none) and its positions, as one of all scores and four lines of positions."""

    def single(*given: Any) -> object:
        return function(*parts.numbers, *parts.captured, *given)[0]

    for place in reversed(range(POSITIONS)):
        dims = (0,) * scores + tuple(0 if other == place else None for other in range(POSITIONS))
        single = torch.vmap(single, in_dims=dims)
    return single


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores of tensors of this type are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _single(dtype: torch.dtype, device: torch.device) -> TensorSpec:
    return TensorSpec((), (), dtype, device)


def _dense(value: object) -> TensorSpec:
    spec = spec_of(value)
    return TensorSpec(spec.shape, iterator_like(spec.shape, spec.strides), spec.dtype, spec.device)


def _laid_out(value: torch.Tensor, strides: Sequence[Size]) -> torch.Tensor:
    if tuple(value.stride()) == tuple(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
