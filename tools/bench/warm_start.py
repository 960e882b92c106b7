"""First calls in fresh processes: eager, ours with an empty cache and with a full one, torch.compile likewise.

python tools/bench/warm_start.py [MODEL ...]      a table; models: resnet18, vit, bert, gpt2, t5

A first call is one forward, and in training one backward, of a model that has been built; imports are left out. Caches
lie in a folder of the run's own. Every figure is the least of `--runs` processes, as seconds on the clock and seconds
of processors, those of compilers that a call starts included: on a machine that others use, only the latter are the
call's own. A later call of the same process says what of it is the model's own arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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


def processor_seconds() -> float:
    """Seconds that processors spent on this process and on those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


def first_call(model_name: str, way: str, training: bool) -> dict[str, float]:
    """Seconds of the first call in this process, on the clock and of processors, of the former what capture and its
    guards took, and those of processors that the third call takes."""
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

    def call() -> tuple[float, float]:
        began, began_processors = time.perf_counter(), processor_seconds()
        with torch.set_grad_enabled(training):
            result = compiled(*args, **kwargs)
            if training:
                out = next(iter(result.values())) if isinstance(result, dict) else result
                out.float().sum().backward()
        return time.perf_counter() - began, processor_seconds() - began_processors

    seconds, processors = call()
    capture = torchcompile.report().capture_seconds if way.startswith("ours") else 0.0
    later = [call()[1] for _ in range(2)][-1]
    return {"seconds": seconds, "processors": processors, "capture": capture, "later": later}


def measured(model: str, way: str, training: bool, folder: str, runs: int) -> dict[str, float]:
    """The least of several first calls, each in a process of its own, and in a folder of its own where caches are to be
    empty."""
    found = []
    for run in range(runs):
        within = f"{folder}/{run}" if way.endswith("cold") else f"{folder}/0"
        found.append(one_process(model, way, training, within))
    return {name: min(row[name] for row in found) for name in found[0]}


def one_process(model: str, way: str, training: bool, folder: str) -> dict[str, float]:
    caches = {"TORCHCOMPILE_CACHE": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
    caches["PYTHONDONTWRITEBYTECODE"] = ""  # what a first call imports is compiled once, as where it is installed
    caches["CCACHE_DISABLE"] = "1"  # else the C++ compiler of a cold call may answer from an earlier run
    command = [sys.executable, __file__, "--one", model, way, str(int(training))]
    done = subprocess.run(
        command, env={**os.environ, **caches}, capture_output=True, text=True, check=True, timeout=MOST_SECONDS
    )
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def share(rows: dict[str, dict[str, float]], whose: str) -> str:
    """A warm call's seconds of processors in per cent of a cold one's: whole / less what a later call takes."""
    cold, warm = rows.get(f"{whose} cold"), rows.get(f"{whose} warm")
    if cold is None or warm is None:
        return ""
    later = min(cold["later"], warm["later"])
    return " / ".join(
        f"{100 * (warm['processors'] - less) / (cold['processors'] - less):.0f} %" for less in (0.0, later)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--runs", type=int, default=1, help="processes for each figure; the least is shown")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(first_call(given.one[0], given.one[1], given.one[2] == "1")))
        return
    print("Seconds on the clock / of processors.\n")
    heads = ["model", "", *given.ways, "capture, warm", "later call", "ours warm of cold", "torch warm of cold"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for model in given.models:
        for training in (False, True):
            with tempfile.TemporaryDirectory(prefix=Path(__file__).stem) as folder:
                rows = {way: measured(model, way, training, folder, given.runs) for way in given.ways}
            times = [f"{row['seconds']:.2f} / {row['processors']:.2f}" for row in rows.values()]
            warm = rows.get("ours warm", {})
            more = [f"{warm[of]:.2f}" if warm else "" for of in ("capture", "later")]
            cells = [model, "training" if training else "inference", *times, *more]
            print(f"| {' | '.join((*cells, share(rows, 'ours'), share(rows, 'torch')))} |", flush=True)


if __name__ == "__main__":
    main()
