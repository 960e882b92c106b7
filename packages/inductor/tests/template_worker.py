"""Runs the template cases in Triton's interpreter; prints one JSON line a case. Started with TRITON_INTERPRET=1."""

import json
import sys
import traceback

import torch
import torch.utils._pytree as pytree
from template_cases import CASES, Case
from triton_interpreter import InterpreterBackend

import primtorch
import torchinductor
from torchinductor import InductorOptions, compile_graph


def error(found: object, truth: object) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(truth), strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def run(case: Case) -> dict[str, float]:
    """Relative errors against float64: the template's, eager's."""
    inputs = case.inputs()
    gm = primtorch.lower(primtorch.trace(case.program, *inputs))
    compiled = compile_graph(gm, inputs, InductorOptions(templates=True, verify=True))
    truth = pytree.tree_map(lambda t: t.detach().double(), case.program(*case.inputs(torch.float64)))
    found = compiled(*[x.clone() for x in inputs])
    return {
        "error": error(found, truth),
        "eager": error(pytree.tree_map(torch.Tensor.detach, case.program(*inputs)), truth),
    }


def main() -> None:
    torchinductor.register_codegen("cpu", InterpreterBackend())
    for name in sys.argv[1:] or CASES:
        try:
            reply = run(CASES[name])
        except Exception:
            reply = {"failure": traceback.format_exc()[-2500:]}
        print(json.dumps({"case": name, **reply}), flush=True)


main()
