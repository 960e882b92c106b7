"""What kind of class a type is: one of Python, or one of C, whose objects hold what Python does not see.

That a type lies on the heap (`Py_TPFLAGS_HEAPTYPE`) says neither: each version of CPython makes more of its own C types
so, `functools.partial` in 3.11, `io.StringIO`, `deque` and those of itertools in 3.12. The flags, and the class's own
`__new__`, tell them apart.
"""

from __future__ import annotations

import types

_NO_INSTANCES = 1 << 7  # Py_TPFLAGS_DISALLOW_INSTANTIATION: of C types alone
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: of C types alone
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_CLASS_DICT = type.__dict__["__dict__"].__get__


def may_change(kind: type) -> bool:
    """Whether a program may assign the class's attributes: only then may a method of its own be Python code."""
    return kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP


def field_in_c(descriptor: object, cls: type) -> str | None:
    """The name of a data descriptor in C, of a class or one of its bases: guards read what it gives as an attribute.
    None for what is no such descriptor."""
    kind = type(descriptor)
    if not hasattr(kind, "__set__") or kind is property or is_python_class(kind):
        return None
    own = getattr(descriptor, "__name__", None)  # fields of `ctypes` say none
    return own or next((name for base in cls.__mro__ for name in vars(base) if vars(base)[name] is descriptor), None)


def is_python_class(kind: type) -> bool:
    """Whether the class adds nothing to its bases but what a class statement can: attributes, methods and slots.

    A C type that only adds methods, like `typing.Generic`, is as good. One that allocates its objects itself is not.
    """
    if kind.__flags__ & (_HEAP | _IMMUTABLE | _NO_INSTANCES) != _HEAP:
        return False
    new = _CLASS_DICT(kind).get("__new__")
    return type(new) is not types.BuiltinFunctionType or new.__self__ is not kind


def native_base(kind: type) -> type:
    """The C type that allocates the objects of a class, and knows what they hold: `object` for plain ones."""
    while is_python_class(kind):
        assert kind.__base__ is not None  # only object has none
        kind = kind.__base__
    return kind
