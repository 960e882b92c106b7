"""First calls in fresh processes: eager, ours with an empty cache and with a full one, torch.compile likewise.

python tools/bench/warm_start.py [MODEL ...]      a table; models: resnet18, vit, bert, gpt2, t5

A first call is one forward, and in training one backward, of a model that has been built; imports are left out. Caches
lie in a folder of the run's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = {
    "resnet18": ("tv", "resnet18"),
    "vit": ("timm", "vit_tiny_patch16_224"),
    "bert": ("hf", "BertForMaskedLM"),
    "gpt2": ("hf", "GPT2LMHeadModel"),
    "t5": ("hf", "T5Small"),
}
WAYS = ("eager", "ours cold", "ours warm", "torch cold", "torch warm")
MOST_SECONDS = 600


def first_call(model_name: str, way: str, training: bool) -> dict[str, float]:
    """Seconds of the first call in this process, and how many of them capture and its guards took."""
    import torch
    import zoo

    import torchcompile

    torch.manual_seed(0)
    suite, name = MODELS[model_name]
    model, args, kwargs = zoo.build(suite, name, train=training)
    compiled = model
    if way.startswith("ours"):
        compiled = torchcompile.compile(model)
    elif way.startswith("torch"):
        compiled = torch.compile(model)
    began = time.perf_counter()
    with torch.set_grad_enabled(training):
        result = compiled(*args, **kwargs)
        if training:
            out = next(iter(result.values())) if isinstance(result, dict) else result
            out.float().sum().backward()
    seconds = time.perf_counter() - began
    capture = torchcompile.report().capture_seconds if way.startswith("ours") else 0.0
    return {"seconds": seconds, "capture": capture}


def measured(model: str, way: str, training: bool, folder: str) -> dict[str, float]:
    caches = {"TORCHCOMPILE_CACHE": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
    caches["PYTHONDONTWRITEBYTECODE"] = ""  # what a first call imports is compiled once, as where it is installed
    caches["CCACHE_DISABLE"] = "1"  # else the C++ compiler of a cold call may answer from an earlier run
    command = [sys.executable, __file__, "--one", model, way, str(int(training))]
    done = subprocess.run(
        command, env={**os.environ, **caches}, capture_output=True, text=True, check=True, timeout=MOST_SECONDS
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(first_call(given.one[0], given.one[1], given.one[2] == "1")))
        return
    print(
        f"| model | | {' | '.join(given.ways)} | capture, of ours warm |\n|{'---|' * (len(given.ways) + 3)}", flush=True
    )
    for model in given.models:
        for training in (False, True):
            with tempfile.TemporaryDirectory(prefix=Path(__file__).stem) as folder:
                rows = {way: measured(model, way, training, folder) for way in given.ways}
            times = " | ".join(f"{row['seconds']:.2f} s" for row in rows.values())
            captured = f"{rows['ours warm']['capture']:.2f} s" if "ours warm" in rows else ""
            print(f"| {model} | {'training' if training else 'inference'} | {times} | {captured} |", flush=True)


if __name__ == "__main__":
    main()
