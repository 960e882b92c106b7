"""Where values lie when a call looks at it: operands of attention and convolutions lie as eager's do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prim_graphs import build

import primtorch
from primtorch.spec import TensorSpec
from primtorch.symbolic.expr import constant, symbol
from torchinductor import CppBackend, InductorOptions, compile_graph, register_codegen
from torchinductor.indexing import at_least
from torchinductor.ir import Kernel
from torchinductor.lowering.context import ExternCall, ViewRef, dense, same_order, without_overlaps
from torchinductor.lowering.graph import lower_graph
from torchinductor.source import planned_operations

pytestmark = pytest.mark.usefixtures("double")


def attend(q, k, v, table):
    """Attention with a computed bias whose rows are padded to a multiple of eight, one for all of the batch."""
    length = q.shape[2]
    bias = torch.nn.functional.pad(table.sigmoid() * 4, (0, -length % 8))[..., :length]
    bias = bias.unsqueeze(0).expand(q.shape[0], -1, -1, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias)[0]


def examples(length):
    q, k, v = (torch.randn(2, 3, length, 16) for _ in range(3))
    return q, k, v, torch.randn(3, length, length)


@pytest.mark.parametrize("length", [5, 8, 13])
def test_a_padded_bias_stays_padded(length):
    inputs = examples(length)
    gm = primtorch.lower(primtorch.trace(attend, *inputs), opset="prims")
    lowered = lower_graph(gm, InductorOptions())
    (call,) = [op for op in lowered.operations if isinstance(op, ExternCall)]
    (bias,) = [ref for _, ref in call.kwargs if isinstance(ref, ViewRef)]
    row = -(-length // 8) * 8
    strides = tuple(s.as_int() for s in bias.strides)
    assert strides[0] == 0 and strides[2:] == (row, 1)
    assert [s.as_int() for s in lowered.buffers[bias.buffer].shape] == [1, 3, length, length]
    torch.testing.assert_close(compile_graph(gm, inputs)(*inputs)[0], attend(*inputs))


def test_a_copy_to_a_device():
    x = torch.randn(3, 4).t()
    gm = build(lambda p, x: (p.device_put(x, torch.device("cpu")), p.device_put(p.mul(x, x), torch.device("cpu"))), x)
    compiled = compile_graph(gm, (x,))
    copied, squared = compiled(x)
    assert torch.equal(copied, x) and copied.data_ptr() != x.data_ptr() and copied.stride() == x.stride()
    assert torch.equal(squared, x * x)


def test_a_constant_is_computed_where_it_is_wanted():
    there = torch.device("cuda:0")  # described, never used

    def scaled(p, x):
        scale = p.device_put(p.sqrt(p.mul(p.full((), 64.0, torch.float32, torch.device("cpu")), 3.0)), there)
        return p.div(x, p.expand(scale, x.shape))

    lowered = lower_graph(build(scaled, TensorSpec((5,), (1,), torch.float32, there)), InductorOptions())
    assert all(isinstance(op, Kernel) and op.device == there for op in lowered.operations)


dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=4)


@given(dims)
def test_layouts_said_to_have_no_overlaps_have_none(found):
    shape, strides = [s for s, _ in found], [t for _, t in found]
    said = without_overlaps(tuple(map(constant, shape)), tuple(map(constant, strides)))
    kept = [(s, t) for s, t in found if t]
    places = [0]
    for size, stride in kept:
        places = [p + i * stride for p in places for i in range(size)]
    if said:
        assert len(set(places)) == len(places)


def test_symbolic_rows_padded_to_a_multiple():
    length = symbol("s0")
    row = length + constant(8) - length % constant(8)
    assert at_least(row, length) and not at_least(length, row)
    one = constant(1)
    assert without_overlaps((constant(3), length, length), (length * row, row, one))
    assert without_overlaps((constant(3), length, length), (constant(0), row, one))
    assert not without_overlaps((constant(3), length, length), (one, row, one))


@settings(deadline=None)
@given(dims, st.randoms())
def test_holes_are_closed_in_the_order_that_eager_keeps(found, random):
    order = list(range(len(found)))
    random.shuffle(order)
    line = torch.empty([2 * size for size, _ in found]).permute(order)
    tensor = line[tuple(slice(None, None, random.choice((1, 2))) for _ in order)]
    tensor = tensor[tuple(slice(0, random.choice((1, 2, None))) for _ in order)]
    ours = dense(tuple(map(constant, tensor.shape)), tuple(map(constant, tensor.stride())))
    strides = tuple(s.as_int() for s in ours)
    eager = torch.empty_like(tensor).stride()
    assert [a for a, n in zip(strides, tensor.shape, strict=True) if n > 1] == [
        b for b, n in zip(eager, tensor.shape, strict=True) if n > 1
    ]
    assert same_order(tuple(map(constant, tensor.shape)), ours, tuple(map(constant, tensor.stride())))


@pytest.mark.filterwarnings("error")
class BiasesApart(CppBackend):
    """Computes on the CPU as a device whose convolutions add their biases by a kernel of their own."""

    traits = replace(CppBackend.traits, biases_apart=True)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["row-major", "channels last"])
def test_a_bias_is_added_where_the_result_is_read(rank: int, transposed: bool, last: bool) -> None:
    kind = getattr(torch.nn.functional, f"conv{'_transpose' if transposed else ''}{rank}d")

    def program(x, weight, bias):
        return kind(x, weight, bias).sin()

    x, weight = torch.randn(2, 4, *(5, 6, 7)[:rank]), torch.randn(4, 4, *(3, 2, 2)[:rank])
    if last and rank > 1:
        x = x.to(memory_format=torch.channels_last if rank == 2 else torch.channels_last_3d)
    inputs = (x, weight, torch.randn(4))
    gm = primtorch.lower(primtorch.trace(program, *inputs), opset="prims")
    register_codegen("cpu", BiasesApart())
    try:
        (call,) = [op for op in planned_operations(gm) if isinstance(op, ExternCall)]
        found, expected = compile_graph(gm, inputs)(*inputs)[0], program(*inputs)
    finally:
        register_codegen("cpu", CppBackend())
    assert len([arg for arg in call.args if isinstance(arg, ViewRef)]) == 2
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_convolutions_are_given_images_in_the_order_of_their_dims():
    """Tokens become images by a transposition: channels-last, with a hole where the class token was."""

    def grads(tokens, weight, gradient):
        def images(t):
            return (t * 2.0)[:, 1:].transpose(1, 2).reshape(2, 8, 4, 4)

        results = torch.ops.aten.convolution_backward(
            images(gradient), images(tokens), weight, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 8, [True] * 3
        )
        return results[0] + 1.0, results[1], results[2]

    inputs = torch.randn(2, 17, 8), torch.randn(8, 1, 3, 3), torch.randn(2, 17, 8)
    gm = primtorch.lower(primtorch.trace(grads, *inputs), opset="prims")
    for got, want in zip(compile_graph(gm, inputs)(*inputs), grads(*inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_a_clone_is_written_by_the_kernel_that_reads_its_source():
    x = torch.randn(4, 6)
    gm = build(lambda p, x: (p.mul(x, 2.0),), x)
    (doubled,) = gm.graph.output_node().args[0]
    with gm.graph.inserting_after(doubled):
        clone = gm.graph.call_function(torch.ops.aten.clone.default, (doubled,))
    clone.meta["val"] = doubled.meta["val"]
    gm.graph.output_node().args = ((doubled, clone),)
    gm.recompile()
    compiled = compile_graph(gm, (x,))
    first, second = compiled(x)
    assert compiled.stats.kernels == 1 and compiled.stats.aten_calls == 0
    assert torch.equal(first, x * 2) and torch.equal(second, first) and first.data_ptr() != second.data_ptr()
