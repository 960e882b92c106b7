"""Calls that torch runs over lists of tensors (`torch._foreach_add_`), and calls with a tensor where a number belongs.

Optimizers make them. In the graph they are ordinary calls, one for each tensor, which compilers fuse as they see fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchdynamo.reasons import BreakGraph

Record = Callable[[Callable[..., object], tuple[object, ...], dict[str, object]], object]

_PREFIX = "_foreach_"
_SCALED: dict[str, Callable[..., object]] = {"addcdiv": torch.Tensor.div, "addcmul": torch.Tensor.mul}
# Whether an in-place form returns the list that it was given, or None: releases of torch differ.
_GIVES_BACK: bool = torch._foreach_neg_([torch.zeros(())]) is not None  # type: ignore[func-returns-value]
# What the other forms return.
_GIVES: Callable[[Sequence[object]], Sequence[object]] = type(torch._foreach_neg([torch.zeros(())]))
_BOUNDS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # by a number
_FUNCTIONS: dict[str, Callable[..., object]] = {"norm": torch.linalg.vector_norm}


def is_over_lists(name: str) -> bool:
    """Whether an operator, by its name, works on lists of tensors."""
    return name.startswith(_PREFIX)


def record_each(record: Record, name: str, args: tuple[Any, ...], kwargs: dict[str, object]) -> Sequence[object] | None:
    """Records the calls that `torch._foreach_...` is."""
    method = name.removeprefix(_PREFIX)
    plain = method.removesuffix("_")
    counts = {len(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple))}
    if len(counts) != 1 or 0 in counts:
        raise BreakGraph("operator_without_meta", f"torch.{name} of lists that do not match")  # eager says why
    (count,) = counts
    results = []
    for index in range(count):
        own = tuple(_element(record, arg, index, plain in _SCALED and place == 3) for place, arg in enumerate(args))
        named = {key: _element(record, value, index, key == "scalars") for key, value in kwargs.items()}
        single, own, named = _single(method, own, named)
        function = getattr(torch.Tensor, single, None)
        copies = function is None  # an in-place form that single tensors do not have
        function = _FUNCTIONS.get(plain) or function or getattr(torch.Tensor, single.removesuffix("_"), None)
        if function is None:
            raise BreakGraph("operator_without_meta", f"torch.{name}")
        result = record_scaled(record, function if isinstance(own[0], torch.Tensor) else torch.pow, own, named)
        results.append(record(torch.Tensor.copy_, (own[0], result), {}) if copies else result)
    if method != plain:
        return args[0] if _GIVES_BACK else None
    return _GIVES(results)


def _single(method: str, own: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The method of one tensor, with its arguments, that a method of lists is for the elements of these."""
    plain = method.removesuffix("_")
    if plain in _SCALED:
        value = own[3] if len(own) > 3 else named.pop("scalars", named.pop("value", 1))
        return method, own[:3], {"value": value}
    if plain in _BOUNDS:
        bound = own[1] if len(own) > 1 else next(iter(named.values()))
        return method if isinstance(bound, torch.Tensor) else method.replace(plain, _BOUNDS[plain]), (own[0], bound), {}
    if "scalar" in named:
        return method, (*own, named.pop("scalar")), named
    return method, own, named


def _element(record: Record, argument: object, index: int, along: bool) -> object:
    if isinstance(argument, (list, tuple)):
        return argument[index]
    if along and isinstance(argument, torch.Tensor) and argument.dim() == 1:
        return record(torch.Tensor.__getitem__, (argument, index), {})
    return argument


def record_scaled(
    record: Record, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Records a call; a factor that only may be a number (`value`, `alpha`) is multiplied in where it is a tensor."""
    name = getattr(function, "__name__", "")
    plain = name.removesuffix("_")
    factor = kwargs.get("value" if plain in _SCALED else "alpha")
    if not isinstance(factor, torch.Tensor):
        return record(function, args, kwargs)
    if plain in _SCALED:
        scaled = record(_SCALED[plain], (record(torch.Tensor.mul, (args[1], factor), {}), args[2]), {})
        return record(torch.Tensor.add_ if name != plain else torch.Tensor.add, (args[0], scaled), {})
    return record(function, (args[0], record(torch.Tensor.mul, (args[1], factor), {})), {})


def takes_factor(name: str, kwargs: dict[str, object]) -> bool:
    """Whether the call has a tensor where a factor belongs."""
    key = _FACTORS.get(name)
    return key is not None and isinstance(kwargs.get(key), torch.Tensor)


_FACTORS = {
    **{name: "value" for plain in _SCALED for name in (plain, f"{plain}_")},
    **dict.fromkeys(("add", "add_", "sub", "sub_"), "alpha"),
}
