"""Loads the packages' C++ extensions: only one that was built for the torch and the Python that run.

torch's C++ interfaces change with every release, and an extension built against another one fails with an unresolved
symbol at best and a segmentation fault at worst. So each build lies in a folder that bears its torch's release,
`torchdynamo/_C/torch-2.13.0/_C.cpython-311-x86_64-linux-gnu.so`, and no other is ever opened.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch


def load(name: str, folder: str) -> ModuleType:
    """The extension module `name` (such as "torchdynamo._C") from its builds in `folder`.

    Raises:
        ImportError: no build is for the torch and the Python that run, or the one there does not load.
    """
    path = build_of(Path(folder))
    if not path.exists():
        raise ImportError(_without_build(name, path), name=name, path=str(path))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        text = f"{path} does not load ({error}). {_how_to_build(name)}"
        raise ImportError(text, name=name, path=str(path)) from error
    return module


def build_of(folder: Path) -> Path:
    """The file among the builds in `folder` that is, or would be, for the torch and the Python that run."""
    release = torch.__version__.partition("+")[0]  # builds of one release for other devices (+cpu, +cu130) are alike
    return folder / f"torch-{release}" / f"_C{EXTENSION_SUFFIXES[0]}"


def _without_build(name: str, path: Path) -> str:
    running = _described(path, torch.__version__)
    there = sorted(map(_described, path.parents[1].glob("torch-*/_C.*")))
    built = f"was built for {', '.join(there)}; this is {running}" if there else f"was not built for {running}"
    return f"{name}, the C++ extension, {built}. {_how_to_build(name)}"


def _described(build: Path, release: str | None = None) -> str:
    return f"torch {release or build.parent.name.removeprefix('torch-')} and Python {build.name.split('.')[1]}"


def _how_to_build(name: str) -> str:
    distribution = "compile-" + name.partition(".")[0].removeprefix("torch")
    return (
        "Build it for them, with a C++20 compiler: pip install hatchling pybind11 && pip install --force-reinstall "
        f"--no-deps --no-build-isolation --no-binary {distribution} {distribution}; "
        "in a checkout: python tools/build_extensions.py"
    )
