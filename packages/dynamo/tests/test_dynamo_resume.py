"""Resume functions: their code, what they refuse, and the programs of `resume_programs.py` on every interpreter here."""

from __future__ import annotations

import dis
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torchdynamo.after_break.resume import Entrance, make_resume

HERE = Path(__file__).parent


def test_break_at_every_instruction(installed_python: str) -> None:
    script = str(HERE / "resume_programs.py")
    done = subprocess.run([installed_python, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 500


def loops(n: int) -> int:
    return sum(range(n))


def test_names_and_refusals() -> None:
    resumed = make_resume(loops, Entrance(0, (), ("n",)))
    assert (resumed.__name__, resumed.__code__.co_name, resumed.__code__.co_filename) == ("loops", "loops", __file__)

    def generator() -> Any:
        yield 1

    with pytest.raises(ValueError, match="suspends"):
        make_resume(generator, Entrance(0))
    with pytest.raises(ValueError, match="starts at byte"):
        make_resume(loops, Entrance(1))
    with pytest.raises(ValueError, match="not a variable"):
        make_resume(loops, Entrance(0, (), ("absent",)))


def test_long_code_needs_extended_arguments() -> None:
    names = [f"v{i}" for i in range(300)]
    source = "def f(a):\n" + "".join(f"    {n} = a + {i}\n" for i, n in enumerate(names))
    source += f"    return sum([{', '.join(names)}])\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    function = scope["f"]
    total = next(i.offset for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL")
    resumed = make_resume(function, Entrance(total, (), tuple(names)))
    assert resumed(list(range(300))) == sum(range(300))
