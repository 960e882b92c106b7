"""What is done while kernels are being built, and before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchinductor.compile as driver
from primtorch.lower import lower
from primtorch.trace import trace
from torchinductor import InductorOptions, begin_graph


def graph(x: torch.Tensor) -> Any:
    return lower(trace(lambda a: (a.exp().sum(1), a + 1), x))


def test_builders_wait_for_neither_the_check_nor_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("verify_kernels", "emit"):
        own = getattr(driver, name)
        monkeypatch.setattr(driver, name, lambda *args, own=own, name=name: (done.append(name), own(*args))[1])
    x = torch.randn(8, 16)
    begun = begin_graph(graph(x), (x,), InductorOptions(cache_dir=str(tmp_path)))
    assert done == []
    compiled = begun()
    assert done == ["verify_kernels", "emit"]
    for found, wanted in zip(compiled(x), (x.exp().sum(1), x + 1), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_kernel_that_is_not_sound_is_told_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsound(Exception):
        pass

    def refuse(operations: object) -> None:
        raise Unsound

    monkeypatch.setattr(driver, "verify_kernels", refuse)
    x = torch.randn(8, 16)
    begun = begin_graph(graph(x), (x,), InductorOptions(cache_dir=str(tmp_path)))
    with pytest.raises(Unsound):
        begun()

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(driver, "_generate", fail)  # of what is not sound there may be no text
    with pytest.raises(Unsound):
        begin_graph(graph(x), (x,), InductorOptions(cache_dir=str(tmp_path)))
