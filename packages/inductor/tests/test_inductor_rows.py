"""Values that only one iteration of a kernel's outer loops needs are arrays on the stack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import primtorch
from primtorch.testing import assert_as_accurate
from torchinductor import InductorOptions, compile_graph

Program = Callable[..., torch.Tensor]

# Programs, shapes, and whether there are rows.
CASES: dict[str, tuple[Program, tuple[int, ...], bool]] = {
    "rows": (lambda x: torch.softmax(x, -1), (40, 700), True),
    "columns": (lambda x: torch.softmax(x, 0), (130, 77), True),
    "between": (lambda x: torch.softmax(x, 1), (5, 33, 70), True),
    "two dims": (lambda x: (x.exp() / x.exp().sum((0, 2), keepdim=True)).abs(), (9, 6, 50), True),
    "of a function": (lambda x: torch.softmax(F.gelu(x) * 2, -1), (3, 1030), True),
    "more than there is room for": (lambda x: torch.softmax(x, -1), (3, 70_000), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", CASES)
def test_rows(name: str, dtype: torch.dtype) -> None:
    program, shape, rows = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    compiled = compile_graph(primtorch.lower(primtorch.trace(program, x)), [x], InductorOptions())
    text = "".join(compiled.sources.values())
    assert ("aligned(64)" in text) == rows
    (found,) = compiled(x)
    assert isinstance(found, torch.Tensor)
    assert_as_accurate(found, program(x), program(x.double()))


def test_rows_take_no_memory() -> None:
    x = torch.randn(256, 1024)
    compiled = compile_graph(
        primtorch.lower(primtorch.trace(lambda x: torch.softmax(x, -1), x)), [x], InductorOptions()
    )
    assert compiled.stats.memory.peak == x.nbytes


def test_threads_have_their_own() -> None:
    x = torch.randn(512, 2048)
    compiled = compile_graph(
        primtorch.lower(primtorch.trace(lambda x: torch.softmax(x, -1), x)), [x], InductorOptions()
    )
    wanted, threads = torch.softmax(x.double(), -1), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for _ in range(5):
            torch.testing.assert_close(compiled(x)[0], wanted.float())
    finally:
        torch.set_num_threads(threads)
