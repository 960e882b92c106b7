"""Eager with other rounding errors: how far rounding alone moves what a program computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Runs whose rounding errors are drawn anew, at most: until they reach as far as each difference in hand.
DRAWS = 12


class DrawnRounding(TorchDispatchMode):
    """Gives each operator's results another rounding error, of at most a unit in the last place, drawn at random.

    So what eager computes varies as much as its rounding matters (Monte Carlo arithmetic: Parker, 1997): by a little
    where a program is well conditioned, by all of a value that is nothing but rounding, and in jumps where a comparison
    or a maximum hangs on a last digit.
    """

    EXACT = frozenset(
        {
            "_to_copy", "arange", "cat", "ceil", "clone", "constant_pad_nd", "copy_", "fill_", "flip", "floor", "full",
            "full_like", "gather", "index", "index_select", "masked_fill", "masked_fill_", "neg", "new_full",
            "new_ones", "new_zeros", "one_hot", "ones", "ones_like", "relu", "relu_", "repeat", "roll", "round",
            "scalar_tensor", "scatter", "scatter_", "sign", "stack", "threshold_backward", "tril", "triu", "trunc",
            "where", "zero_", "zeros", "zeros_like",
        }
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        rounds = func._schema.name.split("::")[-1] not in self.EXACT
        for value, spec in zip(out if isinstance(out, tuple) else (out,), returned, strict=False):
            view = spec.alias_info is not None and not spec.alias_info.is_write
            if rounds and not view and isinstance(value, torch.Tensor) and value.is_floating_point():
                self.vary(value)
        return out

    def vary(self, value: torch.Tensor) -> None:
        if value.layout is torch.strided and value.numel():
            off = (torch.rand(value.shape, generator=self.generator) * 2 - 1) * torch.finfo(value.dtype).eps
            value.mul_(1 + off.to(value.dtype))
