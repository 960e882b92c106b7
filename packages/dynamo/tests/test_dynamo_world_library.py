# ruff: noqa: UP031 - the operator `%` is among what is tested
"""The standard library in captured programs: iteration, functions, contexts, text, numbers, and what asks the system."""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import inspect
import itertools
import json
import logging
import math
import operator
import os
import pathlib
import pickle
import random
import re
import string
import sys
import textwrap
import time
import traceback
import typing
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from world_cases import Case, case, cases_of, check

_log = logging.getLogger(__name__)

# -- itertools ---------------------------------------------------------------------------------


@case(lambda: [1, 2, 3])
def itertools_combining(x: torch.Tensor, items: list[int]) -> Any:
    found = [
        list(itertools.chain(items, "ab")), list(itertools.chain.from_iterable([items, [9]])),
        list(itertools.product(items, "xy")), list(itertools.product([0, 1], repeat=2)),
        list(itertools.permutations(items, 2)), list(itertools.combinations(items, 2)),
        list(itertools.combinations_with_replacement(items, 2)), list(itertools.zip_longest(items, [1], fillvalue=0)),
        list(itertools.pairwise(items)), list(itertools.compress(items, [1, 0, 1])),
    ]  # fmt: skip
    items.append(len(items))
    return x * len(found), found


@case(lambda: [1, 5, 2])
def itertools_selecting(x: torch.Tensor, items: list[int]) -> Any:
    limit = items[1]
    found = [
        list(itertools.islice(items, 1, None)), list(itertools.takewhile(lambda v: v < limit, items)),
        list(itertools.dropwhile(lambda v: v < limit, items)), list(itertools.filterfalse(lambda v: v % 2, items)),
        list(itertools.starmap(lambda a, b: a * b, zip(items, items, strict=True))), list(itertools.accumulate(items)),
        list(itertools.accumulate(items, lambda a, b: a * b, initial=1)), list(itertools.repeat(7, 2)),
        [(k, list(g)) for k, g in itertools.groupby(sorted(items), key=lambda v: v > 1)],
        list(itertools.islice(itertools.count(3, 2), 3)), list(itertools.islice(itertools.cycle(items), 5)),
    ]  # fmt: skip
    a, b = itertools.tee(items)
    next(a)
    items[1] += 1
    return x * len(found), found, list(a), list(b)


@case()
def itertools_of_tensors(x: torch.Tensor, _: Any) -> Any:
    total = x
    for a, b in itertools.product([x, x * 2], [1.0, 2.0]):
        total = total + a * b
    for i, row in zip(itertools.count(), x, strict=False):
        total = total + i * row
    return list(itertools.accumulate([x, x, x], operator.add))[-1], total, [t.sum() for t in itertools.chain([x], (x,))]


# -- functools ---------------------------------------------------------------------------------


def scaled(x: Any, by: float = 1.0, *, plus: float = 0.0) -> Any:
    return x * by + plus


class Areas:
    def __init__(self, side: float) -> None:
        self.side, self.computed = side, 0

    @functools.cached_property
    def area(self) -> float:
        self.computed += 1
        return self.side**2

    @functools.singledispatchmethod
    def show(self, value: Any) -> str:
        return f"any {value}"

    @show.register
    def _(self, value: int) -> str:
        return f"int {value + self.side}"

    twice = functools.partialmethod(scaled)


@case(lambda: functools.partial(scaled, plus=3.0))
def partials(x: torch.Tensor, given: Any) -> Any:
    double = functools.partial(scaled, by=2.0)
    nested = functools.partial(double, plus=1.0)
    return given(x, 2.0), double(x), nested(x, by=4.0), nested.keywords, nested.func is scaled, given.args, double


@case(lambda: Areas(3.0))
def cached_properties(x: torch.Tensor, a: Areas) -> Any:
    out = x * a.area + a.area
    new = Areas(2.0)
    return out, a.computed, new.area, new.computed


