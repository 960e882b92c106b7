"""What a step of a public model costs on a GPU, counted without one: launches, calls, and the bytes that kernels move.

    python tools/bench/gpu_traffic.py                                        the table's models
    python tools/bench/gpu_traffic.py --models hf/BertForMaskedLM,16,512 --modes infer --list
    python tools/bench/gpu_traffic.py --write docs/results/gpu_traffic.md

A model of full size is captured, differentiated and lowered under bf16 autocast; nothing is computed (results are
memory that nobody fills), and kernels are planned for "cuda". Autocast and attention are the CPU's: a real GPU's graph
differs where theirs do.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "packages" / "compile" / "tests")]

from counted_traffic import Show, traffic_of_step  # noqa: E402
from zoo import build  # noqa: E402

from torchinductor.cost import Traffic  # noqa: E402
from torchinductor.lowering.context import Operation  # noqa: E402

MODELS = (
    "hf/BertForMaskedLM,16,512", "hf/GPT2ForSequenceClassification,8,1024", "hf/DistillGPT2,32,512",
    "timm/mobilenetv3_large_100,128,0", "timm/vit_base_patch16_224,64,0",
    "tv/resnet18,64,0",
)  # fmt: skip


def traffic(model: str, mode: str, show: Show | None = None) -> dict[str, Traffic]:
    """By kind of graph, of "suite/name,batch,length"."""
    name, batch, length = model.split(",")
    suite, name = name.split("/")
    net, args, kwargs = build(suite, name, scale="full", train=mode == "train", batch=int(batch), length=int(length))
    return traffic_of_step(net, args, kwargs, mode == "train", show)


def table(models: Sequence[str], modes: Sequence[str], show: Show | None = None) -> str:
    lines = ["| model, batch, length | graph | launches | kernels' GB | calls of ATen |", "|---|---|---|---|---|"]
    for model in models:
        for mode in modes:
            for kind, t in traffic(model, mode, show).items():
                lines.append(f"| {model} | {kind} | {t.kernels} | {t.moved / 1e9:.2f} | {t.calls} |")
                print(lines[-1], flush=True)
    return "\n".join(lines)


def _listed(operations: Sequence[Operation]) -> None:
    print("\n\n".join(map(str, operations)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="suite/name,batch,length")
    parser.add_argument("--modes", nargs="*", default=["train"])
    parser.add_argument("--list", action="store_true", help="print the operations, too")
    parser.add_argument("--write", type=Path, help="the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    text = table(options.models, options.modes, _listed if options.list else None)
    if options.write:
        page = (
            "# Traffic of training steps on a GPU, counted\n\n"
            "Launches of generated kernels, the bytes that these move and calls of ATen, of one bf16 training step, "
            "counted from\nthe planned kernels (`torchinductor.cost`); no GPU ran. Bytes of a kernel are each place "
            "once; those of ATen's calls\nare not in it.\n\n"
        )
        options.write.write_text(
            f"{page}{text}\n\nCommand: `python tools/bench/gpu_traffic.py --write {options.write}`\n"
        )


if __name__ == "__main__":
    main()
