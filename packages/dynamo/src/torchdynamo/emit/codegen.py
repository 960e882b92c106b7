"""Generated Python source of a compiled function: run the graph, replay the side effects, rebuild the result.

def compiled(inputs, x, self):
    v0 = self                             # loads: external objects, before anything changes
    failed = []
    try:
        (o0, o1) = graph(*inputs)         # the graph
    except BaseException as error:
        failed.append(error)
    if failed:                            # it ran before all effects: the call begins anew, eagerly
        return rerun(failed, None, inputs, (x, self))
    v1 = [o0, 3]                          # build: objects the program made
    object.__setattr__(v0, 'last', v1)    # effects
    return v1
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fractions
import math
import re
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch.nested._internal.nested_tensor import NestedTensor

from primtorch.errors import DataDependent
from primtorch.fake import FakeTensor
from primtorch.quantised import ByTensor, by_channel, by_tensor
from primtorch.symbolic import SCALAR_OPS, FloatExpr, IntExpr, expr_of, float_expr_of
from primtorch.wrappers import whole_of
from torchdynamo.emit.forms import FORMS
from torchdynamo.graph import numpy_values
from torchdynamo.graph.conditions import ConditionNotMet
from torchdynamo.graph.jagged import number_rows, ragged_length, rebuilt, stands_for_one
from torchdynamo.graph.quantised import QuantisedFake
from torchdynamo.graph.run_time_texts import RunTimeText
from torchdynamo.graph.scalars import concrete
from torchdynamo.graph.tensor_classes import class_of, size_of, with_class
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.interpreter import Interpreter
from torchdynamo.interpreter.classes import is_python_class, native_base
from torchdynamo.interpreter.iterators import (
    LocalIterator,
    MappingIterator,
    Rounds,
)
from torchdynamo.interpreter.protocol import Marker
from torchdynamo.outside.externals import CONSTANT_TYPES, IDENTITY_TYPES, External
from torchdynamo.outside.outside import Outside
from torchdynamo.outside.overlays import DELETED, Slot
from torchdynamo.reasons import BreakGraph, ClassOutlivesGraph, WorkOutlivesGraph
from torchdynamo.sources import Item, Reading, Source, TensorSize, base_of, own_keys

T = TypeVar("T")
GENERATED = "<torchdynamo "  # how the file names of generated functions begin
_LITERALS = (int, str, bool, bytes, type(None), type(Ellipsis))
GIVEN = ("P", "G", "C", "sys", "graph", "rerun")
"""Globals of a generated function: what it pins, the program's globals and closure, `sys`, the graph, its rerun."""
_RESERVED = frozenset(
    {
        *GIVEN, "inputs", "before", "failed", "error", "BaseException", "object", "list", "dict", "set", "type", "iter",
    }
)  # fmt: skip


def discard_attribute(base: Any, owner: object, name: str) -> None:
    """Deletes an attribute that may be one which the program itself had set."""
    with contextlib.suppress(AttributeError):
        base.__delattr__(owner, name)


def parameter_name(index: int, name: str) -> str:
    """A parameter's name in generated code: the user's, unless generated code uses it itself."""
    clashes = name in _RESERVED or (name[:1] in "vosfu" and name[1:].isdigit())
    return name if name.isidentifier() and not clashes else f"arg{index}"


