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
from column_cases import CASES, Case
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
    walks = sum("for tile in" in text for text in compiled.sources.values())
    return {"walks": walks, "error": error(compiled(*inputs), truth), "eager": error(eager, truth)}


plan.WALK_TILE, plan.WALK_WARPS, plan.WALK_STEPS = 128, 12, 2
torchinductor.register_codegen("cpu", Walking())
for name in sys.argv[1:]:
    try:
        reply = run(CASES[name])
    except Exception:
        reply = {"failure": traceback.format_exc()[-2500:]}
    print(json.dumps({"case": name, **reply}), flush=True)
