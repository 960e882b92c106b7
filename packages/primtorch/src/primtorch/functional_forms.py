"""Operators that write to their arguments, as operators that return what they would have written.

The functional form of `f(Tensor(a!) x, Tensor y) -> Tensor` is `f(Tensor x, Tensor y, *, int[] copies) -> (Tensor,
Tensor[])`: it calls f on copies of what f writes to and returns f's own results, then the copies. It is made from the
schema alone, so that there is one for every operator. Torch's functionalization has no rule for operators that are not
its own; `adopt` gives it this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from primtorch import forks
from primtorch.effects import argument_returned, own_results, tensor_arguments
from primtorch.errors import TraceError
from primtorch.fake.overlap import may_meet
from primtorch.fake.registered import run_registered
from primtorch.fake.tensor import FakeMode, FakeTensor, register_special
from primtorch.functionalize import unwrap, wrap
from primtorch.spec import TensorSpec

T = TypeVar("T")
NAMESPACE = "primtorch_functional"
_library = torch.library.Library(NAMESPACE, "DEF")
_forms: dict[int, OpOverload] = {}  # by the identity of the operator
_defined: list[OpOverload] = []  # they stay, so that their identities do
_adopted: list[torch.library.Library] = []  # a library takes back what it registered when it goes
_known: set[str] = set()  # names of operators that were looked at
_registering = forks.rlock()  # one thread at a time defines what torch then knows by its name


def functional_form(op: OpOverload) -> OpOverload:
    """The operator that takes what `op` takes, writes to nothing, and returns the results of `op` that are no arguments
    and then a list: the new values of the tensors that `op` writes to.

    In a graph of values it does not show which tensors of a call were one. So the form has one more argument `copies`:
    for each tensor among the arguments, in the order of the schema, the number of the copy that stands for it, or -1
    where it is passed on as it is.
    """
    with _registering:
        form = _forms.get(id(op))
        if form is None:
            form = _define(op)
            _forms[id(op)] = form
            _defined.append(op)
        return form


def _define(op: OpOverload) -> OpOverload:
    own = own_results(op)
    arguments, results = _signature(op)
    name = "_".join((op.namespace, op._schema.name.partition("::")[2], op._schema.overload_name or "default"))
    while hasattr(getattr(torch.ops, NAMESPACE), name):  # an operator of that name was there before, and is gone
        name += "_"
    star = "" if any(a.kwarg_only for a in op._schema.arguments) else "*, "
    returned = ", ".join([*(results[i] for i in own), "Tensor[]"])
    _library.define(f"{name}({arguments}, {star}int[] {_COPIES}) -> ({returned})")

    def run(*args: object, **kwargs: Any) -> object:
        copies = kwargs.pop(_COPIES)
        made = _each_copied(op, args, kwargs, copies, _copy)
        given = _with_tensors(op, args, kwargs, [made.get(place) for place in copies])
        results = op(*given[0], **given[1])
        return _packed(op, results, list(made.values()))

    def fake(mode: FakeMode, *args: object, **kwargs: Any) -> object:
        copies = kwargs.pop(_COPIES)
        made = _each_copied(op, args, kwargs, copies, lambda t: _like(t, mode))
        return _packed(op, run_registered(mode, op, args, kwargs), list(made.values()))

    _library.impl(name, run, "CompositeExplicitAutograd")
    form: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    register_special(form, fake)
    return form


_COPIES = "_copies"


def _each_copied(
    op: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    copies: Sequence[int],
    copy: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Each copy by its number, in the order of the numbers."""
    tensors = [t for t, _ in tensor_arguments(op, args, kwargs)]
    return {place: copy(tensors[copies.index(place)]) for place in range(max(copies, default=-1) + 1)}


