"""User classes in captured programs: attributes, descriptors, methods, inheritance, metaclasses."""

from __future__ import annotations

import abc
import functools
import typing
from typing import Any, Protocol

import pytest
import torch
from world_cases import Case, case, cases_of, check

import torchdynamo

# -- attributes --------------------------------------------------------------------------------


class Counter:
    kind = "counter"
    made = 0

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.log: list[Any] = []
        type(self).made += 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.log.append(self.count)
        return x + self.count

    @property
    def double(self) -> int:
        return self.count * 2

    @double.setter
    def double(self, value: int) -> None:
        self.count = value // 2

    @double.deleter
    def double(self) -> None:
        self.count = 0

    @classmethod
    def build(cls, start: int) -> Counter:
        return cls(start)

    @staticmethod
    def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by


@case(Counter)
def attribute_counter(x: torch.Tensor, c: Counter) -> Any:
    y = c.step(x)
    return y, c.count, c.kind, c.log[-1]


@case(Counter)
def property_of_a_given_object(x: torch.Tensor, c: Counter) -> Any:
    c.double = 8
    y = x * c.double
    c.double += 2
    before = c.double
    del c.double
    return y, before, c.double


@case()
def property_of_a_new_object(x: torch.Tensor, _: Any) -> Any:
    c = Counter(3)
    c.double = 10
    out = c.step(x) * c.double
    del c.double
    return out, c


@case()
def class_and_static_methods(x: torch.Tensor, _: Any) -> Any:
    c = Counter.build(2)
    d = c.build(5)
    return Counter.scale(x, 2.0) + c.scale(x, 3.0) + d.count, type(d).__name__


class Dynamic:
    def __init__(self) -> None:
        self.values = {"a": 1.0, "b": 2.0}
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            self.__dict__["asked"].append(name)
            return values[name]
        raise AttributeError(f"no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("set_"):
            self.values[name[4:]] = value
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        del self.values[name]


@case(Dynamic)
def getattr_hook(x: torch.Tensor, d: Dynamic) -> Any:
    y = x * d.a + d.b
    return y, getattr(d, "c", 7), hasattr(d, "b"), hasattr(d, "z")


@case(Dynamic)
def setattr_hook(x: torch.Tensor, d: Dynamic) -> Any:
    d.set_c = 4.0
    d.plain = 5.0
    y = x * d.c * d.plain
    del d.c
    return y, hasattr(d, "c")


@case()
def hooks_of_a_new_object(x: torch.Tensor, _: Any) -> Any:
    d = Dynamic()
    d.set_q = 3.0
    try:
        d.missing  # noqa: B018
    except AttributeError as error:
        return x * d.q, str(error), d.asked
    return x


class Everything:
    """All reads of attributes pass one method."""

    def __init__(self) -> None:
        object.__setattr__(self, "reads", [])
        self.value = 3.0

    def __getattribute__(self, name: str) -> Any:
        if name != "reads" and not name.startswith("__"):
            object.__getattribute__(self, "reads").append(name)
        return object.__getattribute__(self, name)


@case(Everything)
def getattribute_hook(x: torch.Tensor, e: Everything) -> Any:
    return x * e.value + e.value, list(e.reads)


class Typed:
    """A data descriptor that checks and counts."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else getattr(obj, self.name, 1.5)

    def __set__(self, obj: Any, value: Any) -> None:
        if value < 0:
            raise ValueError(f"{self.name} is negative")
        setattr(obj, self.name, value)

    def __delete__(self, obj: Any) -> None:
        delattr(obj, self.name)


class Lazy:
    """A non-data descriptor: the instance's own value wins."""

    def __init__(self, compute: Any) -> None:
        self.compute = compute

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        value = obj.__dict__[self.compute.__name__] = self.compute(obj)
        return value


class Described:
    width = Typed()

    @Lazy
    def area(self) -> float:
        return self.width**2


@case(Described)
def descriptors_of_a_given_object(x: torch.Tensor, d: Described) -> Any:
    y = x * d.width
    d.width = d.width + 1.0
    z = y + d.area
    try:
        d.width = -1.0
    except ValueError as error:
        return z, str(error), d.area, d.width
    return z


@case()
def descriptors_of_a_new_object(x: torch.Tensor, _: Any) -> Any:
    d = Described()
    first = d.width
    d.width = 4.0
    area = d.area
    del d.width
    return x * first + area, d.width, type(Described.width).__name__


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class SlottedChild(Slotted):
    __slots__ = ("c",)


@case(lambda: SlottedChild(2.0))
def slots_of_a_given_object(x: torch.Tensor, s: SlottedChild) -> Any:
    s.c = s.a + 1.0
    has = hasattr(s, "b")
    s.b = x.sum()
    out = x * s.c + s.b
    del s.b
    return out, has, hasattr(s, "b")


@case()
def slots_of_a_new_object(x: torch.Tensor, _: Any) -> Any:
    s = SlottedChild(x)
    s.c = s.a + 1
    try:
        s.d = 1  # type: ignore[attr-defined]
    except AttributeError:
        s.b = "none"
    return s


# -- methods and inheritance -------------------------------------------------------------------


class Base:
    factor = 2.0

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift

    def __call__(self, x: torch.Tensor, *more: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
        for other in more:
            x = x + other
        return self.run(x) * sign


class Left(Base):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x) + 1


class Right(Base):
    factor = 3.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x) - 1


