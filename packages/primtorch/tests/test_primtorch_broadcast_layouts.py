"""Formulas and rules of elementwise operators where operands broadcast against each other, each in a layout of its own."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from formula_check import FormulaCheck, RuleCheck
from torch.utils import _pytree as pytree

from primtorch import interpret, lower, trace
from primtorch.families import Operator, operators
from primtorch.layout import elementwise_strides
from primtorch.symbolic import ShapeEnv, expr_of

SHAPES = ((3, 4, 2), (3, 1, 2), (1, 4, 2), (3, 4, 1), (4, 2), (4, 1), (2,), ())
"""They broadcast to the first, or to what is left of it."""
ORDERS = {rank: list(itertools.permutations(range(rank))) for rank in range(4)}
DRAWS = 24
OF_ONE_SHAPE = ("log_sigmoid_backward",)
"""Operands have one shape: otherwise eager resizes its result and warns."""

ELEMENTWISE = [
    operator
    for operator in operators().values()
    if operator.elementwise and operator.overload is not None and not operator.overload._schema.is_mutable
    if operator.name not in OF_ONE_SHAPE
]


def laid_out(x: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a shape with values of x, dense, with the dims of `order` from the slowest to the fastest in memory."""
    values = x.detach().flatten().repeat(24)[: torch.Size(shape).numel()].reshape(shape)
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(order).contiguous().permute(back)


def calls(operator: Operator, draw: random.Random) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The operator's samples with their tensors in other shapes and layouts."""
    made = [sample.draw() for sample in operator.samples]
    made = [one for one in made if any(isinstance(x, torch.Tensor) and x.numel() for x in pytree.tree_leaves(one))]
    for _ in range(DRAWS if made else 0):
        args, kwargs = draw.choice(made)

        def other(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.numel():
                return x
            shape = draw.choice(SHAPES)
            return laid_out(x, shape, draw.choice(ORDERS[len(shape)]))

        yield pytree.tree_map(other, (args, kwargs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [FormulaCheck, RuleCheck], ids=["formulas", "rules"])
def test_operands_that_broadcast_in_layouts_of_their_own(kind: type[FormulaCheck]) -> None:
    number = time.time_ns() % 2**32
    draw, check = random.Random(number), kind()
    for operator in ELEMENTWISE:
        for args, kwargs in calls(operator, draw):
            try:
                operator.overload(*args, **kwargs)  # type: ignore[misc]
            except (RuntimeError, IndexError):  # not these shapes
                continue
            check.__torch_dispatch__(operator.overload, (), args, kwargs)
    assert not check.failed, f"seed {number}: { ({name: calls[:2] for name, calls in check.failed.items()}) }"
    assert check.checked.total() > 1000


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
OF_ONE_DTYPE = ("mish_backward", "elu_backward", "native_dropout_backward")
"""Autograd calls them with operands of one dtype."""


def calls_of_dtypes(operator: Operator) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The operator's first sample with its one or two tensors in each dtype, in two shapes and two layouts."""
    for sample in operator.samples[:1]:
        made = sample.draw()
        count = sum(isinstance(x, torch.Tensor) and x.numel() > 0 for x in pytree.tree_leaves(made))
        for dtypes in itertools.product(DTYPES, repeat=count) if count in (1, 2) else ():
            ways = iter(zip(dtypes, (((3, 1, 2), (2, 1, 0)), ((3, 2), (1, 0))), strict=False))

            def other(x: Any, ways: Iterator[Any] = ways) -> Any:
                if not isinstance(x, torch.Tensor) or not x.numel():
                    return x
                dtype, (shape, order) = next(ways)
                return laid_out(x, shape, order).to(dtype)

            yield pytree.tree_map(other, made)


def judge(check: FormulaCheck, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Holds a call against eager, which may refuse it for its dtypes."""
    try:
        operator.overload(*args, **kwargs)  # type: ignore[misc]
    except (RuntimeError, IndexError, TypeError):
        return
    check.__torch_dispatch__(operator.overload, (), args, kwargs)


def holds(check: FormulaCheck) -> None:
    assert not check.failed, {name: calls[:2] for name, calls in check.failed.items()}
    assert check.checked.total() > 1000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [FormulaCheck, RuleCheck], ids=["formulas", "rules"])
def test_operands_of_each_pair_of_dtypes(kind: type[FormulaCheck]) -> None:
    """Some kernels are chosen by dtypes, and lay their results out each in its own way."""
    check = kind()
    for operator in ELEMENTWISE:
        for args, kwargs in calls_of_dtypes(operator) if operator.name not in OF_ONE_DTYPE else ():
            judge(check, operator, args, kwargs)
    holds(check)


@pytest.mark.filterwarnings("ignore")
def test_an_operand_of_repeated_elements_beside_one_in_another_order() -> None:
    """On CPUs an iterator over two dtypes casts the one, which repeats nothing any more and decides about the order."""
    repeated = lambda dtype: torch.ones(4, 1, 1).to(dtype).expand(4, 3, 2)
    turned = lambda dtype: torch.ones(2, 3, 4).to(dtype).permute(2, 1, 0)
    check = FormulaCheck()
    binary = [o for o in ELEMENTWISE if not o.name.endswith("_backward")]
    for operator, dtypes in itertools.product(binary, itertools.product(DTYPES, repeat=2)):
        sample = operator.samples[0].draw() if operator.samples else ((), {})
        if sum(isinstance(x, torch.Tensor) and x.numel() > 0 for x in pytree.tree_leaves(sample)) != 2:
            continue
        for makers in ((repeated, turned), (turned, repeated), (repeated, repeated)):
            operands = iter([make(dtype) for make, dtype in zip(makers, dtypes, strict=True)])
            other = lambda x, operands=operands: next(operands) if isinstance(x, torch.Tensor) and x.numel() else x
            args, kwargs = pytree.tree_map(other, sample)
            judge(check, operator, args, kwargs)
    holds(check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ldexp_by_powers_out_of_range(dtype: torch.dtype) -> None:
    """The power alone may be infinite or zero where the product is neither."""
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, torch.inf, torch.nan, info.tiny, -info.max, 1.5, info.smallest_normal * 0.37]
    exponents = torch.tensor([0, 1, -1, 24, -24, 140, -149, 277, -277, 1030, -1074, 2097, -2097, 10**9, -(10**9)])
    x = torch.tensor(numbers, dtype=dtype)[:, None].repeat(1, len(exponents))
    found = interpret(lower(trace(torch.ldexp, x, exponents)))(x, exponents)[0]
    torch.testing.assert_close(found, torch.ldexp(x, exponents), rtol=0, atol=0, equal_nan=True)


def test_layouts_that_differ_in_plain_numbers_ask_nothing_of_a_size() -> None:
    """A bias of heads over keys, its heads innermost, in one operation with a row of keys."""
    env = ShapeEnv()
    keys = env.symbol(7, "keys") + 1
    shape = (1, 4, 1, keys)
    strides = elementwise_strides(shape, [(keys, 0, keys, 1), (4, 1, 4 * keys, 4)])
    row, bias = torch.empty(1, 1, 1, 8).expand(1, 4, 1, 8), torch.empty(1, 1, 8, 4).permute(0, 3, 1, 2)
    assert [expr_of(stride).evaluate({"s0": 7}) for stride in strides] == list((row + bias).stride())
    assert "s0 + 1 != 4" not in [str(guard.expr) for guard in env.guards]
