"""Tensors that a program gives other sizes or strides in place.

Autograd takes the views of a functional tensor anew, from what they are views of, whenever that was written. A tensor
whose shape changed in place is neither the view that was taken nor what others were taken of. So it keeps its shape,
and a view of it stands for it in all that the program does with it from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

from aotautograd.schemas import Values

T = TypeVar("T")
_autograd = torch._C._autograd


class PresentViews:
    """The view that stands for each tensor of a program whose shape was changed."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the program's tensor, and the view
        self._tensors: dict[int, torch.Tensor] = {}  # the program's tensor by the id of the view

    def __bool__(self) -> bool:
        return bool(self._views)

    def stand_for(self, values: object) -> bool:
        """Whether a view stands for a tensor among the values."""
        return bool(self) and any(id(t) in self._views for t in pytree.tree_leaves(values))

    def of(self, values: T) -> T:
        """The same values with views in the place of the tensors for which they stand."""
        return _mapped(values, lambda t: self._views[id(t)][1] if id(t) in self._views else t) if self else values

    def behind(self, values: T) -> T:
        """The reverse: what the program has in its hands."""
        return _mapped(values, lambda t: self._tensors.get(id(t), t)) if self else values

    def change(self, name: str, args: Values, kwargs: Mapping[str, object]) -> torch.Tensor:
        """Does what the call of that name does. `args` have views in the place of tensors; the result is a view."""
        old = args[0]
        tensor = self.behind(old)
        version = old._version
        torch.autograd.graph.increment_version(old)  # before the view is taken, which remembers it
        try:
            view: torch.Tensor = getattr(torch.Tensor, name[:-1])(*args, **kwargs)
        except Exception:
            _autograd._unsafe_set_version_counter((old,), (version,))
            raise
        self._replace(tensor, view)
        return view

    def change_without_history(self, name: str, args: Values, kwargs: Mapping[str, object]) -> torch.Tensor:
        """The same for a view that was taken under no_grad of what needs a gradient. After the change autograd raises
        when it is asked for the view's history: it remembers the version that was before."""
        with torch.no_grad():
            view: torch.Tensor = getattr(torch.Tensor, name[:-1])(*args, **kwargs)
        torch.autograd.graph.increment_version(view)
        self._replace(self.behind(args[0]), view)
        return view

    def detach(self, old: torch.Tensor) -> torch.Tensor:
        """`detach_`: the tensor may be none that autograd took for a view."""
        tensor, view = self.behind(old), old.detach()
        self._replace(tensor, view)
        return view

    def is_view(self, old: torch.Tensor) -> bool:
        """Whether a tensor is a view to the program."""
        return bool(self.behind(old)._is_view())

    def _replace(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        if id(tensor) in self._views:
            del self._tensors[id(self._views[id(tensor)][1])]
        self._views[id(tensor)] = tensor, view
        self._tensors[id(view)] = tensor


def may_change(t: torch.Tensor) -> bool:
    """Whether autograd lets the tensor be changed in place. If not, the call itself says why not."""
    if not t.requires_grad:
        return True
    if t._is_view() and _autograd._get_creation_meta(t) != _autograd.CreationMeta.DEFAULT:
        return False
    return not (t.is_leaf or (t._is_view() and t._base is not None and t._base.is_leaf))


def _mapped(values: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Values of the structure that was given."""
    if isinstance(values, torch.Tensor):
        return change(values)  # type: ignore[return-value]  # a tensor for a tensor
    return pytree.tree_map_only(torch.Tensor, change, values)  # type: ignore[no-any-return]
