"""The compiled callable, structural guards and the frame hook, on an interpreter that may have neither pytest nor torch.

`python hook_programs.py path/to/_C.so` runs every check_* function and prints how many there were.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import inspect
import random
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


C = load("_C", Path(sys.argv[1]))
S = load("sources_alone", Path(__file__).parents[1] / "src" / "torchdynamo" / "sources.py")


def guard(source: Any, kind: str, payload: Any) -> SimpleNamespace:
    return SimpleNamespace(source=source, kind=SimpleNamespace(value=kind), payload=payload)


def eager(_callable: Any, _flat: Any) -> None:
    return None


def raises(kind: type[BaseException], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} expected")


def echo(function: FunctionType) -> Any:
    """A callable whose compiled code says which flat arguments it got."""
    return C.CompiledCallable(function, lambda _c, _flat: C.Entry(None, lambda inputs, *flat: ("compiled", flat)))


def signatures() -> list[FunctionType]:
    def plain(a: Any, b: Any) -> Any:
        return a, b

    def defaults(a: Any, b: Any = 2, *, k: Any, m: Any = 4) -> Any:
        return a, b, k, m

    def stars(a: Any, /, b: Any = 2, *rest: Any, k: Any = 3, **more: Any) -> Any:
        return a, b, k, rest, more

    def only_stars(*rest: Any, **more: Any) -> Any:
        return rest, more

    def nothing() -> Any:
        return ()

    def positional(a: Any, b: Any = 9, /, **more: Any) -> Any:
        return a, b, more

    def celled(a: Any, *rest: Any, k: Any = 1) -> Any:
        return (lambda: (a, k, rest))()

    return [plain, defaults, stars, only_stars, nothing, positional, celled]


def check_binding_is_cpythons() -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for function in signatures():
        compiled = echo(function)
        for _ in range(1500):
            args = [rng.randrange(9) for _ in range(rng.randrange(5))]
            kwargs = {name: rng.randrange(9) for name in rng.sample(["a", "b", "k", "m", "z"], rng.randrange(4))}
            try:
                want: Any = function(*args, **kwargs)
            except TypeError as error:
                assert raises(TypeError, lambda: compiled(*args, **kwargs)) == str(error), seed
                continue
            flat = compiled(*args, **kwargs)[1]
            assert (flat[0] if len(flat) == 1 and function.__name__ != "nothing" else flat) == want, (
                seed,
                function,
                args,
                kwargs,
            )


def check_looks_like_the_function() -> None:
    def f(a: int, b: str = "x") -> float:
        """Doc."""
        return 1.0

    f.mark = 7  # type: ignore[attr-defined]
    c = C.CompiledCallable(f, eager)
    assert (c.__name__, c.__qualname__, c.__doc__, c.__module__) == (
        f.__name__,
        f.__qualname__,
        f.__doc__,
        f.__module__,
    )
    assert c.__wrapped__ is f and c.mark == 7 and c.__annotations__ == f.__annotations__
    assert inspect.signature(c) == inspect.signature(f)
    assert c.__code__ is f.__code__ and c.__defaults__ == f.__defaults__
    c.extra = 1
    assert weakref.ref(c)() is c and c.extra == 1
    raises(TypeError, lambda: C.CompiledCallable(len, eager))


def check_methods() -> None:
    class A:
        def plain(self, x: int) -> Any:
            return self, x

        method = C.CompiledCallable(plain, eager)
        compiled = echo(plain)

    a = A()
    assert a.method(3) == (a, 3) and A.method(a, 3) == (a, 3)
    assert a.compiled(3) == ("compiled", (a, 3))
    bound = a.compiled
    assert bound.__self__ is a and bound(4) == ("compiled", (a, 4))


def check_entries_order_and_hits() -> None:
    def f(x: Any) -> Any:
        return x

    made = []

    def miss(c: Any, flat: Any) -> Any:
        made.append(flat)
        tree = C.GuardTree([guard(S.Argument(0, "x"), "equals", flat[0])], [S.Argument(0, "x")])
        return C.Entry(tree, lambda inputs, x: ("got", *inputs))

    c = C.CompiledCallable(f, miss)
    for value in (1, True, 1.0, 0.0, -0.0, float("nan"), (1, "a"), (True, "a"), None, "s"):
        assert repr(c(value)) == repr(("got", value))
        assert repr(c(value)) == repr(("got", value))
    assert len(made) == 10 and len(c.entries) == 10
    c(1)
    first = c.entries[0]
    assert first.hits == 3 and first.tree.guards[0].payload == 1 and type(first.tree.guards[0].payload) is int
    assert first.tree.check((1,)) == [1] and first.tree.check((2,)) is None and first.tree.explain((2,)) == 0


def check_errors_pass() -> None:
    def f(x: Any) -> Any:
        return x

    def bad(inputs: Any, x: Any) -> Any:
        raise KeyError("inside")

    def angry(c: Any, flat: Any) -> Any:
        raise LookupError("capture")

    assert "inside" in raises(KeyError, lambda: C.CompiledCallable(f, lambda c, flat: C.Entry(None, bad))(1))
    assert "capture" in raises(LookupError, lambda: C.CompiledCallable(f, angry)(1))
    assert "Entry" in raises(TypeError, lambda: C.CompiledCallable(f, lambda c, flat: 3)(1))
    wants_text = guard(S.Argument(0, "x"), "type", str)
    never, told = C.GuardTree([wants_text], []), []

    def wrong(c: Any, flat: Any, *unheld: Any) -> Any:  # asked again, with the guard that does not hold
        told.append(unheld)
        return None if unheld else C.Entry(never, bad)

    assert C.CompiledCallable(f, wrong)(1) == 1 and told == [(), (wants_text,)]
    predicate = C.GuardTree([guard(S.Argument(0, "x"), "predicate", lambda v: v / 0)], [])
    raises(ZeroDivisionError, lambda: predicate.check((1,)))


class Node:
    def __init__(self) -> None:
        self.value, self.items, self.table = 5, [1, 2, 3], {"k": {"deep": 1}}


GLOBAL = [1, 2]


def check_every_structural_guard() -> None:
    cell = [Node]

    def f(obj: Any) -> Any:
        return cell, obj, GLOBAL

    X = S.Argument(0, "obj")
    table = S.InstanceAttribute(X, "table")
    node = Node()
    pinned = object()
    guards = [
        (guard(X, "type", Node), lambda n: [n, object()][1]),
        (guard(S.TypeOf(X), "identity", Node), lambda n: 3),
        (guard(S.InstanceAttribute(X, "value"), "equals", 5), lambda n: setattr(n, "value", 6)),
        (guard(S.InstanceAttribute(X, "items"), "length", 3), lambda n: n.items.append(1)),
        (guard(S.Item(S.InstanceAttribute(X, "items"), -1), "equals", 3), lambda n: n.items.__setitem__(2, 0)),
        (guard(table, "dict_keys", ("k",)), lambda n: n.table.update(j=1)),
        (guard(S.Item(S.Item(table, "k"), "deep"), "equals", 1), lambda n: n.table["k"].clear()),
        (guard(table, "key_absent", "j"), lambda n: n.table.update(j=1)),
        (guard(S.DictKeyAt(table, 0), "equals", "k"), lambda n: setattr(n, "table", {"q": 1})),
        (guard(X, "instance_has", "value"), lambda n: delattr(n, "value")),
        (guard(X, "instance_lacks", "other"), lambda n: setattr(n, "other", 1)),
        (guard(S.InstanceAttribute(X, "items"), "bool", True), lambda n: n.items.clear()),
        (guard(S.Attribute(X, "value"), "equals", 5), lambda n: setattr(n, "value", 7)),
        (guard(S.InstanceAttribute(X, "value"), "predicate", lambda v: v > 4), lambda n: setattr(n, "value", 4)),
        (guard(S.InstanceAttribute(X, "items"), "same_object", S.Attribute(X, "items")), lambda n: None),
        (guard(S.Global("GLOBAL"), "length", 2), lambda n: GLOBAL.append(3)),
        (guard(S.Global("GLOBAL", __name__), "length", 2), lambda n: GLOBAL.append(3)),
        (guard(S.Item(S.ClosureCell(0, "cell"), 0), "identity", Node), lambda n: cell.clear()),
        (guard(S.Pinned(0, "p"), "identity", pinned), lambda n: None),
        (guard(None, "shape", SimpleNamespace(
            program=(("sym", "s"), ("const", 2), ("mul", 0), ("const", 10), ("eq", 0)),
            symbols={"s": S.InstanceAttribute(X, "value")}, text="2*s == 10")), lambda n: setattr(n, "value", 6)),
    ]  # fmt: skip
    inputs = [X, S.Item(S.InstanceAttribute(X, "items"), 1)]
    sys.modules.setdefault(__name__, sys.modules["__main__"])
    for record, spoil in guards:
        tree = C.GuardTree([record], inputs, f, [pinned])
        node = Node()
        assert tree.check((node,)) == [node, 2], record
        replaced = spoil(node)
        if record.kind.value in ("same_object",) or isinstance(record.source, S.Pinned):
            continue
        assert tree.explain((replaced if replaced is not None else node,)) == 0, record
        GLOBAL[:] = [1, 2]
        cell[:] = [Node]
    tree = C.GuardTree([], [S.Item(X, 5)])
    assert tree.check(([1],)) is None and tree.explain(([1],)) == 0
    raises(TypeError, lambda: C.GuardTree([], [3]))
    raises(ValueError, lambda: C.GuardTree([guard(X, "no such kind", 1)], []))


def check_replays_see_every_change() -> None:
    """Random writes to a tree of objects; a tree of guards made afresh has no memory and gives the verdict."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)

    class Part:
        def __init__(self, depth: int) -> None:
            self.value = rng.choice([1, 1, 1, 2, 1.0])
            self.pair = (1, rng.choice([1, 1, 1, 2]))
            self.parts = {str(k): Part(depth - 1) for k in range(2)} if depth else {}

    def describe(part: Part, source: Any) -> tuple[list[Any], list[Any]]:
        parts = S.InstanceAttribute(source, "parts")
        guards = [guard(source, "type", Part), guard(S.InstanceAttribute(source, "value"), "equals", 1),
                  guard(S.Item(S.InstanceAttribute(source, "pair"), 1), "equals", 1),
                  guard(parts, "dict_keys", tuple(part.parts)), guard(source, "instance_lacks", "late")]  # fmt: skip
        inputs = [S.InstanceAttribute(source, "pair")]
        for key, child in part.parts.items():
            below = describe(child, S.Item(parts, key))
            guards += below[0]
            inputs += below[1]
        return guards, inputs

    for root in (S.Argument(0, "x"), S.Item(S.Argument(0, "state"), 0)):
        wrap = (lambda p: (p,)) if isinstance(root, S.Argument) else (lambda p: ((p, 1),))
        guards, inputs = describe(Part(3), root)
        keeping = C.GuardTree(guards, inputs)
        yes = 0
        subject = Part(3)
        for _ in range(1500):
            part = subject
            while part.parts and rng.random() < 0.7:
                part = rng.choice(list(part.parts.values()))
            change = rng.randrange(9)
            if change == 0:
                part.value = rng.choice([1, 1, 2, True])
            elif change == 1:
                part.pair = (0, rng.choice([1, 1, 2]))
            elif change == 2 and part.parts:
                part.parts[rng.choice(list(part.parts))] = Part(0)
            elif change == 3:
                part.__dict__ = dict(part.__dict__)
            elif change == 4:
                part.late = 1  # type: ignore[attr-defined]
            elif change >= 5:
                subject = Part(3) if rng.random() < 0.5 else subject
                for each in [subject, *subject.parts.values()]:
                    each.__dict__.pop("late", None)
                if rng.random() < 0.7:
                    stack = [subject]
                    while stack:
                        each = stack.pop()
                        each.value, each.pair = 1, (1, 1)
                        each.__dict__.pop("late", None)
                        stack += each.parts.values()
            want = C.GuardTree(guards, inputs).check(wrap(subject))
            got = keeping.check(wrap(subject))
            assert got == want, seed
            assert got is None or all(a is b for a, b in zip(got, want)), seed
            yes += got is not None
        assert yes > 50, yes


