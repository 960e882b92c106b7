"""Drawn programs of what decides on gradients beside operators: functions with derivatives of their own, writes that
autograd does not see, blocks without gradients. Exported and compiled, values and first and second gradients are eager's
in float64, or the program is refused with its line."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import torchcompile
import torchdynamo
from aotautograd.errors import DoubleBackwardUnavailable
from primtorch.errors import TraceError
from torchdynamo.errors import NotExportable, Unsupported

# Of the pieces that a compiled program runs eagerly, as it tells.
pytestmark = pytest.mark.expected_eager("tensor_hook", "autograd_function", "ambient_state", "leaf")

Tensor = torch.Tensor
Piece = Callable[[Tensor, Tensor], Tensor]

# Backwards here are linear in gradients, as derivatives are: whether one runs for a gradient that is zero is not to show.


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a.sin() * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return gradient * b * a.sin() if ctx.needs_input_grad[0] else None, gradient * 3 * b


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return a.view_as(a)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Kept(torch.autograd.Function):
    """Keeps what is neither argument nor result; a part of the backward has no history."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        inner = a.tanh()
        found = inner * b + a.shape[0]
        ctx.save_for_backward(a, inner, found)
        ctx.rows = a.shape[0]
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, inner, found = ctx.saved_tensors
        return gradient * a.detach() * found * a.cos(), gradient.reshape(-1).view_as(a) * inner * a / ctx.rows


class Turning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        with torch.no_grad():
            scale = a.cos()
        return gradient * scale * a


