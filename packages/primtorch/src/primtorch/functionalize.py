"""In-place programs made functional: a recorded graph is run again through PyTorch's own functionalization."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from primtorch import effects
from primtorch.ambient import functionalization, set_functionalization
from primtorch.errors import PrimTorchError, TraceError
from primtorch.higher_order import HigherOrder
from primtorch.histories import with_history
from primtorch.layout import written_alike
from primtorch.schemas import UserFrame
from primtorch.spec import spec_of
from primtorch.tracing import RecordingMode

aten = torch.ops.aten
Number: TypeAlias = "torch.SymInt | torch.SymFloat"
WRITTEN_INPUTS = "written_inputs"
"""Key of a graph module's meta: positions of the inputs whose new values follow the outputs."""
WRITTEN_APART = "written_apart"
"""Those of them that get their new values past autograd: their histories stay what they are."""


# The one operator that writes in place for which torch's functionalization has no kernel, because its functional form
# takes the arguments in another order.
_polygamma = torch.library.Library("aten", "IMPL")
_polygamma.impl("polygamma_", lambda x, n: x.copy_(torch.polygamma(n, x)), "Functionalize")


@contextlib.contextmanager
def functional_region() -> Iterator[None]:
    """Inside, operators on wrapped tensors reach a dispatch mode below without writes; views stay views."""
    with _functionalization(True):
        yield


@contextlib.contextmanager
def outside_functionalization() -> Iterator[None]:
    """Inside, operators on wrapped tensors are what they are elsewhere."""
    with _functionalization(None):
        yield


@contextlib.contextmanager
def _functionalization(views: bool | None) -> Iterator[None]:
    """Functionalization as `set_functionalization` takes it. The thread may have had it on, or have taken it from its
    calls, as it does where an operator is implemented in Python; behind the block it has it as before."""
    before, taken = functionalization(), torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    try:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
        set_functionalization(views)
        yield
    finally:
        set_functionalization(before)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, taken)


_KEY = "Functionalize"


def wrap(inner: torch.Tensor) -> torch.Tensor:
    """The tensor as functionalization has it: writes to it replace `inner` by other values."""
    outer: torch.Tensor = torch._to_functional_tensor(inner)
    return outer


def unwrap(outer: torch.Tensor) -> torch.Tensor:
    """The present value, after pending writes through aliases."""
    if not torch._is_functional_tensor(outer):
        return outer
    torch._sync(outer)  # type: ignore[attr-defined]
    inner: torch.Tensor = torch._from_functional_tensor(outer)
    return inner


def writes(gm: fx.GraphModule) -> bool:
    """Whether an operator of the graph writes to one of its arguments."""
    return any(
        n.op == "call_function" and effects.writes(n.target) for n in gm.graph.nodes if isinstance(n.target, OpOverload)
    )


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> object:
    """native_batch_norm writes its running statistics, which its schema does not say."""
    if not training or mean is None or var is None:
        return aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    functional = aten._native_batch_norm_legit_functional.default
    *results, new_mean, new_var = functional(x, weight, bias, mean, var, training, momentum, eps)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(results)


_HIDDEN_WRITES: dict[object, Callable[..., object]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _batch_norm,
}


