"""Every protocol on every program, in processes side by side: the compiled module beside the eager one.

    python packages/compile/tests/protocol_run.py --jobs 16 --out rows.jsonl            all models and 300 random nets
    python packages/compile/tests/protocol_run.py --programs net/7 tv/resnet18 --protocols scaled
    python packages/compile/tests/protocol_run.py --nets 0 --side 32                    smaller images
    python packages/compile/tests/protocol_run.py --nets 50 --models 0 --backends inductor

A process takes one program through all protocols, eager and on each back end, in float64, so that a difference is no
rounding's. `--out` keeps a JSON line for each of them: what is in it is not run again. What fails is printed with the
command that runs it alone, and the exit status is 1. `--write` makes a page of all that is in `--out`.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import platform
import random
import signal
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
PACKAGES = Path(__file__).parents[2]
for folder in (
    PACKAGES / "aotautograd" / "tests",
    PACKAGES / "primtorch" / "tests",
    PACKAGES.parent / "tools" / "bench",
):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
from drawn_rounding import DrawnRounding  # noqa: E402
from pool import Row, Worker, append_row, read_rows, run_cases, told  # noqa: E402
from protocol_programs import SIDE, Program, build, public_names  # noqa: E402
from protocols import (  # noqa: E402
    PROTOCOLS,
    Note,
    Precision,
    Protocol,
    Subject,
    computes_in_single,
    differences,
    observed,
    raised_by,
)  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402

import torchcompile  # noqa: E402

BACKENDS = ("inductor", "aot_eager")
# Versions of a function that a case may compile: protocols change what many guards compare, and what went over to eager
# for their number would be compared with itself.
RECOMPILE_LIMIT = 256
Pair = tuple[str, str]  # a protocol and a back end
Seen = Callable[[str, str, Row], None]


def check(program: str, pairs: Sequence[Pair], seen: Seen, side: int = SIDE) -> None:
    """Calls `seen(protocol, back end, finding)` for each pair. Eager runs each protocol once; where that raises, the
    compiled module is compared up to there, and the finding has the error."""
    warnings.simplefilter("ignore")
    ours = build(program, side)
    eager = Subject(ours, ours.module, ours.module)
    state = {name: value.clone() for name, value in ours.module.state_dict().items()}
    single = computes_in_single(eager)
    torchcompile.reset()
    subjects = {backend: compiled(ours, backend) for _, backend in pairs}
    loaders: dict[str, Any] = {}
    told: Counter[str] = Counter()
    captured = dict.fromkeys(subjects, 0)
    for protocol in PROTOCOLS:
        backends = [backend for name, backend in pairs if name == protocol.name]
        if not backends:
            continue
        expected, exact = observed(protocol, eager, state), None
        raised = raised_by(expected)
        if single:
            with Precision(widened=True):
                exact = observed(protocol, eager, state)
        for backend in backends:
            subject = subjects[backend]
            subject.loaders = loaders
            began, before = time.process_time(), torchcompile.report().captured
            found = differences(
                expected, observed(protocol, subject, state), exact, rounded_anew(protocol, eager, state)
            )
            report = torchcompile.report()
            captured[backend] += report.captured - before
            if captured[backend] == 0 and not raised:
                found.append("no graph was captured")
            now = Counter({f"{e.kind.effect.value} [{e.kind.id}] {e.what}": e.count for e in report.surprises})
            events, told = sorted(now - told), now
            seconds = round(time.process_time() - began, 2)
            finding = {"differences": found[:5], "events": events[:9], "seconds": seconds}
            seen(protocol.name, backend, finding | ({"eager": raised} if raised else {}))


def rounded_anew(protocol: Protocol, eager: Subject, state: dict[str, torch.Tensor]) -> Callable[[int], list[Note]]:
    def run(draw: int) -> list[Note]:
        with DrawnRounding(draw):
            return observed(protocol, eager, state)

    return run


def compiled(program: Program, backend: str) -> Subject:
    module = copy.deepcopy(program.module)
    options = {"recompile_limit": RECOMPILE_LIMIT} | ({"eager_random": True} if backend == "inductor" else {})
    return Subject(program, module, torchcompile.compile(module, backend=backend, options=options))


def measure(case: Row, send: Callable[[Row], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.modules["__main__"] = types.ModuleType("__main__")  # processes that a loader spawns do not import this file

    def seen(protocol: str, backend: str, found: Row) -> None:
        send({"protocol": protocol, "backend": backend, **found})

    check(case["program"], [(protocol, backend) for protocol, backend in case["pairs"]], seen, case["side"])


def command(row: Row) -> str:
    return (
        f"python packages/compile/tests/protocol_run.py --jobs 1 --programs {row['program']} "
        f"--protocols {row['protocol']} --backends {row['backend']} --side {row.get('side', SIDE)}"
    )


def cases_of(options: argparse.Namespace, done: list[Row]) -> list[Row]:
    nets = [f"net/{seed}" for seed in range(options.seed, options.seed + options.nets)]
    programs = options.programs or [*public_names()[: options.models], *nets]
    passed = {(row["program"], row["protocol"], row["backend"]) for row in done}
    wanted = [(p.name, backend) for p in PROTOCOLS if p.name in options.protocols for backend in options.backends]
    cases = [
        {"program": p, "side": options.side, "pairs": [pair for pair in wanted if (p, *pair) not in passed]}
        for p in programs
    ]
    return [case for case in cases if case["pairs"]]


def rows_of(worker: Worker) -> list[Row]:
    """A row for each pair that a process came to; the one in which it ended says how."""
    program, pairs = worker.case["program"], worker.case["pairs"]
    asked = {"program": program, "side": worker.case["side"]}
    rows = [{**asked, **message} for message in worker.messages]
    if worker.failure and len(rows) < len(pairs):  # else it only was slow to end
        protocol, backend = pairs[len(rows)]
        ended = {"differences": [worker.failure], "events": [], "seconds": 0.0}
        rows.append({**asked, "protocol": protocol, "backend": backend, **ended})
    return rows


def run_here(cases: list[Row]) -> Iterator[Worker]:
    """In this process, for a debugger."""
    for case in cases:
        worker = Worker(None, cast(Any, None), case, 0.0)
        try:
            check(
                case["program"],
                case["pairs"],
                lambda protocol, backend, found, worker=worker: worker.messages.append(  # type: ignore[misc]
                    {"protocol": protocol, "backend": backend, **found}
                ),
                case["side"],
            )
        except Exception as error:
            worker.failure = told(error)
        yield worker


def run_in_processes(cases: list[Row], options: argparse.Namespace) -> Iterator[Worker]:
    """In forks of this process, which has imported what they need; no thread runs in it."""
    torch.set_num_threads(1)
    if any(not case["program"].startswith("net/") for case in cases):
        import_torchvision()
        for name in ("timm", "transformers"):
            importlib.import_module(name)
    until = time.monotonic() + options.hours * 3600
    return run_cases(measure, cases, jobs=options.jobs, case_seconds=options.case_seconds, until=until)


def sweep(cases: list[Row], options: argparse.Namespace, console: Console) -> list[Row]:
    rows: list[Row] = []
    here = options.jobs == 1 and options.programs
    workers = run_here(cases) if here else run_in_processes(cases, options)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:  # without a thread: workers are forks
        task = progress.add_task("protocols", total=sum(len(case["pairs"]) for case in cases))
        for worker in workers:
            for row in rows_of(worker):
                append_row(options.out, row)
                rows.append(row)
                if row["differences"]:
                    console.print(f"WRONG {command(row)}\n    {row['differences'][0]}", highlight=False, markup=False)
            progress.advance(task, len(worker.case["pairs"]))
            wrong = sum(bool(row["differences"]) for row in rows)
            progress.update(task, description=f"{worker.case['program']}, {wrong} wrong")
            progress.refresh()
    return rows


# -- the page ----------------------------------------------------------------------------------------------------------

OUTCOMES: dict[str, Callable[[Row], bool]] = {  # the first that holds
    "differs": lambda row: bool(row["differences"]),
    "eager raises": lambda row: "eager" in row,
    "as eager, a part fell back": lambda row: any(event.startswith("fallback") for event in row["events"]),
    "as eager, with detours": lambda row: bool(row["events"]),
    "as eager": lambda row: True,
}


def outcome(row: Row) -> str:
    return next(name for name, holds in OUTCOMES.items() if holds(row))


def _images(sides: Sequence[int]) -> str:
    """What is to be known of the images: `--side`, which some models need larger."""
    pixels = " or ".join(map(str, sides))
    return f", images of {pixels} pixels a side or the fewest that the model takes" if sides else ""


def page(rows: list[Row], options: argparse.Namespace) -> str:
    """All that was run: how each protocol ended, what left compiled code, and what differs."""
    programs = {row["program"] for row in rows}
    nets = sum(name.startswith("net/") for name in programs)
    counts = Counter((row["protocol"], outcome(row)) for row in rows)
    kinds = Counter(event.partition("[")[2].partition("]")[0] for row in rows for event in row["events"])
    table = [
        f"| {p.name} | " + " | ".join(str(counts[p.name, name]) for name in reversed(OUTCOMES)) + " |"
        for p in PROTOCOLS
    ]
    wrong = [f"- `{command(row)}`: {row['differences'][0]}" for row in rows if row["differences"]]
    raising: dict[str, list[str]] = {}
    for row in rows:
        if "eager" in row:
            raising.setdefault(row["program"], []).append(row["eager"])
    sides = sorted({row.get("side", SIDE) for row in rows if row["program"].startswith(("timm/", "tv/"))})
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "timm", "torchvision")
    )
    return "\n".join([
        "# Protocols of training",
        "",
        f"{len(programs) - nets} public models (tiny configurations{_images(sides)}) and {nets} random nets, each trained "
        f"by {len(PROTOCOLS)} protocols on {' and '.join(sorted({row['backend'] for row in rows}))}, beside eager, in "
        f"float64: results, gradients, who shares memory, exceptions and the state of the process are compared. "
        f"{sum(bool(row['differences']) for row in rows)} of {len(rows)} runs differ.",
        "",
        f"Python {platform.python_version()}, {versions}; {platform.machine()}, {os.cpu_count()} processors, "
        f"{options.jobs} processes, one thread each; {sum(row['seconds'] for row in rows):.0f} processor seconds.",
        f"`python packages/compile/tests/protocol_run.py --jobs {options.jobs} --seed {options.seed} --side {options.side} "
        "--out rows.jsonl`",
        "",
        "| protocol | " + " | ".join(reversed(OUTCOMES)) + " |",
        "|---|" + "---|" * len(OUTCOMES),
        *table,
        "",
        "What left compiled code (kinds of the ledger, by runs): "
        + (", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "nothing")
        + ".",
        "",
        *(["Eager itself raises; the compiled module was compared up to there:", ""] if raising else []),
        *(f"- {program}, {len(texts)} runs: {texts[0]}" for program, texts in raising.items()),
        *([""] if raising else []),
        *(["What differs:", "", *wrong, ""] if wrong else []),
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--programs", nargs="+", default=None, help="suite/name or net/SEED; all when not given")
    parser.add_argument("--models", type=int, default=None, help="how many public models; all when not given")
    parser.add_argument("--nets", type=int, default=300, help="how many random nets")
    parser.add_argument("--seed", type=int, default=None, help="of the first random net; drawn when not given")
    parser.add_argument(
        "--side", type=int, default=SIDE, help="pixels of an image's side, where the model takes so few"
    )
    parser.add_argument("--protocols", nargs="+", default=[p.name for p in PROTOCOLS])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--case-seconds", type=float, default=300.0, help="for a program with all its protocols")
    parser.add_argument("--hours", type=float, default=24.0, help="for all of it; what is left stays open")
    parser.add_argument("--write", type=Path, help="write the page of all rows here as Markdown")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the workers end with it
    console = Console()
    done = read_rows(options.out)
    if options.seed is None:
        begun = [int(row["program"].removeprefix("net/")) for row in done if row["program"].startswith("net/")]
        options.seed = min(begun, default=random.randrange(1 << 30))
    cases = cases_of(options, done)
    console.print(f"{len(cases)} programs, first net of seed {options.seed}, {options.jobs} processes")
    rows = [*done, *sweep(cases, options, console)]
    wrong = [row for row in rows if row["differences"]]
    for row in wrong:
        console.print(f"{command(row)}\n    " + "\n    ".join(row["differences"]), highlight=False, markup=False)
    console.print(f"{len(rows)} protocols run, {len(wrong)} differ from eager")
    if options.write:
        options.write.write_text(page(rows, options))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
