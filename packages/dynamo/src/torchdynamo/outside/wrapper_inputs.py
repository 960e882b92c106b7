"""Tensors from outside that wrap others (`graph/wrapper_tensors.py`): what is guarded of them.

Guarded are the class, its own methods and constants, the functions that they call in their module, the constants that
all these name there, what the tensor holds beside tensors, and the metadata of its parts: all sizes are constants. What
the methods read further away (an entry of a dispatch table, say) is not.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

import torch
from torch import nn

from primtorch.fake import FakeMode, FakeTensor
from primtorch.wrappers import Held, NotTakenApart, Template, whole_of
from torchdynamo.graph.recorder import Recorder
from torchdynamo.graph.tensor_classes import own_classes
from torchdynamo.graph.wrapper_tensors import SameContext, called_by, names_in
from torchdynamo.outside.externals import Externals, is_constant, tensor_guard
from torchdynamo.outside.overlays import MISSING
from torchdynamo.outside.torch_names import TorchNames
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Attribute, InstanceAttribute, Item, Source

_METHODS = ("__torch_dispatch__", "__tensor_flatten__", "__tensor_unflatten__", "__torch_function__")


class WrapperInputs:
    """The wrappers that one capture reads."""

    def __init__(self, externals: Externals, torch_names: TorchNames, recorder: Recorder, mode: FakeMode) -> None:
        self.externals = externals
        self.torch_names = torch_names
        self.recorder = recorder
        self.mode = mode
        self.parts: list[tuple[Source, torch.Tensor, FakeTensor]] = []
        self._known: set[type] = set()

    def admit(self, tensor: torch.Tensor, source: Source) -> FakeTensor:
        """The fake of a wrapper, guarded."""
        with torch._C.DisableTorchFunction():
            try:
                template = Template.of(tensor)
            except NotTakenApart as error:
                raise BreakGraph("tensor_subclass", str(error)) from error
            self.know(type(tensor))
            self.externals.guard(source, GuardKind.TENSOR, tensor_guard(tensor, {}))
            parts = list(self._parts(tensor, template, source))
            fake = self.recorder.wrappers.admit(tensor, template, iter(parts))
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # type: ignore[attr-defined]
        return fake

    def _parts(self, tensor: object, template: Template, source: Source) -> Iterator[FakeTensor]:
        """The fakes of the plain tensors in a wrapper."""
        self.externals.guard(source, GuardKind.PREDICATE, SameContext(template))
        for name, part in zip(template.names, template.parts, strict=True):
            value, where = getattr(tensor, name), Attribute(source, name)
            if isinstance(part, Held):
                self.externals.guard(where, GuardKind.IDENTITY, value)
                continue
            self.externals.guard(where, GuardKind.TENSOR, tensor_guard(value, {}))
            if isinstance(part, Template):
                self.know(type(value))
                yield from self._parts(value, part, where)
                continue
            fake = self.mode.from_tensor(value)
            self.recorder.wrappers.memories.append(fake.memory)
            self.parts.append((where, value, fake))
            yield fake

    def know(self, kind: type) -> None:
        """Tensors of this class are in the graph: what its methods are, and what they name, is guarded."""
        if kind in self._known:
            return
        self._known.add(kind)
        for name in _METHODS:
            self.torch_names.of_tensor(kind, name)
        for klass in own_classes(kind):
            for name, value in vars(klass).items():
                if is_constant(value) and not name.startswith("__"):
                    source = InstanceAttribute(self.externals.class_source(klass), name)
                    self.externals.guard(source, GuardKind.EQUALS, value)
        for function in called_by(kind):
            self._know_names(function)

    def _know_names(self, function: types.FunctionType) -> None:
        namespace = function.__globals__
        for name in sorted(set(names_in(function.__code__)) & namespace.keys()):
            value = namespace[name]
            constant = is_constant(value)
            if constant or isinstance(value, types.FunctionType):
                source = Item(self.externals.pins.source(namespace, "globals"), name)
                self.externals.guard(source, GuardKind.EQUALS if constant else GuardKind.IDENTITY, value)

    def attribute(self, tensor: torch.Tensor, name: str) -> object:
        """A part of a wrapper; and of one that the program made, what its class has put there. MISSING where an object
        of the outside is to be asked."""
        part = self.recorder.part(tensor, name)
        if part is not None:
            return part
        whole = whole_of(tensor)
        value = whole.__dict__.get(name, MISSING) if self.externals.lookup(tensor) is None else MISSING
        if value is not MISSING and not is_constant(value):
            raise BreakGraph("tensor_subclass", f"{type(whole).__qualname__}.{name} of one that the graph makes")
        return value
