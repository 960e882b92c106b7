"""Checks every operator that a program runs: its formula on descriptors of the arguments against the real result.

As a script, goes over torch.testing's op database and prints pass rates:
    python formula_check.py [--names add,mul] [--dtypes float32,int64] [--limit 20] [--layout channels_last] [--list]
    python formula_check.py --device cuda --list                             what the kernels of a GPU give
"""

from __future__ import annotations

import argparse
import collections
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from primtorch.derived import formula_from_rule
from primtorch.errors import DataDependent, NoFormula
from primtorch.fake import formula_of, op_key
from primtorch.fake.table import RULES
from primtorch.families import operator_named
from primtorch.spec import TensorSpec


def _in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values, dense, with the dims of `order` from the slowest to the fastest in memory."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return _in_order(x, [0, *range(2, x.dim()), 1]) if x.dim() in (4, 5) else x


def _spaced(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, [2 * stride for stride in x.stride()], dtype=x.dtype).copy_(x)


# How a sample's tensors lie in memory.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": _channels_last,
    "channels_last, spaced": lambda x: _spaced(_channels_last(x)),
    "reversed": lambda x: _in_order(x, list(range(x.dim()))[::-1]),
    "spaced": _spaced,
}


class FormulaCheck:
    """A dispatch mode: runs each operator for real and compares its formula's descriptors with what came out."""

    is_infra_mode = classmethod(lambda cls: False)

    def __init__(self) -> None:
        self.checked: collections.Counter[str] = collections.Counter()
        self.failed: dict[str, list[str]] = collections.defaultdict(list)
        self.missing: collections.Counter[str] = collections.Counter()
        self.data_dependent: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> FormulaCheck:
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    def formula(self, func: Any) -> Any:
        return formula_of(func)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)

        def spec(x: Any) -> Any:
            return TensorSpec.of(x) if isinstance(x, torch.Tensor) and x.layout is torch.strided else x

        strided = all(
            x.layout is torch.strided and not x.is_quantized
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        )
        spec_args, spec_kwargs = pytree.tree_map(spec, (args, kwargs))
        out = func(*args, **kwargs)
        if not strided or name == "aten._local_scalar_dense.default" or RULES.of(func).registered:
            return out
        try:
            formula = self.formula(func)
            if formula is None:
                return out
            predicted = formula(*spec_args, **spec_kwargs)
            problem = self.difference(out, predicted, in_place=func._schema.is_mutable)
        except NoFormula:
            self.missing[name] += 1
            return out
        except DataDependent:
            self.data_dependent[name] += 1
            return out
        except Exception as error:
            self.failed[name].append(f"{spec_args} {spec_kwargs}: {type(error).__name__}: {error}")
            return out
        if problem:
            self.failed[name].append(f"{spec_args} {spec_kwargs}: {problem}")
        else:
            self.checked[name] += 1
        return out

    def difference(self, real: Any, predicted: Any, in_place: bool) -> str:
        def facts(x: Any) -> Any:
            if isinstance(x, torch.Tensor | TensorSpec):
                offset = 0 if in_place else x.storage_offset()
                return (tuple(x.shape), strides_of(x), x.dtype, x.device, offset)
            return None

        if isinstance(real, tuple | list):
            if not isinstance(predicted, tuple | list) or len(real) != len(predicted):
                return f"real gives {len(real)} results, formula {predicted}"
            return "; ".join(
                filter(None, (self.difference(r, p, in_place) for r, p in zip(real, predicted, strict=True)))
            )
        a, b = facts(real), facts(predicted)
        # An undefined tensor comes out of a binding as None or as an empty tensor.
        return "" if a == b else f"real {a}, formula {b}"


C = TypeVar("C", bound=FormulaCheck)


