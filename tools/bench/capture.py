"""Capture alone: this stack's and torch.compile's, with a back end that runs the graph as it was captured.

    python tools/bench/capture.py --all --jobs 16 --out rows.jsonl --write docs/results/capture_models.md
    python tools/bench/capture.py --models hf/BartForCausalLM tv/resnet18 --modes train
    python tools/bench/capture.py --all --compilers torchdynamo --out rows.jsonl         one side of it

A process with one thread for each (model, mode); in it eager runs, then this stack, then torch.compile, from the same
parameters and random state. Transformers are tiny (two layers), image models have their own depth and small images.
`--out` keeps a JSON line a case: cases in it are not run again, so that a sweep can be cut into slices.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from capture_case import COMPILERS, measure
from pool import Row, Worker, append_row, read_rows, run_cases

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
# Started first, so that a sweep does not end in waiting for one of them.
SLOWEST = {
    "timm": "cait_m36_384 xcit_large_24_p8_224 hrnet_w18 pnasnet5large nest_base_jx dpn107 "
    "swin_base_patch4_window7_224 fbnetv3_b mixnet_l tf_mixnet_l twins_pcpvt_base adv_inception_v3 resnext101_32x16d "
    "tnt_s_patch16_224 convnext_base volo_d1_224 cspdarknet53 beit_base_patch16_224 mobilevit_s gmixer_24_224 "
    "convit_base dm_nfnet_f0",
    "hf": "PegasusForConditionalGeneration M2M100ForConditionalGeneration PLBartForConditionalGeneration "
    "MobileBertForMaskedLM MobileBertForQuestionAnswering BlenderbotForCausalLM BlenderbotSmallForCausalLM",
    "tv": "resnet152 densenet121",
}


# -- running -----------------------------------------------------------------------------------


def import_all() -> None:
    """What every worker needs, once: workers are forks of this process. No thread may start here."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from zoo import import_torchvision

    import_torchvision()
    for module in ("timm", "transformers", "torch._dynamo", "torchdynamo"):
        __import__(module)


def as_row(worker: Worker, compilers: Sequence[str]) -> Row:
    """The case with what it told; what it ended in stands where the next finding would."""
    row = {key: worker.case[key] for key in ("model", "mode", "batch", "side")}
    for message in worker.messages:
        row |= message
    missing = [name for name in ("eager", *compilers) if name not in row]
    if worker.failure and missing:
        row[missing[0]] = {"failure": worker.failure}
    return row


# -- reporting ---------------------------------------------------------------------------------


def verdict(row: Row, compiler: str, tolerance: float) -> str:
    found = row.get(compiler, {})
    failure = row.get("failure") or row.get("eager", {}).get("failure") or found.get("failure")
    if failure:
        return f"FAILED: {failure}"
    if not found:
        return "not run"
    if found.get("fallbacks"):
        return f"LEFT TO EAGER: {found['fallbacks'][0]}"
    return "right" if found["error"] <= tolerance else f"WRONG: {found['error']:.1e}"


def both(rows: list[Row]) -> list[tuple[Row, Row, Row]]:
    """(row, ours, torch.compile's) where both captured the case."""
    found = [(row, *(row.get(compiler, {}) for compiler in COMPILERS)) for row in rows]
    return [(row, a, b) for row, a, b in found if "seconds" in a and "seconds" in b and not a["fallbacks"]]


def summary(rows: list[Row], tolerance: float) -> str:
    text = []
    for compiler in COMPILERS:
        verdicts = [verdict(row, compiler, tolerance) for row in rows]
        run = [v for v in verdicts if v != "not run"]
        if run:
            text.append(f"- {compiler}: {run.count('right')} of {len(run)} cases right.")
    for row in rows:
        v = verdict(row, "torchdynamo", tolerance)
        if v not in ("right", "not run"):
            text.append(f"  - {row['model']} {row['mode']}: {v}")
    found = [(row, row.get("torchdynamo", {})) for row in rows]
    again = [f"{row['model']} {row['mode']}" for row, ours in found if ours.get("graphs_after") != ours.get("graphs")]
    text.append(f"- Captured more at a later call: {', '.join(again) or 'none'}.")
    pairs = both(rows)
    if pairs:
        ratios = [max(a["seconds"], 1e-3) / max(b["seconds"], 1e-3) for _, a, b in pairs]
        text.append(
            f"- Capture seconds against torch.compile's: **{statistics.geometric_mean(ratios):.3f}** "
            f"(geometric mean over {len(pairs)} cases; largest {max(ratios):.2f}); "
            f"medians {statistics.median(a['seconds'] for _, a, _ in pairs):.2f} s and "
            f"{statistics.median(b['seconds'] for _, _, b in pairs):.2f} s."
        )
        for name in ("breaks", "graphs"):
            more = [f"{r['model']} {r['mode']} ({a[name]}, {b[name]})" for r, a, b in pairs if a[name] > b[name]]
            fewer = sum(a[name] < b[name] for _, a, b in pairs)
            text.append(f"- More {name} than torch.compile: {', '.join(more) or 'none'}; fewer in {fewer} cases.")
    return "\n".join(text)


