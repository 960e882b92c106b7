"""Peak memory of a step of a public model on a GPU, counted without one, and what is alive then.

    python tools/bench/gpu_memory.py --models hf/DistillGPT2,32,512 --modes train --dtype fp32

A model of full size is captured, differentiated and lowered; nothing is computed (results are memory that nobody
fills), and programs are planned for "cuda". What libraries take for themselves is not in it, and autocast and attention
are the CPU's: a real GPU's graph differs where theirs do.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "packages" / "compile" / "tests")]

from counted_memory import Peak, memory_of_step  # noqa: E402
from zoo import build  # noqa: E402


def peaks(model: str, mode: str, dtype: str) -> dict[str, Peak]:
    """By kind of graph, of "suite/name,batch,length"."""
    name, batch, *length = model.split(",")
    suite, name = name.split("/")
    size = {"length": int(length[0])} if length else {}
    net, args, kwargs = build(suite, name, scale="full", train=mode == "train", batch=int(batch), **size)
    return memory_of_step(net, args, kwargs, mode == "train", dtype == "amp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="suite/name,batch[,length]")
    parser.add_argument("--modes", nargs="*", default=["train"], choices=("train", "infer"))
    parser.add_argument("--dtype", default="amp", choices=("amp", "fp32"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for model in options.models:
        for mode in options.modes:
            for kind, peak in peaks(model, mode, options.dtype).items():
                print(f"{model} {mode} {options.dtype}: {kind}\n{peak}\n", flush=True)


if __name__ == "__main__":
    main()
