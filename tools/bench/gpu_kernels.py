"""Generated Triton kernels on a GPU: values against float64, times beside eager, torch.compile and the copy roofline.

    python tools/bench/gpu_kernels.py [--only softmax] [--no-compile] [--no-build]

Every kernel of packages/inductor/tests/triton_kernel_set.py runs through the C++ executor. Prints a line a case and a
table at the end; exits with status 1 if a value is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("packages/primtorch/src", "packages/inductor/src", "packages/inductor/tests"):
    sys.path.insert(0, str(ROOT / folder))

import torch  # noqa: E402
from gpu_time import median_on_gpu  # noqa: E402


def copy_bandwidth() -> float:
    """Bytes moved a millisecond by a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_on_gpu(lambda: target.copy_(source))


def program_of(case, inputs, backend, options):
    """The case as a flat program: allocations, launches, output."""
    from torchinductor.program import Alloc, AtenCall, Output, Program, Slot, TensorInput

    slots = {name: i for i, name in enumerate(inputs)}
    specs = tuple(
        TensorInput(n, slots[n], t.dtype, t.device, tuple(t.shape), tuple(t.stride())) for n, t in inputs.items()
    )
    kernels = [k for kernel in case.kernels for k in backend.legalize(kernel, options)]
    sources = [backend.generate(k, options) for k in kernels]
    built = backend.build(sources, options)
    instructions = []
    for position, (kernel, source) in enumerate(zip(kernels, sources, strict=True)):
        for name in kernel.writes:
            if name not in slots:
                slots[name] = len(slots)
                buffer = kernel.buffers[name]
                instructions.append(
                    Alloc(slots[name], buffer.shape, buffer.strides, buffer.dtype, torch.device("cuda", 0))
                )
                if name in case.zeroed:
                    instructions.append(AtenCall(torch.ops.aten.zero_.default, (Slot(slots[name]),), (), (None,)))
        arguments = tuple(slots[b] for b in kernel.arguments)
        instructions.append(backend.instruction(kernel, source, position, arguments))
    instructions.append(Output(tuple(Slot(slots[name]) for name in case.outputs)))
    return Program(specs, (), len(slots), (), tuple(instructions), launchers=built.launchers), built


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm, in float64, by row blocks to bound memory."""
    difference = total = 0.0
    for a, b in zip(got.reshape(-1).split(2**24), expected.reshape(-1).split(2**24), strict=True):
        wide = b.double()
        difference += float((a.double() - wide).pow(2).sum())
        total += float(wide.pow(2).sum())
    return math.sqrt(difference / max(total, 1e-300))


def check(case, run, backend, options) -> dict[str, float]:
    """Our error and eager's own error, each against eager in float64."""
    inputs = case.inputs("cuda")
    program, _ = program_of(case, inputs, backend, options)
    got = run(program)(list(inputs.values()))
    torch.cuda.synchronize()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    reference = case.eager(**wide)
    eager = case.eager(**inputs)
    if case.exact:
        return {"error": float((got[0] != eager[0]).sum()), "eager_error": 0.0}
    errors = [relative_error(g, r) for g, r in zip(got, reference, strict=True)]
    own = [relative_error(e, r) for e, r in zip(eager, reference, strict=True)]
    return {"error": max(errors), "eager_error": max(own)}


def measure(case, run, backend, options, floor_rate: float, with_compile: bool) -> dict[str, object]:
    inputs = case.inputs("cuda")
    begin = time.perf_counter()
    program, built = program_of(case, inputs, backend, options)
    callable_ = run(program)
    cold = time.perf_counter() - begin
    values = list(inputs.values())
    floor = case.bytes_moved / floor_rate
    ours = median_on_gpu(lambda: callable_(values))
    row: dict[str, object] = {"case": case.name, "floor_ms": round(floor, 4), "ours_ms": round(ours, 4)}
    row["ours_roofline"] = round(floor / ours, 3)
    row["kernels"] = len(built.launchers)
    row["build_s"] = round(cold, 2)
    if case.name != "dropout_add":  # the reference draws its bits with dozens of eager kernels: not what a user writes
        eager = case.eager
    else:
        eager = lambda x, y, seed: (torch.nn.functional.dropout(x, 0.1, True) + y,)
    row["eager_ms"] = round(median_on_gpu(lambda: eager(**inputs)), 4)
    if with_compile:
        torch._dynamo.reset()
        compiled = torch.compile(eager)
        theirs = median_on_gpu(lambda: compiled(**inputs))
        row["torch_compile_ms"] = round(theirs, 4)
        row["torch_compile_roofline"] = round(floor / theirs, 3)
    return row