def check_reused_addresses() -> None:
    """Objects that take over a dead object's address are not taken for it."""
    tree = C.GuardTree(
        [guard(S.Item(S.Argument(0, "s"), k), "equals", k) for k in range(8)], [S.Item(S.Argument(0, "s"), 7)]
    )
    for shift in (0, 1, 0, 1):
        assert (tree.check((tuple(k + shift for k in range(8)),)) is not None) is (shift == 0)


def check_identity_is_weak() -> None:
    target = Node()
    tree = C.GuardTree([guard(S.Argument(0, "x"), "identity", target)], [])
    ref = weakref.ref(target)
    assert tree.check((target,)) == []
    tree2 = C.GuardTree(
        [SimpleNamespace(source=S.Argument(0, "x"), kind=SimpleNamespace(value="identity"), payload=target)], []
    )
    tree2.guards[0].payload = tree.guards[0].payload = None  # the records themselves may hold what they please
    del target
    assert ref() is None and tree.check((Node(),)) is None


def check_no_leaks() -> None:
    class Holder:
        pass

    def make() -> Any:
        holder = Holder()

        def f(x: Any) -> Any:
            return holder, x

        c = C.CompiledCallable(f, None)
        tree = C.GuardTree([guard(S.Argument(0, "x"), "equals", 1)], [S.Argument(0, "x")], f, [c])
        c.entries.append(C.Entry(tree, lambda inputs, x: (c, inputs), info=c))
        holder.c = c  # type: ignore[attr-defined]
        assert c(1) == (c, [1]) and c(2) == (holder, 2)
        hook = C.Hook(lambda fn: c if fn is f else None)
        with C.hook_enabled(hook):
            assert f(1) == (c, [1])
        holder.hook = hook  # type: ignore[attr-defined]
        return weakref.ref(holder)

    ref = make()
    gc.collect()
    assert ref() is None


