"""Every part of the language in every setting: a table of parts (`reach_programs`) by settings by back ends.

A cell runs a part's program as its setting says, eagerly and compiled, and compares what the two leave behind: values,
gradients, exceptions, who shares memory, the arguments, the process's state; and it asks the ledger for what else has
happened. `feature_matrix_run.py` runs the whole, the suite a few cells that are drawn anew each time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from drawn_rounding import DrawnRounding
from protocols import Note, Precision, differences, state_of_the_process
from reach_programs import Part
from shared_programs import relation
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torchcompile
from primtorch.ambient import AMBIENT
from primtorch.wrappers import is_nested, taken_apart, wraps_others

BACKENDS: dict[str, dict[str, Any]] = {"eager": {}, "aot_eager": {}, "inductor": {"eager_random": True}}
Program = Callable[..., Any]
Arguments = tuple[Any, ...]


@dataclass
class State:
    """What programs read beside their arguments; it changes between calls."""

    scale: float = 2.0
    seen: list[int] = field(default_factory=list)


def as_it_is(program: Program, state: State) -> Program:
    return program


def behind_a_break(program: Program, state: State) -> Program:
    def run(*args: Any) -> Any:
        before = args[0] * 2
        print(end="")
        return program(*args), before

    return run


def before_a_break(program: Program, state: State) -> Program:
    def run(*args: Any) -> Any:
        results = program(*args)
        print(end="")
        return results, args[0] * 2

    return run


def beside_state(program: Program, state: State) -> Program:
    def run(*args: Any) -> Any:
        results = program(*args)
        return results, args[0] * state.scale + len(state.seen)

    return run


def as_often(part: Part) -> list[Arguments]:
    return part.calls()[:2]


def thrice_the_same(part: Part) -> list[Arguments]:
    return [*part.calls()[:2], part.calls()[0]]


def longer(value: Any, times: int) -> Any:
    """A tensor or an array with its first dimension repeated; what else there is stays as it is."""
    if isinstance(value, np.ndarray):
        return np.concatenate([value] * times)
    return torch.cat([value] * times) if type(value) is torch.Tensor else value


def of_other_sizes(part: Part) -> list[Arguments]:
    first = part.calls()[0]
    return [tuple(longer(value, times) for value in first) for times in (1, 2, 3)]


@dataclass(frozen=True)
class Setting:
    """How a part is run.

    Attributes:
        calls: the arguments of its calls.
        gradient: whether gradients are asked for where the part has any.
        around: what stands around the program within the compiled function.
        context: what stands around each call of it.
        threads: which calls are made in a thread of their own.
        changes: whether the state is changed between the calls.
        breaks: kinds of the ledger that the setting itself causes, each of which has to be told.
        may: kinds that it causes in some parts.
    """

    name: str
    calls: Callable[[Part], list[Arguments]] = as_often
    gradient: bool = True
    around: Callable[[Program, State], Program] = as_it_is
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    threads: frozenset[int] = frozenset()
    changes: bool = False
    breaks: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("forward", gradient=False),
        Setting("gradient"),
        Setting("no_grad", context=torch.no_grad),
        Setting("inference_mode", gradient=False, context=torch.inference_mode),
        Setting("other sizes", of_other_sizes, may=frozenset({"loop_of_each_length"})),  # a round is a graph then
        Setting("behind a break", around=behind_a_break, breaks=frozenset({"print"})),
        Setting("before a break", around=before_a_break, breaks=frozenset({"print"})),
        Setting("in another thread", thrice_the_same, threads=frozenset({1})),
        Setting("changed state", thrice_the_same, around=beside_state, changes=True),
    )
}


# What the ledger tells of a program that raises: its call ran as Python runs it.
RAISING = frozenset({"exception", "program_raised", "backward"})
# What breaks the graph of a part in one setting alone.
KNOWN: dict[tuple[str, str], frozenset[str]] = {
    # Without a gradient of its arguments, its result still has the history of a leaf that nobody else sees.
    ("autograd.grad within, differentiated again", "forward"): frozenset({"leaf"}),
    # Capture's stand-ins are inference tensors there, which torch's jacrev cannot split.
    ("jacrev", "inference_mode"): frozenset({"function_transform"}),
    ("hessian", "inference_mode"): frozenset({"function_transform"}),
    ("x.data = ", "inference_mode"): frozenset({"tensor_metadata_write"}),
    ("x.data = , and writes to it", "inference_mode"): frozenset({"tensor_metadata_write"}),
    ("a parameter's data, set and written to", "inference_mode"): frozenset({"tensor_metadata_write"}),
}


# -- running a cell ----------------------------------------------------------------------------------------------------


def observed(part: Part, setting: Setting, compiler: Callable[[Program], Program]) -> list[Note]:
    """What the calls leave behind. An exception is an observation, and the next call is made all the same."""
    notes: list[Note] = []
    state = State()
    torch.manual_seed(1)
    call = compiler(setting.around(part.make(), state))
    torch.manual_seed(2)
    before = state_of_the_process()
    for number, args in enumerate(setting.calls(part)):
        by = [a for a in args if isinstance(a, torch.Tensor)] if setting.gradient and part.gradient else []
        for leaf in by:
            leaf.requires_grad_()
        run = lambda args=args, by=by, number=number: notes.extend(  # noqa: B008
            noted(f"call {number}", call, args, by, setting.context)
        )
        in_a_thread(run) if number in setting.threads else run()
        if setting.changes:
            state.scale += 1.0
            state.seen.append(number)
    after = state_of_the_process()
    changed = [s.name for s in AMBIENT if not s.same(before[s.name], after[s.name])]
    return [*notes, Note("ambient state left changed", facts=changed), Note("random state", (torch.get_rng_state(),))]


def noted(
    name: str, call: Program, args: Arguments, by: list[Any], context: Callable[[], AbstractContextManager[Any]]
) -> Iterator[Note]:
    try:
        with context():
            leaves = list(leaves_of(call(*args)))
        yield described(f"{name}: results", leaves, args)
        floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        if by and floats:
            total: Any = sum(t.sum() for t in floats)
            yield described(f"{name}: gradients", list(torch.autograd.grad(total, by, allow_unused=True)), args)
    except Exception as error:
        yield Note(f"{name}: raised", facts=f"{type(error).__name__}: {error}")
    yield described(f"{name}: arguments and their gradients", [*args, *(leaf.grad for leaf in by)], ())


def leaves_of(results: Any) -> Iterator[Any]:
    """Also of iterators, which are run to their end."""
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, Iterator):
            yield from leaves_of(list(leaf))
        else:
            yield leaf


def described(name: str, leaves: list[Any], args: Arguments) -> Note:
    """Numbers of tensors and arrays; of all leaves the types, of tensors how autograd has them and who shares memory."""
    plain = [parts_of(leaf) for leaf in leaves]
    tensors = [part for parts in plain for part in parts]
    of_args = [part for arg in args for part in parts_of(arg)]
    facts = [
        (type(leaf).__name__, leaf.requires_grad, leaf.is_inference(), leaf.is_leaf)
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        if parts
        else repr(leaf)
        for leaf, parts in zip(leaves, plain, strict=True)
    ]
    kept = tuple(t.detach().clone() for t in tensors)
    return Note(name, kept, (facts, relation([*tensors, *of_args])))


def parts_of(leaf: Any) -> list[torch.Tensor]:
    """The tensors with memory that a leaf is made of."""
    if isinstance(leaf, np.ndarray):
        return [torch.from_numpy(leaf.copy())]
    if not isinstance(leaf, torch.Tensor):
        return []
    if wraps_others(leaf) or is_nested(type(leaf)):
        names, _ = taken_apart(leaf)
        return [part for name in names for part in parts_of(getattr(leaf, name))]
    return [leaf.detach().as_subclass(torch.Tensor)]


def in_a_thread(run: Callable[[], None]) -> None:
    """With the dispatch modes of this thread: a judge's, which draws other rounding errors."""
    modes = _get_current_dispatch_mode_stack()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with contextlib.ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    if thread.is_alive():
        raise TimeoutError("the call in another thread has not ended")
    if raised:
        raise raised[0]


