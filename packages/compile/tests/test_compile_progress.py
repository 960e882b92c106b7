"""The live line: what it says, that it is gone afterwards, and that nothing about it can reach the program."""

from __future__ import annotations

import io
import re
import sys
import threading
from typing import Any

import pytest
import torch

import torchcompile
from torchcompile import progress
from torchcompile.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the terminal is gone")


def compiled(options: dict[str, Any]) -> torch.Tensor:
    x = torch.ones(3, 5, requires_grad=True)
    torchcompile.compile(lambda x: x.softmax(-1).sum(), options={"cache": None, **options})(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("at_once")
def test_a_terminal_shows_one_line_and_has_none_of_it_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    torchcompile.reset()
    compiled({})
    written = terminal.getvalue()
    for told in (
        "graph_0: tracing",
        r"graph_0 forward: kernels 0/\d",
        r"graph_0 forward: building \d kernels",
        "backward",
    ):
        assert re.search(told, written), (told, written)
    assert "\n" not in written and written.endswith("\r\x1b[2K")


@pytest.mark.parametrize(("wanted", "lines"), [(None, 0), (False, 0), (True, 2)])
def test_where_there_is_no_terminal(wanted: bool | None, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    compiled({"progress": wanted})
    written = file.getvalue().splitlines()
    assert len([line for line in written if line.startswith("torchcompile: graph_")]) == lines == len(written)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("stream", [Broken(), None], ids=["broken", "none"])
def test_a_stream_that_fails_is_left_alone(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compiled({"progress": False})
    monkeypatch.setattr(sys, "stderr", stream)
    assert torch.equal(compiled({"progress": True}), expected)


@pytest.mark.usefixtures("at_once")
def test_nobody_waits_for_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    line = Progress(True)
    with line.working("a graph") as watch:
        watch("lower", 0, 0)
        with Progress._lock:
            other = threading.Thread(target=watch, args=("build", 0, 3))
            other.start()
            other.join(timeout=30)
            assert not other.is_alive()
    assert "lowering" in terminal.getvalue() and "building" not in terminal.getvalue()


def test_the_line_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    line = Progress(None)
    with pytest.raises(ZeroDivisionError), line.working("a graph") as watch:
        watch("lower", 0, 0)
        raise ZeroDivisionError
    assert "a graph: lowering" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[2K")
