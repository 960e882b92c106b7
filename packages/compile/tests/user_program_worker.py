"""Runs programs of a file of `user_programs` in a plain process, eager and compiled; prints one JSON line each.

python user_program_worker.py FILE SEED [NAME ...]
"""

import json
import math
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.utils._pytree as pytree
from user_programs import Program, of_file

import torchcompile
from primtorch.testing import double_precision

OPTIONS = {"eager_random": True}


def run(program: Program, wrap: Any, seed: int) -> tuple[list[Any], list[str]]:
    """What it returns, copied, and what it warned of."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        values = program.run(wrap)
    leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(values)]
    return leaves, sorted({f"{w.category.__name__}: {w.message}" for w in caught})


def difference(a: Any, b: Any) -> str:
    """How two values differ; empty where they do not. Both are computed in float64, from the same numbers."""
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return f"{type(a)} {a.dtype} {tuple(a.shape)} and {type(b)} {getattr(b, 'dtype', '')} {getattr(b, 'shape', '')}"
        if a.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        if not (a.is_floating_point() or a.is_complex()):
            return "" if torch.equal(a, b) else f"{a} and {b}"
        error = (a - b).abs().max().item() if a.numel() else 0.0
        scale = b.abs().max().item() if b.numel() else 0.0
        return "" if error <= 1e-8 * (1 + scale) else f"off by {error:.2g} of {scale:.2g}"
    if isinstance(a, float):
        return "" if type(b) is float and math.isclose(a, b, rel_tol=1e-8, abs_tol=1e-8) else f"{a} and {b}"
    return "" if a == b else f"{a!r} and {b!r}"


def judged(name: str, program: Program, seed: int) -> dict[str, Any]:
    expected, warned = run(program, lambda f: f, seed)
    torchcompile.reset()
    try:
        found, told = run(program, lambda f: torchcompile.compile(f, options=OPTIONS), seed)
    except Exception:
        return {"name": name, "raised": traceback.format_exc()[-3000:]}
    report = torchcompile.report()
    breaks = {b.kind.id for b in report.breaks}
    ignored = {*breaks, "recompiled"} if program.recompiles else breaks
    surprises = [str(e) for e in report.surprises if e.kind.id not in ignored]
    differences = [
        f"{n}: {d}" for n, (a, b) in enumerate(zip(found, expected, strict=False)) if (d := difference(a, b))
    ]
    if len(found) != len(expected):
        differences.append(f"{len(found)} values, {len(expected)}")
    return {
        "name": name, "differences": differences, "surprises": surprises, "breaks": list(map(str, report.breaks)), "expected": program.breaks,
        "warned": [w for w in told if w not in warned], "captured": report.captured,
    }  # fmt: skip


def main() -> None:
    file, seed, *names = sys.argv[1:]
    with double_precision():
        for name, program in of_file(file).items():
            if not names or name in names:
                print(json.dumps(judged(name, program, int(seed))), flush=True)


main()
