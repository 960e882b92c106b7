"""First calls in fresh processes: eager, ours with an empty cache and with a full one, torch.compile likewise.

    python tools/bench/warm_start.py [MODEL ...]      a table; models: resnet18, vit, bert, gpt2, t5
    python tools/bench/warm_start.py full-size --device cuda --scale full --autocast --ways eager "ours cold"

A model is one of these, or suite/name[,batch[,length]]; "full-size" stands for the list of zoo.py. A first call is one
forward, and in training one backward, of a model that has been built; imports are left out. Caches lie in a folder of
the run's own. Every figure is the least of `--runs` processes, as seconds on the clock and seconds of processors, those
of compilers that a call starts included: on a machine that others use, only the latter are the call's own. A later call
of the same process says what of it is the model's own arithmetic.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo import FULL_SIZE

MODELS = {
    "resnet18": "tv/resnet18",
    "vit": "timm/vit_tiny_patch16_224",
    "bert": "hf/BertForMaskedLM",
    "gpt2": "hf/GPT2LMHeadModel",
    "t5": "hf/T5Small",
}
WAYS = ("eager", "ours cold", "ours warm", "torch cold", "torch warm")
MODES = ("inference", "training")
MOST_SECONDS = 600


def processor_seconds() -> float:
    """Seconds that processors spent on this process and on those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(of.ru_utime + of.ru_stime for of in used)


@dataclass(frozen=True)
class Setting:
    """What all first calls of a table have in common.

    Attributes:
        autocast: to bfloat16.
        behind_eager: two eager calls come first, so that the device's libraries are there and memory is taken.
    """

    device: str = "cpu"
    scale: str = "tiny"
    autocast: bool = False
    behind_eager: bool = False


def first_call(model_name: str, way: str, training: bool, setting: Setting) -> dict[str, Any]:
    """Seconds of the first call in this process, on the clock and of processors, those on the clock of each stage of
    compilation, and those of processors that the third call takes."""
    import torch
    import zoo

    import torchcompile

    torch.manual_seed(0)
    name, *sizes = MODELS.get(model_name, model_name).split(",")
    sized = dict(zip(("batch", "length"), map(int, sizes), strict=False))
    model, args, kwargs = zoo.build(*name.split("/"), scale=setting.scale, train=training, **sized)
    move = lambda x: x.to(setting.device) if isinstance(x, torch.Tensor) else x
    model, args, kwargs = model.to(setting.device), [move(a) for a in args], {k: move(v) for k, v in kwargs.items()}
    synchronize = torch.cuda.synchronize if setting.device == "cuda" else lambda: None
    compiled = model
    if way.startswith("ours"):
        compiled = torchcompile.compile(model)
    elif way.startswith("torch"):
        compiled = torch.compile(model)

    def call(compiled: Callable[..., Any] = compiled) -> tuple[float, float]:
        synchronize()
        began, began_processors = time.perf_counter(), processor_seconds()
        with torch.set_grad_enabled(training), torch.autocast(setting.device, torch.bfloat16, setting.autocast):
            result = compiled(*args, **kwargs)
        if training:
            out = next(iter(result.values())) if isinstance(result, dict) else result
            out.float().sum().backward()
        synchronize()
        return time.perf_counter() - began, processor_seconds() - began_processors

    for _ in range(2 if setting.behind_eager else 0):
        call(model)
    model.zero_grad()
    seconds, processors = call()
    report = torchcompile.report()
    stages: dict[str, float] = {}
    for span in report.spans:
        stages[span.stage] = stages.get(span.stage, 0.0) + span.ended - span.began
    assert report.clean or not way.startswith("ours"), report.surprises
    later = [call()[1] for _ in range(2)][-1]
    return {
        "seconds": seconds, "processors": processors, "capture": report.capture_seconds, "later": later,
        "stages": stages,
    }  # fmt: skip


def measured(model: str, way: str, training: bool, folder: str, runs: int, setting: Setting) -> dict[str, Any]:
    """The least of several first calls, each in a process of its own, and in a folder of its own where caches are to be
    empty. The stages are those of the quickest."""
    found = []
    for run in range(runs):
        within = f"{folder}/{run}" if way.endswith("cold") else f"{folder}/0"
        found.append(one_process(model, way, training, within, setting))
    stages = min(found, key=lambda row: row["seconds"])["stages"]
    return {name: stages if name == "stages" else min(row[name] for row in found) for name in found[0]}


def one_process(model: str, way: str, training: bool, folder: str, setting: Setting) -> dict[str, Any]:
    caches = {"TORCHCOMPILE_CACHE": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
    caches["TRITON_CACHE_DIR"] = f"{folder}/triton"
    caches["CUDA_CACHE_DISABLE"] = "1"
    caches["PYTHONDONTWRITEBYTECODE"] = ""  # what a first call imports is compiled once, as where it is installed
    caches["CCACHE_DISABLE"] = "1"  # else the C++ compiler of a cold call may answer from an earlier run
    command = [sys.executable, __file__, "--one", model, way, str(int(training)), json.dumps(asdict(setting))]
    done = subprocess.run(
        command, env={**os.environ, **caches}, capture_output=True, text=True, check=True, timeout=MOST_SECONDS
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def share(rows: dict[str, dict[str, Any]], whose: str) -> str:
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
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--runs", type=int, default=1, help="processes for each figure; the least is shown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", default="tiny", choices=["tiny", "full"], help="of transformers")
    parser.add_argument("--autocast", action="store_true", help="to bfloat16")
    parser.add_argument("--behind-eager", action="store_true", help="two eager calls come first")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        model, way, training, setting = given.one
        print(json.dumps(first_call(model, way, training == "1", Setting(**json.loads(setting)))))
        return
    setting = Setting(given.device, given.scale, given.autocast, given.behind_eager)
    print("Seconds on the clock / of processors.\n")
    heads = ["model", "", *given.ways, "stages, cold", "capture, warm", "later call", "ours warm of cold"]
    heads.append("torch warm of cold")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for model in FULL_SIZE if given.models == ["full-size"] else given.models:
        for mode in given.modes:
            with tempfile.TemporaryDirectory(prefix=Path(__file__).stem) as folder:
                rows = {way: measured(model, way, mode == MODES[1], folder, given.runs, setting) for way in given.ways}
            print(f"| {' | '.join((model, mode, *cells(rows)))} |", flush=True)


def cells(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A model's line of the table, behind its name and mode."""
    times = [f"{row['seconds']:.2f} / {row['processors']:.2f}" for row in rows.values()]
    stages = rows.get("ours cold", {}).get("stages", {})
    warm = rows.get("ours warm", {})
    more = [", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())]
    more += [f"{warm[of]:.2f}" if warm else "" for of in ("capture", "later")]
    return [*times, *more, share(rows, "ours"), share(rows, "torch")]


if __name__ == "__main__":
    main()
