"""Cases in worker processes: one each, ended at its deadline, so that no case can harm another or the sweep."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Measure = Callable[[Row, Callable[[Row], None]], None]


@dataclass(eq=False)
class Worker:
    """A case in its process: what it has told so far, and why it ended without saying more."""

    process: Any
    pipe: connection.Connection
    case: Row
    deadline: float
    messages: list[Row] = field(default_factory=list)
    failure: str | None = None


def run_cases(
    measure: Measure,
    cases: Iterable[Row],
    *,
    jobs: int,
    case_seconds: float,
    until: float,
    start: str = "fork",
    environments: Sequence[Mapping[str, str]] = ({},),
) -> Iterator[Worker]:
    """Workers as they end, `jobs` at once; `measure(case, send)` runs in them, with nothing on stdout and stderr.

    `failure` is set where the process was ended or ended itself by anything but the return of `measure`. At `until`
    (of time.monotonic) what still runs is ended and not yielded, and the rest is not begun.
    With `start` "fork" workers inherit what this process has imported: no thread may run in it. `environments` are
    added to this process's, for one worker after the other, before it starts.
    """
    context: Any = multiprocessing.get_context(start)
    waiting, running, turns = iter(cases), list[Worker](), itertools.cycle(environments)
    try:
        while True:
            while len(running) < jobs and time.monotonic() < until:
                case = next(waiting, None)
                if case is None:
                    break
                os.environ.update(next(turns))
                running.append(_start(context, measure, case, time.monotonic() + case_seconds))
            if not running:
                return
            yield from _ended(running, case_seconds, until)
    finally:  # also where the sweep itself is ended
        for worker in running:
            _end(worker, patience=0)


def _start(context: Any, measure: Measure, case: Row, deadline: float) -> Worker:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(measure, case, sender))
    process.start()
    sender.close()
    return Worker(process, receiver, case, deadline)


def _ended(running: list[Worker], case_seconds: float, until: float) -> Iterator[Worker]:
    """Waits for something to happen, and takes those that have ended out of `running`."""
    soonest = min(until, *(worker.deadline for worker in running))
    ready = connection.wait([w.pipe for w in running], timeout=min(max(soonest - time.monotonic(), 0.05), 3600))
    for worker in list(running):
        if worker.pipe in ready and not _receive(worker):
            running.remove(worker)
            _end(worker, patience=5)
            if worker.process.exitcode:
                worker.failure = worker.failure or f"the process ended with status {worker.process.exitcode}"
            yield worker
        elif time.monotonic() >= min(worker.deadline, until):
            running.remove(worker)
            _end(worker, patience=0)
            if time.monotonic() < until:
                worker.failure = f"longer than {case_seconds:.0f} s"
                yield worker


def told(error: BaseException, length: int = 400) -> str:
    """An exception in a line: type, message, and the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}"[:length] + place


def silence() -> None:
    """What models and compilers print and log goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def read_rows(path: Path | None) -> list[Row]:
    """The rows of a sweep so far; none where it has not begun."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def append_row(path: Path | None, row: Row) -> None:
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _work(measure: Measure, case: Row, pipe: connection.Connection) -> None:
    os.setpgid(0, 0)  # what the case starts ends with it
    silence()
    try:
        measure(case, pipe.send)
    except Exception as error:
        pipe.send({"failure": told(error)})
    pipe.close()


def _receive(worker: Worker) -> bool:
    """Takes one message in; False when there will be no more."""
    try:
        message = worker.pipe.recv()
    except EOFError:
        return False
    if set(message) == {"failure"}:
        worker.failure = message["failure"]
    else:
        worker.messages.append(message)
    return True


def _end(worker: Worker, patience: float) -> None:
    if patience:
        worker.process.join(patience)
    try:
        os.killpg(worker.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        worker.process.kill()
    worker.process.join()
    worker.pipe.close()
