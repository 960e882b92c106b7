"""C functions and classes that call back into Python, in a form that calls back through the world.

A rule has the signature `(world, args, kwargs)`. What is not in the table is a leaf: it runs natively.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from torchdynamo.interpreter import attributes
from torchdynamo.interpreter.attributes import is_python, python_method
from torchdynamo.interpreter.iterators import (
    CallableIterator,
    EnumerateIterator,
    FilterIterator,
    InterpretedNext,
    MapIterator,
    ReversedIterator,
    Trampoline,
    ZipIterator,
    native_type,
)
from torchdynamo.interpreter.protocol import MISSING, InterpreterObject, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
BuiltinRule = Callable[[World, Args, Kwargs], Any]

_HEAP_TYPE = 1 << 9
BUILTINS: dict[Any, BuiltinRule] = {}


def interprets(*targets: Any) -> Callable[[BuiltinRule], BuiltinRule]:
    def register(rule: BuiltinRule) -> BuiltinRule:
        BUILTINS.update(dict.fromkeys(targets, rule))
        return rule

    return register


# -- what C code is given in place of the program's objects ----------------------------------


def native_iterator(world: World, obj: Any) -> Any:
    """An iterator over `obj` that C code may consume: Python code behind it is interpreted."""
    iterator = world.iterate(obj)
    if isinstance(iterator, InterpreterObject) or not type(iterator).__flags__ & _HEAP_TYPE:
        return iterator
    return InterpretedNext(world, iterator)


def consumable(world: World, obj: Any) -> Any:
    """`obj` itself when C code iterates it without running Python, else an iterator."""
    kind = type(obj)
    if not kind.__flags__ & _HEAP_TYPE or isinstance(obj, InterpreterObject):
        return obj
    names = ("__iter__", "__next__") if hasattr(kind, "__iter__") else ("__getitem__",)
    runs_python = any(python_method(kind, name) is not None for name in names)
    return native_iterator(world, obj) if runs_python else obj


def callback(world: World, fn: Any) -> Any:
    """`fn` itself when C code may call it directly, else a callable that interprets it."""
    if fn is None or type(fn) is types.BuiltinFunctionType or isinstance(fn, Trampoline):
        return fn
    return Trampoline(world, fn)


# -- iteration -------------------------------------------------------------------------------


@interprets(map)
def call_map(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) < 2 or kwargs:
        return map(*args, **kwargs)
    return MapIterator(world, args[0], tuple(world.iterate(arg) for arg in args[1:]))


@interprets(filter)
def call_filter(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return filter(*args, **kwargs)
    return FilterIterator(world, args[0], world.iterate(args[1]))


@interprets(zip)
def call_zip(world: World, args: Args, kwargs: Kwargs) -> Any:
    if kwargs.keys() - {"strict"}:
        return zip(*args, **kwargs)  # noqa: B905 - raises
    iterators = [world.iterate(arg) for arg in args]
    return ZipIterator(world, tuple(iterators), world.truth(kwargs.get("strict", False)))


@interprets(enumerate)
def call_enumerate(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not 1 <= len(args) <= 2 or kwargs.keys() - {"start"} or (len(args) == 2 and kwargs):
        return enumerate(*args, **kwargs)
    start = args[1] if len(args) == 2 else kwargs.get("start", 0)
    return EnumerateIterator(world, world.iterate(args[0]), operator.index(start))


@interprets(reversed)
def call_reversed(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1 or kwargs:
        return reversed(*args, **kwargs)
    obj = args[0]
    method = python_method(type(obj), "__reversed__")
    if method is not None:
        return world.call(method, (obj,), {})
    if type(obj) in (list, tuple, range, str):
        return ReversedIterator(world, obj, len(obj), type(reversed(obj)))
    if python_method(type(obj), "__getitem__") is not None:
        return ReversedIterator(world, obj, world.call(len, (obj,), {}))
    return world.call_leaf(reversed, args, kwargs)


@interprets(iter)
def call_iter(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs:
        return world.iterate(args[0])
    if len(args) == 2 and not kwargs and callable(args[0]):
        return CallableIterator(world, *args)
    return iter(*args, **kwargs)


@interprets(next)
def call_next(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not 1 <= len(args) <= 2 or kwargs:
        return next(*args, **kwargs)
    if not hasattr(type(args[0]), "__next__"):
        raise TypeError(f"'{type(args[0]).__name__}' object is not an iterator")
    try:
        return world.advance(args[0])
    except StopIteration:
        if len(args) == 2:
            return args[1]
        raise


def _consumer(target: Any) -> BuiltinRule:
    """For a C function whose first argument is iterated."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        if args:
            args = (consumable(world, args[0]), *args[1:])
        return world.call_leaf(target, args, kwargs)

    return rule


