"""How much min_cut keeps: what saves traffic, and never more than eager's autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from aotautograd import min_cut, partition, trace_joint
from aotautograd.api import simplify
from aotautograd.lowering import Lowering, lower_joint
from aotautograd.schemas import JointGraph
from primtorch.memory import memory_of


class Layer(nn.Module):
    """A layer of a transformer that normalises first: what it adds goes into a sum through all layers."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        weights = F.softmax(q @ k.transpose(1, 2), -1)
        x = x + F.dropout(self.out(weights @ v), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), self.dropout)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * k) for k in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * k, 4, 3, padding=1) for k in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return x


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep, self.flat = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.norm, self.gate = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.hardswish(self.norm(self.deep(x)))
        return self.flat(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.within = nn.Linear(16, 16), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.within, self.before(x).tanh(), use_reentrant=False)
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state


def tokens() -> torch.Tensor:
    return torch.randn(4, 6, 16)


def pixels() -> torch.Tensor:
    return torch.randn(2, 8, 6, 6)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "one layer": (Layer, tokens),
    "layers": (lambda: nn.Sequential(*(Layer() for _ in range(4))), tokens),
    "dropped": (lambda: nn.Sequential(*(Layer(dropout=0.2) for _ in range(3))), tokens),
    "normalised behind": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 2),
        tokens,
    ),
    "gated": (lambda: nn.Sequential(Gated(), nn.RMSNorm(16), Gated()), tokens),
    "wide": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh()), tokens),
    "residual": (lambda: nn.Sequential(Residual(), Residual(), Residual()), pixels),
    "pooled": (lambda: nn.Sequential(Residual(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)), pixels),
    "plain": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()), pixels),
    "dense": (Dense, pixels),
    "squeezed": (lambda: nn.Sequential(Squeezed(), Squeezed()), pixels),
    "grouped norm": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)),
        pixels,
    ),
    "checkpointed": (Checkpointed, tokens),
    "recurrent": (Recurrent, tokens),
}


def joint_of(make: Callable[[], nn.Module], x: torch.Tensor, lowered: bool) -> tuple[JointGraph, int]:
    """The joint graph of a network's step, and the bytes that eager's autograd keeps beside inputs."""
    net = make()
    given = {**dict(net.named_parameters()), **dict(net.named_buffers())}

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        return [torch.func.functional_call(net, dict(zip(given, args, strict=False)), args[-1:]).float().sum()]

    joint = simplify(trace_joint(run, [*given.values(), x]))
    own = {t.untyped_storage().data_ptr() for t in (*given.values(), x)}
    kept: dict[int, int] = {}
    alive: list[object] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)  # no other storage gets the address
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(*given.values(), x)
    return simplify(lower_joint(joint, Lowering("prims"))) if lowered else joint, sum(kept.values())


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_more_is_kept_than_eager_keeps(name: str, lowered: bool, bfloat16: bool) -> None:
    torch.manual_seed(0)
    make, example = NETWORKS[name]
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        joint, eager = joint_of(make, example(), lowered)
    assert joint.kept_bytes is not None and joint.kept_bytes <= eager  # of a cell that is called again, less
    assert partition(joint, min_cut()).report.bytes <= eager


def behind(node: fx.Node) -> set[fx.Node]:
    """What a value of the backward is computed from by what the forward would compute it with."""
    if node.op == "placeholder" or node.meta["phase"] == "backward":
        return {node}
    return set[fx.Node]().union(*map(behind, node.all_input_nodes))


@pytest.mark.parametrize("lowered", [False, True])
def test_what_calls_of_both_halves_read_is_kept(lowered: bool) -> None:
    joint, _ = joint_of(NETWORKS["residual"][0], pixels(), lowered)
    parts = partition(joint, min_cut())
    calls = [n for n in parts.backward.graph.nodes if "convolution_backward" in str(n.target)]
    assert len(calls) == 6
    for call in calls:
        given = call.args[1]
        assert isinstance(given, fx.Node) and memory_of(given).op == "placeholder", "an operand is computed again"
    names = [n.name for n in partition(joint, min_cut(0.5)).backward.graph.nodes if n.op == "placeholder"]
    assert not {memory_of(call.args[1]).name for call in calls} <= set(names)


def test_a_sum_through_all_layers_is_kept_within() -> None:
    make, example = nn.Sequential, tokens
    layers = [Layer() for _ in range(8)]
    with torch.autocast("cpu", torch.bfloat16):
        joint, _ = joint_of(lambda: make(*layers), example(), True)
    parts = partition(joint, min_cut())
    most = max(len(behind(n)) for n in parts.backward.graph.nodes if n.op == "call_function")
    assert most <= 8, "a sum is computed again from what all layers before have added"
