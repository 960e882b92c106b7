"""Records that cross the package's boundary."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, slots=True)
class UserFrame:
    """One line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


_NOT_THE_USERS = frozenset(
    [
        "torch",
        "primtorch",
        "aotautograd",
        "torchdynamo",
        "torchinductor",
        "torchcompile",
        "torchdistributed",
        "contextlib",
    ]
)


def calling_frames(limit: int = 8) -> tuple[UserFrame, ...]:
    """The innermost lines of the Python stack outside of torch and of these packages, outermost first."""
    frames: list[UserFrame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < limit:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS:
            frames.append(UserFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))
