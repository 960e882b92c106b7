"""Operators that are not torch's own: opaque calls of themselves, in forward and backward, with all their effects."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from operator_programs import CALLS, Program, draw_program

import torchcompile

BACKENDS = ("inductor", "aot_eager", "eager")


@pytest.fixture(autouse=True)
def forget() -> None:
    torchcompile.reset()


def inputs_of(program: Program, rows: int = 3, grad: bool = False) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return [
        torch.randn(rows, 4, dtype=torch.float64, generator=made).requires_grad_(grad) for _ in range(program.inputs)
    ]


def run(function: Any, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """Results, inputs afterwards, gradients, how often each kernel ran."""
    CALLS.clear()
    results = function(*inputs)
    differentiable = [r for r in results if r.requires_grad]
    if differentiable:
        sum(((i + 1) * r.sin().sum() for i, r in enumerate(differentiable)), torch.zeros(())).backward()
    gradients = [x.grad for x in inputs]
    return [r.detach() for r in results], [x.detach() for x in inputs], gradients, dict(CALLS)


def assert_one_graph() -> None:
    report = torchcompile.report()
    assert report.captured == 1 and not report.breaks and not report.fallbacks, str(report)


@pytest.mark.parametrize("mode", ["inference", "training", "writes", "writes to inputs", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_with_random_schemas(backend: str, mode: str) -> None:
    for _ in range(6):
        seed = random.randrange(10**9)
        rng = random.Random(seed)
        program = draw_program(rng, writes=mode not in ("training",), in_place=mode == "writes to inputs")
        grad = mode == "training"
        torchcompile.reset()
        compiled = torchcompile.compile(
            program.__call__, backend=backend, fullgraph=True, dynamic=True if mode == "dynamic" else None
        )
        for rows in (3, 5, 8) if mode == "dynamic" else (3, 3):
            wanted = run(program, inputs_of(program, rows, grad))
            got = run(compiled, inputs_of(program, rows, grad))
            what = f"seed {seed}: {[call.operator.schema() for call in program.calls]}"
            torch.testing.assert_close(got[:3], wanted[:3], msg=lambda text, what=what: f"{what}\n{text}")
            assert got[3] == wanted[3], what
        assert_one_graph()


_home = torch.library.Library("compile_operators", "DEF")
_home.define("added_(Tensor(a!) x, Tensor y) -> ()")


def _added(x: torch.Tensor, y: torch.Tensor) -> None:
    CALLS["added_"] += 1
    x.add_(y)


_home.impl("added_", _added, "CPU")


@torch.library.custom_op("compile_operators::exponential", mutates_args=())
def exponential(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


@exponential.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _exponential_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    twice = gradient.clone()
    torch.ops.compile_operators.added_(twice, gradient)
    return twice * ctx.saved_tensors[0]


exponential.register_autograd(
    _exponential_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_that_writes_in_the_backward_alone(backend: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return exponential(x * 2).sin()

    def gradient(function: Any) -> tuple[torch.Tensor, int]:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
        CALLS.clear()
        function(x).sum().backward()
        return x.grad, CALLS["added_"]

    got, wanted = gradient(torchcompile.compile(program, backend=backend, fullgraph=True)), gradient(program)
    torch.testing.assert_close(got[0], wanted[0])
    assert got[1] == wanted[1] == 1
    assert_one_graph()


def _bytes(*shape: int) -> torch.Tensor:
    return (torch.arange(shape[0] * shape[1]).reshape(shape) % 7 - 3).to(torch.int8)


# Operators of torch's own without a rule, and dtypes that kernels do not know: each is one graph.
WITHOUT_A_RULE: dict[str, Any] = {
    "_int_mm": lambda x: torch._int_mm(_bytes(32, 16), _bytes(16, 8)) + x[0, 0],
    "_weight_int8pack_mm": lambda x: torch.ops.aten._weight_int8pack_mm(
        x.detach().bfloat16().repeat(1, 4), _bytes(16, 16), torch.ones(16, dtype=torch.bfloat16)
    ),
    "float8 and back": lambda x: x.to(torch.float8_e4m3fn).to(torch.float64) * x,
    "float8 as bytes": lambda x: x.detach().to(torch.float8_e5m2).view(torch.uint8).to(torch.int32) + 1,
    "_scaled_mm": lambda x: torch._scaled_mm(
        torch.eye(16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn).t(),
        scale_a=torch.tensor(2.0), scale_b=torch.tensor(1.5), out_dtype=torch.bfloat16,
    ),
    "fake_quantize": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7).sin(),
    "wider view": lambda x: x.detach().float().view(torch.float64) + 1,
    "narrower view": lambda x: (x.detach() * 2).view(torch.float32) + 1,
    "histogramdd": lambda x: torch.histogramdd(x.detach(), [2, 3, 2, 2]).hist,
    "embedding_bag": lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 2], [1, 1]]), x, mode="max"),
    "weighted embedding_bag": lambda x: torch.nn.functional.embedding_bag(
        torch.tensor([0, 2, 1]), x, torch.tensor([0, 1]), mode="sum", per_sample_weights=x[:, 0].contiguous()
    ),
    "prims": lambda x: torch.ops.prims.sin(x.detach()) + torch.ops.prims.add(x.detach(), x.detach()),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_operators_without_a_rule(name: str, backend: str) -> None:
    program = WITHOUT_A_RULE[name]

    def both(function: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
        result = function(x)
        if result.requires_grad:
            result.sum().backward()
        return result, x.grad

    try:
        wanted = both(program)
    except RuntimeError as error:
        pytest.skip(f"eager: {error}")
    torch.testing.assert_close(both(torchcompile.compile(program, backend=backend, fullgraph=True)), wanted)
    assert_one_graph()


def _weight() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()


PLACES = torch.tensor([[0, 2], [1, 1]])
SPARSE: dict[str, Any] = {
    "embedding": lambda w: torch.nn.functional.embedding(PLACES, w, sparse=True),
    "embedding_bag": lambda w: torch.nn.functional.embedding_bag(PLACES, w, mode="sum", sparse=True),
    "torch.embedding": lambda w: torch.embedding(w, PLACES, -1, False, True),
    "overload": lambda w: torch.ops.aten.embedding(w, PLACES, sparse=True),
    "gather": lambda w: w.gather(1, PLACES, sparse_grad=True),
    "torch.gather": lambda w: torch.gather(w, 1, PLACES, sparse_grad=True),
}


@pytest.mark.expected_eager("sparse_gradient")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_break_the_graph_at_their_operator(name: str, backend: str) -> None:
    def program(w: torch.Tensor) -> torch.Tensor:
        return SPARSE[name](w).sin() * 2

    def gradient(run: Any) -> torch.Tensor:
        w = _weight()
        run(w).sum().backward()
        return w.grad

    got, wanted = gradient(torchcompile.compile(program, backend=backend)), gradient(program)
    assert got.layout is wanted.layout
    torch.testing.assert_close(got.to_dense(), wanted.to_dense())
    report = torchcompile.report()
    assert {event.kind.id for event in report.breaks} == {"sparse_gradient"} and not report.fallbacks


@pytest.mark.parametrize("name", SPARSE)
def test_without_a_gradient_nothing_is_sparse(name: str) -> None:
    compiled = torchcompile.compile(lambda w: SPARSE[name](w).sin(), fullgraph=True)
    for w in (_weight().detach(), _weight()):
        with torch.set_grad_enabled(not w.requires_grad):
            torch.testing.assert_close(compiled(w), SPARSE[name](w).sin())


_library = torch.library.Library("test_operators", "FRAGMENT")
for _name, _kind in (("rows", "CompositeExplicitAutograd"), ("made_of_others", "CompositeImplicitAutograd")):
    _library.define(f"{_name}(Tensor(a) x) -> Tensor(a)")
    _library.impl(_name, lambda x: x[1:], _kind)
torch.library.register_fake("test_operators::rows", lambda x: x[1:], lib=_library)


@pytest.mark.expected_eager("operator_view", "overlapping_inputs")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize(
    ("name", "breaks"), [("rows", ["operator_view", "overlapping_inputs"]), ("made_of_others", [])]
)
def test_views_by_operators_of_ones_own(name: str, breaks: list[str], backend: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        view = getattr(torch.ops.test_operators, name)(y)
        view.add_(1)
        return view.sin(), y

    compiled = torchcompile.compile(program, backend=backend)
    torch.testing.assert_close(compiled(torch.ones(3, 2)), program(torch.ones(3, 2)))
    report = torchcompile.report()
    assert [event.kind.id for event in report.breaks] == breaks and not report.fallbacks


PRIMS_VIEWS: dict[str, tuple[object, ...]] = {
    "broadcast_in_dim": ((2, 3, 4), (1, 2)), "collapse_view": (0, 1), "split_dim": (1, 2), "squeeze": ((),),
    "transpose": ((1, 0),), "view_of": (), "view_of_dtype": (torch.int64,),
}  # fmt: skip
_OF_COMPLEX_NUMBERS = {"conj", "imag", "real"}


def test_torchs_prims_have_no_other_views() -> None:
    listed = {
        schema.name.removeprefix("prims::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("prims::") and any(r.alias_info is not None for r in schema.returns)
        and not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    }  # fmt: skip
    assert listed - _OF_COMPLEX_NUMBERS <= PRIMS_VIEWS.keys()


@pytest.mark.expected_eager("operator_view")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", PRIMS_VIEWS)
def test_views_among_torchs_prims_break_the_graph(name: str, backend: str) -> None:
    view, arguments = getattr(torch.ops.prims, name), PRIMS_VIEWS[name]

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return view(y, *arguments).clone() * 3, y + 1

    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    compiled = torchcompile.compile(program, backend=backend)
    torch.testing.assert_close(compiled(x), program(x))
    report = torchcompile.report()
    assert [event.kind.id for event in report.breaks] == ["operator_view"] and not report.fallbacks


def test_kernels_that_derive_inside() -> None:
    """A kernel may be a program of its own: eager gives it autograd where nothing above it was for autograd."""
    library = torch.library.Library("deriving", "DEF")
    library.define("cube(Tensor x) -> Tensor")
    library.define("slope(Tensor x) -> Tensor")

    def slope(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().clone().requires_grad_()
            row = y[0] * 1
            row.mul_(y[0])
            return torch.autograd.grad((y**3).sum() + row.sum(), y)[0]

    library.impl("cube", lambda x: x**3 + x[0] ** 2, "CPU")
    library.impl("slope", slope, "CPU")
    for name in ("cube", "slope"):
        library.impl(name, torch.empty_like, "Meta")

    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.ops.deriving.slope(context.saved_tensors[0])

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    torch.library.register_autograd("deriving::cube", backward, setup_context=keep, lib=library)
    calls = (
        lambda x: torch.ops.deriving.cube(x * 2).sin(),
        lambda x: torch.ops.deriving.slope(x.detach() + 1) * x,
    )
    for call in calls:
        results = []
        for function in (call, torchcompile.compile(call, fullgraph=True)):
            x = torch.arange(6, dtype=torch.float64).reshape(2, 3).requires_grad_()
            y = function(x)
            results.append((y, *torch.autograd.grad(y.sum(), x)))
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
