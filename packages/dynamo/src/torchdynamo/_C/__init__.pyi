from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, TracebackType
from typing import Any, Literal

import torch

from torchdynamo.schemas import Guard
from torchdynamo.sources import Source

class GuardTree:
    """Checks guards and collects inputs in one traversal of their sources.

    `function` gives the globals and the closure when `check` or `explain` is called from Python; a CompiledCallable
    gives those of the function that is called. `pinned[key]` is what `Pinned(key)` stands for.
    """

    guards: tuple[Guard, ...]
    inputs: tuple[Source, ...]
    def __new__(
        cls,
        guards: Sequence[Guard],
        inputs: Sequence[Source],
        function: FunctionType | None = None,
        pinned: Sequence[Any] | Mapping[int, Any] = (),
    ) -> GuardTree: ...
    def check(self, flat: Sequence[Any], /) -> list[Any] | None:
        """The inputs when every guard holds for the flat argument vector, else None."""
    def explain(self, flat: Sequence[Any], /) -> int | None:
        """Index of the first guard that fails; None when all hold; len(guards) + i when input i cannot be read."""

class Entry:
    """One compiled version: `code(inputs, *flat)`, or `code(inputs, closure, *flat)` when `takes_closure`. One that
    `comes_last` is asked when no other one fits."""

    tree: GuardTree | None
    code: Callable[..., Any]
    info: Any
    hits: int
    takes_closure: bool
    comes_last: bool
    def __new__(
        cls,
        tree: GuardTree | None,
        code: Callable[..., Any],
        info: Any = None,
        takes_closure: bool = False,
        comes_last: bool = False,
    ) -> Entry: ...

class CompiledCallable:
    """A function that runs compiled entries; looks and binds like the function it wraps.

    `miss(callable, flat)` gives a new Entry, or None to run the function as it is.
    """

    function: FunctionType
    miss: Callable[[CompiledCallable, tuple[Any, ...]], Entry | None] | None
    entries: list[Entry]
    __wrapped__: FunctionType
    __name__: str
    __qualname__: str
    __code__: CodeType
    def __new__(
        cls, function: FunctionType, miss: Callable[[CompiledCallable, tuple[Any, ...]], Entry | None] | None
    ) -> CompiledCallable: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., Any]: ...

def define_call(function: FunctionType, /) -> None:
    """Makes `function` what `CompiledCallable.__call__` is to those who look it up; calls do not go through it."""

def kernel_switches() -> tuple[tuple[str, int], ...]:
    """What decides between kernels besides their arguments, by name: see `GlobalState.switches`."""

def force_eager(whether: bool, /) -> None: ...
def gradient_hooks(tensor: torch.Tensor, /) -> bool:
    """Whether autograd's engine runs something of the program's where a gradient comes to the tensor."""

class Hook:
    """A callback for frames, and the callables that it gave out (this object owns them)."""

    callback: Callable[[FunctionType], CompiledCallable | Literal[False] | None]
    callables: list[CompiledCallable]
    def __new__(cls, callback: Callable[[FunctionType], CompiledCallable | Literal[False] | None]) -> Hook: ...

class hook_enabled:
    """`with hook_enabled(hook):` this thread's frames go through the hook; None switches it off."""

    def __new__(cls, hook: Hook | None, /) -> hook_enabled: ...
    def __enter__(self) -> hook_enabled: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> Literal[False]: ...

def set_hook(hook: Hook | None, /) -> Hook | None:
    """Makes `hook` this thread's hook, and returns the former one."""

def skip_code(code: CodeType, /) -> None:
    """No hook ever asks about this code."""

def forget_code(code: CodeType, /) -> None:
    """Undoes every decision taken on this code."""
