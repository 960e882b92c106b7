"""Programs whose sizes and numbers vary, over one cache folder: frames with symbols are found where all is the same.

See `kept_programs`: a run stands for a process.
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_programs import imported, outcome
from kept_programs import kept_folder as kept_folder

import torchcompile
import torchdynamo

pytestmark = pytest.mark.expected_eager("recompiled", "disabled")


HEAD = """
import torch, torchcompile
from torch import nn

@torchcompile.disable
def apart(x):
    return x * 3

"""

# Bodies of `program(x, y, n)`: x has n rows of 4, y n + 3; n is an int.
BODIES = {
    "rows": "    return torch.cat([x.sin(), y.cos()]) / x.shape[0]",
    "two sizes that are related": "    return x + y[:-3] if y.shape[0] == x.shape[0] + 3 else x",
    "a condition on a size": "    return x.sin() if x.shape[0] > 5 else x.cos() * 2",
    "halves": "    half = x.shape[0] // 2\n    return x[:half] * 2 - x[half : 2 * half].exp()",
    "a remainder": "    return x.sum() * (x.shape[0] % 3) + (x.reshape(-1, 2, 4) if x.shape[0] % 2 == 0 else x).sin().sum()",
    "an int": "    return x * n + y.square().sum() ** (1 / n)",
    "a float of an int": "    return x * (0.9 ** n) + max(n, 5) / min(n, 7)",
    "a step in the graph": "    return torch.arange(n, dtype=x.dtype)[:, None] * x",
    "a number of data": "    return x * y.detach().sum().item()",
    "behind a break": "    z = apart(x.sin())\n    return torch.cat([z, y]).cos() * z.shape[0]",
    "in front of a break": "    z = x.reshape(2, -1).sum(1) if x.shape[0] % 2 == 0 else x.sum(0)\n    return apart(z).cos() + n",
    "a text": "    return x * len('a' * n) + {'4': 1.0, '6': 2.0}.get(str(n), 3.0)",
    "an attention mask": (
        "    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()\n"
        "    return torch.softmax((x @ x.T).masked_fill(~mask, float('-inf')), -1) @ x"
    ),
}  # fmt: skip


def text_of(body: str) -> str:
    return f"{HEAD}def program(x, y, n):\n{body}\n"


def call(
    folder: Path, text: str, sizes: Sequence[int], mark: Callable[[Any], object], n: int | None = None, **settings: Any
) -> list[int]:
    """Frames that a process finds, and graphs that it has, which calls the program with these sizes. Held to eager."""
    world = imported(folder, text)
    torchcompile.reset()
    compiled = torchcompile.compile(world.program, **settings)
    for size in sizes:
        x, y = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for rows in (size, size + 3))
        mark(x)
        mark(y)
        given = (x, y, size if n is None else n)
        torch.testing.assert_close(outcome(compiled, given), outcome(world.program, given))
    return [torchdynamo.stats().found, torchdynamo.stats().graphs]


def _refused(*args: object) -> None:
    raise AssertionError("a call is captured")


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("what", BODIES)
def test_a_second_process_captures_nothing(
    what: str, dynamic: bool | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, sizes = text_of(BODIES[what]), (4, 6, 9)
    found, graphs = call(folder, text, sizes, id, dynamic=dynamic)
    assert found == 0
    monkeypatch.setattr(torchdynamo.convert, "interpret", _refused)
    found, again = call(folder, text, sizes, id, dynamic=dynamic)
    assert found >= again == graphs


@pytest.mark.parametrize("what", BODIES)
def test_other_sizes(what: str, folder: Path) -> None:
    """Sizes that no process has met: relations are asked of them as of any."""
    seed = secrets.randbits(32)
    print("seed", seed, file=sys.stderr)
    drawn = random.Random(seed)
    for _ in range(4):
        call(folder, text_of(BODIES[what]), [drawn.randint(2, 12) for _ in range(4)], id)


def test_one_frame_is_for_all_sizes(folder: Path) -> None:
    text = text_of(BODIES["rows"])
    call(folder, text, (4, 6), id)
    assert call(folder, text, (4, 7, 11), id) == [2, 2]
    call(folder, text, (5,), id, n=1, dynamic=True)
    assert call(folder, text, (8, 3), id, n=1, dynamic=True) == [1, 1]


def test_marks(folder: Path) -> None:
    def promised(x: torch.Tensor) -> None:
        torchcompile.mark_dynamic(x, 0, min=2, max=64)

    text = text_of("    return x.sin().sum(0) * x.shape[0]")
    assert call(folder, text, (4, 6), promised, n=1) == [0, 1]
    assert call(folder, text, (9, 5), promised, n=1) == [1, 1]
    assert call(folder, text, (4,), lambda x: torchcompile.mark_dynamic(x, 0)) == [0, 1], "nothing is promised"
    assert call(folder, text, (4,), lambda x: torchcompile.mark_static(x, 0)) == [0, 1]
    assert call(folder, text, (4,), id) == [0, 1], "not marked"


def test_a_promise_is_kept_to(folder: Path) -> None:
    """What the back end asks of a size is refused as where the frame was captured."""
    text = text_of("    return x.reshape(-1, 2, 4)")
    for _ in range(2):
        with pytest.raises(torchdynamo.SizeNotDynamic):
            call(folder, text, (4,), lambda x: torchcompile.mark_dynamic(x, 0, min=2, max=64))