def traced(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper.calls += 1  # type: ignore[attr-defined]
        return function(*args, **kwargs) + 1

    wrapper.calls = 0  # type: ignore[attr-defined]
    return wrapper


@case(lambda: traced(scaled))
def wrapped_functions(x: torch.Tensor, fn: Any) -> Any:
    @traced
    def local(y: Any) -> Any:
        """Documented."""
        return y * 2

    return fn(x, 3.0) + local(x), fn.__name__, fn.__wrapped__ is scaled, fn.calls, local.__doc__, local.calls


@functools.lru_cache(maxsize=4)
def cached_square(n: int) -> int:
    return n * n


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@case(lambda: [2])
def caches(x: torch.Tensor, s: list[int]) -> Any:
    s[0] += 1
    return x * cached_square(s[0]) + fibonacci(10), cached_square(s[0])


@functools.singledispatch
def describe(value: Any) -> str:
    return "object"


@describe.register
def _(value: int) -> str:
    return f"int {value}"


@describe.register(list)
def _(value: list[Any]) -> str:
    return "list of " + ", ".join(map(describe, value))


@case()
def single_dispatch(x: torch.Tensor, _: Any) -> Any:
    return x + 1, describe([1, "a", [2]]), describe(None), Areas(1.0).show(2), Areas(1.0).show("q")


@functools.total_ordering
class Rank:
    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: Any) -> bool:
        return self.n == other.n

    def __lt__(self, other: Rank) -> bool:
        return self.n < other.n


@case(lambda: Rank(2))
def total_orderings(x: torch.Tensor, r: Rank) -> Any:
    found = [r >= Rank(2), r > Rank(3), r <= Rank(1), max([Rank(1), r, Rank(7)]).n]
    r.n += 1
    by = functools.cmp_to_key(lambda a, b: b.n - a.n)
    return (
        x * found[-1],
        found,
        [v.n for v in sorted([Rank(1), r], key=by)],
        functools.reduce(operator.mul, [1, 2, r.n], 2),
    )


# -- operator, math, numbers -------------------------------------------------------------------


@case(lambda: {"a": [1, 2], "p": Areas(2.0)})
def operators_by_name(x: torch.Tensor, s: dict[str, Any]) -> Any:
    first, both = operator.itemgetter("a"), operator.itemgetter(0, 1)
    side, upper = operator.attrgetter("side"), operator.methodcaller("upper")
    s["a"] = operator.iadd(s["a"], [3])
    return (
        operator.add(x, operator.mul(x, side(s["p"]))), both(first(s)), upper("k"), operator.contains([1], 1), operator.neg(x),
        operator.matmul(x, x.T), operator.not_(0), operator.index(3), operator.concat([1], [2]), operator.is_(None, None),
    )  # fmt: skip


@case(lambda: {"n": 10, "f": 0.5})
def mathematics(x: torch.Tensor, s: dict[str, Any]) -> Any:
    n, f = s["n"], s["f"]
    s["n"] += 1
    found = [math.sqrt(n), math.floor(f), math.ceil(f), math.gcd(n, 4), math.prod([1, 2, n]), math.log2(8), math.isclose(f, 0.5),
             math.comb(5, 2), math.factorial(4), math.hypot(3, 4), math.inf > n, math.copysign(1, -f), math.fmod(7, 3), math.pi,
             math.isnan(math.nan), math.trunc(2.7), divmod(n, 3), round(2.567, 2), abs(-n), pow(2, 5, 7), n.bit_length(),
             int("12"), float("1e3"), hex(255), (0.5).is_integer(), complex(1, 2).real, sum([0.1] * 3), min(n, 3)]  # fmt: skip
    return x * found[0] / math.sqrt(x.shape[-1]), found


@case()
def sizes(x: torch.Tensor, _: Any) -> Any:
    size = x.shape
    a, b = size
    grown = size + (5,)
    return (
        x.view(size.numel()),
        a * b,
        grown,
        size[-1:],
        size == (2, 3),
        len(size),
        list(size),
        torch.Size([1]) + size,
        x.size(),
        {size: 1}[x.size()],
    )