def _with_tensors(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], tensors: Sequence[torch.Tensor | None]
) -> tuple[list[object], dict[str, object]]:
    """The arguments of a call with other tensors where there are any, in the order of the schema."""
    rest = iter(tensors)

    def other(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [other(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        found = next(rest)
        return value if found is None else found

    names = [argument.name for argument in op._schema.arguments]
    positional = [other(value) for value in args]
    return positional, {name: other(kwargs[name]) for name in names if name in kwargs}


def _signature(op: OpOverload) -> tuple[str, list[str]]:
    """An operator's arguments and the types of its results as schemas write them, without what they say of aliases."""
    text = str(op._schema)
    text = _ALIASES.sub("Tensor", text[text.index("(") + 1 :])
    arguments, _, results = text.rpartition(") -> ")
    types = [result.split(" ")[0] for result in results.strip("()").split(", ")]
    return arguments, types


_ALIASES = re.compile(r"Tensor\([^()]*\)")


def _packed(op: OpOverload, results: Any, written: list[torch.Tensor]) -> object:
    own = own_results(op)
    if not own:
        return written
    given = (results,) if len(op._schema.returns) == 1 else results
    return (*(given[i] for i in own), written)


def _copy(t: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, which an operator of somebody's own may count on."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _like(t: torch.Tensor, mode: FakeMode) -> FakeTensor:
    return mode.from_spec(TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device))


def adopting(functionalize: Callable[[], T]) -> T:
    """Runs a functionalization. Where it meets an operator that writes and for which torch's has no rule, it is given
    one, and begins again."""
    while True:
        given = len(_adopted)
        try:
            return functionalize()
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            adopt()
            if len(_adopted) == given:  # neither this thread nor another gave it a rule in the meantime
                raise


def is_refusal(error: BaseException) -> bool:
    """Whether torch's functionalization raised this for an operator that it has no rule for."""
    return "custom (non-ATen) operator whose output has alias annotations" in str(error)  # its own words


def adopt() -> None:
    """Gives functionalization a rule for each operator that writes and has none: those that are not torch's own."""
    with _registering:
        new = [name for name in torch._C._dispatch_get_all_op_names() if name not in _known]
        _known.update(new)
        for name in filter(_has_no_rule, new):
            library = torch.library.Library(name.partition("::")[0], "IMPL")
            library.impl(name, _rule(name), "Functionalize")
            _adopted.append(library)


def _has_no_rule(name: str) -> bool:
    """Whether an operator that is not torch's own writes, and functionalization cannot run it."""
    packet, _, overload = name.partition(".")
    if name.startswith(("aten::", "prims::", NAMESPACE)) or not _writes(packet, overload):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not (has_kernel(name, "Functionalize") or has_kernel(name, "CompositeImplicitAutograd"))


def _writes(packet: str, overload: str) -> bool:
    schema = torch._C._get_schema(packet, overload)
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def _rule(operator: str) -> Callable[..., object]:
    namespace, _, rest = operator.partition("::")
    name, _, overload = rest.partition(".")

    def functionalized(*args: object, **kwargs: object) -> object:
        # Looked up at each call: an operator may be taken back, and another defined under its name.
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        return _call_functional(op, args, kwargs)

    return functionalized


_FUNCTIONALIZE = DispatchKeySet(DispatchKey.Functionalize)


def _call_functional(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """A call on functional tensors: its functional form on what they hold, then the new values into them."""
    written, copies = _copies_of(op, args, kwargs)
    inner = _with_tensors(op, args, kwargs, [unwrap(t) for t, _ in tensor_arguments(op, args, kwargs)])
    with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
        out = functional_form(op)(*inner[0], **inner[1], **{_COPIES: copies})
    own = own_results(op)
    for target, value in zip(written, out[-1] if own else out, strict=True):
        torch._functionalize_replace(target, value)  # type: ignore[attr-defined]
        torch._functionalize_commit_update(target)  # type: ignore[attr-defined]
        torch._sync(target)  # type: ignore[attr-defined]
    given = dict(zip(own, out, strict=False)) if own else {}
    results = [
        _outer(given[i]) if i in given else argument_returned(op, i, args, kwargs)
        for i in range(len(op._schema.returns))
    ]
    return results[0] if len(results) == 1 else tuple(results) or None


def _outer(result: object) -> object:
    if isinstance(result, torch.Tensor):
        return wrap(result)
    return type(result)(map(_outer, result)) if isinstance(result, (list, tuple)) else result


def _copies_of(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[torch.Tensor], list[int]]:
    """The functional tensors that a call writes to, one for each place in memory, and the argument `copies`.

    Raises:
        TraceError: what is written shares a part of its memory with another argument, which would not see the write.
    """
    given = [(t, _place(t), written) for t, written in tensor_arguments(op, args, kwargs)]
    written: dict[tuple[object, ...], torch.Tensor] = {}
    for t, place, is_written in given:
        if is_written:
            written.setdefault(place, t)
    for place, target in written.items():
        for other, elsewhere, _ in given:
            if elsewhere != place and elsewhere[0] == place[0] and may_meet(target, other):
                raise TraceError(
                    f"{op} writes to an argument that shares a part of its memory with another; clone one of them"
                )
    numbers = {place: number for number, place in enumerate(written)}
    return list(written.values()), [numbers.get(place, -1) for _, place, _ in given]


def _place(t: torch.Tensor) -> tuple[object, ...]:
    """The part of memory that a functional tensor is: equal for aliases of the whole of it."""
    layout = str((*t.shape, *t.stride(), t.storage_offset()))  # a comparison of symbols would be a guard
    return t.untyped_storage()._cdata, layout, t.dim(), t.dtype
