"""Runs torch.testing's operator database through `torchcompile.compile` with the default back end, against eager.

    python tools/compile_opdb.py --samples 3 --state opdb.jsonl --out docs/results/compile_opdb.md      everything
    python tools/compile_opdb.py --samples 1 --only cumsum amax --dtypes float32                        a slice

Each sample is run as a function (with its gradient), in place, and into `out`, with fixed and with symbolic sizes; the
graph is captured whole (`fullgraph=True`), so that nothing runs eagerly unseen: what breaks the graph is counted as
listed, with its reason. Values, strides and the identity of `out` are compared as `tools/aot_opdb.py` does, whose
machinery this is: float64 judges where the dtype's tolerances do not hold. With `--state`, operators that are done are
written there as they end, and are not run again.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import aot_opdb as opdb
import torchcompile
from torchdynamo.errors import Unsupported

from pool import append_row, read_rows  # isort: skip - `aot_opdb` knows where it is

# The database's random operators seed the generator around their call; `aot_opdb.observe` does, for every run. What
# they do beside that breaks a graph, and is nothing of the operator's.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

COLUMNS = ("right", "right by float64", "listed", "refused", "wrong", "skipped")


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
    compiled = torchcompile.compile(
        program, fullgraph=True, dynamic=dynamic, options={"strict": True, "eager_random": True}
    )
    args, kwargs, leaves = opdb.fresh(sample)
    outputs, gradients = opdb.observe(compiled, args, kwargs, leaves)
    try:
        opdb.same(seen[0][0], outputs, "outputs")
        opdb.same(seen[0][1], gradients, "gradients")
    except opdb.Inexact:
        exact = opdb.in_double(program, sample)
        opdb.judge(seen[0][0], outputs, exact[0], "outputs")
        opdb.judge(seen[0][1], gradients, exact[1], "gradients")
        return "right by float64"
    return "right"


def taken(op: Any, dtype: torch.dtype, gradient: bool, count: int) -> list[Any]:
    """Samples spread over the database's, with one that has an empty and one that has a 0-d tensor where there are."""
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=gradient))
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


def run_operator(place: int, samples: int, limit: int, dtypes: list[str]) -> dict[str, Any]:
    """Counts by dtype, and [reason, dtype] of what was not right."""
    op = op_db[place]
    counts: dict[str, collections.Counter[str]] = {}
    failures: list[tuple[str, str]] = []
    for dtype in opdb.DTYPES:
        name = str(dtype).removeprefix("torch.")
        if dtype not in op.supported_dtypes("cpu") or (dtypes and name not in dtypes):
            continue
        found = counts[name] = collections.Counter()
        gradient = dtype in op.supported_backward_dtypes("cpu") and op.supports_autograd
        for with_gradient in (True, False) if gradient else (False,):
            try:
                chosen = taken(op, dtype, with_gradient, samples)
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
    return {"name": opdb.full_name(op), "counts": counts, "failures": failures}


def judged(program: Callable[..., Any], sample: Any, dynamic: bool, limit: int) -> tuple[str, str]:
    """(column, reason) of one run."""
    signal.alarm(limit)
    faulthandler.dump_traceback_later(2 * limit, exit=True)  # where no Python runs that would see the signal
    try:
        return check(program, sample, dynamic), ""
    except opdb.Skipped:
        return "skipped", ""
    except Unsupported as error:
        return "listed", opdb.first_line(error)
    except (AssertionError, TimeoutError) as error:
        return "wrong", opdb.first_line(error)
    except Exception as error:
        return "refused", opdb.first_line(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)


def report(results: list[dict[str, Any]], samples: int, command: str) -> str:
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
        f"`{command}`, torch {torch.__version__}, Python {platform.python_version()}, CPU ({platform.machine()}): "
        f"{len(results)} of {len(op_db)} entries, {samples or 'all'} samples an operator and dtype and one each with "
        "an empty and a 0-d tensor; as a function with its gradient, in place and into `out`, with fixed and symbolic "
        "sizes. Right by float64: beyond the dtype's tolerances, but no further from the float64 result than twice "
        "eager's own error. Listed: the graph breaks, with a reason. Skipped: eager raises, gives a sparse result, "
        "differs from run to run, or leaves `out` as it was.",
        "",
        "| dtype | " + " | ".join(COLUMNS) + " | right of those run |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for name in (*(d for d in counts if d != "all"), "all"):
        c = counts[name]
        run = sum(c.values()) - c["skipped"]
        part = f"{100 * (c['right'] + c['right by float64']) / run:.2f}%" if run else "-"
        lines.append(f"| {name} | " + " | ".join(str(c[column]) for column in COLUMNS) + f" | {part} |")
    lines += ["", "## What is not right", "", "| operator | runs | what |", "|---|---|---|"]
    lines += [f"| {name} | {n} | {reason.replace('|', '/')} |" for (name, reason), n in sorted(failures.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, one thread each")
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
    options = parser.parse_args()
    chosen = opdb.places_of(options.only)
    results = read_rows(options.state)
    done = {r["name"] for r in results}
    left = [place for place in chosen if opdb.full_name(op_db[place]) not in done]
    run = functools.partial(run_operator, samples=options.samples, limit=options.limit, dtypes=options.dtypes)
    with Progress(auto_refresh=False) as progress:  # no thread: the workers are forks of this process
        task = progress.add_task("operators", total=len(chosen), completed=len(done))
        for result in opdb.swept(run, left, options.jobs):
            results.append(result)
            append_row(options.state, result)
            progress.update(task, advance=1, refresh=True)
    text = report(results, options.samples, " ".join(["python", "tools/compile_opdb.py", *sys.argv[1:]]))
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
