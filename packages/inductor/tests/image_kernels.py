"""Images in several layouts, and which loops of generated C++ the compiler made vectors of."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchinductor.codegen.cpp.build import FLAGS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
}


def vectors_of(text: str, compiler: Sequence[str], folder: Path) -> tuple[set[int], str]:
    """The lines of loops that g++ made vectors of, for a processor that many have, and all that it said."""
    source = folder / "kernels.cpp"
    source.write_text(text)
    flags = [flag for flag in FLAGS if not flag.startswith("-march")]
    told = subprocess.run(
        [*compiler, *flags, "-march=x86-64-v3", "-fopt-info-vec-optimized", source, "-o", folder / "kernels.so"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = re.findall(r"kernels\.cpp:(\d+):\d+: optimized: loop vectorized", told.stderr)
    return {int(line) for line in lines}, told.stderr
