"""Programs that take derivatives and steps themselves, each made anew for each run: a table for the tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[..., Any]
BACKENDS = ["eager", "aot_eager", "inductor"]


@dataclass
class Made:
    """One run's own tensors: the step, what it is called with, whose gradients and values are compared."""

    step: Step
    leaves: Sequence[torch.Tensor]
    calls: Sequence[tuple[Any, ...]] = ((), (), ())
    optimizer: torch.optim.Optimizer | None = None
    between: Callable[[int], None] | None = None  # what happens before a call, outside of it


@dataclass(frozen=True)
class Case:
    make: Callable[[], Made]
    breaks: frozenset[str] = frozenset()
    graphs: int | None = 1  # captured in all calls, None: not counted
    again: bool = True  # whether later derivatives of the results are taken, too
    backends: Sequence[str] = field(default_factory=lambda: BACKENDS)


CASES: dict[str, Case] = {}


def case(*breaks: str, **settings: Any) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        CASES[make.__name__] = Case(make, frozenset(breaks), **settings)
        return make

    return add


def leaf(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(*sizes, dtype=torch.float64, generator=generator).requires_grad_()


def data(*sizes: int, seed: int = 1) -> torch.Tensor:
    return leaf(*sizes, seed=seed).detach()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def of(step: Step, *leaves: torch.Tensor, **more: Any) -> Made:
    return Made(step, leaves, **more)


# -- torch.autograd.grad -------------------------------------------------------------------------


@case()
def by_a_leaf() -> Made:
    w, x = leaf(3, 2), data(4, 3)
    return of(lambda: torch.autograd.grad((x @ w).tanh().sum(), w), w)


@case()
def by_an_argument() -> Made:
    w = leaf(3)
    return of(lambda x: torch.autograd.grad((x * w).sin().sum(), x)[0] * 2, w, calls=[(leaf(3),), (leaf(3, seed=4),)])


@case(graphs=2)
def by_an_argument_of_other_sizes() -> Made:
    w = leaf(1)
    calls = [(leaf(3),), (leaf(4),), (leaf(7),)]
    return of(lambda x: torch.autograd.grad((x * w).sin().sum(), [w, x]), w, calls=calls)


@case()
def by_an_argument_with_a_history() -> Made:
    w = leaf(3)
    return of(lambda x: torch.autograd.grad((x * w).sin().sum(), x)[0] * w, w, calls=[(w.sin(),), (w.exp(),)])


@case("backward")
def by_a_leaf_behind_an_argument() -> Made:
    w = leaf(3)
    return of(lambda x: torch.autograd.grad((x * w).sin().sum(), w)[0], w, calls=[(w.sin(),), (w.exp(),)])


@case("backward")
def by_two_arguments_with_histories() -> Made:
    w = leaf(3)
    x = w.sin()
    return of(lambda x, y: torch.autograd.grad((x * y).sum(), [x, y]), w, calls=[(x, x.exp())])


@case()
def by_what_was_computed() -> Made:
    w = leaf(3)

    def step() -> Any:
        y = w.sin()
        z = (y * y.exp()).sum()
        return torch.autograd.grad(z, [y], retain_graph=True)[0] * 2, z

    return of(step, w)


@case()
def freed_by_what_was_computed() -> Made:
    w = leaf(3)

    def step() -> Any:
        y = w.sin()
        z = (y * y.exp()).sum()
        return torch.autograd.grad(z, y)[0] * 2, z, y * 3

    return of(step, w)


@case()
def of_several_outputs() -> Made:
    w, v = leaf(3), leaf(3, seed=2)
    return of(lambda: torch.autograd.grad([w * v, (w + v).exp().sum()], [v, w], [torch.ones(3).double(), None]), w, v)


@case()
def by_what_is_not_used() -> Made:
    w, v = leaf(3), leaf(3, seed=2)
    return of(lambda: torch.autograd.grad(w.sin().sum(), [v, w], allow_unused=True), w, v)


@case()
def by_what_is_not_used_as_zeros() -> Made:
    w, v = leaf(3), leaf(3, seed=2)
    return of(lambda: torch.autograd.grad(w.sin().sum(), (v, w), materialize_grads=True), w, v)


@case("backward")
def by_what_is_not_used_and_has_to_be() -> Made:
    w, v = leaf(3), leaf(3, seed=2)
    return of(lambda: torch.autograd.grad(w.sin().sum(), [v, w]), w, v)


@case()
def a_penalty() -> Made:
    w, x = leaf(3, 2), data(4, 3)

    def step() -> Any:
        loss = (x @ w).tanh().square().mean()
        (slope,) = torch.autograd.grad(loss, w, create_graph=True)
        return loss + slope.square().sum()

    return of(step, w)


@case(graphs=2)
def a_penalty_by_the_input() -> Made:
    model = net()

    def step(x: torch.Tensor) -> Any:
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        loss = score + (slope.norm(dim=1) - 1).square().mean()
        loss.backward(inputs=list(model.parameters()))
        return loss.detach()

    return Made(step, list(model.parameters()), [(leaf(4, 3),), (leaf(4, 3, seed=2),)])


@case()
def three_times() -> Made:
    w = leaf(3)

    def step() -> Any:
        first = torch.autograd.grad(w.sin().exp().sum(), w, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), w, create_graph=True)[0]
        return torch.autograd.grad(second.sum(), w)[0], first

    return of(step, w)


