"""Which tiles suit the kernels of public models' training steps: each distinct kernel as planned, and with others.

    python tools/bench/gpu_tiles.py --list                                   what would be timed; needs no GPU
    python tools/bench/gpu_tiles.py --models tv/resnet50,128,0 --kinds column --out rows.jsonl

Steps are planned as tools/bench/gpu_traffic.py plans them. A kernel is compiled with every layout of its kind's table
and timed on random inputs (indices are zeros) that no cache holds. A row tells microseconds by layout, beside those
that a copy of the same bytes would take at --bandwidth; the last lines are the layouts that would be best for all
kernels of a kind, by the geometric mean of their times over each kernel's best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_traffic import MODELS, traffic, traffic_of_step
from programs import programs

from torchinductor.codegen.triton.backend import TritonLauncher
from torchinductor.codegen.triton.compiler import Binary, TritonCompiler
from torchinductor.codegen.triton.plan import Layout
from torchinductor.codegen.triton.writer import TritonSource, write
from torchinductor.cost import bytes_of
from torchinductor.errors import BuildFailed
from torchinductor.indexing import product
from torchinductor.ir import Bundle, Kernel
from torchinductor.lowering.context import Operation

_REPEATS = 4
_MOST_ELEMENTS = 64  # of a tile for each thread
_FLUSHED = 1 << 28  # bytes: more than caches hold


@dataclass
class Found:
    """A distinct kernel of a model's step."""

    model: str
    kernel: Kernel
    nbytes: int
    count: int = 1


Kernels = dict[tuple[str, str], Found]
"""By the text of a kernel and its grid."""


def kind_of(kernel: Kernel) -> str:
    """Of layout; reductions in one piece, in loops along rows, and in loops along columns apart."""
    layout = kernel.laid_out(Layout)
    if layout.shape != "reduction":
        return layout.shape
    return "piece" if layout.persistent else "column" if layout.x_block > 1 else "long row"


def add(found: Kernels, place: str, operations: Sequence[Operation], least: int) -> None:
    """Those of a graph's kernels that move at least so many bytes and write by no index."""
    for operation in operations:
        for kernel in operation.parts if isinstance(operation, Bundle) else (operation,):
            if not isinstance(kernel, Kernel) or kernel.scatters or kernel.symbols:
                continue
            nbytes = sum(bytes_of(kernel, {}).values())
            if nbytes < least or kernel.laid_out(Layout).shape in ("matmul", "attention"):
                continue
            key = (write(kernel).text, str(kernel.laid_out(Layout).grid))
            if key in found:
                found[key].count += 1
            else:
                found[key] = Found(place, kernel, nbytes)


def found_in(models: Sequence[str], least: int) -> list[Found]:
    """The kernels of models' training steps."""
    found: Kernels = {}
    for model in models:
        traffic(model, "train", lambda operations, model=model: add(found, model, operations, least))
    return list(found.values())


class _Module(torch.nn.Module):
    """A program as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


def found_in_programs(only: str, least: int) -> list[Found]:
    """The kernels of the programs of tools/bench/programs.py whose name contains `only`."""
    found: Kernels = {}
    for program in programs("cpu", only, big=True):
        show = lambda operations, name=program.name: add(found, name, operations, least)
        traffic_of_step(_Module(program.function), program.inputs, {}, program.gradient is not None, show)
    return list(found.values())


# ---- layouts ------------------------------------------------------------------------------------------------------


def _lines(layout: Layout) -> Iterator[Layout]:
    if layout.shape == "rows":
        yield from _lines(Layout("flat", (*layout.fixed, *layout.x), wide=layout.wide))
    for block, warps in itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8)):
        yield replace(layout, x_block=block, warps=warps)


def _tiles(layout: Layout) -> Iterator[Layout]:
    for x, y, warps in itertools.product((16, 32, 64, 128), (4, 8, 16, 32, 64, 128), (4, 8)):
        yield replace(layout, x_block=x, y_block=y, warps=warps)
    yield from _lines(Layout("flat", (*layout.fixed, *layout.y, *layout.x), wide=layout.wide))


def _columns(layout: Layout) -> Iterator[Layout]:
    length = product(a.size for a in layout.r).as_int() or 1
    for x, r, warps in itertools.product((8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128, 256, 512), (4, 8)):
        whole = length <= r
        yield replace(layout, x_block=x, r_block=r, warps=warps, persistent=whole, stages=1 if whole else 2)


def _pieces(layout: Layout) -> Iterator[Layout]:
    for x, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)):
        yield replace(layout, x_block=x, warps=warps)


def _long_rows(layout: Layout) -> Iterator[Layout]:
    for r, warps, stages in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16, 32), (1, 2, 3)):
        yield replace(layout, r_block=r, warps=warps, stages=stages)


LAYOUTS: Mapping[str, Callable[[Layout], Iterator[Layout]]] = {
    "flat": _lines, "rows": _lines, "tiled": _tiles, "column": _columns, "piece": _pieces, "long row": _long_rows,
}  # fmt: skip


def variants(kernel: Kernel) -> dict[str, Kernel]:
    """The kernel as planned, and with its kind's other layouts, by name."""
    planned = kernel.laid_out(Layout)
    made = {"planned": kernel}
    for layout in LAYOUTS[kind_of(kernel)](planned):
        elements = layout.x_block * layout.y_block * layout.r_block / (32 * layout.warps)
        if 2 <= elements <= _MOST_ELEMENTS:
            blocks = f"x{layout.x_block} y{layout.y_block} r{layout.r_block}"
            made[f"{layout.shape} {blocks} warps {layout.warps} stages {layout.stages}"] = replace(
                kernel, layout=layout
            )
    return made


