"""Runs template cases in Triton's interpreter; prints one JSON line a case. Started with TRITON_INTERPRET=1.

python template_worker.py                          the table
python template_worker.py "a chain" addmm          some of it
python template_worker.py --random SEED COUNT      random programs, in float64
"""

import json
import random
import sys
import traceback

import torch
import torch.utils._pytree as pytree
from template_cases import CASES, Case
from test_inductor_in_place import STEPS, SUMMARIES, RandomProgram
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


def run_random(seed: int) -> dict[str, float]:
    """The relative error of a random program's results against eager's, which are float64 too."""
    draw = random.Random(seed)
    steps = [
        (draw.choice(sorted(STEPS)), draw.randrange(4), draw.randrange(4), draw.random() < 0.6)
        for _ in range(draw.randint(2, 6))
    ]
    results = [(draw.choice(sorted(SUMMARIES)), draw.randrange(3)) for _ in range(draw.randint(1, 3))]
    steps[-1], results[0] = (*steps[-1][:3], True), (results[0][0], 0)  # a product that is read, and not a tiny one
    program = RandomProgram(draw.choice((18, 34, 70)), draw.choice((66, 80)), tuple(steps), tuple(results))
    inputs = program.inputs()
    gm = primtorch.lower(primtorch.trace(program, *inputs))
    compiled = compile_graph(gm, inputs, InductorOptions(templates=True, verify=True))
    found = compiled(*[x.clone() for x in inputs])
    for a, b in zip(found, program(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)
    return {"templates": sum("matmul_" in source for source in compiled.sources.values())}


def main() -> None:
    torchinductor.register_codegen("cpu", InterpreterBackend())
    names = sys.argv[1:] or list(CASES)
    if names[0] == "--random":
        seed, count = map(int, names[1:])
        names = [str(number) for number in range(seed, seed + count)]
    for name in names:
        try:
            reply = run(CASES[name]) if name in CASES else run_random(int(name))
        except Exception:
            reply = {"failure": traceback.format_exc()[-2500:]}
        print(json.dumps({"case": name, **reply}), flush=True)


main()