@case()
def rows_of_a_jacobian() -> Made:
    w = leaf(3)
    rows = torch.eye(3, dtype=torch.float64)
    return of(lambda: torch.autograd.grad(w.sin() * w.sum(), w, rows, is_grads_batched=True), w)


@case()
def one_gradient_of_two() -> Made:
    w, v = leaf(3), leaf(3, seed=2)

    def step() -> Any:
        a, b = torch.autograd.grad((w + v).sin().sum(), [w, v])
        return a is b, a, b

    return of(step, w, v)


@case(graphs=2)
def an_inner_loop() -> Made:
    model = net()
    x, y = data(5, 3), data(5, 2)

    def step() -> Any:
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
            slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        outer = F.mse_loss(torch.func.functional_call(model, weights, (x * 2,)), y)
        outer.backward()
        return outer.detach()

    return Made(step, list(model.parameters()))


@case()
def by_a_leaf_of_its_own() -> Made:
    w = leaf(3)

    def step(x: torch.Tensor) -> Any:
        own = (x * w).detach().requires_grad_()
        loss = (own.sin() * w).sum()
        (slope,) = torch.autograd.grad(loss, own)
        return own.detach() + slope.sign(), slope

    return of(step, w, calls=[(data(3),), (data(3, seed=2),)])


@case()
def by_leaves_made_in_other_ways() -> Made:
    def step(x: torch.Tensor) -> Any:
        a = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        b = x.clone()
        b.requires_grad = True
        c = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(((a + b).exp() * c).sum(), [a, b, c])

    return of(step, calls=[(data(3),), (data(3, seed=2),)])


@case()
def steps_of_an_attack() -> Made:
    model, x, y = net(), data(5, 3), data(5, 2)

    def step() -> Any:
        moved = x.clone()
        for _ in range(3):
            moved = moved.detach().requires_grad_()
            loss = F.mse_loss(model(moved), y)
            loss.backward()
            moved = moved + 0.1 * moved.grad.sign()
        model.zero_grad()
        return moved.detach(), loss.detach()

    return Made(step, list(model.parameters()))


@case("leaf", graphs=None)
def a_leaf_of_its_own_is_returned() -> Made:
    w = leaf(3)

    def step(x: torch.Tensor) -> Any:
        own = (x * w).detach().requires_grad_()
        (slope,) = torch.autograd.grad((own * w).sin().sum(), own)
        return own, slope

    return of(step, w, calls=[(data(3),)])


