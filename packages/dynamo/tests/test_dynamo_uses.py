"""What stands in for a number, a text or a tensor of each call is used as the real one is, by code that handles errors.

A number is one of each call where it is taken out of a tensor, is an argument that has changed, or a size. C code refuses
symbols with errors of many types, and a program that handles errors is to see none of those; what stands in for a value
has no name of its own that a program could read. A run draws some of the uses, `ALL_USES=1 pytest ...` takes all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from use_programs import LISTS, NUMBERS, TENSORS, TEXTS

import torchdynamo
from primtorch.fake import FakeTensor

KINDS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], tuple[Any, ...]]] = {
    "int out of a tensor": (lambda x, n: int(x.sum().item()) % 3 + n, (2, 3, 4, 1)),
    "float out of a tensor": (lambda x, n: x.sum().item() + n, (2, 3.5, 4, 1)),
    "int": (lambda x, n: n + 0, (2, 3, 4, 1)),
    "float": (lambda x, n: n + 0, (2.0, 3.5, 4.0, 1.25)),
    "size": (lambda x, n: x.shape[0], (2, 3, 4, 5)),
}


def drawn(uses: dict[str, Callable[[Any], Any]]) -> list[tuple[str, Callable[[Any], Any]]]:
    return list(uses.items()) if os.environ.get("ALL_USES") else random.sample(list(uses.items()), len(uses) // 4)


def _backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    return graph.forward


@pytest.mark.parametrize("kind", KINDS)
def test_what_python_does_with_a_number(kind: str) -> None:
    number, values = KINDS[kind]
    wrong = []
    for name, use in drawn(NUMBERS):

        def program(x: torch.Tensor, n: Any) -> Any:
            n = number(x, n)
            try:
                return x * 2, use(n)
            except Exception as error:
                return x * 3, type(error), str(error)

        options = torchdynamo.CaptureOptions(strict=True, dynamic=True if kind == "size" else None)
        compiled = torchdynamo.optimize(_backend, options=options)(program)
        for n in values:
            x = torch.arange(float(n if kind == "size" else 3)) % (3 if n != 4 else 7)
            expected, found = repr(program(x, n)), repr(compiled(x, n))
            if found != expected:
                wrong.append((name, n, expected, found))
                break
    assert not wrong


@pytest.mark.parametrize("kind", ["argument", "made", "parameter"])
def test_what_python_does_with_a_tensor(kind: str) -> None:
    """Also what eager refuses: an error's words are eager's where the program reads them."""
    wrong = []
    for name, use in drawn(TENSORS):

        def program(x: torch.Tensor) -> Any:
            try:
                return x * 2, use(x + 1 if kind == "made" else x)
            except Exception as error:
                return x * 3, type(error), str(error)

        compiled = torchdynamo.optimize(_backend, options=torchdynamo.CaptureOptions(strict=True))(program)
        for _ in range(2):
            tensors = [torch.arange(6.0).view(3, 2) for _ in range(2)]
            x, y = map(torch.nn.Parameter, tensors) if kind == "parameter" else tensors
            expected, found = repr(program(x)), repr(compiled(y))
            if found != expected:
                wrong.append((name, expected, found))
                break
    assert not wrong


def test_attributes_of_a_tensor_across_a_break() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x + 1
        y.note = 3  # type: ignore[attr-defined]
        print(end="")
        held = vars(y)
        held["other"] = 4
        return held["note"], y.other, x.t()._base is x, y  # type: ignore[attr-defined]

    compiled = torchdynamo.optimize(_backend, options=torchdynamo.CaptureOptions(strict=True))(program)
    for x in (torch.ones(2, 2), torch.ones(4).view(2, 2)):
        *found, y = compiled(x)
        assert (*found, vars(y)) == (3, 4, x._base is None, {"note": 3, "other": 4})


def test_what_stands_in_for_a_tensor_has_no_names_of_its_own() -> None:
    own = sorted(set(dir(FakeTensor)) - set(dir(torch.Tensor)))

    def program(x: torch.Tensor) -> Any:
        y, told = x + 1, []
        for tensor in (x, y):
            for name in ("absent", *own):
                try:
                    told.append(getattr(tensor, name))
                except AttributeError as error:
                    told.append((str(error), error.name, error.obj is tensor, hasattr(tensor, name)))
        return y, told

    compiled = torchdynamo.optimize(_backend, options=torchdynamo.CaptureOptions(strict=True))(program)
    for x in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert repr(compiled(x)) == repr(program(x))


@pytest.mark.parametrize("taken", [False, True])
def test_what_python_does_with_a_text(taken: bool) -> None:
    wrong = []
    for name, use in drawn(TEXTS):

        def program(x: torch.Tensor, n: Any) -> Any:
            text = f"{int(x.sum().item()) % 5 + n if taken else n + 0}-a"
            try:
                return x * 2, use(text)
            except Exception as error:
                return x * 3, type(error), str(error)

        compiled = torchdynamo.optimize(_backend, options=torchdynamo.CaptureOptions(strict=True))(program)
        for n in (2, 3, 4, 2):
            x = torch.tensor([0.0, 1.0, 1.0])
            expected, found = repr(program(x, n)), repr(compiled(x, n))
            if found != expected:
                wrong.append((name, n, expected, found))
                break
    assert not wrong


def test_what_python_does_with_a_list_that_grows() -> None:
    wrong = []
    for name, use in LISTS.items():

        def program(x: torch.Tensor, items: list[Any]) -> Any:
            items.append(len(items))
            try:
                return x * 2, use(items)
            except Exception as error:
                return x * 3, type(error), str(error)

        compiled = torchdynamo.optimize(_backend, options=torchdynamo.CaptureOptions(strict=True))(program)
        kept: tuple[list[Any], list[Any]] = ([1, 2, 3], [1, 2, 3])
        for call in range(5):
            x = torch.tensor([0.0, 1.0, 1.0])
            expected, found = repr((program(x, kept[0]), kept[0])), repr((compiled(x, kept[1]), kept[1]))
            if found != expected:
                wrong.append((name, call, expected, found))
                break
    assert not wrong
