"""Records that cross the package's boundary."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

import torch

from primtorch.frozen import record

TORCH = os.path.dirname(torch.__file__) + os.sep
"""How the names of torch's own files begin."""

UPDATES = "updates"
"""Key in a graph module's meta: place of a result -> place of the placeholder whose new value it is, for results that
the graph's caller would copy into the input. What runs the graph may write them into the input's memory, and return
that; whoever copies looks whether it has happened."""

DONATED = "donated"
"""Key in a placeholder's meta: true of a tensor whose memory only the graph's own stack has ever seen. What runs the
graph may write over it, where at that call nobody else holds it any more."""


@record
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
        if _is_the_users(frame):
            frames.append(UserFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


def frames_of(traceback: TracebackType | None) -> tuple[UserFrame, ...]:
    """The lines that an error came through, outside of torch and of these packages, outermost first."""
    frames: list[UserFrame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_the_users(traceback.tb_frame):
            frames.append(UserFrame(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return tuple(frames)


def _is_the_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS
