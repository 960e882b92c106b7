"""Channels-last images for a device whose convolutions want them: conversions at the edges, another order in between.

A graph of prims says how each value lies in memory (`meta["val"]`); which order that is changes no value. Where
convolutions are given channels-last operands, their results are channels-last, and so is what is computed from these:
the prims' own metas say so. What looks at memory, what is not computed by a kernel of ours, and what the graph returns
keep the order that they have in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from primtorch import prims
from primtorch.layout import channels_last_strides, is_channels_last
from primtorch.memory import memory_of
from primtorch.prims import Prim
from primtorch.spec import Size, TensorSpec
from torchinductor.lowering.graph import RULES
from torchinductor.schemas import DeviceTraits

CONVOLUTIONS: Mapping[str, slice] = {"convolution": slice(0, 2), "convolution_backward": slice(0, 3)}
"""By prim: which arguments are images and filters."""

_LOOK_AT_MEMORY = frozenset({"as_strided", "as_strided_scatter", "bitcast"})


def channels_last_convolutions(gm: fx.GraphModule, traits_of: Callable[[torch.device], DeviceTraits]) -> bool:
    """Rewrites the graph in place, where the convolutions' bytes outweigh those of the conversions; says whether."""
    convolutions = [node for node in gm.graph.nodes if _wants(node, traits_of)]
    if not convolutions or not all(_static(node) for node in gm.graph.nodes):
        return False
    plan = _planned(gm, frozenset(convolutions))
    if plan is None or plan.converted() >= sum(map(_bytes, _images(convolutions))):
        return False
    plan.apply()
    gm.recompile()
    return True


def _wants(node: fx.Node, traits_of: Callable[[torch.device], DeviceTraits]) -> bool:
    """Whether a node is a convolution of images that its device wants channels-last: units for matrices read them so,
    which take 16-bit numbers, and float32 ones where these may be rounded to TF32."""
    if not isinstance(node.target, Prim) or node.target.name not in CONVOLUTIONS:
        return False
    image = _spec(node.args[0])
    if len(image.shape) != 4 or not traits_of(image.device).channels_last:
        return False
    return image.dtype.itemsize == 2 or (image.dtype == torch.float32 and _rounds_to_tf32())


def _rounds_to_tf32() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the program says it by newer settings of each operator, and not the same of all
        return False


def _images(convolutions: Iterable[fx.Node]) -> Iterable[TensorSpec]:
    """What convolutions read and write."""
    for node in convolutions:
        yield from map(_spec, node.args[CONVOLUTIONS[node.target.name]])  # type: ignore[union-attr]
        yield from (spec for spec in _parts(node.meta["val"]) if isinstance(spec, TensorSpec))


def _parts(value: object) -> Sequence[object]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _spec(node: object) -> TensorSpec:
    assert isinstance(node, fx.Node)
    value = node.meta["val"]
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value


def _static(node: fx.Node) -> bool:
    shapes = [part.shape for part in _parts(node.meta.get("val")) if hasattr(part, "shape")]
    return all(isinstance(size, int) for shape in shapes for size in shape)


def _bytes(spec: TensorSpec) -> int:
    return int(spec.numel()) * spec.dtype.itemsize


def _same_place(spec: TensorSpec, strides: Sequence[object]) -> bool:
    """Whether other strides address the same elements: those of dims of size one do not count."""
    return all(a == b or n == 1 for n, a, b in zip(spec.shape, spec.strides, strides, strict=True))


