"""Compiled functions under what other people trace and count with: those see the operators; what compiles both works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchcompile
import torchdynamo

BACKENDS = ("eager", "aot_eager", "inductor")


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).relu()


class Holder(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _calls(graph: torch.fx.Graph) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)).split(".")[0] for n in graph.nodes if n.op.startswith("call")]


TRACERS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    **{
        f"make_fx {mode}": lambda f, x, mode=mode: _calls(make_fx(f, tracing_mode=mode)(x).graph)
        for mode in ("real", "fake", "symbolic")
    },
    "torch.export": lambda f, x: _calls(torch.export.export(Holder(f), (x,), strict=False).graph),
    "torch.export strict": lambda f, x: _calls(torch.export.export(Holder(f), (x,), strict=True).graph),
    "torch.jit.trace": lambda f, x: [n.kind() for n in torch.jit.trace(Holder(f), (x,)).inlined_graph.nodes()],
    "symbolic_trace": lambda f, x: _calls(torch.fx.symbolic_trace(Holder(f)).graph),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torchcompile.reset()
    torch.compiler.reset()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_sees_the_operators(tracer: str, backend: str, warm: bool) -> None:
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    x = torch.rand(3, 3)
    if warm:
        compiled(x)
    wanted = [name for name in TRACERS[tracer](program, x) if name != "prim::Constant"]
    found = [name for name in TRACERS[tracer](compiled, x) if name != "prim::Constant"]
    assert found == wanted and any("sin" in name for name in found)
    told = {event.kind.id for event in torchdynamo.stats().events} - {"recompiled"}  # for what checks a trace
    assert told <= {"foreign_tracer"} and (told or tracer == "torch.export strict")
    assert torch.equal(compiled(x), program(x)) or backend == "inductor"


def test_a_dispatch_mode_counts_the_operators() -> None:
    compiled = torchcompile.compile(program)
    x = torch.rand(3, 3)
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            compiled(x)
        assert counter.get_total_flops() == 54


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.expected_eager("function_mode")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_mode_sees_each_call_once(backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend)
    x = torch.rand(3, 3)
    with Counting() as wanted:
        program(x)
    for _ in range(2):
        with Counting() as found:
            compiled(x)
        assert found.seen == wanted.seen
        compiled(x)


def _dual(f: Callable[..., Any], x: torch.Tensor) -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def _counted(f: Callable[..., Any], x: torch.Tensor) -> Any:
    with Counting():
        return f(x)


class Answering(TorchDispatchMode):
    """Has a function of the program's own in the place of an operator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.function(*args) if func is torch.ops.aten.neg.default else func(*args, **(kwargs or {}))


def _implements(f: Callable[..., Any], x: torch.Tensor) -> Any:
    with Answering(f):
        return x.neg() * 2


TRANSFORMS: dict[str, tuple[str, Callable[[Callable[..., Any], torch.Tensor], Any]]] = {
    "grad": ("transformed_call", lambda f, x: torch.func.grad(lambda v: f(v).sum())(x)),
    "vmap": ("transformed_call", lambda f, x: torch.vmap(f)(torch.stack([x, x + 1]))),
    "jvp": ("transformed_call", lambda f, x: torch.func.jvp(f, (x,), (x,))[1]),
    "jacrev": ("transformed_call", lambda f, x: torch.func.jacrev(f)(x)),
    "dual level": ("forward_derivatives", _dual),
    "function mode": ("function_mode", _counted),
    "operator": ("within_operator", _implements),
}


@pytest.mark.expected_eager("transformed_call", "forward_derivatives", "function_mode", "within_operator")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_a_graph_cannot_hold_runs_eagerly_and_is_told(transform: str, backend: str) -> None:
    reason, apply = TRANSFORMS[transform]
    x = torch.rand(3, 3, dtype=torch.float64)
    compiled = torchcompile.compile(program, backend=backend)
    whole = torchcompile.compile(program, backend=backend, fullgraph=True)
    for _ in range(2):  # cold, then with a version made
        torch.testing.assert_close(apply(compiled, x), apply(program, x))
        assert reason in {event.kind.id for event in torchdynamo.stats().fallbacks}
        with pytest.raises(torchdynamo.errors.Unsupported, match=reason):
            apply(whole, x)
        compiled(x)
        whole(x)


@pytest.mark.expected_eager("compiler")
@pytest.mark.parametrize("theirs", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_another_compiler(backend: str, theirs: str) -> None:
    x = torch.rand(3, 3, dtype=torch.float64)
    ours = torchcompile.compile(program, backend=backend)
    around = torch.compile(lambda v: ours(v).cos(), backend=theirs, fullgraph=True)
    within = torchcompile.compile(lambda v: torch.compile(program, backend=theirs)(v).cos(), backend=backend)
    given = torch.compile(program, backend=theirs)
    of_given = torchcompile.compile(lambda v: given(v).cos(), backend=backend, fullgraph=True)
    model = nn.Linear(3, 3).double()
    held = torchcompile.compile(Holder(torch.compile(model, backend=theirs)), backend=backend)
    holding = torch.compile(torchcompile.compile(model, backend=backend), backend=theirs, fullgraph=True)
    for _ in range(2):
        for compiled in (around, within, of_given):
            torch.testing.assert_close(compiled(x), program(x).cos())
        for compiled in (held, holding):
            torch.testing.assert_close(compiled(x), model(x))
    assert not torchdynamo.stats().fallbacks


def test_within_a_function_that_another_compiler_broke() -> None:
    ours = torchcompile.compile(program, backend="aot_eager")

    @torch.compile(backend="eager")
    def around(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return torch.compiler.disable(ours)(y)

    x = torch.rand(3, 3)
    torch.testing.assert_close(around(x), program(x + 1))
    assert torchdynamo.stats().graphs == 1 and not torchdynamo.stats().fallbacks


def test_the_written_call_is_compiled() -> None:
    ours = torchcompile.compile(program, backend="aot_eager")
    x = torch.rand(3, 3)
    torch.testing.assert_close(ours.__call__(x), program(x))
    assert torchdynamo.stats().graphs == 1


UNCAPTURED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "cond of two shapes": (
        "higher_order_operator",
        lambda x: torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v[1:].cos(), (x,)),
    ),
    "functionalize within": ("function_transform", lambda x: torch.func.functionalize(torch.sin)(x) + 1),
}


@pytest.mark.parametrize(
    "program_",
    [pytest.param(name, marks=pytest.mark.expected_eager(reason)) for name, (reason, _) in UNCAPTURED.items()],
)
def test_what_nobody_captures_breaks_for_a_reason(program_: str) -> None:
    reason, function = UNCAPTURED[program_]
    x = torch.rand(3, 3, dtype=torch.float64)
    compiled = torchcompile.compile(function, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), function(x))
    told = {event.kind.id for event in torchdynamo.stats().events}
    assert reason in told and "capture_fault" not in told
    with pytest.raises(torchdynamo.Unsupported, match=reason):
        torchcompile.compile(function, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_below_autograd_compiled_code_has_no_history(backend: str) -> None:
    """As where an operator is implemented: neither grad mode nor the tensors say that autograd sees no call."""
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    x = torch.rand(3, 3, requires_grad=True)
    for _ in range(2):
        assert compiled(x).requires_grad
        with torch._C._AutoDispatchBelowAutograd():
            assert torch.is_grad_enabled() and not program(x).requires_grad and not compiled(x).requires_grad
