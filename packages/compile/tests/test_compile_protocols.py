"""What training scripts do around a model: a small part of `make protocols`."""

from __future__ import annotations

import random
from typing import Any

import pytest
from protocol_run import check
from protocols import PROTOCOLS


# What layers of the nets leave a graph for, and what two of the protocols do to it.
@pytest.mark.expected_eager("print", "loop", "tensor_to_number", "module_hook", "program_raised")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("program", ["net/drawn", "tv/resnet18"])
def test_protocols(program: str, backend: str) -> None:
    if program == "net/drawn":
        program = f"net/{random.randrange(1 << 30)}"
    elif backend == "inductor":
        pytest.skip("takes long")
    wrong: list[str] = []

    def seen(protocol: str, backend: str, found: dict[str, Any]) -> None:
        wrong.extend(f"{protocol}: {difference}" for difference in found["differences"])

    check(program, [(p.name, backend) for p in PROTOCOLS], seen)
    assert not wrong, f"{program} on {backend}\n" + "\n".join(wrong)
