"""What training scripts do around a model, as a table: each protocol runs on a subject, eager or compiled.

A protocol notes what it sees; the notes of the eager and of the compiled subject are compared. It leaves hooks and
flags behind as it found them: parameters, gradients and modes are set back between protocols.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from drawn_rounding import DRAWS
from protocol_batches import loader
from protocol_programs import Program
from shared_programs import relation
from torch import nn
from torch.optim import swa_utils
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from primtorch.ambient import AMBIENT


@dataclass(frozen=True)
class Note:
    """One observation: numbers are compared by their values, facts exactly."""

    name: str
    numbers: tuple[torch.Tensor | None, ...] = ()
    facts: Any = None


@dataclass
class Subject:
    """A module, and what is called in its place."""

    program: Program
    module: nn.Module
    call: Callable[..., Any]
    notes: list[Note] = field(default_factory=list)
    loaders: dict[str, Iterable[Any]] = field(default_factory=dict)  # those of other processes may be shared

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def run(self, step: int, call: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        """The results of a call that are tensors."""
        args, kwargs = self.program.batch(step)
        torch.manual_seed(step)
        results = (call or self.call)(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]

    def batches(self, start: str) -> Iterable[Any]:
        """Two batches, loaded by a process that is started in this way; by none for the eager subject."""
        if start not in self.loaders:
            made = [self.program.batch(step) for step in range(2)]
            self.loaders[start] = loader(made, None if self.call is self.module else start)
        return self.loaders[start]

    def loss(self, step: int, call: Callable[..., Any] | None = None) -> torch.Tensor:
        outputs = self.run(step, call)
        self.note(f"results of step {step}", numbers=outputs, facts=relation(outputs))
        return total(outputs)

    def note(self, name: str, numbers: Sequence[torch.Tensor | None] = (), facts: Any = None) -> None:
        kept = tuple(None if t is None else t.detach().clone() for t in numbers)
        self.notes.append(Note(name, kept, facts))

    def note_gradients(self, name: str) -> None:
        gradients = [p.grad for p in self.parameters]
        self.note(name, gradients, relation([g for g in gradients if g is None or g.layout == torch.strided]))

    def note_state(self, name: str) -> None:
        self.note(name, list(self.module.state_dict().values()))

    @contextmanager
    def raising(self, name: str) -> Iterator[None]:
        """Notes what the block raises."""
        try:
            yield
        except RuntimeError as error:
            self.note(name, facts=type(error).__name__)
        else:
            self.note(name, facts="nothing raised")


def total(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    needing = [o for o in outputs if o.requires_grad and o.is_floating_point()]
    return torch.stack([o.square().mean() for o in needing]).sum()


def reset(subject: Subject, state: dict[str, torch.Tensor]) -> None:
    """The module as it was at the start."""
    subject.notes.clear()
    with torch.no_grad():
        for name, value in subject.module.state_dict().items():
            value.copy_(state[name])
    subject.module.train()
    for p in subject.parameters:
        p.grad = None
        p.requires_grad_(True)


# -- the protocols -------------------------------------------------------------------------------------------------------


def accumulated(s: Subject) -> None:
    for step in range(3):
        s.loss(step).backward()
        s.note_gradients(f"after backward {step}")


def clipped_by_norm(s: Subject) -> None:
    for step in range(2):
        s.loss(step).backward()
        s.note("norm", [nn.utils.clip_grad_norm_(s.parameters, 0.1)])
        s.note_gradients(f"clipped {step}")


def clipped_by_value(s: Subject) -> None:
    for step in range(2):
        s.loss(step).backward()
        nn.utils.clip_grad_value_(s.parameters, 1e-3)
        s.note_gradients(f"clipped {step}")


def scaled(s: Subject) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=16.0), torch.optim.SGD(s.parameters, 0.01)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(s.loss(step)).backward()
        scaler.unscale_(optimizer)
        s.note_gradients(f"unscaled {step}")
        scaler.step(optimizer)
        scaler.update()
    s.note_state("stepped")


def zeroed(s: Subject) -> None:
    for step, to_none in enumerate((False, True, False)):
        s.loss(step).backward()
        s.note_gradients(f"backward {step}")
        s.module.zero_grad(set_to_none=to_none)
        s.note_gradients(f"zeroed {step}")


def retained(s: Subject) -> None:
    loss = s.loss(0)
    loss.backward(retain_graph=True)
    s.note_gradients("first")
    loss.backward()
    s.note_gradients("second")
    with s.raising("third"):
        loss.backward()


class Untrainable(Exception):
    """The program writes to what its own backward reads."""


def two_losses(s: Subject) -> None:
    """The results of a call one after the other."""
    outputs = [o for o in s.run(0) if o.requires_grad]
    for place, output in enumerate(outputs[:3]):
        with s.raising(f"backward of result {place}"):
            try:
                output.square().mean().backward()
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):  # what eager refuses, a graph may have copied
                    raise Untrainable from error
                raise
            s.note_gradients(f"result {place}")
            continue
        s.module.zero_grad()  # how far a backward came that raised depends on the order of the nodes


def crossed(s: Subject) -> None:
    """Two calls, then their backwards."""
    first, second = s.loss(0), s.loss(1)
    first.backward()
    second.backward()
    s.note_gradients("crossed")


def frozen(s: Subject) -> None:
    optimizer = torch.optim.SGD(s.parameters, 0.01)
    for step in range(3):
        for place, p in enumerate(s.parameters):
            p.requires_grad_(step != 1 or place % 2 == 0)
        optimizer.zero_grad()
        s.loss(step).backward()
        s.note_gradients(f"step {step}")
        optimizer.step()
    s.note_state("stepped")


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, foreach=False),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, 1e-3, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, 1e-3, fused=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 1e-3),
}


def optimized(s: Subject, name: str) -> None:
    optimizer = OPTIMIZERS[name](s.parameters)
    for step in range(2):
        optimizer.zero_grad()
        s.loss(step).backward()
        optimizer.step()
    s.note_state("stepped")


def lbfgs(s: Subject) -> None:
    optimizer = torch.optim.LBFGS(s.parameters, lr=1e-3, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = s.loss(0)
        loss.backward()
        return loss

    optimizer.step(closure)
    s.note_state("stepped")


def evaluated(s: Subject) -> None:
    s.loss(0).backward()
    s.module.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outputs = s.run(1)
            s.note(f"under {context.__name__}", outputs, [(o.requires_grad, o.is_inference()) for o in outputs])
            s.note("grad mode", facts=(torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    s.module.train()
    s.loss(2).backward()
    s.note_gradients("trained again")


def saved_and_loaded(s: Subject) -> None:
    s.loss(0).backward()
    file = io.BytesIO()
    torch.save(s.module.state_dict(), file)
    with torch.no_grad():
        for p in s.parameters:
            p.mul_(0.5)
    s.loss(1).backward()
    s.note_gradients("halved")
    file.seek(0)
    s.module.load_state_dict(torch.load(file))
    s.loss(1).backward()
    s.note_gradients("loaded")


def copied(s: Subject) -> None:
    s.loss(0).backward()
    twin = copy.deepcopy(s.call)
    with torch.no_grad():
        for p in s.parameters:
            p.add_(0.01)
    s.loss(1).backward()
    s.loss(1, twin).backward()
    s.note_gradients("the original's")
    s.note("the copy's", [p.grad for p in twin.parameters()])  # type: ignore[attr-defined]


def hooked(s: Subject) -> None:
    handles: list[Any] = []
    called: list[str] = []
    s.loss(0).backward()
    child = next((m for m in s.module.modules() if isinstance(m, (nn.Linear, nn.Conv2d))), s.module)
    handles.append(s.parameters[0].register_hook(lambda g: g * 2))
    handles.append(s.parameters[-1].register_post_accumulate_grad_hook(lambda p: called.append("accumulated")))
    s.loss(1).backward()
    s.note_gradients("with hooks of parameters")
    handles.append(child.register_forward_hook(lambda m, args, out: out * 2 if isinstance(out, torch.Tensor) else out))
    handles.append(child.register_full_backward_hook(lambda m, gi, go: called.append("backward")))
    s.loss(2).backward()
    s.note_gradients("with hooks of modules")
    for handle in handles:
        handle.remove()
    s.loss(3).backward()
    s.note_gradients("without hooks")
    s.note("calls in order", facts=called)


def averaged(s: Subject) -> None:
    average = swa_utils.AveragedModel(s.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(s.parameters, 0.01)
    for step in range(2):
        optimizer.zero_grad()
        s.loss(step).backward()
        optimizer.step()
        average.update_parameters(s.module)
    s.note("average", list(average.module.state_dict().values()))
    with torch.no_grad():
        s.note("of the average", s.run(3, average.module))


def in_another_thread(s: Subject) -> None:
    s.loss(0).backward()
    raised: list[BaseException] = []
    modes = _get_current_dispatch_mode_stack()  # a judge's, which draws other rounding errors: a thread begins without

    def work() -> None:
        try:
            with contextlib.ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                s.loss(1).backward()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    s.loss(2).backward()
    s.note_gradients("of both threads")


def loaded(s: Subject, start: str) -> None:
    """By a process that begins when there is compiled code already; eager's batches are made in this one."""
    for args, kwargs in s.batches(start):
        torch.manual_seed(0)
        results = s.call(*args, **kwargs)
        total([t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]).backward()
    s.note_gradients("of loaded batches")


