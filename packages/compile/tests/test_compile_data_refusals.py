"""What eager refuses for what is in tensors, compiled programs refuse, whether or not anybody reads the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import torchcompile
from primtorch.effects import has_effect, may_refuse

pytestmark = pytest.mark.expected_eager("graph_raised")

Program = Callable[[torch.Tensor], Any]
EYE = torch.eye(3, dtype=torch.float64)
NAN = EYE * float("nan")


def places(x: torch.Tensor) -> torch.Tensor:
    return x[0].long()


# Calls, with what they refuse. All take the unit matrix.
CALLS: dict[str, tuple[Program, torch.Tensor]] = {
    "cholesky": (torch.linalg.cholesky, -EYE),
    "inverse": (torch.linalg.inv, EYE * 0),
    "solution": (lambda x: torch.linalg.solve(x, x), EYE * 0),
    "eigenvalues": (torch.linalg.eigh, NAN),
    "singular values": (torch.linalg.svdvals, NAN),
    "pseudoinverse": (torch.linalg.pinv, NAN),
    "draws": (lambda x: torch.multinomial(x[0], 1), -EYE),
    "bernoulli": (torch.bernoulli, EYE * 2),
    "division": (lambda x: 7 // (x.long() + 1), -EYE),
    "remainder": (lambda x: torch.full((3,), 7) % (places(x) + 1), -EYE),
    "counts": (lambda x: torch.bincount(places(x), minlength=3), -EYE),
    "histogram": (torch.histc, NAN),
    "entropy of two": (lambda x: F.binary_cross_entropy(x, EYE), EYE * 2),
    "entropy of two of NaN": (lambda x: F.binary_cross_entropy(x, EYE), NAN),
    "entropy": (lambda x: F.cross_entropy(x, places(x)), EYE * 9),
    "margins": (lambda x: F.multi_margin_loss(x, places(x)), EYE * 9),
    "embedding": (lambda x: F.embedding(x.long(), x), EYE * 9),
    "bag": (lambda x: F.embedding_bag(x.long(), x), EYE * 9),
    "index": (lambda x: x[places(x)], EYE * 9),
    "index from the end": (lambda x: x[places(x)], EYE * -9),
    "two indices": (lambda x: x[places(x), places(x)], EYE * 9),
    "gather": (lambda x: x.gather(0, x.long()), EYE * 9),
    "take": (lambda x: x.take(x.long()), EYE * 9),
    "put": (lambda x: x.put(x.long(), x), EYE * 9),
    "scatter": (lambda x: x.scatter(0, x.long(), x), EYE * 9),
    "scattered sums": (lambda x: x.scatter_add(0, x.long(), x), EYE * 9),
    "scattered maxima": (lambda x: x.scatter_reduce(0, x.long(), x, "amax"), EYE * 9),
    "rows": (lambda x: x.index_select(0, places(x)), EYE * 9),
    "added rows": (lambda x: x.index_add(0, places(x), x), EYE * 9),
    "copied rows": (lambda x: x.index_copy(0, places(x), x), EYE * 9),
    "filled rows": (lambda x: x.index_fill(0, places(x), 1.0), EYE * 9),
    "repeats": (lambda x: x[0].repeat_interleave(places(x)), -EYE),
    "written rows": (lambda x: torch.zeros(5).index_put_((places(x),), torch.ones(())), EYE * 9),
    # Nothing is read at the place.
    "index of ones": (lambda x: torch.ones(5)[places(x)], EYE * 9),
    "index of ones times zero": (lambda x: torch.ones(5)[places(x)] * 0, EYE * 9),
    "index of an expanded row": (lambda x: x[:1, :1].expand(3, 4)[:, places(x)], EYE * 9),
    "chosen index of ones": (lambda x: torch.where(x[0] > 7, 0.0, torch.ones(5)[places(x)]), EYE * 9),
    "gather of zeros": (lambda x: torch.zeros(5).gather(0, places(x)), EYE * 9),
    "rows of zeros": (lambda x: torch.zeros(5, 3).index_select(0, places(x)), EYE * 9),
    "embedding of ones": (lambda x: F.embedding(places(x), torch.ones(5, 2)), EYE * 9),
    "loss of expanded scores": (lambda x: F.nll_loss(x[0, 0].expand(3, 5), places(x)), EYE * 9),
    "length of what is looked up": (lambda x: x[places(x)].shape[0] + x, EYE * 9),
    "zeros like what is looked up": (lambda x: torch.zeros_like(x[places(x)]), EYE * 9),
    "ones of the dtype of what is looked up": (lambda x: x[places(x)].new_ones(2), EYE * 9),
    "what is looked up, filled": (lambda x: x[places(x)].fill_(3.0), EYE * 9),
    "what is looked up, zeroed": (lambda x: (x[places(x)] * 2).zero_() + x, EYE * 9),
    "draws like a quotient": (lambda x: torch.rand_like(1.0 * (7 // (x.long() + 1))), -EYE),
}  # fmt: skip


def _unread(call: Program) -> Program:
    def program(x: torch.Tensor) -> torch.Tensor:
        call(x)
        return x + 1

    return program


def _asked(call: Program) -> Program:
    """Whether it works is what the program is after."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        try:
            call(x)
        except (RuntimeError, IndexError):
            return x - 1, False
        return x + 1, True

    return program


