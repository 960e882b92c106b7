"""Runs a check of the operator database in worker processes, a slice each, and writes its figures into a page."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


def sweep(script: str, arguments: Sequence[str], count: int, jobs: int, *, seconds: int = 1200) -> list[dict[str, Any]]:
    """What `script --slice a:b --json file` writes for slices of `count` cases, `jobs` processes at a time.

    A process that ends otherwise, or takes longer than `seconds`, gives {"ended": what happened} for its slice.
    """
    size = max(1, -(-count // (jobs * 6)))
    starts = range(0, count, size)
    began, done = time.monotonic(), 0

    def run(start: int) -> dict[str, Any]:
        nonlocal done
        piece = f"{start}:{min(start + size, count)}"
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            command = [sys.executable, script, *arguments, "--slice", piece, "--json", str(answer)]
            try:
                status = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
                how = f"status {status.returncode}: {status.stderr.strip()[-300:]}"
            except subprocess.TimeoutExpired:
                how = f"longer than {seconds} s"
            done += 1
            print(f"{done} of {len(starts)} slices, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {"ended": f"{piece} {how}"}
            return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, starts))


def ran_with(script: str, arguments: Sequence[str]) -> str:
    """The command and the versions, as a page's first lines."""
    return (
        f"`python packages/primtorch/tests/{Path(script).name} {' '.join(arguments)}`\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} on {platform.machine()}."
    )


def write_section(page: str, name: str, text: str) -> None:
    """Replace what stands in `page` between the comments `<!-- name -->` and `<!-- /name -->`."""
    path = Path(page)
    before, _, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, found, after = rest.partition(f"<!-- /{name} -->\n")
    if not found:
        raise ValueError(f"{page} has no section {name!r}")
    path.write_text(f"{before}<!-- {name} -->\n{text.strip()}\n<!-- /{name} -->\n{after}")
