"""Programs that are run as if by several processes over one cache folder: modules of text, imported anew for each."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torchcompile
import torchdynamo

NAME = "kept_world"


@pytest.fixture(name="folder", autouse=True)
def kept_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a test's own for modules and a cache, in which frames are kept; for files that import this."""
    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHCOMPILE_KEEP_FRAMES", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in (NAME, "kept_helper"):
        sys.modules.pop(name, None)


def imported(folder: Path, text: str, name: str = NAME) -> types.ModuleType:
    """A module of this text."""
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


Change = Callable[[Any], object]


def run(
    folder: Path, text: str, change: Change = lambda world: None, told: Container[str] = (), **settings: Any
) -> int:
    """How many frames a process finds that runs the program. Held to eager.

    Args:
        text: of a module with `make()`, which gives a callable and its arguments, the same each time.
        change: what the process does to the module before.
        told: what the ledger is told of, breaks among it.
    """
    world = imported(folder, text)
    change(world)
    torchcompile.reset()
    written, args = world.make()
    expected = (outcome(written, args), noted(world))
    world = imported(folder, text)
    change(world)
    program, args = world.make()
    compiled = torchcompile.compile(program, **settings)
    found = (outcome(compiled, args), noted(world))
    _assert_same(found, expected)
    surprises = [event for event in torchdynamo.stats().surprises if event.kind.id not in told]
    assert not surprises, "\n".join(map(str, surprises))
    return torchdynamo.stats().found


def _assert_same(found: tuple[object, Sequence[object]], expected: tuple[object, Sequence[object]]) -> None:
    """What a call gives is close, and so is what it noted; texts are equal."""
    torch.testing.assert_close(found[0], expected[0])
    texts, numbers = (
        [[note for note in notes if isinstance(note, str) is kind] for notes in (found[1], expected[1])]
        for kind in (True, False)
    )
    assert texts[0] == texts[1]
    torch.testing.assert_close(*numbers)


def outcome(program: Any, args: Any) -> object:
    """What a call gives, with gradients where there are some."""
    result = program(*args)
    leaves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    if isinstance(result, torch.Tensor) and result.requires_grad:
        holder = getattr(program, "parameters", None)
        leaves += [leaf for leaf in holder() if leaf.requires_grad] if holder is not None else []
        return result.detach(), torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)
    return result


def noted(world: Any) -> list[object]:
    """What the program wrote down."""
    return list(getattr(world, "NOTES", ()))
