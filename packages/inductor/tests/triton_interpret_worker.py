"""Runs the small kernel set in Triton's interpreter, and prints one JSON line a case. Started with TRITON_INTERPRET=1."""

import json
import sys
import traceback

import torch
from triton_interpreter import load
from triton_kernel_set import small_cases

from torchinductor.codegen.triton.split import split_reductions
from torchinductor.codegen.triton.writer import write


def run(case) -> float:
    inputs = case.inputs("cpu")
    tensors = dict(inputs)
    kernels = [part for kernel in case.kernels for part in split_reductions(kernel)]
    for kernel in kernels:
        for name in kernel.writes:
            buffer = kernel.buffers[name]
            shape = [s.as_int() for s in buffer.shape]
            filler = 0 if name in case.zeroed or buffer.dtype is torch.int64 else float("nan")
            tensors.setdefault(name, torch.full(shape, filler, dtype=buffer.dtype))
    for kernel in kernels:
        source = write(kernel)
        function = load(source.text, source.name)
        grid = tuple(g.as_int() for g in source.grid)
        function[grid](*(tensors[b] for b in source.buffers))
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    worst = 0.0
    expectations = case.eager(**wide)
    scales = expectations if case.scale is None else case.scale(**wide)
    for name, expected, scale in zip(case.outputs, expectations, scales, strict=True):
        got = tensors[name].double()
        if case.exact:
            worst = max(worst, float((got != expected).sum()))
        else:
            worst = max(worst, float((got - expected).norm() / scale.norm()))
    return worst


def main() -> None:
    torch.manual_seed(int(sys.argv[1]))
    for case in small_cases():
        try:
            reply = {"case": case.name, "error": run(case)}
        except Exception:
            reply = {"case": case.name, "failure": traceback.format_exc()[-2500:]}
        print(json.dumps(reply), flush=True)


main()
