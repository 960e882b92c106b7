"""Tensors of classes with a `__torch_dispatch__` that wrap others: one value of the graph each.

A fake with the wrapper's own metadata stands for it, as for any tensor, and goes with a tensor of the class around
fakes (`primtorch.wrappers`). A call runs on that, by the class's own code, and says what the result is. What operators
the class makes of it is for the back end to find out, which differentiates the call first, as autograd does.

That code runs while the graph is recorded, not at every call. Where it changes Python's state, calls break the graph.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias, TypeVar

import torch
from torch.masked import MaskedTensor

from primtorch.fake import FakeMode, FakeTensor
from primtorch.flattenings import Question, matching, source_of, unwarned
from primtorch.spec import TensorSpec
from primtorch.wrappers import (
    Applied,
    NotTakenApart,
    Relaid,
    Template,
    is_wrapper,
    lies_over_ranks,
    stand_for,
    taken_apart,
    whole_of,
)
from torchdynamo.graph.tensor_classes import own_classes, remember_class
from torchdynamo.interpreter.protocol import MISSING
from torchdynamo.reasons import BreakGraph

T = TypeVar("T")

_CONTAINERS = (list, dict, set)
_LONGEST = 10_000  # items of a container that are looked through for a change
_FIXED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, torch.Tensor)


@dataclass(frozen=True, slots=True, eq=False)
class SameContext:
    """A guard: a wrapper has the same parts, and holds the same beside them."""

    template: Template

    @property
    def __name__(self) -> str:
        return f"flattens_as_{self.template.kind.__qualname__}"

    def __call__(self, tensor: Any) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            names, context = taken_apart(tensor)
        return names == self.template.names and (context == self.template.context) is True


class Wrappers:
    """The wrappers of one graph."""

    def __init__(self, mode: FakeMode) -> None:
        self.mode = mode
        self.memories: list[object] = []  # of parts
        self.asked: list[Question] = []  # that two parts are equal, which was taken for granted

    def admit(self, tensor: torch.Tensor, template: Template, parts: Iterator[FakeTensor]) -> FakeTensor:
        """The fake of a wrapper from outside, whose parts have these fakes."""
        spec = TensorSpec.of(tensor)
        whole = self._built(template, parts)
        if tensor.requires_grad:
            whole.requires_grad_()
            if not tensor.is_leaf:
                with torch.enable_grad():
                    whole = _NonLeaf.apply(whole, template)
        fake = self.mode.computed(spec, tensor.requires_grad) if not tensor.is_leaf else self.mode.from_spec(spec)
        if tensor.is_leaf and tensor.requires_grad:
            fake.requires_grad_()
        return self._bound(fake, whole, type(tensor))

    def _built(self, template: Template, parts: Iterator[FakeTensor]) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = _quietly(template.kind, (), lambda: template.build(parts))
        if type(made) is not template.kind or tuple(made.shape) != template.size:
            raise BreakGraph(
                "tensor_subclass", f"{template.kind.__qualname__}.__tensor_unflatten__ makes another tensor"
            )
        return made

    def _bound(self, fake: FakeTensor, whole: torch.Tensor, kind: type) -> FakeTensor:
        stand_for(fake, whole)
        stand_for(whole, fake)
        remember_class(fake, kind)
        return fake

    def run(
        self, name: str, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """The result of a call on wrappers: fakes for the wrappers in it."""
        kind = next(type(whole_of(t)) for t in _fakes((args, kwargs)) if whole_of(t) is not None)
        operands = [(t, t._version) for t in map(_inside, _fakes((args, kwargs))) if not t.is_inference()]
        wholes = [whole_of(t) for t in _fakes((args, kwargs)) if whole_of(t) is not None]
        with self._asking(kind):
            result = _quietly(kind, wholes, lambda: func(*_mapped(args, _inside), **_mapped(kwargs, _inside)))
        if any(t._version != version for t, version in operands):
            raise BreakGraph("tensor_subclass", f"{name}() writes to a {kind.__qualname__}, or from one")
        return _mapped(result, self._outside)

    def _outside(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value
        known: torch.Tensor | None = whole_of(value)
        if known is not None:
            return known
        kind = type(value)
        if not is_wrapper(kind):
            raise BreakGraph("tensor_subclass", f"a {kind.__qualname__} is made")
        try:
            template = Template.of(value)
        except NotTakenApart as error:
            raise BreakGraph("tensor_subclass", str(error)) from error
        for part in template.flatten(value):
            if not isinstance(part, FakeTensor):
                raise BreakGraph(
                    "tensor_subclass", f"a {kind.__qualname__} around a tensor that the graph does not make"
                )
            self.memories.append(part.memory)
        if value.requires_grad and value.is_leaf:
            raise BreakGraph("leaf", f"a {kind.__qualname__} is made")
        return self._bound(self.mode.computed(TensorSpec.of(value), value.requires_grad), value, kind)

    def make(self, kind: type[torch.Tensor], args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
        """The program calls the class."""
        if any(t.requires_grad for t in _fakes((args, kwargs))):
            raise BreakGraph("tensor_subclass", f"a {kind.__qualname__} is made of tensors that require a gradient")
        made = _quietly(kind, (), lambda: kind(*_mapped(args, _inside), **_mapped(kwargs, _inside)))
        return self._outside(made)

    def apply(self, call: Applied, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a function of wrappers gives that is no operator."""
        wholes = [whole for tensor in tensors if (whole := whole_of(tensor)) is not None]
        kind = type(wholes[0]) if wholes else MaskedTensor
        try:
            with self._asking(kind):
                return self._outside(_quietly(kind, wholes, lambda: call(*map(_inside, tensors))))
        except NotTakenApart as error:
            raise BreakGraph("tensor_subclass", str(error)) from error

    @contextlib.contextmanager
    def _asking(self, kind: type) -> Iterator[None]:
        """A block in which a class's code runs. What it asks of pairs of tensors is noted."""
        with matching(kind) as asked:
            yield
        self.asked += asked

    def relaid(self, call: Relaid, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in another layout."""
        return self._outside(call(_inside(tensor)))

    def part(self, fake: torch.Tensor, name: str) -> torch.Tensor | None:
        """The tensor that a wrapper has under this name, or None where it is none of its parts."""
        whole = whole_of(fake)
        if whole is None or name not in taken_apart(whole)[0]:
            return None
        if not isinstance(getattr(whole, name), torch.Tensor):
            return None
        return self._outside(getattr(whole, name))

    def named(self, operands: object, part: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """The wrapper among the operands that has this value as one of its parts, and the part's name."""
        for fake in _fakes(operands):
            whole = whole_of(fake)
            for name in () if whole is None else taken_apart(whole)[0]:
                if source_of(getattr(whole, name)) is source_of(part):
                    return fake, name
        return None

    def of_ranks(self, args: object, kwargs: object) -> bool:
        """Whether a call is of a DTensor."""
        wholes = (whole_of(tensor) for tensor in _fakes((args, kwargs)))
        return any(whole is not None and lies_over_ranks(type(whole)) for whole in wholes)

    def are_in(self, args: object, kwargs: object) -> bool:
        """Whether tensors that wrap others are among the arguments."""
        return any(whole_of(tensor) is not None for tensor in _fakes((args, kwargs)))


class _NonLeaf(torch.autograd.Function):
    """A wrapper with a history, which is never run."""

    @staticmethod
    def forward(ctx: object, leaf: torch.Tensor, template: Template) -> torch.Tensor:
        made: torch.Tensor = template.build(iter(list(template.flatten(leaf))))
        return made

    @staticmethod
    def backward(ctx: object, *gradients: object) -> tuple[object, None]:
        return gradients[0], None


def _inside(fake: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor | None = whole_of(fake)
    return fake if whole is None else whole


def _fakes(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _fakes(item)
    elif isinstance(value, dict):
        yield from _fakes(tuple(value.values()))


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(type(value), "n_sequence_fields"):
        return type(value)(tuple(_mapped(item, change) for item in value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


# -- what a class's code reads of Python's state -------------------------------------------------


def names_in(code: types.CodeType) -> Iterator[str]:
    """Names that code reads or writes otherwise than in its own frame."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def called_by(kind: type) -> list[types.FunctionType]:
    """The methods of the program's classes, and the functions in their modules that they name."""
    found: dict[types.FunctionType, None] = {}
    methods = (method for klass in own_classes(kind) for method in vars(klass).values())
    todo: list[object] = [getattr(method, "__func__", method) for method in methods]
    while todo:
        function = todo.pop()
        if isinstance(function, types.FunctionType) and function not in found:
            found[function] = None
            namespace = function.__globals__
            named = (namespace.get(name) for name in names_in(function.__code__))
            todo += [value for value in named if getattr(value, "__globals__", None) is namespace]
    return list(found)


# -- what a class's code does to Python's state --------------------------------------------------

_noisy: weakref.WeakSet[type] = weakref.WeakSet()  # classes whose code has changed something


def _quietly(kind: type, wholes: Sequence[object], run: Callable[[], T]) -> T:
    """Runs code of a class, which is to change nothing but tensors: what it has changed is put back, and the graph
    breaks, so that the code runs at every call."""
    if kind in _noisy:
        raise BreakGraph("tensor_subclass", f"the code of {kind.__qualname__} changes Python's state")
    before, out, errors = _State(kind, wholes), _Stream(sys.stdout), _Stream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), unwarned(kind):
        try:
            return run()
        finally:
            changed = before.put_back()
            if changed or out.heard or errors.heard:
                _noisy.add(kind)
                what = f"changes {', '.join(sorted(changed))}" if changed else "writes text"
                raise BreakGraph("tensor_subclass", f"the code of {kind.__qualname__} {what}")


class _Stream(io.TextIOBase):
    """In the place of a standard stream: this thread's text is kept from it, others' goes on."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.thread = threading.get_ident()
        self.heard = False

    def write(self, text: str) -> int:
        if threading.get_ident() != self.thread:
            return self.stream.write(text) if self.stream is not None else 0
        self.heard = True
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()


_Owner: TypeAlias = type | dict[str, object] | types.CellType


class _State:
    """What the code of a class may change without being told so: attributes of the class and of its tensors, what its
    methods and the functions that they call name in their modules, and what their closures hold; containers and objects
    among these by what is in them."""

    def __init__(self, kind: type, wholes: Sequence[object]) -> None:
        self.tables: list[tuple[str, _Owner, dict[str, object]]] = []
        self.held: dict[int, tuple[str, Any, Any]] = {}  # containers: the name, the container, a copy of it
        for whole in wholes:
            self.held[id(whole)] = (kind.__qualname__, vars(whole), dict(vars(whole)))
        for klass in own_classes(kind):
            self._table(klass.__qualname__, klass, dict(vars(klass)))
        for function in called_by(kind):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                if name != "__class__" and cell != types.CellType():
                    self._table(name, cell, {"cell_contents": cell.cell_contents})
            namespace = function.__globals__
            named = names_in(function.__code__)
            self._table("the module", namespace, {name: namespace.get(name, MISSING) for name in named})

    def _table(self, label: str, owner: _Owner, values: dict[str, Any]) -> None:
        self.tables.append((label, owner, values))
        for name, value in values.items():
            if type(value) in _CONTAINERS and len(value) <= _LONGEST and not name.startswith("__"):
                self.held[id(value)] = (name, value, value.copy())
            elif not isinstance(value, _FIXED) and type(getattr(value, "__dict__", None)) is dict:
                self.held[id(value)] = (name, vars(value), dict(vars(value)))

    def put_back(self) -> set[str]:
        changed: set[str] = set()
        for label, owner, values in self.tables:
            now: dict[str, object]
            if isinstance(owner, type):
                now = dict(vars(owner))
            elif isinstance(owner, dict):
                now = {name: owner.get(name, MISSING) for name in values}
            else:
                now = {"cell_contents": owner.cell_contents}
            for name in [name for name in {**values, **now} if now.get(name, self) is not values.get(name, self)]:
                if name.startswith("__") and name != "__dict__":
                    continue  # of the interpreter's own
                changed.add(name if name != "cell_contents" else label)
                if isinstance(owner, dict) and values[name] is MISSING:
                    del owner[name]
                elif isinstance(owner, dict):
                    owner[name] = values[name]
                elif name in values:
                    setattr(owner, name, values[name])
                else:
                    delattr(owner, name)
        for name, value, copied in self.held.values():
            if len(value) != len(copied) or not _same_items(value, copied):
                changed.add(name)
                value.clear()
                value.extend(copied) if isinstance(value, list) else value.update(copied)
        return changed


def _same_items(value: Any, copied: Any) -> bool:
    if isinstance(value, set):
        return bool(value == copied)
    if isinstance(value, list):
        return all(map(_is, value, copied))
    return value.keys() == copied.keys() and all(value[key] is copied[key] for key in copied)


def _is(a: object, b: object) -> bool:
    return a is b