def functionalize(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor | Number], differentiable: bool = False
) -> fx.GraphModule:
    """The same program without writes. It returns the old outputs, and then the new value of each input that the
    program writes to; `gm.meta["written_inputs"]` has the positions of those.

    Args:
        inputs: one tensor or symbol for each placeholder, as they were before the program ran.
        differentiable: the graph is to be differentiated operator by operator; `copy` has no derivative.

    Raises:
        TraceError: the program writes to a tensor that is neither its own nor an input, or through views that cannot
            be put back into what they are of.
    """
    frames: tuple[UserFrame, ...] = ()
    mode = RecordingMode(frames=lambda: frames)
    rules = {**_HIDDEN_WRITES, aten.copy_.default: _alike_first} if differentiable else _HIDDEN_WRITES
    values: dict[fx.Node, Any] = {}
    wrapped: list[torch.Tensor | Number] = []
    starts: list[fx.Node] = []
    constants: list[tuple[str, torch.Tensor, fx.Node]] = []
    outputs: list[object] = []
    with torch.no_grad(), mode, functional_region():
        for node in gm.graph.nodes:
            frames = node.meta.get("stack", ())
            if node.op == "placeholder":
                given = inputs[len(starts)]
                inner: Any = given.detach() if isinstance(given, torch.Tensor) else given
                starts.append(mode.placeholder(inner, str(node.target)))
                values[node] = wrap(inner) if isinstance(given, torch.Tensor) else given
                wrapped.append(values[node])
            elif node.op == "get_attr":
                inner = operator.attrgetter(str(node.target))(gm).detach()
                values[node] = wrap(inner)
                constants.append((str(node.target), values[node], mode.node_of(inner)))
            elif node.op == "output":
                outputs = [
                    unwrap(v) if isinstance(v, torch.Tensor) else v
                    for v in fx.map_arg(node.args[0], values.__getitem__)
                ]
            else:
                values[node] = _run(node, values, mode, rules)
        ends = [unwrap(w) if isinstance(w, torch.Tensor) else w for w in wrapped]
        for name, outer, start in constants:
            if mode.node_of(unwrap(outer)) is not start:
                raise TraceError(
                    f"the program writes to {name}, a tensor that it takes from elsewhere; make it an "
                    "input of the function"
                )
    written = [
        i
        for i, (end, start) in enumerate(zip(ends, starts, strict=True))
        if isinstance(end, torch.Tensor) and mode.node_of(end) is not start
    ]
    made = mode.finish((*outputs, *(ends[i] for i in written)))
    if differentiable:
        _differentiable_copies(made.graph)
    made.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or bool(effects.tags_of(n.target)))
    read = {node.target for node in made.graph.find_nodes(op="get_attr")}
    for name in [name for name, _ in made.named_buffers() if name not in read]:
        delattr(made, name)  # what only dead code read
    made.recompile()
    made.meta[WRITTEN_INPUTS] = tuple(written)
    return made


def _alike_first(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A copy from a tensor of the target's shape, dtype and device."""
    source = source.to(dtype=target.dtype, device=target.device)
    return target.copy_(source if source.dim() == target.dim() == 0 else source.expand(target.shape))


def _differentiable_copies(graph: fx.Graph) -> None:
    """`copy` is what it copies; where that lies otherwise in memory, its values have the history of that."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = node.args[:2]
        given, wanted = spec_of(source.meta["val"]), spec_of(node.meta["val"])
        with graph.inserting_before(node):
            alike = given.dtype == wanted.dtype and written_alike(given.shape, wanted.shape)
            alike = alike and written_alike(given.strides, wanted.strides)
            if source.target is with_history and alike and given.device == wanted.device:
                made = source
            elif alike:
                made = graph.call_function(aten.clone.default, (source,))
            else:
                apart = [graph.call_function(aten.detach.default, (of,)) for of in (target, source)]
                values = graph.call_function(aten.copy.default, tuple(apart))
                for of, like in zip((*apart, values), (target, source, node), strict=True):
                    of.meta.update(like.meta, stack=node.meta["stack"])
                made = graph.call_function(with_history, (values, source))
        if made is not source:
            made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _run(node: fx.Node, values: dict[fx.Node, Any], mode: RecordingMode, rules: Mapping[object, Any]) -> object:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if isinstance(node.target, HigherOrder):  # its bodies write to nothing but what is theirs
        operands = tuple(unwrap(v) if isinstance(v, torch.Tensor) else v for v in args)
        with outside_functionalization():
            found = mode.call_graphs(node.target, operands)
        return tuple(map(wrap, found))
    call: Any = rules.get(node.target, node.target)
    try:
        return call(*args, **kwargs)
    except PrimTorchError:
        raise
    except RuntimeError as error:  # what ran when it was recorded is no error of the program's
        stack = node.meta.get("stack", ())
        line = f" ({stack[-1]})" if stack else ""
        what = f"a graph without writes has no form for what {node.target} writes or reads here{line}"
        raise TraceError(f"{what}: {str(error).partition(chr(10))[0]}") from error
