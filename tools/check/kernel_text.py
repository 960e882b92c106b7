"""Holds the text of generated kernels to another checkout's: what changed nothing must have changed no kernel.

    python tools/check/kernel_text.py --of . --out now                     the kernels of all public models, as text
    python tools/check/kernel_text.py --of ../before --out before          the same of another checkout
    python tools/check/kernel_text.py --compare before now [--write page.md]

Each model is captured, differentiated and lowered by the checkout's packages (whose extensions must be built); its
graphs become C++ and Triton text, and run operator by operator. No kernel is built, and no GPU is needed. Transformers
are tiny, image models have their own depth and small images. A model that is in `--out` is not run again, so that a
sweep can be cut into slices.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from capture import SLOWEST, SUITES
from pool import Row, run_cases

DEVICES = {"cpu": "cpp", "cuda": "py"}
KERNEL = "#### "  # the line before a kernel: graph, kind, kernel


class Stand(SimpleNamespace):
    """In the place of a compiled graph; unlike its base it can be referred to weakly."""


def import_all(checkout: Path) -> None:
    """What every worker needs, of the checkout's packages; workers are forks of this process."""
    sys.path[:0] = [str(checkout / "packages" / p.name / "src") for p in (checkout / "packages").iterdir()]
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from zoo import import_torchvision

    import_torchvision()
    for module in ("timm", "transformers", "torchcompile"):
        __import__(module)


def texts_of(graph: Any, device: str) -> list[str]:
    """The kernels of a graph of prims; a head that is common to them, and Triton's functions' names, are left out."""
    import torchinductor

    try:
        texts = torchinductor.generate_source(graph, device).values()
        return [re.sub(r"\Adef \w+", "def KERNEL", text.rpartition("\n@triton.jit\n")[2]) for text in texts]
    except torchinductor.InductorError as error:
        return [f"refused: {error}\n"]


def measure(case: Row, send: Callable[[Row], None]) -> None:
    """Writes the kernels of one case."""
    import torch
    from zoo import build

    import torchcompile
    import torchinductor
    from aotautograd import run_graph

    found: dict[str, list[str]] = {device: [] for device in DEVICES}
    count = 0

    def recorded(graph: Any, inputs: Sequence[Any], *_: Any, title: str = "", **__: Any) -> Any:
        nonlocal count
        count += 1
        for device, texts in found.items():
            texts += [f"{KERNEL}{title} {n}\n{text}" for n, text in enumerate(texts_of(graph, device))]
        return Stand(consume=run_graph(graph, list(inputs)), stats=torchinductor.GraphStats(0, 0, 0), kept=None)

    torchinductor.compile_graph = recorded
    torch.manual_seed(0)
    suite, name = case["model"].split("/")
    model, args, kwargs = build(suite, name, train=case["mode"] == "train", batch=2, side=case["side"])
    with torch.set_grad_enabled(case["mode"] == "train"):
        out = torchcompile.compile(model)(*args, **kwargs)
        if case["mode"] == "train":
            value = out if isinstance(out, torch.Tensor) else out.loss
            (value if value.dim() == 0 else value.float().pow(2).mean()).backward()
    if torchcompile.report().reruns:
        raise RuntimeError("a graph was run again, eagerly")
    fresh = Path(case["folder"] + ".part")
    fresh.mkdir(parents=True, exist_ok=True)
    for device, texts in found.items():
        (fresh / f"{device}.{DEVICES[device]}").write_text("".join(texts))
    fresh.rename(case["folder"])
    send({"graphs": count, **{device: len(texts) for device, texts in found.items()}})


def write(options: argparse.Namespace) -> None:
    """A folder for each case under `--out`."""
    began = time.monotonic()
    order = [f"{suite}/{name}" for suite, names in SLOWEST.items() for name in names.split()]
    everything = [f"{suite}/{name}" for suite, names in SUITES.items() for name in names.split()]
    models = options.models or sorted(everything, key=lambda m: order.index(m) if m in order else len(order))
    cases: list[Row] = []
    for mode in options.modes:
        for model in models:
            folder = options.out / f"{model.replace('/', '_')}-{mode}"
            if not folder.exists():
                cases.append({"model": model, "mode": mode, "side": options.side, "folder": str(folder)})
    if cases:
        import_all(options.of.resolve())
    ready = run_cases(measure, cases, jobs=options.jobs, case_seconds=170, until=began + options.timeout)
    for worker in ready:
        told = worker.failure or " ".join(f"{k} {v}" for message in worker.messages for k, v in message.items())
        print(f"{time.monotonic() - began:4.0f} s {worker.case['model']} {worker.case['mode']}: {told}", flush=True)


