"""What the run-time wrapper of aotautograd adds to a call of the compiled forward.

    python tools/bench/aot_overhead.py

The compiled forward is a Python function that returns prepared tensors, so that the rest is the wrapper's. In training
it saves two tensors for each input. Autograd gives each leaf an accumulator, which lives as long as a graph that leads
to it: a call whose former result was dropped also pays for making them (`dropped`); in a loop such as
`loss = model(x)` the former result lives until the next call returns (`loop`).
"""

from __future__ import annotations

import timeit
from typing import Any

import torch

from aotautograd import aot_module


def measure(inputs: int, requires_grad: bool, repeat: int = 1000) -> tuple[float, float, float]:
    """Microseconds a call: bare, wrapped in a loop that keeps the last result, wrapped with the result dropped."""
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
    result = compiled(*tensors)

    def us(f: Any) -> float:
        return min(timeit.repeat(f, number=repeat, repeat=15)) / repeat * 1e6

    def loop() -> None:
        nonlocal result
        result = compiled(*tensors)

    with torch.no_grad():
        base = us(lambda: bare[0](list(tensors)))
    in_loop = us(loop)
    del result
    return base, in_loop, us(lambda: compiled(*tensors))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("                        bare     loop    added  dropped    added   (us)")
    for requires_grad in (False, True):
        for count in (1, 10, 100, 300):
            base, loop, dropped = measure(count, requires_grad)
            kind = "training " if requires_grad else "inference"
            added = f"{loop:8.2f} {loop - base:8.2f} {dropped:8.2f} {dropped - base:8.2f}"
            print(f"{kind} {count:4d} inputs {base:8.2f} {added}")
