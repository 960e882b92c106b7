"""Models run forward and backward on fake tensors: the same operators, with the same results, as on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_replay import replay
from torchvision_import import import_torchvision

Case = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
SMALL = {"vocab_size": 200, "max_position_embeddings": 64, "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> None:
    """Models of timm, and image models of transformers, import it."""
    import_torchvision()


def _tokens() -> torch.Tensor:
    return torch.randint(3, 200, (2, 12))


def _bert() -> Case:
    t = pytest.importorskip("transformers")
    config = t.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **SMALL)
    ids = _tokens()
    return t.BertForMaskedLM(config), (), {"input_ids": ids, "labels": ids.clone()}


def _gpt2() -> Case:
    t = pytest.importorskip("transformers")
    config = t.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False)
    ids = _tokens()
    # A ready mask: the model would look into the data of a padding mask to see whether it can do without.
    mask = torch.zeros(2, 1, 12, 12)
    return t.GPT2LMHeadModel(config), (), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def _t5() -> Case:
    t = pytest.importorskip("transformers")
    config = t.T5Config(
        vocab_size=200,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    ids = _tokens()
    return t.T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": ids.clone()}


def _albert() -> Case:
    t = pytest.importorskip("transformers")
    config = t.AlbertConfig(
        embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **SMALL
    )
    ids = _tokens()
    return t.AlbertForMaskedLM(config), (), {"input_ids": ids, "labels": ids.clone()}


def _distilbert() -> Case:
    t = pytest.importorskip("transformers")
    ids = _tokens()
    config = t.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, **SMALL)
    return t.DistilBertForMaskedLM(config), (), {"input_ids": ids, "labels": ids.clone()}


def _vit() -> Case:
    t = pytest.importorskip("transformers")
    config = t.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    kwargs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return t.ViTForImageClassification(config), (), kwargs


def _timm(name: str) -> Callable[[], Case]:
    def build() -> Case:
        timm = pytest.importorskip("timm")
        return timm.create_model(name, pretrained=False), (torch.randn(2, 3, 64, 64),), {}

    return build


LANGUAGE = {"bert": _bert, "gpt2": _gpt2, "t5": _t5, "albert": _albert, "distilbert": _distilbert}
VISION = {
    "vit": _vit,
    "resnet18": _timm("resnet18"),
    "mobilenetv2": _timm("mobilenetv2_100"),
    "lcnet": _timm("lcnet_050"),
    "tinynet": _timm("tinynet_e"),
    "convnext": _timm("convnext_atto"),
}
CASES = {**LANGUAGE, **VISION}


def _loss(out: Any) -> torch.Tensor:
    value = out if isinstance(out, torch.Tensor) else out.loss
    assert isinstance(value, torch.Tensor)
    return value.float().sum()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("symbolic", [False, True], ids=["concrete", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_model_on_fakes(name: str, symbolic: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    tensors = [*args, *kwargs.values()]
    dynamic = None
    if symbolic:
        lengths = {2: {0: 0, 1: 1}, 4: {0: 0, 2: 1, 3: 1}}
        dynamic = {i: lengths[t.dim()] if name in LANGUAGE else {0: 0} for i, t in enumerate(tensors)}
    problems, operators, env = replay(model, args, kwargs, dynamic=dynamic, autocast=autocast, loss=_loss)
    assert not problems, "\n".join(problems[:5])
    assert operators > 50
    # Only the length of position tables, and labels shifted by one that could be left with one, restrict the sizes.
    assert all("<=" in str(g.expr) or str(g.expr) == "s1 - 1 != 1" for g in env.guards), [str(g) for g in env.guards]


def test_channels_last_convolutions() -> None:
    torch.manual_seed(0)
    model, args, _ = VISION["mobilenetv2"]()
    model = model.to(memory_format=torch.channels_last)
    problems, _, _ = replay(model, (args[0].to(memory_format=torch.channels_last),), {}, loss=_loss)
    assert not problems, "\n".join(problems[:5])
