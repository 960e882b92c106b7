"""Autograd functions in the graph: forward and backward captured, gradients as in eager, honest breaks."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torchdynamo


class Graphs:
    """A backend that runs graphs as they were captured, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def functions(self) -> list[str]:
        return [str(n.target) for graph in self.graphs for n in graph.graph.nodes if n.op == "call_module"]


def captured(function: Any, **options: Any) -> tuple[Any, Graphs]:
    graphs = Graphs()
    options.setdefault("fullgraph", True)
    options.setdefault("strict", True)
    return torchdynamo.optimize(graphs, options=torchdynamo.CaptureOptions(**options))(function), graphs


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class Square(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad * ctx.scale, None


class SavesResults(Function):
    @staticmethod
    def forward(ctx, x, y):
        e = torch.exp(x)
        s = torch.sigmoid(y)
        ctx.save_for_backward(e, s)
        inner = e.sum()
        ctx.inner = inner  # a tensor kept as an attribute
        return e * s, e.cos()

    @staticmethod
    def backward(ctx, g, h):
        e, s = ctx.saved_tensors
        return g * e * s - h * e.sin() * e, g * e * s * (1 - s) + 0 * ctx.inner


class AsksWhatIsNeeded(Function):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight, bias)
        out = x @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        gx = grad @ weight if ctx.needs_input_grad[0] else None
        gw = grad.t() @ x if ctx.needs_input_grad[1] else None
        gb = grad.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return gx, gw, gb


