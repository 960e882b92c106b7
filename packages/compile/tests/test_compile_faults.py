"""`options={"verify": True}`: a compiled graph that computes something else than eager is told, with its first operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchcompile
from torchinductor.codegen.cpp.backend import CppBackend

VERIFY = {"verify": True, "cache": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).sin()
        return hidden.exp().cos().sum(-1)


def test_what_is_right_passes() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.nn.functional.dropout(x, 0.5) if x.shape[0] == 2 else x.softmax(-1)

    model, x = Net(), torch.randn(3, 6)
    torch.testing.assert_close(torchcompile.compile(model, options=VERIFY)(x), model(x))
    for rows in (2, 3):
        given = torch.ones(rows, 4)
        torchcompile.compile(writes, options=VERIFY)(given)
        assert given.eq(2).all()  # the comparison ran on copies
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    torchcompile.compile(lambda x: x.sin(), options=VERIFY)(x)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("right", "wrong", "grad", "operator"),
    [
        ("exp", "sin", False, "exp"),
        ("cos", "exp", False, "cos"),
        ("sin", "exp", False, "sin"),
        ("cos", "exp", True, "sin"),  # whose derivative it is
    ],
)
def test_the_first_wrong_operator_is_named(
    right: str, wrong: str, grad: bool, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the text of the kernels: one operation is another."""
    generate = CppBackend.generate

    def faulty(self: Any, *args: Any) -> Any:
        source = generate(self, *args)
        return type(source)(source.text.replace(f"{right}f(", f"{wrong}f("), source.meta, source.origins)

    monkeypatch.setattr(CppBackend, "generate", faulty)
    told = rf"first operator that differs is {operator} = [^\n]*\n  {__file__}"
    with torch.set_grad_enabled(grad), pytest.raises(torchcompile.WrongResult, match=told):
        torchcompile.compile(Net(), options=VERIFY)(torch.randn(3, 6))
