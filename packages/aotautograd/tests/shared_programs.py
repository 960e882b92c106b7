"""Random programs of pairs of equal, shared and viewed expressions, and who owns the memory of what they give.

What is compared with eager: which results, gradients and written inputs lie in one storage and where they meet, what a
write to one of them does to the others, and what accumulation, clipping and unscaling make of the gradients.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = list[torch.Tensor]
SHAPES = ((2, 2), (4,), (2, 2), (4,), (2, 2))
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b.reshape(a.shape),
    "sub": lambda a, b: a - b.view(a.shape),
    "mul": lambda a, b: a * b.reshape(a.shape),
    "sin": lambda a, b: a.sin(),
    "square": lambda a, b: a * a,
    "flat": lambda a, b: a.view(4),
    "square_shape": lambda a, b: a.view(2, 2),
    "transposed": lambda a, b: a.view(2, 2).t(),
    "row": lambda a, b: a.view(2, 2)[0].repeat(2),
    "halves": lambda a, b: torch.cat(a.view(4).split(2)[::-1]),
    "sum": lambda a, b: a.sum() + b,
    "expanded": lambda a, b: a.sum().expand(2, 2) + b.view(2, 2),
    "matmul": lambda a, b: a.reshape(2, 2) @ b.reshape(2, 2),
    "linear": lambda a, b: torch.nn.functional.linear(a.reshape(2, 2), b.reshape(2, 2), a.reshape(4)[:2]),
    "cloned": lambda a, b: a.clone(),
    "detached": lambda a, b: a.detach() + b.view(a.shape),
    "same": lambda a, b: a.view_as(a),
    "kept": lambda a, b: Kept.apply(a),
    "swapped": lambda a, b: Swapped.apply(a, b.reshape(a.shape)),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "none": lambda a, b: None,
    "buffer_add": lambda a, b: a.add_(1),
    "buffer_copy": lambda a, b: a.copy_(b.detach().reshape(a.shape)),
    "buffer_row": lambda a, b: a.view(4)[:2].mul_(2),
}


class Kept(torch.autograd.Function):
    """Saves its result, and gives the gradient as it came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g


