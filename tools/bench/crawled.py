"""Modules crawled from public repositories: forward and backward on the default back end, beside eager.

    python tools/bench/crawled.py FOLDER --modules 3000 --seed 1 --jobs 16 --out rows.jsonl --peer --seconds 570
    python tools/bench/crawled.py FOLDER --only test_some_repository:3:SomeModule        one of them, told in full
    python tools/bench/crawled.py FOLDER --out rows.jsonl --seed 1 --again wrong raises       what went so, once more
    python tools/bench/crawled.py FOLDER --out rows.jsonl --seed 1 --write docs/results/crawled_modules.md

FOLDER holds files `test_*.py` as the TorchDynamo paper's benchmark generates them (see crawled_files.py). Modules are
drawn with the seed until so many have been judged; those that eager itself does not run here (a missing library, a
wrong guess of their arguments) are passed over. Values, gradients, the inputs and the module afterwards, and the
process's state are compared with eager's, over two calls; float64 and other rounding judge where float32
differs. `--peer` counts what torch.compile captures of the same modules (`--peer N`: of the first N drawn). `--out`
keeps a JSON line a module: what is in it is not run again, so that a sweep can be cut into slices of `--seconds`: the
same command until it says that so many have been judged.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import multiprocessing
import os
import platform
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import crawled_files
from pool import Row, append_row, read_rows, run_cases, silence
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

VERDICTS = {
    "right": "values, gradients, state and surroundings as eager's",
    "wrong": "a value, a gradient or a state that is not eager's",
    "raises": "raises where eager does not",
    "crashed": "the process ended",
    "slow": "longer than the limit for one run",
    "ambient": "right, but the process is left in another state",
    "unsteady": "eager differs from itself: not judged",
}
# Of `--seconds`, kept for ending what runs and for writing.
SPARE = 10


def judged(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("verdict") not in (None, "unsteady")]


def one_graph(found: Row) -> bool:
    """At most one graph, no break, nothing left to eager."""
    breaks = found.get("breaks") or []
    count = breaks if isinstance(breaks, int) else len(breaks)
    eager = [*(found.get("fallbacks") or ()), *(found.get("reruns") or ())]
    return not (found.get("failure") or count or eager) and found.get("graphs", 2) <= 1


def import_all(peer: bool) -> None:
    """What every worker needs, once: workers are forks of this process. No thread may start here."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    warnings.simplefilter("ignore")
    from zoo import import_torchvision

    import_torchvision()
    wanted = ["crawled_case", "torchcompile", "torchdynamo", "scipy.special", "sklearn", "matplotlib.pyplot", "timm"]
    for module in [*wanted, "transformers", *(["torch._dynamo", "torch._dynamo.utils"] if peer else [])]:
        try:
            __import__(module)
        except ImportError as error:
            if module in wanted[:3]:
                raise
            print(f"{module} is not here: {error}")
    for compiler in ("ours", "peer") if peer else ("ours",):
        for module in imported_late(compiler):
            with contextlib.suppress(ImportError):
                __import__(module)
    gc.collect()
    gc.freeze()  # collections in a worker leave alone what is here, and the pages stay shared


