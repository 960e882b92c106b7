"""Quantised tensors in graphs: their elements as plain integers, and beside these what the integers mean.

A graph holds plain tensors and numbers. An operator over quantised tensors stands in it under a namespace of its own
(`form_of`): for each such tensor it takes the integers, a scale and a zero point, and gives integers back. What these
mean is known where the call is written (`Form.results`), so no graph computes it. The kernel puts the tensors together,
over the same memory, and calls the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch.errors import NoFormula
from primtorch.fake.tensor import FakeMode, FakeTensor, propagate, register_special
from primtorch.frozen import record
from primtorch.layout import (
    broadcast_shapes,
    channels_last_order,
    contiguous_strides,
    is_channels_last,
    is_contiguous,
    strides_in_order,
    suggested_strides,
    suggests_channels_last,
)
from primtorch.once import once
from primtorch.packed import Window, numbers_for_objects, object_of
from primtorch.spec import Size, TensorSpec

NAMESPACE = "primtorch_quantised"
_library = torch.library.Library(NAMESPACE, "DEF")

INTEGERS: Mapping[torch.dtype, torch.dtype] = {
    torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32
}  # fmt: skip
"""What the elements of a quantised dtype are."""
_QUANTISED = {plain: quantised for quantised, plain in INTEGERS.items()}


@record
class ByTensor:
    """One scale and one zero point for all elements: x = (integer - zero_point) * scale."""

    scale: float | torch.SymFloat
    zero_point: int | torch.SymInt


@dataclass(frozen=True, slots=True, eq=False)
class ByChannel:
    """A scale and a zero point for each index along a dim, of float64 and int64; of float32, where zero points are
    floats."""

    scales: torch.Tensor
    zero_points: torch.Tensor
    axis: int

    @property
    def scheme(self) -> torch.qscheme:
        """Torch's name for it."""
        whole = not self.zero_points.is_floating_point()
        return torch.per_channel_affine if whole else torch.per_channel_affine_float_qparams


Meaning: TypeAlias = ByTensor | ByChannel
Strides: TypeAlias = "Callable[[TensorSpec, tuple[Size, ...]], tuple[Size, ...]]"
"""How a result of a shape is laid out, from the first operand."""


# -- tensors -----------------------------------------------------------------------------------------


def is_taken_apart(tensor: torch.Tensor) -> bool:
    """Whether a tensor is quantised, and by whole bytes."""
    with torch._C.DisableTorchFunction():
        return tensor.is_quantized and tensor.layout is torch.strided and tensor.dtype in INTEGERS


def values_of(quantised: torch.Tensor) -> torch.Tensor:
    """The integers of a quantised tensor, over its memory."""
    with torch.no_grad():
        made = torch.empty(0, dtype=INTEGERS[quantised.dtype], device=quantised.device)
        memory = quantised.untyped_storage()
        return made.set_(memory, quantised.storage_offset(), quantised.shape, quantised.stride())  # type: ignore[call-overload, no-any-return]