class RuleCheck(FormulaCheck):
    """Compares what an operator's rule gives with what came out. A shape or dtype that differs is a failure; of strides,
    which are those of the last prim, it is counted by overload (`restrided`): there the formula has to know better.

    Operators without a formula of their own have the rule's descriptors anyhow, strides included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.restrided: collections.Counter[str] = collections.Counter()
        self.name = ""

    def formula(self, func: Any) -> Any:
        record = operator_named(op_key(func))
        self.name = str(func)
        return None if record.formula is None or record.rule is None else formula_from_rule(func)

    def difference(self, real: Any, predicted: Any, in_place: bool) -> str:
        if isinstance(real, torch.Tensor) and isinstance(predicted, TensorSpec):
            differs = strides_of(real) != strides_of(predicted)
            self.restrided[self.name] += differs
            predicted = (
                TensorSpec.of(real) if (real.shape, real.dtype) == (predicted.shape, predicted.dtype) else predicted
            )
        return super().difference(real, predicted, in_place)


class ElsewhereCheck(FormulaCheck):
    """Compares what formula and rule say of the same operands on a device that is not the CPU, where no kernel is run:
    shapes, dtypes and devices."""

    place = torch.device("cuda:0")

    def formula(self, func: Any) -> Any:
        record = operator_named(op_key(func))
        if record.formula is None or record.rule is None:
            return None
        formula, rule = formula_of(func), formula_from_rule(func)

        def both(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map(self.moved, (args, kwargs))
            return self.facts(formula(*args, **kwargs)), self.facts(rule(*args, **kwargs))

        return both

    def moved(self, x: Any) -> Any:
        if isinstance(x, TensorSpec):
            return replace(x, device=self.place)
        return self.place if isinstance(x, torch.device) else x

    def facts(self, made: Any) -> list[Any]:
        leaves = pytree.tree_leaves(made)
        return [(tuple(x.shape), x.dtype, x.device) if isinstance(x, TensorSpec) else x for x in leaves]

    def difference(self, real: Any, predicted: Any, in_place: bool) -> str:
        by_formula, by_rule = predicted
        return "" if by_formula == by_rule else f"formula {by_formula}, rule {by_rule}"


def strides_of(x: Any) -> tuple[int, ...]:
    """The strides that say something: of dims with more than one element, where there are elements."""
    if any(size == 0 for size in x.shape):
        return ()
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1)


def laid_out(part: Any, layout: str) -> Any:
    """The tensors of a sample, new ones where the layout is not theirs, as leaves where they were."""

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or layout == "contiguous":
            return x
        return LAYOUTS[layout](x.detach()).detach().requires_grad_(x.requires_grad)

    return pytree.tree_map(one, part)


def samples(names: list[str], dtypes: list[torch.dtype], limit: int, layout: str, device: str = "cpu") -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if names and op.name not in names:
            continue
        for dtype in dtypes:
            if dtype not in op.supported_dtypes(device):
                continue
            grad = dtype in op.supported_backward_dtypes(device) and op.supports_autograd
            try:
                made = list(op.sample_inputs(device, dtype, requires_grad=grad))[:limit]
            except Exception:
                continue
            for sample in made:
                yield op, grad, *(laid_out(part, layout) for part in (sample.input, sample.args, sample.kwargs))


def run(
    names: list[str],
    dtypes: list[torch.dtype],
    limit: int,
    layout: str = "contiguous",
    kind: type[C] = FormulaCheck,  # type: ignore[assignment]
    device: str = "cpu",
) -> tuple[C, int, int, collections.Counter[str]]:
    check = kind()
    total = good = 0
    bad: collections.Counter[str] = collections.Counter()
    for op, grad, first, args, kwargs in samples(names, dtypes, limit, layout, device):
        before = (sum(map(len, check.failed.values())), sum(check.missing.values()))
        try:
            with check:
                out = op(first, *args, **kwargs)
            if grad:
                leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                if leaves:
                    with check:
                        torch.autograd.backward(leaves, [torch.ones_like(x) for x in leaves])
        except Exception:
            continue
        total += 1
        if (sum(map(len, check.failed.values())), sum(check.missing.values())) == before:
            good += 1
        else:
            bad[op.name] += 1
    return check, total, good, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default="")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--layout", default="contiguous", choices=LAYOUTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rules", action="store_true", help="what rules give, beside the formulas' operators")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start = time.time()
    names = [n for n in options.names.split(",") if n]
    check, total, good, bad = run(names, [getattr(torch, d) for d in options.dtypes.split(",")],
                                   options.limit, options.layout,
                                   RuleCheck if options.rules else FormulaCheck, options.device)  # fmt: skip
    print(f"{good}/{total} samples, {time.time() - start:.0f} s; {sum(check.checked.values())} calls checked of "
          f"{len(check.checked)} overloads; data dependent {sum(check.data_dependent.values())}")  # fmt: skip
    print(f"no formula: {dict(check.missing.most_common())}")
    print("failed: " + ", ".join(f"{k} {len(v)}" for k, v in check.failed.items()))
    if isinstance(check, RuleCheck):
        print(f"other strides: {dict((+check.restrided).most_common())}")
    if options.list:
        for name, cases in check.failed.items():
            for case in cases[:3]:
                print(f"  {name} {case[:700]}")


if __name__ == "__main__":
    main()
