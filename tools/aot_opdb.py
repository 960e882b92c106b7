"""Runs torch.testing's operator database through `aot_function`, forward and gradient, against eager.

    python tools/aot_opdb.py --jobs 16 --out docs/results/aotautograd_opdb.md          everything
    python tools/aot_opdb.py --samples 3 --only linalg                                 a slice

The compilers run the graphs as they are, so that a difference is this package's. Where the values are not within the
dtype's tolerances of eager's (a traced derivative may have another, equal form), the float64
result judges: twice eager's own error is allowed, or twice what eager comes to with other rounding errors. Operators
that leave memory unset are left out. Operators run in worker processes; one that ends a worker, or takes longer than
`--limit` seconds for a sample, is counted as wrong.
"""

from __future__ import annotations

import argparse
import cmath
import collections
import functools
import math
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from aotautograd import aot_function

sys.path.insert(0, str(Path(__file__).parent / "bench"))

from drawn_rounding import DRAWS, DrawnRounding
from pool import Row, run_cases

Observed = tuple[list[Any], list[Any]]  # outputs, gradients

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
UNSET_MEMORY = ("empty", "new_empty")


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


class Skipped(Exception):
    """A sample on which eager itself raises or is not deterministic."""


class Inexact(AssertionError):
    """Values that differ by more than the tolerances of their dtype."""


def observe(
    function: Any, args: Any, kwargs: Any, leaves: list[torch.Tensor], tangents: list[torch.Tensor] | None = None
) -> tuple[list[Any], list[Any]]:
    """Outputs and the gradients by every differentiable input. `tangents` are drawn where none are given."""
    torch.manual_seed(0)
    with mock.patch("torch.manual_seed"):  # the database's random operators seed the generator in the program
        results = function(*args, **kwargs)
    outputs = pytree.tree_leaves(results)
    ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not ends:
        return outputs, []
    if tangents is None:
        tangents = tangents_of(ends)
    return outputs, list(torch.autograd.grad(ends, leaves, tangents, allow_unused=True))


def tangents_of(ends: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(o.shape, dtype=o.dtype).to(o.device) for o in ends]


def fresh(sample: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Copies of a sample's arguments, in their layout, and those that need gradients."""

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        new = t.detach().clone() if t.layout != torch.strided else t.detach().clone(memory_format=torch.preserve_format)
        return new.requires_grad_(t.requires_grad)

    args, kwargs = pytree.tree_map(copy, ((sample.input, *sample.args), sample.kwargs))
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return args, kwargs, leaves


def same(a: list[Any], b: list[Any], what: str) -> None:
    """Raises AssertionError if two runs differ, Skipped for results that are not strided."""
    if len(a) != len(b):
        raise AssertionError(f"{what}: {len(b)} values instead of {len(a)}")
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if type(x) is not type(y) or (x != y and not cmath.isnan(x)):
                raise AssertionError(f"{what}: {type(y).__name__} where eager has {type(x).__name__}, or another value")
            continue
        if x.layout != torch.strided:
            raise Skipped
        if x.stride() != y.stride() and what == "outputs" and x.numel() > 1:
            meaningful = [(p, q) for n, p, q in zip(x.shape, x.stride(), y.stride(), strict=True) if n > 1]
            if any(p != q for p, q in meaningful):
                raise AssertionError(f"{what}: strides {y.stride()} instead of {x.stride()}")
        try:
            torch.testing.assert_close(y, x, equal_nan=True)
        except AssertionError as error:
            raise Inexact(str(error)) from None


WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}


