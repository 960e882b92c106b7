"""Speed of primtorch beside torch's make_fx, on the training graph of a BERT-base encoder.

    python tools/bench/primtorch_speed.py
    python tools/bench/primtorch_speed.py --write docs/results/primtorch_speed.md
    python tools/bench/primtorch_speed.py --layers 2                      # a quick look

The graph: 12 layers of width 768 with 12 heads and 30,522 words, batch 2 of 128 tokens, loss and all gradients, traced
once to ATen; attention as products and softmax, because torch's fake tensors give the CPU's fused attention other
strides than it has. Measured on it, in turns in one process of one thread:

* an operator on descriptors: its formula on `TensorSpec`s, best of 25, median and mean over the graph's calls;
* an operator through the dispatcher: a call on fake tensors, likewise; torch's `FakeTensorMode` on the same calls;
* lowering to prims, without running anything; torch's `make_fx` with its table of decompositions on the same graph, on
  torch's fake tensors: it runs the graph to rewrite it.

What `import primtorch` adds to `import torch` is the median over fresh processes of CPU time, with bytecode cached.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aot_joint import Encoder, program_of
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import primtorch
from aotautograd import trace_joint
from primtorch.fake import FakeMode, formula_of
from primtorch.spec import TensorSpec

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
IMPORT = "import time, torch; t = time.process_time(); import primtorch; print(time.process_time() - t)"


class Calls(torch.fx.Interpreter):
    """Runs a graph on fake tensors and keeps each operator with its arguments."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.calls: list[Call] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            self.calls.append((target, tuple(args), dict(kwargs)))
        return super().call_function(target, args, kwargs)


def best(f: Callable[[], Any], repeat: int = 25) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def each(calls: list[Call], run: Callable[[Call], Callable[[], Any]]) -> tuple[float, float]:
    """(median, mean) microseconds of the calls."""
    times = [best(run(call)) * 1e6 for call in calls]
    return statistics.median(times), statistics.mean(times)


def on_descriptors(call: Call) -> Callable[[], Any]:
    op, args, kwargs = call
    args, kwargs = pytree.tree_map(lambda x: TensorSpec.of(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    formula = formula_of(op)
    return lambda: formula(*args, **kwargs)


def through_dispatcher(call: Call) -> Callable[[], Any]:
    op, args, kwargs = call
    return lambda: op(*args, **kwargs)


def import_milliseconds(processes: int) -> float:
    """CPU time of `import primtorch` after `import torch`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache

        def once() -> float:
            done = subprocess.run(
                [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True
            )
            return float(done.stdout) * 1e3

        once()
        return statistics.median(once() for _ in range(processes))


def measure(layers: int, processes: int) -> str:
    """The table, as markdown."""
    model = Encoder(layers)
    program, inputs = program_of(model)
    inputs.append(torch.randint(0, 30522, (2, 128)))
    with sdpa_kernel(SDPBackend.MATH):
        joint = trace_joint(program, inputs).module
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    given = [n.meta["val"] for n in placeholders]
    nodes = sum(n.op == "call_function" for n in joint.graph.nodes)

    def run(fake: Callable[[Any], Any], mode: Any) -> list[Call]:
        recorder = Calls(joint)
        with mode:
            recorder.run(*map(fake, given))
        return recorder.calls

    ours, theirs = FakeMode(), FakeTensorMode()

    def real_shape(x: Any) -> torch.Tensor:
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype)

    calls = run(lambda x: ours.from_spec(TensorSpec.of(x)), ours)
    other_calls = run(lambda x: theirs.from_tensor(real_shape(x)), theirs)
    specs = each(calls, on_descriptors)
    dispatch, other_dispatch = each(calls, through_dispatcher), each(other_calls, through_dispatcher)
    primtorch.lower(joint)  # its tables are read on first use
    lowering = best(lambda: primtorch.lower(joint), 3)
    lowered = sum(n.op == "call_function" for n in primtorch.lower(joint).graph.nodes)
    table = core_aten_decompositions()
    fakes = [theirs.from_tensor(real_shape(x)) for x in given]

    def make() -> torch.fx.GraphModule:
        with theirs:
            return make_fx(torch.fx.Interpreter(joint).run, decomposition_table=table)(*fakes)

    made = make()
    making = best(make, 2)
    other_nodes = sum(n.op == "call_function" for n in made.graph.nodes)
    added = import_milliseconds(processes)
    return "\n".join(
        [
            f"| {nodes:,} ATen calls of {layers} layers | primtorch | torch |",
            "|---|---:|---:|",
            f"| an operator on descriptors, us: median (mean) | {specs[0]:.2f} ({specs[1]:.2f}) | |",
            f"| an operator through the dispatcher, us: median (mean) | {dispatch[0]:.1f} ({dispatch[1]:.1f}) "
            f"| {other_dispatch[0]:.1f} ({other_dispatch[1]:.1f}) |",
            f"| the graph to prims; make_fx with core_aten_decompositions(): s | {lowering:.3f} | {making:.3f} |",
            f"| calls in the result | {lowered:,} | {other_nodes:,} |",
            f"| added by the import, ms of CPU | {added:.0f} | |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--processes", type=int, default=7, help="of which the import's time is the median")
    parser.add_argument("--write", type=Path, help="write the page here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = measure(options.layers, options.processes)
    print(table)
    if options.write:
        what = (__doc__ or "").partition("The graph:")[2].strip()
        versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} on "
        options.write.write_text(
            f"# Speed of primtorch\n\n    {' '.join(['python', *sys.argv])}\n\n{versions}{platform.machine()}, "
            f"{os.cpu_count()} cores shared with other work, CPU build.\n\nThe graph: {what}\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
