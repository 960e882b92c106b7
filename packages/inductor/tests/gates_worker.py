"""Runs the gates of GELU, and rows of odd lengths, in Triton's interpreter; prints one JSON line a case. Started with
TRITON_INTERPRET=1.

python gates_worker.py
"""

import json
import math

import torch
import torch.nn.functional as F
from triton_interpreter import InterpreterBackend

import primtorch
import torchinductor
from torchinductor.codegen.triton import plan

CASES = {
    "erf": lambda x: F.gelu(x),
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "one and erf": lambda x: 1 + torch.erf(x),
    "tanh and one": lambda x: torch.tanh(x) + 1,
}


def gate(name: str, dtype: torch.dtype) -> dict[str, object]:
    """The worst errors of ours and of eager's against float64, from -30 to 30 and far out, in units of the larger of
    one and the truth; whether what is far out is the truth."""
    program = CASES[name]
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.randn(2000)]).to(dtype)
    far = torch.tensor([math.inf, -math.inf, math.nan, 6e4, -6e4, 1e4, -1e4, 0.0, -0.0]).to(dtype)
    found = {}
    for place, values in (("near", x), ("far", far)):
        graph = primtorch.lower(primtorch.trace(program, values))
        (ours,) = torchinductor.compile_graph(graph, [values])(values)
        eager, truth = program(values), program(values.double())
        if place == "far":
            found["far"] = torch.equal(torch.nan_to_num(ours, nan=7.0), torch.nan_to_num(truth.to(dtype), nan=7.0))
        else:
            scale = truth.abs().clamp_min(1)
            found["error"] = float(((ours.double() - truth).abs() / scale).max())
            found["eager"] = float(((eager.double() - truth).abs() / scale).max())
    return found


def odd_rows(width: int) -> dict[str, object]:
    """A pointwise kernel of rows whose last program alone checks where the row ends."""
    x, weight = torch.randn(3, width, dtype=torch.float16), torch.randn(3, 1, dtype=torch.float16)
    padded = torch.zeros(3, -(-width // 8) * 8, dtype=torch.float16)[:, :width].copy_(x)
    program = lambda x, weight: x * weight
    compiled = torchinductor.compile_graph(primtorch.lower(primtorch.trace(program, padded, weight)), [padded, weight])
    (text,) = compiled.sources.values()
    return {"branches": f"<= {width}:" in text, "equal": torch.equal(compiled(padded, weight)[0], x * weight)}


torchinductor.register_codegen("cpu", InterpreterBackend())
torch.manual_seed(0)
for name in CASES:
    for dtype in (torch.float32, torch.float16):
        print(json.dumps({"case": f"{name}, {dtype}", **gate(name, dtype)}), flush=True)
plan.LONG_LINE, plan.ROW_BLOCK = 64, 32
for width in (60, 62, 64, 124):
    print(json.dumps({"case": f"rows of {width}", **odd_rows(width)}), flush=True)
