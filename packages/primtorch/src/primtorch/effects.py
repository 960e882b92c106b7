"""What a call of an operator does beside giving results. The schema says what it writes to; where an operator is from
says whether the schema is the whole truth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

_PURE_NAMESPACES = frozenset(
    {
        "aten", "prim", "prims", "quantized", "_quantized", "quantization", "mkl", "mkldnn", "mkldnn_prepacked",
        "onednn", "sparse", "primtorch_histories", "primtorch_packed", "primtorch_quantised",
        "torchinductor",
    }
)  # fmt: skip
"""Torch's own operators that compute, and this stack's: what their schemas do not mention does not happen."""


def is_foreign(op: OpOverload) -> bool:
    """Whether an operator is somebody's own (`torch.library`, an extension) or communicates: beside what its schema
    says it may print, count, draw random numbers, wait for others. It runs as often and in the order that eager runs
    it."""
    return op.namespace not in _PURE_NAMESPACES


def has_effect(op: OpOverload) -> bool:
    """Whether a call has to happen although nobody reads its results."""
    return is_foreign(op) or op._schema.is_mutable or not op._schema.returns


def tags_of(target: object) -> frozenset[str]:
    """What a node's call does beside giving results: "random", it draws random numbers; "effect", it has to happen."""
    if not isinstance(target, OpOverload):  # an operator over graphs, or a prim, says so itself
        return frozenset(tag for tag in getattr(target, "tags", ()) if tag in ("random", "effect"))
    random = torch.Tag.nondeterministic_seeded in target.tags
    return frozenset(["random"] * random + ["effect"] * has_effect(target))


_REFUSING = frozenset(
    {
        "_ctc_loss", "_embedding_bag", "_embedding_bag_forward_only", "_histogramdd_bin_edges", "_linalg_check_errors",
        "_linalg_eigh", "_linalg_svd", "binary_cross_entropy", "bincount", "cholesky", "embedding", "gather", "histc",
        "histogram", "index_add", "index_copy", "index_fill", "index_reduce", "index_select", "linalg_eig",
        "linalg_eigvals", "linalg_ldl_solve", "linalg_lstsq", "linalg_lu_solve", "linalg_pinv", "lu_unpack",
        "max_unpool2d", "max_unpool3d", "multi_margin_loss", "multilabel_margin_loss_forward", "multinomial",
        "nll_loss2d_forward", "nll_loss_forward", "put", "repeat_interleave", "scatter", "scatter_add",
        "scatter_reduce", "segment_reduce", "take",
    }
)  # fmt: skip
"""Operators that raise for what is in the tensors that they are given: places outside of a dimension, matrices without
an inverse, NaN."""
_REFUSING_INTEGERS = frozenset(
    {"index", "_index_put_impl", "index_put", "div", "divide", "floor_divide", "fmod", "remainder"}
)
"""Those that do so only where a later argument is a tensor of integers: masks are no places, floats may be zero."""


def may_refuse(op: OpOverload, args: Sequence[object]) -> bool:
    """Whether eager may raise at a call for what is in its tensors. Such a call has to happen although nobody reads its
    results: a program that asks whether a matrix has an inverse may do it so.

    args: the call's, tensors or what has their dtype.
    """
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    if name in _REFUSING:
        return True
    return name in _REFUSING_INTEGERS and any(
        dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex for dtype in _dtypes(args[1:])
    )


def _dtypes(values: Sequence[object]) -> Iterator[torch.dtype]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _dtypes(value)
        elif isinstance(dtype := getattr(value, "dtype", None), torch.dtype):
            yield dtype


_RUNNING = ("running_mean", "running_var")
_UNSAID: dict[str, tuple[tuple[int, str], ...]] = dict.fromkeys(
    ("aten::native_batch_norm", "aten::cudnn_batch_norm"), tuple(enumerate(_RUNNING, 3))
)
"""What operators write, in training, that their schemas do not mention."""


