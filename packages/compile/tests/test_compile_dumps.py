"""What is dumped is the same in each process, in whatever order its sets go: nothing is generated in their order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def _dumped(seed: int, tmp_path: Path) -> dict[str, str]:
    """The files that a process writes whose texts have hashes of this seed."""
    folder = tmp_path / str(seed)
    settings = {"PYTHONHASHSEED": str(seed), "TORCHCOMPILE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(HERE / "dumped_programs.py"), str(folder)],
        env={**os.environ, **settings}, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_dump_does_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    one, other = _dumped(0, tmp_path), _dumped(1, tmp_path)
    assert len(one) > 50 and one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
