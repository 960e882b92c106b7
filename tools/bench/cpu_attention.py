"""Attention with the program's own functions on the CPU: here, by torch.compile and by plain operators.

python tools/bench/cpu_attention.py [--lengths 1024 2048 4096] [--write docs/results/cpu_attention.md]

Four heads of 64 in float32, one thread. The programs of a row are called in turn, and each one's shortest time counts,
with the ratio of another's to ours. torch.compile's has no backward there.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchcompile
from primtorch.ledger import REFUSED

WINDOW = 256
ROUNDS = 3
Tensor = torch.Tensor
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@dataclass(frozen=True)
class Case:
    """A score function and a mask, at a length."""

    name: str
    length: int
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None

    def program(self) -> Callable[[Tensor, Tensor, Tensor], Any]:
        blocks = self.mask and create_block_mask(self.mask, None, None, self.length, self.length, "cpu")
        return lambda q, k, v: flex_attention(q, k, v, self.score, blocks)

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All scores at once, by PyTorch's operators."""
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        places = [torch.arange(n).view([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate(scores.shape)]
        if self.score is not None:
            scores = self.score(scores, *places)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask(*places), -math.inf)
        return scores.softmax(-1) @ v

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(1, 4, self.length, 64) for _ in range(3)]


def cases(lengths: list[int]) -> Iterator[Case]:
    causal = lambda b, h, q, k: q >= k
    window = lambda b, h, q, k: (q >= k) & (q - k < WINDOW)
    alibi = lambda s, b, h, q, k: s + SLOPES[h] * (k - q)
    for length in lengths:
        yield Case("no functions", length)
        yield Case("causal", length, None, causal)
        yield Case(f"window of {WINDOW}", length, None, window)
        yield Case("causal, ALiBi", length, alibi, causal)


def milliseconds(programs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest time of each program, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS + 1):
        for name, program in programs.items():
            began = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - began)
    return {name: min(found[1:]) * 1e3 for name, found in times.items()}


def row(case: Case) -> str:
    program = case.program()
    ours, theirs = torchcompile.compile(program, fullgraph=True), torch.compile(program, fullgraph=True)
    inputs = case.inputs()
    with torch.no_grad():
        forward = {"ours": lambda: ours(*inputs), "plain": lambda: case.plain(*inputs)}
        torch.testing.assert_close(ours(*inputs), case.plain(*inputs), rtol=1e-4, atol=1e-5)
        try:
            torch.testing.assert_close(ours(*inputs), theirs(*inputs), rtol=1e-4, atol=1e-5)
            forward["torch.compile"] = lambda: theirs(*inputs)
        except torch._dynamo.exc.TorchDynamoException:  # no kernel for these sizes, or no compiler
            pass
        found = milliseconds(forward)
    leaves = [t.requires_grad_() for t in case.inputs()]
    both = milliseconds({
        "ours": lambda: torch.autograd.grad(ours(*leaves).sum(), leaves),
        "plain": lambda: torch.autograd.grad(case.plain(*leaves).sum(), leaves),
    })  # fmt: skip
    assert not [event for event in torchcompile.report().events if event.effect in REFUSED]
    peer = found.get("torch.compile")
    cells = (
        case.name,
        str(case.length),
        f"{found['ours']:.1f}",
        "-" if peer is None else f"{peer / found['ours']:.2f}",
        f"{found['plain'] / found['ours']:.2f}",
        f"{both['ours']:.1f}",
        f"{both['plain'] / both['ours']:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--write", type=Path, help="write the page here as Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = [
        "| functions | length | forward, ms | torch.compile | plain | and backward, ms | plain |",
        "|---|---|---|---|---|---|---|",
    ]
    print(*lines, sep="\n")
    for case in cases(options.lengths):
        torchcompile.reset()
        torch.compiler.reset()
        lines.append(row(case))
        print(lines[-1], flush=True)
        if options.write is not None:
            options.write.write_text(page(lines))


def page(lines: list[str]) -> str:
    return "\n".join([
        "# flex_attention on the CPU",
        "",
        "Four heads of 64, float32, one thread: milliseconds of ours, forward and with the backward, and how many "
        "times as long others take, called in turn in one process. *plain* computes all scores at once by PyTorch's "
        "operators; torch.compile's kernel has no backward. "
        "`python tools/bench/cpu_attention.py --write docs/results/cpu_attention.md`.",
        "",
        f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}; the machine was "
        "busy with other work.",
        "",
        *lines,
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
