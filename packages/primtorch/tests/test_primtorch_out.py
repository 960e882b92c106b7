"""out= on fakes: the dtypes that eager takes, the memory that it refuses, the sizes that it gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from primtorch.fake import FakeMode
from primtorch.symbolic import ShapeEnv

OPERATORS = {
    op.name: op
    for op in op_db
    if op.name
    in """abs add addcmul addmm all amax argmax baddbmm bmm cat clamp copysign cross cumprod cumsum div eq exp fft.fft
    fft.rfft floor full gather gt index_select kthvalue linalg.cholesky_ex linalg.qr linalg.svd log_softmax logsumexp
    lerp max maximum mean min mm mul nan_to_num neg nn.functional.gelu nn.functional.softplus norm pow prod round
    scatter_add sigmoid sin softmax sort stack std sub sum take topk tril var where zeros""".split()
    and not op.variant_test_name
}


def expanded(t: torch.Tensor) -> torch.Tensor | None:
    """Of the same shape, with one element for all of a dim."""
    dim = next((d for d, size in enumerate(t.shape) if size > 1 and t.numel()), None)
    return None if dim is None else t.select(dim, 0).unsqueeze(dim).clone().expand(t.shape)


TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "alike": torch.clone,
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "complex64": lambda t: t.to(torch.complex64),
    "empty": lambda t: t.new_empty(0),
    "overlapping": expanded,
}


def facts(call: Callable[[], Any]) -> Any:
    """The type of the error, or metadata of the results."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = pytree.tree_leaves(call())
    except Exception as error:  # its type is what is compared
        return type(error)
    return [(tuple(t.shape), t.stride() if t.numel() else (), t.dtype) for t in results]


KNOWN = {("cumsum", "float64"), ("cumsum", "float16"), ("cumsum", "complex64"), ("mm", "overlapping"),
         ("std", "complex64"), ("var", "complex64"), ("max", "complex64"), ("min", "complex64")}  # fmt: skip
"""Kernels that decide by the operands' layout, or have no code for a dtype."""


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_out_does_what_eager_does(name: str) -> None:
    op = OPERATORS[name]
    compared = 0
    for sample in list(op.sample_inputs("cpu", torch.float32))[:5]:
        arguments = (sample.input, *sample.args)
        results = op(*arguments, **sample.kwargs)
        for kind, target_of in TARGETS.items():
            targets = pytree.tree_map(target_of, results)
            if (name, kind) in KNOWN or any(t is None for t in pytree.tree_leaves(targets, lambda x: x is None)):
                continue
            mode = FakeMode(ShapeEnv())
            fake_args, fake_kwargs, fake_targets = pytree.tree_map(
                lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x,
                (arguments, sample.kwargs, targets),
            )
            expected = facts(lambda: op(*arguments, **sample.kwargs, out=targets))
            with mode:
                found = facts(lambda: op(*fake_args, **fake_kwargs, out=fake_targets))
            assert found == expected, f"{kind}: {sample}"
            compared += 1
    assert compared


WRITES = {
    "add_ to an expanded tensor": lambda t: t[:1].expand(3, 4).add_(1),
    "exp_ of an expanded tensor": lambda t: t[:1].expand(3, 4).exp_(),
    "fill_ of an expanded tensor": lambda t: t[:1].expand(3, 4).fill_(1),
    "copy_ of an overlapping part": lambda t: t[1:].copy_(t[:-1]),
    "add_ of an overlapping part": lambda t: t[1:].add_(t[:-1]),
    "add_ of another part": lambda t: t[:2].add_(t[2:]),
    "add_ of itself": lambda t: t.add_(t),
    "add to its operand": lambda t: torch.add(t, 1, out=t),
    "gather to its operand": lambda t: torch.gather(t, 0, torch.zeros(4, 4, dtype=torch.int64), out=t),
    "cat to its operand": lambda t: torch.cat([t[:2], t[2:]], out=t),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_shared_memory_is_refused_where_eager_refuses_it(name: str) -> None:
    real = torch.randn(4, 4)
    mode = FakeMode()
    x = mode.from_tensor(real)
    with mode:
        found = facts(lambda: WRITES[name](x))
    assert found == facts(lambda: WRITES[name](real))


def test_fakes_of_views_share_memory() -> None:
    base = torch.randn(6)
    mode = FakeMode()
    low, high, other = mode.from_tensor(base[:4]), mode.from_tensor(base[2:]), mode.from_tensor(base.clone())
    assert low.memory is high.memory and low.memory is not other.memory
    with pytest.raises(RuntimeError, match="single memory location"):
        low.add_(high)
