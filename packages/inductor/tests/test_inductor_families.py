"""Kernels that differ in numbers alone are one: what they compute, how wide they load, and that caches find them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interpreted import replies

import primtorch
from torchinductor import InductorOptions
from torchinductor.codegen.base import generated
from torchinductor.ir import Bundle, Kernel
from torchinductor.source import planned_operations

pytest.importorskip("triton")

from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.families import shared  # noqa: E402
from torchinductor.codegen.triton.marks import (  # noqa: E402
    Mark,
    marked,
    marked_float,
    marked_quotient,
    marked_remainder,
    marks_of,
    number_of,
    plain,
    reciprocal,
    replaced,
)
from torchinductor.codegen.triton.resources import resources_of  # noqa: E402
from torchinductor.codegen.triton.writer import TritonSource  # noqa: E402

ACCESS = re.compile(r"\b(?:ld|st)\.global[\w.:]*")


def sources(program: Callable[..., object], *inputs: torch.Tensor) -> list[TritonSource]:
    """The distinct kernels of a program, each for itself."""
    operations = planned_operations(primtorch.lower(primtorch.trace(program, *inputs)), "cuda", OPTIONS)
    made = (generated(o, OPTIONS) for o in operations if isinstance(o, (Kernel, Bundle)))
    return list({source.text: source.meta for source in made}.values())


OPTIONS = InductorOptions(fuse=False)  # each layer's kernel by itself


def halves(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def turn(*images: torch.Tensor) -> list[torch.Tensor]:
    return [x.permute(0, 2, 3, 1).contiguous() for x in images]


def sum_up(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [x.float().sum(0) / (x.shape[0] + 0.5) for x in xs]


def normalise(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [F.layer_norm(x.float(), x.shape[-1:]).to(x.dtype) for x in xs]


def test_layers_of_several_sizes_are_one_kernel() -> None:
    """Their numbers are what differs, in the order of their places, and are those of each layer."""
    own = sources(turn, *(halves(64, c, 28, 28) for c in (192, 320, 448)))
    made = shared(own)
    assert len({source.text for source in own}) == 3
    assert len({source.text for source in made}) == 1
    assert len({source.numbers for source in made}) == 3
    extra = len(own[0].signature)
    assert all(len(source.signature) == extra + len(source.numbers) for source in made)
    for alone, source in zip(own, made, strict=True):
        constants = Counter(re.findall(r"\b\d+\b", alone.text))
        assert all(constants[str(number)] for number in source.numbers), (source.numbers, alone.text)
        assert source.name.rpartition("_")[0] == alone.name.rpartition("_")[0]


def test_numbers_that_the_compiler_takes_differently_stay_apart() -> None:
    """Rows of 784 and of 783 elements are loaded by other widths; a single channel is no stride."""
    own = sources(sum_up, halves(4096, 784), halves(4096, 783))
    assert len({source.text for source in shared(own)}) == len({source.text for source in own})


def test_a_kernel_that_is_alone_keeps_its_constants() -> None:
    own = sources(turn, halves(64, 192, 28, 28))
    assert [source.text for source in shared(own)] == [source.text for source in own]


def test_values_are_those_of_kernels_of_their_own() -> None:
    """Of drawn nets, until some have had kernels that share one: those of several sizes need not."""
    seed, alone, together = random.randrange(2**32), 0, 0
    for number in range(8):
        found = replies("families_worker.py", str(seed + number), "4")
        assert len(found) == 4
        for reply in found:
            assert reply.get("same"), (seed + number, reply)
            alone, together = alone + reply["kernels"][0], together + reply["kernels"][1]
        if together < alone:
            return
    raise AssertionError(f"seed {seed}: no kernels of 32 nets share one")


def shift(*images: torch.Tensor) -> list[torch.Tensor]:
    """Each channel by its own number: where an element's channel is, a division of its place says."""
    return [x + torch.arange(x.shape[-1], device=x.device) for x in images]


def scale(*images: torch.Tensor) -> list[torch.Tensor]:
    """Each image's channels by their own mean, and its lines by a number."""
    return [x * x[:, :1, :1] + torch.arange(x.shape[1], device=x.device)[:, None, None] for x in images]