class Failed(RuntimeError):
    pass


def failed(s: Subject) -> None:
    """An exception in the forward, one in the backward, and good steps behind each."""

    def fail(*args: Any) -> None:
        raise Failed

    s.loss(0).backward()
    child = next((m for m in s.module.modules() if isinstance(m, (nn.Linear, nn.Conv2d))), s.module)
    handle = child.register_forward_pre_hook(fail)
    with s.raising("forward"):
        s.loss(1)
    handle.remove()
    s.note("grad mode", facts=torch.is_grad_enabled())
    s.loss(1).backward()
    s.note_gradients("behind a failed forward")
    handle = s.parameters[0].register_hook(fail)
    with s.raising("backward"):
        s.loss(2).backward()
    handle.remove()
    s.module.zero_grad()
    s.loss(3).backward()
    s.note_gradients("behind a failed backward")


@dataclass(frozen=True)
class Protocol:
    name: str
    run: Callable[[Subject], None]


def _of(name: str, function: Callable[..., None], argument: str) -> Protocol:
    return Protocol(name, lambda s: function(s, argument))


PROTOCOLS: tuple[Protocol, ...] = (
    *(
        Protocol(f.__name__, f)
        for f in (
            accumulated, clipped_by_norm, clipped_by_value, scaled, zeroed, retained, two_losses, crossed, frozen,
            lbfgs, evaluated, saved_and_loaded, copied, hooked, averaged, in_another_thread, failed,
        )
    ),
    *(_of(name, optimized, name) for name in OPTIMIZERS),
    *(_of(f"loaded_by_{start}", loaded, start) for start in ("fork", "spawn")),
)  # fmt: skip


