"""What the run-time wrapper of aotautograd adds to a call of the compiled forward.

    python tools/bench/aot_overhead.py

The compiled forward is a Python function that returns prepared tensors, so that the rest is the wrapper's.
"""

from __future__ import annotations

import timeit
from typing import Any

import torch

from aotautograd import aot_module


def measure(inputs: int, requires_grad: bool, repeat: int = 2000) -> tuple[float, float]:
    """(bare, wrapped) microseconds a call."""
    tensors = [torch.randn(4, requires_grad=requires_grad) for _ in range(inputs)]

    def program(*args: torch.Tensor) -> list[torch.Tensor]:
        total = args[0] * 2
        for a in args[1:]:
            total = total * a
        return [total]

    bare: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        values: list[Any] = []

        def run(args: list[Any]) -> Any:
            if not values:
                values.append(gm(*args))
            return (values[0][0].detach(), *values[0][1:])

        run._boxed_call = True  # type: ignore[attr-defined]
        bare.append(run)
        return run

    compiled = aot_module(program, tensors, fw_compiler=compiler)
    compiled(*tensors)

    def us(f: Any) -> float:
        return min(timeit.repeat(f, number=repeat, repeat=7)) / repeat * 1e6

    args = list(tensors)
    with torch.no_grad():
        base = us(lambda: bare[0](args))
    return base, us(lambda: compiled(*tensors))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for requires_grad in (False, True):
        for count in (1, 10, 100, 300):
            base, wrapped = measure(count, requires_grad)
            kind = "training " if requires_grad else "inference"
            added = wrapped - base
            print(f"{kind} {count:4d} inputs: bare {base:6.2f} us, wrapped {wrapped:6.2f} us, added {added:6.2f} us")
