"""Quantised tensors: a graph has their elements, tensors of plain integers, and what these mean as numbers.

While a program is captured, one is a fake of the quantised dtype, beside it the fake of its integers and a
`primtorch.quantised.Meaning`. A call runs torch's own code for it under a mode that sees each operator: views and
copies are those of the integers, other operators stand in the graph as `primtorch.quantised` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch import quantised as forms
from primtorch.dispatch_mode import DispatchMode
from primtorch.errors import PrimTorchError
from primtorch.fake import FakeMode, FakeTensor
from primtorch.fake.composites import symbolic_keys
from primtorch.fake.recipe import storage_bytes
from primtorch.quantised import INTEGERS, ByChannel, ByTensor, Meaning, Operand
from primtorch.spec import TensorSpec
from torchdynamo.graph.special_tensors import leaves, refusal
from torchdynamo.interpreter.protocol import MISSING, Escape
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder

_aten = torch.ops.aten
_QUANTISED = {plain: quantised for quantised, plain in INTEGERS.items()}

# Views of a quantised tensor, and what exchanges elements as it does for any tensor.
_VIEWS = frozenset(
    {
        _aten.view.default, _aten._unsafe_view.default, _aten.permute.default, _aten.transpose.int, _aten.t.default,
        _aten.select.int, _aten.slice.Tensor, _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.default,
        _aten.squeeze.dim, _aten.squeeze.dims, _aten.split.Tensor, _aten.split_with_sizes.default,
        _aten.unbind.int, _aten.diagonal.default, _aten.as_strided.default, _aten.unfold.default,
        _aten._reshape_alias.default, _aten.detach.default, _aten.alias.default,
    }
)  # fmt: skip
_OF_ANY = frozenset({_aten.detach.default, _aten.alias.default})  # also where each channel has a scale
# Calls that write to their first operand what another gives.
_IN_PLACE = {
    _aten.relu_.default: _aten.relu.default,
    _aten.hardtanh_.default: _aten.hardtanh.default,
    _aten.leaky_relu_.default: _aten.leaky_relu.default,
    _aten.gelu_.default: _aten.gelu.default,
}
_OFFSETS = frozenset({"storage_offset", "as_strided"})


class QuantisedFake(FakeTensor):
    """A quantised tensor without data, and the fake of its integers."""

    integers: FakeTensor
    meaning: Meaning

    @staticmethod
    def around(values: FakeTensor, meaning: Meaning, mode: FakeMode) -> QuantisedFake:
        """The tensor that has these integers."""
        spec = values.spec
        described = spec.shape, spec.strides, spec.offset, None, _QUANTISED[spec.dtype], torch.strided, spec.device
        keys, size = (_KEYS | symbolic_keys(), storage_bytes(spec)) if values.symbolic else (_KEYS, None)
        self: QuantisedFake = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            QuantisedFake, *described, False, False, storage_size=size, _extra_dispatch_keys=keys
        )
        self.fake_mode = mode
        self.spec = TensorSpec(spec.shape, spec.strides, _QUANTISED[spec.dtype], spec.device, spec.offset)
        self.symbolic = values.symbolic
        self._memory = values.memory
        self.integers, self.meaning = values, meaning
        return self

    @property
    def operand(self) -> Operand:
        """It as operators take it."""
        if not isinstance(self.meaning, ByTensor):
            raise BreakGraph("special_tensor", "an operator over a tensor with a scale for each channel")
        return Operand(self.integers, self.meaning)


_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Quantized)  # type: ignore[attr-defined]


class Quantised:
    """The quantised tensors of one graph."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.used = False
        self._alive: list[object] = []

    def release(self) -> None:
        """Lets go of the tensors."""
        self._alive.clear()

    def around(self, values: torch.Tensor, meaning: Meaning) -> QuantisedFake:
        """The quantised tensor that has these integers."""
        assert isinstance(values, FakeTensor)
        self.used = True
        with torch._C.DisableTorchFunction():
            made = QuantisedFake.around(values, meaning, self.recorder.mode)
        self._alive.append(made)
        return made

    def takes(self, name: str, args: object, kwargs: object) -> bool:
        """Whether a call makes one, or has one among its arguments."""
        return name in _MAKERS or (
            self.used and any(isinstance(leaf, QuantisedFake) for leaf in leaves((args, kwargs)))
        )

    # -- calls ----------------------------------------------------------------------------------

    def run(self, name: str, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        """A call with quantised tensors, or one that makes them: what it does is in the graph."""
        if "out" in kwargs or name in ("__setitem__", "requires_grad_"):
            raise BreakGraph("special_tensor", f"{name}() writes to a quantised tensor")
        args, kwargs = self.recorder.adopt_all(args), self.recorder.adopt_all(kwargs)
        known = self._question(name, args)
        if known is not MISSING:
            return known
        if name in _OFFSETS:
            self.recorder.guard_offset(args[0].integers)
        try:
            if name in _MAKERS:
                return self._make(name, args, kwargs)
            form = operator_of(func, args, kwargs) if isinstance(func, (OpOverload, OpOverloadPacket)) else None
            if form is not None:
                return self.operate(form.original, args, kwargs)
            with _Below(self):
                return func(*args, **kwargs)
        except (Escape, PrimTorchError):
            raise
        except RuntimeError as error:  # what eager refuses it says between two graphs
            raise refusal(name, "quantised", error) from error

    def _question(self, name: str, args: tuple[object, ...]) -> object:
        """What a tensor is asked about its scale, or MISSING."""
        one = args[0] if args else None
        if not isinstance(one, QuantisedFake):
            return MISSING
        meaning = one.meaning
        if name == "qscheme":
            return torch.per_tensor_affine if isinstance(meaning, ByTensor) else meaning.scheme
        if name in ("q_scale", "q_zero_point") and isinstance(meaning, ByTensor):
            return meaning.scale if name == "q_scale" else meaning.zero_point
        if isinstance(meaning, ByChannel):
            parts = {
                "q_per_channel_scales": meaning.scales,
                "q_per_channel_zero_points": meaning.zero_points,
                "q_per_channel_axis": meaning.axis,
            }
            return parts.get(name, MISSING)
        return MISSING

    def operate(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object], sizes: Sequence[int] = ()
    ) -> object:
        """The result of an operator; packed parameters among the arguments are their numbers, with their sizes."""
        rule = _RULES.get(op)
        if rule is not None:
            return rule(self, *args, **kwargs)
        first = args[0] if args else None
        if op in _VIEWS and isinstance(first, QuantisedFake):
            if isinstance(first.meaning, ByChannel) and op not in _OF_ANY:
                raise BreakGraph("special_tensor", f"{op} of a tensor with a scale for each channel")
            return self._like(first, self.recorder.record(op, (first.integers, *args[1:]), dict(kwargs)))
        if op in _IN_PLACE:
            made: Any = self.operate(_IN_PLACE[op], args, kwargs)
            self.recorder.record(_aten.copy_.default, (args[0].integers, made.integers), {})
            return first
        form = forms.known_forms().get(op.name())
        if form is None:
            raise BreakGraph("special_tensor", f"{op} of a quantised tensor")
        return self._of_form(form, args, kwargs, sizes)

    def _of_form(
        self, form: forms.Form, args: Sequence[object], kwargs: Mapping[str, object], sizes: Sequence[int]
    ) -> object:
        given = form.bound(args, kwargs)
        for place, argument in enumerate(form.original._schema.arguments):
            value = given[argument.name]
            if (place in form.quantised) != any(isinstance(leaf, QuantisedFake) for leaf in leaves(value)):
                raise BreakGraph("special_tensor", f"{form.original} of quantised and other tensors")
            if isinstance(value, torch.Tensor) and str(argument.type) in _NUMBERS:
                given[argument.name] = self._number(_NUMBERS[str(argument.type)], value)
            if place in form.quantised:
                one_of = isinstance(value, torch.Tensor)
                given[argument.name] = value.operand if one_of else [leaf.operand for leaf in value]
        try:
            means = form.results(given)
        except PrimTorchError as error:
            raise BreakGraph("special_tensor", str(error).partition("\n")[0]) from error
        taken, named = form.call(given, sizes)
        result = self.recorder.record(form.overload, tuple(taken), named)
        several = isinstance(result, (tuple, list))
        made = [
            part if meaning is None else self.around(part, meaning)
            for part, meaning in zip(result if several else (result,), means, strict=True)
        ]
        return tuple(made) if several else made[0]

    def _like(self, first: QuantisedFake, result: Any) -> object:
        if isinstance(result, (tuple, list)):
            return type(result)(self.around(part, first.meaning) for part in result)
        return first if result is first.integers else self.around(result, first.meaning)

    # -- rules ----------------------------------------------------------------------------------

    def _make(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> QuantisedFake:
        """A call of a function that makes one: torch's own takes no symbol for a zero point."""
        overload = getattr(_aten, name).default
        names = ["input" if argument.name == "self" else argument.name for argument in overload._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or given.keys() != set(names) or not isinstance(given["input"], torch.Tensor):
            raise BreakGraph("special_tensor", f"{name}() of such arguments")
        if isinstance(given["input"], QuantisedFake):
            raise BreakGraph("special_tensor", f"{name}() of a quantised tensor")
        return _MAKING[overload](self, *(given[argument] for argument in names))

    def _quantise(self, x: torch.Tensor, scale: object, zero_point: object, dtype: torch.dtype) -> QuantisedFake:
        step, zero = self._number("__float__", scale), self._number("__int__", zero_point)
        _refuse_dtype(dtype)
        values = self.recorder.record(forms.QUANTISE, (x, step, zero, dtype), {})
        return self.around(values, ByTensor(step, zero))

    def _number(self, name: str, value: object) -> Any:
        """A scale or zero point that may be a tensor of one element: its number, which the graph takes out."""
        if not isinstance(value, torch.Tensor):
            return float(value) if name == "__float__" and isinstance(value, int) else value
        number = self.recorder.take_number(name, value)
        if number is MISSING:
            raise BreakGraph("tensor_to_number", "a scale or zero point is taken from a tensor")
        return number

    def _quantise_dynamically(self, x: torch.Tensor, dtype: torch.dtype, reduce_range: bool) -> QuantisedFake:
        _refuse_dtype(dtype)
        made = self.recorder.record(forms.QUANTISE_DYNAMICALLY, (x, dtype, reduce_range), {})
        values, scale, zero_point = made
        return self.around(values, ByTensor(self._number("item", scale), self._number("item", zero_point)))

    def _quantise_by_channel(
        self, x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, dtype: torch.dtype
    ) -> QuantisedFake:
        _refuse_dtype(dtype)
        values = self.recorder.record(forms.QUANTISE_BY_CHANNEL, (x, scales, zero_points, axis, dtype), {})
        return self.around(values, self._by_channel(scales, zero_points, axis))

    def _by_channel(self, scales: torch.Tensor, zero_points: torch.Tensor, axis: int) -> ByChannel:
        kinds = (torch.float32,) * 2 if zero_points.is_floating_point() else (torch.float64, torch.int64)
        return ByChannel(self._as(scales, kinds[0]), self._as(zero_points, kinds[1]), axis)

    def _as(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if part.dtype is dtype:
            return part
        return self.recorder.record(torch.Tensor.to, (part, dtype), {})  # type: ignore[no-any-return]

    def _made(self, values: torch.Tensor, scale: float, zero_point: int) -> QuantisedFake:
        return self.around(self._copied(values), ByTensor(scale, zero_point))

    def _made_by_channel(
        self, values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
    ) -> QuantisedFake:
        return self.around(self._copied(values), self._by_channel(scales, zero_points, axis))

    def _copied(
        self, values: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        return self.recorder.record(_aten.clone.default, (values,), {"memory_format": memory_format})  # type: ignore[no-any-return]

    def _clone(self, x: QuantisedFake, memory_format: torch.memory_format | None = None) -> QuantisedFake:
        """A copy: by rows where the layout is to be kept, as eager has it of quantised tensors."""
        kept = memory_format in (None, torch.preserve_format)
        return self.around(self._copied(x.integers, torch.contiguous_format if kept else memory_format), x.meaning)  # type: ignore[arg-type]

    def _dequantise(self, x: QuantisedFake) -> torch.Tensor:
        """The floats: in plain operations where each step rounds as eager's does."""
        record, meaning = self.recorder.record, x.meaning
        if isinstance(meaning, ByChannel):
            parts = (x.integers, meaning.scales, meaning.zero_points, meaning.axis)
            return record(forms.DEQUANTISE_BY_CHANNEL, parts, {})  # type: ignore[no-any-return]
        return self._of_form(forms.known_forms()["aten::dequantize.self"], (x,), {}, ())  # type: ignore[return-value]

    def _int_repr(self, x: QuantisedFake) -> torch.Tensor:
        if isinstance(x.meaning, ByChannel):
            return self._copied(x.integers)
        return self._of_form(forms.known_forms()["aten::int_repr"], (x,), {}, ())  # type: ignore[return-value]


_MAKING: Mapping[OpOverload, Callable[..., QuantisedFake]] = {
    _aten.quantize_per_tensor.default: Quantised._quantise,
    _aten.quantize_per_tensor_dynamic.default: Quantised._quantise_dynamically,
    _aten.quantize_per_channel.default: Quantised._quantise_by_channel,
    _aten._make_per_tensor_quantized_tensor.default: Quantised._made,
    _aten._make_per_channel_quantized_tensor.default: Quantised._made_by_channel,
}
_RULES: Mapping[OpOverload, Callable[..., torch.Tensor]] = {
    **_MAKING,
    _aten.clone.default: Quantised._clone,
    _aten.dequantize.self: Quantised._dequantise,
    _aten.int_repr.default: Quantised._int_repr,
}


_MAKERS = frozenset(overload.overloadpacket.__name__ for overload in _MAKING)
"""Functions that make one of plain tensors."""
_NUMBERS = {"float": "__float__", "int": "__int__"}  # what an operator takes out of a tensor that it is given for one


class _Below(DispatchMode):
    """The operators that a call of quantised tensors comes down to."""

    def __init__(self, quantised: Quantised) -> None:
        self.quantised = quantised

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        recorder = self.quantised.recorder
        args, keywords = recorder.adopt_all(args), recorder.adopt_all(dict(kwargs or {}))
        if func in _RULES or any(isinstance(leaf, QuantisedFake) for leaf in leaves((args, keywords))):
            return self.quantised.operate(func, args, keywords)
        return recorder.record(func, args, keywords)


def operator_of(
    operator: OpOverload | OpOverloadPacket, args: Sequence[object], kwargs: Mapping[str, object]
) -> forms.Form | None:
    """What stands in graphs for a call of one of torch's operators over quantised tensors."""
    if not any(isinstance(leaf, QuantisedFake) for leaf in leaves((args, kwargs))):
        return None
    return forms.form_of(operator, args, kwargs)


def _refuse_dtype(dtype: torch.dtype) -> None:
    if dtype not in INTEGERS:
        raise BreakGraph("special_tensor", f"a tensor of {dtype} is made")
