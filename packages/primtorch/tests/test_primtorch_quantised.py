"""Operators over quantised tensors: what graphs hold gives eager's integers, in eager's layout, and says what they mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from primtorch.errors import NoFormula
from primtorch.fake import FakeMode, FakeTensor
from primtorch.packed import number_of, sizes_of
from primtorch.quantised import (
    DEQUANTISE_BY_CHANNEL,
    QUANTISE,
    QUANTISE_BY_CHANNEL,
    QUANTISE_DYNAMICALLY,
    ByTensor,
    Form,
    Operand,
    by_channel,
    by_tensor,
    form_of,
    known_forms,
    values_of,
)

SCALE, ZERO = 0.05, 60
_RANK = {"1d": 3, "2d": 4, "3d": 5}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quantised(*shape: int, dtype: torch.dtype = torch.quint8, scale: float = SCALE) -> torch.Tensor:
    with quiet():
        return torch.quantize_per_tensor(torch.randn(*shape), scale, ZERO, dtype)


def layouts(rank: int) -> dict[str, torch.Tensor]:
    """Operands of one rank, in the layouts that programs give them."""
    shape = {2: (4, 6), 3: (2, 4, 6), 4: (2, 4, 6, 8), 5: (2, 4, 6, 8, 4)}[rank]
    found = {"rows": quantised(*shape), "bytes with a sign": quantised(*shape, dtype=torch.qint8)}
    if rank >= 4:
        last = torch.channels_last if rank == 4 else torch.channels_last_3d
        found["channels last"] = quantised(*shape).contiguous(memory_format=last)
        found["every other"] = quantised(*shape[:2], 12, *shape[3:])[:, :, ::2]
        found["one image"] = quantised(1, *shape[1:]).contiguous(memory_format=last)
    found["transposed"] = quantised(*shape[:-2], shape[-1], shape[-2]).transpose(-2, -1)
    return found


def weight(*shape: int) -> torch.Tensor:
    return quantised(*shape, dtype=torch.qint8, scale=0.1)


def _of_channels(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.rand(x.shape[1]) + 0.5 for _ in range(4))


def _norm(x: torch.Tensor) -> tuple[Any, ...]:
    return (x, *_of_channels(x), 1e-5, 0.1, 3)


_linear = torch.ops.quantized.linear_prepack(weight(5, 6), torch.randn(5))
_conv1d = torch.ops.quantized.conv1d_prepack(weight(5, 4, 3), torch.randn(5), [2], [1], [1], 1)
_conv2d = torch.ops.quantized.conv2d_prepack(weight(6, 2, 3, 3), torch.randn(6), [2, 1], [1, 1], [1, 1], 2)
_conv3d = torch.ops.quantized.conv3d_prepack(weight(5, 4, 3, 3, 3), torch.randn(5), [1] * 3, [1] * 3, [1] * 3, 1)
_back1d = torch.ops.quantized.conv_transpose1d_prepack(weight(4, 6, 3), torch.randn(6), [2], [1], [1], [1], 1)
_back2d = torch.ops.quantized.conv_transpose2d_prepack(
    weight(4, 6, 3, 3), torch.randn(6), [2, 1], [1, 1], [1, 0], [1, 1], 1
)
_back3d = torch.ops.quantized.conv_transpose3d_prepack(
    weight(4, 6, 3, 3, 3), torch.randn(6), [2, 1, 1], [1] * 3, [1, 0, 0], [1] * 3, 1
)
_PACKED = {
    "linear": _linear, "conv1d": _conv1d, "conv2d": _conv2d, "conv3d": _conv3d,
    "conv_transpose1d": _back1d, "conv_transpose2d": _back2d, "conv_transpose3d": _back3d,
}  # fmt: skip

Case = tuple[int, Callable[[torch.Tensor], tuple[Any, ...]]]
_GIVEN = 0.1, 3

CASES: dict[str, Case] = {
    **dict.fromkeys(("dequantize", "int_repr", "relu", "gelu", "sigmoid", "tanh", "hardsigmoid"), (4, lambda x: (x,))),
    "hardtanh": (4, lambda x: (x, 0.0, 6.0)),
    "clamp": (4, lambda x: (x, -0.5, 0.5)),
    "threshold": (4, lambda x: (x, 0.1, 0.2)),
    "leaky_relu": (4, lambda x: (x, 0.2)),
    "_adaptive_avg_pool2d": (4, lambda x: (x, [2, 1])),
    "_adaptive_avg_pool3d": (5, lambda x: (x, [2, 1, 3])),
    "avg_pool2d": (4, lambda x: (x, [2, 2])),
    "avg_pool3d": (5, lambda x: (x, [2, 2, 2])),
    "upsample_nearest2d": (4, lambda x: (x, [9, 9])),
    "upsample_nearest3d": (5, lambda x: (x, [9, 9, 9])),
    "_upsample_nearest_exact2d": (4, lambda x: (x, [9, 9])),
    "_upsample_nearest_exact3d": (5, lambda x: (x, [9, 9, 9])),
    "upsample_bilinear2d": (4, lambda x: (x, [9, 9], False)),
    "constant_pad_nd": (4, lambda x: (x, [1, 1], 0.2)),
    "reflection_pad2d": (4, lambda x: (x, [1, 1, 1, 1])),
    "channel_shuffle": (4, lambda x: (x, 2)),
    "flip": (4, lambda x: (x, [1])),
    "cat": (4, lambda x: ([x, x], 1)),
    "quantized_max_pool1d": (3, lambda x: (x, [2], [2])),
    "quantized_max_pool2d": (4, lambda x: (x, [2, 2], [2, 1])),
    "quantized_max_pool3d": (5, lambda x: (x, [2, 2, 2], [2, 1, 1])),
    "mean": (4, lambda x: (x, [2, 3])),
    "index_select": (4, lambda x: (x, 1, torch.tensor([2, 0]))),
    "index": (4, lambda x: (x, [None, torch.tensor([2, 0])])),
    "repeat": (4, lambda x: (x, [2, 1, 1, 1])),
    "pixel_shuffle": (4, lambda x: (x, 2)),
    "pixel_unshuffle": (4, lambda x: (x, 2)),
    **dict.fromkeys(("max", "min"), (4, lambda x: (x,))),
    **dict.fromkeys(("max.dim", "min.dim", "sort"), (4, lambda x: (x, 2))),
    "topk": (4, lambda x: (x, 2)),
    **{f"{name}.Tensor": (4, lambda x: (x, x.flip(0))) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{name}.Scalar": (4, lambda x: (x, 0.3)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"linear{of}": (2, lambda x: (x, _linear, *_GIVEN)) for of in ("", "_relu")},
    **{
        f"{name}{relu}{'.new' if name in ('conv2d', 'conv3d') else ''}": (
            _RANK[name[-2:]],
            lambda x, p=_PACKED[name]: (x, p, *_GIVEN),  # type: ignore[misc]
        )
        for name in _PACKED
        for relu in ("", "_relu")
        if name != "linear" and not (relu and "transpose" in name)
    },
    **dict.fromkeys(("add", "add_relu", "mul", "mul_relu"), (4, lambda x: (x, x.flip(0), *_GIVEN))),
    **{
        f"{op}{form}": (4, lambda x: (x, -0.3))
        for op in ("add", "mul")
        for form in (".Scalar", "_relu.Scalar", "_scalar", "_scalar_relu")
    },
    **dict.fromkeys(("quantized::cat", "cat_relu"), (4, lambda x: ([x, x], 1, *_GIVEN))),
    "matmul": (4, lambda x: (x, x.transpose(2, 3), *_GIVEN)),
    **dict.fromkeys(("hardswish", "quantized::sigmoid", "elu", "celu"), (4, lambda x: (x, *_GIVEN))),
    "quantized::leaky_relu": (4, lambda x: (x, 0.1, False, *_GIVEN)),
    "prelu": (4, lambda x: (x, quantised(1), *_GIVEN)),
    "softmax": (4, lambda x: (x, 1, *_GIVEN)),
    "layer_norm": (4, lambda x: (x, [x.shape[-1]], torch.ones(x.shape[-1]), torch.zeros(x.shape[-1]), 1e-5, *_GIVEN)),
    "group_norm": (4, lambda x: (x, 2, *_of_channels(x)[:2], 1e-5, *_GIVEN)),
    "instance_norm": (4, lambda x: (x, *_of_channels(x)[:2], 1e-5, *_GIVEN)),
    "relu6": (4, lambda x: (x,)),
    **dict.fromkeys(("quantized::threshold", "quantized::clamp"), (4, lambda x: (x, 0.1, 0.2))),
    **{f"batch_norm{relu}": (4, _norm) for relu in ("", "_relu")},
    **{f"batch_norm{dims}{relu}": (rank, _norm) for dims, rank in _RANK.items() for relu in ("", "_relu")},
}
# Only other engines than this machine's have them.
_ELSEWHERE = frozenset({"linear_leaky_relu", "linear_tanh", "conv2d_add", "conv2d_add_relu"})


def named(name: str) -> Form:
    full = name if "::" in name else f"aten::{name}"
    for found in (full, f"{full}.self", f"{full}.dim", f"{full}.Tensor"):
        if found in known_forms():
            return known_forms()[found]
    return known_forms()[f"quantized::{name}"]


def test_each_form_has_a_case() -> None:
    """Nothing stands in the table that is not held to eager."""
    known = {named(name).original.name() for name in CASES}
    assert {name for name in known_forms() if name.rpartition(":")[2] not in _ELSEWHERE} == known


@pytest.mark.parametrize("name", CASES)
def test_integers_layout_and_meaning(name: str) -> None:
    """For each layout that the operator takes: the integers, strides and dtypes of eager's result, and what they mean."""
    form, (rank, arguments) = named(name), CASES[name]
    taken = 0
    with quiet():
        for layout, x in layouts(rank).items():
            args = arguments(x)
            try:
                expected = form.original(*args)
            except (RuntimeError, NotImplementedError):
                continue
            taken += 1
            check(form, args, expected, f"{name}, {layout}")
    assert taken


