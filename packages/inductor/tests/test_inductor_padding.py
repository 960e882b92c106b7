"""Matrix products of 16-bit numbers at sizes that no vector load divides: when operands get margins, and the values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from prim_graphs import build
from test_inductor_symbolic import symbolic

import primtorch
from primtorch.spec import TensorSpec
from torchinductor import CppBackend, InductorOptions, TritonBackend, compile_graph, register_codegen
from torchinductor.compile import planned_program
from torchinductor.indexing import contiguous_strides, exprs
from torchinductor.ir import Kernel
from torchinductor.lowering.context import ExternCall, ViewRef
from torchinductor.parts import memory_of
from torchinductor.source import planned_operations

BF16, F32, CUDA = torch.bfloat16, torch.float32, torch.device("cuda")


class Padding(CppBackend):
    """Computes on the CPU, and takes any margin to pay."""

    traits = replace(CppBackend.traits, products=replace(TritonBackend.traits.products, unaligned=1.0))


@pytest.fixture
def padding() -> Iterator[None]:
    register_codegen("cpu", Padding())
    yield
    register_codegen("cpu", CppBackend())


class Grouping(CppBackend):
    """Takes launches to cost nothing, too, so that results of odd rows are written in groups of them."""

    traits = replace(CppBackend.traits, products=replace(TritonBackend.traits.products, unaligned=1.0, bandwidth=1.0))


@pytest.fixture
def grouping() -> Iterator[None]:
    register_codegen("cpu", Grouping())
    yield
    register_codegen("cpu", CppBackend())


def spec(*shape: int, dtype: torch.dtype = BF16, transposed: bool = False) -> TensorSpec:
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    strides = tuple(s.as_int() or 0 for s in contiguous_strides(exprs(shape)))
    if transposed:
        shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    return TensorSpec(shape, strides, dtype, CUDA)


def product_shapes(gm: torch.fx.GraphModule) -> list[tuple[tuple[int | None, ...], ...]]:
    """The shapes of the operands of each product."""
    calls = [op for op in planned_operations(gm) if isinstance(op, ExternCall)]
    return [tuple(tuple(s.as_int() for s in a.shape) for a in c.args if isinstance(a, ViewRef)) for c in calls]


# What a product of two given matrices becomes.
GIVEN = [
    ("a vocabulary", (8192, 768, 50257), False, True, ((8192, 768), (768, 50264))),
    ("a multiple of 4", (4096, 768, 128100), False, True, ((4096, 768), (768, 128104))),
    ("its weight's gradient", (50257, 8192, 768), True, False, ((50264, 8192), (8192, 768))),
    ("its input's gradient", (8192, 50257, 768), False, False, ((8192, 50264), (50264, 768))),
    ("rows need no margin", (8191, 768, 4096), False, False, ((8191, 768), (768, 4096))),
    ("a sum down columns needs none", (768, 8191, 4096), True, False, ((768, 8191), (8191, 4096))),
    ("a small product", (64, 100, 33), False, True, ((64, 100), (100, 33))),
    ("a classifier of a batch", (128, 1280, 1001), False, True, ((128, 1280), (1280, 1001))),
]


@pytest.mark.parametrize(("sizes", "a_columns", "b_columns", "made"), [g[1:] for g in GIVEN], ids=[g[0] for g in GIVEN])
def test_when_a_margin_pays(
    sizes: tuple[int, int, int], a_columns: bool, b_columns: bool, made: tuple[tuple[int, ...], ...]
) -> None:
    rows, depth, columns = sizes
    a, b = spec(rows, depth, transposed=a_columns), spec(depth, columns, transposed=b_columns)
    assert product_shapes(build(lambda p, a, b: p.sum(p.mm(a, b), (1,), False), a, b)) == [made]
    full = build(lambda p, a, b: p.mm(a, b), *(replace_dtype(s) for s in (a, b)))
    assert product_shapes(full) == [((rows, depth), (depth, columns))]


def replace_dtype(s: TensorSpec) -> TensorSpec:
    return TensorSpec(s.shape, s.strides, F32, s.device)


def test_a_step_over_a_vocabulary_writes_margins_and_copies_nothing() -> None:
    """Cast and pad in one: no kernel but those that there are anyway, and one for each margin."""

    def step(p, x, weight, slope):
        cast = p.convert_element_type(weight, BF16)
        logits = p.mm(x, p.permute(cast, (1, 0)))
        wide = p.convert_element_type(logits, F32)
        total = p.sum(p.exp(wide), (1,), False)
        grad = p.convert_element_type(p.mul(p.exp(wide), slope), BF16)
        return total, p.mm(p.permute(grad, (1, 0)), x), p.mm(grad, cast)

    inputs = spec(4096, 768), spec(50257, 768, dtype=F32), spec(4096, 50257, dtype=F32)
    gm = build(step, *inputs)
    assert product_shapes(gm) == [
        ((4096, 768), (768, 50264)),
        ((4096, 50264), (50264, 768)),  # frees the weight's cast, which the next result is as large as
        ((50264, 4096), (4096, 768)),
    ]
    moved = [op for op in planned_operations(gm) if not isinstance(op, ExternCall)]
    assert len(moved) == 4  # the cast, its margin; sums and gradients of rows; their margin


SIZES = list(itertools.product((8, 9), (16, 21), (24, 33)))


@pytest.mark.usefixtures("padding")
@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_values_are_those_without_margins(name: str) -> None:
    batch = (3,) if name.startswith("b") else ()
    draw = torch.Generator().manual_seed(0)
    for (n, k, m), a_columns, b_columns in itertools.product(SIZES, (False, True), (False, True)):
        a = torch.randn(*batch, *((k, n) if a_columns else (n, k)), generator=draw).half()
        b = torch.randn(*batch, *((m, k) if b_columns else (k, m)), generator=draw).half()
        a, b = a.mT if a_columns else a, b.mT if b_columns else b
        added = [torch.randn(m if n % 2 else (*batch, n, m), generator=draw).half()] if "add" in name else []
        function = getattr(torch, name)
        program = lambda *inputs: torch.relu(function(*inputs)) + 1  # noqa: B023, E731
        inputs = (*added, a, b)
        compiled = compile_graph(primtorch.lower(primtorch.trace(program, *inputs)), inputs, InductorOptions())
        (found,) = compiled(*inputs)
        truth = program(*(x.double() for x in inputs))
        eager = program(*inputs)
        assert found.stride() == eager.stride()
        limit = 2 * (eager.double() - truth).norm() + 1e-3 * truth.norm()
        assert (found.double() - truth).norm() <= limit, (n, k, m, a_columns, b_columns)


def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of a classifier's loss, whose products are of halves unless the inputs are doubles."""
    x, weight, bias = (t.detach().requires_grad_() for t in inputs[:3])
    factors = (x, weight, bias) if x.dtype is torch.float64 else (x.half(), weight.half(), bias.half())
    loss = F.cross_entropy(F.linear(*factors).to(x.dtype), inputs[3])
    return torch.autograd.grad(loss, (x, weight, bias))


