"""Results that go to `out`: to a tensor that the program makes, to an input, and to an input of another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchcompile

Into = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PROGRAMS: dict[str, Into] = {
    "add": lambda x, y, out: torch.add(x, y, out=out),
    "cat": lambda x, y, out: torch.cat([x, y], out=out),
    "sum": lambda x, y, out: torch.sum(x, 0, out=out),
    "mm": lambda x, y, out: torch.mm(x, y, out=out),
    "matmul": lambda x, y, out: torch.matmul(x, y, out=out),
    "matmul: batch, matrix": lambda x, y, out: torch.matmul(x.repeat(2, 1, 1), y, out=out),
    "matmul: batch, vector": lambda x, y, out: torch.matmul(x.repeat(2, 1, 1), y[0], out=out),
    "matmul: two batch dims": lambda x, y, out: torch.matmul(x.repeat(4, 2, 1, 1), y, out=out),
    "matmul: vector": lambda x, y, out: torch.matmul(x, y[0], out=out),
    "matmul: of linalg": lambda x, y, out: torch.linalg.matmul(x.repeat(2, 1, 1), y, out=out),
    "dot": lambda x, y, out: torch.matmul(x[0], y[0], out=out),
    "linear": lambda x, y, out: torch.ops.aten.linear.out(x, y, y[0], out=out),
    "linear: batch": lambda x, y, out: torch.ops.aten.linear.out(x.repeat(2, 1, 1), y, None, out=out),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("target", ["made", "given"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_out_of_the_right_size_is_captured(name: str, target: str, dynamic: bool) -> None:
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    expected = PROGRAMS[name](x, y, torch.empty(0))
    shape = expected.shape

    def made(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return PROGRAMS[name](x, y, torch.empty(shape))

    program = made if target == "made" else PROGRAMS[name]
    out = torch.full(shape, 7.0)
    result = torchcompile.compile(program, dynamic=dynamic, fullgraph=True)(x, y, out)
    torch.testing.assert_close(result, expected)
    assert (result is out) == (target == "given")


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.expected_eager("tensor_metadata_write", "graph_raised")
@pytest.mark.parametrize("name", PROGRAMS)
def test_out_of_another_size(name: str) -> None:
    x, y, out = torch.randn(3, 3), torch.randn(3, 3), torch.empty(0)
    compiled = torchcompile.compile(PROGRAMS[name])
    for _ in range(2):
        result = compiled(x, y, out)
        torch.testing.assert_close(result, PROGRAMS[name](x, y, torch.empty(0)))
        assert result is out
