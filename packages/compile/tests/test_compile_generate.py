"""`generate` of transformers over compiled models: eager's tokens, and a number of graphs that does not grow with tokens,
prompts and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import torchcompile

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("torchvision")
VOCABULARY, NEW_TOKENS = 200, 10
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(layers: int = 2) -> Any:
    config = transformers.GPT2Config(n_layer=layers, n_head=4, n_embd=32, n_positions=128, **TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int = 2) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, **TOKENS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def built(make: Callable[..., Any], *layers: int) -> Any:
    torch.manual_seed(0)
    model = make(*layers).eval().double()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def compiled_generate(model: Any, way: str) -> Callable[..., torch.Tensor]:
    """What users write."""
    if way == "forward":
        model.forward = torchcompile.compile(model.forward)
    elif way == "model":
        model = torchcompile.compile(model)
    return torchcompile.compile(model.generate) if way == "generate" else model.generate  # type: ignore[no-any-return]


def prompts(*batches: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """Prompts of these lengths, padded on the left."""
    found = []
    for number, lengths in enumerate(batches):
        ids = torch.randint(
            3, VOCABULARY, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(number)
        )
        mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


LENGTHS, PADDED = prompts((7,), (11,), (5,), (19,)), prompts((9, 6), (12, 3), (6, 6))
DECODINGS: dict[str, tuple[Mapping[str, Any], list[dict[str, torch.Tensor]], int]] = {  # options, prompts, most graphs
    "greedy": ({}, LENGTHS, 4),  # a prompt and a token, of the first length and of any
    "static cache": ({"cache_implementation": "static"}, LENGTHS, 4),
    "sampling": ({"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}, LENGTHS, 4),
    "beams": ({"num_beams": 3}, LENGTHS, 4),
    "padded": ({}, PADDED, 4),
    "chunks": ({"prefill_chunk_size": 4}, LENGTHS, 6),  # a chunk behind others is a third kind of call
    "assisted": ({}, LENGTHS, 9),  # several tokens at once, behind a cache that is cut back
}


def answers(generate: Callable[..., torch.Tensor], decoding: str, make: Callable[..., Any]) -> list[torch.Tensor]:
    options, given, _ = DECODINGS[decoding]
    if decoding == "assisted":
        options = {"assistant_model": built(make, 1)}
    found = []
    for prompt in given:
        torch.manual_seed(1)
        found.append(generate(**prompt, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}))
    return found


CASES = [("forward", decoding) for decoding in DECODINGS] + [("model", "greedy"), ("model", "padded")]


@pytest.mark.parametrize(("way", "decoding"), CASES, ids=lambda part: part)
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_a_model_under_generate(make: Callable[..., Any], way: str, decoding: str) -> None:
    """All in a few graphs, in the first round; nothing breaks, nothing is left to eager."""
    torchcompile.reset()
    expected = answers(built(make).generate, decoding, make)
    generate = compiled_generate(built(make), way)
    graphs = []
    for _ in range(2):
        for found, other in zip(answers(generate, decoding, make), expected, strict=True):
            assert torch.equal(found, other)
        graphs.append(torchcompile.report().captured)
    report = torchcompile.report()
    assert report.clean, report
    assert graphs[0] == graphs[1] <= DECODINGS[decoding][2]
    assert sum(event.count for event in report.recompiles) == graphs[0] - 1


@pytest.mark.expected_eager("data_dependent_branch", "generator", "suspending_frame")
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_generate_itself(make: Callable[..., Any]) -> None:
    """It breaks where it asks whether all is said; the rest is compiled, for all prompts, and stays so."""
    torchcompile.reset()
    expected = answers(built(make).generate, "greedy", make)
    generate = compiled_generate(built(make), "generate")
    graphs = []
    for _ in range(2):
        for found, other in zip(answers(generate, "greedy", make), expected, strict=True):
            assert torch.equal(found, other)
        graphs.append(torchcompile.report().captured)
    assert graphs[0] == graphs[1] <= 12
