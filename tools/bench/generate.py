"""Serving language models: `generate` of transformers, eager, under torch.compile and under this stack.

    python tools/bench/generate.py --out rows.jsonl --write docs/results/generate.md
    python tools/bench/generate.py --models gpt2 llama --decodings greedy beams --ways forward generate
    python tools/bench/generate.py --compilers ours --parts session --out rows.jsonl       tokens and counts alone

A process for each (model, way of decoding, way of compiling, compiler). A session is four prompts of different lengths,
each answered by `generate`, and then all of them again: in float64, where its tokens (and whatever else the call gives)
have to be eager's, and in float32, where it is timed afterwards, eager and compiled in turns. Models have 4 layers of
width 256 and random weights.

It ends with an error where tokens differ, where something is compiled in the second round of a session, where a
function reaches its limit of versions, or where a graph breaks within the model's own call.
`--out` keeps a JSON line a case: cases in it are not run again.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generate_case import COMPILERS, DECODINGS, ENCODED, MODELS, WAYS, measure
from pool import Row, Worker, append_row, read_rows, run_cases

KEY = ("model", "decoding", "way", "compiler")


def import_all() -> None:
    """What every worker needs, once: workers are forks of this process. No thread may start here."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from zoo import import_torchvision

    import_torchvision()
    import transformers

    for model in MODELS.values():
        getattr(transformers, model.class_name)
    for module in ("torch._dynamo", "torchcompile"):
        __import__(module)


def decodings_of(model: str) -> Sequence[str]:
    """The ways of decoding that a model has."""
    encoded = model in ("t5", "whisper")
    return [name for name in DECODINGS if not encoded or name in ENCODED]


def as_row(worker: Worker) -> Row:
    """A case with what it told."""
    row = {name: worker.case[name] for name in KEY}
    for message in worker.messages:
        row |= message
    if worker.failure:
        row["failure"] = worker.failure
    return row


# -- what is wrong with a row --------------------------------------------------------------------


def faults(row: Row) -> list[str]:
    """What a user would complain of, each once."""
    return list(dict.fromkeys(_faults(row)))


def _faults(row: Row) -> Iterator[str]:
    if "failure" in row:
        yield row["failure"]
    for part in ("session", "clock"):
        found = row.get(part)
        if not found:
            continue
        if found["differ"] and part == "session":
            yield f"another result than eager's: {', '.join(found['differ'])}"
        late = found["again"]["graphs"] - found["counts"]["graphs"]
        if late:
            yield f"{late} graphs in the second round"
        if found["again"]["limits"]:
            yield f"limit of versions: {'; '.join(found['again']['limits'])}"
        if row["way"] != "generate" and found["again"]["breaks"]:
            yield f"{found['again']['breaks']} breaks within the model's call"


def count(row: Row, name: str) -> str:
    found = row.get("session") or row.get("clock")
    return str(found["counts"].get(name, "")) if found else ""


def verdict(row: Row) -> str:
    if "failure" in row:
        return f"FAILED: {row['failure'][:80]}"
    differs = any(row.get(part, {}).get("differ") for part in ("session",))
    return "DIFFERS" if differs else "equal" if "session" in row else ""


def line(row: Row) -> str:
    """A row for a person who waits."""
    head = " ".join(row[name] for name in KEY)
    counts = ", ".join(f"{name} {count(row, name)}" for name in ("graphs", "recompiles", "breaks", "fallbacks"))
    ms = row.get("ms")
    times = f", ms a token {ms['eager']:.2f} -> {ms['compiled']:.2f}" if ms else ""
    return f"{head}: {counts}{times}" + "".join(f"\n    {fault}" for fault in faults(row))


# -- the page ------------------------------------------------------------------------------------


HEAD = (
    "model", "decoding", "compiled", "tokens", "graphs", "recompiles", "breaks", "limit", "later", "first call, s",
    "eager, ms a token", "ours", "torch.compile", "its graphs", "its first call, s",
)  # fmt: skip


