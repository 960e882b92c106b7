"""Which torch: one that was not tested warns, an extension that was built for another one is not opened."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from primtorch import extensions, supported

pytestmark = pytest.mark.smoke
SUFFIX = EXTENSION_SUFFIXES[0]


@pytest.mark.parametrize("release", [*supported.TORCH, "2.13.0+cpu", "2.11.0a0+git0000000", "2.14.9+cu130"])
def test_tested_releases_are_silent(release: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        supported.warn_if_untested(release)


@pytest.mark.parametrize("release", ["2.10.1", "2.15.0+cpu", "2.99.0.dev20300101", "3.0.0", "1.13.1"])
def test_other_releases_are_told(release: str) -> None:
    with pytest.warns(supported.UntestedTorch, match=f"torch {release.split('+')[0]}.*pip install torch==") as told:
        supported.warn_if_untested(release)
    assert len(told) == 1


def test_the_import_warns_once() -> None:
    program = "import torch; torch.__version__ = '2.99.0'; import primtorch, primtorch.fake, primtorch.lower"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("UntestedTorch") == 1, done.stderr


def build(folder: Path, release: str, suffix: str = SUFFIX) -> Path:
    path = folder / f"torch-{release}" / f"_C{suffix}"
    path.parent.mkdir()
    path.write_bytes(b"no library at all")
    return path


def test_builds_for_another_torch_are_not_opened(tmp_path: Path) -> None:
    build(tmp_path, "2.1.0")
    with pytest.raises(
        ImportError, match=r"torchdynamo\._C.* was built for torch 2\.1\.0 and Python cpython-\d+"
    ) as told:
        extensions.load("torchdynamo._C", str(tmp_path))
    for part in (
        f"this is torch {torch.__version__}",
        "--no-deps compile-dynamo",
        "build_extensions.py",
    ):
        assert part in str(told.value)


def test_builds_for_another_python_are_not_opened(tmp_path: Path) -> None:
    build(tmp_path, torch.__version__.partition("+")[0], ".cpython-39-x86_64-linux-gnu.so")
    with pytest.raises(ImportError, match=r"Python cpython-39-x86_64-linux-gnu; this is"):
        extensions.load("aotautograd._C", str(tmp_path))


def test_no_build_at_all(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"was not built for torch .* its sources are not in .* pip install"):
        extensions.load("torchinductor._C", str(tmp_path))


def test_a_build_that_does_not_load_is_told(tmp_path: Path) -> None:
    path = build(tmp_path, torch.__version__.partition("+")[0])
    with pytest.raises(ImportError, match=f"{path.name} does not load .*Delete it"):
        extensions.load("torchinductor._C", str(tmp_path))
