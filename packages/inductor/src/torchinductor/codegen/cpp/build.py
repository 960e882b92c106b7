"""Compiles a translation unit to a shared library, through the disk cache, and loads it."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from primtorch import forks
from torchinductor.cache import DiskCache, content_key
from torchinductor.errors import BuildFailed, CompilerMissing
from torchinductor.schemas import Binaries

_log = logging.getLogger(__name__)

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    # g++ keeps values in MMX registers where it has no AVX, and leaves them there: the next `fmod` of anybody is NaN.
    *(("-mno-mmx",) if _IS_X86 else ()),
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-fPIC",
    "-shared",
    "-w",
)
_TOLD = ".json"  # a text, of the kinds of files that the cache folder holds
_NAMES = ("g++", "c++", "clang++")


@lru_cache(maxsize=8)
def find_compiler(wanted: str | None) -> tuple[str, ...]:
    """The command of the C++ compiler: its path, and the flags that `wanted` names behind it.

    Raises:
        CompilerMissing: there is none; the message says how to get one.
    """
    commands = [(wanted,), tuple(shlex.split(wanted))] if wanted else [(name,) for name in _NAMES]
    for command in commands:
        found = shutil.which(command[0]) if command else None
        if found:
            return found, *command[1:]
    names = (wanted,) if wanted else _NAMES
    raise CompilerMissing(
        f"no C++ compiler found (looked for {', '.join(names)} on PATH). CPU kernels are C++: install one, "
        "for example `apt-get install g++`, `dnf install gcc-c++` or `xcode-select --install`, "
        "or name one with InductorOptions(cxx=...)."
    )


@lru_cache(maxsize=8)
def compiler_version(command: tuple[str, ...]) -> str:
    """What the compiler says of itself, in one line."""
    return _run([*command, "--version"]).stdout.split("\n")[0]


def identity_of(cache: DiskCache, cxx: str | None) -> str:
    """The compiler's version and the machine it compiles for: parts of the cache key. Where there is no compiler, that
    of the one which built the folder's kernels for such a machine: the folder may have been made on another one.

    Raises:
        CompilerMissing: see `find_compiler`; and no kernels of this machine are in the folder.
    """
    try:
        command = find_compiler(cxx)
    except CompilerMissing:
        there = cache.find(_builder_key(), _TOLD) if cxx is None else None
        if there is None:
            raise
        return there.read_text()
    return f"{' '.join(command)}|{_known_version(command, cache)}|{platform.machine()}|{cpu_flags()}"


def _builder_key() -> str:
    return content_key("compiler of kernels", platform.machine(), cpu_flags())


def _tell_builder(cache: DiskCache, identity: str) -> None:
    """Writes down what compiler the folder's kernels are of, for machines that have none."""
    with suppress(OSError):  # no room, say, which is told where kernels are written
        known = cache.find(_builder_key(), _TOLD)
        if cache.writable and (known is None or known.read_text() != identity):
            _write(cache, _builder_key(), identity)


def _write(cache: DiskCache, key: str, text: str) -> None:
    written = cache.temporary(key, _TOLD)
    written.write_text(text)
    cache.publish(written, key, _TOLD)


def _known_version(command: tuple[str, ...], cache: DiskCache) -> str:
    """The compiler's version. To ask takes longer than to load kernels: the answer is kept beside them, until one of
    the files changes that the command, or a wrapper that looks for the next one on PATH, may come to."""
    paths = dict.fromkeys((command[0], *(os.path.join(folder, Path(command[0]).name) for folder in os.get_exec_path())))
    key = content_key("compiler", *command, *filter(None, map(_file_facts, paths)))
    try:
        kept = cache.find(key, _TOLD)
        version = kept.read_text() if kept is not None else ""
        if not version:
            version = compiler_version(command)
            _write(cache, key, version)
    except OSError:  # no room, say, which is told where kernels are written
        version = compiler_version(command)
    return version


