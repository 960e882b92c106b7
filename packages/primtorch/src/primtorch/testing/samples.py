"""One table of samples for every prim: layouts, dtypes, empty and 0-d tensors. A prim that is an ATen operator taken
whole has that operator's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from primtorch.errors import PrimError
from primtorch.families import operator_named
from primtorch.prims import PRIMS, Prim
from primtorch.samples import Arguments
from primtorch.spec import TensorSpec

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One call of a prim: `prim(*args, **kwargs)` on real tensors is the reference's answer."""

    prim: Prim
    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.prim.name}-{self.label}"


def tensor(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, low: float = -2.0, high: float = 2.0
) -> torch.Tensor:
    """Values in [low, high) from torch's generator; integers in [0, 6)."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_complex:
        return torch.complex(torch.rand(shape) * (high - low) + low, torch.rand(shape) * (high - low) + low).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).to(dtype)
    return torch.randint(0, 6, shape).to(dtype)


def _layouts(dtype: torch.dtype, **options: Any) -> Iterator[tuple[str, Any]]:
    yield "dense", tensor((2, 3, 4), dtype, **options)
    yield "permuted", tensor((4, 2, 3), dtype, **options).permute(1, 2, 0)
    yield "spaced", tensor((2, 6, 8), dtype, **options)[:, ::2, 1::2]
    yield "expanded", tensor((2, 1, 4), dtype, **options).expand(2, 3, 4)
    yield "empty", tensor((2, 0, 4), dtype, **options)
    yield "scalar", tensor((), dtype, **options)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- elementwise -----------------------------------------------------------------------------------
def _unary(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for dtype in DTYPES:
        for label, t in _layouts(dtype):
            yield f"{_name(dtype)}-{label}", ((t,), {})
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 0.5, 1.0, -1.0])
    yield "special", ((special,), {})


def _binary(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    divides = prim.name in ("floor_div", "trunc_div", "fmod", "remainder")
    shifts = prim.name in ("shift_left", "shift_right")
    for dtype in DTYPES:
        integral = not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
        positive = {"low": 0.25} if prim.name in ("pow", "igamma", "igammac", "zeta") else {}
        for (label, a), (_, c) in zip(_layouts(dtype, **positive), _layouts(dtype, **positive), strict=True):
            if integral and (divides or shifts):
                c = c % 3 + (1 if divides else 0)
            yield f"{_name(dtype)}-{label}", ((a, c), {})
        dense, odd = tensor((2, 3, 4), dtype, **positive), tensor((4, 2, 3), dtype, **positive).permute(1, 2, 0)
        if integral and (divides or shifts):
            odd = odd % 3 + (1 if divides else 0)
        yield f"{_name(dtype)}-mixed", ((dense, odd), {})
        if dtype is not torch.bool:
            number = 2 if integral else 1.5
            yield f"{_name(dtype)}-number", ((dense, number), {})


def _where(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for dtype in DTYPES:
        for label, t in _layouts(dtype):
            cond = torch.rand(t.shape) < 0.5
            yield f"{_name(dtype)}-{label}", ((cond, t, t.flip(0) if t.dim() else t), {})
    yield "number", ((torch.tensor([True, False]), torch.ones(2), 3.0), {})


def _convert(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for source in DTYPES:
        for target in (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16):
            yield f"{_name(source)}-{_name(target)}", ((tensor((2, 3), source, low=0.0, high=4.0).t(), target), {})


# --- reductions and scans ----------------------------------------------------------------------------
def _reduction(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    options = {"low": 0.5, "high": 1.5} if prim.name == "prod" else {}
    for dtype in DTYPES:
        for label, t in (
            ("dense", tensor((2, 3, 4), dtype, **options)),
            ("permuted", tensor((4, 2, 3), dtype, **options).permute(1, 2, 0)),
        ):
            for dims in ((0,), (2,), (0, 2), (0, 1, 2), ()):
                yield f"{_name(dtype)}-{label}-{dims}", ((t, dims, False), {})
            yield f"{_name(dtype)}-{label}-keepdim", ((t, (1,), True), {})
    yield "empty", ((tensor((0, 3)), (1,), False), {})
    if prim.name in ("amax", "amin", "argmax", "argmin"):
        yield "nan", ((torch.tensor([[1.0, float("nan"), 3.0], [2.0, 5.0, 5.0]]), (1,), False), {})


def _var_mean(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for correction in (0.0, 1.0):
        for dims in ((0,), (1, 2), (0, 1, 2)):
            yield f"{correction}-{dims}", ((tensor((3, 4, 5)), dims, correction, True), {})
    yield "far", ((tensor((2, 64)) + 1e3, (1,), 0.0, False), {})


def _scan(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for dtype in (torch.float64, torch.float32, torch.int64):
        for dim in range(3):
            yield f"{_name(dtype)}-{dim}", ((tensor((2, 5, 3), dtype), dim), {})


def _along(*arguments: Callable[[], Arguments]) -> Callable[[Prim], Iterator[tuple[str, Arguments]]]:
    def make(prim: Prim) -> Iterator[tuple[str, Arguments]]:
        for place, case in enumerate(arguments):
            yield str(place), case()

    return make


def _index(rows: int, size: int) -> torch.Tensor:
    return torch.randint(0, size, (rows,))


def _scattered(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for dim in range(2):
        index = (
            torch.stack([torch.randperm(4)[:3] for _ in range(3)])
            if dim
            else torch.stack([torch.randperm(5)[:3] for _ in range(3)], 1)
        )
        arguments: tuple[object, ...] = (tensor((5, 4)), dim, index, tensor((3, 3), low=0.5))
        if prim.name != "scatter_reduce":
            yield str(dim), (arguments, {})
            continue
        for how in ("prod", "mean", "amax", "amin"):
            for whole in (True, False):
                yield f"{dim}-{how}-{whole}", ((*arguments, how), {"include_self": whole})


def _pooling(*rest: tuple[Any, ...]) -> Callable[[Prim], Iterator[tuple[str, Arguments]]]:
    def make(prim: Prim) -> Iterator[tuple[str, Arguments]]:
        for place, arguments in enumerate(rest):
            rank = len(arguments[0])
            yield str(place), ((tensor((2, 3, *(7, 8, 6)[:rank])), *arguments), {})

    return make


def _convolutions() -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield "1d", (tensor((2, 4, 9)), tensor((6, 4, 3)), tensor((6,)), (2,), (1,), (1,), False, (0,), 1)
    yield "2d", (tensor((2, 4, 7, 8)), tensor((6, 4, 3, 2)), tensor((6,)), (2, 1), (1, 0), (1, 2), False, (0, 0), 1)
    yield "groups", (tensor((2, 4, 6, 6)), tensor((8, 2, 3, 3)), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 2)
    yield (
        "3d",
        (tensor((1, 2, 4, 5, 4)), tensor((3, 2, 2, 2, 2)), None, (1, 2, 1), (0, 1, 0), (1, 1, 1), False, (0, 0, 0), 1),
    )
    yield (
        "transposed",
        (tensor((2, 4, 5, 5)), tensor((4, 3, 3, 3)), tensor((6,)), (2, 2), (1, 1), (1, 1), True, (1, 0), 2),
    )


def _convolution(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for label, arguments in _convolutions():
        yield label, (arguments, {})


def _convolution_backward(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    for label, (t, weight, bias, *geometry) in _convolutions():
        out = PRIMS["convolution"](t, weight, bias, *geometry)
        sizes = None if bias is None else tuple(bias.shape)
        yield label, ((tensor(tuple(out.shape)), t, weight, sizes, *geometry, (True, True, bias is not None)), {})


_FAMILIES: dict[str, Callable[[Prim], Iterator[tuple[str, Arguments]]]] = {
    "elementwise unary": _unary,
    "predicate": _unary,
    "elementwise binary": _binary,
    "comparison": _binary,
    "ternary": _where,
    "reduction": _reduction,
    "scan": _scan,
}
_OWN: dict[str, Callable[[Prim], Iterator[tuple[str, Arguments]]]] = {
    "convert_element_type": _convert,
    "var_mean": _var_mean,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "scatter": _scattered,
    "scatter_add": _scattered,
    "scatter_reduce": _scattered,
    "bitcast": _along(
        lambda: ((tensor((2, 3)), torch.int32), {}), lambda: ((tensor((3,), torch.int64), torch.float64), {})
    ),
    "device_put": _along(lambda: ((tensor((2, 3)), CPU), {})),
    "view_as_real": _along(lambda: ((tensor((2, 3), torch.complex64),), {})),
    "view_as_complex": _along(lambda: ((tensor((3, 2)),), {})),
    "complex": _along(lambda: ((tensor((2, 3)), tensor((2, 3))), {})),
    "full": _along(
        lambda: (((2, 3), 1.5, torch.float32, CPU), {}),
        lambda: (((), True, torch.bool, CPU), {}),
        lambda: (((0, 2), 7, torch.int64, CPU), {}),
    ),
    "iota": _along(
        lambda: ((5, 2, 3, torch.int64, CPU), {}),
        lambda: ((4, 3, -1, torch.int32, CPU), {}),
        lambda: ((0, 0, 1, torch.int64, CPU), {}),
    ),
    "empty_strided": _along(lambda: (((2, 3), (1, 2), torch.float32, CPU), {})),
    "random_seed": _along(lambda: ((CPU,), {})),
    "random_uniform": _along(
        lambda: ((torch.tensor(7), (3, 5), 0), {}),
        lambda: ((torch.tensor(2**40 + 3), (9,), 1), {}),
        lambda: ((torch.tensor(5), (3, 7), 1, torch.float64), {}),
        lambda: ((torch.tensor(5), (33,), 0, torch.float16), {}),
    ),
    "random_bits": _along(
        lambda: ((torch.tensor(7), (3, 5), 0), {}),
        lambda: ((torch.tensor(11), (), 2), {}),
        lambda: ((torch.tensor(2**50 + 9), (3, 7), 3, 64), {}),
    ),
    "expand": _along(lambda: ((tensor((3, 1)), (2, 3, 4)), {}), lambda: ((tensor(()), (2, 2)), {})),
    "permute": _along(lambda: ((tensor((2, 3, 4)), (2, 0, 1)), {}), lambda: ((tensor(()), ()), {})),
    "reshape": _along(
        lambda: ((tensor((2, 3, 4)), (6, 4)), {}),
        lambda: ((tensor((3, 4)).t(), (2, 6)), {}),
        lambda: ((tensor((0, 3)), (3, 0, 2)), {}),
        lambda: ((tensor((1,)), ()), {}),
    ),
    "squeeze": _along(lambda: ((tensor((1, 3, 1)), (0, 2)), {}), lambda: ((tensor((1, 3)), ()), {})),
    "unsqueeze": _along(lambda: ((tensor((2, 3)), (0, 3)), {}), lambda: ((tensor(()), (0,)), {})),
    "slice": _along(lambda: ((tensor((5, 7)), 1, 1, 6, 2), {}), lambda: ((tensor((5, 7)), 0, 2, 2, 1), {})),
    "flip": _along(lambda: ((tensor((2, 3)), (0, 1)), {})),
    "diagonal": _along(lambda: ((tensor((3, 4)), 1, 0, 1), {}), lambda: ((tensor((2, 4, 3)), -1, 1, 2), {})),
    "unfold": _along(lambda: ((tensor((2, 7)), 1, 3, 2), {})),
    "as_strided": _along(lambda: ((tensor((12,)), (2, 3), (1, 2), 3), {})),
    "cat": _along(
        lambda: (((tensor((2, 3)), tensor((4, 3))), 0), {}),
        lambda: (((tensor((2, 3)), tensor((2, 0)), tensor((2, 1))), 1), {}),
    ),
    "pad": _along(
        lambda: ((tensor((2, 3)), (1, 0), (0, 2), 4.0), {}), lambda: ((tensor((4, 5)), (-1, 2), (1, -2), 0.0), {})
    ),
    "copy_strided": _along(lambda: ((tensor((2, 3)), (1, 2)), {})),
    "slice_scatter": _along(lambda: ((tensor((5, 4)), tensor((5, 2)), 1, 0, 4, 2), {})),
    "as_strided_scatter": _along(lambda: ((tensor((12,)), tensor((2, 3)), (2, 3), (6, 2), 1), {})),
    "roll": _along(lambda: ((tensor((4, 5)), (1, -2), (0, 1)), {})),
    "index": _along(
        lambda: ((tensor((5, 4)), (_index(6, 5),), False), {}),
        lambda: ((tensor((5, 4, 3)), (None, _index(2, 4).unsqueeze(1), _index(2, 3)), False), {}),
        lambda: ((tensor((5, 4, 3)), (_index(2, 5), None, _index(2, 3) - 3), True), {}),
    ),
    "index_put": _along(
        lambda: ((tensor((5, 4)), (_index(6, 5),), tensor((6, 4)), True, False), {}),
        lambda: ((tensor((5, 4)), (None, torch.tensor([3, 0])), tensor((5, 2)), False, False), {}),
        lambda: ((tensor((5, 4)), (torch.tensor([-1, 2, -5]),), tensor((3, 4)), True, True), {}),
    ),
    "gather": _along(
        lambda: ((tensor((5, 4)), 0, torch.randint(0, 5, (3, 2))), {}),
        lambda: ((tensor((5, 4)), 1, torch.randint(0, 4, (5, 6))), {}),
    ),
    "sort": _along(
        lambda: ((tensor((3, 9)), 1, False, True), {}),
        lambda: ((tensor((9, 2), torch.int64), 0, True, True), {}),
        lambda: ((torch.tensor([1.0, float("nan"), -1.0]), 0, False, True), {}),
    ),
    "searchsorted": _along(
        lambda: ((tensor((6,)).sort()[0], tensor((2, 5)), False), {}),
        lambda: ((torch.tensor([[1, 2, 2, 5], [0, 3, 3, 3]]), torch.tensor([[2, 5], [3, 9]]), True), {}),
    ),
    "max_pool": _pooling(
        ((3, 3), (2, 2), (1, 1), (1, 1), False),
        ((2,), (2,), (0,), (2,), True),
        ((2, 2, 2), (2, 1, 2), (0, 1, 0), (1, 1, 1), False),
    ),
    "avg_pool": _pooling(
        ((3, 3), (2, 2), (1, 1), True, True, None),
        ((3, 2), (1, 2), (1, 0), False, False, None),
        ((2,), (2,), (0,), True, True, None),
        ((2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, 5),
    ),
    "local_scalar": _along(lambda: ((torch.tensor(3),), {}), lambda: ((torch.tensor(2.5),), {})),
    "assert_async": _along(lambda: ((torch.tensor(True), "never shown"), {})),
}


def _made(prim: Prim) -> Iterator[tuple[str, Arguments]]:
    own = _OWN.get(prim.name)
    operator = operator_named(prim.aten.name().removeprefix("aten::")) if prim.aten is not None else None
    if own is not None:
        yield from own(prim)
    elif prim.family in _FAMILIES and not (operator and operator.own_samples):
        yield from _FAMILIES[prim.family](prim)
    elif prim.pointwise is not None and not (operator and operator.own_samples):  # special functions
        for dtype in (torch.float64, torch.float32):
            others = [torch.full((2, 3), 3.0, dtype=dtype) for _ in range(prim.operands - 1)]
            yield _name(dtype), ((tensor((2, 3), dtype, low=0.25), *others), {})
    elif operator is not None:
        for place, sample in enumerate(operator.samples):
            yield str(place), sample.draw()


def _accepts(prim: Prim, arguments: Arguments) -> bool:
    """Whether the prim takes these dtypes: its meta says so, and the reference has them on the CPU."""
    args, kwargs = arguments
    try:
        prim.meta(*map(_described, args), **{k: _described(v) for k, v in kwargs.items()})
        prim(*args, **kwargs)
    except (PrimError, RuntimeError, NotImplementedError):
        return False
    return True


def _described(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return TensorSpec.of(argument)
    return tuple(map(_described, argument)) if isinstance(argument, (tuple, list)) else argument


def cases(name: str | None = None, *, seed: int = 0) -> tuple[Case, ...]:
    """The samples of one prim, or of all. GPU attention has none on the CPU."""
    found: list[Case] = []
    with torch.random.fork_rng(devices=[]):
        for prim in PRIMS.values() if name is None else (PRIMS[name],):
            torch.manual_seed(seed)
            found += [Case(prim, label, *arguments) for label, arguments in _made(prim) if _accepts(prim, arguments)]
    return tuple(found)
