"""Products of arrays and linear algebra as torch calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.rules import Axis, Rule, dim_of, known
from torchdynamo.arrays.values import Model, model_of
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.arrays.world import ArrayWorld


def _both(n: ArrayWorld, asked: Model, a: object, b: object) -> tuple[torch.Tensor, torch.Tensor]:
    if asked.dtype == bool:
        raise BreakGraph("numpy", "a product of truth values")
    return n.tensor(a, asked.dtype), n.tensor(b, asked.dtype)


def _dot(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    x, y = _both(n, asked, a, b)
    if not x.dim() or not y.dim():
        return x * y
    return torch.matmul(x, y) if y.dim() <= 2 else torch.tensordot(x, y, ([-1], [-2]))


def _inner(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    x, y = _both(n, asked, a, b)
    return torch.tensordot(x, y, ([-1], [-1])) if x.dim() and y.dim() else x * y


def _outer(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    x, y = (n.tensor(value, asked.dtype) for value in (a, b))
    return x.reshape(-1, 1) * y.reshape(1, -1)


def _vdot(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    x, y = _both(n, asked, a, b)
    x = torch.conj_physical(x) if x.is_complex() else x
    return torch.dot(x.reshape(-1), y.reshape(-1))


def _tensordot(n: ArrayWorld, asked: Model, a: object, b: object, axes: Any = 2) -> object:
    x, y = _both(n, asked, a, b)
    if isinstance(axes, int):
        return torch.tensordot(x, y, axes)
    first, second = ([int(part)] if numpy.ndim(part) == 0 else [int(one) for one in part] for part in axes)
    return torch.tensordot(x, y, (first, second))


def _einsum(n: ArrayWorld, asked: Model, subscripts: object, *operands: object, optimize: object = False) -> object:
    if not isinstance(subscripts, str) or asked.dtype == bool:
        raise BreakGraph("numpy", "numpy.einsum() without a text of subscripts")
    return torch.einsum(subscripts, *(n.tensor(operand, asked.dtype) for operand in operands))


def _kron(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    return torch.kron(*_both(n, asked, a, b))


def _cross(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    x, y = _both(n, asked, a, b)
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        raise BreakGraph("numpy", "numpy.cross() of vectors of two elements")
    x, y = torch.broadcast_tensors(x, y)
    return torch.linalg.cross(x, y)


def _on_regular(function: Callable[..., object]) -> Callable[..., object]:
    """NumPy is asked of regular matrices: it looks at the elements, and refuses singular ones."""

    def ask(*args: object, **kwargs: object) -> object:
        return function(*map(_regular, args), **kwargs)

    return ask


def _regular(value: object) -> object:
    if not isinstance(value, (numpy.ndarray, numpy.generic)) or value.ndim < 2:
        return value
    made = numpy.empty_like(value)
    made[...] = numpy.eye(*value.shape[-2:], dtype=value.dtype) * numpy.asarray(2, value.dtype)
    return made


def _floats(n: ArrayWorld, *values: object) -> tuple[torch.Tensor, ...]:
    """Operands as NumPy computes with them: whole numbers in double precision."""
    kinds = [numpy.asarray(model_of(value)).dtype for value in values]
    dtype = numpy.result_type(*(kind if kind.kind in "fc" else numpy.dtype("float64") for kind in kinds))
    return tuple(n.tensor(value, dtype) for value in values)


def _of_matrix(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, a: object) -> object:
        return getattr(torch.linalg, name)(*_floats(n, a))

    return Rule(program, _on_regular)


def _several(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, a: object) -> object:
        return tuple(getattr(torch.linalg, name)(*_floats(n, a)))

    return Rule(program, _on_regular)


def _solve(n: ArrayWorld, asked: Model, a: object, b: object) -> object:
    x, y = _floats(n, a, b)
    if y.dim() == 1:
        return torch.linalg.solve(x, y.unsqueeze(-1)).squeeze(-1)
    return torch.linalg.solve(x, y)


def _norm(
    n: ArrayWorld, asked: Model, x: object, ord: object = None, axis: Axis = None, keepdims: bool = False
) -> object:
    (given,) = _floats(n, x)
    if ord is None and axis is None:
        found = torch.linalg.vector_norm(given.reshape(-1))
        return found.reshape((1,) * given.dim()) if keepdims else found
    over = tuple(range(given.dim())) if axis is None else tuple(axis) if isinstance(axis, tuple) else (dim_of(axis),)
    if len(over) == 1 or ord is None:
        if isinstance(ord, str):
            raise BreakGraph("numpy", "numpy.linalg.norm() of this order")
        return torch.linalg.vector_norm(given, 2 if ord is None else ord, over, keepdim=keepdims)
    if ord not in ("fro", "nuc", 1, -1, 2, -2, numpy.inf, -numpy.inf):
        raise BreakGraph("numpy", "numpy.linalg.norm() of this order")
    return torch.linalg.matrix_norm(given, ord, over, keepdim=keepdims)


def _singular_values(
    n: ArrayWorld, asked: Model, a: object, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> object:
    """The vectors are each unique but for a sign, or less: libraries give different ones."""
    known(compute_uv, hermitian)
    if compute_uv or hermitian:
        raise BreakGraph("numpy", "numpy.linalg.svd() with its vectors")
    return torch.linalg.svdvals(*_floats(n, a))


def _inverse_of_any(n: ArrayWorld, asked: Model, a: object, rcond: object = None, hermitian: bool = False) -> object:
    known(rcond, hermitian)
    (given,) = _floats(n, a)
    return torch.linalg.pinv(given, rtol=1e-15 if rcond is None else float(rcond), hermitian=bool(hermitian))  # type: ignore[arg-type]


def _condition(n: ArrayWorld, asked: Model, x: object, p: object = None) -> object:
    if p not in (None, 2, -2):
        raise BreakGraph("numpy", "numpy.linalg.cond() of this order")
    found = torch.linalg.svdvals(*_floats(n, x))
    first, last = found[..., 0], found[..., -1]
    return last / first if p == -2 else first / last


def _multi_dot(n: ArrayWorld, asked: Model, arrays: Sequence[object]) -> object:
    if len(arrays) < 2:
        raise BreakGraph("numpy", "numpy.linalg.multi_dot() of one matrix")
    return torch.linalg.multi_dot([n.tensor(part, asked.dtype) for part in arrays])


def _matrix_power(world: ArrayWorld, asked: Model, a: object, n: int) -> object:
    if model_of(a).dtype.kind != "f" or int(n) < 0:
        raise BreakGraph("numpy", "numpy.linalg.matrix_power()")
    return torch.linalg.matrix_power(world.tensor(a), int(n))


PRODUCTS: dict[str, Rule] = {
    "inner": Rule(_inner), "outer": Rule(_outer), "vdot": Rule(_vdot), "tensordot": Rule(_tensordot),
    "einsum": Rule(_einsum), "kron": Rule(_kron), "cross": Rule(_cross),
}  # fmt: skip
DOT: dict[str, Rule] = {"dot": Rule(_dot)}
LINALG: dict[str, Rule] = {
    "inv": _of_matrix("inv"), "det": _of_matrix("det"), "cholesky": _of_matrix("cholesky"),
    "eigvalsh": _of_matrix("eigvalsh"), "slogdet": _several("slogdet"), "solve": Rule(_solve, _on_regular),
    "norm": Rule(_norm), "matrix_power": Rule(_matrix_power, _on_regular), "svd": Rule(_singular_values, _on_regular),
    "pinv": Rule(_inverse_of_any, _on_regular), "cond": Rule(_condition, _on_regular), "multi_dot": Rule(_multi_dot),
}  # fmt: skip
