"""`torchcompile.profile`: a row for each kernel and call, with time, bytes and the user's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchcompile
from torchcompile import profiling


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
    assert "test_compile_profile.py" in text and "a second (" in " ".join(text.split())
    html5lib = pytest.importorskip("html5lib", reason="html5lib checks the page's structure")
    html5lib.HTMLParser(strict=True).parse(page)
    assert "/s</td>" in report.html()


def test_runs_are_counted_from_one() -> None:
    with pytest.raises(torchcompile.InvalidArgument, match="at least 1"):
        torchcompile.profile(lambda: None, runs=0)
