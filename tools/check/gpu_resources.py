"""Registers, spills and shared memory of every kernel of public models' training steps, for sm_80 and sm_90, no GPU.

    python tools/check/gpu_resources.py                          against the recorded bounds (minutes)
    python tools/check/gpu_resources.py --write                  record them
    python tools/check/gpu_resources.py --models hf/BertForMaskedLM,16,512 --arch 90

A kernel that spills, or takes more registers or shared memory than any of its model did before, is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))

from gpu_traffic import MODELS, traffic  # noqa: E402

from torchinductor import InductorOptions  # noqa: E402
from torchinductor.codegen.base import generated  # noqa: E402
from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.families import shared  # noqa: E402
from torchinductor.codegen.triton.resources import Resources, resources_of  # noqa: E402
from torchinductor.codegen.triton.writer import TritonSource  # noqa: E402
from torchinductor.ir import Bundle, Kernel, Template  # noqa: E402
from torchinductor.lowering.context import Operation  # noqa: E402

RECORD = Path(__file__).with_name("gpu_resources.json")


def sources_of(model: str) -> list[TritonSource]:
    """The distinct kernels of a training step, as they are compiled."""
    found: dict[str, TritonSource] = {}

    def add(operations: Sequence[Operation]) -> None:
        kernels = [o for o in operations if isinstance(o, (Kernel, Template, Bundle))]
        alone = {(source := generated(o, InductorOptions())).text: source.meta for o in kernels}
        found.update((source.text, source) for source in shared(list(alone.values())))

    traffic(model, "train", add)
    return list(found.values())


def most(sources: Sequence[TritonSource], arch: int) -> tuple[Resources, list[str]]:
    """The most that a kernel takes of each resource, and the texts of those that spill."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = TritonCompiler(arch, Path(folder))
        taken = [resources_of(binary) for binary in compiler.compile(sources)]
        compiler.close()
    spilling = [s.text for s, t in zip(sources, taken, strict=True) if t.spilled]
    columns = zip(*[(t.registers, t.spilled, t.shared) for t in taken], strict=True)
    return Resources(*map(max, columns)), spilling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="suite/name,batch,length")
    parser.add_argument("--arch", nargs="*", type=int, default=[80, 90])
    parser.add_argument("--write", action="store_true", help="record what is found")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    worse: list[str] = []
    for model in options.models:
        wanted = [a for a in options.arch if options.write or f"{model} sm_{a}" in recorded]
        if not wanted:
            print(f"{model}: not recorded yet (--write)", flush=True)
            continue
        sources = sources_of(model)
        for arch in wanted:
            found, spilling = most(sources, arch)
            key = f"{model} sm_{arch}"
            values = [found.registers, found.spilled, found.shared]
            print(f"{key}: {len(sources)} kernels, at most {values[0]} registers, {values[1]} bytes spilled, "
                  f"{values[2]} bytes of shared memory, {len(spilling)} spill", flush=True)  # fmt: skip
            if options.write:
                recorded[key] = values
                RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
            elif not found.within(Resources(*recorded[key])):
                worse.append(f"{key}: {values}, recorded are {recorded[key]}\n" + "\n".join(spilling[:1]))
    if worse:
        raise SystemExit("\n".join(["kernels take more than is recorded (--write records it):", *worse]))


if __name__ == "__main__":
    main()
