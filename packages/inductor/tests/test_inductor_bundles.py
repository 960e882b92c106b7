"""Kernels that share a launch: what has to run after another one still does, in random sequences of kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from triton_kernel_set import Builder

from torchinductor import indexing
from torchinductor.codegen.triton.compiler import TritonCompiler
from torchinductor.codegen.triton.plan import planned
from torchinductor.errors import InductorError
from torchinductor.ir import Bundle, Kernel, Recorder, verify_kernels
from torchinductor.lowering.context import ViewRef
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import buffers_of
from torchinductor.scheduling.bundles import bundle
from torchinductor.scheduling.groups import writes_of
from torchinductor.scheduling.memory import LiveBytes

pytest.importorskip("triton")

from torchinductor.codegen.triton.bundles import key_of, write_bundle  # noqa: E402

F32 = torch.float32


SIZES = (300, 2000)


def sequence(seed: int, count: int = 40, sizes: Sequence[int] = SIZES) -> list[Kernel]:
    """Kernels that each write a buffer of a few sizes, from earlier ones of the same size; some write a buffer again."""
    draw = random.Random(seed)
    b = Builder()
    pools: dict[int, list[str]] = {}
    for size in sizes:
        pools[size] = [f"in{size}_{k}" for k in range(4)]
        for name in pools[size]:
            b.buffer(name, F32, size)
    for number in range(count):
        size = draw.choice(sizes)
        names = draw.sample(pools[size], draw.randint(1, 2))
        again = [n for n in pools[size] if not n.startswith("in") and n not in names]
        target = draw.choice(again) if again and draw.random() < 0.2 else f"made{number}"
        if target not in b.buffers:
            b.buffer(target, F32, size)
            pools[size].append(target)

        def body(r: Recorder, names: list[str] = names, target: str = target) -> None:
            values = [b.load(r, n, "i0") for n in names]
            b.store(r, target, r.apply("neg", values[0]) if len(values) == 1 else r.apply("add", *values), "i0")

        b.kernel({"i0": (size, False)}, ("outer", body))
    return [planned(kernel) for kernel in b.kernels]


def graph_of(kernels: Sequence[Kernel], results: Sequence[str] = ()) -> Lowered:
    """A graph of these kernels alone, that returns some buffers."""
    outputs = tuple(ViewRef(name, (), (), indexing.number(0)) for name in results)
    return Lowered((), outputs, {}, tuple(kernels), {}, (), {}, (), {})


@pytest.mark.parametrize("seed", range(12))
def test_what_must_wait_still_waits(seed: int) -> None:
    kernels = sequence(seed)
    found = bundle(graph_of(kernels), kernels, key_of)
    verify_kernels(found)
    place = {
        part.name: position
        for position, made in enumerate(found)
        for part in (made.parts if isinstance(made, Bundle) else (made,))  # type: ignore[union-attr]
    }
    assert len(place) == len(kernels) and len(found) < len(kernels)
    for first, second in combinations(kernels, 2):
        if set(writes_of(first)) & set(buffers_of(second)) or set(writes_of(second)) & set(buffers_of(first)):
            assert place[first.name] < place[second.name]


def test_no_more_memory_is_held_at_once() -> None:
    seed = random.randrange(2**32)
    bundles = 0
    for number in range(seed, seed + 40):
        kernels = sequence(number, sizes=(300, 300_000, 1_000_000))
        graph = graph_of(kernels, [kernel.writes[0] for kernel in random.Random(number).sample(kernels, 5)])
        found = bundle(graph, kernels, key_of)
        verify_kernels(found)
        live = LiveBytes(graph, kernels)
        for given in (False, True):
            before, behind = (max(live.during(order, given)) for order in (kernels, found))
            assert behind <= before + 2**20, f"seed {number}, given {given}: {before} -> {behind} bytes"
        bundles += sum(isinstance(made, Bundle) for made in found)
    assert bundles > 40, f"seed {seed}"


def test_a_bundle_of_kernels_that_wait_for_each_other_is_refused() -> None:
    kernels = sequence(0)
    first, second = next((a, b) for a, b in combinations(kernels, 2) if set(writes_of(a)) & set(b.reads))
    with pytest.raises(InductorError, match="has to wait for"):
        verify_kernels([Bundle((first, second))])


def test_equal_kernels_of_a_bundle_are_one_function(tmp_path: object) -> None:
    kernels = sequence(3)
    made = next(op for op in bundle(graph_of(kernels), kernels, key_of) if isinstance(op, Bundle))
    source = write_bundle(made)
    functions = source.text.count("\ndef part")
    assert functions < len(made.parts) or len(made.parts) < 4
    called = [
        line for line in source.text.splitlines() if line.startswith("        part") and "(" in line.split(" ")[8]
    ]
    assert len(called) == functions  # a call is compiled where it stands
    assert source.buffers == made.arguments and len(source.signature) == len(made.arguments)
    compiler = TritonCompiler(90, tmp_path, workers=1)  # type: ignore[arg-type]
    (binary,) = compiler.compile([source])
    assert binary.code[:4] == b"\x7fELF"
    compiler.close()
