"""Names that are there at one call and not at the next: that a program found none is guarded as what it found is."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo

Program = Callable[[torch.Tensor], torch.Tensor]


def of_globals() -> Program:
    namespace: dict[str, Any] = {"__name__": "absences", "__builtins__": builtins}
    exec(
        """
def toggled(x):
    global value
    try:
        y = x + value
        del value
    except NameError:
        y, value = x, 2
    return y

def deleted(x):
    global value
    try:
        del value
        return x + 2
    except NameError:
        value = 3
        return x
""",
        namespace,
    )
    return lambda x: namespace["deleted"](namespace["toggled"](x) * 3)


def of_attributes(make: Callable[[], Any]) -> Callable[[], Program]:
    def program_of() -> Program:
        held = make()

        def toggled(x: torch.Tensor) -> torch.Tensor:
            if hasattr(held, "value"):
                x = x + held.value
                del held.value
            else:
                held.value = 2
            return x

        return toggled

    return program_of


def of_items(held: Any) -> Callable[[], Program]:
    def program_of() -> Program:
        table = held()

        def toggled(x: torch.Tensor) -> torch.Tensor:
            if "value" in table:
                x = x + table.pop("value")
            else:
                table["value"] = 2
            return x

        return toggled

    return program_of


def of_cells() -> Program:
    value: Any = 2

    def toggled(x: torch.Tensor) -> torch.Tensor:
        nonlocal value
        try:
            y = x + value
            del value
        except NameError:
            y, value = x, 3  # noqa: F841
        return y

    return toggled


class Slotted:
    __slots__ = ("value",)


class SlottedChild(Slotted):
    __slots__ = ()


HOLDERS: dict[str, Callable[[], Program]] = {
    "globals": of_globals,
    "cells": of_cells,
    "slots": of_attributes(Slotted),
    "inherited slots": of_attributes(SlottedChild),
    "attributes": of_attributes(types.SimpleNamespace),
    "attributes of a class": of_attributes(lambda: type("Holder", (), {})),
    "attributes of a module": of_attributes(nn.Module),
    "attributes of a module of Python's": of_attributes(lambda: types.ModuleType("holder")),
    "attributes of a function": of_attributes(lambda: lambda: None),
    "items": of_items(dict),
    "items of a subclass": of_items(type("Table", (dict,), {})),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_absent_may_come_and_go(name: str) -> None:
    program, x = HOLDERS[name](), torch.ones(2)
    expected = [program(x) for _ in range(6)]
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(HOLDERS[name]())
    for wanted in expected:
        assert torch.equal(compiled(x), wanted)
