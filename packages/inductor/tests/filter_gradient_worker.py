"""Runs gradients of depthwise filters in Triton's interpreter; prints one JSON line a case. Started with
TRITON_INTERPRET=1.

python filter_gradient_worker.py                          the table, and any number of images
python filter_gradient_worker.py --random SEED COUNT      cases that are drawn, with tiles that are drawn too
"""

import json
import random
import sys
import traceback
from dataclasses import replace

import torch
from filter_gradient_cases import CASES, LEFT, Case, drawn
from prim_graphs import symbolic
from triton_interpreter import InterpreterBackend

import primtorch
import torchinductor
from torchinductor import CompiledGraph, InductorOptions, compile_graph
from torchinductor.codegen.triton import filter_gradient


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative; infinite where what is not finite is not the same."""
    whole = truth.isfinite()
    if not torch.equal(found.double()[~whole], truth[~whole]) or not found[whole].isfinite().all():
        return float("inf")
    return float((found.double() - truth)[whole].norm() / truth[whole].norm().clamp(min=1e-30))


def designs(compiled: CompiledGraph) -> int:
    return sum("_filter_gradient_" in text for text in compiled.sources.values())


def run(case: Case) -> dict[str, float]:
    """How many kernels of the design there are; relative errors against float64: ours, eager's; what one may be."""
    inputs = case.inputs()
    gm = primtorch.lower(primtorch.trace(case.program, *inputs))
    compiled = compile_graph(gm, inputs, InductorOptions(verify=True))
    found, eager, truth = compiled(*inputs), case.program(*inputs), case.program(*case.inputs(torch.float64))
    for ours, theirs in zip(found, eager, strict=True):
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride() and ours.shape == theirs.shape
    return {
        "made": designs(compiled),
        "error": max(map(error, found, truth)),
        "limit": max(2 * max(map(error, eager, truth)), torch.finfo(case.dtype).eps),
    }


def run_of_any_number() -> dict[str, float]:
    """One kernel for every number of images, of which there may be none; the convolution itself, too.

    Of a size that is not known all programs are launched that a device has room for: here, one after the other, few.
    """
    filter_gradient.TILES = {taps: replace(tile, programs=24) for taps, tile in filter_gradient.TILES.items()}
    case = Case(2, 12, (7, 9), (3, 3), (2, 1), (1, 1), image=True, bias=True)
    settings = case.stride, case.padding, case.dilation, False, (0, 0), case.channels

    def program(p, n, gradient, image, filters):  # type: ignore[no-untyped-def]
        images = [p.permute(rows, (0, 3, 1, 2)) for rows in (gradient, image)]
        result = p.convolution(images[1], filters, None, *settings)
        return *p.convolution_backward(*images, filters, [case.channels], *settings, (True, True, True)), result

    shapes = lambda n: [  # noqa: E731
        ((n, *case.made, case.channels), case.dtype),
        ((n, *case.size, case.channels), case.dtype),
        ((case.channels, 1, *case.kernel), case.dtype),
    ]
    compiled = compile_graph(symbolic(program, (6,), shapes))
    assert not [part.name for part in compiled.program.parts if not part.generated]
    made = {"made": designs(compiled), "error": 0.0, "limit": torch.finfo(case.dtype).eps}
    for n in (1, 2, 5, 16, 0):
        inputs = [torch.randn(shape).to(dtype) for shape, dtype in shapes(n)]
        found = compiled(n, *inputs)
        images = [rows.permute(0, 3, 1, 2) for rows in inputs[:2]]
        exact = [x.double() for x in (*images, inputs[2])]
        geometry = case.stride, case.padding, case.dilation, case.channels
        truth = (*case.program(*exact), torch.nn.functional.conv2d(exact[1], exact[2], None, *geometry))
        pairs = zip(found, truth, strict=True)
        made["error"] = max(made["error"], *(error(a, b) if n else float(a.abs().sum()) for a, b in pairs))
    return made


def with_tile(case: Case, draw: random.Random) -> dict[str, float]:
    """Small tiles, so that a program goes through several, and there are several programs."""
    along, vector, warps = draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 4]), draw.choice([1, 2])
    filter_gradient.TILES = {25: filter_gradient.Tile(along, vector, warps, draw.choice([1, 7, 24]))}
    filter_gradient.STEPS = draw.choice([1, 2])
    filter_gradient.CHANNELS = draw.choice([4, 16, 64])
    return run(case)


def main() -> None:
    torchinductor.register_codegen("cpu", InterpreterBackend())
    if sys.argv[1:2] == ["--random"]:
        seed, count = map(int, sys.argv[2:])
        draws = {str(number): random.Random(number) for number in range(seed, seed + count)}
        runs = {name: (lambda draw=draw: with_tile(drawn(draw), draw)) for name, draw in draws.items()}
    else:
        runs = {name: (lambda case=case: run(case)) for name, case in {**CASES, **LEFT}.items()}
        runs["any number"] = run_of_any_number
    for name, call in runs.items():
        try:
            reply = call()
        except Exception:
            reply = {"failure": traceback.format_exc()[-2500:]}
        print(json.dumps({"case": name, **reply}), flush=True)


main()
