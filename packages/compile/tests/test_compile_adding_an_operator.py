"""docs/adding_an_operator.md, followed: each of its steps is undone in a copy of the sources, and done again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```python (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS: list[tuple[str, str]] = BLOCK.findall((ROOT / "docs" / "adding_an_operator.md").read_text())

LOWERED = """
import torch
from primtorch import lower, trace, verify
graph = lower(trace(torch.{name}, *{arguments}))
verify(graph)
left = [str(n.target) for n in graph.graph.nodes if str(n.target).startswith("aten")]
out = graph(*{arguments})
out = out[0] if isinstance(out, (tuple, list)) else out
assert torch.equal(out, torch.{name}(*{arguments}))
print("left whole:", *left)
"""
DIAG_EMBED = LOWERED.format(name="diag_embed", arguments="(torch.arange(6.0).reshape(2, 3),)")
COPYSIGN = LOWERED.format(name="copysign", arguments="(torch.ones(3), torch.tensor([1.0, -1.0, -0.0]))")
REFUSED = """
import torch
from primtorch.fake import FakeMode
try:
    torch.diag_embed(FakeMode().from_tensor(torch.ones(3)), 0, 1, 1)
except Exception as error:
    print(type(error).__name__, error)
"""
FORMULA = """
import torch
from primtorch.families import operator_named
record = operator_named("diag_embed")
print([part for part in ("formula", "refusal", "rule") if getattr(record, part) is None])
"""
SAMPLED = """
from primtorch.families import operator_named
print(len(operator_named("diag_embed").samples))
"""
LOADED = "import torchinductor, torchinductor.codegen.cpp.expressions, torchinductor.codegen.triton.expressions"

# What each step of the page gives: a program, and what it says without the step and with it.
TOLD: tuple[tuple[str, str, str], ...] = (
    (FORMULA, r"\['formula'\]", r"\[\]"),
    (REFUSED, r"\A(?!.*cannot be identical)", "RuntimeError diagonal dimensions cannot be identical"),
    (DIAG_EMBED, r"left whole: aten.diag_embed.default", r"left whole:\s*\Z"),
    (SAMPLED, r"1", r"2"),
    (COPYSIGN, r"left whole: aten.copysign.Tensor", r"left whole:\s*\Z"),
    (LOADED, r"the C\+\+ back end has no text for copysign", r"\A\Z"),
    (LOADED, r"the Triton back end has no text for copysign", r"\A\Z"),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources of the packages that the page speaks of."""
    place = tmp_path_factory.mktemp("sources")
    for package in ("primtorch", "inductor"):
        source = Path("packages") / package / "src"
        shutil.copytree(ROOT / source, place / source, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def told(sources: Path, program: str) -> str:
    """What a program says, on either stream, with these sources."""
    paths = [str(sources / "packages" / package / "src") for package in ("primtorch", "inductor")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_page_has_the_steps() -> None:
    assert len(STEPS) == len(TOLD)
    assert len({path for path, _ in STEPS[:4]}) == 1 and len({path for path, _ in STEPS[4:]}) == 3


@pytest.mark.parametrize("step", range(len(TOLD)))
def test_a_step_does_what_the_page_says(step: int, copy: Path) -> None:
    path, block = STEPS[step]
    program, without, with_it = TOLD[step]
    file = copy / path
    whole = file.read_text()
    assert whole.count(block) == 1, f"the page's block is not in {path} as it stands there:\n{block}"
    file.write_text(whole.replace(block, ""))
    try:
        said = told(copy, program)
        assert re.search(without, said, re.DOTALL), said
    finally:
        file.write_text(whole)
    said = told(copy, program)
    assert re.search(with_it, said, re.DOTALL), said
