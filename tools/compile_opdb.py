"""Runs torch.testing's operator database through `torchcompile.compile` with the default back end, against eager.

    python tools/compile_opdb.py --samples 3 --state opdb.jsonl --out docs/results/compile_opdb.md      everything
    python tools/compile_opdb.py --samples 1 --only cumsum amax --dtypes float32                        a slice
    python tools/compile_opdb.py --samples 1 --gpus 2 --jobs 30                                         on two GPUs

Each sample is run as a function (with its gradient), in place, and into `out`, with fixed and with symbolic sizes; the
graph is captured whole (`fullgraph=True`), so that nothing runs eagerly unseen. What refuses that is run once more with
breaks allowed, as a user would: where the values are right and the ledger tells of graph breaks alone, that is a
column of its own, with the break's reason; where a function or a graph ran eagerly as a whole, the run is listed.
Values, strides and the identity of `out` are compared as `tools/aot_opdb.py` does, whose machinery this is: float64
judges where the dtype's tolerances do not hold. With `--state`, operators that are done with a dtype are written there
as they end, and are not run again.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import math
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import aot_opdb as opdb
import torchcompile
from primtorch.ledger import LEDGER, Effect, of
from torchdynamo.errors import Unsupported

from pool import append_row, read_rows  # isort: skip - `aot_opdb` knows where it is

# The database's random operators seed the generator around their call; `aot_opdb.observe` does, for every run. What
# they do beside that breaks a graph, and is nothing of the operator's.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

ACROSS = "right across a break"
RIGHT = ("right", "right by float64", ACROSS)
COLUMNS = (*RIGHT, "listed", "refused", "wrong", "skipped")


class Listed(Exception):
    """The program's values are eager's because eager made them: it ran as a whole, and the ledger says so."""


class Across(Exception):
    """Right, with a break that was told; the message is its reason."""


def variants(op: Any, gradient: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, program of the sample's arguments)."""
    yield "function", op.op
    if op.inplace_variant is not None:
        in_place = op.inplace_variant
        yield "in place", lambda x, *args, **kwargs: in_place(x.clone(), *args, **kwargs)
    if op.supports_out and not gradient:
        yield "out", lambda *args, **kwargs: into_out(op.op, args, kwargs)


def into_out(function: Any, args: Any, kwargs: Any) -> Any:
    """The call with `out=` memory of the result's shape and dtype; the results must be that memory."""
    shaped = function(*args, **kwargs)
    one = isinstance(shaped, torch.Tensor)
    out = torch.zeros_like(shaped) if one else tuple(torch.zeros_like(t) for t in shaped)
    function(*args, **kwargs, out=out)
    return out


def writes_out(op: Any, sample: Any) -> bool:
    """Whether eager writes to `out` at all: `fft.ihfftn` over one dimension does not, and gives its result apart."""
    args, kwargs, _ = opdb.fresh(sample)
    torch.manual_seed(0)
    try:
        shaped, out = op.op(*args, **kwargs), into_out(op.op, args, kwargs)
    except Exception:
        return True  # for `check` to say
    if any(t.layout != torch.strided for t in pytree.tree_leaves(out)):
        return True
    pairs = zip(pytree.tree_leaves(shaped), pytree.tree_leaves(out), strict=True)
    return not any(t.any() and not o.any() for t, o in pairs)


def check(program: Callable[..., Any], sample: Any, dynamic: bool) -> str:
    """The column of `COLUMNS` that one run belongs to; raises for what is wrong or refused."""
    seen = []
    for _ in range(2):
        args, kwargs, leaves = opdb.fresh(sample)
        try:
            seen.append(opdb.observe(program, args, kwargs, leaves))
        except Exception as error:
            raise opdb.Skipped from error
    try:
        opdb.same(seen[0][0], seen[1][0], "outputs")
        opdb.same(seen[0][1], seen[1][1], "gradients")
    except AssertionError as error:
        raise opdb.Skipped from error
    try:
        return compared(program, sample, dynamic, seen[0], fullgraph=True)
    except Unsupported as error:
        reason, strict = opdb.first_line(error), True
    except (AssertionError, TimeoutError):
        raise
    except Exception as error:
        reason, strict = opdb.first_line(error), False  # what a back end cannot compile runs as it was captured
    LEDGER.clear()
    compared(program, sample, dynamic, seen[0], fullgraph=False, strict=strict)
    if of(LEDGER.events, Effect.FALLBACK) or not of(LEDGER.events, Effect.BREAK):
        raise Listed(reason)
    raise Across(reason)


