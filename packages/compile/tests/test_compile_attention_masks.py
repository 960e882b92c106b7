"""What a graph says of masks: known values are those that running it gives, and attention does without needless masks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import torchcompile
from torchcompile.known_values import Affine, Chosen, Condition, KnownValues
from torchcompile.passes import attention_masks

ATTENTION = F.scaled_dot_product_attention
Mask = Callable[[int, int], torch.Tensor]


def graph_of(program: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    kept: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        kept.append(gm)
        return gm.forward

    torchcompile.reset()
    torchcompile.compile(program, backend=keep, dynamic=dynamic, fullgraph=True)(*inputs)
    return kept[0]


# -- what is known ---------------------------------------------------------------------------------------------------
class Draw:
    """Choices that were drawn before the program that makes them is captured."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers, self.at = numbers, 0

    def below(self, limit: int) -> int:
        self.at += 1
        return self.numbers[self.at - 1] % limit


def drawn_numbers(draw: Draw, depth: int, rows: int, columns: int) -> torch.Tensor:
    """Positions, or sums of them, that broadcast to rows and columns."""
    if depth and draw.below(2):
        left = drawn_numbers(draw, depth - 1, rows, columns)
        right = draw.below(7) - 3 if draw.below(2) else drawn_numbers(draw, depth - 1, rows, columns)
        return left + right if draw.below(2) else left - right
    match draw.below(6):
        case 0:
            return torch.arange(rows)[:, None]
        case 1:
            return torch.arange(columns)[None]
        case 2:
            return torch.arange(draw.below(3), 2 * columns + 3, 2)[:columns].expand(rows, -1)
        case 3:
            return torch.full((rows, 1), draw.below(5) - 2)
        case 4:
            positions = torch.arange(columns).unsqueeze(0)
            return torch.diff(positions, prepend=positions[:, :1] - draw.below(3), dim=-1)
        case _:
            return torch.zeros(columns, rows, dtype=torch.int64).cumsum(0).transpose(0, 1)


COMPARISONS = (torch.ge, torch.le, torch.gt, torch.lt, torch.eq, torch.ne)


def drawn_condition(draw: Draw, depth: int, rows: int, columns: int) -> torch.Tensor:
    """A mask, of comparisons, triangles and what is made of several."""
    if depth and draw.below(5) < 3:
        left = drawn_condition(draw, depth - 1, rows, columns)
        match draw.below(4):
            case 0:
                return ~left
            case 1:
                return left.logical_not()
            case 2:
                return left & drawn_condition(draw, depth - 1, rows, columns)
            case _:
                return left | drawn_condition(draw, depth - 1, rows, columns)
    match draw.below(4):
        case 0:
            return torch.ones(rows, columns, dtype=torch.bool).tril(draw.below(5) - 2)
        case 1:
            return torch.triu(torch.ones(rows, columns), diagonal=draw.below(5) - 2) == draw.below(2)
        case 2:
            return torch.ones(rows, columns).bool()[:, None].squeeze(1)
        case _:
            left = drawn_numbers(draw, 1, rows, columns)
            right = draw.below(3) - 1 if draw.below(2) else drawn_numbers(draw, 1, rows, columns)
            return COMPARISONS[draw.below(6)](left, right).expand(rows, columns)


