"""The file: a zip archive of a manifest, compiled forms as text, and kernels as built, each with its hash."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from primtorch.files import appearing
from primtorch.records import NotARecord, NotAsText, Records
from torchcompile.artifacts.schemas import FORMAT, CodeRow, Contents, Fact, Manifest
from torchcompile.errors import ArtifactError, ArtifactMismatch

_RECORDS = Records((Manifest, Fact, CodeRow))
_MANIFEST = "manifest.json"
_EXPORTED = "program.json"  # what an exported graph's file has in its place
_PROGRAM = re.compile(r"programs/([0-9a-f]{40}\.\w+)")
_FRAME = re.compile(r"frames/([0-9a-f]{40}\.frame_[0-9])")
_KERNEL = re.compile(r"kernels/([0-9a-f]{32,40}\.(?:so|cubin|json))")
MOST_BYTES = 4 << 30  # of a file, unpacked


def write(file: str | os.PathLike[str], manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Writes a file, which appears whole.

    Raises:
        ArtifactError: something of the manifest has no form as text, or the file cannot be written.
    """
    target = Path(file)
    hashes = {name: _hash(content) for name, content in contents.items()}
    try:
        text = _RECORDS.text(replace(manifest, files=hashes))
        with appearing(target) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, text)
            for entry, content in contents.items():
                archive.writestr(entry, content)
    except (NotAsText, OSError) as error:
        raise ArtifactError(f"{target} cannot be written: {error}") from error


def read(file: str | os.PathLike[str]) -> Contents:
    """Reads a file. Nothing of it is unpickled, imported or run.

    Raises:
        ArtifactError: it is torn, or none of `write`'s.
        ArtifactMismatch: it is of a release that wrote another format.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > MOST_BYTES:
                raise ArtifactError(f"{file} holds more than {MOST_BYTES} bytes")
            held = {member.filename: archive.read(member) for member in members}
        if _EXPORTED in held:
            raise ArtifactError(f"{file} is an exported graph, which needs no model: torchcompile.load({str(file)!r})")
        text = held.pop(_MANIFEST).decode()
        _hold_to_format(file, text)
        manifest = _RECORDS.value(text)
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror or error}") from error
    except (EOFError, KeyError, ValueError, NotARecord, zipfile.BadZipFile, NotImplementedError) as error:
        raise ArtifactError(f"{file} is torn, or no file of torchcompile.save: {error}") from error
    except zipfile.zlib.error as error:  # type: ignore[attr-defined]
        raise ArtifactError(f"{file} is torn: {error}") from error
    if not isinstance(manifest, Manifest):
        raise ArtifactError(f"{file} is torn, or no file of torchcompile.save: its manifest is none")
    if {name: _hash(content) for name, content in held.items()} != manifest.files:
        raise ArtifactError(f"{file} is torn: what it holds is not what its manifest says")
    programs: dict[str, str] = {}
    kernels: dict[str, bytes] = {}
    for name, content in held.items():
        if found := _PROGRAM.fullmatch(name) or _FRAME.fullmatch(name):
            programs[found[1]] = content.decode()
        elif found := _KERNEL.fullmatch(name):
            kernels[found[1]] = content
        else:
            raise ArtifactError(f"{file} holds {name!r}, which is no entry of such a file")
    return Contents(manifest, programs, kernels)


def _hold_to_format(file: str | os.PathLike[str], text: str) -> None:
    """The format comes first in every release's manifest: one of another has other fields behind it.

    Raises:
        ArtifactMismatch: it is none that this release reads.
    """
    match json.loads(text):
        case {"record": ["Manifest", int(found), *_]} if found != FORMAT:
            raise ArtifactMismatch(
                f"{file} does not fit: it is of format {found}, and this release of torchcompile reads {FORMAT}. Save "
                "it anew with this release, or load it with the one that wrote it",
                [("format", str(found), str(FORMAT))],
            )


def is_compiled(file: str | os.PathLike[str]) -> bool:
    """Whether a file holds what a model was compiled to, as far as its table of contents says."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _MANIFEST in archive.namelist()
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


def program_entry(name: str) -> str:
    """Where a program lies in an artifact's archive."""
    return f"programs/{name}"


def frame_entry(name: str) -> str:
    """Where a captured frame lies in an artifact's archive."""
    return f"frames/{name}"


def kernel_entry(name: str) -> str:
    """Where a kernel's file lies in an artifact's archive."""
    return f"kernels/{name}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
