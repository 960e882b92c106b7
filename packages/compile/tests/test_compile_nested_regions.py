"""Functions marked with `torch.compiler.nested_compile_region`: each is captured, differentiated and compiled once for
all its calls, and what it computes, writes and refuses is eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aotautograd.nested_regions
import torchcompile
import torchdynamo
import torchinductor.compile
from primtorch import graph_text
from primtorch.higher_order import InvokeSubgraph
from primtorch.ledger import LEDGER

region = getattr(torch.compiler, "nested_compile_region", None)
pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.skipif(region is None, reason="this torch has no nested_compile_region"),
]
BACKENDS = ("eager", "aot_eager", "inductor")
WIDTH = 8


class Layers(nn.Module):
    """A linear layer, then layers that are regions."""

    def __init__(self, forward: Callable[..., Any], init: Callable[[nn.Module], None], count: int = 3) -> None:
        super().__init__()

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(WIDTH, WIDTH)
                init(self)

        Layer.forward = region(lambda self, *args: forward(self, *args))  # type: ignore[method-assign, misc]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def call(self, layer: nn.Module, x: torch.Tensor) -> Any:
        return layer(x)


class Checkpointed(Layers):
    def call(self, layer: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False)


class Autocast(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x.float()).double()


class Derived(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        first = self.first(x)
        y = first
        for layer in self.layers:
            y = layer(y)
        (gradient,) = torch.autograd.grad(y.square().sum(), first, create_graph=True)
        return y + gradient


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


def without_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
    return self.a(x / scale)  # type: ignore[no-any-return]


def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    self.mean.lerp_(x.detach().mean(0), 0.1)
    return self.a(x - self.mean)  # type: ignore[no-any-return]


def reassigned(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
    return self.a(x - self.mean)  # type: ignore[no-any-return]


def with_buffers(self: Any) -> None:
    self.register_buffer("count", torch.zeros(()))
    self.register_buffer("mean", torch.zeros(WIDTH))


def writes_its_own(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    y.add_(1)
    y[:, 0] = 0
    return y  # type: ignore[no-any-return]


def writes_what_it_is_given(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return self.a(x)  # type: ignore[no-any-return]


def heads(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ self.a.weight).view(4, 2, 4).transpose(0, 1), x.view(2, 4, 4), self.a(x).view(2, 4, 4)
    return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(4, WIDTH)


inner = region(lambda t, w: (t @ w).tanh()) if region is not None else None


def regions_within(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert inner is not None
    return inner(inner(x, self.a.weight), self.a.weight) + self.a(x)  # type: ignore[no-any-return]


def batch_norm(self: Any) -> None:
    self.norm = nn.BatchNorm1d(WIDTH)


@dataclass(frozen=True)
class Row:
    """A kind of region. `in_place`: whether its calls are part of the graph around them; `twice`: whether eager can
    differentiate it twice."""

    forward: Callable[..., Any]
    init: Callable[[nn.Module], None] = lambda module: None
    kind: type[Layers] = Layers
    in_place: bool = False
    twice: bool = True
    close: float = 1e-9


ROWS = {
    "plain": Row(lambda self, x: self.a(x).tanh() + x),
    "batch norm": Row(lambda self, x: self.norm(self.a(x)).relu(), batch_norm),
    "a view": Row(lambda self, x: self.a(x).view(4, 2, 4).reshape(4, WIDTH).t().t()),
    "what it is given": Row(lambda self, x: [x, self.a(x)][1 if self.training else 0]),
    "under no_grad": Row(without_gradient),
    "detached": Row(lambda self, x: self.a(x) * x.detach().sigmoid()),
    "an autograd function": Row(lambda self, x: Square.apply(self.a(x)) * 0.1),
    "writes within": Row(writes_its_own),
    "writes to an operand": Row(writes_what_it_is_given, in_place=True),
    "buffers": Row(counted, with_buffers, twice=False),
    "a buffer set": Row(reassigned, with_buffers),
    "a region within": Row(regions_within),
    "a checkpoint within": Row(lambda self, x: checkpoint(lambda t: self.a(t).sin().exp(), x, use_reentrant=False)),
    "within a checkpoint": Row(lambda self, x: self.a(x).sin().exp().tanh(), kind=Checkpointed),
    "autocast": Row(lambda self, x: self.a(x).relu(), kind=Autocast, twice=False, close=2e-2),
    "attention": Row(heads, twice=False),
    "torch.cond": Row(lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.a(x),)), twice=False),
    "a number of the data": Row(lambda self, x: self.a(x) * x.abs().max().item(), in_place=True),
    "places in memory": Row(lambda self, x: self.a(x).as_strided((4, WIDTH), (WIDTH, 1)) + x, in_place=True),
    "a derivative around it": Row(lambda self, x: self.a(x).tanh(), kind=Derived),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torchcompile.reset()
    yield
    torchcompile.reset()


def told() -> list[str]:
    return [event.detail for event in LEDGER.events if event.kind.id == "region_in_place"]


def run(model: nn.Module, called: Callable[..., Any], twice: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(4, WIDTH).requires_grad_()
    results = [t for t in pytree.tree_leaves(called(x)) if isinstance(t, torch.Tensor)]
    by = [x, *model.parameters()]
    gradients = torch.autograd.grad(sum(t.square().sum() for t in results), by, create_graph=twice, allow_unused=True)
    found = [*results, *gradients]
    if twice:
        total = sum(g.square().sum() for g in gradients if g is not None)
        found += torch.autograd.grad(total, by, allow_unused=True)  # type: ignore[arg-type]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], close: float = 1e-9) -> None:
    assert [value is None for value in found] == [value is None for value in wanted]
    for a, b in zip(found, wanted, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=close, atol=close)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_regions_are_as_eager_has_them(name: str, backend: str) -> None:
    row = ROWS[name]
    for twice in (False, True) if row.twice and backend != "eager" else (False,):
        torch.manual_seed(0)
        model = row.kind(row.forward, row.init)
        model = model.float() if row.kind is Autocast else model
        reference = copy.deepcopy(model)
        compiled = torchcompile.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            same(run(model, compiled, twice), run(reference, reference, twice), row.close)
        with torch.no_grad():
            x = torch.randn(4, WIDTH)
            if row.kind is not Derived:
                torch.testing.assert_close(compiled(x.clone()), reference(x.clone()), rtol=row.close, atol=row.close)
    if backend == "inductor":
        assert bool(told()) is row.in_place


def test_hooks_see_what_comes_from_another_result() -> None:
    apart = region(lambda x: (x.sin(), x.sin() * 2))  # type: ignore[misc]
    chained = region(lambda x: (h := x.sin(), h * 2))  # type: ignore[misc]
    for part, leads in ((apart, False), (chained, True)):
        torchcompile.reset()
        x = torch.randn(3, requires_grad=True)
        first, second = torchcompile.compile(lambda x, part=part: part(x))(x)
        assert told()
        if leads:  # as eager, and hooks see the whole gradient
            (gradient,) = torch.autograd.grad(second.sum(), first, retain_graph=True)
            torch.testing.assert_close(gradient, torch.full_like(first, 2))
        (gradient,) = torch.autograd.grad(first.sum() + second.sum(), x)
        torch.testing.assert_close(gradient, 3 * x.cos())


def test_gradients_of_some_results_alone_are_those_of_eager() -> None:
    """Nothing is computed, and no zero multiplied, behind a result that is not used."""
    part = region(lambda x, w: (x * w, (x * w).log()))  # type: ignore[misc]
    other = region(lambda x, w: (x * w, x.sin()))  # type: ignore[misc]
    for function in (part, other):
        for program in (
            lambda x, w, f=function: f(x, w),
            lambda x, w, f=function: f(x, w)[0] * 2,
            lambda x, w, f=function: f(x, w)[0] + f(x, w)[1].relu(),
        ):
            torchcompile.reset()
            compiled = torchcompile.compile(program)
            for used in range(3):
                found = []
                for run in (program, compiled):
                    x, w = torch.tensor([0.0, 1.0, 2.0], requires_grad=True), torch.ones(3, requires_grad=True)
                    results = run(x, w)
                    results = results if isinstance(results, tuple) else (results,)
                    chosen = results if used == 2 else results[used : used + 1] or results
                    total = sum(t.sum() for t in chosen)
                    found.append(torch.autograd.grad(total, (x, w), allow_unused=True))
                assert [g is None for g in found[0]] == [g is None for g in found[1]]
                torch.testing.assert_close(*([g for g in gs if g is not None] for gs in found), equal_nan=True)


def test_dropout_draws_anew_in_each_call() -> None:
    model = Layers(lambda self, x: F.dropout(self.a(x), 0.5, self.training) + 1, lambda module: None)
    compiled, x = torchcompile.compile(model, options={"eager_random": True}), torch.randn(4, WIDTH)
    for _ in range(2):
        torch.manual_seed(5)
        found = compiled(x)
        torch.manual_seed(5)
        wanted = model(x)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in (found, wanted)]
        torch.testing.assert_close(*gradients)
    torch.manual_seed(5)
    fast = torchcompile.compile(Layers(lambda self, x: F.dropout(x, 0.5), lambda module: None))
    ones = torch.ones(4, WIDTH)
    kept = (fast(ones) != 0).double().mean()
    assert not told() and 0 < float(kept) < 0.4  # an eighth: three draws that are not one


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_vary(backend: str) -> None:
    model = Layers(lambda self, x: self.a(x).softmax(0) + x.mean(0) * x.shape[0], lambda module: None)
    compiled = torchcompile.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for rows in (5, 3, 17):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        for by in ([x], list(model.parameters())):
            found, wanted = (torch.autograd.grad(f(x).square().sum(), by) for f in (compiled, model))
            torch.testing.assert_close(found, wanted)
    assert sum(event.kind.id == "recompiled" for event in LEDGER.events) == 0 and not told()


def captured(function: Callable[..., Any], *args: Any) -> list[fx.GraphModule]:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torchdynamo.optimize(backend)(function)(*args)
    return graphs


def calls_in(graph: fx.GraphModule) -> list[InvokeSubgraph]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, InvokeSubgraph)]


def test_equal_regions_share_a_graph() -> None:
    layer = region(lambda x, w: (x @ w).tanh())  # type: ignore[misc]
    other = region(lambda x, w: (x @ w).sin())  # type: ignore[misc]

    def program(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        return layer(layer(other(x, w), w), wide)  # type: ignore[no-any-return]

    (graph,) = captured(program, torch.randn(2, 3), torch.randn(3, 3), torch.randn(3, 5))
    calls = calls_in(graph)
    assert len(calls) == 3 and len({id(call.bodies[0]) for call in calls}) == 3  # another function, other sizes
    (graph,) = captured(lambda x, w: layer(layer(layer(x, w), w.sin()), w), torch.randn(2, 3), torch.randn(3, 3))
    assert len(calls_in(graph)) == 3 and len({id(call.bodies[0]) for call in calls_in(graph)}) == 1
    assert graph_text(graph).count("def invoke_subgraph_region(") == 1


def test_what_python_reads_makes_other_regions() -> None:
    part = region(lambda x, factor: x * factor)  # type: ignore[misc]
    (graph,) = captured(lambda x: part(part(part(x, 2), 2.0), True), torch.randn(3))
    assert len({id(call.bodies[0]) for call in calls_in(graph)}) == 3


def test_invoke_subgraph_is_such_a_call() -> None:
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    def program(x: torch.Tensor) -> Any:
        return invoke_subgraph(lambda t: (t.sin() * 2,), "part", x)

    (graph,) = captured(program, torch.randn(3))
    assert len(calls_in(graph)) == 1
    x = torch.randn(3)
    torch.testing.assert_close(torchcompile.compile(program)(x), (x.sin() * 2,))


def test_a_stack_of_layers_is_captured_traced_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    lowered: list[int] = []
    trace, lower = aotautograd.nested_regions.Regions._traced, torchinductor.compile.lower_graph

    def count_trace(self: Any, body: fx.GraphModule, operands: Any) -> Any:
        traced.append(str(body))
        return trace(self, body, operands)

    def count_lower(gm: fx.GraphModule, *args: Any) -> Any:
        lowered.append(sum(node.op == "call_function" for node in gm.graph.nodes))
        return lower(gm, *args)

    monkeypatch.setattr(aotautograd.nested_regions.Regions, "_traced", count_trace)
    monkeypatch.setattr(torchinductor.compile, "lower_graph", count_lower)
    counts = {}
    for layers in (2, 24):
        torchcompile.reset()
        traced.clear()
        lowered.clear()
        model = Layers(lambda self, x: x + F.gelu(self.a(F.layer_norm(x, (WIDTH,)))), lambda module: None, layers)
        (graph,) = captured(model, torch.randn(4, WIDTH))
        assert len(calls_in(graph)) == layers and len({id(call.bodies[0]) for call in calls_in(graph)}) == 1
        x = torch.randn(4, WIDTH)
        compiled = torchcompile.compile(model, options={"cache": None})
        found, wanted = (torch.autograd.grad(f(x).square().sum(), list(model.parameters())) for f in (compiled, model))
        torch.testing.assert_close(found, wanted)
        assert len(traced) == 1
        assert len(lowered) == 4  # a forward and a backward, and those of the region
        counts[layers] = set(lowered)
    assert len(counts[2] & counts[24]) >= 2  # the region's own are as large as ever


def test_regions_cost_nothing_when_they_run(tmp_path: Path) -> None:
    """The region's program is a part of the one around it: no call of Python, and no call of another program."""
    model = Layers(lambda self, x: self.a(x).tanh() + x, lambda module: None)
    compiled = torchcompile.compile(model, options={"dump": str(tmp_path)})
    compiled(torch.randn(4, WIDTH)).sum().backward()
    texts = [path.read_text() for path in tmp_path.rglob("*program.txt")]
    assert texts and all("invoke_subgraph" not in text for text in texts)
    forward = next(text for text in texts if text.count("addmm") == 4)
    assert forward.count("alloc") > 1


