"""Sums of columns in the kernels that go through the rows: when they are made there, and that they are right."""

from __future__ import annotations

import pytest
import torch
from column_cases import CASES, normalise_sum, share_and_sum
from device_cases import activate_and_share, gradients, normalise
from interpreted import replies

import primtorch
from primtorch.testing.accuracy import SUMMED
from torchinductor.cost import traffic_of
from torchinductor.ir import Kernel
from torchinductor.source import planned_operations

pytest.importorskip("triton")

from torchinductor.codegen.triton.plan import Layout, walk_parts, walk_rows  # noqa: E402

BF16 = torch.bfloat16


def planned(program, *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Kernel]:  # type: ignore[no-untyped-def]
    """The kernels of a program for a GPU."""
    inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
    found = planned_operations(primtorch.lower(primtorch.trace(program, *inputs)), "cuda")
    assert all(isinstance(o, Kernel) for o in found)
    return found  # type: ignore[return-value]


def walks(kernels: list[Kernel]) -> int:
    return sum(kernel.laid_out(Layout).walk is not None for kernel in kernels)


def norm(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    return (rows, columns), (columns,), (columns,), (rows, columns)


def test_a_norm_and_its_gradients_read_their_operands_once() -> None:
    rows, columns = 8192, 1024
    kernels = planned(gradients(normalise), *norm(rows, columns))
    assert (len(kernels), walks(kernels)) == (2, 1)
    parts = walk_parts(rows, columns)
    partial = 2 * 2 * parts * columns * 4  # two sums, written and read
    moved = (4 * rows + 4) * columns * 2 + partial  # x, its gradient, the result, the result's gradient
    assert traffic_of(kernels).moved == moved


def test_what_a_block_ends_in_is_one_kernel_too() -> None:
    """Three sums of columns: of the norm's weight, its shift, and of a bias in front of it."""
    kernels = planned(gradients(normalise_sum), (4096, 768), (4096, 768), (768,), (768,), (768,), (4096, 768))
    assert (len(kernels), walks(kernels)) == (2, 1)


def test_sums_of_what_is_stored_are_made_where_it_is_stored() -> None:
    kernels = planned(share_and_sum, (8192, 512), (8192, 512))
    assert (len(kernels), walks(kernels)) == (2, 1)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (64, 1024),  # too few for programs that take many
        (2048, 64),  # so little that a second look costs nothing
        (4096, 20000),  # no registers hold the sums of so many columns
    ],
)
def test_other_sums_are_kernels_of_their_own(rows: int, columns: int) -> None:
    assert walks(planned(gradients(normalise), *norm(rows, columns))) == 0


def test_what_computes_much_has_more_threads() -> None:
    def warps(program, *shapes: tuple[int, ...]) -> int:  # type: ignore[no-untyped-def]
        layouts = [kernel.laid_out(Layout) for kernel in planned(gradients(program), *shapes)]
        (walk,) = (layout for layout in layouts if layout.walk is not None)
        return walk.warps

    shapes = (8192, 1024), (1024,), (1024,), (8192, 1024)
    assert warps(activate_and_share, *shapes) > warps(normalise, *shapes)


def test_random_numbers_are_not_made_by_few_programs() -> None:
    def dropped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return normalise(torch.nn.functional.dropout(x, 0.5, True), weight, bias)

    inputs = [torch.empty(shape, dtype=BF16) for shape in norm(8192, 1024)]
    found = planned_operations(primtorch.lower(primtorch.trace(gradients(dropped), *inputs)), "cuda")
    assert walks([operation for operation in found if isinstance(operation, Kernel)]) == 0


def test_rows_and_columns_of_a_square_are_told_apart() -> None:
    """As many rows as columns: a kernel of rows never walks down the columns."""
    for size in (256, 4096):
        kernels = planned(lambda x: (x - x.mean(1, keepdim=True), x.sum(0)), (size, size))
        for kernel in kernels:
            layout = kernel.laid_out(Layout)
            for op in (op for stage in kernel.stages if stage.kind == "inner" for op in stage.body.accesses):
                if len(op.index.symbols()) == 2 and layout.x_block == 1:
                    assert layout.r[-1].name in [f[0].name for f, c in op.index.ordered_terms() if f and c == 1], kernel


def test_programs_have_work() -> None:
    assert walk_parts(None, 1024) >= walk_parts(1 << 20, 1024) >= walk_parts(8192, 1024) >= 1
    for columns in (32, 768, 1024, 8192):
        assert walk_parts(2048, columns) * walk_rows(columns) <= 2048


def test_values_in_the_interpreter() -> None:
    names = [*CASES, "any number of rows"]
    found = replies("columns_worker.py", *names)
    assert [r["case"] for r in found] == names
    for reply in found:
        assert "failure" not in reply, reply["failure"]
        assert reply["walks"] == 1, reply
        dtype = CASES[reply["case"]].dtype if reply["case"] in CASES else torch.float32
        ulps = SUMMED if dtype == torch.float64 else 1  # of which eager is its own judge
        assert reply["error"] <= 2 * reply["eager"] + ulps * torch.finfo(dtype).eps, reply
