"""Samples of torch's operator database, lowered to prims and compared with eager; a script and a source of test cases.

python opdb_replay.py [--dtypes float32,int64] [--slice 0:60] [--ops name,name] [--limit 12] [--json file]
python opdb_replay.py --jobs 16 --out docs/results/primtorch_opdb.md       everything, in worker processes
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import warnings
from dataclasses import dataclass, field

import torch
import torch.utils._pytree as pytree
from sweep import ran_with, sweep, write_section
from torch.testing._internal.common_methods_invocations import op_db

from primtorch import interpret, lower, trace, verify

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64")
WIDE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
RANDOM = frozenset(
    {
        "bernoulli",
        "multinomial",
        "nn.functional.dropout",
        "nn.functional.dropout2d",
        "nn.functional.dropout3d",
        "nn.functional.alpha_dropout",
        "nn.functional.feature_alpha_dropout",
        "nn.functional.feature_alpha_dropout",
        "normal",
        "rand_like",
        "randn_like",
        "randint_like",
        "randn",
        "randint",
        "uniform",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "nn.functional.rrelu",
        "svd_lowrank",
        "pca_lowrank",
        "rand",
        "torch.ops.aten._fused_dropout",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
    }
)
"""Values are drawn; only dtype, shape and strides are compared."""
UNSET = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Values are whatever memory held."""
NOT_UNIQUE = frozenset(
    {
        "linalg.eig",
        "linalg.eigh",
        "linalg.svd",
        "svd",
        "linalg.qr",
        "qr",
        "geqrf",
        "linalg.lstsq",
        "linalg.lu",
        "lu",
        "symeig",
    }
)


ANSWERS = frozenset({"equal", "allclose", "item"})
"""Give the program a Python value: in a recorded graph that is a constant, and there is nothing to compare."""
TIES = frozenset({"kthvalue", "median", "nanmedian", "mode", "topk", "sort", "argsort", "msort"})
"""Which of equal elements is taken is left open: places after the first result are not compared."""


REFUSED = {
    "nn.functional.linear_cross_entropy": "an operator of `torch_nn`, PyTorch's own Python library, not of ATen",
    "histogramdd": "lists of tensors with computed lengths",
    "resize_as_": "a functional graph has no memory to resize",
    "resize_": "a functional graph has no memory to resize",
    "nn.functional.ctc_loss": "lengths in tensors: the size of a result depends on their values",
    "nn.functional.interpolate": "bytes: eager computes them in fixed point, with a rounding of its own",
    "nn.functional.upsample_bilinear": "bytes: eager computes them in fixed point, with a rounding of its own",
    "_upsample_bilinear2d_aa": "bytes: eager computes them in fixed point, with a rounding of its own",
}
"""Operators some of whose samples are refused with an error, and why."""


@dataclass
class Tally:
    """What became of the samples, by dtype; failures by operator and by (dtype, error)."""

    taken: collections.Counter[str] = field(default_factory=collections.Counter)
    passed: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: collections.Counter[str] = field(default_factory=collections.Counter)
    """Samples with another value, dtype, shape or stride than eager's; the others that fail raise."""
    failures: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )

    @property
    def rate(self) -> float:
        return self.passed.total() / max(self.taken.total(), 1)

    def add(self, record):
        """Take in what `as_record` gave of another one."""
        for name in ("taken", "passed", "wrong"):
            getattr(self, name).update(record[name])
        for name, found in record["failures"].items():
            self.failures[name].update(found)

    def as_record(self):
        return {"taken": self.taken, "passed": self.passed, "wrong": self.wrong, "failures": self.failures}


