"""The main job: train a small vision transformer eager and compiled, then generate text with a small GPT-2.

    python examples/demo.py [--steps 120] [--report demo_report]

Prints step times, the agreement of the loss curves, graphs, breaks, kernels and seconds to compile, and
writes `demo_report/index.html` with the loss plot and the step-time plot.
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jinja2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools" / "bench"))
from zoo import import_torchvision

import_torchvision()  # transformers imports it, and its compiled operators need CUDA's libraries
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import torchcompile

BATCH = 128
CONSOLE = Console()


@dataclass(frozen=True)
class Run:
    """One training run: losses and seconds of each step, and the accuracy on held-out digits."""

    name: str
    losses: list[float]
    seconds: list[float]
    accuracy: float

    @property
    def step_ms(self) -> float:
        """Median milliseconds of a step once warm."""
        return statistics.median(self.seconds[5:]) * 1e3


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: images (N, 1, 8, 8) in [0, 1] and labels, split into training and held-out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1536], order[1536:]
    return images[train], labels[train], images[test], labels[test]


def vision_transformer() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train(name: str, model: torch.nn.Module, steps: int, progress: Progress) -> Run:
    """AdamW on random batches, the same batches for every run."""
    images, labels, test_images, test_labels = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)
    task = progress.add_task(f"training, {name}", total=steps)
    losses, seconds = [], []
    model.train()
    for _ in range(steps):
        pick = torch.randint(len(labels), (BATCH,), generator=batches)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(pixel_values=images[pick], labels=labels[pick]).loss
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        progress.update(task, advance=1, description=f"training, {name}: loss {losses[-1]:.3f}")
    model.eval()
    with torch.no_grad():
        accuracy = (model(pixel_values=test_images).logits.argmax(-1) == test_labels).float().mean().item()
    return Run(name, losses, seconds, accuracy)


def generate(tokens: int) -> tuple[float, float, bool]:
    """Greedy text from a small GPT-2: (eager seconds, compiled seconds once warm, same tokens)."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(3, 500, (2, 8), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": False}

    def timed(candidate: GPT2LMHeadModel) -> tuple[float, torch.Tensor]:
        candidate.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)
        start = time.perf_counter()
        text = candidate.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)
        return time.perf_counter() - start, text

    eager_seconds, eager_text = timed(model)
    compiled_seconds, compiled_text = timed(torchcompile.compile(model))
    return eager_seconds, compiled_seconds, torch.equal(eager_text, compiled_text)


def picture(title: str, ylabel: str, runs: list[Run], series: str) -> str:
    """A line plot of a series of each run, as a data URI."""
    figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
    for run, style in zip(runs, ("-", "--"), strict=True):
        values = run.losses if series == "losses" else [s * 1e3 for s in run.seconds]
        axes.plot(values, style, label=run.name, linewidth=1.5)
    axes.set(title=title, xlabel="step", ylabel=ylabel)
    if series == "seconds":
        axes.set_yscale("log")
    axes.legend()
    axes.grid(alpha=0.3)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


PAGE = jinja2.Environment(autoescape=True).from_string("""<!doctype html><meta charset="utf-8">
<title>torchcompile demo</title>
<style>
body{font:16px/1.5 system-ui;max-width:50em;margin:2em auto;padding:0 1em} img{max-width:100%}
table{border-collapse:collapse} td,th{border:1px solid #ccc;padding:.3em .8em;text-align:right}
td:first-child,th:first-child{text-align:left}
</style>
<h1>A small ViT on digits, eager and compiled</h1>
<table>{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p><img src="{{ losses }}" alt="loss of each step"></p><p><img src="{{ times }}" alt="milliseconds of each step"></p>
<h2>What was compiled</h2>{{ report | safe }}
""")


def summary(eager: Run, compiled: Run, text: tuple[float, float, bool]) -> list[tuple[str, str]]:
    drift = max(abs(a - b) for a, b in zip(eager.losses, compiled.losses, strict=True))
    return [
        ("step, eager", f"{eager.step_ms:.2f} ms"),
        ("step, compiled", f"{compiled.step_ms:.2f} ms"),
        ("speed-up of a step", f"{eager.step_ms / compiled.step_ms:.2f}x"),
        ("first compiled step (with compilation)", f"{compiled.seconds[0]:.2f} s"),
        ("largest difference of the loss curves", f"{drift:.2e}"),
        ("accuracy, eager / compiled", f"{eager.accuracy:.3f} / {compiled.accuracy:.3f}"),
        ("GPT-2 generation, eager / compiled", f"{text[0] * 1e3:.0f} ms / {text[1] * 1e3:.0f} ms"),
        ("GPT-2 tokens agree", "yes" if text[2] else "NO"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--report", type=Path, default=Path("demo_report"))
    arguments = parser.parse_args()

    model = vision_transformer()
    with Progress(console=CONSOLE) as progress:
        eager = train("eager", copy.deepcopy(model), arguments.steps, progress)
        compiled = train("compiled", torchcompile.compile(copy.deepcopy(model)), arguments.steps, progress)
    CONSOLE.print("generating with GPT-2, eager and compiled")
    rows = summary(eager, compiled, generate(arguments.tokens))
    report = torchcompile.report()
    rows.append(("ran eagerly, twice or differently", "\n".join(e.short for e in report.surprises) or "nothing"))

    table = Table(title="ViT on digits", show_header=False)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)
    CONSOLE.print(report)
    arguments.report.mkdir(parents=True, exist_ok=True)
    page = arguments.report / "index.html"
    page.write_text(
        PAGE.render(
            rows=rows,
            losses=picture("Loss", "cross entropy", [eager, compiled], "losses"),
            times=picture("Step time", "milliseconds", [eager, compiled], "seconds"),
            report=report.html_tables(),
        )
    )
    CONSOLE.print(f"report: {page.resolve()}")


if __name__ == "__main__":
    main()
