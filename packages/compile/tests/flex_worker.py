"""Runs programs of flex_attention by the Triton templates in Triton's interpreter; prints one JSON line a case.

Started with TRITON_INTERPRET=1, and the folder of torchinductor's tests on the path.
"""

import json
import sys
import traceback

import torch
from flex_programs import CASES, F64, Case
from triton_interpreter import InterpreterBackend

import torchcompile
import torchinductor
from torchinductor.codegen.base import KernelSource
from torchinductor.ir import Attention, Template
from torchinductor.schemas import InductorOptions

MADE: list[str] = []  # the directions of the templates that were written


class Noting(InterpreterBackend):
    def generate_template(self, template: Template, options: InductorOptions) -> KernelSource:
        assert isinstance(template, Attention)
        MADE.append(template.direction)
        return super().generate_template(template, options)


def error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    pairs = [
        (a.detach().double().nan_to_num(neginf=0), b.detach().nan_to_num(neginf=0))
        for a, b in zip(found, truth, strict=True)
    ]
    return [float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs]


def run(case: Case) -> dict[str, object]:
    """The relative error of each result and gradient, beside that of the same by plain operators."""
    torchcompile.reset()
    truth = case.run(case.judged, F64)
    compiled = torchcompile.compile(case.program(), fullgraph=True, options={"strict": True})
    MADE.clear()
    found = case.run(compiled)
    return {
        "error": error(found, truth),
        "eager": error(case.run(case.judged), truth),
        "made": sorted(MADE),
    }


def main() -> None:
    torchinductor.register_codegen("cpu", Noting())
    for name in sys.argv[1:] or CASES:
        try:
            reply = run(CASES[name])
        except Exception:
            reply = {"failure": traceback.format_exc()[-2500:]}
        print(json.dumps({"case": name, **reply}), flush=True)


main()