class Diamond(Left, Right):
    def __init__(self, shift: float) -> None:
        super().__init__(shift)
        self.extra = super().factor

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x) * self.extra


@case(lambda: Diamond(0.5))
def super_along_a_diamond(x: torch.Tensor, d: Diamond) -> Any:
    return d(x, x, sign=-1.0), Left.run(d, x), super(Left, d).run(x)


@case()
def new_diamond(x: torch.Tensor, _: Any) -> Any:
    d = Diamond(1.0)
    bound = d.run
    return bound(x), [c.__name__ for c in Diamond.__mro__], isinstance(d, Right), issubclass(Diamond, Left)


class Singleton:
    instance: Singleton | None = None

    def __new__(cls, *args: Any) -> Singleton:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
        return cls.instance

    def __init__(self, value: float) -> None:
        self.value = value


@case()
def new_returns_a_known_object(x: torch.Tensor, _: Any) -> Any:
    a, b = Singleton(1.0), Singleton(2.0)
    return x * a.value, a is b


class Registry(type):
    def __new__(mcs, name: str, bases: Any, namespace: Any, tag: str = "") -> Any:
        made = super().__new__(mcs, name, bases, namespace)
        made.tag = tag or name.lower()
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.by_meta = True
        return made

    @property
    def shout(cls) -> str:
        return cls.tag.upper()

    def __len__(cls) -> int:
        return 3

    def __contains__(cls, item: Any) -> bool:
        return item == 3

    def __getitem__(cls, item: Any) -> Any:
        return (cls.tag, item)


class Plugin(metaclass=Registry, tag="plug"):
    def __init__(self, v: float) -> None:
        self.v = v


@case()
def metaclasses(x: torch.Tensor, _: Any) -> Any:
    p = Plugin(2.0)
    return x * p.v, p.by_meta, Plugin.shout, len(Plugin), 3 in Plugin, Plugin["k"], type(Plugin).__name__


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> float: ...

    @property
    @abc.abstractmethod
    def name(self) -> str: ...


class Square(Shape):
    def __init__(self, side: float) -> None:
        self.side = side

    def area(self) -> float:
        return self.side**2

    @property
    def name(self) -> str:
        return "square"


@typing.runtime_checkable
class HasArea(Protocol):
    def area(self) -> float: ...


@case(lambda: Square(3.0))
def abstract_classes(x: torch.Tensor, s: Shape) -> Any:
    try:
        Shape()  # type: ignore[abstract]
    except TypeError:
        return x * s.area(), s.name, isinstance(s, Shape), Square(2.0).area()
    return x


@case(lambda: Square(3.0))
def protocols(x: torch.Tensor, s: Any) -> Any:
    return x * s.area() if isinstance(s, HasArea) else x, isinstance(3, HasArea)


