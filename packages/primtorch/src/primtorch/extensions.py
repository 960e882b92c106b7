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
    suffix = EXTENSION_SUFFIXES[0]
    path = Path(folder) / f"torch-{_release(torch.__version__)}" / f"_C{suffix}"
    if not path.exists():
        raise ImportError(_without_build(name, Path(folder), suffix), name=name, path=str(path))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        text = f"{path} does not load ({error}). {_how_to_build(name)}"
        raise ImportError(text, name=name, path=str(path)) from error
    return module


def _release(version: str) -> str:
    """The torch that a build is for. Builds of one release for other devices (+cpu, +cu130) are alike to C++."""
    return version.partition("+")[0]


def _without_build(name: str, folder: Path, suffix: str) -> str:
    running = _described(torch.__version__, suffix)
    there = sorted(
        _described(path.parent.name.removeprefix("torch-"), path.name) for path in folder.glob("torch-*/_C.*")
    )
    built = f"was built for {', '.join(there)}; this is {running}" if there else f"was not built for {running}"
    return f"{name}, the C++ extension, {built}. {_how_to_build(name)}"


def _described(release: str, file: str) -> str:
    return f"torch {release} and Python {file.split('.')[1]}"


def _how_to_build(name: str) -> str:
    distribution = "compile-" + name.partition(".")[0].removeprefix("torch")
    return (
        "Build it for them, with a C++20 compiler: pip install hatchling pybind11 && pip install --force-reinstall "
        f"--no-deps --no-build-isolation --no-binary {distribution} {distribution}; "
        "in a checkout: python tools/build_extensions.py"
    )
