"""Whole models: eager, torch.compile and this stack side by side, one process a (model, compiler).

    python tools/bench/models.py                                       tiny models on CPU, training and inference
    python tools/bench/models.py --device cuda --scale full --dtype amp --models hf/T5Small,8,1024 tv/resnet18,64
    python tools/bench/models.py --device cuda --scale full --dtype amp --models full-size --together 8 --kernels FOLDER
    python tools/bench/models.py --write docs/results/NAME.md

A model is suite/name[,batch[,length]]; "full-size" stands for the list of zoo.py. Each process starts with empty
caches, measures eager and one compiler in turns, and compares the loss and all gradients with eager in float64.
Columns: median milliseconds of a step, the ratio to eager's of the same process (above 1: faster than eager), seconds
from the call to the first result, relative errors with eager's own in parentheses, peak memory (CUDA), and what the
report counts. It exits with an error that lists whatever ran eagerly, twice or differently (--allow-eager: without
one).

With --together N, N processes build and compile at once and then wait; steps are timed in one process after the other,
so that nothing else runs beside them. The seconds to the first result are those of a machine shared by N.
--options '{"shared_kernels": false}' gives torchcompile.compile these.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from zoo import FULL_SIZE, build

DEFAULT_MODELS = (
    "hf/BertForMaskedLM", "hf/GPT2ForSequenceClassification", "hf/T5Small", "hf/AlbertForMaskedLM",
    "hf/DistilBertForMaskedLM", "tv/resnet18", "tv/mobilenet_v2", "timm/lcnet_050", "timm/tinynet_a",
)  # fmt: skip


# What the report counts of a model.
COUNTS = ("graphs", "breaks", "fallbacks", "mended", "reruns")


class Bench:
    """A model on its device with its inputs; runs steps, times them, compares values."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        self.case = case
        self.train = case["mode"] == "train"
        self.synchronize = torch.cuda.synchronize if case["device"] == "cuda" else (lambda: None)
        torch.manual_seed(0)
        suite, name = case["model"].split("/")
        model, args, kwargs = build(
            suite, name, scale=case["scale"], train=self.train, batch=case["batch"], length=case["length"]
        )
        move = lambda x: x.to(case["device"]) if isinstance(x, torch.Tensor) else x
        self.model, self.args = model.to(case["device"]), [move(a) for a in args]
        self.kwargs = {k: move(v) for k, v in kwargs.items()}

    def step(self, candidate: Any, double: bool = False) -> Any:
        """One training step (or inference): the loss (or the output) in its own precision."""
        import torch

        for p in candidate.parameters():
            p.grad = None
        cast = lambda x: x.double() if double and torch.is_tensor(x) and x.is_floating_point() else x
        args, kwargs = [cast(a) for a in self.args], {k: cast(v) for k, v in self.kwargs.items()}
        amp = self.case["dtype"] == "amp" and not double
        autocast = torch.autocast(self.case["device"], torch.bfloat16) if amp else contextlib.nullcontext()
        with torch.set_grad_enabled(self.train), autocast:
            out = candidate(*args, **kwargs)
        first = lambda: out.logits if hasattr(out, "logits") else out[0]
        value = out if isinstance(out, torch.Tensor) else out.loss if self.train else first()
        if self.train:
            (value if value.dim() == 0 else value.float().pow(2).mean()).backward()
        return value.detach()

    def results(self, candidate: Any, double: bool = False) -> tuple[Any, dict[str, Any]]:
        """The step's value and every gradient, as float64 on the CPU. `double`: the candidate is a copy in float64."""
        owner = candidate if double else self.model  # torch.compile's wrapper gives parameters other names
        state = {k: v.clone() for k, v in owner.state_dict().items()}
        value = self.step(candidate, double).double().cpu()
        gradients = {n: p.grad.double().cpu() for n, p in owner.named_parameters() if p.grad is not None}
        owner.load_state_dict(state)  # running statistics and the like as before
        return value, gradients

    def median_ms(self, candidate: Any) -> float:
        for _ in range(3):
            self.step(candidate)
        self.synchronize()
        seconds: list[float] = []
        end = time.perf_counter() + self.case["seconds"]
        while time.perf_counter() < end or len(seconds) < 5:
            start = time.perf_counter()
            self.step(candidate)
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e3

    def peak_mb(self, candidate: Any) -> tuple[float, ...] | None:
        """The most that the allocator had given out, and what of it was asked for: it gives up to 1 MiB more."""
        import torch

        if self.case["device"] != "cuda":
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step(candidate)
        self.synchronize()
        stats = torch.cuda.memory_stats()
        return tuple(stats[f"{kind}_bytes.all.peak"] / 2**20 for kind in ("allocated", "requested"))


