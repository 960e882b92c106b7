"""Other compilers and tracers, and who else sees each operator of a call.

Under a watcher a function runs as it was written, since compiled code would hide the operators. The guards of every
compiled version refuse such calls (`is_watched` in `cpp/tensor_guard.cpp`), which so come to the driver, and it asks
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import cast

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from primtorch.ambient import dispatch_modes, function_modes
from primtorch.frozen import record
from primtorch.ledger import Kind
from torchdynamo._C import CompiledCallable, define_call
from torchdynamo.events import (
    DISABLED_OVERRIDES,
    FOREIGN_TRACER,
    FORWARD_DERIVATIVES,
    FUNCTION_MODE,
    TRANSFORMED_CALL,
    WITHIN_OPERATOR,
)


@record
class Watcher:
    """What sees the operators of a call, as a kind of event."""

    kind: Kind
    detail: str


def written_call(self: CompiledCallable, *args: object, **kwargs: object) -> object:
    """`CompiledCallable.__call__` to whoever reads it: torch.compile and torch.export trace the function as written."""
    return self.__wrapped__(*args, **kwargs) if torch.compiler.is_compiling() else self(*args, **kwargs)


define_call(cast(FunctionType, written_call))


@contextmanager
def other_compiler_off() -> Iterator[None]:
    """A block whose frames another compiler's frame hook, if one is on, does not look at."""
    hook = torch._C._dynamo.eval_frame
    previous = hook.set_eval_frame(None)
    try:
        yield
    finally:
        hook.set_eval_frame(previous)


@contextmanager
def saving_unseen() -> Iterator[None]:
    """A block in which autograd shows no hook of the program's what it saves: a checkpoint, say, counts what a call
    saves, and running on fakes is none. Whether there are hooks can still be asked."""
    autograd = torch._C._autograd
    previous = autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_set_tracing(previous)


def watcher(flat: Sequence[object]) -> Watcher | None:
    """What sees the operators of a call with these arguments, besides the program, or None."""
    return next(_watchers(flat), None)


def _watchers(flat: Sequence[object]) -> Iterator[Watcher]:
    if torch._C._get_tracing_state() is not None:
        yield Watcher(FOREIGN_TRACER, "torch.jit.trace")
    if any(isinstance(value, fx.Proxy) for value in flat):
        yield Watcher(FOREIGN_TRACER, "torch.fx")
    for mode in reversed(dispatch_modes()):
        yield Watcher(FOREIGN_TRACER, f"the dispatch mode {type(mode).__qualname__}")
    if torch._C._dispatch_tls_is_dispatch_key_included("Functionalize"):
        yield Watcher(FOREIGN_TRACER, "functionalization")
    for key in ("Functionalize", "Python"):  # what graphs are traced with
        if torch._C._dispatch_tls_is_dispatch_key_excluded(key):
            yield Watcher(WITHIN_OPERATOR, f"the dispatch key {key} is excluded")
    if torch._C._are_functorch_transforms_active():
        yield Watcher(TRANSFORMED_CALL, "a call under a transform")
    if forward_ad._current_level >= 0:
        yield Watcher(FORWARD_DERIVATIVES, "a call within forward_ad.dual_level()")
    for mode in reversed(function_modes()):
        if not isinstance(mode, DeviceContext):
            yield Watcher(FUNCTION_MODE, f"a call under the function mode {type(mode).__qualname__}")
    if torch._C._is_torch_function_all_disabled():
        yield Watcher(DISABLED_OVERRIDES, "a call under torch._C.DisableTorchFunction")
