"""Entries of torch's operator database by the default back end, as Triton kernels in Triton's interpreter.

    TRITON_INTERPRET=1 python interpreted_opdb.py fft.fftshift roll

Prints a JSON line an entry: its counts by column, and what was not right.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "packages" / "inductor" / "tests"), str(ROOT / "tools")]

from triton_interpreter import InterpreterBackend  # noqa: E402

import aot_opdb as opdb  # noqa: E402
import torchinductor  # noqa: E402
from compile_opdb import run_operator  # noqa: E402


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, opdb.too_long)
    torchinductor.register_codegen("cpu", InterpreterBackend())
    for place in opdb.places_of([""]):
        if opdb.full_name(opdb.op_db[place]) in names:
            print(json.dumps(run_operator(place, "float32", "cpu", 1, 100)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