# -- comparison ----------------------------------------------------------------------------------------------------------

TOLERANCE = 1e-9  # of all numbers of a note, relative, where everything is float64
FEW = 8  # ulps of float32, where a part is computed in it


class Precision(TorchDispatchMode):
    """Notes whether something is computed in less than float64; where `widened`, it is computed in float64 instead.

    Some models compute a part in float32 whatever they are given: the judge of them is eager without these roundings.
    """

    def __init__(self, widened: bool = False) -> None:
        super().__init__()
        self.widened, self.single = widened, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.widened and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        self.single |= any(
            isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype is not torch.float64
            for t in pytree.tree_leaves(result)
        )
        return result


def computes_in_single(subject: Subject) -> bool:
    with Precision() as precision, suppress(Exception):  # a program that eager cannot train
        total(subject.run(0)).backward()
    return precision.single


def state_of_the_process() -> dict[str, Any]:
    return {state.name: state.read() for state in AMBIENT}


def observed(protocol: Protocol, subject: Subject, state: dict[str, torch.Tensor]) -> list[Note]:
    """What a protocol notes; what it raises and what it leaves of the process's state are notes too."""
    reset(subject, state)
    before = state_of_the_process()
    try:
        protocol.run(subject)
    except Exception as error:
        subject.note("raised", facts=f"{type(error).__name__}: {str(error)[:300]}")
    after = state_of_the_process()
    changed = [s.name for s in AMBIENT if not s.same(before[s.name], after[s.name])]
    subject.note("ambient state that it left changed", facts=changed)
    subject.note("random state", [torch.get_rng_state()])
    return list(subject.notes)