def check(form: Form, args: tuple[Any, ...], expected: Any, what: str) -> None:
    given, sizes = form.bound(args, {}), list[int]()
    for place, argument in enumerate(form.original._schema.arguments):
        value = given[argument.name]
        if place in form.packed:
            sizes += sizes_of(value)
            given[argument.name] = number_of(value)
        elif place in form.quantised:
            one = isinstance(value, torch.Tensor)
            given[argument.name] = operand(value) if one else [operand(part) for part in value]
    several = isinstance(expected, (tuple, list))
    wanted = list(expected) if several else [expected]
    for result, meaning in zip(wanted, form.results(given), strict=True):
        assert (meaning is not None) == result.is_quantized, what
        assert meaning is None or meaning == ByTensor(result.q_scale(), result.q_zero_point()), what
    taken, named_ = form.call(given, sizes)
    made: Any = form.overload(*taken, **named_)
    mode = FakeMode()
    with mode:
        fake: Any = form.overload(*(_fake(mode, value) for value in taken), **named_)
    for result, ours, theirs in zip(made if several else [made], fake if several else [fake], wanted, strict=True):
        plain = values_of(theirs) if theirs.is_quantized else theirs
        assert torch.equal(result, plain) and result.dtype == plain.dtype == ours.dtype, what
        assert tuple(ours.shape) == plain.shape and ours.stride() == plain.stride() == result.stride(), what