def imported_late(compiler: str) -> list[str]:
    """The modules that a first compilation imports, found by one in another process: this one stays as it was."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile_and_tell, args=(compiler, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        return []  # it says in the rows why it cannot compile
    finally:
        process.join()


def _compile_and_tell(compiler: str, pipe: connection.Connection) -> None:
    import crawled_case
    import torch

    silence()
    before = set(sys.modules)
    module, _ = crawled_case.COMPILERS[compiler](torch.nn.Linear(3, 3), crawled_case.Run())
    module(torch.ones(2, 3)).sum().backward()
    pipe.send([name for name in sys.modules if name not in before])


def measure(case: Row, send: Any) -> None:
    import crawled_case

    crawled_case.measure(case, send)


def sample(options: argparse.Namespace, rows: dict[str, Row]) -> Iterator[Row]:
    """Cases still to run, in the order of the draw, until so many modules are judged."""
    names = crawled_files.listed(Path(options.folder))
    if options.only:
        chosen = [name for name in names if any(wanted in name for wanted in options.only)]
    elif options.again:
        chosen = [name for name, row in rows.items() if row.get("verdict") in options.again]
        for name in chosen:
            del rows[name]
    else:
        chosen = crawled_files.shuffled(names, options.seed)
    for place, name in enumerate(chosen):
        if not (options.only or options.again) and len(judged(list(rows.values()))) >= options.modules:
            return
        if name not in rows:
            yield {
                "module": name, "folder": str(Path(options.folder).resolve()), "seed": options.seed,
                "train": options.train, "peer": place < options.peer, "memory": options.memory,
                "run_seconds": options.run_seconds,
            }  # fmt: skip


def line(row: Row) -> str:
    if "verdict" not in row:
        return f"{row['module']}: eager: {row['eager'][:120]}"
    detail = row["detail"] and (f" ({row['detail']})" if row["verdict"] == "right" else f": {row['detail']}")
    parts = [f"{row['module']}: {row['verdict']}{detail}"]
    parts += [
        f"{row.get('graphs')} graphs",
        *(f"{n} {reason} ({where})" for n, reason, where, _ in row.get("breaks", ())),
    ]
    parts += [f"LEFT TO EAGER {text}" for text in row.get("fallbacks", ())]
    if row.get("backward"):
        parts.append(f"eager's backward raises {row['backward'][:80]}")
    return "; ".join(parts)


# -- reporting ---------------------------------------------------------------------------------


def counts(rows: list[Row]) -> list[tuple[str, str]]:
    """(what, how many) of a sweep."""
    mine = judged(rows)
    total = max(len(mine), 1)
    share = lambda n: f"{n} ({n / total:.1%})"
    found = [
        ("modules drawn", str(len(rows))),
        ("eager does not run them", str(sum("verdict" not in row for row in rows))),
        ("eager differs from itself", str(sum(row.get("verdict") == "unsteady" for row in rows))),
        ("judged", str(len(mine))),
    ]
    tally = Counter(row["verdict"] for row in mine)
    found += [
        (f"{verdict}: {meaning}", share(tally[verdict]))
        for verdict, meaning in VERDICTS.items()
        if verdict != "unsteady"
    ]
    left = [row for row in mine if row.get("fallbacks")]
    raised = [row for row in mine if row.get("backward")]
    fine = sum(row["verdict"] == "right" for row in raised)
    found.append(("a function or a graph of them left to eager", share(len(left))))
    found.append(("ran otherwise than planned", share(sum(bool(row.get("mended")) for row in mine))))
    found.append(("eager's backward raises; right in the forward", f"{len(raised)}; {fine}"))
    found.append(("captured in one graph", share(sum(one_graph(row) for row in mine))))
    both = [row for row in mine if "peer" in row]
    if both:
        ran = [row for row in both if not row["peer"].get("failure")]
        theirs, here = sum(one_graph(row["peer"]) for row in both), sum(one_graph(row) for row in both)
        found.append((f"of {len(both)} in one graph: here, by torch.compile", f"{here}, {theirs}"))
        theirs, here = sum(one_graph(row["peer"]) for row in ran), sum(one_graph(row) for row in ran)
        found.append((f"of {len(ran)} that torch.compile runs: here, by torch.compile", f"{here}, {theirs}"))
    return found


def reasons(rows: list[Row]) -> Counter[str]:
    """Modules by reason of a break."""
    return Counter(reason for row in judged(rows) for reason in {reason for _, reason, _, _ in row.get("breaks", ())})


def show(rows: list[Row]) -> None:
    console = Console()
    table = Table("crawled modules", "")
    for what, number in counts(rows):
        table.add_row(what, number)
    console.print(table)
    broken = Table("why graphs end", "modules")
    for reason, number in reasons(rows).most_common():
        broken.add_row(reason, str(number))
    console.print(broken)
    for row in judged(rows):
        if row["verdict"] != "right" or row.get("fallbacks"):
            console.print(line(row), markup=False, soft_wrap=True)


def seconds(rows: list[Row]) -> str:
    """What a drawn module takes of a processor, by what is done with it."""
    spent: Counter[str] = Counter()
    for row in rows:
        spent.update(row.get("took", {}))
    each = {what: spent[what] / max(sum(what in row.get("took", {}) for row in rows), 1) for what in spent}
    return ", ".join(f"{what} {taken:.1f} s" for what, taken in each.items())


REPOSITORY = Path(__file__).resolve().parents[2]


def machine() -> str:
    cpus = Path("/proc/cpuinfo")
    names = [text.split(":", 1)[1].strip() for text in cpus.read_text().splitlines() if text.startswith("model name")]
    return names[0] if names else platform.machine()


def page(rows: list[Row], options: argparse.Namespace) -> str:
    import torch

    rest = [row for row in judged(rows) if row["verdict"] != "right" or row.get("fallbacks")]
    peer = f" --peer {options.peer}" if 0 < options.peer < sys.maxsize else " --peer" * (options.peer > 0)
    lines = [
        "# Modules crawled from public repositories",
        "",
        "Forward and backward on the default back end, two calls each, with eager's random numbers; on CPU, in "
        f"{'training' if options.train else 'inference'} mode. Compared with eager: results (values, dtypes, strides, "
        "shared memory), gradients, inputs and the module afterwards, the process's state. A value that differs in "
        "float32 by more than four units in the last place of its largest element is right in three cases: it is at "
        "most twice as far from float64 as eager's; it differs by at most twice what other rounding errors, drawn at "
        "random for each operator, do to eager; the module compiled in float64 gives what eager does in float64. The "
        "modules are those of the benchmark of the TorchDynamo paper; those that eager does not run here are passed "
        'over. torch.compile: with its back end "eager", so that capture alone is compared.',
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}; {os.cpu_count()} processors ({machine()}), "
        f"{options.jobs} modules at once, one thread each. Processor time of a module: {seconds(rows)}.",
        f"`python tools/bench/crawled.py FOLDER --modules {options.modules} --seed {options.seed} --jobs {options.jobs}"
        f"{' --train' if options.train else ''}{peer} --out rows.jsonl`",
        "",
        "| | modules |",
        "|---|---|",
        *(f"| {what} | {number} |" for what, number in counts(rows)),
        "",
        "| why graphs end | modules |",
        "|---|---|",
        *(f"| {reason} | {number} |" for reason, number in reasons(rows).most_common()),
        "",
        "Not right, or left to eager:" if rest else "All are right, and nothing is left to eager.",
        "",
        *(f"- {line(row)}" for row in sorted(rest, key=lambda row: row["module"])),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    for folder in (Path(options.folder).resolve(), REPOSITORY):  # paths of this machine are nothing to a reader
        text = text.replace(f"{folder}/", "")
    return text


# -- the command -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the files test_*.py")
    parser.add_argument("--modules", type=int, default=300, help="how many are to be judged")
    parser.add_argument("--seed", type=int, help="of the draw, of parameters and of inputs; else a fresh one")
    parser.add_argument("--only", nargs="*", help="the modules whose names contain one of these")
    parser.add_argument("--train", action="store_true", help="modules in training mode; else in inference mode")
    parser.add_argument(
        "--peer", nargs="?", type=int, const=sys.maxsize, default=0, metavar="N",
        help="torch.compile's capture beside ours, of the first N of the draw; else of all",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="modules at once")
    parser.add_argument("--seconds", type=float, default=3600, help="for all of it; what is left stays open")
    parser.add_argument("--run-seconds", type=float, default=100, help="for one run of one module")
    parser.add_argument("--memory", type=int, default=4096, help="MiB that one run may take")
    parser.add_argument("--out", help="JSON lines, a module each: grows, and modules in it are not run again")
    parser.add_argument("--again", nargs="*", help="run the modules in --out that have these verdicts once more")
    parser.add_argument("--write", help="write the page here as Markdown, of all rows in --out")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds - SPARE
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(10**6)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # modules that ask for a GPU find none: all runs are on the CPU
    console = Console()
    console.print(f"seed {options.seed}")
    out = Path(options.out) if options.out else None
    rows = {row["module"]: row for row in read_rows(out)}
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cases = sample(options, rows)
    first = next(cases, None)
    if first is not None:
        import_all(options.peer > 0)
        drawn = itertools.chain([first], cases)
        ready = run_cases(measure, drawn, jobs=options.jobs, case_seconds=8 * options.run_seconds, until=until)
        with Progress(*columns, console=console, auto_refresh=False) as progress:
            task = progress.add_task("judged", total=None if options.only or options.again else options.modules)
            for worker in ready:
                row: Row = {"module": worker.case["module"], "seed": options.seed, "train": options.train}
                row |= worker.messages[0] if worker.messages else {"eager": f"not told: {worker.failure}"}
                rows[row["module"]] = row
                append_row(out, row)
                if row.get("verdict") or options.only:
                    progress.console.print(line(row), markup=False, highlight=False, soft_wrap=True)
                progress.update(task, completed=len(judged(list(rows.values()))), refresh=True)
    show(list(rows.values()))
    if options.write:
        Path(options.write).write_text(page(list(rows.values()), options))


if __name__ == "__main__":
    main()
