"""Operators over packed parameters: quantised weights as a kernel wants them, in objects of torch's C++ classes.

A graph holds tensors and numbers. Such an operator stands in it under a namespace of its own (`in_graph`): in the place
of each object is its number, which is an input like any other, and in front is what the shapes of results depend on
(`sizes_of`). So a graph is compiled once for all objects of these sizes, and can be kept on disk.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch.fake.tensor import FakeMode, FakeTensor, register_special
from primtorch.frozen import record
from primtorch.layout import channels_last_order, contiguous_strides, strides_in_order
from primtorch.once import once
from primtorch.spec import Size, TensorSpec

NAMESPACE = "primtorch_packed"
_library = torch.library.Library(NAMESPACE, "DEF")
_OBJECT = re.compile(r"__torch__\.torch\.classes\.\w+\.\w+(\[\])? ")

Extent: TypeAlias = "tuple[tuple[Size, ...], tuple[Size, ...]]"
"""A result's shape and strides."""
Shapes: TypeAlias = "Callable[..., Sequence[Extent]]"
"""What an operator's results look like, from the sizes of its objects and its other arguments: shapes and strides."""


@record
class _Known:
    """An object that has a number, which lives as long as the program holds it."""

    object: weakref.ref[torch.ScriptObject]
    number: int
    sizes: tuple[int, ...]
    has_history: bool


_numbers = itertools.count(1)
_by_identity: dict[int, _Known] = {}  # the objects' own comparison raises
_by_number: dict[int, _Known] = {}


def number_of(packed: torch.ScriptObject) -> int:
    """What graphs call the object by. The number is good in this process, for as long as the object lives."""
    return _known(packed).number


def sizes_of(packed: torch.ScriptObject) -> tuple[int, ...]:
    """What shapes of results depend on: the features that a linear layer gives, the length of an embedding's rows, a
    convolution's `Window`; none for the cells of recurrent layers, whose states tell it."""
    return _known(packed).sizes


def has_history(packed: torch.ScriptObject) -> bool:
    """Whether what is computed with the object requires a gradient, as by weights of float16, to which eager adds the
    bias that it has been given."""
    return _known(packed).has_history


def _known(packed: torch.ScriptObject) -> _Known:
    identity = id(packed)
    found = _by_identity.get(identity)
    if found is not None and found.object() is packed:
        return found
    number = next(_numbers)

    def forget(_: object) -> None:
        del _by_number[number]
        if _by_identity[identity].number == number:
            del _by_identity[identity]

    kind = str(packed._type()).rpartition(".")[2]
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        sizes = _SIZES[kind](packed)  # whoever asks may be tracing
        found = _Known(weakref.ref(packed, forget), number, sizes, _adds_bias(packed))
    _by_identity[identity] = _by_number[number] = found
    return found


def object_of(number: int) -> torch.ScriptObject:
    """The object that has the number.

    Raises:
        RuntimeError: it is no longer there.
    """
    known = _by_number.get(number)
    packed = None if known is None else known.object()
    if packed is None:
        raise RuntimeError("a compiled function reads packed parameters that are no longer there")
    return packed


def _features(packed: Any) -> tuple[int, ...]:
    return (int(packed.unpack()[0].shape[0]),)


def _row(packed: object) -> tuple[int, ...]:
    return (int(torch.ops.quantized.embedding_bag_unpack(packed).shape[1]),)


