"""The world that the interpreter runs in during capture: `PlainWorld` with the outside behind it."""

from __future__ import annotations

import builtins
import contextvars
import dis
import re
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn

from primtorch.errors import DataDependent
from primtorch.fake import FakeTensor
from primtorch.frozen import record
from primtorch.interrupts import interrupt_behind, pass_on_interrupt
from torchdynamo.after_break.resume import origin_of
from torchdynamo.after_break.suspended import given_up, refuse_coroutines
from torchdynamo.arrays.values import Array, arrays_in
from torchdynamo.calls import tensor_operators, torch_calls
from torchdynamo.calls.c_functions import ASKED_METHODS, SETS, asks, compared, keeps_texts, only_keeps, only_puts
from torchdynamo.calls.calls import Calls
from torchdynamo.calls.redirect import Redirect
from torchdynamo.graph import scalars
from torchdynamo.graph.jagged import stands_for_one
from torchdynamo.graph.recorder import FAKE_ERRORS, as_break
from torchdynamo.graph.refusals import is_worded_here
from torchdynamo.graph.run_time_texts import MADE_AT_EACH_CALL, RunTimeText, joined
from torchdynamo.graph.scalars import SYMBOLIC, NumberNeeded, concrete
from torchdynamo.graph.taken_numbers import NumberAsked
from torchdynamo.graph.tensor_classes import PLAIN_TENSORS, own_classes
from torchdynamo.interpreter import PlainWorld
from torchdynamo.interpreter.attributes import bind, is_data_descriptor, missing_attribute
from torchdynamo.interpreter.classes import field_in_c, is_python_class, may_change, native_base
from torchdynamo.interpreter.exceptions import Traceback
from torchdynamo.interpreter.operators import BINARY, COMPARE, UNARY
from torchdynamo.interpreter.protocol import MISSING, InterpreterObject, Interrupted
from torchdynamo.outside import imports, modules
from torchdynamo.outside.classes import FACTS
from torchdynamo.outside.externals import ATOMS, CONTAINER_BASES, TABLES_SHOWN
from torchdynamo.outside.growing_lists import refuse_growing
from torchdynamo.outside.one_process import is_builtin, note_call, note_order, note_text
from torchdynamo.outside.outside import Outside
from torchdynamo.outside.overlays import DELETED
from torchdynamo.reasons import BreakGraph, GivesUp
from torchdynamo.sources import Attribute, own_dict


@record
class TensorSuper:
    """`super()` in a method of a tensor's class: the fake that stands for the tensor is of another one."""

    behind: type
    tensor: torch.Tensor
    kind: type