@pytest.mark.usefixtures("padding")
def test_a_training_step_of_a_classifier() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=draw) / 4 for s in ((30, 16), (101, 16), (101,)))
    inputs = (x, weight, bias, torch.randint(0, 101, (30,), generator=draw))
    gm = primtorch.lower(primtorch.trace(step, *inputs))
    assert [shapes[-2:] for shapes in product_shapes(gm)] == [
        ((30, 16), (16, 104)),
        ((30, 104), (104, 16)),
        ((104, 30), (30, 16)),
    ]
    found = compile_graph(gm, inputs, InductorOptions())(*inputs)
    truth = step(*(t.double() for t in inputs[:3]), inputs[3])
    for ours, true, eager in zip(found, truth, step(*inputs), strict=True):
        assert ours.stride() == eager.stride()
        assert (ours - true).norm() <= 2 * (eager - true).norm() + 1e-3 * true.norm()


@pytest.mark.usefixtures("padding")
def test_rows_of_a_number_that_is_not_known() -> None:
    half = torch.float16
    specs = lambda n: [((n, 21), half), ((21, 33), half)]  # noqa: E731
    gm = symbolic(lambda p, n, x, w: p.neg(p.mm(x, w)), (5,), specs)
    assert product_shapes(gm) == [((None, 24), (24, 40))]
    compiled = compile_graph(gm, (), InductorOptions())
    for rows in (5, 8):
        x, w = torch.randn(rows, 21).half(), torch.randn(21, 33).half()
        torch.testing.assert_close(compiled(rows, x, w)[0], -(x @ w), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_that_are_written_in_groups(with_bias: bool) -> None:
    seed = random.randrange(1 << 30)
    draw = torch.Generator().manual_seed(seed)
    for rows, columns, unit in itertools.product((1, 2, 7, 8, 33), (1, 3, 8, 12, 21, 34), (1, 4, 8)):
        a = torch.randn(rows, 5, generator=draw, dtype=torch.float64)
        b = torch.randn(columns, 5, generator=draw, dtype=torch.float64).mT
        bias = torch.randn(columns, generator=draw, dtype=torch.float64) if with_bias else None
        found = torch.ops.torchinductor.odd_product(a, b, bias, unit)
        expected = a @ b if bias is None else a @ b + bias
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, msg=f"seed {seed}: {rows} x {columns}, unit {unit}")