def check(part: Part, setting: Setting, backend: str) -> list[str]:
    """What is not as eager has it, and what the ledger tells beyond what the part and the setting have it tell."""
    eager: Callable[[Program], Program] = lambda program: program
    judge = part.judge
    expected = observed(part, setting, eager) if judge is None else observed(judged(part, judge), setting, eager)
    torchcompile.reset()
    compiled = lambda program: torchcompile.compile(program, backend=backend, options=BACKENDS[backend])
    found = observed(part, setting, compiled)
    if setting.name == "inference_mode" and part.group == "torch.func":
        expected, found = without_inference(expected), without_inference(found)
    if judge is not None:  # whose results and gradients may lie in memory in another way
        expected, found = contiguous(expected), contiguous(found)
    report = torchcompile.report()
    wrong = differences(expected, found)
    if wrong and computes_in_less(part, setting):
        wrong = differences(expected, found, None, lambda draw: drawn_anew(part, setting, draw))
    raised = any(note.name.endswith("raised") for note in expected)
    broken = setting.breaks | set(part.breaks) | KNOWN.get((part.name, setting.name), frozenset())
    computes = any(note.numbers for note in expected if note.name.endswith("results"))
    if report.captured == 0 and computes and not raised and not broken:
        wrong.append("no graph was captured")
    broken = broken | setting.may
    told = {event.kind.id: str(event) for event in report.surprises}
    wrong += [
        f"the ledger tells {text}"
        for kind, text in told.items()
        if kind not in (broken | RAISING if raised else broken)
    ]
    if not raised and not part.breaks:
        wrong += [f"the ledger does not tell of {kind}" for kind in setting.breaks - told.keys()]
    return wrong


def without_inference(notes: list[Note]) -> list[Note]:
    """Without which tensors are inference tensors: torch's transforms give others, compiled code gives these alone."""
    kept = []
    for note in notes:
        if note.name.endswith("results"):
            facts, related = note.facts
            facts = [fact if isinstance(fact, str) else (*fact[:2], *fact[3:]) for fact in facts]
            note = replace(note, facts=(facts, related))
        kept.append(note)
    return kept


def contiguous(notes: list[Note]) -> list[Note]:
    return [replace(note, numbers=tuple(t if t is None else t.contiguous() for t in note.numbers)) for note in notes]


def judged(part: Part, judge: Program) -> Part:
    return Part(part.group, part.name, lambda: judge, part.calls, part.gradient)


def computes_in_less(part: Part, setting: Setting) -> bool:
    with Precision() as precision:
        observed(part, setting, lambda program: program)
    return precision.single


def drawn_anew(part: Part, setting: Setting, draw: int) -> list[Note]:
    with DrawnRounding(draw):
        return observed(part, setting, lambda program: program)
