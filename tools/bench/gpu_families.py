"""How many kernels a step of a public model compiles for a GPU, counted without one, and what sharing them changes.

    python tools/bench/gpu_families.py                                   the table's models
    python tools/bench/gpu_families.py --compile 20 --models tv/densenet121,64,0
    python tools/bench/gpu_families.py --compile 1000 --write docs/results/gpu_families.md

A model of full size is captured, differentiated and planned as in `gpu_traffic.py`. Kernels that differ in numbers
alone are one family, which is compiled once. With --compile N, up to N families of a model are compiled for sm_90, each
beside one of its members with its own numbers as constants, drawn by chance: the accesses to memory must be equally
many and wide, and no more may be spilled; differences are printed, and are an error.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_traffic import traffic  # noqa: E402

from torchinductor import InductorOptions  # noqa: E402
from torchinductor.codegen.base import generated  # noqa: E402
from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.families import shared  # noqa: E402
from torchinductor.codegen.triton.resources import resources_of  # noqa: E402
from torchinductor.codegen.triton.writer import TritonSource  # noqa: E402
from torchinductor.ir import Bundle, Kernel, Template  # noqa: E402
from torchinductor.lowering.context import Operation  # noqa: E402

MODELS = (
    "tv/densenet121,64,0", "timm/tf_efficientnet_b0,128,0", "timm/mobilenetv3_large_100,256,0",
    "timm/swin_base_patch4_window7_224,64,0", "timm/nfnet_l0,64,0", "timm/xcit_large_24_p8_224,8,0",
    "hf/MobileBertForMaskedLM,64,128", "hf/DebertaV2ForMaskedLM,8,512", "hf/XLNetLMHeadModel,16,512",
    "hf/BertForMaskedLM,16,512",
)  # fmt: skip
DESIGNS = ("flat", "rows", "tiled", "reduction", "bundle", "filter_gradient", "attention", "matmul")
ACCESS = re.compile(r"\b(?:ld|st|red|atom)\.global[\w.:]*")


@dataclass
class Step:
    """A step's kernels: launches, and distinct ones as (by itself, as it is compiled); processor seconds of Python."""

    launches: int = 0
    pairs: list[tuple[TritonSource, TritonSource]] = field(default_factory=list)
    front: float = 0.0
    generate: float = 0.0

    def add(self, operations: Sequence[Operation]) -> None:
        """Takes the planned operations of a graph."""
        begun = time.process_time()
        kernels = [o for o in operations if isinstance(o, (Kernel, Template, Bundle))]
        own = {(source := generated(o, InductorOptions())).text: source.meta for o in kernels}
        self.pairs += zip(own.values(), shared(list(own.values())), strict=True)
        self.launches += len(kernels)
        self.generate += time.process_time() - begun

    def distinct(self, place: int) -> dict[str, TritonSource]:
        """The kernels by text, with constants (0) or as they are compiled (1)."""
        return {pair[place].text: pair[place] for pair in self.pairs}

    def families(self) -> dict[str, list[TritonSource]]:
        """The members of each family of several, by the text that they share."""
        found: dict[str, dict[str, TritonSource]] = {}
        for own, made in self.pairs:
            if made.numbers:
                found.setdefault(made.text, {})[own.text] = own
        return {text: list(members.values()) for text, members in found.items()}


def step_of(model: str) -> Step:
    """The kernels of a training step."""
    step, begun = Step(), time.process_time()
    traffic(model, "train", step.add)
    step.front = time.process_time() - begun - step.generate
    return step


def by_design(sources: dict[str, TritonSource]) -> Counter[str]:
    """How many kernels there are of each design."""
    return Counter(next(d for d in DESIGNS if re.search(rf"_{d}_\w+$", source.name)) for source in sources.values())


def compared(step: Step, most: int) -> tuple[str, list[str]]:
    """Cells of the table, and what differs, of up to so many families."""
    chance = random.Random(0)
    made = step.distinct(1)
    drawn = chance.sample(sorted(step.families().items()), min(most, len(step.families())))
    pairs = [(made[text], chance.choice(members)) for text, members in drawn]
    with tempfile.TemporaryDirectory() as folder:
        compiler = TritonCompiler(90, Path(folder))
        binaries = compiler.compile([source for pair in pairs for source in pair])
        texts = [(Path(folder) / f"{binary.key}.ptx").read_text() for binary in binaries]
        compiler.close()
    worse: list[str] = []
    instructions, registers = [0, 0], [0, 0]
    for place, pair in enumerate(pairs):
        accesses = [Counter(ACCESS.findall(text)) for text in texts[2 * place :][:2]]
        taken = [resources_of(binary) for binary in binaries[2 * place :][:2]]
        for side in range(2):
            instructions[side] += texts[2 * place + side].count(";\n")
            registers[side] += taken[side].registers
        if accesses[0] != accesses[1] or taken[0].spilled > taken[1].spilled:
            worse.append(f"{pair[0].name} {taken[0]} {accesses[0]}\n  {pair[1].name} {taken[1]} {accesses[1]}")
    ratios = [f"{ours / own:.3f}" if own else "-" for ours, own in (instructions, registers)]
    return " | ".join([str(len(pairs)), str(len(worse)), *ratios]), worse


def row(model: str, most: int) -> tuple[str, list[str]]:
    """A line of the table, and what differs."""
    step = step_of(model)
    own, made = step.distinct(0), step.distinct(1)
    before, after = by_design(own), by_design(made)
    designs = ", ".join(f"{name} {count} -> {after[name]}" for name, count in before.most_common())
    cells = f"{model} | {step.launches} | {len(own)} | {len(made)} | {len(step.families())} | {designs}"
    check, worse = compared(step, most) if most else ("- | - | - | -", [])
    return f"| {cells} | {step.front:.1f}, {step.generate:.1f} | {check} |", worse


PAGE = """# Kernels of training steps on a GPU, and families of them

Kernels of one bf16 training step that differ in numbers alone (sizes, strides, constant parts of addresses, float
constants) are one kernel that is given these: counted from the planned kernels, no GPU ran. `alone`: distinct kernels
with their numbers as constants; `compiled`: what is compiled; `families`: those of several members; by design: how many
alone and compiled. Seconds are Python's on one processor: of capture, differentiation and planning, and of writing the
kernels. The last columns hold families to a member with constants, compiled for sm_90: how many were compared, of how
many the accesses to memory differ in number or width or more is spilled, and the ratios of PTX instructions and of
registers.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="suite/name,batch,length")
    parser.add_argument("--compile", type=int, default=0, help="families of each model that are compiled and compared")
    parser.add_argument("--write", type=Path, help="the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "| model, batch, length | launches | alone | compiled | families | by design | front, writing s "
        "| compared | differ | instructions | registers |",
        "|---" * 11 + "|",
    ]
    print("\n".join(lines))
    worse: list[str] = []
    for model in options.models:
        line, found = row(model, options.compile)
        lines.append(line)
        worse += found
        print(line, *found, sep="\n", flush=True)
    if options.write:
        command = f"python tools/bench/gpu_families.py --compile {options.compile} --write {options.write}"
        options.write.write_text(PAGE + "\n".join(lines) + f"\n\nCommand: `{command}`\n")
    if worse:
        raise SystemExit(f"{len(worse)} families are not what their members are")


if __name__ == "__main__":
    main()
