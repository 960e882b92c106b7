"""Peak memory of a training step, and what is kept between forward and backward: eager beside this stack.

    python tools/bench/aot_memory.py --all --jobs 8 --out rows.jsonl --write docs/results/aotautograd_memory.md
    python tools/bench/aot_memory.py --models hf/BertForMaskedLM tv/resnet18 --backends aot_eager --device cpu

Each (model, back end) runs in a process of its own: eager first, then compiled, the third step of each measured, with
gradients set to None before it. Bytes are counted above what is held before the step (parameters, inputs): on CUDA by
the caching allocator, on CPU by adding up the allocations that torch's profiler reports. `--out` keeps a JSON line a
case; cases in it are not run again, so that a sweep can be cut into slices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from capture import SLOWEST, SUITES

Row = dict[str, Any]
BACKENDS = ("aot_eager", "inductor")
MIB = 2**20


# -- one case ----------------------------------------------------------------------------------


def measure(case: Row) -> Row:
    """Bytes of eager's step and of the compiled one: {"eager": {...}, "ours": {...}}."""
    import torch
    from zoo import build

    import torchcompile

    torch.set_num_threads(1)
    device = case["device"]
    suite, name = case["model"].split("/")
    torch.manual_seed(0)
    size = {"side": case["side"]} if suite != "hf" else {"length": case["length"]}
    model, args, kwargs = build(suite, name, scale=case["scale"], train=True, batch=case["batch"], **size)
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x
    model, args, kwargs = model.to(device), [move(a) for a in args], {k: move(v) for k, v in kwargs.items()}
    probe = on_cuda if device == "cuda" else on_cpu
    row = dict(case)
    settings = {"partitioner": case["partitioner"]} if case["partitioner"] else None
    compiled = torchcompile.compile(model, backend=case["backend"], options=settings)
    for label, candidate in (("eager", model), ("ours", compiled)):
        forward = lambda candidate=candidate: loss_of(candidate, args, kwargs)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            forward().backward()
        model.zero_grad(set_to_none=True)
        row[label] = probe(forward)
    report = torchcompile.report()
    row["graphs"], row["fallbacks"] = report.captured, [str(f) for f in report.fallbacks][:3]
    return row


def loss_of(candidate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    out = candidate(*args, **kwargs)
    if getattr(out, "loss", None) is not None:
        return out.loss
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(x.float().pow(2).mean() for x in leaves)


def on_cuda(forward: Callable[[], Any]) -> dict[str, int]:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = forward()
    torch.cuda.synchronize()
    kept, peak_forward = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return {
        "peak": torch.cuda.max_memory_allocated() - before,
        "peak_forward": peak_forward,
        "kept": kept,
        "after": torch.cuda.memory_allocated() - before,
    }


def on_cpu(forward: Callable[[], Any]) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        loss = forward()
        with record_function("between forward and backward"):
            pass
        loss.backward()
    events = trace.profiler.kineto_results.events()
    middle = next(e.start_ns() for e in events if e.name() == "between forward and backward")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = peak_forward = kept = 0
    for moment, change in changes:
        now += change
        peak = max(peak, now)
        if moment < middle:
            peak_forward, kept = peak, now
    return {"peak": peak, "peak_forward": peak_forward, "kept": kept, "after": now}


# -- all cases ---------------------------------------------------------------------------------


def in_fresh_process(case: Row, seconds: float) -> Row:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, check=False)
    except subprocess.TimeoutExpired:
        return {**case, "failure": f"longer than {seconds:.0f} s"}
    if done.returncode == 0:
        found: Row = json.loads(done.stdout.splitlines()[-1])
        return found
    return {**case, "failure": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300]}


def planned(options: argparse.Namespace, done: set[tuple[str, str]]) -> list[Row]:
    """Cases that are still to run, the longest first."""
    chosen = list(SUITES) if options.all else options.models
    models = [
        model
        for entry in chosen
        for model in ([f"{entry}/{name}" for name in SUITES[entry].split()] if entry in SUITES else [entry])
    ]
    slow = [f"{suite}/{name}" for suite, names in SLOWEST.items() for name in names.split()]
    place = {model: index for index, model in enumerate(slow)}
    shared = {k: getattr(options, k) for k in ("device", "scale", "batch", "side", "length", "partitioner")}
    cases = [
        {"model": model, "backend": backend, **shared}
        for model in models
        for backend in options.backends
        if (model, backend) not in done
    ]
    return sorted(cases, key=lambda case: place.get(case["model"], len(place)))