@dataclass
class _Plan:
    """What becomes of a graph: the values' new layouts, and copies in front of some operands."""

    specs: dict[fx.Node, Any] = field(default_factory=dict)  # of nodes whose layout is another one
    copies: dict[fx.Node, dict[fx.Node, tuple[int, ...]]] = field(default_factory=dict)  # reader -> operand -> strides

    def spec(self, node: fx.Node) -> Any:
        """The layout of a node as the plan has it so far."""
        if node in self.specs:
            return self.specs[node]
        value = node.meta.get("val")
        return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value

    def copied(self, reader: fx.Node, operand: fx.Node, strides: Sequence[Size]) -> TensorSpec:
        """The layout in which a reader gets an operand that it wants with these strides."""
        spec = self.spec(operand)
        assert isinstance(spec, TensorSpec)
        same = spec.strides == tuple(strides) if reader.op == "output" else _same_place(spec, strides)
        if same:
            return spec
        self.copies.setdefault(reader, {})[operand] = tuple(map(int, strides))
        return TensorSpec(spec.shape, tuple(strides), spec.dtype, spec.device)

    def converted(self) -> int:
        """Bytes of all copies."""
        made = {(operand, strides) for wanted in self.copies.values() for operand, strides in wanted.items()}
        return sum(_bytes(self.spec(operand)) for operand, _ in made)

    def apply(self) -> None:
        """Changes the graph."""
        made: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        for node, spec in self.specs.items():
            node.meta["val"] = spec
        for reader, wanted in self.copies.items():
            for operand, strides in wanted.items():
                copy = made.get((operand, strides))
                if copy is None:
                    spec = self.spec(operand)
                    with operand.graph.inserting_before(reader):
                        copy = operand.graph.call_function(prims.copy_strided, (operand, strides))
                    copy.meta = {**reader.meta, "val": TensorSpec(spec.shape, strides, spec.dtype, spec.device)}
                    made[operand, strides] = copy
                reader.replace_input_with(operand, copy)


def _planned(gm: fx.GraphModule, convolutions: frozenset[fx.Node]) -> _Plan | None:
    """The plan for a graph; None where a value's memory is another's in a way that a copy would end."""
    plan = _Plan()
    for node in gm.graph.nodes:
        changed = [source for source in node.all_input_nodes if source in plan.specs]
        if node in convolutions:
            given = node.args[CONVOLUTIONS[node.target.name]]
            wanted = {arg: plan.copied(node, arg, channels_last_strides(arg.meta["val"].shape)) for arg in given}
            _propagate(plan, node, wanted)
        elif not changed:
            continue
        elif node.target is operator.getitem:
            plan.specs[node] = plan.spec(node.args[0])[node.args[1]]
        elif isinstance(node.target, Prim) and node.target.name in RULES and node.target.name not in _LOOK_AT_MEMORY:
            _propagate(plan, node, {})
        else:
            if node.op == "output" and _shared(node, changed):
                return None
            for source in changed:
                if isinstance(source.meta["val"], (tuple, list)):
                    return None
                plan.copied(node, source, _spec(source).strides)
    return plan


def _shared(output: fx.Node, changed: Sequence[fx.Node]) -> bool:
    """Whether a result that changes lies in the memory of another result, or of an input."""
    owners = [memory_of(node) for node in output.all_input_nodes]
    return any(owners.count(memory_of(node)) > 1 or memory_of(node).op != "call_function" for node in changed)


def _propagate(plan: _Plan, node: fx.Node, wanted: Mapping[fx.Node, TensorSpec]) -> None:
    """The layout of a prim's result by its meta. What is computed of images in both orders is channels-last."""
    target = node.target
    assert isinstance(target, Prim)
    lookup = lambda source: wanted.get(source) or plan.spec(source)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lookup)  # type: ignore[arg-type]
    made, old = target.meta(*args, **kwargs), plan.spec(node)
    if isinstance(made, TensorSpec) and "view" not in target.tags and target is not prims.copy_strided:
        sources = [plan.specs[source] for source in node.all_input_nodes if source in plan.specs]
        if any(_is_image(s) and s.shape == made.shape for s in sources):
            made = TensorSpec(made.shape, channels_last_strides(made.shape), made.dtype, made.device)
    if _strides(made) != _strides(old):
        plan.specs[node] = made


def _is_image(spec: object) -> bool:
    return isinstance(spec, TensorSpec) and len(spec.shape) == 4 and is_channels_last(spec.shape, spec.strides)


def _strides(value: object) -> list[object]:
    return [part.strides if isinstance(part, TensorSpec) else part for part in _parts(value)]
