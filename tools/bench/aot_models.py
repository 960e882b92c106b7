"""Training steps of public models, compiled beside eager's: losses and gradients.

    python tools/bench/aot_models.py --all --jobs 16 --out rows.jsonl --write docs/results/aotautograd_models.md
    python tools/bench/aot_models.py --all --jobs 16 --backend inductor --precisions fp64 --steps 1
    python tools/bench/aot_models.py --models hf/T5Small tv/resnet18 --precisions fp32

A case is a model in one precision, in a process of its own with one thread: some steps of SGD run eagerly, then
compiled, from the same parameters and random state. Losses of every step and the gradients of the first and the last
one are compared. Where they differ by more than the tolerance, as rounding alone makes them do in nets with kinks, the
same steps in float64 judge: our error must be at most twice eager's. In precision fp64 nothing judges, and a difference
is no rounding's where there is one step; over several, nets with batch norm and few images multiply rounding errors.
`--out` keeps a JSON line a case: cases in it are not run again, so that a sweep can be cut into slices.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from capture import SLOWEST, SUITES, import_all
from pool import Row, append_row, read_rows, run_cases

# Relative, of losses and of a step's whole gradient. Some models compute a part in float32 whatever they are given: a
# layer norm of Deberta, the sines of GPT-J's positions.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp64": 1e-6}
TITLES = {"fp32": "float32", "bf16": "bfloat16 autocast", "fp64": "float64"}
BACKENDS = {
    "aot_eager": "their forward and backward by aotautograd, run by eager's kernels",
    "inductor": "their forward and backward as generated kernels, with eager's random numbers",
}
SHARED = ("batch", "side", "backend", "device", "steps")
Run = dict[str, Any]  # {"losses": [...], "gradients": {step: [...]}}


# -- one case ----------------------------------------------------------------------------------


class Training:
    """A model, its inputs and its parameters at the start."""

    def __init__(self, case: Row) -> None:
        import torch
        from zoo import build

        suite, name = case["model"].split("/")
        torch.manual_seed(0)
        model, args, kwargs = build(suite, name, train=True, batch=case["batch"], side=case["side"])
        self.device, self.steps = case["device"], case["steps"]
        move = lambda value: value.to(self.device) if isinstance(value, torch.Tensor) else value
        self.model, self.args = model.to(self.device), tuple(map(move, args))
        self.kwargs = {key: move(value) for key, value in kwargs.items()}
        if case["precision"] == "fp64":
            self.to_double()
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.amp = case["precision"] == "bf16"

    def run(self, candidate: Callable[..., Any], amp: bool) -> Run:
        """Steps from the start."""
        import torch
        from torch.utils import _pytree as pytree

        with torch.no_grad():
            for key, value in self.model.state_dict().items():
                value.copy_(self.state[key])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        losses: list[float] = []
        gradients: dict[int, list[Any]] = {}
        for step in range(self.steps):
            optimizer.zero_grad()
            torch.manual_seed(step)
            with torch.autocast(self.device, torch.bfloat16, enabled=amp):
                out = candidate(*self.args, **self.kwargs)
                leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                loss = out.loss if hasattr(out, "loss") else sum(leaf.float().pow(2).mean() for leaf in leaves)
            loss.backward()
            losses.append(float(loss))
            if step in (0, self.steps - 1):
                gradients[step] = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
            optimizer.step()
        return {"losses": losses, "gradients": gradients}

    def in_double(self) -> Run:
        """Eager's steps in float64, without autocast."""
        self.to_double()
        return self.run(self.model, amp=False)

    def to_double(self) -> None:
        import torch

        def double(value: Any) -> Any:
            return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        self.model.double()
        self.args = tuple(map(double, self.args))
        self.kwargs = {key: double(value) for key, value in self.kwargs.items()}


def difference(expected: Run, found: Run) -> float:
    """The largest relative error of a loss or of a step's gradient as a whole; infinite where one has no gradient."""
    errors = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected["losses"], found["losses"], strict=True)]
    for step, reference in expected["gradients"].items():
        gap = scale = 0.0
        for a, b in zip(reference, found["gradients"][step], strict=True):
            if (a is None) != (b is None):
                return float("inf")
            if a is not None:
                gap += float((a.double() - b.double()).square().sum())
                scale += float(a.double().square().sum())
        errors.append((gap / max(scale, 1e-24)) ** 0.5)
    worst = max(errors)
    return worst if worst == worst else float("inf")  # noqa: PLR0124 - NaN


def measured(case: Row) -> Row:
    import torch

    import torchcompile
    import torchdynamo

    torch.backends.cudnn.allow_tf32 = False
    training = Training(case)
    torch.set_num_threads(1)
    try:
        expected = training.run(training.model, training.amp)
    except Exception as error:
        return {"eager_failure": message_of(error), "failure": raised_by_compiled(training, case["backend"])}
    options = {"strict": True} | ({"eager_random": True} if case["backend"] == "inductor" else {})
    compiled = torchcompile.compile(training.model, backend=case["backend"], options=options)
    began = time.perf_counter()
    found = training.run(compiled, training.amp)
    seconds = time.perf_counter() - began
    stats = torchdynamo.stats()
    row: Row = {"error": difference(expected, found), "seconds": seconds, "graphs": stats.graphs}
    row["fallbacks"] = [event.short for event in stats.surprises]
    if row["error"] > TOLERANCE[case["precision"]]:
        truth = training.in_double()
        row["eager_error"], row["our_error"] = difference(truth, expected), difference(truth, found)
    return row


def measure(case: Row, send: Callable[[Row], None]) -> None:
    send(measured(case))