def table(rows: list[Row], tolerance: float) -> str:
    lines = [
        "| model | mode | result | graphs | its | breaks | its | capture s | its | why graphs end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["model"], row["mode"])):
        ours, its = (row.get(compiler, {}) for compiler in COMPILERS)
        cells = [row["model"], row["mode"], verdict(row, "torchdynamo", tolerance)]
        for name in ("graphs", "breaks"):
            cells += [str(ours.get(name, "")), str(its.get(name, ""))]
        cells += [f"{found['seconds']:.2f}" if "seconds" in found else "" for found in (ours, its)]
        lines.append("| " + " | ".join([*cells, ", ".join(ours.get("reasons", ()))]) + " |")
    return "\n".join(lines)


def page(rows: list[Row], options: argparse.Namespace) -> str:
    import torch
    from zoo import import_torchvision

    import_torchvision()  # before what imports it
    import timm
    import torchvision
    import transformers

    machine = (
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"timm {timm.__version__}, torchvision {torchvision.__version__}; {os.cpu_count()} processors, "
        f"{options.jobs} cases at once, one thread each."
    )
    return f"""# Capture of public models

Back end "eager": each graph is run as it was captured. Transformers in tiny configurations, image models with small
images, batch {options.batch}; on CPU. A case is a model in training (loss, outputs, gradients and buffers compared with
eager's) or in inference; right: a relative error of at most {options.tolerance:g}, over {1 + options.calls} calls.
Capture seconds: the first call less an eager one; either compiler has captured a small function before. "Its":
torch.compile(backend="eager"), afterwards in the same process.

{machine}
`python tools/bench/capture.py --all --jobs {options.jobs}`

{summary(rows, options.tolerance)}

{table(rows, options.tolerance)}
"""


# -- the command -------------------------------------------------------------------------------


def planned(options: argparse.Namespace, done: set[tuple[str, str]]) -> list[Row]:
    """Cases that are still to run, the longest first."""
    chosen = list(SUITES) if options.all else options.models
    models = [
        model
        for entry in chosen
        for model in ([f"{entry}/{name}" for name in SUITES[entry].split()] if entry in SUITES else [entry])
    ]
    slow = [f"{suite}/{name}" for suite, names in SLOWEST.items() for name in names.split()]
    place = {model: index for index, model in enumerate(slow)}
    cases = [
        {"model": model, "mode": mode, "batch": options.batch, "side": options.side, "calls": options.calls,
         "compilers": options.compilers}
        for model in models
        for mode in options.modes
        if (model, mode) not in done
    ]  # fmt: skip
    return sorted(cases, key=lambda case: (place.get(case["model"], len(place)), case["mode"] != "train"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole public list")
    parser.add_argument("--models", nargs="*", default=["hf"], help="suite/name, or a whole suite: hf, timm, tv")
    parser.add_argument("--modes", nargs="*", default=["train", "infer"])
    parser.add_argument("--compilers", nargs="*", default=list(COMPILERS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--side", type=int, default=96, help="pixels of an image's side where the model takes any")
    parser.add_argument("--calls", type=int, default=1, help="calls after the first one")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--case-timeout", type=float, default=180, help="seconds for one case")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for all of it; what is left stays open")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative error that counts as right")
    parser.add_argument("--out", help="JSON lines, a case each: grows, and cases in it are not run again")
    parser.add_argument("--again", action="store_true", help="run the cases in --out that are not right once more")
    parser.add_argument("--write", help="write the page here as Markdown, of all rows in --out")
    options = parser.parse_args()
    began = time.monotonic()
    out = Path(options.out) if options.out else None
    rows = {(row["model"], row["mode"]): row for row in read_rows(out)}
    kept = [
        case
        for case, row in rows.items()
        if not options.again or all(verdict(row, name, options.tolerance) == "right" for name in options.compilers)
    ]
    cases = planned(options, set(kept))
    if cases:
        import_all()
    ready = run_cases(
        measure, cases, jobs=options.jobs, case_seconds=options.case_timeout, until=began + options.timeout
    )
    for count, worker in enumerate(ready, 1):
        row = as_row(worker, options.compilers)
        rows[row["model"], row["mode"]] = row
        append_row(out, row)
        print(f"{time.monotonic() - began:4.0f} s {count}/{len(cases)} {line(row, options)}", flush=True)
    ordered = list(rows.values())
    print(summary(ordered, options.tolerance))
    if options.write:
        Path(options.write).write_text(page(ordered, options))


def line(row: Row, options: argparse.Namespace) -> str:
    parts = [f"{row['model']} {row['mode']}"]
    for compiler in options.compilers:
        found = row.get(compiler, {})
        shown = f"{compiler} {verdict(row, compiler, options.tolerance)}"
        if "seconds" in found:
            shown += f" {found['graphs']} graphs {found['breaks']} breaks {found['seconds']:.2f} s"
            if found.get("graphs_after", found["graphs"]) != found["graphs"]:
                shown += f" ({found['graphs_after']} graphs later)"
        parts.append(" ".join([shown, *found.get("recompiles", ())]))
    return "; ".join(parts)


if __name__ == "__main__":
    main()
