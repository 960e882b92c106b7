"""Recurrent layers: one graph, whatever kernel eager calls for them."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_with_gradients_is_one_graph(kind: type[nn.Module], bidirectional: bool) -> None:
    """oneDNN's LSTM keeps for its backward what it alone can read: the graph has the operators of the plain one."""
    seed = torch.seed()
    layer = kind(4, 5, num_layers=2, bidirectional=bidirectional)
    exact = kind(4, 5, num_layers=2, bidirectional=bidirectional).double()
    exact.load_state_dict(layer.state_dict())

    def gradients(call: Any, layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        output, state = call(x)
        values = [output, *(state if isinstance(state, tuple) else (state,))]
        sum(v.square().sum() for v in values).backward()
        found = [p.grad for p in (x, *layer.parameters())]
        layer.zero_grad()
        return [*(v.detach() for v in values), *found]

    compiled, x = torchcompile.compile(layer), torch.randn(6, 3, 4)
    for _ in range(2):
        expected = gradients(layer, layer, x), gradients(exact, exact, x.double())
        assert_as_accurate(gradients(compiled, layer, x), *expected, f"seed {seed}")
    stats = torchdynamo.stats()
    assert stats.graphs == 1 and not stats.break_details and not stats.fallbacks


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_of_varying_lengths(kind: type[nn.Module]) -> None:
    """The longest one's length is a symbol of the graph behind the break, of which the layer's kernel would read sizes."""
    torch.manual_seed(seed := torch.seed())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = kind(4, 5, batch_first=True, bidirectional=True), nn.Linear(10, 2)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
            return self.out(padded.sum(1)).sin()

    net = Net().double()
    compiled = torchcompile.compile(net)
    for longest in (7, 9, 8, 1, 9):
        x = torch.randn(3, 9, 4, dtype=torch.float64)
        lengths = torch.cat([torch.randint(1, longest + 1, (2,)), torch.tensor([longest])])
        found = []
        for call in (net, compiled):
            result = call(x, lengths)
            found.append([result, *torch.autograd.grad(result.sum(), list(net.parameters()))])
        torch.testing.assert_close(found[0], found[1], msg=lambda text: f"seed {seed}: {text}")


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh", "relu"])
def test_packed_sequences_leave_the_graph(kind: str, dynamic: bool | None) -> None:
    """Their kernels read how long each is, whether or not there is data to read."""
    made: Any = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind) or (lambda *a, **k: nn.RNN(*a, **k, nonlinearity=kind))
    layer = made(4, 3, batch_first=True).double()

    def program(x: torch.Tensor) -> Any:
        lengths = torch.tensor([2] * (x.shape[0] - 1) + [5])
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, lengths, batch_first=True, enforce_sorted=False)
        out, state = layer(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].sin(), state

    compiled = torchcompile.compile(program, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 5, 4, dtype=torch.float64, requires_grad=True)
        found, wanted = compiled(x), program(x)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out, _ in (found, wanted)]
        torch.testing.assert_close(*gradients)
