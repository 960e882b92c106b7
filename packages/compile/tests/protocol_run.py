"""Every protocol on every program, in processes side by side: the compiled module beside the eager one.

    python packages/compile/tests/protocol_run.py --jobs 16 --out rows.jsonl            all models and 300 random nets
    python packages/compile/tests/protocol_run.py --programs net/7 tv/resnet18 --protocols scaled
    python packages/compile/tests/protocol_run.py --nets 50 --models 0 --backends inductor

A process takes one program and one back end through all protocols, in float64, so that a difference is no rounding's.
`--out` keeps a JSON line for each of them: what is in it is not run again. What fails is printed with the command that
runs it alone, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
PACKAGES = Path(__file__).parents[2]
for folder in (
    PACKAGES / "aotautograd" / "tests",
    PACKAGES / "primtorch" / "tests",
    PACKAGES.parent / "tools" / "bench",
):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from pool import Row, append_row, read_rows, run_cases, told  # noqa: E402
from protocol_programs import build, public_names  # noqa: E402
from protocols import PROTOCOLS, Subject, differences, observed  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

import torchcompile  # noqa: E402

BACKENDS = ("inductor", "aot_eager")


def check(program: str, backend: str, protocols: list[str], seen: Callable[[str, list[str], list[str]], None]) -> None:
    """Calls `seen(protocol, differences, what ran eagerly)` for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ours = build(program)
    eager = copy.deepcopy(ours.module)
    torchcompile.reset()
    options = {"eager_random": True} if backend == "inductor" else {}
    call = torchcompile.compile(ours.module, backend=backend, options=options)
    state = {name: value.clone() for name, value in eager.state_dict().items()}
    for protocol in PROTOCOLS:
        if protocol.name not in protocols:
            continue
        expected = observed(protocol, Subject(ours, eager, eager), state)
        found = differences(expected, observed(protocol, Subject(ours, ours.module, call), state))
        report = torchcompile.report()
        if report.captured == 0:
            found.append("no graph was captured")
        seen(protocol.name, found, [f"{event.kind.id}: {event.what}" for event in report.ran_eagerly])


def measure(case: Row, send: Callable[[Row], None]) -> None:
    def seen(protocol: str, found: list[str], eagerly: list[str]) -> None:
        send({"protocol": protocol, "differences": found[:5], "ran_eagerly": eagerly[:5]})

    check(case["program"], case["backend"], case["protocols"], seen)


def command(row: Row) -> str:
    return (
        f"python packages/compile/tests/protocol_run.py --jobs 1 --programs {row['program']} "
        f"--protocols {row['protocol']} --backends {row['backend']}"
    )


def cases_of(options: argparse.Namespace, done: list[Row]) -> list[Row]:
    nets = [f"net/{seed}" for seed in range(options.seed, options.seed + options.nets)]
    programs = options.programs or [*public_names()[: options.models], *nets]
    passed = {(row["program"], row["backend"], row["protocol"]) for row in done}
    cases = []
    for program in programs:
        for backend in options.backends:
            left = [name for name in options.protocols if (program, backend, name) not in passed]
            if left:
                cases.append({"program": program, "backend": backend, "protocols": left})
    return cases


def rows_of(worker: Any) -> list[Row]:
    """A row for each protocol that a process came to; the one in which it ended says how."""
    case = worker.case
    rows = [{"program": case["program"], "backend": case["backend"], **message} for message in worker.messages]
    if worker.failure and len(rows) < len(case["protocols"]):  # else it only was slow to end
        reached = case["protocols"][min(len(rows), len(case["protocols"]) - 1)]
        rows.append(
            {
                "program": case["program"],
                "backend": case["backend"],
                "protocol": reached,
                "differences": [worker.failure],
                "ran_eagerly": [],
            }
        )
    return rows


def run_here(cases: list[Row]) -> list[Row]:
    """In this process, for a debugger."""
    rows: list[Row] = []
    for case in cases:

        def seen(protocol: str, found: list[str], eagerly: list[str], case: Row = case) -> None:
            rows.append({**case, "protocol": protocol, "differences": found, "ran_eagerly": eagerly})

        try:
            check(case["program"], case["backend"], case["protocols"], seen)
        except Exception as error:
            seen(case["protocols"][0], [told(error)], [])
    return rows


def sweep(cases: list[Row], options: argparse.Namespace, console: Console) -> list[Row]:
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("protocols", total=sum(len(case["protocols"]) for case in cases))
        until = time.monotonic() + options.hours * 3600
        for worker in run_cases(
            measure, cases, jobs=options.jobs, case_seconds=options.case_seconds, until=until, start="spawn"
        ):
            for row in rows_of(worker):
                append_row(options.out, row)
                rows.append(row)
                if row["differences"]:
                    console.print(f"[red]WRONG[/] {command(row)}\n    {row['differences'][0]}", highlight=False)
            progress.advance(task, len(worker.case["protocols"]))
            wrong = sum(bool(row["differences"]) for row in rows)
            progress.update(task, description=f"{worker.case['program']}, {wrong} wrong")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--programs", nargs="+", default=None, help="suite/name or net/SEED; all when not given")
    parser.add_argument("--models", type=int, default=None, help="how many public models; all when not given")
    parser.add_argument("--nets", type=int, default=300, help="how many random nets")
    parser.add_argument("--seed", type=int, default=None, help="of the first random net; drawn when not given")
    parser.add_argument("--protocols", nargs="+", default=[p.name for p in PROTOCOLS])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--case-seconds", type=float, default=1800.0)
    parser.add_argument("--hours", type=float, default=24.0)
    options = parser.parse_args()
    console = Console()
    done = read_rows(options.out)
    if options.seed is None:
        begun = [int(row["program"].removeprefix("net/")) for row in done if row["program"].startswith("net/")]
        options.seed = min(begun, default=random.randrange(1 << 30))
    cases = cases_of(options, done)
    console.print(f"{len(cases)} programs and back ends, first net of seed {options.seed}, {options.jobs} processes")
    rows = run_here(cases) if options.jobs == 1 and options.programs else sweep(cases, options, console)
    wrong = [row for row in (*done, *rows) if row["differences"]]
    for row in wrong:
        console.print(f"{command(row)}\n    " + "\n    ".join(row["differences"]), highlight=False, markup=False)
    console.print(f"{len(done) + len(rows)} protocols run, {len(wrong)} differ from eager")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