# ---- timing -------------------------------------------------------------------------------------------------------


class Timer:
    """Compiles kernels in parallel, and times them one by one."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self.compiler = TritonCompiler(10 * major + minor)
        self.pool = ThreadPoolExecutor(16)
        self.other = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")

    def _built(self, source: TritonSource) -> Binary | None:
        try:
            return self.compiler.compile([source])[0]
        except BuildFailed:
            return None

    def times(self, made: Mapping[str, Kernel]) -> dict[str, float]:
        """Microseconds by name, of those that compile and can be launched."""
        sources = {name: write(kernel) for name, kernel in made.items()}
        binaries = {name: self.pool.submit(self._built, source) for name, source in sources.items()}
        memory: dict[str, torch.Tensor] = {}
        found: dict[str, float] = {}
        for name, source in sources.items():
            binary = binaries[name].result()
            if binary is None:
                continue
            tensors = [self._memory(made[name], buffer, memory) for buffer in source.buffers]
            try:
                found[name] = self._time(TritonLauncher(source, binary), tensors, made[name].laid_out(Layout))
            except RuntimeError:  # more shared memory or registers than there are
                continue
        return found

    @staticmethod
    def _memory(kernel: Kernel, name: str, made: dict[str, torch.Tensor]) -> torch.Tensor:
        if name not in made:
            buffer = kernel.buffers[name]
            values = torch.zeros(buffer.span.as_int() or 1, device="cuda")
            made[name] = (values.normal_() if buffer.dtype.is_floating_point else values).to(buffer.dtype)
        return made[name]

    def _time(self, launcher: TritonLauncher, tensors: Sequence[torch.Tensor], layout: Layout) -> float:
        grid = [layout.grid.as_int() or 1, 1, 1]
        launcher(tensors, [], grid)
        seconds = []
        for _ in range(_REPEATS):
            self.other.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launcher(tensors, [], grid)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end))
        return round(min(seconds) * 1e3, 1)


def best_for_all(rows: Sequence[dict[str, float]]) -> list[tuple[float, str]]:
    """Layouts that most kernels could be compiled with, by the geometric mean of their times over the best."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = []
    for name in names:
        shares = [row[name] / min(row.values()) for row in rows if name in row]
        if 2 * len(shares) >= len(rows):
            found.append((statistics.geometric_mean(shares), name))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="suite/name,batch,length")
    parser.add_argument("--programs", help="in place of models: programs whose names contain this, '' for all")
    parser.add_argument("--kinds", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--most", type=int, default=16, help="kernels of a kind: those that move most")
    parser.add_argument("--least-megabytes", type=float, default=15)
    parser.add_argument("--bandwidth", type=float, default=4.25e12, help="bytes a second that the device copies")
    parser.add_argument("--list", action="store_true", help="only say which kernels there are")
    parser.add_argument("--out", type=Path, help="JSON lines, a kernel each")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    least = int(options.least_megabytes * 1e6)
    found = found_in(options.models, least) if options.programs is None else found_in_programs(options.programs, least)
    timer = None if options.list else Timer()
    for kind in options.kinds:
        here = sorted((f for f in found if kind_of(f.kernel) == kind), key=lambda f: -f.nbytes * f.count)[
            : options.most
        ]
        rows = []
        for item in here:
            made = variants(item.kernel)
            row = {
                "kind": kind, "model": item.model, "kernel": item.kernel.name, "count": item.count,
                "copied": round(item.nbytes / options.bandwidth * 1e6, 1),
            }  # fmt: skip
            if timer is None:
                print(f"{row} {len(made)} layouts, planned {item.kernel.layout}")
                continue
            times = timer.times(made)
            rows.append(times)
            best = sorted((t, name) for name, t in times.items())[:3]
            print(f"{row} planned {times.get('planned')}, best {best}", flush=True)
            if options.out:
                with options.out.open("a") as lines:
                    lines.write(json.dumps(row | {"times": times}) + "\n")
        for share, name in best_for_all(rows)[:8]:
            print(f"{kind}: {share:.3f} of the best by {name}")


if __name__ == "__main__":
    main()