def name_of(op) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def samples(op, dtype, limit):
    """The operator's own samples, and a few with every other element of a larger memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        except Exception:  # this dtype has no samples, whatever supported_dtypes says
            return
    step = max(1, len(made) // limit)
    chosen = made[::step][:limit]
    yield from chosen
    for sample in chosen[:2]:
        if all(
            t.layout is torch.strided
            for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(t, torch.Tensor)
        ):
            yield sample.noncontiguous()


def program_of(op, sample):
    """(function of the sample's tensors, those tensors), or None for layouts out of scope."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    if any(flat[i].layout is not torch.strided for i in places):
        return None

    def program(*tensors):
        leaves = list(flat)
        for i, t in zip(places, tensors, strict=True):
            leaves[i] = t
        first, args, kwargs = pytree.tree_unflatten(leaves, spec)
        return op.op(first, *args, **kwargs)

    return program, [flat[i] for i in places]


def copies(tensors):
    return [_copy(t) for t in tensors]


def _copy(t):
    """The same values, strides and offset over the same memory, gaps included."""
    if t.is_conj() or t.is_neg():
        return t.clone()
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())


def check(op, dtype, program, tensors, drops=False):
    """Raises where the lowered program differs from eager. Returns False where eager refuses the sample.

    drops: the sample asks for dropout, so that values are drawn.
    """
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            inputs = copies(tensors)
            eager = pytree.tree_leaves(program(*inputs))
    except Exception:  # eager's refusal is not ours to judge
        return False
    if any(isinstance(e, torch.Tensor) and e.layout is not torch.strided for e in eager):
        return False
    torch.manual_seed(0)
    with torch.no_grad():
        graph = trace(program, *copies(tensors))
        lowered = lower(graph)
        verify(lowered)
        torch.manual_seed(0)
        got = interpret(lowered)(*copies(tensors))
    got = got[: len(eager)]
    assert len(got) == len(eager), f"{len(got)} results, not {len(eager)}"
    for want, have in zip(eager, got, strict=True):
        if isinstance(want, torch.Tensor):
            _compare_layout(want, have, strides=not any(want is t for t in inputs))
    if drops or op.name in RANDOM or op.name in UNSET or name_of(op).startswith(("empty", "new_empty")):
        return True
    if op.name in TIES:
        eager, got = ([], []) if op.name == "argsort" else (eager[:1], got[:1])
    try:
        for want, have in zip(eager, got, strict=True):
            if isinstance(want, torch.Tensor):
                _compare(want, have)
    except AssertionError:
        if op.name in NOT_UNIQUE or not _as_near_to_truth(program, tensors, eager, got):
            raise
    return True


def _compare_layout(want, have, *, strides):
    assert want.dtype == have.dtype, f"dtype {have.dtype} not {want.dtype}"
    assert want.shape == have.shape, f"shape {tuple(have.shape)} not {tuple(want.shape)}"
    same = (
        not strides
        or want.numel() < 2
        or all(a == b or n == 1 for a, b, n in zip(want.stride(), have.stride(), want.shape, strict=True))
    )
    assert same, f"strides {have.stride()} not {want.stride()} of shape {tuple(want.shape)}"


def _compare(want, have):
    t = TOLERANCE.get(want.dtype, 0)
    torch.testing.assert_close(have, want, equal_nan=True, rtol=t, atol=t * 0.1)


def _as_near_to_truth(program, tensors, eager, got):
    """Whether the result is about as near as eager's to the result in float64."""
    widened = [t.to(WIDE[t.dtype]) if t.dtype in WIDE else t.clone() for t in tensors]
    try:
        with torch.no_grad():
            truth = pytree.tree_leaves(program(*widened))
    except Exception:  # no judge
        return False
    for exact, want, have in zip(truth, eager, got, strict=True):
        if not isinstance(want, torch.Tensor):
            continue
        if not (want.is_floating_point() or want.is_complex()):
            if not torch.equal(want, have):
                return False
            continue
        eps = torch.finfo(want.dtype).eps
        known = torch.isfinite(exact)
        theirs, ours = ((r.to(exact.dtype) - exact)[known].abs() for r in (want, have))
        finite = torch.isfinite(theirs)  # eager may overflow where the truth does not
        size = exact[known].abs()
        allowed = 2 * theirs[finite].max() if finite.any() else 0
        near = (ours <= allowed + 8 * eps * size.max()) | (~finite & ~torch.isfinite(ours)) if size.numel() else finite
        if not bool(near.all()) or not torch.equal(torch.isfinite(have)[~known], torch.isfinite(want)[~known]):
            return False
    return True


