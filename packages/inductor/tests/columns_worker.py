"""Runs the programs whose columns are summed up by the kernels of their rows in Triton's interpreter, with few small
tiles for a program; prints one JSON line a program. Started with TRITON_INTERPRET=1.

python columns_worker.py "layer norm" "in halves"
"""

import json
import sys
import traceback
from dataclasses import replace

import torch
import torch.utils._pytree as pytree
from column_cases import CASES, Case, of_any_number, of_any_number_in_eager
from prim_graphs import symbolic
from triton_interpreter import InterpreterBackend

import primtorch
import torchinductor
from torchinductor.codegen.triton import plan
from torchinductor.schemas import ColumnSums


class Walking(InterpreterBackend):
    """Walks over few rows."""

    traits = replace(InterpreterBackend.traits, columns=ColumnSums(4096, 16384, programs=0, rows=1, least=0))


def error(found: object, truth: object) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(truth), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def run(case: Case) -> dict[str, float]:
    """How many kernels walk; relative errors against float64: the kernels', eager's."""
    inputs = case.inputs()
    compiled = torchinductor.compile_graph(primtorch.lower(primtorch.trace(case.program, *inputs)), inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth = pytree.tree_map(torch.Tensor.detach, case.program(*wide))
    eager = pytree.tree_map(torch.Tensor.detach, case.program(*inputs))
    return {"walks": walks_of(compiled), "error": error(compiled(*inputs), truth), "eager": error(eager, truth)}


def walks_of(compiled: torchinductor.CompiledGraph) -> int:
    return sum("for tile in" in text for text in compiled.sources.values())


def run_of_any_number() -> dict[str, float]:
    """One kernel for every number of rows: the worst errors."""
    width, found = 24, {"error": 0.0, "eager": 0.0}
    shapes = lambda n: [((n, width), torch.float32)] * 2 + [((width,), torch.float32)]  # noqa: E731
    compiled = torchinductor.compile_graph(symbolic(of_any_number, (6,), shapes))
    for n in (1, 2, 5, 64, 201):
        inputs = [torch.randn(shape) for shape in ((n, width), (n, width), (width,))]
        truth, eager = of_any_number_in_eager(*[x.double() for x in inputs]), of_any_number_in_eager(*inputs)
        found = {"error": max(found["error"], error(compiled(n, *inputs), truth)),
                 "eager": max(found["eager"], error(eager, truth))}  # fmt: skip
    rows, products, sums, scaled = compiled(0, *[torch.empty(0, width)] * 2, torch.ones(width))
    assert not products.any() and not sums.any() and rows.shape == scaled.shape == (0, width)
    return {"walks": walks_of(compiled), **found}


plan.WALK_TILE, plan.HEAVY_WALK_TILE, plan.WALK_WARPS, plan.WALK_STEPS = 128, 128, 24, 2
torchinductor.register_codegen("cpu", Walking())
torch.manual_seed(0)
for name in sys.argv[1:]:
    try:
        reply = run(CASES[name]) if name in CASES else run_of_any_number()
    except Exception:
        reply = {"failure": traceback.format_exc()[-2500:]}
    print(json.dumps({"case": name, **reply}), flush=True)