def operand(value: torch.Tensor) -> Operand:
    return Operand(values_of(value), ByTensor(value.q_scale(), value.q_zero_point()))  # type: ignore[arg-type]


def _fake(mode: FakeMode, value: Any) -> Any:
    if isinstance(value, list):
        return [_fake(mode, item) for item in value]
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_into_integers_and_out(dtype: torch.dtype) -> None:
    """Floats in each layout, by tensor, by channel and by the range that they have; elements that are no numbers too."""
    with quiet():
        for x in (torch.randn(2, 4, 6, 8), torch.randn(2, 6, 8, 4).permute(0, 3, 1, 2), torch.randn(6, 3).t()):
            x[0, 0] = float("inf")
            x[0, 1] = float("nan")
            held(QUANTISE, (x, 0.1, 3, dtype), torch.quantize_per_tensor(x, 0.1, 3, dtype))
            axis = 1
            scales, zeros = torch.rand(x.shape[axis]) + 0.1, torch.arange(x.shape[axis])
            whole = torch.quantize_per_channel(x, scales, zeros, axis, dtype)
            held(QUANTISE_BY_CHANNEL, (x, scales, zeros, axis, dtype), whole)
            parts = whole.q_per_channel_scales(), whole.q_per_channel_zero_points(), axis
            held(DEQUANTISE_BY_CHANNEL, (values_of(whole), *parts), whole.dequantize())
            assert torch.equal(by_channel(values_of(whole), *parts).dequantize(), whole.dequantize())
    if dtype is not torch.qint32:
        x = torch.randn(3, 5)
        with quiet():
            expected = torch.quantize_per_tensor_dynamic(x, dtype, False)
            values, scale, zero = QUANTISE_DYNAMICALLY(x, dtype, False)
        assert torch.equal(values, expected.int_repr())
        assert (scale.item(), zero.item()) == (expected.q_scale(), expected.q_zero_point())


