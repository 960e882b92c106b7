"""A value that is the conversion of a narrower one takes that one's memory, and readers convert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import primtorch
from primtorch.testing import assert_as_accurate
from torchinductor import InductorOptions, compile_graph
from torchinductor.ir import Kernel
from torchinductor.source import planned_operations

Program = Callable[..., object]
NARROW = (torch.bfloat16, torch.float16, torch.int8, torch.bool)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers > 0 if dtype is torch.bool else (numbers * 3).to(dtype)


def chosen(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What is dear enough to be stored: several loads."""
    return torch.where(a > b, a & b if a.dtype is torch.bool else a + b, b)


def read_twice(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = chosen(a, b).float()
    return wide.sum(0), (wide * wide).sum(1)


def read_from_a_view(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = chosen(a, b).float().t()
    return wide.sum(0), (wide * wide).sum(1)


def read_at_places(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = chosen(a, b).float().exp()
    return wide[torch.arange(len(a)).flip(0)].sum(1), wide.sum(0)


def returned(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = chosen(a, b).float()
    return wide, wide.sum(0)


def returned_as_a_view(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = chosen(a, b).float()
    return wide.t(), wide.sum(0)


def multiplied(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = chosen(a, b).float()
    return wide @ wide.t(), wide.sum(0)


def traced(program: Program, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return primtorch.lower(primtorch.trace(program, *inputs))


def stored(gm: torch.fx.GraphModule, device: str, options: InductorOptions) -> list[torch.dtype]:
    """The dtypes of matrices that kernels store for others or for the caller."""
    found: dict[str, torch.dtype] = {}
    for operation in planned_operations(gm, device, options):
        if isinstance(operation, Kernel):
            buffers = (operation.buffers[name] for name in set(operation.writes) - operation.local)
            found |= {b.name: b.dtype for b in buffers if {str(size) for size in b.shape} == {"120", "130"}}
    return list(found.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("program", [read_twice, read_from_a_view])
def test_the_narrower_value_is_stored(program: Program, dtype: torch.dtype, device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    inputs = [filled((120, 130), dtype, seed) for seed in (0, 1)]
    gm = traced(program, *inputs)
    assert stored(gm, device, InductorOptions(fuse=False)) == [dtype]
    assert set(stored(gm, device, InductorOptions())) <= {dtype}


@pytest.mark.parametrize("program", [returned, returned_as_a_view, multiplied])
def test_who_wants_the_value_itself_gets_it_stored_once(program: Program) -> None:
    inputs = [filled((120, 130), torch.bfloat16, seed) for seed in (0, 1)]
    assert stored(traced(program, *inputs), "cpu", InductorOptions(fuse=False)) == [torch.float32]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "program", [read_twice, read_from_a_view, read_at_places, returned, returned_as_a_view, multiplied]
)
@pytest.mark.parametrize(("shape", "rounds"), [((33, 47), False), ((33, 47), True), ((0, 4), False)])
def test_values(program: Program, dtype: torch.dtype, shape: tuple[int, int], rounds: bool) -> None:
    inputs = [filled(shape, dtype, seed) for seed in (2, 3)]
    compiled = compile_graph(traced(program, *inputs), inputs, InductorOptions(round_like_eager=rounds))
    exact = [t.double() if t.is_floating_point() else t for t in inputs]
    assert_as_accurate(compiled(*inputs), list(program(*inputs)), list(program(*exact)))


def test_a_stored_sum_is_loaded_where_its_parts_would_be_loaded_again() -> None:
    """Passes over rows that no program holds: the second reads one value in the place of three."""
    pytest.importorskip("triton")

    def program(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = parts[0] + parts[1] + parts[2]
        wide = total.float()
        return total, wide - wide.mean((0, 2), keepdim=True)

    for rows, again in ((4096, False), (16, True)):
        parts = [torch.empty(64, 8, rows, dtype=torch.bfloat16) for _ in range(3)]
        stages = [
            stage.body
            for operation in planned_operations(traced(program, *parts), "cuda")
            for stage in operation.stages  # type: ignore[union-attr]
        ]
        readers = [sum(name.startswith("in_") for name in body.reads) for body in stages]
        assert readers.count(3) == 1 + again and sum(readers) == 3 * (1 + again), readers
