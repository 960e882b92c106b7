"""NumPy arrays in captured programs: one graph, and eager's values, dtypes, layouts, memory and errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from array_programs import captured, check, judge

import torchdynamo

Program = Callable[..., Any]


def doubles(*shape: int) -> np.ndarray:
    return np.linspace(-2, 3, int(np.prod(shape))).reshape(shape)


def tensors(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(torch.from_numpy(doubles(*shape)) for shape in shapes)


def arrays(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(doubles(*shape) for shape in shapes)


# -- between tensors and arrays --------------------------------------------------------------


def from_and_to(x: torch.Tensor) -> Any:
    a = x.numpy()
    b = np.tanh(a) * 2 + a.T.sum()
    return torch.from_numpy(b) * x, torch.as_tensor(b), torch.tensor(b, dtype=torch.float32), torch.from_numpy(a)


def written_from_both_sides(x: torch.Tensor) -> Any:
    a = x.numpy()
    a[0] = 7
    t = torch.from_numpy(a[1:])
    t += 1
    return a, x * 2, t, a.copy(), torch.asarray(a)


def of_parts_with_a_gradient(x: torch.Tensor) -> Any:
    w = (x * 1).requires_grad_(False)
    scale = np.abs(w.detach().cpu().numpy()).max(axis=0, keepdims=True)
    return x / torch.from_numpy(scale)


def functions_of_tensors(x: torch.Tensor) -> Any:
    a = x.numpy()
    return np.sin(x), np.greater(x, 0.5), x + a, x * a, np.concatenate([x, x]), np.asarray(x), np.sqrt(np.abs(x.sum()))


def scalars_and_tensors(x: torch.Tensor) -> Any:
    s = x.numpy().mean()
    return x * s, s - x, x.float() / s, torch.as_tensor(s)


@pytest.mark.parametrize(
    "program",
    [from_and_to, written_from_both_sides, of_parts_with_a_gradient, functions_of_tensors, scalars_and_tensors],
)
def test_between_tensors_and_arrays(program: Program) -> None:
    check(program, tensors((3, 4)), tensors((2, 4)), lambda: (torch.from_numpy(doubles(4, 3)).T,))


# -- arrays of the outside -------------------------------------------------------------------


GLOBAL = doubles(3)


class Holder:
    def __init__(self) -> None:
        self.scale = doubles(4)


def inputs(a: Any, b: Any) -> Any:
    holder = Holder()
    return a * b + GLOBAL.sum(), b, holder.scale[: len(b)] * b


def writes(a: Any, b: Any) -> Any:
    a[1:] = b[:-1]
    b *= 2
    a[a < 0] = 0.5
    a[0] += b.sum()
    return a[::-1], b[1]


def overlapping_writes(a: Any, b: Any) -> Any:
    a[1:] = a[:-1]
    a[::-1][:2] += 1
    return a, b


def held(a: Any, b: Any) -> Any:
    made = {"sum": a.sum(), "rows": list(b), "view": a[1:], "method": a.sum}
    return made["sum"], made["rows"], made["view"], made["method"]()


def filled(a: Any, b: Any) -> Any:
    """Arrays of known numbers, until the program writes to them what it does not know."""
    out, counts = np.zeros(3), np.arange(6).reshape(2, 3)
    part, backwards = out[1:], out[::-1]
    for place in range(3):
        out[place] = a[place] * b.sum()
    counts[0] += np.floor(a[:3]).astype(int)
    part *= 2
    grid = np.ones((2, 2))
    t = torch.from_numpy(grid)
    grid[0] = 5
    t += 1
    return out, part, backwards, counts, counts.T, t, grid, out.sum(), np.concatenate([out, a]), len(out), list(counts)


@pytest.mark.parametrize("program", [inputs, writes, overlapping_writes, held, filled])
def test_arrays_of_the_outside(program: Program) -> None:
    def singles() -> tuple[Any, ...]:
        return doubles(4).astype(np.float32), doubles(4).astype(np.float32)[::2].repeat(2)

    check(program, arrays((4,), (4,)), singles, lambda: (doubles(8)[::2], doubles(4)))


def test_inputs_that_share_memory() -> None:
    """A write to one array of the outside is seen through the other, whichever of them is a tensor."""

    def program(a: Any, b: Any) -> Any:
        a += 1
        return b * 2

    def shared() -> tuple[Any, ...]:
        memory = doubles(6)
        return memory[:4], memory[2:]

    def with_tensor() -> tuple[Any, ...]:
        memory = doubles(4)
        return memory, torch.from_numpy(memory)

    compiled = captured(program)
    for make in (arrays((4,), (4,)), shared, with_tensor, arrays((4,), (4,))):
        judge(program, compiled, make)


def test_guards() -> None:
    """Another dtype, shape or layout is another version; what torch cannot take runs as written."""

    def program(a: Any) -> Any:
        return a * 2, a.strides, a.flags.writeable if not a.size else None

    def read_only() -> tuple[Any, ...]:
        a = doubles(4)
        a.flags.writeable = False
        return (a,)

    compiled = captured(program)
    for make in (
        arrays((4,)), arrays((2, 3)), lambda: (doubles(4).astype(np.int32),), lambda: (doubles(2, 3).T,),
        lambda: (doubles(4)[::-1],), read_only, lambda: (doubles(4).astype(">f8"),), lambda: (np.array(["a"]) != "b",),
        lambda: (np.longdouble([1, 2]),), arrays((4,)), lambda: ([1.0, 2.0],),
    ):  # fmt: skip
        judge(program, compiled, make)


# -- what breaks, and what raises ------------------------------------------------------------


def mask_selected(a: Any) -> Any:
    return a[a > 0] * 2


def truth(a: Any) -> Any:
    return a * 2 if a.sum() > 0 else a * 3


def other_arguments(a: Any) -> Any:
    return np.add(a, 1, out=np.empty_like(a)), np.sum(a, where=a > 0), a.flatten("F"), np.interp(0.5, a, a)


def text(a: Any) -> Any:
    return str(a), f"{a[0]:.2f}"


def sets(a: Any) -> Any:
    return np.unique(a), np.nonzero(a), a in [1, 2] if a.size == 1 else None


def under_autocast(a: Any) -> Any:
    with torch.autocast("cpu"):
        return a.astype(np.float32) @ a.astype(np.float32)


def weighted(a: Any) -> Any:
    """Weights whose sum is zero raise."""
    return np.average(a, weights=np.abs(a)), a * 2


@pytest.mark.parametrize("program", [mask_selected, truth, other_arguments, text, sets, under_autocast, weighted])
def test_what_breaks(program: Program) -> None:
    check(program, arrays((4,)), arrays((5,)), breaks=True)


RAISING: tuple[Program, ...] = (
    lambda a: a.astype(int).__iadd__(1) + a.reshape(7), lambda a: a + np.ones(3), lambda a: a[9], lambda a: a.sum(axis=3),
    lambda a: np.concatenate([a, a[None]]), lambda a: torch.from_numpy(a[::-1]), lambda a: ~a, lambda a: a.nothing,
    lambda a: np.linalg.inv(a), lambda a: np.max(a[:0]), lambda a: a @ np.ones(3), lambda a: hash(a), lambda a: len(a[0]),
    lambda a: a[1.5], lambda a: np.int8(1) + a.astype(np.int8) + 300, lambda a: bool(a), lambda a: float(a),
    lambda a: torch.from_numpy(a).requires_grad_().numpy(), lambda a: torch.from_numpy(a).bfloat16().numpy(),
    lambda a: np.broadcast_to(a, (2, 4)).__setitem__(0, 1), lambda a: iter(a[0]),
)  # fmt: skip


@pytest.mark.parametrize("program", RAISING, ids=range(len(RAISING)))
def test_errors_are_eagers(program: Program) -> None:
    compiled = captured(program)
    judge(program, compiled, arrays((4,)))


def casting(a: Any) -> Any:
    a += 0.5
    return a


def test_writes_that_numpy_refuses() -> None:
    compiled = captured(casting)
    judge(casting, compiled, lambda: (np.arange(3),))
    judge(casting, compiled, arrays((3,)))


def test_floating_point_errors_that_raise() -> None:
    def program(a: Any) -> Any:
        return a / 0

    compiled = captured(program)
    judge(program, compiled, arrays((3,)))
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        compiled(doubles(3))


# -- functions -------------------------------------------------------------------------------


ELEMENTWISE = (
    "sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh exp exp2 expm1 log log2 log10 log1p sqrt"
    " square reciprocal negative positive absolute fabs floor ceil trunc rint sign isnan isinf isfinite signbit invert"
    " conjugate deg2rad rad2deg logical_not modf"
).split()
TWO_OPERANDS = (
    "add subtract multiply true_divide floor_divide remainder fmod divmod power float_power maximum minimum fmax fmin"
    " arctan2 hypot copysign nextafter logaddexp logaddexp2 heaviside equal not_equal less less_equal greater"
    " greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor left_shift right_shift gcd lcm"
).split()
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, 7.0, 100.0, np.inf, -np.inf, np.nan]


def elements(dtype: str) -> Any:
    with np.errstate(all="ignore"):
        if np.dtype(dtype).kind in "biu":
            return np.array([0, 1, 2, 3, 7, 100, 5, 6, 90, 4, 11, 12]).astype(dtype)
        return np.array(SPECIAL).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_one_array(name: str, dtype: str) -> None:
    function = getattr(np, name)
    judge(function, captured(lambda a: function(a)), lambda: (elements(dtype),))


@pytest.mark.parametrize("name", TWO_OPERANDS)
def test_functions_of_two_operands(name: str) -> None:
    """Dtypes by NumPy's rules, those of Python's numbers included; special values."""
    function = getattr(np, name)
    for dtype in DTYPES:
        for other in (*DTYPES, 2, 0, 2.5, np.float32(0.5), np.int64(3)):
            second = elements(other)[::-1] if isinstance(other, str) else other
            judge(
                function, captured(lambda a, b: function(a, b)),
                lambda dtype=dtype, second=second: (elements(dtype), second.copy() if hasattr(second, "shape") else second),
            )  # fmt: skip


CALLS: tuple[Program, ...] = (
    lambda a, b: (np.cov(a), np.cov(b, rowvar=False), np.cov(a[0]), np.cov(a, bias=True), np.cov(b, ddof=2), np.corrcoef(a), np.corrcoef(b.T, rowvar=False)),
    lambda a, b: (np.atleast_3d(a), np.atleast_3d(b[0]), np.atleast_3d(a.sum()), np.corrcoef(a[0])),
    lambda a, b: (a.sum(), a.sum(0), a.sum(axis=(0, 1)), a.sum(-1, keepdims=True), np.sum(b, dtype=np.float32)),
    lambda a, b: (a.mean(), np.mean(b, 0), np.std(a, axis=1), a.var(ddof=1), np.var(b, axis=0, keepdims=True)),
    lambda a, b: (a.max(), a.min(0), np.amax(b, axis=1), a.argmax(), a.argmin(axis=1), np.argmax(b > 0, 0)),
    lambda a, b: ((a > 0).any(), (b > 0).all(axis=0), np.any(a, 1), np.prod(b, axis=1), b.prod()),
    lambda a, b: (a.cumsum(), np.cumsum(b, axis=1), a.cumprod(0), np.diff(a), np.diff(b, n=2, axis=0), np.ptp(a, axis=0)),
    lambda a, b: (np.median(a), np.median(b, axis=0), np.average(a, axis=0, weights=np.arange(1.0, 4)), np.count_nonzero(a)),
    lambda a, b: (a.reshape(4, 3), a.reshape(-1), a.T.reshape(12), a.ravel(), b.T.ravel(), a.flatten(), a.reshape((2, -1))),
    lambda a, b: (a.transpose(), a.transpose(1, 0), np.transpose(a, (1, 0)), a.swapaxes(0, 1), np.moveaxis(a, 0, -1)),
    lambda a, b: (a[None], np.expand_dims(a, 1), a[:, None].squeeze(), np.squeeze(a[:, None], 1), np.broadcast_to(a, (2, 3, 4))),
    lambda a, b: (np.concatenate([a, b]), np.concatenate((a, b), axis=1), np.stack([a, b]), np.vstack([a, b]), np.hstack([a, b])),
    lambda a, b: (np.split(a, 2, axis=1), np.array_split(a, 2), np.hsplit(a, [1, 3]), np.vsplit(b, 3)),
    lambda a, b: (np.repeat(a, 2), a.repeat(2, axis=0), np.tile(a, (2, 1)), np.roll(a, 1), np.roll(a, 2, axis=1)),
    lambda a, b: (np.flip(a), np.flipud(a), np.fliplr(a)[0], np.flip(a, 1)[:, 1:], a[::-1, ::2].T, a[::-1].sum(0)),
    lambda a, b: (np.where(a > 0, a, b), np.where(a > 0, 1, 0.5), np.clip(a, -1, 1), a.clip(0), a.clip(max=1), np.clip(a, b, 2)),
    lambda a, b: (np.sort(a), np.sort(a, axis=0), np.argsort(a, kind="stable"), np.take(a, [0, 2], axis=1), a.take(3)),
    lambda a, b: (a.dot(b.T), np.dot(a, b.T), a @ b.T, a[0] @ b[0], np.outer(a[0], b[:, 0]), np.inner(a, b), np.vdot(a, b)),
    lambda a, b: (np.einsum("ij,kj->ik", a, b), np.einsum("ij->i", a), np.tensordot(a, b, 2), np.tensordot(a, b, ([1], [1]))),
    lambda a, b: (np.zeros_like(a), np.ones_like(b), np.full_like(a, a[0, 0]), np.full((2,), a.max()), np.linspace(a.min(), 1, 5)),
    lambda a, b: (a.astype(int), a.astype(np.float32), a.astype(np.float64, copy=False), np.asarray(a), np.array(a), a.copy()),
    lambda a, b: (np.trace(a), a.diagonal(), np.diag(a), np.diag(a[0]), np.tril(a), np.triu(a, 1), a.diagonal(1)),
    lambda a, b: (np.linalg.norm(a), np.linalg.norm(a, axis=1), np.linalg.norm(a, ord=1, axis=0), np.linalg.norm(a[0], np.inf)),
    lambda a, b: (np.linalg.inv(a[:, :3] + 9 * np.eye(3)), np.linalg.det(a[:, :3] + np.eye(3)), np.linalg.solve(a[:, :3] + 9 * np.eye(3), b)),
    lambda a, b: (np.linalg.cholesky(a @ a.T + np.eye(3)), np.linalg.eigvalsh(a @ a.T), np.linalg.slogdet(a @ a.T + np.eye(3))),
    lambda a, b: (np.meshgrid(a[0], b[0]), np.pad(a, 1), np.pad(a, ((0, 1), (2, 0)), constant_values=3), np.append(a, b)),
    lambda a, b: (np.round(a, 1), a.round(), np.nan_to_num(a), np.isclose(a, b), np.searchsorted(np.sort(a[0]), b[0])),
    lambda a, b: (a[1], a[1:, 2], a[..., 0], a[0, 1], a[[0, 2]], a[[0, 1], [1, 2]], a[:, [1, 0]], a[-1:0:-1], a[np.argmax(a, 0)]),
    lambda a, b: (-a, +a, abs(a), ~(a > 0), (a > 0) & (b > 0), (a > 0) | (b > 0), 2 - a, 2**b, a // 0.5, a % 0.7, 1 / (a + 9)),
    lambda a, b: (a.shape, a.ndim, a.size, a.dtype, a.T.strides, len(a), a.nbytes, a.real, isinstance(a, np.ndarray), type(a[0, 0])),
    lambda a, b: ([row.sum() for row in a], [x for x in a[0]], sum(a[0]), [p @ q for p, q in zip(a, b)], list(enumerate(a))),
    lambda a, b: (np.float32(a.sum()) if False else a.sum().astype(np.float32), a.sum() + 1, a.sum() * b, a.sum() > 0, -a.mean()),
    lambda a, b: (np.array([a.sum(), b.sum()]), np.array([a[0], b[1]]), np.asarray([[a[0, 0], 1.0], [2.0, b[0, 0]]])),
    lambda a, b: (np.float32(a), np.float64(a.sum()), np.int64(b[0]), np.array([x * i for i, x in enumerate(a[0])]), np.max(np.diag(a))),
    lambda a, b: (a == b, a != a, a <= 0, np.maximum(a, b).mean(axis=0) - np.minimum(a, 0).std(), np.hypot(a, b)[1:]),
    lambda a, b: (np.kron(a, b), np.cross(a[:, :3], b[:, :3]), np.take_along_axis(a, np.argsort(a, axis=1, kind="stable"), axis=1)),
)  # fmt: skip


@pytest.mark.parametrize("program", CALLS, ids=range(len(CALLS)))
def test_functions(program: Program) -> None:
    check(program, arrays((3, 4), (3, 4)), lambda: (doubles(3, 4).astype(np.float32), doubles(3, 4)))


WRITES: tuple[Program, ...] = (
    lambda a, b: (a.__setitem__(0, b[1]), a.__setitem__((slice(None), 1), 5), a)[2],
    lambda a, b: [a.sort(), b.sort(0), a, b][2:],
    lambda a, b: [a.fill(3), b[0].fill(a[0, 0]), b][2:],
)  # fmt: skip


def in_place(a: Any, b: Any) -> Any:
    v = a[1:]
    v += b[1:]
    v[:, 0] *= 2
    a -= b.sum(axis=0)
    a[0] /= 3
    a[:, ::-1][:, 0] = 9
    a[[0, 1]] = b[[1, 2]]
    a[:, [0, 3]] = 0
    b[b > 1] = a.min()
    b[0, 0] = a[1, 1]
    c = b.T
    c[2] **= 2
    b.sort(axis=0)
    s = a.sum()
    s += 1
    d = np.zeros_like(a)
    d[0], d[1:] = a[0], v
    d.fill(s)
    return v, a, c, s, d


def test_writes() -> None:
    check(in_place, arrays((3, 4), (3, 4)), lambda: (doubles(3, 4).astype(np.float32), doubles(3, 4)))


def test_graph_breaks_between() -> None:
    """Arrays outlive a break with their memory."""

    def program(x: torch.Tensor, b: Any) -> Any:
        a = x.numpy()
        part = a[1:]
        backwards = a[::-1]
        total = a.sum()
        torchdynamo.graph_break()
        part += b
        rows = iter(a)
        first = next(rows)
        torchdynamo.graph_break()
        return part * total, x + 1, backwards, first, next(rows), a

    check(program, lambda: (torch.from_numpy(doubles(3, 4)), doubles(4)), breaks=True)


def test_no_grad_histories_are_told_of_writes() -> None:
    """A write by NumPy to what a derivative reads is none that a graph can hold."""

    def program(x: torch.Tensor) -> Any:
        y = x * x
        x.detach().numpy()[0] = 3
        return y.sum()

    compiled = captured(program)
    grads = []
    for function in (program, compiled):
        x = torch.from_numpy(doubles(3)).requires_grad_()
        function(x).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


# -- random programs -------------------------------------------------------------------------


STEPS: tuple[Program, ...] = (
    lambda a, b, k: a + b, lambda a, b, k: a * 2 - b, lambda a, b, k: np.maximum(a, b), lambda a, b, k: a.T, lambda a, b, k: a[::-1],
    lambda a, b, k: a / (np.abs(b) + 1), lambda a, b, k: np.where(a > b, a, b * k), lambda a, b, k: a - a.mean(axis=0),
    lambda a, b, k: np.sin(a).astype(np.float32), lambda a, b, k: np.concatenate([a, b])[:k], lambda a, b, k: a @ b.T,
    lambda a, b, k: a.reshape(-1)[: k * k].reshape(k, k) if a.size >= k * k else a, lambda a, b, k: np.sort(a, axis=0),
    lambda a, b, k: a.cumsum(axis=-1), lambda a, b, k: np.clip(a, -k, k), lambda a, b, k: a[:, ::-1] if a.ndim > 1 else a[::2],
    lambda a, b, k: (a > 0).astype(int) * k, lambda a, b, k: a // k, lambda a, b, k: a % (k + 0.5), lambda a, b, k: np.roll(a, k),
    lambda a, b, k: a.sum(axis=0, keepdims=True) + b, lambda a, b, k: np.stack([a, b]).max(axis=0), lambda a, b, k: np.tanh(a) ** 2,
    lambda a, b, k: np.mean(a, axis=-1), lambda a, b, k: a.std(axis=0, keepdims=True), lambda a, b, k: a.argmax(axis=0),
    lambda a, b, k: np.diff(a, axis=0), lambda a, b, k: np.outer(a[0], b[0]), lambda a, b, k: a[[0, -1]], lambda a, b, k: a[0],
    lambda a, b, k: np.minimum(a, b.max()), lambda a, b, k: np.split(a, [1])[k % 2], lambda a, b, k: a[1:, :k] if a.ndim > 1 else a[1:],
    lambda a, b, k: np.vstack([a, b]), lambda a, b, k: np.tile(a, (k, 1)), lambda a, b, k: a[..., None], lambda a, b, k: np.swapaxes(a, 0, -1),
    lambda a, b, k: np.flip(a), lambda a, b, k: np.broadcast_to(a, (2, *a.shape))[1], lambda a, b, k: np.full_like(a, k), lambda a, b, k: a.ravel(),
    lambda a, b, k: np.take(a, [0, 1], axis=-1), lambda a, b, k: np.round(a, 1), lambda a, b, k: np.zeros_like(b), lambda a, b, k: a > b,
    lambda a, b, k: a[..., None].squeeze(), lambda a, b, k: a + k, lambda a, b, k: np.repeat(a, 2, axis=0)[::2], lambda a, b, k: a.copy(),
)  # fmt: skip
STORES: tuple[Program, ...] = (
    lambda a, b, k: a.__setitem__(0, k), lambda a, b, k: a.__setitem__(slice(1, None), a[:-1]), lambda a, b, k: a.fill(k),
    lambda a, b, k: a.__setitem__(-1, b.sum()), lambda a, b, k: a.__setitem__(a > k, 0), lambda a, b, k: a.__iadd__(k),
    lambda a, b, k: a.__isub__(b), lambda a, b, k: a.sort(0), lambda a, b, k: a.__setitem__([0, -1], k), lambda a, b, k: a.T.__imul__(2),
)  # fmt: skip


def random_program(generator: random.Random) -> Program:
    steps = [
        (generator.choice(STEPS), generator.randrange(1, 5), generator.random(), generator.random())
        for _ in range(generator.randrange(2, 7))
    ]
    stores = [generator.choice(STORES) if generator.random() < 0.4 else None for _ in steps]

    def program(a: Any, x: torch.Tensor) -> Any:
        values = [a, x.numpy(), np.arange(float(a.size)).reshape(a.shape)]
        for (step, k, first, second), store in zip(steps, stores, strict=True):
            p, q = values[int(first * len(values))], values[int(second * len(values))]
            values.append(step(p, q, k))
            if store is not None:
                store(p, q, k)
        return values, x.sum()

    return program


def spread(size: int) -> Any:
    """Numbers at no step of a function, where results that differ by rounding would lie apart."""
    return np.random.default_rng(size).normal(0, 3, (size, size))


@pytest.mark.parametrize("repeat", range(40))
def test_random_programs(repeat: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    program = random_program(generator)
    rows = generator.choice([2, 3, 4])
    dtype = generator.choice(["float64", "float64", "float32", "int64"])
    compiled = captured(program)
    for size in (rows, rows, rows + 1):
        judge(
            program, compiled,
            lambda size=size: (spread(size).astype(dtype), torch.from_numpy(spread(size))),
        )  # fmt: skip
    assert not [event for event in torchdynamo.stats().fallbacks if event.kind.id == "internal_error"]


# -- Python's own ways over rows ---------------------------------------------------------------

OVER_ROWS: dict[str, Program] = {
    "for": lambda a, x: [x * torch.tensor(s) for s in a],
    "zip": lambda a, x: [x * torch.tensor(s) + k for s, k in zip(a, (1, 2, 3), strict=False)],
    "enumerate": lambda a, x: [x * torch.tensor(s) + k for k, s in enumerate(a)],
    "map": lambda a, x: list(map(lambda s: x * torch.tensor(s), a)),
    "reversed": lambda a, x: [x * torch.tensor(s) for s in reversed(a)],
    "unpacked": lambda a, x: (lambda first, *rest: x * torch.tensor(first + rest[-1]))(*a),
    "sum": lambda a, x: x * torch.tensor(sum(a)),
    "product": lambda a, x: [x * torch.tensor(s) + k for s, k in itertools.product(a, (1, 2))],
    "product of two": lambda a, x: [x * torch.tensor(s * t) for s, t in itertools.product(a, a)],
    "chain": lambda a, x: [x * torch.tensor(s) for s in itertools.chain(a, [a[0]])],
    "islice": lambda a, x: [x * torch.tensor(s) for s in itertools.islice(a, 1, None)],
    "accumulate": lambda a, x: [x * torch.tensor(s) for s in itertools.accumulate(a)],
    "pairwise": lambda a, x: [x * torch.tensor(s * t) for s, t in itertools.pairwise(a)],
    "combinations": lambda a, x: [x * torch.tensor(s - t) for s, t in itertools.combinations(a, 2)],
    "zip_longest": lambda a, x: [x * torch.tensor(s) for s, _ in itertools.zip_longest(a, a[:1], fillvalue=0)],
    "starmap": lambda a, x: list(itertools.starmap(lambda s, t: x * torch.tensor(s * t), zip(a, a, strict=True))),
}


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 1, 2)])
@pytest.mark.parametrize("way", OVER_ROWS)
def test_ways_over_rows(way: str, shape: tuple[int, ...]) -> None:
    check(OVER_ROWS[way], lambda: (doubles(*shape), torch.ones(shape[1:], dtype=torch.float64)))
