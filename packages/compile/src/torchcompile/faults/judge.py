"""Two runs of a graph held to each other: values, gradients and what is left in the inputs, judged by float64.

How far a result may be from that of the run in float64 is what eager's own is, in the program's types: no tolerance is
fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.ambient import unset
from primtorch.testing import assert_as_accurate
from torchcompile.faults.schemas import Program, Run
from torchinductor.program import Value

_WIDE = {
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
}  # fmt: skip
_WIDE_METHODS = dict.fromkeys(("float", "half", "bfloat16"), "double")
_PARTS = ("output,", "input after the call,", "gradient of an input,")


@contextmanager
def numbers_of_its_own() -> Iterator[None]:
    """A block that draws no random numbers of the program's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def apart() -> Iterator[None]:
    """A block in the middle of a program whose modes see nothing of it. Its autocast holds: graphs depend on it, and a
    run in float64 does not."""
    casts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    with ExitStack() as stack:
        stack.enter_context(numbers_of_its_own())
        stack.enter_context(unset(torch.get_default_dtype()))
        for device, dtype in casts:
            stack.enter_context(torch.autocast(device, dtype))
        yield


class Judge:
    """What eager makes of a program, in its own types and in float64.

    Raises:
        Exception: whatever the program raises in eager.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        state = torch.get_rng_state()
        self._eager = results(program.module.forward, program.inputs, wide=False)
        self.draws = not torch.equal(state, torch.get_rng_state())
        self._exact = self._eager if self.draws else self._in_double()

    def _in_double(self) -> Any:
        try:
            exact = results(_in_wide_types(self.program.module).forward, self.program.inputs, wide=True)
            if all(map(_judges, pytree.tree_leaves(exact), pytree.tree_leaves(self._eager))):
                return exact
        except (RuntimeError, TypeError, ValueError):  # an operator that has no float64
            pass
        return pytree.tree_map_only(torch.Tensor, _widened, self._eager)

    def difference(self, run: Run) -> str | None:
        """What differs from eager; None where nothing does, or the program draws random numbers.

        Raises:
            Exception: whatever `run` raises.
        """
        if self.draws:
            return None
        found = results(run, self.program.inputs, wide=False)
        for what, mine, other, judge in zip(_PARTS, found, self._eager, self._exact, strict=True):
            if len(mine) != len(other):
                return f"{what} {len(mine)} results instead of {len(other)}"
            try:
                assert_as_accurate(mine, other, judge, what)
            except AssertionError as error:
                return str(error)
            wrong = _history(mine, other) if what == _PARTS[0] else None
            if wrong is not None:
                return wrong
        return None


def _history(mine: Sequence[object], other: Sequence[object]) -> str | None:
    """What autograd sees, and the order in memory, of results."""
    for place, (ours, theirs) in enumerate(zip(mine, other, strict=True)):
        if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            continue
        if ours.requires_grad != theirs.requires_grad:
            return f"output, result {place}: requires_grad is {ours.requires_grad}"
        if ours.layout is torch.strided and not _same_order(ours, theirs):
            return f"output, result {place}: strides {tuple(ours.stride())} instead of {tuple(theirs.stride())}"
    return None


def _same_order(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    strides = zip(ours.shape, ours.stride(), theirs.stride(), strict=True)
    return ours.numel() == 0 or all(size == 1 or a == b for size, a, b in strides)


def _judges(exact: object, eager: object) -> bool:
    if not isinstance(exact, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return not isinstance(eager, torch.Tensor)
    return exact.dtype == _WIDE.get(eager.dtype, eager.dtype) and exact.shape == eager.shape


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _in_wide_types(gm: fx.GraphModule) -> fx.GraphModule:
    """The program with the types that it names made wide, and its constants."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.args, node.kwargs = (
            fx.node.map_aggregate(held, lambda a: _WIDE.get(a, a) if isinstance(a, torch.dtype) else a)  # type: ignore[arg-type]
            for held in (node.args, node.kwargs)
        )
        if node.op == "call_method":
            node.target = _WIDE_METHODS.get(node.target, node.target)
    wide = fx.GraphModule(gm, graph)
    for node in graph.find_nodes(op="get_attr"):
        held = getattr(wide, str(node.target), None)
        if isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.Parameter):
            delattr(wide, str(node.target))
            wide.register_buffer(str(node.target), _widened(held), persistent=False)
    return wide


def results(run: Run, inputs: Sequence[Value], wide: bool) -> tuple[list[object], list[object], list[object]]:
    """Outputs, the inputs after the call, and gradients of the inputs; of a run on copies."""
    leaves = [copied(value, wide) for value in inputs]
    taken = [
        leaf.clone() if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf else leaf
        for leaf, value in zip(leaves, inputs, strict=True)
    ]
    outputs = list(run(*taken))
    roots = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients: list[object] = []
    if roots and wanted:
        tangents = [tangent(root) for root in roots]
        gradients = list(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
    elif wanted:
        gradients = [None] * len(wanted)
    return outputs, [value for value in taken if isinstance(value, torch.Tensor)], gradients


def tangent(root: torch.Tensor) -> torch.Tensor:
    """A gradient to begin with, of exact numbers that differ: of ones, a softmax has none."""
    steps = torch.arange(root.numel(), device=root.device) % 7
    return (1 + steps / 8).reshape(root.shape).to(root.dtype)


def copied(value: object, wide: bool = False) -> Any:
    """A detached copy that needs a gradient where the tensor does, `wide`: in float64; others as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return (_widened(copy) if wide else copy).requires_grad_(value.requires_grad)
