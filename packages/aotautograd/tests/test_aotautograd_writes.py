"""Writes that torch's functionalization loses or has no kernel for: out= of programs of operators, in-place operators
over symbolic sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from aotautograd import aot_function
from primtorch.fake import FakeMode
from primtorch.fake.table import is_composite
from primtorch.functionalize import functional_region, unwrap, wrap
from primtorch.symbolic import ShapeEnv

aten = torch.ops.aten
A, B, V = torch.randn(4, 4, 4), torch.randn(4, 4, 4), torch.randn(5)
INTO: dict[str, Callable[..., Any]] = {
    "rank": lambda a, b, v, out: torch.linalg.matrix_rank(a, out=out),
    "rank, with a tolerance": lambda a, b, v, out: torch.linalg.matrix_rank(a, tol=0.5, out=out),
    "rank, with tolerances in tensors": lambda a, b, v, out: torch.linalg.matrix_rank(
        a, atol=torch.tensor(0.5), out=out
    ),
    "rank, Hermitian": lambda a, b, v, out: torch.linalg.matrix_rank(a @ a.mT, hermitian=True, out=out),
    "condition": lambda a, b, v, out: torch.linalg.cond(a, out=out),
    "condition by a norm": lambda a, b, v, out: torch.linalg.cond(a, "fro", out=out),
    "norm of matrices": lambda a, b, v, out: torch.linalg.matrix_norm(a, "nuc", out=out),
    "nuclear norm": lambda a, b, v, out: torch.nuclear_norm(a, [1, 2], out=out),
    "Frobenius norm": lambda a, b, v, out: torch.frobenius_norm(a, [1, 2], out=out),
    "pseudo-inverse": lambda a, b, v, out: torch.linalg.pinv(a, out=out),
    "power": lambda a, b, v, out: torch.linalg.matrix_power(a, 3, out=out),
    "chain of products": lambda a, b, v, out: torch.linalg.multi_dot([a[0], b[0], a[1]], out=out),
    "products of vectors": lambda a, b, v, out: torch.linalg.vecdot(a, b, out=out),
    "tensordot": lambda a, b, v, out: torch.tensordot(a, b, dims=2, out=out),
    "determinant": lambda a, b, v, out: torch.linalg.det(a, out=out),
    "Kronecker product": lambda a, b, v, out: torch.kron(a[0], b[0], out=out),
    "difference": lambda a, b, v, out: torch.diff(v, out=out),
    "quantile": lambda a, b, v, out: torch.quantile(v, 0.5, out=out),
    "average without NaN": lambda a, b, v, out: torch.nanmean(v, out=out),
    "transform": lambda a, b, v, out: torch.fft.hfft(v, out=out),
    "stack": lambda a, b, v, out: torch.hstack([v, v], out=out),
    "taken": lambda a, b, v, out: torch.take_along_dim(v, torch.tensor([1, 0]), 0, out=out),
    "clipped": lambda a, b, v, out: torch.clip(v, -0.1, 0.1, out=out),
    "power in float64": lambda a, b, v, out: torch.float_power(v, 2, out=out),
    "loss": lambda a, b, v, out: torch._C._nn.nll_loss(a[0], torch.tensor([0, 1, 2, 3]), out=out),
    "deviation": lambda a, b, v, out: torch.std(a, 1, out=out),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", sorted(INTO))
def test_an_out_tensor_is_written(name: str) -> None:
    expected = INTO[name](A, B, V, None)

    def program(*inputs: torch.Tensor) -> torch.Tensor:
        out = torch.full(expected.shape, 7, dtype=expected.dtype)
        result = INTO[name](*inputs, out)
        assert result is out
        return out + 1

    (found,) = pytree.tree_leaves(aot_function(program, fw_compiler=lambda gm, _: gm)(A, B, V))
    torch.testing.assert_close(found, expected + 1)


def test_a_size_that_a_tensor_has_is_no_change() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 3)
        return out.resize_(2, 3).add_(x).resize_as_(x).mul_(2) + torch.full((2, 3), 1.0).resize_((2, 3))

    x = torch.randn(2, 3)
    torch.testing.assert_close(aot_function(program, fw_compiler=lambda gm, _: gm)(x), program(x))


IN_PLACE = [op for op in op_db if op.inplace_variant is not None and torch.float32 in op.supported_dtypes("cpu")]
RESIZED = frozenset({"resize_", "resize_as_", "addbmm"})


@pytest.mark.parametrize("start", range(10))
def test_in_place_operators_take_symbolic_sizes(start: int) -> None:
    """One symbol for each size, so that what is broadcast in the sample is broadcast over symbols."""
    checked = 0
    for op in IN_PLACE[start::10]:
        if op.name in RESIZED:
            continue
        for sample in list(op.sample_inputs("cpu", torch.float32))[:3]:
            tensors = [t for t in pytree.tree_leaves((sample.input, sample.args)) if isinstance(t, torch.Tensor)]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = op.inplace_variant(sample.input.clone(), *sample.args, **sample.kwargs)
            except Exception:  # eager refuses the sample
                continue
            env = ShapeEnv()
            mode = FakeMode(env)
            symbols = {n: env.symbol(n, f"s{n}") for n in {n for t in tensors for n in t.shape if n > 1}}

            def fake(t: Any, mode: FakeMode = mode, symbols: dict[int, torch.SymInt] = symbols) -> Any:
                if not isinstance(t, torch.Tensor):
                    return t
                return wrap(mode.from_tensor(t, dynamic={d: symbols[n] for d, n in enumerate(t.shape) if n > 1}))

            first, args, kwargs = pytree.tree_map(fake, (sample.input, sample.args, sample.kwargs))
            with torch.no_grad(), mode, functional_region():
                written = unwrap(op.inplace_variant(first, *args, **kwargs))
            assert written.dtype == expected.dtype, op.name
            assert [str(s) for s in written.shape] == [str(symbols.get(n, n)) for n in expected.shape], op.name
            checked += 1
    assert checked


def test_every_operator_that_writes_has_a_kernel() -> None:
    """Of torch's own in-place operators functionalization knows each one but those that are none of a tensor's."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or packet.startswith("_") or not packet.endswith("_"):
            continue
        op = getattr(getattr(aten, packet), overload or "default")
        if op._schema.is_mutable and not is_composite(op):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Functionalize"), name
