"""`options={"never_slower": True}`: a graph whose gain is in doubt is timed beside eager, and eager kept where it wins.

The first call runs compiled, and shows whether the graph writes or draws. The second one times both, in turns, on
detached aliases of its own inputs, until `BUDGET` seconds have passed. From then on the faster one runs, for as long as
the guards hold. It is an option and no default: what a clock decides differs between runs, and with it the last bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from primtorch import forks
from primtorch.effects import has_effect, is_inplace, unsaid_writes, writes
from primtorch.ledger import Event, Ledger
from torchcompile.events import EAGER_IS_FASTER

Run = Callable[..., Sequence[object]]

FEW = 8  # operators: a graph of no more than these may cost more to call than it saves
FUSED = 2  # operators a kernel, from which on a gain is not in doubt
ROUNDS = 5
BUDGET = 0.005  # seconds
MARGIN = 0.8  # of the compiled graph's time, below which eager is kept: noise shall not decide


def in_doubt(gm: fx.GraphModule, kernels: int) -> bool:
    """Whether a compiled graph may well be slower than eager: few operators, opaque calls alone, nothing fused."""
    operators = sum(node.op.startswith("call") for node in gm.graph.nodes)
    return operators <= FEW or operators < FUSED * kernels or not kernels


def can_be_timed(gm: fx.GraphModule) -> bool:
    """Whether the graph may run more often than asked, by what it says of itself; the first call has to show the rest.
    Its sizes have to be fixed, too: another size might choose otherwise."""
    return all(_is_plain(node) for node in gm.graph.nodes)


def _is_plain(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return type(node.meta.get("val")).__name__ == "FakeTensor"
    if node.op in {"output", "get_attr"}:
        return True
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return False
    if node.op == "call_method":
        return not is_inplace(str(node.target))
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        return not has_effect(target) and not writes(target)
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.startswith("aten::") and not is_inplace(target.__name__)
    module = str(getattr(target, "__module__", "") or "")
    known = module.partition(".")[0] in ("torch", "_operator", "math", "") and "distributed" not in module
    if not known or not hasattr(target, "__name__") or is_inplace(target.__name__):
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta.get("val"))  # type: ignore[arg-type]
    return not unsaid_writes(target, args, kwargs)


class Timed:
    """A compiled graph that may turn out to be slower than eager.

    Args:
        kernels: how many were generated for it so far.
        has_backward: whether its backward has been compiled.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        compiled: Run,
        title: str,
        ledger: Ledger,
        kernels: Callable[[], int],
        has_backward: Callable[[], bool],
    ) -> None:
        self.gm = gm
        self.compiled = compiled
        self.title = title
        self.ledger = ledger
        self.kernels = kernels
        self.has_backward = has_backward
        self.lock = forks.lock()
        self.calls = 0
        self.run: Run = self._undecided if can_be_timed(gm) else compiled

    def __call__(self, *inputs: object) -> Sequence[object]:
        return self.run(*inputs)

    def _undecided(self, *inputs: object) -> Sequence[object]:
        if not self.lock.acquire(blocking=False):  # another thread is at it
            return self.compiled(*inputs)
        try:
            self.calls += 1
            if self.calls == 1:
                before = _seen(inputs)
                results = self.compiled(*inputs)
                if _seen(inputs) != before:
                    self.run = self.compiled
                return results
            self.run = self._chosen(inputs)
        finally:
            self.lock.release()
        return self.run(*inputs)

    def _chosen(self, inputs: Sequence[object]) -> Run:
        if not in_doubt(self.gm, self.kernels()) or _is_watched():
            return self.compiled
        backward = torch.is_grad_enabled() and self.has_backward()
        times: dict[str, list[float]] = {"compiled": [], "eager": []}
        end = time.perf_counter() + BUDGET
        try:
            for _ in range(ROUNDS):
                for name, run in (("compiled", self.compiled), ("eager", self.gm.forward)):
                    times[name].append(_seconds(run, inputs, backward))
                if time.perf_counter() > end:
                    break
        except Exception:  # what the user's own call does is for that call to show
            return self.compiled
        compiled, eager = min(times["compiled"]), min(times["eager"])
        if len(times["eager"]) < 2 or eager > MARGIN * compiled:
            return self.compiled
        what = "forward and backward" if backward else "forward"
        detail = (
            f"{eager * 1e6:.0f} us in eager, {compiled * 1e6:.0f} us compiled ({what}, best of {len(times['eager'])})"
        )
        stacks = [node.meta["stack"] for node in self.gm.graph.nodes if node.meta.get("stack")]
        self.ledger.add(Event(EAGER_IS_FASTER, self.title, detail, stacks[0] if stacks else ()))
        return self.gm.forward


def _is_watched() -> bool:
    """Whether somebody would see operators run that the program does not call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks is not None or torch.is_anomaly_enabled() or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def _seen(inputs: Sequence[object]) -> tuple[object, ...]:
    """What a call changes that writes to its inputs or draws random numbers."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    versions = [0 if value.is_inference() else value._version for value in tensors]
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device) for device in {t.device for t in tensors} if device.type == "cuda"]
    return (*versions, *(bytes(state.numpy()) for state in states))


def _seconds(run: Run, inputs: Sequence[object], backward: bool) -> float:
    """What one call takes, with its backward if asked."""
    taken = list(map(_aliased, inputs))
    cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    results = run(*taken)
    if backward:
        roots = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        wanted = [value for value in taken if isinstance(value, torch.Tensor) and value.requires_grad]
        if roots and wanted:
            torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _aliased(value: object) -> object:
    """The same memory without history: the user's gradients and hooks see nothing."""
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach()
    if not value.requires_grad:
        return leaf
    leaf.requires_grad_()
    return leaf if value.is_leaf else leaf.view_as(leaf)