# -- contexts ----------------------------------------------------------------------------------


@contextlib.contextmanager
def scope(log: list[Any], name: str) -> Iterator[str]:
    log.append(f"in {name}")
    try:
        yield name * 2
    finally:
        log.append(f"out {name}")


@case(list)
def context_functions(x: torch.Tensor, log: list[Any]) -> Any:
    with scope(log, "a") as a, scope(log, "b"):
        x = x * len(a)
    try:
        with scope(log, "c"):
            raise ValueError("inside")
    except ValueError as error:
        log.append(str(error))
    return x, len(log)


@case(list)
def exit_stacks(x: torch.Tensor, log: list[Any]) -> Any:
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(scope(log, n)) for n in "pq"]
        stack.callback(log.append, "called")
        x = x + len(names)
    with contextlib.suppress(KeyError, IndexError):
        log.append({}["missing"])
    with contextlib.nullcontext(5) as five:
        x = x * five
    return x


@contextlib.contextmanager
def no_grad_if(flag: bool) -> Iterator[None]:
    with torch.no_grad() if flag else contextlib.nullcontext():
        yield


@case(lambda: [True, torch.ones(3, requires_grad=True)])
def contexts_of_gradients(x: torch.Tensor, flags: list[Any]) -> Any:
    x = x * flags[1]
    with no_grad_if(flags[0]):
        y = x * 2
    flags[0] = not flags[0]
    with torch.enable_grad():
        z = x * 3
    return y, z, torch.is_grad_enabled(), y.requires_grad


class Manager(contextlib.AbstractContextManager):
    def __exit__(self, *error: Any) -> None:
        return None


@case(list)
def closing_and_decorating(x: torch.Tensor, log: list[Any]) -> Any:
    @scope(log, "deco")
    def inner(y: Any) -> Any:
        return y + 1

    class Thing:
        def close(self) -> None:
            log.append("closed")

    with contextlib.closing(Thing()), Manager() as m:
        x = inner(x)
    return x, type(m).__name__


# -- text --------------------------------------------------------------------------------------


SENTENCE = "%s has %d"


@case(lambda: {"name": "layer.0.weight", "n": 3})
def texts(x: torch.Tensor, s: dict[str, Any]) -> Any:
    name, n = s["name"], s["n"]
    s["name"] = name.replace("0", "1")
    parts = name.split(".")
    found = [
        name.upper(), name.startswith("layer"), ".".join(reversed(parts)), name.partition("."), name.find("0"), name[::-1],
        f"{n:>5}|{n:05.2f}|{n!r:<4}|{name:*^20}", f"{n}-{name}", SENTENCE % (name, n), name.encode(),
        " a b ".strip().title(), "a,b,,c".split(","), "x".join("abc"), "abc".isalpha(), name.removeprefix("layer."),
        "tab\tx".expandtabs(2), "é".casefold(), name.rsplit(".", 1), ord("a"), chr(98), "abc".translate({97: "z"}), "a" < "b",
        "l" in name, name.count("e"), "line\nline".splitlines(), string.ascii_lowercase[:3], textwrap.dedent("  k"), "7".zfill(3),
    ]  # fmt: skip
    return x * len(parts), found


@case(lambda: {"key": "h.10.attn"})
def regular_expressions(x: torch.Tensor, s: dict[str, str]) -> Any:
    match = re.match(r"h\.(\d+)\.(?P<kind>\w+)", s["key"])
    pattern = re.compile(r"\d+")
    assert match is not None
    s["key"] = pattern.sub(lambda m: str(int(m.group()) + 1), s["key"])
    return (
        x * int(match.group(1)),
        match["kind"],
        match.span(),
        pattern.findall("1 22"),
        re.split(r"\W", "a.b"),
        bool(re.search("z", "q")),
    )


@case(lambda: {"a": [1, 2.5, None, True], "b": {"c": "é"}})
def json_texts(x: torch.Tensor, d: dict[str, Any]) -> Any:
    text = json.dumps(d, sort_keys=True)
    back = json.loads(text)
    d["a"].append(len(text))
    return x * back["a"][1], text, back == d


