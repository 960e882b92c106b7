"""Operators of somebody's own with schemas drawn at random, and programs that call them.

Every operator computes the same thing from its schema: what is read is added up, written arguments and results follow
from the sum, and each call is counted. So any schema has a kernel, a fake and (where nothing is written) a derivative.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CALLS: Counter[str] = Counter()
"""How often each kernel ran, by the operator's name."""
_numbers = itertools.count()
_library = torch.library.Library("operator_programs", "DEF")

# A parameter's type, and what a call may give for it.
READ = ("Tensor", "Tensor?", "Tensor[]")
WRITTEN = ("Tensor({}!)", "Tensor({}!)?", "Tensor({}!)[]")
NUMBERS: dict[str, Sequence[Any]] = {
    "int": (2, 3),
    "float": (0.5, -1.5),
    "bool": (True, False),
    "int[]": ([1, 2], [3]),
    "float?": (None, 2.5),
    "str": ("a", "bc"),
}


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    keyword: bool = False

    @property
    def written(self) -> bool:
        return "!" in self.type

    @property
    def is_list(self) -> bool:
        return self.type.startswith("Tensor") and self.type.endswith("[]")

    @property
    def is_optional(self) -> bool:
        return self.type.startswith("Tensor") and self.type.endswith("?")


@dataclass(frozen=True)
class Operator:
    """`results`: a number of tensors, "list" for a list, "both" for a tensor and a list, or the name of the out=
    argument that is given back."""

    name: str
    parameters: tuple[Parameter, ...]
    results: int | str

    @property
    def writes(self) -> bool:
        return any(p.written for p in self.parameters)

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.operator_programs, self.name).default

    def schema(self) -> str:
        parts = []
        for i, p in enumerate(self.parameters):
            if p.keyword and not (i and self.parameters[i - 1].keyword):
                parts.append("*")
            parts.append(f"{p.type} {p.name}")
        match self.results:
            case "list":
                returned = "Tensor[]"
            case "both":
                returned = "(Tensor, Tensor[])"
            case str():
                returned = next(p.type for p in self.parameters if p.name == self.results)
            case 1:
                returned = "Tensor"
            case count:
                returned = "(" + ", ".join(["Tensor"] * count) + ")"
        return f"{self.name}({', '.join(parts)}) -> {returned}"


def draw_operator(rng: random.Random, *, writes: bool) -> Operator:
    """A new operator, defined with its kernel, its fake and its derivative."""
    letters = iter("abcdefgh")
    kinds = ["Tensor", *rng.sample(READ, rng.randint(0, 2)), *rng.sample(sorted(NUMBERS), rng.randint(0, 3))]
    if writes:
        kinds += [kind.format(next(letters)) for kind in rng.choices(WRITTEN, k=rng.randint(1, 2))]
    rng.shuffle(kinds)
    parameters = [Parameter(f"p{i}", kind) for i, kind in enumerate(kinds)]
    results: int | str = rng.choice([0, 1, 2, 3, "list", "both"]) if writes else rng.choice([1, 2, 3, "list", "both"])
    if writes and rng.random() < 0.3:
        parameters.append(Parameter("out", f"Tensor({next(letters)}!)", keyword=True))
        results = "out"
    operator = Operator(f"op{next(_numbers)}", tuple(parameters), results)
    _library.define(operator.schema())
    _library.impl(operator.name, _kernel(operator), "CPU")
    if operator.results not in (0, "out"):
        torch.library.register_fake(f"operator_programs::{operator.name}", _fake(operator), lib=_library)
    if not writes:
        backward, setup = _derivative(operator)
        name = f"operator_programs::{operator.name}"
        torch.library.register_autograd(name, backward, setup_context=setup, lib=_library)
    return operator


def _bound(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((p.name for p in operator.parameters), args, strict=False)) | kwargs


def _tensors(operator: Operator, values: dict[str, Any], written: bool) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for p in operator.parameters:
        value = values.get(p.name)
        if p.written == written and p.type.startswith("Tensor") and value is not None:
            found += value if p.is_list else [value]
    return found


def _scale(operator: Operator, values: dict[str, Any]) -> float:
    scale = 1.0
    for p in operator.parameters:
        match values.get(p.name):
            case bool(flag):
                scale *= 2 if flag else 0.5
            case int() | float() as number:
                scale *= number
            case str(text):
                scale *= 1 + len(text)
            case [int(), *_] as numbers:
                scale *= sum(numbers)
    return scale


def _kernel(operator: Operator) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        CALLS[operator.name] += 1
        values = _bound(operator, args, kwargs)
        total = sum(_tensors(operator, values, written=False)) * _scale(operator, values)
        for place, target in enumerate(_tensors(operator, values, written=True)):
            target.mul_(place + 0.5).add_(total)
        if operator.results == "out":
            return values["out"]
        return _results(operator, [total * 1.0, total.sin(), total.cos()])

    return kernel


