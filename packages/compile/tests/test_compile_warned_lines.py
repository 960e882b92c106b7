"""A warning of the compiler's names a line of the user's, before and behind a break."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchcompile
from torchinductor.codegen.cpp.backend import CppBackend


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("breaks", [0, 1, 2])
def test_a_graph_that_is_not_compiled_is_told_at_a_line_of_the_program(
    breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *args: Any) -> Any:
        raise NotImplementedError("planted")

    def called(x: torch.Tensor) -> torch.Tensor:
        for _ in range(breaks):
            torchcompile.graph_break()
        return x.sin().cos()

    monkeypatch.setattr(CppBackend, "generate", fails)
    compiled, x = torchcompile.compile(called, options={"cache": None, "strict": False}), torch.randn(7)
    with pytest.warns(UserWarning, match="planted") as told:
        torch.testing.assert_close(compiled(x), called(x))
    assert {warning.filename for warning in told if "planted" in str(warning.message)} == {__file__}