def in_double(op: Any, sample: Any) -> tuple[list[Any], list[Any]]:
    """Eager's outputs and gradients of the sample's values, computed in double precision."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(WIDE.get(value.dtype, value.dtype)).requires_grad_(value.requires_grad)
        return WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    args, kwargs, leaves = fresh(sample)
    outputs, _ = observe(op, args, kwargs, leaves)
    tangents = tangents_of([o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad])
    args, kwargs = pytree.tree_map(widen, (args, kwargs))
    wide = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return observe(op, args, kwargs, wide, [widen(t) for t in tangents])


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _error(found: torch.Tensor, exact: torch.Tensor, where: torch.Tensor | None = None) -> float:
    """The largest difference, of all elements or of some that are finite in eager; infinite where only one is a NaN."""
    off = torch.where(_equal(found, exact), 0.0, (found - exact).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    if where is not None:
        off = off[where & found.isfinite()]
    return off.max().item() if off.numel() else 0.0


def judge(eager: list[Any], ours: list[Any], exact: list[Any], what: str) -> None:
    """Raises AssertionError unless every tensor is as near to the exact one as eager's, twice its error allowed, and
    a unit in the last place of the largest value. Where eager is far off, nothing but a much smaller error will do:
    what cancels to nothing in double precision tells of no rounding, and what is no rounding is off for both."""
    for x, y, z in zip(eager, ours, exact, strict=True):
        if not isinstance(x, torch.Tensor) or not x.numel():
            continue
        if not (x.is_floating_point() or x.is_complex()):
            if not torch.equal(x, y):
                raise AssertionError(f"{what}: other integers or truth values")
            continue
        finite = z.isfinite()
        largest = z[finite].abs().max().item() if finite.any() else 0.0
        as_eager = torch.where(_equal(x, y), z, y.to(z.dtype))  # what overflows in eager too is right
        errors = [_error(x.to(z.dtype), z, finite), _error(as_eager, z)]
        rounds = errors[0] <= 0.1 * largest and errors[1] <= 2 * errors[0] + torch.finfo(x.dtype).eps * largest
        if not rounds and not errors[1] <= 0.01 * errors[0]:
            raise AssertionError(f"{what}: error {errors[1]:.3g} against float64, eager's {errors[0]:.3g}")


def judged(op: Any, sample: Any, eager: Observed, ours: Observed) -> None:
    """Raises AssertionError unless outputs and gradients are right by float64, or no further from it than eager comes
    with other rounding errors: what terms of some size cancel to is exact in one order of rounding, by luck."""
    exact = in_double(op, sample)
    try:
        for x, y, z, what in zip(eager, ours, exact, ("outputs", "gradients"), strict=True):
            judge(x, y, z, what)
    except AssertionError:
        if not within_draws(op, sample, ours, exact):
            raise


def within_draws(op: Any, sample: Any, ours: Observed, exact: Observed) -> bool:
    """Whether each element is at most twice as far from the exact one as one of eager's with other rounding errors."""
    args, kwargs, leaves = fresh(sample)
    outputs, _ = observe(op, args, kwargs, leaves)
    tangents = tangents_of([o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad])
    found, right = [*ours[0], *ours[1]], [*exact[0], *exact[1]]
    off = [_distances(y, z) for y, z in zip(found, right, strict=True)]
    reach = [torch.zeros_like(o) for o in off]
    for seed in range(DRAWS):
        args, kwargs, leaves = fresh(sample)
        with DrawnRounding(seed):
            drawn = observe(op, args, kwargs, leaves, tangents)
        for i, (x, z) in enumerate(zip([*drawn[0], *drawn[1]], right, strict=True)):
            apart = _distances(x, z)
            reach[i] = torch.maximum(reach[i], torch.where(apart.isfinite(), apart, 0.0))
        if all(bool((o <= 2 * r).all()) for o, r in zip(off, reach, strict=True)):
            return True
    return False


def _distances(found: Any, exact: Any) -> torch.Tensor:
    """How far each element is from the exact one; infinite where only one is a NaN, nothing but 0 or that of what is no
    float."""
    if not isinstance(found, torch.Tensor):
        return torch.tensor(0.0 if found == exact else math.inf)
    wide = found.to(exact.dtype)
    apart = torch.where(_equal(wide, exact), 0.0, (wide - exact).abs() if exact.dtype != torch.bool else math.inf)
    inexact = found.is_floating_point() or found.is_complex()
    return (apart if inexact else torch.where(apart == 0, 0.0, math.inf)).nan_to_num(nan=math.inf, posinf=math.inf)


def check(op: Any, sample: Any) -> str:
    """ "right", or "right by float64"."""
    seen = []
    for _ in range(2):
        args, kwargs, leaves = fresh(sample)
        try:
            seen.append(observe(op, args, kwargs, leaves))
        except Exception as error:
            raise Skipped from error
    try:
        same(*(s[0] for s in seen), "outputs")
        same(*(s[1] for s in seen), "gradients")
    except AssertionError as error:
        raise Skipped from error
    args, kwargs, leaves = fresh(sample)
    outputs, gradients = observe(aot_function(op, fw_compiler=identity), args, kwargs, leaves)
    try:
        same(seen[0][0], outputs, "outputs")
        same(seen[0][1], gradients, "gradients")
    except Inexact:
        judged(op, sample, seen[0], (outputs, gradients))
        return "right by float64"
    return "right"


def run_operator(place: int, samples: int, limit: int) -> dict[str, Any]:
    """Counts by dtype, and what was not right: [[reason, dtype], ...]."""
    op = op_db[place]
    counts: dict[str, collections.Counter[str]] = {}
    failures: list[tuple[str, str]] = []
    for dtype in DTYPES:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        name = str(dtype).removeprefix("torch.")
        found = counts[name] = collections.Counter()
        gradient = dtype in op.supported_backward_dtypes("cpu") and op.supports_autograd
        torch.manual_seed(0)
        try:
            taken = list(op.sample_inputs("cpu", dtype, requires_grad=gradient))
        except Exception:  # the database itself cannot make them
            continue
        if samples:
            taken = taken[:: max(1, len(taken) // samples)][:samples]
        for sample in taken:
            signal.alarm(limit)
            try:
                found[check(op, sample)] += 1
            except Skipped:
                found["skipped"] += 1
            except Exception as error:
                kind = "wrong" if isinstance(error, (AssertionError, TimeoutError)) else "refused"
                found[kind] += 1
                failures.append((f"{kind}: {first_line(error)}", name))
            finally:
                signal.alarm(0)
    return {"name": full_name(op), "counts": counts, "failures": failures}


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def too_long(*_: Any) -> None:
    raise TimeoutError("longer than the limit for one sample")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:160]}"


