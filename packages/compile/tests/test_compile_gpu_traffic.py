"""Training steps on a GPU, counted without one: a fusion that is lost shows as launches or bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from counted_traffic import traffic_of_step

pytest.importorskip("triton")


class Block(torch.nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear, norm = torch.nn.Linear, torch.nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, -1, 64).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Language(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50257, 256)
        self.blocks = torch.nn.Sequential(Block(256), Block(256))
        self.head = torch.nn.Linear(256, 50257, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.words(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Images(torch.nn.Module):
    """Inverted residuals, as mobile networks have them."""

    def __init__(self) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        layers = [conv(3, 32, 3, 2, 1, bias=False), norm(32), torch.nn.Hardswish()]
        for _ in range(2):
            layers += [conv(32, 96, 1, bias=False), norm(96), torch.nn.ReLU()]
            layers += [conv(96, 96, 3, 1, 1, groups=96, bias=False), norm(96), torch.nn.ReLU()]
            layers += [conv(96, 32, 1, bias=False), norm(32)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().mean((2, 3))


class Stem(torch.nn.Module):
    """As residual networks begin: what lies before a pool of overlapping windows is normalised."""

    def __init__(self) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        layers = [conv(3, 64, 7, 2, 3, bias=False), norm(64), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)]
        self.layers = torch.nn.Sequential(*layers, conv(64, 64, 1, bias=False), norm(64), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().mean((2, 3))


# (launches, gigabytes of generated kernels) of forward and backward, as they are. Depthwise convolutions and all of their
# gradients are among them.
CASES = {
    "language": (Language, (8, 1024), {"forward": (11, 1.93), "backward": (27, 2.24)}),
    "images": (Images, (64, 3, 112, 112), {"forward": (28, 0.74), "backward": (27, 1.45)}),
    "stem": (Stem, (32, 3, 224, 224), {"forward": (10, 0.33), "backward": (7, 0.37)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_takes_no_more_launches_and_bytes(name: str) -> None:
    made, shape, limits = CASES[name]
    inputs = torch.zeros(shape, dtype=torch.int64) if name == "language" else torch.empty(shape)
    found = traffic_of_step(made(), (inputs,), {})
    for kind, (launches, gigabytes) in limits.items():
        assert found[kind].kernels <= launches, found
        assert found[kind].moved <= gigabytes * 1e9, found


def test_steps_are_counted_where_programs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are by default: the tools that count have no test's settings."""
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path))
    found = traffic_of_step(torch.nn.Linear(64, 64), (torch.randn(32, 64),), {})
    assert found.keys() == {"forward", "backward"} and all(part.calls for part in found.values())
