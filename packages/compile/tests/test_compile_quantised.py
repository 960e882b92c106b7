"""Weights of few bits: packed parameters as inputs of graphs, whose objects come and go; parts of the language about them
in every setting."""

from __future__ import annotations

import gc
import re
import warnings
import weakref

import feature_matrix_run  # noqa: F401  (finds the folders of what is shared)
import pytest
import torch
from feature_matrix import BACKENDS, SETTINGS, check
from reach_programs import PARTS
from reach_programs.quantised import QUANTISED, Layers, dynamic
from torch import nn

import torchcompile

NAMES = [name for name, part in PARTS.items() if part.group == QUANTISED]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", NAMES)
def test_in_every_setting(name: str) -> None:
    """Each part in all settings, on one back end after the other."""
    wrong = []
    for number, setting in enumerate(SETTINGS.values()):
        backend = list(BACKENDS)[(number + NAMES.index(name)) % len(BACKENDS)]
        found = check(PARTS[name], setting, backend)
        wrong += [f"{setting.name} on {backend}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)


def test_another_object_comes_in_its_place() -> None:
    """Weights that are packed again are read at each call; those of another size are compiled anew."""
    models = [dynamic(Layers(), nn.Linear) for _ in range(3)]
    compiled = torchcompile.compile(models[0], fullgraph=True)
    x = torch.randn(3, 16)
    for model in models:
        for mine, other in zip(models[0].children(), model.children(), strict=True):
            mine._packed_params = other._packed_params
        assert torch.equal(compiled(x), models[0](x))
    assert not torch.equal(models[0](x), dynamic(Layers(), nn.Linear)(x))
    assert len(torchcompile.report().graphs) == 1

    wide = dynamic(nn.Sequential(nn.Linear(16, 24)), nn.Linear)
    models[0].second = wide[0]
    models[0].first = dynamic(nn.Sequential(nn.Linear(16, 16)), nn.Linear)[0]
    assert torch.equal(compiled(x), models[0](x)) and compiled(x).shape == (3, 24)


@pytest.mark.usefixtures("collector_of_new_objects")
def test_packed_parameters_that_are_gone() -> None:
    """Compiled code holds no weights."""
    weight = torch.quantize_per_tensor(torch.randn(8, 16), 0.1, 0, torch.qint8)

    @torchcompile.compile(fullgraph=True)
    def program(x: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic(x, packed) * 2  # type: ignore[no-any-return]

    x = torch.randn(3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            packed = torch.ops.quantized.linear_prepack(weight, None)
            assert torch.equal(program(x, packed), torch.ops.quantized.linear_dynamic(x, packed) * 2)
            last = weakref.ref(packed)
            del packed
            gc.collect()
            assert last() is None


@pytest.mark.expected_eager("backward")
def test_a_bias_that_requires_a_gradient() -> None:
    """Weights of float16 give their result the history of the bias that they hold, which no graph can."""
    model = dynamic(Layers(), nn.Linear, torch.float16)
    compiled = torchcompile.compile(model)
    x = torch.randn(3, 16)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        assert not torchcompile.report().events
    result = compiled(x)
    assert result.requires_grad and torch.equal(result, model(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_between_layers(backend: str) -> None:
    """In evaluation it is none; the sizes of results follow from the state's."""
    layer = nn.LSTM(16, 8, 2, dropout=0.5, bidirectional=True, batch_first=True)
    model = dynamic(nn.Sequential(layer), nn.LSTM).eval()
    compiled = torchcompile.compile(model, backend=backend, fullgraph=True)
    for shape in ((2, 5, 16), (3, 5, 16), (3, 7, 16)):
        x = torch.randn(*shape)
        for ours, theirs in zip(_flat(compiled(x)), _flat(model(x)), strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def _flat(results: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    output, states = results
    return [output, *states]


@pytest.mark.parametrize("first", [torch.int8, torch.uint8, torch.int32, torch.float32])
@pytest.mark.parametrize("second", [torch.int8, torch.uint8])
@pytest.mark.expected_eager("program_raised")
def test_products_of_integers_take_what_eager_takes(first: torch.dtype, second: torch.dtype) -> None:
    """Activations of a CPU are uint8 where a zero point was moved, and its weights int8."""

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(a + 1, b).double() * 0.5

    a, b = torch.randint(0, 100, (18, 16)).to(first), torch.randint(-100, 100, (16, 8)).to(second)
    compiled = torchcompile.compile(program)
    try:
        expected = program(a, b)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).partition("\n")[0])):
            compiled(a, b)
    else:
        torch.testing.assert_close(compiled(a, b), expected)
