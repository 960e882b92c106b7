"""One small function, compiled with every stage written to a folder: what docs/walkthrough.md follows.

python examples/score.py [folder]
"""

import sys

import torch

import torchcompile


def score(x, bias, weight, shift):
    hidden = torch.nn.functional.gelu(x + bias)
    hidden = torch.nn.functional.layer_norm(hidden, (hidden.shape[-1],), weight, shift)
    return hidden.sum()


def inputs():
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in ((64, 32), (32,), (32,), (32,))]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "score_stages"
    compiled = torchcompile.compile(score, fullgraph=True, options={"dump": folder})
    arguments = inputs()
    result = compiled(*arguments)
    result.backward()

    expected = score(*arguments)
    gradients = torch.autograd.grad(expected, arguments)
    torch.testing.assert_close(result, expected)
    for argument, gradient in zip(arguments, gradients, strict=True):
        torch.testing.assert_close(argument.grad, gradient)
    print(f"equal to eager; the stages are in {folder}")
