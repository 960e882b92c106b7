"""Writes under inference mode, where tensors do not count them: each is in the graph, as under no_grad."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import torchcompile

FLAGGED = (
    "relu", "relu6", "elu", "celu", "selu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu",
    "threshold", "rrelu", "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
)  # fmt: skip
MORE = {
    "threshold": {"threshold": 0.5, "value": 2.0},
    **{name: {"training": False} for name in FLAGGED if "drop" in name},
}


def flagged(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        getattr(F, name)(y, inplace=True, **MORE.get(name, {}))
        return y

    return program


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, variance = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    return F.batch_norm(x, mean, variance, training=True), mean, variance


def into_out(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    torch.add(x, 1, out=y)
    return y


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    F.relu(y[0], inplace=True)
    y[1] = 0
    y[2:] += 1
    return y


PROGRAMS = {
    **{name: flagged(name) for name in FLAGGED},
    "positional": lambda x: F.relu(x, True),
    "given": lambda x: (F.hardtanh(x, -0.5, 0.5, True), x * 2),
    "statistics": statistics, "out": into_out, "view": through_a_view,
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes(name: str, mode: Callable[[], object]) -> None:
    program = PROGRAMS[name]
    with mode():  # type: ignore[attr-defined]
        x = torch.randn(4, 3, 2, dtype=torch.float64)
        given = x.clone()
        expected = program(x)
        found = torchcompile.compile(program, backend="aot_eager")(given)
        torch.testing.assert_close((found, given), (expected, x), rtol=1e-12, atol=0)


def _written(x: torch.Tensor) -> torch.Tensor:
    x[0] = 5.0
    return x + 1


def _handled(x: torch.Tensor) -> torch.Tensor:
    try:
        x.mul_(2)
    except RuntimeError:
        return x + 1
    return x


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "method": lambda x: x.add_(1),
    "behind another operator": lambda x: ((x * 2).sin(), x.mul_(2)),
    "view": lambda x: x.view(-1).add_(1),
    "item": _written,
    "slot": lambda x: x.__setitem__(0, 5.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "in place by a flag": lambda x: F.relu(x, inplace=True),
    "handled": _handled,
}


@pytest.mark.expected_eager("exception")  # the write raises where eager's does: behind a break
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_write_to_an_inference_tensor_outside_of_the_mode(name: str, backend: str) -> None:
    """Eager refuses it, once it has written."""

    def outcome(program: Callable[[torch.Tensor], object]) -> tuple[object, list[float]]:
        with torch.inference_mode():
            x = torch.tensor([1.0, -2.0, 3.0])
        try:
            result = program(x)
        except RuntimeError as error:
            result = str(error)
        return (result.tolist() if isinstance(result, torch.Tensor) else result), x.tolist()

    assert outcome(torchcompile.compile(REFUSED[name], backend=backend)) == outcome(REFUSED[name])


RESTRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t_": lambda v: v.t_(),
    "transpose_": lambda v: v.transpose_(0, 1),
    "swapaxes_": lambda v: v.swapaxes_(0, 1),
    "swapdims_": lambda v: v.swapdims_(0, 1),
    "squeeze_": lambda v: v.squeeze_(0),
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "as_strided_": lambda v: v.as_strided_((3, 2), (1, 3)),
}


@pytest.mark.parametrize("name", RESTRIDES)
def test_another_shape_in_place(name: str) -> None:
    """Under the mode operators that are programs of others arrive as they are."""

    def program(x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        view = base[:2]
        RESTRIDES[name](view)
        return x + view.shape[0] + view[0].sum()

    x, base = torch.ones(3), torch.arange(12.0).reshape(4, 3)
    compiled = torchcompile.compile(program, fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, base), program(x, base))
