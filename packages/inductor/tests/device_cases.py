"""Programs whose kernels for a GPU are counted, and run in Triton's interpreter: what reaches memory, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A program of tensors, and what it becomes on a GPU.

    Attributes:
        shapes: of the inputs for a number of rows; one that ends in 0 stands for indices below its first number, of the shape in between.
        kernels: how many.
        slow: whether the interpreter takes seconds for it.
        moved: the bytes that they move, over those of the inputs and the results.
    """

    program: Callable[..., object]
    shapes: Callable[[int], tuple[Shape, ...]]
    kernels: int
    moved: float = 1.0
    slow: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, rows: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        made: list[Tensor] = []
        for shape in self.shapes(rows):
            if shape and shape[-1] == 0:
                made.append(torch.randint(0, shape[0], shape[1:-1], generator=draw))
            else:
                made.append(torch.randn(shape, generator=draw).to(self.dtype))
        return made


def gradients(program: Callable[..., Tensor]) -> Callable[..., object]:
    """The program's result, and the gradients of its inputs for a gradient of the result that comes last."""

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs[:-1]]
        out = program(*leaves)
        return out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], inputs[-1])

    return step


def embed_and_normalise(table: Tensor, ids: Tensor, added: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table) + added, weight.shape, weight, bias)


def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def activate_and_share(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(F.gelu(x * weight + bias), -1)


def layer_gradients(x: Tensor, weight: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Backward of gelu(x) @ weight: the activation is computed again, and its transpose is a factor."""
    wide = x.detach().requires_grad_()
    activated = F.gelu(wide, approximate="tanh")
    return torch.autograd.grad(activated, wide, slope @ weight.t())[0], activated.detach().t() @ slope


def casts(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Products of halves of float32 parameters, and their gradients, which are float32 again."""
    leaves = [w.detach().requires_grad_() for w in weights]
    for w in leaves:
        x = torch.relu(x.half() @ w.half())
    return x.detach(), *torch.autograd.grad(x.float().sum(), leaves)


def statistics(*rows: Tensor) -> tuple[Tensor, ...]:
    """Sums of small matrices, which nothing orders; one needs another's."""
    sums = [r.sum(-1) for r in rows]
    return (*sums, (rows[0] - sums[1][:, None]).amax(-1))


def tiny_network(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """Products that a library would be asked for in more time than they take."""
    return torch.tanh(F.linear(x, first, bias)) @ second


def positions(places: Tensor, slope: Tensor) -> Tensor:
    """The gradient of a table of relative positions: its values lie one after another along the sum."""
    return slope.new_zeros(32, len(slope)).index_put((places,), slope.permute(1, 2, 0), accumulate=True)


def positions_from_the_end(places: Tensor, slope: Tensor) -> Tensor:
    """More rows than are compared with at a time, which are counted from the end, and values that are computed."""
    return slope.new_ones(100, len(slope)).index_put(
        (places - 100,), slope.sin().exp().permute(1, 2, 0), accumulate=True
    )


def types(table: Tensor, ids: Tensor) -> Tensor:
    """An embedding of few rows, one of which is padding."""
    return F.embedding(ids, table, padding_idx=1)


def cells(row: Tensor, column: Tensor, values: Tensor) -> Tensor:
    """Places of two dims, around one that is kept."""
    values = values.transpose(0, 1)[:, None, :]
    return values.new_zeros(3, len(values), 5).transpose(1, 2).index_put((row, column), values[:, 0].T, accumulate=True)


def integers_by_place(places: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Sums of integers along a dim of an index that is smaller than what it adds to."""
    typed = [(values - 25).to(kind) for kind in (torch.int32, torch.int64)]
    return tuple(v.new_full((len(v) + 2, 11), 3).scatter_add(1, places, v) for v in typed)


def counted(places: Tensor) -> Tensor:
    """A histogram: one is added to a place for each value."""
    flat = places.flatten()
    return torch.zeros(13, dtype=torch.int64).index_add(0, flat, torch.ones_like(flat))


ROW, LONG = (512,), (20000,)

MANY, FEW = 576, 6
"""Rows: enough for a program each, and few enough for the interpreter."""

CASES: dict[str, Case] = {
    "softmax": Case(lambda x: torch.softmax(x, -1), lambda n: ((n, *ROW),), 1),
    # Two products forward, four backward; what stands between them stays with a product.
    "a tiny network": Case(gradients(tiny_network), lambda n: ((n, 6), (8, 6), (8,), (8, 4), (n, 4)), 6, 9.0),
    "softmax of a long row": Case(lambda x: torch.softmax(x, -1), lambda n: ((n, *LONG),), 1, slow=True),
    "softmax of halves": Case(lambda x: torch.softmax(x, -1), lambda n: ((n, *ROW),), 1, dtype=torch.float16),
    "gelu and softmax": Case(activate_and_share, lambda n: ((n, *ROW), ROW, ROW), 1),
    "gelu and softmax of a long row": Case(activate_and_share, lambda n: ((n, *LONG), LONG, LONG), 1, slow=True),
    "layer norm": Case(normalise, lambda n: ((n, *ROW), ROW, ROW), 1),
    "layer norm of a long row": Case(normalise, lambda n: ((n, *LONG), LONG, LONG), 1),
    # As many rows of the table as there are indices.
    "embedding and layer norm": Case(embed_and_normalise, lambda n: ((n, *ROW), (n, n, 0), (n, *ROW), ROW, ROW), 1),
    "embedding and layer norm of a long row": Case(
        embed_and_normalise, lambda n: ((n, *LONG), (n, n, 0), (n, *LONG), LONG, LONG), 1
    ),
    # A product's operand that is taken transposed is made where the same values are read by rows.
    "a layer's gradients": Case(layer_gradients, lambda n: ((n, 24), (24, 40), (n, 40)), 1, 2.0),
    # One launch for the casts, six for relu and its slopes between products, the last for the gradients' casts too.
    "casts of parameters": Case(casts, lambda n: ((n, 24), (24, 40), (40, 64), (64, 16)), 7, 9.0),
    "small sums": Case(statistics, lambda n: ((n, 24), (n, 40), (n, 90), (n, 17)), 2, 1.5),
    # The logits' maxima and sums; then an element of each row.
    # A row's slopes are its probabilities but for one of them: no sum over the row is left.
    "slopes of cross entropy": Case(
        gradients(lambda x, ids: F.cross_entropy(x, ids)), lambda n: ((n, *ROW), (*ROW, n, 0), ()), 3, 1.52
    ),
    # A sum in parts, and the parts' sum.
    "a few positions": Case(positions, lambda n: ((32, n, n, 0), (4, n, n)), 2, 1.02),
    "positions from the end": Case(positions_from_the_end, lambda n: ((100, n, 8, 0), (4, n, 8)), 2, 3.1),
    "positions in parts that differ": Case(positions, lambda n: ((32, 1, 20011, 0), (2, 1, 20011)), 2, 1.1),
    "types in parts that differ": Case(gradients(types), lambda n: ((2, 80), (2, 1, 9001, 0), (1, 9001, 80)), 3, 1.2),
    "types of halves": Case(
        gradients(types), lambda n: ((3, 64), (3, n, 8, 0), (n, 8, 64)), 4, 1.3, dtype=torch.float16
    ),
    "places of two dims": Case(cells, lambda n: ((3, 4 * n, 0), (5, 4 * n, 0), (4 * n, 6)), 2, 1.6),
    "integers by place": Case(integers_by_place, lambda n: ((11, n, 40, 0), (50, n, 40, 0)), 3, 2.1),
    "one value": Case(lambda t, i, v: t.index_put((i,), v, accumulate=True), lambda n: ((9,), (9, 1, 0), (1,)), 2, 2.0),
    # Every iteration adds one number to one place: neither tells the iterations apart.
    "one place": Case(
        lambda t, i: t.index_put((i.expand(200),), t.new_ones(200), accumulate=True),
        lambda n: ((300,), (300, 1, 0)),
        2,
        2.0,
    ),
    "a histogram": Case(counted, lambda n: ((13, n, 40, 0),), 2, 1.1),
    "cross entropy": Case(F.cross_entropy, lambda n: ((n, *ROW), (*ROW, n, 0)), 2, 1.02),
    "cross entropy of a long row": Case(F.cross_entropy, lambda n: ((n, *LONG), (*LONG, n, 0)), 2, 1.01, slow=True),
}
