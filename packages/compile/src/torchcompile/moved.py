"""The cache folder in one file, for other machines of the same kind: a zip archive of the folder's files."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from primtorch.files import appearing
from torchcompile.errors import InvalidArgument
from torchcompile.store import Store, is_entry

MOST_FILE_BYTES = 1 << 30


def export_cache(store: Store, file: Path) -> int:
    """Writes all files of the cache into one, which appears whole; returns how many."""
    entries = store.entries()
    with appearing(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in entries:
            try:
                content = entry.path.read_bytes()
            except FileNotFoundError:  # another process has deleted it
                continue
            archive.writestr(entry.path.relative_to(store.cache).as_posix(), content)
        return len(archive.namelist())


def import_cache(store: Store, file: Path) -> int:
    """Takes the files of `export_cache` into the cache; returns how many. They hold machine code: take a file only from
    whom you would take a program.

    Raises:
        InvalidArgument: it is no such file, or the cache folder cannot be used.
    """
    if not store.usable:
        raise InvalidArgument(f"{store.folder} cannot be used: it is to be a folder that you alone write to")
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            for member in members:
                _check(member)
            torn = archive.testzip()
            if torn is not None:
                raise InvalidArgument(f"{file} cannot be imported: it is torn at {torn}")
            for member in members:
                _extract(archive, member, store.cache)
    except (OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidArgument(f"{file} cannot be imported: {error}") from error
    return len(members)


def _check(member: zipfile.ZipInfo) -> None:
    path = PurePosixPath(member.filename)
    strange = path.is_absolute() or ".." in path.parts or len(path.parts) > 3 or not is_entry(path.name)
    if strange or member.file_size > MOST_FILE_BYTES:
        raise InvalidArgument(f"the archive holds {member.filename!r}, which is no file of a compile cache")


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    """The file appears whole, for its owner alone."""
    target = folder / PurePosixPath(member.filename)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        written.touch(mode=0o700)
        written.write_bytes(archive.read(member))
        os.replace(written, target)
    except BaseException:
        written.unlink(missing_ok=True)  # the folder may be full
        raise