class Shown:
    def __init__(self) -> None:
        self.n = 1

    def __repr__(self) -> str:
        return f"Shown({self.n})"

    def __index__(self) -> int:
        return self.n


@case(Shown)
def texts_of_changed_objects(x: torch.Tensor, s: Shown) -> Any:
    s.n += 1
    found = [str(s), repr(s), "%s" % s, "%r and %d" % (s, 3), f"{s} {s!r:>10}", f"{s}", f"{s!a}", str([s, (s,)]),
             "%(a)s" % {"a": s}, "%x" % s, "%s" % {"k": s}, ascii(s), str({s.n: s}), "%s" % (s.n,), "%5.1f" % s.n]  # fmt: skip
    return x * s.n, found


@case(breaks=4)
def texts_of_tensors(x: torch.Tensor, _: Any) -> Any:
    y = x > 100
    return y, "%s" % y, str([y]), "%.3f" % y.sum(), f"{y[0]}"


# -- logging and warnings ----------------------------------------------------------------------


@case(list)
def logs_and_warnings(x: torch.Tensor, s: list[Any]) -> Any:
    _log.debug("shape %s", x.shape)
    _log.info("info")
    if _log.isEnabledFor(logging.ERROR):
        s.append("enabled")
    warnings.warn("careful", stacklevel=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = x * 2
    return x


@case(breaks=2, calls=1)
def texts_of_tracebacks(x: torch.Tensor, _: Any) -> Any:
    try:
        raise ValueError("said")
    except ValueError:
        text = traceback.format_exc()
    return x + 1, [line for line in text.splitlines() if "^" not in line]


@case(list)
def exception_groups(x: torch.Tensor, log: list[Any]) -> Any:
    for raised in (ValueError("v"), ExceptionGroup("g", [KeyError("k"), ExceptionGroup("h", [ValueError("w")])])):
        try:
            raise raised
        except* KeyError as group:
            log.append(("key", len(group.exceptions)))
            x = x + 1
        except* ValueError as group:
            log.append(("value", group.message))
            x = x * 2
    return x, len(log)


@case(lambda: [1])
def the_python_that_runs(x: torch.Tensor, _: Any) -> Any:
    return (
        x + 1,
        sys.version_info >= (3, 11),
        sys.version_info[:2],
        sys.maxsize,
        sys.float_info.epsilon,
        sys.flags.debug,
    )


# -- typing and inspection ---------------------------------------------------------------------

T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    def __init__(self, item: T) -> None:
        self.item = item

    @typing.overload
    def get(self, k: int) -> int: ...
    @typing.overload
    def get(self, k: str) -> str: ...
    @typing.final
    def get(self, k: Any) -> Any:
        return k


@case()
def typing_does_nothing(x: torch.Tensor, _: Any) -> Any:
    box: Box[torch.Tensor] = Box[torch.Tensor](x)
    item = typing.cast("torch.Tensor", box.item)
    if typing.TYPE_CHECKING:
        item = None
    hints = typing.get_type_hints(scaled)
    assert item is not None
    return (
        item + 1,
        box.get(3),
        typing.get_origin(list[int]),
        typing.get_args(dict[str, int]),
        hints["by"],
        typing.NamedTuple.__name__,
    )


@case()
def signatures(x: torch.Tensor, _: Any) -> Any:
    names = list(inspect.signature(scaled).parameters)
    kwargs = {k: 2.0 for k in ("by", "plus", "other") if k in inspect.signature(scaled).parameters}
    return (
        scaled(x, **kwargs),
        names,
        inspect.isfunction(scaled),
        inspect.getfullargspec(scaled).kwonlyargs,
        callable(scaled),
    )


@case(lambda: Areas(1.0))
def reflection(x: torch.Tensor, a: Areas) -> Any:
    names = [n for n in dir(a) if not n.startswith("_")]
    for name in ("side", "other"):
        setattr(a, name, getattr(a, name, 0.0) + 1.0)
    return (
        x * a.side,
        names,
        vars(a),
        a.__class__.__name__,
        type(a).__module__ == __name__,
        hasattr(a, "other"),
        a.__dict__["side"],
    )


class Node:
    def __init__(self) -> None:
        self.value = 2.0
        self.ref = weakref.ref(self)


@case(Node)
def weak_references(x: torch.Tensor, n: Node) -> Any:
    target = n.ref()
    assert target is not None
    target.value += 1
    local = weakref.ref(n)
    return x * n.value, local() is n, target is n


# -- the system --------------------------------------------------------------------------------


@case(lambda: os.environ.__setitem__("WORLD_SCALE", "2"))
def environment(x: torch.Tensor, _: Any) -> Any:
    scale = int(os.environ.get("WORLD_SCALE", "1"))
    return x * scale, os.environ["WORLD_SCALE"], "WORLD_NONE" in os.environ, os.getenv("WORLD_NONE", "d")


@case(lambda: pathlib.PurePosixPath("/a/b.txt"))
def paths(x: torch.Tensor, p: pathlib.PurePosixPath) -> Any:
    q = p.parent / "c" / "d.bin"
    return (
        x + len(p.parts),
        q.name,
        q.suffix,
        str(q),
        p.stem,
        os.path.join("a", "b"),
        os.path.basename("/q/r"),
        p.with_suffix(".z"),
    )


@case(breaks=1)
def clocks(x: torch.Tensor, _: Any) -> Any:
    began = time.perf_counter()
    return x + 1, began > 0


@case(lambda: datetime.timedelta(seconds=5))
def dates(x: torch.Tensor, d: datetime.timedelta) -> Any:
    return x * d.total_seconds(), datetime.date(2020, 1, 31) + datetime.timedelta(days=1)


@case(lambda: random.Random(3), breaks=3)
def random_numbers_of_an_own_generator(x: torch.Tensor, r: random.Random) -> Any:
    drawn = r.random()
    return x * drawn, r.randint(0, 9)


@case(breaks=5)
def random_numbers(x: torch.Tensor, _: Any) -> Any:
    random.seed(11)
    drawn = [random.random(), random.randint(0, 5), random.choice([1, 2, 3]), random.uniform(0, 1)]
    return x * drawn[0], drawn


@case(lambda: collections.deque([1.0, 2.0]))
def generators(x: torch.Tensor, queue: Any) -> Any:
    def numbers(n: int) -> Iterator[Any]:
        for i in range(n):
            got = yield x * i
            if got:
                queue.append(got)
        return "done"

    g = numbers(3)
    first = next(g)
    second = g.send(len(queue))

    def both() -> Iterator[Any]:
        result = yield from numbers(2)
        yield result

    return first + second, [v if isinstance(v, str) else v.sum() for v in both()], sum(v * 2 for v in queue)


@case(lambda: {"kept": {}, "names": ["a", "b"]}, calls=5)
def results_kept_by_pickled_arguments(x: torch.Tensor, state: Any) -> Any:
    def remember(*args: Any, **kwargs: Any) -> Any:
        key = ("size", args, pickle.dumps(kwargs))
        state["kept"].setdefault(key, x * len(args))
        return state["kept"][key]

    made = remember(1, upper=False, name="a"), remember(), remember(1, pair=(1, "c"))
    return (
        made,
        pickle.dumps(None),
        pickle.dumps([1, 2.5, b"x"]),
        pickle.dumps(
            (1, ("a",)),
        ),
        len(state["kept"]),
    )


@case(lambda: ["a", "".join(["", "a"])], breaks=1)
def pickled_by_identity(x: torch.Tensor, names: list[str]) -> Any:
    """Of equal texts that come twice, pickle tells whether they are one object."""
    return x + len(pickle.dumps(names))


@pytest.mark.parametrize("found", cases_of(__name__))
@pytest.mark.filterwarnings("ignore")
def test_library(found: Case) -> None:
    check(found)