def table(rows: dict[tuple[str, ...], Row]) -> str:
    """One line for each (model, decoding, way)."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for key, ours in rows.items():
        if key[3] != "ours":
            continue
        its = rows.get((*key[:3], "torch.compile"), {})
        found = ours.get("session") or ours.get("clock") or {}
        cells = [*key[:3], verdict(ours), *(count(ours, name) for name in ("graphs", "recompiles", "breaks"))]
        cells.append("reached" if found and found["again"]["limits"] else "")
        cells.append(str(found["again"]["graphs"] - found["counts"]["graphs"]) if found else "")
        clock, its_clock = ours.get("clock"), its.get("clock")
        cells.append(f"{clock['first']:.1f}" if clock else "")
        cells += [f"{ours['ms'][of]:.2f}" if "ms" in ours else "" for of in ("eager", "compiled")]
        its_ms = its.get("ms")
        cells.append(f"{its_ms['compiled'] * ours['ms']['eager'] / its_ms['eager']:.2f}" if its_ms else "")
        cells += [count(its, "graphs"), f"{its_clock['first']:.1f}" if its_clock else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: dict[tuple[str, ...], Row]) -> str:
    ours = [row for row in rows.values() if row["compiler"] == "ours"]
    text = []
    for way in WAYS:
        of_way = [row for row in ours if row["way"] == way]
        if not of_way:
            continue
        right = [row for row in of_way if not faults(row)]
        graphs = [int(count(row, "graphs") or 0) for row in of_way]
        quicker = [row for row in of_way if "ms" in row and row["ms"]["compiled"] < row["ms"]["eager"]]
        timed = [row for row in of_way if "ms" in row]
        text.append(
            f"- compiled: {way}: {len(right)} of {len(of_way)} without fault; at most {max(graphs)} graphs; "
            f"quicker than eager in {len(quicker)} of {len(timed)}."
        )
        for row in of_way:
            text += [f"  - {row['model']}, {row['decoding']}: {fault}" for fault in faults(row)]
    return "\n".join(text)


def page(rows: dict[tuple[str, ...], Row], command: str) -> str:
    import torch
    import transformers

    return f"""# Serving language models

`generate` of transformers on CPU, for models of 4 layers of width 256 with random weights. A session is four prompts of
different lengths (or padded batches, or batches of 1, 2 and 3 prompts), and then all of them again. Tokens, and scores,
hidden states and caches where the call gives them, are compared with eager's in float64. Compiled is what the user
writes: *forward* `model.forward = compile(model.forward)`, *model* `model = compile(model)`, *generate*
`generate = compile(model.generate)`. Counts are those of the first round of the session; *later* are graphs of the
second. Milliseconds a token are of float32, a whole call of `generate` by its steps, the median of 7, eager and
compiled in turns in one process; torch.compile's are scaled by the ratio of the two processes' eager. Others used the
machine meanwhile: compare milliseconds within a row. First calls find some of their kernels on disk.

Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}; {os.cpu_count()}
processors, one thread. `{command}`

Where all outputs are asked for, transformers puts hooks on the model in the first call, under a lock: two breaks, in
that call alone. Mistral's cache, of a window of 16, takes other ways below the window, at its edge and beyond it, each
of which is a graph; and once assisted decoding has cut it back it counts its length in a tensor, which its own code
asks.

{summary(rows)}

{table(rows)}
"""


# -- the command ---------------------------------------------------------------------------------


def planned(options: argparse.Namespace, done: set[tuple[str, ...]]) -> list[Row]:
    """Cases that are still to run."""
    return [
        {"model": model, "decoding": decoding, "way": way, "compiler": compiler, "parts": options.parts}
        for compiler in options.compilers
        for model in options.models
        for decoding in decodings_of(model)
        for way in options.ways
        if decoding in options.decodings and (model, decoding, way, compiler) not in done
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--decodings", nargs="*", default=list(DECODINGS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--compilers", nargs="*", default=list(COMPILERS))
    parser.add_argument("--parts", nargs="*", default=["session", "clock"])
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--case-timeout", type=float, default=300, help="seconds for one case")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all of it; what is left stays open")
    parser.add_argument("--out", help="JSON lines, a case each: grows, and cases in it are not run again")
    parser.add_argument("--events", action="store_true", help="show what the ledger was told, too")
    parser.add_argument("--write", help="write the page here as Markdown, of all rows in --out")
    options = parser.parse_args()
    began = time.monotonic()
    out = Path(options.out) if options.out else None
    rows = {tuple(row[name] for name in KEY): row for row in read_rows(out)}
    cases = planned(options, set(rows))
    if cases:
        import_all()
    ready = run_cases(
        measure, cases, jobs=options.jobs, case_seconds=options.case_timeout, until=began + options.timeout
    )
    for number, worker in enumerate(ready, 1):
        row = as_row(worker)
        rows[tuple(row[name] for name in KEY)] = row
        append_row(out, row)
        print(f"{time.monotonic() - began:4.0f} s {number}/{len(cases)} {line(row)}", flush=True)
        if options.events:
            found = row.get("session") or row.get("clock") or {}
            print("".join(f"    * {event}\n" for event in found.get("again", {}).get("events", ())), flush=True)
    order = {name: place for place, name in enumerate((*MODELS, *DECODINGS, *WAYS, *COMPILERS))}
    rows = dict(sorted(rows.items(), key=lambda item: [order[name] for name in item[0]]))
    print(summary(rows))
    if options.write:
        Path(options.write).write_text(page(rows, "python tools/bench/generate.py"))
    wrong = [row for row in rows.values() if row["compiler"] == "ours" and faults(row)]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(rows)} cases have faults")


if __name__ == "__main__":
    main()
