"""Random programs of views, writes and aliases through `aot_function`, beside eager: many, in worker processes.

    python tools/aot_fuzz.py --jobs 16 --programs 100000 --seed 1 --out docs/results/aotautograd_fuzz.md
    python tools/aot_fuzz.py --programs 1000 --seed 1007       the batch of seed 1007 again

The programs are those of packages/aotautograd/tests/test_aotautograd_fuzz.py, drawn in batches, each with a seed of its
own. A program that differs from eager is printed with its batch's seed and the difference; its text is Python that
makes it again.
"""

from __future__ import annotations

import argparse
import collections
import math
import platform
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools" / "bench"), str(ROOT / "packages" / "aotautograd" / "tests")]

import test_aotautograd_fuzz as fuzz  # noqa: E402
from pool import Row, Worker, run_cases  # noqa: E402

BATCH = 1000
BATCH_SECONDS = 1800.0


def run_batch(seed: int, count: int) -> dict[str, Any]:
    """Counts by outcome and by reason of refusal, and what differs: [[program, with gradients, what], ...]."""
    import hypothesis

    seen: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    different: list[tuple[str, bool, str]] = []

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.seed(seed)
    @hypothesis.given(fuzz.programs, hypothesis.strategies.booleans())
    def run(program: Any, grad: bool) -> None:
        try:
            fuzz.judge(program, grad, seen, refusals)
        except Exception as error:
            seen["different"] += 1
            place = "".join(traceback.format_exception(error)[-3:])
            different.append((repr(program), grad, place[-1500:]))

    run()
    return {"seed": seed, "seen": seen, "refusals": refusals, "different": different}


def measure(case: Row, send: Callable[[Row], None]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    send(run_batch(case["seed"], case["count"]))


def result_of(worker: Worker) -> dict[str, Any]:
    """What a batch has found; a batch that ended its process is one program that differs."""
    if worker.messages:
        return worker.messages[0]
    ended = ("", True, worker.failure or "the process ended")
    return {"seed": worker.case["seed"], "seen": {"different": 1}, "refusals": {}, "different": [ended]}


def report(results: list[dict[str, Any]], seconds: float, jobs: int, command: str) -> str:
    total: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    for result in results:
        total.update(result["seen"])
        for reason, count in result["refusals"].items():
            refusals[re.sub(r"\d+", "N", re.sub(r"\[[\d, ]+\]", "[...]", reason))] += count
    asked = "equal to eager asked for histories"
    overlaps, several = "runs where eager's memory overlaps", "runs where eager forbids to write one of several views"
    columns = ["equal", "both raise", asked, overlaps, several, "refused", "different"]
    return "\n".join(
        [
            "# Random programs of views, writes and aliases",
            "",
            f"`{command}`, torch {torch.__version__}, Python {platform.python_version()}, CPU: values, gradients, "
            "aliasing relations, identities, strides, histories and version counters beside eager's. "
            f"{seconds:.0f} s in {jobs} processes of one thread.",
            "",
            "| programs | " + " | ".join(columns) + " |",
            "|" + "---|" * (len(columns) + 1),
            f"| {sum(total.values()):,} | " + " | ".join(f"{total[c]:,}" for c in columns) + " |",
            "",
            "Asked for histories: to eager's check of writes, a view that was written through another one is a leaf "
            "until somebody reads its `grad_fn`; eager with such reads is compared.",
            "Memory overlaps: a write reads the memory that it writes, in another order; eager raises or gives what "
            "depends on the order. One of several views: an input is a result of `unbind` or `split`, and its "
            "memory is shared by another. The suite runs 2,000 of these programs.",
            "",
            *(["| refused with | programs |", "|---|---|"] if refusals else []),
            *(f"| {reason} | {count} |" for reason, count in refusals.most_common()),
            *([""] if refusals else []),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, one thread each")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch; the others count up")
    parser.add_argument("--out", help="write the page here")
    options = parser.parse_args()
    sizes = [min(BATCH, options.programs - start) for start in range(0, options.programs, BATCH)]
    batches = [{"seed": options.seed + i, "count": size} for i, size in enumerate(sizes)]
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    for worker in run_cases(measure, batches, jobs=options.jobs, case_seconds=BATCH_SECONDS, until=math.inf):
        result = result_of(worker)
        results.append(result)
        for program, grad, what in result["different"]:
            print(f"DIFFERENT, seed {result['seed']}, grad={grad}:\n{program}\n{what}", flush=True)
        if len(results) % 10 == 0:
            print(
                f"{len(results)} of {len(sizes)} batches, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
            )
    command = " ".join(["python", "tools/aot_fuzz.py", *sys.argv[1:]])
    text = report(results, time.monotonic() - began, options.jobs, command)
    print(text)
    if options.out:
        Path(options.out).write_text(text)
    if any(result["different"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
