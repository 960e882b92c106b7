"""Symbolic integers against sympy and against plain Python integers."""

from __future__ import annotations

import operator
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primtorch.errors import DataDependentValue
from primtorch.layout import view_strides
from primtorch.schemas import UserFrame
from primtorch.symbolic import (
    ShapeEnv,
    constant,
    depends_on_data,
    expected,
    expr_of,
    hint_of,
    materialize,
    relate,
    shape_env_of,
    symbol,
)
from primtorch.symbolic.expr import IntExpr
from primtorch.symbolic.sym_node import node_of

NAMES = ("s0", "s1", "s2")
SYMPY = {n: sympy.Symbol(n, integer=True) for n in NAMES}


def _pair(tree: Any) -> tuple[IntExpr, Any]:
    """(our expression, sympy's) of a nested tuple."""
    if isinstance(tree, int):
        return constant(tree), sympy.Integer(tree)
    if isinstance(tree, str):
        return symbol(tree), SYMPY[tree]
    op, a, b = tree
    (x, p), (y, q) = _pair(a), _pair(b)
    match op:
        case "+":
            return x + y, p + q
        case "-":
            return x - y, p - q
        case "*":
            return x * y, p * q
        case "//":
            return x // y, sympy.floor(p / q)
        case "%":
            return x % y, sympy.Mod(p, q)
        case "min":
            return x.minimum(y), sympy.Min(p, q)
    return x.maximum(y), sympy.Max(p, q)


def _value(tree: Any, values: dict[str, int]) -> int:
    """Of a nested tuple, by Python's own integers."""
    if not isinstance(tree, tuple):
        return values[tree] if isinstance(tree, str) else tree
    op, a, b = tree
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
    of: Any = operations.get(op) or {"min": min, "max": max}[op]
    return of(_value(a, values), _value(b, values))


LEAVES = st.one_of(st.sampled_from(NAMES), st.integers(-6, 6))
POLYNOMIALS = st.recursive(LEAVES, lambda c: st.tuples(st.sampled_from("+-*"), c, c), max_leaves=8)
DIVISORS = st.one_of(
    st.sampled_from(NAMES), st.integers(1, 6), st.tuples(st.just("*"), st.sampled_from(NAMES), st.integers(1, 4))
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda c: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "min", "max"]), c, c),
        st.tuples(st.sampled_from(["//", "%"]), c, DIVISORS),
    ),
    max_leaves=8,
)
VALUES = st.fixed_dictionaries({n: st.integers(1, 9) for n in NAMES})


@settings(max_examples=150, deadline=None)
@given(POLYNOMIALS, POLYNOMIALS)
def test_equal_polynomials_are_one_expression(a: Any, b: Any) -> None:
    (x, p), (y, q) = _pair(a), _pair(b)
    assert (x == y) == (sympy.expand(p - q) == 0)
    assert sympy.expand(sympy.sympify(str(x), locals=SYMPY) - p) == 0


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS, VALUES)
@example(("%", ("-", 0, "s0"), ("*", "s0", 2)), {"s0": 1, "s1": 1, "s2": 1})  # -1 by sympy, which draws s0 out of both
def test_evaluation_agrees_with_python(tree: Any, values: dict[str, int]) -> None:
    ours, expected = _pair(tree)[0], _value(tree, values)
    assert ours.evaluate(values) == expected
    assert eval(str(ours), {}, dict(values)) == expected
    assert _run(ours.program(), values) == expected
    assert pickle.loads(pickle.dumps(ours)) == ours


def _run(program: Any, values: dict[str, int]) -> int:
    stack: list[int] = []
    binary = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a, b: a // b,
        "mod": lambda a, b: a % b, "min": min, "max": max,
    }  # fmt: skip
    for op, argument in program:
        if op == "const":
            stack.append(argument)
        elif op == "sym":
            stack.append(values[argument])
        elif op == "neg":
            stack.append(-stack.pop())
        else:
            b, a = stack.pop(), stack.pop()
            stack.append(binary[op](a, b))
    (result,) = stack
    return result


@settings(max_examples=150, deadline=None)
@given(
    EXPRESSIONS,
    EXPRESSIONS,
    st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]),
    st.lists(VALUES, min_size=4, max_size=4),
)
def test_static_decisions_hold_for_all_values(a: Any, b: Any, op: str, samples: list[dict[str, int]]) -> None:
    env = ShapeEnv()
    for _ in NAMES:
        env.symbol(3, "", min=1, max=9)
    expr = relate(op, _pair(a)[0], _pair(b)[0])
    known = env.decide(expr)
    if known is not None:
        assert {expr.evaluate(values) for values in samples} == {known}


