"""Each distribution on its own: its wheel, in an environment with only what it declares, runs its README's example."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("primtorch", "aotautograd", "dynamo", "inductor", "distributed", "compile")
IMPORTS = {
    "dynamo": "torchdynamo",
    "inductor": "torchinductor",
    "distributed": "torchdistributed",
    "compile": "torchcompile",
}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, cwd=cwd, timeout=900, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def readme_examples(path: Path) -> list[str]:
    """The ```python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S)


@pytest.fixture(scope="module")
def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    assert found, "uv is in requirements-dev.txt: run `make setup`"
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Wheels of all six, built from copies so that the working tree stays as it is."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = tmp_path_factory.mktemp("sources")
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "tests", "dist")
        shutil.copytree(ROOT / "packages" / name, sources / name, ignore=ignore)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder)
    run(*pip, *(sources / name for name in FOLDERS))
    assert len(list(folder.glob("*-py3-none-any.whl"))) == len(FOLDERS)  # one wheel for every torch and Python
    for name in ("aotautograd", "dynamo", "inductor"):
        (wheel,) = folder.glob(f"compile_{name}-*.whl")
        held = zipfile.ZipFile(wheel).namelist()
        assert any(path.endswith("/_C/cpp/module.cpp") for path in held)
        assert not any(path.endswith(".so") for path in held)
    yield folder


@pytest.mark.parametrize("name", FOLDERS)
def test_wheel_works_with_only_what_it_declares(name: str, wheels: Path, uv: str, tmp_path: Path) -> None:
    distribution = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]["name"]
    environment = tmp_path / "env"
    run(uv, "venv", "-q", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    links = [wheels, *os.environ.get("PIP_FIND_LINKS", "").split()]  # an option of uv's replaces its variable
    install = (
        uv,
        "pip",
        "install",
        "-q",
        "--python",
        python,
        *(part for link in links for part in ("--find-links", link)),
    )
    run(*install, "-c", ROOT / "constraints.txt", f"{distribution}==0.1.0", "numpy")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for sources in site.glob("*/_C/cpp"):  # built already: test_primtorch_first_use.py has what is not
        (builds,) = ROOT.glob(f"packages/*/src/{sources.parents[1].name}/_C")
        shutil.copytree(builds, sources.parent, dirs_exist_ok=True)
    module = IMPORTS.get(name, name)
    where = run(python, "-c", f"import {module}; print({module}.__file__, {module}.__version__)", cwd=tmp_path)
    assert str(environment) in where
    examples = readme_examples(ROOT / "packages" / name / "README.md")
    assert examples, f"packages/{name}/README.md has no example"
    for i, example in enumerate(examples):
        script = tmp_path / f"example_{i}.py"  # a file: capture reads source positions
        script.write_text(example)
        run(python, script, cwd=tmp_path)


def test_root_readme_examples_run(tmp_path: Path) -> None:
    for i, example in enumerate(readme_examples(ROOT / "README.md")):
        script = tmp_path / f"example_{i}.py"
        script.write_text(example)
        run(sys.executable, script, cwd=tmp_path)


def test_release_tags_are_checked() -> None:
    tool = ROOT / "tools" / "release.py"
    assert run(sys.executable, tool, "inductor-v0.1.0") == "PACKAGE=inductor\nVERSION=0.1.0\n"
    for bad in ("inductor-v9.9.9", "nothing-v0.1.0", "inductor"):
        done = subprocess.run([sys.executable, str(tool), bad], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert bad in done.stderr
