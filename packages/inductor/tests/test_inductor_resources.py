"""Registers, spills and shared memory of kernels for two generations of GPUs: bounds that were recorded without a GPU.

A kernel that needs more than before is slower or does not launch. `tools/check/gpu_resources.py` does the same for all
kernels of public models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from device_cases import activate_and_share, gradients, normalise, positions, types

import primtorch
from torchinductor import InductorOptions
from torchinductor.codegen.base import generated
from torchinductor.ir import Bundle, Kernel
from torchinductor.source import planned_operations

pytest.importorskip("triton")

from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.plan import Layout  # noqa: E402
from torchinductor.codegen.triton.resources import Resources, resources_of  # noqa: E402
from torchinductor.codegen.triton.writer import write  # noqa: E402

BF16 = torch.bfloat16


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16)


WIDE = (halves(4096, 4096), halves(4096), halves(4096), halves(4096, 4096))
IMAGES = halves(64, 56, 56, 64).permute(0, 3, 1, 2)
Program = Callable[..., object]

# The most that any kernel of the program takes on either, with a tenth more registers: compilers differ.
BOUNDS: dict[str, tuple[Program, tuple[torch.Tensor, ...], Resources]] = {
    "softmax": (lambda x: torch.softmax(x, -1), WIDE[:1], Resources(36, 0, 32)),
    "layer norm and gradients": (gradients(normalise), WIDE, Resources(198, 0, 32800)),
    "gelu, softmax and gradients": (gradients(activate_and_share), WIDE, Resources(121, 0, 16384)),
    "cross entropy and gradients": (
        gradients(lambda x, at: F.cross_entropy(x.float(), at)),
        (halves(2048, 50257), torch.zeros(2048, dtype=torch.int64), torch.ones(())),
        Resources(154, 0, 32),
    ),
    "batch norm of images": (
        lambda x: F.relu(F.batch_norm(x.float(), None, None, training=True)).to(BF16),
        (IMAGES,),
        Resources(141, 0, 8192),
    ),
    "a few positions": (
        positions,
        (torch.zeros(1024, 1024, dtype=torch.int64), torch.empty(8, 1024, 1024)),
        Resources(86, 0, 128),
    ),
    "types and gradients": (
        gradients(types),
        (torch.empty(4, 768), torch.zeros(16, 512, dtype=torch.int64), torch.empty(16, 512, 768)),
        Resources(134, 0, 4096),
    ),
}


@pytest.fixture(scope="module", params=[80, 90])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TritonCompiler:
    return TritonCompiler(request.param, tmp_path_factory.mktemp("triton"), workers=2)


@pytest.mark.parametrize("name", BOUNDS)
def test_resources_are_within_their_bounds(compiler: TritonCompiler, name: str) -> None:
    program, inputs, bound = BOUNDS[name]
    operations = planned_operations(primtorch.lower(primtorch.trace(program, *inputs)), "cuda")
    kernels = [o for o in operations if isinstance(o, (Kernel, Bundle))]
    sources = {source.text: source.meta for source in (generated(k, InductorOptions()) for k in kernels)}
    binaries = compiler.compile(list(sources.values()))
    found = {text: resources_of(binary) for text, binary in zip(sources, binaries, strict=True)}
    for text, taken in found.items():
        assert taken.within(bound), f"{taken}, not {bound}\n{text}"


def test_a_spill_is_seen(tmp_path: Path) -> None:
    """Rows of 8192 in one warp: no registers hold that."""
    x = halves(512, 8192)
    (kernel,) = planned_operations(primtorch.lower(primtorch.trace(lambda x: torch.softmax(x, -1), x)), "cuda")
    assert isinstance(kernel, Kernel)
    crowded = replace(kernel, layout=replace(kernel.laid_out(Layout), warps=1))
    made = TritonCompiler(90, tmp_path, workers=1)
    (binary,) = made.compile([write(crowded)])
    assert resources_of(binary).spilled > 0
    made.close()
