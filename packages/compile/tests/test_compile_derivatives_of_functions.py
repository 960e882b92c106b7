"""Derivatives, up to the third, of autograd functions whose backward's operators do not say what its derivative is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import torchcompile

pytestmark = pytest.mark.expected_eager("autograd_function", "backward", "loop")

Tensor = torch.Tensor
Piece = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[..., Any]

# Backwards here are linear in gradients, as derivatives are: how often one runs, and for which parts, is not to show.


def own(backward: Backward, forward: Callable[..., Any] | None = None, once: bool = False) -> Any:
    """A function with this backward of (gradient, *saved). It keeps the argument, what it computes inside, the result."""

    def usual(ctx: Any, a: Tensor) -> Tensor:
        result = a.tanh()
        ctx.save_for_backward(a, a.cos(), result)
        return result

    def pulled_back(ctx: Any, *gradients: Tensor) -> Any:
        return backward(*gradients, *ctx.saved_tensors)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            return (forward or usual)(ctx, *args)

    Own.backward = staticmethod(once_differentiable(pulled_back) if once else pulled_back)  # type: ignore[assignment]
    return Own


def _apart(g: Tensor, a: Tensor, inner: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = a.cos()
        with torch.enable_grad():
            shift = g * y
    return g * scale * a + shift


def _in_place(g: Tensor, a: Tensor, inner: Tensor, y: Tensor) -> Tensor:
    h = g.clone()
    h.mul_(a)
    return h.mul_(y.detach())


def _checkpointed(g: Tensor, a: Tensor, inner: Tensor, y: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda u, v: u * v.sin(), g, a, use_reentrant=False)
    return found


def _kept_plainly(ctx: Any, a: Tensor) -> Tensor:
    ctx.save_for_backward()
    ctx.a, ctx.inner, ctx.y = a, a.cos(), a.tanh()
    return ctx.y  # type: ignore[no-any-return]


class Plainly(torch.autograd.Function):
    """Keeps tensors as attributes."""

    forward = staticmethod(_kept_plainly)  # type: ignore[assignment]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.a * ctx.y * ctx.inner


class Several(torch.autograd.Function):
    """In two parts, with several results, one of them without a gradient."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return a * b, a > b, a + b, a.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[0], output[3])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, first: Tensor, _: Any, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, product, cosine = ctx.saved_tensors
        return first * product + third * a.detach(), second * a.detach() + cosine * third


class Unasked(torch.autograd.Function):
    """Of one result: without a gradient where none came."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Tensor | None:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        return None if g is None else g * a.detach() * a


class Needed(torch.autograd.Function):
    """Computes the gradients that are asked for."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        first, second = ctx.needs_input_grad[:2]
        return g * b * a.detach() * ctx.scale if first else None, g * a * b.detach() if second else None, None


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # type: ignore[override]
        mask = torch.rand_like(a)
        ctx.save_for_backward(a, mask)
        return a * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        a, mask = ctx.saved_tensors
        return g * mask * a


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(a)
        a.mul_(2)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        return g * a.detach() * 5


