"""Operators alone, in several memory layouts: eager, torch.compile and this stack side by side.

    python tools/bench/operators.py                                            ours and eager, every operator
    python tools/bench/operators.py --only pool pad --layouts channels_last    a slice
    python tools/bench/operators.py --compilers torch torchcompile --write docs/results/cpu_operators.md
    python tools/bench/operators.py --compilers torch fixed torchcompile --dynamic --write docs/results/cpu_symbols.md
    python tools/bench/operators.py --device cuda --write docs/results/h200_operators.md

Models hide an operator that is slow in one layout behind their convolutions; here it stands alone. Images of 4 x 64 x
56 x 56, one thread, the shortest time of programs that are called in turn; on a GPU 64 of them, and the device's time.
Values and gradients are held to eager's of float64 on the CPU, by eager's own error. Ratios above 1 are faster than
eager. It exits with an error if a value is wrong or something ran eagerly. With --dynamic sizes are symbols to the
compilers, but to "fixed", which is this stack for the sizes at hand.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_time import median_on_gpu
from rich.progress import track

import torchcompile

Tensor = torch.Tensor
CHANNELS = 64
IMAGES = {"cpu": 4, "cuda": 64}
ROUNDS = {"cpu": 5, "cuda": 2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORSE = 4.0  # times eager's own error of rounding, and a rounding of the result

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool 2x2": lambda x: F.max_pool2d(x, 2),
    "max_pool 3x3/2": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool 3x3": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool 2x2": lambda x: F.avg_pool2d(x, 2),
    "avg_pool 3x3": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool 7": lambda x: F.adaptive_avg_pool2d(x, 7),
    "adaptive_avg_pool 5": lambda x: F.adaptive_avg_pool2d(x, 5),
    "adaptive_avg_pool 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool 7": lambda x: F.adaptive_max_pool2d(x, 7),
    "adaptive_max_pool 1": lambda x: F.adaptive_max_pool2d(x, 1),
    "nearest x2": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bilinear x2": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear /2": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bicubic x2": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "pad constant": lambda x: F.pad(x, (1, 1, 1, 1)),
    "pad reflect": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
    "pad replicate": lambda x: F.pad(x, (2, 2, 2, 2), mode="replicate"),
    "pad circular": lambda x: F.pad(x, (2, 2, 2, 2), mode="circular"),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
    "roll": lambda x: x.roll((3, 5), (2, 3)),
    "flip": lambda x: x.flip(3),
    "cat channels": lambda x: torch.cat([x.relu(), x.sigmoid(), x], 1),
    "cat columns": lambda x: torch.cat([x, x * 2], 3),
    "slice": lambda x: x[:, :, 1::2, 1::2] * 2,
    "tril": lambda x: x.tril(),
    "diff": lambda x: x.diff(dim=3),
    "to rows": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "cumsum columns": lambda x: x.cumsum(3),
    "softmax channels": lambda x: x.softmax(1),
    "softmax columns": lambda x: x.softmax(3),
    "logsumexp": lambda x: x.logsumexp(1),
    "group_norm": lambda x: F.group_norm(x, 8),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "layer_norm channels": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,)),
    "normalize": F.normalize,
    "var": lambda x: x.var(1),
    "amax": lambda x: x.amax(1),
    "sum batch": lambda x: x.sum(0),
    "glu": lambda x: F.glu(x, 1),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-1, 1),
    "squeeze-excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "sliced": lambda x: F.pad(x, (1, 1, 1, 0))[:, :, 1:, 1:-1],
}


@dataclass(frozen=True)
class Case:
    """An operator on an image, with or without its gradient."""

    operator: str
    layout: str
    dtype: str
    train: bool
    device: str

    def image(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = IMAGES[self.device], CHANNELS, 56, 56
        image = torch.randn(shape, generator=generator, device=self.device)
        return LAYOUTS[self.layout](image.to(DTYPES[self.dtype]))

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        if not self.train:
            return [function(x)]
        x = x.detach().requires_grad_()
        y = function(x)
        return [y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))]

    def __str__(self) -> str:
        return f"| {self.operator} | {self.layout} | {self.dtype} | {'train' if self.train else 'infer'} |"


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for dtype in options.dtypes:
        for layout in options.layouts:
            for operator in OPERATORS:
                if any(part in operator for part in options.only):
                    yield from (Case(operator, layout, dtype, train, options.device) for train in (False, True))


def compiled(compiler: str, function: Callable[[Tensor], Tensor], dynamic: bool) -> Callable[[Tensor], Tensor]:
    wanted = True if dynamic and compiler != "fixed" else None
    if compiler == "torch":
        torch.compiler.reset()
        return torch.compile(function, dynamic=wanted)
    return torchcompile.compile(function, fullgraph=True, dynamic=wanted)


def runs(case: Case, program: Callable[[Tensor], Tensor]) -> bool:
    """Whether torch.compile takes the operator: where it raises, its columns are empty."""
    try:
        case.run(program, case.image())
    except Exception:
        return False
    return True


def wrong(
    case: Case, function: Callable[[Tensor], Tensor], programs: dict[str, Callable[[Tensor], Tensor]]
) -> list[str]:
    """Whose values are further from float64's than eager's rounding explains, or have other strides than eager's."""
    exact = [result.to(case.device) for result in case.run(function, case.image().cpu().double())]
    found = {name: case.run(program, case.image()) for name, program in programs.items()}
    worse = []
    for name, results in found.items():
        for result, eager, wanted in zip(results, found["eager"], exact, strict=True):
            scale = wanted.abs().max().item()
            bound = WORSE * ((eager.double() - wanted).abs().max().item() + torch.finfo(eager.dtype).eps * scale)
            if not (result.double() - wanted).abs().max().item() <= bound or result.stride() != eager.stride():
                worse.append(name)
    return list(dict.fromkeys(worse))


