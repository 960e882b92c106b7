"""Peak memory of a training step, and what is kept between forward and backward: eager beside this stack.

    python tools/bench/aot_memory.py --all --jobs 12 --device cuda --out rows.jsonl --write memory.md
    python tools/bench/aot_memory.py --models hf/BertForMaskedLM tv/resnet18 --backends aot_eager --explain

Each model runs in a process of its own: eager first, then compiled by each back end. The third step of each is
measured, with gradients set to None before it. Bytes are counted above what is held before the step (parameters,
inputs): on CUDA those that the caching allocator was asked for (and, beside them, those of the blocks that it gave,
which depend on the blocks that it had at hand), on CPU by adding up the allocations that torch's profiler reports.
`--explain` (CPU) lists what is alive at the peak, by the operator that allocated it. `--out` keeps a JSON line a case;
cases in it are not run again, so that a sweep can be cut into slices.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from capture import SLOWEST, SUITES, import_all
from pool import Row, Worker, append_row, read_rows, run_cases, told

BACKENDS = ("aot_eager", "inductor")
MIB = 2**20
WARM_STEPS = 2


# -- one model ---------------------------------------------------------------------------------


def measure(case: Row, send: Callable[[Row], None]) -> None:
    """Sends bytes of eager's step and of the compiled one, a row a back end: {"eager": {...}, "ours": {...}}."""
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
    probe = on_cuda if device == "cuda" else explained if case["explain"] else on_cpu

    def step(candidate: Callable[..., Any]) -> Row:
        forward = lambda: loss_of(candidate, args, kwargs)
        for _ in range(WARM_STEPS):
            model.zero_grad(set_to_none=True)
            forward().backward()
        model.zero_grad(set_to_none=True)
        return probe(forward)

    eager = step(model)
    settings = {"partitioner": case["partitioner"]} if case["partitioner"] else None
    shared = {key: case[key] for key in SHARED}
    for backend in case["backends"]:
        row = {"model": case["model"], "backend": backend, **shared, "eager": eager}
        torchcompile.reset()
        try:
            row["ours"] = step(torchcompile.compile(model, backend=backend, options=settings))
            report = torchcompile.report()
            row["graphs"] = report.captured
            row["fallbacks"] = [event.short for event in report.surprises if event not in report.breaks]
        except Exception as error:
            row["failure"] = told(error)
        send(row)


def loss_of(candidate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    out = candidate(*args, **kwargs)
    if getattr(out, "loss", None) is not None:
        return out.loss
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(x.float().pow(2).mean() for x in leaves)


def on_cuda(forward: Callable[[], Any]) -> Row:
    import torch

    def now(what: str) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats().get(what, 0))

    asked, given = "requested_bytes.all", "allocated_bytes.all"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, before_given = now(f"{asked}.current"), now(f"{given}.current")
    loss = forward()
    kept, peak_forward = now(f"{asked}.current") - before, now(f"{asked}.peak") - before
    loss.backward()
    return {
        "peak": now(f"{asked}.peak") - before,
        "peak_forward": peak_forward,
        "kept": kept,
        "after": now(f"{asked}.current") - before,
        "peak_of_blocks": now(f"{given}.peak") - before_given,
    }