@case()
def a_value_of_its_own_leaf_is_returned() -> Made:
    w = leaf(3)

    def step(x: torch.Tensor) -> Any:
        own = (x * w).detach().requires_grad_()
        value = (own * w).sin().sum()
        (slope,) = torch.autograd.grad(value, own, retain_graph=True)
        return value, slope

    return of(step, w, calls=[(data(3),)])


@case("leaf", graphs=None)
def an_input_is_written_with_its_own_leaf() -> Made:
    w = leaf(3)

    def step(x: torch.Tensor) -> Any:
        own = torch.ones(3, dtype=torch.float64, requires_grad=True)
        x.mul_(own)
        return torch.autograd.grad(x.sum(), own, retain_graph=True)

    return of(step, w, calls=[(data(3),)])


# -- backward ------------------------------------------------------------------------------------


@case(graphs=2)
def plain_backward() -> Made:
    model, x = net(), data(5, 3)

    def step() -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Made(step, list(model.parameters()))


@case(graphs=2)
def two_batches() -> Made:
    model, x = net(), data(5, 3)

    def step() -> Any:
        model.zero_grad()
        for part in (x, x * 2):
            (model(part).square().mean() / 2).backward()
        return [p.grad * 2 for p in model.parameters()]

    return Made(step, list(model.parameters()))


@case(graphs=2)
def a_gradient_is_given() -> Made:
    w, v = leaf(3), data(3)
    return of(lambda: torch.autograd.backward([w * 2, w.sin()], [v, v * 3]), w)


@case(graphs=2)
def the_given_gradient_itself() -> Made:
    w, v = leaf(2, 2), data(2, 2)

    def step() -> Any:
        (w + 1).backward(v)
        return v

    return of(step, w)


@case(graphs=2)
def a_view_of_the_given_gradient() -> Made:
    w = leaf(4)

    def step(v: torch.Tensor) -> Any:
        w.view(2, 2).backward(v)

    return of(step, w, calls=[(data(2, 2),), (data(2, 2, seed=5),)])


@case(graphs=2)
def shared_by_two_leaves() -> Made:
    w, v = leaf(3), leaf(3, seed=2)
    return of(lambda: (w + v).sin().sum().backward(), w, v)


@case(graphs=2)
def shared_by_a_view() -> Made:
    w, v = leaf(4), leaf(2, 2, seed=2)
    return of(lambda: (w.view(2, 2) + v).sin().sum().backward(), w, v)


@case("overlapping_inputs")  # of the second call: what it adds to
def shared_by_two_views() -> Made:
    w, v = leaf(4), leaf(4, seed=2)
    return of(lambda: (w.view(2, 2) + v.view(2, 2)).sin().sum().backward(), w, v)


@case("overlapping_inputs")  # of the second call: what it adds to
def shared_by_two_views_and_a_leaf() -> Made:
    w, v, u = leaf(4), leaf(4, seed=2), leaf(2, 2, seed=3)
    return of(lambda: (w.view(2, 2) + v.view(2, 2) + u + u).backward(torch.ones(2, 2).double()), w, v, u)


@case(graphs=2)
def parts_of_one() -> Made:
    w, v = leaf(3), leaf(2, seed=2)
    return of(lambda: torch.cat([w, v]).sin().sum().backward(), w, v)


@case(graphs=2)
def expanded() -> Made:
    w, v = leaf(3), leaf(3, 1, seed=2)
    return of(lambda: (w.sum() + v.expand(3, 4).sum()).backward(), w, v)


