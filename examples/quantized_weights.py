"""Quantised weights as a tensor subclass: a Llama-like block whose linear layers never hear of it, in one graph.

    python examples/quantized_weights.py

`Int8Weight` wraps levels of int8 and a scale for each row; what operators make of them `__torch_dispatch__` says. Every
`nn.Linear` of the block gets one for its weight. Compiled, the block is one graph over the plain tensors in the
weights: kernels read the int8 levels. Values and gradients of what is trained (the norms) are eager's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchcompile
import torchdynamo

WIDTH, HEADS, HIDDEN, TOKENS = 256, 4, 688, 32
aten = torch.ops.aten


class Int8Weight(torch.Tensor):
    """A matrix of `dtype` to whoever asks: 8 bits a number, and a scale a row, in memory."""

    levels: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, levels: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, levels.shape, strides=levels.stride(), dtype=dtype, device=levels.device
        )
        return made  # type: ignore[no-any-return]

    def __init__(self, levels: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.levels, self.scale = levels, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Weight:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def dense(self) -> torch.Tensor:
        return self.levels.to(self.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["levels", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], dtype: torch.dtype, size: torch.Size, stride: Sequence[int]
    ) -> Int8Weight:
        return cls(inner["levels"], inner["scale"], dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Int8Weight({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.t.default):  # stays quantised
            return cls(func(args[0].levels), func(args[0].scale), args[0].dtype)
        dense = [value.dense() if isinstance(value, cls) else value for value in args]
        return func(*dense, **(kwargs or {}))


class Block(nn.Module):
    """Attention with rotated queries and keys, and a gated feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        size = WIDTH // HEADS
        turns = torch.outer(torch.arange(TOKENS), 10_000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", turns.cos().repeat(1, 2))
        self.register_buffer("sin", turns.sin().repeat(1, 2))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def quantize(model: nn.Module) -> nn.Module:
    """The model with quantised weights in its linear layers: no other line of it changes."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8Weight.of(module.weight.detach()), requires_grad=False)
    return model


def size_of(model: nn.Module) -> int:
    """Bytes of the parameters."""
    parts = [[p.levels, p.scale] if isinstance(p, Int8Weight) else [p] for p in model.parameters()]
    return sum(tensor.nbytes for tensors in parts for tensor in tensors)


def run(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients of the norms."""
    model.zero_grad()
    result = call(x)
    result.square().mean().backward()
    return (result.detach(), *(p.grad for p in model.parameters() if p.grad is not None))


def milliseconds(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, times: int = 20) -> float:
    with torch.no_grad():
        call(x)
        began = time.perf_counter()
        for _ in range(times):
            call(x)
    return (time.perf_counter() - began) / times * 1e3


def of_the_same_levels(block: nn.Module) -> nn.Module:
    """The same block, computed in float64 from the same levels."""
    made = Block().double()
    state = block.state_dict()
    made.load_state_dict({k: v.dense() if isinstance(v, Int8Weight) else v for k, v in state.items()})
    for module in made.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
    return made


def main() -> None:
    torch.manual_seed(0)
    block = Block()
    dense = size_of(block)
    quantize(block)
    x = torch.randn(2, TOKENS, WIDTH)
    in_double = of_the_same_levels(block)
    exact = run(in_double, in_double, x.double())
    compiled = torchcompile.compile(block, fullgraph=True)
    for number, result in enumerate((run(block, block, x), run(block, compiled, x))):
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(result, exact, strict=True))
        print(f"{('eager', 'compiled')[number]:9} differs from float64 by {error:.1e}")
        assert error < 1e-4
    graphs, report = torchdynamo.stats().graphs, torchcompile.report()
    assert graphs == 1 and report.clean, report
    print(f"{graphs} graph, parameters of {size_of(block) / 1e6:.1f} MB in place of {dense / 1e6:.1f}")
    print(
        f"without gradients: eager {milliseconds(block, x):.2f} ms, compiled {milliseconds(compiled, x):.2f} ms a call"
    )


if __name__ == "__main__":
    main()
