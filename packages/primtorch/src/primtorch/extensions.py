"""Loads the packages' C++ extensions: only one that was built for the torch and the Python that run.

torch's C++ interfaces change with every release, and an extension built against another one fails with an unresolved
symbol at best and a segmentation fault at worst. So a checkout's builds lie in folders that bear their torch's release,
`torchdynamo/_C/torch-2.13.0/_C.cpython-311-x86_64-linux-gnu.so`, and no other is ever opened. Where there is none, the
extension is built at its first use, once for all processes of a user, of the sources that the package brings.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from primtorch.building import NotBuilt, build_of
from primtorch.first_use import built


def load(name: str, folder: str) -> ModuleType:
    """The extension module `name` (such as "torchdynamo._C") from its builds in `folder`, or of its sources there.

    Raises:
        ImportError: no build is for the torch and the Python that run, and none could be made; or one does not load.
    """
    path = build_of(Path(folder))
    sources = sources_of(Path(folder))
    if not path.exists() and sources is not None:
        try:
            path = built(name.partition(".")[0], sources)
        except NotBuilt as error:
            raise ImportError(f"{_without_build(name, path)}, and could not be built: {error}", name=name) from error
    elif not path.exists():
        text = f"{_without_build(name, path)}, and its sources are not in {folder}. {_how_to_repair(name)}"
        raise ImportError(text, name=name, path=str(path))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        text = f"{path} does not load ({error}). Delete it, and it is built anew. {_how_to_repair(name)}"
        raise ImportError(text, name=name, path=str(path)) from error
    return module


def sources_of(folder: Path) -> Path | None:
    """Where the C++ of a package lies: in it, or beside `src/` in a checkout."""
    for place in (folder / "cpp", *(parent / "cpp" for parent in folder.parents[2:3])):
        if any(place.glob("*.cpp")):
            return place
    return None


def _without_build(name: str, path: Path) -> str:
    running = _described(path, torch.__version__)
    there = sorted(map(_described, path.parents[1].glob("torch-*/_C.*")))
    built_for = f"was built for {', '.join(there)}; this is {running}" if there else f"was not built for {running}"
    return f"{name}, the C++ extension, {built_for}"


def _described(build: Path, release: str | None = None) -> str:
    return f"torch {release or build.parent.name.removeprefix('torch-')} and Python {build.name.split('.')[1]}"


def _how_to_repair(name: str) -> str:
    distribution = "compile-" + name.partition(".")[0].removeprefix("torch")
    return (
        f"To have the package whole again: pip install --force-reinstall --no-deps {distribution}; "
        "in a checkout: python tools/build_extensions.py"
    )
