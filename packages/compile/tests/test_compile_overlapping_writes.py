"""Writes to inputs whose elements share memory: what is read behind a write sees it, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchcompile
import torchdynamo

pytestmark = pytest.mark.warm

Tensor = torch.Tensor

INPUTS: dict[str, Callable[[], Tensor]] = {
    "expanded rows": lambda: torch.arange(4.0).expand(3, 4),
    "expanded columns": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "one element": lambda: torch.ones(1, 1).expand(3, 4),
    "windows": lambda: torch.arange(6.0).unfold(0, 4, 1),
    "windows of rows": lambda: torch.arange(12.0).view(3, 4).unfold(1, 2, 1).reshape(3, 3, 2)[:, :2].flatten(1),
    "as_strided": lambda: torch.arange(8.0).as_strided((3, 4), (2, 1)),
    "windows, turned": lambda: torch.arange(6.0).unfold(0, 3, 1).t(),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda x: x.zero_(),
    "add_": lambda x: x.add_(1),
    "a row": lambda x: x[0].fill_(2),
    "rows": lambda x: x[:1].mul_(3),
    "an element": lambda x: x.__setitem__((1, 1), 9.0),
    "a row by another": lambda x: x[1].copy_(x[2] * 2),
    "row by row": lambda x: [row.mul_(2) for row in x.unbind()],
    "a mask": lambda x: x[1].masked_fill_(x[1] > 1, -1.0),
}


@pytest.mark.expected_eager(...)
@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", INPUTS)
def test_writes_are_read_where_they_lie(name: str, write: str, backend: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x.sum(0)
        WRITES[write](x)
        return before, x * 2

    def run(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[object]:
        found: list[object] = []
        for _ in range(2):
            x = INPUTS[name]()
            try:
                found += [t.clone() for t in call(x)]
            except RuntimeError as error:
                found.append(str(error).partition("\n")[0])
            found.append(x.clone())
        return found

    wanted, got = run(program), run(torchcompile.compile(program, backend=backend))
    assert [a if isinstance(a, str) else a.tolist() for a in got] == [  # type: ignore[attr-defined]
        a if isinstance(a, str) else a.tolist()  # type: ignore[attr-defined]
        for a in wanted
    ]


def test_such_a_write_is_told() -> None:
    def program(x: Tensor) -> Tensor:
        x[0].fill_(2)
        return x * 2

    with pytest.raises(torchdynamo.Unsupported, match="which overlaps itself"):
        torchcompile.compile(program, fullgraph=True)(torch.arange(6.0).unfold(0, 3, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_gaps_and_turned_dims_are_no_overlap(dynamic: bool) -> None:
    def program(x: Tensor) -> Tensor:
        x[0].mul_(2)
        return x + 1

    compiled = torchcompile.compile(program, fullgraph=True, dynamic=dynamic)
    for make in (
        lambda: torch.arange(24.0).view(4, 6)[:, ::2],
        lambda: torch.arange(24.0).view(4, 6).t()[::2],
        lambda: torch.arange(24.0).view(2, 3, 4).permute(1, 2, 0),
        lambda: torch.arange(12.0).view(3, 4)[:, :1].expand(3, 1),
    ):
        ours, eager = make(), make()
        torch.testing.assert_close(compiled(ours), program(eager))
        torch.testing.assert_close(ours, eager)
