"""Where a training step's time and memory go on a GPU: the longest kernels, eager and compiled.

python tools/bench/profile_gpu.py hf/BertForMaskedLM --batch 16 --length 512 --dtype amp
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torchcompile

sys.path.insert(0, str(Path(__file__).parent))
from models import Bench, longest_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="amp", choices=["fp32", "amp"])
    parser.add_argument("--rows", type=int, default=25)
    arguments = parser.parse_args()
    case = dict(vars(arguments), device="cuda", scale="full", mode="train", seconds=1.0)
    bench = Bench(case)
    print("eager\n" + longest_kernels(bench, bench.model, arguments.rows))
    compiled = torchcompile.compile(bench.model)
    print("compiled\n" + longest_kernels(bench, compiled, arguments.rows))
    print(f"peak MB: eager {bench.peak_mb(bench.model)[0]:.0f}, compiled {bench.peak_mb(compiled)[0]:.0f}")
    print(torchcompile.report())


if __name__ == "__main__":
    main()