@case(graphs=2)
def strides_of_the_leaf() -> Made:
    w = leaf(3, 4).detach().t().requires_grad_()
    image = data(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    gaps = data(6, 4)[:, ::2].requires_grad_()
    return of(lambda: ((w * 2).sin().sum() + image.mean() + (gaps * gaps).sum()).backward(), w, image, gaps)


@case(graphs=2)
def used_twice_or_not() -> Made:
    w, v, frozen = leaf(3), leaf(3, seed=2), data(3)
    return of(lambda: (w * w.sin() * frozen).sum().backward(), w, v, frozen)


@case(graphs=2)
def by_named_leaves() -> Made:
    w, v = leaf(3), leaf(3, seed=2)
    return of(lambda: (w * v).sum().backward(inputs=[v]), w, v)


@case(graphs=2)
def kept_and_run_again() -> Made:
    w = leaf(3)

    def step() -> Any:
        loss = w.sin().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss, w.grad * 1

    return of(step, w)


@case("backward")
def run_again() -> Made:
    w = leaf(3)

    def step() -> Any:
        loss = w.sin().sum()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)[:40]

    return of(step, w)


@case(graphs=2)
def a_history_that_is_not_freed() -> Made:
    w = leaf(3)

    def step() -> Any:
        loss = (w + 1).sum()
        loss.backward()
        return loss

    return of(step, w)


@case(graphs=2)
def under_no_grad() -> Made:
    w = leaf(3)

    def step() -> Any:
        loss = w.sin().sum()
        with torch.no_grad():
            loss.backward()
            w.sub_(w.grad, alpha=0.1)
        return loss.detach()

    return of(step, w)


@case()
def in_a_block_with_grad_mode() -> Made:
    w = leaf(3)

    @torch.no_grad()
    def step() -> Any:
        with torch.enable_grad():
            loss = w.sin().sum()
        loss.backward()
        w.add_(w.grad, alpha=-0.1)
        w.grad = None
        return loss

    return of(step, w)


@case("backward")
def of_no_scalar() -> Made:
    w = leaf(3)
    return of(lambda: w.sin().backward(), w)


@case("backward")
def of_no_history() -> Made:
    w = leaf(3)
    return of(lambda: w.detach().sum().backward(), w)


@case(graphs=2)
def gradients_are_changed() -> Made:
    w, v = leaf(3), leaf(2, seed=3)

    def step() -> Any:
        (w.sin().sum() + v.exp().sum()).backward()
        w.grad.mul_(0.5)
        v.grad = v.grad * 2
        return w.grad.norm(), v.grad

    return of(step, w, v)


@case()
def gradients_are_dropped() -> Made:
    w = leaf(3)

    def step() -> Any:
        w.sin().sum().backward()
        kept, w.grad = w.grad, None
        (w * 2).sum().backward()
        w.grad = None
        return kept

    return of(step, w)


@case()
def gradients_that_overlap() -> Made:
    w, v = leaf(3), leaf(3, seed=2)

    def between(number: int) -> None:
        w.grad = data(3)
        v.grad = w.grad

    return of(lambda: (w * v).sum().backward(), w, v, between=between)


@case(graphs=1)
def a_leaf_is_written_first() -> Made:
    w = leaf(3)

    def step() -> Any:
        with torch.no_grad():
            w.mul_(0.5)
        w.sin().sum().backward()
        g, w.grad = w.grad, None
        return g

    return of(step, w)


@case(graphs=1)
def by_leaves_with_buffers() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def step(x: torch.Tensor) -> Any:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), [b.clone() for b in model.buffers()]

    def between(number: int) -> None:
        model.zero_grad()

    return Made(step, list(model.parameters()), [(data(5, 3),), (data(5, 3, seed=7),)], between=between)


@case(graphs=1)
def under_a_checkpoint() -> Made:
    model, x = net(), data(5, 3)

    def step() -> Any:
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads

    return Made(step, list(model.parameters()))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0] * 3  # which is not the derivative


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float) -> Any:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor, x.argmax()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad * w * ctx.factor, grad * x * ctx.factor if ctx.needs_input_grad[1] else None, None


@case(graphs=2)
def through_a_function() -> Made:
    w = leaf(3)
    return of(lambda: Doubled.apply(w.sin()).sum().backward(), w)