PROGRAMS: dict[str, tuple[Callable[..., object], Sequence[torch.Tensor]]] = {
    "turned images": (turn, [halves(64, c, 28, 28) for c in (192, 320, 448)]),
    "turned odd images": (turn, [halves(64, c, 27, 27) for c in (72, 120, 200)]),
    "sums of columns": (sum_up, [halves(4096, n) for n in (784, 1040, 1072)]),
    "channels of a line": (shift, [halves(64, 30, c) for c in (120, 168, 200)]),
    "channels of sixteens": (shift, [halves(64, 30, c) for c in (48, 80, 112)]),
    "odd channels of a line": (shift, [halves(64, 32, c) for c in (35, 27, 51)]),
    "channels of images": (scale, [halves(64, n, n, c) for n, c in ((14, 40), (28, 56), (7, 24))]),
    "rows": (normalise, [halves(4096, n) for n in (592, 720, 880)]),
    "rows of eights": (normalise, [halves(4096, n) for n in (568, 600, 616)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_loads_are_as_wide_as_with_constants(name: str, tmp_path: Path) -> None:
    program, inputs = PROGRAMS[name]
    own = sources(program, *inputs)
    made = shared(own)
    assert len({source.text for source in made}) < len(own)
    compiler = TritonCompiler(90, tmp_path, workers=2)
    unique = list({source.text: source for source in (*own, *made)}.values())
    binary = {source.text: found for source, found in zip(unique, compiler.compile(unique), strict=True)}
    accesses = {
        source.text: Counter(ACCESS.findall((tmp_path / f"{compiler.key(source)}.ptx").read_text()))
        for source in unique
    }
    for alone, source in zip(own, made, strict=True):
        assert accesses[alone.text] == accesses[source.text], f"{alone.text}\n{source.text}"
        mine, other = resources_of(binary[source.text]), resources_of(binary[alone.text])
        assert mine.spilled <= other.spilled and mine.shared == other.shared, f"{other}, {mine}\n{source.text}"
    assert all(found.hit for found in compiler.compile(shared(sources(program, *inputs))))  # as another process would
    compiler.close()


def test_marks() -> None:
    text = (
        f"tl.load(p0{marked(-48, '<')} + (i0 * {marked(24)}){marked(-48, '>')}) * {marked_float(49.0, torch.float32)}"
    )
    assert plain(text) == "tl.load(p0 + (i0 * 24) + -48) * 49.0"
    assert replaced(text, lambda mark: mark.named("n", 8)) == "tl.load(p0 + n + (i0 * n)) * n"
    assert [mark.likeness(16) for mark in marks_of(text)] == ["<-*16", "n*8", ">-*16", "f"]
    assert [mark.likeness(4) for mark in marks_of(text)] == ["<-*4", "n*4", ">-*4", "f"]
    assert marked_float(float("inf"), torch.float32) is None and marked_float(True, torch.float32) is None


def test_marks_of_divisions() -> None:
    """By what is no power of two; another way of dividing needs the quotient's name."""
    text = f"i0 = {marked_quotient('x', 24)}; i1 = {marked_remainder('x', 24, 'i0')}"
    assert plain(text) == "i0 = (x // (24)); i1 = (x % (24))"
    assert replaced(text, lambda mark: mark.named("n", 8)) == "i0 = _over(x, n, 8); i1 = (x - i0 * n)"
    assert [mark.likeness(16) for mark in marks_of(text)] == ["/x*8", "%x i0"]
    assert marked_quotient("x", 32) == "(x // (32))" and marked_remainder("x", 32, "q") == "(x % (32))"


def test_products_divide() -> None:
    """At the ends of the numbers that are divided, at multiples and next to them, and at drawn ones."""
    seed, end = random.randrange(2**32), 2**31
    draw = random.Random(seed)
    for _ in range(2000):
        divisor = draw.randrange(3, 1 << draw.randrange(2, 32))
        if divisor & (divisor - 1) == 0:
            continue
        factor, shift = reciprocal(divisor) & 0xFFFFFFFF, reciprocal(divisor) >> 32
        assert reciprocal(divisor) < 2**63 and shift < 32
        times = draw.randrange(end // divisor + 1)
        for number in (0, end - 1, draw.randrange(end), times * divisor, times * divisor - 1, end // divisor * divisor):
            if 0 <= number < end:
                assert number * factor >> 32 >> shift == number // divisor, (seed, number, divisor)


@pytest.mark.parametrize(
    ("use", "text", "alone"),
    [("n", "1", True), ("n", "0", True), ("n", str(2**31), True), ("n", "7", False), ("f", "0.5", True),
     ("f", "-0.0", True), ("f", "1e+300", True), ("d", "1e+300", False), ("f", "0.1", False)],
)  # fmt: skip
def test_what_the_compiler_makes_something_of_is_a_constant(use: str, text: str, alone: bool) -> None:
    assert (text in Mark(use, text).likeness(16)) is alone  # type: ignore[arg-type]


def test_floats_travel_by_their_bits() -> None:
    assert number_of(0x3F800000, "fp32") == 1.0
    assert number_of(0x3FF0000000000000, "fp64") == 1.0
    assert number_of(17, "i32") == 17
