"""A back end on aotautograd and primtorch: forward and backward in about 240 primitives, of which it replaces some."""

import torch

import primtorch
from aotautograd import aot_function, min_cut


class Device:
    """A vendor's own kernels, one method a prim; the reference stands in for each one that is missing."""

    def __init__(self):
        self.used = set()

    def mm(self, a, b):
        self.used.add("mm")
        return (a.unsqueeze(-1) * b).sum(1)  # stands for a matrix unit

    def tanh(self, a):
        self.used.add("tanh")
        return 2 * torch.sigmoid(2 * a) - 1


device = Device()


def compiler(graph, example_inputs):
    primtorch.verify(graph)  # proves that nothing but prims is left
    return primtorch.interpret(graph, device)


def loss(x, first, second):
    return (torch.tanh(x @ first) @ second).square().mean()


compiled = aot_function(loss, fw_compiler=compiler, partitioner=min_cut(), decompositions="prims")
x, first, second = torch.randn(4, 3), torch.randn(3, 5, requires_grad=True), torch.randn(5, 2, requires_grad=True)
value = compiled(x, first, second)
value.backward()

expected = loss(x, first, second)
torch.testing.assert_close(value, expected)
for weight, gradient in zip((first, second), torch.autograd.grad(expected, (first, second)), strict=True):
    torch.testing.assert_close(weight.grad, gradient)
assert device.used == {"mm", "tanh"}
