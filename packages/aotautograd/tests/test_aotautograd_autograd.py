"""What autograd promises of a program holds for its compiled form, and bad programs raise what eager raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from aotautograd import AotAutogradError, aot_function, aot_module, default_partition, partition, trace_joint

Program = Callable[..., Any]


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def leaf(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def result(body: Callable[[Program], Any], program: Program) -> Any:
    torch.manual_seed(0)
    try:
        return body(program)
    except Exception as error:
        return ("raises", type(error), str(error).splitlines()[0][:60])


def check(program: Program, body: Callable[[Program], Any]) -> None:
    eager = result(body, program)
    ours = result(body, aot_function(program, fw_compiler=identity))
    assert same(eager, ours), f"{ours} instead of {eager}"


def two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return (x @ w).sin(), (x @ v).cos()


def weights(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return leaf(3, 3, grad=False), leaf(3, 3), leaf(3, 3, **kwargs)


def one_output_unused(f: Program) -> Any:
    x, w, v = weights()
    f(x, w, v)[0].sum().backward()
    return w.grad, v.grad


def retained(f: Program) -> Any:
    x, w, v = weights()
    a, b = f(x, w, v)
    (a.t() * b).sum().backward(retain_graph=True)
    first = w.grad.clone()
    (a.sum() + b.sum()).backward()
    return first, w.grad, v.grad


def twice(f: Program) -> Any:
    x, w, v = weights()
    a, _ = f(x, w, v)
    a.sum().backward()
    a.sum().backward()


def hooks(f: Program) -> Any:
    x, w, v = weights()
    log: list[torch.Tensor] = []
    w.register_hook(lambda g: log.append(g.clone()) or g * 2)
    v.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
    a, b = f(x, w, v)
    a.register_hook(lambda g: log.append(g.clone()) or g * 3)
    (a * b).sum().backward()
    return sorted(g.sum().item() for g in log), w.grad, v.grad


def frozen(f: Program) -> Any:
    x, w, v = weights(grad=False)
    a, b = f(x, w, v)
    return a.requires_grad, b.requires_grad, b.grad_fn is None


def weight_modified(f: Program) -> Any:
    x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)
    a, b = f(x, w, v)
    with torch.no_grad():
        w.mul_(2)
    (a + b).sum().backward()


def output_modified(f: Program) -> Any:
    x, w, v = leaf(3, 3), leaf(3, 3), leaf(3, 3)
    a, b = f(x, w, v)
    a.mul_(2)
    (a + b).sum().backward()
    return w.grad


def accumulated(f: Program) -> Any:
    x, w, v = weights()
    for _ in range(3):
        a, b = f(x, w, v)
        (a * b).sum().backward()
    return w.grad, v.grad


def only_some(f: Program) -> Any:
    x, w, v = weights()
    a, b = f(x, w, v)
    first = torch.autograd.grad((a * b).sum(), [w], retain_graph=True)
    second = torch.autograd.grad(a.sum(), [w, v], allow_unused=True)
    return first, second[0], second[1] is None


def inference_mode(f: Program) -> Any:
    with torch.inference_mode():
        a, b = f(*weights())
        return a, b, a.is_inference(), a.requires_grad


@pytest.mark.parametrize(
    "body",
    [one_output_unused, retained, twice, hooks, frozen, weight_modified, output_modified, accumulated, only_some,
     inference_mode],
)  # fmt: skip
def test_two_outputs(body: Callable[[Program], Any]) -> None:
    check(two, body)


def by_input(*make: Callable[[], torch.Tensor]) -> Callable[[Program], Any]:
    """Gradients by every input of the sum of all outputs."""

    def body(f: Program) -> Any:
        inputs = [m() for m in make]
        outputs = f(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(torch.view_as_real(o).sum() if o.is_complex() else o.sum() for o in outputs if o.requires_grad).backward()
        return [o.detach() for o in outputs], [t.grad for t in inputs if t.is_leaf]

    return body


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0] * 3  # not the derivative of exp: this one must be used


def view_written_by_caller(f: Program) -> Any:
    x = leaf(3, 3)
    y = f(x)
    y.mul_(2)
    y.sum().backward()
    return x.grad


def test_output_that_is_a_view_may_be_written() -> None:
    check(lambda x: (x * 2).view(-1), view_written_by_caller)


def test_saved_output_may_not() -> None:
    check(lambda x: x.tanh(), view_written_by_caller)


def test_custom_function() -> None:
    check(lambda x: Cubed.apply(x * 2), by_input(lambda: leaf(3, 3)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda a: (a @ w).tanh().sin(), x, use_reentrant=reentrant) * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(program, by_input(lambda: leaf(3, 3), lambda: leaf(3, 3)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_its_mask_once(reentrant: bool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def layer(a: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout((a @ w).tanh(), 0.5).sin() * torch.rand_like(a)

        for _ in range(2):
            x = checkpoint(layer, torch.nn.functional.dropout(x), use_reentrant=reentrant)
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(program, by_input(lambda: leaf(3, 3), lambda: leaf(3, 3)))


def test_activations_of_a_checkpoint_are_not_kept() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(lambda a: torch.dropout((a @ w).tanh().sin().exp(), 0.5, True), x, use_reentrant=False)
        return x.sum()

    inputs = [leaf(3, 3), leaf(3, 3)]
    state = torch.get_rng_state()
    report = partition(trace_joint(program, inputs), default_partition).report
    assert report.tensors - report.input_tensors == 3 + 2, "three masks and the two borders between the regions"
    assert torch.equal(state, torch.get_rng_state()), "tracing draws nothing"


def test_complex() -> None:
    def program(x: torch.Tensor) -> Any:
        return x * x.conj(), torch.view_as_real(x * 2j), x.abs(), x.real

    def conjugate_tangent(f: Program) -> Any:
        x = leaf(3, dtype=torch.complex128)
        y = f(x.conj())[0]
        y.backward(torch.randn_like(y).conj())
        return x.grad

    check(program, by_input(lambda: leaf(3, dtype=torch.complex128)))
    check(program, conjugate_tangent)


def test_a_tangent_without_memory() -> None:
    """Forward-mode formulas hand out zeros that have none."""

    def body(f: Program) -> Any:
        x = leaf(3, 3)
        f(x)[0].backward(torch._efficientzerotensor((3, 3), dtype=x.dtype))
        return x.grad

    def reading_memory(graph: Any, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            assert not any(isinstance(value, torch.Tensor) and value._is_zerotensor() for value in given)
            return graph.forward(*given)

        return run

    check(lambda x: (x.sin() * 2,), body)
    x = leaf(3, 3)
    aot_function(lambda x: x.sin() * 2, fw_compiler=reading_memory)(x).backward(
        torch._efficientzerotensor((3, 3), dtype=x.dtype)
    )
    assert x.grad is not None and not x.grad.any()


def test_expanded_tangent() -> None:
    def body(f: Program) -> Any:
        x = leaf(3, 3)
        f(x).backward(torch.ones(1, dtype=torch.float64).expand(3, 3))
        return x.grad

    check(lambda x: x.sin(), body)


def test_anomaly_mode() -> None:
    def body(f: Program) -> Any:
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        f(x).sum().backward()
        return x.grad

    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        check(lambda x: x.exp(), body)
        with pytest.raises(RuntimeError, match="returned nan values"):
            body(aot_function(lambda x: x.sqrt() * 0, fw_compiler=identity))


@pytest.mark.parametrize(
    ("program", "make"),
    [
        (lambda x: x.add_(1), lambda: leaf(3, 3)),
        (lambda x: x.add_(1), lambda: leaf(3, 3)[0]),
        (lambda x: (x * 1).resize_(2, 2), lambda: leaf(3, 3)),
        (lambda x: x.expand(3, 3).add_(1), lambda: leaf(3, 1, grad=False)),
        (lambda x: x.expand(3, 3).__setitem__((slice(None), 0), 1.0), lambda: leaf(1, 3, grad=False)),
        (lambda x: x.add_(1), lambda: leaf(3, 1, grad=False).expand(3, 3)),
    ],
)
def test_bad_programs_raise_as_eager(program: Program, make: Callable[[], torch.Tensor]) -> None:
    check(program, lambda f: f(make()))


def assign_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.data = y.data
    return x * 2


@pytest.mark.parametrize("program", [lambda x, y: x.resize_(2, 2), lambda x, y: x.set_(y), assign_data])
def test_refused(program: Program) -> None:
    with pytest.raises(AotAutogradError):
        aot_function(program, fw_compiler=identity)(torch.randn(3, 3), torch.randn(3, 3))


OVERLAPS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "the same": lambda: (lambda b: [b, b])(leaf(4, 4, grad=False)),
    "rows": lambda: (lambda b: [b[:2], b[1:3]])(leaf(4, 4, grad=False)),
    "interleaved": lambda: (lambda b: [b[::2], b[1::2]])(leaf(4, 4, grad=False)),
    "data": lambda: (lambda b: [b, b.data])(leaf(4, 4, grad=False)),
    "transposed": lambda: (lambda b: [b, b.t()])(leaf(4, 4) * 1),
    "rows with history": lambda: (lambda b: [b[:2], b[1:3]])(leaf(4, 4) * 1),
    "leaf": lambda: (lambda b: [b, b])(leaf(4, 4)),
}


def write_both(x: torch.Tensor, y: torch.Tensor) -> Any:
    y.mul_(2)
    x[0].add_(1)
    return y.sum() + x, x


def write_one(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(2)
    return x * y, y


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("program", [write_both, write_one])
def test_overlapping_inputs(program: Program, name: str) -> None:
    def body(f: Program) -> Any:
        inputs = OVERLAPS[name]()
        outputs = list(f(*inputs))
        seen = [*outputs, *inputs]
        values = [t.detach().clone() for t in seen]
        identities = [a is b for a in seen for b in seen]
        ends = [t for t in seen if t.requires_grad]
        grads = torch.autograd.grad(sum((t * t).sum() for t in ends), inputs[1]._base or seen[0]) if ends else []
        return values, identities, grads

    check(program, body)


def test_overlap_is_found_at_a_later_call() -> None:
    f = aot_module(lambda x, y: [x.add_(1), y * 2], list(torch.randn(2, 4)), fw_compiler=identity)
    a, b = torch.zeros(4), torch.zeros(4)
    assert f(a, b)[1].tolist() == [0.0] * 4
    assert f(a, a)[1].tolist() == [4.0] * 4
    assert f(a, b)[1].tolist() == [0.0] * 4
    assert a.tolist() == [3.0] * 4


def test_overlap_of_other_types_is_refused() -> None:
    x = torch.zeros(4)
    with pytest.raises(AotAutogradError, match="share memory"):
        aot_function(lambda a, b: (a.add_(1), b * 2), fw_compiler=identity)(x, x.view(torch.int32))


def test_derivative_needs_an_input_that_was_modified() -> None:
    x, w = leaf(3), leaf(3)
    y = aot_function(lambda x, w: ((x + w).sin() ** 2).sum(), fw_compiler=identity)(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        torch.autograd.grad(y, x, create_graph=True)
