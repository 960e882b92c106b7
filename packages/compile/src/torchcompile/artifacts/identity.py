"""What a compiled program is bound to: versions, processor and GPU, and the source of the functions it was made of.

Source is compared by content. A function that stands on other lines, or in another file of its module, is the same.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import aotautograd
import primtorch
import torchdistributed
import torchdynamo
import torchinductor
from torchcompile.artifacts.schemas import CodeRow, Fact
from torchinductor import facts_of
from torchinductor.codegen.cpp.build import cpu_flags
from torchinductor.program_file import processor_features

_PACKAGES: tuple[types.ModuleType, ...] = (primtorch, aotautograd, torchdynamo, torchinductor, torchdistributed)
# Their functions are compared by their versions.
_VERSIONED = frozenset({"torch", "torchcompile", *(package.__name__ for package in _PACKAGES)})
_FLAGS = "processor features"
_SOURCES = (".py", ".cpp", ".h")  # what extensions are built to differs between machines


def facts(devices: Iterable[str] = ()) -> tuple[Fact, ...]:
    """Those of this process, and of what is behind these types of devices."""
    system = (platform.system(), platform.machine(), *platform.libc_ver())
    rows = {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "torchcompile": f"{sys.modules['torchcompile'].__version__} ({_source()})",
        "system": " ".join(filter(None, system)),
        _FLAGS: " ".join(processor_features()) or cpu_flags(),  # what speaks of the machine differs between alike ones
        "threads": str(torch.get_num_threads()),
    }
    for device in devices:
        rows |= facts_of(device) or {}
    return tuple(Fact(name, value) for name, value in rows.items())


@functools.cache
def _source() -> str:
    """A hash of this stack's own files."""
    files = hashlib.sha256()
    for package in (*_PACKAGES, sys.modules["torchcompile"]):
        root = Path(str(package.__file__)).parent
        for path in sorted(found for suffix in _SOURCES for found in root.rglob(f"*{suffix}")):
            files.update(f"{path.relative_to(root)}\n".encode())
            files.update(hashlib.sha256(path.read_bytes()).digest())
    return files.hexdigest()[:16]


def differences(there: Iterable[Fact], here: Iterable[Fact]) -> list[tuple[str, str, str]]:
    """(what, there, here) of what is not the same. Of a processor's features those that the other has not."""
    found = []
    then, now = ({fact.name: fact.value for fact in given} for given in (there, here))
    for name in dict.fromkeys((*then, *now)):
        one, other = then.get(name, "unknown"), now.get(name, "unknown")
        if one == other:
            continue
        if name == _FLAGS:
            one, other = (" ".join(sorted(set(a.split()) - set(b.split()))) for a, b in ((one, other), (other, one)))
        found.append((name, one, other))
    return found


# -- code ----------------------------------------------------------------------------------------


def rows_of(programs: Iterable[tuple[str, types.CodeType]]) -> tuple[CodeRow, ...]:
    """The user's functions and those of libraries, each once."""
    rows = {
        CodeRow(module, code.co_qualname, digest_of(code))
        for module, code in programs
        if module.partition(".")[0] not in _VERSIONED
    }
    return tuple(sorted(rows, key=lambda row: (row.module, row.qualname, row.digest)))


def digest_of(code: types.CodeType) -> str:
    """A hash of what a function's code does, wherever it stands."""
    return hashlib.sha256(repr(_content(code)).encode()).hexdigest()[:32]


def _content(constant: object) -> object:
    """A constant of a function's code by what it is: code by what it does, without its file and its lines."""
    if isinstance(constant, types.CodeType):
        code = constant
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return code.co_name, code.co_code, code.co_exceptiontable, names, counts, tuple(map(_content, code.co_consts))
    if isinstance(constant, tuple):
        return tuple(map(_content, constant))
    if isinstance(constant, frozenset):
        return "frozenset", sorted(map(repr, map(_content, constant)))
    return type(constant).__name__, repr(constant)


def changed(rows: Sequence[CodeRow]) -> list[tuple[str, str, str]]:
    """(function, hash there, hash here) of the functions that are found and say something else now.

    One that is not found by its name proves nothing: a graph that it is part of is looked up by what it computes.
    """
    by_name: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        by_name.setdefault((row.module, row.qualname), set()).add(row.digest)
    found = []
    for (module, qualname), digests in by_name.items():
        now = {digest_of(code) for code in _codes(module, qualname)}
        if now and not digests <= now:
            found.append((f"{module}.{qualname}", " ".join(sorted(digests)), " ".join(sorted(now))))
    return found


def _codes(module: str, qualname: str) -> list[types.CodeType]:
    """The code of a module that is loaded, by its qualified name; of functions in functions, all of that name."""
    found: list[object] = [sys.modules[module]] if module in sys.modules else []
    for part in qualname.split("."):
        if part == "<locals>":
            found = [code for owner in found if (code := _code_of(owner)) is not None]
        else:
            found = [member for owner in found for member in _members(owner, part)]
    return [code for owner in found if (code := _code_of(owner)) is not None]


def _members(owner: object, name: str) -> list[object]:
    if isinstance(owner, types.CodeType):
        return [item for item in owner.co_consts if isinstance(item, types.CodeType) and item.co_name == name]
    if isinstance(owner, (types.ModuleType, type)) and name in vars(owner):
        return [vars(owner)[name]]
    return []


def _code_of(owner: object) -> types.CodeType | None:
    """The code behind a function, however it is decorated."""
    for _ in range(100):  # decorators over each other
        if isinstance(owner, types.CodeType):
            return owner
        inner = getattr(owner, "__wrapped__", None) or getattr(owner, "fget", None) or getattr(owner, "__func__", None)
        if inner is None:
            code = getattr(owner, "__code__", None)
            return code if isinstance(code, types.CodeType) else None
        owner = inner
    return None
