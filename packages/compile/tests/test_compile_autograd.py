"""What programs do with autograd around and inside of compiled code: orders, hooks, retained graphs, modes, accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchcompile

pytestmark = pytest.mark.expected_eager()  # nothing, but for what tests say themselves

BACKENDS = ("eager", "aot_eager", "inductor")
Run = Callable[[Any, Any], Any]


class Net(nn.Module):
    """Convolution, both norms, attention, an embedding of positions; smooth, so that derivatives of any order exist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.heads = nn.Linear(8, 24)
        self.out = nn.Linear(8, 3)
        self.places = nn.Embedding(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.conv(x)).transpose(1, 2) + self.places(torch.arange(x.shape[-1]))
        q, k, v = self.heads(self.norm(y)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1)
        return self.out(F.gelu(weights @ v)).mean(1)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int = 0, size: int = 2) -> torch.Tensor:
    return torch.randn(size, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def gradient_penalty(call: Any, model: nn.Module) -> Any:
    x = batch().requires_grad_()
    score = call(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    (score.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()).backward()
    return score.detach(), slope.detach(), x.grad, grads(model)


def hessian_vector_product(call: Any, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    first = torch.autograd.grad(call(batch()).square().sum(), parameters, create_graph=True)
    direction = [torch.ones_like(p) for p in parameters]
    return torch.autograd.grad(first, parameters, direction)


def third_order(call: Any, model: nn.Module) -> Any:
    value = x = batch().requires_grad_()
    value = call(x).sin().sum()
    for _ in range(3):
        (value,) = torch.autograd.grad(value, x, create_graph=True)
        value = value.square().sum()
    return value.detach()


def retained_graph(call: Any, model: nn.Module) -> Any:
    loss = call(batch()).square().sum()
    loss.backward(retain_graph=True)
    first = grads(model)
    loss.backward()
    second = grads(model)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    grads(model)
    return first, second


def accumulation(call: Any, model: nn.Module) -> Any:
    for i in range(3):
        (call(batch(i, 2 + i)).square().sum() / 3).backward()
    return grads(model)


def some_outputs(call: Any, model: nn.Module) -> Any:
    out = call(batch())
    out[:, 0].sum().backward(retain_graph=True)
    first = grads(model)
    return first, torch.autograd.grad(out[0], [model.out.weight], torch.ones(3, dtype=torch.float64))


def parameter_hooks(call: Any, model: nn.Module) -> Any:
    seen: list[Any] = []
    handles = [
        model.out.weight.register_hook(lambda g: g * 2),
        model.conv.bias.register_hook(lambda g: seen.append(g.clone())),
        model.heads.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    results = []
    for i in range(3):
        call(batch(i)).square().sum().backward()
        results.append(grads(model))
        if i == 1:
            handles[0].remove()
    for handle in handles[1:]:
        handle.remove()
    return results, seen


def step_in_backward(call: Any, model: nn.Module) -> Any:
    """Each parameter is updated as soon as its gradient is there."""

    def descend(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.sub_(0.01 * p.grad)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(descend) for p in model.parameters()]
    for i in range(3):
        call(batch(i)).square().sum().backward()
    for handle in handles:
        handle.remove()
    return [p.detach().clone() for p in model.parameters()]


def hooks_of_results(call: Any, model: nn.Module) -> Any:
    seen: list[Any] = []
    x = batch().requires_grad_()
    out = call(x)
    out.retain_grad()
    out.register_hook(lambda g: seen.append(g.clone()))
    out.grad_fn.register_hook(lambda inputs, outputs: seen.append(outputs[0].clone()))
    out.square().sum().backward()
    return seen, out.grad, x.grad, grads(model)


def frozen(call: Any, model: nn.Module) -> Any:
    results = []
    for part in (model.conv, model.places, model.out):
        part.requires_grad_(False)
        call(batch()).square().sum().backward()
        results.append(grads(model))
    model.requires_grad_(False)
    assert not call(batch()).requires_grad
    model.requires_grad_(True)
    call(batch()).square().sum().backward()
    return results, grads(model)


def anomaly(call: Any, model: nn.Module) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        call(batch()).square().sum().backward()
    return grads(model)


def inputs_alone(call: Any, model: nn.Module) -> Any:
    x = batch().requires_grad_()
    call(x).square().sum().backward(inputs=[x])
    assert all(p.grad is None for p in model.parameters())
    return x.grad


def detached_parts(call: Any, model: nn.Module) -> Any:
    x = batch().requires_grad_()
    out = call(x)
    (out.detach() * out).sum().backward()
    with torch.no_grad():
        inference = call(x)
    assert not inference.requires_grad
    return x.grad, grads(model), inference


def jacobian(call: Any, model: nn.Module) -> Any:
    x = batch(size=1).requires_grad_()
    return torch.autograd.functional.jacobian(call, x), torch.autograd.functional.hessian(lambda v: call(v).sum(), x)


def replaced_gradients(call: Any, model: nn.Module) -> Any:
    """Accumulators that the program made, filled or changed."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    kept = model.out.weight.grad
    call(batch()).square().sum().backward()
    assert model.out.weight.grad is kept
    return grads(model)


PROGRAMS: tuple[Run, ...] = (
    gradient_penalty, hessian_vector_product, third_order, retained_graph, accumulation, some_outputs, parameter_hooks,
    step_in_backward, hooks_of_results, frozen, anomaly, inputs_alone, detached_parts, jacobian, replaced_gradients,
)  # fmt: skip


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_compiled_code_is_a_citizen_of_autograd(program: Run, backend: str) -> None:
    model, twin = net(), net()
    compiled = torchcompile.compile(model, backend=backend, fullgraph=True, options={"strict": True})
    for _ in range(2):
        close(program(compiled, model), program(twin, twin))
    assert not torchcompile.report().fallbacks


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Autocast leaves float64 alone, and keeps what it converted float32 to."""
    with torch.autocast("cpu", torch.bfloat16):
        return x.float() @ (w.float().t() @ w.float())


# (scale, w, x) to (loss, what the caller overwrites before the backward): no node of eager's autograd keeps it.
OVERWRITTEN: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "a copied input": lambda scale, w, x: ((x * w) @ scale.clone().detach(), scale),
    "an input copied into another": lambda scale, w, x: ((x * w) @ torch.empty_like(scale).copy_(scale), scale),
    "an input of a result that is kept": lambda scale, w, x: (torch.sigmoid(x) * w @ torch.exp(scale), scale),
    "an input under a cast": lambda scale, w, x: ((x * w).float() @ scale.float(), scale),
    "a parameter under a cast": lambda scale, w, x: (w.float().square(), w),
    "a parameter under autocast": lambda scale, w, x: (under_autocast(x, w), w),
    "an argument of a kept result": lambda scale, w, x: (x.exp() * w, x),
    "a copied result": lambda scale, w, x: ((y := x + w).clone().square(), y),
    "a result that was kept as another": lambda scale, w, x: (torch.sigmoid(y := w * 2.0), y),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_what_autograd_does_not_keep_may_be_overwritten(name: str, backend: str) -> None:
    def run(program: Callable[[Any, Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
        w = batch()[0, :, :4].requires_grad_()
        loss, written = program(batch(1)[0, :, :3].contiguous(), w, batch(2)[0, :, :4].contiguous())
        with torch.no_grad():
            written.zero_()
        loss.sum().backward()
        return loss.detach(), w.grad

    close(run(torchcompile.compile(OVERWRITTEN[name], backend=backend)), run(OVERWRITTEN[name]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(backend: str, inside: bool) -> None:
    """As near to the truth as eager under autocast; the same dtypes; a change of the region between calls is seen."""
    torch.manual_seed(0)
    model = Net()
    truth = copy.deepcopy(model).double()

    def run(one: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not inside:
            return one(x)
        with torch.autocast("cpu", torch.bfloat16):
            return one(x)

    compiled = torchcompile.compile(run, backend=backend, fullgraph=True, options={"strict": True})
    for dtype in (torch.bfloat16, None, torch.bfloat16, torch.float16):
        x = torch.randn(4, 4, 6)
        errors, dtypes = [], []
        wanted = truth(x.double())
        wanted.square().sum().backward()
        wanted = wanted.detach()
        exact = torch.cat([p.grad.flatten() for p in truth.parameters()])
        truth.zero_grad()
        for f in (run, compiled):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                out = f(model, x)
            out.float().square().sum().backward()
            found = torch.cat([p.grad.flatten() for p in model.parameters()])
            model.zero_grad()
            dtypes.append(out.dtype)
            errors.append(tuple(float((a - b).norm() / b.norm()) for a, b in ((out.detach(), wanted), (found, exact))))
        assert dtypes[0] == dtypes[1]
        for theirs, ours in zip(*errors, strict=True):
            assert ours <= 2 * theirs + 1e-6


@pytest.mark.expected_eager("transformed_call")
@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_outside_of_compiled_code_and_inside(backend: str) -> None:
    model = net()
    compiled = torchcompile.compile(model, backend=backend, options={"strict": True})
    x = batch()
    compiled(x)
    close(torch.func.grad(lambda v: compiled(v).sum())(x), torch.func.grad(lambda v: model(v).sum())(x))
    close(torch.vmap(compiled, randomness="same")(x[None]), torch.vmap(model)(x[None]))

    def inside(v: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda u: model(u).sum())(v * 2)
        return slope + torch.vmap(torch.sin)(v).cos()

    close(torchcompile.compile(inside, backend=backend, options={"strict": True})(x), inside(x))
    assert not torchcompile.report().breaks


WEIGHT = torch.linspace(-1, 1, 3, dtype=torch.float64)


def of_a_detached_input(x):
    leaf = x.detach().requires_grad_()
    return (leaf * leaf * WEIGHT).sum(), leaf


def made_by_a_factory(x):
    leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    return ((leaf + x) * WEIGHT).sum(), leaf


def made_from_numbers(x):
    leaf = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    return (leaf * x).sum(), leaf


def a_parameter(x):
    leaf = nn.Parameter(x * 2)
    return (leaf.sin() * WEIGHT).sum(), leaf


def by_assignment(x):
    leaf = (x * 2).detach()
    leaf.requires_grad = True
    return (leaf * leaf).sum(), leaf


def made_without_grad_mode(x):
    with torch.no_grad():
        leaf = x * 2
    leaf.requires_grad_(True)
    return (leaf * 3).sum(), leaf


def differentiated_inside(x):
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((leaf * leaf).sum(), leaf, create_graph=True)
    return (slope * WEIGHT).square().sum(), leaf


def the_input_itself(x):
    x.requires_grad_()
    return (x * x).sum(), x


LEAVES = (
    of_a_detached_input, made_by_a_factory, made_from_numbers, a_parameter, by_assignment, made_without_grad_mode,
    differentiated_inside, the_input_itself,
)  # fmt: skip


@pytest.mark.expected_eager("leaf", "tensor_subclass", "tensor_metadata_write", "backward")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", LEAVES, ids=lambda f: f.__name__)
def test_leaves_that_begin_in_compiled_code_get_their_gradients(program: Callable[..., Any], backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend, options={"strict": True})
    for _ in range(2):
        runs = []
        for f in (program, compiled):
            x = torch.arange(3, dtype=torch.float64)
            value, leaf = f(x)
            value.backward()
            assert leaf.is_leaf and leaf.requires_grad and type(leaf) is type(program(x.clone())[1])
            runs.append((value.detach(), leaf.detach(), leaf.grad, x.requires_grad))
        torch.testing.assert_close(*runs)


def by_an_intermediate(x):
    y = x.sin()
    return torch.autograd.grad((y * y).sum(), y)[0] * 2


def by_several(x):
    first = x.sin()
    left, right = (first * 2).chunk(2)
    third = left * right
    z = third.exp().sum()
    return (*torch.autograd.grad(z, [third, first, x]), third + 1)


def by_backward(x):
    y = x.cos()
    (y * y * 3).sum().backward(inputs=[y])
    return y.grad + 1


def hessian(x):
    return torch.autograd.functional.hessian(lambda v: (v.sin() * v.sum()).sum(), x) + 1


def jacobian_of_jacobian(x):
    inner = lambda v: torch.autograd.functional.jacobian(lambda u: u.sin() * u.sum(), v, create_graph=True).sum(0)
    return torch.autograd.functional.jacobian(inner, x)


INSIDE = (by_an_intermediate, by_several, by_backward, hessian, jacobian_of_jacobian)


@pytest.mark.expected_eager("backward", "loop", "leaf")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", INSIDE, ids=lambda f: f.__name__)
def test_derivatives_by_what_the_program_computed(program: Callable[..., Any], backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend, options={"strict": True})
    for _ in range(2):
        x = torch.randn(4, dtype=torch.float64)
        close(compiled(x.clone().requires_grad_()), program(x.clone().requires_grad_()))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_running_statistics_of_an_unused_norm(layer: nn.Module) -> None:
    """Nobody reads its result; its statistics move on."""
    model = copy.deepcopy(layer).double()

    def program(x: torch.Tensor) -> torch.Tensor:
        model(x)
        return x.sin()

    x = torch.rand(4, 3, 5, dtype=torch.float64)
    states = []
    for run in (program, torchcompile.compile(program)):
        model.load_state_dict(layer.state_dict())
        run(x)
        states.append([value.clone() for value in model.state_dict().values()])
    torch.testing.assert_close(states[1], states[0], rtol=1e-12, atol=0)
    assert not torch.equal(states[0][0], layer.double().state_dict()["running_mean"])


class Features(nn.Module):
    """Its second result is computed from its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return features, self.head(features.relu())


def retained(features: torch.Tensor, scores: torch.Tensor) -> Any:
    features.retain_grad()
    scores[..., 0].sum().backward()
    return features.grad


def hooked(features: torch.Tensor, scores: torch.Tensor) -> Any:
    seen: list[torch.Tensor] = []
    features.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    (scores.square().sum() + features.exp().sum()).backward()
    return seen


def by_the_result(features: torch.Tensor, scores: torch.Tensor) -> Any:
    (slope,) = torch.autograd.grad(scores.square().sum(), features, create_graph=True)
    (slope.square().sum() + features.sum()).backward()
    return slope.detach()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("look", [retained, hooked, by_the_result], ids=lambda f: f.__name__)
def test_gradients_of_a_result_that_another_is_computed_from(look: Callable[..., Any], backend: str) -> None:
    torch.manual_seed(0)
    model, options = Features().double(), {"eager_random": True} if backend == "inductor" else {}
    found = []
    for call in (model, torchcompile.compile(model, backend=backend, options=options)):
        for step in range(2):
            torch.manual_seed(step)
            model.zero_grad()
            found.append([look(*call(batch(step))), *grads(model)])
    close(found[2:], found[:2])


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a view": lambda t: t,
    "detached": torch.Tensor.detach,
    "its data": lambda t: t.data,
    "a view of a detached one": lambda t: t.detach().view(2, -1).flatten(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_running_statistics_that_are_views(norm: Callable[..., torch.Tensor], part: str, backend: str) -> None:
    """Those of one step among several, as networks keep them that are trained for few steps."""

    def program(x: torch.Tensor, means: torch.Tensor, variances: torch.Tensor, step: int) -> Any:
        switch = {"training": True} if norm is F.batch_norm else {"use_input_stats": True}
        mean, variance = PARTS[part](means[step]), PARTS[part](variances.t()[step])
        return norm(x, mean, variance, **switch).sin(), means.sum()

    def run(f: Callable[..., Any]) -> list[Any]:
        means, variances = torch.zeros(3, 4, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
        found = []
        for step in range(3):
            x = batch(step).requires_grad_()
            result, total = f(x, means, variances, step)
            result.square().sum().backward()
            found += [result.detach(), total, x.grad, means.clone(), variances.clone(), means._version]
        return found

    close(run(torchcompile.compile(program, backend=backend)), run(program))
    assert {event.kind.id for event in torchcompile.report().events} <= {"recompiled"}
