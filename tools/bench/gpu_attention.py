"""Attention with the program's own masks on a GPU: here, by torch.compile and eagerly, forward and with the backward.

python tools/bench/gpu_attention.py [--quick] [--values] [--ours]

Sliding windows and causal documents in bfloat16, heads of 64 and 128, lengths of 4,096 and 16,384. Each row is one run:
the three programs are called in turn, and the medians of their times by CUDA events are printed, with the ratio of
torch.compile's to ours. Nothing here may have run eagerly: the ledger is asked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import torchcompile
from primtorch.ledger import REFUSED

WINDOW = 1024
Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A mask, a head's size and a length."""

    mask: str
    head: int
    length: int

    def __str__(self) -> str:
        return f"{self.mask}, {self.head}, {self.length}"

    def function(self) -> Callable[..., Tensor]:
        if self.mask == "window":
            return lambda b, h, q, k: (q >= k) & (q - k < WINDOW)
        if self.mask == "causal":
            return lambda b, h, q, k: q >= k
        generator = torch.Generator().manual_seed(self.length)
        ends = torch.randperm(self.length, generator=generator)[: self.length // 1024]
        of = torch.zeros(self.length, dtype=torch.int32)
        of[ends] = 1
        document = of.cumsum(0).to(torch.int32).cuda()
        return lambda b, h, q, k: (q >= k) & (document[q] == document[k])

    def blocks(self) -> BlockMask:
        return create_block_mask(self.function(), None, None, self.length, self.length, device="cuda")

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (max(1, 16384 // self.length), 16, self.length, self.head)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def cases(quick: bool) -> Iterator[Case]:
    for mask in ("window", "document"):
        for head in (64, 128):
            for length in (4096,) if quick else (4096, 16384):
                yield Case(mask, head, length)


def milliseconds(programs: dict[str, Callable[[], object]], rounds: int = 12) -> dict[str, float]:
    """The median of each program's time, with the programs called in turn and the cache flushed before each."""
    flush = torch.empty(64 * 1024 * 1024, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 3):
        for name, program in programs.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            program()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def both(program: Program, inputs: list[Tensor], tangent: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(program(*inputs), inputs, tangent)


def programs_of(case: Case, ours_only: bool) -> tuple[dict[str, Program], list[Tensor]]:
    blocks, inputs = case.blocks(), case.inputs()
    program = lambda q, k, v: flex_attention(q, k, v, block_mask=blocks)
    found: dict[str, Program] = {"ours": torchcompile.compile(program, fullgraph=True)}
    if not ours_only:
        found["torch.compile"] = torch.compile(program, fullgraph=True)
        if case.length <= 4096:
            line = torch.arange(case.length, device="cuda")
            mask = case.function()(0, 0, line[:, None], line)
            found["sdpa"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)
    return found, inputs


def measure(case: Case, ours_only: bool, report: Callable[[str], None]) -> None:
    torchcompile.reset()
    torch._dynamo.reset()
    programs, inputs = programs_of(case, ours_only)
    tangent = torch.randn_like(inputs[0])
    names = list(programs)
    frozen = [t.detach() for t in inputs]
    forward = milliseconds({name: (lambda p=program: p(*frozen)) for name, program in programs.items()})
    whole = milliseconds({name: both(program, inputs, tangent) for name, program in programs.items()})
    told = [event for event in torchcompile.report().events if event.effect in REFUSED]
    assert not told, told
    for what, times in (("forward", forward), ("with backward", whole)):
        row = ", ".join(f"{name} {times[name]:.3f} ms" for name in names)
        ratio = f"; torch.compile / ours {times['torch.compile'] / times['ours']:.2f}" if not ours_only else ""
        report(f"{case}, {what}: {row}{ratio}")


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64, by plain operators, one head at a time."""
    line = torch.arange(case.length, device="cuda")
    mask = case.function()(0, 0, line[:, None], line)
    heads = []
    for head in range(q.shape[1]):
        a, b, c = (t[:, head].double() for t in (q, k, v))
        scores = (a @ b.transpose(-2, -1) / case.head**0.5).masked_fill(~mask, -torch.inf)
        heads.append(scores.softmax(-1) @ c)
    return torch.stack(heads, 1)


def values(case: Case, report: Callable[[str], None]) -> None:
    """The relative errors of results and gradients, and those of a product that rounds where eager's does."""
    torchcompile.reset()
    inputs = [t.detach()[:1, :2].contiguous().requires_grad_() for t in case.inputs()]
    blocks = case.blocks()
    compiled = torchcompile.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks), fullgraph=True)
    line = torch.arange(case.length, device="cuda")
    mask = case.function()(0, 0, line[:, None], line)
    eager = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)
    tangent = torch.randn_like(inputs[0])
    truths = None
    rows = {}
    for name, program in (("exact", lambda *t: exact(case, *t)), ("ours", compiled), ("sdpa", eager)):
        out = program(*inputs)
        found = [out, *torch.autograd.grad(out, inputs, tangent.to(out.dtype))]
        if truths is None:
            truths = found
        rows[name] = [float((a.double() - b).norm() / b.double().norm()) for a, b in zip(found, truths, strict=True)]
    ours, theirs = (" ".join(f"{value:.2e}" for value in rows[name]) for name in ("ours", "sdpa"))
    right = all(a <= 2 * b + 1e-6 for a, b in zip(rows["ours"], rows["sdpa"], strict=True))
    report(f"{case}: errors of result and gradients {ours}; of eager's {theirs}; {'right' if right else 'WRONG'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="length 4,096 only")
    parser.add_argument("--values", action="store_true", help="compare values, not times")
    parser.add_argument("--ours", action="store_true", help="without torch.compile and eager")
    given = parser.parse_args()

    def report(text: str) -> None:
        print(text, flush=True)

    report(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {sys.version.split()[0]}")
    for case in cases(given.quick):
        job: Any = (lambda c: values(c, report)) if given.values else (lambda c: measure(c, given.ours, report))
        job(case)


if __name__ == "__main__":
    main()
