"""Capture alone: this stack's and torch.compile's, with a back end that runs the graph as it was captured.

    python tools/bench/capture.py                                   all transformers of the list, train and infer
    python tools/bench/capture.py --models hf/BartForCausalLM tv/resnet18 --modes train
    python tools/bench/capture.py --write docs/results/capture_models.md

One process a (model, mode, compiler), its caches cold. Columns: graphs; breaks; seconds of the first call less those
of an eager call; milliseconds of a later call; whether outputs and gradients agree with eager's. The random state is
the same for each run, so that layers dropped at random are the same ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUITES: dict[str, str] = {
    "hf": "AlbertForMaskedLM AlbertForQuestionAnswering AllenaiLongformerBase BartForCausalLM BertForMaskedLM "
    "BlenderbotForCausalLM BlenderbotSmallForCausalLM CamemBert DebertaForQuestionAnswering DistilBertForMaskedLM "
    "DistilBertForQuestionAnswering ElectraForCausalLM GPT2ForSequenceClassification GPTJForCausalLM "
    "GPTNeoForSequenceClassification LayoutLMForMaskedLM LayoutLMForSequenceClassification "
    "M2M100ForConditionalGeneration MBartForCausalLM MegatronBertForCausalLM MegatronBertForQuestionAnswering "
    "MobileBertForMaskedLM MobileBertForQuestionAnswering OPTForCausalLM PLBartForCausalLM "
    "PLBartForConditionalGeneration PegasusForConditionalGeneration RobertaForQuestionAnswering T5Small "
    "XGLMForCausalLM XLNetLMHeadModel",
    "timm": "adv_inception_v3 beit_base_patch16_224 cait_m36_384 coat_lite_mini convit_base convmixer_768_32 "
    "convnext_base cspdarknet53 dm_nfnet_f0 dpn107 eca_botnext26ts_256 ese_vovnet19b_dw fbnetc_100 fbnetv3_b "
    "gmixer_24_224 hrnet_w18 nest_base_jx lcnet_050 mixer_b16_224 mixnet_l mnasnet_100 mobilenetv2_100 "
    "mobilenetv3_large_100 mobilevit_s nfnet_l0 pnasnet5large regnety_002 res2next50 sebotnet33ts_256 selecsls42b "
    "spnasnet_100 swin_base_patch4_window7_224 resnext101_32x16d tf_efficientnet_b0 tf_mixnet_l tinynet_a "
    "tnt_s_patch16_224 twins_pcpvt_base visformer_small vit_base_patch16_224 volo_d1_224 xcit_large_24_p8_224",
    "tv": "alexnet densenet121 mnasnet1_0 mobilenet_v2 mobilenet_v3_large resnet18 resnet50 resnet152 "
    "shufflenet_v2_x1_0 vgg16",
}
COMPILERS = ("torchdynamo", "torch.compile")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One (model, mode, compiler) in this process."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from zoo import build

    suite, name = case["model"].split("/")
    train = case["mode"] == "train"
    torch.manual_seed(0)
    model, args, kwargs = build(suite, name, train=train, batch=case["batch"])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    graphs = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        graphs[0] += 1
        return graph.forward

    if case["compiler"] == "torchdynamo":
        import torchdynamo

        compiled = torchdynamo.optimize(backend)(model)
    else:
        compiled = torch.compile(model, backend=backend)

    def step(candidate: Any) -> tuple[list[torch.Tensor], float]:
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(1)
        began = time.perf_counter()
        with torch.set_grad_enabled(train):
            out = candidate(*args, **kwargs)
        seconds = time.perf_counter() - began
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if train:
            torch.manual_seed(2)
            total = out.loss if hasattr(out, "loss") else sum(x.float().pow(2).mean() for x in leaves)
            total.backward()
        found = [leaf.detach() for leaf in leaves]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found + [buffer.clone() for buffer in model.buffers()], seconds

    def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        if len(a) != len(b) or any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(a, b, strict=True)):
            return float("inf")
        return max(
            float((x.double() - y.double()).norm() / (x.double().norm() + 1e-6)) for x, y in zip(a, b, strict=True)
        )

    step(model)
    expected, eager = step(model)
    found, first = step(compiled)
    row = dict(case, seconds=first - eager, error=difference(expected, found))
    row["graphs"] = graphs[0]
    again, _ = step(compiled)
    row["error"] = max(row["error"], difference(expected, again))
    row["graphs_after"] = graphs[0]
    row["ms"] = min(step(compiled)[1] for _ in range(3)) * 1e3
    row["eager_ms"] = min(step(model)[1] for _ in range(3)) * 1e3
    if case["compiler"] == "torchdynamo":
        stats = torchdynamo.stats()
        row["breaks"] = sum(count for count, _, _ in stats.breaks)
        row["reasons"] = sorted({f"{reason} ({Path(where).name})" for _, reason, where in stats.breaks})
        row["fallbacks"] = [f"{what}: {why}" for what, why in stats.fallbacks]
    else:
        counters = torch._dynamo.utils.counters
        row["breaks"] = sum(counters["graph_break"].values())
    return row


def in_fresh_process(case: dict[str, Any], timeout: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return dict(case, failure=f"longer than {timeout:.0f} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        row: dict[str, Any] = json.loads(lines[-1])
        return row
    return dict(case, failure=(done.stderr.strip().splitlines() or ["no output"])[-1][:200])


def verdict(row: dict[str, Any], tolerance: float) -> str:
    if "failure" in row:
        return f"FAILED: {row['failure']}"
    return "right" if row["error"] <= tolerance else f"WRONG: {row['error']:.1e}"


def table(rows: list[dict[str, Any]], tolerance: float) -> str:
    lines = [
        "| model | mode | compiler | graphs | breaks | capture s | ms a call | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model"], row["mode"], row["compiler"]]
        if "failure" in row:
            cells += ["", "", "", ""]
        else:
            cells += [str(row["graphs"]), str(row["breaks"]), f"{row['seconds']:.2f}", f"{row['ms']:.1f}"]
        lines.append("| " + " | ".join([*cells, verdict(row, tolerance)]) + " |")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]], tolerance: float) -> str:
    by_case = {(row["model"], row["mode"], row["compiler"]): row for row in rows if "failure" not in row}
    text = []
    for compiler in COMPILERS:
        own = [row for row in rows if row["compiler"] == compiler]
        right = sum(verdict(row, tolerance) == "right" for row in own)
        if own:
            text.append(f"{compiler}: {right} of {len(own)} right.")
    pairs = [
        (row, by_case[model, mode, "torch.compile"])
        for (model, mode, compiler), row in by_case.items()
        if compiler == "torchdynamo" and (model, mode, "torch.compile") in by_case
    ]
    if pairs:
        ratio = statistics.geometric_mean(max(a["seconds"], 1e-3) / max(b["seconds"], 1e-3) for a, b in pairs)
        more = [f"{a['model']} {a['mode']}" for a, b in pairs if a["breaks"] > b["breaks"]]
        text.append(f"Capture seconds against torch.compile's: {ratio:.3f} (geometric mean over {len(pairs)} cases).")
        text.append(f"More breaks than torch.compile: {', '.join(more) or 'none'}.")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[f"hf/{name}" for name in SUITES["hf"].split()])
    parser.add_argument("--modes", nargs="*", default=["train", "infer"])
    parser.add_argument("--compilers", nargs="*", default=list(COMPILERS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative error that counts as right")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="JSON lines: cases in them are not run again; the first grows"
    )
    parser.add_argument("--write", help="write the table here as Markdown")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(json.loads(options.case))), flush=True)
        return
    models = [f"{entry}/{name}" for entry in options.models if entry in SUITES for name in SUITES[entry].split()] + [
        entry for entry in options.models if entry not in SUITES
    ]
    kept_rows = [Path(path).read_text().splitlines() for path in options.rows if Path(path).exists()]
    rows: list[dict[str, Any]] = [json.loads(line) for lines in kept_rows for line in lines]
    done = {(row["model"], row["mode"], row["compiler"]) for row in rows}
    for model in models:
        for mode in options.modes:
            for compiler in options.compilers:
                case = {"model": model, "mode": mode, "compiler": compiler, "batch": options.batch}
                if (model, mode, compiler) in done:
                    continue
                row = in_fresh_process(case, options.timeout)
                rows.append(row)
                if options.rows:
                    with Path(options.rows[0]).open("a") as kept:
                        kept.write(json.dumps(row) + "\n")
                shown = " ".join(f"{k}={row[k]}" for k in ("graphs", "breaks") if k in row)
                spent = f"{row['seconds']:.2f}s" if "seconds" in row else ""
                notes = [*row.get("reasons", ()), *row.get("fallbacks", ())]
                print(
                    f"{model} {mode} {compiler}: {verdict(row, options.tolerance)} {shown} {spent} {notes or ''}",
                    flush=True,
                )
    text = summary(rows, options.tolerance)
    print(text)
    if options.write:
        import torch

        machine = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} processors."
        head = f"# Capture of public models\n\nTiny configurations on CPU. {machine}\n`python tools/bench/capture.py`\n"
        Path(options.write).write_text(f"{head}\n{text}\n\n{table(rows, options.tolerance)}\n")


if __name__ == "__main__":
    main()
