"""What the run-time wrapper of aotautograd adds to a call of the compiled forward, beside torch's own wrapper.

    python tools/bench/aot_overhead.py

The compiled forward is a Python function that returns prepared tensors, so that the rest is the wrapper's. In training
it saves two tensors for each input. Autograd gives each leaf an accumulator, which lives as long as a graph that leads
to it: a call whose former result was dropped also pays for making them (`dropped`); in a loop such as
`loss = model(x)` the former result lives until the next call returns (`loop`). Each figure is the least of many short
runs, so that what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from aotautograd import aot_module

Forward = Callable[[list[Any]], Any]


class Times(NamedTuple):
    """Microseconds a call: bare, wrapped in a loop that keeps the last result, wrapped with the result dropped."""

    bare: float
    loop: float
    dropped: float


class Program(torch.nn.Module):
    """A chain of products: the backward reads two tensors for each input."""

    def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
        total = args[0] * 2
        for a in args[1:]:
            total = total * a
        return [total]


class PreparedCompiler:
    """Compiles a graph to a function that returns values of an earlier run."""

    def __init__(self) -> None:
        self.made: list[Forward] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Forward:
        values: list[Any] = []

        def run(args: list[Any]) -> Any:
            if not values:
                values.append(gm(*args))
            return (values[0][0].detach(), *values[0][1:])

        run._boxed_call = True  # type: ignore[attr-defined]
        self.made.append(run)
        return run


def ours(tensors: list[torch.Tensor], compiler: PreparedCompiler) -> Callable[..., Any]:
    return aot_module(Program(), tensors, fw_compiler=compiler)


def torchs(tensors: list[torch.Tensor], compiler: PreparedCompiler) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_module_simplified

    run: Callable[..., Any] = aot_module_simplified(Program(), tensors, fw_compiler=compiler, bw_compiler=compiler)
    return run


def measure(wrap: Any, inputs: int, requires_grad: bool, number: int, repeat: int) -> Times:
    tensors = [torch.randn(4, requires_grad=requires_grad) for _ in range(inputs)]
    compiler = PreparedCompiler()
    compiled = wrap(tensors, compiler)
    result = compiled(*tensors)
    bare = compiler.made[0]

    def us(f: Callable[[], Any]) -> float:
        return min(timeit.repeat(f, number=number, repeat=repeat)) / number * 1e6

    def loop() -> None:
        nonlocal result
        result = compiled(*tensors)

    with torch.no_grad():
        base = us(lambda: bare(list(tensors)))
    in_loop = us(loop)
    del result
    return Times(base, in_loop, us(lambda: compiled(*tensors)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, nargs="*", default=[1, 10, 100, 300])
    parser.add_argument("--wrappers", nargs="*", default=["ours", "torch"], choices=("ours", "torch"))
    parser.add_argument("--number", type=int, default=100, help="calls of a run")
    parser.add_argument("--repeat", type=int, default=300, help="runs, of which the shortest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrappers = {"ours": ours, "torch": torchs}
    print("| wrapper | mode | inputs | bare us | in a loop us | added us | result dropped us | added us |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.wrappers:
        for requires_grad in (False, True):
            for count in options.inputs:
                t = measure(wrappers[name], count, requires_grad, options.number, options.repeat)
                mode = "training" if requires_grad else "inference"
                added = f"{t.loop:.2f} | **{t.loop - t.bare:.2f}** | {t.dropped:.2f} | {t.dropped - t.bare:.2f}"
                print(f"| {name} | {mode} | {count} | {t.bare:.2f} | {added} |", flush=True)


if __name__ == "__main__":
    main()