def read_rows(path: Path) -> dict[tuple[str, str], Row]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["model"], row["backend"]): row for row in rows}


def is_above(row: Row, allowance: float) -> bool:
    return bool("ours" in row and row["ours"]["peak"] > row["eager"]["peak"] * (1 + allowance))


def line(row: Row) -> str:
    if "failure" in row:
        return f"{row['model']} {row['backend']}: FAILED {row['failure']}"
    ours, eager = row["ours"], row["eager"]
    left = f" LEFT TO EAGER {row['fallbacks']}" if row["fallbacks"] else ""
    return (
        f"{row['model']} {row['backend']}: peak {ours['peak'] / MIB:.2f} of eager's {eager['peak'] / MIB:.2f} MiB "
        f"({ours['peak'] / max(eager['peak'], 1):.3f}), "
        f"kept {ours['kept'] / MIB:.2f} of {eager['kept'] / MIB:.2f}{left}"
    )


def page(rows: list[Row], options: argparse.Namespace) -> str:
    import torch

    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    text = [
        "# Peak memory of a training step",
        "",
        f"`python tools/bench/aot_memory.py --all --device {options.device} --scale {options.scale} "
        f"--batch {options.batch}`, Python {platform.python_version()}, torch {torch.__version__}, {machine}.",
        "",
        "MiB above what is held before the step (parameters, inputs); gradients were None before it. Kept: what lives",
        "between forward and backward. Each compiled step beside eager's in the same process.",
        "",
    ]
    for backend in options.backends:
        mine = [r for r in rows if r["backend"] == backend and "ours" in r]
        above = [r["model"] for r in mine if is_above(r, options.allowance)]
        failed = [r for r in rows if r["backend"] == backend and "ours" not in r]
        text.append(f"- {backend}: at most eager's peak on {len(mine) - len(above)} of {len(mine)} models.")
        text += [f"  - above: {', '.join(above)}"] if above else []
        text += [f"  - {r['model']}: {r['failure']}" for r in failed]
    text += [
        "",
        "| model | back end | graphs | peak | eager's | ratio | kept | eager's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted((r for r in rows if "ours" in r), key=lambda r: (r["model"], r["backend"])):
        ours, eager = row["ours"], row["eager"]
        cells = [row["model"], row["backend"], str(row["graphs"])]
        cells += [f"{ours['peak'] / MIB:.2f}", f"{eager['peak'] / MIB:.2f}"]
        cells += [f"{ours['peak'] / max(eager['peak'], 1):.3f}"]
        cells += [f"{ours['kept'] / MIB:.2f}", f"{eager['kept'] / MIB:.2f}"]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole public list")
    parser.add_argument(
        "--models", nargs="*", default=["hf/BertForMaskedLM", "tv/resnet18"], help="suite/name or suite"
    )
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--partitioner", default="", help="default or min_cut; else each back end's own")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scale", default="tiny", choices=("tiny", "full"))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="tokens")
    parser.add_argument("--side", type=int, default=96, help="pixels of an image's side where the model takes any")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--case-timeout", type=float, default=300, help="seconds for one case")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all of it; what is left stays open")
    parser.add_argument("--allowance", type=float, default=0.0, help="part above eager's that does not count")
    parser.add_argument("--out", help="JSON lines, a case each: grows, and cases in it are not run again")
    parser.add_argument(
        "--again", action="store_true", help="run the cases in --out that failed or are above once more"
    )
    parser.add_argument("--write", help="write the page here as Markdown, of all rows in --out")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))))
        return
    until = time.monotonic() + options.timeout
    out = Path(options.out) if options.out else None
    rows = read_rows(out) if out else {}
    kept = {k for k, r in rows.items() if not options.again or ("ours" in r and not is_above(r, options.allowance))}
    cases = planned(options, kept)

    def run(case: Row) -> Row | None:
        left = until - time.monotonic()
        return in_fresh_process(case, min(options.case_timeout, left)) if left > 0 else None

    with ThreadPoolExecutor(options.jobs) as pool:
        for count, row in enumerate(pool.map(run, cases), 1):
            if row is None:
                continue
            rows[row["model"], row["backend"]] = row
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{count}/{len(cases)} {line(row)}", flush=True)
    if options.write:
        Path(options.write).write_text(page(list(rows.values()), options))


if __name__ == "__main__":
    main()