class Itself(torch.autograd.Function):
    """Its backward calls the function itself."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a)
        return a.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        found: Tensor = Itself.apply(a + 1.5)
        return g * found


def _thrice(ctx: Any, a: Tensor) -> Tensor:
    ctx.save_for_backward(a, a * 2)
    return a * 3


INNERMOST = own(lambda g, a, _: g * 1.7, _thrice)
INNER = own(lambda g, a, _: INNERMOST.apply(g) * 0.5, _thrice)
OF_ARGUMENT = own(lambda g, a, _: g * a.sin(), _thrice)
DETACHING = own(lambda g, a, inner, y: g * a.detach() * y)
APART = own(_apart)
ONCE = own(lambda g, a, inner, y: g * a, once=True)
INSIDE = own(lambda g, a, inner, y: g * inner * a)
NESTED = own(lambda g, a, inner, y: INNER.apply(g) * a + g * OF_ARGUMENT.apply(y))

ONE: dict[str, Any] = {
    "detaches": DETACHING,
    "reads data": own(lambda g, a, inner, y: g * a.data * y),
    "detaches the gradient": own(lambda g, a, inner, y: g.detach() * a),
    "hands a detached gradient on": own(lambda g, a, inner, y: g.detach()),
    "hands a view of it on": own(lambda g, a, inner, y: g.detach().t().t()),
    "reads what is inside": INSIDE,
    "turns grad mode": APART,
    "asks for grad mode": own(lambda g, a, inner, y: g * a * (2.0 if torch.is_grad_enabled() else 3.0)),
    "once": ONCE,
    "once, and hands the gradient on": own(lambda g, a, inner, y: g, once=True),
    "calls functions": NESTED,
    "calls itself": Itself,
    "takes the gradient's shape": own(lambda g, a, inner, y: torch.zeros_like(g) * a.detach() * a),
    "writes": own(_in_place),
    "has a checkpoint": own(_checkpointed),
    "keeps attributes": Plainly,
    "without a gradient": Unasked,
    "draws": Drawing,
    "gives what is drawn": own(
        lambda g, a: g * a.detach() * a, lambda ctx, a: (ctx.save_for_backward(a), a + torch.rand_like(a))[1]
    ),
    "calls a function in its forward": own(
        lambda g, a: DETACHING.apply(a) * g, lambda ctx, a: (ctx.save_for_backward(a), DETACHING.apply(a))[1]
    ),
    "gives another shape": own(
        lambda g, a: g.sum(0) * a.detach() * a,
        lambda ctx, a: (ctx.save_for_backward(a), a.expand(2, *a.shape) * 1)[1],
    ),
    "gives a number": own(
        lambda g, a: g * a.detach() * a, lambda ctx, a: (ctx.save_for_backward(a), a.sum())[1]
    ),
    "of complex numbers": own(
        lambda g, a: (g.real + 2 * g.imag) * a.detach() * a,
        lambda ctx, a: (ctx.save_for_backward(a), a * (1 + 2j))[1],
    ),
}  # fmt: skip


def _of_one(function: Any) -> Piece:
    def piece(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = function.apply(a)
        found = torch.view_as_real(found).sum(-1) if found.is_complex() else found
        return (found if found.dim() < 3 else found[1]) * b

    return piece


def _in_checkpoint(function: Any) -> Piece:
    def piece(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda c, d: function.apply(c * d).sin() * d, a, b, use_reentrant=False)
        return found

    return piece


def by_several(a: Tensor, b: Tensor) -> Tensor:
    product, larger, total, cosine = Several.apply(a, b)
    return torch.where(larger, product, total) + cosine


def by_one_of_several(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = Several.apply(a, b)[0]
    return product * b


def by_needed(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = Needed.apply(a, b, 1.5)
    return product * a


def by_dirty(a: Tensor, b: Tensor) -> Tensor:
    doubled: Tensor = Dirty.apply(a.clone())
    return doubled * b


def by_strides(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = INSIDE.apply(a.t()[:, ::2])
    return (found * b.t()[:, ::2]).sum() * b


def by_no_elements(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = DETACHING.apply(a[:0])
    return torch.cat([found * b[:0], a * b])


def by_another_dtype(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = DETACHING.apply(a.to(torch.complex128)).real
    return found * b


def by_a_derivative(a: Tensor, b: Tensor) -> Tensor:
    value = DETACHING.apply(a * 1)
    (gradient,) = torch.autograd.grad((value * b).sum(), a, create_graph=True) if a.requires_grad else (a,)
    return gradient * b * a


def by_a_write(a: Tensor, b: Tensor) -> Tensor:
    c = a * 2
    d = DETACHING.apply(c)
    d.mul_(b)
    return d * a


def by_no_history(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = DETACHING.apply(a)
    found: Tensor = DETACHING.apply(a)
    return scale * found * b


def by_nested_checkpoints(a: Tensor, b: Tensor) -> Tensor:
    inner = lambda e, f: NESTED.apply(e) * f  # noqa: E731
    outer = lambda c, d: checkpoint(inner, c * d, d, use_reentrant=False).sin()  # noqa: E731
    found: Tensor = checkpoint(outer, a, b, use_reentrant=False)
    return found


@getattr(torch.compiler, "nested_compile_region", lambda function: function)  # type: ignore[untyped-decorator]
def region(c: Tensor, d: Tensor) -> Tensor:
    found: Tensor = APART.apply(NESTED.apply(c * d))
    return found * d


def by_regions(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = region(a, b) + region(b, a)
    return found


@getattr(torch.compiler, "nested_compile_region", lambda function: function)  # type: ignore[untyped-decorator]
def drawing_region(c: Tensor, d: Tensor) -> Tensor:
    found: Tensor = Drawing.apply(c * d)
    return found * d


def by_drawing_regions(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = drawing_region(a, b) + drawing_region(b, a)
    return found


def without_histories(a: Tensor, b: Tensor) -> Tensor:
    """No function, but what a checkpoint's second run is to leave without a history."""

    def run(c: Tensor, d: Tensor) -> Tensor:
        with torch.no_grad():
            scale = c.sin()
        return scale * c * d + c.detach() * d

    found: Tensor = checkpoint(run, a, b, use_reentrant=False)
    return found


