"""Generated programs: random statements over a few variables, run natively and interpreted."""

import random

from torchdynamo.interpreter import Interpreter, PlainWorld

_NAMES = ("a", "b", "c", "d")
_PREAMBLE = """
class Box:
    def __init__(self, v): self.v = v
    def __add__(self, o): return Box((self.v, "add"))
    def __radd__(self, o): return Box((self.v, "radd"))
    def __eq__(self, o): return isinstance(o, Box) and self.v == o.v
    def __hash__(self): return 1
    def __getattr__(self, name):
        if name == "gone": raise AttributeError(name)
        return name
    def __iter__(self):
        yield self.v
        yield 1
    def __len__(self): return 2
    def __repr__(self): return f"Box({self.v!r})"
class Manager:
    def __init__(self, log, swallow): self.log, self.swallow = log, swallow
    def __enter__(self):
        self.log.append("enter")
        return 3
    def __exit__(self, kind, value, tb):
        self.log.append(kind and kind.__name__)
        return self.swallow
"""


class Writer:
    """Writes a random function of bounded size from a seeded source of randomness."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.fresh = 0

    def name(self):
        return self.random.choice(_NAMES)

    def expression(self, depth=2):
        pick = self.random.choice
        if depth == 0:
            return pick((*_NAMES, "0", "1", "2", "-3", "2.5", "'xy'", "None", "True", "[1, 2]", "(3,)", "{'k': 1}"))
        e = lambda: self.expression(depth - 1)
        forms = (
            lambda: (
                f"({e()} {pick(('+', '-', '*', '//', '%', '<', '==', '!=', 'is', 'in', 'and', 'or', '|', '>='))} {e()})"
            ),
            lambda: f"({e()} if {e()} else {e()})",
            lambda: f"(not {e()})",
            lambda: f"[{e()} for {self.name()} in {e()} if {e()}]",
            lambda: f"list({e()} for {self.name()} in [{e()}, {e()}])",
            lambda: f"{{{self.name()}: {e()} for {self.name()} in range(3)}}",
            lambda: f"(lambda x, *y, z={e()}: (x, y, z))({e()}, {e()})",
            lambda: f"(lambda: {e()})()",
            lambda: f"f'{{{e()}!r:>5}}'",
            lambda: f"Box({e()})",
            lambda: f"Box({e()}).{pick(('v', 'gone', 'other'))}",
            lambda: f"{e()}[{e()}]",
            lambda: f"[*{e()}, {e()}]",
            lambda: f"sorted([{e()}, {e()}], key=lambda q: str(q))",
            lambda: f"list(map(lambda q: (q, {e()}), {e()}))",
            lambda: f"({self.name()} := {e()})",
            lambda: f"max({e()}, {e()})",
            lambda: f"list(zip({e()}, {e()}))",
            lambda: f"({e()} < {e()} < {e()})",
            lambda: f"(log.append({e()}), {e()})[1]",
        )
        return pick(forms)()

    def block(self, depth, loop, indent):
        lines = []
        for _ in range(self.random.randint(1, 3)):
            lines += self.statement(depth, loop, indent)
        return lines

    def statement(self, depth, loop, indent):
        pick, pad = self.random.choice, "    " * indent
        e = self.expression
        inner = lambda in_loop=loop: self.block(depth - 1, in_loop, indent + 1)
        simple = [
            lambda: [f"{pad}{self.name()} = {e()}"],
            lambda: [f"{pad}{self.name()} {pick(('+=', '-=', '*=', '|='))} {e()}"],
            lambda: [f"{pad}log.append({e()})"],
            lambda: [f"{pad}{self.name()}, {self.name()} = {e()}, {e()}"],
            lambda: [f"{pad}{self.name()}, *{self.name()} = {e()}"],
            lambda: [f"{pad}raise {pick(('ValueError', 'KeyError(1)', 'IndexError from None'))}"],
            lambda: [f"{pad}return {e()}"],
            lambda: [f"{pad}del {self.name()}"],
            lambda: [f"{pad}assert {e()}, {e(1)}"],
            lambda: [f"{pad}yield_ = {e()}"],
        ]
        if loop:
            simple += [lambda: [f"{pad}break"], lambda: [f"{pad}continue"]]
        if depth == 0:
            return pick(simple)()
        compound = (
            lambda: [f"{pad}if {e()}:", *inner(), f"{pad}else:", *inner()],
            lambda: [f"{pad}for {self.name()} in {e()}:", *inner(True), f"{pad}else:", *inner()],
            lambda: [f"{pad}try:", *inner(), f"{pad}except {pick(('ValueError', '(KeyError, TypeError)', 'Exception'))} as error:",
                     *inner(), f"{pad}    log.append((str(error), type(error.__context__).__name__))", f"{pad}finally:", *inner()],
            lambda: [f"{pad}try:", *inner(), f"{pad}except Exception:", *inner(), f"{pad}else:", *inner()],
            lambda: [f"{pad}try:", *inner(), f"{pad}finally:", *inner()],
            lambda: [f"{pad}with Manager(log, {pick((True, False))}) as {self.name()}:", *inner()],
            lambda: self.generator(depth, indent),
            lambda: self.closure(depth, indent),
            lambda: [f"{pad}match {e()}:", f"{pad}    case [x, *_]:", *self.block(depth - 1, loop, indent + 2), f"{pad}    case {{'k': y}}:",
                     *self.block(depth - 1, loop, indent + 2), f"{pad}    case int() | None:", *self.block(depth - 1, loop, indent + 2)],
        )  # fmt: skip
        return pick((*simple[:5], *compound))()

    def generator(self, depth, indent):
        self.fresh += 1
        name, pad = f"g{self.fresh}", "    " * indent
        body = self.block(depth - 1, False, indent + 1)
        use = self.random.choice(
            (f"list({name}({self.expression(1)}))", f"next({name}(1))", f"[*{name}(2), 5]", f"{name}(1).send(None)")
        )
        return [f"{pad}def {name}(a, b=1, c=2, d=3):", f"{pad}    yield a", *body, f"{pad}    b = yield b", f"{pad}    yield from [a, b]",
                f"{pad}{self.name()} = {use}"]  # fmt: skip

    def closure(self, depth, indent):
        self.fresh += 1
        name, pad = f"f{self.fresh}", "    " * indent
        shared = self.name()
        body = self.block(depth - 1, False, indent + 1)
        return [f"{pad}def {name}(*args, key=1, **rest):", f"{pad}    nonlocal {shared}", *body, f"{pad}    return args, key",
                f"{pad}{self.name()} = {name}({self.expression(1)}, *{self.expression(1)}, key=2)"]  # fmt: skip

    def program(self):
        body = self.block(3, False, 1)
        # A scope around the variables, so that `nonlocal` finds them.
        return "\n".join([_PREAMBLE, "def program(log, a, b, c, d):", *body, "    return a, b, c, d", ""])


def outcome(call):
    try:
        return "returned", repr(call())
    except RecursionError:
        raise
    except Exception as error:
        context = error.__context__
        return type(error).__name__, str(error), type(context).__name__, str(context)


def check(seed):
    source = Writer(seed).program()
    try:
        code = compile(source, f"<program {seed}>", "exec")
    except SyntaxError:  # e.g. `nonlocal` after a use, two starred targets
        return False
    results = []
    for interpret in (False, True):
        namespace, log = {}, []
        exec(code, namespace)
        arguments = (log, 1, [2, 3], "s", {"k": 4})
        fn = namespace["program"]
        if interpret:
            results.append((outcome(lambda: Interpreter(PlainWorld()).run(fn, *arguments)), repr(log)))
        else:
            results.append((outcome(lambda: fn(*arguments)), repr(log)))
    assert results[0] == results[1], f"seed {seed}\n{source}\nnative      {results[0]}\ninterpreted {results[1]}"
    return True
