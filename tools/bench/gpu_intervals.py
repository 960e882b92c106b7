"""When the kernels of a GPU ran, at little cost to the thread that launches them.

torch.profiler records each call of the CUDA runtime and driver as well, which made a step of many small kernels half as
long again (docs/results/h200_distributed.md): where the device waits for the host it then shows another step than the
one that users run. Here CUPTI records the device alone. It is not for a process that uses torch.profiler, too: what
CUPTI records goes to one reader.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
import time
from pathlib import Path

Interval = tuple[str, float, float]  # name, begin and end, in microseconds of `time.time`


class Recorder:
    """Records from its making to the end of this process, on all of its devices.

    Raises:
        RuntimeError: CUPTI is not there, or refuses.
    """

    def __init__(self) -> None:
        loaded = re.search(r"/\S*libcupti\.so\S*", Path("/proc/self/maps").read_text())
        if loaded is None:
            raise RuntimeError("this process has not loaded libcupti, which torch for CUDA does")
        self._folder = tempfile.TemporaryDirectory()
        built = f"{self._folder.name}/intervals.so"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run(["c++", "-O1", "-std=c++17", "-shared", "-fPIC", source, "-o", built, "-ldl"], check=True)
        self._recorder = ctypes.CDLL(built)
        self._recorder.now.restype = ctypes.c_uint64
        if error := self._recorder.begin(loaded.group().encode()):
            raise RuntimeError(f"CUPTI's error {error}")

    def take(self) -> list[Interval]:
        """What ran since the last time. The devices have to be idle."""
        offset = time.time_ns() - self._recorder.now()
        path = Path(self._folder.name, "intervals.txt")
        if self._recorder.take(str(path).encode()):
            raise RuntimeError(f"{path} cannot be written")
        lines = (line.split(" ", 2) for line in path.read_text().splitlines())
        return [(name, (int(b) + offset) * 1e-3, (int(e) + offset) * 1e-3) for b, e, name in lines]
