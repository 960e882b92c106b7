"""Every optimizer of torch, as torch's own database sets it up: compiled steps are eager's, and few programs do for them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Muon, Optimizer, SparseAdam
from torch.testing._internal.common_optimizers import optim_db

import torchcompile

FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}
# Python's own branches on what is in a tensor: the step runs as it is, behind one break.
BREAKS = ("ASGD", "RAdam", "LBFGS", "SparseAdam")
STEPS = 4
KINDS = {info.optim_cls.__name__: info for info in optim_db}


def nets(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return net, copy.deepcopy(net)


def parameters(net: nn.Module, kind: type[Optimizer], grouped: bool) -> list[Any]:
    """Of the shapes that the optimizer takes; in two groups, of which the second has another rate."""
    found = [p for p in net.parameters() if kind is not Muon or p.dim() == 2]
    return [{"params": found[:1]}, {"params": found[1:], "lr": 0.003}] if grouped else found


def give_gradients(net: nn.Module, kind: type[Optimizer], draw: random.Random, step: int) -> None:
    """New ones for each step; one parameter has none in the second."""
    torch.manual_seed(draw.randrange(1 << 30))
    for place, p in enumerate(net.parameters()):
        gradient = torch.randn_like(p)
        p.grad = gradient.to_sparse() if kind is SparseAdam else gradient
        if step == 1 and place == 2:
            p.grad = None


def settings_of(name: str, draw: random.Random) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Two of the database's, in each form that the class has."""
    info = KINDS[name]
    known = [one.kwargs for one in info.optim_inputs_func(device="cpu")]
    forms = [form for form in FORMS if form == "loop" or next(iter(FORMS[form])) in info.supported_impls]
    for form in forms:
        how = FORMS[form] if len(info.supported_impls) > 1 or form != "loop" else {}
        for settings in draw.sample(known, min(2, len(known))):
            yield form, draw.random() < 0.5 and name != "LBFGS", {**settings, **how}


def taken(kind: type[Optimizer], net: nn.Module, grouped: bool, settings: dict[str, Any]) -> Optimizer | None:
    """The optimizer; None where the class refuses the settings."""
    try:
        return kind(parameters(net, kind, grouped), **copy.deepcopy(settings))
    except (TypeError, ValueError, RuntimeError):
        return None


def stepped(optimizer: Optimizer, net: nn.Module) -> Any:
    """A step, of LBFGS with the closure that it asks for."""
    if not isinstance(optimizer, LBFGS):
        return optimizer.step()

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = sum(((p - 0.3) ** 2).sum() for p in net.parameters())
        value.backward()  # type: ignore[union-attr]
        return value  # type: ignore[return-value]

    return optimizer.step(loss)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_eagers(name: str) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    kind = KINDS[name].optim_cls
    for form, grouped, settings in settings_of(name, draw):
        told = f"seed {seed}: {name}({settings}), {form}, {'two groups' if grouped else 'one group'}"
        net, twin = nets(seed)
        ours, theirs = (taken(kind, one, grouped, settings) for one in (net, twin))
        if ours is None or theirs is None:
            continue
        torchcompile.reset()
        step = torchcompile.compile(stepped, options={"strict": True})
        gradients = draw.randrange(1 << 30)
        for count in range(STEPS):
            for one in (net, twin):
                give_gradients(one, kind, random.Random(gradients + count), count)
            try:
                stepped(theirs, twin)
            except (AssertionError, RuntimeError) as error:  # what this device cannot do
                with pytest.raises(type(error)):
                    step(ours, net)
                break
            step(ours, net)
        else:
            alike(kind, net, twin, ours, theirs, told)
            report = torchcompile.report()
            assert not report.fallbacks and bool(report.breaks) == (name in BREAKS), (told, report)
            # Without state, with it, and where one parameter has no gradient.
            assert name in BREAKS or report.captured <= STEPS - 1, (told, report)


def alike(
    kind: type[Optimizer], net: nn.Module, twin: nn.Module, ours: Optimizer, theirs: Optimizer, told: str
) -> None:
    """Parameters and state. Counters, and what is computed of them, are of single precision, which Python's numbers are
    not: a step tells them apart by that. Muon's updates are made in bfloat16 (see below)."""
    off = max(float(group["lr"]) for group in theirs.param_groups) * 2**-22
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        if kind is not Muon:
            torch.testing.assert_close(p, q, rtol=1e-9, atol=off, msg=lambda m: f"{told}: {m}")
        mine, eagers = ours.state.get(p, {}), theirs.state.get(q, {})
        assert list(mine) == list(eagers), told
        for key, value in eagers.items():
            if isinstance(value, torch.Tensor):
                assert mine[key].dtype is value.dtype and mine[key].stride() == value.stride(), (told, key)
                close = torch.testing.assert_close
                close(mine[key], value, rtol=1e-6, atol=1e-9, msg=lambda m, key=key: f"{told}, {key}: {m}")


def test_muon_is_as_near_as_eager_to_an_update_of_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    (net, twin), (judge, _) = nets(seed), nets(seed)
    runs = [(one, Muon(parameters(one, Muon, False), lr=0.1)) for one in (net, twin, judge)]
    step = torchcompile.compile(stepped, fullgraph=True, options={"strict": True})
    for one, optimizer in runs:
        if one is judge:
            monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
        for count in range(STEPS):
            give_gradients(one, Muon, random.Random(seed + count), 0)
            (step if one is net else stepped)(optimizer, one)
    for p, q, exact in zip(net.parameters(), twin.parameters(), judge.parameters(), strict=True):
        mine, eagers = ((one - exact).norm() / exact.norm() for one in (p, q))
        assert mine <= 4 * eagers + 1e-3, f"seed {seed}: off by {mine}, eager by {eagers}"