for _target in (list, tuple, set, frozenset):
    BUILTINS[_target] = _consumer(_target)


def _method_consumer(method: Any) -> BuiltinRule:
    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        return world.call_leaf(method, (*args[:1], *(consumable(world, arg) for arg in args[1:])), kwargs)

    return rule


_CONSUMING_METHODS: tuple[Any, ...] = (
    list.extend, list.__init__, set.update, set.__init__, str.join, bytes.join, set.union, set.intersection,
    set.difference, set.intersection_update, set.difference_update,
)  # fmt: skip
for _method in _CONSUMING_METHODS:
    BUILTINS[_method] = _method_consumer(_method)


@interprets(dict)
def call_dict(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.call_leaf(dict, tuple(_mapping_source(world, arg) for arg in args), kwargs)


@interprets(dict.update)
def call_dict_update(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.call_leaf(dict.update, (*args[:1], *(_mapping_source(world, a) for a in args[1:])), kwargs)


@interprets(dict.__init__)
def call_dict_init(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.call_leaf(dict.__init__, (*args[:1], *(_mapping_source(world, a) for a in args[1:])), kwargs)


def _mapping_source(world: World, obj: Any) -> Any:
    """What `dict` reads: a mapping with Python methods becomes a dict, other iterables an iterator."""
    kind = type(obj)
    if not kind.__flags__ & _HEAP_TYPE or isinstance(obj, InterpreterObject):
        return obj
    if not hasattr(kind, "keys"):
        return consumable(world, obj)
    if python_method(kind, "keys") is None and python_method(kind, "__getitem__") is None:
        return obj
    if isinstance(obj, dict) and python_method(kind, "__iter__") is None:
        return obj
    keys = native_iterator(world, world.call(world.getattr(obj, "keys"), (), {}))
    return {key: world.getitem(obj, key) for key in keys}


@interprets(sum)
def call_sum(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not 1 <= len(args) <= 2 or kwargs.keys() - {"start"} or (len(args) == 2 and kwargs):
        return sum(*args, **kwargs)
    total = args[1] if len(args) == 2 else kwargs.get("start", 0)
    values = list(native_iterator(world, args[0]))
    if isinstance(total, (str, bytes, bytearray)) or all(type(v) in (int, float, bool) for v in (total, *values)):
        return sum(values, total)  # C adds floats with compensation since 3.12
    for value in values:
        total = world.binary("+", total, value)
    return total


@interprets(any)
def call_any(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1 or kwargs:
        return any(*args, **kwargs)
    return any(world.truth(value) for value in native_iterator(world, args[0]))


@interprets(all)
def call_all(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1 or kwargs:
        return all(*args, **kwargs)
    return all(world.truth(value) for value in native_iterator(world, args[0]))


def _extremum(native: Any, op: str) -> BuiltinRule:
    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        if not args or kwargs.keys() - {"key", "default"} or (len(args) > 1 and "default" in kwargs):
            return native(*args, **kwargs)
        key = kwargs.get("key")
        values = args if len(args) > 1 else list(native_iterator(world, args[0]))
        if not values:
            return native(values, **kwargs)
        best, best_key = MISSING, None
        for value in values:
            value_key = value if key is None else world.call(key, (value,), {})
            if best is MISSING or world.truth(world.compare(op, value_key, best_key)):
                best, best_key = value, value_key
        return best

    return rule


BUILTINS[max] = _extremum(max, ">")
BUILTINS[min] = _extremum(min, "<")


class SortItem(InterpreterObject):
    """A value under comparison by C code; `<` is asked of the world."""

    __slots__ = ("value", "world")

    def __init__(self, world: World, value: Any) -> None:
        self.world, self.value = world, value

    def __lt__(self, other: SortItem) -> bool:
        return self.world.truth(self.world.compare("<", self.value, other.value))


def _sort_key(world: World, key: Any, values: list[Any]) -> Any:
    """The `key` for the native sort: None when it needs none."""
    if key is None:
        if any(type(value).__flags__ & _HEAP_TYPE and is_python(type(value).__lt__) for value in values):
            return lambda value: SortItem(world, value)
        return None

    def native_key(value: Any) -> Any:
        result = world.call(key, (value,), {})
        return SortItem(world, result) if is_python(type(result).__lt__) else result

    return native_key


@interprets(sorted)
def call_sorted(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1 or kwargs.keys() - {"key", "reverse"}:
        return sorted(*args, **kwargs)
    values = list(native_iterator(world, args[0]))
    values.sort(key=_sort_key(world, kwargs.get("key"), values), reverse=kwargs.get("reverse", False))
    return values


@interprets(list.sort)
def call_list_sort(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 1 or kwargs.keys() - {"key", "reverse"} or not isinstance(args[0], list):
        return list.sort(*args, **kwargs)
    key = _sort_key(world, kwargs.get("key"), args[0])
    return world.call_leaf(list.sort, args, {**kwargs, "key": key})


@interprets(functools.reduce)
def call_reduce(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not 2 <= len(args) <= 3 or kwargs:
        return functools.reduce(*args, **kwargs)
    iterator = native_iterator(world, args[1])
    if len(args) == 3:
        total = args[2]
    else:
        total = next(iterator, MISSING)
        if total is MISSING:
            raise TypeError("reduce() of empty iterable with no initial value")
    for value in iterator:
        total = world.call(args[0], (total, value), {})
    return total


def itertools_call(world: World, cls: type, args: Args, kwargs: Kwargs) -> Any:
    """An itertools object over what the world iterates; functions among the arguments are interpreted."""
    if cls in (itertools.repeat, itertools.count):
        return world.call_leaf(cls, args, kwargs)

    def convert(value: Any) -> Any:
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
            return callback(world, value)
        return consumable(world, value)

    return world.call_leaf(cls, tuple(map(convert, args)), {name: convert(value) for name, value in kwargs.items()})


# -- attributes ------------------------------------------------------------------------------


@interprets(getattr)
def call_getattr(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not 2 <= len(args) <= 3 or kwargs or not isinstance(args[1], str):
        return getattr(*args, **kwargs)
    if len(args) == 2:
        return world.getattr(args[0], args[1])
    try:
        return world.getattr(args[0], args[1])
    except AttributeError:
        world.interpreter.propagating = None
        return args[2]


@interprets(hasattr)
def call_hasattr(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs or not isinstance(args[1], str):
        return hasattr(*args, **kwargs)
    try:
        world.getattr(args[0], args[1])
    except AttributeError:
        world.interpreter.propagating = None
        return False
    return True


@interprets(setattr)
def call_setattr(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or kwargs or not isinstance(args[1], str):
        return setattr(*args, **kwargs)
    return world.setattr(*args)


@interprets(delattr)
def call_delattr(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs or not isinstance(args[1], str):
        return delattr(*args, **kwargs)
    return world.delattr(*args)


@interprets(object.__getattribute__)
def call_object_getattribute(world: World, args: Args, kwargs: Kwargs) -> Any:
    obj, name = args
    if isinstance(obj, (type, InterpreterObject)) or not type(obj).__flags__ & _HEAP_TYPE:
        return world.call_leaf(object.__getattribute__, args, kwargs)
    value = attributes.instance_attribute(world, obj, name)
    if value is MISSING:
        raise attributes.missing_attribute(obj, name)
    return value


@interprets(type.__getattribute__)
def call_type_getattribute(world: World, args: Args, kwargs: Kwargs) -> Any:
    value = attributes.type_attribute(world, *args)
    if value is MISSING:
        raise attributes.missing_attribute(*args)
    return value


@interprets(object.__setattr__)
def call_object_setattr(world: World, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], type) or not type(args[0]).__flags__ & _HEAP_TYPE:
        return world.call_leaf(object.__setattr__, args, kwargs)
    return attributes.store_instance_attribute(world, *args)


@interprets(object.__delattr__)
def call_object_delattr(world: World, args: Args, kwargs: Kwargs) -> Any:
    return attributes.delete_instance_attribute(world, *args)


@interprets(super)
def call_super(world: World, args: Args, kwargs: Kwargs) -> Any:
    if args or kwargs:
        return super(*args, **kwargs)
    frame = world.interpreter.frames[-1]
    code = frame.function.__code__
    if not code.co_argcount:
        raise RuntimeError("super(): no arguments")
    first = frame.fast[0]
    if isinstance(first, types.CellType):
        first = world.load_cell(first)
    if "__class__" not in code.co_freevars:
        raise RuntimeError("super(): __class__ cell not found")
    cell = frame.fast[frame.decoded.local_names.index("__class__", len(frame.fast) - len(code.co_freevars))]
    cls = world.load_cell(cell)
    if cls is MISSING:
        raise RuntimeError("super(): empty __class__ cell")
    return super(cls, first)


# -- types -----------------------------------------------------------------------------------


@interprets(type)
def call_type(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs:
        return native_type(args[0])
    return world.call_leaf(type, args, kwargs)


@interprets(type.__call__)
def call_type_call(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.interpreter.instantiate(args[0], args[1:], kwargs)  # type: ignore[attr-defined]


@interprets(isinstance)
def call_isinstance(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return isinstance(*args, **kwargs)
    obj, classes = args
    if type(classes) is tuple:
        return any(call_isinstance(world, (obj, cls), {}) for cls in classes)
    if isinstance(obj, InterpreterObject) and obj.native is not object:
        return issubclass(obj.native, classes)
    if type(classes) is type or type(obj) is classes:
        return isinstance(obj, classes)
    check = python_method(type(classes), "__instancecheck__")
    if check is None or check.__module__ in ("abc", "typing"):
        return world.call_leaf(isinstance, args, {})
    return world.truth(world.call(check, (classes, obj), {}))


@interprets(issubclass)
def call_issubclass(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return issubclass(*args, **kwargs)
    cls, classes = args
    if type(classes) is tuple:
        return any(call_issubclass(world, (cls, one), {}) for one in classes)
    check = python_method(type(classes), "__subclasscheck__")
    if check is None or check.__module__ in ("abc", "typing"):
        return world.call_leaf(issubclass, args, {})
    return world.truth(world.call(check, (classes, cls), {}))


@interprets(callable)
def call_callable(world: World, args: Args, kwargs: Kwargs) -> Any:
    return callable(*args, **kwargs)


@interprets(builtins.__build_class__)
def call_build_class(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.build_class(args[0], args[1], args[2:], kwargs)


# -- conversions: a C function that asks one special method ----------------------------------


def _asks(native: Any, *names: str) -> BuiltinRule:
    """For `native(obj)`: the first of the methods `names` that is Python code is interpreted.

    The native function then gets an object that answers with the result, so that it checks and converts
    the result itself.
    """

    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        if args and type(args[0]).__flags__ & _HEAP_TYPE and not isinstance(args[0], InterpreterObject):
            cls = type(args[0])
            for name in names:
                if not hasattr(cls, name):
                    continue
                method = python_method(cls, name)
                if method is None:
                    break
                answer = world.call(method, (args[0], *args[1:]), kwargs)
                return native(_answering(cls.__name__, name, answer))
        return world.call_leaf(native, args, kwargs)

    return rule


def _answering(class_name: str, method: str, answer: Any) -> Any:
    """An object whose special method returns `answer`; the class's name is in the messages of the checks."""
    return type(class_name, (), {method: lambda _self, *_args: answer})()


for _native, _names in (
    (len, ("__len__",)),
    (hash, ("__hash__",)),
    (int, ("__int__", "__index__", "__trunc__")),
    (float, ("__float__", "__index__")),
    (complex, ("__complex__", "__float__", "__index__")),
    (repr, ("__repr__",)),
    (str, ("__str__", "__repr__")),
    (bytes, ("__bytes__",)),
    (operator.index, ("__index__",)),
    (operator.length_hint, ("__len__",)),
):
    BUILTINS[_native] = _asks(_native, *_names)


def _delegates(native: Any, name: str) -> BuiltinRule:
    """For `native(obj, ...)` that returns whatever the special method returns."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        if args and type(args[0]).__flags__ & _HEAP_TYPE:
            method = python_method(type(args[0]), name)
            if method is not None:
                return world.call(method, args, kwargs)
        return world.call_leaf(native, args, kwargs)

    return rule


def _rounded(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not args or kwargs.keys() - {"ndigits"}:
        return round(*args, **kwargs)
    given = (*args, *kwargs.values())
    if len(given) == 2 and given[1] is None:
        given = given[:1]
    return _delegates(round, "__round__")(world, given, {})


BUILTINS[abs] = _delegates(abs, "__abs__")
BUILTINS[round] = _rounded


@interprets(bool)
def call_bool(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.truth(args[0]) if len(args) == 1 and not kwargs else bool(*args, **kwargs)


@interprets(format)
def call_format(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not 1 <= len(args) <= 2 or kwargs:
        return format(*args, **kwargs)
    return world.format_value(args[0], args[1] if len(args) == 2 else "")


@interprets(divmod)
def call_divmod(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return divmod(*args, **kwargs)
    return world.binary("divmod", args[0], args[1])


@interprets(pow)
def call_pow(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return world.call_leaf(pow, args, kwargs)
    return world.binary("**", args[0], args[1])


class FormatArgument(InterpreterObject):
    """An argument of `str.format` whose formatting is asked of the world."""

    __slots__ = ("value", "world")

    def __init__(self, world: World, value: Any) -> None:
        self.world, self.value = world, value

    def __format__(self, spec: str) -> str:
        return self.world.format_value(self.value, spec)

    def __str__(self) -> str:
        return self.world.convert(self.value, "str")

    def __repr__(self) -> str:
        return self.world.convert(self.value, "repr")

    def __getattr__(self, name: str) -> Any:
        return _format_argument(self.world, self.world.getattr(self.value, name))

    def __getitem__(self, key: Any) -> Any:
        return _format_argument(self.world, self.world.getitem(self.value, key))


def _format_argument(world: World, value: Any) -> Any:
    return FormatArgument(world, value) if type(value).__flags__ & _HEAP_TYPE else value


@interprets(str.format)
def call_str_format(world: World, args: Args, kwargs: Kwargs) -> Any:
    values = tuple(_format_argument(world, value) for value in args[1:])
    return world.call_leaf(str.format, (*args[:1], *values), {k: _format_argument(world, v) for k, v in kwargs.items()})


# -- the operator module: the same operations under names --------------------------------------

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@",
    "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_INPLACE = {
    "iadd": "+", "isub": "-", "imul": "*", "itruediv": "/", "ifloordiv": "//", "imod": "%", "ipow": "**",
    "imatmul": "@", "iand": "&", "ior": "|", "ixor": "^", "ilshift": "<<", "irshift": ">>",
}  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {"neg": "-", "pos": "+", "invert": "~"}


def _operation(native: Any, method: str, symbol: str | None, count: int) -> BuiltinRule:
    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        if len(args) != count or kwargs:
            return native(*args, **kwargs)
        return getattr(world, method)(*(() if symbol is None else (symbol,)), *args)

    return rule


for _family, _method_name, _count in ((_OPERATORS, "binary", 2), (_INPLACE, "inplace", 2), (_COMPARISONS, "compare", 2),
                                      (_UNARY, "unary", 1)):  # fmt: skip
    for _name, _symbol in _family.items():
        BUILTINS[getattr(operator, _name)] = _operation(getattr(operator, _name), _method_name, _symbol, _count)
for _name, _method_name, _count in (
    ("truth", "truth", 1), ("contains", "contains", 2), ("getitem", "getitem", 2), ("setitem", "setitem", 3),
    ("delitem", "delitem", 2),
):  # fmt: skip
    BUILTINS[getattr(operator, _name)] = _operation(getattr(operator, _name), _method_name, None, _count)


@interprets(operator.not_)
def call_not(world: World, args: Args, kwargs: Kwargs) -> Any:
    return not world.truth(args[0]) if len(args) == 1 and not kwargs else operator.not_(*args, **kwargs)


# -- what asks about the running frame ---------------------------------------------------------


@interprets(globals)
def call_globals(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.interpreter.frames[-1].function.__globals__ if not (args or kwargs) else globals(*args, **kwargs)


@interprets(locals)
def call_locals(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.interpreter.frames[-1].local_values() if not (args or kwargs) else locals(*args, **kwargs)


@interprets(vars)
def call_vars(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not args and not kwargs:
        return world.interpreter.frames[-1].local_values()
    if len(args) == 1 and not kwargs:
        found = call_getattr(world, (args[0], "__dict__", MISSING), {})
        if found is MISSING:
            raise TypeError("vars() argument must have __dict__ attribute")
        return found
    return vars(*args, **kwargs)


@interprets(dir)
def call_dir(world: World, args: Args, kwargs: Kwargs) -> Any:
    if not args and not kwargs:
        return sorted(world.interpreter.frames[-1].local_values())
    if len(args) == 1 and python_method(type(args[0]), "__dir__") is not None:
        return world.call(sorted, (world.call(type(args[0]).__dir__, args, {}),), {})
    return world.call_leaf(dir, args, kwargs)


@interprets(sys.exc_info)
def call_exc_info(world: World, args: Args, kwargs: Kwargs) -> Any:
    error = world.interpreter.handled_exception()
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


@interprets(sys.exception)
def call_exception(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.interpreter.handled_exception()


def _in_frame(native: Any) -> BuiltinRule:
    """`eval` and `exec` compile text and run it natively, in the namespaces of the interpreted frame."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> Any:
        if len(args) == 1 and not kwargs:
            frame = world.interpreter.frames[-1]
            args = (args[0], frame.function.__globals__, frame.local_values())
        return world.call_leaf(native, args, kwargs)

    return rule


BUILTINS[eval] = _in_frame(eval)
BUILTINS[exec] = _in_frame(exec)


class FrameView(InterpreterObject):
    """What `sys._getframe` returns for an interpreted frame."""

    __slots__ = ("_frame", "_place", "_world")
    native = types.FrameType

    def __init__(self, world: World, place: int) -> None:
        self._world, self._place, self._frame = world, place, world.interpreter.frames[place]

    @property
    def f_back(self) -> FrameView | None:
        return FrameView(self._world, self._place - 1) if self._place else None

    @property
    def f_globals(self) -> dict[str, Any]:
        return self._frame.function.__globals__  # type: ignore[no-any-return]

    @property
    def f_locals(self) -> dict[str, Any]:
        return self._frame.local_values()  # type: ignore[no-any-return]

    @property
    def f_code(self) -> types.CodeType:
        return self._frame.function.__code__  # type: ignore[no-any-return]

    @property
    def f_lineno(self) -> int:
        return self._frame.position.line  # type: ignore[no-any-return]


def _frame_at(world: World, args: Args) -> FrameView:
    depth = max(args[0], 0) if args else 0
    place = len(world.interpreter.frames) - 1 - depth
    if place < 0:
        world.unsupported("c_function", "sys._getframe reads frames outside of the interpreted program")
    return FrameView(world, place)


@interprets(sys._getframe)
def call_getframe(world: World, args: Args, kwargs: Kwargs) -> Any:
    return sys._getframe(*args, **kwargs) if kwargs or len(args) > 1 else _frame_at(world, args)


@interprets(getattr(sys, "_getframemodulename", None))
def call_getframemodulename(world: World, args: Args, kwargs: Kwargs) -> Any:
    """Since Python 3.12."""
    return _frame_at(world, (*args, *kwargs.values()))._frame.function.__module__
