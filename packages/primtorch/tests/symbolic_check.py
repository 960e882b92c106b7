"""Samples of torch's operator database on fakes whose every size is a symbol, against the real run.

The results' metadata at the example's sizes (shape, strides, dtype, device) must be the real run's, that of the gradients
too where the sample has any, and each guard must hold there. As a script, goes over the whole database:
    python symbolic_check.py [--names add,mul] [--dtypes float32,int64] [--limit 6] [--slice 0:60] [--json file]
    python symbolic_check.py --jobs 16 --limit 100 --out docs/results/primtorch_shape_propagation.md
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fake_replay import described
from sweep import ran_with, sweep, write_section
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from primtorch.errors import DataDependent
from primtorch.fake import FakeMode
from primtorch.symbolic import ShapeEnv
from primtorch.symbolic.relation import Relation

OUTSIDE = frozenset(
    {
        *("empty_strided", "as_strided", "as_strided_copy", "as_strided_scatter", "new_empty_strided"),
        *("sparse.mm", "sparse.sampled_addmm", "to_sparse"),
        "nn.functional.linear_cross_entropy",
    }
)
"""Operators that take strides as numbers, sparse layouts, one of torch's own Python library."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
          torch.complex64)  # fmt: skip
CASES = tuple(
    (op, dtype) for op in op_db if op.name not in OUTSIDE for dtype in DTYPES if dtype in op.supported_dtypes("cpu")
)
REFUSED = "refused:"
UNSET = ("empty", "new_empty")
"""Operators whose samples' gradients are not asked for: memory as it was."""


@dataclass
class Tally:
    """What became of the samples, by dtype; failures by operator and dtype."""

    taken: collections.Counter[str] = field(default_factory=collections.Counter)
    good: collections.Counter[str] = field(default_factory=collections.Counter)
    fixed: collections.Counter[str] = field(default_factory=collections.Counter)
    """Good ones that fixed a size: an equality among the guards."""
    data: collections.Counter[str] = field(default_factory=collections.Counter)
    """Stopped by a value that only data tell; not counted as taken."""
    failures: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))

    def wrong(self) -> dict[str, list[str]]:
        """The failures with other metadata than the real run's, or with a broken guard; the others raise."""
        found = {name: [p for p in problems if not p.startswith(REFUSED)] for name, problems in self.failures.items()}
        return {name: problems for name, problems in found.items() if problems}

    def as_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("taken", "good", "fixed", "data", "failures")}

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in what `as_record` gave of another one."""
        for name in ("taken", "good", "fixed", "data"):
            getattr(self, name).update(record[name])
        for name, problems in record["failures"].items():
            self.failures[name] += problems


def symbolic_fakes(env: ShapeEnv, mode: FakeMode, tree: Any) -> Any:
    """Fakes of the tensors in a tree: each size above 1 is a symbol, one for each dim of each tensor."""

    def fake(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            return x
        number = len(env.symbols)
        dims = {d: env.symbol(s, f"t{number}.size({d})") for d, s in enumerate(x.shape) if s > 1}
        return mode.from_tensor(x, dynamic=dims)

    return pytree.tree_map(fake, tree)


def broken_guards(env: ShapeEnv) -> list[str]:
    """Guards that the example's own sizes do not satisfy."""
    hints = {name: info.hint for name, info in env.symbols.items() if info.hint is not None}
    broken = []
    for guard in env.guards:
        names = guard.expr.symbols()
        if all(name in hints for name in names) and not guard.expr.evaluate({n: hints[n] for n in names}):
            broken.append(str(guard))
    return broken


