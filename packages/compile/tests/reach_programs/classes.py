"""Classes that the program makes, and modules that make themselves."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import nn

from .record import PYTHON, Program, maker, part


@part(PYTHON, "dataclasses, named tuples, enums")
def records(x: torch.Tensor) -> Any:
    @dataclasses.dataclass
    class State:
        value: torch.Tensor
        scale: float = 2.0

    class Two(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    class Mode(enum.Enum):
        PLAIN = 1
        DOUBLE = 2

    state = dataclasses.replace(State(x), scale=3.0)
    pair = Two(state.value * state.scale, x)
    return pair.a * Mode.DOUBLE.value + pair.b


@part(PYTHON, "an enum made within")
def enumerated(x: torch.Tensor) -> Any:
    class Mode(enum.Enum):
        PLAIN = 1
        DOUBLE = 2

    return x * Mode.DOUBLE.value, Mode(1).name == "PLAIN"


@part(PYTHON, "an enum of flags, and one of texts, made within")
def flags(x: torch.Tensor) -> Any:
    class Flags(enum.IntFlag):
        A = 1
        B = 2

    class Names(str, enum.Enum):  # noqa: UP042 (another base, another metaclass's work)
        FIRST = "first"

    return x * int(Flags.A | Flags.B), Names("first").name == "FIRST"


@maker(PYTHON, "lazy modules", gradient=False)
def lazy() -> Program:
    torch.manual_seed(3)
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU()).double()
    return lambda x: net(x).shape[1] * x
