"""Single kernels on the CPU beside the copy roofline: eager, torch.compile and this stack, in turns in one process.

    python tools/bench/cpu_kernels.py                                    every case
    python tools/bench/cpu_kernels.py --only softmax --no-compile        one case, without torch.compile
    python tools/bench/cpu_kernels.py --write docs/results/cpu_kernels.md

"roofline" is the time that a copy of as many bytes as the case must move takes, over the measured time. Errors are
relative to float64, eager's own beside ours.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import torchcompile

ROWS, COLUMNS, VOCABULARY = 2048, 1024, 8192


class Case(NamedTuple):
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    bytes: int
    backward: bool = False
    random: bool = False


def _rms_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + r
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w, h


def _rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return q * cos + torch.cat((-q[..., 64:], q[..., :64]), -1) * sin


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)


def cases() -> dict[str, Case]:
    """The cases by name; what each moves at least, in bytes."""
    n, d = ROWS, COLUMNS
    x, y, w, b = torch.randn(n, d), torch.randn(n, d), torch.randn(d), torch.randn(d)
    logits, targets = torch.randn(512, VOCABULARY), torch.randint(0, VOCABULARY, (512,))
    table, ids = torch.randn(VOCABULARY, d), torch.randint(0, VOCABULARY, (n,))
    q, cos, sin = torch.randn(8, 32, 256, 128), torch.randn(256, 128), torch.randn(256, 128)
    images, scale, shift = torch.randn(8, 64, 112, 112), torch.randn(64), torch.randn(64)
    mean, var = torch.zeros(64), torch.ones(64)
    one = n * d * 4
    return {
        "pointwise_chain": Case(lambda x, y: torch.sigmoid(x * 1.7 + y).mul(x).tanh() + y, (x, y), 3 * one),
        "softmax": Case(lambda x: torch.softmax(x, -1), (x,), 2 * one),
        "softmax_columns": Case(lambda x: torch.softmax(x, 0), (x,), 2 * one),
        "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (d,), w, b), (x, w, b), 2 * one),
        "rms_norm_residual": Case(_rms_norm, (x, y, w), 4 * one),
        "bias_gelu_residual": Case(lambda x, b, r: F.gelu(x + b, approximate="tanh") + r, (x, b, y), 3 * one),
        "column_sum": Case(lambda x: x.sum(0), (x,), one),
        "row_sum": Case(lambda x: x.sum(1), (x,), one),
        "full_sum": Case(lambda x: x.sum(), (x,), one),
        "full_var_mean": Case(lambda x: torch.var_mean(x, dim=None), (x,), one),
        "column_var_mean": Case(lambda x: torch.var_mean(x, 0), (torch.randn(8 * n, d // 2),), 4 * one),
        "argmax": Case(lambda x: x.argmax(-1), (x,), one),
        "cumsum": Case(lambda x: x.cumsum(-1), (x,), 2 * one),
        "transpose_scale": Case(lambda x: (x.t() * 2).contiguous(), (x,), 2 * one),
        "cross_entropy": Case(_loss, (logits, targets), 512 * VOCABULARY * 4),
        "embedding_layer_norm": Case(
            lambda e, i, p, w, b: F.layer_norm(F.embedding(i, e) + p, (d,), w, b), (table, ids, y, w, b), 3 * one
        ),
        "rope": Case(_rope, (q, cos, sin), 2 * q.numel() * 4),
        "batch_norm_relu": Case(
            lambda x, w, b, m, v: F.relu(F.batch_norm(x, m, v, w, b, True)),
            (images, scale, shift, mean, var),
            3 * images.numel() * 4,
        ),
        "batch_norm_channels_last": Case(
            lambda x, w, b, m, v: F.relu(F.batch_norm(x, m, v, w, b, True)),
            (images.contiguous(memory_format=torch.channels_last), scale, shift, mean, var),
            3 * images.numel() * 4,
        ),
        "max_pool": Case(lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), (images,), images.numel() * 5),
        "swiglu": Case(lambda g, u: F.silu(g) * u, (x, y), 3 * one),
        "dropout_add": Case(lambda x, y: F.dropout(x, 0.1, True) + y, (x, y), 3 * one, random=True),
        "layer_norm_backward": Case(lambda x, w, b: F.layer_norm(x, (d,), w, b), (x, w, b), 5 * one, backward=True),
        "gelu_softmax_backward": Case(
            lambda x, w, b: torch.softmax(F.gelu(x * w + b), -1), (x, w, b), 5 * one, backward=True
        ),
    }


def _runner(case: Case, function: Callable[..., Any]) -> Callable[[], Any]:
    if not case.backward:
        return lambda: function(*case.inputs)
    leaves = [t.detach().requires_grad_() for t in case.inputs]
    seed = torch.ones_like(case.inputs[0]).cumsum(-1)

    def run() -> Any:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(seed)
        return tuple(leaf.grad for leaf in leaves)

    return run


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _error(found: Any, truth: Any) -> float:
    worst = 0.0
    for a, b in zip(_tensors(found), _tensors(truth), strict=True):
        worst = max(worst, float((a.double() - b.double()).norm() / (b.double().norm() + 1e-300)))
    return worst


def _medians(runners: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Milliseconds of each, run in turns so that a busy machine disturbs all alike; the lower quartile."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values():
        for _ in range(3):
            run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 7:
        for name, run in runners.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(values)[len(values) // 4] * 1e3 for name, values in times.items()}


def measure(name: str, case: Case, copy_rate: float, compilers: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One row of the table."""
    wide = case._replace(inputs=tuple(t.double() if t.is_floating_point() else t for t in case.inputs))
    truth = _runner(wide, case.function)()
    runners = {"eager": _runner(case, case.function)}
    first = {}
    for compiler, compile_ in compilers.items():
        runner = _runner(case, compile_(case.function))
        start = time.perf_counter()
        runner()
        first[compiler] = time.perf_counter() - start
        runners[compiler] = runner
    errors = {c: float("nan") if case.random else _error(run(), truth) for c, run in runners.items()}
    floor = case.bytes / copy_rate * 1e3
    milliseconds = _medians(runners, seconds)
    return {"name": name, "floor": floor, "ms": milliseconds, "first": first, "errors": errors}


