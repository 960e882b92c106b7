"""Names of generated functions, as profilers show them: `amax_exp_sum_reduction_1f0c93ab`.

A name says what is computed, by which design, and has a few digits of the text. All of it comes from a kernel's own
loops: kernels of equal text have equal names whichever graphs they stand in, so they stay one kernel in a program, and
a cache on disk finds them for every graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from primtorch.prims import PRIMS
from torchinductor.ir import (
    Apply,
    Bitcast,
    Body,
    IndexExpr,
    Indirect,
    Load,
    RandomBits,
    Reduce,
    ReduceColumn,
    Scan,
    Store,
    ToDtype,
)

PLACEHOLDER = "KERNEL"  # where the name goes in a text that has none yet
_LONGEST = 60
_DIGITS = 8
_MOST = 4  # words
_FEW = 3  # words that tell much: where there are fewer, plain ones make up for them

# What a word tells of a kernel that does other things, too: much, little, or nothing.
_TELLING, _PLAIN, _CHECKS, _MOVES = range(4)

_SCANS: Mapping[str, str] = MappingProxyType({"sum": "cumsum", "prod": "cumprod"})
_RANKS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("add", "sub", "mul", "div", "neg", "fma", "reciprocal", "where"), _PLAIN)
    | {prim.name: _CHECKS for prim in PRIMS.values() if prim.family in ("comparison", "predicate")}
    | dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_not"), _CHECKS)
)


def described(bodies: Iterable[Body], *design: str, otherwise: str = "copy") -> str:
    """What loops with these bodies compute, or else `otherwise`, and the design that they are written by."""
    ranks: dict[str, int] = {}
    for body in bodies:
        for word, rank in _words(body):
            ranks.setdefault(word, rank)
    telling, plain, checks, moves = ([word for word, rank in ranks.items() if rank == kind] for kind in range(4))
    chosen = {*telling[:_MOST], *plain[: max(0, _FEW - len(telling))]} or {*(checks or moves)[:_FEW]}
    words = [word for word in ranks if word in chosen]  # in the order in which they run
    words = words or ([otherwise] if otherwise else [])
    while len("_".join((*words, *design))) > _LONGEST - _DIGITS - 1:
        words.pop()
    return "_".join((*words, *design))


def name_of(title: str, text: str) -> str:
    """The name of a function with this text, in which `PLACEHOLDER` is where the name goes."""
    return f"{title}_{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


def _words(body: Body) -> Iterator[tuple[str, int]]:
    """A word for each operation that has one, and its rank."""
    read = {name for op in body.of(Load) for name in op.index.symbols()}
    written = {name for op in body.of(Store) if op.mode == "set" for name in op.index.symbols()}
    for op in body.ops:
        match op:
            case Reduce(kind=kind) | ReduceColumn(kind=kind):
                yield kind, _TELLING
            case Scan(kind=kind):
                yield _SCANS.get(kind, kind), _TELLING
            case RandomBits():
                yield "random", _TELLING
            case Store(mode=mode) if mode != "set":
                yield f"scatter_{mode}", _TELLING
            case Indirect(symbol=symbol):
                yield from (("gather", _TELLING),) if symbol in read else ()
                yield from (("scatter", _TELLING),) if symbol in written else ()
            case Apply(op=name):
                yield name, _RANKS.get(name, _TELLING)
            case ToDtype() | Bitcast():
                yield "cast", _MOVES
            case IndexExpr():
                yield "iota", _MOVES