def replay(ops, dtypes, limit, *, seconds=None) -> Tally:
    tally = Tally()
    ops = [op for op in ops if op.name not in ANSWERS]
    start = time.time()
    for op in ops:
        supported = op.supported_dtypes("cpu")
        for dtype_name in dtypes:
            dtype = getattr(torch, dtype_name)
            if dtype not in supported:
                continue
            for sample in samples(op, dtype, limit):
                case = program_of(op, sample)
                if case is None:
                    continue
                try:
                    taken = check(op, dtype, *case, drops=bool(sample.kwargs.get("dropout_p")))
                except Exception as error:  # every failure is counted and shown
                    taken = True
                    tally.wrong[dtype_name] += int(isinstance(error, AssertionError))
                    text = (str(error).strip() or "?").splitlines()
                    line = next((t for t in text if "Mismatched" in t), text[0])
                    tally.failures[name_of(op)][f"{dtype_name}: {type(error).__name__}: {line[:170]}"] += 1
                else:
                    tally.passed[dtype_name] += taken
                tally.taken[dtype_name] += taken
        if seconds is not None and time.time() - start > seconds:
            break
    return tally


def page(tally: Tally, limit: int) -> str:
    """The figures and what fails, as markdown."""
    lines = [
        f"Every operator of `torch.testing`'s database in each dtype that it takes, at most {limit} samples each, and two of "
        "them again over every other element of a larger memory: traced, lowered, verified closed, and run on the "
        "references.",
        "",
        f"**{tally.passed.total():,} of {tally.taken.total():,} samples pass: {100 * tally.rate:.2f} %.** "
        f"{tally.wrong.total()} give something else than eager; the other "
        f"{tally.taken.total() - tally.passed.total() - tally.wrong.total()} raise.",
        "",
        "| dtype | samples | pass | | raise | wrong |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in [name for name in DTYPES if tally.taken[name]]:
        taken, passed, wrong = tally.taken[name], tally.passed[name], tally.wrong[name]
        rate = f"{100 * passed / taken:.2f} %"
        lines.append(f"| {name} | {taken:,} | {passed:,} | {rate} | {taken - passed - wrong} | {wrong} |")
    lines += ["", "| operator | samples | error | why |", "|---|---:|---|---|"]
    for name, found in sorted(tally.failures.items(), key=lambda item: -item[1].total()):
        errors = collections.Counter()
        for what, count in found.items():
            errors[what.partition(": ")[2]] += count
        error = errors.most_common(1)[0][0].replace("|", "/")[:120]
        why = next((text for start, text in REFUSED.items() if name.startswith(start)), "")
        lines.append(f"| `{name}` | {found.total()} | {error} | {why} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--slice", default=":")
    parser.add_argument("--ops", default="")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--json", default="")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--out", default="", help="the page whose section `replay` is written")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    chosen = list(op_db)
    if options.ops:
        wanted = options.ops.split(",")
        chosen = [op for op in op_db if op.name in wanted or name_of(op) in wanted]
    ended = []
    if options.jobs > 1:
        tally = Tally()
        arguments = ["--dtypes", options.dtypes, "--ops", options.ops, "--limit", str(options.limit)]
        for record in sweep(__file__, arguments, len(chosen), options.jobs):
            if "ended" in record:
                ended.append(record["ended"])
            else:
                tally.add(record)
    else:
        first, _, last = options.slice.partition(":")
        tally = replay(chosen[int(first or 0) : int(last) if last else None], options.dtypes.split(","), options.limit)
    text = page(tally, options.limit)
    print(text, *ended, sep="\n")
    if options.out:
        write_section(options.out, "replay", f"{ran_with(__file__, sys.argv[1:])}\n\n{text}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(tally.as_record(), file, indent=1)
    sys.exit(1 if ended or tally.wrong.total() else 0)


if __name__ == "__main__":
    main()