PIECES: dict[str, Piece] = {
    **{name: _of_one(function) for name, function in ONE.items()},
    **{f"{name}, in a checkpoint": _in_checkpoint(ONE[name])
       for name in ("detaches", "reads what is inside", "turns grad mode", "once", "calls functions", "draws")},
    **{piece.__name__: piece for piece in (
        by_several, by_one_of_several, by_needed, by_dirty, by_strides, by_no_elements, by_another_dtype,
        by_a_derivative, by_a_write, by_no_history, by_nested_checkpoints, by_regions, by_drawing_regions, without_histories,
    )},
}  # fmt: skip


def example(seed: int, rows: int, both: bool) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed + rows)
    a, b = (torch.rand(rows, 3, dtype=torch.float64, generator=numbers) + 0.2 for _ in range(2))
    return a.requires_grad_(), b.requires_grad_(both)


def derivatives(piece: Piece, inputs: tuple[Tensor, Tensor], order: int, linear: bool) -> list[Any]:
    """The value and all gradients up to an order, with what of them has a history; or the error that came instead.
    `linear`: the first gradient that comes has no history."""
    torch.manual_seed(0)
    wanted = [t for t in inputs if t.requires_grad]
    found: list[Any] = []
    try:
        value = piece(*inputs)
        found.append(value.detach())
        total = value.sum() if linear else (value.sin() * value).mean()
        for step in range(order):
            if not total.requires_grad:
                break
            slopes = torch.autograd.grad(total, wanted, create_graph=step + 1 < order, allow_unused=True)
            given = [g for g in slopes if g is not None]
            found += [None if g is None else g.detach() for g in slopes] + [g.requires_grad for g in given]
            total = torch.stack([(g.tanh() * g).mean() for g in given]).sum()
    except RuntimeError as error:
        found.append(str(error).partition("\n")[0])
    return found


def compare(found: list[Any], expected: list[Any], what: str) -> None:
    assert len(found) == len(expected), f"{what}: {found}, eager's {expected}"
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor), f"{what}: value {place} is {a}, eager's {b}"
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m: f"{what}, value {place}: {m}")
        else:
            assert a == b, f"{what}: value {place} is {a}, eager's {b}"


