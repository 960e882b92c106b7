"""Scripts that run kernels in Triton's interpreter, which a process decides for before it imports Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def replies(worker: str, *arguments: str) -> list[dict[str, Any]]:
    """What a script beside the tests prints in Triton's interpreter: a JSON line a case. Raises CalledProcessError."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, worker, *arguments],
        cwd=Path(__file__).resolve().parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
