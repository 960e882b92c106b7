"""Two runs of a graph held to each other: values, gradients and what is left in the inputs, judged by float64.

How far a result may be from that of the run in float64 is what eager's own is, in the program's types: no tolerance is
fixed. Where that is small by luck, it is that beside the inputs, a rounding away.
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
_BESIDE = 8  # inputs a rounding away: of 4000 draws eager's error at one point was too small to judge by in one


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
        exact = self._eager if self.draws else self._in_double()
        self._exact = pytree.tree_map_only(torch.Tensor, _widened, self._eager) if exact is None else exact

    def _in_double(self, beside: int = 0) -> Any:
        """None where an operator of the program has no float64."""
        wide = _in_wide_types(self.program.module).forward
        try:
            exact = results(wide, self.program.inputs, wide=True, beside=beside)
        except (RuntimeError, TypeError, ValueError):
            return None
        return exact if all(map(_judges, pytree.tree_leaves(exact), pytree.tree_leaves(self._eager))) else None

    def difference(self, run: Run) -> str | None:
        """What differs from eager; None where nothing does, or the program draws random numbers.

        Raises:
            Exception: whatever `run` raises.
        """
        if self.draws:
            return None
        found = results(run, self.program.inputs, wide=False)
        for part, what in enumerate(_PARTS):
            mine, other = found[part], self._eager[part]
            if len(mine) != len(other):
                return f"{what} {len(mine)} results instead of {len(other)}"
            error = _inaccuracy(mine, other, self._exact[part], what)
            if error is not None and _inaccuracy(mine, self._as_far_off(part), self._exact[part], what) is not None:
                return error
            wrong = _history(mine, other) if part == 0 else None
            if wrong is not None:
                return wrong
        return None

    def _as_far_off(self, part: int) -> Sequence[object]:
        """Eager's results, as far off the exact ones as the furthest beside the inputs."""
        eager, exact = self._eager[part], self._exact[part]
        errors = [0.0] * len(eager)
        with numbers_of_its_own():
            for beside in range(1, _BESIDE + 1):
                judge = self._in_double(beside)
                try:
                    there = results(self.program.module.forward, self.program.inputs, wide=False, beside=beside)[part]
                except Exception:  # eager refuses numbers there, for their values
                    judge = None
                if judge is None:
                    return eager
                errors = [max(e, _distance(*pair)) for e, *pair in zip(errors, there, judge[part], strict=True)]
        return [_moved(*of) for of in zip(eager, exact, errors, strict=True)]


def _inaccuracy(mine: object, other: object, exact: object, what: str) -> str | None:
    try:
        assert_as_accurate(mine, other, exact, what)
    except AssertionError as error:
        return str(error)
    return None


def _distance(value: object, exact: object) -> float:
    """The largest between finite numbers of a type that is rounded."""
    if not isinstance(value, torch.Tensor) or not isinstance(exact, torch.Tensor) or value.dtype not in _WIDE:
        return 0.0
    difference = (value.detach().to(exact.dtype) - exact.detach()).abs()
    known = difference[torch.isfinite(difference)]
    return float(known.max()) if known.numel() else 0.0


def _moved(value: object, exact: object, by: float) -> object:
    """A result of eager's with that error; what is no finite number stays as it is."""
    if not isinstance(value, torch.Tensor) or not isinstance(exact, torch.Tensor) or value.dtype not in _WIDE:
        return value
    far = (exact.detach() + by).to(value.dtype)
    return torch.where(torch.isfinite(value) & torch.isfinite(far), far, value.detach())


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


def results(
    run: Run, inputs: Sequence[Value], wide: bool, beside: int = 0
) -> tuple[list[object], list[object], list[object]]:
    """Outputs, the inputs after the call, and gradients of the inputs; of a run on copies, or `beside` them: on numbers
    a rounding away, others for each of these."""
    given = [_nudged(value, (beside << 16) + i) for i, value in enumerate(inputs)] if beside else inputs
    leaves = [copied(value, wide) for value in given]
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


def _nudged(value: Value, seed: int) -> Value:
    """Numbers of a type that is rounded, each off by up to an ulp."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE or value.layout is not torch.strided:
        return value
    generator = torch.Generator(value.device).manual_seed(seed)
    by = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64)
    nudged = value.detach() * (1 + (2 * by - 1) * torch.finfo(value.dtype).eps)
    return nudged.to(value.dtype).requires_grad_(value.requires_grad)


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