def by_tensor(values: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """The quantised tensor of these integers, over their memory."""
    made = torch._empty_affine_quantized(
        [0], scale=scale, zero_point=zero_point, dtype=_QUANTISED[values.dtype], device=values.device
    )
    return _over(made, values)


def by_channel(values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int) -> torch.Tensor:
    """The same with a scale for each index along a dim."""
    made = torch._empty_per_channel_affine_quantized(
        [0], scales=scales, zero_points=zero_points, axis=axis, dtype=_QUANTISED[values.dtype], device=values.device
    )
    return _over(made, values)


def _over(made: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return made.set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())  # type: ignore[call-overload, no-any-return]


# -- what a result means -----------------------------------------------------------------------------


@record
class Operand:
    """A quantised tensor in a call: a fake of its integers, and what they mean."""

    values: FakeTensor
    meaning: ByTensor


Rule: TypeAlias = "Callable[[Form, Operand, Mapping[str, Any]], ByTensor | None]"
"""What a result means, from the first quantised operand and all arguments by name; None for a plain tensor."""


def _same(form: Form, first: Operand, given: Mapping[str, object]) -> ByTensor:
    return first.meaning


def _plain(form: Form, first: Operand, given: Mapping[str, object]) -> None:
    return None


_SCALES = ("output_scale", "Y_scale_i", "scale")
_ZEROS = ("output_zero_point", "Y_zero_point_i", "zero_point")


def _given(form: Form, first: Operand, given: Mapping[str, Any]) -> ByTensor:
    scale, zero = (next(given[n] for n in names if n in given) for names in (_SCALES, _ZEROS))
    own = first.meaning
    return ByTensor(own.scale if scale is None else scale, own.zero_point if zero is None else zero)


def _asked(form: Form, first: Operand, given: Mapping[str, object]) -> ByTensor:
    """As eager has it: the operator is called with one element."""
    meaning = first.meaning
    if isinstance(meaning.scale, torch.SymFloat) or isinstance(meaning.zero_point, torch.SymInt):
        raise NoFormula(form.original.name(), reason="what its result means depends on a scale that varies")
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        one = by_tensor(torch.zeros(1, 1, dtype=first.values.dtype), meaning.scale, meaning.zero_point)
        rest = form.original._schema.arguments[1:]
        named = {argument.name: given[argument.name] for argument in rest if argument.kwarg_only}
        result = form.original(one, *(given[argument.name] for argument in rest if not argument.kwarg_only), **named)
        return ByTensor(result.q_scale(), result.q_zero_point())


def _fixed(**known: tuple[float, int]) -> Rule:
    def rule(form: Form, first: Operand, given: Mapping[str, object]) -> ByTensor:
        found = known.get(str(first.values.dtype).removeprefix("torch."))
        if found is None:
            raise NoFormula(form.original.name(), reason=f"what its result of {first.values.dtype} means is not known")
        return ByTensor(*found)

    return rule


# -- operators ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """An operator over quantised tensors, and what stands for it in graphs.

    Attributes:
        quantised: the places of arguments that are, or list, quantised tensors.
        packed: the places of packed parameters.
        means: of each result.
        shapes: of the results, from the mode, the sizes of packed parameters and the arguments by name.
    """

    original: OpOverload
    overload: OpOverload
    quantised: frozenset[int]
    packed: frozenset[int]
    means: tuple[Rule, ...]
    strides: Strides
    shapes: Callable[..., Sequence[tuple[Size, ...]]]
    dtype: torch.dtype | None

    def bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The arguments of a call of the original, by name, with defaults."""
        schema = self.original._schema.arguments
        found = {a.name: a.default_value for a in schema if a.has_default_value()}
        found.update(zip((a.name for a in schema), args, strict=False))
        found.update(kwargs)
        return {a.name: found[a.name] for a in schema}

    def call(self, given: Mapping[str, Any], sizes: Sequence[int]) -> tuple[list[object], dict[str, object]]:
        """What stands in graphs takes: `given` has operands for quantised tensors, numbers for packed parameters."""
        args: list[object] = [list(sizes)] if self.packed else []
        kwargs: dict[str, object] = {}
        for place, argument in enumerate(self.original._schema.arguments):
            value = given[argument.name]
            if place not in self.quantised:
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            elif isinstance(value, Operand):
                args += [value.values, value.meaning.scale, value.meaning.zero_point]
            else:
                args.append([one.values for one in value])
                args.append([one.meaning.scale for one in value])
                args.append([one.meaning.zero_point for one in value])
        return args, kwargs

    def results(self, given: Mapping[str, object]) -> list[ByTensor | None]:
        """What each result means; None for a plain tensor.

        Raises:
            NoFormula: it is not known.
        """
        first = next(_operands(given))
        if given.get("inplace"):
            raise NoFormula(self.original.name(), reason="it writes to a quantised tensor")
        return [rule(self, first, given) for rule in self.means]


def _operands(given: Mapping[str, object]) -> Iterator[Operand]:
    for value in given.values():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Operand):
                yield one


def form_of(
    operator: OpOverload | OpOverloadPacket, args: Sequence[object], kwargs: Mapping[str, object]
) -> Form | None:
    """What stands in graphs for a call of an operator, or of the overload that takes such arguments."""
    if isinstance(operator, OpOverload):
        return known_forms().get(operator.name())
    for name in operator.overloads():
        form = known_forms().get(getattr(operator, name).name())
        if form is not None and _takes(form.original, args, kwargs):
            return form
    return None