def _outcome(program: Program, x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    try:
        return program(x)
    except (RuntimeError, IndexError) as error:
        return IndexError if isinstance(error, IndexError) else RuntimeError


@pytest.mark.parametrize("name", CALLS)
def test_data_is_refused_though_nobody_reads_the_result(name: str) -> None:
    call, refused = CALLS[name]
    for program in (_unread(call), _asked(call)):
        compiled = torchcompile.compile(program)
        for x in (EYE, refused, EYE):
            found, expected = _outcome(compiled, x), _outcome(program, x)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True) if not isinstance(
                expected, type
            ) else None
            # Of places out of bounds, some operators say IndexError and others RuntimeError.
            assert isinstance(found, type) == isinstance(expected, type), (found, expected)
    compiled = torchcompile.compile(call)
    for x in (EYE, refused):
        assert isinstance(_outcome(compiled, x), type) == isinstance(_outcome(call, x), type) == (x is refused)


def test_what_was_looked_up_for_nothing_has_a_derivative_beside_it() -> None:
    def program(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x[at]
        return (x * x).sum() + x[:1].expand(5)[at].sum()

    compiled = torchcompile.compile(program)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for at in (torch.tensor([0, 3]), torch.tensor([4]), torch.tensor([-4, 1]), torch.tensor([-5])):
        if -4 <= int(at.min()) and int(at.max()) < 4:
            torch.testing.assert_close(
                torch.autograd.grad(compiled(x, at), x), torch.autograd.grad(program(x, at), x), rtol=1e-14, atol=0
            )
        else:
            with pytest.raises(IndexError):
                compiled(x, at)


COUNTED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "embedding": lambda x, n: F.embedding(torch.arange(n), x[:, None]),
    "behind others": lambda x, n: torch.cat([x[:, None], F.embedding(torch.arange(n), x[:, None])]),
    "index": lambda x, n: x[torch.arange(n)],
    "rows": lambda x, n: x.index_select(0, torch.arange(n) * 2 // 2),
    "every other": lambda x, n: x.index_select(0, torch.arange(n) * 2),
    "before the first": lambda x, n: x.gather(0, torch.arange(n) - 1),
    "gather": lambda x, n: x.gather(0, torch.arange(n)),
    "scatter": lambda x, n: x.scatter(0, torch.arange(n), 1.0),
    "added": lambda x, n: x.index_add(0, torch.arange(n), torch.ones(n, dtype=x.dtype)),
    "put": lambda x, n: x.index_put((torch.arange(n),), torch.ones((), dtype=x.dtype)),
}


@pytest.mark.parametrize("dynamic", (False, None))
@pytest.mark.parametrize("name", COUNTED)
def test_places_that_are_counted_are_looked_at_too(name: str, dynamic: bool | None) -> None:
    """Positions beyond the end of a table of positions: memory behind it is no embedding."""
    program = COUNTED[name]
    compiled = torchcompile.compile(program, dynamic=dynamic)
    x = torch.arange(5, dtype=torch.float64)
    for n in (3, 5, 2, 9, 6, 4):
        found, expected = (_outcome(lambda x, f=f: f(x, n), x) for f in (compiled, program))
        assert isinstance(found, type) == isinstance(expected, type), n
        if not isinstance(expected, type):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- what the table of operators has -------------------------------------------------------------


class _Refused(TorchDispatchMode):
    """Notes the operator that raised first."""

    by: tuple[torch._ops.OpOverload, tuple[Any, ...]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, IndexError):
            self.by = self.by or (func, args)
            raise


def _filled(sample: Any, number: float) -> Iterator[tuple[Any, ...]]:
    """The sample with all elements of one of its tensors made a number."""
    whole = (sample.input, sample.args, sample.kwargs)
    tensors = [t for t in tree_leaves(whole) if isinstance(t, torch.Tensor) and t.numel() and t.dtype != torch.bool]
    for chosen in tensors[:3]:
        if chosen.is_floating_point() or number == number:
            new = torch.full_like(chosen, number)
            yield tree_map(lambda t, chosen=chosen, new=new: new if t is chosen else t, whole)


_CRASHES = ("linalg.ldl_solve",)  # eager, for pivots out of range
_BY_SIZES = ("as_strided", "linspace")  # refused for sizes and numbers, which capture knows


@pytest.mark.parametrize("dtype", (torch.float64, torch.int64), ids=str)
def test_operators_that_refuse_data_are_known(dtype: torch.dtype) -> None:
    unknown = set()
    for op in op_db:
        if op.name in _CRASHES or op.name.startswith("_refs") or not op.supports_dtype(dtype, "cpu"):
            continue
        sample = next(iter(op.sample_inputs("cpu", dtype)), None)
        for number in (1000, -1000, 0, float("nan")) if sample is not None else ():
            for given, args, kwargs in _filled(sample, number):
                mode = _Refused()
                try:
                    with mode:
                        op(given, *args, **kwargs)
                except (RuntimeError, IndexError):
                    if mode.by is None:
                        continue
                    operator, operands = mode.by
                    draws = torch.Tag.nondeterministic_seeded in operator.tags
                    if not (draws or has_effect(operator) or may_refuse(operator, operands)):
                        unknown.add(operator._schema.name.removeprefix("aten::"))
                except Exception:  # noqa: BLE001, S112 - of torch's Python code, which capture runs, too
                    continue
    assert unknown - set(_BY_SIZES) == set()
