"""Small public models built from their configs, and a cache folder of the test run's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from primtorch.testing import double_precision

for _package in (
    "aotautograd",
    "compile",
    "dynamo",
    "primtorch",
):  # programs of this and of other packages; how torchvision is imported
    sys.path.insert(0, str(Path(__file__).parents[2] / _package / "tests"))

from torchvision_import import import_torchvision  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCHCOMPILE_CHECK_KERNELS", "0" if "TEST_CACHE" in os.environ else "1")  # which keeps nothing

SIZES: dict[str, int] = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "intermediate_size": 128, "d_ff": 128, "hidden_dim": 128, "vocab_size": 1000, "d_kv": 16,
}  # fmt: skip

Inputs = dict[str, Any]


@dataclass(frozen=True)
class SmallModel:
    """A module, and `inputs(batch, length)` that draws keyword inputs (length: tokens; unused by image models)."""

    module: torch.nn.Module
    inputs: Callable[..., Inputs]


@pytest.fixture(scope="session")
def torchvision() -> None:
    """Models of timm, and image models of transformers, import it."""
    import_torchvision()


@pytest.fixture
def small_model(torchvision: None) -> Callable[[str], SmallModel]:
    return build


def build(name: str) -> SmallModel:
    torch.manual_seed(0)
    family, _, model = name.partition("/")
    if family == "hf":
        return transformer(model)
    if family == "timm":
        import timm

        module, key = timm.create_model(model, pretrained=False, drop_rate=0.0, drop_path_rate=0.0), "x"
    else:
        import torchvision

        module, key = getattr(torchvision.models, model)(), "x"
    for child in module.modules():
        if isinstance(child, torch.nn.Dropout):
            child.p = 0.0
    return SmallModel(module, lambda batch=2, length=96: {key: torch.randn(batch, 3, length, length)})


def transformer(name: str) -> SmallModel:
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class()
    for key, value in SIZES.items():
        if type(getattr(config, key, None)) is int:
            setattr(config, key, value)
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    for key in ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"):
        token = getattr(config, key, None)
        if token is None or (type(token) is int and token >= config.vocab_size):
            setattr(config, key, 1)
    config.use_cache = False

    def inputs(batch: int = 2, length: int = 64) -> Inputs:
        ids = torch.randint(3, config.vocab_size, (batch, length))
        result = {"input_ids": ids, "labels": ids.clone()}
        if name.endswith("SequenceClassification"):
            ids[:, -1] = config.eos_token_id
            result["labels"] = torch.randint(0, config.num_labels, (batch,))
        if name.endswith("ForConditionalGeneration"):
            result["decoder_input_ids"] = ids.clone()
        return result

    return SmallModel(cls(config), inputs)


@pytest.fixture(autouse=True)
def fresh_stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Every test starts with nothing compiled; kernels are shared through one cache folder of the run, or of several
    runs where TEST_CACHE names it: a second one is then made of warm processes, and is held to the same.

    At its end nothing may have run eagerly, twice or differently but for the kinds of the ledger that the test, or its
    module, is marked to expect: `expected_eager(*kinds)`, where `...` stands for all.
    """
    import torchcompile

    cache = Path(os.environ.get("TEST_CACHE") or tmp_path_factory.getbasetemp() / "kernel_cache")
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(cache))
    torchcompile.reset()
    yield cache
    expected = {kind for mark in request.node.iter_markers("expected_eager") for kind in mark.args}
    report = torchcompile.report()
    torchcompile.reset()
    surprises = [event for event in report.surprises if event.kind.id not in expected]
    if surprises and ... not in expected:
        pytest.fail("\n".join(["ran eagerly, twice or differently:", *map(str, surprises)]), pytrace=False)


@pytest.fixture
def double() -> Iterator[None]:
    """Float64 unless a dtype is named: a difference from eager that shows is no rounding's, on whatever processor."""
    with double_precision():
        yield