def raised_by(notes: Sequence[Note]) -> str:
    """What a protocol raised, or nothing."""
    return next((str(note.facts) for note in notes if note.name == "raised"), "")


def differences(
    eager: Sequence[Note],
    ours: Sequence[Note],
    exact: Sequence[Note] | None = None,
    with_other_rounding: Callable[[int], Sequence[Note]] | None = None,
) -> list[str]:
    """Where the two part, in words.

    With `exact`, ours may be twice as far from that as eager, and a few ulps. `with_other_rounding(draw)` gives what
    eager notes with rounding errors drawn anew: ours may be twice as far from eager as those are, since an optimizer
    that divides a gradient by its size makes much of one that is nothing but rounding.
    """
    found: list[str] = []
    parted: list[tuple[Note, Note, float]] = []
    for a, b, judge in zip(eager, ours, exact or eager, strict=False):
        if a.name == "raised":  # eager cannot run this protocol on this program
            break
        if a.name != b.name:
            found.append(f"{b.name} ({b.facts}) where eager has {a.name} ({a.facts})")
            break
        if a.facts != b.facts:
            found.append(f"{a.name}: {b.facts} instead of {a.facts}")
        gap, allowed = relative_gap(a.numbers, b.numbers), TOLERANCE
        if exact and allowed < gap < float("inf"):
            gap = relative_gap(judge.numbers, b.numbers, layout=False)
            own = relative_gap(judge.numbers, a.numbers, layout=False)
            allowed = 2 * own + FEW * torch.finfo(torch.float32).eps
        if not gap <= allowed:
            parted.append((a, b, gap))
    else:
        if len(eager) != len(ours) and not found:
            found.append(f"{len(ours)} observations instead of {len(eager)}")
    if with_other_rounding and all(gap < float("inf") for _, _, gap in parted):
        parted = beyond_other_rounding(parted, eager, with_other_rounding)
    return [*found, *(f"{a.name}: differs by {gap:.1e}" for a, _, gap in parted)]


def beyond_other_rounding(
    parted: list[tuple[Note, Note, float]], eager: Sequence[Note], run: Callable[[int], Sequence[Note]]
) -> list[tuple[Note, Note, float]]:
    """Those of (eager's note, ours, gap) that are more than twice as far apart as runs of eager are from each other."""
    spread = [0.0] * len(eager)
    for draw in range(DRAWS):
        if not parted:
            break
        for place, (a, drawn) in enumerate(zip(eager, run(draw), strict=False)):
            apart = relative_gap(a.numbers, drawn.numbers, layout=False) if a.name == drawn.name else float("inf")
            spread[place] = max(spread[place], apart if apart < float("inf") else 0.0)
        of = {id(a): 2 * spread[place] for place, a in enumerate(eager)}
        parted = [(a, b, gap) for a, b, gap in parted if not relative_gap(a.numbers, b.numbers) <= of[id(a)]]
    return parted


def relative_gap(
    expected: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None], layout: bool = True
) -> float:
    """Of all tensors together; infinite where one is missing, or has another dtype or layout."""
    if [t is None for t in expected] != [t is None for t in found]:
        return float("inf")
    gap = scale = 0.0
    for a, b in zip(expected, found, strict=True):
        if a is None or b is None:
            continue
        if a.shape != b.shape or (layout and (a.dtype != b.dtype or a.stride() != b.stride())):
            return float("inf")
        x, y = a.double(), b.double()
        if not torch.equal(x.isnan(), y.isnan()):
            return float("inf")
        gap += float((x - y).nan_to_num(0, 0, 0).square().sum())
        scale += float(x.nan_to_num(0, 0, 0).square().sum())
    return (gap / max(scale, 1e-24)) ** 0.5
