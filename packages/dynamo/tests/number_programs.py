"""Programs of one number, an int or a float, that a sweep of its values compiles twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

X = torch.linspace(-1.5, 2.0, 20).reshape(5, 4)
HALF = torch.tensor([0.5, -1.25, 3.0], dtype=torch.float16)
INTS = torch.arange(4)


def write_items(n: int) -> torch.Tensor:
    y = X.clone()
    y[n] = n
    y[:, n - 1] = X[:, 0]
    y[n, n - 1] += 1
    return y


def cosine(step: int) -> torch.Tensor:
    """A schedule with warm-up."""
    rate = 0.1 * min(1.0, step / 3) * 0.5 * (1 + math.cos(math.pi * step / 20))
    return X * rate


FLOATS: dict[str, Callable[[float], Any]] = {
    "arithmetic": lambda a: (X * a + a, X / a, a / X, X - a, a - X),
    "promotion": lambda a: (HALF * a, INTS * a, INTS + a, HALF / a, torch.tensor(1, dtype=torch.int8) * a),
    "power": lambda a: (X * a**3, X**a, a ** X.abs(), X * 2**a),
    "full": lambda a: (torch.full((3,), a), torch.full_like(X, a), torch.empty(3).fill_(a)),
    "clamp": lambda a: (X.clamp(min=a), X.clamp(-a, a), F.hardtanh(X, -a, a)),
    "factors": lambda a: (torch.add(X, X, alpha=a), torch.addcmul(X, X, X, value=a), torch.lerp(X, X + 1, a)),
    "in_place": lambda a: X.clone().mul_(a).add_(a),
    "math": lambda a: X * math.sqrt(a) + math.log(a) * math.exp(-a) + math.tanh(a),
    "extremes": lambda a: X * min(1.0, a / 100) * max(a, 0.5) * abs(-a),
    "tensor": lambda a: (torch.tensor([a, 1.0, 2]), torch.tensor(a), torch.tensor([[a], [2]], dtype=torch.float64)),
    "where": lambda a: (torch.where(X > a, X, a), X.masked_fill(X > 0, a), X < a),
    "returned": lambda a: (X + 1, a * 2, [a - 1, {"k": -a}], a // 0.3, a % 0.3, divmod(a, 0.7)),
    "compared": lambda a: X + (a > 0) + (0 < a < 1e9) + (a != 0),
    "to_int": lambda a: (X[: int(a) % 4], X * round(a) + int(a) + math.floor(a) + math.ceil(a)),
    "activations": lambda a: (F.leaky_relu(X, a), F.elu(X, a), F.softplus(X, beta=a), F.threshold(X, a, 0.0)),
    "type": lambda a: X + isinstance(a, float) + (type(a) is float) + bool(a),
    "cosine": lambda a: X * (0.5 * (1 + math.cos(math.pi * a / 20))),
    "sum": lambda a: X * sum([a, a, 1.0]),
    "linspace": lambda a: torch.linspace(0, a, 5),
    "dropout": lambda a: F.dropout(X, 1 / (a + 10), False),
    "normalize": lambda a: X * F.normalize(X, eps=a),
    "addmm": lambda a: torch.addmm(X @ X.t(), X, X.t(), beta=a, alpha=a * 2),
    "scaled_loss": lambda a: (X * a).sum() * a,
}
INTEGERS: dict[str, Callable[[int], Any]] = {
    "index": lambda n: (X[n], X[-n], X[n, 1:], X[:, n % 4], X[None, n, ..., n - 1]),
    "write": write_items,
    "slice": lambda n: (X[:n], X[n:], X[: int(n * 0.5) + 1]),
    "division": lambda n: X * (n / 2) + n / 3 + n // 2 + n % 3,
    "divmod": lambda n: X + divmod(n, 2)[0] + divmod(n, 3)[1],
    "bits": lambda n: X + (n & 1) + (n | 2) + (n ^ 3) + (n << 1) + (n >> 1) + ~n,
    "chain": lambda n: X + (0 <= n < 100),
    "tensor": lambda n: (torch.tensor([n]), torch.tensor([[n, 1], [2, n]]), torch.tensor([n, 0.5])),
    "arange": lambda n: (torch.arange(n), torch.arange(0, n, 2), torch.zeros(n, 2) + n, torch.eye(n)),
    "float": lambda n: X * float(n) + X / math.sqrt(n) + math.log(n),
    "power": lambda n: X * n**2 + 2**n + n**n + 0.9**n,
    "extremes": lambda n: X * min(n, 3) * max(n, 2) + abs(-n),
    "views": lambda n: (X.repeat(n, 1), X.roll(n, 0), X.select(0, n), X.narrow(0, 0, n), torch.tril(X, n)),
    "schedule": cosine,
    "rounding": lambda n: X * math.floor(n / 2) + int(n / 2) + round(n / 3),
    "topk": lambda n: X.flatten().topk(n)[0],
    "pad": lambda n: F.pad(X, (n, 0)),
}
# A version for each value: the loop unrolls, the text differs, the layout of the list of results depends on it.
ONE_A_VALUE: dict[str, Callable[[int], Any]] = {
    "range": lambda n: X + sum(range(n)),
    "loop": lambda n: [X * j for j in range(n)][0],
    "text": lambda n: X + len(f"{n:>{n}}"),
    "list": lambda n: X * [1, 2, 3, 4, 5, 6][n],
    "split": lambda n: X.flatten().split(n)[0],
}
