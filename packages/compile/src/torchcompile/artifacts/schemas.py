"""What a file of a compiled program holds, as records."""

from __future__ import annotations

from primtorch.frozen import record

FORMAT = 5


@record
class Fact:
    """What a compiled program depends on beside its code: another value of it, and the program is another one."""

    name: str
    value: str


@record
class CodeRow:
    """A function whose code the program is made of, by where it is defined and by what it says."""

    module: str
    qualname: str
    digest: str


@record
class Manifest:
    """The first entry of a file.

    Attributes:
        settings: arguments of `torchcompile.compile`.
        options: its `options`, those that say nothing of a machine.
        code: of the functions that were captured, and of those that they call.
        graphs: of each captured graph its name in the report of the process that wrote the file.
        devices: types of those whose facts are among the facts.
        files: the hash of each other entry.
    """

    format: int
    facts: tuple[Fact, ...]
    settings: dict[str, object]
    options: dict[str, object]
    code: tuple[CodeRow, ...]
    graphs: tuple[str, ...]
    devices: tuple[str, ...]
    files: dict[str, str]


@record
class Contents:
    """A file, read and found whole: compiled forms by graph and part, captured frames by key; kernels as files by
    name."""

    manifest: Manifest
    programs: dict[str, str]
    kernels: dict[str, bytes]
