"""Containers in captured programs: the built-in ones, those of `collections`, and subclasses of them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import heapq
import types
from bisect import bisect_left, insort
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import pytest
import torch
from world_cases import Case, case, cases_of, check

import torchdynamo

# -- lists and tuples --------------------------------------------------------------------------


@case(lambda: [3, 1, 2])
def list_methods(x: torch.Tensor, items: list[Any]) -> Any:
    items.append(4)
    items.extend((5, 6))
    items.insert(0, 9)
    items.remove(1) if 1 in items else None
    last = items.pop()
    items.reverse()
    items.sort(key=lambda v: -v)
    items += [7]
    items[1:3] = [0]
    del items[-1]
    copied = items.copy() * 2
    return x * last, items.index(9), items.count(9), copied, items == copied, items < copied, len(items)


@case(lambda: [torch.ones(3), torch.zeros(3)])
def list_of_tensors(x: torch.Tensor, items: list[torch.Tensor]) -> Any:
    items.append(x[0])
    items[0] = items[0] + 1
    total = sum(items)
    return torch.stack(items).sum(0) + total, items[::-1][0], max(map(lambda t: t.dim(), items))


@case()
def list_building(x: torch.Tensor, _: Any) -> Any:
    rows = [x * i for i in range(4) if i % 2 == 0]
    nested = [[i * j for j in range(i)] for i in range(4)]
    flat = [v for row in nested for v in row]
    first, *middle, last = (*rows, x)
    return torch.cat([*rows, *middle]), flat, first + last, tuple(reversed(flat)), sorted(flat, reverse=True)


class Stack(list):
    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.pushed = 0

    def append(self, item: Any) -> None:
        self.pushed += 1
        super().append(item)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)

    @property
    def top(self) -> Any:
        return self[-1]


@case(lambda: Stack(1, 2))
def list_subclass(x: torch.Tensor, s: Stack) -> Any:
    s.append(s.top + 1)
    t = Stack(x)
    t.append(x * s.top)
    return t.top, t.pushed, len(s), t


class Shape3(tuple):
    __slots__ = ()

    def __new__(cls, *dims: int) -> Shape3:
        return super().__new__(cls, dims)

    @property
    def volume(self) -> int:
        total = 1
        for d in self:
            total *= d
        return total


@case(lambda: Shape3(2, 3))
def tuple_subclass(x: torch.Tensor, s: Shape3) -> Any:
    return x * s.volume, Shape3(4, 5).volume, s + (1,), s[0], s == (2, 3), hash(s) == hash((2, 3))


# -- dicts -------------------------------------------------------------------------------------


@case(lambda: {"a": 1.0, "b": 2.0})
def dict_methods(x: torch.Tensor, d: dict[str, Any]) -> Any:
    d["n"] = d.get("n", 0) + 1
    d.setdefault("c", 3.0)
    d.update({"b": d["b"] + 1}, e=5.0)
    e = d.pop("e")
    missing = d.pop("zz", None)
    merged = d | {"a": 9.0}
    d |= {"f": 6.0}
    last = d.popitem()
    keys = [k for k, v in d.items() if v > 1]
    both = d.keys() & {"a", "b"}
    return (
        x * e,
        missing,
        merged,
        last,
        keys,
        sorted(both),
        "a" in d,
        list(reversed(d)),
        dict.fromkeys("xy", 0),
        d == dict(d),
    )


@case(lambda: {"w": torch.ones(3)})
def dict_of_tensors(x: torch.Tensor, d: dict[str, torch.Tensor]) -> Any:
    d["y"] = x * d["w"]
    d["w"] = d["w"] * 2
    return {k: v.sum() for k, v in d.items()}, {**d, "z": x}


@case(lambda: {"a": {"b": [1, {"c": 2.0}]}})
def nested_containers(x: torch.Tensor, d: dict[str, Any]) -> Any:
    d["a"]["b"][1]["c"] += 1.0
    d["a"]["b"].append(d["a"]["b"][0])
    return x * d["a"]["b"][1]["c"]


@case()
def dict_errors(x: torch.Tensor, _: Any) -> Any:
    d = {"a": 1}
    found = []
    for attempt in (lambda: d["q"], lambda: [][3], lambda: {}.popitem(), lambda: d[[]], lambda: (1, 2).index(5)):
        try:
            attempt()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            found.append((type(error).__name__, str(error)))
    return x + 1, found


@case()
def dict_changed_while_iterated(x: torch.Tensor, _: Any) -> Any:
    d = {1: 1}
    try:
        for k in d:
            d[k + 1] = 1
    except RuntimeError as error:
        return x + 1, str(error)
    return x


@case(lambda: OrderedDict(a=1.0, b=2.0))
def ordered_dict(x: torch.Tensor, d: OrderedDict[str, float]) -> Any:
    d.move_to_end("a")
    d["c"] = d.pop("b", 7.0)
    first = d.popitem(last=False)
    d["a"] = 1.5
    new = OrderedDict([("z", x), ("y", x + 1)])
    new.move_to_end("z")
    return x * first[1], list(d), list(new), d == OrderedDict(d), new


@case(lambda: defaultdict(list, {"a": [1]}))
def default_dict(x: torch.Tensor, d: defaultdict[str, list[Any]]) -> Any:
    d["b"].append(len(d["a"]))
    counts: defaultdict[str, int] = defaultdict(int)
    for c in "hello":
        counts[c] += 1
    tensors = defaultdict(lambda: torch.zeros(3))
    tensors["q"] = tensors["q"] + x[0]
    return x * counts["l"], counts, tensors["q"], "zz" in d, d.default_factory is list


@case(lambda: Counter("abca"))
def counters(x: torch.Tensor, c: Counter[str]) -> Any:
    c.update("ab")
    c["z"] += 2
    other = Counter(a=1, b=5)
    return (
        x * c["a"], c.most_common(1), c + other, c - other, c & other, c | other, c.total(), sorted(c.elements())[:3], c["none"]
    )  # fmt: skip


@case(lambda: ChainMap({"a": 1.0}, {"a": 2.0, "b": 3.0}))
def chain_map(x: torch.Tensor, c: ChainMap[str, float]) -> Any:
    c["b"] = 5.0
    child = c.new_child({"q": 1.0})
    return x * c["a"] + c["b"], dict(child), len(child), "q" in child, child.get("none", 0.0), sorted(child)


@case(lambda: deque([1, 2, 3], maxlen=4))
def deques(x: torch.Tensor, d: deque[Any]) -> Any:
    d.append(4)
    d.appendleft(0)
    d.rotate(1)
    left = d.popleft()
    d.extend([7, 8])
    d.extendleft([5])
    q: deque[Any] = deque()
    q.append(x)
    while q and len(q) < 3:
        q.append(q[0] * 2)
    return q.pop(), left, d.count(7), list(d), d.maxlen, d.index(5), deque(d, 2)


@case(lambda: {1, 2, 3})
def sets(x: torch.Tensor, s: set[int]) -> Any:
    s.add(5)
    s.discard(1)
    s |= {9}
    f = frozenset(s)
    new = {v % 3 for v in s}
    new ^= {1}
    found = [s & {2, 3}, s - {2}, s ^ {2, 77}, s.issubset(range(10)), f == s, f <= s, s.isdisjoint({100}), s > {2}]
    if 5 in s:
        s.remove(5)
    return x * len(s), found, new, {f: 1}[frozenset(f)], min(s), sorted(s)


# -- subclasses of dict ------------------------------------------------------------------------


class ModelOutput(OrderedDict):
    """As transformers' outputs: a dataclass whose fields that are not None are items too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                self[f.name] = value

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[k] for k in self.keys())