def places_of(only: Sequence[str]) -> list[int]:
    """Places of the operators whose name contains one of `only`, but not of those that leave memory unset."""
    return [
        place
        for place, op in enumerate(op_db)
        if any(part in full_name(op) for part in only) and not op.name.startswith(UNSET_MEMORY)
    ]


_SHARD = 8  # cases that a process takes which has to import everything for itself


def swept(
    run: Callable[..., dict[str, Any]],
    cases: Sequence[tuple[Any, ...]],
    jobs: int,
    until: float = math.inf,
    gpus: int = 0,
) -> Iterator[dict[str, Any]]:
    """What `run` gives for each case, a place in the database and perhaps a dtype, as they end, in processes side by
    side, as far as they come until then.

    With `gpus`, each process has one of so many. It is no fork, as it may not be of one that has asked for a GPU, and
    takes several cases; where it ends within one, those behind it are left for another time.
    """
    size, start = (_SHARD, "spawn") if gpus else (1, "fork")
    shards = ({"cases": cases[at : at + size]} for at in range(0, len(cases), size))
    environments = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(gpus)] or [{}]
    measure = functools.partial(_measure, run)
    for worker in run_cases(
        measure, shards, jobs=jobs, case_seconds=math.inf, until=until, start=start, environments=environments
    ):
        yield from worker.messages
        if len(worker.messages) < len(worker.case["cases"]):
            place, dtype = (*worker.case["cases"][len(worker.messages)], "float32")[:2]
            reason, name = f"wrong: {worker.failure}", full_name(op_db[place])
            yield {"name": name, "dtype": dtype, "counts": {dtype: {"wrong": 1}}, "failures": [(reason, dtype)]}


def _measure(run: Callable[..., dict[str, Any]], shard: Row, send: Callable[[Row], None]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    for case in shard["cases"]:
        send(run(*case))


def report(results: list[dict[str, Any]], samples: int, command: str) -> str:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        for dtype, found in result["counts"].items():
            counts[dtype].update(found)
        for reason, dtype in result["failures"]:
            failures[result["name"], reason][dtype] += 1
    limit = f"at most {samples} samples an operator and dtype" if samples else "all samples"
    lines = [
        "# Operator database through aot_function",
        "",
        f"`{command}`, torch {torch.__version__}, Python {platform.python_version()}, CPU: {len(results)} of "
        f"{len(op_db)} entries, {limit}. Compilers run the graphs as they are; outputs, strides and gradients beside "
        "eager's at `torch.testing.assert_close`'s tolerances. Right by float64: beyond them, but no further from the "
        "float64 result than twice eager's own error. Skipped: eager raises, gives a sparse result, or differs from "
        "run to run.",
        "",
        "| dtype | right | right by float64 | refused with an error | wrong | right of those run | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    total: collections.Counter[str] = collections.Counter()
    for name in (*(str(d).removeprefix("torch.") for d in DTYPES), "all"):
        c = counts[name] if name != "all" else total
        right = c["right"] + c["right by float64"]
        run = right + c["refused"] + c["wrong"]
        part = f"{100 * right / run:.2f}%" if run else "-"
        columns = (c["right"], c["right by float64"], c["refused"], c["wrong"], part, c["skipped"])
        lines.append(f"| {name} | " + " | ".join(map(str, columns)) + " |")
        total.update(c)
    lines += ["", "## What is not right", "", "| operator | samples | what |", "|---|---|---|"]
    for (name, reason), dtypes in sorted(failures.items()):
        numbers = ", ".join(f"{n} {d}" for d, n in sorted(dtypes.items()))
        lines.append(f"| {name} | {numbers} | {reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, one thread each")
    parser.add_argument("--samples", type=int, default=0, help="at most so many an operator and dtype; 0: all")
    parser.add_argument("--only", nargs="*", default=[""], help="operators whose name contains one of these")
    parser.add_argument("--limit", type=int, default=60, help="seconds for one sample")
    parser.add_argument("--out", help="write the page here")
    options = parser.parse_args()
    chosen = places_of(options.only)
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    run = functools.partial(run_operator, samples=options.samples, limit=options.limit)
    for result in swept(run, [(place,) for place in chosen], options.jobs):
        results.append(result)
        if len(results) % 20 == 0:
            print(f"{len(results)} of {len(chosen)} operators, {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = report(results, options.samples, " ".join(["python", "tools/aot_opdb.py", *sys.argv[1:]]))
    print(text)
    if options.out:
        Path(options.out).write_text(text)


if __name__ == "__main__":
    main()
