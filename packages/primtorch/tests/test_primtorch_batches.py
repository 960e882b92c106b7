"""Solvers of linear systems take batches that broadcast against each other: formulas say the shapes that eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from primtorch.fake import FakeMode

SOLVERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "cholesky_solve": lambda b, a: torch.cholesky_solve(b, a),
    "_linalg_solve_ex": lambda b, a: torch._linalg_solve_ex(a, b),
    "_linalg_solve_ex, from the right": lambda b, a: torch._linalg_solve_ex(a, b.mT, left=False),
    "_linalg_solve_ex of vectors": lambda b, a: torch._linalg_solve_ex(a, b.sum(-1)),
    "linalg_solve_triangular": lambda b, a: torch.linalg.solve_triangular(a, b, upper=False),
    "linalg_solve_triangular, from the right": lambda b, a: torch.linalg.solve_triangular(
        a, b.mT, upper=False, left=False
    ),
    "triangular_solve": lambda b, a: torch.triangular_solve(b, a),
    "linalg_lu_solve": lambda b, a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
    "linalg_lu_solve, from the right": lambda b, a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b.mT, left=False),
    "linalg_lstsq": lambda b, a: tuple(torch.linalg.lstsq(a, b)),
    "ormqr": lambda b, a: torch.ormqr(a, torch.ones(a.shape[:-1]), b),
}
BATCHES = [
    ((3, 2), (3, 3)),
    ((5, 3, 2), (3, 3)),
    ((3, 2), (5, 3, 3)),
    ((4, 1, 3, 2), (5, 3, 3)),
    ((5, 3, 2), (4, 1, 3, 3)),
    ((5, 3, 2), (1, 3, 3)),
    ((1, 3, 2), (5, 3, 3)),
    ((5, 3, 2), (4, 3, 3)),
    ((3, 0), (2, 3, 3)),
]


def layouts(solve: Callable[[torch.Tensor, torch.Tensor], Any], b: torch.Tensor, a: torch.Tensor) -> object:
    try:
        found = solve(b, a)
    except RuntimeError:
        return "refused"
    return [(tuple(t.shape), t.stride()) for t in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOLVERS)
def test_batches_broadcast_as_in_eager(name: str) -> None:
    for right, matrices in BATCHES:
        b, half = torch.randn(right), torch.randn(matrices)
        a = half @ half.mT + torch.eye(3)
        fake = FakeMode()
        with fake:
            found = layouts(SOLVERS[name], fake.from_tensor(b), fake.from_tensor(a))
        assert found == layouts(SOLVERS[name], b, a), (right, matrices)
