"""What a call of a compiled function does for the time being: compile, run eagerly, or refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeVar, cast, get_args

from primtorch import forks
from primtorch.ledger import LEDGER, Event
from torchdynamo import torch_compilers_marks
from torchdynamo._C import force_eager
from torchdynamo.events import STANCE

Stance = Literal[
    "default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile", "aot_eager_then_compile"
]
F = TypeVar("F", bound=Callable[..., object])

_lock = forks.lock()
_stance: Stance = "default"


class set_stance:
    """What compiled functions of this process do from now on; as a block or a decorator, within it.

    * `default`: they are compiled.
    * `force_eager`: every call runs as it was written.
    * `eager_on_recompile`: a call that a compiled version fits runs that; another one runs as it was written.
    * `fail_on_recompile`: a call that no compiled version fits raises.
    * `eager_then_compile`: the first call of each function runs as it was written, and later ones are compiled.
    * `aot_eager_then_compile`, a stance of torch.compile's: the same as `default`.

    Not for compiled code to call: there it breaks the graph. What `torch.compiler.set_stance` says holds too where
    nothing else was set here.

    Args:
        skip_guard_eval_unsafe: taken as torch.compile's callers write it: guards are checked all the same, which takes
            about a microsecond a call.
        force_backend: not taken; `compile` is given a back end.

    Raises:
        ValueError: there is no such stance, or a back end is given.
    """

    def __init__(
        self, stance: Stance = "default", *, skip_guard_eval_unsafe: bool = False, force_backend: object = None
    ) -> None:
        if force_backend is not None:
            raise ValueError(
                f"force_backend={force_backend!r} is not taken: write compile(model, backend=...), or "
                "set_stance('force_eager') for calls as they were written"
            )
        if stance not in get_args(Stance):
            raise ValueError(f"unknown stance {stance!r}; known: {', '.join(get_args(Stance))}")
        self.stance: Stance = "default" if stance == "aot_eager_then_compile" else stance
        self.before = _set(self.stance)

    def __enter__(self) -> None:
        _set(self.stance)

    def __exit__(self, *raised: object) -> None:
        _set(self.before)

    def __call__(self, function: F) -> F:
        _set(self.before)  # it was made to decorate
        stance = self.stance

        @functools.wraps(function)
        def within(*args: object, **kwargs: object) -> object:
            with set_stance(stance):
                return function(*args, **kwargs)

        return cast(F, within)


def _set(stance: Stance) -> Stance:
    global _stance
    with _lock:
        before, _stance = _stance, stance
        force_eager(stance == "force_eager")
    if stance == "force_eager" != before:
        LEDGER.add(Event(STANCE, "all compiled functions", "set_stance('force_eager')"))
    return before


def current() -> str:
    """The stance that holds."""
    return _stance if _stance != "default" else torch_compilers_marks.stance()
