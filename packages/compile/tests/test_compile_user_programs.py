"""Programs as users write them, from data to optimizer, in processes as users have them: plain warnings, nothing else run.

What each leaves is eager's in float64: losses, parameters, gradients, buffers, what the user's own classes collected.
Warnings are eager's too. A new program belongs into `user_programs` when it is of a kind that is not there.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from user_programs import FILES

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("file", FILES)
def test_programs_are_eagers(file: str) -> None:
    seed = random.randrange(1 << 20)
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "user_program_worker.py"), file, str(seed)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(replies) > 3
    for reply in replies:
        where = f"{reply['name']}, seed {seed}: {json.dumps(reply, indent=1)}"
        assert "raised" not in reply, f"{where}\n{reply['raised']}"
        assert not reply["differences"] and not reply["surprises"] and not reply["warned"], where
        assert len(reply["breaks"]) == reply["expected"] and reply["captured"], where
