"""A function and example inputs become a graph of ATen overloads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.ambient import preserved
from primtorch.errors import TraceError
from primtorch.fake import FakeTensor
from primtorch.functional_forms import adopting
from primtorch.functionalize import WRITTEN_APART, WRITTEN_INPUTS, functionalize, writes
from primtorch.higher_order import handled_by
from primtorch.out_arguments import LandingOut
from primtorch.schemas import UserFrame
from primtorch.traced_bodies import Lines, TracedBodies
from primtorch.tracing import RecordingMode
from primtorch.unseen_writes import memory

_TORCH = torch.__file__.rpartition("/")[0]
_OURS = __file__.rpartition("/")[0]


def _user_frames() -> tuple[UserFrame, ...]:
    """The frames of the program being traced, outermost first: neither torch's nor this package's."""
    frames: list[UserFrame] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is trace.__code__:
            break
        if not code.co_filename.startswith((_TORCH, _OURS)):
            frames.append(UserFrame(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(frames))


def trace(fn: Callable[..., object], *examples: object) -> fx.GraphModule:
    """Run `fn` on the examples once and record every ATen call, gradients included.

    The graph takes the symbolic numbers among the examples, then the tensors (in pytree order), and returns fn's
    results as a flat tuple. It is functional: a program that writes in place is rewritten, and where it writes to its
    inputs, their new values follow the outputs and `gm.meta["written_inputs"]` has their positions; `"written_apart"`
    has those of them that are written only where autograd sees nothing. Tensors that fn
    reads from elsewhere become constants. Branches and loops are a node each, over such graphs of their own. Where an
    example requires a gradient, what has no history in fn is detached. Nodes have the lines of the user: where fn is a
    graph, those of its nodes.

    Raises:
        TraceError: fn returns something that is not a tensor, a number or None, or writes to a tensor that is neither
            its own nor an input, or where autograd does not see it and no graph can say what gradients are then, or
            calls an autograd function of which it would have but the forward.
    """
    return _traced(fn, Lines(_user_frames), examples)


def _traced(fn: Callable[..., object], lines: Lines, examples: Sequence[object]) -> fx.GraphModule:
    leaves, _ = pytree.tree_flatten(examples)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    snapshots = _Snapshots(inputs)
    follows = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    captured = isinstance(fn, fx.GraphModule) and not any(
        "requires_grad_" in (node.target, getattr(node.target, "__name__", "")) for node in fn.graph.nodes
    )
    mode = RecordingMode(frames=lines, before_write=snapshots.before_write, follows_history=follows, captured=captured)
    numbers = [leaf for leaf in leaves if isinstance(leaf, (torch.SymInt, torch.SymFloat))]
    for i, number in enumerate(numbers):
        mode.placeholder(number, f"number_{i}")
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            mode.placeholder(leaf, f"input_{i}")
    envs = {leaf.fake_mode.shape_env for leaf in leaves if isinstance(leaf, FakeTensor)} - {None}
    bodies = handled_by(TracedBodies(mode, lines, _traced))
    with preserved(), contextlib.ExitStack() as asking, LandingOut(), mode, bodies:
        for env in envs:
            asking.enter_context(env.asked_by(lines))  # type: ignore[union-attr]
        outputs = lines.run(fn, examples) if isinstance(fn, fx.GraphModule) else fn(*examples)
    flat, _ = pytree.tree_flatten(outputs)
    for out in flat:
        if out is not None and not isinstance(
            out, (torch.Tensor, int, float, bool, complex, torch.SymInt, torch.SymFloat)
        ):
            raise TraceError(f"fn returned a {type(out).__name__}; expected tensors, numbers or None in containers")
    if follows:
        for out in flat:
            if isinstance(out, torch.Tensor):
                mode.settle(out)
                if not out.requires_grad:
                    mode.detach(out)
    recorded = mode.finish(tuple(flat))
    if not writes(recorded):
        return recorded
    made = adopting(lambda: functionalize(recorded, [*numbers, *snapshots.restored()], follows))
    if follows:  # running statistics are computed of what has a history, and have none
        apart = [*(False for _ in numbers), *(not leaf.requires_grad for leaf in inputs)]
        _detached(made, [apart[place] for place in made.meta[WRITTEN_INPUTS]])
        places = [None] * len(numbers) + [memory(leaf) for leaf in inputs]
        past = [i for i in made.meta[WRITTEN_INPUTS] if places[i] not in mode.seen_writes]
        made.meta[WRITTEN_APART] = tuple(past)
    return made


def _detached(gm: fx.GraphModule, which: Sequence[bool]) -> None:
    """Has the last of a graph's results without a history, where `which` says so."""
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    first = len(results) - len(which)
    with gm.graph.inserting_before(output):
        for place, (apart, node) in enumerate(zip(which, results[first:], strict=True), first):
            if apart and node.target is not torch.ops.aten.detach.default:
                results[place] = gm.graph.call_function(torch.ops.aten.detach.default, (node,))
                results[place].meta = dict(node.meta)
    output.args = (tuple(results),)
    gm.recompile()


class _Snapshots:
    """The inputs as they were before the program's first write to their memory."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.shared = [t.untyped_storage()._cdata for t in inputs if t.layout is torch.strided]
        self.saved: dict[int, torch.UntypedStorage] = {}

    def before_write(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if isinstance(t, FakeTensor) or key in self.saved or key not in self.shared:
            return  # a fake has no values to keep
        if self.shared.count(key) > 1:
            raise TraceError(
                "the program writes to an input that shares its memory with another input; a functional "
                "graph has one value for each input"
            )
        self.saved[key] = storage.clone()

    def restored(self) -> list[torch.Tensor]:
        return [self._restored(t.detach()) for t in self.inputs]

    def _restored(self, t: torch.Tensor) -> torch.Tensor:
        strided = t.layout is torch.strided and not isinstance(t, FakeTensor)
        saved = self.saved.get(t.untyped_storage()._cdata) if strided else None
        if saved is None:
            return t
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(saved, t.storage_offset(), t.size(), t.stride())
