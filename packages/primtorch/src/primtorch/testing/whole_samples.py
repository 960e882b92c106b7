"""Samples of the prims that are taken whole: linear algebra, Fourier transforms, samplers, data-dependent sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Made = tuple[tuple[Any, ...], dict[str, Any]]


def _a(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _positive(n: int = 4) -> torch.Tensor:
    m = _a(n, n)
    return m @ m.t() + n * torch.eye(n, dtype=torch.float64)


def _lu() -> tuple[torch.Tensor, torch.Tensor]:
    factors, pivots, _ = torch.linalg.lu_factor_ex(_a(4, 4))
    return factors, pivots


def _attention() -> tuple[Any, ...]:
    return tuple(torch.randn(2, 3, 8, 16) for _ in range(3))


def _attention_backward() -> list[Made]:
    q, k, v = _attention()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    return [((torch.randn_like(out), q, k, v, out, lse, 0.0, False), {})]


def _bags() -> tuple[Any, ...]:
    return torch.randn(7, 3), torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 2, 3])


def _bags_backward() -> list[Made]:
    weight, indices, offsets = _bags()
    out, bag, size, largest = aten._embedding_bag.default(weight, indices, offsets, False, 1)
    return [((torch.randn_like(out), indices, bag, size, largest, 7, False, 1, None), {})]


def _bags_weights_backward() -> list[Made]:
    weight, indices, offsets = _bags()
    out, bag, _, _ = aten._embedding_bag.default(weight, indices, offsets, False, 0, False, torch.rand(5))
    return [((torch.randn_like(out), weight, indices, offsets, bag, 0), {})]


def _ctc() -> tuple[Any, ...]:
    return torch.randn(6, 2, 4).log_softmax(2), torch.tensor([[1, 2], [3, 1]]), [6, 5], [2, 1]


def _ctc_backward() -> list[Made]:
    arguments = _ctc()
    loss, alpha = aten._ctc_loss.default(*arguments)
    return [((torch.ones_like(loss), *arguments, loss, alpha, 0), {})]


def _householder() -> tuple[torch.Tensor, torch.Tensor]:
    packed, tau = torch.geqrf(_a(5, 3))
    return packed, tau


def _ldl() -> tuple[torch.Tensor, torch.Tensor]:
    factors, pivots, _ = torch.linalg.ldl_factor_ex(_positive())
    return factors, pivots


def _grid(rank: int) -> tuple[Any, ...]:
    return torch.randn(2, 3, *(5, 6, 4)[:rank]), torch.rand(2, *(3, 4, 2)[:rank], rank) * 2 - 1


def _grid_backward(rank: int) -> list[Made]:
    image, grid = _grid(rank)
    grad = torch.randn(2, 3, *grid.shape[1:-1])
    return [((grad, image, grid, 0, 0, False, [True, True]), {})]


def _segments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 2), torch.tensor([2, 1, 3])


def _segments_backward() -> list[Made]:
    data, lengths = _segments()
    out = aten.segment_reduce.default(data, "sum", lengths=lengths)
    return [((torch.randn_like(out), out, data, "sum"), {"lengths": lengths})]


def _distances_backward() -> list[Made]:
    x, y = torch.randn(4, 3), torch.randn(5, 3)
    out = aten._cdist_forward.default(x, y, 2.0, None)
    return [((torch.randn_like(out), x, y, 2.0, out), {})]


def _pairs_backward() -> list[Made]:
    x = torch.randn(5, 3)
    out = aten._pdist_forward.default(x, 2.0)
    return [((torch.randn_like(out), x, 2.0, out), {})]


def _one(*args: object, **kwargs: object) -> list[Made]:
    return [(args, kwargs)]


WHOLE: dict[str, Callable[[], list[Made]]] = {
    "scaled_dot_product_flash_attention_for_cpu": lambda: [(_attention(), {}), ((*_attention(), 0.0, True), {})],
    "scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "linalg_det": lambda: _one(_a(2, 4, 4)),
    "linalg_slogdet": lambda: _one(_a(4, 4)),
    "linalg_lu_factor_ex": lambda: _one(_a(2, 4, 3)),
    "linalg_lu": lambda: _one(_a(4, 3)),
    "lu_unpack": lambda: _one(*_lu()),
    "linalg_lu_solve": lambda: _one(*_lu(), _a(4, 2)),
    "linalg_cholesky_ex": lambda: _one(_positive()),
    "cholesky_solve": lambda: _one(_a(4, 2), torch.linalg.cholesky(_positive())),
    "cholesky_solve_helper": lambda: _one(_a(4, 2), torch.linalg.cholesky(_positive()), False),
    "cholesky_inverse": lambda: _one(torch.linalg.cholesky(_positive())),
    "linalg_inv_ex": lambda: _one(_positive()),
    "linalg_eigh": lambda: _one(_positive()),
    "linalg_eig": lambda: _one(_a(4, 4)),
    "linalg_eigvals": lambda: _one(_a(4, 4)),
    "linalg_svd": lambda: _one(_a(4, 3)),
    "linalg_qr": lambda: _one(_a(4, 3)),
    "linalg_householder_product": lambda: _one(*_householder()),
    "ormqr": lambda: _one(*_householder(), _a(5, 2)),
    "geqrf": lambda: _one(_a(4, 3)),
    "linalg_solve_ex": lambda: _one(_positive(), _a(4, 2)),
    "linalg_solve_triangular": lambda: _one(_positive().triu(), _a(4, 2), upper=True),
    "triangular_solve": lambda: _one(_a(4, 2), _positive().triu()),
    "linalg_lstsq": lambda: _one(_a(5, 3), _a(5, 2), None, driver="gelsd"),
    "linalg_ldl_factor_ex": lambda: _one(_positive()),
    "linalg_ldl_solve": lambda: _one(*_ldl(), _a(4, 2)),
    "linalg_matrix_exp": lambda: _one(_a(3, 3)),
    "cdist_forward": lambda: _one(torch.randn(2, 4, 3), torch.randn(2, 5, 3), 2.0, None),
    "cdist_backward": _distances_backward,
    "pdist_forward": lambda: _one(torch.randn(5, 3), 2.0),
    "pdist_backward": _pairs_backward,
    "fft_r2c": lambda: [((_a(3, 8), [1], 0, True), {}), ((_a(4, 5), [0, 1], 2, False), {})],
    "fft_c2r": lambda: _one(torch.fft.rfft(_a(3, 8)), [1], 2, 8),
    "fft_c2c": lambda: [
        ((torch.complex(_a(3, 8), _a(3, 8)), [1], 0, True), {}),
        ((torch.complex(_a(4, 5), _a(4, 5)), [0, 1], 2, False), {}),
    ],
    "polygamma": lambda: _one(2, torch.rand(5, dtype=torch.float64) + 0.5),
    "grid_sampler_2d": lambda: _one(*_grid(2), 0, 0, False),
    "grid_sampler_3d": lambda: _one(*_grid(3), 0, 1, True),
    "grid_sampler_2d_backward": lambda: _grid_backward(2),
    "grid_sampler_3d_backward": lambda: _grid_backward(3),
    "embedding_bag": lambda: [((*_bags(), False, mode), {}) for mode in (0, 1, 2)],
    "embedding_bag_forward_only": lambda: [((*_bags(), False, mode), {}) for mode in (0, 1)],
    "embedding_bag_dense_backward": _bags_backward,
    "embedding_bag_per_sample_weights_backward": _bags_weights_backward,
    "ctc_loss": lambda: _one(*_ctc()),
    "ctc_loss_backward": _ctc_backward,
    "histc": lambda: _one(torch.randn(20), 5, -2, 2),
    "mode": lambda: _one(torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 1.0]]), 1, True),
    "multinomial": lambda: _one(torch.rand(2, 5), 3, False),
    "poisson": lambda: _one(torch.rand(3, 4) * 4),
    "binomial": lambda: _one(torch.full((3, 4), 6.0), torch.rand(3, 4)),
    "standard_gamma": lambda: _one(torch.rand(3, 4) + 0.5),
    "standard_gamma_grad": lambda: _one(torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.5),
    "sample_dirichlet": lambda: _one(torch.rand(3, 4) + 0.5),
    "dirichlet_grad": lambda: _one(torch.rand(3, 4) * 0.8 + 0.1, torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 2.0),
    "randperm": lambda: _one(7),
    "fractional_max_pool2d": lambda: _one(torch.randn(2, 3, 7, 8), [2, 2], [3, 4], torch.rand(2, 3, 2)),
    "fractional_max_pool3d": lambda: _one(torch.randn(2, 3, 5, 6, 7), [2, 2, 2], [2, 3, 3], torch.rand(2, 3, 3)),
    "segment_reduce": lambda: [((_segments()[0], how), {"lengths": _segments()[1]}) for how in ("sum", "max", "mean")],
    "segment_reduce_backward": _segments_backward,
    "hash_tensor": lambda: [((torch.randn(3, 4),), {}), ((torch.randn(3, 4), [1]), {})],
    "nonzero": lambda: [((torch.randint(0, 2, (3, 4)),), {}), ((torch.zeros(2, 2),), {})],
    "unique2": lambda: _one(torch.randint(0, 5, (3, 4)), True, True, True),
    "unique_dim": lambda: _one(torch.randint(0, 2, (6, 2)), 0, True, True, True),
    "unique_consecutive": lambda: _one(torch.tensor([1, 1, 2, 2, 1]), True, True),
    "unique_dim_consecutive": lambda: _one(torch.tensor([[1, 2], [1, 2], [0, 1]]), 0, True, True),
    "bincount": lambda: [((torch.randint(0, 5, (9,)),), {}), ((torch.randint(0, 5, (9,)), torch.rand(9), 8), {})],
    "local_scalar": lambda: [((torch.tensor(3),), {}), ((torch.tensor(2.5),), {})],
    "assert_async": lambda: _one(torch.tensor(True), "never shown"),
}