@functools.cache
def said_writes(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operator writes to, by its schema."""
    given = enumerate(op._schema.arguments)
    return tuple((i, a.name) for i, a in given if a.alias_info is not None and a.alias_info.is_write)


def writes(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """The places and names of all arguments that an operator may write to."""
    return said_writes(op) + _UNSAID.get(op.name(), ())


def tensor_arguments(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that a call is given, in the order of the schema, each with whether the call writes to it."""
    said = said_writes(op)
    for position, argument in enumerate(op._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        for one in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(one, torch.Tensor):
                yield one, (position, argument.name) in said


def written_tensors(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors that a call writes to, each once."""
    if not op._schema.is_mutable:
        return []
    return list({id(t): t for t, written in tensor_arguments(op, args, kwargs) if written}.values())


_ASSIGNMENTS = frozenset(
    {"setitem", "delitem", "iadd", "isub", "imul", "idiv", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand",
     "ior", "ixor", "ilshift", "irshift", "iconcat"}
)  # fmt: skip


_KEYWORDS = frozenset({"and_", "or_", "not_", "is_"})  # operators of Python that are words of its grammar


RESTRIDES = frozenset({"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"})
"""Methods that give a tensor another shape or strides in place, in the memory that it has: torch tags them
`inplace_view`. Each without its last letter is that of the view."""


def is_inplace(name: str) -> bool:
    """Whether a function of torch, a method or an operator of Python of this name writes to its first argument."""
    if name in _KEYWORDS:
        return False
    return (name.endswith("_") and not name.endswith("__")) or name.strip("_") in _ASSIGNMENTS


def asked_inplace(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call of one of torch's functions in Python has the flag `inplace`: it writes to its first argument."""
    if type(function) is not FunctionType:
        return False
    place = place_of_inplace(function)
    return place >= 0 and bool(kwargs.get("inplace", args[place] if place < len(args) else False))


def writes_first(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call says by its name or by a flag that it writes to its first argument. An operator of somebody's own
    says it in its schema alone."""
    if isinstance(function, OpOverload) and is_foreign(function):
        return False
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return is_inplace(name.partition(".")[0]) or asked_inplace(function, args, kwargs)


def outs_of(kwargs: Mapping[str, object]) -> tuple[torch.Tensor, ...]:
    """The tensors that a call is given as `out`."""
    return _tensors(kwargs.get("out"))


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, torch.Tensor))


def _first(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    return args[0] if args else kwargs.get("input")


def written_by(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors of which a call says that it writes to them: by its schema, as `out`, by its name or a flag.

    function: an overload, a packet of these, a function, or the name of a method.
    """
    overload = overload_of(function, args, kwargs)
    if overload is not None:
        return written_tensors(overload, args, kwargs)
    first = _tensors(_first(args, kwargs)) if writes_first(function, args, kwargs) else ()
    return [*first, *outs_of(kwargs)]


# The same of functions, which have no schema: where a switch is on, the places of both statistics.
_STATISTICS: dict[object, tuple[tuple[int, int], int, str]] = {
    F.batch_norm: ((1, 2), 5, "training"),
    F.instance_norm: ((1, 2), 5, "use_input_stats"),
    torch.batch_norm: ((3, 4), 5, "training"),
    torch.native_batch_norm: ((3, 4), 5, "training"),
    torch.instance_norm: ((3, 4), 5, "use_input_stats"),
}


def unsaid_writes(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors that a call of one of torch's functions writes to without saying so in its schema."""
    first = _tensors(_first(args, kwargs)) if asked_inplace(function, args, kwargs) else ()
    return [*outs_of(kwargs), *first, *written_statistics(function, args, kwargs)]


def written_statistics(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The running statistics that a call of one of torch's functions updates."""
    if function not in _STATISTICS:
        return []
    places, place, switch = _STATISTICS[function]
    default = function is F.instance_norm
    if not (args[place] if place < len(args) else kwargs.get(switch, default)):
        return []
    statistics = (args[i] if i < len(args) else kwargs.get(name) for i, name in zip(places, _RUNNING, strict=True))
    return [t for t in statistics if isinstance(t, torch.Tensor)]


@functools.lru_cache(1024)
def _place_of_inplace(code: CodeType) -> int:
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names.index("inplace") if "inplace" in names else -1


def place_of_inplace(function: FunctionType) -> int:
    """Where a function takes its flag `inplace`, with which it writes to its first argument; -1 if it has none."""
    return _place_of_inplace(function.__code__)


def own_results(op: OpOverload) -> tuple[int, ...]:
    """Which results of an operator are none of the arguments that it writes to."""
    return tuple(i for i, r in enumerate(op._schema.returns) if r.alias_info is None or not r.alias_info.is_write)


def returns_memory(op: OpOverload) -> bool:
    """Whether an operator that is none of ATen's gives back memory of an argument that it does not write to: a view,
    for which functionalization has no rule, unless the operator is made of others or brings one."""
    if op.namespace == "aten" or all(r.alias_info is None or r.alias_info.is_write for r in op._schema.returns):
        return False
    keys = ("CompositeImplicitAutograd", "Functionalize")
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def argument_returned(op: OpOverload, place: int, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The argument that a call writes to and gives back as its result number `place`."""
    memory = op._schema.returns[place].alias_info.before_set  # type: ignore[union-attr]
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == memory:
            return args[position] if position < len(args) else kwargs.get(argument.name)
    raise LookupError(f"result {place} of {op} is none of its arguments")


def overload_of(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> OpOverload | None:
    """The overload that a call of `function` comes to, if that is an operator or one of its overloads."""
    if isinstance(function, OpOverload):
        return function
    if not isinstance(function, OpOverloadPacket):
        return None
    names = function.overloads()
    if len(names) == 1:
        return getattr(function, names[0])  # type: ignore[no-any-return]
    chosen = torch._C._jit_resolve_packet(function._qualified_op_name, *args, **kwargs)  # type: ignore[attr-defined]
    return getattr(function, chosen)  # type: ignore[no-any-return]
