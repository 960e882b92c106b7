"""Shapes of operators that are not torch's own: what their authors registered for tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch._library import custom_ops, fake_impl, simple_registry
from torch._ops import OpOverload

from primtorch.effects import argument_returned, own_results
from primtorch.errors import NoFormula, PrimTorchError
from primtorch.spec import Size

Kernel = Callable[..., object]


class Fakes(AbstractContextManager[object], Protocol):
    """The mode that makes fake tensors, as much as is asked of it here."""

    def fresh_size(self, maximum: Size | None, minimum: Size = 0) -> Size:
        """A size that only the data tells, between the two."""


class SizeSource:
    """What `torch.library.get_ctx()` gives inside of a registered fake: where sizes that depend on data come from."""

    def __init__(self, mode: Fakes) -> None:
        self._mode = mode

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Size:
        """A size that only the data tells."""
        return self._mode.fresh_size(max, min)

    def create_unbacked_symint(self, *, min: int = 2, max: int | None = None) -> Size:
        """The same under its older name, which counts from two."""
        return self._mode.fresh_size(max, min)


def run_registered(mode: Fakes, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The fake result of a call, from the schema where that is enough, else by what was registered for the operator.

    Raises:
        NoFormula: nothing was, or it failed: the operator's own kernel will say whether the call is wrong.
    """
    count = len(op._schema.returns)
    own = own_results(op)
    if not own:
        given = [argument_returned(op, i, args, kwargs) for i in range(count)]
        return given[0] if count == 1 else tuple(given) or None
    kernel = _fake_kernel(op) or _meta_kernel(op)
    if kernel is None:
        raise NoFormula(op.name(), reason="its author registered no fake implementation, see torch.library")
    try:
        with mode, fake_impl.set_ctx_getter(lambda: SizeSource(mode)):
            out: Any = kernel(*args, **kwargs)
    except PrimTorchError:
        raise
    except Exception as error:
        reason = f"its fake implementation raised {type(error).__name__}: {error}"
        raise NoFormula(op.name(), reason=reason) from error
    if len(own) == count:
        return out
    return tuple(out[i] if i in own else argument_returned(op, i, args, kwargs) for i in range(count))


def _fake_kernel(op: OpOverload) -> Kernel | None:
    """What `torch.library.register_fake` was given."""
    name = op.name()
    definition = custom_ops.OPDEFS.get(name)
    if definition is not None and definition._abstract_fn is None:
        return None  # what is registered in its place raises
    kernel = simple_registry.singleton.find(name).fake_impl.kernel
    return None if kernel is None else kernel.func


def _meta_kernel(op: OpOverload) -> Kernel | None:
    """The kernel that the dispatcher has for meta tensors. In Python it takes fakes as well, symbolic sizes included;
    so do kernels in C++ that are written for symbolic sizes."""
    name = op.name()
    definition = custom_ops.OPDEFS.get(name)
    if definition is not None and definition._abstract_fn is None:
        return None
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _SERVE_META):
        return None  # it has torch's own, which only raises
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


_SERVE_META = ("Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
