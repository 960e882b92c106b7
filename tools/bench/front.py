"""Python's part of a cold first step of large public models, by stage: no kernel is built, and no GPU is needed.

    python tools/bench/front.py                                         this checkout, kernels for a GPU
    python tools/bench/front.py --device cpu --models hf/XLNetLMHeadModel,16,512
    python tools/bench/front.py --of ../before --of . --runs 2          another one beside it, in turns
    python tools/bench/front.py --write docs/results/front.md

A training step under bf16 autocast, in a process of its own with an empty cache: capture, the joint graph, lowering to
prims, partition, and for each half lowering to loops, fusion, planning, text, program, and what the shelf keeps. What
would build kernels gives none, results are memory that nobody fills. Seconds are those of the processor
(`time.process_time`), the least of the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = (
    "timm/tf_efficientnet_b0,128,0", "hf/MobileBertForMaskedLM,64,128", "hf/XLNetLMHeadModel,16,512",
    "timm/xcit_large_24_p8_224,8,0", "hf/DebertaV2ForMaskedLM,8,512",
)  # fmt: skip
# Each stage's functions, where they are looked up. What is in none of them is capture and the shelf.
STAGES = {
    "trace": ("aotautograd.api.trace_joint",),
    "prims": (
        "aotautograd.api.lower_joint", "aotautograd.api.simplify", "aotautograd.api.mask_at_maxima",
        "aotautograd.api.keep_refusals",
    ),
    "partition": ("aotautograd.api.partition",),
    "loops": ("torchinductor.compile.lower_graph",),
    "fusion": ("torchinductor.compile.schedule",),
    "planning": (
        "torchinductor.compile._legalize", "torchinductor.compile.bundle", "torchinductor.compile.write_in_place",
        "torchinductor.compile.verify_kernels",
    ),
    "text": ("torchinductor.compile._generate",),
    "program": (
        "torchinductor.compile._program", "torchinductor.compile.spliced", "torchinductor.compile._kept_graph",
        "torchinductor.compile._stats",
    ),
}  # fmt: skip
REST = "capture, shelf"


class Stages:
    """Processor seconds by stage; a stage that runs within another is not in it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*STAGES, REST), 0.0)
        self._inner: list[float] = []
        for stage, places in STAGES.items():
            for place in places:
                module, _, name = place.rpartition(".")
                owner = importlib.import_module(module)
                setattr(owner, name, self.timed(stage, getattr(owner, name)))

    def timed(self, stage: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; what it takes belongs to the stage, or to nothing."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took, inner = time.process_time() - began, self._inner.pop()
                if self._inner:
                    self._inner[-1] += took
                if stage is not None:
                    self.seconds[stage] += took - inner

        return call


class Built:
    """Takes the place of what builds and runs a graph's kernels; keeps a digest of all texts and programs."""

    def __init__(self, device: str, stages: Stages) -> None:
        import torch
        from counted_traffic import Stand, memory_for

        import torchinductor
        import torchinductor.compile as driver
        from torchinductor.codegen import base
        from torchinductor.source import on_device

        self.begin_graph, self.digest = driver.begin_graph, hashlib.sha256()
        self.stand, self.memory = Stand, memory_for
        moved = stages.timed(None, lambda graph: on_device(graph, torch.device("cuda")))
        self.placed: Callable[[Any], Any] = moved if device == "cuda" else lambda graph: graph
        for kind in ("cpu", "cuda"):
            back_end = type(base.codegen_for(kind))
            addresses = kind == "cpu"
            back_end.begin = lambda _, sources, options, addresses=addresses: base.Building(  # type: ignore[method-assign]
                lambda: base.Built(
                    (1,) * len(sources) if addresses else (), () if addresses else (None,) * len(sources)
                )
            )
            back_end.warm = back_end.foresee = lambda *_: None  # type: ignore[method-assign]
        generate = driver._generate

        def generated(*args: Any) -> Any:
            found = generate(*args)
            for sources in found.values():
                for source in sources.unique:
                    self.digest.update(source.text.encode())
            return found

        driver._generate, driver._runnable = generated, lambda *_: (None, None)
        torchinductor.compile_graph = lambda *given: self.compile(*given).finish()
        torchinductor.begin_graph = self.compile
        if device == "cuda":
            on_gpu = lambda _: base.traits_of(torch.device("cuda"))
            torchinductor.choose_layouts = lambda gm: driver.arrange_convolutions(gm, on_gpu)
            torchinductor.choose_kept_layouts = lambda kept: driver.align_kept_rows(kept, on_gpu)
            torchinductor.walks_windows = lambda _: on_gpu(None).walks_windows

    def compile(self, graph: Any, inputs: Sequence[Any], options: Any, account: Any) -> Any:
        begun = self.begin_graph(self.placed(graph), inputs, options, account)
        names = [node for node in graph.graph.nodes if node.op == "placeholder"]
        returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]

        def run(values: Sequence[Any]) -> list[Any]:
            given = dict(zip(names, values, strict=True))
            value = lambda o: given[o] if o in given else self.memory(o.meta["val"]) if hasattr(o, "meta") else o
            return list(map(value, returned))

        def finish() -> SimpleNamespace:
            done = begun()
            return self.stand(
                consume=run, stats=done.stats, kept=done.kept, program=done.program, sources={}, _sources=()
            )

        return dataclasses.replace(begun, finish=finish, apart=False)


