"""Random programs of side effects, with breaks and exceptions in random places, compared with eager.

A program is a module: state of many kinds (objects, containers, globals, cells, classes, tensors), and three functions
that call each other and write to it, under loops, `with` blocks, handlers and `finally`. It is run twice, once eagerly
and once compiled, each in a module of its own, and called several times. After each call the two have to agree on the
result, or on the exception with its text, chain and lines, and on all state: values, order, and which objects are one.

    python packages/dynamo/tests/effect_programs.py --programs 20000 --jobs 16 [--seed N]
    python packages/dynamo/tests/effect_programs.py --one SEED
"""

from __future__ import annotations

import argparse
import collections
import itertools
import linecache
import multiprocessing
import os
import random
import sys
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import torchdynamo

WORLD = """
import collections
import torch
import torchdynamo

LOG = []
TOTAL = 1

class Refused(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code

class Plain:
    kind = "plain"
    def __init__(self, a): self.a = a
    def note(self, v):
        LOG.append(("note", v))
        self.noted = v
        return self
    def stop(self, v):
        self.stopped = v
        raise Refused(v, "stopped")

class Noting:
    def __setattr__(self, name, value):
        LOG.append(("set", name, dict(self.__dict__)))
        object.__setattr__(self, name, value)
    def __delattr__(self, name):
        LOG.append(("del", name))
        object.__delattr__(self, name)

class Slotted:
    __slots__ = ("v", "w")
    def __init__(self): self.v = 0

class Property:
    def __init__(self): self._v = 0
    @property
    def v(self): return self._v
    @v.setter
    def v(self, value):
        LOG.append(("v", value, self._v))
        self._v = value

class Items:
    def __init__(self): self.held = {}
    def __setitem__(self, key, value):
        LOG.append(("item", key, list(self.held)))
        self.held[key] = value
    def __getitem__(self, key):
        LOG.append(("got", key))
        return self.held[key]

class Table(dict):
    def __setitem__(self, key, value):
        LOG.append(("table", key))
        super().__setitem__(key, value)
    def __missing__(self, key):
        self[key] = 0
        return 0

class Stack(list):
    def append(self, value):
        LOG.append(("stack", len(self)))
        super().append(value)

class Manager:
    def __init__(self, s, swallow): self.s, self.swallow = s, swallow
    def __enter__(self):
        LOG.append("enter")
        return self.s
    def __exit__(self, kind, error, trace):
        LOG.append(("exit", kind and kind.__name__, str(error)))
        self.s.left = self.swallow
        return self.swallow and kind is not None and issubclass(kind, (Refused, KeyError))

class Breaking(Manager):
    def __exit__(self, *raised):
        print(end="")
        return super().__exit__(*raised)

def make_closures():
    count, held = 0, [0]
    def bump(by=1):
        nonlocal count
        count += by
        held.append(count)
        return count
    def read(): return count, held
    return bump, read

def kept(v, seen=[]):
    seen.append(v)
    return len(seen)

def counted(v):
    counted.calls = getattr(counted, "calls", 0) + 1
    return counted.calls

def values(s, k):
    for i in range(k):
        s.yielded = i
        yield i
    LOG.append("end")

def breaking_values(s, k):
    try:
        for i in range(k):
            s.yielded = i
            print(end="")
            yield i
    finally:
        LOG.append("closed")

def num(v): return v if type(v) is int else len(v) if isinstance(v, (list, dict)) else 1

bump, read = make_closures()
s, noting, slotted, prop, items, stack = Plain(1), Noting(), Slotted(), Property(), Items(), Stack([1])
s.buffer = torch.zeros(3)
s.child = Plain(2)
table, typed, ordered = {"a": 1, "b": 2, "c": 3}, Table(a=1), collections.OrderedDict(a=1, b=2, c=3)
missing = collections.defaultdict(list)
queue, deque, names = [1, 2, 3], collections.deque([1, 2, 3], 5), {1, 2}
shared = [0]
s.shared = table["shared"] = shared
iterator = iter([5, 6, 7])
"""

STATE = (
    "LOG TOTAL s noting slotted prop items stack table typed ordered missing queue deque names shared Plain counted "
    "SPARE"
).split()