def check_hook_replaces_frames() -> None:
    seen = []

    def callback(function: FunctionType) -> Any:
        seen.append(function.__name__)
        return echo(function) if function.__name__ in {f.__name__ for f in signatures()} else None

    hook = C.Hook(callback)
    plain, defaults, stars, *_, celled = signatures()

    def driver() -> Any:
        return [plain(1, 2), defaults(1, k=3), stars(1, 2, 3, z=5), celled(4, 5)]

    def outer() -> Any:
        with C.hook_enabled(hook):
            return driver()

    want = [
        ("compiled", (1, 2)),
        ("compiled", (1, 2, 3, 4)),
        ("compiled", (1, 2, 3, (3,), {"z": 5})),
        ("compiled", (4, 1, (5,))),
    ]
    assert outer() == want and outer() == want
    assert plain(1, 2) == (1, 2)
    assert len(set(seen)) == len(seen)
    C.forget_code(plain.__code__)
    C.skip_code(plain.__code__)
    assert outer()[0] == (1, 2)
    assert C.set_hook(None) is None


def check_hook_eager_and_recursion() -> None:
    calls = []

    def fact(n: int) -> int:
        return 1 if n == 0 else n * fact(n - 1)

    hook = C.Hook(lambda f: C.CompiledCallable(f, lambda c, flat: calls.append(flat)))
    with C.hook_enabled(hook):
        assert fact(30) == fact.__code__.co_argcount * eval("__import__('math').factorial(30)")
    assert len(calls) >= 31
    compiled = C.CompiledCallable(fact, eager)
    with C.hook_enabled(hook):
        assert compiled(5) == 120

    def deep(n: int) -> int:
        return 0 if n == 0 else 1 + deep(n - 1)

    with C.hook_enabled(C.Hook(lambda f: None)):
        assert deep(200) == 200
        raises(RecursionError, lambda: deep(1_000_000))


