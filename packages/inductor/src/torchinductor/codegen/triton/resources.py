"""What a compiled kernel takes of a processor: registers, memory for what these do not hold, shared memory.

Read out of the binary by the tool that comes with Triton, so that no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

from primtorch.frozen import record

from .compiler import Binary

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_LINE = re.compile(r"REG:(\d+)\s+STACK:(\d+)")


@record
class Resources:
    """A kernel's needs.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that registers do not hold.
        shared: bytes of a program, that it asks for at its launch.
    """

    registers: int
    spilled: int
    shared: int

    def within(self, bound: Resources) -> bool:
        """Whether it takes no more than that."""
        mine = (self.registers, self.spilled, self.shared)
        return all(a <= b for a, b in zip(mine, (bound.registers, bound.spilled, bound.shared), strict=True))


def resources_of(binary: Binary) -> Resources:
    """Raises RuntimeError where the tool does not say."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.code)
        file.flush()
        done = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=False)
    found = _LINE.search(done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resources: {done.stdout}{done.stderr}")
    return Resources(int(found.group(1)), int(found.group(2)), int(binary.record["shared"]))
