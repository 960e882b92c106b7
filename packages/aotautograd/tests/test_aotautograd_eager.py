"""Autograd as eager: each thing that a caller may rely on, as one program run eagerly and compiled."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from aotautograd import aot_function, default_partition, min_cut, partition, trace_joint

Program = Callable[..., Any]
Pair = namedtuple("Pair", ["first", "second"])


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def leaf(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def described(value: Any) -> Any:
    """A value with tensors as nested lists and what a caller can ask of them."""
    if isinstance(value, torch.Tensor):
        return (value.detach(), value.dtype, value.stride(), value.requires_grad, value.grad_fn is not None)
    return value


def same(a: Any, b: Any) -> None:
    leaves_a, structure_a = pytree.tree_flatten(a)
    leaves_b, structure_b = pytree.tree_flatten(b)
    assert structure_a == structure_b
    for x, y in zip(map(described, leaves_a), map(described, leaves_b), strict=True):
        if isinstance(x, tuple):
            assert x[1:] == y[1:]
            torch.testing.assert_close(y[0], x[0])
        else:
            assert type(x) is type(y)
            assert x == y


def check(program: Program, body: Callable[[Program], Any], **options: Any) -> None:
    """`body` uses the program as a caller does, and says what it saw."""
    seen = []
    for function in (program, aot_function(program, fw_compiler=identity, **options)):
        torch.manual_seed(0)
        seen.append(body(function))
    same(*seen)


def linear(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return (x @ w).sin(), (x @ v).cos(), x * 2


def test_several_outputs_some_without_gradient() -> None:
    def body(f: Program) -> Any:
        x, w, v = leaf(3, 3, grad=False), leaf(3, 3), leaf(3, 3)
        a, b, c = f(x, w, v)
        (a * b).sum().backward()
        return a, b, c, w.grad, v.grad

    check(linear, body)


def test_unused_parameters_keep_none() -> None:
    def body(f: Program) -> Any:
        x, w, v, unused = leaf(3, 3), leaf(3, 3), leaf(3, 3), leaf(3)
        f(x, w, v, unused)[0].sum().backward()
        return x.grad, w.grad, v.grad, unused.grad

    check(lambda x, w, v, unused: linear(x, w, v), body)


def test_frozen_parameters_keep_none() -> None:
    def body(f: Program) -> Any:
        x, w, v = leaf(3, 3, grad=False), leaf(3, 3, grad=False), leaf(3, 3)
        a, b, _ = f(x, w, v)
        b.sum().backward()
        first = (a.requires_grad, w.grad, v.grad)
        w.requires_grad_(), v.requires_grad_(False)  # thawed and frozen between two calls
        v.grad = None
        a, b, _ = f(x, w, v)
        a.sum().backward()
        return first, b.requires_grad, w.grad, v.grad

    check(linear, body)


def test_accumulation_into_existing_gradients() -> None:
    def body(f: Program) -> Any:
        x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)
        w.grad = given = torch.ones(3, 3, dtype=torch.float64)
        for _ in range(3):
            sum(o.sum() for o in f(x, w, v)).backward()
        return x.grad, w.grad, v.grad, w.grad is given

    check(linear, body)


def test_retain_graph() -> None:
    def body(f: Program) -> Any:
        x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)
        a, b, c = f(x, w, v)
        (a * b * c).sum().backward(retain_graph=True)
        c.sum().backward(retain_graph=True)
        (a + b).sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            (a + b).sum().backward()
        return x.grad, w.grad, v.grad

    check(linear, body)


def test_hooks_on_tensors_and_parameters() -> None:
    def body(f: Program) -> Any:
        log: list[torch.Tensor] = []
        x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)
        w.register_hook(lambda g: log.append(g.clone()) or g * 2)
        inner = v * 1
        inner.register_hook(lambda g: log.append(g.clone()) or g * 5)
        inner.retain_grad()
        a, b, c = f(x, w, inner)
        a.register_hook(lambda g: log.append(g.clone()) or g * 3)
        handle = b.register_hook(lambda g: log.append(g.clone()))
        handle.remove()
        (a * b * c).sum().backward()
        return sorted(float(g.sum()) for g in log), x.grad, w.grad, v.grad, inner.grad

    check(linear, body)


def test_hooks_after_accumulation() -> None:
    def body(f: Program) -> Any:
        x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)
        log: list[torch.Tensor] = []

        def step(p: torch.Tensor) -> None:
            log.append(p.grad.clone())
            with torch.no_grad():
                p -= 0.1 * p.grad  # an optimizer in the backward
            p.grad = None

        w.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            sum(o.sum() for o in f(x, w, v)).backward()
        return log, w, w.grad, v.grad

    check(linear, body)


def test_hooks_inside_of_the_program() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return y.exp()

    def body(f: Program) -> Any:
        x = leaf(3, 3)
        f(x).sum().backward()
        return x.grad

    check(program, body)


class Scaled(torch.autograd.Function):
    """Its backward is not the derivative of its forward, takes a number, and gives None for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x.exp(), sign

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos() * ctx.factor, None


