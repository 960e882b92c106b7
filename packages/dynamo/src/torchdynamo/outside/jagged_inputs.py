"""Nested tensors of the jagged layout from outside (`graph/jagged.py`): their tensors are inputs, and what is guarded.

Guarded are the class, which parts there are, the metadata of values, offsets and lengths, and of every two nested
tensors whether they have the same ragged length: operators take two only where torch keeps one number for both.
"""

from __future__ import annotations

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from primtorch.fake import FakeTensor
from torchdynamo.graph.jagged import KIND, for_real, form_of, max_seqlen, min_seqlen, rows_of, values_of
from torchdynamo.graph.recorder import Recorder
from torchdynamo.outside.externals import Externals
from torchdynamo.outside.torch_names import TorchNames
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Attribute, InstanceAttribute, Reading, Source

_SEQLENS = {"min_seqlen": min_seqlen, "max_seqlen": max_seqlen}
_FIELDS = frozenset({"_offsets", "_lengths", "_ragged_idx"})
# What autograd says of the values, it says of the nested tensor.
_OF_VALUES = frozenset({"requires_grad"})
_UNREAD = frozenset({"grad_fn", "_base", "data", "output_nr", "_version", "_values", "_metadata_cache", "__dict__"})


class JaggedInputs:
    """The nested tensors that one capture reads."""

    def __init__(self, externals: Externals, torch_names: TorchNames, recorder: Recorder) -> None:
        self.externals = externals
        self.torch_names = torch_names
        self.jagged = recorder.jagged
        self.jagged.know_rows = self.know
        self.rows: list[tuple[Source, object, FakeTensor]] = []  # where they are found, torch's number, the fake

    def admit(self, tensor: NestedTensor, source: Source) -> torch.Tensor:
        """What stands for a nested tensor, guarded."""
        with torch._C.DisableTorchFunction(), for_real():
            form, taken = form_of(tensor), values_of(tensor)
            kept = {name: size(tensor) for name, size in _SEQLENS.items() if name in form[2]}
        if getattr(tensor, "_is_param", False):
            raise BreakGraph("special_tensor", f"{source.expression()} is a parameter that is a nested tensor")
        externals = self.externals
        externals.guard(source, GuardKind.TYPE, KIND)
        externals.guard(Reading(source, form_of), GuardKind.EQUALS, form)
        for name in ("__torch_function__", "__torch_dispatch__"):
            self.torch_names.of_tensor(KIND, name)
        values = externals.inputs.tensor_input(taken, Reading(source, values_of))
        offsets = externals.wrap(tensor._offsets, InstanceAttribute(source, "_offsets"))
        lengths = externals.wrap(tensor._lengths, InstanceAttribute(source, "_lengths"))
        rows = offsets if lengths is None else lengths
        self._know(rows, Reading(source, rows_of), tensor)
        sizes = {name: externals.inputs.seqlen(size, Reading(source, _SEQLENS[name])) for name, size in kept.items()}
        return self.jagged.around(values, offsets, lengths, tensor._ragged_idx, sizes)  # type: ignore[arg-type]

    def know(self, rows: FakeTensor) -> None:
        """A nested tensor is made of these offsets or lengths."""
        known = self.externals.lookup(rows)
        if known is None:
            self.jagged.symbol(rows)
        else:
            self._know(rows, Reading(known.source, rows_of), known.original)

    def _know(self, rows: FakeTensor, source: Source, original: object) -> None:
        if any(fake is rows for _, _, fake in self.rows):
            return
        own, same = rows_of(original), None
        for where, other, fake in self.rows:
            self.externals.guard(source, GuardKind.SAME_OBJECT if other is own else GuardKind.DISTINCT_OBJECT, where)
            if other is own:
                same = fake
        self.rows.append((source, own, rows))
        self.jagged.symbol(rows, same)

    def attribute(self, tensor: NestedTensor, name: str) -> object:
        """An attribute of a nested tensor: torch's, run under the recorder, or one of its parts."""
        known = self.externals.lookup(tensor)
        if name in _OF_VALUES:
            return getattr(tensor._values, name)
        if name == "is_leaf":
            return known.original.is_leaf if known is not None else not tensor._values.requires_grad
        if name == "grad":
            if known is None:
                raise BreakGraph("unsupported_read", "grad of a nested tensor that the program made")
            with torch._C.DisableTorchFunction():
                return self.externals.wrap(known.original.grad, Attribute(known.source, "grad", native=True))
        if name in _FIELDS or (hasattr(KIND, name) and name not in _UNREAD):
            return getattr(tensor, name)
        raise BreakGraph("unsupported_read", f"{name} of a nested tensor")