@dataclasses.dataclass
class Output(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


@case(lambda: Output(logits=torch.ones(2, 3)))
def model_output(x: torch.Tensor, given: Output) -> Any:
    out = Output(logits=x * given.logits, hidden=(x, x + 1))
    out.logits = out.logits + given["logits"]
    out["loss"] = out[0].sum()
    given.hidden = 3
    return out, out.to_tuple()[1:], "loss" in out, list(out), out.loss, len(given)


class Attr(dict):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __missing__(self, key: str) -> Any:
        if key.startswith("auto"):
            self[key] = len(self)
            return self[key]
        raise KeyError(key)


@case(lambda: Attr(a=1.0))
def dict_subclass_with_attributes(x: torch.Tensor, d: Attr) -> Any:
    d.b = d.a + 1
    new = Attr(q=x)
    new.r = new.q * 2
    return x * d.b, d["auto"], hasattr(d, "zz"), new, d.get("auto9"), dict(d)


class Lower(MutableMapping):
    def __init__(self, **items: Any) -> None:
        self.data = {k.lower(): v for k, v in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self.data[key.lower()]

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key.lower()] = value

    def __delitem__(self, key: str) -> None:
        del self.data[key.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@case(lambda: Lower(A=1.0, B=2.0))
def abstract_mapping(x: torch.Tensor, m: Lower) -> Any:
    m["C"] = m.get("a", 0) + 1
    m.update(D=4.0)
    m.setdefault("E", 5.0)
    b = m.pop("B", 0.0)
    return x * m["c"] + b, dict(m), {**m}, list(m.items()), "d" in m, isinstance(m, Mapping), len(m), m == {"a": 1}


class Ring(Sequence):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __getitem__(self, i: Any) -> Any:
        if i >= len(self.items):
            raise IndexError(i)
        return self.items[i]

    def __len__(self) -> int:
        return len(self.items)


@case()
def abstract_sequence(x: torch.Tensor, _: Any) -> Any:
    r = Ring(1, 2, 3)
    return x * sum(r), 2 in r, r.index(3), r.count(1), list(reversed(r)), isinstance(r, Sequence)


@case(lambda: UserDict(a=1.0))
def user_dict(x: torch.Tensor, d: UserDict[str, float]) -> Any:
    d["b"] = d["a"] * 2
    u = UserList([1, 2])
    u.append(3)
    return x * d["b"], u.data, len(d), d.get("q"), list(d)


@case(lambda: types.SimpleNamespace(a=1.0, items=[1]))
def simple_namespace(x: torch.Tensor, n: Any) -> Any:
    n.b = n.a + 1
    n.items.append(n.b)
    m = types.SimpleNamespace(**vars(n))
    m.a = x
    return x * n.b, m, n == types.SimpleNamespace(a=1.0), repr(types.SimpleNamespace(q=1))


@case(lambda: {"a": 2.0})
def mapping_proxy(x: torch.Tensor, d: dict[str, float]) -> Any:
    p = types.MappingProxyType(d)
    try:
        p["b"] = 1
    except TypeError:
        return x * p["a"], list(p), p.get("z"), len(p), dict(p)
    return x


# -- algorithms on containers ------------------------------------------------------------------


@case(lambda: [5, 1, 4])
def heaps_and_bisection(x: torch.Tensor, heap: list[int]) -> Any:
    heapq.heapify(heap)
    heapq.heappush(heap, 2)
    least = heapq.heappop(heap)
    ordered = sorted(heap)
    insort(ordered, 3)
    return (
        x * least,
        ordered,
        bisect_left(ordered, 4),
        heapq.nlargest(2, heap),
        heapq.nsmallest(1, heap),
        heapq.heapreplace(heap, 3),
    )


@case(lambda: [("b", 2), ("a", 2), ("c", 1)])
def sorting(x: torch.Tensor, rows: list[tuple[str, int]]) -> Any:
    by_number = sorted(rows, key=lambda r: (r[1], r[0]))
    rows.sort(key=lambda r: r[0], reverse=True)
    sizes = sorted([x, x[0], x[0, 0]], key=lambda t: t.numel())
    return (
        x * by_number[0][1],
        by_number,
        sizes[0],
        min(rows, key=lambda r: r[1]),
        max([3, 1], default=0),
        max((), default=7),
    )


@case(lambda: {"a": [1, 2], "t": torch.ones(2)})
def copies(x: torch.Tensor, d: dict[str, Any]) -> Any:
    shallow, plain = copy.copy(d), copy.deepcopy({"k": [1, {"z": (2, 3)}]})
    shallow["a"].append(3)
    plain["k"][1]["z"] = 0
    return x * len(d["a"]), shallow["a"] is d["a"], plain, copy.copy([1, [2]]), copy.deepcopy((1, [2]))


@dataclasses.dataclass
class Node:
    value: Any
    children: list[Any] = dataclasses.field(default_factory=list)


@case(lambda: Node(1.0, [Node(2.0), Node(3.0)]))
def deep_copies_of_objects(x: torch.Tensor, n: Node) -> Any:
    m = copy.deepcopy(n)
    m.children[0].value = 9.0
    s = copy.copy(n)
    s.value = 5.0
    return x * m.children[0].value, n.children[0].value, m, s.children is n.children


@case(lambda: Node(1.0))
def trees_and_cycles(x: torch.Tensor, root: Node) -> Any:
    root.children.append(Node(root.value + 1))
    loop: list[Any] = [x]
    loop.append(loop)

    def total(n: Node) -> float:
        return n.value + sum(total(c) for c in n.children)

    return x * total(root), loop[1][1][0], len(loop)


@case(lambda: [1, 2])
def aliases(x: torch.Tensor, items: list[int]) -> Any:
    same = items
    box = {"a": same, "b": same}
    box["a"].append(3)
    return x * len(items), box, box["a"] is box["b"], [same] * 2


@case()
def comparison_of_containers(x: torch.Tensor, _: Any) -> Any:
    return x + 1, [
        (1, 2) < (1, 3), [1] != [1.0], {"a": 1} == {"a": True}, (1, [2]) == (1, [2]), "ab" < "b", None is None, [] or 5, {} and 1,
        not [], (1,) * 3, [1, 2, 3][-2:], (3, 1) > (2, 9), range(3) == range(3), 2 in range(0, 10, 2), range(10)[2:5],
    ]  # fmt: skip


Holder = collections.namedtuple("Holder", "a b")


@case(lambda: Holder([1], {"k": 1}))
def mutable_inside_immutable(x: torch.Tensor, p: Any) -> Any:
    p.a.append(len(p.a))
    p[1]["k"] += 1
    return x * p.b["k"]


# -- parts with methods in Python, asked by containers in C ------------------------------------


class Token:
    def __init__(self, text: str, weight: float = 1.0) -> None:
        self.text, self.weight = text, weight

    def __eq__(self, other: Any) -> bool:
        return self.text == getattr(other, "text", other)

    def __lt__(self, other: Token) -> bool:
        return self.weight < other.weight

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"<{self.text} {self.weight}>"


PAIR, NUMBERS = "%s and %s", "%d %.2f %s"


def tokens() -> dict[str, Any]:
    return {"list": [Token("a"), Token("b", 0.5)], "one": Token("a"), "table": {Token("a"): 1.0, (1, Token("b")): 2.0}}


@case(tokens)
def parts_compared(x: torch.Tensor, s: dict[str, Any]) -> Any:
    items, one = s["list"], s["one"]
    found = [
        one in items,
        items == [Token("a"), Token("b")],
        (one, 1) == (Token("q"), 1),
        items.count(one),
        [one] != items[:1],
    ]
    found.append((1, one) < (1, Token("z", 9.0)))
    one.text = one.text + "a"  # the next call sees another text
    found += [one in items, {"k": one} == {"k": Token("aa")}, items.index(Token("b"))]
    return x + len(items), found


@case(tokens)
def parts_hashed(x: torch.Tensor, s: dict[str, Any]) -> Any:
    table, one = s["table"], s["one"]
    weight = table.get(one, 7.0) + table[1, Token("b")]
    table[Token(f"n{len(table)}")] = weight
    missing = Token("zz") in table
    s["one"] = Token("b") if one.text == "a" else Token("a")
    return x * weight, missing, table.pop(Token("n2"), None), len(table)


@case(tokens)
def parts_shown(x: torch.Tensor, s: dict[str, Any]) -> Any:
    items, one = s["list"], s["one"]
    items[0].weight += 1.0
    text = [repr(items), str((one,)), f"{items}", f"{ {1: one} }", PAIR % (one, items), f"{items} {one!r}"]
    return x * 2, text, NUMBERS % (1, 2.5, one), repr({"k": (items, deque([one]))}), str(OrderedDict(a=one))


@case(tokens)
def parts_sorted(x: torch.Tensor, s: dict[str, Any]) -> Any:
    items = s["list"]
    least = min(items)
    items.sort()
    items[0].weight += 0.3
    return (
        x * least.weight,
        items,
        sorted(items, reverse=True)[0].text,
        sorted([(1, items[0]), (1, items[1])])[0][1].text,
    )


class Label(str):
    def loud(self) -> str:
        return self.upper() + "!"


class Meters(float):
    unit = "m"


@case(lambda: {"label": Label("a"), "size": Meters(2.0)})
def classes_of_text_and_numbers(x: torch.Tensor, s: dict[str, Any]) -> Any:
    out = x * s["size"] if s["label"] == "a" else x + s["size"]
    shown = s["label"].loud()
    s["label"] = Label("b" if s["label"] == "a" else "a")
    s["size"] = Meters(s["size"] + 1)
    return out, shown, s["size"].unit, {Label("k"): 1}["k"], Label("new")


@case(lambda: {"by": -1.0})
def defaults_made_by_the_program(x: torch.Tensor, s: dict[str, float]) -> Any:
    table: defaultdict[str, Any] = defaultdict(lambda: s["by"])
    first = table["a"]
    s["by"] += 1.0
    return x * first + table["b"], table


class Tagged(set):
    def __init__(self, items: Any = (), tag: str = "t") -> None:
        super().__init__(items)
        self.tag = tag


class Window(deque):
    def mean(self) -> float:
        return sum(self) / len(self)


@case()
def subclasses_of_set_and_deque(x: torch.Tensor, _: Any) -> Any:
    t = Tagged([1, 2], tag="q")
    t.add(3)
    w = Window([1.0, 2.0], maxlen=2)
    w.append(4.0)
    return x * w.mean(), t, w, t.tag, w.maxlen


def _refuses(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


# What Python's own code and C code find in a container, they find without the methods of a class made from it.
_PROTOCOL = ("__len__", "__iter__", "__getitem__", "__contains__", "__bool__", "__reversed__", "copy", "keys", "values",
             "items", "get")  # fmt: skip


def _with_refusals(base: type) -> type:
    """A class whose objects can be read by the methods of `base` alone."""
    methods = {name: _refuses for name in _PROTOCOL if hasattr(base, name) or name == "__bool__"}
    return type(f"Own{base.__name__}", (base,), methods)


OWN = {base: _with_refusals(base) for base in (tuple, list, dict, OrderedDict, defaultdict, set, frozenset, deque)}


def _own_containers() -> dict[str, Any]:
    pairs, numbers, tensors = [("a", 1), ("b", 2)], [3, 1, 2], [torch.ones(3), torch.zeros(3)]
    made: dict[str, Any] = {base.__name__: kind(numbers) for base, kind in OWN.items() if not issubclass(base, dict)}
    made |= {base.__name__: kind() for base, kind in OWN.items() if issubclass(base, dict)}
    for base in (dict, OrderedDict, defaultdict):
        for key, value in pairs:
            base.__setitem__(made[base.__name__], key, value)
    del made["deque"]  # a class made from it is not read
    return made | {"of tensors": OWN[tuple](tensors), "nested": OWN[list]([OWN[tuple](numbers), tensors[0]])}


HELD = _own_containers()


@case()
def containers_that_refuse_their_own_protocol(x: torch.Tensor, _: Any) -> Any:
    total = x * tuple.__len__(HELD["tuple"]) + tuple.__getitem__(HELD["tuple"], 0) + list.__getitem__(HELD["list"], 1)
    table = [dict.__getitem__(HELD[name], "b") for name in ("dict", "OrderedDict", "defaultdict")]
    sizes = dict.__len__(HELD["dict"]), set.__len__(HELD["set"]), frozenset.__len__(HELD["frozenset"])
    nested = list.__getitem__(HELD["nested"], 0)
    made = OWN[list]([1, 2])
    list.append(made, 4.0)
    rows = tuple.__getitem__(HELD["of tensors"], 0) + list.__getitem__(HELD["nested"], 1)
    return total + rows, table, sizes, tuple.__getitem__(nested, 2), set.__contains__(HELD["set"], 3), list.pop(made)


MAPPINGS = (dict, OrderedDict, lambda pairs: defaultdict(int, pairs))


def loops_over_a_mapping_go_on_behind_a_break(x: torch.Tensor, table: Any) -> Any:
    seen = []
    for key, value in table.items():
        x = x * value
        torchdynamo.graph_break()
        seen.append(key)
    for key in table:
        torchdynamo.graph_break()
        x = x + table[key]
    rest = iter(table.values())
    first = next(rest)
    torchdynamo.graph_break()
    return x * first, seen, list(rest)


for _make in MAPPINGS:
    case(lambda make=_make: make([("a", 1.0), ("b", 2.0), ("c", 3.0)]), breaks=None)(  # type: ignore[misc]
        loops_over_a_mapping_go_on_behind_a_break
    )


TABLES = [make([("a", 1.0), ("b", 2.0)]) for make in MAPPINGS]
VIEWS = [(table, table.keys(), table.values(), table.items()) for table in TABLES]


@case()
def views_that_others_hold(x: torch.Tensor, _: Any) -> Any:
    found: list[Any] = []
    for table, keys, values, items in VIEWS:
        for value in values:
            x = x * value
        found.append(("a" in keys, len(items), list(keys), dict(items), "b" in table))
    table, keys, _, items = VIEWS[1]
    table["c"] = 3.0
    found.append((len(keys), list(items)))
    del table["c"]
    return x, found, len(keys)


@pytest.mark.parametrize("found", cases_of(__name__))
def test_containers(found: Case) -> None:
    check(found)
