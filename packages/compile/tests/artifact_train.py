"""A process of `test_compile_artifacts.py`: saves a compiled vision transformer, or trains one that it loads."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from unittest import mock

import torch
from artifact_vit import ViT

import aotautograd.api
import torchcompile
import torchinductor.compile

STEPS = 20


def train(model: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.Tensor], steps: int) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(parameters, 0.1), []
    for step in range(steps):
        images = torch.randn(4 if step % 2 else 6, 1, 8, 8, dtype=torch.float64)
        loss = torch.nn.functional.cross_entropy(model(images), torch.arange(len(images)) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def infer(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(torch.ones(2, 1, 8, 8, dtype=torch.float64))


def main(stage: str, folder: str) -> None:
    file = f"{folder}/vit"
    torch.manual_seed(0)
    model = ViT().double()
    eager = copy.deepcopy(model)
    if stage == "save":
        compiled = torchcompile.compile(model, dynamic=False)
        train(compiled, list(model.parameters()), 2)
        infer(compiled)
        torchcompile.save(compiled, file)
        return
    os.environ["PATH"] = "/nowhere"
    os.environ.pop("CXX", None)
    compiled = torchcompile.load(file, model)
    nothing = mock.Mock(side_effect=AssertionError("the first call compiles"))
    with (
        mock.patch.object(aotautograd.api, "trace_joint", nothing),
        mock.patch.object(torchinductor.compile, "lower_graph", nothing),
    ):
        found = train(compiled, list(model.parameters()), STEPS), infer(compiled)
    torch.testing.assert_close(found, (train(eager, list(eager.parameters()), STEPS), infer(eager)))
    assert not [event for event in torchcompile.report().events if event.kind.id != "recompiled"]


if __name__ == "__main__":
    main(*sys.argv[1:])
