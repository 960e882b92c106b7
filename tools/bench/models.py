"""Whole models: eager, torch.compile and this stack side by side, one process a (model, compiler).

    python tools/bench/models.py                                       tiny models on CPU, training and inference
    python tools/bench/models.py --device cuda --scale full --dtype amp --models hf/BertForMaskedLM tv/resnet18
    python tools/bench/models.py --write docs/results/NAME.md

Each process starts with empty caches, measures eager and one compiler in turns, and compares loss and all
gradients with eager's. Columns: median milliseconds of a step, the ratio to eager's of the same process
(above 1: faster than eager), seconds from the call to the first result, relative errors, peak memory (CUDA).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEFAULT_MODELS = (
    "hf/BertForMaskedLM", "hf/GPT2ForSequenceClassification", "hf/T5Small", "hf/AlbertForMaskedLM",
    "hf/DistilBertForMaskedLM", "tv/resnet18", "tv/mobilenet_v2", "timm/lcnet_050", "timm/tinynet_a",
)  # fmt: skip


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One (model, compiler) in this process."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from zoo import build

    device, train = case["device"], case["mode"] == "train"
    torch.manual_seed(0)
    suite, name = case["model"].split("/")
    model, args, kwargs = build(
        suite, name, scale=case["scale"], train=train, batch=case["batch"], length=case["length"]
    )
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x
    model, args, kwargs = model.to(device), [move(a) for a in args], {k: move(v) for k, v in kwargs.items()}
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def step(candidate: torch.nn.Module) -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        autocast = torch.autocast(device, torch.bfloat16) if case["dtype"] == "amp" else contextlib.nullcontext()
        with torch.set_grad_enabled(train), autocast:
            out = candidate(*args, **kwargs)
        value = out if isinstance(out, torch.Tensor) else out.loss if train else out.logits
        if train:
            (value if value.dim() == 0 else value.float().pow(2).mean()).backward()
        return value.detach().float()

    def median_ms(candidate: torch.nn.Module) -> float:
        for _ in range(3):
            step(candidate)
        synchronize()
        seconds: list[float] = []
        end = time.perf_counter() + case["seconds"]
        while time.perf_counter() < end or len(seconds) < 5:
            start = time.perf_counter()
            step(candidate)
            synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e3

    def gradients() -> dict[str, torch.Tensor]:
        return {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}

    def peak_mb(candidate: torch.nn.Module) -> float | None:
        if device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        step(candidate)
        synchronize()
        return torch.cuda.max_memory_allocated() / 2**20

    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected, expected_gradients = step(model), gradients()
    row = dict(case, eager_ms=median_ms(model), eager_peak_mb=peak_mb(model))
    model.load_state_dict(state)
    if case["compiler"] == "torch":
        compiled = torch.compile(model)
    else:
        import torchcompile

        compiled = torchcompile.compile(model)
    start = time.perf_counter()
    found = step(compiled)
    synchronize()
    row["first_s"] = time.perf_counter() - start
    row["error"] = float((found - expected).norm() / (expected.norm() + 1e-12))
    found_gradients = gradients()
    row["missing"] = len(expected_gradients.keys() - found_gradients.keys())
    shared = expected_gradients.keys() & found_gradients.keys()
    difference = sum(float((expected_gradients[n] - found_gradients[n]).norm() ** 2) for n in shared)
    norm = sum(float(g.norm() ** 2) for g in expected_gradients.values())
    row["gradient_error"] = (difference / (norm + 1e-30)) ** 0.5
    row["ms"] = median_ms(compiled)
    row["peak_mb"] = peak_mb(compiled)
    row["eager_ms"] = min(row["eager_ms"], median_ms(model))
    row["ratio"] = row["eager_ms"] / row["ms"]
    if case["compiler"] == "torchcompile":
        report = torchcompile.report()
        row["graphs"], row["breaks"], row["fallbacks"] = report.captured, len(report.breaks), len(report.fallbacks)
    return row


def in_fresh_process(case: dict[str, Any], timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TORCHCOMPILE_CACHE")
        env = dict(os.environ, **{name: f"{folder}/{name.lower()}" for name in caches})
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return dict(case, failed=f"no result in {timeout:.0f} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else dict(case, failed=done.stderr.strip().splitlines()[-1:])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = "| model | mode | compiler | eager ms | ms | ratio | first s | error | gradient error | peak MB (eager) |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        start = f"| {row['model']} | {row['mode']} | {row['compiler']} |"
        if "failed" in row:
            lines.append(f"{start} failed: {row['failed']} | | | | | | |")
            continue
        peak = f"{row['peak_mb']:.0f} ({row['eager_peak_mb']:.0f})" if row.get("peak_mb") else "-"
        lines.append(
            f"{start} {row['eager_ms']:.2f} | {row['ms']:.2f} | {row['ratio']:.2f} | {row['first_s']:.1f} "
            f"| {row['error']:.1e} | {row['gradient_error']:.1e} | {peak} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=DEFAULT_MODELS)
    parser.add_argument("--compilers", nargs="*", default=["torch", "torchcompile"])
    parser.add_argument("--modes", nargs="*", default=["train", "infer"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "amp"])
    parser.add_argument("--scale", default="tiny", choices=["tiny", "full"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each median is measured")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--write", type=Path, help="Markdown file to write the table to")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(json.loads(arguments.case))))
        return
    import torch

    shared = {k: getattr(arguments, k) for k in ("device", "dtype", "scale", "batch", "length", "seconds")}
    rows = []
    for model in arguments.models:
        for mode in arguments.modes:
            for compiler in arguments.compilers:
                case = dict(shared, model=model, mode=mode, compiler=compiler)
                rows.append(in_fresh_process(case, arguments.timeout))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    ratios = {c: [r["ratio"] for r in rows if r["compiler"] == c and "ratio" in r] for c in arguments.compilers}
    means = ", ".join(f"{c} {statistics.geometric_mean(v):.2f}x over {len(v)}" for c, v in ratios.items() if v)
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else cpu
    text = f"{table(rows)}\n\nGeometric mean of the ratios to eager: {means}.\n"
    text += (
        f"torch {torch.__version__}, Python {platform.python_version()}, {machine}\n\n`python {' '.join(sys.argv)}`\n"
    )
    print(text)
    if arguments.write:
        arguments.write.write_text(f"# {arguments.write.stem}\n\n{text}")


if __name__ == "__main__":
    main()