def host_overhead(backend, options, run) -> dict[str, float]:
    """Microseconds a call on the host for one and for twenty small kernels."""
    from triton_kernel_set import sigmoid_chain

    found = {}
    base = sigmoid_chain(8, 8, torch.float32)
    for count in (1, 20):
        case = type(base)(**{**vars(base), "kernels": base.kernels * count})
        inputs = case.inputs("cuda")
        program, _ = program_of(case, inputs, backend, options)
        callable_, values = run(program), list(inputs.values())
        best = math.inf
        for _ in range(15):
            torch.cuda.synchronize()
            calls = 400 // count  # fewer launches than the device queues, so that its own pace stays out of it
            start = time.perf_counter()
            for _ in range(calls):
                callable_(values)
            best = min(best, (time.perf_counter() - start) / calls * 1e6)
        found[f"{count}_kernels_us"] = round(best, 2)
    return found


def replayed(backend, options, run) -> dict[str, object]:
    """Values and microseconds a call of twenty small kernels as a CUDA graph, with a moving input and a held result."""
    from triton_kernel_set import sigmoid_chain

    from torchinductor.cuda_graphs import CudaDevice, GraphedProgram

    base = sigmoid_chain(64, 64, torch.float32)
    case = type(base)(**{**vars(base), "kernels": base.kernels * 20})
    first = case.inputs("cuda")
    program, _ = program_of(case, first, backend, options)
    graphed = GraphedProgram(program, run(program), CudaDevice(torch.device("cuda", 0)))
    worst, kept = 0.0, []
    for step in range(8):
        kept.append(torch.randn_like(first["x"]))
        (got,) = graphed([kept[-1], first["y"]])
        worst = max(worst, relative_error(got, case.eager(kept[-1], first["y"])[0]))
        if step == 4:
            held, expected = got, got.clone()
        del got
    unharmed = torch.equal(held, expected)
    del held
    best = math.inf
    values = [kept[-1], first["y"]]
    graphed(values)
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            graphed(values)
        best = min(best, (time.perf_counter() - start) / 20 * 1e6)
    return {"error": worst, "held_result_kept": unharmed, "us_a_call": round(best, 2), "runs": str(graphed.runs)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-build", action="store_true", help="the C++ extension is built already")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which the measuring stops")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if not arguments.no_build:
        subprocess.run([sys.executable, str(ROOT / "tools/build_extensions.py"), "inductor"], check=True)
    from triton_kernel_set import large_cases, small_cases

    from torchinductor import native
    from torchinductor.codegen.triton import TritonBackend
    from torchinductor.schemas import InductorOptions

    backend, options = TritonBackend(), InductorOptions()
    torch.manual_seed(0)
    wrong = 0
    for case in small_cases() + large_cases():
        if arguments.only not in case.name:
            continue
        try:
            found = check(case, native.prepare, backend, options)
        except Exception as error:  # one broken kernel must not hide the others' figures
            print(json.dumps({"case": case.name, "failure": f"{type(error).__name__}: {error}"[:600]}), flush=True)
            wrong += 1
            continue
        right = found["error"] <= 2 * found["eager_error"] + 2e-6
        wrong += not right
        print(
            json.dumps({"case": case.name, "right": right, **{k: float(f"{v:.3g}") for k, v in found.items()}}),
            flush=True,
        )
        torch.cuda.empty_cache()
    print(f"values: {wrong} wrong; {time.perf_counter() - begin:.0f} s so far", flush=True)

    rate = copy_bandwidth()
    print(f"copy bandwidth {rate / 1e9:.2f} TB/s; host: {host_overhead(backend, options, native.prepare)}", flush=True)
    try:
        print(f"cuda graph: {replayed(backend, options, native.prepare)}", flush=True)
    except Exception as error:  # the other figures must still be shown
        print(f"cuda graph failed: {type(error).__name__}: {error}", flush=True)
        wrong += 1
    rows = []
    for case in large_cases():
        if arguments.only not in case.name:
            continue
        with_compile = not arguments.no_compile and time.perf_counter() - begin < arguments.budget
        try:
            rows.append(measure(case, native.prepare, backend, options, rate, with_compile))
        except Exception as error:
            print(json.dumps({"case": case.name, "failure": f"{type(error).__name__}: {error}"[:600]}), flush=True)
            continue
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    report(rows)
    return 1 if wrong else 0


def report(rows: list[dict[str, object]]) -> None:
    print(f"\n{'case':24}{'ours ms':>9}{'of copy':>9}{'eager ms':>10}{'compile ms':>12}{'of copy':>9}")
    for row in rows:
        theirs = f"{row['torch_compile_ms']:>12}{row['torch_compile_roofline']:>9}" if "torch_compile_ms" in row else ""
        print(f"{row['case']:24}{row['ours_ms']:>9}{row['ours_roofline']:>9}{row['eager_ms']:>10}{theirs}")
    for key in ("ours_roofline", "torch_compile_roofline"):
        values = [float(str(r[key])) for r in rows if key in r]
        if values:
            print(f"geomean {key}: {math.exp(sum(map(math.log, values)) / len(values)):.3f} over {len(values)} cases")


if __name__ == "__main__":
    sys.exit(main())