@settings(max_examples=100, deadline=None)
@given(
    EXPRESSIONS,
    st.lists(st.tuples(EXPRESSIONS, EXPRESSIONS, st.sampled_from(["eq", "lt", "ge", "ne"])), max_size=4),
    VALUES,
)
def test_what_guards_teach_is_true_where_they_hold(tree: Any, facts: Any, values: dict[str, int]) -> None:
    env = ShapeEnv()
    for n in NAMES:
        env.symbol(values[n], n, min=1, max=9)
    for a, b, op in facts:
        expr = relate(op, _pair(a)[0], _pair(b)[0])
        assert env.evaluate(expr, expr.evaluate(values)) == expr.evaluate(values)
    expr = _pair(tree)[0]
    assert env.simplify(expr).evaluate(values) == expr.evaluate(values)
    low, high = env.range_of(expr)
    assert (low is None or low <= expr.evaluate(values)) and (high is None or expr.evaluate(values) <= high)
    assert all(g.expr.evaluate(values) for g in env.guards)


def test_sizes_in_torch() -> None:
    env = ShapeEnv(lambda: (UserFrame("model.py", 3, "forward"),))
    b, s = env.symbol(4, "x.shape[0]"), env.symbol(8, "x.shape[1]")
    assert str(b * s + 1) == "s0*s1 + 1"
    assert str((b * s * 4) // s) == "4*s0"
    assert str((4 * s + 3) // 4) == "s1"
    assert (b * s) % s == 0
    assert not (b == 0) and not (b == 1) and b > 1
    assert str(torch.sym_max(s, 1)) == "s1"
    assert env.guards == []
    assert hint_of(b * s) == 32
    assert shape_env_of(b) is env and shape_env_of(3) is None
    assert s == 2 * b
    assert [str(g.expr) for g in env.guards] == ["s1 == 2*s0"]
    assert env.guards[0].stack[0].line == 3
    assert str(s + b) == "3*s0"
    assert str(expr_of(s // 2)) == "s0"
    assert int(b) == 4
    assert expr_of(s).as_int() == 8
    assert len(env.guards) == 2


def test_unbacked_sizes() -> None:
    env = ShapeEnv()
    u = env.unbacked(max=10)
    assert u >= 0 and u <= 10
    with pytest.raises(DataDependentValue, match="u0 < 5"):
        bool(u < 5)
    torch._check(u < 5)
    assert u < 5
    assert [str(a.expr) for a in env.assumptions] == ["u0 < 5"]
    with pytest.raises(ValueError, match="depends on data"):
        hint_of(u)


def test_guards_do_not_multiply() -> None:
    env = ShapeEnv()
    a, b = env.symbol(5, "a"), env.symbol(7, "b")
    for _ in range(5):
        assert a < b
        assert not a >= b
        assert a != b
    assert [str(g.expr) for g in env.guards] == ["s0 < s1"]


def test_materialize_shares_nodes() -> None:
    env = ShapeEnv()
    b, s = env.symbol(4, "b"), env.symbol(8, "s")
    graph = torch.fx.Graph()
    nodes = {}
    for size in (b, s):
        node = graph.placeholder(str(size))
        node.meta["val"] = size
        nodes[str(size)] = node
    x = graph.placeholder("x")
    first = materialize(graph, b * s + 1, nodes)
    second = materialize(graph, b * s // 3, nodes)
    assert materialize(graph, 7, nodes) == 7
    graph.call_function(torch.ops.aten.view.default, (x, [first, second]))
    graph.output((first, second))
    graph.lint()
    assert sum(n.op == "call_function" and n.target.__name__ == "mul" for n in graph.nodes) == 1
    run = torch.fx.GraphModule({}, torch.fx.Graph())
    run.graph = torch.fx.Graph()
    values = {}
    output = run.graph.graph_copy(graph, values)
    for node in [n for n in run.graph.nodes if n.target is torch.ops.aten.view.default]:
        run.graph.erase_node(node)
    run.graph.output(output)
    run.recompile()
    assert run(5, 6, None) == (31, 10)


def test_a_trial_forgets_what_it_asked_and_takes_other_values() -> None:
    """What is asked in it is told, true of the values given, known to a later trial that is told so, and to no other."""
    env = ShapeEnv()
    size = env.symbol(6, "x.shape[0]")
    with env.trial({"s0": 10}) as asked:
        assert not size == 6
        assert int(size + 1) == 11
        assert env.taken.guards is asked
        assert size // 3 == 3
    assert [g.expr.evaluate({"s0": 10}) for g in asked] == [True] * len(asked)
    assert not all(g.expr.evaluate({"s0": 6}) for g in asked)
    assert env.guards == [] and env.taken == ((), (), {})
    with env.trial({"s0": 10}, asked) as again:
        assert int(size) == 10
    assert len(again) == len(asked)
    assert env.decide(relate("eq", expr_of(size), constant(10))) is None
    assert int(size) == 6
    assert len(env.guards) == 1


def test_what_was_computed_before_a_trial_has_the_values_of_the_trial_in_it() -> None:
    """Sizes of tensors that earlier traces made are what later ones compute with; their examples are the trial's."""
    env = ShapeEnv()
    a, b = env.symbol(6, "x.shape[0]"), env.symbol(4, "x.shape[1]")
    pairs: tuple[Callable[[Any, Any], Any], ...] = (
        lambda a, b: a, lambda a, b: -a, lambda a, b: a + b, lambda a, b: 2 * a - b, lambda a, b: a * b + 1,
        lambda a, b: (a + 1) // b, lambda a, b: a % b, lambda a, b: a**2, lambda a, b: a < 2 * b,
        lambda a, b: torch.sym_not(a == b + 1), lambda a, b: torch.sym_max(a, b), lambda a, b: torch.sym_float(a) / 2,
    )  # fmt: skip
    before = [f(a, b) for f in pairs]
    with env.trial({"s0": 10, "s1": 9}):
        assert int(a) == 10  # what comes to be known is no other value
        with env.trial({}):
            for f, made in zip(pairs, before, strict=True):
                for number in (made, f(a, b)):
                    assert not hasattr(number, "node") or number.node.hint == f(10, 9)
    assert [x.node.hint for x in before] == [f(6, 4) for f in pairs]


def test_symbols_made_in_a_trial_keep_their_names() -> None:
    env = ShapeEnv()
    size = env.symbol(6, "x.shape[0]")
    with env.trial({"s0": 10}):
        first = env.define("fdiv", expr_of(size), constant(4))
        assert env.hint(first) == 2.5
    second = env.define("fdiv", expr_of(size), constant(4))
    assert str(first) != str(second) and env.hint(second) == 1.5


def test_numbers_of_data_that_are_known_by_now_answer_as_what_they_are() -> None:
    """They keep their names, and what is asked of them is guarded of the numbers that inputs give."""
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    for _ in range(20):
        env = ShapeEnv()
        sizes = [env.symbol(draw.randint(2, 9), f"x.shape[{i}]") for i in range(2)]
        counted = [env.unbacked() for _ in range(2)]
        made = [(counted[0], sizes[0]), ((counted[1] + 1) // 2, sizes[1] - 1), (counted[0] * 3 + 1, sizes[0] * 3 + 1)]
        for number, size in made[:2]:
            assert depends_on_data(number) and expected(number == size)
        for number, size in made:
            assert not depends_on_data(number) and hint_of(number) == hint_of(size), f"seed {seed}"
            assert node_of(number).of_data and not node_of(size).of_data
            for limit in (draw.randint(0, 30), hint_of(size)):
                assert bool(number <= limit) == (hint_of(size) <= limit), f"seed {seed}"
                assert bool(number == limit) == (hint_of(size) == limit), f"seed {seed}"
        assert all(guard.expr.symbols() <= {"s0", "s1"} for guard in env.guards), f"seed {seed}: {env.guards}"
        assert all(str(env.simplify(symbol(name))) == name for name in ("s0", "s1") if not env.guards)
        known = env.found()
        for number, size in made:
            assert env.simplify(expr_of(number).substitute(known)) == expr_of(size), f"seed {seed}"


def test_bounds_that_meet_are_an_equality() -> None:
    """A size that is asked for twice, from below and from above, is the number that is left."""
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    for _ in range(20):
        env = ShapeEnv()
        value, other = draw.randint(2, 9), draw.randint(2, 9)
        size, more = env.symbol(value, "x.shape[0]", min=0), env.symbol(other, "x.shape[1]", min=0)
        asked = [lambda: size >= value, lambda: size <= value]  # noqa: B023
        assert all(map(bool, (ask() for ask in draw.sample(asked, 2))))
        assert expr_of(size).as_int() == value and expr_of(size * more - more) == expr_of(more) * constant(value - 1)
        asked = [lambda: size + other >= more + value, lambda: more >= other]  # noqa: B023
        assert all(map(bool, (ask() for ask in draw.sample(asked, 2))))
        assert expr_of(more).as_int() == other, f"seed {seed}: {env.guards}"
    env = ShapeEnv()
    row = env.symbol(0, "a size", min=0)
    assert not row > 0 and expr_of(row).as_int() == 0


def test_common_factors_hide_no_equality() -> None:
    """`k * s * (u0 + u1) == k * s * t` tells the sum, where `s` is surely positive."""
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    for _ in range(20):
        env = ShapeEnv()
        columns, size, rows, more = env.symbol(5, "columns"), env.symbol(7, "rows"), env.unbacked(), env.unbacked()
        factor: Any = draw.randint(1, 5) * columns ** draw.randint(0, 2)
        assert expected(factor * rows + factor * more == factor * size)
        assert not depends_on_data(rows + more) and expr_of(rows + more) == expr_of(size), f"seed {seed}"
        half: Any = (rows + 1) // 2
        assert depends_on_data(half) and expected(factor * half == factor * (size - 3))
        assert expr_of(half) == expr_of(size) - constant(3), f"seed {seed}"


def test_what_is_known_of_data_places_views() -> None:
    """A size that is known to be a product of data's is divided as that is."""
    env = ShapeEnv()
    rows, columns, size = env.unbacked(), env.symbol(5, "x.shape[1]"), env.symbol(10, "a size")
    assert expected(rows * columns == int(size))
    assert view_strides((size,), (1,), (rows, columns)) == (columns, 1)


def test_a_row_that_is_known_to_be_one_leaves_a_view_what_it_is() -> None:
    env = ShapeEnv()
    rows = env.unbacked()
    assert expected(rows == 1)
    assert view_strides((rows, 5), (5, 1), (rows, 5)) == (5, 1)
    assert view_strides((rows, 5), (5, 1), (5,)) == (1,)
