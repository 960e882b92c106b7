"""`register_flattening`: classes that wrap others and do not say how, traced through by the table's word."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchcompile
from primtorch import flattenings

Tensor = torch.Tensor


class Paired(torch.Tensor):
    """A tensor, and one that goes with it through every operator. It has no `__tensor_flatten__`."""

    first: Tensor
    second: Tensor
    label: str

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor, label: str, requires_grad: bool = False) -> Paired:
        made: Paired = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, first.shape, dtype=first.dtype, requires_grad=requires_grad
        )
        made.first, made.second, made.label = first, second, label
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = next(arg.label for arg in args if isinstance(arg, Paired))
        both = [
            func(*(getattr(a, name) if isinstance(a, Paired) else a for a in args), **(kwargs or {}))
            for name in ("first", "second")
        ]
        return Paired(*both, label)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def apart(tensor: Paired) -> tuple[list[str], str]:
    return ["first", "second"], tensor.label


def together(parts: Any, label: str, size: Any, stride: Any) -> Paired:
    return Paired(parts["first"], parts["second"], label)


@pytest.fixture
def registered() -> Iterator[None]:
    torchcompile.register_flattening(Paired, apart, together, elementwise=True)
    yield
    del flattenings._FLATTENINGS[Paired]


def program(x: Tensor) -> Any:
    pair = Paired(x.detach().sin(), x.detach().cos(), "made") * 2
    return pair, pair.second * x


def of_inputs(pair: Paired) -> Any:
    return pair.sin() * pair, pair.first + 1


def parts(value: Any) -> list[Any]:
    if isinstance(value, Paired):
        return [Paired, value.label, value.first.detach(), value.second.detach()]
    return [type(value), value.detach()]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_tensors_of_the_class_are_made_in_one_graph(backend: str, dynamic: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        observed = []
        for run in (program, compiled):
            x = torch.randn(rows, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            pair, product = run(x.requires_grad_())
            observed.append([*parts(pair), *parts(product), *parts(torch.autograd.grad(product.sum(), x)[0])])
        torch.testing.assert_close(observed[1][2:4], observed[0][2:4], msg=lambda m: f"seed {seed}: {m}")
        torch.testing.assert_close(observed[1][5::2], observed[0][5::2], msg=lambda m: f"seed {seed}: {m}")
        assert observed[1][:2] == observed[0][:2] == [Paired, "made"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_tensors_of_the_class_come_in_and_what_they_hold_is_guarded(backend: str, gradient: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(of_inputs, backend=backend, fullgraph=True)
    for label in ("one", "one", "another"):
        observed = []
        for run in (of_inputs, compiled):
            numbers = torch.Generator().manual_seed(seed)
            both = (torch.randn(3, dtype=torch.float64, generator=numbers) for _ in range(2))
            pair = Paired(*both, label, requires_grad=gradient)
            product, first = run(pair)
            gradients = torch.autograd.grad(product, pair, torch.ones_like(product)) if gradient else ()
            observed.append([part for value in (product, first, *gradients) for part in parts(value)])
        for a, b in zip(*observed, strict=True):
            if isinstance(b, Tensor):
                torch.testing.assert_close(a, b, msg=lambda m: f"seed {seed}: {m}")
            else:
                assert a == b, f"seed {seed}"
    assert torchcompile.report().captured == 2  # for two labels


@pytest.mark.expected_eager(...)
def test_without_an_entry_the_graph_breaks() -> None:
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torchcompile.compile(program)(x)[1], program(x)[1])
    assert "tensor_subclass" in [event.kind.id for event in torchcompile.report().surprises]  # and in its own code


@pytest.mark.usefixtures("registered")
def test_what_has_no_use_for_an_entry_is_refused() -> None:
    class Tagged(torch.Tensor):
        pass

    class Flat(Paired):
        def __tensor_flatten__(self) -> Any:
            raise NotImplementedError

    for kind in (int, Tagged):
        with pytest.raises(TypeError):
            torchcompile.register_flattening(kind, apart, together)  # type: ignore[arg-type]
    for again in (Paired, Flat):
        with pytest.raises(ValueError, match="flattening already"):
            torchcompile.register_flattening(again, apart, together)