def _file_facts(path: str) -> str:
    """A file's own path, size and time; nothing for one that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{os.path.realpath(path)} {found.st_size} {found.st_mtime_ns}"


def _run(command: Sequence[str], source: str = "") -> subprocess.CompletedProcess[str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        compiler = forks.process(command, **pipes, text=True, env=_environment(), errors="replace")
    except OSError as error:
        raise BuildFailed(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    with compiler:
        try:
            said, told = compiler.communicate(source)
        except BaseException:  # an interrupt: nobody waits for what it makes
            compiler.kill()
            raise
    return subprocess.CompletedProcess(command, compiler.returncode, said, told)


@lru_cache(maxsize=1)
def cpu_flags() -> str:
    """The processor's features as /proc/cpuinfo has them in a line; its name where there is no such file."""
    try:
        with open("/proc/cpuinfo") as f:
            return next((line for line in f if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def content_of(source: str) -> str:
    """The key of a translation unit, whichever compiler builds it."""
    return content_key("cpp", source, *FLAGS)


def file_of(source: str) -> str:
    """The name of its library among those that are brought along."""
    return f"{content_of(source)}.so"


def key_of(source: str, cache: DiskCache, cxx: str | None) -> str:
    """The key of a translation unit in the cache folder. Raises CompilerMissing."""
    return content_key("cpp", source, *FLAGS, identity_of(cache, cxx))


def built_file(source: str, cache: DiskCache, cxx: str | None, brought: Binaries | None) -> Path | None:
    """The file of a translation unit that was built before."""
    found = brought.find(file_of(source)) if brought is not None else None
    return found or cache.find(key_of(source, cache, cxx), ".so")


def build_library(
    source: str, cache: DiskCache, cxx: str | None, brought: Binaries | None = None
) -> tuple[ctypes.CDLL, bool]:
    """The loaded library of a translation unit, and whether it was built before. What was brought along asks for no
    compiler.

    Raises:
        CompilerMissing: no compiler.
        BuildFailed: the compiler failed, or what it makes could not be written.
    """
    found = brought.find(file_of(source)) if brought is not None else None
    library = opened(found)
    if library is not None:
        return library, True
    key = key_of(source, cache, cxx)
    library = _loaded(cache, key)
    if library is not None:
        return library, True
    with cache.turn(key, ".so"):  # ranks of one machine ask for the same kernels at the same time
        library = _loaded(cache, key)
        if library is not None:
            return library, True
        try:
            return _built(source, cache, key, cxx), False
        except (OSError, BuildFailed) as error:
            if not cache.give_up(error):
                raise
            return _built(source, cache, key, cxx), False


def _loaded(cache: DiskCache, key: str) -> ctypes.CDLL | None:
    return opened(cache.find(key, ".so"))


def opened(found: Path | None) -> ctypes.CDLL | None:
    """The library in a file; None where there is none, or none that can be loaded."""
    try:
        return None if found is None else ctypes.CDLL(str(found))
    except OSError as error:
        _log.warning("the cached kernels %s cannot be loaded (%s): building them again", found, error)
        return None


def _built(source: str, cache: DiskCache, key: str, cxx: str | None) -> ctypes.CDLL:
    target = cache.temporary(key, ".so")
    try:
        compile_library(source, target, cxx)
        library = ctypes.CDLL(str(cache.publish(target, key, ".so")))
        _tell_builder(cache, identity_of(cache, cxx))
        return library
    except BaseException:  # an interrupt too: nothing half-written stays behind
        target.unlink(missing_ok=True)
        raise


def compile_library(source: str, target: Path, cxx: str | None) -> None:
    """Runs the compiler on source from its standard input. Raises BuildFailed with what it says, CompilerMissing."""
    compiler = find_compiler(cxx)
    done = _run([*compiler, *FLAGS, "-x", "c++", "-", "-o", str(target), *_libraries()], source)
    if done.returncode != 0:
        shown = "\n".join(done.stderr.splitlines()[:20])
        raise BuildFailed(f"{compiler[0]} failed on generated code (exit status {done.returncode}):\n{shown}")


def _libraries() -> tuple[str, ...]:
    return ("-lmvec", "-lm") if platform.libc_ver()[0] == "glibc" and _IS_X86 else ("-lm",)


def _environment() -> dict[str, str]:
    """The process's environment with messages in English, so that a report of a failed build reads alike everywhere."""
    return {**os.environ, "LC_ALL": "C"}