def profiled(forward: Callable[[], Any]) -> Any:
    """The profiler's trace of a step on CPU."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        loss = forward()
        with record_function(BETWEEN):
            pass
        loss.backward()
    return trace


BETWEEN = "between forward and backward"


def on_cpu(forward: Callable[[], Any]) -> Row:
    events = profiled(forward).profiler.kineto_results.events()
    middle = next(e.start_ns() for e in events if e.name() == BETWEEN)
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = peak_forward = kept = 0
    for moment, change in changes:
        now += change
        peak = max(peak, now)
        if moment < middle:
            peak_forward, kept = peak, now
    return {"peak": peak, "peak_forward": peak_forward, "kept": kept, "after": now}


def explained(forward: Callable[[], Any]) -> Row:
    """The same, with what is alive at the peak: [[bytes, phase and operators that allocated it, times], ...]."""
    trace = profiled(forward)
    roots = trace.profiler.kineto_results.experimental_event_tree()
    changes: list[tuple[int, int, int, tuple[str, ...]]] = []
    work = [(event, ()) for event in roots]
    middle = 0
    while work:
        event, path = work.pop()
        if event.name == BETWEEN:
            middle = event.start_time_ns
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr, path))
        work += [(child, (*path, event.name)) for child in event.children]
    alive: dict[int, tuple[int, str]] = {}
    now = peak = 0
    at_peak: Counter[tuple[int, str]] = Counter()
    for moment, change, pointer, path in sorted(changes):
        now += change
        if change < 0:
            alive.pop(pointer, None)
            continue
        phase = "forward" if moment < middle else "backward"
        alive[pointer] = (change, " < ".join([*reversed(path[-3:]), phase]))
        if now > peak:
            peak, at_peak = now, Counter(alive.values())
    found = [[size, what, times] for (size, what), times in at_peak.items()]
    largest = sorted(found, key=lambda entry: -entry[0] * entry[2])
    return {**on_cpu(forward), "at_peak": largest[:40]}


# -- all models --------------------------------------------------------------------------------

SHARED = ("device", "scale", "batch", "side", "length", "partitioner")


def rows_of(worker: Worker) -> list[Row]:
    """A row for each back end: what was told, or what the case ended in."""
    told_of = {message["backend"] for message in worker.messages}
    missing = [backend for backend in worker.case["backends"] if backend not in told_of]
    failed = [{"model": worker.case["model"], "backend": name, "failure": worker.failure} for name in missing]
    return worker.messages + failed


def planned(options: argparse.Namespace, done: set[tuple[str, str]]) -> list[Row]:
    """Models that are still to run, each with its back ends, the longest first."""
    chosen = list(SUITES) if options.all else options.models
    models = [
        model
        for entry in chosen
        for model in ([f"{entry}/{name}" for name in SUITES[entry].split()] if entry in SUITES else [entry])
    ]
    slow = [f"{suite}/{name}" for suite, names in SLOWEST.items() for name in names.split()]
    place = {model: index for index, model in enumerate(slow)}
    shared = {key: getattr(options, key) for key in (*SHARED, "explain")}
    cases = [
        {"model": model, "backends": [b for b in options.backends if (model, b) not in done], **shared}
        for model in models
    ]
    return sorted((c for c in cases if c["backends"]), key=lambda case: place.get(case["model"], len(place)))


def is_above(row: Row, allowance: float) -> bool:
    return bool("ours" in row and row["ours"]["peak"] > row["eager"]["peak"] * (1 + allowance))


def line(row: Row, allowance: float) -> str:
    if "failure" in row:
        return f"{row['model']} {row['backend']}: FAILED {row['failure']}"
    ours, eager = row["ours"], row["eager"]
    above = " ABOVE" if is_above(row, allowance) else ""
    left = f" LEFT TO EAGER {row['fallbacks']}" if row["fallbacks"] else ""
    found = (
        f"{row['model']} {row['backend']}: peak {ours['peak'] / MIB:.2f} of eager's {eager['peak'] / MIB:.2f} MiB "
        f"({ours['peak'] / max(eager['peak'], 1):.3f}), "
        f"kept {ours['kept'] / MIB:.2f} of {eager['kept'] / MIB:.2f}{left}{above}"
    )
    for label in ("eager", "ours"):
        for size, what, times in row[label].get("at_peak", ())[:25]:
            found += f"\n    {label:5} {size * times / MIB:9.3f} MiB  {times} x {size}  {what}"
    return found


def ratio(row: Row, what: str) -> str:
    ours, eager = row["ours"], row["eager"]
    return f"{ours[what] / max(eager[what], 1):.3f}" if what in ours else ""


def page(rows: list[Row], options: argparse.Namespace) -> str:
    import torch

    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    models = "--all" if options.all else f"--models {' '.join(options.models)}"
    text = [
        "# Peak memory of a training step",
        "",
        f"`python tools/bench/aot_memory.py {models} --device {options.device} --scale {options.scale} "
        f"--batch {options.batch}`, Python {platform.python_version()}, torch {torch.__version__}, {machine}.",
        "",
        "MiB above what is held before the step (parameters, inputs); gradients were None before it. On CUDA these are",
        "the bytes that the allocator was asked for; those of the blocks that it gave depend on which it had at hand.",
        "Kept: what lives between forward and backward. Each compiled step beside eager's in the same process.",
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
        "| model | back end | graphs | peak | eager's | ratio | ratio in blocks | kept | eager's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted((r for r in rows if "ours" in r), key=lambda r: (r["model"], r["backend"])):
        ours, eager = row["ours"], row["eager"]
        cells = [row["model"], row["backend"], str(row["graphs"])]
        cells += [f"{ours['peak'] / MIB:.2f}", f"{eager['peak'] / MIB:.2f}"]
        cells += [ratio(row, "peak"), ratio(row, "peak_of_blocks")]
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
    parser.add_argument("--explain", action="store_true", help="what is alive at the peak (CPU)")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--case-timeout", type=float, default=300, help="seconds for one model")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all of it; what is left stays open")
    parser.add_argument("--allowance", type=float, default=0.0, help="part above eager's that does not count")
    parser.add_argument("--out", help="JSON lines, a case each: grows, and cases in it are not run again")
    parser.add_argument(
        "--again", action="store_true", help="run the cases in --out that failed or are above once more"
    )
    parser.add_argument("--write", help="write the page here as Markdown, of all rows in --out")
    options = parser.parse_args()
    began = time.monotonic()
    out = Path(options.out) if options.out else None
    rows = {(row["model"], row["backend"]): row for row in read_rows(out)}
    kept = {k for k, r in rows.items() if not options.again or ("ours" in r and not is_above(r, options.allowance))}
    cases = planned(options, kept)
    # A CUDA context does not outlive a fork, and what is imported may make one.
    start = "spawn" if options.device == "cuda" else "fork"
    if cases and start == "fork":
        import_all()
        __import__("torchcompile")
    ready = run_cases(
        measure, cases, jobs=options.jobs, case_seconds=options.case_timeout, until=began + options.timeout, start=start
    )
    for count, worker in enumerate(ready, 1):
        for row in rows_of(worker):
            rows[row["model"], row["backend"]] = row
            append_row(out, row)
            moment = f"{time.monotonic() - began:4.0f} s {count}/{len(cases)}"
            print(f"{moment} {line(row, options.allowance)}", flush=True)
    if options.write:
        Path(options.write).write_text(page(list(rows.values()), options))


if __name__ == "__main__":
    main()