@record
class Window:
    """What a convolution's shape depends on. Of one over a single dim there are two dims here, the first of size 1."""

    channels: int
    transposed: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]

    @staticmethod
    def of(sizes: Sequence[int]) -> Window:
        """The window that `sizes_of` tells."""
        rest, dims = sizes[2:], (len(sizes) - 2) // 5
        return Window(sizes[0], bool(sizes[1]), *(tuple(rest[i * dims : (i + 1) * dims]) for i in range(5)))

    def strides(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        """How a convolution of quantised weights lays out its result: channels last, also of one dim."""
        return strides_in_order(tuple(shape), channels_last_order(len(shape)))

    def shape(self, x: Sequence[Size]) -> tuple[Size, ...]:
        """The shape of the result for an operand of this shape."""
        last = len(x) - 2
        parts = (self.kernel, self.stride, self.padding, self.dilation, self.output_padding)
        spatial = []
        for size, kernel, stride, padding, dilation, more in zip(x[2:], *(part[-last:] for part in parts), strict=True):
            reach = dilation * (kernel - 1)
            if self.transposed:
                spatial.append((size - 1) * stride - 2 * padding + reach + more + 1)
            else:
                spatial.append((size + 2 * padding - reach - 1) // stride + 1)
        return x[0], self.channels, *spatial


def _window(packed: Any) -> tuple[int, ...]:
    weight, transposed = packed.unpack()[0], bool(packed.transpose())
    channels = weight.shape[1] * packed.groups() if transposed else weight.shape[0]
    parts = (weight.shape[2:], packed.stride(), packed.padding(), packed.dilation(), packed.output_padding())
    return channels, int(transposed), *(int(size) for part in parts for size in part)


def _adds_bias(packed: Any) -> bool:
    match str(packed._type()).rpartition(".")[2]:
        case "LinearPackedParamsBase":
            weight, bias = packed.unpack()
            return bias is not None and bias.requires_grad and not weight.is_quantized
        case "CellParamsBase":
            (_, *_, parts), _ = packed.__getstate__()
            return any(map(_adds_bias, parts))
    return False


_SIZES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "LinearPackedParamsBase": _features,
    "EmbeddingPackedParamsBase": _row,
    "CellParamsBase": lambda packed: (),
    "Conv2dPackedParamsBase": _window,
    "Conv3dPackedParamsBase": _window,
}


def is_packed(value: object) -> bool:
    """Whether a value is an object of packed parameters that graphs have numbers for."""
    return isinstance(value, torch.ScriptObject) and str(value._type()).rpartition(".")[2] in _SIZES


def in_graph(operator: OpOverload | OpOverloadPacket, places: frozenset[int]) -> tuple[OpOverload, bool] | None:
    """What stands in graphs for a call of an operator whose arguments at `places` are, or list, packed parameters,
    and whether it draws random numbers in training. None for operators that none does."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    for name in packet.overloads():
        overload = getattr(packet, name)
        found = known_forms().get(overload.name())
        if (found is not None and found.places == places) and operator in (packet, overload):
            return found.overload, found.draws
    return None


# -- shapes ------------------------------------------------------------------------------------------


def _dense(*shape: Size) -> Extent:
    return shape, contiguous_strides(shape)


def _linear(sizes: Sequence[int], x: FakeTensor, *rest: object) -> Sequence[Extent]:
    return (_dense(*x.spec.shape[:-1], sizes[0]),)


def _convolved(sizes: Sequence[int], x: FakeTensor, *rest: object) -> Sequence[Extent]:
    window = Window.of(sizes)
    shape = window.shape(x.spec.shape)
    return ((shape, window.strides(shape)),)


def _like_states(
    sizes: Sequence[int], x: FakeTensor, states: FakeTensor | Sequence[FakeTensor], *rest: object
) -> Sequence[Extent]:
    states = states if isinstance(states, (list, tuple)) else (states,)
    return [_dense(*state.spec.shape) for state in states]


def _rows(sizes: Sequence[int], packed: int, indices: FakeTensor, *rest: object) -> Sequence[Extent]:
    return (_dense(*indices.spec.shape, sizes[0]),)


def _bags(
    sizes: Sequence[int],
    packed: int,
    indices: FakeTensor,
    offsets: FakeTensor | None = None,
    *rest: object,
    include_last_offset: bool = False,
    **options: object,
) -> Sequence[Extent]:
    last = rest[5] if len(rest) > _LAST_OFFSET else include_last_offset
    if indices.dim() == 2 or offsets is None:
        return (_dense(indices.spec.shape[0], sizes[0]),)
    return (_dense(offsets.spec.shape[0] - 1 if last else offsets.spec.shape[0], sizes[0]),)


_LAST_OFFSET = 5  # behind the offsets


def _sequence(
    sizes: Sequence[int],
    x: FakeTensor,
    states: FakeTensor | Sequence[FakeTensor],
    packed: object,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    **options: object,
) -> Sequence[Extent]:
    of_states = _like_states(sizes, x, states)
    width = of_states[0][0][-1] * (2 if bidirectional else 1)
    first, second = x.spec.shape[:2]
    shape, strides = _dense(*((second, first) if batch_first else (first, second)), width)
    if batch_first:
        shape, strides = (first, second, width), (strides[1], strides[0], strides[2])
    return [(shape, strides), *of_states]


def _packed_sequence(
    sizes: Sequence[int],
    x: FakeTensor,
    lengths: FakeTensor,
    states: FakeTensor | Sequence[FakeTensor],
    packed: object,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    **options: object,
) -> Sequence[Extent]:
    of_states = _like_states(sizes, x, states)
    return [_dense(x.spec.shape[0], of_states[0][0][-1] * (2 if bidirectional else 1)), *of_states]


# -- the operators -----------------------------------------------------------------------------------


@record
class _Form:
    overload: OpOverload
    places: frozenset[int]
    draws: bool


def numbers_for_objects(schema: str) -> str:
    """A schema that has numbers in the places of packed parameters."""
    return _OBJECT.sub(lambda found: f"SymInt{found.group(1) or ''} ", schema)


def _define(original: OpOverload, shapes: Shapes) -> _Form:
    """Another operator, with numbers for objects, whose kernel calls the original."""
    schema = original._schema
    text = numbers_for_objects(str(schema).partition("::")[2])
    name, _, arguments = text.partition("(")
    places = frozenset(i for i, a in enumerate(schema.arguments) if "__torch__" in str(a.type))

    def run(sizes: Sequence[int], *args: object, **kwargs: object) -> object:
        given = [_objects(arg) if i in places else arg for i, arg in enumerate(args)]
        return original(*given, **kwargs)

    def fake(mode: FakeMode, sizes: Sequence[int], *args: object, **kwargs: object) -> object:
        like = next(arg for arg in args if isinstance(arg, FakeTensor)).spec.device
        results = tuple(
            mode.from_spec(TensorSpec(shape, strides, torch.float32, like))
            for shape, strides in shapes(sizes, *args, **kwargs)
        )
        return results[0] if len(schema.returns) == 1 else results

    _library.define(f"{name}(int[] sizes, {arguments}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    packet, _, kind = name.partition(".")
    overload = getattr(getattr(torch.ops.primtorch_packed, packet), kind or "default")
    register_special(overload, fake)
    return _Form(overload, places, any(argument.name == "dropout" for argument in schema.arguments))


def _objects(numbers: Any) -> object:
    return object_of(numbers) if isinstance(numbers, int) else [object_of(number) for number in numbers]


_SHAPES: dict[str, Shapes] = {
    **dict.fromkeys(
        (
            "linear_dynamic", "linear_relu_dynamic", "linear_dynamic_fp16", "linear_relu_dynamic_fp16",
            "linear_with_input_q_dq_qweight_dq_output_fp32", "linear_with_input_q_dq_qweight_dq_relu_output_fp32",
        ),
        _linear,
    ),
    **dict.fromkeys((f"conv{form}{dims}d_dynamic" for form in ("", "_transpose") for dims in (1, 2, 3)), _convolved),
    **{f"quantized_{kind}_cell_dynamic": _like_states for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **dict.fromkeys(("embedding_byte", "embedding_4bit"), _rows),
    **dict.fromkeys(("embedding_bag_byte", "embedding_bag_4bit"), _bags),
    **{f"quantized_{kind}.input": _sequence for kind in ("lstm", "gru")},
    **{f"quantized_{kind}.data": _packed_sequence for kind in ("lstm", "gru")},
}  # fmt: skip


def _original(name: str) -> OpOverload | None:
    """The operator of this name, where the installed torch has it."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten if overload else torch.ops.quantized, packet, None)
    return getattr(found, overload or "default", None)


@once
def known_forms() -> Mapping[str, _Form]:
    """Of each operator, by its name. Whoever first asks defines the operators that stand in graphs."""
    return {
        original.name(): _define(original, shapes)
        for name, shapes in _SHAPES.items()
        if (original := _original(name)) is not None
    }