@case(graphs=2)
def through_functions_that_hand_on() -> Made:
    """One gradient for both leaves: autograd copies it for the first of them."""
    w, v = leaf(3), leaf(3, seed=4)
    return of(lambda: (Straight.apply(w * 1.0) * Straight.apply(v)).sum().backward(), w, v)


@case(graphs=2)
def through_functions_that_hand_on_one() -> Made:
    w, v = leaf(3), leaf(3, seed=4)
    return of(lambda: (Straight.apply(w) + Straight.apply(v)).sin().sum().backward(), w, v)


@case(graphs=2)
def through_a_function_of_several() -> Made:
    w, v = leaf(3), leaf(3, seed=4)

    def step() -> Any:
        value, place = Scaled.apply(w.exp(), v, 2.0)
        (value.sin() * w).sum().backward()
        return place

    return of(step, w, v)


@case()
def twice_through_a_function() -> Made:
    w = leaf(3)

    def step() -> Any:
        (slope,) = torch.autograd.grad(Doubled.apply(w.sin()).sum(), w, create_graph=True)
        return torch.autograd.grad(slope.sum(), w)

    return of(step, w)


@case()
def through_a_transform() -> Made:
    w = leaf(3)

    def step() -> Any:
        slope = torch.func.grad(lambda v: v.sin().sum())(w)
        return torch.autograd.grad(slope.sum(), w)

    return of(step, w)


@case(graphs=2, backends=["eager", "aot_eager"])
def with_dropout() -> Made:
    w, x = leaf(6, 5), data(8, 6)

    def step() -> Any:
        hidden = F.dropout(x @ w, 0.5)
        loss = checkpoint(lambda h: F.dropout(h.sin(), 0.3).square().mean(), hidden, use_reentrant=False)
        loss.backward()
        return loss.detach(), torch.rand(2)

    return of(step, w, between=lambda number: torch.manual_seed(number))  # type: ignore[arg-type, return-value]


@case(graphs=2, backends=["eager", "aot_eager"])
def under_autocast() -> Made:
    w, x = leaf(8, 8).detach().float().requires_grad_(), data(8, 8).float()

    def step() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            ((x @ w) @ w).float().sin().sum().backward()
        return w.grad.dtype

    return of(step, w)


@case(graphs=2)
def into_indices() -> Made:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3).double()
    bag = torch.tensor([[1, 2, 2], [0, 6, 1]])

    def step() -> Any:
        out = table(bag).sum(1)
        top, _ = out.sort(dim=1)
        (top[:, 1:] * out.gather(1, bag[:, :2] % 3)).sum().backward()

    return Made(step, list(table.parameters()))


@case(graphs=2, backends=["eager"])  # others conjugate lazily where eager does not
def complex_leaves() -> Made:
    w = torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return of(lambda: (w.exp() * w.conj()).abs().sum().backward(), w)


@case(graphs=2)
def two_losses_of_one_forward() -> Made:
    w = leaf(3)

    def step() -> Any:
        hidden = w.sin()
        first, second = hidden.exp().sum(), (hidden * hidden).sum()
        first.backward(retain_graph=True)
        second.backward()
        return first, second

    return of(step, w)


@case(graphs=2)
def under_a_checkpoint_that_reenters() -> Made:
    w = leaf(3)
    return of(lambda: checkpoint(lambda x: x.sin().exp(), w * 2, use_reentrant=True).sum().backward(), w)


@case(graphs=2)
def batches_of_other_sizes() -> Made:
    made = steps(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), clip=0.5)
    made.calls = [(data(n, 3), data(n, 2)) for n in (4, 5, 7, 9, 4)]
    return made


@case("exception", graphs=None)
def a_raise_behind_it() -> Made:
    w = leaf(3)

    def step() -> Any:
        w.sin().sum().backward()
        raise ValueError("not today")

    return of(step, w)


@case("graph_raised", graphs=None)
def an_operator_raises_behind_it() -> Made:
    w = leaf(3, 3)

    def between(number: int) -> None:
        w.grad = None

    def step() -> Any:
        w.sin().sum().backward()
        return torch.linalg.cholesky(-torch.eye(3).double() + 0 * w.detach()).sum()

    return of(step, w, between=between)


