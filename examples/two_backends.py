"""Two back ends for one model: a vendor's unit takes matrix products and tanh, inductor all the rest, in training."""

import torch

import torchcompile
from torchcompile import Capability


@torchcompile.register_backend(name="unit", capability=Capability({"mm", "tanh"}, cost=0.5, border=0.4))
def unit(graph, example_inputs):
    """A piece of a forward or backward graph: only prims that were declared, sizes first, then tensors."""

    class Unit(torch.fx.Interpreter):  # stands for a compiler
        def call_function(self, target, args, kwargs):
            if target.name == "mm":
                left, right = args
                return (left.unsqueeze(-1) * right).sum(1)  # stands for a matrix unit
            return super().call_function(target, args, kwargs)

    return Unit(graph).run


model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4), torch.nn.Softmax(-1))
batch = torch.randn(16, 8)
model(batch).square().mean().backward()
expected = [parameter.grad for parameter in model.parameters()]

model.zero_grad()
compiled = torchcompile.compile(model, backend=["unit", "inductor"], fullgraph=True)
compiled(batch).square().mean().backward()
torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)

for piece in torchcompile.report().pieces:
    print(piece)
assert {piece.backend for piece in torchcompile.report().pieces} == {"unit", "inductor"}
