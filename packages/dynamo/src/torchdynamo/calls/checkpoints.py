"""`torch.utils.checkpoint` in the graph: the checkpointed function as a nested graph that is run under a checkpoint.

The function is interpreted like any other; what it records becomes a nested graph, called by a `CheckpointedGraph`,
which hands it to `torch.utils.checkpoint` at each call. So its activations are not kept, whoever compiles the graph,
but for those that a policy of the program chooses (`create_selective_checkpoint_contexts`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import checkpoint as eager

from torchdynamo.interpreter.protocol import World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

# Arguments of `checkpoint` that are its own; all others are the function's.
_OWN = {
    name: parameter.default
    for name, parameter in inspect.signature(eager.checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
} | {"preserve_rng_state": True}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the program asked of the checkpoint."""

    preserve_rng_state: bool
    determinism_check: str
    context_fn: Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class CheckpointedGraph(nn.Module):
    """Runs `body` without keeping its activations: its backward runs it again first."""

    def __init__(self, body: fx.GraphModule, rules: Rules) -> None:
        super().__init__()
        self.body = body
        self.rules = rules

    def forward(self, *inputs: object) -> object:
        """Runs the body by `torch.utils.checkpoint`, as the program asked for it."""
        return eager.checkpoint(
            self.body,
            *inputs,
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
    mark = regions.mark()
    try:
        with regions.body():
            value = world.call(function, tuple(given), rest)
        nodes = regions.since(mark)
    except BreakGraph as error:
        wrapped = BreakGraph("checkpoint", f"in the checkpointed function, {error.reason}: {error.detail}")
        wrapped.positions = error.positions
        raise wrapped from error
    if nodes:
        rules = Rules(bool(own["preserve_rng_state"]), str(own["determinism_check"]), own["context_fn"])
        region = regions.outline(nodes)
        node = regions.call(region, region.inputs, "checkpoint", lambda body, _: CheckpointedGraph(body, rules))
        outside.recorder.annotate(node, ())
    return value


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