@case("tensor_hook", "backward", graphs=None)
def an_intermediate_that_keeps_its_gradient() -> Made:
    w = leaf(3)

    def step() -> Any:
        y = w.sin()
        y.retain_grad()
        y.exp().sum().backward()
        return y.grad

    return of(step, w)


@case("tensor_hook", "library_code", "backward", graphs=None)
def a_hook_before_a_backward() -> Made:
    """The hook is of a backward that the program runs in the same call."""
    w = leaf(3)

    def step() -> Any:
        y = w.sin()
        y.register_hook(lambda gradient: gradient * 2)
        y.exp().sum().backward()
        return w.grad.clone()  # type: ignore[union-attr]

    return of(step, w)


# -- what the engine would meet outside of the graph --------------------------------------------


@case("backward")
def a_history_outside() -> Made:
    w = leaf(3)
    made = of(lambda x: (x * 2).sum().backward(), w)
    made.calls = [(w.sin(),), (w.exp(),)]
    return made


@case("backward")
def a_hook_of_a_leaf() -> Made:
    w = leaf(3)
    w.register_hook(lambda grad: grad * 2)
    return of(lambda: w.sin().sum().backward(), w)


@case("backward")
def a_hook_of_an_argument() -> Made:
    w = leaf(3)
    x = w * 1
    x.register_hook(lambda grad: grad * 2)
    return of(lambda x: torch.autograd.grad(x.sin().sum(), x), w, calls=[(x,)])


@case("backward")
def an_argument_that_keeps_its_gradient() -> Made:
    w = leaf(3)
    x = w * 1
    x.retain_grad()

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(x.sin().sum(), x), x.grad

    return of(step, w, calls=[(x,)])


@case("backward")
def a_hook_behind_accumulation() -> Made:
    w, seen = leaf(3), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def step() -> Any:
        w.sin().sum().backward()
        return list(seen)

    return of(step, w)


@case("backward", "c_function")
def a_hook_of_what_accumulates() -> Made:
    w, seen = leaf(3), []
    node = w.view_as(w).grad_fn.next_functions[0][0]
    node.register_hook(lambda *grads: seen.append(1))

    def step() -> Any:
        w.sin().sum().backward()
        return len(seen), node.name()

    return of(step, w)


@case("backward", graphs=None)
def a_hook_that_comes_later() -> Made:
    w = leaf(3)

    def between(number: int) -> None:
        w.grad = None
        if number == 1:
            w.register_hook(lambda grad: grad * 2)

    return of(lambda: w.sin().sum().backward(), w, between=between)


@case("backward", "ambient_state", "library_code")
def in_anomaly_mode() -> Made:
    w = leaf(3)

    def step() -> Any:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            w.sin().sum().backward()

    return of(step, w)


@case()
def with_a_history_of_gradients() -> Made:
    w = leaf(3)

    def step() -> Any:
        w.sin().sum().backward(create_graph=True)
        g, w.grad = w.grad, None
        return g.sum()

    return of(step, w)


# -- steps ---------------------------------------------------------------------------------------


def steps(make: Callable[..., torch.optim.Optimizer], clip: float = 0.0, to_none: bool = True, every: int = 1) -> Made:
    model = net()
    optimizer = make(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=to_none)
        total = 0.0
        for part in range(every):
            loss = F.mse_loss(model(x * (1 + part)), y) / every
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
        optimizer.step()
        return total, norm

    calls = [(data(5, 3, seed=n), data(5, 2, seed=n)) for n in range(4)]
    return Made(step, list(model.parameters()), calls, optimizer)


@case(graphs=2)
def sgd() -> Made:
    return steps(lambda p: torch.optim.SGD(p, 0.1))


@case(graphs=2)
def sgd_with_momentum() -> Made:
    return steps(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), every=2)