OPTIONS = {"inductor": {"eager_random": True}}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", PIECES)
def test_derivatives_are_eagers(name: str, backend: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    piece = PIECES[name]
    builds = backend == "inductor"  # which takes long
    for order in (2,) if builds else (1, 2, 3):
        for both, linear in ((True, False), (False, True))[: 1 if builds else 2]:
            torchcompile.reset()
            compiled = torchcompile.compile(piece, backend=backend, options=OPTIONS.get(backend))
            for rows in (4,) if builds else (4, 5):
                expected = derivatives(piece, example(seed, rows, both), order, linear)
                found = derivatives(compiled, example(seed, rows, both), order, linear)
                compare(found, expected, f"seed {seed}, {order=}, {both=}, {linear=}, {rows=}")


ONCE_BACKWARDS: dict[str, Backward] = {
    "hands the gradient on": lambda g, a, inner, y: g,
    "by parts": lambda g, a, inner, y: torch.cat([g[:2], g[2:] * a[2:]]),
    "a view": lambda g, a, inner, y: g.t().reshape(g.shape[1], -1).t(),
    "computes": lambda g, a, inner, y: g * a * y,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ONCE_BACKWARDS)
def test_fourth_derivatives_past_a_function_that_may_be_differentiated_once(name: str, backend: str) -> None:
    """Autograd passes its error by where no input lies behind it: what its backward gives is a constant to all orders."""
    function, seed = own(ONCE_BACKWARDS[name], once=True), random.SystemRandom().randrange(1 << 30)

    def program(a: Tensor, b: Tensor) -> Tensor:
        return function.apply(a.square() * b) * b.sin()  # type: ignore[no-any-return]

    compiled = torchcompile.compile(program, backend=backend, options=OPTIONS.get(backend))
    for linear in (False, True):
        expected, found = (derivatives(f, example(seed, 4, True), 4, linear) for f in (program, compiled))
        assert len(expected) > 12
        compare(found, expected, f"seed {seed}, {linear=}")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_drawn_compositions(backend: str) -> None:
    check_compositions(backend, 3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_many_drawn_compositions(backend: str) -> None:
    check_compositions(backend, 60)


def check_compositions(backend: str, count: int) -> None:
    """Of pieces whose results are as large as their arguments, of which each takes two values that there are."""
    seed = random.SystemRandom().randrange(1 << 30)
    source = random.Random(seed)
    # A region's draws, in higher derivatives, may be none that the forward kept: those are refused.
    left_out = ("by_no_elements", "by_a_derivative", "gives a number", "by_drawing_regions")
    names = [name for name in PIECES if name not in left_out]
    for number in range(count):
        steps = [(source.choice(names), source.randrange(2 + n), source.randrange(2 + n)) for n in range(3)]

        def program(a: Tensor, b: Tensor, steps: Any = steps) -> Tensor:
            values = [a, b]
            for name, first, second in steps:
                values.append(PIECES[name](values[first], values[second]).sin())
            return values[-1]

        torchcompile.reset()
        order, dynamic, linear = source.choice((2, 3)), source.choice((None, True)), source.random() < 0.3
        compiled = torchcompile.compile(program, backend=backend, dynamic=dynamic, options=OPTIONS.get(backend))
        for rows in (4, 5):
            inputs = lambda rows=rows: example(seed + number, rows, True)  # noqa: E731
            expected = derivatives(program, inputs(), order, linear)
            found = derivatives(compiled, inputs(), order, linear)
            compare(
                found, expected, f"seed {seed}, program {number}: {steps}, {order=}, {dynamic=}, {linear=}, {rows=}"
            )


def _branch(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = OF_ARGUMENT.apply(a) * INSIDE.apply(a * b)
    return found


def _branched(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = torch.cond(a.sum() > 0, _branch, lambda c, d: c * d, (a, b))
    return found


def _looped(a: Tensor, b: Tensor, loop: Callable[..., Any]) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = NESTED.apply(carry) * row
        return carry, carry.sin()

    found: Tensor = loop(step, b[0] * 1, a)[1]
    return found


def _loop(step: Callable[..., Any], carry: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for row in rows:
        carry, made = step(carry, row)
        found.append(made)
    return carry, torch.stack(found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("piece", "plain"),
    [(_branched, _branch), (lambda a, b: _looped(a, b, scan), lambda a, b: _looped(a, b, _loop))],
    ids=["a branch", "a loop"],
)
def test_functions_in_branches_and_loops(piece: Piece, plain: Piece, backend: str) -> None:
    """Eager has no second derivatives of these operators: they are those of what Python's own would compute."""
    seed = random.SystemRandom().randrange(1 << 30)
    for order in (1, 2, 3):
        torchcompile.reset()
        compiled = torchcompile.compile(piece, backend=backend)
        expected = derivatives(plain, example(seed, 4, True), order, False)
        compare(derivatives(compiled, example(seed, 4, True), order, False), expected, f"seed {seed}, {order=}")


def test_they_are_in_one_graph() -> None:
    for name in (
        "detaches",
        "reads what is inside",
        "turns grad mode",
        "asks for grad mode",
        "once",
        "calls functions",
    ):
        torchcompile.reset()
        derivatives(torchcompile.compile(PIECES[name], backend="aot_eager"), example(0, 4, True), 2, True)
        assert torchcompile.report().clean, name


ASKING: dict[str, Callable[[Tensor], bool]] = {
    "the gradient": lambda g: g.requires_grad,
    "a product": lambda g: (g * 2).requires_grad,
    "a sum's node": lambda g: (g + g.detach()).sum().grad_fn is not None,
    "a leaf": lambda g: not g.exp().is_leaf,
}


@pytest.mark.parametrize("asks", ASKING)
def test_a_backward_that_asks_for_its_gradients_history_runs_in_eager(asks: str) -> None:
    asking = own(lambda g, a, inner, y: g * a * (2.0 if ASKING[asks](g) else 3.0))
    piece = _of_one(asking)
    compiled = torchcompile.compile(piece, backend="aot_eager")
    for linear in (True, False):
        expected = derivatives(piece, example(0, 4, True), 2, linear)
        compare(derivatives(compiled, example(0, 4, True), 2, linear), expected, f"{linear=}")
    assert any("computes from a gradient" in str(b) for b in torchcompile.report().breaks)


class Deep(torch.autograd.Function):
    """Its backward calls a function whose backward calls it again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a)
        return a.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        found: Tensor = Deep.apply(a.exp())
        return g * found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_in_each_others_backwards_have_three_derivatives(backend: str) -> None:
    piece: Piece = lambda a, b: Deep.apply(a.exp()) * b  # noqa: E731
    for order in (1, 2, 3):
        torchcompile.reset()
        compiled = torchcompile.compile(piece, backend=backend)
        expected = derivatives(piece, example(0, 4, True), order, False)
        compare(derivatives(compiled, example(0, 4, True), order, False), expected, f"{order=}")
    found = derivatives(compiled, example(0, 4, True), 4, False)
    assert "torchcompile.disable" in str(found[-1])
