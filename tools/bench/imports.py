"""What a process pays before its first call has returned: the import, and a trivial first call, cold and warm.

    python tools/bench/imports.py                                this checkout
    python tools/bench/imports.py --of ../before --of . --names before after      another one beside it, in turns

Each run is a fresh process. Seconds are those of processors, user and system, those of the C++ compiler in the first
call included; the median of the runs. "bytecode": whether Python finds these packages' files compiled, as it does from
the second process on unless PYTHONDONTWRITEBYTECODE forbids to keep them ("none" is of checkouts without __pycache__).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, resource

def seconds():
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in used)

at = [seconds()]
import torch
at.append(seconds())
import torchcompile
at.append(seconds())
torchcompile.compile(lambda x: x.sin() + 1)(torch.ones(3))
at.append(seconds())
print(json.dumps([after - before for before, after in zip(at, at[1:])]))
"""
FOUND = ("import torch", "import torchcompile", "first call, cold", "first call, warm")


def run(program: Path, checkout: Path, cache: Path, bytecode: Path | None) -> tuple[float, float, float]:
    """Seconds of torch's import, ours, and the first call in a fresh process."""
    environment = {**os.environ, "TORCHCOMPILE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = ":".join(map(str, sorted((checkout / "packages").glob("*/src"))))
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        environment.pop(name, None)
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode)} if bytecode is not None else {"PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"{checkout}:\n{told.stderr[-2000:]}")
    torch, ours, call = json.loads(told.stdout)
    return torch, ours, call


def table(checkouts: dict[str, Path], runs: int) -> list[str]:
    """The table's lines."""
    lines = [f"| bytecode | checkout | {' | '.join(FOUND)} |", "|---" * (len(FOUND) + 2) + "|"]
    with tempfile.TemporaryDirectory() as place:
        program = Path(place) / "program.py"
        program.write_text(PROGRAM)
        for kept in (True, False):
            found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
            for turn in range(runs + 1):
                for name in checkouts if turn % 2 else reversed(checkouts):
                    bytecode = Path(place) / f"bytecode of {name}" if kept else None
                    with tempfile.TemporaryDirectory(dir=place) as cache:
                        cold = run(program, checkouts[name], Path(cache), bytecode)
                        warm = run(program, checkouts[name], Path(cache), bytecode)
                    if turn:  # the first writes bytecode
                        for what, took in zip(FOUND, (*cold, warm[-1]), strict=True):
                            found[name, what].append(took)
            for name in checkouts:
                cells = (f"{statistics.median(found[name, what]):.2f}" for what in FOUND[:2])
                calls = (f"{statistics.median(found[name, what]):.3f}" for what in FOUND[2:])
                lines.append(f"| {'kept' if kept else 'none'} | {name} | {' | '.join((*cells, *calls))} |")
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, action="append", help="a checkout; may be given several times")
    parser.add_argument("--names", nargs="+", help="of the checkouts")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    checkouts = [path.resolve() for path in options.of or [ROOT]]
    names = options.names or [path.name for path in checkouts]
    print("\n".join(table(dict(zip(names, checkouts, strict=True)), options.runs)))


if __name__ == "__main__":
    main()
