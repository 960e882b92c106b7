"""No composite of ATen follows a null pointer on fakes: their tensors have no memory, over symbols neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from composite_calls import Drawn, composites

from primtorch.errors import DataDependentValue

CALLS = Path(__file__).with_name("composite_calls.py")


def test_no_composite_ends_the_process() -> None:
    ops, start, died = composites(), 0, []
    assert len(ops) > 500
    while True:
        ran = subprocess.run([sys.executable, CALLS, str(start)], capture_output=True, text=True)
        *_, last = ran.stdout.split()
        if last == "done":
            break
        died.append(str(ops[int(last)]))
        start = int(last) + 1
    assert not died, f"status {ran.returncode} of {died}"


@pytest.mark.parametrize(
    "gates, network",
    [(3, torch.gru), (4, torch.lstm), (1, torch.rnn_tanh), (1, torch.rnn_relu)],
    ids=lambda x: str(x)[:20],
)
def test_networks_over_packed_sequences_are_refused(gates: int, network: object) -> None:
    """Their arguments no schema tells: batch sizes, and a list of weights that fit."""
    drawn = Drawn(2, torch.float32, 1)
    data, sizes = drawn.fake(2, torch.float32), drawn.fake(1, torch.int64)
    with drawn.mode:
        weights = [torch.ones(4 * gates, 4), torch.ones(4 * gates, 4)]
        state = torch.ones(1, 3, 4)
    states = [state, state] if network is torch.lstm else state
    with pytest.raises(DataDependentValue, match="reads a tensor's memory"):
        network(data, sizes, states, weights, False, 1, 0.0, False, False)  # type: ignore[operator]
