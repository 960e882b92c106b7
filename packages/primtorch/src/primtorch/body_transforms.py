"""What derivatives and transforms make of a body of an operator over graphs: bodies again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primtorch.ambient import AutocastState
from primtorch.higher_order import Batch, Body, Values, call_body, casting


@dataclass(frozen=True, eq=False, repr=False)
class Pullback:
    """A body's vector-Jacobian product: (inputs, gradients of the differentiable results) -> gradients of inputs.

    Attributes:
        inputs: how many inputs the body has, numbers included.
        wanted: places of the inputs whose gradients are given; zeros where the results do not depend on one.
        differentiable: for each result, whether it has a gradient.
        casts: the state of autocast in which the body runs.
    """

    body: Body
    inputs: int
    wanted: tuple[int, ...]
    differentiable: tuple[bool, ...]
    casts: AutocastState

    def __call__(self, *flat: Any) -> Values:
        inputs, gradients = list(flat[: self.inputs]), flat[self.inputs :]
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        # Transforms let nobody mark what requires a gradient, and in inference mode autograd records nothing.
        if torch._C._are_functorch_transforms_active() or _is_autograd_passed_by():
            return self._of_function(inputs, gradients)
        again = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)  # this one's derivative is taken
        with torch.enable_grad():
            for place in self.wanted:
                given = inputs[place]
                inputs[place] = given.view_as(given) if given.requires_grad else given.detach().requires_grad_()
            results, _ = self._results(inputs)
            pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
            wanted = [inputs[place] for place in self.wanted]
            pulled: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                of, by = zip(*pairs, strict=True)
                pulled = torch.autograd.grad(of, wanted, by, allow_unused=True, create_graph=again)
        return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, pulled, strict=True))

    def _results(self, inputs: Sequence[object]) -> tuple[Values, Values]:
        """The differentiable results of the body, and the others."""
        with casting(self.casts):
            return _by(self.differentiable, call_body(self.body, tuple(inputs)))

    def _of_function(self, inputs: list[torch.Tensor], gradients: Values) -> Values:
        wanted = [inputs[place] for place in self.wanted]
        if not wanted:
            return ()
        primal = lambda *given: self._results(_with(inputs, self.wanted, given))[0]
        _, pull = torch.func.vjp(primal, *wanted)
        pulled: Values = pull(tuple(gradients))
        return pulled


@dataclass(frozen=True, eq=False, repr=False)
class Pushforward:
    """A body's Jacobian-vector product: (inputs, tangents of some) -> (results, tangents of the differentiable ones).

    Attributes: as of `Pullback`; `wanted` are the places of the inputs whose tangents are given.
    """

    body: Body
    inputs: int
    wanted: tuple[int, ...]
    differentiable: tuple[bool, ...]
    casts: AutocastState

    def __call__(self, *flat: Any) -> tuple[Values, Values]:
        inputs, tangents = flat[: self.inputs], flat[self.inputs :]

        def primal(*given: torch.Tensor) -> tuple[Values, Values]:
            with casting(self.casts):
                return _by(self.differentiable, call_body(self.body, _with(inputs, self.wanted, given)))

        if self.wanted and any(self.differentiable):
            primals = tuple(inputs[place] for place in self.wanted)
            values, pushed, others = torch.func.jvp(primal, primals, tangents, has_aux=True)
        else:
            values, others = primal(*(inputs[place] for place in self.wanted))
            pushed = tuple(map(torch.zeros_like, values))
        first, second = iter(values), iter(others)
        return tuple(next(first if has else second) for has in self.differentiable), pushed


@dataclass(frozen=True, eq=False, repr=False)
class Batched:
    """A body for all elements of a batch, which lies in its results' first dimension.

    Attributes:
        dims: where it lies in each input; None: every element is given the same.
    """

    body: Body
    dims: tuple[int | None, ...]
    batch: Batch

    def __call__(self, *flat: Any) -> Values:
        run = lambda *inner: tuple(call_body(self.body, inner))
        if any(dim is not None for dim in self.dims):
            found: Values = torch.vmap(run, self.dims, 0, self.batch.randomness)(*flat)
            return found
        return tuple(value.expand(self.batch.size, *value.shape).contiguous() for value in run(*flat))


def batch_first(value: Any, dim: int | None, place: int = 0) -> Any:
    """A tensor with its batch, if it has one, in this dimension."""
    return value if dim is None else value.movedim(dim, place)


def in_batch(value: torch.Tensor, dim: int | None, batch: Batch) -> torch.Tensor:
    """A tensor with the batch in its first dimension: the same for each element where it has none."""
    return value.expand(batch.size, *value.shape) if dim is None else value.movedim(dim, 0)


def _is_autograd_passed_by() -> bool:
    """Whether the thread's calls do not reach autograd: in inference mode, also where a transform has taken the mode
    from view."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded("AutogradOther") or torch.is_inference_mode_enabled()


def _by(differentiable: Sequence[bool], found: Sequence[object]) -> tuple[Values, Values]:
    pairs = list(zip(found, differentiable, strict=True))
    return tuple(value for value, has in pairs if has), tuple(value for value, has in pairs if not has)


def _with(inputs: Sequence[object], places: Sequence[int], given: Sequence[object]) -> Values:
    """The inputs with others at some places."""
    changed = list(inputs)
    for place, value in zip(places, given, strict=True):
        changed[place] = value
    return tuple(changed)
