"""Inputs of which the forward keeps a copy, since the caller may write to them before the backward: in any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from primtorch.ledger import LEDGER, Effect, of

pytestmark = pytest.mark.warm

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded rows": lambda m: m[:1].expand(4, -1, -1, -1),
    "expanded within": lambda m: m[:, :1].expand(-1, 3, -1, -1),
    "all of one element": lambda m: m[:1, :1, :1, :1].expand(4, 3, 5, 5),
    "transposed": lambda m: m.transpose(2, 3),
    "with gaps": lambda m: m.repeat(1, 1, 1, 2)[..., ::2],
    "a part": lambda m: torch.cat([m, m])[2:6],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_of_an_input_in_any_layout(layout: str, dynamic: bool) -> None:
    """The input is overwritten between the forward and the backward, as a mask's buffer in a loop is."""

    def program(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = mask.to(x.dtype) * 0.5 + 1  # which is what eager's autograd keeps
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask), (x @ x.transpose(2, 3)).sin() * weights

    compiled = torchcompile.compile(program, dynamic=dynamic, options={"strict": True})
    base = torch.rand(4, 3, 5, 5) > 0.3
    grads = []
    x = torch.randn(4, 3, 5, 8, dtype=torch.float64)
    for run in (program, compiled):
        mask, own = LAYOUTS[layout](base.clone()), x.clone().requires_grad_()
        results = run(own, mask)
        if run is compiled:
            mask[0, 0, 0, 0].logical_not_()
        sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
        grads.append(own.grad)
    torch.testing.assert_close(grads[1], grads[0])
    assert not of(LEDGER.events, Effect.FALLBACK, Effect.MENDED), LEDGER.events
