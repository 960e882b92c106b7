"""The whole matrix of the language, in processes side by side: every part in every setting on every back end.

    python packages/compile/tests/feature_matrix_run.py --jobs 2 --out rows.jsonl
    python packages/compile/tests/feature_matrix_run.py --jobs 1 --parts vmap --settings no_grad --backends inductor

`--out` keeps a JSON line for each cell: what is in it is not run again. What differs from eager is printed with the
command that runs it alone, and the exit status is 1. `--write` makes a page of all that is in `--out`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
PACKAGES = Path(__file__).parents[2]
for folder in (
    PACKAGES / "aotautograd" / "tests",
    PACKAGES / "primtorch" / "tests",
    PACKAGES.parent / "tools" / "bench",
):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from feature_matrix import BACKENDS, KNOWN, SETTINGS, check  # noqa: E402
from pool import Row, Worker, append_row, read_rows, run_cases, told  # noqa: E402
from reach_programs import PARTS  # noqa: E402


def measure(case: Row, send: Callable[[Row], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for setting, backend in case["cells"]:
        began = time.process_time()
        try:
            found = check(PARTS[case["part"]], SETTINGS[setting], backend)
        except Exception as error:
            found = [f"the check itself: {told(error)}"]
        seconds = round(time.process_time() - began, 2)
        send({"setting": setting, "backend": backend, "differences": found[:5], "seconds": seconds})


def command(row: Row) -> str:
    return (
        f"python packages/compile/tests/feature_matrix_run.py --jobs 1 --parts {shlex.quote(row['part'])} "
        f"--settings {shlex.quote(row['setting'])} --backends {row['backend']}"
    )


def cases_of(options: argparse.Namespace, done: list[Row]) -> list[Row]:
    passed = {(row["part"], row["setting"], row["backend"]) for row in done}
    wanted = [(setting, backend) for backend in options.backends for setting in options.settings]
    cases = [{"part": p, "cells": [cell for cell in wanted if (p, *cell) not in passed]} for p in options.parts]
    return [case for case in cases if case["cells"]]


def rows_of(worker: Worker) -> list[Row]:
    """A row for each cell that a process came to; the one in which it ended says how."""
    part, cells = worker.case["part"], worker.case["cells"]
    rows = [{"part": part, **message} for message in worker.messages]
    if worker.failure and len(rows) < len(cells):
        setting, backend = cells[len(rows)]
        ended = {"differences": [worker.failure], "seconds": 0.0}
        rows.append({"part": part, "setting": setting, "backend": backend, **ended})
    return rows


def page(rows: list[Row]) -> str:
    """How many cells of each setting and back end are as eager has them, and those that are not."""
    wrong = [row for row in rows if row["differences"]]
    total = Counter((row["setting"], row["backend"]) for row in rows)
    right = Counter((row["setting"], row["backend"]) for row in rows if not row["differences"])
    backends = [backend for backend in BACKENDS if any(row["backend"] == backend for row in rows)]
    return "\n".join([
        "# The language's parts in every setting",
        "",
        f"{len({row['part'] for row in rows})} programs ([what is captured](../reach.md)) in {len(SETTINGS)} settings on "
        f"{len(backends)} back ends, each beside eager in float64: values, gradients, exceptions, who shares memory, the "
        "arguments, the state of the process, and no event of the ledger beyond a break that was put there. "
        f"Of {len(PARTS) * len(SETTINGS) * len(BACKENDS)} cells {len(rows)} were run, and {len(wrong)} differ.",
        "",
        "Taken as they are: under inference mode results of torch.func are inference tensors, where torch's are others; and "
        "the graph breaks for " + "; ".join(f"{part} ({setting}: {', '.join(sorted(kinds))})" for (part, setting), kinds in KNOWN.items()) + ".",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}; {platform.machine()}, {os.cpu_count()} "
        f"processors, one thread each; {sum(row['seconds'] for row in rows):.0f} processor seconds.",
        "`python packages/compile/tests/feature_matrix_run.py --out rows.jsonl` (`make matrix`); a test of the suite runs "
        "some cells that are drawn anew each time.",
        "",
        "| setting | " + " | ".join(backends) + " |",
        "|---|" + "---|" * len(backends),
        *(
            f"| {name} | " + " | ".join(f"{right[name, b]} of {total[name, b]}" for b in backends) + " |"
            for name in SETTINGS
        ),
        "",
        *(["What differs:", "", *(f"- `{command(row)}`: {row['differences'][0].splitlines()[0]}" for row in wrong), ""] if wrong else []),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--case-seconds", type=float, default=300.0, help="for a part in all its settings")
    parser.add_argument("--seconds", type=float, default=86400.0, help="for all of it; what is left stays open")
    parser.add_argument("--write", type=Path, help="write the page of all rows here as Markdown")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the workers end with it
    rows = read_rows(options.out)
    until = time.monotonic() + options.seconds
    for worker in run_cases(measure, cases_of(options, rows), jobs=options.jobs, case_seconds=options.case_seconds, until=until):  # fmt: skip
        for row in rows_of(worker):
            append_row(options.out, row)
            rows.append(row)
            if row["differences"]:
                print(command(row), *row["differences"], sep="\n    ", flush=True)
    wrong = sum(bool(row["differences"]) for row in rows)
    print(f"{len(rows)} cells run, {wrong} differ from eager")
    if options.write:
        options.write.write_text(page(rows))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
