"""Derivatives of operators as operators: what a graph calls where it cannot hold what a derivative does.

The derivative of somebody's own operator may be Python that reads data. Its pullback is an operator of namespace
`primtorch_pullback` that takes gradients of the results, the results and the arguments of a call, and runs that
derivative as eager runs it, by autograd's engine; the operator itself does not run again. It is made from the schema
alone, and has a pullback in its turn, so that there are derivatives of any order.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from primtorch import forks
from primtorch.dispatch_mode import DispatchMode
from primtorch.effects import tensor_arguments
from primtorch.fake.tensor import FakeMode, FakeTensor, register_special
from primtorch.layout import iterator_strides
from primtorch.spec import TensorSpec

NAMESPACE = "primtorch_pullback"
_library = torch.library.Library(NAMESPACE, "DEF")
_pullbacks: dict[int, OpOverload] = {}  # by the identity of the operator
_defined: list[OpOverload] = []  # they stay, so that their identities do
_defining = forks.rlock()
_LISTS = "List[Tensor]"

NOT_ASKED, GIVEN, NONE_GIVEN = range(3)
"""Of an argument: it requires no gradient; it gets one; it requires one, and the derivative gives None."""


def is_pullback(op: object) -> bool:
    """Whether an operator is a pullback of another."""
    return isinstance(op, OpOverload) and op.namespace == NAMESPACE


def has_pullback(op: OpOverload) -> bool:
    """Whether an operator's pullback can be told from its schema: it writes to nothing and returns no view, and its
    results are tensors, or one list of them."""
    schema = op._schema
    if any(item.alias_info is not None for item in (*schema.arguments, *schema.returns)):
        return False
    kinds = [str(result.type) for result in schema.returns]
    return bool(kinds) and (kinds == [_LISTS] or set(kinds) == {"Tensor"})


def pullback_of(op: OpOverload) -> OpOverload:
    """The operator `(Tensor?[] tangents, Tensor[] results, <arguments of op>, *, int[] wanted) -> Tensor[]`.

    `wanted` says of each tensor among the arguments, in the order of the schema, what is asked (`NOT_ASKED`, `GIVEN` or
    `NONE_GIVEN`). Each gradient that is given has its argument's shape and dtype, and its layout without holes.

    Raises:
        ValueError: `op` has no pullback (`has_pullback`).
    """
    with _defining:
        found = _pullbacks.get(id(op))
        if found is None:
            if not has_pullback(op):
                raise ValueError(f"{op} writes to arguments or gives what is no new tensor")
            found = _pullbacks[id(op)] = _define(op)
            _defined.append(op)
        return found


def _define(op: OpOverload) -> OpOverload:
    name = "_".join((op.namespace, op._schema.name.partition("::")[2], op._schema.overload_name or "default"))
    while hasattr(getattr(torch.ops, NAMESPACE), name):  # an operator of that name was there before, and is gone
        name += "_"
    text = str(op._schema)
    arguments = text[text.index("(") + 1 : text.rindex(") -> ")]
    level = len(_OWN.findall(arguments)) // 3  # that of an operator of one's own has the names of its own arguments
    tangents, results, wanted = (f"_{part}{level or ''}" for part in ("tangents", "results", "wanted"))
    star = "" if any(a.kwarg_only for a in op._schema.arguments) else "*, "
    comma = ", " if arguments else ""
    schema = f"{name}(Tensor?[] {tangents}, Tensor[] {results}, {arguments}{comma}{star}int[] {wanted}) -> Tensor[]"
    _library.define(schema)

    def run(
        follow: bool, given: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor], *args: object, **kwargs: Any
    ) -> object:
        asked = kwargs.pop(wanted)
        return pulled_back(op, given, found, args, kwargs, asked, follow)

    def fake(mode: FakeMode, given: object, found: object, *args: object, **kwargs: Any) -> list[FakeTensor]:
        asked = kwargs.pop(wanted)
        tensors = [t for t, _ in tensor_arguments(op, args, kwargs)]
        return [mode.from_spec(_like(t)) for t, kind in zip(tensors, asked, strict=True) if kind == GIVEN]

    _library.impl(name, functools.partial(run, False), "CompositeExplicitAutograd")
    pullback: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _library.impl(name, _following(pullback, functools.partial(run, True)), "Autograd")
    register_special(pullback, fake)
    return pullback


def call_pullback(
    op: OpOverload,
    tangents: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    wanted: Sequence[int],
) -> list[torch.Tensor]:
    """Calls an operator's pullback: the gradients that are `GIVEN`, in the order of the arguments."""
    pullback = pullback_of(op)
    asked = {pullback._schema.arguments[-1].name: list(wanted)}
    found: list[torch.Tensor] = pullback(list(tangents), list(results), *args, **kwargs, **asked)
    return found