def test_what_stays_in_place_is_told_with_the_users_line() -> None:
    @region  # type: ignore[misc]
    def part(x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()

    torchcompile.compile(lambda x: part(x) + 1)(torch.randn(3))
    (event,) = (event for event in LEDGER.events if event.kind.id == "region_in_place")
    assert "number" in event.detail and event.frames[-1].file == __file__


def test_a_break_within_a_region_is_a_break() -> None:
    @region  # type: ignore[misc]
    def part(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torchcompile.graph_break()
        return x * 2

    x = torch.randn(3)
    torch.testing.assert_close(torchcompile.compile(lambda x: part(part(x)))(x), ((x.sin() * 2).sin() * 2))


def test_an_exception_within_a_region_is_the_programs() -> None:
    @region  # type: ignore[misc]
    def part(x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = x.sin()
        if fails:
            raise ValueError("as told")
        return y

    def program(x: torch.Tensor, fails: bool) -> torch.Tensor:
        try:
            return part(x, fails) + 1  # type: ignore[no-any-return]
        except ValueError:
            return x.cos()

    compiled, x = torchcompile.compile(program), torch.randn(3)
    torch.testing.assert_close(compiled(x, False), x.sin() + 1)
    torch.testing.assert_close(compiled(x, True), x.cos())


def test_exported_programs_have_regions(tmp_path: Path) -> None:
    model, x = Layers(lambda self, x: self.a(x).tanh(), lambda module: None).eval(), torch.randn(4, WIDTH)
    exported = torchcompile.export(model, x)
    torchcompile.save(exported, tmp_path / "program.zip")
    torch.testing.assert_close(torchcompile.load(tmp_path / "program.zip")(x), model(x))


# -- regions that the program marks itself, at each call ------------------------------------------


def scaled(a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return a.sin() * (a if b is None else b)


LAYER = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def marked_within(x: torch.Tensor) -> Any:
    f = region(scaled)
    return f(x) + f(x * 2, b=x), f.__marked_compile_region_fn__ is scaled


def marked_closure(x: torch.Tensor) -> Any:
    @region
    def inner(a: torch.Tensor) -> torch.Tensor:
        return a.cos() * x

    return inner(x) + inner(x + 1)


def marked_with_options(x: torch.Tensor) -> Any:
    @region(max_reuse_entries=2, reuse_hash_fn=lambda a: 1)
    def inner(a: torch.Tensor) -> torch.Tensor:
        return a.cos()

    return inner(x) + inner(inner(x))


def marked_module(x: torch.Tensor) -> Any:
    layer = region(LAYER)
    return layer(layer(x))


def marked_twice(x: torch.Tensor) -> Any:
    f = region(region(scaled))
    return f(f(x))


def marked_in_a_class(x: torch.Tensor) -> Any:
    class Scaled:
        @region
        def run(self, a: torch.Tensor) -> torch.Tensor:
            return a.tanh()

    return Scaled().run(x) + Scaled().run(x + 1)


def marked_under_a_checkpoint(x: torch.Tensor) -> Any:
    def body(a: torch.Tensor) -> torch.Tensor:
        f = region(scaled)
        return f(a) + f(a * 3)

    return checkpoint(body, checkpoint(region(LAYER), x, use_reentrant=False), use_reentrant=False)


def marked_around_a_checkpoint(x: torch.Tensor) -> Any:
    f = region(lambda a: checkpoint(lambda b: region(scaled)(b) * 2, a, use_reentrant=False))
    return f(x) + f(f(x))


def marked_and_returned(x: torch.Tensor) -> Any:
    return x * 2, region(scaled)


MARKED = (
    marked_within, marked_closure, marked_with_options, marked_module, marked_twice, marked_in_a_class,
    marked_under_a_checkpoint, marked_around_a_checkpoint, marked_and_returned,
)  # fmt: skip


@pytest.mark.parametrize("program", MARKED, ids=lambda program: program.__name__)
def test_marked_by_the_program_itself(program: Callable[..., Any]) -> None:
    """In one graph, with eager's values and gradients, and what the decorator gives is a function as eager's."""
    compiled = torchcompile.compile(program, backend="aot_eager", fullgraph=True)
    for rows in (4, 4, 6):
        found = []
        for run in (compiled, program):
            torch.manual_seed(rows)
            x = torch.randn(rows, WIDTH, requires_grad=True)
            leaves = pytree.tree_leaves(run(x))
            total: Any = sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor))
            by = [x, *LAYER.parameters()]
            functions = [leaf for leaf in leaves if callable(leaf) and not isinstance(leaf, torch.Tensor)]
            marks = [(f(x.detach()), f.__marked_compile_region_fn__ is scaled) for f in functions]
            rest = [leaf for leaf in leaves if not callable(leaf)]
            found.append((torch.autograd.grad(total, by, allow_unused=True), marks, rest))
        torch.testing.assert_close(*found)
