"""`torchcompile.profile`: a row for each kernel and call, with time, bytes and the user's lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import torchcompile
from torchcompile import profiling
from torchcompile.profiling import Time, times_of


def measured(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).softmax(-1).sum()


@pytest.fixture(scope="module")
def found() -> tuple[torchcompile.Profile, torchcompile.Report]:
    """What was measured, and the report after it."""
    before = profiling._COPIED
    profiling._COPIED = 1 << 22  # what is measured is not what is tested
    torchcompile.reset()
    compiled = torchcompile.compile(measured, options={"cache": None})
    x, w = torch.ones(32, 64, requires_grad=True), torch.ones(64, 64)
    try:
        profile = torchcompile.profile(lambda x: compiled(x, w).backward(), x, runs=3)
        return profile, torchcompile.report()
    finally:
        profiling._COPIED = before
        profiling.copy_bandwidth.cache_clear()


def test_every_part_is_measured(found: tuple[torchcompile.Profile, torchcompile.Report]) -> None:
    profile, report = found
    labels = {graph.label(part) for graph in report.graphs for part in graph.parts}
    assert {row.label for row in profile.rows} == labels == set(report.seconds)
    for row in profile.rows:
        assert row.runs == 1 and row.seconds is not None and row.seconds > 0
        assert row.share is not None and row.share == pytest.approx(row.part.moved / profile.bandwidth / row.seconds)
    times = [row.seconds or 0.0 for row in profile.rows]
    assert times == sorted(times, reverse=True)
    assert profile.bandwidth == report.bandwidth and profile.other >= 0


def test_it_prints_and_is_a_page(found: tuple[torchcompile.Profile, torchcompile.Report], tmp_path: Path) -> None:
    profile, report = found
    text = str(profile)
    page = profile.html(tmp_path / "profile.html")
    assert (tmp_path / "profile.html").read_text() == page
    for row in profile.rows:
        assert row.label in page and row.label in "".join(text.split())
        assert row.part.function in page and row.part.function in text and row.part.function in report.html()
        assert bool(row.part.function) == row.part.generated
    assert "test_compile_profile.py" in text and "a second (" in " ".join(text.split())
    html5lib = pytest.importorskip("html5lib", reason="html5lib checks the page's structure")
    html5lib.HTMLParser(strict=True).parse(page)
    assert "/s</td>" in report.html()


def test_runs_are_counted_from_one() -> None:
    with pytest.raises(torchcompile.InvalidArgument, match="at least 1"):
        torchcompile.profile(lambda: None, runs=0)


def on_cpu(name: str, start: float, end: float, *children: FunctionEvent) -> FunctionEvent:
    """A range, or a call of the driver, as torch makes it of Kineto's."""
    event = FunctionEvent(0, name, 1, start, end, use_device="cuda", device_type=DeviceType.CPU)
    for child in children:
        event.append_cpu_child(child)
    return event


def on_gpu(
    name: str, start: float, end: float, launched_by: FunctionEvent | None = None, span: bool = False
) -> FunctionEvent:
    """A kernel, or the span of a range's kernels: torch gives either to the range that it is correlated with."""
    event = FunctionEvent(
        0, name, 7, start, end, use_device="cuda", device_type=DeviceType.CUDA, is_user_annotation=span
    )
    if launched_by is not None:
        launched_by.append_kernel(name, 0, end - start)
    return event


def flattened(event: FunctionEvent) -> list[FunctionEvent]:
    return [event, *(each for child in event.cpu_children for each in flattened(child))]


FUNCTIONS = {"g.exp_0": "exp_flat_1", "g.mm_1": "", "g.exp_2": "exp_flat_1", "g.sum_3": "sum_reduction_2", "g.x_4": ""}


def check(found: dict[str, Time], wanted: dict[str, tuple[float, float, bool]]) -> None:
    assert found.keys() == wanted.keys()
    for label, (microseconds, runs, on_device) in wanted.items():
        assert found[label].seconds == pytest.approx(microseconds / 1e6), label
        assert (found[label].runs, found[label].on_device) == (runs, on_device)


def test_a_gpu_s_time_is_that_of_the_kernels_once() -> None:
    events: list[FunctionEvent] = []
    for run in (0, 100):
        exp = on_cpu("g.exp_0", run, run + 9, on_cpu("cuLaunchKernel", run + 2, run + 8))
        mm = on_cpu("aten::mm", run + 11, run + 18, on_cpu("cudaLaunchKernel", run + 12, run + 13))
        product = on_cpu("g.mm_1", run + 10, run + 19, mm)
        last = on_cpu("g.exp_2", run + 20, run + 29)
        for event in (exp, product, last):
            events += flattened(event)
        events.append(on_gpu("exp_flat_1", run + 30, run + 33, exp))
        events.append(on_gpu("g.exp_0", run + 30, run + 33, exp, span=True))
        events.append(on_gpu("cublas_main", run + 33, run + 40, mm))
        events.append(on_gpu("cublas_reduce", run + 40, run + 41, mm))
        events.append(on_gpu("g.mm_1", run + 33, run + 41, product, span=True))
        events.append(on_gpu("exp_flat_1", run + 41, run + 46, last))
        events.append(on_gpu("exp_flat_1", run + 50, run + 51, on_cpu("another program", run, run + 60)))
    events.append(on_cpu("g.x_4", 60, 64))
    wanted = {"g.exp_0": (6, 2, True), "g.mm_1": (16, 2, True), "g.exp_2": (10, 2, True), "g.x_4": (4, 1, False)}
    check(times_of(events, FUNCTIONS), wanted)


def replays() -> Sequence[FunctionEvent]:
    """Two replays of a CUDA graph that holds all parts: its kernels are correlated with its launch."""
    events = []
    for run in (0, 100):
        launch = on_cpu("cudaGraphLaunch", run, run + 5)
        kernels = ("exp_flat_1", 3), ("cublas_main", 7), ("exp_flat_1", 5), ("sum_reduction_2", 2)
        events += [launch, *(on_gpu(name, run + 10, run + 10 + took, launch) for name, took in kernels)]
    return events


def test_what_a_cuda_graph_replays_is_known_by_its_name() -> None:
    exp = (8, 2, True)  # the mean of the two that launch it
    check(times_of(replays(), FUNCTIONS), {"g.exp_0": exp, "g.exp_2": exp, "g.sum_3": (4, 2, True)})


def test_ranges_within_ranges_take_each_kernel_once() -> None:
    """A range around a program that has ranges of its own; another program replays the same function."""
    inner = on_cpu("g.exp_0", 1, 9)
    events = [*flattened(on_cpu("g.x_4", 0, 10, inner)), on_gpu("exp_flat_1", 10, 14, inner), *replays()]
    found = times_of(events, FUNCTIONS)
    assert (found["g.exp_0"].seconds, found["g.x_4"].seconds) == pytest.approx((4e-6, 4e-6))
    check({"g.exp_2": found["g.exp_2"]}, {"g.exp_2": (16, 4, True)})


def test_no_event_is_no_row() -> None:
    assert times_of((), FUNCTIONS) == {}