# Effects; {v} is a value, {k} a key.
EFFECTS = (
    "s.a = {v}", "s.b = {v}", "s.c = {v}", "s.a = num(s.a) + 1", "del s.b", "setattr(s, {k}, {v})", "s.child.a = {v}",
    "s.child, s.b = Plain(n), s.child", "vars(s)[{k}] = {v}", "s.__dict__.update(b={v}, z=1)", "s.note({v}).b = n",
    "vars(s).pop({k}, None)",
    "noting.p = {v}", "noting.q = {v}", "del noting.p", "slotted.v = {v}", "slotted.w = {v}", "del slotted.w",
    "prop.v = {v}", "items[{k}] = {v}", "n = n + num(items[{k}])", "Plain.kind = {v}", "Plain.late = {v}",
    "del Plain.late", "s.kind = n",
    "table[{k}] = {v}", "del table[{k}]", "table.pop({k}, None)", "table.setdefault({k}, {v})",
    "table.update(b={v}, z=n)", "table[{k}] = table.pop({k}, 0)", "typed[{k}] = {v}", "n = n + num(typed[{k}])",
    "table |= {{'m': n}}", "table.clear()", "table.popitem()", "table[n], table[True] = {v}, {v}",
    "ordered[{k}] = {v}", "ordered.move_to_end({k})", "ordered.move_to_end({k}, last=False)", "ordered.popitem(False)",
    "ordered[{k}] = ordered.pop({k}, n)", "missing[{k}].append({v})", "del missing[{k}]",
    "queue.append({v})", "queue.insert(0, {v})", "queue.pop()", "queue.reverse()", "queue[0] = {v}", "del queue[-1]",
    "queue += [n, {v}]", "queue[1:2] = [{v}, n]", "queue.extend(i for i in range(2))", "queue.sort(key=num)",
    "queue.clear()", "queue.remove(n)", "queue[:] = queue[::-1]", "stack.append({v})",
    "stack *= 2 if len(stack) < 99 else 1",  # in loops within loops
    "deque.append({v})", "deque.appendleft({v})", "deque.rotate(1)", "n += num(deque.popleft())",
    "names.add(n)", "names.discard(n)", "names.update((n, n + 1))", "names.remove(n)", "names ^= {{n}}",
    "shared.append({v})", "s.b = table[{k}] = [n]", "s.shared = list(shared)", "s.shared[0] = {v}",
    "TOTAL = TOTAL + n", "TOTAL += 1", "SPARE = {v}", "del SPARE", "bump()", "n = bump(n)", "read()[1].append({v})",
    "n += kept({v})", "n += counted(n)", "counted.note = {v}", "LOG.append({v})", "LOG.append(('n', n))",
    "t.add_(1)", "t.mul_(2)", "s.buffer.add_(t)", "s.buffer[0] = n", "s.buffer = t * 1", "s.view = t[1:]",
    "s.view = s.buffer[:2]", "x.sub_(1)", "s.last = t", "table['t'] = t", "queue.append(t)", "t = t + 1", "t = t * n",
    "t, s.previous = t - n, t", "with torch.no_grad(): s.buffer.copy_(t)",
    "local = [n]; local.append(local); s.c = local", "local = {{'s': s}}; s.c = local; local['n'] = n",
    "s.c = lambda: n", "s.c = s.note", "n = n + 1", "n = n % 5",
)  # fmt: skip
READS = (
    "n = n + len(queue)", "n = n + num(s.a)", "LOG.append(list(vars(s)))", "LOG.append(list(table))",
    "LOG.append(list(ordered.items()))", "n += TOTAL % 3", "n += num(table.get({k}))", "LOG.append(queue[-1:])",
    "LOG.append(sorted(names))", "n += num(slotted.v)", "t = t + num(prop.v)", "LOG.append(s.shared is shared)",
    "t = t + s.buffer", "LOG.append(hasattr(s, 'b'))", "LOG.append(read()[0])", "t = t * num(s.child.a)",
    "LOG.append(table.get({k}) is s.b)", "n += num(getattr(noting, 'p', 0))", "LOG.append(list(vars(noting)))",
    "LOG.append('SPARE' in globals())", "LOG.append([i for i in queue if num(i) > 1])", "n += len(deque)",
    "LOG.append(Plain.kind)", "LOG.append(getattr(s, 'late', None))",
)  # fmt: skip
BREAKS = (
    "print(end='')", "torchdynamo.graph_break()", "n = n + int(t.sum().item()) % 3", "n += int(t[0]) % 2",
    "s.b = t.sum().item()", "queue.append(t.tolist()[0])", "table['i'] = float(t[0])", "LOG.append(str(t.tolist()))",
    "if t.sum() > 3: n = n + 1", "n += next(iterator, 0)", "t = t[t > 0].sum() + t", "bump(t.argmax().item())",
    "LOG.append(f'{{t.sum()}}')", "queue[0] = bool(t[0] > 0)", "assert not t.isnan().any()",
)  # fmt: skip
RAISES = (
    "raise Refused(n, 'asked')", "n = table['absent']", "n = queue[99]", "n = 1 // (n - n)", "t = t @ torch.ones(7, 7)",
    "s.absent", "assert n < -100, f'n is {{n}}'", "absent_name", "s.stop(n)", "(lambda: s.stop(n))()", "del s.absent",
    "raise KeyError(n)", "raise ValueError", "int('x')", "n, *_ = []", "n = t.view(99)", "raise Refused(n, s.absent)",
    "next(iter([]))", "s.slot = slotted.absent", "n = [].pop()", "TOTAL = None + n", "t.absent_method(1)",
    "queue.remove('absent')", "ordered.move_to_end('absent')", "torch.cat([t, 3])", "s.child.note(1, 2)",
)  # fmt: skip
VALUES = ("n", "n + 1", "[n]", "7", "'text'", "t", "t + 1", "s.a", "shared", "(n, t)", "queue", "None", "len(LOG) % 4")
KEYS = ("'a'", "'b'", "'c'", "'z'", "'new'")
HANDLERS = ("Refused as error", "KeyError", "(KeyError, IndexError)", "Exception", "Exception as error", "RuntimeError")
LOOPS = (
    "for i in range({k})", "for i, v in enumerate(queue[:{k}])", "for i, v in zip(range({k}), queue[:3])",
    "for key, v in list(table.items())[:{k}]", "for i in values(s, {k})", "for i in breaking_values(s, {k})",
    "for i in map(num, queue[:{k}])", "for i in (m for m in range({k}))", "for i in reversed(range({k}))",
    "while (turns := turns + 1) <= {k}",
)  # fmt: skip
WITHS = (
    "with Manager(s, True) as m", "with Manager(s, False)", "with Breaking(s, True)", "with torch.no_grad()",
    "with torch.autocast('cpu', dtype=torch.bfloat16)", "with Manager(s, False), Breaking(s, True)",
    "with torch.enable_grad(), Manager(s, True)",
)  # fmt: skip