def check_what_a_hook_is_asked_does_not_depend_on_how_many_there_have_been() -> None:
    """Each hook decides for itself, and what a hook that is gone has decided is forgotten."""

    def left() -> int:
        return 1

    def taken() -> int:
        return 2

    alive = []
    for number in range(200):
        asked = []

        def answer(function: FunctionType, asked: list[str] = asked) -> Any:
            asked.append(function.__name__)
            return C.CompiledCallable(taken, eager) if function is taken else None

        hook = C.Hook(answer)
        with C.hook_enabled(hook):
            for _ in range(2):
                left()
                taken()
        assert asked == ["left", "taken"], (number, asked)
        if number % 2:
            alive.append(hook)


def check_hook_asks_of_what_suspends_once_and_leaves_it_alone() -> None:
    asked = []

    def generator() -> Any:
        yield 1

    async def coroutine() -> int:
        return 2

    def drive() -> Any:
        class Body:
            x = [v for v in generator()]

        c = coroutine()
        try:
            c.send(None)
        except StopIteration as stop:
            return Body.x, stop.value

    with C.hook_enabled(C.Hook(lambda f: asked.append(f.__name__))):
        for _ in range(2):
            assert drive() == ([1], 2)
    assert (asked.count("generator"), asked.count("coroutine"), asked.count("Body")) == (1, 1, 0), asked

    def instead() -> int:
        return 3

    compiled = C.CompiledCallable(instead, lambda self, flat: None)
    with C.hook_enabled(C.Hook(lambda f: compiled if f.__name__ == "generator" else None)):
        raises(TypeError, drive)


