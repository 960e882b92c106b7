"""A function's bytecode as text for dumps."""

from __future__ import annotations

import dis
import re
import types
from pathlib import PurePath


def bytecode_text(code: types.CodeType) -> str:
    """What capture interprets: one instruction a line, without addresses, and with the file's name for its path."""
    head = f"# {code.co_qualname}, {PurePath(code.co_filename).name}:{code.co_firstlineno}\n"
    text = re.sub(r" at 0x[0-9a-f]+, file \"[^\"]*\", line \d+>", ">", dis.Bytecode(code).dis())
    return head + re.sub(r" at 0x[0-9a-f]+", "", text)
