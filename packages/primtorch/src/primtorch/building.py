"""Compiles a package's C++ extension: in place for a checkout, and for `extensions`, which has it made at first use.

A wheel holds the sources, in `_C/cpp/`, and no binary: so one wheel serves every supported torch and Python. In a
checkout they lie in `cpp/` beside `src/`; headers that packages share in primtorch's `include/`. A package with an
`include/` of its own is for C++ programs, too: all but its `module.cpp`, which alone knows Python, is a library beside
the extension.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

SHARED = Path(__file__).parent / "include"  # headers, under the name of the package that they come from
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-g0", "-Wall")
COMPILERS = ("c++", "g++", "clang++")


class NotBuilt(RuntimeError):
    """An extension could not be compiled; says why, and what to do."""


def build_of(folder: Path) -> Path:
    """The file among the builds in `folder` that is, or would be, for the torch and the Python that run."""
    release = torch.__version__.partition("+")[0]  # builds of one release for other devices (+cpu, +cu130) are alike
    return folder / f"torch-{release}" / f"_C{EXTENSION_SUFFIXES[0]}"


def headers_of(folder: Path) -> list[Path]:
    """The headers that an extension in this folder may include."""
    return [path for place in (folder, SHARED, *_given_headers(folder)) for path in place.rglob("*.h")]


def _given_headers(folder: Path) -> list[Path]:
    """The folder of headers that the package of the sources in `folder` gives to C++ programs, if it does."""
    return [*folder.parent.glob("src/*/include"), *filter(Path.is_dir, (folder.parents[1] / "include",))]


def library_of(extension: Path, package: str) -> Path:
    """The library for C++ programs that lies beside a package's extension."""
    return extension.with_name(f"lib{package}.so")


def build_in_place(root: Path) -> Path:
    """Compiles what is newer than its object file, links, and returns the extension's path.

    root: of a distribution: the folder with `src/` and `cpp/`.
    """
    (package,) = (path.parent for path in (root / "src").glob("*/__init__.py"))
    target = build_of(package / "_C")
    build = target.parent.name
    work = root / "build" / f"{sysconfig.get_config_var('SOABI')}-{build}"
    folder = root / "cpp"
    headers = max(path.stat().st_mtime for path in headers_of(folder))
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
        compile_objects(stale)
        link_all(package.name, objects, target)
    return target


def compile_objects(sources: dict[Path, Path], progress: Callable[[int], None] = lambda done: None) -> None:
    """One object file a source, as many at a time as there are processors.

    Raises:
        NotBuilt: there is no compiler, or it does not take the sources.
    """
    command = [*compiler(), *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    given = dict.fromkeys(path for source in sources for path in _given_headers(source.parent))
    command += [f"-I{path}" for path in (*given, *_include_paths())]
    waiting = list(sources.items())
    running: list[subprocess.Popen[str]] = []
    failed: list[str] = []
    done = 0
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            source, obj = waiting.pop()
            running.append(_started([*command, "-c", str(source), "-o", str(obj)]))
        process = running.pop(0)
        told, _ = process.communicate()
        if process.returncode != 0:
            failed.append(told)
            waiting.clear()
        done += 1
        progress(done)
    if failed:
        raise NotBuilt(
            f"{' '.join(compiler())} does not compile the C++ extension (g++ 11 or newer does):\n{failed[0]}"
        )


def link_all(package: str, objects: Mapping[Path, Path], target: Path) -> None:
    """A package's extension of the objects of its sources, and before it the library for C++ programs, if it has one.

    Raises:
        NotBuilt: the compiler cannot.
    """
    if any(_given_headers(source.parent) for source in objects):
        plain = [made for source, made in objects.items() if source.name != "module.cpp"]
        link(plain, library_of(target, package), python=False)
    link(list(objects.values()), target)


def link(objects: Sequence[Path], target: Path, python: bool = True) -> None:
    """The shared library of these objects, there as a whole or not at all: a running process keeps the file it mapped.

    Raises:
        NotBuilt: the compiler cannot.
    """
    from torch.utils.cpp_extension import library_paths

    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    # The shared C++ library, that torch uses: beside a static one, which some compilers prefer, streams crash.
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ldl", "-l:libstdc++.so.6"]
    libraries += ["-ltorch_python"] if python else [f"-Wl,-soname,{target.name}"]
    fresh = target.with_suffix(f".new{os.getpid()}")
    process = _started([*compiler(), "-shared", *map(str, objects), *libraries, "-o", str(fresh)])
    told, _ = process.communicate()
    if process.returncode != 0:
        raise NotBuilt(f"{' '.join(compiler())} does not link the C++ extension:\n{told}")
    fresh.replace(target)


def compiler() -> list[str]:
    """The command of the C++ compiler: the environment's `CXX`, else the first one there is.

    Raises:
        NotBuilt: there is none.
    """
    asked = os.environ.get("CXX", "").split()
    found = next(filter(shutil.which, asked[:1] or COMPILERS), None)
    if found is None:
        looked = " ".join(asked) or ", ".join(COMPILERS)
        raise NotBuilt(
            f"there is no C++ compiler (looked for {looked}). Install g++ 11 or newer: apt-get install g++, dnf "
            "install gcc-c++ or conda install gxx; or name one by the environment variable CXX"
        )
    return [found, *asked[1:]]


def _include_paths() -> Iterable[str]:
    """Of the shared headers, torch with its pybind11, and Python.

    Raises:
        NotBuilt: Python's headers are not installed.
    """
    from torch.utils.cpp_extension import include_paths

    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").exists():
        version = sysconfig.get_python_version()
        raise NotBuilt(
            f"there is no {python}/Python.h: install Python's headers (apt-get install python{version}-dev, dnf "
            f"install python{version}-devel), or take a Python that has them (uv's, conda's, python.org's)"
        )
    return (str(SHARED), *include_paths(), python)


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