def kernels_in(file: Path) -> Counter[str]:
    """The texts in a file, and how often each occurs."""
    return Counter(part.partition("\n")[2] for part in file.read_text().split(KERNEL)[1:])


def renamed(text: str) -> tuple[str, ...]:
    """The tokens of each line, with what the kernel assigns to named in order: equal for kernels that differ in names
    of variables, and so in the order of an index's terms, alone."""
    assigned = set(re.findall(r"(?:^ *|[(;] *|\w )(\w+) = ", text, re.M))
    names: dict[str, str] = {}
    name = lambda m: names.setdefault(m[0], f"v{len(names)}") if m[0] in assigned else m[0]
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]  # comments tell types
    return tuple(" ".join(sorted(re.findall(r"[\w.]+|\S", re.sub(r"\b[A-Za-z]\w*", name, line)))) for line in code)


def apart(old: Counter[str], new: Counter[str]) -> tuple[int, Counter[str], Counter[str]]:
    """How many kernels differ in names alone, and the others that are gone and that have come."""
    gone, come = list((old - new).elements()), list((new - old).elements())
    shared = Counter(map(renamed, gone)) & Counter(map(renamed, come))
    return shared.total(), _without(gone, shared), _without(come, shared)


def _without(texts: Sequence[str], shared: Counter[tuple[str, ...]]) -> Counter[str]:
    """The texts but for those that the other side has under other names."""
    left, rest = shared.copy(), Counter[str]()
    for text in texts:
        key = renamed(text)
        rest[text] += not left[key]
        left[key] -= left[key] > 0
    return +rest


def page(before: Path, now: Path) -> str:
    """Counts by device, and the cases whose texts differ with the first difference."""
    shared = sorted(f.name for f in now.iterdir() if (before / f.name).exists())
    lines = ["| case | device | kernels | other names | other text | first difference |", "|---|---|---|---|---|---|"]
    sums = {device: Counter[str]() for device in DEVICES}
    for case in shared:
        for device, suffix in DEVICES.items():
            old, new = (kernels_in(folder / case / f"{device}.{suffix}") for folder in (before, now))
            names, gone, come = apart(old, new)
            sums[device].update(kernels=new.total(), names=names, texts=come.total(), cases=bool(gone or come))
            if gone or come:
                changed = difflib.ndiff("".join(gone).splitlines(), "".join(come).splitlines())
                first = [line.replace("|", "\\|")[:72].strip() for line in changed if line[:2] in ("- ", "+ ")][:2]
                shown = " ".join(f"`{line}`" for line in first)
                lines.append(
                    f"| {case} | {device} | {new.total()} | {names} | -{gone.total()} +{come.total()} | {shown} |"
                )
    said = [
        f"- {device}: {n['kernels']} kernels of {len(shared)} cases; {n['names']} have other names of variables, "
        f"{n['texts']} another text, in {n['cases']} cases."
        for device, n in sums.items()
    ]
    return "\n".join([*said, "", *(lines if len(lines) > 2 else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, default=Path("."), help="the checkout whose kernels are written")
    parser.add_argument("--out", type=Path, help="the folder that they are written to")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "NOW"))
    parser.add_argument("--write", type=Path, help="the page of the comparison")
    parser.add_argument("--models", nargs="*", help="suite/name; all public ones")
    parser.add_argument("--modes", nargs="*", default=["train", "infer"])
    parser.add_argument("--side", type=int, default=96, help="pixels of an image's side where the model takes any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=220, help="seconds; what is left is for the next call")
    options = parser.parse_args()
    if options.out:
        write(options)
    if options.compare:
        text = page(*options.compare)
        print(text)
        if options.write:
            options.write.write_text(text)


if __name__ == "__main__":
    main()
