"""Programs that a memory's speed bounds, each as a user writes it, with the bytes that it cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

ROWS, COLUMNS = 16384, 4096  # of most programs' tensors
SMALL_ROWS, SMALL_COLUMNS = 2048, 1024  # for processors without an accelerator


@dataclass(frozen=True)
class Program:
    """A function and what it is called with.

    Attributes:
        name: of its row.
        function: what is compiled.
        inputs: on one device; those that require a gradient make the program a forward and a backward.
        nbytes: what has to be read and written if each tensor that comes or goes is touched once.
        gradient: what the backward begins with.
        drawn: whether it draws random numbers, so that values cannot be compared with eager's.
    """

    name: str
    function: Callable[..., object]
    inputs: tuple[torch.Tensor, ...]
    nbytes: int
    gradient: torch.Tensor | None = None
    drawn: bool = False

    def run(self, compiled: Callable[..., object]) -> tuple[torch.Tensor, ...]:
        """Calls it, and its backward where there is one; results, then gradients."""
        out = compiled(*self.inputs)
        results = out if isinstance(out, tuple) else (out,)
        if self.gradient is None:
            return results
        leaves = [t for t in self.inputs if t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        results[0].backward(self.gradient)
        return (*results, *(leaf.grad for leaf in leaves))


def _rms_norm_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x + residual
    return h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(h.dtype) * weight, h


def _rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def programs(device: str, only: str = "", more: bool = False, big: bool | None = None) -> Iterator[Program]:
    """Those whose name contains `only`, made one after the other: large and bfloat16 on a GPU, else small and float32.
    The 17 that figures over all of them are about, and with `more` further ones.
    """
    big = device == "cuda" if big is None else big
    dtype = torch.bfloat16 if big else torch.float32
    n, d = (ROWS, COLUMNS) if big else (SMALL_ROWS, SMALL_COLUMNS)
    item = dtype.itemsize
    rows = n * d * item

    def drawn(*shape: int, dtype: torch.dtype = dtype, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    def integers(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (count,), device=device)

    words, tokens = (50304, 4096) if big else (8192, 512)
    length = 2048 if big else 256
    images = (64 if big else 8, 64, 112, 112)
    pixels = images[0] * images[1] * images[2] * images[3] * item
    norm = lambda x, w, b: F.layer_norm(x, (d,), w, b)

    def statistics() -> tuple[torch.Tensor, ...]:
        return drawn(64), drawn(64), torch.zeros(64, device=device), torch.ones(64, device=device)

    def weighted(grad: bool) -> tuple[torch.Tensor, ...]:
        return drawn(n, d, grad=grad), drawn(d, grad=grad), drawn(d, grad=grad)

    # fmt: off
    table: list[tuple[str, Callable[..., object], Callable[[], tuple[torch.Tensor, ...]], int]] = [
        ("pointwise_chain", lambda x, y: torch.sigmoid(x * 1.7 + y).mul(x).tanh() + y,
         lambda: (drawn(n, d), drawn(n, d)), 3 * rows),
        ("softmax", lambda x: torch.softmax(x, -1), lambda: (drawn(n, d),), 2 * rows),
        ("layer_norm", norm, lambda: weighted(False), 2 * rows),
        ("rms_norm_residual", _rms_norm_residual, lambda: (drawn(n, d), drawn(n, d), drawn(d)), 4 * rows),
        ("bias_gelu_residual", lambda x, b, r: F.gelu(x + b, approximate="tanh") + r,
         lambda: (drawn(n, d), drawn(d), drawn(n, d)), 3 * rows),
        ("col_sum", lambda x: x.sum(0), lambda: (drawn(n, d),), rows),
        ("full_mean_var", lambda x: torch.var_mean(x.float()), lambda: (drawn(n, d),), rows),
        ("transpose_add", lambda x: (x.t() * 2).contiguous(), lambda: (drawn(n, d),), 2 * rows),
        ("cross_entropy", lambda x, t: F.cross_entropy(x.float(), t),
         lambda: (drawn(tokens, words), integers(words, tokens)), tokens * words * item),
        ("embedding_add_ln", lambda e, i, p, w, b: F.layer_norm(F.embedding(i, e) + p, (d,), w, b),
         lambda: (drawn(words, d), integers(words, n), drawn(n, d), drawn(d), drawn(d)), 3 * rows),
        ("rope", _rope, lambda: (drawn(8, 32, length, 128), drawn(length, 128), drawn(length, 128)),
         2 * 8 * 32 * length * 128 * item),
        ("batch_norm_relu_train", lambda x, w, b, m, v: F.relu(F.batch_norm(x, m, v, w, b, True)),
         lambda: (drawn(*images), *statistics()), 3 * pixels),
        ("maxpool", lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), lambda: (drawn(*images),), pixels + pixels // 4),
        ("swiglu", lambda g, u: F.silu(g) * u, lambda: (drawn(n, d), drawn(n, d)), 3 * rows),
        ("dropout_add", lambda x, y: F.dropout(x, 0.1, True) + y, lambda: (drawn(n, d), drawn(n, d)), 3 * rows),
        ("layer_norm_fwd_bwd", norm, lambda: weighted(True), 5 * rows),
        ("gelu_bias_softmax_fwd_bwd", lambda x, w, b: torch.softmax(F.gelu(x * w + b), -1),
         lambda: weighted(True), 5 * rows),
    ]
    further: list[tuple[str, Callable[..., object], Callable[[], tuple[torch.Tensor, ...]], int]] = [
        ("softmax_columns", lambda x: torch.softmax(x, 0), lambda: (drawn(n, d),), 2 * rows),
        ("row_sum", lambda x: x.sum(1), lambda: (drawn(n, d),), rows),
        ("full_sum", lambda x: x.sum(), lambda: (drawn(n, d),), rows),
        ("column_var_mean", lambda x: torch.var_mean(x, 0), lambda: (drawn(8 * n, d // 2),), 4 * rows),
        ("argmax", lambda x: x.argmax(-1), lambda: (drawn(n, d),), rows),
        ("cumsum", lambda x: x.cumsum(-1), lambda: (drawn(n, d),), 2 * rows),
        ("batch_norm_channels_last", lambda x, w, b, m, v: F.relu(F.batch_norm(x, m, v, w, b, True)),
         lambda: (drawn(*images).contiguous(memory_format=torch.channels_last), *statistics()), 3 * pixels),
    ]
    # fmt: on
    for name, function, inputs, nbytes in table + further * more:
        if only in name:
            made = inputs()
            gradient = drawn(n, d) if made[0].requires_grad else None
            yield Program(name, function, made, nbytes, gradient, drawn="dropout" in name)
