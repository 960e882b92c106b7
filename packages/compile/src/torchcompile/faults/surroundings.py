"""What a call of a function may change beside its results, kept so that it can be run again as if it had not run."""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from primtorch.schemas import TORCH
from torchcompile.faults.judge import copied, numbers_of_its_own

_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), type(...), slice, range, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, types.ModuleType, types.BuiltinFunctionType, type,
)  # fmt: skip
_CONTAINERS = (list, dict, set)


class CannotRepeat(Exception):
    """A call cannot be run again as if it had not run, or shows nothing that way. The message says why."""


@dataclass
class Surroundings:
    """The modules, tensors, containers and globals that a function reaches."""

    modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    containers: dict[int, Any] = field(default_factory=dict)
    variables: dict[tuple[int, str], dict[str, object]] = field(default_factory=dict)  # globals that the code names
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, function: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Surroundings:
        """
        Raises:
            CannotRepeat: the function reaches an object of which nobody knows how to undo a change.
        """
        found = cls()
        found._reach(function)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):  # those are copied
                found._reach(leaf)
            elif type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                raise CannotRepeat(f"it takes a tensor of class {name_of(type(leaf))}")
        return found

    def _reach(self, value: object) -> None:
        if id(value) in self._seen or isinstance(value, _PLAIN):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, torch.nn.Module):
            for module in value.modules():
                self.modules[id(module)] = module
                self._reach_code(type(module).forward)
            for tensor in (*value.parameters(), *value.buffers()):
                self.tensors[id(tensor)] = tensor
        elif isinstance(value, types.MethodType):
            self._reach(value.__self__)
            self._reach(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._reach_code(value)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self.containers[id(value)] = value
            for item in value.values() if isinstance(value, dict) else value:
                self._reach(item)
        elif not callable(value) or getattr(type(value), "__module__", "") not in ("torch", "builtins", "functools"):
            raise CannotRepeat(f"it reaches an object of class {name_of(type(value))}")

    def _reach_code(self, function: object) -> None:
        """What a function of the program's own names."""
        if not isinstance(function, types.FunctionType) or function.__code__.co_filename.startswith(TORCH):
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                self._reach(cell.cell_contents)
        for name in _names(function.__code__):
            if name in function.__globals__ and not hasattr(builtins, name):
                self.variables[id(function.__globals__), name] = function.__globals__
                self._reach(function.__globals__[name])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A block after which all is as before it: what it prints is swallowed, and it draws no numbers."""
        tensors = [(t, t.detach().clone(), t._version, t.grad, _copy_of(t.grad)) for t in self.tensors.values()]
        tables = [
            (table, dict(table)) for m in self.modules.values() for table in (m.__dict__, m._parameters, m._buffers)
        ]
        containers = [(held, copy.copy(held)) for held in self.containers.values()]
        variables = [(table, name, table[name]) for (_, name), table in self.variables.items()]
        try:
            with (
                numbers_of_its_own(),
                contextlib.redirect_stdout(io.StringIO()),
                torch.set_grad_enabled(torch.is_grad_enabled()),
            ):
                yield
        finally:
            for table, before in tables:
                _refill(table, before)
            for held, before in containers:
                _refill(held, before)
            for table, name, value in variables:
                table[name] = value
            with torch.no_grad():
                for tensor, value, version, grad, kept in tensors:
                    tensor.data.copy_(value)  # whatever wrote: not all operators that do count as a version
                    if tensor._version != version:
                        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
                    tensor.grad = grad
                    if grad is not None and kept is not None:
                        grad.data.copy_(kept)

    def values(self) -> list[torch.Tensor]:
        """Copies of the tensors as they are."""
        return [tensor.detach().clone() for tensor in self.tensors.values()]


def name_of(cls: type) -> str:
    """A class as messages name it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _refill(held: Any, before: Any) -> None:
    if held == before if isinstance(held, set) else False:
        return
    held.clear()
    held.extend(before) if isinstance(held, list) else held.update(before)


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@dataclass(frozen=True)
class Outcome:
    """What one run of a call came to.

    Attributes:
        values: results, arguments after the call, tensors that the function reaches; and gradients.
        drew: whether random numbers were drawn.
        strange: the class of a result that cannot be compared, if there is one.
    """

    values: tuple[Sequence[object], Sequence[object], Sequence[object], Sequence[object]]
    drew: bool
    strange: type | None


def outcome(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], around: Surroundings
) -> Outcome:
    """Runs a call on copies of its tensors, and undoes it.

    Raises:
        Exception: whatever it raises.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    memo = {id(leaf): copied(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    fresh = [memo.get(id(leaf), leaf) for leaf in leaves]
    taken = [
        given.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf else given
        for leaf, given in zip(leaves, fresh, strict=True)
    ]
    with around.restored():
        state = torch.get_rng_state()
        copies, named = pytree.tree_unflatten(taken, structure)
        given_out = pytree.tree_leaves(function(*copies, **named))
        results = [r for r in given_out if isinstance(r, (torch.Tensor, *_PLAIN))]
        strange = next((type(r) for r in given_out if not isinstance(r, (torch.Tensor, *_PLAIN))), None)
        drew = not torch.equal(state, torch.get_rng_state())
        roots = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        wanted = [t for t in (*memo.values(), *around.tensors.values()) if t.requires_grad and t.is_leaf]
        gradients: list[object] = []
        if roots and wanted:
            ones = [torch.ones_like(root) for root in roots]
            gradients = list(torch.autograd.grad(roots, wanted, ones, allow_unused=True))
        after = [t.detach().clone() for t in taken if isinstance(t, torch.Tensor)]
        kept = [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in results]
        flags = [r.requires_grad for r in results if isinstance(r, torch.Tensor)]
        return Outcome(([*kept, *flags], after, around.values(), gradients), drew, strange)
