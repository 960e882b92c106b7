"""Tensors that a module's forward writes to its attributes and buffers: eager's state, and one version for modules that
are built alike, whatever hooks they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

import torchdynamo
from torchdynamo.api import owner_of


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.register_buffer("missing", None)
        self.last: Any = None


def adds_to_a_buffer(module: Any, x: torch.Tensor) -> Any:
    module.total += x.mean()
    return module.total * 2


def replaces_a_buffer(module: Any, x: torch.Tensor) -> Any:
    module.total = module.total * 2 + x.mean()
    module.unsaved = x.detach()[0, :2]
    return module.total


def fills_a_missing_buffer(module: Any, x: torch.Tensor) -> Any:
    module.missing = x.detach().mean()
    return module.missing + 1


def keeps_its_result(module: Any, x: torch.Tensor) -> Any:
    module.last = module.inner(x)
    module.further = module.last.mean()
    return module.last + module.further


def exchanges_buffers(module: Any, x: torch.Tensor) -> Any:
    module.total, module.unsaved = module.unsaved, module.total
    return module.total.sum() + x


def keeps_what_it_is_given(module: Any, x: torch.Tensor) -> Any:
    module.last = x
    module.same = module.total
    return x + 1


def clears(module: Any, x: torch.Tensor) -> Any:
    module.total = None
    module.last = x * 2
    module.last = None
    return x


def deletes_and_sets(module: Any, x: torch.Tensor) -> Any:
    del module.total
    module.total = x.mean()
    return module.total


def sets_through_the_registry(module: Any, x: torch.Tensor) -> Any:
    module._buffers["total"] = x.mean()
    module.total = module.total + 1
    return module.total


def makes_a_buffer(module: Any, x: torch.Tensor) -> Any:
    module.register_buffer("later", x.detach() * 2)
    module.later = module.later + 1
    return module.later


PROGRAMS = [
    adds_to_a_buffer, replaces_a_buffer, fills_a_missing_buffer, keeps_its_result, exchanges_buffers,
    keeps_what_it_is_given, clears, deletes_and_sets, sets_through_the_registry, makes_a_buffer,
]  # fmt: skip
SHARED = PROGRAMS[:4]


def _state(module: Any) -> Any:
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return (
        {name: None if value is None else value.detach() for name, value in module._buffers.items()},
        dict.fromkeys(module.state_dict(), 0),
        dict.fromkeys(sorted(module._non_persistent_buffers_set), 0),
        {name: (value.detach(), value.requires_grad) for name, value in tensors.items()},
    )


def _called(run: Callable[..., Any], module: Any, steps: int) -> list[Any]:
    found: list[Any] = []
    for step in range(steps):
        try:
            found.append(run(module, torch.full((2, 3), 1.0 + step)))
        except AttributeError as error:
            found.append({str(error): 0})
        found.append(_state(module))
    return found


def _made(seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    module = Written()
    for name, value in more.items():
        setattr(module, name, value)
    return module


def _compiled(program: Callable[..., Any]) -> Any:
    options = torchdynamo.CaptureOptions(strict=True)
    return torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_state_is_eager_s(program: Any) -> None:
    torch.testing.assert_close(_called(_compiled(program), _made(0), 3), _called(program, _made(0), 3))


@pytest.mark.parametrize("program", SHARED, ids=lambda program: program.__name__)
def test_modules_with_other_hooks_share_a_version(program: Any) -> None:
    compiled = _compiled(program)
    for seed in range(4):
        module, twin = _made(seed), _made(seed)
        for each in (module, twin):
            each.register_forward_hook(lambda *given: None)
        torch.testing.assert_close(_called(compiled, module, 2), _called(program, twin, 2))
    assert len(owner_of(compiled).versions()) <= 2


def test_hooks_for_all_buffers_are_told() -> None:
    told: list[str] = []
    compiled = _compiled(replaces_a_buffer)
    module = _made(0)
    compiled(module, torch.ones(2, 3))
    handle = register_module_buffer_registration_hook(lambda module, name, buffer: told.append(name))
    try:
        compiled(module, torch.ones(2, 3))
    finally:
        handle.remove()
    assert told == ["total", "unsaved"]


class Registers(Written):
    """It counts what is registered."""

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        object.__setattr__(self, "registered", getattr(self, "registered", 0) + 1)
        super().register_buffer(name, tensor, persistent)


class Refuses(Written):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "total":
            raise AttributeError("not this one")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [Registers, Refuses])
@pytest.mark.parametrize("program", [adds_to_a_buffer, replaces_a_buffer], ids=lambda program: program.__name__)
def test_a_class_with_a_word_in_it_has_it(kind: Any, program: Any) -> None:
    module, twin = kind(), kind()
    torch.testing.assert_close(_called(_compiled(program), module, 3), _called(program, twin, 3))
    assert getattr(module, "registered", 0) == getattr(twin, "registered", 0)


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))])
def test_a_tensor_that_a_registry_takes_is_registered(value: Any) -> None:
    def sets(module: Any, x: torch.Tensor) -> Any:
        module.last = value
        module.total = value if isinstance(value, nn.Buffer) else module.total
        return module.last + x.sum()

    module, twin = _made(0), _made(0)
    for each in (module, twin):
        del each.last
    torch.testing.assert_close(_called(_compiled(sets), module, 2), _called(sets, twin, 2))
    assert list(dict(module.named_parameters())) == list(dict(twin.named_parameters()))
