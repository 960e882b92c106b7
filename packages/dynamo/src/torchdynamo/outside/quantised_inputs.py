"""Quantised tensors from outside (`graph/quantised.py`): the graph's inputs are their integers, and what is guarded.

Guarded are the class, dtype and scheme, the integers' metadata, and scale and zero point as any number is: one that
changes between calls becomes an input.
"""

from __future__ import annotations

import torch

from primtorch.quantised import ByChannel, ByTensor, Meaning, is_taken_apart, values_of
from torchdynamo.graph.quantised import QuantisedFake
from torchdynamo.graph.recorder import Recorder
from torchdynamo.outside.externals import Externals
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Reading, Source


def form_of(tensor: torch.Tensor) -> tuple[type, torch.dtype, torch.qscheme, int | None] | None:
    """What code relies on of a quantised tensor beside its integers and its numbers; None of what is none."""
    with torch._C.DisableTorchFunctionSubclass():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_quantized:
            return None
        by_tensor = tensor.qscheme() is torch.per_tensor_affine
        return type(tensor), tensor.dtype, tensor.qscheme(), None if by_tensor else tensor.q_per_channel_axis()


# Guards ask these of whatever came, and each gives None for what it is not of.


def integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The integers of a quantised tensor, over its memory."""
    return values_of(tensor) if form_of(tensor) is not None and is_taken_apart(tensor) else None


def scale(tensor: torch.Tensor) -> float | None:
    """The scale of all its elements."""
    return tensor.q_scale() if _is_by_tensor(tensor) else None


def zero_point(tensor: torch.Tensor) -> int | None:
    """The zero point of all its elements."""
    return tensor.q_zero_point() if _is_by_tensor(tensor) else None


def scales(tensor: torch.Tensor) -> torch.Tensor | None:
    """The scale of each channel."""
    return tensor.q_per_channel_scales() if _is_by_tensor(tensor) is False else None


def zero_points(tensor: torch.Tensor) -> torch.Tensor | None:
    """The zero point of each channel."""
    return tensor.q_per_channel_zero_points() if _is_by_tensor(tensor) is False else None


def _is_by_tensor(tensor: torch.Tensor) -> bool | None:
    form = form_of(tensor)
    return None if form is None else form[2] is torch.per_tensor_affine


class QuantisedInputs:
    """The quantised tensors that one capture reads."""

    def __init__(self, externals: Externals, recorder: Recorder) -> None:
        self.externals = externals
        self.quantised = recorder.quantised

    def admit(self, tensor: torch.Tensor, source: Source) -> QuantisedFake:
        """What stands for a quantised tensor, guarded."""
        externals, inputs = self.externals, self.externals.inputs
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            form, taken = form_of(tensor), integers(tensor)
            parts = [read(tensor) for read in ((scale, zero_point) if _is_by_tensor(tensor) else (scales, zero_points))]
        assert form is not None and taken is not None
        externals.guard(source, GuardKind.TYPE, type(tensor))
        externals.guard(Reading(source, form_of), GuardKind.EQUALS, form)
        values = inputs.tensor_input(taken, Reading(source, integers))
        meaning: Meaning
        if form[3] is None:
            reads = zip(parts, (scale, zero_point), strict=True)
            meaning = ByTensor(*(inputs.number(number, Reading(source, read)) for number, read in reads))  # type: ignore[arg-type]
        else:
            of_channels = zip(parts, (scales, zero_points), strict=True)
            fakes = [inputs.tensor_input(part, Reading(source, read)) for part, read in of_channels]  # type: ignore[arg-type]
            meaning = ByChannel(fakes[0], fakes[1], form[3])
        return self.quantised.around(values, meaning)