def compared(
    program: Callable[..., Any], sample: Any, dynamic: bool, eager: Any, fullgraph: bool, strict: bool = True
) -> str:
    """Runs the compiled program: "right", or "right by float64"."""
    options = {"strict": strict, "eager_random": True}
    compiled = torchcompile.compile(program, fullgraph=fullgraph, dynamic=dynamic, options=options)
    args, kwargs, leaves = opdb.fresh(sample)
    outputs, gradients = opdb.observe(compiled, args, kwargs, leaves)
    try:
        opdb.same(eager[0], outputs, "outputs")
        opdb.same(eager[1], gradients, "gradients")
    except opdb.Inexact:
        opdb.judged(program, sample, eager, (outputs, gradients))
        return "right by float64"
    return "right"


def taken(op: Any, device: str, dtype: torch.dtype, gradient: bool, count: int) -> list[Any]:
    """Samples spread over the database's, with one that has an empty and one that has a 0-d tensor where there are."""
    torch.manual_seed(0)
    found = list(op.sample_inputs(device, dtype, requires_grad=gradient))
    if not count:
        return found
    chosen = found[:: max(1, len(found) // count)][:count]

    def add_first(has: Callable[[torch.Tensor], bool]) -> None:
        for sample in found:
            tensors = [t for t in pytree.tree_leaves((sample.input, sample.args)) if isinstance(t, torch.Tensor)]
            if any(map(has, tensors)):
                if all(sample is not s for s in chosen):
                    chosen.append(sample)
                return

    add_first(lambda t: t.numel() == 0)
    add_first(lambda t: t.dim() == 0)
    return chosen


def dtypes_of(place: int, device: str, only: Sequence[str]) -> list[str]:
    """Names of the dtypes that an entry is run with."""
    op = op_db[place]
    names = [str(dtype).removeprefix("torch.") for dtype in opdb.DTYPES if dtype in op.supported_dtypes(device)]
    return [name for name in names if not only or name in only]


def run_operator(place: int, name: str, device: str, samples: int, limit: int) -> dict[str, Any]:
    """Counts of one dtype, and [reason, dtype] of what was not right."""
    op, dtype = op_db[place], getattr(torch, name)
    found: collections.Counter[str] = collections.Counter()
    failures: list[tuple[str, str]] = []
    gradient = dtype in op.supported_backward_dtypes(device) and op.supports_autograd
    for with_gradient in (True, False) if gradient else (False,):
        try:
            chosen = taken(op, device, dtype, with_gradient, samples)
        except Exception:  # the database itself cannot make them
            continue
        for variant, program in variants(op, with_gradient):
            if gradient and not with_gradient and variant != "out":
                continue
            for dynamic in (False, True):
                what = f"{variant}, {'symbolic' if dynamic else 'fixed'} sizes"
                for sample in chosen:
                    if variant == "out" and not writes_out(op, sample):
                        found["skipped"] += 1
                        continue
                    column, reason = judged(program, sample, dynamic, limit)
                    found[column] += 1
                    if reason:
                        failures.append((f"{column}: {what}: {reason}", name))
                torchcompile.reset()
    return {"name": opdb.full_name(op), "dtype": name, "counts": {name: found}, "failures": failures}


def judged(program: Callable[..., Any], sample: Any, dynamic: bool, limit: int) -> tuple[str, str]:
    """(column, reason) of one run."""
    signal.alarm(limit)
    faulthandler.dump_traceback_later(2 * limit, exit=True)  # where no Python runs that would see the signal
    try:
        return check(program, sample, dynamic), ""
    except opdb.Skipped:
        return "skipped", ""
    except Across as error:
        return ACROSS, str(error)
    except Listed as error:
        return "listed", str(error)
    except (AssertionError, TimeoutError) as error:
        return "wrong", opdb.first_line(error)
    except Exception as error:
        return "refused", opdb.first_line(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)


def report(results: list[dict[str, Any]], samples: int, device: str, command: str) -> str:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: collections.Counter[tuple[str, str]] = collections.Counter()
    for result in results:
        for dtype, found in result["counts"].items():
            counts[dtype].update(found)
            counts["all"].update(found)
        failures.update((result["name"], reason) for reason, _ in result["failures"])
    lines = [
        "# Operator database through the default back end",
        "",
        f"`{command}`, torch {torch.__version__}, Python {platform.python_version()}, {device} ({platform.machine()}): "
        f"{len({r['name'] for r in results})} of {len(op_db)} entries, {samples or 'all'} samples of each operator "
        "and dtype, one each with an empty and a 0-d tensor; as a function with its gradient, in place and into `out`, "
        "with fixed and symbolic sizes. Right by float64: beyond the dtype's tolerances, but no further from the "
        "float64 result than twice eager's own error. Right across a break: an operator, or Python that looks at its "
        "result, has to see data; it ran between two graphs, and the report says so. Listed: it ran eagerly as a "
        "whole. Refused: it raises where eager does not. Skipped: eager raises, gives a sparse result, differs from "
        "run to run, or leaves `out` as it was.",
        "",
        "| dtype | " + " | ".join(COLUMNS) + " | right of those run | in one graph |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for name in (*(d for d in counts if d != "all"), "all"):
        c = counts[name]
        run = sum(c.values()) - c["skipped"]
        right = sum(c[column] for column in RIGHT)
        parts = [f"{100 * part / run:.2f}%" if run else "-" for part in (right, right - c[ACROSS])]
        lines.append(f"| {name} | " + " | ".join((*(str(c[column]) for column in COLUMNS), *parts)) + " |")
    for heading, across in (("What is not right", False), ("What breaks the graph", True)):
        rows = [(key, n) for key, n in sorted(failures.items()) if key[1].startswith(ACROSS) == across]
        lines += ["", f"## {heading}", "", "| operator | runs | what |", "|---|---|---|"]
        lines += [f"| {name} | {n} | {shown(reason)} |" for (name, reason), n in rows]
    return "\n".join(lines) + "\n"


def shown(reason: str) -> str:
    return reason.removeprefix(f"{ACROSS}: ").replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, one thread each")
    parser.add_argument("--gpus", type=int, default=0, help="run on so many NVIDIA GPUs instead of the CPU")
    parser.add_argument("--samples", type=int, default=3, help="so many an operator and dtype; 0: all")
    parser.add_argument("--only", nargs="*", default=[""], help="operators whose name contains one of these")
    parser.add_argument(
        "--dtypes", nargs="*", default=[], help="float32 and the like; all of the tool's when not given"
    )
    parser.add_argument(
        "--limit", type=int, default=60, help="seconds for one run; after twice as many the process ends"
    )
    parser.add_argument("--state", type=Path, help="a line for each operator that is done; these are not run again")
    parser.add_argument("--out", type=Path, help="write the page here")
    parser.add_argument("--seed", type=int, default=0, help="the order; the page says which")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then what still runs is left for another time")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    device = "cuda" if options.gpus else "cpu"
    chosen = [
        (place, name) for place in opdb.places_of(options.only) for name in dtypes_of(place, device, options.dtypes)
    ]
    results = read_rows(options.state)
    done = {(r["name"], r["dtype"]) for r in results}
    left = [case for case in chosen if (opdb.full_name(op_db[case[0]]), case[1]) not in done]
    random.Random(options.seed).shuffle(left)
    run = functools.partial(run_operator, device=device, samples=options.samples, limit=options.limit)
    with Progress(auto_refresh=False) as progress:  # no thread: the workers are forks of this process
        task = progress.add_task("operators", total=len(chosen), completed=len(chosen) - len(left))
        for result in opdb.swept(run, left, options.jobs, until, options.gpus):
            results.append(result)
            append_row(options.state, result)
            progress.update(task, advance=1, refresh=True)
    text = report(results, options.samples, device, " ".join(["python", "tools/compile_opdb.py", *sys.argv[1:]]))
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