@case(graphs=2)
def sgd_zeroing() -> Made:
    return steps(lambda p: torch.optim.SGD(p, 0.1), to_none=False)


@case(graphs=2)
def adamw_clipped() -> Made:
    return steps(lambda p: torch.optim.AdamW(p, 0.1, foreach=False), clip=0.1)


@case(graphs=2)
def adam_over_lists() -> Made:
    return steps(lambda p: torch.optim.Adam(p, 0.1, foreach=True), clip=0.1)


@case("tensor_to_number", graphs=None)
def scaled() -> Made:
    """The third batch is infinite: no step, and half the scale; the scale doubles after two steps without."""
    made = steps(lambda p: torch.optim.SGD(p, 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    (model,) = (cell.cell_contents for cell in made.step.__closure__ or () if isinstance(cell.cell_contents, nn.Module))
    optimizer = made.optimizer
    assert optimizer is not None

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), norm, scaler.state_dict(), scaler._scale

    calls = [(data(5, 3, seed=n), data(5, 2, seed=n) * (float("inf") if n == 2 else 1)) for n in range(6)]
    return Made(step, made.leaves, calls, optimizer)


# The search looks at its losses.
@case("data_dependent_branch", "library_code", graphs=None)
def by_a_closure() -> Made:
    made = steps(lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3))
    (model,) = (cell.cell_contents for cell in made.step.__closure__ or () if isinstance(cell.cell_contents, nn.Module))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> Any:
            made.optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return made.optimizer.step(closure)

    return Made(step, made.leaves, made.calls)


@case(graphs=2)
def with_a_frozen_layer() -> Made:
    made = steps(lambda p: torch.optim.SGD(p, 0.1))
    made.leaves[0].requires_grad_(False)
    return made


# -- drawn ---------------------------------------------------------------------------------------

_OPERATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda x, y: x.reshape(-1),
    lambda x, y: x.reshape(-1)[:4].reshape(2, 2) if x.numel() >= 4 else x.sin(),
    lambda x, y: x.t() if x.dim() <= 2 else x,
    lambda x, y: x.view_as(x),
    lambda x, y: x.reshape(-1)[1:],
    lambda x, y: x.reshape(-1)[:1].expand(4),
    lambda x, y: x + y if x.shape == y.shape else x + 0,
    lambda x, y: x.reshape(-1) + y.reshape(-1) if x.numel() == y.numel() else x.exp(),
    lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    lambda x, y: x * y if x.shape == y.shape else x * 3,
    lambda x, y: x.detach() * y.sum(),
    lambda x, y: Straight.apply(x),
)


def drawn(seed: int) -> Made:
    """A program of views and sums, whose leaves are handed one gradient, parts of it and views of it."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [draw.choice([(4,), (2, 2), (4, 1), (1, 4)]) for _ in range(draw.randint(1, 3))]
    leaves = [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    if draw.random() < 0.3:
        leaves[0] = leaves[0].detach().reshape(2, 2).t().requires_grad_()
    for one in leaves:
        one.grad = torch.ones_like(one).detach() if draw.random() < 0.4 else None
    plan = [(draw.choice(_OPERATIONS), draw.random(), draw.random()) for _ in range(draw.randint(2, 6))]
    given, twice, keep, named = (draw.random() < chance for chance in (0.4, 0.4, 0.3, 0.3))
    inputs = leaves if named else None

    def step() -> Any:
        values = list(leaves)
        for operation, first, second in plan:
            values.append(operation(values[int(first * len(values))], values[int(second * len(values))]))
        results = [value for value in values[-2:] if value.requires_grad]
        retain = keep or twice
        if given:
            torch.autograd.backward(results, [torch.ones_like(r) for r in results], retain_graph=retain, inputs=inputs)
        else:
            sum(r.sum() for r in results).backward(retain_graph=retain, inputs=inputs)  # type: ignore[union-attr]
        if twice:
            results[0].sum().backward(retain_graph=keep)
        return results

    return Made(step, leaves)
