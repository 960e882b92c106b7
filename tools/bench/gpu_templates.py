"""Matrix products on a GPU as templates, with what stands around them, beside cuBLAS and kernels of their own.

    python tools/bench/gpu_templates.py [--only ffn] [--no-build]

Each case is compiled twice, with `InductorOptions(templates=...)` off and on, and run in turns with eager. Errors are
relative to float64, eager's own in parentheses; exits with status 1 where the template's is more than twice eager's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from gpu_kernels import ROOT, median_ms

sys.path.insert(0, str(ROOT / "packages/aotautograd/src"))

import torch
import torch.nn.functional as F

import primtorch
import torchinductor
from torchinductor import InductorOptions


class Case(NamedTuple):
    program: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    operations: int  # multiplications and additions of the product


def cases(scale: int = 1) -> dict[str, Case]:
    """By name; `scale` divides the sizes."""
    n, d, f, h, s, e = 8192 // scale, 1024 // scale, 4096 // scale, 128 // scale, 512 // scale, 64
    residual = lambda x, w, b, r: F.linear(x, w, b) + r
    return {
        "square": Case(torch.mm, ((f, f), (f, f)), 2 * f**3),
        "ffn up, gelu": Case(lambda x, w, b: F.gelu(F.linear(x, w, b)), ((n, d), (f, d), (f,)), 2 * n * d * f),
        "ffn down, residual": Case(residual, ((n, f), (d, f), (d,), (n, d)), 2 * n * d * f),
        "projection, residual": Case(residual, ((n, d), (d, d), (d,), (n, d)), 2 * n * d * d),
        "float32 operands": Case(
            lambda x, w: torch.mm(x.float().to(x.dtype), w.float().to(w.dtype)).relu(), ((n, d), (d, d)), 2 * n * d * d
        ),
        "scores, scaled": Case(
            lambda q, k: torch.bmm(q, k.transpose(1, 2)) * 0.125, ((h, s, e), (h, s, e)), 2 * h * s * s * e
        ),
    }


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def measure(case: Case, device: str) -> dict[str, float]:
    """Milliseconds and relative errors of eager, of calls of cuBLAS, and of templates."""
    inputs = [(torch.randn(s, device=device) / s[-1] ** 0.5).bfloat16() for s in case.shapes]
    truth = case.program(*(x.double() for x in inputs))
    row = {"eager": median_ms(lambda: case.program(*inputs)), "eager error": error(case.program(*inputs), truth)}
    graph = primtorch.lower(primtorch.trace(case.program, *inputs))
    for name, asked in (("calls", False), ("templates", True)):
        compiled = torchinductor.compile_graph(graph, inputs, InductorOptions(templates=asked))
        if asked and compiled.stats.aten_calls:
            raise RuntimeError("the product is a call of ATen")
        row[name] = median_ms(lambda compiled=compiled: compiled(*inputs))
        row[f"{name} error"] = error(compiled(*inputs)[0], truth)
    return row


def main(device: str = "cuda", scale: int = 1) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-build", action="store_true", help="the C++ extension is built already")
    arguments = parser.parse_args()
    if not arguments.no_build:
        subprocess.run([sys.executable, str(ROOT / "tools/build_extensions.py"), "inductor"], check=True)
    torch.manual_seed(0)
    wrong = 0
    print(
        "| case | eager ms | calls ms | templates ms | TFLOP/s | templates' error (eager) |\n|---|---|---|---|---|---|"
    )
    for name, case in cases(scale).items():
        if arguments.only in name:
            row = measure(case, device)
            wrong += row["templates error"] > 2 * row["eager error"]
            rate = case.operations / row["templates"] / 1e9
            times = " | ".join(f"{row[kind]:.4f}" for kind in ("eager", "calls", "templates"))
            print(
                f"| {name} | {times} | {rate:.0f} | {row['templates error']:.1e} ({row['eager error']:.1e}) |",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