def row_text(row: dict[str, Any], compilers: list[str]) -> str:
    eager = row["ms"]["eager"]
    cells = [row["name"], f"{row['floor']:.2f}", f"{eager:.2f}"]
    for c in compilers:
        ms = row["ms"][c]
        cells += [f"{ms:.2f}", f"{eager / ms:.2f}", f"{row['floor'] / ms:.2f}", f"{row['errors'][c]:.0e}"]
    cells.append(f"{row['errors']['eager']:.0e}")
    return f"| {' | '.join(cells)} |"


def _copy_rate() -> float:
    """Bytes a second that a copy of 64 MiB moves, reads and writes counted."""
    source = torch.empty(2**24)
    target = torch.empty_like(source)
    (ms,) = _medians({"copy": lambda: target.copy_(source)}, 1.0).values()
    return 2 * source.numel() * 4 / ms * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each case is measured")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    compilers: dict[str, Any] = {} if arguments.no_compile else {"torch.compile": torch.compile}
    compilers["torchcompile"] = torchcompile.compile
    rate = _copy_rate()
    head = "| case | roofline ms | eager ms |" + "".join(f" {c} ms | speedup | roofline | error |" for c in compilers)
    lines = [head + " eager error |", "|" + "---|" * (4 + 4 * len(compilers))]
    print("\n".join(lines), flush=True)
    rows = []
    for name, case in cases().items():
        if arguments.only in name:
            rows.append(measure(name, case, rate, compilers, arguments.seconds))
            lines.append(row_text(rows[-1], list(compilers)))
            print(lines[-1], flush=True)
    assert not torchcompile.report().surprises, torchcompile.report()
    lines.append("")
    for c in compilers:
        means = [
            math.exp(sum(map(math.log, values)) / len(rows))
            for values in ([r["ms"]["eager"] / r["ms"][c] for r in rows], [r["floor"] / r["ms"][c] for r in rows])
        ]
        lines.append(f"Geometric means, {c}: {means[0]:.2f}x eager, {means[1]:.2f} of the copy roofline.")
    lines.append(
        f"\ntorch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, copy {rate / 1e9:.1f} GB/s\n"
    )
    lines.append(f"`python {' '.join(sys.argv)}`")
    print("\n".join(lines[len(rows) + 2 :]))
    if arguments.write:
        arguments.write.write_text("# cpu_kernels\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
