"""Fake tensors: construction, aliases, data-dependent results, copies, modes, errors; formulas on the op database."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from primtorch.errors import DataDependent, DataDependentShape, FakeTensorError, NoFormula
from primtorch.fake import FakeMode, FakeTensor, formula_of, register_formula
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, expr_of

aten = torch.ops.aten


def test_from_tensor_keeps_what_it_should() -> None:
    env = ShapeEnv()
    mode = FakeMode(env)
    x = torch.randn(4, 6, 5).transpose(0, 1).requires_grad_()
    b = env.symbol(6, "b")
    fake = mode.from_tensor(x, dynamic={0: b})
    assert mode.from_tensor(x) is fake
    assert str(fake.stride()) == "(5, 5*s0, 1)"
    assert fake.requires_grad and fake.is_leaf
    parameter = mode.from_tensor(torch.nn.Parameter(torch.ones(3)))
    assert isinstance(parameter, torch.nn.Parameter)
    inner = mode.from_tensor(x * 2)
    assert inner.requires_grad and not inner.is_leaf


def test_views_share_memory() -> None:
    x = FakeMode().from_tensor(torch.randn(4, 6))
    assert x.t().memory is x.memory
    assert x.chunk(2)[1].view(-1).memory is x.memory
    assert x.chunk(2)[1].storage_offset() == 12
    assert (x + 1).memory is not x.memory
    assert x.add_(1) is x


def test_factories_and_constants_inside_the_mode() -> None:
    with FakeMode():
        x = torch.zeros(3, 4)
        assert isinstance(x, FakeTensor)
        known = torch.tensor(3)
        assert known.item() == 3
        known.add_(1)
        with pytest.raises(DataDependent):
            known.item()


def test_data_dependent_results() -> None:
    env = ShapeEnv()
    with FakeMode(env):
        x = torch.zeros(3, 4)
        found = x.nonzero()
        assert str(found.shape) == "torch.Size([u0, 2])"
        assert env.symbols["u0"].max == 12
        assert str(x[x > 0].shape) == "torch.Size([u1])"
        assert isinstance(torch.zeros((), dtype=torch.int64).item(), torch.SymInt)
        with pytest.raises(DataDependent):
            bool(x.sum() > 0)
    with FakeMode(), pytest.raises(DataDependentShape):
        torch.zeros(3).nonzero()


def test_counts_of_distinct_elements_are_symbols_of_the_mode() -> None:
    real = torch.randint(0, 3, (2, 3, 4))
    calls = {
        "unique": lambda t: torch.unique(t, return_counts=True),
        "unique of a dim": lambda t: torch.unique(t, dim=2, return_inverse=True, return_counts=True),
        "consecutive": lambda t: torch.unique_consecutive(t, return_inverse=True, return_counts=True),
        "consecutive of a dim": lambda t: torch.unique_consecutive(t, dim=-1, return_counts=True),
        "bincount": lambda t: (torch.bincount(t.flatten(), minlength=2),),
        "bincount with weights": lambda t: (torch.bincount(t.flatten(), t.flatten().double()),),
    }
    for name, call in calls.items():
        env = ShapeEnv()
        with FakeMode(env) as mode:
            found = call(mode.from_tensor(real))
        assert list(env.symbols) == ["u0"], name
        for fake, result in zip(found, call(real), strict=True):
            shape = tuple(r if str(s) == "u0" else s for s, r in zip(fake.shape, result.shape, strict=True))
            assert shape == tuple(result.shape) and fake.dtype is result.dtype, name
            values = (
                {"u0": next(r for s, r in zip(fake.shape, result.shape, strict=True) if str(s) == "u0")}
                if ("u0" in map(str, fake.shape))
                else {}
            )
            assert tuple(expr_of(s).evaluate(values) for s in fake.stride()) == result.stride(), name


def test_copies() -> None:
    x = FakeMode().from_tensor(torch.randn(4, 6).t())
    for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert isinstance(again, FakeTensor)
        assert TensorSpec.of(again) == TensorSpec.of(x)
    assert repr(x) == "FakeTensor(float32[6, 4](1, 6) cpu)"


def test_constructors_of_a_tensors_kind_take_symbolic_sizes() -> None:
    env = ShapeEnv()
    mode = FakeMode(env)
    x = mode.from_tensor(torch.ones(3, 2, dtype=torch.float64), dynamic={0: env.symbol(3, "x.size(0)")})
    with mode:
        made = (x.new(4), x.new(x.size()), x.new([1.0]), x.new_tensor([1.0, 2.0]), x.new_tensor(x[0]))
    shapes = [(4,), tuple(x.shape), (1,), (2,), (2,)]
    assert [tuple(m.shape) for m in made] == shapes and all(m.dtype is torch.float64 for m in made)
    assert not env.guards


def test_restriding_in_place() -> None:
    x = FakeMode().from_tensor(torch.randn(4, 6))
    x.t_()
    assert tuple(x.shape) == (6, 4) and x.stride() == (1, 6)
    x.unsqueeze_(0)
    assert tuple(x.shape) == (1, 6, 4)


def test_an_operator_that_only_writes_gives_nothing() -> None:
    with FakeMode():
        gradients, found, scale = [torch.empty(3), torch.empty(2)], torch.zeros(1), torch.ones(1)
        assert torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default(gradients, found, scale) is None
        assert torch.ops.aten._foreach_mul_.Scalar(gradients, 2.0) is None


def test_errors_are_eagers() -> None:
    mode = FakeMode()
    x, y = mode.from_tensor(torch.randn(4, 6)), mode.from_tensor(torch.randn(5, 6))
    real = (torch.randn(4, 6), torch.randn(5, 6))
    for program in (
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: a.view(5, 5),
        lambda a, b: a.sum(3),
        lambda a, b: a.transpose(0, 4),
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: a.expand(3, 3),
        lambda a, b: a.select(0, 9),
        lambda a, b: a[0].add_(a),
        lambda a, b: a.long().add_(0.5),
    ):
        with pytest.raises(Exception) as expected:
            program(*real)
        with pytest.raises(expected.type):
            program(x, y)
    with pytest.raises(FakeTensorError, match="real tensor"), FakeMode():
        real[0].add_(1)


SPARSE = {
    "sparse_coo_tensor": lambda t: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), t, (3, 3)),
    "sparse_csr_tensor": lambda t: torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 2]), t, (2, 3)),
    "to_sparse": lambda t: t.to_sparse(),
    "to_sparse_csr": lambda t: t.expand(2, 2).to_sparse_csr(),
}


@pytest.mark.parametrize("name", SPARSE)
def test_tensors_that_are_not_strided_have_no_formula(name: str) -> None:
    mode = FakeMode()
    t = mode.from_tensor(torch.ones(2))
    with mode, pytest.raises(NoFormula, match="sparse"):
        SPARSE[name](t)


def test_register_formula_for_a_new_operator() -> None:
    with torch.library._scoped_library("primtorch_fake_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        op = torch.ops.primtorch_fake_test.twice.default
        with pytest.raises(NoFormula, match="primtorch_fake_test::twice"):
            op(FakeMode().from_tensor(torch.ones(2)))
        register_formula("primtorch_fake_test::twice", lambda x: TensorSpec((x.shape[0] * 2,), (1,), x.dtype, x.device))
        assert op(FakeMode().from_tensor(torch.ones(2))).shape == (4,)


@pytest.mark.parametrize(
    "op, arguments",
    [
        (aten.add.Tensor, ((3, 1, 5), (4, 1))),
        (aten.mul.Tensor, ((), (2, 3))),
        (aten.where.self, ((2, 1), (1, 3), ())),
        (aten.atan2.default, ((0, 3), (3,))),
    ],
)
def test_promotion_and_strides(op: torch._ops.OpOverload, arguments: tuple[tuple[int, ...], ...]) -> None:
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ]
    for first in dtypes:
        for second in dtypes:
            tensors = []
            for i, shape in enumerate(arguments):
                dtype = torch.bool if op is aten.where.self and i == 0 else (first, second)[i % 2]
                t = torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
                tensors.append(t)
            try:
                real = op(*tensors)
            except (RuntimeError, NotImplementedError):
                continue
            spec = formula_of(op)(*map(TensorSpec.of, tensors))
            assert (spec.shape, spec.strides, spec.dtype) == (tuple(real.shape), real.stride(), real.dtype), (
                first,
                second,
            )
