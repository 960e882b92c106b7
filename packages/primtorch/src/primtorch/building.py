"""Builds a package's C++ extension while its wheel (or the editable install) is made: what `extensions` then loads.

A distribution with an extension names `hatch_build.py` as its hook, which takes `BuildHook` from here, and requires
compile-primtorch to be built. Its sources lie in `cpp/`; headers that packages share in primtorch's `include/`.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from primtorch.extensions import build_of

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # tools/build_extensions.py builds in place where hatchling is not installed
    BuildHookInterface = None

SHARED = Path(__file__).parent / "include"  # headers, under the name of the package that they come from


def build_in_place(root: Path) -> Path:
    """Compiles what is newer than its object file, links, and returns the extension's path.

    root: of a distribution: the folder with `src/` and `cpp/`.
    """
    (package,) = (path.parent for path in (root / "src").glob("*/__init__.py"))
    target = build_of(package / "_C")
    build = target.parent.name
    work = root / "build" / f"{sysconfig.get_config_var('SOABI')}-{build}"
    folder = root / "cpp"
    headers = max(path.stat().st_mtime for path in (*folder.glob("*.h"), *SHARED.rglob("*.h")))
    target.parent.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    objects: dict[Path, Path] = {source: work / (source.stem + ".o") for source in sorted(folder.glob("*.cpp"))}
    stale = {
        source: obj
        for source, obj in objects.items()
        if not obj.exists() or obj.stat().st_mtime < max(headers, source.stat().st_mtime)
    }
    if stale or not target.exists() or target.stat().st_mtime < max(obj.stat().st_mtime for obj in objects.values()):
        print(f"{package.name}._C for {build}: compiling {len(stale)} of {len(objects)} C++ files", flush=True)
        _compile(stale)
        _link(list(objects.values()), target)
    return target


def _compile(sources: dict[Path, Path]) -> None:
    """One object file a source, as many at a time as there are processors."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import include_paths

    paths = (str(SHARED), *include_paths(), sysconfig.get_path("include"), pybind11.get_include())
    flags = ["-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-g0", "-Wall"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    flags += [f"-I{path}" for path in paths]
    waiting = list(sources.items())
    running: list[subprocess.Popen[bytes]] = []
    failed = False
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            source, obj = waiting.pop()
            running.append(subprocess.Popen([_compiler(), *flags, "-c", str(source), "-o", str(obj)]))
        failed |= running.pop(0).wait() != 0
    if failed:
        raise RuntimeError("the C++ extension did not compile: install a C++20 compiler (g++ 11 or newer) or set CXX")


def _link(objects: list[Path], target: Path) -> None:
    from torch.utils.cpp_extension import library_paths

    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    # The shared C++ library, that torch uses: beside a static one, which some compilers prefer, streams crash.
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl", "-l:libstdc++.so.6"]
    fresh = target.with_suffix(".new")  # rename at the end: a running process keeps the file it mapped
    subprocess.run([_compiler(), "-shared", *map(str, objects), *libraries, "-o", str(fresh)], check=True)
    fresh.replace(target)


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


if BuildHookInterface is not None:

    class BuildHook(BuildHookInterface[object]):
        """Puts into the wheel what `build_in_place` builds with the system's C++ compiler."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            root = Path(self.root)
            extension = build_in_place(root)
            sources = max(path.stat().st_mtime for path in (root / "cpp").iterdir())
            build_data["artifacts"] += [  # with the builds for other torches that a release has made before
                f"/{build.relative_to(root).as_posix()}"
                for build in extension.parents[1].glob(f"torch-*/{extension.name}")
                if build.stat().st_mtime >= sources
            ]
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