@dataclass
class Statement:
    """A line, or the headed blocks of a compound statement."""

    line: str = ""
    blocks: list[tuple[str, list[Statement]]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        if not self.blocks:
            yield self.line
        for head, body in self.blocks:
            yield f"{head}:"
            yield from (f"    {line}" for line in block_lines(body))


def block_lines(body: list[Statement]) -> list[str]:
    return [line for statement in body for line in statement.lines()] or ["pass"]


class Writer:
    """Draws the functions of one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def program(self) -> list[list[Statement]]:
        """Bodies of `program`, which calls `first`, which calls `second`."""
        bodies = []
        for callee in ("first", "second", None):
            body = self.block(self.random.randint(2, 5), 2, callee)
            bodies.append(body)
        return bodies

    def block(self, count: int, depth: int, callee: str | None, loop: bool = False) -> list[Statement]:
        return [self.statement(depth, callee, loop) for _ in range(count)]

    def simple(self, table: tuple[str, ...]) -> Statement:
        pick = self.random.choice
        parts = {"v": pick(VALUES), "k": pick(KEYS)}
        return Statement(pick(table).format(**parts))

    def statement(self, depth: int, callee: str | None, loop: bool) -> Statement:
        draw, pick = self.random.random(), self.random.choice
        if depth and draw < 0.3:
            return self.compound(depth - 1, callee, loop)
        if callee and draw < 0.45:
            calls = (
                "t, n = {f}(t, n)", "n = {f}(x, n)[1]", "t = [{f}(t, i)[0] for i in range(2)][-1]",
                "t, n = (lambda a: {f}(a, n))(t)", "s.a = {f}(t, n)",
            )  # fmt: skip
            return Statement(pick(calls).format(f=callee))
        if draw < 0.55:
            return self.simple(BREAKS)
        if draw < 0.6:
            raising = self.simple(RAISES).line
            return Statement(blocks=[(pick(("if n % 3 == 1", "if n > 4", "if True")), [Statement(raising)])])
        if draw < 0.72:
            return self.simple(READS)
        if loop and draw < 0.76:
            return Statement(blocks=[(pick(("if n % 2", "if t.sum() > 2")), [Statement(pick(("break", "continue")))])])
        if draw < 0.77:
            return Statement(blocks=[("if n > 3", [Statement("return t * 3, n")])])
        return self.simple(EFFECTS)

    def compound(self, depth: int, callee: str | None, loop: bool) -> Statement:
        pick, count = self.random.choice, lambda: self.random.randint(1, 3)
        match self.random.randrange(5):
            case 0:
                head = pick(("if n % 2 == 0", "if n > 2", "if t.sum() > 1", "if queue", "if 'b' in table"))
                blocks = [(head, self.block(count(), depth, callee, loop))]
                if self.random.random() < 0.5:
                    blocks.append(("else", self.block(count(), depth, callee, loop)))
            case 1:
                head = pick(LOOPS).format(k=self.random.randint(0, 3))
                blocks = [(head, self.block(count(), depth, callee, True))]
                if self.random.random() < 0.2:
                    blocks.append(("else", self.block(count(), depth, callee, loop)))
            case 2:
                blocks = [(pick(WITHS), self.block(count(), depth, callee, loop))]
            case _:
                blocks = [("try", self.block(count(), depth, callee, loop))]
                final = self.random.random() < 0.4
                if not final or self.random.random() < 0.7:
                    handler = self.block(count(), depth, callee, loop)
                    handler += [Statement(pick(("pass", "raise", "LOG.append(str(error))", "raise Refused(1, 'x')")))]
                    blocks.append((f"except {pick(HANDLERS)}", handler))
                    if self.random.random() < 0.2:
                        blocks.append(("else", self.block(count(), depth, callee, loop)))
                if final:
                    blocks.append(("finally", self.block(count(), depth, callee, loop)))
        return Statement(blocks=blocks)


def source(bodies: list[list[Statement]]) -> str:
    lines = WORLD.splitlines()
    names = ("program", "first", "second")
    for name, body in zip(reversed(names), reversed(bodies), strict=True):
        lines += [f"def {name}(x, n):", "    global TOTAL, SPARE, queue, stack, names, table"]
        lines += ["    t, turns, error = x * 2 if n else x, 0, None"]
        lines += [f"    {line}" for line in [*block_lines(body), "return t, n"]]
    return "\n".join(lines) + "\n"


def load(text: str, name: str) -> types.ModuleType:
    """The program's module. Its text is found by tracebacks."""
    file = f"<{name}>.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, file, "exec"), module.__dict__)
    return module


class Picture:
    """What objects are, comparable between two runs: contents, order, and the identity of whatever can be changed.

    A program may add to its lists in loops within loops: what comes after so many objects is left out.
    """

    def __init__(self, room: int = 20_000) -> None:
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []
        self.room = room

    def of(self, obj: Any) -> Any:
        self.room -= 1
        if self.room < 0:
            return "and more"
        if isinstance(obj, (int, float, str, bool, type(None), bytes)):
            return (type(obj).__name__, repr(obj))
        if isinstance(obj, tuple):
            return (type(obj).__name__, tuple(map(self.of, obj)))
        if id(obj) in self.seen:
            return ("seen", self.seen[id(obj)])
        self.seen[id(obj)] = len(self.seen)
        self.alive.append(obj)
        return (type(obj).__name__, *self.parts(obj))

    def parts(self, obj: Any) -> tuple[Any, ...]:
        if isinstance(obj, torch.Tensor):
            storage = obj.untyped_storage()
            memory = self.seen.setdefault(-storage.data_ptr() - 1, len(self.seen)) if storage.nbytes() else None
            layout = (obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset(), obj.requires_grad)
            return (repr(obj.tolist()), layout, memory)
        if isinstance(obj, BaseException):
            return (self.of(obj.args), self.of(vars(obj)), self.of(obj.__cause__), self.of(obj.__context__))
        found: list[Any] = []
        if isinstance(obj, dict):
            found += [(self.of(key), self.of(value)) for key, value in obj.items()]
        elif isinstance(obj, (list, collections.deque)):
            found += (len(obj), *map(self.of, itertools.islice(obj, self.room)))
        elif isinstance(obj, (set, frozenset)):
            found += sorted(map(self.of, obj))
        elif isinstance(obj, type):
            return (obj.__name__, tuple((k, self.of(v)) for k, v in vars(obj).items() if k in ("kind", "late")))
        elif isinstance(obj, types.MethodType):
            return (obj.__name__, self.of(obj.__self__))
        elif isinstance(obj, types.FunctionType):
            cells = tuple(self.of(cell.cell_contents) for cell in obj.__closure__ or ())
            return (obj.__qualname__, self.of(vars(obj)), self.of(obj.__defaults__), cells)
        for name in getattr(type(obj), "__slots__", ()):
            found.append((name, self.of(getattr(obj, name, "unset"))))
        if hasattr(obj, "__dict__"):
            found.append(self.of(vars(obj)))
        return tuple(found)


def outcome(module: types.ModuleType, run: Any, call: int) -> Any:
    """What one call did: result or exception, and all state afterwards."""
    x = torch.arange(3.0) + call
    picture = Picture()
    try:
        result: Any = ("returned", picture.of(run(x, call)))
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == module.__file__]
        result = ("raised", picture.of(error), lines)
        error.__traceback__ = None
    state = [(name, picture.of(getattr(module, name, "unset"))) for name in STATE]
    closures = picture.of(module.bump), picture.of(module.kept)
    rest = next(module.iterator, None) if call == 2 else None
    return (
        result,
        ("x", picture.of(x)),
        *state,
        closures,
        rest,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


def disagreement(bodies: list[list[Statement]]) -> str | None:
    """Runs a program eagerly and compiled; tells where the two part, or None."""
    text = source(bodies)
    eager, own = load(text, "eager_effects"), load(text, "compiled_effects")
    eager.__file__, own.__file__ = "<eager_effects>.py", "<compiled_effects>.py"
    options = torchdynamo.CaptureOptions(strict=True, recompile_limit=64)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(own.program)
    for call in range(4):
        expected = outcome(eager, eager.program, call)
        try:
            found = outcome(own, compiled, call)
        except torchdynamo.TorchDynamoError as error:
            return f"call {call}: {type(error).__name__}: {error}"
        if repr(found) != repr(expected):
            parts = [(a, b) for a, b in zip(found, expected, strict=True) if repr(a) != repr(b)]
            return "\n".join([f"call {call}", *(f"  compiled {a}\n  eager    {b}" for a, b in parts[:3])])
    return None


def check(seed: int) -> tuple[int, str | None]:
    """The seed, and a report when the program is wrong."""
    torch.manual_seed(0)
    try:
        return seed, disagreement(Writer(seed).program())
    except torchdynamo.TorchDynamoError as error:
        return seed, f"{type(error).__name__}: {error}"


def _still_wrong(bodies: list[list[Statement]]) -> bool:
    try:
        return disagreement(bodies) is not None
    except torchdynamo.TorchDynamoError:
        return True
    except SyntaxError:
        return False


def shrunk(bodies: list[list[Statement]]) -> None:
    """Removes statements as long as the program stays wrong."""

    def reduce(body: list[Statement]) -> bool:
        changed, index = False, 0
        while index < len(body):
            statement = body[index]
            replacements: list[list[Statement]] = [[], *(inner for _, inner in statement.blocks)]
            for other in replacements:
                body[index : index + 1] = other
                if _still_wrong(bodies):
                    changed = True
                    break
                body[index : index + len(other)] = [statement]
            else:
                for place in range(len(statement.blocks) - 1, 0, -1):
                    part = statement.blocks.pop(place)
                    if _still_wrong(bodies):
                        changed = True
                    else:
                        statement.blocks.insert(place, part)
                for _, inner in statement.blocks:
                    changed |= reduce(inner)
                index += 1
        return changed

    while any([reduce(body) for body in bodies]):
        pass


def show(seed: int) -> str:
    """The program of a seed, as small as it stays wrong, and what is wrong."""
    bodies = Writer(seed).program()
    if not _still_wrong(bodies):
        return f"seed {seed}: right"
    shrunk(bodies)
    text = source(bodies)[len(WORLD) :]
    try:
        report = disagreement(bodies)
    except torchdynamo.TorchDynamoError as error:
        report = f"{type(error).__name__}: {error}"
    return f"seed {seed}\n{text}\n{report}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="of the first program; drawn when not given")
    parser.add_argument("--one", type=int, help="check the program of this seed alone")
    parser.add_argument("--show", type=int, default=10, help="how many wrong programs are shrunk and printed")
    options = parser.parse_args()
    if options.one is not None:
        print(show(options.one))
        return 0
    first = random.randrange(1 << 40) if options.seed is None else options.seed
    print(f"programs {options.programs}, jobs {options.jobs}, first seed {first}", flush=True)
    began, wrong = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for seed, report in pool.imap_unordered(check, range(first, first + options.programs), chunksize=20):
            if report is not None:
                wrong.append(seed)
                print(f"WRONG seed {seed}: {report.splitlines()[0][:160]}", flush=True)
    print("\n\n".join(map(show, wrong[: options.show])))
    print(f"{options.programs} programs, {len(wrong)} wrong, {time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
