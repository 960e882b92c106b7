"""Random operators that a recomputation repeats: the backward takes what the forward drew.

`torch.utils.checkpoint` runs its function again in the backward, with the random generator put back to where it was.
A graph has no generator to put back, so the second draw has to be the first one's value. While a program is traced
nothing is drawn, and the generator is free to count: each random operator finds it at a seed of its own and leaves it
at the next one. An operator of the backward that finds a seed of the forward's is a repetition.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

_FIRST_SEED = 0x5EED << 40


class Draws:
    """The draws of one trace. Use as a context manager around each part of it: the generator is put back at the end."""

    def __init__(self) -> None:
        self._next = _FIRST_SEED
        self._drawn: dict[int, tuple[object, int, object]] = {}  # seed before -> (operator, seed after, result)
        self._outside: list[torch.Tensor] = []

    def __enter__(self) -> Draws:
        self._outside.append(torch.default_generator.get_state())
        self._seed(self._next)
        return self

    def __exit__(self, *exc: object) -> None:
        torch.default_generator.set_state(self._outside.pop())

    def repeated(self, func: object) -> object:
        """What the forward drew where `func` is run again, or None."""
        operator, after, result = self._drawn.get(torch.default_generator.initial_seed(), (None, 0, None))
        if operator is not func:
            return None
        self._seed(after)
        return result

    def drew(self, func: object, result: object) -> None:
        """The forward ran `func`."""
        before = torch.default_generator.initial_seed()
        self._next += 1
        self._drawn[before] = (func, self._next, result)
        self._seed(self._next)

    @staticmethod
    def _seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)


NEVER, ALWAYS = -1, -2


def place_of_probability(func: OpOverload) -> int:
    """The place of an operator's `dropout_p`, without which it takes no random numbers; NEVER or ALWAYS."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return NEVER
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else ALWAYS


def draws_numbers(place: int, args: tuple[object, ...], kwargs: dict[str, object] | None) -> bool:
    """Whether a call takes random numbers, by its operator's `place_of_probability`."""
    if place < 0:
        return place == ALWAYS
    probability = args[place] if place < len(args) else (kwargs or {}).get("dropout_p", 0.0)
    return bool(probability != 0.0)