class Registered:
    subclasses: typing.ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()
        cls.options = kwargs

    def __class_getitem__(cls, item: Any) -> Any:
        return (cls.__name__, item)


class Sub(Registered, depth=2):
    pass


@case()
def class_hooks(x: torch.Tensor, _: Any) -> Any:
    return x * Sub.options["depth"], Sub[4]


@case()
def class_made_inside(x: torch.Tensor, _: Any) -> Any:
    class Local(Base):
        factor = 5.0

        def twice(self, y: torch.Tensor) -> torch.Tensor:
            return self.run(y) * 2

    made = type("Made", (Local,), {"shift": 1.0, "__init__": lambda self: None})
    return Local(1.0).twice(x), made().run(x)


class Named:
    kind = "n"

    def __init__(self) -> None:
        self.first = 1


@case(Named)
def names_of_attributes(x: torch.Tensor, o: Any) -> Any:
    before = [name for name in dir(o) if not name.startswith("_")]
    setattr(o, f"n{len(before)}", len(before))
    after = [name for name in dir(o) if not name.startswith("_")]
    return x * len(before), before, after, "kind" in dir(type(o)), len(dir(o))


def test_names_and_contents_of_a_changed_class() -> None:
    class Changed:
        a = 1

    def program(x: torch.Tensor, o: Any) -> Any:
        kind = type(o)
        return x * vars(kind)["a"], [name for name in dir(o) if len(name) == 1], "b" in kind.__dict__

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    x = torch.ones(2)
    for change in (lambda: None, lambda: setattr(Changed, "a", 3), lambda: setattr(Changed, "b", 1)):
        change()
        got, wanted = compiled(x, Changed()), program(x, Changed())
        assert torch.equal(got[0], wanted[0]) and got[1:] == wanted[1:]
    assert not torchdynamo.stats().fallbacks


class Slotted:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


@case(Slotted)
def slots_that_do_not_exist(x: torch.Tensor, o: Any) -> Any:
    try:
        o.b = 2
    except AttributeError as error:
        return x + o.a, str(error)
    return x


# Classes made from functools.partial, with a constructor of another form than its.


class BoundPartial(functools.partial):  # type: ignore[type-arg]
    """As libraries write decorators that keep their function."""

    def __init__(self, function: Any) -> None:
        self.inner = functools.partial(function)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self.func, instance)


class Scaled(functools.partial):  # type: ignore[type-arg]
    __slots__ = ("by",)

    def __new__(cls, function: Any, by: float, **given: Any) -> Any:
        made = super().__new__(cls, function, **given)
        made.by = by
        return made


class Announced(functools.partial):  # type: ignore[type-arg]
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) + 1


def _sum_of(a: Any, b: Any = 1, *, scale: float = 1.0) -> Any:
    return (a + b) * scale


class WithBoundPartial:
    n = 3

    @BoundPartial
    def grow(self, x: Any) -> Any:
        return x * self.n


@case(lambda: {"held": [BoundPartial(_sum_of), Scaled(_sum_of, 2.0, scale=3.0), Announced(_sum_of, 5)]})
def classes_made_from_partial(x: torch.Tensor, s: dict[str, list[Any]]) -> Any:
    bound, scaled, announced = s["held"]
    made = [BoundPartial(_sum_of), Scaled(_sum_of, 4.0, scale=x.shape[0]), Announced(_sum_of)]
    y = bound(x, x) + scaled(x, scale=0.5) * scaled.by + announced(x) + WithBoundPartial().grow(x)
    for function in made:
        y = function(y)
    return y, made[1].by, made[0].inner.func, bound.func


@case(breaks=1)
def objects_made_from_partial_outlive_a_break(x: torch.Tensor, _: Any) -> Any:
    made = [BoundPartial(_sum_of), Scaled(_sum_of, 4.0, scale=2.0), Announced(_sum_of, x)]
    torchdynamo.graph_break()
    for function in made:
        x = function(x)
    return x, made[0].inner(1), made[1](1), made[1].by, type(made[2])


@pytest.mark.parametrize("found", cases_of(__name__))
def test_classes(found: Case) -> None:
    check(found)