class Several(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a * b, a > b, a + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, first: Tensor, apart: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a, product = ctx.saved_tensors
        return first * product + first, second * a


class Nested(torch.autograd.Function):
    """Its forward and its backward call others."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return Reversed.apply(a, 2.0).exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return Scaled.apply(a, gradient) + Reversed.apply(gradient, 0.5)


class Unasked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return a * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else gradient * 5


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


@torch.library.custom_op("histories::square", mutates_args=())
def square(a: Tensor) -> Tensor:
    return a * a


@square.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _of_square(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * ctx.saved_tensors[0] * 7


square.register_autograd(_of_square, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


# -- pieces --------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b + a.sin()


def by_scaled(a: Tensor, b: Tensor) -> Tensor:
    return Scaled.apply(a, b)


def by_reversed(a: Tensor, b: Tensor) -> Tensor:
    return Reversed.apply(a, 1.5) * b


def by_kept(a: Tensor, b: Tensor) -> Tensor:
    return Kept.apply(a, b)


def by_several(a: Tensor, b: Tensor) -> Tensor:
    one, larger, _ = Several.apply(a, b)
    return torch.where(larger, one, a)


def by_nested(a: Tensor, b: Tensor) -> Tensor:
    return Nested.apply(a * 0.3) + b


def by_unasked(a: Tensor, b: Tensor) -> Tensor:
    return Unasked.apply(a) * b


def by_once(a: Tensor, b: Tensor) -> Tensor:
    return Once.apply(a * 0.3) + b


def by_turning(a: Tensor, b: Tensor) -> Tensor:
    return Turning.apply(a) + b


def by_dirty(a: Tensor, b: Tensor) -> Tensor:
    return Dirty.apply(a.clone()) * b


def by_square(a: Tensor, b: Tensor) -> Tensor:
    return square(a * 0.5) + b


def by_square_apart(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = square(a)
    return scale * b


def by_checkpoint(a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda c, d: Scaled.apply(c.sin(), d), a, b, use_reentrant=False)


def by_a_derivative(a: Tensor, b: Tensor) -> Tensor:
    if not a.requires_grad:
        return a + b
    value = a.tanh()
    (gradient,) = torch.autograd.grad((value * Scaled.apply(value, b)).sum(), a, create_graph=True)
    return gradient * b


def detached(a: Tensor, b: Tensor) -> Tensor:
    return a.detach() * b


def detached_in_place(a: Tensor, b: Tensor) -> Tensor:
    c = a.sin()
    c.detach_()
    return c * b + a


def apart(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = a.sin()
        with torch.enable_grad():
            kept = b.cos() * scale
        scale = scale + kept
    return kept * scale


@torch.no_grad()
def _decorated(a: Tensor) -> Tensor:
    return a.exp() * 0.1


def by_decorated(a: Tensor, b: Tensor) -> Tensor:
    return _decorated(a) * b


def filled_apart(a: Tensor, b: Tensor) -> Tensor:
    table = torch.zeros_like(a)
    with torch.no_grad():
        table.add_(a)
        table[0] = b[1]
    return table * b


def written_apart(a: Tensor, b: Tensor) -> Tensor:
    c = a * 2
    with torch.no_grad():
        c.mul_(b)
    return c * b


def a_row_is_written_apart(a: Tensor, b: Tensor) -> Tensor:
    c = a * 2
    row = c[1:]
    with torch.no_grad():
        c[0].zero_()
        row.add_(b[1:])
    return torch.cat([row, c[:1]]) * c


def data_is_written(a: Tensor, b: Tensor) -> Tensor:
    c = a + b
    c.data.mul_(3)
    return c * c.data + c


def a_detached_alias_is_written(a: Tensor, b: Tensor) -> Tensor:
    c = a.t().sin().t()
    d = c.detach()
    d.add_(b.detach())
    return c * d


def data_is_set(a: Tensor, b: Tensor) -> Tensor:
    c = a * 3
    c.data = b.detach() * 2
    return c * a


def seen_writes(a: Tensor, b: Tensor) -> Tensor:
    c = a * 2
    c.mul_(b)
    c[0] = b[1].sin()
    c[:, 1].copy_(a[:, 0])
    c.t().copy_(a.t())
    return c + b


def an_argument_is_written(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        a.mul_(0.5)
    return a + b


def data_of_an_argument_is_written(a: Tensor, b: Tensor) -> Tensor:
    a.data.add_(0.25)
    return a + b


def hooked(a: Tensor, b: Tensor) -> Tensor:
    c = a.sin()
    if c.requires_grad:
        c.register_hook(lambda gradient: gradient * 3)
    return c * b


def a_leaf_within(a: Tensor, b: Tensor) -> Tensor:
    return a.detach().requires_grad_() * b


def inferred(a: Tensor, b: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = a.sin()
    return scale.clone() * b


COMMON: tuple[Piece, ...] = (
    product, by_scaled, by_reversed, by_kept, by_several, by_nested, by_unasked, by_square, by_square_apart,
    by_checkpoint, by_a_derivative, detached, detached_in_place, apart, by_decorated, filled_apart, written_apart,
    a_row_is_written_apart, data_is_written, a_detached_alias_is_written, data_is_set, seen_writes,
)  # fmt: skip
SELDOM: tuple[Piece, ...] = (
    by_once, by_turning, by_dirty, an_argument_is_written, data_of_an_argument_is_written, hooked, a_leaf_within, inferred,
)  # fmt: skip


OF_FUNCTIONS = (
    by_kept, by_nested, by_once, by_turning, by_checkpoint, by_reversed, by_several, by_unasked, by_a_derivative,
    by_square_apart,
)  # fmt: skip


def draw(source: random.Random) -> tuple[str, Piece]:
    """A program of some pieces, each of two values that there are, and its text."""
    steps = [
        (source.choice(SELDOM if source.random() < 0.06 else COMMON), source.randrange(2 + n), source.randrange(2 + n))
        for n in range(source.randint(1, 4))
    ]

    def program(x: Tensor, y: Tensor) -> Any:
        values = [x, y]
        for piece, first, second in steps:
            values.append(piece(values[first], values[second]))
        return tuple(values[2:])

    text = "; ".join(f"{piece.__name__}({first}, {second})" for piece, first, second in steps)
    return text, program


def example(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(rows, 3, dtype=torch.float64, generator=numbers) + 0.2 for _ in range(2))
    return x.requires_grad_(), y.requires_grad_(seed % 3 > 0)


class EagerRaises(Exception):
    """What there is nothing to compare with."""


def observed(function: Callable[..., Any], inputs: tuple[Tensor, Tensor], order: int) -> tuple[object, list[Tensor]]:
    """Which results have a history; results, inputs behind the call, and gradients up to an order."""
    found = function(*inputs)
    wanted = [t for t in inputs if t.requires_grad]
    told, values = [t.requires_grad for t in found], [t.detach().clone() for t in (*found, *inputs)]
    total = sum((t * torch.linspace(1, 2, t.shape[-1], dtype=t.dtype)).sum() for t in found if t.requires_grad)
    for step in range(order):
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if isinstance(total, Tensor) and total.requires_grad:
            grads = torch.autograd.grad(total, wanted, create_graph=step + 1 < order, allow_unused=True)
        values += [torch.zeros_like(t) if g is None else g.detach() for t, g in zip(wanted, grads, strict=True)]
        total = sum((g * g).sum() for g in grads if g is not None)
    return told, values


def eager(program: Callable[..., Any], inputs: tuple[Tensor, Tensor], order: int) -> tuple[object, list[Tensor]]:
    try:
        return observed(program, inputs, order)
    except RuntimeError as error:
        raise EagerRaises(str(error)) from error


def differs(
    expected: tuple[object, list[Tensor]],
    actual: tuple[object, list[Tensor]],
    spread: Iterable[Tensor | float] = itertools.repeat(0.0),
) -> str | None:
    """`spread` is how far eager's values move, one by one, where inputs are off by a rounding."""
    if expected[0] != actual[0]:
        return f"results have histories {actual[0]}, eager's {expected[0]}"
    pairs = zip(expected[1], actual[1], strict=True)
    for place, ((a, b), moves) in enumerate(zip(pairs, spread, strict=False)):
        close = torch.isclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
        if not (close | ((a - b).abs() <= 100 * moves)).all():
            return f"value {place} is {b}, eager's {a}"
    return None


def judged(program: Piece, expected: Any, actual: Any, rows: int, seed: int, order: int) -> str | None:
    """What differs. Products of large powers cancel: where a rounding of the inputs changes eager's own result, it says
    nothing of more digits than stay."""
    found = differs(expected, actual)
    if found is None:
        return None
    spread = [torch.zeros_like(value) for value in expected[1]]
    for draw_of in range(3):
        inputs, numbers = example(rows, seed), torch.Generator().manual_seed(draw_of)
        with torch.no_grad():
            for x in inputs:
                x *= 1 + 2.0**-52 * torch.randn(x.shape, dtype=x.dtype, generator=numbers)
        beside = eager(program, inputs, order)[1]
        moved = [torch.nan_to_num(b - a).abs() for a, b in zip(expected[1], beside, strict=True)]
        spread = list(map(torch.maximum, spread, moved))
    return differs(expected, actual, spread)


WAYS = ("export", "export of varying sizes", "export of prims", "file", "compile")
REFUSALS = (TraceError, NotExportable, Unsupported, DoubleBackwardUnavailable)


def made(way: str, program: Callable[..., Any], inputs: tuple[Tensor, Tensor], path: Path) -> Callable[..., Any]:
    if way == "compile":
        return torchcompile.compile(program)
    exported = torchcompile.export(
        program,
        *inputs,
        aten_graph=True,
        dynamic=True if way == "export of varying sizes" else None,
        decompositions="prims" if way == "export of prims" else None,
    )
    if way != "file":
        return exported
    torchdynamo.save(exported, path)
    return torchdynamo.load(path, operators=("histories",))


def outcome(way: str, program: Callable[..., Any], seed: int, path: Path) -> str:
    """What comes of a program: "equal", "refused", "eager raises"; else what differs."""
    call = None
    for rows in (4, 5) if way in ("export of varying sizes", "compile") else (4, 4):
        order = 2
        try:
            expected = eager(program, example(rows, seed), order)
        except EagerRaises:
            order = 1
            try:
                expected = eager(program, example(rows, seed), order)
            except EagerRaises:
                return "eager raises"
        try:
            call = call or made(way, program, example(rows, seed), path)
            actual = observed(call, example(rows, seed), order)
        except REFUSALS as error:
            assert Path(__file__).name in str(error), f"no line of the user's: {error}"
            if not isinstance(error, DoubleBackwardUnavailable):
                return "refused"
            order = 1
            try:
                expected, actual = (observed(f, example(rows, seed), 1) for f in (program, call))  # type: ignore[arg-type]
            except DoubleBackwardUnavailable:  # the program takes a derivative itself
                return "refused"
        except RuntimeError as error:
            if way == "compile" or "the graph has no derivative of it" not in str(error):
                raise
            order = 1
            expected, actual = (observed(f, example(rows, seed), 1) for f in (program, call))  # type: ignore[arg-type]
        found = judged(program, expected, actual, rows, seed, order)
        if found is not None:
            return found
    return "equal"


def drawn(seed: int, count: int, ways: Sequence[str], path: Path) -> collections.Counter[str]:
    source, counts = random.Random(seed), collections.Counter[str]()
    for number in range(count):
        text, program = draw(source)
        for way in ways:
            torchcompile.reset()
            try:
                found = outcome(way, program, seed + number, path)
            except Exception as error:
                raise AssertionError(f"seed {seed}, program {number}, {way}: {text}") from error
            counts[found] += 1
            assert found in ("equal", "refused", "eager raises"), (
                f"seed {seed}, program {number}, {way}: {text}: {found}"
            )
    return counts


@pytest.mark.parametrize("way", WAYS)
def test_drawn_programs_have_eagers_gradients(way: str, tmp_path: Path) -> None:
    counts = drawn(random.SystemRandom().randrange(1 << 30), 12, [way], tmp_path / "program")
    assert counts["equal"] >= counts["refused"], counts


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_many_drawn_programs_have_eagers_gradients(way: str, tmp_path: Path) -> None:
    counts = drawn(random.SystemRandom().randrange(1 << 30), 150, [way], tmp_path / "program")
    assert counts["equal"] > 2 * counts["refused"], counts


WRITES_TO_PARTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a row": lambda c, b: c.__setitem__(0, b[1].sin()),
    "a column": lambda c, b: c[:, 1].copy_(b[:, 0]),
    "turned": lambda c, b: c.t().copy_(b.t()),
    "a part in place": lambda c, b: c[1:].mul_(b[1:]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES_TO_PARTS)
def test_a_derivative_of_a_write_to_a_part_within_the_program(write: str, way: str, tmp_path: Path) -> None:
    """Its derivative writes to parts of gradients: of what these are computed from an export had lost the history."""

    def program(x: Tensor, y: Tensor) -> Any:
        written = y * 2
        WRITES_TO_PARTS[write](written, y)
        return (by_a_derivative(y, written + y),)

    torchcompile.reset()
    assert outcome(way, program, 5, tmp_path / "program") == ("equal" if way == "compile" else "refused")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("piece", COMMON, ids=lambda piece: piece.__name__)
def test_each_common_piece_is_taken(piece: Piece, way: str, tmp_path: Path) -> None:
    for first, second in ((0, 1), (1, 0), (0, 0)):

        def program(x: Tensor, y: Tensor) -> Any:
            return (piece((x, y)[first], (x, y)[second]),)

        torchcompile.reset()
        assert outcome(way, program, 2, tmp_path / "program") == "equal", (first, second)


@pytest.mark.parametrize("piece", SELDOM, ids=lambda piece: piece.__name__)
def test_what_has_no_form_in_a_graph_is_refused(piece: Piece, tmp_path: Path) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return (piece(x, y),)

    for way in WAYS:
        torchcompile.reset()
        assert outcome(way, program, 2, tmp_path / "program") in ("equal", "refused", "eager raises"), way


@pytest.mark.parametrize("piece", COMMON, ids=lambda piece: piece.__name__)
def test_what_a_piece_keeps_is_written_by_data(piece: Piece, tmp_path: Path) -> None:
    """A derivative reads what is written, which no counter tells it, also of an argument that has no history."""
    for written, with_gradients in itertools.product((0, 1), (False, True)):

        def program(x: Tensor, y: Tensor) -> Any:
            found = piece(x, y)
            (x, y)[written].data.add_(0.25)
            return (found, found * y)

        torchcompile.reset()
        found = outcome("export", program, 2 if with_gradients else 3, tmp_path / "program")
        assert found in ("equal", "refused", "eager raises"), (written, with_gradients)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("piece", OF_FUNCTIONS, ids=lambda piece: piece.__name__)
def test_further_derivatives_are_eagers(piece: Piece, backend: str, dynamic: bool | None) -> None:
    for first, second in ((0, 1), (1, 0), (0, 0)):

        def program(x: Tensor, y: Tensor) -> Any:
            return (piece((x, y)[first], (x, y)[second]),)

        torchcompile.reset()
        compiled = torchcompile.compile(program, backend=backend, dynamic=dynamic)
        for rows, order in ((4, 1), (4, 2), (5, 2), (5, 3)):
            expected = observed(program, example(rows, 2), order)
            assert differs(expected, observed(compiled, example(rows, 2), order)) is None, (rows, order)


def in_two_parts(backward: Callable[[Any, Tensor], Tensor]) -> Any:
    """tanh with a derivative of its own, as transforms take it."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(a: Tensor) -> Tensor:
            return a.tanh()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(ctx, gradient)

    return Own


def _turned(ctx: Any, gradient: Tensor) -> Tensor:
    with torch.no_grad():
        scale = ctx.saved_tensors[0].cos()
    return gradient * scale * ctx.saved_tensors[0]


Plain = in_two_parts(lambda ctx, g: g * ctx.saved_tensors[0].cos())
TRANSFORMED = {
    "plain": Plain, "turning": in_two_parts(_turned),
    "detaching": in_two_parts(lambda ctx, g: g * ctx.saved_tensors[0].detach() * ctx.saved_tensors[1]),
    "of data": in_two_parts(lambda ctx, g: g * ctx.saved_tensors[0].data),
    "nested": in_two_parts(lambda ctx, g: Plain.apply(ctx.saved_tensors[0]) * g),
}  # fmt: skip


@pytest.mark.expected_eager("function_transform", "external_write", "backward")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("kind", TRANSFORMED)
def test_transforms_of_functions(kind: str, backend: str) -> None:
    def once(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: TRANSFORMED[kind].apply(y).sum())(x)

    def twice(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: once(y).sum())(x)

    torchcompile.reset()
    for program in (once, twice):
        compiled = torchcompile.compile(program, backend=backend)
        for x in (torch.rand(3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)):
            torch.testing.assert_close(compiled(x), program(x))
        assert program is twice or not torchcompile.report().breaks
