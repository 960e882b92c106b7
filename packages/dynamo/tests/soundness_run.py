"""Soundness over many random programs, in processes side by side.

    python packages/dynamo/tests/soundness_run.py --programs 100000 --jobs 16 [--seed N] [--write summary.md]
    python packages/dynamo/tests/soundness_run.py --one SEED

Each program has its own seed. Those on which compiled and eager part are printed with it, shrunk, and again at the end;
the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from ambient_state import state_of_process, take_modes_off
from soundness_programs import disagreement, random_program


def check(seed: int) -> tuple[int, str | None]:
    """The seed, and a report when the program is wrong, or does not end."""
    statements, changes = random_program(seed)
    signal.alarm(_SECONDS_A_PROGRAM)
    before = state_of_process()
    try:
        found = disagreement(statements, changes)
    except BaseException as error:  # of capture or of the harness: a finding as well
        found = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    after = state_of_process()
    if after != before:
        left = {name: value for name, value in after.items() if value != before[name]}
        found = f"the process is left changed: {left}; {found or 'results as eager'}"
        take_modes_off(before)
    return seed, found


_SECONDS_A_PROGRAM = 60


def _give_up(number: int, frame: Any) -> None:
    raise TimeoutError(f"not done after {_SECONDS_A_PROGRAM} s")


def prepare() -> None:
    """Makes a process a worker."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _give_up)
    warnings.simplefilter("ignore")  # of hooks that a change puts on modules, of limits that are reached
    logging.disable(logging.WARNING)


def check_slice(work: tuple[int, int]) -> tuple[int, list[tuple[int, str]]]:
    """Checks `count` programs from `seed` on; how many, and which were wrong."""
    seed, count = work
    return count, [(s, report) for s, report in map(check, range(seed, seed + count)) if report is not None]


def shrunk(seed: int) -> tuple[list[str], list[str], str]:
    """A smaller program with fewer changes that is still wrong."""
    statements, changes = random_program(seed)
    for part in (changes, statements):
        index = 0
        while index < len(part):
            removed = part.pop(index)
            try:
                still = disagreement(statements, changes) if statements else None
            except Exception:
                still = "error"
            if still is None:
                part.insert(index, removed)
                index += 1
    try:
        return statements, changes, disagreement(statements, changes) or "not seen again"
    except Exception as error:
        return statements, changes, f"{type(error).__name__}: {error}"


def show(seed: int) -> str:
    statements, changes, report = shrunk(seed)
    lines = [f"seed {seed}", *(f"    {line}" for line in statements), *(f"  then {line}" for line in changes)]
    return "\n".join([*lines, f"  -> {report}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="of the first program; drawn when not given")
    parser.add_argument("--one", type=int, help="check the program of this seed alone")
    parser.add_argument("--show", type=int, default=20, help="how many wrong programs are shrunk and printed")
    parser.add_argument("--write", help="write the summary here as Markdown")
    options = parser.parse_args()
    if options.one is not None:
        print(show(options.one))
        return 0
    first = random.randrange(1 << 40) if options.seed is None else options.seed
    step = 50
    work = [(first + start, min(step, options.programs - start)) for start in range(0, options.programs, step)]
    began, done, wrong = time.perf_counter(), 0, []
    print(f"programs {options.programs}, jobs {options.jobs}, first seed {first}", flush=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, prepare, maxtasksperchild=20) as pool:
        for number, (count, found) in enumerate(pool.imap_unordered(check_slice, work)):
            done += count
            wrong += found
            for seed, report in found:
                print(f"WRONG seed {seed}: {report.splitlines()[0]}", flush=True)
            if number % max(1, len(work) // 20) == 0:
                rate = done / (time.perf_counter() - began)
                print(f"{done} programs, {len(wrong)} wrong, {rate:.0f} a second", flush=True)
    seconds = time.perf_counter() - began
    shown = [show(seed) for seed, _ in wrong[: options.show]]
    print("\n\n".join(shown))
    summary = (
        f"{done} random programs (first seed {first}), each called after 2 to 5 changes of state: {len(wrong)} wrong.\n"
        f"{seconds:.0f} s, {options.jobs} processes, Python {platform.python_version()}, torch {torch.__version__}."
    )
    print(summary)
    if options.write:
        text = "\n\n".join(f"```\n{part}\n```" for part in shown)
        Path(options.write).write_text(f"# Soundness over random programs\n\n{summary}\n\n{text}".rstrip() + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
