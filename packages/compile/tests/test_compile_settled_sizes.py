"""Sizes whose symbols cancel are numbers: a dim of `n // n` rows broadcasts as one of size 1 does, in whatever follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from primtorch.ledger import LEDGER, Effect, of

pytestmark = pytest.mark.warm

# Each makes one row of four numbers out of n of them.
ROWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "view": lambda x, n: x.view(n, -1, 4)[0],
    "reshape": lambda x, n: x.reshape(n, 4, -1)[0].t(),
    "unflatten": lambda x, n: x.flatten().unflatten(0, (n, -1, 4))[-1],
    "view of a quotient": lambda x, n: x.view(n, n // n, 4)[1],
    "narrow": lambda x, n: x.narrow(0, 0, n // n),
    "slice": lambda x, n: x[n - n : n - n + 1],
    "slice from a size": lambda x, n: x[n - 1 :],
    "zeros": lambda x, n: torch.zeros(n // n, 4, dtype=x.dtype) + x[:1],
    "new_ones": lambda x, n: x.new_ones(n - n + 1, 4),
    "expand": lambda x, n: x[:1].expand(n // n, 4),
    "repeat": lambda x, n: x[:1].repeat(n // n, 1),
    "chunk": lambda x, n: x.chunk(n // n)[0].sum(0, keepdim=True),
    "split": lambda x, n: x.split(n)[0].mean(0, keepdim=True),
    "as_strided": lambda x, n: x.as_strided((n // n, 4), (4, 1)),
    "pad": lambda x, n: F.pad(x[:1], (0, 0, n - n, 0)),
    "arange": lambda x, n: torch.arange(n - 1, n, dtype=x.dtype)[:, None] * x[:1],
    "tensor_split": lambda x, n: x.tensor_split([1, n])[0],
    "index": lambda x, n: x[torch.zeros(n // n, dtype=torch.long)],
    "repeat_interleave": lambda x, n: x[:1].repeat_interleave(n // n, 0),
    "adaptive pool": lambda x, n: F.adaptive_avg_pool1d(x.t()[None], n // n)[0].t(),
    "meshgrid": lambda x, n: torch.meshgrid(torch.arange(n // n), torch.arange(4), indexing="ij")[1].to(x.dtype),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_size_that_is_one_broadcasts(row: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ROWS[row](x, x.shape[0])
        return y * x + x, (y + 1).softmax(-1), torch.where(x > 0, y, x), torch.cat([x, y * x]), y @ x.t()

    compiled = torchcompile.compile(program, options={"strict": True}, dynamic=True, fullgraph=True)
    for n in (5, 7):
        ours = torch.randn(n, 4, dtype=torch.float64, requires_grad=True)
        eager = ours.detach().clone().requires_grad_()
        got, wanted = compiled(ours), program(eager)
        torch.testing.assert_close(got, wanted)
        for results in (got, wanted):
            torch.stack([(result * result).sum() for result in results]).sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(ours.grad, eager.grad)
    assert not of(LEDGER.events, Effect.FALLBACK, Effect.RECOMPILE), LEDGER.events


def test_a_mask_of_keys_broadcasts_at_any_length() -> None:
    """Attention with a mask of keys, as `nn.MultiheadAttention` has it in training: its rows are a size that is worked out."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, dtype=torch.float64)

    def program(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = attention(x, x, x, need_weights=False, key_padding_mask=padding)[0]
        return attended

    compiled = torchcompile.compile(program, options={"strict": True, "eager_random": True}, dynamic=True)
    for length in (5, 7):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        padding = torch.arange(length)[None] >= torch.tensor([length, length - 2])[:, None]
        torch.manual_seed(1)
        got = compiled(x, padding)
        torch.manual_seed(1)
        torch.testing.assert_close(got, program(x, padding))
