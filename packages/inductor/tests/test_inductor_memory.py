"""When memory is taken and given back: results early, dead buffers freed, sums written over an operand."""

import random

import pytest
import torch
from prim_graphs import build
from program_memory import bytes_at_peak

from primtorch import lower, trace
from torchinductor import InductorOptions, compile_graph
from torchinductor.program import Alloc, Free, View

pytestmark = pytest.mark.usefixtures("double")

PLAIN = InductorOptions(reuse_buffers=False, fuse=False)


def test_a_sum_of_matrix_products_takes_one_buffer_for_itself():
    """Each product is a kernel's operand that dies there."""
    x, y, z = (torch.randn(8, 8) for _ in range(3))

    def program(p, x, y, z):
        total = p.mm(x, y)
        for a in (y, z):
            total = p.add(p.mm(a, z), p.exp(total))
        return total

    gm = build(program, x, y, z)
    compiled = compile_graph(gm, (x, y, z))
    assert bytes_at_peak(compiled) == 0  # kernels write over what ATen gave
    torch.testing.assert_close(compiled(x, y, z), compile_graph(gm, (x, y, z), PLAIN)(x, y, z))


def test_inputs_and_results_are_never_written_over():
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def program(p, x, w):
        product = p.mm(x, w)
        return product, p.exp(product), p.sin(x)

    compiled = compile_graph(build(program, x, w), (x, w))
    kept = x.clone()
    product, exp, sin = compiled.consume([x, w])
    torch.testing.assert_close((product, exp, sin), (kept @ w, (kept @ w).exp(), kept.sin()))
    assert torch.equal(x, kept)


def test_what_is_read_elsewhere_is_not_written_over():
    """A transposed sum reads places that other iterations have written by then."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def program(p, x, w):
        product = p.mm(x, w)
        return p.add(product, p.permute(product, (1, 0)))

    torch.testing.assert_close(compile_graph(build(program, x, w), (x, w))(x, w)[0], x @ w + (x @ w).t())


def test_a_reader_does_not_wait_for_a_far_operation():
    """What a product reads is not computed by one kernel with a sum at the other end of a chain of products."""
    x, w = torch.randn(16, 16), torch.randn(16, 16)

    def program(p, x, w):
        early = p.sin(x)
        result = p.mm(early, w)
        last = p.mm(x, w)
        for _ in range(12):
            last = p.mm(p.exp(p.mul(last, 1e-3)), w)
        return result, p.add(p.mul(last, 1e-3), early)

    compiled = compile_graph(build(program, x, w), (x, w))
    calls = [str(getattr(i, "op", i)) for i in compiled.program.instructions if not isinstance(i, (Alloc, Free, View))]
    assert "mm" in calls[1], calls[:4]


@pytest.mark.parametrize("repetition", range(8))
def test_programs_give_the_same_with_and_without_shared_memory(repetition):
    seed = random.randrange(1 << 30)  # not a parameter: workers have to collect the same names
    torch.manual_seed(seed)
    inputs = [torch.randn(6, 6, dtype=torch.float64) for _ in range(3)]

    def program(p, *inputs):
        draw = random.Random(seed)
        values = list(inputs)
        for _ in range(24):
            a, b = draw.choice(values), draw.choice(values[-4:])
            kind = draw.randrange(7)
            if kind == 0:
                values.append(p.mul(p.mm(a, b), 0.1))
            elif kind == 1:
                values.append(p.add(a, b))
            elif kind == 2:
                values.append(p.add(p.permute(a, (1, 0)), b))
            elif kind == 3:
                values.append(p.sub(a, p.expand(p.sum(b, (1,), True), (6, 6))))
            elif kind == 4:
                values.append(p.cat((p.slice(a, 0, 0, 3, 1), p.slice(b, 0, 3, 6, 1)), 0))
            elif kind == 5:
                values.append(p.flip(p.sin(a), (0,)))
            else:
                values.append(p.mm(a, p.tanh(b)))
        return tuple(draw.sample(values[3:], 3)) + (values[-1],)

    gm = build(program, *inputs)
    kept = [x.clone() for x in inputs]
    found = compile_graph(gm, inputs).consume(list(inputs))
    for a, b in zip(compile_graph(gm, kept, PLAIN)(*kept), found, strict=True):
        torch.testing.assert_close(b, a, msg=lambda text: f"seed {seed}: {text}")
    assert all(map(torch.equal, inputs, kept)), f"seed {seed}: an input was written"


def test_results_own_their_memory() -> None:
    """A rule may give its operand for what the graph calls a new value: one part of a concatenation, say."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, nothing = x.exp(), x[:0]
        return a, torch.cat([a, nothing]), torch.cat([x, nothing]), a.reshape(-1), torch.cat([y.expand(2, 4), nothing])

    x, y = torch.rand(3, 4, dtype=torch.float64), torch.rand(1, 4, dtype=torch.float64)
    results = compile_graph(lower(trace(program, x, y)))(x, y)
    for expected, result in zip(program(x, y), results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-14, atol=0)
    storages = [t.untyped_storage().data_ptr() for t in (*results, x, y)]  # type: ignore[union-attr]
    assert storages[0] == storages[3]  # a view of it
    assert len(set(storages)) == len(storages) - 1
