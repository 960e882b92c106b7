"""What a GPU's library is asked for where matrices are multiplied: read as it reads memory, it is the product."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path

import pytest
import torch

from torchinductor import _C

Tensor = torch.Tensor
SEED = secrets.randbelow(2**32)

LAYOUTS = ("rows", "columns", "wide rows", "wide columns", "offset", "broadcast")


def drawn(draw: torch.Generator, batch: int | None, rows: int, columns: int, layout: str) -> Tensor:
    """A float64 matrix, or a batch of them, that lies in memory as `layout` says."""
    outer = () if batch is None else (batch,)
    if layout == "broadcast":
        return torch.randn(rows, columns, generator=draw, dtype=torch.float64).expand(*outer, rows, columns)
    if layout == "offset":
        return torch.randn(*outer, rows + 2, columns, generator=draw, dtype=torch.float64)[..., 2:, :]
    margin = 3 if layout.startswith("wide") else 0
    if layout.endswith("rows"):
        return torch.randn(*outer, rows, columns + margin, generator=draw, dtype=torch.float64)[..., :columns]
    return torch.randn(*outer, columns, rows + margin, generator=draw, dtype=torch.float64).mT[..., :rows, :]


def read(tensor: Tensor, matrix: tuple[int, int, int, int, bool], batch: int) -> Tensor:
    """(batch, rows, columns) of what is multiplied, as the library reads it from a tensor's first element on."""
    rows, columns, leading, batch_stride, transposed = matrix
    assert leading >= rows
    found = tensor.as_strided((batch, rows, columns), (batch_stride, 1, leading))
    return found.mT if transposed else found


@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("sizes", [(2, 3, 4), (5, 1, 7), (8, 16, 2)])
def test_the_library_reads_the_product(batch: int | None, sizes: tuple[int, int, int]) -> None:
    draw = torch.Generator().manual_seed(SEED)
    rows, depth, columns = sizes
    for first, second in itertools.product(LAYOUTS, LAYOUTS):
        a, b = drawn(draw, batch, rows, depth, first), drawn(draw, batch, depth, columns, second)
        row = torch.randn(columns, generator=draw, dtype=torch.float64)
        whole = drawn(draw, batch, rows, columns, "wide rows")
        for added in (None, row, row.expand(*a.shape[:-1], columns), whole):
            found = _C.product_layout(a, b, added)
            where = f"seed {SEED}, {first}, {second}, {'nothing' if added is None else tuple(added.stride())}"
            assert found is not None, where
            left, right, out, matrix, is_row, count = found
            memory = torch.zeros(count * rows * columns, dtype=torch.float64)
            result = read(memory, out, count)
            result.copy_(read(b, left, count) @ read(a, right, count))
            if matrix is not None:
                assert added is whole, where
                result += read(whole, matrix, count)
            if is_row:
                assert added is not None, where
                result += row[:, None]
            truth = a @ b if added is None else a @ b + added
            torch.testing.assert_close(memory.view(truth.shape), truth, msg=lambda text, w=where: f"{w}\n{text}")


@pytest.mark.parametrize(
    ("a", "b", "added"),
    [
        (torch.ones(1, 4), torch.ones(4, 5), None),  # vectors have kernels of their own
        (torch.ones(4, 4), torch.ones(4, 1), None),
        (torch.ones(0, 4), torch.ones(4, 5), None),
        (torch.ones(3, 0), torch.ones(0, 5), None),
        (torch.ones(6, 8)[::2, ::2], torch.ones(4, 5), None),  # neither rows nor columns are dense
        (torch.ones(4, 1).expand(4, 4), torch.ones(4, 5), None),
        (torch.ones(3, 4), torch.ones(4, 5), torch.ones(5, 3).mT),  # what is added has the result's order
        (torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 1)),
        (torch.ones(3, 4), torch.ones(4, 5), torch.ones(10)[::2]),
        (torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 1, 5)),  # a row for each matrix of the batch
    ],
)
def test_what_is_left_to_aten(a: Tensor, b: Tensor, added: Tensor | None) -> None:
    assert _C.product_layout(a, b, added) is None


def test_choices_are_remembered_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "products.txt"
    first, words = _C.ProductChoices(str(path)), [2**64 - 1, *range(7)]
    first.remember("H200/a", (4096, words))
    first.remember("H200/b", None)
    other = _C.ProductChoices(str(path))
    assert other.find("H200/a") == (4096, words)
    assert other.find("H200/b") is None
    other.remember("H200/a", None)
    assert _C.ProductChoices(str(path)).find("H200/a") is None
    with pytest.raises(KeyError):
        first.find("H200/c")


def test_lines_that_are_no_choices_count_as_not_there(tmp_path: Path) -> None:
    path = tmp_path / "products.txt"
    whole = "key 64 1 2 3 4 5 6 7 8 ."
    torn = [whole[:end] for end in range(len(whole))]
    foreign = [
        "",
        "key aten",
        "key -1 x .",
        "key 64 1 2 3 4 5 6 7 8 9 .",
        "key aten . more",
        "\x00\xff",
        whole.replace("64", "6 4"),
    ]
    path.write_text("\n".join((*torn, *foreign, "other aten .")))
    choices = _C.ProductChoices(str(path))
    with pytest.raises(KeyError):
        choices.find("key")
    assert choices.find("other") is None
    missing = _C.ProductChoices(str(tmp_path / "none" / "products.txt"))
    missing.remember("key", None)  # a folder that cannot be written to
    assert missing.find("key") is None