def errors(found: tuple[Any, dict[str, Any]], truth: tuple[Any, dict[str, Any]]) -> tuple[float, float]:
    """Relative errors of the value and of all gradients together."""
    value = float((found[0] - truth[0]).norm() / (truth[0].norm() + 1e-30))
    difference = sum(float((g - found[1][n]).norm() ** 2) for n, g in truth[1].items())
    norm = sum(float(g.norm() ** 2) for g in truth[1].values())
    return value, (difference / (norm + 1e-30)) ** 0.5


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Only one process of this benchmark at a time is in here: float64 needs much of a GPU's memory."""
    with open(Path(tempfile.gettempdir()) / "models_benchmark.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    # closed, and so unlocked


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One (model, compiler) in this process: compiled and judged, then, when a line says so, timed."""
    import torch

    bench = Bench(case)
    model = bench.model
    row = dict(case)
    with _alone():
        judge = copy.deepcopy(model).double()
        truth = bench.results(judge, double=True)
        del judge
        row["eager_error"], row["eager_gradient_error"] = errors(bench.results(model), truth)
        if case["device"] == "cuda":
            torch.cuda.empty_cache()
    if case["compiler"] == "torch":
        compiled = torch.compile(model)
    else:
        import torchcompile

        compiled = torchcompile.compile(model, options=case["options"])
    bench.synchronize()
    start = time.perf_counter()
    bench.step(compiled)
    bench.synchronize()
    row["first_s"] = time.perf_counter() - start
    found = bench.results(compiled)
    row["missing"] = len(truth[1].keys() - found[1].keys())
    row["error"], row["gradient_error"] = errors(found, truth)
    for p in model.parameters():
        p.grad = None
    if case["device"] == "cuda":
        torch.cuda.empty_cache()  # the others have not compiled yet
    print("ready", flush=True)
    sys.stdin.readline()
    row["eager_ms"], row["eager_peak_mb"] = bench.median_ms(model), bench.peak_mb(model)
    row["ms"], row["peak_mb"] = bench.median_ms(compiled), bench.peak_mb(compiled)
    row["eager_ms"] = min(row["eager_ms"], bench.median_ms(model))
    row["ratio"] = row["eager_ms"] / row["ms"]
    if case["kernels"]:
        row["kernels"] = {"eager": longest_kernels(bench, model), "compiled": longest_kernels(bench, compiled)}
    if case["compiler"] == "torchcompile":
        report = torchcompile.report()
        row["graphs"] = report.captured
        row["breaks"], row["fallbacks"], row["mended"], row["reruns"] = (
            sum(event.count for event in events)
            for events in (report.breaks, report.fallbacks, report.mended, report.reruns)
        )
        row["eager"] = [event.short for event in report.surprises]
    return row


def longest_kernels(bench: Bench, candidate: Any, rows: int = 60) -> str:
    """Device milliseconds and calls of the kernels that take longest in one step, as lines of text."""
    import torch

    bench.step(candidate)
    bench.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.step(candidate)
        bench.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1e3
    lines = [f"{e.self_device_time_total / 1e3:9.3f} ms {e.count:5d} x {e.key[:150]}" for e in events[:rows]]
    return "\n".join([f"{total:9.3f} ms on the device in {sum(e.count for e in events)} launches", *lines])


class Worker:
    """A fresh process for one (model, compiler), with empty caches of its own."""

    def __init__(self, case: dict[str, Any], timeout: float) -> None:
        self.case = case
        self.end = time.monotonic() + timeout
        self.timeout = timeout
        self.folder = tempfile.TemporaryDirectory()
        caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TORCHCOMPILE_CACHE")
        env = dict(os.environ, **{name: f"{self.folder.name}/{name.lower()}" for name in caches})
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `row`
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--case", json.dumps(case)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")  # the process has ended

    def _wait_for(self, start: str) -> str:
        """The next line that begins so; "" where the process ended or its time is up."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, self.end - time.monotonic()))
            except queue.Empty:
                return ""
            if not line or line.startswith(start):
                return line

    def ready(self) -> bool:
        """Whether it has compiled and waits to be timed."""
        return bool(self._wait_for("ready"))

    def row(self) -> dict[str, Any]:
        """What it measures now, or why it failed. The process ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        line = self._wait_for("{")
        late = not line and self.process.poll() is None and time.monotonic() >= self.end
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        said = [f"no result in {self.timeout:.0f} s"] if late else self.errors.read().strip().splitlines()[-1:]
        self.errors.close()
        self.folder.cleanup()
        return json.loads(line) if line else dict(self.case, failed=said)


def in_fresh_processes(cases: Sequence[dict[str, Any]], together: int, timeout: float) -> Iterator[dict[str, Any]]:
    """A row for each case; `together` of them compile at once, and are timed one after the other."""
    for start in range(0, len(cases), together):
        workers = [Worker(case, timeout) for case in cases[start : start + together]]
        ready = [worker.ready() for worker in workers]
        for worker, whether in zip(workers, ready, strict=True):
            if whether:
                worker.end = time.monotonic() + timeout
            yield worker.row()


def sized(model: str, batch: int, length: int) -> dict[str, Any]:
    """suite/name[,batch[,length]] as fields of a case."""
    name, *sizes = model.split(",")
    numbers = [*map(int, sizes), *(batch, length)[len(sizes) :]]
    return {"model": name, "batch": numbers[0], "length": numbers[1]}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = (
        "| model | mode | compiler | eager ms | ms | ratio | first s | error (eager) | gradient error (eager) "
        "| peak MB given out / asked for (eager) | graphs, breaks, fallbacks, mended, reruns |"
    )
    lines = [head, "|---" * 11 + "|"]
    for row in rows:
        start = f"| {row['model']} | {row['mode']} | {row['compiler']} |"
        if "failed" in row:
            lines.append(f"{start} failed: {row['failed']} | | | | | | | |")
            continue
        peaks = (" / ".join(f"{mb:.1f}" for mb in row[key]) for key in ("peak_mb", "eager_peak_mb") if row.get(key))
        peak = "{} ({})".format(*peaks) if row.get("peak_mb") else "-"
        counts = ", ".join(str(row[name]) for name in COUNTS) if "graphs" in row else "-"
        lines.append(
            f"{start} {row['eager_ms']:.2f} | {row['ms']:.2f} | {row['ratio']:.2f} | {row['first_s']:.1f} "
            f"| {row['error']:.1e} ({row['eager_error']:.1e}) "
            f"| {row['gradient_error']:.1e} ({row['eager_gradient_error']:.1e}) | {peak} | {counts} |"
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
    parser.add_argument("--together", type=int, default=1, help="how many processes compile at once")
    parser.add_argument("--options", type=json.loads, default={}, help="of torchcompile.compile, as JSON")
    parser.add_argument("--kernels", type=Path, help="folder for lists of the longest kernels of each model's step")
    parser.add_argument("--allow-eager", action="store_true", help="no error where a model is not compiled as a whole")
    parser.add_argument("--write", type=Path, help="Markdown file to write the table to")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(json.loads(arguments.case))))
        return
    import torch

    shared = {k: getattr(arguments, k) for k in ("device", "dtype", "scale", "seconds", "options")}
    shared["kernels"] = arguments.kernels is not None
    cases = [
        dict(shared, **sized(model, arguments.batch, arguments.length), mode=mode, compiler=compiler)
        for model in (FULL_SIZE if arguments.models == ["full-size"] else arguments.models)
        for mode in arguments.modes
        for compiler in arguments.compilers
    ]
    rows = []
    for row in in_fresh_processes(cases, arguments.together, arguments.timeout):
        rows.append(row)
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if isinstance(kernels := row.pop("kernels"), dict):
            arguments.kernels.mkdir(parents=True, exist_ok=True)
            name = f"{row['model'].replace('/', '-')}-{row['mode']}"
            for side, text in {"eager": kernels["eager"], row["compiler"]: kernels["compiled"]}.items():
                (arguments.kernels / f"{name}-{side}.txt").write_text(f"{text}\n")
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
    eager = [f"{row['model']} {row['mode']}: {event}" for row in rows for event in row.get("eager", ())]
    if eager and not arguments.allow_eager:
        raise SystemExit("\n".join(["not all of it was compiled:", *eager]))


if __name__ == "__main__":
    main()
