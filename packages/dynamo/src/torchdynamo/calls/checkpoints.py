"""`torch.utils.checkpoint` in the graph: the checkpointed function as a nested graph that is run under a checkpoint.

The function is interpreted like any other; what it records becomes a nested graph, called by a `CheckpointedGraph`,
which hands it to `torch.utils.checkpoint` at each call. So its activations are not kept, whoever compiles the graph.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

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


class CheckpointedGraph(nn.Module):
    """Runs `body` without keeping its activations: its backward runs it again first."""

    def __init__(self, body: fx.GraphModule, rules: Rules) -> None:
        super().__init__()
        self.body = body
        self.rules = rules

    def forward(self, *inputs: object) -> object:
        return eager.checkpoint(
            self.body,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self.rules.preserve_rng_state,
            determinism_check=self.rules.determinism_check,
        )


def call_checkpointed(outside: Outside, world: World, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """`checkpoint(function, *args, **kwargs)`."""
    regions = outside.recorder.regions
    own = {name: kwargs.get(name, default) for name, default in _OWN.items()}
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
        rules = Rules(bool(own["preserve_rng_state"]), str(own["determinism_check"]))
        region = regions.outline(nodes)
        node = regions.call(region, region.inputs, "checkpoint", lambda body, _: CheckpointedGraph(body, rules))
        outside.recorder.annotate(node, ())
    return value


def _refuse(own: dict[str, object], args: list[object], kwargs: dict[str, object]) -> None:
    if own["context_fn"] is not eager.noop_context_fn:
        raise BreakGraph("checkpoint", "context_fn chooses what is kept, operator by operator")
    if own["debug"]:
        raise BreakGraph("checkpoint", "debug=True records the operators of an eager run")
    if own["use_reentrant"] is False:
        return
    # The reentrant kind differentiates by its tensor arguments alone: with one of them it is as good as the other kind.
    if kwargs or not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        raise BreakGraph("checkpoint", "use_reentrant=True, and no argument requires a gradient")
    if any(isinstance(arg, (tuple, list, dict)) for arg in args):
        raise BreakGraph("checkpoint", "use_reentrant=True does not look into containers for tensors")
