"""`torchcompile.load`: a compiled function or module out of a file, for the same code in another process."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torchdynamo
from primtorch import forks
from primtorch.ledger import LEDGER, Event, Ledger
from torchcompile.api import compile_one, stack_of
from torchcompile.artifacts import archive, identity
from torchcompile.artifacts.schemas import Contents
from torchcompile.errors import ArtifactError, ArtifactMismatch
from torchcompile.events import NOT_IN_ARTIFACT
from torchcompile.options import CompileOptions, resolve
from torchinductor import Binaries

ModelT = TypeVar("ModelT", bound=Callable[..., Any])


@overload
def load(
    file: str | os.PathLike[str], model: None = None, *, classes: Sequence[type] = ..., operators: Collection[str] = ...
) -> torchdynamo.Exported: ...
@overload
def load(file: str | os.PathLike[str], model: ModelT, *, recompile: bool = ...) -> ModelT: ...
def load(
    file: str | os.PathLike[str],
    model: Callable[..., object] | None = None,
    *,
    recompile: bool = False,
    classes: Sequence[type] = (),
    operators: Collection[str] = (),
) -> object:
    """Takes what `save` wrote: of a compiled model, for `model`, the same function or a module of the same class; of an
    exported graph, without one.

    The result is what `compile` gave when the file was made. What its calls compute is looked up in the file: nothing
    is traced, lowered or built, and no compiler is needed. Calls whose capture is in the file, guards and all, are not
    captured either, where all that it read is the same here. The file holds machine code and Python's: take one only
    from whom you would take a program.

    Args:
        model: a module, a function, a method or a class, as `compile` takes them.
        recompile: what is not in the file, or does not fit here, is compiled, and the ledger tells of it.
        classes, operators: of an exported graph, see `torchdynamo.load`.

    Raises:
        ArtifactError: the file is torn, or none of `save`'s.
        ArtifactMismatch: it was made with another torch, Python, torchcompile, processor, GPU or number of threads,
            the source of a function has changed, or the release that wrote it has another format (of which nothing is
            known: `recompile` does not help); `differences` names each. At a call: the file has nothing for it.
        UnsafeArchive: it is no exported graph, or calls what has no place in one.
    """
    if model is None:
        if archive.is_compiled(file):
            raise ArtifactError(f"{file} holds what a model was compiled to: torchcompile.load(file, model) takes it")
        return torchdynamo.load(file, classes=classes, operators=operators)
    contents = archive.read(file)
    manifest = contents.manifest
    found = identity.differences(manifest.facts, identity.facts(manifest.devices)) + identity.changed(manifest.code)
    known = {item.name for item in dataclasses.fields(CompileOptions)}
    found += [(f"option {name}", repr(value), "") for name, value in manifest.options.items() if name not in known]
    if found:
        told = "; ".join(f"{what}: {there or 'none'} there, {here or 'none'} here" for what, there, here in found)
        if not recompile:
            raise ArtifactMismatch(f"{file} does not fit: {told}. recompile=True compiles instead", found)
        LEDGER.add(Event(NOT_IN_ARTIFACT, str(file), told))
    brought = None if found else FromFile(file, contents, recompile)
    settings: dict[str, Any] = manifest.settings
    options = resolve(None, {name: value for name, value in manifest.options.items() if name in known})
    transform = stack_of(settings["fullgraph"], settings["dynamic"], "inductor", options, settings["name"], brought)
    return compile_one(model, transform)


_SCRATCH = forks.ScratchFolder("torchcompile-")  # for kernels, the user's own


class FromFile:
    """A file's compiled forms and kernels (`torchcompile.shelf.Brought`)."""

    def __init__(self, file: str | os.PathLike[str], contents: Contents, recompile: bool) -> None:
        self._file = file
        self._contents = contents
        self._recompile = recompile
        folder = Path(tempfile.mkdtemp(dir=_SCRATCH.path))
        files = {}
        for name, content in contents.kernels.items():
            files[name] = folder / name
            files[name].write_bytes(content)
        self.binaries = Binaries(files)

    def find(self, name: str) -> str | None:
        """The text of a program's part, or of a frame, by its key; None where the file has none."""
        return self._contents.programs.get(name)

    def lacks(self, title: str, ledger: Ledger) -> None:
        """Tells the ledger that a graph is compiled since the file has no program for it.

        Raises:
            ArtifactMismatch: it was loaded without `recompile=True`.
        """
        text = (
            f"{title} is not in {self._file}: other sizes, dtypes, strides, training or inference than were called "
            "before it was saved, or another program"
        )
        if not self._recompile:
            raise ArtifactMismatch(f"{text}. recompile=True compiles it", [(title, "absent", "asked for")])
        ledger.add(Event(NOT_IN_ARTIFACT, title, text))
