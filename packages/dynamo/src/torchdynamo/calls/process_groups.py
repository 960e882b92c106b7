"""Questions about process groups and device meshes: rank, size, members, the default group.

They are answered when a program is captured, and asked again by the guards. What a question is about, a group or a
mesh, has to be that very object from then on: a group answers for itself alone. A question that raises, or one about
what the program made itself, leaves the graph and is asked at each call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch.distributed

from torchdynamo.graph import scalars
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, Rule
from torchdynamo.outside.externals import is_constant
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

# By the module, or the class of a module, that has them; not every torch has all.
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "distributed_c10d": (
        "is_initialized", "get_rank", "get_world_size", "get_backend", "get_global_rank", "get_group_rank",
        "get_process_group_ranks", "get_pg_count", "get_node_local_rank", "get_default_backend_for_device",
        "is_backend_available", "is_gloo_available", "is_mpi_available", "is_nccl_available", "is_ucc_available",
        "is_xccl_available", "is_torchelastic_launched", "supports_complex", "get_debug_level",
        "_rank_not_in_group", "_get_default_group", "_get_group_size_by_name", "_resolve_process_group",
    ),
    "distributed_c10d.ProcessGroup": ("size", "rank", "name", "group_name", "group_desc"),
    "device_mesh.DeviceMesh": (
        "size", "ndim", "shape", "device_type", "mesh_dim_names", "get_rank", "get_local_rank", "get_coordinate",
        "get_group", "get_all_groups", "__getitem__",
    ),
}  # fmt: skip


class ProcessGroups:
    """The questions of one capture."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def rules(self) -> Iterator[tuple[object, Rule]]:
        """Questions about process groups, and what calls of them mean."""
        for function in _questions():
            yield function, self._ask
        if torch.distributed.is_available():
            world = vars(type(torch.distributed.group))["WORLD"]
            yield world.fget, self._ask_for_world
            yield begins_together, self._ask_for_batches

    def _ask_for_world(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        """`torch.distributed.group.WORLD`."""
        return self._ask(default_group, (), {})

    def _ask_for_batches(self, fn: Callee, args: Args, kwargs: Kwargs) -> None:
        if self._ask(fn, args, kwargs):
            raise BreakGraph("distributed", "batch_isend_irecv() that the back end begins as one")

    def _ask(self, fn: Callee, args: Args, kwargs: Kwargs) -> object:
        name = getattr(fn, "__name__", str(fn))
        plain = self._plain(fn, name, scalars.concrete(args), scalars.concrete(kwargs))
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                answer = self.outside.ambient(fn, plain)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise BreakGraph("distributed", f"{name}() raises {type(error).__name__}") from error
        return [self._held(part) for part in answer] if isinstance(answer, list) else self._held(answer)

    def _plain(self, fn: Callee, name: str, args: Args, kwargs: Kwargs) -> Args:
        """The arguments in their order, each a constant or what the program was given."""
        if isinstance(fn, types.FunctionType):
            bound = inspect.signature(fn).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if kwargs:
            raise BreakGraph("distributed", f"{name}() with arguments by name")
        return tuple(self._asked_about(name, value) for value in args)

    def _asked_about(self, name: str, value: object) -> object:
        if is_constant(value):
            return value
        known = self.outside.externals.lookup(value)
        if known is None:
            raise BreakGraph("distributed", f"{name}() of a {type(value).__name__} that the program makes")
        self.outside.identity(value)
        return known.original

    def _held(self, answer: object) -> object:
        return answer if is_constant(answer) else self.outside.externals.hold(answer, type(answer).__name__)


def default_group() -> object:
    """The group of all processes, None before there is one."""
    return torch.distributed.distributed_c10d._world.default_pg


def begins_together(group: Any, device: torch.device) -> bool:
    """Whether a group's back end begins messages of a batch as one."""
    return bool(group._get_backend(device).supports_coalescing)


@functools.cache
def _questions() -> tuple[object, ...]:
    if not torch.distributed.is_available():
        return ()
    found: list[object] = []
    for place, names in _QUESTIONS.items():
        module, _, owner = place.partition(".")
        namespace = vars(importlib.import_module(f"torch.distributed.{module}"))
        members = vars(namespace[owner]) if owner else namespace
        found += [called(members[name]) for name in names if name in members]
    return tuple(found)


def called(member: object) -> object:
    """What is called where a member is used: a property's getter, the function that a method of C++ binds."""
    getter = getattr(member, "fget", None) or member
    return getattr(getter, "__func__", getter)
