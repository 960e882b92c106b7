"""The rules that an autograd function has of its own for transforms of `torch.func`: its `vmap` and its `jvp`.

What they are given only the transform knows, which runs on fakes once the function around the call has been recorded.
So a rule is interpreted when the transform first asks for it, and is a graph from then on: of the call's tensors, and
of a `jvp` with its results and tangents. Whoever runs the transform later finds the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from primtorch.frozen import record
from primtorch.spec import TensorSpec
from torchdynamo.calls.effects import effects_so_far
from torchdynamo.interpreter.protocol import World
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

REASON = "autograd_function"


@record
class Rule:
    """A rule as a graph of tensors.

    Attributes:
        given: for each of the graph's results what it is of, for a rule that leaves some out.
        dims: where the batch lies in each result, of a `vmap`.
    """

    graph: fx.GraphModule
    given: tuple[int, ...]
    dims: tuple[int | None, ...] = ()


class Rules:
    """Records the rules of one call of an autograd function.

    Args:
        args: the call's arguments, tensors among them; `results`: how many tensors it gives.
        context: makes a fresh `ctx`.
    """

    def __init__(
        self,
        outside: Outside,
        world: World,
        kind: type[torch.autograd.Function],
        args: tuple[object, ...],
        results: int,
        context: Callable[[], Any],
    ) -> None:
        self.outside, self.world, self.kind = outside, world, kind
        self.args, self.results, self.context = args, results, context
        self.recorder = outside.recorder

    def vmap(self, info: object, dims: Sequence[int | None], tensors: Sequence[torch.Tensor]) -> Rule:
        """`kind.vmap(info, in_dims, *args)` for operands with their batch in these dims."""
        rule = self.world.getattr(self.kind, "vmap")
        of_args = self._in_args(dims, None)

        def run(given: Sequence[torch.Tensor]) -> tuple[list[object], tuple[int | None, ...]]:
            value: Any = self.world.call(rule, (info, of_args, *self._in_args(given)), {})
            if type(value) is not tuple or len(value) != 2:
                raise _refusal("its vmap returns no pair of results and their dims")
            found, out = value
            results = list(found) if type(found) is tuple else [found]
            places = out if type(out) is tuple else (out,) * len(results)
            if len(results) != self.results or len(places) != len(results):
                raise _refusal("its vmap returns another number of results than its forward, or of dims")
            if not all(place is None or type(place) is int for place in places):
                raise _refusal("its vmap returns dims that are no numbers")
            return results, tuple(places)

        return self._record("vmap", run, tensors)

    def jvp(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> Rule:
        """`kind.jvp(ctx, *tangents)` behind a call of these tensors; a rule of them and of the tangents there are."""
        rule, setup = self.world.getattr(self.kind, "jvp"), self.world.getattr(self.kind, "setup_context")
        known = [tangent for tangent in tangents if tangent is not None]
        first, last = len(tensors), len(tensors) + len(results)

        def run(given: Sequence[torch.Tensor]) -> tuple[list[object], tuple[int | None, ...]]:
            ctx, made = self.context(), tuple(given[first:last])
            output = made if len(made) > 1 else made[0]
            self.world.call(setup, (ctx, tuple(self._in_args(given[:first])), output), {})
            if ctx.for_forward is not None:
                ctx.saved_tensors = ctx.for_forward
            rest = iter(given[last:])
            asked = self._in_args([None if tangent is None else next(rest) for tangent in tangents], None)
            value: Any = self.world.call(rule, (ctx, *asked), {})
            return list(value) if type(value) is tuple else [value], ()

        return self._record("jvp", run, [*tensors, *results, *known])

    # -- recording --------------------------------------------------------------------------

    def _in_args(self, given: Sequence[object], other: object = ...) -> tuple[object, ...]:
        """One of these for each tensor argument, and the argument itself, or `other`, for those that are none."""
        rest = iter(given)
        keep = lambda arg: arg if other is ... else other
        return tuple(next(rest) if isinstance(arg, torch.Tensor) else keep(arg) for arg in self.args)

    def _record(
        self,
        name: str,
        run: Callable[[Sequence[torch.Tensor]], tuple[list[object], tuple[int | None, ...]]],
        tensors: Sequence[torch.Tensor],
    ) -> Rule:
        recorder, regions = self.recorder, self.recorder.regions
        written = len(recorder.written)
        before, said = effects_so_far(self.outside), self.outside.emitted
        specs = [_described(tensor) for tensor in tensors]
        mark = regions.mark()
        regions.transforms += 1
        try:
            with _no_levels(), recorder.conditions.refused(), regions.body():
                given = [recorder.stand_in("of_rule", spec) for spec in specs]
                results, dims = run(given)
        finally:
            regions.transforms -= 1
        if effects_so_far(self.outside, before) != before or self.outside.emitted != said:
            raise _refusal(f"its {name} changes objects outside of it")
        nodes = regions.since(mark)
        own = set(nodes)
        if any(recorder.node_of(tensor) not in own for tensor in recorder.written[written:]):
            raise _refusal(f"its {name} writes to a tensor that was made before")
        del recorder.written[written:]
        if not all(value is None or isinstance(value, torch.Tensor) for value in results):
            raise _refusal(f"its {name} returns something else than tensors")
        places = tuple(place for place, value in enumerate(results) if value is not None)
        outputs = [recorder.known_node(value, REASON) for value in results if isinstance(value, torch.Tensor)]
        region = regions.outline(nodes)
        if region.inputs or any(node not in region.copies for node in outputs):
            raise _refusal(f"its {name} reads tensors or sizes that it is not given")
        region.outputs = [region.copies[node] for node in outputs]
        region.sealed = _refusal(f"a value of its {name} is used outside of it")
        return Rule(regions.finished_sealed(region), places, dims)


def own_rules(kind: type[torch.autograd.Function]) -> tuple[bool, bool]:
    """Whether a function has a `vmap`, and a `jvp`, of its own."""
    of = torch.autograd.function._SingleLevelFunction
    return kind.vmap is not torch.autograd.Function.vmap, kind.jvp is not of.jvp


def _described(tensor: torch.Tensor) -> TensorSpec:
    """A tensor that a transform may have wrapped, as its rule sees it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


@contextmanager
def _no_levels() -> Iterator[None]:
    """A block outside of all transforms that are active, in which capture goes on."""
    levels = torch._C._functorch
    stack = []
    while levels.peek_interpreter_stack() is not None:
        stack.append(levels.pop_dynamic_layer_stack())
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for level in reversed(stack):
            levels.push_dynamic_layer_stack(level)


def _refusal(why: str) -> BreakGraph:
    return BreakGraph(REASON, why)
