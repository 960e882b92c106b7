"""Functions with a cache (`functools.lru_cache`): interpreted like any other, and asked once for each key of a capture.

A graph computes at each call what the cache of a function of the outside would keep. That is the same for who only
reads it. Where it is not (random numbers, a tensor for a key, a result that is written to, handed out, or a container)
the graph ends at the call, which is then made for real, with the cache. A cache that the program itself makes lives no
longer than the call, so that what is noted here is all of it.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from primtorch.fake import FakeTensor
from torchdynamo.calls.effects import effects_so_far
from torchdynamo.calls.emissions import Emissions
from torchdynamo.graph.choices import KEPT
from torchdynamo.graph.derivatives import CALL
from torchdynamo.interpreter.protocol import MISSING, Args, InterpreterApi, Kwargs, World
from torchdynamo.outside.externals import CONSTANT_TYPES, is_trusted_module
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

Cached: TypeAlias = "functools._lru_cache_wrapper[Any]"
_CONTAINERS = (list, dict, set, deque, bytearray)


@dataclass
class _Kept:
    """What a cache holds by now: of one that the program made all, of one of the outside what this capture asked."""

    function: Cached  # held, so that its id stays its own
    results: OrderedDict[Hashable, object] = field(default_factory=OrderedDict)
    hits: int = 0
    misses: int = 0


class Caches:
    """Those that a capture meets."""

    def __init__(self, outside: Outside, world: World, interpreter: InterpreterApi, emissions: Emissions) -> None:
        self.outside = outside
        self.world = world
        self.interpreter = interpreter
        self.emissions = emissions
        self._kept: dict[int, _Kept] = {}

    def call(self, fn: Cached, args: Args, kwargs: Kwargs) -> object:
        """A call of the function. One that says something is called each time: it may keep silent."""
        self.interpreter.tail_call = False
        if is_trusted_module(getattr(fn.__wrapped__, "__module__", None) or ""):
            return self._interpreted(fn, args, kwargs)
        key = _key(args, kwargs, bool(fn.cache_parameters()["typed"]))
        kept = self._kept.setdefault(id(fn), _Kept(fn))
        if key is not MISSING and key in kept.results:
            kept.results.move_to_end(key)
            kept.hits += 1
            return kept.results[key]
        kept.misses += 1
        result = self._interpreted(fn, args, kwargs) if self._is_local(fn) else self._of_the_outside(fn, args, kwargs)
        if key is not MISSING:
            kept.results[key] = result
            most = fn.cache_parameters()["maxsize"]
            if most is not None and len(kept.results) > most:
                kept.results.popitem(last=False)
        return result

    def method(self, fn: Cached, name: str) -> object:
        """`cache_info()` and `cache_clear()`; MISSING for a cache of the outside, which this call has not filled."""
        if not self._is_local(fn) or name not in ("cache_info", "cache_clear"):
            return MISSING
        kept = self._kept.setdefault(id(fn), _Kept(fn))
        if name == "cache_clear":
            self._kept[id(fn)] = _Kept(fn)
            return None
        most = fn.cache_parameters()["maxsize"]
        return type(fn.cache_info())(kept.hits, kept.misses, most, len(kept.results))

    def _is_local(self, fn: Cached) -> bool:
        return self.outside.externals.lookup(fn) is None

    def _interpreted(self, fn: Cached, args: Args, kwargs: Kwargs) -> object:
        made = self.emissions.made
        before = len(made)
        result = self.world.call(fn.__wrapped__, args, kwargs)
        if len(made) > before:
            del made[before:]
            self.emissions.do(fn, args, kwargs)
        return result

    def _of_the_outside(self, fn: Cached, args: Args, kwargs: Kwargs) -> object:
        recorder, name = self.outside.recorder, fn.__wrapped__.__qualname__
        if _tensors((args, kwargs)):
            raise BreakGraph("c_function", f"{name} has a cache, and is asked by tensors")
        if fn in KEPT:
            raise BreakGraph("c_function", f"{name} has a cache, and what it keeps is written to or handed out")
        effects, calls, draws = effects_so_far(self.outside), recorder.calls, recorder.draws
        result = self._interpreted(fn, args, kwargs)
        if effects_so_far(self.outside, effects) != effects:
            raise BreakGraph("c_function", f"{name} has a cache, and writes to the outside")
        if recorder.draws != draws:
            raise BreakGraph("c_function", f"{name} has a cache, and draws random numbers")
        if isinstance(result, _CONTAINERS) and self.outside.externals.lookup(result) is None:
            raise BreakGraph("c_function", f"{name} has a cache, and gives a {type(result).__qualname__}")
        recorder.choices.keep([t for t in _tensors(result) if self._is_since(t, calls)], fn)
        return result

    def _is_since(self, tensor: torch.Tensor, calls: int) -> bool:
        node = self.outside.recorder.node_of(tensor)
        return node is None or node.meta.get(CALL, calls if node.op == "get_attr" else -1) >= calls


def _key(args: Args, kwargs: Kwargs, typed: bool) -> Hashable:
    """What a cache tells calls apart by: values, and objects by identity. MISSING where one is a number of the call."""
    names, values = [*kwargs], [_part(value) for value in (*args, *kwargs.values())]
    if any(value is MISSING for value in values):
        return MISSING
    made: Hashable = functools._make_key(  # type: ignore[attr-defined]  # 1 is no 1.0, but (1, 2) is (1.0, 2)
        tuple(values[: len(args)]), dict(zip(names, values[len(args) :], strict=True)), typed
    )
    return made


def _part(value: object) -> Hashable:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return MISSING
    if type(value) is tuple:
        parts = tuple(map(_part, value))
        return MISSING if any(part is MISSING for part in parts) else parts
    return value if type(value) in CONSTANT_TYPES else (id, id(value))  # type: ignore[return-value]


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [value] if isinstance(value, (FakeTensor, torch.Tensor)) else []