def _takes(original: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the arguments fit a schema as far as its overloads differ: by their names, and by what are tensors."""
    schema = original._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    known = {argument.name: argument for argument in schema}
    if len(args) > len(schema) or not given.keys() <= known.keys():
        return False
    if any(not argument.has_default_value() and argument.name not in given for argument in schema):
        return False
    return all(isinstance(given[name], torch.Tensor) for name in given if str(known[name].type) == "Tensor")


_NAMES = frozenset({"self", "qx", "X", "qa", "qb", "qaccum", "input", "tensors", "other"})
"""What quantised tensors are called in schemas."""


def _define(original: OpOverload, row: _Row) -> Form:
    schema = original._schema
    names = _NAMES | row.also
    places = frozenset(i for i, a in enumerate(schema.arguments) if a.name in names and "Tensor" in str(a.type))
    packed = frozenset(i for i, a in enumerate(schema.arguments) if "__torch__" in str(a.type))
    name, _, rest = numbers_for_objects(str(schema).replace("::", "_", 1)).partition("(")
    for place in places:
        called = schema.arguments[place].name
        rest = re.sub(rf"Tensor {called}\b", rf"Tensor {called}, Scalar {called}_scale, SymInt {called}_zero", rest)
        rest = re.sub(
            rf"Tensor\[\] {called}\b", f"Tensor[] {called}, Scalar[] {called}_scale, SymInt[] {called}_zero", rest
        )
    rest = re.sub(r"\bint(\??) (\w*zero_point\w*)", r"SymInt\1 \2", rest)
    rest = re.sub(r"\bfloat(\??) (output_scale|Y_scale_i|scale)\b", r"Scalar\1 \2", rest)
    _library.define(f"{name}({'int[] sizes, ' if packed else ''}{rest}")
    packet, _, kind = name.partition(".")
    overload = getattr(getattr(torch.ops.primtorch_quantised, packet), kind or "default")
    form = Form(original, overload, places, packed, row.means, row.strides, row.shapes, row.dtype)

    def run(*args: object, **kwargs: object) -> object:
        taken = _positional(overload, args)
        if packed:
            next(taken)
        given: list[object] = []
        for place, argument in enumerate(schema.arguments):
            if argument.kwarg_only:
                break
            value = next(taken)
            if place in packed:
                value = object_of(value)
            elif place in places and isinstance(value, torch.Tensor):
                value = by_tensor(value, next(taken), next(taken))
            elif place in places:
                value = [by_tensor(*parts) for parts in zip(value, next(taken), next(taken), strict=True)]
            given.append(value)
        result = original(*given, **kwargs)
        return tuple(map(_own, result)) if isinstance(result, (tuple, list)) else _own(result)

    _library.impl(name, run, "CompositeExplicitAutograd")
    register_special(overload, _fake(form))
    return form


def _positional(overload: OpOverload, args: Sequence[object]) -> Iterator[Any]:
    """The arguments of a call by position: the dispatcher leaves out defaults at the end."""
    yield from args
    yield from (argument.default_value for argument in overload._schema.arguments[len(args) :])


def _own(result: torch.Tensor) -> torch.Tensor:
    return values_of(result) if result.is_quantized else result


def _fake(form: Form) -> Callable[..., object]:
    def fake(mode: FakeMode, *args: object, **kwargs: object) -> object:
        taken = _positional(form.overload, args)
        sizes: Sequence[int] = next(taken) if form.packed else ()
        given: dict[str, object] = {}
        for place, argument in enumerate(form.original._schema.arguments):
            default = argument.default_value if argument.kwarg_only else None
            given[argument.name] = kwargs.get(argument.name, default) if argument.kwarg_only else next(taken)
            if place in form.quantised:
                next(taken), next(taken)
        first = next(given[a.name] for i, a in enumerate(form.original._schema.arguments) if i in form.quantised)
        others = first if isinstance(first, (list, tuple)) else (first,)
        source = others[0].spec
        lie_alike = all(suggests_channels_last(one.spec.shape, one.spec.strides) for one in others)
        made: list[FakeTensor] = []
        for shape in form.shapes(form, mode, sizes, given):
            strides = (
                form.strides(source, shape)
                if lie_alike or not isinstance(first, (list, tuple))
                else contiguous_strides(shape)
            )
            dtype = form.dtype or source.dtype
            if len(made) == 1:
                dtype = torch.int64  # places, beside values
            made.append(mode.from_spec(TensorSpec(shape, strides, dtype, source.device)))
        return made[0] if len(made) == 1 else tuple(made)

    return fake


# -- shapes ------------------------------------------------------------------------------------------


def _as_floats(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, object]) -> list[tuple[Size, ...]]:
    """As the operator has it of floats."""
    return _of_floats(form.original, mode, form.original._schema.arguments, given)


def _of_floats(
    op: OpOverload, mode: FakeMode, arguments: Sequence[torch.Argument], given: Mapping[str, object]
) -> list[tuple[Size, ...]]:
    args = tuple(_float(mode, given[a.name]) for a in arguments if not a.kwarg_only)
    kwargs = {a.name: given[a.name] for a in arguments if a.kwarg_only}
    result: object = propagate(mode, op, args, kwargs)
    return [one.spec.shape for one in (result if isinstance(result, (tuple, list)) else (result,))]


def _float(mode: FakeMode, value: object) -> Any:
    if isinstance(value, (tuple, list)) and any(isinstance(one, FakeTensor) for one in value):
        return [_float(mode, one) for one in value]
    if not isinstance(value, FakeTensor) or value.dtype not in _QUANTISED:
        return value
    spec = value.spec
    return mode.from_spec(TensorSpec(spec.shape, contiguous_strides(spec.shape), torch.float32, spec.device))


def _as_first(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, object]) -> list[tuple[Size, ...]]:
    return [next(value.spec.shape for value in given.values() if isinstance(value, FakeTensor))]


def _broadcast(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, object]) -> list[tuple[Size, ...]]:
    """Of two operands; how one that is broadcast is laid out is known of dense ones alone."""
    a, b = (value.spec for value in given.values() if isinstance(value, FakeTensor))
    shape = broadcast_shapes(a.shape, b.shape)
    dense = is_contiguous(a.shape, a.strides) or is_channels_last(a.shape, a.strides)
    if len(a.shape) != len(shape) or not (dense or a.shape == shape):
        raise NoFormula(form.original.name(), reason="its first operand is broadcast")
    return [tuple(shape)]


def _pooled(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, Any]) -> list[tuple[Size, ...]]:
    """Of a max pool, which floats have with places."""
    dims = int(form.original.name()[-2])
    values = _float(mode, given["self"])
    windows = [list(given[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
    if dims == 1:  # with a dim of size 1 in front
        spec = values.spec
        shape = (*spec.shape[:-1], 1, spec.shape[-1])
        values = mode.from_spec(TensorSpec(shape, contiguous_strides(shape), spec.dtype, spec.device))
        windows = [[one, *part] if part else part for one, part in zip((1, 1, 0, 1), windows, strict=True)]
    op = torch.ops.aten.max_pool3d_with_indices if dims == 3 else torch.ops.aten.max_pool2d_with_indices
    result: Any = propagate(mode, op.default, (values, *windows, given["ceil_mode"]), {})
    shape = result[0].spec.shape
    return [(*shape[:-2], shape[-1]) if dims == 1 else shape]


def _through(packet: OpOverload, names: Sequence[str]) -> Callable[..., list[tuple[Size, ...]]]:
    """As another operator has it of floats, which takes the arguments of these names."""

    def shapes(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, object]) -> list[tuple[Size, ...]]:
        result: Any = propagate(mode, packet, tuple(_float(mode, given[name]) for name in names), {})
        return [result.spec.shape]

    return shapes


def _features(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, Any]) -> list[tuple[Size, ...]]:
    return [(*given["X"].spec.shape[:-1], sizes[0])]


def _convolved(form: Form, mode: FakeMode, sizes: Sequence[int], given: Mapping[str, Any]) -> list[tuple[Size, ...]]:
    return [Window.of(sizes).shape(given["qx"].spec.shape)]


# -- layouts -----------------------------------------------------------------------------------------


def _rows(source: TensorSpec, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(contiguous_strides(shape))


def _channels_last(source: TensorSpec, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(strides_in_order(shape, channels_last_order(len(shape))))


def _images_last(source: TensorSpec, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return _channels_last(source, shape) if len(shape) in (4, 5) else _rows(source, shape)


def _suggested(source: TensorSpec, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(suggested_strides(source, shape))


def _suggested_as_images(source: TensorSpec, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """As that of rows as images of one row."""
    size, step = source.shape, source.strides
    suggests = suggests_channels_last((*size[:-1], 1, size[-1]), (*step[:-1], size[-1] * step[-1], step[-1]))
    return _channels_last(source, shape) if len(shape) == 3 and suggests else _rows(source, shape)


# -- the table ---------------------------------------------------------------------------------------


@record
class _Row:
    names: str
    means: tuple[Rule, ...]
    strides: Strides = _suggested
    shapes: Callable[..., Sequence[tuple[Size, ...]]] = _as_floats
    dtype: torch.dtype | None = None
    also: frozenset[str] = frozenset()  # names of other arguments that are quantised


_SIGMOID = _fixed(int8=(1 / 256, -128), uint8=(1 / 256, 0))
_TANH = _fixed(int8=(2 / 256, 0), uint8=(2 / 256, 128))
_LINEAR = " ".join(f"quantized.linear{then}" for then in ("", "_relu", "_leaky_relu", "_tanh"))
_CONVOLUTIONS = " ".join(
    (
        *(f"quantized.conv{dims}d{relu}{'' if dims == 1 else '.new'}" for dims in (1, 2, 3) for relu in ("", "_relu")),
        *(f"quantized.conv_transpose{dims}d" for dims in (1, 2, 3)),
        *(f"quantized.conv2d_add{relu}" for relu in ("", "_relu")),
    )
)
_NORMS = " ".join(f"quantized.batch_norm{dims}{relu}" for dims in ("", "1d", "2d", "3d") for relu in ("", "_relu"))
_COMPARISONS = " ".join(
    f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
)
_WITH_NUMBERS = " ".join(
    f"quantized.{op}{form}" for op in ("add", "mul") for form in (".Scalar", "_relu.Scalar", "_scalar", "_scalar_relu")
)

_ROWS = (
    _Row("aten.dequantize.self", (_plain,), dtype=torch.float32, shapes=_as_first),
    _Row("aten.int_repr", (_plain,), shapes=_as_first),
    _Row("aten.relu aten.hardtanh aten.clamp aten.threshold aten.leaky_relu", (_same,)),
    _Row("aten.gelu", (_asked,)),
    _Row("aten._adaptive_avg_pool2d aten._adaptive_avg_pool3d aten.avg_pool2d", (_same,)),
    _Row("aten.avg_pool3d", (_same,), _channels_last),
    _Row("aten.upsample_nearest2d aten.upsample_nearest3d aten.upsample_bilinear2d", (_same,)),
    _Row("aten._upsample_nearest_exact2d aten._upsample_nearest_exact3d", (_same,)),
    _Row("aten.constant_pad_nd aten.channel_shuffle aten.flip aten.cat", (_same,)),
    _Row("aten.quantized_max_pool1d", (_same,), _suggested_as_images, _pooled),
    _Row("aten.quantized_max_pool2d aten.quantized_max_pool3d", (_same,), shapes=_pooled),
    _Row("aten.mean.dim aten.index_select aten.index.Tensor aten.repeat aten.reflection_pad2d", (_same,), _rows),
    _Row("aten.pixel_shuffle aten.pixel_unshuffle aten.max aten.min", (_same,), _rows),
    _Row("aten.max.dim aten.min.dim aten.topk", (_same, _plain), _rows),
    _Row("aten.sort", (_same, _plain)),
    _Row("aten.sigmoid aten.hardsigmoid", (_SIGMOID,)),
    _Row("aten.tanh", (_TANH,)),
    _Row(_COMPARISONS, (_plain,), dtype=torch.bool),
    _Row(_LINEAR, (_given,), _rows, _features),
    _Row(_CONVOLUTIONS, (_given,), _channels_last, _convolved),
    _Row("quantized.add quantized.add_relu quantized.mul quantized.mul_relu", (_given,), shapes=_broadcast),
    _Row(_WITH_NUMBERS, (_asked,), shapes=_as_first),
    _Row("quantized.cat quantized.cat_relu", (_given,), shapes=_through(torch.ops.aten.cat.default, ("qx", "dim"))),
    _Row("quantized.matmul", (_given,), _rows, _through(torch.ops.aten.matmul.default, ("qa", "qb"))),
    _Row("quantized.hardswish quantized.leaky_relu quantized.sigmoid", (_given,), shapes=_as_first),
    _Row("quantized.prelu", (_given,), shapes=_as_first, also=frozenset({"weight"})),
    _Row("quantized.elu quantized.celu quantized.softmax quantized.layer_norm", (_given,), _rows, _as_first),
    _Row("quantized.group_norm quantized.instance_norm", (_given,), shapes=_as_first),
    _Row("quantized.relu6 quantized.threshold quantized.clamp", (_same,), shapes=_as_first),
    _Row(_NORMS, (_given,), _images_last, _as_first),
)


@once
def known_forms() -> Mapping[str, Form]:
    """Of each operator, by its name. Whoever first asks defines the operators that stand in graphs."""
    return dict(_forms())


def _forms() -> Iterator[tuple[str, Form]]:
    for row in _ROWS:
        for name in row.names.split():
            namespace, packet, *kind = name.split(".")
            found = getattr(getattr(torch.ops, namespace), packet, None)
            original = getattr(found, kind[0] if kind else "default", None)
            if original is not None:  # not every torch has it
                yield original.name(), _define(original, row)


# -- into quantised tensors and out of them ----------------------------------------------------------


def _special(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> OpOverload:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    overload: OpOverload = getattr(torch.ops.primtorch_quantised, name).default
    register_special(overload, fake)
    return overload


def _integers(mode: FakeMode, x: FakeTensor, dtype: torch.dtype) -> FakeTensor:
    spec = x.spec
    return mode.from_spec(
        TensorSpec(spec.shape, tuple(suggested_strides(spec, spec.shape)), INTEGERS.get(dtype, dtype), spec.device)
    )


def _quantise_dynamically(x: torch.Tensor, dtype: torch.dtype, reduce_range: bool) -> tuple[torch.Tensor, ...]:
    made = torch.quantize_per_tensor_dynamic(x, dtype, reduce_range)
    scale, zero = torch.tensor(made.q_scale(), dtype=torch.float64), torch.tensor(made.q_zero_point())
    return values_of(made), scale, zero


def _dynamic_integers(mode: FakeMode, x: FakeTensor, dtype: torch.dtype, reduce_range: bool) -> tuple[FakeTensor, ...]:
    numbers = (mode.from_spec(TensorSpec((), (), kind, x.spec.device)) for kind in (torch.float64, torch.int64))
    return _integers(mode, x, dtype), *numbers


QUANTISE = _special(
    "quantize_per_tensor(Tensor x, Scalar scale, SymInt zero_point, ScalarType dtype) -> Tensor",
    lambda x, scale, zero_point, dtype: values_of(torch.quantize_per_tensor(x, scale, zero_point, dtype)),
    lambda mode, x, scale, zero_point, dtype: _integers(mode, x, dtype),
)
QUANTISE_BY_CHANNEL = _special(
    "quantize_per_channel(Tensor x, Tensor scales, Tensor zero_points, int axis, ScalarType dtype) -> Tensor",
    lambda x, scales, zeros, axis, dtype: values_of(torch.quantize_per_channel(x, scales, zeros, axis, dtype)),
    lambda mode, x, scales, zeros, axis, dtype: _integers(mode, x, dtype),
)
QUANTISE_DYNAMICALLY = _special(
    "quantize_per_tensor_dynamic(Tensor x, ScalarType dtype, bool reduce_range) -> (Tensor, Tensor, Tensor)",
    _quantise_dynamically,
    _dynamic_integers,
)
DEQUANTISE_BY_CHANNEL = _special(
    "dequantize_per_channel(Tensor values, Tensor scales, Tensor zero_points, int axis) -> Tensor",
    lambda values, scales, zeros, axis: by_channel(values, scales, zeros, axis).dequantize(),
    lambda mode, values, scales, zeros, axis: _integers(mode, values, torch.float32),
)