class Codegen:
    """Writes one compiled function. `value` gives an expression for an object as capture left it."""

    def __init__(self, outside: Outside, interpreter: Interpreter) -> None:
        self.raises = interpreter.raises  # ordinals of raises, by the ids of exceptions that the program raised
        self.made_functions = interpreter.made_functions
        self.recorder = outside.recorder
        self.arrays = outside.arrays
        self.externals = outside.externals
        self.overlays = outside.overlays
        self.shape_env = outside.shape_env
        self.symbol_sources = outside.symbol_sources
        self.made_classes = outside.classes.made
        self.inputs = outside.tensors
        self.classed = {source for source, _, fake in outside.tensors if class_of(fake) is not None}
        self.array_inputs = {id(fake): s for s, _, fake in outside.tensors if isinstance(s, Reading)}
        self.keep_iterators = False  # set for values that only the rest of the same function will see
        self.loads: list[str] = []
        self.build: list[str] = []
        self.effects: list[str] = []
        self.unstarted: list[types.FunctionType] = []  # of generators that leave the program before they start
        self.emptied: list[str] = []  # the last effects: what such lists held may end with them
        self.late: set[str] = set()  # iterators that begin when what they go over is as the program left it
        self.written: list[External] = []  # objects of the outside that the effects change
        self.outputs: dict[fx.Node, str] = {}
        self._names: dict[int, str] = {}
        self._alive: list[object] = []
        self._sources: dict[Source, str] = {}
        self._symbols: set[str] = set()  # those that the code has loaded under their names
        self.scalars: list[str] = []  # inputs of the graph that the code computes
        self.checks: list[str] = []  # statements that follow the graph, and raise what calls for an eager run
        self._count = 0

    # -- names ------------------------------------------------------------------------------

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count - 1}"

    def named(self, obj: object, expression: str) -> str:
        """A variable that holds `obj`, made by the expression."""
        known = self._names.get(id(obj))
        if known is not None:  # one of its parts led back to it
            return known
        name = self._fresh()
        self.build.append(f"{name} = {expression}")
        self._remember(obj, name)
        return name

    def _remember(self, obj: object, name: str) -> None:
        self._names[id(obj)] = name
        self._alive.append(obj)

    def pin(self, obj: object) -> str:
        """An expression for an object that the compiled code holds. Raises ClassOutlivesGraph."""
        if isinstance(obj, type) and obj in self.made_classes:
            raise ClassOutlivesGraph(f"{obj.__qualname__} outlives the graph", self.made_classes[obj])
        return self.externals.pins.source(obj).expression()

    def load(self, source: Source) -> str:
        """A variable that holds the object at `source` as it was at the call."""
        name = self._sources.get(source)
        if name is None:
            name = self._sources[source] = self._fresh()
            self.loads.append(f"{name} = {self._spelt(source).expression()}")
        return name

    def _spelt(self, source: Source) -> Source:
        """The source with functions, and keys that Python has no literal for, held by the compiled code."""
        base = base_of(source)
        if base is None:
            return source
        changes: dict[str, Any] = {}
        spelt = self._spelt(base)
        if spelt is not base:
            changes["base"] = spelt
        if isinstance(source, Item) and type(source.key) not in _LITERALS:
            changes["key"] = Marker(self.pin(source.key))
        if isinstance(source, Reading):
            changes["name"] = self.pin(source.read)
        return dataclasses.replace(source, **changes) if changes else source

    # -- values -----------------------------------------------------------------------------

    def value(self, obj: Any) -> str:
        """An expression for an object as capture left it. Raises BreakGraph for what cannot be made anew."""
        name = self._names.get(id(obj))
        if name is not None:
            return name
        kind = type(obj)
        if kind in _LITERALS:
            return repr(obj)
        if kind is float and math.isfinite(obj):
            return repr(obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, (torch.SymInt, torch.SymFloat)):
            return self._symbolic(obj)
        if isinstance(obj, torch.SymBool):
            return repr(self._settled(obj))
        if isinstance(obj, RunTimeText):
            return self._run_time_text(obj)
        known = self.externals.lookup(obj)
        if known is not None:
            handed_over = type(obj) is Rounds and not self.keep_iterators
            return f"{self.load(known.source)}.iterator" if handed_over else self.load(known.source)
        if kind is fractions.Fraction:  # the one constant whose parts are the program's numbers
            return self.pin(fractions.Fraction(self._settled(obj.numerator), self._settled(obj.denominator)))
        if (kind in CONSTANT_TYPES and kind is not torch.Size) or numpy_values.is_scalar(obj):
            return self.pin(obj)
        for base, rule in FORMS:
            if isinstance(obj, base):
                return rule(self, obj)
        if isinstance(obj, IDENTITY_TYPES):
            return self.pin(obj)
        return self._instance(obj)

    def _settled(self, number: object) -> Any:
        """What a run-time number is in this call, guarded."""
        try:
            return concrete(number)
        except DataDependent as error:
            self.recorder.taken.asked(error, as_size=False)
            raise

    def _tensor(self, tensor: torch.Tensor) -> str:
        known = self.externals.lookup(tensor)
        if known is not None:
            return self.load(known.source)
        if stands_for_one(tensor):
            return self._jagged(tensor)
        if isinstance(tensor, QuantisedFake):
            return self._quantised(tensor)
        if not isinstance(tensor, FakeTensor):
            return self.pin(tensor)
        self.recorder.choices.leaves(tensor)
        if id(tensor) in self.array_inputs:
            source = self.array_inputs[id(tensor)]
            return self.named(tensor, f"{self.pin(source.read)}({self.load(source.base)})")
        node = self.recorder.node_of(tensor)
        if node is None:
            raise BreakGraph("rebuild", "a tensor that the graph does not make")
        if getattr(tensor, "_is_param", False) and not tensor.requires_grad:
            make, parameter = self.pin(torch.Tensor._make_subclass), self.pin(torch.nn.Parameter)
            return self.named(tensor, f"{make}({parameter}, {self._node(node)}, False)")
        kind = class_of(tensor)
        if kind is not None and whole_of(tensor) is None:
            return self.named(tensor, f"{self.pin(with_class)}({self._node(node)}, {self.pin(kind)})")
        return self._node(node)

    def _jagged(self, nested: NestedTensor) -> str:
        """A nested tensor that the program made: around its values, with the very offsets that they have."""
        kept = [nested._metadata_cache.get(name) for name in ("min_seqlen", "max_seqlen")]
        sizes = [None if size is None else size.shape[0] for size in kept]
        memory = memory_of(nested._values)
        fresh = all(fake.memory is not memory for _, _, fake in self.inputs)
        parts = (nested._values, nested._offsets, nested._lengths, nested._ragged_idx, *sizes, fresh)
        return self.named(nested, f"{self.pin(rebuilt)}({self.items(parts)})")

    def _quantised(self, tensor: QuantisedFake) -> str:
        """A quantised tensor that the program made: over the memory of its integers."""
        meaning = tensor.meaning
        if isinstance(meaning, ByTensor):
            parts: tuple[object, ...] = (tensor.integers, meaning.scale, meaning.zero_point)
            return self.named(tensor, f"{self.pin(by_tensor)}({self.items(parts)})")
        parts = (tensor.integers, meaning.scales, meaning.zero_points, meaning.axis)
        return self.named(tensor, f"{self.pin(by_channel)}({self.items(parts)})")

    def _run_time_text(self, text: RunTimeText) -> str:
        if text.source is not None:
            return self.load(text.source)
        return self.named(text, f"{self.pin(text.function)}({self.items(text.args)})")

    def _symbolic(self, number: torch.SymInt | torch.SymFloat) -> str:
        expr = expr_of(number) if isinstance(number, torch.SymInt) else float_expr_of(number)
        rows = self.recorder.jagged.rows_of(number) if isinstance(number, torch.SymInt) else None
        if rows is not None:
            return self.named(number, f"{self.pin(ragged_length)}({self.value(rows)})")
        if not self.shape_env.roots(expr.symbols()) <= self.symbol_sources.keys():  # a number that only the graph knows
            node = self.recorder.argument(number)
            return self._node(node) if isinstance(node, fx.Node) else repr(node)
        return self._expression(expr)

    def _expression(self, expr: IntExpr | FloatExpr) -> str:
        """An expression over symbols that are loaded."""
        if isinstance(expr, FloatExpr):
            return self.symbol(expr.text) if expr.value is None else f"({self.value(expr.value)})"
        expr = self.shape_env.simplify(expr)
        symbols = expr.symbols()
        for name in sorted(symbols):
            self.symbol(name)
        return f"({expr})" if symbols else str(expr)

    def condition(self, truth: torch.SymBool) -> str:
        """What a loop asks of numbers in each of its rounds, as an expression over symbols that are loaded."""
        for name in sorted(truth.node.expr.symbols()):
            self.symbol(name)
        return f"({truth.node.expr})"

    def symbol(self, name: str) -> str:
        """A variable that holds a symbol's number, read or computed before the graph runs."""
        if name in self._symbols:
            return name
        self._symbols.add(name)
        definition = self.shape_env.definitions.get(name)
        if definition is None:
            source = self.symbol_sources[name]
            text = self._spelt(source).expression()
            if (
                isinstance(source, TensorSize) and source.base in self.classed
            ):  # the tensor's class may have a word to say of `shape`
                text = f"{self.pin(size_of)}({self._spelt(source.base).expression()}, {source.dim})"
        else:
            record, operands = SCALAR_OPS[definition.op], tuple(map(self._expression, definition.args))
            text = record.text(operands) if record.symbol else f"{self.pin(record.function)}({', '.join(operands)})"
        self.loads.append(f"{name} = {text}")
        return name

    def _node(self, node: fx.Node) -> str:
        return self.outputs.setdefault(node, f"o{len(self.outputs)}")

    def items(self, values: Iterable[object]) -> str:
        """Expressions for the values, with commas between them."""
        return ", ".join(map(self.value, values))

    def _instance(self, obj: object) -> str:
        """An object of a Python class without a built-in base other than object."""
        kind = type(obj)
        if id(obj) in self.recorder.works:
            raise WorkOutlivesGraph("the work of a collective outlives the graph", self.recorder.works[id(obj)][1])
        if not _allocated_by_object(kind):
            raise BreakGraph("rebuild", f"an object of type {kind.__module__}.{kind.__qualname__}")
        name = self.named(obj, f"object.__new__({self.pin(kind)})")
        self.attributes(obj, name)
        return name

    def attributes(self, obj: object, name: str) -> None:
        """Gives the object of that name what `obj` has in its `__dict__` and its slots."""
        for key, item in (getattr(obj, "__dict__", None) or {}).items():
            self.build.append(f"object.__setattr__({name}, {key!r}, {self.value(item)})")
        for klass in type(obj).__mro__:
            for key, member in vars(klass).items():
                if isinstance(member, types.MemberDescriptorType) and is_python_class(klass):
                    try:
                        item = member.__get__(obj)
                    except AttributeError:
                        continue
                    self.build.append(f"object.__setattr__({name}, {key!r}, {self.value(item)})")

    # -- effects ----------------------------------------------------------------------------

    def side_effects(self) -> None:
        """Writes of the program to objects of the outside world, in the order of the first write to each."""
        for known in self.externals.shadows:
            before = len(self.effects) + len(self.emptied)
            self._write_back(known)
            if len(self.effects) + len(self.emptied) > before:
                self.written.append(known)
        own = {id(leaf) for leaf in self.recorder.leaves}  # they end with the graph, with what was written to them
        for slot, value in self.overlays.writes():
            if id(slot.owner) in own:
                continue
            self._write(slot, value)
            owner = self.externals.lookup(slot.owner)
            if owner is not None:
                self.written.append(owner)

    def _write(self, slot: Slot, value: object) -> None:
        owner = self.value(slot.owner)
        if slot.kind == "cell":
            discard, target = f"del {owner}.cell_contents", f"{owner}.cell_contents = "
        elif slot.kind == "global":
            discard, target = f"{owner}.pop({slot.name!r}, None)", f"{owner}[{slot.name!r}] = "
        else:
            base = "type" if isinstance(slot.owner, type) else "object"
            if isinstance(slot.owner, (types.FunctionType, types.ModuleType, torch.Tensor)):
                known = self.externals.lookup(slot.owner)
                base = self.pin(torch.Tensor if known is None else type(known.original))
            elif isinstance(slot.owner, threading.local):
                base = self.pin(threading.local)
            discard = f"{self.pin(discard_attribute)}({base}, {owner}, {slot.name!r})" if slot.deleted else ""
            target = f"{base}.__setattr__({owner}, {slot.name!r}, "
        if value is DELETED or (slot.deleted and slot.kind != "cell"):
            self.effects.append(discard)
        if value is not DELETED:
            self.effects.append(f"{target}{self.value(value)}{')' if slot.kind in ('attribute', 'slot') else ''}")

    def _write_back(self, known: External) -> None:
        shadow, before = known.value, known.snapshot
        if isinstance(shadow, LocalIterator):
            for field, old in before.items():
                if getattr(shadow, field) is not old:
                    self.effects.append(f"{self.load(known.source)}.{field} = {self.value(getattr(shadow, field))}")
            if isinstance(shadow, MappingIterator):
                steps = shadow.consumed - before["consumed"]
                self.effects.append(f"for _ in range({steps}): next({self.load(known.source)}.inner)")
        elif isinstance(shadow, dict):
            self._write_dict(known)
        elif isinstance(shadow, (list, collections.deque)):
            base = "list" if isinstance(shadow, list) else self.pin(collections.deque)
            now = list(list.__iter__(shadow) if isinstance(shadow, list) else shadow)
            if _same_items(now, before):
                return
            target = self.load(known.source)
            kept = len(before)
            added = now[kept:]
            if len(now) < kept or not _same_items(now[:kept], before):
                added = now
                (self.effects if added else self.emptied).append(f"{base}.clear({target})")
            if added:
                self.effects.append(f"{base}.extend({target}, [{self.items(added)}])")
        elif isinstance(shadow, set):
            target = self.load(known.source)
            for method, items in (("difference_update", _not_in(shadow, before)), ("update", _not_in(before, shadow))):
                if items:
                    self.effects.append(f"set.{method}({target}, [{self.items(items)}])")

    def _write_dict(self, known: External) -> None:
        before: dict[object, object] = known.snapshot
        shadow: dict[object, object] = known.value
        now = {key: dict.__getitem__(shadow, key) for key in own_keys(shadow)}
        if _same_items(list(now), list(before)) and _same_items(list(now.values()), list(before.values())):
            return
        base = self.pin(collections.OrderedDict) if isinstance(shadow, collections.OrderedDict) else "dict"
        target = self.load(known.source)
        removed = [key for key in before if key not in now]
        kept = [key for key in before if key in now]
        if not _same_items(list(now)[: len(kept)], kept):  # another order, or True in the place of 1: written anew
            removed, before = list(before), {}
        for key in removed:
            self.effects.append(f"{base}.__delitem__({target}, {self.value(key)})")
        for key, item in now.items():
            if key not in before or before[key] is not item:
                self.effects.append(f"{base}.__setitem__({target}, {self.value(key)}, {self.value(item)})")

    def call_at_each_call(
        self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Calls a function that the code holds, for what it does."""
        arguments = [*map(self.value, args), *(f"{name}={self.value(value)}" for name, value in kwargs.items())]
        self.effects.append(f"{self.pin(function)}({', '.join(arguments)})")

    def number_rows(self) -> None:
        """Torch counts the ragged lengths of the nested tensors that the program makes: those of its results, and of
        what is left of none."""
        rows = self.recorder.jagged.numbered
        kept = [self.externals.lookup(one) is not None or self.recorder.node_of(one) in self.outputs for one in rows]
        if rows:
            given = self.items(one if keep else None for one, keep in zip(rows, kept, strict=True))
            self.build.insert(0, f"{self.pin(number_rows)}(({given},))")

    def check_conditions(self) -> None:
        """Asks whether what the graph takes for granted is so."""
        conditions = self.recorder.conditions
        if conditions.met:
            met = " and ".join(map(self.value, conditions.met.values()))
            self.checks.append(
                f"if not ({met}): raise {self.pin(ConditionNotMet)}({self.pin(tuple(conditions.places))})"
            )

    # -- the whole --------------------------------------------------------------------------

    def _statements(self) -> list[str]:
        """What is made, and the effects; behind these what is late, and whatever has to do with that.

        An effect that stores something late comes as soon as that is there, and what goes over what it changes later.
        """
        late = set(self.late)
        lines, waiting = _apart(self.build, late)
        effects, late_effects = _apart((*self.effects, *self.emptied), late)
        lines += effects
        for effect in late_effects:
            wanted = set(_NAMES.findall(effect))
            while not wanted.issuperset(parts := _parts_of(wanted, waiting)):
                wanted |= parts
            lines += [line for line in waiting if _NAMES.findall(line)[0] in wanted]
            waiting = [line for line in waiting if _NAMES.findall(line)[0] not in wanted]
            lines.append(effect)
        return lines + waiting

    def source_text(self, parameters: Sequence[str], has_graph: bool, has_effects: bool, tail: Sequence[str]) -> str:
        """The generated function.

        Args:
            has_effects: the graph may have changed something when it raises.
        """
        lines = [f"def compiled(inputs, {', '.join(parameters)}):" if parameters else "def compiled(inputs):"]
        lines += [f"    {line}" for line in self.loads]
        if has_graph:
            outputs = "".join(f"{name}, " for name in self.outputs.values())
            call = f"graph({', '.join((*self.scalars, '*inputs'))})"
            lines += ["    before = rerun.begin(inputs)"] if has_effects else []
            lines += ["    failed = []", "    try:"]
            lines.append(f"        ({outputs}) = {call}" if outputs else f"        {call}")
            lines += [f"        {check}" for check in self.checks]
            lines += ["    except BaseException as error:", "        failed.append(error)", "    if failed:"]
            given = f"({''.join(f'{parameter}, ' for parameter in parameters)})"
            lines.append(f"        return rerun(failed, {'before' if has_effects else None}, inputs, {given})")
        lines += [f"    {line}" for line in (*self._statements(), *tail)]
        return "\n".join(lines) + "\n"


_NAMES = re.compile(r"\bv\d+\b")


def _apart(statements: Iterable[str], late: set[str]) -> tuple[list[str], list[str]]:
    """The statements that have to do with nothing late, and the others; what these are about is late from then on."""
    first: list[str] = []
    behind: list[str] = []
    for line in statements:
        names = _NAMES.findall(line)
        if late.isdisjoint(names):
            first.append(line)
        else:
            behind.append(line)
            late.add(names[0])
    return first, behind


def _parts_of(names: set[str], lines: Iterable[str]) -> set[str]:
    """All that the statements about these name. What a statement is about comes first in it."""
    found = (_NAMES.findall(line) for line in lines)
    return {part for about, *parts in found if about in names for part in parts}


def _not_in(keys: set[T], others: set[T]) -> list[T]:
    """Those of the others that are no keys, or are equal to one of another type."""
    own = {key: key for key in set.__iter__(keys)}
    return [other for other in set.__iter__(others) if other not in own or type(own[other]) is not type(other)]


def _allocated_by_object(kind: type) -> bool:
    """Whether `object.__new__`, attributes and slots make an object of the class as it is."""
    return is_python_class(kind) and native_base(kind) is object


def _same_items(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(
        x is y or (type(x) in _LITERALS and type(x) is type(y) and x == y) for x, y in zip(a, b, strict=True)
    )