def shortest(case: Case, programs: dict[str, Callable[[Tensor], Tensor]]) -> dict[str, float]:
    """Milliseconds of each, called in turn."""
    x, best = case.image(), dict.fromkeys(programs, math.inf)
    for _ in range(ROUNDS[case.device]):
        for name, program in programs.items():
            best[name] = min(best[name], milliseconds(case, lambda program=program: case.run(program, x)))
    return best


def milliseconds(case: Case, run: Callable[[], object]) -> float:
    if case.device == "cuda":
        return median_on_gpu(run, 10)
    run()
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def measured(case: Case, compilers: list[str], dynamic: bool) -> tuple[dict[str, float], list[str]]:
    """Milliseconds by program, and who is wrong or, of ours, ran eagerly."""
    function = OPERATORS[case.operator]
    torchcompile.reset()
    programs = {"eager": function, **{name: compiled(name, function, dynamic) for name in compilers}}
    if "torch" in programs and not runs(case, programs["torch"]):
        del programs["torch"]
    faults = wrong(case, function, programs)
    times = shortest(case, programs)
    eagerly = "torchcompile" in compilers and torchcompile.report().fallbacks
    return times, [*faults, *(["torchcompile, eagerly"] if eagerly else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="operators whose name contains one of these")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--dtypes", nargs="*", default=["float32"], choices=list(DTYPES))
    parser.add_argument("--compilers", nargs="*", default=["torchcompile"], choices=["torch", "fixed", "torchcompile"])
    parser.add_argument("--device", default="cpu", choices=list(IMAGES))
    parser.add_argument("--dynamic", action="store_true", help="sizes are symbols")
    parser.add_argument("--write", type=Path, help="the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = ["eager", *options.compilers]
    lines = [f"| operator | layout | dtype | mode | {' ms | '.join(names)} ms | {' | '.join(options.compilers)} |"]
    lines.append("|" + "---|" * (4 + len(names) + len(options.compilers)))
    ratios: dict[str, list[float]] = {name: [] for name in options.compilers}
    faults: list[str] = []
    theirs = 0  # rows in which torch.compile's values or strides are not eager's
    for case in track(list(cases(options)), "operators", disable=not sys.stderr.isatty()):
        times, wrongly = measured(case, options.compilers, options.dynamic)
        found = {name: times["eager"] / times[name] for name in options.compilers if name in times}
        for name, ratio in found.items():
            ratios[name].append(ratio)
        columns = [f"{times[name]:.3f}" if name in times else "raises" for name in names]
        columns += [f"{found[name]:.2f}" if name in found else "" for name in options.compilers]
        lines.append(f"{case} {' | '.join(columns)} |")
        print(lines[-1], flush=True)
        theirs += "torch" in wrongly
        faults += [f"{case} {name}" for name in wrongly if name != "torch"]
    summary = "\n".join(
        f"{name}: {math.exp(sum(map(math.log, found)) / len(found)):.2f}x eager, {sum(r < 0.8 for r in found)} of "
        f"{len(found)} rows below 0.8, the least {min(found):.2f}."
        for name, found in ratios.items()
        if found
    )
    summary += f"\nOther strides or values than eager's: torch.compile {theirs} rows, ours {len(faults)}."
    print(summary, *faults, sep="\n")
    if options.write:
        on_gpu = options.device == "cuda"
        title = f"# Operators alone, on {'a GPU' if on_gpu else 'the CPU'}\n\n"
        machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, one thread"
        versions = f"Python {platform.python_version()}, torch {torch.__version__}, {machine}.\n"
        command = f"\n`python {' '.join(sys.argv)}`\n"
        text = f"{title}{versions}\n{summary}\n\n" + "\n".join(lines) + "\n" + command
        options.write.write_text(text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