def check_hook_off_inside() -> None:
    seen = []

    def helper() -> int:
        return 1

    def user() -> int:
        return helper()

    def code(inputs: Any) -> Any:
        return helper(), "compiled"

    def callback(function: FunctionType) -> Any:
        seen.append(function.__name__)
        helper()
        return C.CompiledCallable(function, lambda c, flat: C.Entry(None, code)) if function is user else None

    with C.hook_enabled(C.Hook(callback)):
        assert user() == (1, "compiled")
    assert "helper" not in seen and "code" not in seen and seen.count("user") == 1


def evaluator() -> int:
    """The address of what evaluates this interpreter's frames."""
    current = ctypes.pythonapi.PyInterpreterState_Get
    current.restype = ctypes.c_void_p
    get = ctypes.pythonapi._PyInterpreterState_GetEvalFrameFunc
    get.argtypes, get.restype = [ctypes.c_void_p], ctypes.c_void_p
    return int(get(current()))


def check_what_runs_with_the_hook_off_is_evaluated_by_the_interpreter() -> None:
    """Python is called through C wherever an evaluator is installed: what the hook leaves alone does not pay for it."""
    plain, seen = evaluator(), {}

    def left() -> None:
        seen["left alone, asked about what it calls"] = evaluator()

    def below() -> None:
        seen["left alone with all below"] = evaluator()

    def compiled() -> None:
        raise AssertionError

    def code(inputs: Any) -> None:
        seen["compiled code"] = evaluator()

    def miss(callable: Any, flat: Any) -> Any:
        seen["a miss"] = evaluator()
        return C.Entry(None, code)

    def callback(function: FunctionType) -> Any:
        seen["the callback"] = evaluator()
        return C.CompiledCallable(function, miss) if function is compiled else False if function is below else None

    def program() -> dict[str, int]:
        seen.clear()
        with C.hook_enabled(C.Hook(callback)):
            for function in (left, below, compiled, left):
                function()
        return dict(seen)

    expected = {"the callback", "left alone with all below", "a miss", "compiled code"}
    first = program()
    assert evaluator() == plain and {name for name, address in first.items() if address == plain} == expected, first
    ready, over = threading.Event(), threading.Event()

    def other() -> None:
        with C.hook_enabled(C.Hook(callback)):
            ready.set()
            over.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    beside = program()
    over.set()
    thread.join()
    assert plain not in beside.values(), "another thread needs it"
    assert evaluator() == plain


