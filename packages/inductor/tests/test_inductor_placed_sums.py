"""Additions to few places become reductions without atomic operations on a GPU, where that pays."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import fx

import primtorch
from primtorch import prims
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv
from torchinductor.codegen.triton.plan import SHARED_ROWS, Layout
from torchinductor.ir import Kernel, Reduce, Store
from torchinductor.source import generate_source, planned_operations

pytest.importorskip("triton")

Form = Literal["added", "compared", "unrolled"]


def table_gradient(
    rows: int, columns: int, values: int, by_rows: bool, dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """A graph that adds `values` rows of `columns` to a table's `rows`; `by_rows`: as they are, not transposed."""

    def program(ids: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        added = slope if by_rows else slope.t()
        return added.new_zeros(rows, columns).index_put((ids,), added, accumulate=True)

    shape = (values, columns) if by_rows else (columns, values)
    ids, slope = torch.zeros(values, dtype=torch.int64), torch.empty(shape, dtype=dtype)
    return primtorch.lower(primtorch.trace(program, ids, slope))


def kernels(gm: fx.GraphModule, device: str = "cuda") -> list[Kernel]:
    return [k for k in planned_operations(gm, device) if isinstance(k, Kernel)]


def form(found: list[Kernel]) -> Form:
    bodies = [stage.body for kernel in found for stage in kernel.stages]
    if any(store.mode == "add" for body in bodies for store in body.of(Store)):
        return "added"
    sums = max(sum(1 for _ in body.of(Reduce)) for body in bodies)
    return "unrolled" if sums > 1 else "compared"


# (rows, columns, values, whether columns are contiguous) -> what becomes of it.
CHOICES: dict[tuple[int, int, int, bool], Form] = {
    (32, 8, 1 << 20, False): "compared",  # T5's relative positions
    (169, 4, 49 * 49, False): "compared",  # Swin's
    (169, 32, 49 * 49, False): "compared",
    (2, 768, 8192, True): "unrolled",  # BERT's types of tokens
    (4, 768, 8192, True): "unrolled",
    (64, 768, 8192, True): "added",  # each row would read all values again, though few of them meet
    (512, 768, 8192, True): "added",  # positions
    (30522, 768, 8192, True): "added",  # words
    (32, 8, 1 << 20, True): "compared",  # rows of a sector's size
    (256, 1, 1 << 20, False): "compared",  # a histogram
    (1000, 1, 1 << 20, False): "added",  # spread evenly, they hardly wait
    (100, 8192, 1024, False): "added",  # so many columns that few values meet at one time
}


@pytest.mark.parametrize("sizes", CHOICES)
def test_what_additions_become(sizes: tuple[int, int, int, bool]) -> None:
    assert form(kernels(table_gradient(*sizes))) == CHOICES[sizes]


def test_rows_share_what_they_read_of_values() -> None:
    """A program reads a value once for as many rows as its tile has, and other columns are other programs'."""
    for rows in (32, 256):
        first, _ = kernels(table_gradient(rows, 8, 1 << 20, False))
        layout = first.laid_out(Layout)
        assert layout.shared and layout.x_block == min(rows, SHARED_ROWS)
        assert [a.size.as_int() for a in layout.x] == [rows] and layout.fixed
    text = generate_source(table_gradient(169, 32, 2401, False), "cuda")
    (source,) = text.values()  # a short sum is not cut: one launch, and no zeros before it
    assert "atomic" not in source and "tl.device_assert" in source


def test_sums_of_halves_round_once() -> None:
    (kernel,) = kernels(table_gradient(7, 5, 100, False, torch.float16))
    (total,) = (op for stage in kernel.stages for op in stage.body.of(Reduce))
    assert total.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_numbers_of_any_width_are_summed_so(dtype: torch.dtype) -> None:
    assert form(kernels(table_gradient(7, 5, 100, False, dtype))) == "compared"


@pytest.mark.parametrize("sizes", [(32, 8, 1 << 16, False), (2, 768, 512, True)])
def test_a_processor_adds_in_order(sizes: tuple[int, int, int, bool]) -> None:
    assert form(kernels(table_gradient(*sizes), "cpu")) == "added"


@pytest.mark.parametrize("values", [0, 1])
def test_where_no_two_values_meet_nothing_is_compared(values: int) -> None:
    found = kernels(table_gradient(32, 8, values, False))
    assert not any(stage.body.reduces for kernel in found for stage in kernel.stages)


def test_a_number_of_values_that_is_not_known() -> None:
    size = ShapeEnv().symbol(4096, "values")
    graph = fx.Graph()
    for name, val in (
        ("size", size),
        ("ids", TensorSpec((size,), (1,), torch.int64, torch.device("cpu"))),
        ("slope", TensorSpec((size,), (1,), torch.float32, torch.device("cpu"))),
        ("table", TensorSpec((8,), (1,), torch.float32, torch.device("cpu"))),
    ):
        graph.placeholder(name).meta["val"] = val
    _, ids, slope, table = graph.nodes
    put = graph.call_function(prims.index_put, (table, (ids,), slope, True, True))
    put.meta["val"] = table.meta["val"]
    graph.output((put,))
    assert form(kernels(fx.GraphModule(torch.nn.Module(), graph))) == "added"
