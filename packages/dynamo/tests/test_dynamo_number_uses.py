"""What Python does with a number, where the number is one of each call: taken out of a tensor, an argument that has
changed, a size. C code refuses symbols with errors of many types, and a program that handles errors is to see none of
those; what stands in for a number or a tensor has no name of its own that a program could read."""

from __future__ import annotations

import array
import bisect
import calendar
import cmath
import collections
import copy
import datetime
import decimal
import fractions
import functools
import heapq
import io
import itertools
import json
import math
import operator
import pickle
import random
import re
import statistics
import string
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from primtorch.fake import FakeTensor

USES: dict[str, Callable[[Any], Any]] = {
    "bit_length": lambda n: n.bit_length(),
    "to_bytes": lambda n: n.to_bytes(4, "big"),
    "numerator": lambda n: n.numerator,
    "conjugate": lambda n: n.conjugate(),
    "real": lambda n: n.real,
    "imag": lambda n: n.imag,
    "hex_f": lambda n: float(n).hex(),
    "is_integer": lambda n: float(n).is_integer(),
    "ratio": lambda n: n.as_integer_ratio(),
    "pd": lambda n: "%d" % n,  # noqa: UP031
    "p5.2": lambda n: "%5.2f" % n,  # noqa: UP031
    "f04": lambda n: f"{n:04}",
    "fx": lambda n: format(n, "x"),
    "fe": lambda n: format(n, ".3e"),
    "hex": hex,
    "bin": bin,
    "oct": oct,
    "chr": chr,
    "divmod": lambda n: divmod(n, 2),
    "pow3": lambda n: pow(n, 2, 5),
    "round1": lambda n: round(n, 1),
    "round": round,
    "index": operator.index,
    "dindex": lambda n: n.__index__(),
    "range": lambda n: list(range(n)),
    "bytes": lambda n: bytes(n),
    "lmul": lambda n: [1] * n,
    "smul": lambda n: "a" * n,
    "comb": lambda n: math.comb(n, 2),
    "gcd": lambda n: math.gcd(n, 6),
    "isqrt": lambda n: math.isqrt(n),
    "fact": lambda n: math.factorial(n),
    "pack": lambda n: struct.pack("i", n),
    "packf": lambda n: struct.pack("f", n),
    "json": json.dumps,
    "jsonl": lambda n: json.dumps([n, {"a": n}]),
    "hash": hash,
    "sorted": lambda n: sorted([n, 3, -1]),
    "int": int,
    "float": float,
    "complex": complex,
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
    "Random": lambda n: random.Random(n).random(),
    "delta": lambda n: datetime.timedelta(n),
    "shl": lambda n: n << 2,
    "inv": lambda n: ~n,
    "neg": lambda n: -n,
    "and": lambda n: n & 3,
    "isint": lambda n: isinstance(n, int),
    "type": lambda n: type(n) is int,
    "intadd": lambda n: int.__add__(n, 1),
    "floatadd": lambda n: float.__add__(n, 1.0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "mean": lambda n: statistics.mean([n, 2]),
    "islice": lambda n: list(itertools.islice("abcdefgh", n)),
    "repeat": lambda n: list(itertools.repeat(1, n)),
    "count": lambda n: next(itertools.count(n)),
    "array": lambda n: array.array("d", [n]),
    "write": lambda n: io.StringIO().write(str(n)),
    "gmtime": lambda n: time.gmtime(n).tm_year,
    "isleap": lambda n: calendar.isleap(n),
    "zfill": lambda n: "a".zfill(n),
    "center": lambda n: "a".center(n),
    "Counter": lambda n: collections.Counter([n, n]),
    "heap": lambda n: heapq.nsmallest(n, [3, 1, 2]),
    "bisect": lambda n: bisect.bisect([1, 2, 3], n),
    "partial": lambda n: functools.partial(max, n)(2),
    "dset": lambda n: {n: 1},
    "din": lambda n: n in {3: 1, 2: 1},
    "dget": lambda n: {3: 1, 2: 2, 4: 5, 5: 6}.get(n),
    "lin": lambda n: n in [1, 2, 3],
    "lindex": lambda n: [1, 2, 3, 4, 5].index(n),
    "lcount": lambda n: [1, 2, 3].count(n),
    "insert": lambda n: [1, 2, 3].insert(n, 1),
    "pop": lambda n: [1, 2, 3, 4, 5, 6, 7, 8].pop(n),
    "enumerate": lambda n: list(enumerate("ab", n)),
    "deque": lambda n: collections.deque([1, 2, 3], n),
    "rot": lambda n: collections.deque([1, 2, 3]).rotate(n),
    "round_": lambda n: n.__round__(),
    "trunc": math.trunc,
    "sqrt": math.sqrt,
    "csqrt": cmath.sqrt,
    "log2": math.log2,
    "isnan": math.isnan,
    "ldexp": lambda n: math.ldexp(1.0, n),
    "frexp": math.frexp,
    "modf": math.modf,
    "fsum": lambda n: math.fsum([n, 1]),
    "hypot": lambda n: math.hypot(n, 1),
    "atan2": lambda n: math.atan2(n, 1),
    "copysign": lambda n: math.copysign(n, -1),
    "isclose": lambda n: math.isclose(n, 2),
    "prod": lambda n: math.prod([n, 2]),
    "str": str,
    "repr": repr,
    "ascii": ascii,
    "bool": bool,
    "max": lambda n: max(n, 2),
    "minl": lambda n: min([n, 2]),
    "sum": lambda n: sum([n, 2]),
    "abs": abs,
    "eqs": lambda n: n == "a",
    "lts": lambda n: n < "a",
    "adds": lambda n: n + "a",
    "call": lambda n: n(),
    "attr": lambda n: n.nothing,
    "getitem": lambda n: n[0],
    "iter": lambda n: list(n),
    "len": len,
    "strf": lambda n: f"{n:>5}|{n!r}",
    "tmpl": lambda n: string.Template("$a").substitute(a=n),
    "resub": lambda n: re.sub("a", "b", "aaa", count=n),
    "match": lambda n: (lambda v: {int: "i"}.get(type(v)))(n),
    "hasattr": lambda n: (hasattr(n, "bit_length"), hasattr(n, "node"), hasattr(n, "hex")),
    "dir": lambda n: len(dir(n)),
    "fromkeys": lambda n: dict.fromkeys([n]),
    "frozenset": lambda n: frozenset([n]),
    "zip": lambda n: list(zip([n], [1])),
    "setattr": lambda n: vars(type("T", (), {"a": n}))["a"],
    "slice": lambda n: [1, 2, 3, 4][:n],
    "slicei": lambda n: slice(n).indices(10),
    "div0": lambda n: 1 / (n - n),
    "mod0": lambda n: 1 % (n - n),
    "intbase": lambda n: int("11", n),
    "ord": lambda n: ord(n),
    "bytearray": lambda n: bytearray([n]),
    "memory": lambda n: memoryview(b"abcdefgh")[n],
    "tobytes": lambda n: n.to_bytes(1, "little"),
    "frombytes": lambda n: int.from_bytes([n], "big"),
    "mul_t": lambda n: (1, 2) * n,
    "mat": lambda n: n @ n,
    "raise_": lambda n: (_ for _ in ()).throw(KeyError(n)),
}
KINDS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], tuple[Any, ...]]] = {
    "int out of a tensor": (lambda x, n: int(x.sum().item()) % 3 + n, (2, 3, 4, 1)),
    "float out of a tensor": (lambda x, n: x.sum().item() + n, (2, 3.5, 4, 1)),
    "int": (lambda x, n: n + 0, (2, 3, 4, 1)),
    "float": (lambda x, n: n + 0, (2.0, 3.5, 4.0, 1.25)),
    "size": (lambda x, n: x.shape[0], (2, 3, 4, 5)),
}


