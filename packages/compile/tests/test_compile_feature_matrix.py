"""The language's parts in every setting on every back end: some cells of `make matrix`, drawn anew each time."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import feature_matrix_run
import pytest
import torch
from feature_matrix import BACKENDS, SETTINGS, check
from reach_programs import PARTS

SECONDS = 7.0  # for cells to be begun


@pytest.mark.expected_eager(...)
def test_some_cells() -> None:
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    until, wrong = time.monotonic() + SECONDS, []
    while time.monotonic() < until:
        part, setting = draw.choice(list(PARTS)), draw.choice(list(SETTINGS))
        (backend,) = draw.choices(list(BACKENDS), (1, 4, 1))
        found = check(PARTS[part], SETTINGS[setting], backend)
        if found:
            cell = {"part": part, "setting": setting, "backend": backend}
            wrong.append("\n    ".join([feature_matrix_run.command(cell), *found]))
    assert not wrong, "\n".join([f"seed {seed}", *wrong])


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("setting", ["forward", "gradient", "in another thread"])
def test_a_wrong_value_is_seen(setting: str) -> None:
    """A program whose compiled calls are a little off."""
    part = replace(PARTS["map"], make=lambda: lambda x: x.sin() * (1 + 1e-6 * torch.compiler.is_compiling()))
    assert any("differs by" in text for text in check(part, SETTINGS[setting], "eager"))


@pytest.mark.expected_eager("print")
def test_a_break_that_nobody_put_there_is_seen() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x.sin()

    part = replace(PARTS["map"], make=lambda: program)
    assert any("[print]" in text for text in check(part, SETTINGS["forward"], "eager"))
    assert not check(part, SETTINGS["behind a break"], "eager")