def held(op: Any, args: tuple[Any, ...], expected: torch.Tensor) -> None:
    plain = values_of(expected) if expected.is_quantized else expected
    made, mode = op(*args), FakeMode()
    with mode:
        fake: FakeTensor = op(*(_fake(mode, value) for value in args))
    torch.testing.assert_close(made, plain, rtol=0, atol=0, equal_nan=True)
    assert made.dtype == fake.dtype and made.stride() == plain.stride() == fake.stride()


def test_memory_is_shared() -> None:
    """Neither way is a copy."""
    x = quantised(3, 4)[:, 1:]
    values = values_of(x)
    assert values.data_ptr() == x.data_ptr() and values.stride() == x.stride()
    again = by_tensor(values, SCALE, ZERO)
    values.fill_(7)
    assert again.int_repr().unique().tolist() == x.int_repr().unique().tolist() == [7]


def test_overloads_by_arguments() -> None:
    """A packet comes to the overload that its arguments are for."""
    x = quantised(3, 4)
    add = torch.ops.quantized.add
    assert form_of(add, (x, x, 0.1, 3), {}) is known_forms()["quantized::add"]
    assert form_of(add, (x, x), {"scale": 0.1, "zero_point": 3}) is known_forms()["quantized::add"]
    assert form_of(add, (x, 2.0), {}) is known_forms()["quantized::add.Scalar"]
    assert form_of(add, (x,), {}) is None and form_of(torch.ops.aten.sin, (x,), {}) is None


def test_what_is_not_known() -> None:
    """Writes, and first operands that are broadcast, have no formula."""
    relu6, add = known_forms()["quantized::relu6"], known_forms()["quantized::add"]
    mode = FakeMode()
    fake: Any = mode.from_tensor(values_of(quantised(2, 4, 6, 8)))
    one = Operand(fake, ByTensor(SCALE, ZERO))
    with pytest.raises(NoFormula, match="writes"):
        relu6.results({"qx": one, "inplace": True})
    odd = mode.from_tensor(values_of(quantised(1, 4, 8, 6).transpose(2, 3)))
    with mode, pytest.raises(NoFormula, match="broadcast"):
        add.overload(odd, SCALE, ZERO, fake, SCALE, ZERO, 0.1, 3)
