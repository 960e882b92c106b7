"""Files that appear whole, and files that nobody else can have written.

Whoever reads one of the first finds what was there before, or all of what has been written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A stream to write a file to, which has its name behind the block, and is readable for whom the user's umask says.

    Where the block raises, or there is no room, nothing is left of it, and what had the name still has it.

    Raises:
        OSError: the file cannot be written; it tells the file's own name.
    """
    target = Path(path)
    written = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as stream:
            yield stream
        os.replace(written, target)
    except OSError as error:
        if error.filename in (str(written), None) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(target)) from error
        raise
    finally:
        written.unlink(missing_ok=True)


def is_trusted(path: Path, others: int = stat.S_IWOTH) -> bool:
    """Whether a file or folder is the user's own or the system's, no link, and not for `others` to write to.

    Raises:
        OSError: there is none.
    """
    found = path.lstat()
    own = not hasattr(os, "geteuid") or found.st_uid in (0, os.geteuid())
    return own and not stat.S_ISLNK(found.st_mode) and not found.st_mode & others