def _backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    return graph.forward


@pytest.mark.parametrize("kind", KINDS)
def test_what_python_does_with_a_number(kind: str) -> None:
    number, values = KINDS[kind]
    wrong = []
    for name, use in USES.items():

        def program(x: torch.Tensor, n: Any) -> Any:
            n = number(x, n)
            try:
                return x * 2, use(n)
            except Exception as error:
                return x * 3, type(error), str(error)

        options = torchdynamo.CaptureOptions(strict=True, dynamic=True if kind == "size" else None)
        compiled = torchdynamo.optimize(_backend, options=options)(program)
        for n in values:
            x = torch.arange(float(n if kind == "size" else 3)) % (3 if n != 4 else 7)
            expected, found = repr(program(x, n)), repr(compiled(x, n))
            if found != expected:
                wrong.append((name, n, expected, found))
                break
    assert not wrong


def test_what_stands_in_for_a_tensor_has_no_names_of_its_own() -> None:
    own = sorted(set(dir(FakeTensor)) - set(dir(torch.Tensor)))

    def program(x: torch.Tensor) -> Any:
        y, told = x + 1, []
        for tensor in (x, y):
            for name in ("absent", *own):
                try:
                    told.append(getattr(tensor, name))
                except AttributeError as error:
                    told.append((str(error), error.name, error.obj is tensor, hasattr(tensor, name)))
        return y, told

    compiled = torchdynamo.optimize(_backend, options=torchdynamo.CaptureOptions(strict=True))(program)
    for x in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert repr(compiled(x)) == repr(program(x))
