"""Programs that two processes run, which differ in one thing (`test_compile_kept_worlds.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """A program, and what the second process has otherwise.

    Attributes:
        text: of the program's module: `program(x)`, or `make()`, which gives a callable and its arguments.
        change: a text in it, and what stands there in the second process.
        helper: the text of a module `kept_helper` that it imports.
        helper_change: as `change`.
        before, after: what the second process runs before and behind the import; there the module is `world`.
        environment: variables of the second process.
        kept: whether another process like the first one finds its frame.
        differs: whether the second process gives another result than the first one.
    """

    text: str
    change: tuple[str, str] = ("", "")
    helper: str = ""
    helper_change: tuple[str, str] = ("", "")
    before: str = ""
    after: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    kept: bool = True
    differs: bool = True


ROWS: dict[str, Row] = {
    # -- functions ------------------------------------------------------------------------------
    "a function two calls away": Row(
        "import kept_helper\ndef program(x): return kept_helper.outer(x)",
        helper="def outer(x): return middle(x)\ndef middle(x): return inner(x) + 1\ndef inner(x): return x * 2",
        helper_change=("x * 2", "x * 3"),
    ),
    "a constant of another module": Row(
        "import kept_helper\ndef program(x): return x * kept_helper.SCALE",
        helper="SCALE = 2.0", helper_change=("2.0", "3.0"),
    ),
    "a constant that was imported by name": Row(
        "from kept_helper import SCALE\ndef program(x): return x * SCALE",
        helper="SCALE = 2.0", helper_change=("2.0", "3.0"),
    ),
    "a function of another module put in a function's place": Row(
        "import kept_helper\ndef program(x): return kept_helper.inner(x)",
        helper="def inner(x): return x * 2", after="sys.modules['kept_helper'].inner = lambda x: x * 5",
    ),
    "code of a function": Row(
        "def inner(x): return x * 2\ndef program(x): return inner(x)",
        after="world.inner.__code__ = (lambda x: x * 5).__code__",
    ),
    "a default": Row("def inner(x, by=2): return x * by\ndef program(x): return inner(x)", ("by=2", "by=3")),
    "a default that was put there": Row(
        "def inner(x, by=2): return x * by\ndef program(x): return inner(x)", after="world.inner.__defaults__ = (4,)"
    ),
    "a keyword's default, a list": Row(
        "def inner(x, *, by=[2, 3]): return x * by[0] + by[1]\ndef program(x): return inner(x)", ("[2, 3]", "[2, 4]")
    ),
    "a default, an object": Row(
        "class By:\n    def __init__(self, n): self.n = n\n"
        "def inner(x, by=By(2)): return x * by.n\ndef program(x): return inner(x)", ("By(2))", "By(3))"),
    ),
    "a default, a decimal number": Row(
        "import decimal\ndef inner(x, by=decimal.Decimal('2')): return x * float(by)\n"
        "def program(x): return inner(x)", ("'2'", "'3'"),
    ),
    "a default, a fraction": Row(
        "import fractions\ndef inner(x, by=fractions.Fraction(2, 3)): return x * by.numerator\n"
        "def program(x): return inner(x)", ("(2, 3)", "(4, 3)"),
    ),
    "a default, a path": Row(
        "import pathlib\ndef inner(x, by=pathlib.Path('ab')): return x * len(str(by))\n"
        "def program(x): return inner(x)", ("'ab'", "'abc'"), kept=False,
    ),
    "a default, a pattern": Row(
        "import re\ndef inner(x, by=re.compile('a')): return x * 2 if by.match('ab') else x * 3\n"
        "def program(x): return inner(x)", ("compile('a')", "compile('b')"),
    ),
    "a default, a long pattern": Row(
        "import re\ndef inner(x, by=re.compile('a' * 300 + '|b')): return x * 2 if by.match('b') else x * 3\n"
        "def program(x): return inner(x)", ("'|b'", "'|c'"),
    ),
    "a default, a number of NumPy": Row(
        "import numpy\ndef inner(x, by=numpy.float64(2)): return x * float(by)\ndef program(x): return inner(x)",
        ("float64(2)", "float64(3)"),
    ),
    "a default, what is known of a dtype": Row(
        "def inner(x, by=torch.finfo(torch.float32)): return x * by.bits\ndef program(x): return inner(x)",
        ("torch.float32", "torch.float16"),
    ),
    "a default, a span of time": Row(
        "import datetime\ndef inner(x, by=datetime.timedelta(days=2)): return x * by.days\n"
        "def program(x): return inner(x)", ("days=2", "days=3"),
    ),
    "a default, a tuple of such": Row(
        "import decimal\ndef inner(x, by=((decimal.Decimal('2'),),)): return x * float(by[0][0])\n"
        "def program(x): return inner(x)", ("'2'", "'3'"),
    ),
    "a cell": Row(
        "def scaled(by):\n    def scale(x): return x * by\n    return scale\n"
        "def make(): return scaled(2.0), (torch.ones(3),)", ("scaled(2.0)", "scaled(3.0)"),
    ),
    "a cell of a function in a cell": Row(
        "def scaled(by):\n    def scale(x): return x * by\n    return scale\n"
        "def twice(one):\n    def run(x): return one(one(x))\n    return run\n"
        "def make(): return twice(scaled(2.0)), (torch.ones(3),)", ("scaled(2.0)", "scaled(3.0)"),
    ),
    "a decorator": Row(
        "import functools\ndef plus(n):\n    def decorate(f):\n        @functools.wraps(f)\n"
        "        def run(x): return f(x) + n\n        return run\n    return decorate\n"
        "@plus(1)\ndef inner(x): return x * 2\ndef program(x): return inner(x)", ("@plus(1)", "@plus(2)"),
    ),
    "six decorators": Row(
        "import functools\ndef plus(n):\n    def decorate(f):\n        @functools.wraps(f)\n"
        "        def run(x): return f(x) + n\n        return run\n    return decorate\n"
        "def inner(x): return x * 2\nrun = plus(6)(plus(5)(plus(4)(plus(3)(plus(2)(plus(1)(inner))))))\n"
        "def program(x): return run(x)", ("x * 2", "x * 3"),
    ),
    "a partial": Row(
        "import functools\ndef inner(x, by): return x * by\nrun = functools.partial(inner, by=2)\n"
        "def program(x): return run(x)", ("by=2", "by=3"),
    ),
    "a function with a cache": Row(
        "import functools\n@functools.lru_cache\ndef number(n): return n * 2\n"
        "def program(x): return x * number(3)", ("n * 2", "n * 3"),
    ),
    "what decides a function's result with a cache": Row(
        "import functools\nBY = 2\n@functools.lru_cache\ndef number(n): return n * BY\n"
        "def program(x): return x * number(3)", after="world.BY = 5",
    ),
    "a function's own attribute": Row(
        "def inner(x): return x * inner.by\ninner.by = 2\ndef program(x): return inner(x)", ("by = 2", "by = 3")
    ),
    "a function that torch's name was put on": Row(
        "import functools\nimport torch.nn.functional as F\n@functools.wraps(F.relu)\n"
        "def inner(x): return F.relu(x) * 2\ndef program(x): return inner(x)", ("* 2", "* 3"),
    ),
    "an itemgetter": Row(
        "import operator\nget = operator.itemgetter(0)\ndef program(x): return x * get((2, 3))",
        ("getter(0)", "getter(1)"),
    ),
    "an attrgetter": Row(
        "import operator\nget = operator.attrgetter('a')\nclass C:\n    a, b = 2, 3\n"
        "def program(x): return x * get(C)", ("getter('a')", "getter('b')"),
    ),
    "a methodcaller of what shows itself alike": Row(
        "import operator\nclass By:\n    def __init__(self, n): self.n = n\n    def __repr__(self): return 'By()'\n"
        "class C:\n    def get(self, by): return by.n\nget = operator.methodcaller('get', By(2))\nONE = C()\n"
        "def program(x): return x * get(ONE)", ("By(2)", "By(3)"), kept=False,
    ),
    # -- ways to what no name leads to ------------------------------------------------------------
    "a setting behind a module's own class": Row(
        "torch.manual_seed(0)\nMODEL = nn.MultiheadAttention(8, 2, batch_first=True).eval()\n"
        "def make():\n    x = torch.linspace(-1, 1, 48).reshape(2, 3, 8)\n    return MODEL, (x, x, x)",
        before="torch.backends.mha.set_fastpath_enabled(False)", differs=False,
    ),
    "a module's own class": Row(
        "import kept_helper\ndef program(x): return x * kept_helper.by",
        helper="import sys, types\nclass Own(types.ModuleType):\n    @property\n    def by(self): return 2\n"
        "sys.modules[__name__].__class__ = Own", helper_change=("return 2", "return 3"),
    ),
    "what a module's own class inherits from": Row(
        "import kept_helper\ndef program(x): return x * kept_helper.by",
        helper="import sys, types\nclass Base(types.ModuleType):\n    def __getattr__(self, name): return 2\n"
        "class Own(Base): pass\nmade = Own(__name__)\nsys.modules[__name__] = made",
        helper_change=("return 2", "return 3"),
    ),
    "a class that is made while the program runs": Row(
        "from torch.nn.utils.parametrize import register_parametrization\n"
        "class Scaled(nn.Module):\n    def forward(self, weight): return weight * 2\n"
        "MODEL = nn.Linear(3, 2, bias=False)\nnn.init.ones_(MODEL.weight)\n"
        "register_parametrization(MODEL, 'weight', Scaled())\n"
        "def make(): return MODEL, (torch.ones(3),)", ("weight * 2", "weight * 3"),
    ),
    "a method of such a class": Row(
        "class Base(nn.Module):\n    def forward(self, x): return self.run(x)\n"
        "def made(by):\n    def run(self, x): return x * by\n    return type('Made', (Base,), {'run': run})\n"
        "MODEL = made(2.0)()\ndef make(): return MODEL, (torch.ones(3),)", ("made(2.0)", "made(3.0)"),
    ),
    "a scripted function": Row(
        "@torch.jit.script\ndef inner(x):\n    return x * 2\ndef program(x): return inner(x)", ("x * 2", "x * 3")
    ),
    "classes that are keys": Row(
        "class A: pass\nclass B: pass\nTABLE = {A: 2, B: 3}\nONE = A()\n"
        "def program(x):\n    for kind, by in TABLE.items():\n        if isinstance(ONE, kind): x = x * by\n    return x",
        ("{A: 2, B: 3}", "{B: 2, A: 3}"),
    ),
    "functions and typing's forms that are keys": Row(
        "import typing\ndef inner(x): return x\nTABLE = {typing.Union: 2, inner: 3, typing.Any: 4}\n"
        "def program(x):\n    for by in TABLE.values(): x = x * by\n    return x", ("2, inner", "5, inner"),
    ),
    "a mapping of collections.abc": Row(
        "import collections.abc\nclass Table(collections.abc.Mapping):\n    def __init__(self, n): self.n = n\n"
        "    def __getitem__(self, key):\n        if key != 'by': raise KeyError(key)\n        return self.n\n"
        "    def __iter__(self): return iter(['by'])\n    def __len__(self): return 1\n"
        "ONE = Table(2)\ndef program(x): return x * ONE.get('by', 1) + ONE.get('shift', 1)", ("Table(2)", "Table(3)"),
    ),
    "a function that no class can override": Row(
        "import torch.nn.functional as F\ndef program(x): return F.hardswish(x * 2)", ("x * 2", "x * 3")
    ),
    # -- classes --------------------------------------------------------------------------------
    "an attribute of a class": Row("class C:\n    by = 2\ndef program(x): return x * C.by", ("by = 2", "by = 3")),
    "a method that was put on an instance": Row(
        "class M(nn.Module):\n    def inner(self, x): return x * 2\n    def forward(self, x): return self.inner(x)\n"
        "MODEL = M()\ndef make(): return MODEL, (torch.ones(3),)", after="world.MODEL.inner = lambda x: x * 5",
    ),
    "a method that was put on a class": Row(
        "class M(nn.Module):\n    def inner(self, x): return x * 2\n    def forward(self, x): return self.inner(x)\n"
        "def make(): return M(), (torch.ones(3),)", after="world.M.inner = lambda self, x: x * 5",
    ),
    "a base": Row(
        "class A:\n    by = 2\nclass B:\n    by = 3\nclass C(A, B): pass\nONE = C()\ndef program(x): return x * ONE.by",
        ("(A, B)", "(B, A)"),
    ),
    "a property": Row(
        "class C:\n    @property\n    def by(self): return 2\nONE = C()\ndef program(x): return x * ONE.by",
        ("return 2", "return 3"),
    ),
    "a property of a partial": Row(
        "import functools\ndef get(self, by): return by\n"
        "class C:\n    by = property(functools.partial(get, by=2))\nONE = C()\ndef program(x): return x * ONE.by",
        ("by=2", "by=3"), kept=False,
    ),
    "a property of an object": Row(
        "class Get:\n    def __init__(self, n): self.n = n\n    def __call__(self, one): return self.n\n"
        "class C:\n    by = property(Get(2))\nONE = C()\ndef program(x): return x * ONE.by",
        ("Get(2)", "Get(3)"), kept=False,
    ),
    "a static method, a partial": Row(
        "import functools\ndef inner(x, by): return x * by\n"
        "class C:\n    run = staticmethod(functools.partial(inner, by=2))\ndef program(x): return C.run(x)",
        ("by=2", "by=3"), kept=False,
    ),
    "a static method, an object": Row(
        "class Run:\n    def __init__(self, n): self.n = n\n    def __call__(self, x): return x * self.n\n"
        "class C:\n    run = staticmethod(Run(2))\ndef program(x): return C.run(x)", ("Run(2)", "Run(3)"), kept=False,
    ),
    "a class's method, a partial": Row(
        "import functools\ndef inner(kind, x, by): return x * by\n"
        "class C:\n    run = classmethod(functools.partial(inner, by=2))\ndef program(x): return C.run(x)",
        ("by=2", "by=3"), kept=False,
    ),
    "a method, a partial": Row(
        "import functools\nclass C:\n    def run(self, x, by): return x * by\n"
        "    half = functools.partialmethod(run, by=2)\nONE = C()\ndef program(x): return ONE.half(x)",
        ("by=2", "by=3"), kept=False,
    ),
    "a cached property": Row(
        "import functools\nclass C:\n    @functools.cached_property\n    def by(self): return 2\n"
        "ONE = C()\ndef program(x): return x * ONE.by", ("return 2", "return 3"),
    ),
    "a cached property that is there already": Row(
        "import functools\nclass C:\n    @functools.cached_property\n    def by(self): return 2\n"
        "ONE = C()\ndef program(x): return x * ONE.by", after="world.ONE.__dict__['by'] = 7",
    ),
    "a descriptor": Row(
        "class Get:\n    def __init__(self, n): self.n = n\n    def __get__(self, one, kind): return self.n\n"
        "class C:\n    by = Get(2)\nONE = C()\ndef program(x): return x * ONE.by", ("Get(2)", "Get(3)"), kept=False,
    ),
    "how attributes are found": Row(
        "class C:\n    def __getattr__(self, name): return 2\nONE = C()\ndef program(x): return x * ONE.by",
        ("return 2", "return 3"),
    ),
    "that attributes are found otherwise": Row(
        "class C:\n    def __init__(self): self.by = 2\nONE = C()\ndef program(x): return x * ONE.by",
        after="world.C.__getattribute__ = lambda self, name: 5",
    ),
    "a class's class": Row(
        "class Meta(type):\n    def __call__(kind, n): return n * 2\nclass C(metaclass=Meta): pass\n"
        "def program(x): return x * C(3)", ("n * 2", "n * 3"),
    ),
    "what a class's class says of instances": Row(
        "class Meta(type):\n    def __instancecheck__(kind, one): return True\nclass C(metaclass=Meta): pass\n"
        "def program(x): return x * 2 if isinstance(3, C) else x * 3", ("return True", "return False"),
    ),
    "that a class's class says nothing of instances": Row(
        "class Meta(type):\n    pass\nclass C(metaclass=Meta): pass\n"
        "def program(x): return x * 2 if isinstance(3, C) else x * 3",
        after="world.Meta.__instancecheck__ = lambda kind, one: True",
    ),
    "a class that was registered": Row(
        "import collections.abc\nclass C: pass\nONE = C()\n"
        "def program(x): return x * 2 if isinstance(ONE, collections.abc.Sequence) else x * 3",
        after="import collections.abc; collections.abc.Sequence.register(world.C)",
    ),
    "a subclass that was registered": Row(
        "import abc\nclass Base(abc.ABC): pass\nclass C: pass\n"
        "def program(x): return x * 2 if issubclass(C, Base) else x * 3", after="world.Base.register(world.C)",
    ),
    "a class's hook for subclasses": Row(
        "import abc\nclass Base(abc.ABC):\n    @classmethod\n    def __subclasshook__(kind, other): return True\n"
        "class C: pass\ndef program(x): return x * 2 if issubclass(C, Base) else x * 3",
        ("return True", "return False"), kept=False,
    ),
    "an enumeration's value": Row(
        "import enum\nclass E(enum.Enum):\n    A = 2\n    B = 5\ndef program(x): return x * E.A.value",
        ("A = 2", "A = 3"),
    ),
    "an enumeration's value, an object": Row(
        "import enum, functools\ndef inner(x, by): return x * by\n"
        "class E(enum.Enum):\n    A = functools.partial(inner, by=2)\ndef program(x): return E.A.value(x)",
        ("by=2", "by=3"),
    ),
    "which member of an enumeration has a value": Row(
        "import enum\nclass E(enum.Enum):\n    A = 2\n    B = 3\n"
        "def program(x): return x * 2 if E(2) is E.A else x * 3", ("A = 2\n    B = 3", "A = 3\n    B = 2"),
    ),
    "an enumeration's order": Row(
        "import enum\nclass E(enum.Enum):\n    A = 2\n    B = 3\n"
        "def program(x):\n    for one in E: x = x * one.value + 1\n    return x",
        ("A = 2\n    B = 3", "B = 3\n    A = 2"),
    ),
    "a number's enumeration": Row(
        "import enum\nclass E(enum.IntEnum):\n    A = 2\n    B = 5\ndef program(x): return x * E.A", ("A = 2", "A = 3"), kept=False,
    ),
    "a dataclass's field": Row(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    by: int = 2\ndef program(x): return x * C().by",
        ("= 2", "= 3"),
    ),
    "a dataclass's fields in another order": Row(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int\n    b: int\n"
        "def program(x): return x * C(2, 3).a", ("a: int\n    b: int", "b: int\n    a: int"),
    ),
    "a dataclass's way to make a value": Row(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n"
        "    by: int = dataclasses.field(default_factory=lambda: 2)\ndef program(x): return x * C().by",
        ("lambda: 2", "lambda: 3"),
    ),
    "a dataclass made at run time": Row(
        "import dataclasses\nclass Base:\n    def by(self): return 2\n"
        "C = dataclasses.make_dataclass('C', ['a'], bases=(Base,), namespace={'z': 1})\nONE = C(1)\n"
        "def program(x): return x * ONE.by()", ("{'z': 1}", "{'by': lambda self: 3}"),
    ),
    "a named tuple's fields": Row(
        "import collections\nP = collections.namedtuple('P', 'a b')\nONE = P(2, 3)\n"
        "def program(x): return x * ONE.a", ("'a b'", "'b a'"), kept=False,
    ),
    "slots": Row(
        "class C:\n    __slots__ = ('a', 'b')\nONE = C()\nONE.a, ONE.b = 2, 3\ndef program(x): return x * ONE.a",
        ("2, 3", "4, 3"),
    ),
    "what a pattern matches": Row(
        "class P:\n    __match_args__ = ('a', 'b')\n    def __init__(self): self.a, self.b = 2, 3\nONE = P()\n"
        "def program(x):\n    match ONE:\n        case P(first, _): return x * first\n    return x",
        ("('a', 'b')", "('b', 'a')"),
    ),
    "a module's class": Row(
        "import kept_helper\ndef program(x): return x * kept_helper.SCALE", helper="SCALE = 2.0",
        after="import types\nclass Other(types.ModuleType):\n    SCALE = property(lambda self: 7.0)\n"
        "sys.modules['kept_helper'].__class__ = Other",
    ),
    "a class of the same name in another module": Row(
        "from kept_helper import C\ndef program(x): return x * C.by",
        helper="class C:\n    by = 2", helper_change=("by = 2", "by = 3"),
    ),
    "a model's numbers, of parameters alike": Row(
        "def make():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Conv1d(2, 2, 3, padding=1)), "
        "(torch.ones(1, 2, 8),)", ("padding=1", "padding=2"),
    ),
    "a layer's slope": Row(
        "def make(): return nn.Sequential(nn.LeakyReLU(0.1), nn.Flatten()), (-torch.ones(2, 3),)", ("0.1", "0.2"),
    ),
    "a layer in evaluation": Row(
        "def make():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "
        "(torch.arange(6.0).view(2, 3),)", ("nn.BatchNorm1d(3))", "nn.BatchNorm1d(3)).eval()"),
    ),
    "a graph of torch.fx": Row(
        "import torch.fx\nclass M(nn.Module):\n    def forward(self, x): return x * 2\n"
        "def make(): return torch.fx.symbolic_trace(M()), (torch.ones(3),)", ("x * 2", "x * 3"),
    ),
    # -- data -----------------------------------------------------------------------------------
    "a dict's order": Row(
        "BY = {'a': 2, 'b': 3}\ndef program(x):\n    for by in BY.values(): x = x * by + 1\n    return x",
        ("{'a': 2, 'b': 3}", "{'b': 3, 'a': 2}"),
    ),
    "a set's order": Row(
        "def program(x):\n    for name in {'sin', 'cos', 'atan', 'exp', 'tanh'}: x = getattr(torch, name)(x)\n"
        "    return x", kept=False,
    ),
    "the order of a module's set": Row(
        "NAMES = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    for name in NAMES: x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "a set's order in a list": Row(
        "NAMES = frozenset({'sin', 'cos', 'atan', 'exp', 'tanh'})\n"
        "def program(x):\n    for name in list(NAMES): x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "a set's order by unpacking": Row(
        "NAMES = frozenset({'sin', 'cos', 'atan', 'exp', 'tanh'})\n"
        "def program(x):\n    first, *others = NAMES\n    return getattr(torch, first)(x)", kept=False,
    ),
    "a set's order by a comprehension": Row(
        "NAMES = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    for f in [getattr(torch, name) for name in NAMES]: x = f(x)\n    return x", kept=False,
    ),
    "a set's order by joining": Row(
        "NAMES = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    for name in ' '.join(NAMES).split(): x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "what is taken from a set": Row(
        "def program(x):\n    names = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n    return getattr(torch, names.pop())(x)",
        kept=False,
    ),
    "the next of a set": Row(
        "NAMES = {'sin', 'cos', 'atan', 'exp', 'tanh'}\ndef program(x): return getattr(torch, next(iter(NAMES)))(x)",
        kept=False,
    ),
    "a set's order in a union": Row(
        "A, B = {'sin', 'cos'}, {'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    for name in A | B: x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "the order of a difference of keys": Row(
        "A = dict.fromkeys(['sin', 'cos', 'atan', 'exp', 'tanh'])\n"
        "def program(x):\n    for name in A.keys() - {'cos'}: x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "keys made of a set": Row(
        "A = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    for name in dict.fromkeys(A): x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "a list extended by a set": Row(
        "A = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    names = []\n    names.extend(A)\n    names += A\n"
        "    for name in names: x = getattr(torch, name)(x)\n    return x", kept=False,
    ),
    "the least of a set by a key": Row(
        "A = {'sin', 'cos', 'atan', 'exp'}\ndef program(x): return getattr(torch, min(A, key=lambda name: 0))(x)",
        kept=False,
    ),
    "a sorted set": Row(
        "A = {'sin', 'cos', 'atan', 'exp', 'tanh'}\n"
        "def program(x):\n    for name in sorted(A): x = getattr(torch, name)(x)\n    return x if 'sin' in A else -x",
        ("'exp', 'tanh'}", "'exp'}"), kept=False,
    ),
    "a set of numbers": Row(
        "A = {3, 5, 2}\ndef program(x):\n    for by in A: x = x * by + 1\n    return x", ("3, 5, 2", "3, 5"),
    ),
    "an attribute of an object": Row(
        "class C: pass\nONE = C()\nONE.by = 2\ndef program(x): return x * ONE.by", after="world.ONE.by = 3"
    ),
    "a name that hides a builtin": Row(
        "def program(x): return x * abs(-2)", after="world.abs = lambda n: 5"
    ),
    "a builtin": Row("def program(x): return x * abs(-2)", before="import builtins; builtins.abs = lambda n: 5"),
    "builtins of its own": Row(
        "WORLD = {'__builtins__': {'abs': abs}}\nexec(compile('def program(x): return x * abs(-2)', 'own', 'exec'), WORLD)\n"
        "program = WORLD['program']", ("{'abs': abs}", "{'abs': lambda n: 5}"), kept=False,
    ),
    "builtins of its own, in the second alone": Row(
        "def program(x): return x * abs(-2)",
        after="import types; world.program = types.FunctionType(world.program.__code__, "
        "{**vars(world), '__builtins__': {'abs': lambda n: 5}})",
    ),
    "code that was run as text": Row(
        "WORLD = {}\nexec(compile('def inner(x): return x * 2', '<cell>', 'exec'), WORLD)\ninner = WORLD['inner']\n"
        "def program(x): return inner(x)", ("x * 2", "x * 3"),
    ),
    "a name that is not there": Row(
        "class C: pass\nONE = C()\ndef program(x): return x * getattr(ONE, 'by', 2)", after="world.ONE.by = 5"
    ),
    "a global that is not there": Row(
        "def program(x):\n    try: return x * BY\n    except NameError: return x", after="world.BY = 5"
    ),
    "a module that was loaded": Row(
        "import sys\ndef program(x): return x * 2 if 'wave' in sys.modules else x * 3", before="import wave",
    ),
    "a module that is missing": Row(
        "def program(x):\n    try: import kept_other\n    except ImportError: return x\n    return x * 2",
        before="import types; sys.modules['kept_other'] = types.ModuleType('kept_other')", kept=False,
    ),
    "another function by that name in a table": Row(
        "def a(x): return x * 2\ndef b(x): return x * 3\nTABLE = {'run': a}\ndef program(x): return TABLE['run'](x)",
        ("{'run': a}", "{'run': b}"),
    ),
    "how an object is copied": Row(
        "import copy\nclass C:\n    def __init__(self): self.by = 2\nONE = C()\n"
        "def program(x): return x * copy.copy(ONE).by",
        after="import copyreg\ndef made():\n    one = world.C(); one.by = 5; return one\n"
        "copyreg.pickle(world.C, lambda one: (made, ()))", kept=False,
    ),
    "what torch's trees know": Row(
        "import torch.utils._pytree as pytree\nclass C:\n    def __init__(self): self.by = 2\nONE = C()\n"
        "def program(x): return x * len(pytree.tree_leaves([ONE, ONE]))",
        after="import torch.utils._pytree as p; p.register_pytree_node(world.C, lambda c: ([1, 2], None), lambda v, c: c)",
        kept=False,
    ),
    # -- the process ----------------------------------------------------------------------------
    "an environment variable": Row(
        "import os\ndef program(x): return x * float(os.environ.get('KEPT_BY', '2'))", environment={"KEPT_BY": "3"},
    ),
    "an environment variable by getenv": Row(
        "import os\ndef program(x): return x * float(os.getenv('KEPT_BY', '2'))", environment={"KEPT_BY": "3"},
    ),
    "an environment variable, read at import": Row(
        "import os\nBY = float(os.environ.get('KEPT_BY', '2'))\ndef program(x): return x * BY",
        environment={"KEPT_BY": "3"},
    ),
    "the folder it runs in": Row(
        "import os\ndef program(x): return x * len(os.getcwd())", before="import os; os.chdir('/')",
    ),
    "the default dtype": Row(
        "def program(x): return x + 1, torch.tensor(0.1)",
        before="torch.set_default_dtype(torch.float64)",
    ),
    "the default device": Row(
        "def program(x): return (x * 2, torch.ones(2).device.type == 'meta')", before="torch.set_default_device('meta')",
    ),
    "gradients off": Row(
        "def program(x): return (x * 2).requires_grad\n"
        "def make(): return program, (torch.ones(3, requires_grad=True),)", before="torch.set_grad_enabled(False)",
    ),
    "autocast": Row(
        "def program(x): return x @ x\ndef make(): return program, (torch.ones(3, 3),)",
        before="torch.autocast('cpu', dtype=torch.bfloat16).__enter__()",
    ),
    "another dtype of autocast": Row(
        "casts = torch.autocast('cpu', dtype=torch.bfloat16)\ncasts.__enter__()\n"
        "def program(x): return x @ x / 3\ndef make(): return program, (torch.full((3, 3), 0.3),)",
        ("torch.bfloat16", "torch.float16"),
    ),
    "autocast without its cache": Row(
        "torch.set_autocast_cache_enabled(True)\ndef program(x): return x * torch.is_autocast_cache_enabled()",
        ("(True)", "(False)"),
    ),
    "deterministic algorithms": Row(
        "def program(x): return x * (2 if torch.are_deterministic_algorithms_enabled() else 3)",
        before="torch.use_deterministic_algorithms(True)",
    ),
    "the number of threads": Row(
        "def program(x): return x * torch.get_num_threads()", before="torch.set_num_threads(torch.get_num_threads() + 1)"
    ),
    "a function of torch": Row(
        "def program(x): return torch.relu(x)", before="torch.relu = torch.square",
    ),
    "a function of torch's functions": Row(
        "import torch.nn.functional as F\ndef program(x): return F.softplus(x)",
        before="import torch.nn.functional as F; F.softplus = torch.square",
    ),
    "a default of a function of torch": Row(
        "import torch.nn.functional as F\ndef program(x): return F.celu(-x)",
        before="import torch.nn.functional as F; F.celu.__defaults__ = (3.0, False)",
    ),
    "a method of tensors": Row(
        "def program(x): return x.relu()", before="torch.Tensor.relu = lambda self: self * 5",
    ),
    "a call of all modules": Row(
        "def make(): return nn.Sequential(nn.Tanh()), (torch.ones(3),)",
        before="torch.nn.Module.__call__ = lambda self, x: self.forward(x) * 5",
    ),
    "the call behind a call of all modules": Row(
        "def make(): return nn.Sequential(nn.Tanh()), (torch.ones(3),)",
        before="torch.nn.Module._call_impl = lambda self, x: self.forward(x) * 5",
    ),
    "attributes of all modules": Row(
        "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.act = nn.Tanh()\n"
        "    def forward(self, x): return self.act(x)\ndef make(): return M(), (torch.ones(3),)",
        before="torch.nn.Module.__getattr__ = lambda self, name: torch.exp",
    ),
    "a hook of all modules": Row(
        "def make(): return nn.Sequential(nn.Tanh()), (torch.ones(3),)",
        before="torch.nn.modules.module.register_module_forward_hook(lambda m, a, r: r * 5)",
    ),
    "a hook of one module": Row(
        "MODEL = nn.Sequential(nn.Tanh())\ndef make(): return MODEL, (torch.ones(3),)",
        after="world.MODEL[0].register_forward_hook(lambda m, a, r: r * 5)",
    ),
    "a hook's code": Row(
        "MODEL = nn.Sequential(nn.Tanh())\nMODEL[0].register_forward_hook(lambda m, a, r: r * 5)\n"
        "def make(): return MODEL, (torch.ones(3),)", ("r * 5", "r * 6"),
    ),
    "a function of Python's library": Row(
        "import math\ndef program(x): return x * math.floor(2.5)", before="import math; math.floor = lambda n: 5"
    ),
    "a class of Python's library": Row(
        "import collections\ndef program(x): return x * len(collections.OrderedDict(a=2))",
        before="import collections; collections.OrderedDict = lambda **k: [1, 2, 3]",
    ),
    "a method of a class of Python's library": Row(
        "import contextlib\nclass C(contextlib.ContextDecorator):\n    by = 2\nONE = C()\n"
        "def program(x): return x * getattr(ONE, 'other', 2)", before="import contextlib; contextlib.ContextDecorator.other = 5",
    ),
    "a modified function of Python's library": Row(
        "import functools\ndef program(x): return x * functools.reduce(lambda a, b: a + b, [1, 2])",
        before="import functools; functools.reduce = lambda f, xs: 5",
    ),
    "the import of modules": Row(
        "def program(x):\n    import math\n    return x * math.floor(2.5)",
        before="import builtins, types\nown = builtins.__import__\ndef given(name, globals=None, *more):\n"
        "    asked = name == 'math' and globals['__name__'] == 'kept_program'\n"
        "    return types.SimpleNamespace(floor=lambda n: 5) if asked else own(name, globals, *more)\n"
        "builtins.__import__ = given",
    ),
    "a logger's level": Row(
        "import logging\nNOTES = []\nclass Handler(logging.Handler):\n"
        "    def emit(self, record): NOTES.append(record.getMessage())\nLOG = logging.getLogger('kept_log')\n"
        "LOG.addHandler(Handler())\ndef program(x):\n    if LOG.isEnabledFor(logging.DEBUG): x = x + 1\n"
        "    LOG.debug('said')\n    return x * 2",
        after="import logging; logging.getLogger('kept_log').setLevel(logging.DEBUG)", kept=False,
    ),
    "warnings that are errors": Row(
        "import warnings\ndef program(x):\n    warnings.warn('said')\n    return x * 2",
        before="import warnings; warnings.simplefilter('error')", kept=False,
    ),
    "a variable of the context": Row(
        "import contextvars\nBY = contextvars.ContextVar('by', default=2)\ndef program(x): return x * BY.get()",
        after="world.BY.set(5)", kept=False,
    ),
    "arguments of the process": Row(
        "import sys\ndef program(x): return x * len(sys.argv)", before="sys.argv.append('more')",
    ),
    "an operator of the program's own": Row(
        "@torch.library.custom_op('kept_world::run', mutates_args=())\ndef run(x: torch.Tensor) -> torch.Tensor: return x * 2\n"
        "@run.register_fake\ndef fake(x): return torch.empty_like(x)\ndef program(x): return run(x) + 1",
        ("x * 2", "x * 3"), kept=False,
    ),
    "what shape an operator of the program's own gives": Row(
        "LIB = torch.library.Library('kept_world', 'DEF')\nLIB.define('take(Tensor x) -> Tensor')\n"
        "def take(x): return x[:2].clone()\nLIB.impl('take', take, 'CPU')\n"
        "torch.library.register_fake('kept_world::take', lambda x: x.new_empty(2), lib=LIB)\nOP = torch.ops.kept_world.take.default\n"
        "def program(x): return OP(x).shape[0] * x",
        ("x[:2].clone()", "x[:3].clone()"), kept=False,
    ),
    "a mark on a function": Row(
        "def inner(x): return x * 2\ndef program(x): return inner(x) + 1",
        after="import torchcompile; torchcompile.disable(world.inner)", differs=False,
    ),
    "a class of tensors": Row(
        "class T(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None):\n"
        "        with torch._C.DisableTorchFunctionSubclass(): return f(*args, **(kwargs or {})) * 2\n"
        "def program(x): return x + 1\ndef make(): return program, (torch.ones(3).as_subclass(T),)",
        ("{})) * 2", "{})) * 3"),
    ),
    "a parameter's gradient": Row(
        "P = nn.Parameter(torch.ones(3))\ndef program(x): return x * 2 if P.grad is None else x * 3",
        after="world.P.grad = torch.ones(3)",
    ),
    "a name that torch lacks": Row(
        "def program(x): return x * getattr(torch, 'kept_by', 2)", before="torch.kept_by = 5",
    ),
    "a name that Python's library lacks": Row(
        "import math\ndef program(x): return x * (math.kept_by if hasattr(math, 'kept_by') else 2)",
        before="import math; math.kept_by = 5",
    ),
    "a name that no builtin has": Row(
        "def program(x):\n    try: return x * kept_by\n    except NameError: return x",
        before="import builtins; builtins.kept_by = 5",
    ),
    "a name that tensors lack": Row(
        "def program(x): return x * getattr(x, 'kept_by', 2)", before="torch.Tensor.kept_by = 5",
    ),
    "a name that hides a builtin in torch": Row(
        "import torch.nn.functional as F\ndef program(x): return F.normalize(x, dim=0) * len(F.pad(x, [1, 1]))",
        before="import torch.nn.functional as F; F.len = lambda given: 5", differs=False,
    ),
    "Python's numbers by chance": Row(
        "import random\ndef program(x): return x * random.random()\n"
        "def make():\n    random.seed(0)\n    return program, (torch.ones(4),)", ("seed(0)", "seed(1)"),
    ),
    "NumPy's numbers by chance": Row(
        "import numpy\ndef program(x): return x * float(numpy.random.rand())\n"
        "def make():\n    numpy.random.seed(0)\n    return program, (torch.ones(4),)", ("seed(0)", "seed(1)"),
    ),
    "the seed": Row(
        "def program(x): return x * torch.initial_seed()\n"
        "def make():\n    torch.manual_seed(2)\n    return program, (torch.ones(4),)", ("seed(2)", "seed(3)"),
    ),
    "an object's class": Row(
        "class C:\n    def by(self): return 2\nclass D(C):\n    def by(self): return 3\nONE = C()\n"
        "def program(x): return x * ONE.by()", after="world.ONE.__class__ = world.D",
    ),
    "a class's bases": Row(
        "class A:\n    by = 2\nclass B:\n    by = 3\nclass C(A): pass\nONE = C()\ndef program(x): return x * ONE.by",
        after="world.C.__bases__ = (world.B,)",
    ),
    "a generator": Row(
        "def numbers():\n    yield 2\n    yield 3\ndef program(x):\n    for by in numbers(): x = x * by\n    return x",
        ("yield 3", "yield 4"),
    ),
    "a context of a generator": Row(
        "import contextlib\n@contextlib.contextmanager\ndef by():\n    yield 2\n"
        "def program(x):\n    with by() as n: return x * n", ("yield 2", "yield 3"),
    ),
    "a named tuple's default": Row(
        "import typing\nclass P(typing.NamedTuple):\n    by: int = 2\ndef program(x): return x * P().by",
        ("= 2", "= 3"), kept=False,
    ),
    "a base's way to make objects": Row(
        "class A:\n    def __init__(self): self.by = 2\nclass C(A):\n    def __init__(self): super().__init__()\n"
        "def program(x): return x * C().by", ("self.by = 2", "self.by = 3"),
    ),
    "a function of NumPy": Row(
        "import numpy\ndef program(x): return x * float(numpy.sqrt(4.0))",
        before="import numpy; numpy.sqrt = lambda n: numpy.float64(5.0)",
    ),
    "a mode of functions": Row(
        "def program(x): return x + 1",
        before="from torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n"
        "    def __torch_function__(self, f, types, args=(), kwargs=None):\n"
        "        made = f(*args, **(kwargs or {}))\n"
        "        return made * 2 if getattr(f, '__name__', '') == 'add' else made\nM().__enter__()",
    ),
    "how exact products are": Row(
        "def program(x): return x * len(torch.get_float32_matmul_precision())",
        before="torch.set_float32_matmul_precision('medium')",
    ),
    "the fast path of attention": Row(
        "def program(x): return x * (2 if torch.backends.mha.get_fastpath_enabled() else 3)",
        before="torch.backends.mha.set_fastpath_enabled(False)",
    ),
    "what a thread has": Row(
        "import threading\nHELD = threading.local()\nHELD.by = 2\ndef program(x): return x * HELD.by",
        after="world.HELD.by = 3",
    ),
    "a hook of a gradient": Row(
        "P = nn.Parameter(torch.ones(3))\nLEAVES = [P]\ndef program(x): return x * P\n"
        "def make(): return program, (torch.ones(3),)", after="world.P.register_hook(lambda gradient: gradient * 5)",
    ),
    "a function of autograd's": Row(
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x * 2\n"
        "    @staticmethod\n    def backward(ctx, g): return g * 3\n"
        "P = nn.Parameter(torch.ones(3))\nLEAVES = [P]\ndef program(x): return F.apply(x * P)\n"
        "def make(): return program, (torch.ones(3),)", ("g * 3", "g * 4"), kept=False,
    ),
    "the day": Row(
        "import datetime\ndef program(x): return x * datetime.datetime.now().year",
        before="import datetime\nclass D(datetime.datetime):\n    @classmethod\n    def now(cls): return datetime.date(3000, 1, 1)\n"
        "datetime.datetime = D", kept=False,
    ),
}  # fmt: skip