def measure(model: str, device: str) -> dict[str, Any]:
    """A cold first step in this process."""
    import torch
    from zoo import build

    import torchcompile

    warnings.simplefilter("ignore")
    for name in ("normal_", "uniform_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "trunc_normal_"):
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)  # nobody reads the weights
    stages = Stages()
    built = Built(device, stages)
    name, batch, length = model.split(",")
    suite, name = name.split("/")
    net, args, kwargs = build(suite, name, scale="full", train=True, batch=int(batch), length=int(length))
    with tempfile.TemporaryDirectory() as cache:
        compiled = torchcompile.compile(net, fullgraph=True, options={"cache": cache})

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                out = compiled(*args, **kwargs)
            value = out if isinstance(out, torch.Tensor) else out.loss
            (value if value.dim() == 0 else value.float().sum()).backward()

        began = time.perf_counter()
        stages.timed(REST, step)()
    return {"wall": time.perf_counter() - began, "digest": built.digest.hexdigest()[:12], **stages.seconds}


def in_process(checkout: Path, model: str, device: str) -> dict[str, Any]:
    """The same in a fresh process, by the packages of a checkout."""
    paths = [*sorted((checkout / "packages").glob("*/src")), ROOT / "tools" / "bench"]
    paths.append(ROOT / "packages" / "compile" / "tests")
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", "--device", device, "--models", model]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"{model} of {checkout}:\n{told.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def rows(options: argparse.Namespace) -> list[str]:
    """A line for each model and checkout."""
    checkouts = [path.resolve() for path in options.of]
    lines: list[str] = []
    for model in options.models:
        found: dict[Path, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
        for _ in range(options.runs):
            for checkout in checkouts:
                found[checkout].append(in_process(checkout, model, options.device))
        digests = {row["digest"] for own in found.values() for row in own}
        for number, own in enumerate(found.values()):
            least = min(own, key=lambda row: sum(row[stage] for stage in (*STAGES, REST)))
            seconds = [least[stage] for stage in (*STAGES, REST)]
            cells = " | ".join(f"{value:.2f}" for value in (*seconds, sum(seconds)))
            same = "the same" if len(digests) == 1 else "differ"
            lines.append(f"| {model} | {options.names[number]} | {cells} | {same} |")
            print(lines[-1], flush=True)
    return lines


PAGE = """# Python's part of a cold first step

Seconds of one processor in which Python captures, differentiates, fuses and writes a training step under bf16 autocast,
with an empty cache, by stage (`tools/bench/front.py`); no kernel is built, and no GPU ran. `texts`: whether all
checkouts wrote the same kernels.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="suite/name,batch,length")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what kernels are for")
    parser.add_argument("--of", type=Path, action="append", help="a checkout; this one, if none is given")
    parser.add_argument("--names", nargs="*", help="what the table calls them")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--write", type=Path, help="the page")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.models[0], options.device)))
        return
    options.of = options.of or [ROOT]
    options.names = options.names or [path.name or "this" for path in options.of]
    head = [f"| model, batch, length | checkout | {' | '.join((*STAGES, REST))} | all | texts |"]
    head.append("|---" * (len(STAGES) + 5) + "|")
    print("\n".join(head))
    lines = rows(options)
    if options.write:
        options.write.write_text(PAGE + "\n" + "\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
