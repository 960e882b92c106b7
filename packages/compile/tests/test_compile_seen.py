"""What is known of compiled code: parts with the user's lines and bytes, when each stage ran, rows in a profiler."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import torchcompile
from torchcompile import api
from torchcompile.journal import CompiledGraphRecord


def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x @ w
    gate = torch.sigmoid(hidden)
    return torch.softmax(hidden * gate, -1).sum()


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(gated)
    return first + next(number for number, line in enumerate(lines) if text in line)


def step(compiled: object) -> None:
    x, w = torch.ones(8, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True)
    compiled(x, w).backward()  # type: ignore[operator]


@pytest.fixture
def records(tmp_path: Path) -> list[CompiledGraphRecord]:
    torchcompile.reset()
    step(torchcompile.compile(gated, options={"cache": str(tmp_path)}))
    return list(torchcompile.report().graphs)


def test_parts_have_lines_and_bytes(records: list[CompiledGraphRecord]) -> None:
    assert [record.kind for record in records] == ["forward", "backward"]
    (product, *kernels) = records[0].parts
    assert not product.generated and all(kernel.generated for kernel in kernels)
    assert [frame.line for frame in product.frames] == [line_of("x @ w")]
    assert (product.read, product.written) == (4 * (8 * 16 + 16 * 16), 4 * 8 * 16)
    lines = {frame.line for kernel in kernels for frame in kernel.frames}
    assert lines == {line_of("sigmoid"), line_of("softmax")}
    for record in records:
        assert record.memory.peak >= record.memory.results > 0
        assert len({part.name for part in record.parts}) == len(record.parts)
        assert all(part.generated != part.name.startswith("mm") for part in record.parts)
        assert not any(part.generated and "mm" in part.name.split("_") for part in record.parts)


@pytest.mark.usefixtures("records")
def test_stages_follow_each_other() -> None:
    spans = api._journal.spans
    assert [span.stage for span in spans[:4]] == ["capture", "trace", "partition", "lower"]
    assert all(span.began <= span.ended for span in spans)
    assert all(one.ended <= other.began + 1e-9 for one, other in zip(spans, spans[1:]))


def test_symbolic_sizes_are_those_of_the_example() -> None:
    torchcompile.reset()
    torchcompile.compile(lambda x: x.sin() + 1, dynamic=True)(torch.ones(6, 5))
    (record,) = torchcompile.report().graphs
    (part,) = record.parts
    assert (part.read, part.written, record.memory.results) == (120, 120, 120)


def test_a_warm_process_tells_of_the_lines_where_they_are_now(tmp_path: Path) -> None:
    """The second program is the first one a few lines further down, in another file."""
    source = inspect.getsource(gated)
    found = []
    for number, text in enumerate((source, f"\n\n\n{source}")):
        file = tmp_path / f"program_{number}.py"
        namespace = {"torch": torch}
        exec(compile(text, str(file), "exec"), namespace)
        torchcompile.reset()
        step(
            torchcompile.compile(namespace["gated"], options={"cache": str(tmp_path / "cache"), "check_kernels": False})
        )
        parts = [part for record in torchcompile.report().graphs for part in record.parts]
        found.append([[(frame.file, frame.line) for frame in part.frames] for part in parts])
        stages = {span.stage for span in api._journal.spans}
        assert ("trace" in stages) == (number == 0)
    moved = [[(str(tmp_path / "program_1.py"), line + 3) for _, line in frames] for frames in found[0]]
    assert moved == found[1] and any(moved)


def test_a_profiler_has_a_row_for_each_part(records: list[CompiledGraphRecord]) -> None:
    compiled = torchcompile.compile(gated)
    torchcompile.reset()
    step(compiled)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:  # torch.profiler's rows, and ready at once
        step(compiled)
    rows = {event.key: event.count for event in profile.key_averages()}
    for record in torchcompile.report().graphs:
        for part in record.parts:
            assert rows[record.label(part)] == 1
            assert re.fullmatch(rf"graph_0\.{record.kind}\.\w+_\d+", record.label(part))
