"""Every Python of the supported versions that is installed here, for what depends on the interpreter and not on torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchdynamo.stats import TOTAL

sys.path.insert(0, str(Path(__file__).parent))  # modules that tests share

VERSIONS = ("3.11", "3.12", "3.13")
# Where version managers keep interpreters, below a home folder or their own root: one folder for each version.
_MANAGED = (
    ("PYENV_ROOT", "versions"),
    ("HOME", ".pyenv/versions"),
    ("ASDF_DATA_DIR", "installs/python"),
    ("HOME", ".asdf/installs/python"),
    ("UV_PYTHON_INSTALL_DIR", "."),
    ("HOME", ".local/share/uv/python"),
    ("RUNNER_TOOL_CACHE", "Python"),
)


def _candidates(version: str) -> Iterator[str]:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield sys.executable
    found = shutil.which(f"python{version}")
    if found is not None:
        yield found
    for variable, folder in _MANAGED:
        root = os.environ.get(variable)
        if root:
            for depth in ("*", "*/*"):
                yield from map(str, sorted(Path(root, folder).glob(f"{depth}/bin/python{version}")))


def _works(python: str, version: str) -> bool:
    """Whether it starts and is of that version: a manager's shim may stand for a Python that is not chosen."""
    query = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", query], capture_output=True, text=True, timeout=60)
    return done.returncode == 0 and done.stdout.strip() == version


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    """Every test starts with an empty ledger; what was compiled for other tests stays."""
    TOTAL.clear()


@pytest.fixture(scope="session", params=VERSIONS)
def installed_python(request: pytest.FixtureRequest) -> str:
    """The path of a working interpreter of each supported version; the test is skipped where there is none."""
    for python in _candidates(request.param):
        if _works(python, request.param):
            return python
    pytest.skip(f"Python {request.param} is not installed")
