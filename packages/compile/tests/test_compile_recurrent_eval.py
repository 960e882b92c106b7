"""Recurrent layers where no gradient is needed: one graph, whatever kernel eager calls for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchcompile
import torchdynamo
from primtorch.testing import assert_as_accurate


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_without_gradients_is_one_graph(
    kind: type[nn.Module], bidirectional: bool, batch_first: bool
) -> None:
    seed = torch.seed()
    layer = kind(4, 5, num_layers=2, bidirectional=bidirectional, batch_first=batch_first).eval()
    exact = kind(4, 5, num_layers=2, bidirectional=bidirectional, batch_first=batch_first).eval().double()
    exact.load_state_dict(layer.state_dict())
    compiled = torchcompile.compile(layer)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(6, 3, 4)
            assert_as_accurate(compiled(x), layer(x), exact(x.double()), f"seed {seed}")
    stats = torchdynamo.stats()
    assert stats.graphs == 1 and not stats.break_details and not stats.fallbacks