def drawn_mask(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    """A mask of booleans, or one that is added."""
    condition = drawn_condition(draw, 2, rows, columns)
    match draw.below(4):
        case 0:
            return torch.zeros(rows, columns).masked_fill(condition, float("-inf"))
        case 1:
            return torch.where(condition, torch.zeros(columns), torch.finfo(torch.float32).min)
        case 2:
            return torch.triu(torch.full((rows, columns), float("-inf")), diagonal=1)[None, None]
        case _:
            return condition[None]


def values_of(value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A known value, element by element."""
    if isinstance(value, Affine):
        places = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij") if shape else ()
        total = torch.full(shape, value.base, dtype=torch.float64)
        return total + sum((s * p for s, p in zip(value.slopes, places, strict=True)), torch.zeros(()))
    if isinstance(value, Chosen):
        return torch.where(values_of(value.where, shape).bool(), float(value.inside), float(value.outside))
    assert isinstance(value, Condition)
    held = [values_of(one, shape) >= 0 for one in value.sums]
    return torch.stack([torch.ones(shape, dtype=torch.bool), *held]).all(0)


class Checked(fx.Interpreter):
    """Runs a graph; what is known of a node has to be what it gives."""

    def __init__(self, gm: fx.GraphModule, told: str) -> None:
        super().__init__(gm)
        self.known, self.told, self.count = KnownValues(gm.graph), told, 0

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        value = self.known.of(n) if n.op in ("call_function", "call_method") else None
        if value is not None:
            self.count += 1
            given = values_of(value, tuple(found.shape)).double()
            assert torch.equal(given, found.double()), f"{self.told}: {n.format_node()} is not {value}"
        return found


def test_known_values_are_those_that_the_graph_gives() -> None:
    seed = random.randrange(2**32)
    count = 0
    for at in range(seed, seed + 40):
        sizes = random.Random(at)
        rows, columns = sizes.randrange(1, 6), sizes.randrange(1, 6)
        numbers = tuple(sizes.randrange(420) for _ in range(80))
        x = torch.zeros(rows, columns)
        told = f"seed {at}: {rows} rows, {columns} columns"
        for dynamic in (False, True):
            gm = graph_of(lambda x, numbers=numbers: drawn_mask(Draw(numbers), *x.shape), x, dynamic=dynamic)
            checked = Checked(gm, told)
            sized = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
            checked.run(*(x if isinstance(one, torch.Tensor) else int(one) for one in sized))
            count += checked.count
    assert count > 200


# -- what attention does without -------------------------------------------------------------------------------------
def positions(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows)[None, None, :, None] + 0, torch.arange(columns)[None, None, None, :] + 0


def everywhere(rows: int, columns: int) -> torch.Tensor:
    return (positions(rows, columns)[0] >= 0).expand(2, -1, rows, columns)


def causal(rows: int, columns: int) -> torch.Tensor:
    row, column = positions(rows, columns)
    return (row.new_ones((), dtype=torch.bool) & (column <= row)).expand(2, -1, rows, columns)


def packed(rows: int, columns: int) -> torch.Tensor:
    """The causal mask of sequences that are packed into one, where it is only one."""
    numbered = torch.arange(columns).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(numbered, prepend=numbered[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row, column = positions(rows, columns)
    batch = torch.arange(2)[:, None, None, None]
    return causal(rows, columns) & (sequence[batch, row] == sequence[batch, column])


def unpadded(rows: int, columns: int) -> torch.Tensor:
    """The causal mask, and a padding mask of ones."""
    batch, column = torch.arange(2)[:, None, None, None], positions(rows, columns)[1]
    return causal(rows, columns) & torch.ones(2, columns).to(torch.bool)[batch, column]


def windowed(rows: int, columns: int) -> torch.Tensor:
    row, column = positions(rows, columns)
    return causal(rows, columns) & (column > row - 3)


def added(rows: int, columns: int) -> torch.Tensor:
    return torch.triu(torch.full((rows, columns), float("-inf"), dtype=torch.float64), diagonal=1)


def lowest(rows: int, columns: int) -> torch.Tensor:
    return torch.where(everywhere(rows, columns), torch.zeros(rows, columns), torch.finfo(torch.float32).min).double()


def written(rows: int, columns: int) -> torch.Tensor:
    mask = torch.ones(rows, columns, dtype=torch.bool).tril()
    mask[:, :1].view(-1)[1:].logical_not_()
    return mask


def written_through_a_view(rows: int, columns: int) -> torch.Tensor:
    mask = torch.ones(rows, columns, dtype=torch.bool)
    turned = mask.transpose(0, 1)
    mask[1:, :2] = False
    return turned.expand(2, 1, columns, rows).transpose(2, 3) if rows == columns else mask


NONE, CAUSAL, KEPT = (None, False), (None, True), ("kept", False)
CASES: Mapping[Mask, tuple[str | None, bool]] = {
    everywhere: NONE, causal: CAUSAL, packed: CAUSAL, unpadded: CAUSAL, windowed: KEPT, added: CAUSAL, lowest: NONE,
    written: KEPT, written_through_a_view: KEPT,
}  # fmt: skip


def attend(mask: Mask) -> Callable[..., torch.Tensor]:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[-2], k.shape[-2]))

    return program


def attend_itself(mask: Mask) -> Callable[..., torch.Tensor]:
    return lambda x: attend(mask)(x, x, x)


def qkv(draw: random.Random, rows: int, columns: int) -> list[torch.Tensor]:
    torch.manual_seed(draw.randrange(2**31))
    return [torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (rows, columns, columns)]


def asked(gm: fx.GraphModule) -> tuple[str | None, bool]:
    (node,) = attention_masks(gm).graph.find_nodes(op="call_function", target=ATTENTION)
    return None if node.kwargs.get("attn_mask") is None else "kept", bool(node.kwargs.get("is_causal", False))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", CASES, ids=lambda mask: mask.__name__)
def test_attention_does_without_a_mask_that_it_does_not_need(mask: Mask, dynamic: bool) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    rows = draw.randrange(5, 9)
    assert asked(graph_of(attend_itself(mask), qkv(draw, rows, rows)[0], dynamic=dynamic)) == CASES[mask], (
        f"seed {seed}"
    )
    compiled, program = torchcompile.compile(attend(mask), dynamic=dynamic), attend(mask)
    for rows, columns in ((rows, rows), (rows + 2, rows + 2), (rows + 2, rows - 1)):
        if mask is packed and rows != columns:
            continue  # positions beyond its numbers
        inputs = qkv(draw, rows, columns)
        weight = torch.randn(2, 3, rows, 4, dtype=torch.float64)
        expected, found = program(*inputs), compiled(*inputs)
        grads = [torch.autograd.grad((out * weight).sum(), inputs) for out in (expected, found)]
        for left, right in zip((found, *grads[1]), (expected, *grads[0]), strict=True):
            torch.testing.assert_close(left, right, msg=lambda text: f"seed {seed}, {rows} rows: {text}")  # noqa: B023


def test_a_causal_mask_of_more_keys_than_queries_is_kept() -> None:
    draw = random.Random(0)
    assert asked(graph_of(attend(causal), *qkv(draw, 4, 6))) == KEPT
    assert asked(graph_of(attend(everywhere), *qkv(draw, 4, 6))) == NONE
    assert asked(graph_of(attend(causal), *qkv(draw, 4, 6), dynamic=True)) == KEPT


def test_a_mask_that_is_given_is_kept() -> None:
    q = torch.randn(2, 3, 5, 4)
    given = torch.ones(5, 5, dtype=torch.bool)
    program = lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask & causal(5, 5))
    assert asked(graph_of(program, q, given)) == KEPT


def test_biases_that_a_needless_condition_chooses_are_taken_as_they_are() -> None:
    """As of relative positions: what is added is of all sequences, and not made anew for each."""

    def program(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mask = torch.where(everywhere(5, 5), bias, torch.finfo(torch.float64).min)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q, bias = (torch.randn(n, 3, 5, m, dtype=torch.float64, requires_grad=True) for n, m in ((2, 4), (1, 5)))
    (node,) = attention_masks(graph_of(program, q, bias)).graph.find_nodes(op="call_function", target=ATTENTION)
    assert node.kwargs["attn_mask"].target == "expand_as"
    expected = torch.autograd.grad(program(q, bias).square().sum(), (q, bias))
    found = torch.autograd.grad(torchcompile.compile(program)(q, bias).square().sum(), (q, bias))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_biases_that_are_written_to_meanwhile_are_not() -> None:
    def program(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        bias = bias * 2
        mask = torch.where(everywhere(5, 5), bias, torch.finfo(torch.float64).min)
        bias.add_(torch.arange(5))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask) + bias.sum()

    q, bias = (torch.randn(n, 3, 5, m, dtype=torch.float64) for n, m in ((2, 4), (1, 5)))
    torch.testing.assert_close(torchcompile.compile(program)(q, bias), program(q, bias))


ODD: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "named operands": lambda x: torch.tril(input=torch.ones(5, 5)).bool().logical_and(other=torch.ones(5, 5).bool()),
    "bits of another dtype": lambda x: torch.ones(5, 5).view(torch.int32) == 1,
    "a result of its own": lambda x: torch.logical_and(x > 0, x > 1, out=torch.ones(5, 5, dtype=torch.bool)),
    "what a dtype has not": lambda x: torch.full((5, 5), -1).to(torch.uint8) == 255,
    "a step of infinity": lambda x: torch.full((6, 5), float("inf"), dtype=torch.float64).diff(dim=0).isnan(),
}


@pytest.mark.parametrize("name", ODD)
def test_what_no_rule_knows_is_left_to_the_graph(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.where(ODD[name](x[0]), 0.0, x * 0 - 2.0))

    x = torch.randn(2, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(torchcompile.compile(program)(x), program(x), equal_nan=True)