class Swapped(torch.autograd.Function):
    """Gives a view of the gradient to one, and what is made of it to the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y.flip(0)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g.view_as(g), g.flip(0)


@dataclass(frozen=True)
class Step:
    name: str
    a: int
    b: int


@dataclass(frozen=True)
class SharedProgram:
    """`inputs` are five parameters and one buffer; the results are values and, at times, one of them twice."""

    steps: tuple[Step, ...]
    write: Step
    outputs: tuple[int, ...]
    non_leaf: bool  # the parameters come through an operator

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        *values, buffer = inputs
        for step in self.steps:
            a, b = values[step.a % len(values)], values[step.b % len(values)]
            values.append(STEPS[step.name](a if a.numel() == 4 else a.expand(2, 2).contiguous(), b))
        with torch.no_grad():
            WRITES[self.write.name](buffer, values[self.write.b % len(values)])
        return [values[i % len(values)] for i in self.outputs]


def draw(seed: int) -> SharedProgram:
    """Equal steps and equal operands are likely."""
    chance = random.Random(seed)
    names = chance.sample(sorted(STEPS), 4)
    steps: list[Step] = []
    for _ in range(chance.randint(1, 6)):
        if steps and chance.random() < 0.25:
            steps.append(chance.choice(steps))
        else:
            steps.append(Step(chance.choice(names), chance.randrange(8), chance.randrange(8)))
    newest = len(SHAPES) + len(steps) - 1
    outputs = tuple(newest - chance.randrange(min(len(steps), 3)) for _ in range(chance.randint(1, 3)))
    write = Step(chance.choice(sorted(WRITES)), 0, chance.randrange(8))
    return SharedProgram(tuple(steps), write, outputs, chance.random() < 0.25)


def make_inputs(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.rand(s, dtype=torch.float64, generator=generator).requires_grad_() for s in SHAPES]
    return [*parameters, torch.rand(4, dtype=torch.float64, generator=generator)]


def relation(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int, str]]:
    """Which of the tensors are one object, or lie in one storage, and whether they meet there."""
    found: list[tuple[int, int, str]] = []
    for (i, a), (j, b) in itertools.combinations(enumerate(tensors), 2):
        if a is None or b is None:
            continue
        if a is b:
            found.append((i, j, "same object"))
        elif a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
            found.append((i, j, "meet" if places(a) & places(b) else "apart"))
    return found


def places(t: torch.Tensor) -> set[int]:
    everything = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    return set(everything.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def observe(program: Callable[..., Tensors], drawn: SharedProgram, seed: int) -> dict[str, Any]:
    """What a training script sees of some steps with the program."""
    seen: dict[str, Any] = {}
    *parameters, buffer = make_inputs(seed)

    def run() -> tuple[Tensors, torch.Tensor]:
        given = [p * 1 for p in parameters] if drawn.non_leaf else parameters
        outputs = program(*given, buffer)
        needing = {id(o): o for o in outputs if o.requires_grad}.values()
        return outputs, sum((o.sin().sum() for o in needing), torch.zeros((), dtype=torch.float64))

    def note(name: str, outputs: Tensors = ()) -> None:  # type: ignore[assignment]
        gradients = [p.grad for p in parameters]
        tensors = [*outputs, *gradients, *parameters, buffer]
        seen[f"{name}: aliases"] = relation(tensors)
        seen[f"{name}: values"] = [None if t is None else t.detach().clone() for t in tensors]

    outputs, loss = run()
    if not loss.requires_grad:
        return {"outputs": [o.detach().clone() for o in outputs], "aliases": relation([*outputs, *parameters, buffer])}
    loss.backward()
    note("first backward", outputs)
    outputs, loss = run()
    loss.backward(retain_graph=True)
    loss.backward()
    note("accumulated", outputs)
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    note("clipped by norm")
    torch.nn.utils.clip_grad_value_(parameters, 0.1)
    note("clipped by value")
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(0.5)  # what unscaling does
    note("unscaled")
    for p in parameters:
        p.grad = None
    outputs, loss = run()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    seen["asked: aliases"] = relation([*outputs, *gradients])
    seen["asked: values"] = [None if g is None else g.clone() for g in gradients]
    for some in _some_of(len(outputs)):
        for p in parameters:  # what is added to gradients that share memory in eager alone would differ
            p.grad = None
        outputs, _ = run()
        chosen = [outputs[i] for i in some if outputs[i].requires_grad]
        if chosen:
            tangents = [torch.ones_like(o) for o in chosen]
            torch.autograd.backward(chosen, tangents, retain_graph=True)
            note(f"of outputs {some}", [*tangents, *outputs])
            gradients = torch.autograd.grad(chosen, parameters, tangents, allow_unused=True)
            seen[f"of outputs {some}, asked: aliases"] = relation([*tangents, *outputs, *gradients])
            seen[f"of outputs {some}, asked: values"] = [None if g is None else g.clone() for g in gradients]
    for p in parameters:
        p.grad = None
    with torch.no_grad():
        outputs, _ = run()
        distinct = {id(o): o for o in outputs}.values()
        for number, output in enumerate(distinct):
            if not any(output is p for p in parameters):
                output.add_(number + 1) if not _overlaps(output) else None
    note("written", outputs)
    return seen


def _some_of(count: int) -> list[tuple[int, ...]]:
    """The places of one output, and of two."""
    return [some for number in (1, 2) for some in itertools.combinations(range(count), number)]


def _overlaps(t: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))


def _sharing(related: Sequence[tuple[int, int, str]]) -> set[tuple[int, int, bool]]:
    """Whether it is one object or a view is left out: a view of all of a tensor is no operation."""
    return {(i, j, how == "apart") for i, j, how in related}


def differences(eager: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The first observations that differ."""
    found: list[str] = []
    for name, expected in eager.items():
        got = ours.get(name)
        if name.endswith("values") or name == "outputs":
            alike = len(expected) == len(got) and all(
                (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-12))
                for a, b in zip(expected, got, strict=True)
            )
        elif name.startswith("of outputs "):  # who shares is known of the backward of all: never more than in eager
            alike = got is not None and _sharing(got) <= _sharing(expected)
        else:
            alike = expected == got
        if not alike:
            found.append(f"{name}: {got} instead of {expected}")
    return found
