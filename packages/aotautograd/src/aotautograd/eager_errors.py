"""What eager says of a call that failed while it was traced.

Shape formulas and torch's own meta kernels word errors in their way. A failed call is made once more on real tensors of
the same sizes, types and layout; what that raises is the error that the user knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils import _pytree as pytree

from primtorch.effects import is_foreign, overload_of
from primtorch.functionalize import outside_functionalization
from primtorch.symbolic import hint_of

USER_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
MOST_BYTES = 1 << 28  # of the real tensors: larger calls keep the error that they have


class TooLarge(Exception):
    """The stand-ins would need too much memory."""


def eager_error(
    func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Exception | None:
    """The error of the call on real tensors; None if there is none, or if it was not made."""
    if str(getattr(func, "__module__", "")).startswith("torch.autograd"):
        return None  # it asks for histories, which stand-ins lack
    operator = overload_of(func, args, kwargs)
    if operator is not None and is_foreign(operator):
        return None  # a call has effects
    try:
        leaves = _leaves(args, kwargs)
        stand_ins: dict[int, torch.Tensor] = {}
        with _eager():
            args, kwargs = pytree.tree_map(lambda a: _stand_in(a, leaves, stand_ins), (args, dict(kwargs)))
            func(*args, **kwargs)
    except TooLarge:
        return None
    except USER_ERRORS as error:
        return error.with_traceback(None)
    return None


def _leaves(args: tuple[object, ...], kwargs: Mapping[str, object]) -> set[int]:
    """The tensors that are leaves and need a gradient. Asked while functionalization is on: a view that was written to
    makes its history anew then, by operators on functional tensors."""
    tensors = [a for a in pytree.tree_leaves((args, dict(kwargs))) if isinstance(a, torch.Tensor)]
    return {id(t) for t in tensors if t.requires_grad and t.is_leaf}


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Outside of all that traces; random numbers drawn in it are drawn again afterwards."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),  # type: ignore[attr-defined]
        torch.random.fork_rng(devices=[]),
        outside_functionalization(),
    ):
        yield


def _stand_in(value: object, leaves: set[int], made: dict[int, torch.Tensor]) -> object:
    if isinstance(value, torch.SymInt):
        return hint_of(value, 4)
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in made:
        shape = [hint_of(s, 4) for s in value.shape]
        stride = [hint_of(s, 4) for s in value.stride()]
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if reach * value.element_size() > MOST_BYTES:
            raise TooLarge
        with torch.no_grad():
            new = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
            torch.empty(0, dtype=value.dtype, device=value.device).set_(new.untyped_storage()).zero_()
        made[id(value)] = new.requires_grad_(id(value) in leaves)
    return made[id(value)]
