"""Public models, training and inference: one graph, no break, no fallback, eager's values and gradients."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

import torchcompile

MODELS = (
    "hf/BertForMaskedLM", "hf/GPT2ForSequenceClassification", "hf/T5ForConditionalGeneration",
    "hf/AlbertForMaskedLM", "hf/DistilBertForMaskedLM", "tv/resnet18", "tv/mobilenet_v2",
    "timm/lcnet_050", "timm/tinynet_a",
)  # fmt: skip
SMOOTH = frozenset({  # the others have ReLU or hardswish
    "hf/BertForMaskedLM", "hf/GPT2ForSequenceClassification", "hf/AlbertForMaskedLM", "hf/DistilBertForMaskedLM",
    "timm/tinynet_a",
})  # fmt: skip


def outputs(module: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    out = module(**inputs)
    return out if isinstance(out, torch.Tensor) else out.loss if "labels" in inputs else out.logits


def train_step(module: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    value = outputs(module, inputs)
    (value if value.dim() == 0 else value.square().mean()).backward()
    return value.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def in_double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def all_in_double(module: torch.nn.Module) -> torch.nn.Module:
    """The model in float64. T5's own norm would go on to take its variance in float32: torch's is the same function."""
    for child in list(module.modules()):
        for name, norm in child.named_children():
            if type(norm).__name__ == "T5LayerNorm":
                own = torch.nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)  # type: ignore[arg-type]
                own.weight = norm.weight
                setattr(child, name, own)
    return module.double()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-30))


def joined(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def assert_one_clean_graph() -> None:
    report = torchcompile.report()
    assert report.captured == 1, report
    assert not report.breaks, report
    assert not report.fallbacks, report


ROUNDING = 1e-9  # more than float64 makes of rounding in these models, relative to the norm


def bound(eager_error: float) -> float:
    return 2 * eager_error + 2e-6


@pytest.mark.parametrize("name", MODELS)
def test_training_is_right(name: str, small_model: Any) -> None:
    """Loss, statistics and gradients of the model in float64, where a difference is no rounding's.

    In float32 the gradient of a net with ReLU or hardswish jumps where an activation lies within rounding of a kink,
    and nobody can say which side is right.
    """
    model = small_model(name)
    module = all_in_double(model.module).train()
    eager, compiled = copy.deepcopy(module), torchcompile.compile(module)
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    inputs = in_double(model.inputs())
    expected, expected_gradients = train_step(eager, inputs)
    value, gradients = train_step(compiled, inputs)
    assert relative(value, expected) <= ROUNDING, f"seed {seed}"
    assert gradients.keys() == expected_gradients.keys()
    assert relative(joined(gradients), joined(expected_gradients)) <= ROUNDING, f"seed {seed}"
    statistics, expected_statistics = dict(compiled.named_buffers()), dict(eager.named_buffers())
    if statistics:  # of batch norm. A mean by itself may be zero but for rounding
        assert relative(joined(statistics), joined(expected_statistics)) <= ROUNDING, f"seed {seed}"
    assert_one_clean_graph()


@pytest.mark.parametrize("name", MODELS)
def test_training_is_as_accurate_as_eager(name: str, small_model: Any) -> None:
    """In float32: no further from float64 than eager is. Gradients of the models without kinks alone."""
    model = small_model(name)
    module = model.module.train()
    judge, eager = copy.deepcopy(module).double(), copy.deepcopy(module)
    compiled = torchcompile.compile(module)
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    inputs = model.inputs()
    true_value, true_gradients = train_step(judge, in_double(inputs))
    eager_value, eager_gradients = train_step(eager, inputs)
    value, gradients = train_step(compiled, inputs)
    assert relative(value, true_value) <= bound(relative(eager_value, true_value)), f"seed {seed}"
    buffers = zip(compiled.named_buffers(), eager.buffers(), judge.buffers(), strict=True)
    for (key, found), other, truth in buffers:
        allowed = 2 * float((other.double() - truth).norm()) + 2e-6 * (1 + float(truth.double().norm()))
        assert float((found.double() - truth).norm()) <= allowed, f"{key}, seed {seed}"
    if name in SMOOTH:
        error = relative(joined(gradients), joined(true_gradients))
        assert error <= bound(relative(joined(eager_gradients), joined(true_gradients))), f"seed {seed}"
    assert_one_clean_graph()


@pytest.mark.parametrize("name", MODELS)
def test_inference_is_right(name: str, small_model: Any) -> None:
    model = small_model(name)
    module = model.module.eval()
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    inputs = model.inputs()
    inputs.pop("labels", None)
    with torch.no_grad():
        judge = outputs(copy.deepcopy(module).double(), in_double(inputs))
        eager_error = relative(outputs(module, inputs), judge)
        found = outputs(torchcompile.compile(module), inputs)
    assert relative(found, judge) <= bound(eager_error), f"seed {seed}"
    assert_one_clean_graph()


def test_five_shapes_one_compilation(small_model: Any) -> None:
    model = small_model("hf/GPT2ForSequenceClassification")
    module = model.module.double().train()
    eager = copy.deepcopy(module)
    compiled = torchcompile.compile(module, dynamic=True)
    for batch, length in [(2, 16), (3, 24), (4, 17), (2, 40), (5, 9)]:
        inputs = model.inputs(batch, length)
        expected, expected_gradients = train_step(eager, inputs)
        found, gradients = train_step(compiled, inputs)
        assert relative(found, expected) <= ROUNDING, (batch, length)
        assert relative(joined(gradients), joined(expected_gradients)) <= ROUNDING, (batch, length)
    assert_one_clean_graph()
    # The model's first call writes `config.problem_type`, which capture guards: the second captures again, and finds
    # the graph that it already has. Sizes cost nothing.
    assert sum(event.count for event in torchcompile.report().recompiles) == 1


@pytest.mark.skipif(
    "ATEN_CPU_CAPABILITY" in os.environ, reason="torch's attention packs bfloat16 for what the processor itself has"
)
def test_bfloat16_autocast_training(small_model: Any) -> None:
    model = small_model("hf/BertForMaskedLM")
    module = model.module.train()
    inputs = model.inputs()
    judge, judge_gradients = train_step(copy.deepcopy(module).double(), in_double(inputs))
    eager, compiled = copy.deepcopy(module), torchcompile.compile(module)
    errors = []
    for candidate in (eager, compiled):
        candidate.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = candidate(**inputs).loss
        loss.backward()
        gradients = {n: p.grad for n, p in candidate.named_parameters() if p.grad is not None}
        assert gradients.keys() == judge_gradients.keys()
        errors.append((relative(loss.detach(), judge), relative(joined(gradients), joined(judge_gradients))))
    (eager_loss, eager_grad), (found_loss, found_grad) = errors
    assert found_loss <= 2 * eager_loss + 1e-3
    assert found_grad <= 2 * eager_grad + 1e-3
    assert_one_clean_graph()