class CaptureWorld(PlainWorld):
    """Reads of external objects record guards, writes to them are kept aside, calls go through the tables."""

    calls: Calls  # by which the interpreter enters this world

    def __init__(self, outside: Outside) -> None:
        super().__init__()
        self.outside = outside
        outside.externals.world = self
        self._known_methods: set[tuple[type, str]] = set()
        self._tracebacks: dict[int, Traceback] = {}  # by the exception's identity
        self.watches_tests = outside.loops.watches

    # -- names ------------------------------------------------------------------------------

    def load_global(self, fn: types.FunctionType, name: str) -> object:
        value = self.outside.namespaces.get(fn.__globals__, name)
        if value is not MISSING:
            return value
        own = fn.__builtins__  # type: ignore[attr-defined]
        if name in own and not is_builtin(name, own[name]):  # somebody's
            return self.outside.namespaces.get(own, name)
        if name in own:
            return self.outside.builtins.setdefault(name, own[name])
        self.outside.namespaces.absent.append((own, name))
        raise NameError(f"name {name!r} is not defined", name=name)

    def store_global(self, fn: types.FunctionType, name: str, value: object) -> None:
        self.outside.namespaces.set(fn.__globals__, name, value)

    def delete_global(self, fn: types.FunctionType, name: str) -> None:
        if self.outside.namespaces.get(fn.__globals__, name) is MISSING:
            raise NameError(f"name {name!r} is not defined", name=name)
        self.outside.namespaces.delete(fn.__globals__, name)

    def make_cell(self, cell: types.CellType) -> types.CellType:
        return self.outside.cells.new(cell)

    def load_cell(self, cell: types.CellType) -> object:
        return self.outside.cells.get(cell)

    def store_cell(self, cell: types.CellType, value: object) -> None:
        self.outside.cells.set(cell, value)

    def delete_cell(self, cell: types.CellType) -> None:
        self.outside.cells.delete(cell)

    def function_defaults(self, fn: types.FunctionType) -> tuple[tuple[object, ...] | None, dict[str, object] | None]:
        return self.outside.function_defaults(fn)

    # -- attributes -------------------------------------------------------------------------

    def know_methods(self, obj: object, *names: str) -> None:
        """The program asks for these special methods of `obj`: that its class has them, or not, is guarded."""
        kind = type(obj)
        if isinstance(obj, RunTimeText):
            obj.need()
        if isinstance(obj, torch.Tensor):
            kind = self.outside.type_of(obj)
            for name in names:
                self.outside.torch_names.of_tensor(kind, name)
                if any(name in vars(klass) for klass in own_classes(kind)):
                    raise BreakGraph("tensor_subclass", f"{kind.__qualname__} has its own {name}")
            return
        if not may_change(kind) or isinstance(obj, _NOT_OF_THE_PROGRAM) or kind in self.outside.classes.made:
            return
        for name in names:
            if (kind, name) not in self._known_methods:
                self._known_methods.add((kind, name))
                self.outside.classes.get(kind, name)

    def getattr(self, obj: object, name: str) -> object:
        obj = self.outside.arrays.current(obj)
        if isinstance(obj, Array):
            return self.outside.arrays.getattr(obj, name)
        if isinstance(obj, torch.Tensor):
            value = self._of_tensor_class(obj, name)
            return self.outside.tensor_get(obj, name) if value is MISSING else value
        if isinstance(obj, (*SYMBOLIC, RunTimeText)):
            return obj.attribute(name) if isinstance(obj, RunTimeText) else scalars.attribute(obj, name)
        if name == "__class__" and isinstance(obj, InterpreterObject):
            return self.outside.type_of(obj)
        if type(obj) is TensorSuper:
            return self._behind_class(obj, name)
        if isinstance(obj, types.CellType) and name == "cell_contents":
            value = self.load_cell(obj)
            if value is MISSING:
                raise ValueError("Cell is empty")
            return value
        self.know_methods(obj, "__getattribute__")
        if isinstance(obj, BaseException) and self.outside.externals.lookup(obj) is None:
            if name == "__traceback__":
                return self._traceback(obj)
            if name == "args":
                self._need_words(obj)
        if type(obj) is types.ModuleType:
            value = self.outside.module_get(obj, name)
            return super().getattr(obj, name) if value is MISSING else value
        if isinstance(obj, nn.Module) and modules.uses_plain_getattr(type(obj)):
            self.know_methods(obj, "__getattr__")
            value = self._module_attribute(obj, name)
            if value is not MISSING:
                return value
            if self._lacks(obj, name):
                raise missing_attribute(obj, name)
        return super().getattr(obj, name)

    def _traceback(self, error: BaseException) -> Traceback:
        detail, ordinal = f"the traceback of a {type(error).__qualname__}", self.interpreter.raises.get(id(error), -1)

        def refuse() -> NoReturn:
            raise GivesUp(detail, ordinal) if ordinal >= 0 else BreakGraph("exception", detail)

        return self._tracebacks.setdefault(id(error), Traceback(refuse))

    def _of_tensor_class(self, tensor: torch.Tensor, name: str) -> object:
        """What a tensor has from a class of the program's, or MISSING."""
        kind = self.outside.type_of(tensor)
        if (
            kind in PLAIN_TENSORS
            or stands_for_one(tensor)
            or not any(name in vars(klass) for klass in own_classes(kind))
        ):
            return MISSING
        found = self.class_get(kind, name)
        if found is None:
            return MISSING
        descriptor = found[0]
        if is_data_descriptor(type(descriptor)) or name not in self.outside.stored_names(tensor):
            return bind(self, descriptor, tensor, kind)
        return MISSING

    def _behind_class(self, proxy: TensorSuper, name: str) -> object:
        mro = proxy.kind.__mro__
        for klass in mro[mro.index(proxy.behind) + 1 :]:
            if klass in PLAIN_TENSORS:
                break
            found = self.class_get(klass, name)
            if found is not None and found[1] is klass:
                return bind(self, found[0], proxy.tensor, proxy.kind)
        return self.outside.tensor_get(proxy.tensor, name)

    def make_super(self, cls: Any, obj: object) -> object:
        if not isinstance(obj, torch.Tensor):
            return super().make_super(cls, obj)
        kind = self.outside.type_of(obj)
        if kind in PLAIN_TENSORS:
            return super().make_super(cls, obj)
        return TensorSuper(cls, obj, kind)

    def class_of(self, obj: object) -> type:
        return self.outside.type_of(obj) if isinstance(obj, torch.Tensor) else super().class_of(obj)

    def _module_attribute(self, module: nn.Module, name: str) -> object:
        """Parameters, buffers and submodules, when nothing else has the name."""
        if type_has(type(module), name):
            return MISSING
        attributes = own_dict(module)
        if attributes is not None and name in attributes:
            return MISSING
        return self.outside.registered(module, name)

    def _lacks(self, module: nn.Module, name: str) -> bool:
        """Whether neither the module nor its class has the name, and no registry of the module."""
        return not type_has(type(module), name) and self.outside.lacks(module, name)

    def setattr(self, obj: object, name: str, value: object) -> None:
        self.outside.refuse_opaque(*(() if not isinstance(obj, Array) else (obj,)))
        self.know_methods(obj, "__setattr__")
        if isinstance(obj, torch.Tensor):
            self._refuse_descriptor(obj, name)
            self.outside.tensor_set(obj, name, value)
        elif isinstance(obj, types.ModuleType):
            self.outside.namespaces.set(obj.__dict__, name, value)
        elif isinstance(obj, types.CellType) and name == "cell_contents":
            self.store_cell(obj, value)
        elif isinstance(obj, nn.Module) and self._writes_plainly(obj, name, value):
            self.instance_set(obj, name, value)
        elif isinstance(obj, nn.Module) and isinstance(value, torch.Tensor) and self._writes_buffer(obj, name, value):
            if self.outside.registered(obj, name) is not value:  # else it is registered again, as by `self.buffer += 1`
                self.setitem(self.getattr(obj, "_buffers"), name, value)
        else:
            super().setattr(obj, name, value)

    def _writes_plainly(self, module: nn.Module, name: str, value: object) -> bool:
        """Whether `nn.Module.__setattr__` would end in a plain write to the instance."""
        kind = type(module)
        if kind.__setattr__ is not modules.PLAIN_SETATTR or isinstance(value, nn.Module):
            return False
        if isinstance(value, torch.Tensor) and not self._is_plain_result(value):
            return False
        if is_data_descriptor(type(getattr(kind, name, None))) or self.outside.externals.lookup(module) is None:
            return False
        return self.outside.registered(module, name) is MISSING

    def _writes_buffer(self, module: nn.Module, name: str, value: torch.Tensor) -> bool:
        """Whether `nn.Module.__setattr__` would end in another tensor in the place of a buffer, or in the same one."""
        kind = type(module)
        plain = kind.__setattr__ is modules.PLAIN_SETATTR and kind.register_buffer is nn.Module.register_buffer
        if not plain or is_data_descriptor(type(getattr(kind, name, None))):
            return False
        if not self.outside.has_buffer(module, name):
            return False
        return self._is_plain_result(value) or self.outside.registered(module, name) is value

    def _is_plain_result(self, value: torch.Tensor) -> bool:
        """Whether the program made a tensor that no registry takes for its own."""
        of_program = self.outside.externals.lookup(value) is None
        return of_program and self.outside.type_of(value) is torch.Tensor and not hasattr(value, "_is_buffer")

    def delattr(self, obj: object, name: str) -> None:
        self.know_methods(obj, "__delattr__")
        if isinstance(obj, torch.Tensor):
            self._refuse_descriptor(obj, name)
            self.outside.tensor_delete(obj, name)
        elif isinstance(obj, types.CellType) and name == "cell_contents":
            self.delete_cell(obj)
        else:
            super().delattr(obj, name)

    def _refuse_descriptor(self, tensor: torch.Tensor, name: str) -> None:
        kind = self.outside.type_of(tensor)
        for klass in own_classes(kind):
            if is_data_descriptor(type(vars(klass).get(name))):
                raise BreakGraph("tensor_subclass", f"{kind.__qualname__}.{name} is set by a descriptor")

    def instance_get(self, obj: object, name: str) -> object:
        return self.outside.instance_get(obj, name)

    def instance_set(self, obj: object, name: str, value: object) -> None:
        self.outside.instance_set(obj, name, value)

    def instance_del(self, obj: object, name: str) -> None:
        self.outside.instance_delete(obj, name)

    def class_get(self, cls: type, name: str) -> tuple[object, type] | None:
        return self.outside.classes.get(cls, name)

    def class_set(self, cls: type, name: str, value: object) -> None:
        self.outside.classes.set(cls, name, value)

    def class_del(self, cls: type, name: str) -> None:
        self.outside.classes.delete(cls, name)

    def build_class(
        self, body: types.FunctionType, name: str, bases: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        return self.outside.classes.make(name, lambda: super(CaptureWorld, self).build_class(body, name, bases, kwargs))

    def leaf_getattr(self, obj: object, name: str) -> object:
        return self.outside.leaf_get(obj, name)

    def leaf_setattr(self, obj: object, name: str, value: object) -> None:
        if name == "__traceback__" and isinstance(value, Traceback):
            return  # it has that one, or gets it where it is raised for real
        self.outside.leaf_set(obj, name, value)

    def leaf_delattr(self, obj: object, name: str) -> None:
        if self.outside.externals.lookup(obj) is None:
            delattr(obj, name)
        elif type(obj) is types.SimpleNamespace:
            self.outside.instance_delete(obj, name)
        else:
            raise BreakGraph("external_write", f"attribute {name!r} of a {type(obj).__qualname__}")

    def descriptor_get(self, descriptor: object, obj: object, cls: type) -> object:
        if obj is not None:
            if isinstance(descriptor, types.GetSetDescriptorType):
                if descriptor.__name__ == "__dict__":
                    return self.outside.instance_dict(obj)
                if descriptor.__name__ == "__class__":
                    return self.outside.type_of(obj)
            if isinstance(descriptor, types.MemberDescriptorType):
                value = self.outside.slot_get(obj, descriptor)
                if value is MISSING:
                    raise AttributeError(descriptor.__name__)
                return value
            name = getattr(descriptor, "__name__", "")
            if isinstance(obj, type) and name in FACTS and isinstance(descriptor, types.GetSetDescriptorType):
                return self.outside.classes.fact(obj, name, super().descriptor_get(descriptor, obj, cls))
            known = self.outside.externals.lookup(obj)
            if known is not None and (field := field_in_c(descriptor, cls)):
                value = super().descriptor_get(descriptor, known.original, cls)
                return self.outside.externals.wrap(value, Attribute(known.source, field))
        return super().descriptor_get(descriptor, obj, cls)

    def descriptor_set(self, descriptor: object, obj: object, value: object) -> None:
        if isinstance(descriptor, types.MemberDescriptorType) and self.outside.externals.lookup(obj) is not None:
            self.outside.overlays.write(obj, descriptor.__name__, value, "slot")
        else:
            self._refuse_write(descriptor, obj)
            super().descriptor_set(descriptor, obj, value)

    def descriptor_del(self, descriptor: object, obj: object) -> None:
        if isinstance(descriptor, types.MemberDescriptorType) and self.outside.externals.lookup(obj) is not None:
            if self.outside.slot_get(obj, descriptor) is MISSING:
                raise AttributeError(descriptor.__name__)
            self.outside.overlays.write(obj, descriptor.__name__, DELETED, "slot")
            return
        self._refuse_write(descriptor, obj)
        super().descriptor_del(descriptor, obj)

    def _refuse_write(self, descriptor: object, obj: object) -> None:
        """What a descriptor in C does to an object of the outside world is not known."""
        if self.outside.externals.lookup(obj) is not None and not isinstance(obj, torch.Tensor):
            raise BreakGraph(
                "external_write", f"attribute {getattr(descriptor, '__name__', '?')!r} of a {type(obj).__qualname__}"
            )

    # -- run-time numbers as values ---------------------------------------------------------

    def convert(self, value: object, how: str) -> str:
        made = self.outside.texts.convert(value, how)
        if made is not MISSING:
            return cast(str, made)
        self._need_words(value)
        return note_text(self.outside, super().convert(concrete(value), how))

    def format_value(self, value: object, spec: str) -> str:
        made = self.outside.texts.format(value, spec)
        if made is not MISSING:
            return cast(str, made)
        if isinstance(value, BaseException) and not spec:
            value = self.convert(value, "str")
        self.outside.refuse_opaque(value)
        with self._numbers_shown():
            return note_text(self.outside, super().format_value(concrete(value), spec))

    def join_texts(self, parts: object) -> str:
        made = self.outside.texts.of(joined, "", *parts)
        return super().join_texts(parts) if made is MISSING else cast(str, made)

    @contextmanager
    def _numbers_shown(self) -> Iterator[None]:
        """In any text that C code makes meanwhile of what holds symbols, these are numbers."""
        env = self.outside.shape_env
        before, env.shows_numbers = env.shows_numbers, True
        try:
            yield
        finally:
            env.shows_numbers = before

    # -- loops ------------------------------------------------------------------------------

    def at_test(self, frame: Any, value: object) -> None:
        self.outside.loops.at_test(frame, value)

    def iterate(self, obj: object) -> object:
        obj = self.outside.arrays.current(obj)
        if isinstance(obj, Array):
            return self.outside.arrays.iterate(obj)
        self.know_methods(obj, "__iter__", "__getitem__")
        self.outside.refuse_opaque(obj)
        note_order(self.outside.externals, obj)
        return super().iterate(self.outside.begun(obj))

    def advance(self, iterator: object) -> object:
        self.know_methods(iterator, "__next__")
        self.outside.refuse_iterator(iterator)
        return super().advance(iterator)

    # -- items and operators ----------------------------------------------------------------

    def getitem(self, obj: object, key: object) -> object:
        if self.outside.arrays.used and not isinstance(obj, dict):
            obj, key = self._current(obj, key)
            if isinstance(obj, Array) or arrays_in(key):
                return self.outside.arrays.getitem(obj, key)
        if type(key) is str and self.outside.namespaces.holds(obj, key):
            return self.outside.namespaces.item(obj, key)
        self.know_methods(obj, "__getitem__", "__missing__")
        self.outside.refuse_opaque(obj, key)
        self.outside.loops.at_item(obj, key)
        if isinstance(obj, dict):
            self.tell_apart(key)
        elif isinstance(obj, torch.Tensor) and scalars.indexes_by_symbol(key) and not self.outside.recorder.modes:
            return scalars.item(obj, key)
        return super().getitem(obj, key)

    def setitem(self, obj: object, key: object, value: object) -> None:
        if isinstance(key, slice):
            refuse_growing(None, (value,), {})
        if self.outside.arrays.used and not isinstance(obj, CONTAINER_BASES):
            obj, key, value = self._current(obj, key, value)
            if isinstance(obj, Array) or arrays_in((key, value)):
                self.outside.arrays.setitem(obj, key, value)
                return
        if type(key) is str and self.outside.namespaces.holds(obj, key):
            self.outside.namespaces.set(obj, key, value)
            return
        self.know_methods(obj, "__setitem__")
        self.outside.refuse_opaque(obj, key)
        self.outside.loops.at_item(obj, key)
        if isinstance(obj, dict):
            self.tell_apart(key)
        elif isinstance(obj, torch.Tensor) and scalars.indexes_by_symbol(key) and not self.outside.recorder.modes:
            obj, key = scalars.item(obj, key), ...
        super().setitem(obj, key, value)

    def _current(self, *values: object) -> Iterator[object]:
        return map(self.outside.arrays.current, values)

    def delitem(self, obj: object, key: object) -> None:
        if type(key) is str and self.outside.namespaces.holds(obj, key):
            self.outside.namespaces.pop(obj, key)
            return
        self.know_methods(obj, "__delitem__")
        self.outside.refuse_opaque(obj, key)
        if isinstance(obj, dict):
            self.tell_apart(key)
        super().delitem(obj, key)

    def contains(self, container: object, item: object) -> bool:
        if type(item) is str and self.outside.namespaces.holds(container, item):
            return self.outside.namespaces.get(container, item) is not MISSING
        self.know_methods(container, "__contains__", "__iter__", "__getitem__")
        self.know_methods(item, "__eq__", "__hash__")
        self.outside.refuse_opaque(container, item)
        if isinstance(container, dict):
            self.tell_apart(item)
        elif not isinstance(container, (torch.Tensor, str)):
            self.tell_apart(container, item)
        return super().contains(container, item)

    def tell_apart(self, *values: object) -> None:
        self.outside.externals.tell_apart(*values)

    def is_same(self, a: object, b: object) -> bool:
        if a is not b:
            if scalars.both_of_a_kind(a, b):  # small ints and bools are one object each
                return concrete(a) is concrete(b)
            self.outside.guard_distinct(a, b)
        return a is b

    def truth(self, obj: object) -> bool:
        obj = self.outside.arrays.current(obj)
        if isinstance(obj, Array):
            return bool(obj)
        self.know_methods(obj, "__bool__", "__len__")
        if isinstance(obj, SYMBOLIC):
            try:
                return bool(obj)
            except DataDependent as error:  # no handler of the program's is to see it
                self.outside.recorder.taken.asked(error, as_size=False)
                raise
        if self.outside.namespaces.is_one(obj):
            return True
        if hasattr(type(obj), "__bool__") or hasattr(type(obj), "__len__"):
            self.outside.refuse_opaque(obj)
        return super().truth(obj)

    def check(self, obj: object, expected: bool) -> bool:
        recorder = self.outside.recorder
        if isinstance(obj, FakeTensor) and not recorder.modes and recorder.conditions.take_for_granted(obj, expected):
            return expected
        if isinstance(obj, torch.SymBool) and self.outside.recorder.taken.check(
            obj if expected else torch.sym_not(obj)
        ):
            return expected
        return self.truth(obj)

    def unary(self, op: str, a: object) -> object:
        a = self.outside.arrays.current(a)
        if isinstance(a, Array):
            return self.outside.arrays.unary(op, a)
        self.know_methods(a, UNARY[op][1])
        self.outside.refuse_opaque(a)
        result = scalars.unary(op, a, UNARY[op][0])
        return super().unary(op, a) if result is MISSING else result

    def binary(self, op: str, a: object, b: object) -> object:
        refuse_growing(None, (a, b), {})
        a, b = self._current(a, b)
        if isinstance(a, Array) or isinstance(b, Array):
            return self.outside.arrays.binary(op, a, b)
        made = self.outside.texts.binary(op, a, b)
        if made is not MISSING:
            return made
        if op == "%" and isinstance(a, str):
            self._need_words(*(b if type(b) is tuple else (b,)))
        result = self._of_numbers(op, a, b, BINARY[op][2:4])
        if result is MISSING and tensor_operators.is_between(a, b):
            return tensor_operators.binary(self, op, a, b)
        return note_text(self.outside, super().binary(op, a, b)) if result is MISSING else result

    def inplace(self, op: str, a: object, b: object) -> object:
        refuse_growing(None, (b,), {})
        given = a
        a, b = self._current(a, b)
        if isinstance(a, Array) or isinstance(b, Array):
            made = self.outside.arrays.inplace(op, a, b)
            return given if made is a else made
        made = self.outside.texts.binary(op, a, b)
        if made is not MISSING:
            return made
        result = self._of_numbers(op, a, b, BINARY[op][2:])
        if result is MISSING and tensor_operators.is_between(a, b):
            return tensor_operators.binary(self, op, a, b, in_place=True)
        return super().inplace(op, a, b) if result is MISSING else result

    def _of_numbers(self, op: str, a: object, b: object, methods: Sequence[str]) -> object:
        """`a op b` of numbers, else MISSING, with what is asked of the operands guarded: `methods` of the left one."""
        self.know_methods(a, *methods)
        self.know_methods(b, *BINARY[op][2:4])
        self.outside.refuse_opaque(a, b)
        if isinstance(a, SETS):
            self.tell_apart(a, b)
        return scalars.binary(op, a, b, BINARY[op][0])

    def choose(
        self, op: str, values: tuple[object, object], keys: tuple[object, object]
    ) -> tuple[object, object] | None:
        return self.outside.recorder.choices.choose(op, values, keys)

    def order(self, values: list[object], keys: list[object], reverse: bool) -> list[object] | None:
        return self.outside.recorder.choices.order(values, keys, reverse)

    def compare(self, op: str, a: object, b: object) -> object:
        a, b = self._current(a, b)
        if isinstance(a, Array) or isinstance(b, Array):
            return self.outside.arrays.compare(op, a, b)
        if tensor_operators.is_by_class(op, a, b):
            return tensor_operators.compare(self, op, a, b)
        self.know_methods(a, *COMPARE[op][1:], "__eq__")
        self.know_methods(b, *COMPARE[op][1:], "__eq__")
        if op in ("==", "!=") and type(a) is type(b) is types.SimpleNamespace:
            a, b = self.outside.instance_dict(a), self.outside.instance_dict(b)
        self.outside.refuse_opaque(a, b)
        if not isinstance(a, _COMPARED_BY_VALUE) and not isinstance(b, _COMPARED_BY_VALUE):
            self.tell_apart(a, b)
        if tensor_operators.is_between(a, b):
            return tensor_operators.compare(self, op, a, b)
        result = scalars.compare(op, a, b, COMPARE[op][0])
        return super().compare(op, a, b) if result is MISSING else result

    # -- imports ----------------------------------------------------------------------------

    def import_name(self, fn: types.FunctionType, name: str, fromlist: object, level: int) -> object:
        if fn.__builtins__.get("__import__") is not imports.BUILTIN:  # type: ignore[attr-defined]
            raise BreakGraph("import", f"import of {name} by another __import__ than Python's")
        return self.import_by(fn.__globals__, name, fromlist, level)

    def import_by(self, namespace: Any, name: str, fromlist: Any, level: int) -> object:
        """What an `import` of the program gives, for the names of `namespace`."""
        self.outside.builtins["__import__"] = builtins.__import__
        return imports.captured(self.outside.externals, self._has, name, namespace, fromlist, level)

    def _has(self, module: types.ModuleType, name: str) -> bool:
        return self.call(getattr, (module, name, MISSING), {}) is not MISSING

    # -- calls ------------------------------------------------------------------------------

    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        made = self.outside.texts.call(fn, args, kwargs)
        if made is not MISSING:
            return made
        if type(fn) in _OF_C and not any(fn is one for one in _TAKES_TEXTS) and not self._leaves_with(fn):
            self.outside.floats.need_texts(fn, args, kwargs)
        names = ASKED_METHODS.get(id(fn))
        if names is not None and args:
            if isinstance(args[0], RunTimeText):
                self.outside.floats.need_texts(fn, args[0])
            self.know_methods(args[0], *names)
        interpreter = self.interpreter
        if (begun := self.outside.loops.call(fn, args, kwargs)) is not MISSING:
            return begun
        tail, interpreter.tail_call = interpreter.tail_call, False
        try:
            result = self.calls.handle(fn, args, kwargs)
            if result is MISSING:
                interpreter.tail_call = tail
                return super().call(fn, args, kwargs)
        except FAKE_ERRORS as error:  # raised outside of an operator, by a method that reads data
            raise as_break(error) from error
        if type(result) is Redirect:
            interpreter.tail_call = tail
            return self.call(result.function, result.args, result.kwargs)
        return result

    def let_go(self, values: Sequence[object], error: BaseException | None) -> None:
        """Ends the graph where that closes a generator which an earlier part of the program has started for real."""
        if origin_of(self.outside.function) is None:
            return
        generator = given_up(values, self.interpreter.frames, self.outside.externals)
        if generator is None:
            return
        detail = f"{generator.__qualname__}() is given up where it is suspended"
        if error is not None:
            raise GivesUp(f"{detail}, by a {type(error).__name__}", self.interpreter.raises.get(id(error), -1))
        raise BreakGraph("generator", detail)

    def call_leaf(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """C code. What is not known to be pure breaks the graph."""
        refuse_coroutines(fn)
        if fn is torch.Tensor.__new__ and args[0] is not torch.Tensor:
            return self.calls.handle(fn, args[:2], {})  # what follows is for __init__
        if fn is str.join and len(args) == 2 and type(args[1]) not in (str, list, tuple):
            note_order(self.outside.externals, args[1])
            args = (args[0], list(cast("Iterable[object]", args[1])))
        made = self.outside.texts.call(fn, args, kwargs)
        if made is not MISSING or (made := self.outside.namespaces.call(fn, args, kwargs)) is not MISSING:
            return made
        if not only_keeps(fn):
            looked_at = (arg for arg in (*args, *kwargs.values()) if type(arg) not in MADE_AT_EACH_CALL)
            asks(self.outside, fn, *looked_at)
            self._need_words(*args, *kwargs.values())
        self.tell_apart(*compared(fn, args))
        for argument in () if only_puts(fn) else args:
            self.outside.refuse_iterator(argument)
        if any(fn is one for one in _NEED_NUMBERS):
            args = concrete(args)
        if isinstance(fn, types.BuiltinFunctionType) and not isinstance(fn.__self__, (types.ModuleType, type)):
            owner = fn.__self__
            self.outside.refuse_opaque(owner)
            if owner is not None and not self._may_call_method_of(owner):
                raise BreakGraph("c_function", f"method {fn.__name__} of a {type(owner).__qualname__}")
            return self._call_c(fn, args, kwargs)
        module = getattr(fn, "__module__", None) or type(fn).__module__
        if isinstance(fn, types.MethodDescriptorType | types.WrapperDescriptorType | types.MethodWrapperType):
            module = fn.__objclass__.__module__
            if not isinstance(fn.__objclass__, type) or is_python_class(fn.__objclass__):
                module = "builtins"
        if isinstance(fn, type) and is_python_class(fn):
            module = "builtins"  # its own __new__ and __init__ are those of a built-in base
        package = module.partition(".")[0]
        if module == "_thread" and self._module_of_frame() in torch_calls.REPR_MODULES:
            module = "builtins"  # the thread's number marks a running `repr`, and is forgotten afterwards
        if any(fn is one for one in torch_calls.PURE_C_FUNCTIONS):
            module = "builtins"
        if module not in torch_calls.PURE_C_MODULES and package not in ("torch", "builtins"):
            raise BreakGraph("c_function", f"call of {module}.{getattr(fn, '__qualname__', fn)}")
        if package == "torch" and getattr(fn, "__name__", "") != "__repr__":
            return self.outside.recorder.all_known(super().call_leaf(fn, args, kwargs), "c_function")
        if isinstance(fn, type) and issubclass(fn, type) and len(args) == 3:
            return self._make_class(fn, *args, kwargs)
        result = self._call_c(fn, args, kwargs)
        if isinstance(result, type) and getattr(fn, "__self__", None) is type and len(args) == 4:
            self.outside.classes.begin(result)
        return result

    def _make_class(
        self, meta: type, name: object, bases: object, namespace: object, kwargs: dict[str, object]
    ) -> object:
        """`type(name, bases, namespace)`, which takes the module from the frame that calls it."""
        if type(namespace) is dict and "__module__" not in namespace:
            namespace = {**namespace, "__module__": self._module_of_frame()}
        return self.outside.classes.make(name, lambda: self._call_c(meta, (name, bases, namespace), kwargs))

    def _leaves_with(self, fn: object) -> bool:
        """Whether a C function keeps its arguments as they are, or is a method that leaves the graph with them."""
        owner = fn.__self__ if isinstance(fn, types.BuiltinFunctionType) else None
        outside = owner is not None and not isinstance(owner, (types.ModuleType, type))
        return keeps_texts(fn) or (outside and not self._may_call_method_of(owner))

    def _call_c(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        note_call(self.outside, fn, args)
        if not keeps_texts(fn):
            self.outside.floats.need_texts(fn, args, kwargs)
        if not self.outside.shape_env.symbols:
            return note_text(self.outside, super().call_leaf(fn, args, kwargs))
        with self._numbers_shown(), self.outside.floats.looked_at(fn):
            try:
                made = super().call_leaf(fn, args, kwargs)
            except Exception as error:  # it may be that it takes no symbol: no handler of the program's is to see that
                if not scalars.holds_any_symbol((args, kwargs)):
                    raise
                pass_on_interrupt(error)
                self.outside.floats.need(fn, args, kwargs)
                self._need_numbers(error)
                made = super().call_leaf(fn, concrete(args), concrete(kwargs))  # of sizes, which are guarded
            return note_text(self.outside, made)

    def _module_of_frame(self) -> object:
        """The module in which the code that runs now is written."""
        return self.interpreter.frames[-1].function.__globals__.get("__name__")

    def _may_call_method_of(self, owner: object) -> bool:
        if self.outside.externals.lookup(owner) is None:
            modules_of_c = torch_calls.PURE_C_MODULES | {"torch"}
            makers = (type(owner), native_base(type(owner)))
            return isinstance(owner, torch_calls.LOCKS) or any(
                kind.__module__.partition(".")[0] in modules_of_c for kind in makers
            )
        return isinstance(
            owner, (*CONTAINER_BASES, *TABLES_SHOWN, *ATOMS, re.Pattern, torch.Tensor, contextvars.ContextVar)
        )

    def note_raise(self, error: BaseException) -> None:
        """C code may refuse a symbol for a number, or ask for a value that the data tells: no handler sees that.
        Nor what a signal's handler raised, which is no doing of the instruction that it came in."""
        interrupt = interrupt_behind(error)
        if isinstance(error, KeyboardInterrupt):
            frame = self.interpreter.frames[-1]
            interrupt = None if frame.decoded.opcodes[frame.index - 1] == _RAISE else error
        if interrupt is not None:
            raise Interrupted(interrupt)
        if isinstance(error, DataDependent):
            self.outside.recorder.taken.asked(error, as_size=False)
            raise NumberNeeded(error)
        if isinstance(error, TypeError) and "Sym" in str(error):
            self._need_numbers(error)
            if self.outside.shape_env.symbols:
                raise NumberNeeded(error)
        if isinstance(error, TypeError):
            self.outside.texts.refused(error)

    def _need_numbers(self, error: Exception) -> None:
        """C code has refused symbols, or cannot tell without their values: the next capture has numbers there."""
        if places := self.outside.recorder.taken.places_of(error):
            raise NumberAsked(places, as_size=False) from error
        if self.outside.run_time_numbers():
            raise NumberNeeded(error)

    def _need_words(self, *values: object) -> None:
        """The program reads an error that is worded by what stands in for a tensor: it is raised for real."""
        for value in values:
            if isinstance(value, BaseException) and is_worded_here(value):
                raise GivesUp(
                    f"the text of a {type(value).__name__} is read", self.interpreter.raises.get(id(value), -1)
                )

    def unsupported(self, reason: str, detail: str) -> NoReturn:
        raise BreakGraph(reason, detail)


_RAISE = dis.opmap["RAISE_VARARGS"]
_OF_C = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType})
# Objects whose methods are capture's own.
_NOT_OF_THE_PROGRAM = (InterpreterObject, *SYMBOLIC)
_COMPARED_BY_VALUE = (torch.Tensor, int, float, complex, str, bytes, type(None), *SYMBOLIC)
_TAKES_TEXTS: list[object] = [print, setattr, warnings.warn]  # by rules that know what is made at each call
# A list: the functions asked for may not be hashable. The class of an OSError depends on the number.
_NEED_NUMBERS: list[object] = [str, repr, ascii, format, hash, OSError]


def type_has(kind: type, name: str) -> bool:
    """Whether a class or one of its bases has an attribute in its own dict."""
    return any(name in klass.__dict__ for klass in kind.__mro__)
