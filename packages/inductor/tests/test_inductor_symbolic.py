"""One kernel for every size: graphs with symbolic sizes, run at several of them."""

import pytest
import torch
from prim_graphs import build, symbolic

from torchinductor import InductorOptions, compile_graph


@pytest.mark.parametrize("native", [False, True])
def test_norms_and_softmax(native):
    def fn(p, b, s, x, w):
        flat = p.reshape(x, (b * s, 24))
        var, mean = p.var_mean(flat, (1,), 0.0, True)
        y = p.mul(p.sub(flat, p.expand(mean, flat.shape)), p.expand(p.rsqrt(p.add(var, 1e-5)), flat.shape))
        y = p.mul(y, p.expand(w, flat.shape))
        cols = p.permute(x, (0, 2, 1))
        e = p.exp(p.sub(cols, p.expand(p.amax(cols, (2,), True), cols.shape)))
        soft = p.div(e, p.expand(p.sum(e, (2,), True), cols.shape))
        return y, soft, p.sum(flat, (0,)), p.slice(x, 1, 1, s, 1), p.cat((x, x), 1)

    gm = symbolic(fn, (3, 5), lambda b, s: [((b, s, 24), torch.float64), ((24,), torch.float64)])
    compiled = compile_graph(gm, (), InductorOptions(native_executor=native))
    for b, s in ((3, 5), (7, 2), (2, 300), (40, 64)):
        x, w = torch.randn(b, s, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
        y, soft, total, part, double = compiled(b, s, x, w)
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (24,), w).reshape(b * s, 24))
        torch.testing.assert_close(soft, torch.softmax(x.permute(0, 2, 1), 2))
        torch.testing.assert_close(total, x.sum((0, 1)))
        assert torch.equal(part, x[:, 1:]) and torch.equal(double, torch.cat((x, x), 1))


def test_static_and_symbolic_share_results():
    x = torch.randn(6, 8)
    fixed = compile_graph(build(lambda p, x: p.sum(p.exp(x), (1,)), x), (x,), InductorOptions())
    free = compile_graph(
        symbolic(lambda p, n, x: p.sum(p.exp(x), (1,)), (6,), lambda n: [((n, 8), torch.float32)]),
        (),
        InductorOptions(),
    )
    assert torch.equal(fixed(x)[0], free(6, x)[0])
