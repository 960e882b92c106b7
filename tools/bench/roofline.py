"""Programs that a memory's speed bounds, beside the time of a copy: eager, torch.compile and this stack in one process,
through `torchcompile.compile`.

    python tools/bench/roofline.py --device cuda                         the 17 programs that the means are over
    python tools/bench/roofline.py --more --write docs/results/cpu_kernels.md
    python tools/bench/roofline.py --only softmax --no-compile           one program, without torch.compile

"of copy" is the time that a copy of as many bytes as the program must move takes, over its own. Errors are relative to
float64, eager's beside the compilers'. A program that leaves compiled code ends the run.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpu_time import median_on_gpu
from programs import Program, programs

import torchcompile

Run = Callable[[], object]
Compiler = Callable[[Callable[..., object]], Callable[..., object]]


@dataclass(frozen=True)
class Row:
    """What was measured of a program: milliseconds and errors by compiler, "eager" among them; `floor` is a copy's."""

    name: str
    floor: float
    ms: Mapping[str, float]
    errors: Mapping[str, float]
    first: Mapping[str, float]


def in_turns(runs: Mapping[str, Run], seconds: float) -> dict[str, float]:
    """Milliseconds of each, on the clock, by turns, so that a busy machine disturbs all alike; the lower quartile."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 7:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(values)[len(values) // 4] * 1e3 for name, values in times.items()}


def milliseconds(device: str, runs: Mapping[str, Run], seconds: float) -> dict[str, float]:
    if device == "cuda":
        return {name: median_on_gpu(run) for name, run in runs.items()}
    return in_turns(runs, seconds)


def copy_rate(device: str) -> float:
    """Bytes a millisecond that a large copy moves, reads and writes counted."""
    source = torch.empty(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (ms,) = milliseconds(device, {"copy": lambda: target.copy_(source)}, 1.0).values()
    return 2 * source.numel() / ms


def error(found: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> float:
    """The largest relative error of the results."""
    return max(
        float((a.detach().double() - b.double()).norm() / (b.double().norm() + 1e-300))
        for a, b in zip(found, truth, strict=True)
    )


def in_float64(program: Program) -> tuple[torch.Tensor, ...]:
    """What the program gives where nothing is rounded to 32 bits."""

    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t

    gradient = program.gradient.double() if program.gradient is not None else None
    inputs = tuple(map(wide, program.inputs))
    return tuple(t.detach() for t in replace(program, inputs=inputs, gradient=gradient).run(program.function))


def measure(program: Program, rate: float, compilers: Mapping[str, Compiler], seconds: float, device: str) -> Row:
    functions: dict[str, Callable[..., object]] = {"eager": program.function}
    first = {}
    for name, compiler in compilers.items():
        functions[name] = compiler(program.function)
        start = time.perf_counter()
        program.run(functions[name])
        first[name] = time.perf_counter() - start
    errors = {}
    truth = None if program.drawn else in_float64(program)
    for name, function in functions.items():
        found = program.run(function)
        errors[name] = math.nan if truth is None else error(found, truth)
        del found
    del truth
    runs = {name: (lambda function=function: program.run(function)) for name, function in functions.items()}
    return Row(program.name, program.nbytes / rate, milliseconds(device, runs, seconds), errors, first)


def cells(row: Row, compilers: Mapping[str, Compiler]) -> str:
    """A line of the table."""
    eager = row.ms["eager"]
    texts = [row.name, f"{row.floor:.4g}", f"{eager:.4g}"]
    for name in compilers:
        ms = row.ms[name]
        texts += [f"{ms:.4g}", f"{eager / ms:.2f}", f"{row.floor / ms:.3f}", f"{row.errors[name]:.0e}"]
    texts.append(f"{row.errors['eager']:.0e}")
    return f"| {' | '.join(texts)} |"


def means(rows: list[Row], compilers: Mapping[str, Compiler]) -> list[str]:
    """The geometric means over the programs, and where the last compiler is behind another one."""
    lines = []
    for name in compilers:
        faster = statistics.geometric_mean(row.ms["eager"] / row.ms[name] for row in rows)
        share = statistics.geometric_mean(row.floor / row.ms[name] for row in rows)
        lines.append(f"Geometric means over {len(rows)}, {name}: {faster:.2f}x eager, {share:.3f} of the copy.")
    ours = list(compilers)[-1]
    for other in list(compilers)[:-1]:
        behind = [f"{row.name} ({row.ms[other] / row.ms[ours]:.3f})" for row in rows if row.ms[ours] > row.ms[other]]
        lines.append(f"Behind {other}: {', '.join(behind) or 'nothing'}.")
    return lines


def machine(device: str, rate: float) -> str:
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    )
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {where}; a copy moves "
        f"{rate / 1e6:.1f} GB/s."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--more", action="store_true", help="with the further programs")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each is measured on a CPU")
    parser.add_argument("--write", type=Path, help="the page")
    options = parser.parse_args()
    torch.manual_seed(0)
    compilers: dict[str, Compiler] = {} if options.no_compile else {"torch.compile": torch.compile}
    compilers["torchcompile"] = torchcompile.compile
    rate = copy_rate(options.device)
    head = "| program | copy ms | eager ms |" + "".join(f" {c} ms | x eager | of copy | error |" for c in compilers)
    lines = [head + " eager error |", "|" + "---|" * (4 + 4 * len(compilers))]
    print(machine(options.device, rate), *lines, sep="\n", flush=True)
    rows = []
    for program in programs(options.device, options.only, options.more):
        rows.append(measure(program, rate, compilers, options.seconds, options.device))
        lines.append(cells(rows[-1], compilers))
        print(lines[-1], flush=True)
    assert not torchcompile.report().surprises, torchcompile.report()
    behind = ["", *means(rows, compilers)]
    for name in compilers:
        behind.append(f"First calls, {name}: {sum(row.first[name] for row in rows):.1f} s in all.")
    print("\n".join(behind))
    if options.write:
        title = "GPU" if options.device == "cuda" else "CPU"
        page = [f"# Programs that memory bounds, on a {title}", "", machine(options.device, rate), "", *lines, *behind]
        options.write.write_text("\n".join([*page, "", f"`python {' '.join(sys.argv)}`", ""]))


if __name__ == "__main__":
    main()
