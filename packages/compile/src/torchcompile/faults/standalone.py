"""A reduced program as a file that runs alone: its inputs are drawn anew from a seed, or written out."""

from __future__ import annotations

import platform
import re
import textwrap
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import torch
from torch import fx

from primtorch import graph_text
from primtorch.frozen import record
from torchcompile.faults.judge import apart
from torchcompile.faults.schemas import Fault, Named, Program

SEED = 0
MOST_ELEMENTS = 64  # of a tensor that is written out
_NAMES = {"torch": torch, "inf": inf, "nan": nan}


@record
class Standalone:
    """A program whose inputs are texts, evaluated one after the other behind `torch.manual_seed(SEED)`."""

    module: fx.GraphModule
    inputs: tuple[str, ...]

    def program(self) -> Program:
        """The program on the inputs that the texts make."""
        with apart(), torch.enable_grad():
            torch.manual_seed(SEED)
            return Program(self.module, tuple(eval(text, _NAMES) for text in self.inputs))


def standalone(program: Program, shows: Callable[[Program], bool]) -> Standalone | None:
    """The program with inputs that a text makes: drawn ones where these show the fault as well. None if none do."""
    texts = [[*_drawn(value), *_written(value)] for value in program.inputs]
    if not all(texts):
        return None
    for choice in range(max(map(len, texts), default=1)):
        made = Standalone(program.module, tuple(options[min(choice, len(options) - 1)] for options in texts))
        if _holds(made, shows):
            return made
    return None


def outline(program: Program) -> Standalone:
    """The program on drawn inputs of the same metadata: it holds no tensor of a caller's."""
    return Standalone(program.module, tuple(_drawn(value)[0] for value in program.inputs))


def _holds(made: Standalone, shows: Callable[[Program], bool]) -> bool:
    try:
        return shows(made.program())
    except Exception:  # numbers that the program refuses
        return False


def _drawn(value: object) -> list[str]:
    """Texts that draw a tensor of this shape, strides and type."""
    if not isinstance(value, torch.Tensor):
        return [repr(value)]
    dense = value.is_contiguous()
    shape = tuple(value.shape)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, value.stride(), strict=True))
    drawn = str(shape if dense else (extent if value.numel() else 0,))
    if value.dtype is torch.bool:
        bases = [f"(torch.rand({drawn}) > 0.5)"]
    elif value.is_floating_point() or value.is_complex():
        dtype = "" if value.dtype is torch.float32 else f".to({value.dtype})"
        bases = [f"torch.randn({drawn}){dtype}", f"(torch.rand({drawn}) + 0.5){dtype}"]
    else:
        high = int(value.max()) + 1 if value.numel() else 1
        low = min(int(value.min()), high - 1) if value.numel() else 0
        bases = [f"torch.randint({low}, {high}, {drawn}, dtype={value.dtype})"]
    return [
        _finished(base if dense else f"{base}.as_strided({shape}, {tuple(value.stride())})", value) for base in bases
    ]


def _written(value: object) -> list[str]:
    """The tensor by its elements."""
    if not isinstance(value, torch.Tensor) or value.numel() > MOST_ELEMENTS:
        return []
    text = f"torch.tensor({value.detach().cpu().tolist()!r}, dtype={value.dtype})"
    if not value.is_contiguous():
        text = f"torch.empty_strided({tuple(value.shape)}, {tuple(value.stride())}, dtype={value.dtype}).copy_({text})"
    return [_finished(text, value)]


def _finished(text: str, value: torch.Tensor) -> str:
    device = "" if value.device.type == "cpu" else f".to({str(value.device)!r})"
    return f"{text}{device}{'.requires_grad_()' if value.requires_grad else ''}"


def ambient_blocks() -> list[str]:
    """The blocks that the program ran in, as text."""
    blocks = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            blocks.append(f"torch.autocast({device!r}, {torch.get_autocast_dtype(device)})")
    if not torch.is_grad_enabled():
        blocks.append("torch.no_grad()")
    return blocks


def file_name(fault: Fault) -> str:
    """The name of a reproducer's file: its stage and the operator at fault."""
    operator = re.sub(r"\W+", "_", fault.operator or "program").strip("_")
    return f"minified_{fault.stage}_{operator}.py"


_WITH_GRADIENTS = """\
results = [r for r in compiled(*inputs()) if isinstance(r, torch.Tensor) and r.requires_grad]
torch.autograd.backward(results, [torch.ones_like(result) for result in results])"""


def source(found: Standalone, fault: Fault, blocks: list[str], by: Named) -> str:
    """The file's text."""
    lines = graph_text(found.module, "program")
    told = textwrap.indent(str(fault).replace("\\", "\\\\").replace('"""', "'''"), "    ")
    drawn = "".join(f"        {text},\n" for text in found.inputs)
    within = ", ".join(blocks)
    call = "compiled(*inputs())"
    ends = fault.finding.ends
    if ends and any(".requires_grad_()" in text for text in found.inputs):
        call = _WITH_GRADIENTS
    call = textwrap.indent(call, "        " if within else "    ")
    backend = f"backend={by.expression}, " if by.expression else ""
    flaw = (
        f"that torchcompile {fault.finding.kind} at" if ends else "that torchcompile computes otherwise than eager does"
    )
    shown = f"it {fault.finding.kind}" if ends else "it raises"
    return f'''"""A program {flaw}.

{told}

Reduced by `python -m torchcompile minify` with torch {torch.__version__}, Python {platform.python_version()}.
Run it: {shown} as long as the fault is there.
"""

from math import inf, nan  # noqa: F401

import torch

import torchcompile
{by.imported and chr(10) + by.imported + chr(10)}

{lines}

def inputs():
    torch.manual_seed({SEED})
    return [
{drawn}    ]


if __name__ == "__main__":
    options = {{"verify": {not ends}, "strict": True, "cache": None}}
    compiled = torchcompile.compile(program, {backend}fullgraph=True, dynamic=False, options=options)
{f"    with {within}:" + chr(10) + call if within else call}
    print("no fault: compiled as in eager")
'''


def write(folder: Path, found: Standalone, fault: Fault, blocks: list[str], by: Named) -> Path:
    """Writes the file; one of another fault with this name stays."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(fault)
    text = source(found, fault, blocks, by)
    for number in range(1, 100):
        if not path.exists() or path.read_text() == text:
            break
        path = folder / f"{Path(file_name(fault)).stem}_{number}.py"
    path.write_text(text)
    return path
