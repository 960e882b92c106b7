"""Builds the C++ extension `torchinductor._C` while the wheel (or the editable install) is made."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "torchinductor"


class CustomBuildHook(BuildHookInterface[Any]):
    """Compiles every `cpp/*.cpp` into one extension module with the system's C++ compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        target = root / "src" / PACKAGE / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
        sources = sorted((root / "cpp").glob("*.cpp"))
        newest = max(path.stat().st_mtime for path in (root / "cpp").iterdir())
        if not target.exists() or target.stat().st_mtime < newest:
            compile_extension(sources, target, root / "build")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_extension(sources: list[Path], target: Path, work: Path) -> None:
    """One object file a source, in parallel; then one link against torch's own libraries."""
    import pybind11
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX", "c++")
    work.mkdir(exist_ok=True)
    includes = [*include_paths(), sysconfig.get_path("include"), pybind11.get_include()]
    flags = ["-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-g0", "-Wall"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-DTORCH_EXTENSION_NAME=_C"]
    flags += [f"-I{path}" for path in includes]
    objects = [work / (source.stem + ".o") for source in sources]
    jobs = [
        subprocess.Popen([compiler, *flags, "-c", str(source), "-o", str(obj)])
        for source, obj in zip(sources, objects, strict=True)
    ]
    if any(job.wait() for job in jobs):
        raise RuntimeError(f"{PACKAGE}._C did not compile: install a C++20 compiler (g++ 11 or newer) or set CXX to one")
    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    fresh = target.with_suffix(".new")  # rename at the end: a running process keeps the file it mapped
    subprocess.run([compiler, "-shared", *map(str, objects), *libraries, "-o", str(fresh)], check=True)
    fresh.replace(target)