def metadata(value: Any) -> list[Any]:
    """Shape, strides, dtype and device of each tensor of a result. Without elements, strides say nothing."""
    found = [described(x) for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return [(shape, () if 0 in shape else strides, *rest[:2]) for shape, strides, *rest in found]


def run_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Metadata of the results, and of the gradients by each input that takes part."""
    torch.manual_seed(0)
    results = op(*args, **kwargs)
    outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    found = metadata(outputs)
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    ends = [x for x in outputs if x.requires_grad]
    if leaves and ends:
        tangents = [torch.ones_like(x) for x in ends]
        grads = torch.autograd.grad(ends, leaves, tangents, allow_unused=True)
        found.append([metadata(g) for g in grads])
    return found


class Idle:
    """A dispatch mode that runs each call: under any mode, some derivatives take formulas that do not look at data (prod,
    cumprod, ormqr), and lay gradients out otherwise than without one."""

    is_infra_mode = classmethod(lambda cls: False)

    def __enter__(self) -> None:
        torch._C._push_on_torch_dispatch_stack(self)

    def __exit__(self, *exc: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def problem_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ShapeEnv]:
    """(what differs, in words; the environment). Raises what the real run raises, and DataDependent."""
    with Idle():
        expected = run_of(op, args, kwargs)
    env = ShapeEnv()
    mode = FakeMode(env)
    fake_args, fake_kwargs = symbolic_fakes(env, mode, (args, kwargs))
    try:
        with mode:
            found = run_of(op, fake_args, fake_kwargs)
    except DataDependent:
        raise
    except Exception as error:
        if any(info.hint is None for info in env.symbols.values()):
            raise DataDependent("a size", "only the data tells", "") from None
        return f"{REFUSED} {type(error).__name__}: {error}"[:300], env
    if expected != found:
        return f"real {expected}, fake {found}", env
    broken = broken_guards(env)
    return f"guards that do not hold: {broken}" if broken else "", env


def check(tally: Tally, op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kind = str(dtype).removeprefix("torch.")
    try:
        problem, env = problem_of(op, args, kwargs)
    except DataDependent:
        tally.data[kind] += 1
        return
    except Exception:  # the sample does not run in eager
        return
    tally.taken[kind] += 1
    if problem:
        tally.failures[f"{op.name} {kind}"].append(problem)
        return
    tally.good[kind] += 1
    tally.fixed[kind] += any(isinstance(g.expr, Relation) and g.expr.op == "eq" for g in env.guards)


@functools.cache
def samples_of(number: int) -> list[Any]:
    """The samples of CASES[number], with gradients where the operator has them."""
    op, dtype = CASES[number]
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and not op.name.startswith(UNSET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return list(op.sample_inputs("cpu", dtype, requires_grad=grad))
        except Exception:  # this dtype has no samples, whatever supported_dtypes says
            return []


def resized(tree: Any, sizes: Mapping[int, int], swapped: bool) -> Any:
    """The arguments with other sizes: equal sizes stay equal; elements are repeated, so that indices stay in range.

    Args:
        sizes: old size -> new size. Numbers in lists that are such sizes (a target shape) change too.
        swapped: lay tensors out with the first and the last dim exchanged in memory.
    """

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.dim() == 0:
            return x
        wanted = [sizes.get(s, s) for s in x.shape]
        if 0 in x.shape:
            return x
        out = x.repeat([-(-new // old) for new, old in zip(wanted, x.shape, strict=True)])
        out = out.detach()[tuple(slice(n) for n in wanted)].contiguous()
        out = out.transpose(0, -1).contiguous().transpose(0, -1) if swapped else out
        return out.requires_grad_(x.requires_grad)

    def numbers(x: Any) -> Any:
        if isinstance(x, list | tuple) and x and all(type(n) is int for n in x):
            return (
                type(x)([sizes.get(n, n) for n in x])
                if type(x) in (list, tuple)
                else torch.Size(sizes.get(n, n) for n in x)
            )
        if type(x) in (list, tuple):
            return type(x)([numbers(part) for part in x])
        return leaf(x)

    args, kwargs = tree
    checked = {"unsafe": False} if "unsafe" in kwargs else {}  # eager writes past its memory where segments do not fit
    return tuple(numbers(x) for x in args), {name: numbers(x) for name, x in kwargs.items()} | checked


def run(cases: Iterable[int], limit: int) -> Tally:
    tally = Tally()
    for number in cases:
        op, dtype = CASES[number]
        made = samples_of(number)
        for sample in made[:: max(1, len(made) // limit)][:limit]:
            check(tally, op, dtype, (sample.input, *sample.args), sample.kwargs)
        samples_of.cache_clear()
    return tally


def page(tally: Tally, limit: int) -> str:
    """The figures and what fails, as markdown."""
    taken, good, wrong = tally.taken.total(), tally.good.total(), sum(map(len, tally.wrong().values()))
    lines = [
        f"At most {limit} samples an operator and dtype, gradients included where the operator has them.",
        "",
        f"**{good:,} of {taken:,} samples agree: {100 * good / max(taken, 1):.2f} %.** {wrong} have other metadata than the "
        f"real run or a guard that does not hold; the other {taken - good - wrong} raise.",
        "",
        "| dtype | samples | agree | with an equality among the guards | sizes that depend on data |",
        "|---|---:|---:|---:|---:|",
    ]
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        counts = (tally.taken[kind], tally.good[kind], tally.fixed[kind], tally.data[kind])
        lines.append(f"| {kind} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    by_operator: dict[str, list[str]] = collections.defaultdict(list)
    for name, problems in tally.failures.items():
        by_operator[name.rpartition(" ")[0]] += problems
    lines += ["", "| operator | samples | what |", "|---|---:|---|"]
    for name, problems in sorted(by_operator.items()):
        first = problems[0].split("\n")[0].replace("|", "/")[:160]
        lines.append(f"| `{name}` | {len(problems)} | {first} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="")
    parser.add_argument("--dtypes", default="")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--slice", default=":")
    parser.add_argument("--json", default="")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--out", default="", help="the page whose section `symbolic` is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = options.names.split(",") if options.names else None
    dtypes = [getattr(torch, d) for d in options.dtypes.split(",")] if options.dtypes else DTYPES
    chosen = [n for n, (op, dtype) in enumerate(CASES) if dtype in dtypes and (names is None or op.name in names)]
    ended: list[str] = []
    if options.jobs > 1:
        tally = Tally()
        arguments = ["--names", options.names, "--dtypes", options.dtypes, "--limit", str(options.limit)]
        for record in sweep(__file__, arguments, len(chosen), options.jobs):
            if "ended" in record:
                ended.append(record["ended"])
            else:
                tally.add(record)
    else:
        first, _, last = options.slice.partition(":")
        tally = run(chosen[int(first or 0) : int(last) if last else None], options.limit)
    text = page(tally, options.limit)
    print(text, *ended, sep="\n")
    if options.out:
        write_section(options.out, "symbolic", f"{ran_with(__file__, sys.argv[1:])}\n\n{text}")
    if options.json:
        Path(options.json).write_text(json.dumps(tally.as_record(), indent=1))
    sys.exit(1 if ended or tally.wrong() else 0)


if __name__ == "__main__":
    main()