_OWN = re.compile(r"\b_(?:tangents|results|wanted)\d*\b")


def _following(pullback: OpOverload, run: Callable[..., object]) -> Callable[..., object]:
    """In grad mode the derivative runs under autograd, which so follows it; else below, as any operator."""

    def follow(*args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled() and any(t.requires_grad for t, _ in tensor_arguments(pullback, args, kwargs)):
            return run(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            return pullback(*args, **kwargs)

    return follow


def _like(t: torch.Tensor) -> TensorSpec:
    """What a gradient looks like: its argument, without holes."""
    shape = tuple(t.shape)
    return TensorSpec(shape, iterator_strides(shape, ((shape, t.stride()),)), t.dtype, t.device)


def pulled_back(
    op: OpOverload,
    tangents: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    wanted: Sequence[int],
    follow: bool = False,
) -> list[torch.Tensor]:
    """The gradients that the operator's own derivative gives for a call that gave `results`.

    Args:
        follow: with a history, for derivatives of higher order.

    Raises:
        RuntimeError: what the derivative raises; it gives a gradient that was taken for none.
    """
    leaves: list[torch.Tensor] = []

    def own(value: object) -> object:
        """An argument that nothing else leads to."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(own, value))
        if not isinstance(value, torch.Tensor):
            return value
        if follow and value.requires_grad:
            leaf = value.view_as(value)
        else:
            leaf = value.detach()
            leaf.requires_grad_(wanted[len(leaves)] != NOT_ASKED)
        leaves.append(leaf)
        return leaf

    with torch.enable_grad(), _with_autograd():
        given, named = [own(value) for value in args], {name: own(value) for name, value in kwargs.items()}
        with _Given(op, results):
            found = op(*given, **named)
        outputs = list(found) if isinstance(found, (list, tuple)) else [found]
        pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None and o.requires_grad]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = iter(_derived(pairs, asked, follow))
        made: list[torch.Tensor] = []
        for leaf, kind in zip(leaves, wanted, strict=True):
            gradient = next(gradients) if leaf.requires_grad else None
            if kind == GIVEN:
                made.append(torch.zeros_like(leaf) if gradient is None else _laid_out(gradient, leaf))
            elif kind == NONE_GIVEN and gradient is not None:
                raise RuntimeError(f"the derivative of {op} gives a gradient where it gave None before")
        return made


def _derived(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], leaves: Sequence[torch.Tensor], follow: bool
) -> Sequence[torch.Tensor | None]:
    """Runs autograd's engine. (`torch.autograd.grad` would import sympy first, half a second, to compare shapes.)"""
    if not pairs or not leaves:
        return [None] * len(leaves)
    found: Sequence[torch.Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
        tuple(o for o, _ in pairs),
        tuple(t for _, t in pairs),
        keep_graph=follow,
        create_graph=follow,
        inputs=tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def _laid_out(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A gradient in memory of its own, as `_like` says."""
    strides = _like(leaf).strides
    if gradient.stride() == strides and gradient._base is None and gradient is not leaf:
        return gradient
    made = torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device)
    return made.copy_(gradient)


class _Given(DispatchMode):
    """A dispatch mode that answers the first call of an operator with results that it has given before."""

    def __init__(self, op: OpOverload, results: Sequence[torch.Tensor]) -> None:
        self.op = op
        self.results: Sequence[torch.Tensor] | None = results

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is not self.op or self.results is None:
            return func(*args, **(kwargs or {}))
        results, self.results = [r.detach() for r in self.results], None
        kinds = [str(result.type) for result in func._schema.returns]
        if kinds == [_LISTS]:
            return results
        return results[0] if len(kinds) == 1 else tuple(results)


_AUTOGRAD = DispatchKeySet(DispatchKey.AutogradFunctionality) | DispatchKeySet(DispatchKey.ADInplaceOrView)


@contextlib.contextmanager
def _with_autograd() -> Iterator[None]:
    """Autograd records, although who called this operator is below it."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - _AUTOGRAD):
        yield
