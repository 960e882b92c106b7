"""What the system says of processes that may end while they are looked at."""

from __future__ import annotations

from pathlib import Path


def said(process: int | str, name: str) -> str:
    """The text of a process' file `name` beneath /proc, empty where there is no such process any more: which shows when
    the file is opened, or, of a process that ends behind it, when it is read."""
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def running(process: int | str) -> bool:
    """Whether there is a process of this number that has not ended (one that nobody has waited for has)."""
    state = said(process, "stat").rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def children(process: int | str) -> set[int]:
    """The processes that the threads of one have started and not waited for, ended ones too."""
    tasks = Path(f"/proc/{process}/task")
    try:
        threads = [task.name for task in tasks.iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {int(child) for thread in threads for child in said(process, f"task/{thread}/children").split()}