def test_custom_function_is_traced_in_both_directions() -> None:
    def program(x: torch.Tensor) -> Any:
        value, sign = Scaled.apply(x * 2, 3.0)
        return value, sign

    def body(f: Program) -> Any:
        x = leaf(3, 3)
        value, sign = f(x)
        value.sum().backward()
        return value, sign, x.grad

    check(program, body)
    joint = trace_joint(program, [leaf(3, 3)])
    names = [str(n.target) for n in joint.module.graph.nodes]
    assert "aten.exp.default" in names
    assert "aten.cos.default" in names


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_saves_no_activations(reentrant: bool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(lambda a: (a @ w).tanh().sin().exp(), x, use_reentrant=reentrant)
        return x.sum()

    def body(f: Program) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        f(x, w).backward()
        return x.grad, w.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(program, body)
        for strategy in (default_partition, min_cut()):
            report = partition(trace_joint(program, [leaf(3, 3), leaf(3, 3)]), strategy).report
            assert report.tensors - report.input_tensors <= 2  # what stands between the regions


def layers(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.softmax(x @ w, -1), (x @ w).exp()


def layers_under_autocast(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
    return y, z, F.softmax(y, -1)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("program", [layers, layers_under_autocast])
def test_autocast_inside_and_outside(program: Program, outside: bool) -> None:
    def body(f: Program) -> Any:
        x, w = leaf(4, 4, dtype=torch.float32), leaf(4, 4, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            outputs = f(x, w)
            loss = sum(o.float().square().sum() for o in outputs)
        loss.backward()
        return outputs, x.grad, w.grad

    check(program, body)


def test_autocast_may_change_between_calls() -> None:
    def body(f: Program) -> Any:
        x, w = leaf(4, 4, dtype=torch.float32), leaf(4, 4, dtype=torch.float32)
        seen = []
        for enabled in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                seen.append(f(x, w))
        return seen

    check(layers, body)


def test_anomaly_mode_finds_the_call() -> None:
    def body(f: Program) -> Any:
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        with torch.autograd.detect_anomaly():
            out = f(x)
            with pytest.raises(RuntimeError, match="returned nan values"):
                out.sum().backward()
            good = f(x.detach().add(1).requires_grad_())
            good.sum().backward()
        return good

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(lambda x: x.sqrt() * 0, body)


def test_nested_outputs_none_and_what_is_no_tensor() -> None:
    def program(x: torch.Tensor, options: dict[str, Any]) -> Any:
        y = x * options["scale"]
        return {"all": [y, None, (y.sum(), "text", 3)], "pair": Pair(y[0], options["flag"]), "shape": tuple(y.shape)}

    def body(f: Program) -> Any:
        x, scale = leaf(3, 3), leaf(1)
        out = f(x, {"scale": scale, "flag": True})
        (out["all"][2][0] + out["pair"].first.sum()).backward()
        return out, x.grad, scale.grad

    check(program, body)


def test_complex() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x @ w.conj()
        return y.abs(), torch.view_as_real(y), y.real, torch.fft.fft(y), y.mT.conj()

    def body(f: Program) -> Any:
        x, w = leaf(3, 3, dtype=torch.complex128), leaf(3, 3, dtype=torch.complex128)
        outputs = f(x, w)
        sum(torch.view_as_real(o.resolve_conj()).sum() if o.is_complex() else o.sum() for o in outputs).backward()
        return [o.resolve_conj() for o in outputs], x.grad.resolve_conj(), w.grad.resolve_conj()

    check(program, body)


def test_integer_and_boolean_inputs() -> None:
    def program(table: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, small: torch.Tensor) -> Any:
        rows = F.embedding(ids, table)
        return torch.where(mask[:, None], rows, -rows), ids + small, mask & (small > 0), rows * small[:, None]

    def body(f: Program) -> Any:
        table = leaf(5, 3)
        ids, mask = torch.tensor([0, 4, 0]), torch.tensor([True, False, True])
        outputs = f(table, ids, mask, torch.tensor([1, 0, 2], dtype=torch.int8))
        (outputs[0].exp() + outputs[3]).sum().backward()
        return outputs, table.grad

    check(program, body)


@pytest.mark.parametrize("decompositions", [None, "prims"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_derivatives_of_any_order(order: int, decompositions: Any) -> None:
    def body(f: Program) -> Any:
        x, w = leaf(3, 3), leaf(3, 3)
        value = f(x, w)
        found = []
        for _ in range(order):
            gradients = torch.autograd.grad(value, (x, w), create_graph=True)
            found += gradients
            value = sum(g.sin().sum() for g in gradients)
        value.backward()
        return found, x.grad, w.grad

    check(lambda x, w: (torch.tanh(x @ w) * x).sum(), body, decompositions=decompositions)


def test_gradient_penalty_and_hessian_vector_product() -> None:
    def body(f: Program) -> Any:
        x, w = leaf(4, 3), leaf(3, 3)
        out = f(x, w)
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        (out + (g.norm(dim=1) - 1).square().mean()).backward()
        vector = torch.ones(3, 3, dtype=torch.float64)
        (first,) = torch.autograd.grad(f(x, w), w, create_graph=True)
        product = torch.autograd.grad((first * vector).sum(), w)
        return x.grad, w.grad, product

    check(lambda x, w: F.softplus(x @ w).pow(2).sum(), body)