def _results(operator: Operator, made: Sequence[torch.Tensor]) -> Any:
    match operator.results:
        case 0:
            return None
        case 1:
            return made[0]
        case "list":
            return list(made)
        case "both":
            return made[0], list(made[1:])
        case count:
            return tuple(made[: int(count)])


def _fake(operator: Operator) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        like = _tensors(operator, _bound(operator, args, kwargs), written=False)[0]
        return _results(operator, [torch.empty_like(like) for _ in range(3)])

    return fake


def _derivative(operator: Operator) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """All read tensors have one gradient. The backward calls an operator that is counted too."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = _bound(operator, inputs, {})
        ctx.scale = _scale(operator, values)
        ctx.lists = {p.name: len(values[p.name]) for p in operator.parameters if p.is_list}
        ctx.absent = {p.name for p in operator.parameters if values.get(p.name) is None}
        ctx.save_for_backward(sum(_tensors(operator, values, written=False)))

    def backward(ctx: Any, *gradients: Any) -> Any:
        (total,) = ctx.saved_tensors
        total = total * ctx.scale
        flat = [g for part in gradients for g in (part if isinstance(part, (list, tuple)) else [part])]
        slopes = [1.0, total.cos(), -total.sin()]
        whole = sum(g * slope for g, slope in zip(flat, slopes, strict=False) if g is not None) * ctx.scale
        whole = torch.ops.operator_programs.noted(whole, operator.name)
        found: list[Any] = []
        for p in operator.parameters:
            given = p.type.startswith("Tensor") and p.name not in ctx.absent
            found.append(([whole] * ctx.lists[p.name] if p.is_list else whole) if given else None)
        return tuple(found)

    return backward, setup


def _noted(x: torch.Tensor, name: str) -> torch.Tensor:
    CALLS[f"backward of {name}"] += 1
    return x.clone()


_library.define("noted(Tensor x, str name) -> Tensor")
_library.impl("noted", _noted, "CPU")
torch.library.register_fake("operator_programs::noted", lambda x, name: torch.empty_like(x), lib=_library)


@dataclass(frozen=True)
class Call:
    """One call: what each parameter gets, as places among the values of the program."""

    operator: Operator
    given: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Program:
    """`inputs` tensors of one shape; each step makes a value of two, then calls an operator, then changes a value in
    place. Everything that was made is returned."""

    inputs: int
    calls: tuple[Call, ...]
    in_place: bool

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for number, call in enumerate(self.calls):
            values.append(values[number % len(values)] * 2 + values[-1].sin())
            targets = _targets(values[-1].detach(), inputs[0].detach() if self.in_place else None)
            args, kwargs = [], {}
            for (name, what), parameter in zip(call.given, call.operator.parameters, strict=True):
                value = _argument(parameter, what, values, targets)
                if parameter.keyword:
                    kwargs[name] = value
                else:
                    args.append(value)
            out = call.operator.overload(*args, **kwargs)
            values += targets
            for part in out if isinstance(out, (tuple, list)) else [out]:
                values += [v for v in (part if isinstance(part, (tuple, list)) else [part]) if v is not None]
            if self.in_place:
                values[-1] = values[-1] * 1.0
                values[-1].detach()[0].add_(0.25)
        return values[len(inputs) :]


def _targets(like: torch.Tensor, given: torch.Tensor | None) -> list[torch.Tensor]:
    """What an operator may write to: fresh tensors of equal values, parts of a larger one, an input."""
    both = torch.zeros(2, *like.shape, dtype=like.dtype)
    return [torch.zeros_like(like), torch.zeros_like(like), both[0], both[1], (like + 1).t().contiguous().t()] + (
        [given] if given is not None else []
    )


def _argument(parameter: Parameter, what: Any, values: list[torch.Tensor], targets: list[torch.Tensor]) -> Any:
    if not parameter.type.startswith("Tensor") or what is None:
        return what
    among = targets if parameter.written else values
    if parameter.is_list:
        return [among[place % len(among)] for place in what]
    return among[what % len(among)]


def draw_program(rng: random.Random, *, writes: bool, in_place: bool) -> Program:
    calls = []
    for _ in range(rng.randint(1, 3)):
        operator = draw_operator(rng, writes=writes and rng.random() < 0.7)
        free = rng.sample(range(6), 6)  # a target is written through one argument alone
        given: list[tuple[str, Any]] = []
        for p in operator.parameters:
            if p.is_optional and rng.random() < 0.4:
                given.append((p.name, None))
            elif p.type in NUMBERS:
                given.append((p.name, rng.choice(NUMBERS[p.type])))
            elif p.is_list:
                places = [free.pop(), free.pop()] if p.written else [rng.randrange(20), rng.randrange(20)]
                given.append((p.name, places))
            else:
                given.append((p.name, free.pop() if p.written else rng.randrange(20)))
        calls.append(Call(operator, tuple(given)))
    return Program(2, tuple(calls), in_place)
