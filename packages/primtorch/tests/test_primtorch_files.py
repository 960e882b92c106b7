"""A file appears whole, under its own name, as its user's files do; where it cannot, nothing of it is left."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from primtorch.files import appearing


def test_it_appears_whole_and_as_other_files_do(tmp_path: Path) -> None:
    before, plain = tmp_path / "file", tmp_path / "plain"
    before.write_bytes(b"before")
    plain.write_bytes(b"")
    with appearing(before) as stream:
        stream.write(b"part")
        stream.flush()
        assert before.read_bytes() == b"before"
        stream.write(b" and rest")
    assert before.read_bytes() == b"part and rest" and len(os.listdir(tmp_path)) == 2
    assert stat.S_IMODE(before.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_was_there_stays_where_writing_ends(kind: type[BaseException], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    with pytest.raises(kind), appearing(file) as stream:
        stream.write(b"part")
        raise kind
    assert file.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_errors_tell_the_name_of_the_file(tmp_path: Path) -> None:
    def full() -> None:
        with appearing(tmp_path / "file"):
            raise OSError(28, "No space left on device")

    def missing() -> None:
        with appearing(tmp_path / "nowhere" / "file"):
            raise AssertionError

    def another() -> None:
        with appearing(tmp_path / "file"):
            open(tmp_path / "other")  # noqa: SIM115 - it is not there

    def folder() -> None:
        with appearing(tmp_path):
            pass

    for write, told in ((full, "file"), (missing, "nowhere/file"), (another, "other")):
        with pytest.raises(OSError, match=rf"'{tmp_path}/{told}'$"):
            write()
    with pytest.raises(IsADirectoryError):
        folder()
    assert not os.listdir(tmp_path)
