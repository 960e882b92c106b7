"""Python values that a program takes out of its tensors: `.item()`, `torch.equal`, sizes that a branch asks for.

A graph holds no branch. So the value is computed from the example inputs while the program is traced, and the graph is
right for inputs that give the same value. A guard, which is a graph of its own, says before a call whether they do.
"""

from __future__ import annotations

import cmath
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import OpOverload

from aotautograd.errors import user_location
from aotautograd.inputs import ProgramInputs
from aotautograd.partitioners import extract
from aotautograd.passes import is_random
from aotautograd.schemas import Assumption, JointGraph, SymbolSource, Values
from primtorch.effects import has_effect
from primtorch.errors import DataDependentValue
from primtorch.fake import FakeTensor
from primtorch.functionalize import outside_functionalization
from primtorch.schemas import UserFrame
from primtorch.symbolic import hint_of

CHECK_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


class ExampleValues:
    """The values of a growing graph's nodes for the example inputs, computed where they are asked for."""

    def __init__(self, inputs: Mapping[fx.Node, Any], constants: Mapping[str, torch.Tensor]) -> None:
        self.known = dict(inputs)
        self.constants = constants
        self.assumed: dict[fx.Node, Assumption] = {}

    def __call__(self, node: fx.Node) -> Any:
        """Runs what the node depends on, on real tensors. Raises DataDependentValue if that draws random numbers."""
        work = [node]
        with _real():
            while work:
                last = work[-1]
                missing = [n for n in last.all_input_nodes if n not in self.known]
                if last in self.known or missing:
                    work.pop() if last in self.known else work.extend(missing)
                    continue
                self.known[last] = self._run(last)
                work.pop()
        return self.known[node]

    def _run(self, node: fx.Node) -> object:
        if node.op == "get_attr":
            return self.constants[str(node.target)]
        if is_random(node) or node.op != "call_function":
            raise _unknown(
                node,
                "the tensor depends on random numbers or on the gradient, so that it cannot be known before the call",
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.known.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def assume(self, node: fx.Node, kind: Literal["value", "shape"]) -> object:
        """The number in a tensor, or a tensor's shape, which from here on is taken for granted."""
        value = self(node)
        with _real():
            found = tuple(value.shape) if kind == "shape" else value.item()
        self.assumed[node] = Assumption(node.name, kind, found, _stack(node))
        return found


def _unknown(node: fx.Node, why: str) -> DataDependentValue:
    remedy = "Keep the value in a tensor, or keep this part out of the compiled region."
    what = "a Python value that the program takes out of a tensor"
    return DataDependentValue(what, why, remedy + user_location(_stack(node)))


class TriedValues(ExampleValues):
    """Values that nothing is made of: a derivative is tried on them. Draws are any draws."""

    def read(self, func: Callable[..., object], node: fx.Node) -> object:
        """What a function reads of a node's value. Raises DataDependentValue if operators of somebody's own, which run
        as often as the program calls them, would have to run for it."""
        value = self(node)
        with _real():
            return func(value)

    def _run(self, node: fx.Node) -> object:
        if isinstance(node.target, OpOverload) and has_effect(node.target):
            raise _unknown(node, "an operator that is not torch's own computes it")
        if not is_random(node):
            return super()._run(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.known.__getitem__)
        with torch.random.fork_rng():
            return node.target(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def _real() -> Iterator[None]:
    """Outside of all that traces."""
    with (
        outside_functionalization(),  # which makes wrappers of what is made of nothing
        torch._C._DisableTorchDispatch(),  # type: ignore[attr-defined]
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
    ):
        yield


def _stack(node: fx.Node) -> tuple[UserFrame, ...]:
    return node.meta.get("stack") or ()


def example_values(
    bound: ProgramInputs, nodes: Sequence[fx.Node], examples: Sequence[object], constants: Mapping[str, torch.Tensor]
) -> ExampleValues | None:
    """None if the examples are descriptions, not tensors with data, or have sizes that are symbols."""
    inputs = _inputs(bound, nodes, examples)
    if inputs is None or any(isinstance(value, torch.SymInt) for value in inputs.values()):
        return None
    return ExampleValues(inputs, constants)


def tried_values(
    bound: ProgramInputs, nodes: Sequence[fx.Node], examples: Sequence[object], constants: Mapping[str, torch.Tensor]
) -> TriedValues | None:
    """None if the examples are descriptions, not tensors with data. Symbols are the sizes that they stand for here."""
    inputs = _inputs(bound, nodes, examples)
    if inputs is None:
        return None
    return TriedValues(
        {node: hint_of(value) if isinstance(value, torch.SymInt) else value for node, value in inputs.items()},
        constants,
    )


def _inputs(bound: ProgramInputs, nodes: Sequence[fx.Node], examples: Sequence[object]) -> dict[fx.Node, object] | None:
    inputs: dict[fx.Node, object] = {}
    for node, (_, source, _) in zip(nodes, bound.placeholders(), strict=True):
        example = examples[source.input if isinstance(source, SymbolSource) else source]
        known = isinstance(example, (torch.Tensor, int, torch.SymInt))
        if not known or isinstance(example, FakeTensor) or _is_symbolic(example):
            return None
        inputs[node] = example.shape[source.dim] if isinstance(source, SymbolSource) else example  # type: ignore[attr-defined]
    return inputs


def _is_symbolic(example: object) -> bool:
    return isinstance(example, torch.Tensor) and (example.is_meta or torch._is_functional_tensor(example))


def guard_graph(joint: fx.GraphModule, num_placeholders: int, assumed: Iterable[fx.Node]) -> fx.GraphModule:
    """The part of a joint graph that tells the assumed values, one tensor for each."""
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"][:num_placeholders]
    return extract(joint, inputs, tuple(assumed), "Guard")


def holds(joint: JointGraph, flat: Values) -> bool:
    """Whether inputs give the values that the program was traced with. Runs the guard as it is, kernel by kernel."""
    metadata = joint.metadata
    if joint.guard is None:
        return True
    inputs = [flat[p] if isinstance(p, int) else flat[p.input].shape[p.dim] for p in metadata.placeholders]
    with torch.no_grad(), torch._C._DisableAutocast():
        try:
            values = joint.guard(*inputs)
        except CHECK_ERRORS:  # other sizes than those assumed do not fit what follows; a new trace tells
            return False
    return all(_agrees(a, v) for a, v in zip(metadata.assumptions, values, strict=True))


def _agrees(assumption: Assumption, tensor: torch.Tensor) -> bool:
    if assumption.kind == "shape":
        return bool(tuple(tensor.shape) == assumption.value)
    found, expected = tensor.item(), assumption.value
    return bool(found == expected) or (cmath.isnan(found) and cmath.isnan(expected))
