"""Runs torch.testing's operator database through `aot_function`, forward and gradient, against eager.

    python tools/aot_opdb.py [--samples 4] [--only NAME] [--out docs/results/aotautograd_opdb.md] [--seconds 600]

The compilers run the graphs as they are, so that a difference is this package's.
Operators that leave memory unset are skipped.
"""

from __future__ import annotations

import argparse
import collections
import signal
import time
import warnings
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from aotautograd import aot_function

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


class Skipped(Exception):
    """A sample on which eager itself raises or is not deterministic."""


def observe(function: Any, args: Any, kwargs: Any, leaves: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Outputs and the gradients by every differentiable input."""
    torch.manual_seed(0)
    with mock.patch("torch.manual_seed"):  # the database's random operators seed the generator in the program
        results = function(*args, **kwargs)
    outputs = [o for o in pytree.tree_leaves(results) if isinstance(o, torch.Tensor)]
    ends = [o for o in outputs if o.requires_grad]
    if not ends:
        return outputs, []
    torch.manual_seed(1)
    tangents = [torch.randn(o.shape, dtype=o.dtype) for o in ends]
    return outputs, list(torch.autograd.grad(ends, leaves, tangents, allow_unused=True))


def fresh(sample: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Copies of a sample's arguments, in their layout, and those that need gradients."""

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        new = t.detach().clone(memory_format=torch.preserve_format)
        return new.requires_grad_(t.requires_grad)

    args, kwargs = pytree.tree_map(copy, ((sample.input, *sample.args), sample.kwargs))
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return args, kwargs, leaves


def same(a: list[Any], b: list[Any], what: str) -> None:
    if len(a) != len(b):
        raise AssertionError(f"{what}: {len(b)} values instead of {len(a)}")
    for x, y in zip(a, b, strict=True):
        if (x is None) != (y is None):
            raise AssertionError(f"{what}: {'None' if y is None else 'a tensor'} where eager has the other")
        if x is None:
            continue
        if x.layout != torch.strided:
            raise Skipped
        if x.stride() != y.stride() and what == "outputs" and x.numel() > 1:
            meaningful = [(p, q) for n, p, q in zip(x.shape, x.stride(), y.stride(), strict=True) if n > 1]
            if any(p != q for p, q in meaningful):
                raise AssertionError(f"{what}: strides {y.stride()} instead of {x.stride()}")
        torch.testing.assert_close(y, x, equal_nan=True)


def check(op: Any, sample: Any) -> None:
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
    same(seen[0][0], outputs, "outputs")
    same(seen[0][1], gradients, "gradients")


def too_long(*_: Any) -> None:
    raise TimeoutError("more than 20 s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    counts: dict[torch.dtype, collections.Counter[str]] = {d: collections.Counter() for d in DTYPES}
    failures: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    end, done = time.monotonic() + options.seconds, 0
    for op in op_db:
        if options.only not in op.name or op.name.startswith(("empty", "new_empty")) or time.monotonic() > end:
            continue
        done += 1
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            gradient = dtype in op.supported_backward_dtypes("cpu") and op.supports_autograd
            try:
                torch.manual_seed(0)
                samples = list(op.sample_inputs("cpu", dtype, requires_grad=gradient))
            except Exception:
                continue
            step = max(1, len(samples) // options.samples)
            for sample in samples[::step][: options.samples]:
                signal.alarm(20)
                try:
                    check(op, sample)
                    counts[dtype]["right"] += 1
                except Skipped:
                    counts[dtype]["skipped"] += 1
                except Exception as error:
                    kind = "wrong" if isinstance(error, AssertionError) else "refused"
                    counts[dtype][kind] += 1
                    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
                    reason = f"{kind}: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
                    failures[name][reason].add(str(dtype).removeprefix("torch."))
                finally:
                    signal.alarm(0)
    lines = [
        "# Operator database through aot_function",
        "",
        f"torch {torch.__version__}, CPU, {done} of {len(op_db)} operators, at most {options.samples} samples an "
        "operator and dtype. Compilers run the graphs as they are; outputs, strides and gradients beside eager's at "
        "`torch.testing.assert_close`'s tolerances. Skipped: eager raises, gives a sparse result, or differs from run "
        "to run.",
        "",
        "| dtype | right | refused with an error | wrong | right of those run | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, c in counts.items():
        run = c["right"] + c["refused"] + c["wrong"]
        part = f"{100 * c['right'] / run:.2f}%" if run else "-"
        name = str(dtype).removeprefix("torch.")
        lines.append(f"| {name} | {c['right']} | {c['refused']} | {c['wrong']} | {part} | {c['skipped']} |")
    lines += ["", "## What is not right", "", "| operator | dtypes | what |", "|---|---|---|"]
    for name, reasons in sorted(failures.items()):
        for reason, dtypes in reasons.items():
            lines.append(f"| {name} | {', '.join(sorted(dtypes))} | {reason.replace('|', '/')} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