def check_hook_errors() -> None:
    def f() -> int:
        return 1

    def angry(function: FunctionType) -> Any:
        raise ValueError("no")

    def run(hook: Any) -> Any:
        with C.hook_enabled(hook):
            return f()

    C.skip_code(raises.__code__)
    assert raises(ValueError, lambda: run(C.Hook(angry))) == "no"
    assert "CompiledCallable" in raises(TypeError, lambda: run(C.Hook(lambda fn: 3 if fn is f else None)))
    raises(TypeError, lambda: C.set_hook(3))
    assert C.set_hook(None) is None and f() == 1


def check_closures_are_told_apart() -> None:
    def make(k: int) -> Any:
        def inner(x: int) -> int:
            return x + k

        return inner

    def miss(c: Any, flat: Any) -> Any:
        tree = C.GuardTree([guard(S.ClosureCell(0, "k"), "equals", c.function.__closure__[0].cell_contents)], [])
        return C.Entry(tree, lambda inputs, closure, x: ("compiled", x + closure[0].cell_contents), takes_closure=True)

    hook = C.Hook(lambda f: C.CompiledCallable(f, miss) if f.__name__ == "inner" else None)
    functions = [make(k) for k in range(100)]
    with C.hook_enabled(hook):
        results = [f(1) for f in functions]
    assert results[:3] == [("compiled", 1), ("compiled", 2), ("compiled", 3)]
    assert [r[1] if isinstance(r, tuple) else r for r in results] == [k + 1 for k in range(100)]


def check_threads() -> None:
    def f(x: int) -> Any:
        return x

    hook = C.Hook(lambda fn: echo(fn) if fn is f else None)
    wrong = []

    def worker(on: bool) -> None:
        def loop() -> None:
            for i in range(2000):
                if f(i) != (("compiled", (i,)) if on else i):
                    wrong.append((on, i))
                if i % 500 == 0:
                    time.sleep(0.0005)

        if on:
            with C.hook_enabled(hook):
                loop()
        else:
            loop()

    threads = [threading.Thread(target=worker, args=(k % 2 == 0,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[:3]


def check_references_do_not_drift() -> None:
    marker = object()

    def plain(a: Any, b: Any = marker, *rest: Any, k: Any = None, **more: Any) -> Any:
        return (lambda: a)()

    def fails(inputs: Any, a: Any, *_: Any) -> Any:
        raise ValueError

    good = C.CompiledCallable(plain, lambda c, flat: C.Entry(None, lambda inputs, a, *_: a))
    hook = C.Hook(lambda f: good if f is plain else None)

    def tour() -> None:
        for _ in range(500):
            plain(marker, marker, marker, k=marker, z=marker)
            good(marker, b=marker, q=marker)
            try:
                good()
            except TypeError:
                pass

    def run(code: Any) -> None:
        good.entries[:] = [C.Entry(None, code)]
        try:
            with C.hook_enabled(hook):
                tour()
        except ValueError:
            pass

    for code in (lambda inputs, a, *_: a, fails):
        run(code)
        gc.collect()
        before = sys.getrefcount(marker), sys.getrefcount(plain), sys.getrefcount(plain.__code__), len(gc.get_objects())
        run(code)
        gc.collect()
        after = sys.getrefcount(marker), sys.getrefcount(plain), sys.getrefcount(plain.__code__), len(gc.get_objects())
        assert before[:3] == after[:3], (before, after)
        assert abs(after[3] - before[3]) < 20, (before, after)


if __name__ == "__main__":
    checks = [value for name, value in list(globals().items()) if name.startswith("check_")]
    for check in checks:
        check()
        assert C.set_hook(None) is None, check
    print(len(checks))
