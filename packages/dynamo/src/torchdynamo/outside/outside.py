"""What the interpreter asks of the outside world: reads with guards, writes kept aside, calls by their kind."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nested._internal.nested_tensor import NestedTensor

from primtorch.fake import FakeTensor
from primtorch.schemas import UserFrame
from primtorch.symbolic import ShapeEnv
from primtorch.wrappers import whole_of
from torchdynamo.arrays.values import Array, ScalarAt, TensorAt, flipped_dims
from torchdynamo.arrays.world import ArrayWorld
from torchdynamo.graph import numpy_values
from torchdynamo.graph.floats_for_c import FloatsForC
from torchdynamo.graph.jagged import stands_for_one
from torchdynamo.graph.recorder import Recorder
from torchdynamo.graph.run_time_texts import RunTimeText, RunTimeTexts
from torchdynamo.graph.scalars import SYMBOLIC
from torchdynamo.graph.symbol_nodes import SymbolNodes
from torchdynamo.graph.tensor_classes import class_of, remember_class
from torchdynamo.graph.torch_functions import home_of
from torchdynamo.interpreter.attributes import missing_attribute
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.iterators import LocalIterator, Rounds, native_type
from torchdynamo.interpreter.protocol import InterpreterObject
from torchdynamo.outside import modules
from torchdynamo.outside.absences import EmptySlot
from torchdynamo.outside.captured_mode import CapturedMode, KnownSizes
from torchdynamo.outside.cells import Cells
from torchdynamo.outside.classes import Classes
from torchdynamo.outside.dynamic_policy import INTEGER_BOUND, DynamicPolicy
from torchdynamo.outside.externals import (
    External,
    Externals,
    is_constant,
    is_trusted_module,
    stays_outside,
    tensor_guard,
    told_by,
)
from torchdynamo.outside.growing_lists import Ends, GrowingList, GrowingTuple, length_of
from torchdynamo.outside.jagged_inputs import JaggedInputs
from torchdynamo.outside.loops import Loops
from torchdynamo.outside.namespaces import Namespaces
from torchdynamo.outside.overlays import DELETED, MISSING, Overlays
from torchdynamo.outside.quantised_inputs import QuantisedInputs
from torchdynamo.outside.torch_names import TorchNames
from torchdynamo.outside.wrapper_inputs import WrapperInputs
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import AmbientRead, GuardKind
from torchdynamo.size_marks import SizeKind, SizeMark, size_marks
from torchdynamo.sources import (
    Argument,
    Attribute,
    Computed,
    InstanceAttribute,
    InstanceDict,
    Item,
    Pinned,
    Reading,
    Referent,
    Source,
    TensorOffset,
    TensorSize,
    TensorStride,
    input_name,
    instance_dict,
    is_beneath,
    own_dict,
)


class Outside:
    """The captured program's outside: external objects, writes to them, the graph's inputs.

    Args:
        function: the root function of the capture.
        dynamic: decides which dims of a tensor, and which integers, become symbols.
        user_frames: the user's stack now, outermost first.
    """

    def __init__(
        self, function: types.FunctionType, dynamic: DynamicPolicy, user_frames: Callable[[], tuple[UserFrame, ...]]
    ) -> None:
        self.function = function
        self.dynamic = dynamic
        self.user_frames = user_frames
        self.shape_env = ShapeEnv(user_frames)
        self.mode = (KnownSizes if dynamic.breaks_at_data else CapturedMode)(self.shape_env)
        self.overlays = Overlays()
        code = function.__code__
        entry = (UserFrame(code.co_filename, code.co_firstlineno, function.__name__),)
        self.externals = Externals(self, lambda: user_frames() or entry)
        self.torch_names = TorchNames(self.externals)
        self.texts = RunTimeTexts(user_frames, dynamic.plain_texts)
        self.recorder = Recorder(self.mode, user_frames, self.adopt, self.guard_offset)
        self.floats = FloatsForC(self.shape_env, dynamic.guards_floats, lambda: bool(self.recorder.regions.open))
        self.arrays = ArrayWorld(self.recorder, self.externals.arrays, self.adopt, self.ambient)
        lookup = self.externals.lookup
        self.loops = Loops(dynamic.loops, dynamic.in_rounds, self.shape_env, self.length_of, lookup, user_frames)
        self.loops.round_by_round, self.loops.unrolled = dynamic.round_by_round, dynamic.unrolled
        self.symbol_sources: dict[str, Source] = {}
        self.promised: dict[str, SizeMark] = {}  # what the user said of symbols
        self.recorder.symbol_nodes = SymbolNodes(self.shape_env, self.symbol_sources, self._computed_input)
        self.tensors: list[tuple[Source, torch.Tensor, FakeTensor]] = []
        self.wrappers = WrapperInputs(self.externals, self.torch_names, self.recorder, self.mode)
        self.jagged = JaggedInputs(self.externals, self.torch_names, self.recorder)
        self.quantised = QuantisedInputs(self.externals, self.recorder)
        self._numbers: dict[Source, torch.SymInt | torch.SymFloat] = {}
        self._scalars: dict[Source, Array] = {}
        self.cells = Cells(function, self.externals, self.overlays)
        self.namespaces = Namespaces(function, self.externals, self.overlays)
        self.classes = Classes(self.externals, self.overlays, self.ambient)
        self.interpreted: dict[types.CodeType, str] = {}  # called functions' code, and their modules
        self.builtins: dict[str, object] = {}  # that the program has read, by name: without guards
        self.answers: list[tuple[Callable[..., object], tuple[object, ...], object]] = []  # of torch, without guards
        self.emitted = 0  # log records and warnings so far

    def release(self) -> None:
        """Lets go of the program's objects. What points to this record keeps no more of them alive."""
        externals = self.externals
        held: tuple[Any, ...] = (externals.by_original, externals.by_value, externals.shadows, externals.opaque)
        held += (externals.hashed, externals.arrays.shared)
        held += (
            self.classes.made,
            self.classes.found,
            externals.fixed,
            self.builtins,
            self.answers,
            self.namespaces.absent,
        )
        for table in (*held, self.tensors, self.wrappers.parts, self.jagged.rows):
            table.clear()
        self.cells.release()
        self.overlays.clear()
        self.arrays.release()
        self.shape_env.release()
        self.loops.release()
        self.mode.release()
        self.recorder.release()

    # -- graph inputs -----------------------------------------------------------------------

    def tensor_input(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """The fake of a tensor, an input of the graph: its metadata is guarded, and dims that vary are symbols."""
        with torch._C.DisableTorchFunction():
            dims = self.dynamic.dims(tensor, source)
            symbols = {}
            marks = size_marks(tensor)
            for dim in dims:
                mark = marks.get(dim, SizeMark(SizeKind.MAYBE_DYNAMIC))
                low = 2 if mark.low is None else mark.low  # 0 and 1 are never symbols
                symbols[dim] = self._symbol(tensor.shape[dim], TensorSize(source, dim), low, mark.high)
                if mark.kind is SizeKind.DYNAMIC:
                    self.promised[str(symbols[dim])] = mark
            strides = {
                dim: self._symbol(tensor.stride(dim), TensorStride(source, dim), 2, None)
                for dim in self.dynamic.strides(tensor, source)
            }
            self.externals.guard(source, GuardKind.TENSOR, tensor_guard(tensor, symbols, bool(strides)))
            fake = self.mode.from_tensor(tensor, dynamic=symbols, strides=strides)
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # type: ignore[attr-defined]
            if isinstance(tensor, nn.Buffer):
                fake._is_buffer = True  # type: ignore[attr-defined]
            remember_class(fake, type(tensor))
            self.recorder.add_input(fake, source, input_name(source))
        self.tensors.append((source, tensor, fake))
        return fake

    def wrapper_input(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """The fake of a tensor that wraps others: one input of the graph for all of them."""
        fake = self.wrappers.admit(tensor, source)
        self.recorder.add_input(fake, source, input_name(source))
        self.tensors.append((source, tensor, fake))
        return fake

    def jagged_input(self, tensor: NestedTensor, source: Source) -> torch.Tensor:
        """What stands for a nested tensor of the jagged layout: inputs of the graph are its values and its offsets."""
        return self.jagged.admit(tensor, source)

    def quantised_input(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """What stands for a quantised tensor: inputs of the graph are its integers and what varies of their scale."""
        return self.quantised.admit(tensor, source)

    def array_input(self, array: Any, source: Source) -> Array:
        """An array of the outside: an input of the graph is the tensor that has its memory."""
        flipped = flipped_dims(array)
        where = Reading(source, TensorAt(flipped))
        return self.arrays.of_input(self._tensor_read(where, array, input_name(source)), flipped)

    def scalar_input(self, scalar: Any, source: Source) -> Array:
        """A NumPy scalar of the outside, of each call: an input of the graph is a tensor that holds it."""
        known = self._scalars.get(source)
        if known is None:
            self.externals.guard(source, GuardKind.TYPE, type(scalar))
            fake = self._tensor_read(Reading(source, ScalarAt(type(scalar))), scalar, input_name(source))
            known = self._scalars[source] = self.arrays.of_scalar(fake)
        return known

    def _tensor_read(self, where: Reading, value: object, name: str) -> FakeTensor:
        """The fake of the tensor that each call reads of an object of NumPy's."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            tensor = where.read(value)
        with torch._C.DisableTorchFunction():
            self.externals.guard(where, GuardKind.TENSOR, tensor_guard(tensor, {}))
            fake = self.mode.from_tensor(tensor)
            self.recorder.add_input(fake, where, name)
        self.tensors.append((where, tensor, fake))
        return fake

    def seqlen(self, value: int, source: Source) -> int | torch.SymInt | torch.SymFloat | float:
        """A length of rows that a nested tensor keeps: of each call, since it differs between most."""
        return self.number(value, source) if self.dynamic.never else self.symbol_at(source, value, 0, None)

    def _symbol(self, hint: int, source: Source, low: int, high: int | None) -> torch.SymInt:
        symbol = self.shape_env.symbol(hint, source.expression(), min=low, max=high)
        self._add_symbol(symbol, source)
        return symbol

    def _add_symbol(self, symbol: torch.SymInt | torch.SymFloat, source: Source) -> None:
        name = symbol.node.str()  # its name also where texts show numbers
        self.symbol_sources[name] = source
        self.recorder.symbol_nodes[name] = self.recorder.add_input(symbol, source, name)

    def _computed_input(self, name: str) -> fx.Node:
        """A derived number becomes an input of the graph: generated code computes it."""
        info = self.shape_env.symbols[name]
        return self.recorder.add_input(self.shape_env.named(name), Computed(info.source), name)

    def number(self, value: int | float, source: Source) -> int | float | torch.SymInt | torch.SymFloat:
        """An int or float of the outside: itself, guarded, or a symbol when it changed between calls."""
        if not self.dynamic.number(value, source):
            self.externals.guard(source, GuardKind.EQUALS, value)
            return value
        self.externals.guard(source, GuardKind.TYPE, type(value))
        return self.symbol_at(source, value, -INTEGER_BOUND, INTEGER_BOUND)

    def symbol_at(
        self, source: Source, value: int | float, low: int, high: int | None
    ) -> torch.SymInt | torch.SymFloat:
        """The symbol for the number that each call reads at the source; `low` and `high` bound an int."""
        symbol = self._numbers.get(source)
        if symbol is None:
            with torch._C.DisableTorchFunction():
                if isinstance(value, float):
                    symbol = self.shape_env.float_symbol(value, source.expression())
                    self._add_symbol(symbol, source)
                else:
                    symbol = self._symbol(value, source, low, high)
            self._numbers[source] = symbol
        return symbol

    def length_of(self, grown: GrowingList | GrowingTuple) -> int | torch.SymInt:
        """The length of what grows in this call: of a list what it came with, and what the program has appended."""
        known = self.externals.lookup(grown)
        assert known is not None
        came_with: Any = self.symbol_at(Reading(grown.source, length_of), length_of(known.original), 0, None)
        return came_with + length_of(grown)  # type: ignore[no-any-return]

    def text(self, value: object, source: Source) -> object:
        """A text of the outside, bytes, a decimal number: itself, guarded, or one of each call when it changed between
        calls."""
        if not self.dynamic.text(source):
            self.externals.guard(source, GuardKind.EQUALS, value)
            return value
        self.externals.guard(source, GuardKind.TYPE, type(value))
        return self.texts.given(value, source)

    def changes(self, source: Source) -> bool:
        """Whether a value at the source, or reached through it, differed between calls."""
        return any(is_beneath(changed, source) for changed in self.dynamic.changed)

    def steps(self, source: Source) -> bool:
        """Whether the iterator at the source, that of a loop whose body breaks, is to be advanced for real."""
        return self.dynamic.versions >= _UNROLLED_ROUNDS and self.changes(source)

    def grows(self, source: Source) -> bool:
        """Whether the list at the source had another length in an earlier call."""
        return source in self.dynamic.changed

    def ends_at(self, source: Source, value: Any) -> Ends:
        """What of a list, a tuple or a dict ends the graph, in the place of one more version for its length."""
        known = self.dynamic.read_whole.get(source, ())
        versions = len(known)
        if source in self.dynamic.varied or (self.dynamic.in_rounds and versions):
            return Ends.READS
        is_dict = type(value) is dict
        if not is_dict and told_by(value) in known:
            return Ends.NOTHING  # something else is new in this call
        items = value.values() if is_dict else value
        of_modules = any(isinstance(item, nn.Module) for item in items)  # which no two rounds have in common
        if versions >= (_VERSIONS_BY_KEYS if is_dict else _VERSIONS_BY_LENGTH) and not (is_dict and of_modules):
            return Ends.READS
        return Ends.LOOPS if versions and not of_modules and not all(map(is_constant, items)) else Ends.NOTHING

    def run_time_numbers(self) -> frozenset[Source]:
        """Where the program read ints and floats that became symbols: of a growing list's length, the list."""
        return frozenset(
            source.base if isinstance(source, Reading) and source.read is length_of else source
            for source in self._numbers
        )

    def guard_offset(self, fake: FakeTensor) -> None:
        """The program uses where `fake` begins in its memory: so does each input that lies there."""
        for source, tensor, known in self.tensors:
            if known.memory is fake.memory:
                self.externals.guard(TensorOffset(source), GuardKind.EQUALS, tensor.storage_offset())

    def ambient(self, function: Callable[..., object], args: tuple[object, ...]) -> object:
        """What a function says of the state of the process, guarded."""
        value = function(*args)
        self.externals.guard(None, GuardKind.AMBIENT, AmbientRead(function, args, value))
        return value

    def identity(self, obj: object) -> int:
        """`id(obj)` of an object of the outside, which has to be that object from now on."""
        known = self.externals.lookup(obj)
        if known is None:
            return id(obj)
        if isinstance(known.original, torch.Tensor) and not isinstance(known.original, nn.Parameter):
            raise BreakGraph("unsupported_read", f"id() of the tensor {known.source.expression()}")  # another each call
        self.externals.unkept = "the program asks for an id()"
        if not isinstance(known.source, Pinned):
            self.externals.guard(known.source, GuardKind.IDENTITY, known.original)
        return id(known.original)

    def text_of_exception(self, show: Callable[[object], str], error: BaseException) -> object:
        """`str` or `repr` of an exception of the outside that shows its arguments and no more, or MISSING."""
        kind = type(error)
        own: object = kind.__repr__ if show is repr else kind.__str__
        if self.externals.lookup(error) is None or own not in _TEXTS_OF_ARGUMENTS:
            return MISSING
        known = self.externals.lookup(error)
        assert known is not None
        shown = self.externals.wrap(error.args, Attribute(known.source, "args", native=True))
        return show(error) if is_constant(shown) else MISSING

    def referent(self, reference: weakref.ReferenceType[object]) -> object:
        """What a weak reference of the outside refers to."""
        known = self.externals.lookup(reference)
        return reference() if known is None else self.externals.wrap(reference(), Referent(known.source))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor that C code handed to a torch call: an input that the compiled code holds."""
        if stays_outside(tensor):
            self.externals.refuse(tensor)
        wrapped = self.externals.hold(tensor, "tensor")
        assert isinstance(wrapped, torch.Tensor)
        return wrapped

    # -- reads ------------------------------------------------------------------------------

    def argument(self, index: int, name: str, value: object) -> object:
        """Slot `index` of the flat argument vector, as the program sees it."""
        return self.externals.wrap(value, Argument(index, name))

    # -- attributes -------------------------------------------------------------------------

    def instance_get(self, obj: object, name: str) -> object:
        """`name` in the object's own `__dict__` (no class attribute is asked), or MISSING."""
        if isinstance(obj, types.ModuleType):
            return self.namespaces.get(obj.__dict__, name)
        known = self.externals.lookup(obj)
        if known is None:
            return (own_dict(obj) or {}).get(name, MISSING)
        written = self.overlays.read(obj, name)
        if written is not MISSING:
            return MISSING if written is DELETED else written
        attributes = own_dict(known.original)
        if attributes is None:
            return MISSING
        shadow = self.externals.by_original.get(id(attributes))
        if shadow is not None:
            return shadow.value.get(name, MISSING)
        if name not in attributes:
            self.externals.guard(known.source, GuardKind.INSTANCE_LACKS, name)
            return MISSING
        return self.externals.wrap(attributes[name], InstanceAttribute(known.source, name))

    def instance_set(self, obj: object, name: str, value: object) -> None:
        """A write to the object's `__dict__`, kept aside for one of the outside. Raises AttributeError without one."""
        if isinstance(obj, types.ModuleType):
            self.namespaces.set(obj.__dict__, name, value)
            return
        known = self.externals.lookup(obj)
        if known is None:
            object.__setattr__(obj, name, value)
            return
        attributes = own_dict(known.original)
        if attributes is None:
            object.__setattr__(known.original, name, value)  # says that there is no place for it
        shadow = self.externals.by_original.get(id(attributes))
        if shadow is not None:
            shadow.value[name] = value
        else:
            self.overlays.write(obj, name, value)

    def instance_delete(self, obj: object, name: str) -> None:
        """A deletion from the object's own `__dict__`. Raises AttributeError where the name is not there."""
        if isinstance(obj, types.ModuleType):
            if self.namespaces.get(obj.__dict__, name) is MISSING:
                raise missing_attribute(obj, name)
            self.namespaces.delete(obj.__dict__, name)
            return
        known = self.externals.lookup(obj)
        if known is None:
            object.__delattr__(obj, name)
            return
        if self.instance_get(obj, name) is MISSING:
            raise missing_attribute(obj, name, self.type_of(obj))
        shadow = self.externals.by_original.get(id(own_dict(known.original)))
        if shadow is not None:
            del shadow.value[name]
        else:
            self.overlays.write(obj, name, DELETED)

    def instance_dict(self, obj: object) -> dict[str, object]:
        """`obj.__dict__` as the program may hold and change it."""
        if isinstance(obj, type):
            return self.classes.namespace(obj)  # type: ignore[return-value]
        known = self.externals.lookup(obj)
        if known is None:
            return obj.__dict__
        attributes = instance_dict(known.original)
        first = id(attributes) not in self.externals.by_original
        shadow: dict[str, object] = self.externals.wrap(attributes, InstanceDict(known.source))
        if first:  # earlier writes move from the overlay into the shadow, which answers from now on
            self.overlays.move(obj, shadow)
        return shadow

    def slot_get(self, obj: object, member: types.MemberDescriptorType) -> object:
        """A `__slots__` attribute, or MISSING."""
        known = self.externals.lookup(obj)
        name = member.__name__
        if known is not None:
            written = self.overlays.read(obj, name, "slot")
            if written is not MISSING:
                return MISSING if written is DELETED else written
        try:
            value = member.__get__(obj if known is None else known.original)
        except AttributeError:
            if known is not None:
                self.externals.guard(known.source, GuardKind.PREDICATE, EmptySlot(member))
            return MISSING
        native = vars(object)["__getattribute__"] is type(obj).__getattribute__
        return value if known is None else self.externals.wrap(value, Attribute(known.source, name, native))

    def stored_names(self, obj: object) -> set[str]:
        """Names in the `__dict__` of an external object of a C type, and those written during capture."""
        known = self.externals.lookup(obj)
        own = own_dict(known.original) if known is not None else None
        shadow = self.externals.by_original.get(id(own))
        own = own if shadow is None else shadow.value
        return {*(own or ()), *self.overlays.names(obj)}

    def leaf_get(self, obj: object, name: str) -> object:
        """An attribute of an object of a C type."""
        if isinstance(obj, types.MethodType) and isinstance(obj.__func__, types.FunctionType) and _passes_on(name):
            return self.leaf_get(obj.__func__, name)
        known = self.externals.lookup(obj)
        written = self.overlays.read(obj, name)
        if isinstance(obj, types.ModuleType):
            written = self.overlays.read(obj.__dict__, name, "global")
        if written is DELETED:
            raise missing_attribute(obj, name)
        if written is not MISSING:
            return written
        if name == "__dict__" and known is not None and type(obj) is types.SimpleNamespace:
            return self.instance_dict(obj)
        if known is not None and not isinstance(obj, torch.Tensor) and self._keeps_attributes(obj, name):
            stored = self.instance_get(obj, name) if name in self.stored_names(obj) else MISSING
            if stored is not MISSING:
                return stored
            if own_dict(obj) is not None and not hasattr(type(obj), name):
                self.instance_get(obj, name)  # guards that it is not there
        value = getattr(obj, name)
        if type(obj) is functools.partial and name in ("func", "args", "keywords"):  # made anew around what it has
            return value
        if known is None or isinstance(obj, torch.Tensor) or (callable(value) and _is_own_method(obj, value)):
            return value
        if isinstance(obj, types.FunctionType):
            return self._part_of_function(obj, known, name, value)
        if name in _FIXED_ATTRIBUTES and (isinstance(known.source, Pinned) or not isinstance(value, str)):
            return value
        native = not may_change(type(obj))
        return self.externals.wrap(value, Attribute(known.source, name, native))

    def _part_of_function(self, fn: types.FunctionType, known: External, name: str, value: object) -> object:
        """A function's name, annotations, code and `__dict__` may be others while it is the same object."""
        if name == "__closure__" or is_trusted_module(home_of(fn)):
            return value
        if name == "__dict__":
            return self.instance_dict(fn)
        return self.externals.wrap(value, Attribute(known.source, name, native=True))

    def leaf_set(self, obj: object, name: str, value: object) -> None:
        """Assignment to an attribute of an object of a C type: kept aside when it would end in its `__dict__`.

        Raises AttributeError for an object without one, as eager does at this place of the program.
        """
        known = self.externals.lookup(obj)
        if known is None:
            setattr(obj, name, value)
            return
        member = next((vars(klass)[name] for klass in type(obj).__mro__ if name in vars(klass)), None)
        if isinstance(obj, type) or hasattr(type(member), "__set__"):
            raise BreakGraph("external_write", f"attribute {name!r} of a {type(obj).__qualname__}")
        if own_dict(known.original) is None:
            try:
                object.__setattr__(known.original, name, value)  # raises: there is no place for it
            except TypeError:
                raise BreakGraph("external_write", f"attribute {name!r} of a {type(obj).__qualname__}") from None
        self.instance_set(obj, name, value)

    def _keeps_attributes(self, obj: object, name: str) -> bool:
        """Whether an attribute in the `__dict__` of an object of a C type may change."""
        if not isinstance(obj, types.FunctionType):
            return True
        return not (name.startswith("__") or is_trusted_module(home_of(obj)))

    def inline(self, fn: types.FunctionType) -> None:
        """The program calls `fn`, which is interpreted: its code must be the same next time."""
        self.interpreted[fn.__code__] = home_of(fn)
        known = self.externals.lookup(fn)
        if known is not None and not is_trusted_module(home_of(fn)):
            source = Attribute(known.source, "__code__", native=True)
            self.externals.guard(source, GuardKind.IDENTITY, fn.__code__)

    def function_defaults(self, fn: types.FunctionType) -> tuple[tuple[object, ...] | None, dict[str, object] | None]:
        """Default values as the program may hold them: constants as they are, all else by its source."""
        defaults, keywords = fn.__defaults__, fn.__kwdefaults__
        known = self.externals.lookup(fn)
        if known is None or is_trusted_module(home_of(fn)):
            return defaults, keywords
        if not isinstance(known.source, Pinned):  # made anew at each call
            return (
                self.externals.wrap(defaults, Attribute(known.source, "__defaults__", native=True)),
                self.externals.wrap(keywords, Attribute(known.source, "__kwdefaults__", native=True)),
            )
        for name in ("__defaults__", "__kwdefaults__"):
            self.externals.guard(Attribute(known.source, name, native=True), GuardKind.IDENTITY, getattr(fn, name))
        if defaults is not None and not all(map(is_constant, defaults)):
            source = Attribute(known.source, "__defaults__", native=True)
            defaults = tuple(self.externals.wrap(value, Item(source, i)) for i, value in enumerate(defaults))
        if keywords is not None:
            source = Attribute(known.source, "__kwdefaults__", native=True)
            keywords = {key: self.externals.wrap(value, Item(source, key)) for key, value in keywords.items()}
        return defaults, keywords

    def examined(self, *functions: object) -> None:
        """Python's library is asked about functions: whatever may be assigned to on them has to be as it is."""
        for function in functions:
            while isinstance(function := getattr(function, "__func__", function), types.FunctionType):
                if self.externals.lookup(function) is None or is_trusted_module(home_of(function)):
                    break
                self.inline(function)
                self.function_defaults(function)
                self.leaf_get(function, "__annotations__")
                function = self.instance_dict(function).get("__wrapped__")

    def guard_distinct(self, a: object, b: object) -> None:
        """The program asked whether two objects are the same, and they are not."""
        first, second = self.externals.lookup(a), self.externals.lookup(b)
        if first is not None and second is not None:
            pinned = isinstance(first.source, Pinned), isinstance(second.source, Pinned)
            if not all(pinned):
                source, other = (second, first) if pinned[0] else (first, second)
                self.externals.guard(source.source, GuardKind.DISTINCT_OBJECT, other.source)

    def refuse_iterator(self, obj: object) -> None:
        """Breaks at the use of an iterator that the program did not make: advancing it would show outside."""
        method = getattr(type(obj), "__next__", None)
        if type(obj) is Rounds and not obj.is_ahead:
            self.loops.refuse(obj)
        if type(method) is not types.WrapperDescriptorType and not isinstance(obj, LocalIterator):
            return
        known = self.externals.lookup(obj)
        if known is not None and known.original is obj:
            if isinstance(obj, LocalIterator):
                raise BreakGraph("loop", "the next round of a loop")
            raise BreakGraph("generator", f"{known.source.expression()} is a {type(obj).__name__} made outside")

    def begun(self, obj: object) -> object:
        """The iterable itself, or what goes over it in its place (`Loops.begun`)."""
        if type(obj) is not Rounds:
            self.refuse_iterator(obj)
        return self.loops.begun(obj)

    def refuse_opaque(self, *objects: object) -> None:
        """Breaks where the program looks into an object that no guard can watch."""
        for obj in objects:
            if isinstance(obj, RunTimeText):
                obj.need()
            if isinstance(obj, Array):
                raise BreakGraph("numpy", "C code looks into an array")
            if numpy_values.is_array(obj):
                self.externals.arrays.refuse_shared(obj)
            known = self.externals.opaque.get(id(obj))
            if known is not None and known.original is obj:
                kind = type(obj)
                reason = "numpy" if kind.__module__.partition(".")[0] == "numpy" else "unsupported_read"
                raise BreakGraph(reason, f"{known.source.expression()} is a {kind.__module__}.{kind.__qualname__}")

    def module_get(self, module: types.ModuleType, name: str) -> object:
        """A module object's attribute, or MISSING (`__getattr__` of the module is the caller's business)."""
        return self.namespaces.get(module.__dict__, name)

    # -- tensors ----------------------------------------------------------------------------

    def type_of(self, obj: object) -> type:
        """`type(obj)` as the program would see it without capture."""
        if isinstance(obj, FakeTensor):
            known = self.externals.lookup(obj)
            if known is not None:
                return type(known.original)
            plain = nn.Parameter if obj.__dict__.get("_is_param") else torch.Tensor
            return class_of(obj) or plain
        if isinstance(obj, InterpreterObject):
            return native_type(obj)
        return obj.node.pytype if isinstance(obj, SYMBOLIC) else type(obj)

    def tensor_get(self, tensor: torch.Tensor, name: str) -> object:
        """An attribute of a tensor. Properties and methods are torch's, run under the recorder."""
        known = self.externals.lookup(tensor)
        if name in _OF_THE_CLASS:
            kind = self.type_of(tensor)
            return kind if name == "__class__" else getattr(kind, name)
        if name == "_base" and (known is not None or self.externals.lookup(tensor._base) is not None):
            raise BreakGraph("unsupported_read", "_base of an input, or of its view")
        if name in _OF_HISTORY and self.recorder.has_unknown_history(tensor):
            raise BreakGraph("autograd_function", f"its backward reads {name} of what it computes from a gradient")
        if name == "__dict__":
            if known is None:
                raise BreakGraph("unsupported_read", "__dict__ of a tensor that the program made")
            return self.instance_dict(tensor)
        self.torch_names.of_tensor(self.type_of(tensor), name)
        if stands_for_one(tensor):
            return self.jagged.attribute(tensor, name)
        if not isinstance(getattr(torch.Tensor, name, None), _METHODS):  # one breaks the graph where it is called
            self.externals.refuse(tensor)
        written = self.overlays.read(tensor, name)
        if written is not MISSING and written is not DELETED:
            return written
        if whole_of(tensor) is not None and not hasattr(torch.Tensor, name):
            found = self.wrappers.attribute(tensor, name)
            if found is not MISSING:
                return found
        if known is not None:
            if written is MISSING and name in self.stored_names(tensor):
                return self.instance_get(tensor, name)
            if written is MISSING and not hasattr(type(known.original), name):
                self.externals.guard(known.source, GuardKind.INSTANCE_LACKS, name)
            if name == "grad":
                with torch._C.DisableTorchFunction():
                    return self.externals.wrap(known.original.grad, Attribute(known.source, "grad", native=True))
        kind = self.type_of(tensor)
        if not hasattr(kind, name) and name != "_is_param":  # which torch asks for what is a parameter
            raise missing_attribute(tensor, name, kind)
        return getattr(tensor, name)

    def tensor_set(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        """Assignment to an attribute: kept aside, or in the graph (`data`, `requires_grad`); else a break."""
        self.externals.refuse(tensor)
        if stands_for_one(tensor):
            raise BreakGraph("special_tensor", f"assignment to the attribute {name!r} of a nested tensor")
        member = getattr(torch.Tensor, name, None)
        if (
            name == "grad"
            and (self.externals.lookup(tensor) is not None or any(tensor is leaf for leaf in self.recorder.leaves))
            and (value is None or isinstance(value, torch.Tensor))
        ):
            self.overlays.write(tensor, name, value)
            return
        if name == "data":
            data = self.recorder.data_writes.write(tensor, value)
            if self.externals.lookup(tensor) is not None:
                self.overlays.write(tensor, name, data)
            return
        if isinstance(member, (types.GetSetDescriptorType, property)):
            if name == "requires_grad" and self.externals.lookup(tensor) is None:
                if not tensor.is_leaf:
                    with torch._C.DisableTorchFunction():
                        tensor.requires_grad = value  # says that it is none
                tensor.requires_grad_(value)
                return
            raise BreakGraph("tensor_metadata_write", f"assignment to the tensor attribute {name!r}")
        self.overlays.write(tensor, name, value)

    def tensor_delete(self, tensor: torch.Tensor, name: str) -> None:
        """A deletion of an attribute of the program's own; one of torch's breaks the graph."""
        if hasattr(torch.Tensor, name):
            raise BreakGraph("tensor_metadata_write", f"deletion of the tensor attribute {name!r}")
        self.tensor_get(tensor, name)  # raises when there is none
        self.overlays.write(tensor, name, DELETED)

    # -- nn.Module --------------------------------------------------------------------------

    def registered(self, module: nn.Module, name: str) -> object:
        """A parameter, buffer or submodule by its name, or MISSING."""
        known = self.externals.lookup(module)
        if known is None:
            return MISSING
        found = modules.shadowed_registry(self.externals, known, name)
        return modules.registered(self.externals, known, name) if found is MISSING else found

    def has_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether a module of the outside has a buffer of that name, and nobody is told of another one, guarded."""
        known = self.externals.lookup(module)
        return known is not None and modules.has_buffer(self.externals, known, name)

    def lacks(self, module: nn.Module, name: str) -> bool:
        """Whether a module of the outside has no such attribute, which is guarded. False says nothing."""
        known = self.externals.lookup(module)
        if known is None or any(self.overlays.read(module, key) is not MISSING for key in (name, *modules.REGISTRIES)):
            return False
        if not modules.lacks(self.externals, known, name):
            return False
        return self.classes.get(type(module), name) is None and self.instance_get(module, name) is MISSING

    def forward_of(self, module: nn.Module) -> object:
        """The module's `forward` as a bound method, or what its instance has in place of it."""
        own = self.instance_get(module, "forward")
        if own is not MISSING:
            return own
        found = self.classes.get(type(module), "forward")
        forward = found[0] if found is not None else None
        return types.MethodType(forward, module) if isinstance(forward, types.FunctionType) else module.forward

    def has_plain_call(self, module: nn.Module) -> bool:
        """Whether a call of the module is one of its `forward`: no hooks, which is guarded."""
        known = self.externals.lookup(module)
        if known is None:
            return modules.has_no_hooks(module)
        return modules.has_plain_call(self.externals, self.overlays, known)

    def has_backward_hooks(self, module: nn.Module) -> bool:
        """Whether the module has hooks on its gradients."""
        known = self.externals.lookup(module)
        return modules.has_backward_hooks(module if known is None else known.original)


# Rounds of a loop with breaks that get code of their own, with whatever follows in the same graph.
_UNROLLED_ROUNDS = 2
# For lengths of a list or a tuple that the program reads, and keys of a dict, in which items are looked up one by one.
# Of a loop over what is no constant, there is a version for one of them.
_VERSIONS_BY_LENGTH = 3
_VERSIONS_BY_KEYS = 5

# How exceptions in C show themselves that have nothing to show but their arguments.
_OF_HISTORY = frozenset({"requires_grad", "is_leaf", "grad_fn"})
_OF_THE_CLASS = frozenset({"__class__", "__doc__", "__module__"})
_TEXTS_OF_ARGUMENTS: tuple[object, ...] = (BaseException.__str__, BaseException.__repr__, KeyError.__str__)


def _is_own_method(obj: object, value: object) -> bool:
    """Whether a callable attribute of an object of a C type comes with its class, and is not held by it."""
    owner = getattr(value, "__self__", MISSING)
    return owner is obj or isinstance(owner, type) or value is type(obj)


def _passes_on(name: str) -> bool:
    """Whether a method asks its function for an attribute."""
    return name == "__doc__" or not any(name in vars(klass) for klass in types.MethodType.__mro__)


# Attributes that cannot change while the object is the same.
_FIXED_ATTRIBUTES = frozenset(
    {
        "__name__", "__qualname__", "__module__", "__code__", "__doc__", "__closure__", "__self__", "__func__",
        "__objclass__",
    }
)  # fmt: skip
_METHODS = (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
