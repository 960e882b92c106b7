"""What another compiler put around methods of torch, in the whole process, once it was used: the methods behind."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MappingProxyType

# A wrapper, by its module and name, so that it is not imported -> the variable in which it keeps the method.
_WRAPPERS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("torch._dynamo.mutation_guard", "patched_init"): "init",  # nn.Module.__init__
        ("torch._dynamo.mutation_guard", "patched_setstate"): "setstate",  # nn.Module.__setstate__
    }
)


def behind_patch(function: FunctionType) -> FunctionType | None:
    """The method behind a wrapper of another compiler; None where there is no such wrapper.

    `torch.compile` counts modules as they are made, and keeps itself out of `_init_group` of every optimizer.
    """
    attributes = function.__dict__
    if attributes.get("_torchdynamo_disable") and (function.__module__ or "").startswith("torch.optim"):
        return attributes.get("__wrapped__")
    variable = _WRAPPERS.get((function.__module__ or "", function.__name__))
    if variable is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    method = cells[variable].cell_contents if variable in cells else None
    return method if isinstance(method, FunctionType) else None
