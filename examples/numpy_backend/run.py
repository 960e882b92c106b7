"""A ResNet and a BERT, forward and backward, on numpy: trace to ATen, lower to prims, prove it, run."""

import backend
import torch
from torch import nn
from torch.nn import functional as F

import primtorch
from primtorch.testing import conformance


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.skip = nn.Conv2d(channels, out, 1, stride)
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(out)) for _ in range(2)])

    def norm(self, x, weight):
        return F.batch_norm(x, None, None, weight, torch.zeros_like(weight), training=True)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x), self.weights[0]))
        return F.relu(self.norm(self.second(y), self.weights[1]) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, 2, 3)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, images, labels):
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        x = F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


class Bert(nn.Module):
    def __init__(self, words=40, width=16, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(12, width)
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "qkv": nn.Linear(width, 3 * width),
                        "out": nn.Linear(width, width),
                        "up": nn.Linear(width, 4 * width),
                        "down": nn.Linear(4 * width, width),
                        "norm1": nn.LayerNorm(width),
                        "norm2": nn.LayerNorm(width),
                    }
                )
                for _ in range(layers)
            ]
        )
        self.head = nn.Linear(width, words)

    def forward(self, ids, labels):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in layer["qkv"](x).chunk(3, -1))
            mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
            x = layer["norm1"](x + layer["out"](mixed.transpose(1, 2).flatten(2)))
            x = layer["norm2"](x + layer["down"](F.gelu(layer["up"](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train_on_numpy(model, inputs):
    """(loss, gradients...) of one step, by numpy and by eager."""
    parameters = list(model.parameters())

    def step(*arguments):
        loss = model(*arguments[: len(inputs)])
        return (loss, *torch.autograd.grad(loss, parameters))

    lowered = primtorch.lower(primtorch.trace(step, *inputs, *parameters))
    primtorch.verify(lowered)
    run = primtorch.interpret(lowered, backend.NumpyBackend())
    got = [backend.to_torch(a) for a in run(*map(backend.to_numpy, (*inputs, *parameters)))]
    return got, step(*inputs, *parameters)


def main():
    torch.manual_seed(0)
    models = {
        "ResNet": (ResNet().double(), (torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 3]))),
        "BERT": (Bert().double(), (torch.randint(0, 40, (2, 9)), torch.randint(0, 40, (2, 9)))),
    }
    for name, (model, inputs) in models.items():
        got, expected = train_on_numpy(model, inputs)
        torch.testing.assert_close(tuple(got), expected, rtol=1e-7, atol=1e-9)
        print(f"{name}: loss {got[0].item():.6f}, {len(got) - 1} gradients equal to eager's")
    print(
        conformance(
            backend.NumpyBackend(),
            to_backend=backend.to_numpy,
            from_backend=backend.to_torch,
            dtypes=set(backend.DTYPES),
        )
    )


if __name__ == "__main__":
    main()
