"""Texts that C code makes of what holds a tensor: eager's, never of what stands in for it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo

TEXTS: dict[str, Callable[[torch.Tensor], str]] = {
    "percent": lambda y: "%s" % (y,),  # noqa: UP031
    "format": lambda y: "{}".format(y),  # noqa: UP032
    "format of a list": lambda y: "{}".format([y]),  # noqa: UP032
    "f-string": lambda y: f"{[y]!r:>40}",
    "list": lambda y: str([y]),
    "dict": lambda y: repr({"y": (y,)}),
    "partial": lambda y: repr(functools.partial(torch.add, y)),
    "exception": lambda y: f"{ValueError(y)} {ValueError(1, y)!r}",
    "slice": lambda y: repr(slice(y, None)),
    "method": lambda y: repr(y.sin),
    "methods": lambda y: f"{y.__add__} {[y.cos]}",
    "metadata": lambda y: f"{y.shape} {y.dtype} {type(y)} {y.stride()}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_eagers(name: str) -> None:
    def program(x: torch.Tensor) -> tuple[str, torch.Tensor]:
        y = x * 2
        return TEXTS[name](y), y + 1

    compiled = torchdynamo.optimize(lambda graph, inputs: graph)(program)
    for x in (torch.ones(2), torch.zeros(2)):
        (found, value), (expected, eager) = compiled(x), program(x)
        assert _without_addresses(found) == _without_addresses(expected)
        assert torch.equal(value, eager)


def _without_addresses(text: Any) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)