def message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def raised_by_compiled(training: Training, backend: str) -> str:
    """What the compiled model raises where eager raises."""
    import torchcompile

    try:
        training.run(torchcompile.compile(training.model, backend=backend), training.amp)
    except Exception as error:
        return message_of(error)
    return "nothing, where eager raises"


def verdict(row: Row) -> str:
    if row.get("eager_failure"):
        same = row["failure"] == row["eager_failure"]
        return f"right (raises as eager: {row['failure']})" if same else f"WRONG: raises {row['failure']}"
    if "failure" in row:
        return f"FAILED: {row['failure']}"
    if row["fallbacks"]:
        return f"LEFT TO EAGER: {row['fallbacks'][0]}"
    if not row["graphs"]:
        return "FAILED: no graph was captured"
    if row["error"] <= TOLERANCE[row["precision"]]:
        return "right"
    errors = f"{row['our_error']:.1e} from float64, eager {row['eager_error']:.1e}"
    return f"right ({errors})" if row["our_error"] <= 2 * row["eager_error"] else f"WRONG: {errors}"


# -- many cases --------------------------------------------------------------------------------


def page(rows: list[Row], options: argparse.Namespace) -> str:
    import timm
    import torch
    import torchvision
    import transformers

    precisions = [p for p in TOLERANCE if any(row["precision"] == p for row in rows)]
    bounds = ", ".join(f"{TOLERANCE[p]:.0e} in {TITLES[p]}" for p in precisions)
    verdicts = {(row["model"], row["precision"]): verdict(row) for row in rows}
    lines = [
        f'# Training of public models, back end "{options.backend}"',
        "",
        f'Back end "{options.backend}": captured graphs, {BACKENDS[options.backend]}. Steps of SGD: '
        f"{options.steps}, on {options.device}; transformers in tiny configurations, image models with small images, "
        f"batch {options.batch}. Compared: the loss of every step, the gradients of the first and the last as a whole, "
        f"relative to eager's; right at most {bounds}. Beyond that float64 judges, but in float64: our error at most "
        "twice eager's.",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, timm "
        f"{timm.__version__}, torchvision {torchvision.__version__}; {options.jobs} cases at once, one thread each.",
        f"`python tools/bench/aot_models.py --all --jobs {options.jobs} --backend {options.backend} --device "
        f"{options.device} --steps {options.steps} --precisions {' '.join(precisions)}`",
        "",
        f"**{sum(v.startswith('right') for v in verdicts.values())} of {len(verdicts)} cases right**, "
        f"{sum(row.get('error') == 0 for row in rows)} of them to the bit.",
        "",
        f"| model | {' | '.join(f'{TITLES[p]} | error' for p in precisions)} |",
        "|---" * (1 + 2 * len(precisions)) + "|",
    ]
    by_case = {(row["model"], row["precision"]): row for row in rows}
    for model in sorted({row["model"] for row in rows}):
        cells = [model]
        for precision in precisions:
            row = by_case.get((model, precision), {})
            cells += [verdicts.get((model, precision), ""), f"{row['error']:.1e}" if "error" in row else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def planned(options: argparse.Namespace, done: set[tuple[str, str]]) -> list[Row]:
    """Cases that are still to run, the longest first."""
    models = [
        model
        for entry in (list(SUITES) if options.all else options.models)
        for model in ([f"{entry}/{name}" for name in SUITES[entry].split()] if entry in SUITES else [entry])
    ]
    slow = [f"{suite}/{name}" for suite, names in SLOWEST.items() for name in names.split()]
    place = {model: index for index, model in enumerate(slow)}
    cases = [
        {"model": model, "precision": precision} | {key: getattr(options, key) for key in SHARED}
        for model in models
        for precision in options.precisions
        if (model, precision) not in done
    ]
    return sorted(cases, key=lambda case: place.get(case["model"], len(place)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole public list")
    parser.add_argument("--models", nargs="*", default=["hf"], help="suite/name, or a whole suite: hf, timm, tv")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"], choices=list(TOLERANCE))
    parser.add_argument("--steps", type=int, default=5, help="of SGD")
    parser.add_argument("--backend", default="aot_eager", choices=list(BACKENDS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--side", type=int, default=96, help="pixels of an image's side where the model takes any")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--case-timeout", type=float, default=240, help="seconds for one case")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for all of it; what is left stays open")
    parser.add_argument("--out", help="JSON lines, a case each: grows, and cases in it are not run again")
    parser.add_argument("--again", action="store_true", help="run the cases in --out that are not right once more")
    parser.add_argument("--write", help="write the page here as Markdown, of all rows in --out")
    options = parser.parse_args()
    began = time.monotonic()
    out = Path(options.out) if options.out else None
    rows = {(row["model"], row["precision"]): row for row in read_rows(out)}
    done = {case for case, row in rows.items() if not options.again or verdict(row).startswith("right")}
    cases = planned(options, done)
    if cases or options.write:
        import_all()
    ready = run_cases(
        measure, cases, jobs=options.jobs, case_seconds=options.case_timeout, until=began + options.timeout
    )
    for count, worker in enumerate(ready, 1):
        row = {**worker.case, **(worker.messages[0] if worker.messages else {"failure": worker.failure})}
        rows[row["model"], row["precision"]] = row
        append_row(out, row)
        told = f"{row['seconds']:.1f} s, error {row['error']:.1e}, {row['graphs']} graphs" if "error" in row else ""
        case = f"{row['model']} {row['precision']}"
        print(f"{time.monotonic() - began:4.0f} s {count}/{len(cases)} {case}: {verdict(row)} {told}", flush=True)
    if options.write:
        Path(options.write).write_text(page(list(rows.values()), options))


if __name__ == "__main__":
    main()
