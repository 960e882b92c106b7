"""Fake tensors over symbolic sizes: few guards, results kept by layout, errors that name the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from primtorch.errors import DataDependent, NoFormula
from primtorch.fake import FakeMode, FakeTensor, formula_of
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, hint_of


def fake() -> tuple[ShapeEnv, FakeMode, FakeTensor]:
    env = ShapeEnv()
    mode = FakeMode(env)
    dims = {0: env.symbol(6, "batch"), 1: env.symbol(16, "length")}
    return env, mode, mode.from_tensor(torch.randn(6, 16, 32), dynamic=dims)


# Program -> the guards that it may leave, as text.
PROGRAMS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "chunk of a fixed dim": (lambda x: x.chunk(2, -1), []),
    "pieces of sizes": (lambda x: x.split([2, x.shape[0] - 2]), []),
    "split": (lambda x: x.split(4), ["((s0 + 3)//4) == 2", "s0 >= 4"]),
    "unbind": (lambda x: x.unbind(0), ["s0 == 6"]),
    "slice": (lambda x: (x[:, :-1], x[1:], x[:, -1]), []),
    "bounded slice": (lambda x: x[:5], ["s0 >= 5"]),
    "heads": (lambda x: x.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2).reshape(-1, x.shape[1], 8), []),
    "attention": (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, []),
    "matrix of weights": (lambda x: F.linear(x, x.new_empty(8, 32)), []),
    "vector of weights": (lambda x: x @ x.new_empty(32), []),
    "heads of matrices": (lambda x: x[:, None].expand(-1, 3, -1, -1) @ x.new_empty(3, 32, 5), []),
    "matrix of many": (lambda x: x.new_empty(9, 32) @ x.mT, []),
    "masked attention": (lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(x.shape[1], x.shape[1])), []),
    "weighted sum": (lambda x: torch.einsum("blc,dc->bld", x, x.new_empty(7, 32)), []),
    "fused attention": (lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]), []),
    "norm": (lambda x: F.layer_norm(x, (32,)).mean((0, 1)), []),
    "loss": (lambda x: F.cross_entropy(x.reshape(-1, 32), torch.zeros(x.shape[:2], dtype=torch.long).view(-1)), []),
    "soft targets": (lambda x: F.cross_entropy(x[:, 0], x[:, 1].softmax(-1), label_smoothing=0.1), []),
    "positions": (lambda x: torch.arange(x.shape[1])[None] - torch.arange(x.shape[1])[:, None], []),
    "grouped heads": (lambda x: x[:, :, None].expand(-1, -1, 3, -1).reshape(x.shape[0], -1, 32), []),
    "top": (lambda x: x.topk(3, 1), ["s1 >= 3"]),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_leave_few_guards(name: str) -> None:
    program, expected = PROGRAMS[name]
    env, mode, x = fake()
    with mode:
        program(x)
    assert [str(guard.expr) for guard in env.guards] == expected


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_products_of_matrices_keep_symbols(grad: bool, autocast: bool) -> None:
    """Also where autograd records them, and under autocast."""
    env, mode, x = fake()
    weight = mode.from_tensor(torch.randn(8, 32, requires_grad=grad))
    x = x.clone().requires_grad_(grad)
    with mode, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for out in (
            F.linear(x, weight),
            x @ weight.mT,
            weight @ x.mT,
            x.mT @ x,
            F.scaled_dot_product_attention(x, x, x),
        ):
            assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
            assert str(out.shape[0]) == "s0" and out.requires_grad == grad
            if grad:
                assert str(torch.autograd.grad(out.sum(), x)[0].shape) == str(x.shape)
    assert not env.guards


def test_repeated_calls_give_equal_results() -> None:
    _, mode, x = fake()
    b, length = x.shape[0], x.shape[1]
    aten = torch.ops.aten
    calls = [
        lambda: x + x,
        lambda: x + 1,
        lambda: x.int() + 1.5,  # must not be taken for the call with a whole number
        lambda: x.int() + 1,
        lambda: x.view(b * length, 32),
        lambda: x.transpose(0, 1),
        lambda: aten.max.dim(x, 1)[1],
        lambda: x.new_zeros(b, 2),
    ]
    first = [call() for call in calls]
    for a, call in zip(first, calls, strict=True):
        again = call()
        assert again is not a
        assert str(TensorSpec.of(again)) == str(TensorSpec.of(a))
        assert hint_of(again.untyped_storage().nbytes()) == hint_of(a.untyped_storage().nbytes())
    assert [t.dtype for t in first[2:4]] == [torch.float32, torch.int32]
    assert x.transpose(0, 1).memory is x.memory
    assert (x + x).memory is not first[0].memory


def test_storage_size_is_that_of_a_real_tensor() -> None:
    env = ShapeEnv()
    mode = FakeMode(env)
    real = torch.randn(7, 5, 3).permute(1, 2, 0)
    x = mode.from_tensor(real, dynamic={0: env.symbol(5, "a"), 2: env.symbol(7, "b")})
    for program in (lambda t: t * 2, lambda t: t[1:] + 1, lambda t: t.contiguous().double()):
        assert hint_of(program(x).untyped_storage().nbytes()) == program(real).untyped_storage().nbytes()


def test_torchs_meta_kernels_get_answers() -> None:
    env = ShapeEnv()
    s, u = env.symbol(6, "s"), env.unbacked()
    assert env.evaluate_sym_node((s >= 2).node) is True
    assert not env.guards
    assert env.evaluate_sym_node((u == 3).node, fallback_value=False) is False
    assert env.evaluate_sym_node((u == 3).node, fallback_value=True) is True
    assert env.evaluate_sym_node((s == 6).node, fallback_value=False) is True
    assert [str(g.expr) for g in env.guards] == ["s0 == 6"]
    with pytest.raises(DataDependent):
        env.evaluate_sym_node((u == 3).node)


def test_a_kernel_that_asks_for_numbers_fixes_them_with_a_guard() -> None:
    env, _, x = fake()
    assert torch.ops.aten.sym_size.default(x)[2] == 32 and not env.guards
    assert torch.ops.aten.size.default(x) == [6, 16, 32]
    assert sorted(str(g.expr) for g in env.guards) == ["s0 == 6", "s1 == 16"]


def test_errors_name_the_users_line() -> None:
    def users_function(x: torch.Tensor) -> Any:
        return x.nonzero()

    x = FakeMode().from_tensor(torch.ones(3))
    with pytest.raises(DataDependent, match="users_function") as shape:
        users_function(x)
    assert shape.value.frames[-1].function == "users_function"
    with pytest.raises(NoFormula, match="test_errors_name_the_users_line"):
        torch.ops.aten.resize(x, [4])
    with pytest.raises(DataDependent, match="test_errors_name_the_users_line"):
        torch.equal(x, x)


def test_an_operator_without_a_formula_has_its_rules() -> None:
    _, _, x = fake()
    op = torch.ops.aten.diag_embed.default
    out = op(x)
    assert str(tuple(out.shape)) == "(s0, s1, 32, 32)"
    assert formula_of(op)(TensorSpec.of(torch.ones(2, 3))).shape == (2, 3, 3)


def test_a_program_in_cpp_that_wants_numbers_is_named_with_the_users_line() -> None:
    _, mode, x = fake()
    with pytest.raises(RuntimeError) as raised, mode:
        torch.tensor_split(x, mode.from_tensor(torch.tensor([2, 4])))
    note = raised.value.__notes__[0]
    assert "as numbers" in note and __file__ in note and "in test_a_program_in_cpp" in note
