"""Runs the cases for a GPU in Triton's interpreter; prints one JSON line a case. Started with TRITON_INTERPRET=1.

python device_worker.py "layer norm" softmax
"""

import json
import sys
import traceback

import torch
import torch.utils._pytree as pytree
from device_cases import CASES, FEW, Case
from triton_interpreter import InterpreterBackend

import primtorch
import torchinductor


def error(found: object, truth: object) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(truth), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def run(case: Case) -> dict[str, float]:
    """Relative errors against float64: the kernels', eager's."""
    inputs = case.inputs(FEW)
    compiled = torchinductor.compile_graph(primtorch.lower(primtorch.trace(case.program, *inputs)), inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth = pytree.tree_map(torch.Tensor.detach, case.program(*wide))
    eager = pytree.tree_map(torch.Tensor.detach, case.program(*inputs))
    return {"error": error(compiled(*inputs), truth), "eager": error(eager, truth)}


torchinductor.register_codegen("cpu", InterpreterBackend())
for name in sys.argv[1:]:
    try:
        reply = run(CASES[name])
    except Exception:
        reply = {"failure": traceback.format_exc()[-2500:]}
    print(json.dumps({"case": name, **reply}), flush=True)
