"""Tensors without elements, forward and backward: eager's values and gradients, in one compiled graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchcompile

Shape = tuple[int, ...]
none = torch.zeros(0, dtype=torch.long)
# Name -> (program, shapes of its inputs).
CASES: dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]] = {
    **{f"max_pool{n}d": (getattr(F, f"max_pool{n}d"), ((0, 3, *[4] * n), ())) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": (getattr(F, f"avg_pool{n}d"), ((0, 3, *[4] * n), ())) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": (getattr(F, f"adaptive_max_pool{n}d"), ((0, 3, *[4] * n), ())) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": (getattr(F, f"adaptive_avg_pool{n}d"), ((0, 3, *[4] * n), ())) for n in (1, 2, 3)},
    **{
        f"interpolate {mode}": (lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), ((0, 3, 4, 4),))
        for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
    },
    "unfold": (lambda x: x.unfold(1, 2, 1), ((0, 4),)),
    "im2col": (lambda x: F.unfold(x, 2), ((0, 3, 4, 4),)),
    "col2im": (lambda x: F.fold(x, (4, 4), 2, stride=2), ((0, 12, 4),)),
    "svd of no matrices": (lambda x: torch.linalg.svd(x, full_matrices=False)[1], ((0, 3, 4),)),
    "svd of an empty matrix": (lambda x: torch.linalg.svd(x, full_matrices=False), ((3, 0),)),
    "qr": (torch.linalg.qr, ((0, 3, 3),)),
    "slogdet": (lambda x: torch.linalg.slogdet(x)[1], ((0, 3, 3),)),
    "det of an empty matrix": (torch.linalg.det, ((2, 0, 0),)),
    "solve": (torch.linalg.solve, ((0, 3, 3), (0, 3, 2))),
    "topk": (lambda x: x.topk(2)[0], ((0, 4),)),
    "max": (lambda x: x.max(1)[0], ((0, 4),)),
    "cumprod": (lambda x: x.cumprod(1), ((0, 4),)),
    "gather": (lambda x: x.gather(1, none.view(0, 1).expand(0, 2)), ((0, 4),)),
    "index_select": (lambda x: x.index_select(0, none), ((3, 4),)),
    "index_put": (lambda x, y: x.index_put((none,), y), ((3, 4), (0, 4))),
    "convolution": (F.conv2d, ((0, 3, 4, 4), (2, 3, 2, 2), (2,))),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), ((0, 3, 4), (3,))),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), ((0, 3, 4), (4,))),
    "mm over nothing": (torch.mm, ((2, 0), (0, 3))),
    "attention": (F.scaled_dot_product_attention, ((0, 2, 3, 4),) * 3),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), ((0, 3, 4, 4), (0, 2, 2, 2))),
    "reflection": (lambda x: F.pad(x, (1, 1), mode="reflect"), ((0, 3, 4),)),
    "softmax over nothing": (lambda x: x.softmax(-1), ((4, 0),)),
    "flip": (lambda x: x.flip(0, 1, 2), ((5, 0, 10),)),
    "bilinear": (F.bilinear, ((0, 3), (0, 4), (5, 3, 4), (5,))),
    "sums over nothing of two shapes": (
        lambda x, y: (x.sum(0), (x[:, :, None] * y[:, None]).sum(0)),
        ((0, 5), (0, 64)),
    ),
    "as_strided_scatter of one number": (lambda x, y: x.as_strided_scatter(y, (), ()), ((), ())),
    "as_strided_scatter into one number": (lambda x, y: x.as_strided_scatter(y, (1,), (1,)), ((), (1,))),
    "as_strided_scatter of nothing": (lambda x, y: x.as_strided_scatter(y, (0,), (1,)), ((4,), (0,))),
}


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_no_elements(name: str, backend: str) -> None:
    torchcompile.reset()
    program, shapes = CASES[name]
    if "pool" in name:
        shapes, program = shapes[:1], lambda x, pool=program: pool(x, 2)

    def run(function: Callable[..., Any]) -> Any:
        inputs = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        results = function(*inputs)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        sum(r.sum() for r in results).backward()
        return results, [x.grad for x in inputs]

    torch.testing.assert_close(run(torchcompile.compile(program, backend=backend, fullgraph=True)), run(program))
    report = torchcompile.report()
    assert report.captured == 1 and not report.breaks and not report.fallbacks, str(report)


@pytest.mark.expected_eager("graph_raised")
@pytest.mark.parametrize("dynamic", [False, True, None])
def test_places_in_nothing(dynamic: bool | None) -> None:
    """Rows that are looked up, padded and looked up again: where there are none and none is asked for, that is no fault,
    and one that is asked for is eager's."""
    seed = random.randrange(1 << 30)
    torchcompile.reset()
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def program(x: torch.Tensor, places: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return F.pad(F.pad(x[places] * 2, (0, 0, 1, 0))[more].sin(), (0, 0, 0, 1))

    compiled = torchcompile.compile(program, dynamic=dynamic)
    for rows, found in draw.sample(((5, 4), (4, 2), (3, 0), (0, 0), (1, 1)), 5):
        x = torch.randn(rows, 3, generator=generator)
        places = torch.randint(max(rows, 1), (found,), generator=generator)
        more = torch.randint(found + 1, (draw.randint(0, 3),), generator=generator)
        text = f"seed {seed}: {found} of {rows}"
        torch.testing.assert_close(
            compiled(x, places, more), program(x, places, more), msg=lambda m, t=text: f"{t}: {m}"
        )  # type: ignore[misc]
    with pytest.raises(IndexError):
        compiled(torch.randn(0, 3), torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
