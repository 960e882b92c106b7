"""What training scripts do around a model: a small part of `make protocols`."""

from __future__ import annotations

import random
import threading
from typing import Any

import protocol_run
import pytest
import torch
from protocol_programs import Program
from protocol_run import check
from protocols import PROTOCOLS, Subject, in_another_thread
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


# What layers of the nets leave a graph for, and what two of the protocols do to it.
@pytest.mark.expected_eager("print", "loop", "tensor_to_number", "module_hook", "program_raised", "list_of_each_length")
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


class Refusing(nn.Module):
    """Eager runs it once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2).double()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise OverflowError("as eager does")
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.expected_eager("exception", "program_raised")
def test_what_eager_raises_is_told_and_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = lambda step: ((torch.ones(2, 2, dtype=torch.float64),), {})
    monkeypatch.setattr(protocol_run, "build", lambda name, side: Program(name, Refusing(), batch))
    found: dict[str, dict[str, Any]] = {}
    pairs = [(name, "aot_eager") for name in ("accumulated", "evaluated")]
    check("refusing", pairs, lambda protocol, backend, row: found.update({protocol: row}))
    assert all(row["eager"] == "OverflowError: as eager does" and not row["differences"] for row in found.values())
    assert {protocol_run.outcome(row) for row in found.values()} == {"eager raises"}


class SeesThreads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


def test_other_rounding_errors_are_drawn_in_every_thread_of_a_protocol() -> None:
    """A thread begins without dispatch modes: what it computed was the same in each draw, and one digit off was wrong."""
    module = nn.Linear(2, 2).double()
    program = Program("linear", module, lambda step: ((torch.ones(2, 2, dtype=torch.float64),), {}))
    with SeesThreads() as seen:
        in_another_thread(Subject(program, module, module))
    assert len(seen.threads) == 2