class WithSetup(Function):
    @staticmethod
    def forward(x, power=2):
        return x**power, x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, power = inputs
        ctx.save_for_backward(x, output[1])
        ctx.power = power
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, ignored):
        x, sign = ctx.saved_tensors
        return g * ctx.power * x ** (ctx.power - 1) * sign * sign, None


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class SinOf(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * CosOf.apply(x)


class CosOf(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -3 * grad * SinOf.apply(x)  # thrice the true derivative: shows whether it is asked


class Identity(Function):
    @staticmethod
    def forward(ctx, x, label):
        ctx.label = label
        return x, label, 7

    @staticmethod
    def backward(ctx, grad, *rest):
        return grad * len(ctx.label), None


class Lonely(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 3


class Indices(Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.sort(dim=-1)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx, grad, _):
        (places,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, places, grad)


def leaf(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "square": (lambda x: Square.apply(x.sin(), 3.0).sum(), lambda: [leaf(3, 4)]),
    "several results": (lambda x, y: SavesResults.apply(x, y), lambda: [leaf(3), leaf(3)]),
    "one result unused": (lambda x, y: SavesResults.apply(x, y)[1], lambda: [leaf(3), leaf(3)]),
    "needs all": (lambda x, w, b: AsksWhatIsNeeded.apply(x, w, b).tanh(), lambda: [leaf(2, 3), leaf(4, 3), leaf(4)]),
    "needs some": (
        lambda x, w: AsksWhatIsNeeded.apply(x, w, None).tanh(),
        lambda: [leaf(2, 3, grad=False), leaf(4, 3)],
    ),
    "needs default": (lambda x, w: AsksWhatIsNeeded.apply(x, w), lambda: [leaf(2, 3), leaf(4, 3, grad=False)]),
    "setup_context": (lambda x: WithSetup.apply(x, 3), lambda: [leaf(4)]),
    "setup_context default": (lambda x: WithSetup.apply(x)[0] * 2, lambda: [leaf(4)]),
    "once_differentiable": (lambda x: Once.apply(x) + x, lambda: [leaf(4)]),
    "straight through": (lambda x: StraightThrough.apply(x * 5) * x, lambda: [leaf(4)]),
    "no gradient needed": (lambda x: Square.apply(x, 2.0) + 1, lambda: [leaf(4, grad=False)]),
    "twice the same": (lambda x: SavesResults.apply(x, x)[0], lambda: [leaf(4)]),
    "chain": (lambda x: Square.apply(Square.apply(x, 2.0), 0.5), lambda: [leaf(4)]),
    "within another": (lambda x: SinOf.apply(x) * 2, lambda: [leaf(4)]),
    "identity": (lambda x: Identity.apply(x * 2, "abc")[0] * Identity.apply(x, "z")[2], lambda: [leaf(4)]),
    "absent gradients": (lambda x: Lonely.apply(x).exp(), lambda: [leaf(4)]),
    "indices": (lambda x: Indices.apply(x)[0] * 2 + Indices.apply(x)[1], lambda: [leaf(2, 5)]),
}


def backward(value: Any) -> None:
    values = [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, torch.Tensor)]
    total = sum((v.double() * torch.arange(v.numel()).reshape(v.shape)).sum() for v in values if v.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()


def twin(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_is_captured_with_its_backward(name: str) -> None:
    program, inputs = PROGRAMS[name]
    compiled, graphs = captured(program)
    for _ in range(3):
        ours = inputs()
        theirs = [twin(value) for value in ours]
        a, b = compiled(*ours), program(*theirs)
        same(a, b)
        for x, y in zip(*(v if isinstance(v, tuple) else (v,) for v in (a, b)), strict=True):
            assert x.requires_grad == y.requires_grad
            assert (x.grad_fn is None) == (y.grad_fn is None)
        backward(a)
        backward(b)
        for x, y in zip(ours, theirs, strict=True):
            same(x.grad, y.grad)
    assert len(graphs.graphs) == 1
    assert bool(graphs.functions()) == (name != "no gradient needed")


def test_the_graph_prints_and_is_copied() -> None:
    compiled, graphs = captured(PROGRAMS["square"][0])
    x = leaf(3, 4)
    compiled(x)
    (graph,) = graphs.graphs
    assert graphs.functions() == ["Square"]
    assert "Square(" in graph.code
    again = copy.deepcopy(graph)
    (result,) = again(x)
    assert result.grad_fn is not None and torch.autograd.grad(result, x)[0] is not None
    inner = graph.get_submodule("Square")
    assert {name for name, _ in inner.named_children()} == {"forward_graph", "backward_graph"}


def test_a_backward_is_captured_in_grad_mode_where_that_makes_a_difference() -> None:
    class Turning(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                scale = x.cos()
            return g * scale * x

    class Asking(Turning):
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * ctx.saved_tensors[0] if torch.is_grad_enabled() else g * 2

    for kind, args, twice in ((Turning, (), True), (Asking, (), True), (Square, (2.0,), False)):
        compiled, graphs = captured(lambda x, kind=kind, args=args: kind.apply(x, *args))
        compiled(leaf(3))
        names = {name for name, _ in graphs.graphs[0].get_submodule(kind.__name__).named_children()}
        assert ("recorded_graph" in names) == twice


def test_the_node_in_autograds_graph_goes_by_the_users_name() -> None:
    compiled, _ = captured(lambda x: Square.apply(x, 2.0))
    assert compiled(leaf(3)).grad_fn.name() == "SquareBackward"


def test_second_derivatives() -> None:
    def second(f: Any, x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    for program in (lambda x: Square.apply(x, 2.0) * x, lambda x: SinOf.apply(x) * 2):
        compiled, _ = captured(program)
        x = leaf(5)
        same(second(compiled, x), second(program, x))
    program = lambda x: Once.apply(x).square()
    compiled, _ = captured(program)
    for f in (program, compiled):
        x = leaf(3)
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()


def test_saved_tensors_are_checked_for_writes_and_attributes_are_not() -> None:
    class Keeps(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x)
            ctx.w = w
            return x * w

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.w, grad * ctx.saved_tensors[0]

    program = lambda x, w: Keeps.apply(x * 1, w)
    compiled, _ = captured(program)
    grads = []
    for f in (compiled, program):
        x, w = torch.ones(3, requires_grad=True), torch.ones(3)
        y = f(x, w)
        w.mul_(5)
        y.sum().backward()
        grads.append(x.grad)
    same(*grads)
    x, w = torch.ones(3, requires_grad=True).clone(), torch.ones(3, requires_grad=True)
    y = captured(lambda x, w: Keeps.apply(x, w))[0](x, w)
    x.data  # noqa: B018
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_forward_and_backward_read_is_guarded() -> None:
    settings = {"forward": 2.0, "backward": 3.0}

    class Reads(Function):
        @staticmethod
        def forward(ctx, x):
            return x * settings["forward"]

        @staticmethod
        def backward(ctx, grad):
            return grad * settings["backward"]

    program = lambda x: Reads.apply(x)
    compiled, graphs = captured(program)
    for change in ({}, {"forward": 4.0}, {"backward": 5.0}, {}):
        settings.update(change)
        x = leaf(3)
        compiled(x).sum().backward()
        same(x.grad, torch.full_like(x, settings["backward"]))
        same(compiled(x), program(x))
    assert len(graphs.graphs) == 3


def test_parameters_that_a_body_reads_get_no_gradient_as_in_eager() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            layer = self

            class Reads(Function):
                @staticmethod
                def forward(ctx, x):
                    return x * layer.weight

                @staticmethod
                def backward(ctx, grad):
                    return grad * layer.weight * layer.scale

            return Reads.apply(x)

    layer = Layer()
    x = leaf(3)
    compiled, graphs = captured(layer, fullgraph=False)
    for _ in range(2):
        x.grad = None
        compiled(x).sum().backward()
        same(x.grad, (layer.weight * layer.scale).detach())
        assert layer.weight.grad is None and layer.scale.grad is None


def test_effects_of_the_forward_happen_at_each_call() -> None:
    seen: list[torch.Tensor] = []

    class Logs(Function):
        @staticmethod
        def forward(ctx, x):
            inner = x * 2
            seen.append(inner)
            ctx.cosine = inner.cos()
            return inner.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.cosine

    compiled, graphs = captured(lambda x: Logs.apply(x) * seen[-1], fullgraph=False)
    x = leaf(3)
    first = compiled(x)
    same(seen[0], (x * 2).detach())
    assert not seen[0].requires_grad
    same(first, (x * 2).sin() * (x * 2))
    assert "Logs" in graphs.functions()


@pytest.mark.parametrize("kind", ["dirty", "effect", "item", "counts", "raises"])
def test_what_cannot_be_carried_breaks_with_a_reason(kind: str) -> None:
    log: list[float] = []

    class Bad(Function):
        @staticmethod
        def forward(ctx, x):
            if kind == "dirty":
                x.mul_(2)
                ctx.mark_dirty(x)
                return x
            if kind == "item":
                ctx.number = x.sum().item()
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if kind == "effect":
                log.append(1.0)
            if kind == "counts" and grad.sum() > 1e9:
                return grad
            if kind == "raises":
                raise ValueError("no gradient today")
            return grad * 2

    def program(x):
        y = x.sin()
        return Bad.apply(y).cos()

    torchdynamo.reset()
    compiled, graphs = captured(program, fullgraph=False)
    for _ in range(2):
        x = leaf(3)
        z = twin(x)
        a, b = compiled(x), program(z)
        same(a, b)
        if kind == "raises":
            with pytest.raises(ValueError, match="today"):
                a.sum().backward()
            continue
        a.sum().backward()
        b.sum().backward()
        same(x.grad, z.grad)
    assert len(log) == (4 if kind == "effect" else 0)
    assert {detail.reason for detail in torchdynamo.stats().break_details} == {"autograd_function"}
    with pytest.raises(torchdynamo.Unsupported, match=r"Bad\.apply"):
        captured(program)[0](leaf(3))


def test_symbolic_sizes_pass_through_a_function() -> None:
    class Mean(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.n = x.shape[0]
            return x.sum(0) / ctx.n

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(ctx.n, *grad.shape) / ctx.n

    program = lambda x: Mean.apply(x * 2)
    compiled, graphs = captured(program)
    for n in (3, 5, 6, 9):
        x = leaf(n, 2)
        z = twin(x)
        a, b = compiled(x), program(z)
        same(a, b)
        a.sum().backward()
        b.sum().backward()
        same(x.grad, z.grad)
    assert len(graphs.graphs) == 2


def test_nothing_is_kept_alive_after_backward() -> None:
    compiled, _ = captured(lambda x: SavesResults.apply(x, x)[0])
    x = leaf(3)
    y = compiled(x)
    y.sum().backward()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


# -- checkpoints ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.second = nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return x + self.drop(self.second(torch.tanh(self.first(x)))) * scale


class Deep(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x.sin()


def trained(f: Any, model: nn.Module, x: torch.Tensor) -> tuple[Any, ...]:
    model.zero_grad()
    torch.manual_seed(7)
    value = f(x)
    value.sum().backward()
    return value.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize(
    "how", [{"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "scale": 2}]
)
def test_a_checkpoint_is_captured(how: dict[str, Any]) -> None:
    model = Deep(**how)
    compiled, graphs = captured(model)
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        z = twin(x)
        same(trained(compiled, model, x), trained(model, model, z))
        same(x.grad, z.grad)
    assert graphs.functions() == ["checkpoint", "checkpoint_", "checkpoint__"]
    with torch.no_grad():
        torch.manual_seed(1)
        a = compiled(x)
        torch.manual_seed(1)
        same(a, model(x))
    assert len(graphs.functions()) == 3, "without gradients there is nothing to run again"


def test_a_checkpoint_keeps_no_activations() -> None:
    def kept(f: Any, x: torch.Tensor) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            f(x)
        return sum(sizes)

    model = Deep(use_reentrant=False)
    compiled, _ = captured(model)
    x = torch.randn(2, 4, requires_grad=True)
    compiled(x)
    assert kept(compiled, x) == kept(model, x)


def test_checkpoints_within_functions_and_sequences() -> None:
    def inner(x):
        return checkpoint(lambda v: Square.apply(v, 2.0).tanh(), x.sin(), use_reentrant=False) * 2

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def program(x):
        y = checkpoint(inner, x, use_reentrant=False)
        return checkpoint_sequential(layers, 2, y, use_reentrant=False)

    compiled, graphs = captured(program)
    x = torch.randn(2, 4, requires_grad=True)
    z = twin(x)
    same(trained(compiled, layers, x), trained(program, layers, z))
    same(x.grad, z.grad)
    assert len(graphs.graphs) == 1


def test_values_from_inside_a_checkpoint() -> None:
    def program(x):
        def body(v):
            inner = v.exp()
            return inner.sin(), {"inner": inner * 2}

        y, named = checkpoint(body, x, use_reentrant=False)
        return y * named["inner"]

    compiled, _ = captured(program)
    for _ in range(2):
        x = leaf(3)
        z = twin(x)
        a, b = compiled(x), program(z)
        same(a, b)
        a.sum().backward()
        b.sum().backward()
        same(x.grad, z.grad)


@pytest.mark.parametrize("kind", ["context_fn", "break", "reentrant without gradient"])
def test_a_checkpoint_that_cannot_be_captured_breaks(kind: str) -> None:
    model = Block()

    def body(x):
        if kind == "break":
            torchdynamo.graph_break()
        return model(x)

    how: dict[str, Any] = {"use_reentrant": kind.startswith("reentrant")}
    if kind == "context_fn":
        how["context_fn"] = lambda: (contextlib.nullcontext(), contextlib.nullcontext())

    def program(x):
        return checkpoint(body, x * 2, **how).cos()

    torchdynamo.reset()
    compiled, _ = captured(program, fullgraph=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = torch.randn(2, 4, requires_grad=not kind.startswith("reentrant"))
            a, b = twin(x), twin(x)
            torch.manual_seed(0)
            mine = compiled(a)
            torch.manual_seed(0)
            theirs = program(b)
            same(mine, theirs)
            assert mine.requires_grad == theirs.requires_grad
            if mine.requires_grad:
                mine.sum().backward()
                theirs.sum().backward()
                same(a.grad, b.grad)
    assert {detail.reason for detail in torchdynamo.stats().break_details} == {"checkpoint"}


class Counting(nn.Module):
    """Does something beside computing within its checkpoint."""

    def __init__(self, what: str, reentrant: bool) -> None:
        super().__init__()
        self.what, self.reentrant, self.count, self.log = what, reentrant, 0, []
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))

    def body(self, x):
        if self.what == "norm":
            x = self.norm(x)
        elif self.what == "tensor":
            self.total += x.detach().sum(0)
        elif self.what == "view of a tensor":
            self.total[1:].add_(1)
        elif self.what == "list":
            self.log.append(x.shape[0])
        elif self.what == "attribute":
            self.count += 1
        return x.sin()

    def forward(self, x):
        return checkpoint(self.body, x * 2, use_reentrant=self.reentrant) * self.total


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["norm", "tensor", "view of a tensor", "list", "attribute"])
def test_what_a_checkpointed_function_changes_it_changes_again_in_the_backward(what: str, reentrant: bool) -> None:
    ours, theirs = Counting(what, reentrant), Counting(what, reentrant)
    compiled, _ = captured(ours, fullgraph=False)
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        z = twin(x)
        a, b = compiled(x), theirs(z)
        same(a, b)
        a.sum().backward()
        b.sum().backward()
        same((x.grad, ours.log, ours.count), (z.grad, theirs.log, theirs.count))
        same(ours.state_dict(), theirs.state_dict())
    assert {detail.reason for detail in torchdynamo.stats().break_details} == {"checkpoint"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_reads_and_the_program_writes_behind_it(reentrant: bool) -> None:
    """What the function closes over is read as it is in the backward; what it is given may not be written."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x, given):
            y = checkpoint(lambda v, g: (v * self.scale * g).sin(), x * 2, given, use_reentrant=reentrant)
            self.scale.mul_(3)
            return y

    ours, theirs = Reading(), Reading()
    compiled, graphs = captured(ours)
    x, given = torch.randn(3, 4, requires_grad=True), torch.ones(4)
    for _ in range(2):
        a, b = twin(x), twin(x)
        compiled(a, given).sum().backward()
        theirs(b, given).sum().backward()
        same((a.grad, ours.scale), (b.grad, theirs.scale))
    for model in (compiled, theirs):
        y = model(twin(x), given)
        given.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert len(graphs.graphs) == 1


def test_draws_from_a_generator_of_the_programs_own() -> None:
    generator = torch.Generator()

    def program(x):
        y = x.sin()
        return torch.rand(3, generator=generator) * y + torch.empty(3).normal_(generator=generator)

    torchdynamo.reset()
    compiled, _ = captured(program)
    x = torch.ones(3)
    for _ in range(2):
        results = []
        for f in (compiled, program):
            generator.manual_seed(3)
            results.append((f(x), torch.rand(2, generator=generator)))
        same(*results)


@pytest.mark.parametrize("way", ["method", "function", "grad"])
def test_what_autograds_engine_runs_is_not_captured(way: str) -> None:
    """A back end's own backward, in particular, is none of the program."""
    seen: list[str] = []

    def derivative(grad: torch.Tensor) -> torch.Tensor:
        return grad * 3

    class Compiled(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, grad):
            return derivative(grad)

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(type(graph).__name__)
        return lambda *args: tuple(Compiled.apply(out) if out.requires_grad else out for out in graph.forward(*args))

    def program(x):
        y = (x * 2).sum()
        if way == "method":
            y.backward()
        elif way == "function":
            torch.autograd.backward(y)
        else:
            x.grad = torch.autograd.grad(y, x)[0]
        return x.grad + 1

    compiled = torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(strict=True))(program)
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: None)  # no graph calls it
    torch.testing.assert_close(compiled(x), torch.full((3,), 7.0), rtol=0, atol=0)
    assert len(seen) == 2  # before the engine's run and behind it


def test_a_leaf_that_begins_in_the_program_is_an_input_of_what_follows() -> None:
    def program(x):
        leaf = (x * 2).detach().requires_grad_()
        other = torch.ones(3, requires_grad=True)
        return (leaf * other).sin(), leaf, other

    torchdynamo.reset()
    compiled, graphs = captured(program, fullgraph=False)
    ours, theirs = compiled(torch.ones(3)), program(torch.ones(3))
    for result, *leaves in (ours, theirs):
        result.sum().backward()
        assert all(leaf.is_leaf for leaf in leaves)
    same([t.detach() for t in ours], [t.detach() for t in theirs])
    same([t.grad for t in ours[1:]], [t.grad for t in theirs[1:]])
    assert {detail.reason for detail in torchdynamo.stats().break_details} == {"leaf"}
    kinds = [{n.target for n in g.graph.nodes} & {"requires_grad_", torch.ones} for g in graphs.graphs]
    assert not any(kinds)
    plain, _ = captured(lambda x: x.detach().requires_grad_(False) + torch.ones(3, requires_grad=False))
    same(plain(torch.ones(3)), torch.full((3,), 2.0))


def by_an_intermediate(x):
    y = x.sin()
    z = (y * y).sum()
    return torch.autograd.grad(z, y)[0] * 2


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


def by_a_view(x):
    y = x.view_as(x)
    (slope,) = torch.autograd.grad(y.exp().sum(), y, create_graph=True, allow_unused=True)
    return torch.autograd.grad(slope.sum(), y)[0]


def within_a_called_function(x):
    def slope(f, v):
        return torch.autograd.grad(f(v).sum(), v, create_graph=True)[0]

    return slope(torch.exp, slope(torch.sin, x * 2)) + 1


@pytest.mark.parametrize(
    "program",
    [by_an_intermediate, by_several, by_backward, by_a_view, within_a_called_function],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_derivatives_by_what_the_program_computed(program: Callable[..., Any], broken: bool) -> None:
    """In the graph, or behind a graph that ends at what is differentiated by."""
    torchdynamo.reset()

    def one_node(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """As compiled graphs are for autograd: nothing is known between two results."""

        class Node(Function):
            @staticmethod
            def forward(ctx, *args):
                with torch.enable_grad():
                    leaves = [a.detach().requires_grad_(a.requires_grad) for a in args]
                    results = graph.forward(*leaves)
                ctx.leaves, ctx.results = leaves, results
                return tuple(r.detach() for r in results)

            @staticmethod
            def backward(ctx, *tangents):
                ends = [(r, t) for r, t in zip(ctx.results, tangents, strict=True) if r.requires_grad]
                wanted = [a for a in ctx.leaves if a.requires_grad]
                found = iter(
                    torch.autograd.grad(
                        [r for r, _ in ends], wanted, [t for _, t in ends], create_graph=True, allow_unused=True
                    )
                )
                return tuple(next(found) if a.requires_grad else None for a in ctx.leaves)

        return lambda *args: Node.apply(*args)

    for backend in (Graphs(), one_node):
        if backend is one_node and program in (by_a_view, within_a_called_function):
            continue  # this node has no second derivative
        compiled = torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(strict=True))(program)
        for _ in range(2):
            x = leaf(4)
            with torch.autograd.set_detect_anomaly(broken):
                torch.testing.assert_close(compiled(x), program(twin(x)), rtol=0, atol=0)
    assert {detail.reason for detail in torchdynamo.stats().break_details} == (
        {"backward"} if broken or program is by_backward else set()
    )


def test_tangents_of_forward_mode_are_not_lost() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()

    def program(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x * 2, torch.ones_like(x))
            return forward_ad.unpack_dual(net(dual)).tangent * 2

    compiled, _ = captured(program, fullgraph=False)
    x = leaf(2, 3, grad=False)
    for _ in range(2):
        same(compiled(x).detach(), program(x).detach())
    inner, graphs = captured(net, fullgraph=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        same(forward_ad.unpack_dual(inner(dual)).tangent.detach(), forward_ad.unpack_dual(net(dual)).tangent.detach())
    assert not graphs.graphs
    with forward_ad.dual_level(), pytest.raises(torchdynamo.Unsupported, match="forward_derivatives"):
        captured(net)[0](forward_ad.make_dual(x, torch.ones_like(x)))


def test_what_a_cell_holds_is_read_and_written_as_the_variable_that_it_is() -> None:
    count, names = 1, ["a"]

    def held() -> int:
        return count * len(names)

    def again(value: int) -> None:
        nonlocal count
        count = value

    def program(x: torch.Tensor) -> Any:
        first, second = (cell.cell_contents for cell in held.__closure__ or ())
        (held.__closure__ or ())[0].cell_contents = first + 1
        return x * first, x * len(second), x * held()

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for value in (1, 1, 5):
        again(value)
        wanted, after = program(torch.ones(2)), count
        again(value)
        for found, want in zip(compiled(torch.ones(2)), wanted, strict=True):
            assert torch.equal(found, want)
        assert count == after
        names.append("b")
