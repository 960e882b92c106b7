"""One language model under one way of decoding: what compiling it does to `generate`, in calls of other lengths."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
Row = dict[str, Any]
SEED = 1
_VOCABULARY, _WIDTH, _HEADS, _LAYERS, _POSITIONS = 1000, 256, 4, 4, 512
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS // 2, "head_dim": _WIDTH // _HEADS,
    "max_position_embeddings": _POSITIONS, **_TOKENS,
}  # fmt: skip


# -- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A class of transformers with the config of a small model; `features`: what the encoder of one of speech gets."""

    class_name: str
    config: Mapping[str, Any]
    features: tuple[int, int] | None = None

    def build(self, dtype: Any) -> Any:
        """The model in eval mode, with random weights that are the same each time."""
        import torch
        import transformers

        torch.manual_seed(0)
        cls = getattr(transformers, self.class_name)
        model = cls(cls.config_class(**self.config)).eval().to(dtype)
        model.generation_config.eos_token_id = None  # calls are as long as they say
        model.generation_config.pad_token_id = 0
        if self.features is not None:
            model.generation_config.update(no_timestamps_token_id=_VOCABULARY - 1, is_multilingual=False)
        return model


MODELS: dict[str, Model] = {
    "gpt2": Model(
        "GPT2LMHeadModel",
        {"vocab_size": _VOCABULARY, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": _POSITIONS}
        | _TOKENS,
    ),
    "llama": Model("LlamaForCausalLM", _DECODER),
    "qwen2": Model("Qwen2ForCausalLM", _DECODER),
    "qwen3": Model("Qwen3ForCausalLM", _DECODER),
    "mistral": Model("MistralForCausalLM", _DECODER | {"sliding_window": 16}),
    "t5": Model(
        "T5ForConditionalGeneration",
        {"vocab_size": _VOCABULARY, "d_model": _WIDTH, "d_kv": _WIDTH // _HEADS, "d_ff": 2 * _WIDTH,
         "num_layers": _LAYERS, "num_heads": _HEADS, "pad_token_id": 0, "eos_token_id": 2,
         "decoder_start_token_id": 0},
    ),
    "whisper": Model(
        "WhisperForConditionalGeneration",
        {"vocab_size": _VOCABULARY, "d_model": _WIDTH, "encoder_layers": _LAYERS, "decoder_layers": _LAYERS,
         "encoder_attention_heads": _HEADS, "decoder_attention_heads": _HEADS, "encoder_ffn_dim": 2 * _WIDTH,
         "decoder_ffn_dim": 2 * _WIDTH, "num_mel_bins": 16, "max_source_positions": 40, "max_target_positions": 128,
         "decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None, **_TOKENS},
        (16, 80),
    ),
}  # fmt: skip


# -- ways of decoding ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """A call's prompt: lengths of its rows, which are padded on the left, and how many tokens are to follow."""

    lengths: tuple[int, ...]
    new: int


@dataclass(frozen=True)
class Decoding:
    """What `generate` is asked for beside the prompt.

    Attributes:
        options: arguments of `generate`.
        made: arguments that are made for each call, of the model and the prompt's ids.
        prompts: those of a session, one after the other.
        of: the models that it is for; none: all that have no encoder.
    """

    options: Mapping[str, Any]
    made: Callable[[Any, Any], Mapping[str, Any]] | None = None
    prompts: tuple[Prompt, ...] = (Prompt((7,), 12), Prompt((11,), 12), Prompt((5,), 16), Prompt((19,), 12))
    of: tuple[str, ...] = ()


class Streamed:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def put(self, value: Any) -> None:
        """Takes the next tokens."""
        self.texts.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing follows."""


def _streamer(model: Any, ids: Any) -> Mapping[str, Any]:
    return {"streamer": Streamed()}


def _criteria(model: Any, ids: Any) -> Mapping[str, Any]:
    """Stops at a token of which half of the vocabulary is, from the eighth on."""
    from transformers import StoppingCriteriaList

    length = ids.shape[1]

    def even_late(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        late = input_ids.shape[1] >= length + 8
        return (input_ids[:, -1] % 2 == 0) & torch.full((input_ids.shape[0],), late)

    return {"stopping_criteria": StoppingCriteriaList([even_late])}


def _assistant(model: Any, ids: Any) -> Mapping[str, Any]:
    """A model of the same class with one layer drafts tokens."""
    if "_drafting" not in vars(model):
        spec = next(spec for spec in MODELS.values() if spec.class_name == type(model).__name__)
        layers = "n_layer" if "n_layer" in spec.config else "num_hidden_layers"
        draft = Model(spec.class_name, {**spec.config, layers: 1}).build(model.dtype)
        vars(model)["_drafting"] = draft  # no module of the model's
    return {"assistant_model": model._drafting}


_BATCHES = (Prompt((9, 6), 12), Prompt((12, 3), 12), Prompt((6, 6), 12), Prompt((14, 13), 12))
DECODINGS: dict[str, Decoding] = {
    "greedy": Decoding({}),
    "static cache": Decoding({"cache_implementation": "static"}),
    "sampling": Decoding({"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    "penalties": Decoding({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
    "beams": Decoding({"num_beams": 3}),
    "beams that sample": Decoding({"num_beams": 2, "do_sample": True}),
    "padded batch": Decoding({}, prompts=_BATCHES),
    "padded, static": Decoding({"cache_implementation": "static"}, prompts=_BATCHES),
    "batches of 1, 2, 3": Decoding({}, prompts=tuple(Prompt((7,) * n, 12) for n in (1, 2, 3, 2))),
    "streamer": Decoding({}, _streamer),
    "stopping": Decoding({}, _criteria),
    "assisted": Decoding({}, _assistant),
    "prompt lookup": Decoding({"prompt_lookup_num_tokens": 3}),
    "all outputs": Decoding(
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    ),
    "no cache": Decoding({"use_cache": False}),
    "chunked prefill": Decoding({"prefill_chunk_size": 4}),
}  # fmt: skip
# Those of models with an encoder.
ENCODED = ("greedy", "static cache", "sampling", "beams", "padded batch", "all outputs")


# -- one session ---------------------------------------------------------------------------------


def arguments(spec: Model, decoding: Decoding, prompt: Prompt, model: Any) -> Row:
    """What a call of `generate` gets."""
    import torch

    generator = torch.Generator().manual_seed(sum(prompt.lengths) * 100 + prompt.new)
    options = {"max_new_tokens": prompt.new, "do_sample": False, **decoding.options}
    if spec.features is not None:
        shape = (len(prompt.lengths), *spec.features)
        options["input_features"] = torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype)
        return options
    longest = max(prompt.lengths)
    ids = torch.randint(3, _VOCABULARY, (len(prompt.lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(prompt.lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    if decoding.made is not None:
        options |= decoding.made(model, ids)
    return {"input_ids": ids, "attention_mask": mask, **options}


def answer(generate: Callable[..., Any], given: Row) -> tuple[Any, float]:
    """What a call gives, as tensors and lists, and its seconds."""
    import torch
    from torch.utils import _pytree as pytree

    torch.manual_seed(SEED)
    began = time.perf_counter()
    result = generate(**given)
    seconds = time.perf_counter() - began
    parts = dict(result) if not isinstance(result, torch.Tensor) else {"sequences": result}
    cache = parts.pop("past_key_values", None)
    if cache is not None:
        decoder: Any = getattr(cache, "self_attention_cache", cache)
        parts["cache"] = [tensor for layer in decoder.layers for tensor in (layer.keys, layer.values)]
    if "streamer" in given:
        parts["streamed"] = given["streamer"].texts
    return pytree.tree_leaves(parts), seconds


def agree(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    """Tokens are equal, and numbers as near as float64 has them."""
    import torch

    def one(a: Any, b: Any) -> bool:
        if not isinstance(a, torch.Tensor):
            return bool(a == b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, rtol=1e-4, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)

    return len(expected) == len(found) and all(map(one, expected, found))


def new_tokens(given: Row, found: Sequence[Any]) -> int:
    """How many steps a call made: its longest result less the prompt."""
    prompt = given["input_ids"].shape[1] if "input_ids" in given else 0
    lengths = [leaf.shape[1] for leaf in found if getattr(leaf, "ndim", 0) == 2 and not leaf.is_floating_point()]
    longest = max(lengths, default=prompt)
    return max(longest - prompt, 1) if longest > prompt else longest


# -- compilers -----------------------------------------------------------------------------------


class Ours:
    """This stack. It counts by its report."""

    def __init__(self) -> None:
        import torchcompile

        self.api = torchcompile
        torchcompile.reset()

    def compile(self, what: Any) -> Any:
        """Of a model, a forward or a `generate`."""
        return self.api.compile(what)

    def counts(self) -> Row:
        """Graphs, recompiles, breaks and what else the ledger was told."""
        report = self.api.report()
        events = {name: getattr(report, name) for name in ("recompiles", "breaks", "fallbacks", "mended", "reruns")}
        limits = [event.short for event in report.fallbacks if event.kind.id.startswith("recompile")]
        return {
            "graphs": report.captured,
            **{name: sum(event.count for event in found) for name, found in events.items()},
            "limits": limits,
            "events": [str(event)[:1500] for found in events.values() for event in found],
        }


class Torchs:
    """torch.compile. It counts by its own counters."""

    def __init__(self) -> None:
        import torch

        torch._dynamo.reset()
        self.counters = importlib.import_module("torch._dynamo.utils").counters
        self.counters.clear()

    def compile(self, what: Any) -> Any:
        """Of a model, a forward or a `generate`."""
        import torch

        return torch.compile(what)

    def counts(self) -> Row:
        """Graphs, and breaks by its counters."""
        breaks = self.counters["graph_break"]
        limits = [reason for reason in breaks if "recompile_limit" in reason or "cache_size_limit" in reason]
        return {
            "graphs": self.counters["stats"]["unique_graphs"],
            "breaks": sum(breaks.values()),
            "limits": limits,
            "events": [reason.strip().splitlines()[0][:120] for reason in breaks],
        }


COMPILERS: dict[str, Callable[[], Any]] = {"ours": Ours, "torch.compile": Torchs}
WAYS = ("forward", "model", "generate")


def compiled_generate(compiler: Any, way: str, model: Any) -> Callable[..., Any]:
    """`model.generate`, compiled in one of the ways in which users do it."""
    if way == "forward":
        model.forward = compiler.compile(model.forward)
        return model.generate  # type: ignore[no-any-return]
    if way == "model":
        return compiler.compile(model).generate  # type: ignore[no-any-return]
    return compiler.compile(model.generate)  # type: ignore[no-any-return]


def measure(case: Row, report: Callable[[Row], None]) -> None:
    """One (model, decoding, way, compiler): a session in float64 against eager's, then one in float32 on the clock."""
    import torch

    torch.set_num_threads(1)
    spec, decoding = MODELS[case["model"]], DECODINGS[case["decoding"]]
    for part, dtype in (("session", torch.float64), ("clock", torch.float32)):
        if part not in case["parts"]:
            continue
        compiler = COMPILERS[case["compiler"]]()
        eager = spec.build(dtype)
        model = spec.build(dtype)
        generate = compiled_generate(compiler, case["way"], model)
        report({part: dict(_session(spec, decoding, eager, model, generate, compiler))})
        if part == "clock":
            report({"ms": _milliseconds(spec, decoding, eager, model, generate), "later": compiler.counts()})


def _session(
    spec: Model, decoding: Decoding, eager: Any, model: Any, generate: Callable[..., Any], compiler: Any
) -> Iterator[tuple[str, Any]]:
    """Each prompt once, then all of them again: what differs from eager, and what was compiled when."""
    expected = [answer(eager.generate, arguments(spec, decoding, prompt, eager))[0] for prompt in decoding.prompts]
    differ, first = [], 0.0
    for turn in range(2):
        for index, prompt in enumerate(decoding.prompts):
            found, seconds = answer(generate, arguments(spec, decoding, prompt, model))
            first = first or seconds
            if not agree(expected[index], found):
                differ.append(f"turn {turn}, prompt {index}")
        if turn == 0:
            yield "first", first
            yield "counts", compiler.counts()
    yield "again", compiler.counts()
    yield "differ", differ


def _milliseconds(spec: Model, decoding: Decoding, eager: Any, model: Any, generate: Callable[..., Any]) -> Row:
    """Milliseconds a token, eager and compiled in turns: the median of calls of the session's last prompt."""
    prompt = decoding.prompts[-1]
    times: dict[str, list[float]] = {"eager": [], "compiled": []}
    for _ in range(7):
        for name, run, owner in (("eager", eager.generate, eager), ("compiled", generate, model)):
            given = arguments(spec, decoding, prompt, owner)
            found, seconds = answer(run, given)
            times[name].append(1e3 * seconds / new_tokens(given, found))
    return {name: statistics.median(of) for name, of in times.items()}