def head(tokens: TensorSpec, weight: TensorSpec, *bias: TensorSpec) -> torch.fx.GraphModule:
    """A classifier over a vocabulary whose scores are returned, of sequences."""

    def scores(p, x, w, *bias):
        product = p.addmm(*bias, x, p.permute(w, (1, 0))) if bias else p.mm(x, p.permute(w, (1, 0)))
        return p.reshape(product, (x.shape[0] // 2, 2, w.shape[0]))

    return build(scores, tokens, weight, *bias)


def called(gm: torch.fx.GraphModule) -> list[str]:
    return [str(op.op) for op in planned_operations(gm) if isinstance(op, ExternCall)]


def test_scores_that_are_only_returned_are_written_without_a_margin() -> None:
    weight = spec(50257, 768)
    for bias in ((), (spec(50257),)):
        assert called(head(spec(16384, 768), weight, *bias)) == ["torchinductor.odd_product.default"]
    assert called(head(spec(512, 768), weight)) == ["aten.mm.default"]  # the weight would be read eight times
    assert called(head(spec(16384, 768), spec(50256, 768))) == ["aten.mm.default"]
    read = build(lambda p, x, w: p.sum(p.mm(x, p.permute(w, (1, 0))), (1,), False), spec(16384, 768), weight)
    assert called(read) == ["aten.mm.default"]


# What is returned of scores, and whether it lies where they do: then they have no margin.
OVER = {
    "with a row": (lambda p, s, row, mask: p.add(s, p.expand(row, s.shape)), True),
    "in another type on the way": (
        lambda p, s, row, mask: p.convert_element_type(p.exp(p.convert_element_type(s, F32)), BF16),
        True,
    ),
    "in another shape": (lambda p, s, row, mask: p.reshape(p.neg(s), (2, 4096, 50257)), True),
    "in another type": (lambda p, s, row, mask: p.convert_element_type(s, F32), False),
    "with a whole mask": (lambda p, s, row, mask: p.mul(s, mask), False),
    "twice": (lambda p, s, row, mask: (p.neg(s), p.exp(s)), False),
    "transposed": (lambda p, s, row, mask: p.permute(p.neg(s), (1, 0)), False),
}


@pytest.mark.parametrize("name", OVER)
def test_what_is_made_of_scores_point_by_point_goes_over_them(name: str) -> None:
    """A model that adds a row to its scores in place: it held them twice, with a margin and without."""
    made, over = OVER[name]
    program = lambda p, x, w, row, mask: made(p, p.mm(x, p.permute(w, (1, 0))), row, mask)
    specs = spec(8192, 256), spec(50257, 256), spec(50257), spec(8192, 50257)
    gm = build(program, *specs)
    assert called(gm) == ["torchinductor.odd_product.default" if over else "aten.mm.default"]
    peak = memory_of(planned_program(gm), {}).peak
    scores = 8192 * 50257 * 2
    assert (peak < 1.1 * scores) == over


@pytest.mark.usefixtures("grouping")
def test_a_second_factor_that_is_computed_is_stored_by_columns() -> None:
    seed = random.randrange(1 << 30)
    draw = torch.Generator().manual_seed(seed)
    x, first, second, row = (torch.randn(*s, generator=draw).half() for s in ((640, 24), (101, 8), (16, 101), (101,)))
    inputs = (x, first, second, row)
    program = lambda x, first, second, row: x @ torch.cat([first.t(), second]).sin() + row  # noqa: E731
    gm = primtorch.lower(primtorch.trace(program, *inputs))
    assert called(gm) == ["torchinductor.odd_product.default"]
    found, eager = compile_graph(gm, inputs)(*inputs)[0], program(*inputs)
    truth = program(*(t.double() for t in inputs))
    assert found.stride() == eager.stride()
    assert (found - truth).norm() <= 2 * (eager - truth).norm() + 1e-3 * truth.norm(), f"seed {seed}"


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("with_bias", [False, True])
def test_scores_without_a_margin_are_the_products(with_bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, *bias = (torch.randn(*s, generator=draw).half() for s in ((64, 16), (101, 16), *[(101,)] * with_bias))
    inputs = (x, weight, *bias)
    program = lambda x, w, *bias: F.linear(x, w, *bias).view(8, 8, -1)  # noqa: E731
    gm = primtorch.lower(primtorch.trace(program, *inputs))
    assert called(gm) == ["torchinductor.odd_product.default"]
    found, eager = compile_graph(gm, inputs)(*inputs)[0], program(*inputs)
    truth = program(*(t.double() for t in inputs))
    assert found.stride() == eager.stride()
    assert (found - truth).norm() <= 2 * (eager - truth).norm() + 1e-3 * truth.norm()


@pytest.mark.parametrize(("words", "apart"), [(50257, True), (50264, False), (9001, False)])
def test_long_odd_rows_are_not_stored_by_what_reads_aligned_ones(words: int, apart: bool) -> None:
    def both(p, x, w):
        scores = p.mm(x, p.permute(w, (1, 0)))
        return scores, p.amax(p.convert_element_type(scores, F32), (1,), False)

    gm = build(both, spec(8192, 768), spec(words, 768))
    kernels = [op for op in planned_operations(gm) if isinstance(op, Kernel)]
    reduction = next(k for k in kernels if k.inner)
    assert len(reduction.writes) == (1 if apart or words == 50264 else 2)
    assert (
        sum(not k.inner and any(k.buffers[b].shape[-1].as_int() == words for b in k.writes) for k in kernels) == apart
    )
