"""`torch.utils.checkpoint` in the graph: the checkpointed function as a nested graph that is run under a checkpoint.

The function is interpreted like any other; what it records becomes a nested graph, called by a `CheckpointedGraph`,
which hands it to `torch.utils.checkpoint` at each call. So its activations are not kept, whoever compiles the graph,
but for those that a policy of the program chooses (`create_selective_checkpoint_contexts`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as eager

from primtorch.fake import FakeTensor
from primtorch.frozen import record
from primtorch.higher_order import call_body
from torchdynamo.calls.effects import effects_so_far
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.interpreter.protocol import World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

# Arguments of `checkpoint` that are its own; all others are the function's.
_OWN = {
    name: parameter.default
    for name, parameter in inspect.signature(eager.checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
} | {"preserve_rng_state": True}


@record
class Rules:
    """What the program asked of the checkpoint."""

    preserve_rng_state: bool
    determinism_check: str
    context_fn: Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class CheckpointedGraph(nn.Module):
    """Runs `body` without keeping its activations: its backward runs it again first.

    Args:
        given: the places of the inputs that the program hands to `checkpoint`, which refuses its backward where one of
            them was written in between. What the function closes over is read as it is then, in the program as here.
    """

    def __init__(self, body: fx.GraphModule, rules: Rules, given: Sequence[int]) -> None:
        super().__init__()
        self.body = body
        self.rules = rules
        self.given = tuple(given)

    def forward(self, *inputs: object) -> object:
        """Runs the body by `torch.utils.checkpoint`, as the program asked for it."""
        given = [inputs[place] for place in self.given]

        def run(*again: object) -> object:
            values = list(inputs)
            for place, value in zip(self.given, again, strict=True):
                values[place] = value
            return call_body(self.body, tuple(values))

        return eager.checkpoint(
            run,
            *given,
            use_reentrant=False,
            preserve_rng_state=self.rules.preserve_rng_state,
            determinism_check=self.rules.determinism_check,
            context_fn=self.rules.context_fn,
        )


def call_checkpointed(outside: Outside, world: World, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """`checkpoint(function, *args, **kwargs)`."""
    regions = outside.recorder.regions
    own: dict[str, Any] = {name: kwargs.get(name, default) for name, default in _OWN.items()}
    rest = {name: value for name, value in kwargs.items() if name not in own}
    function, *given = args
    if not torch.is_grad_enabled():
        return world.call(function, tuple(given), rest)
    _refuse(own, given, rest)
    recorder = outside.recorder
    handed = {recorder.node_of(t) for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
    mark, written = regions.mark(), len(recorder.written)
    before, said = effects_so_far(outside), outside.emitted
    try:
        with regions.body():
            value = world.call(function, tuple(given), rest)
        nodes = regions.since(mark)
        if effects_so_far(outside, before) != before or outside.emitted != said:
            raise _done_again("changes objects outside of it, or writes text")
        if not {memory_of(t) for t in recorder.written[written:]}.isdisjoint(_read_memories(nodes)):
            raise _done_again("writes to a tensor that was made before")
    except BreakGraph as error:
        wrapped = BreakGraph("checkpoint", f"in the checkpointed function, {error.reason}: {error.detail}")
        wrapped.positions = error.positions
        raise wrapped from error
    if nodes:
        rules = Rules(bool(own["preserve_rng_state"]), str(own["determinism_check"]), own["context_fn"])
        region = regions.outline(nodes)
        places = [place for place, node in enumerate(region.inputs) if node in handed]
        node = regions.call(region, region.inputs, "checkpoint", lambda body, _: CheckpointedGraph(body, rules, places))
        recorder.annotate(node, ())
    return value


def _done_again(what: str) -> BreakGraph:
    """The backward of a checkpoint does once more what its function does beside computing; a graph's does not."""
    return BreakGraph("checkpoint", f"the checkpointed function {what}, and does so again in its backward")


def _read_memories(nodes: Sequence[fx.Node]) -> set[object]:
    """Those of the tensors that nodes read from around them."""
    own = set(nodes)
    read = (source.meta.get("val") for node in nodes for source in node.all_input_nodes if source not in own)
    return {value.memory for value in read if isinstance(value, FakeTensor)}


# What tells operator by operator what is kept: it decides on memory, never on values.
_SELECTIVE = tuple(map(type, eager.create_selective_checkpoint_contexts([])))


def _is_selective(context_fn: Callable[[], object]) -> bool:
    """Whether the contexts that a program gives are those of a policy. It is asked where the graph is traced."""
    try:
        with torch._C.DisableTorchFunction():
            contexts = context_fn()
    except Exception as error:
        raise BreakGraph("checkpoint", f"context_fn() raises {type(error).__name__}") from error
    return type(contexts) is tuple and tuple(map(type, contexts)) == _SELECTIVE


def _refuse(own: dict[str, Any], args: list[object], kwargs: dict[str, object]) -> None:
    if own["context_fn"] is not eager.noop_context_fn and not _is_selective(own["context_fn"]):
        raise BreakGraph("checkpoint", "context_fn gives contexts of the program's own")
    if own["debug"]:
        raise BreakGraph("checkpoint", "debug=True records the operators of an eager run")
    if own["use_reentrant"] is False:
        return
    # The reentrant kind differentiates by its tensor arguments alone: with one of them it is as good as the other kind.
    if kwargs or not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        raise BreakGraph("checkpoint", "use_reentrant=True, and no argument requires a gradient")
    if any(isinstance(arg, (tuple, list, dict)) for arg in args):
        raise BreakGraph("checkpoint", "use_reentrant=True does not look into containers for tensors")
