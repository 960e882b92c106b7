"""Random programs of views, writes and aliases: everything a caller can observe is eager's.

More of them: `pytest packages/aotautograd/tests/test_aotautograd_fuzz.py --programs 20000`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aotautograd import AotAutogradError, aot_function

Env = list[torch.Tensor]
ROUNDS = 3  # of calls and backwards whose gradients are added up
OVERLAP = "some elements of the input tensor and the written-to tensor"  # what eager says where it sees one


@torch.library.custom_op("fuzz::tripled", mutates_args=())
def tripled(t: torch.Tensor) -> torch.Tensor:
    return t * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, grad: grad * 3)


@torch.library.custom_op("fuzz::bumped_", mutates_args=("t",))
def bumped_(t: torch.Tensor) -> None:
    t.add_(1)


@torch.library.custom_op("fuzz::moved_", mutates_args=("t", "s"))
def moved_(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    t.mul_(0.5)
    s.add_(t.sum())
    return t + 1


moved_.register_fake(lambda t, s: torch.empty_like(t))

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": lambda t: t[0] if t.dim() else t.view(()),
    "tail": lambda t: t[1:] if t.dim() else t.view(()),
    "every_second": lambda t: t[::2] if t.dim() else t.view(()),
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t.view(()),
    "flat": lambda t: t.view(-1),
    "unsqueezed": lambda t: t.unsqueeze(0),
    "same": lambda t: t.view_as(t),
    "detached": lambda t: t.detach(),
    "diagonal": lambda t: t.diagonal() if t.dim() >= 2 else t.view_as(t),
    "narrow": lambda t: t.narrow(-1, 0, 1) if t.dim() and t.shape[-1] else t.view_as(t),
    "split": lambda t: t.split(2)[0] if t.dim() else t.view_as(t),
    "unbound": lambda t: t.unbind(0)[-1] if t.dim() and t.shape[0] else t.view_as(t),
}
VALUES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda a, b: a * (b if a.shape == b.shape else b.sum()),
    "sine": lambda a, b: a.sin(),
    "sum": lambda a, b: a + (b if a.shape == b.shape else 1),
    "clone": lambda a, b: a.clone(),
    "contiguous": lambda a, b: a.contiguous(),
    "reshaped": lambda a, b: a.reshape(-1),
    "total": lambda a, b: a.sum(),
    "tripled": lambda a, b: tripled(a),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a.add_(1),
    "mul": lambda a, b: a.mul_(b if a.shape == b.shape else 0.5),
    "sin": lambda a, b: a.sin_(),
    "copy": lambda a, b: a.copy_(b if a.shape == b.shape else b.sum()),
    "zero": lambda a, b: a.zero_(),
    "fill_first": lambda a, b: a.__setitem__(0, b.sum()) if a.dim() and a.shape[0] else a.fill_(2.0),
    "augmented": lambda a, b: a.__iadd__(b.sum()),
    "bumped": lambda a, b: bumped_(a),
    "moved": lambda a, b: moved_(a, b) if a.untyped_storage()._cdata != b.untyped_storage()._cdata else a.neg_(),
}
# Writes of a tensor's sizes and strides.
METADATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda a: a.t_() if a.dim() <= 2 else a.transpose_(0, -1),
    "swapped": lambda a: a.swapaxes_(0, -1) if a.dim() else a,
    "unsqueezed": lambda a: a.unsqueeze_(0) if a.dim() < 4 else a,
    "squeezed": lambda a: a.squeeze_(),
}


class UnseenOverlap(RuntimeError):
    """Eager's check looks at dense tensors only; what a write gives that it lets pass depends on the order in memory."""


def reads_what_it_writes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of `a` is another element of `b`. Both have the same shape."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    places = torch.arange(a.untyped_storage().nbytes() // a.element_size())
    written, read = (places.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() for t in (a, b))
    return bool(((written[:, None] == read) & ~torch.eye(len(read), dtype=torch.bool)).any())


@dataclass(frozen=True)
class Instruction:
    kind: str  # view, value, write, metadata, or one of the first and the third under no_grad
    name: str
    a: int
    b: int

    def run(self, env: Env) -> None:
        a, b = env[self.a % len(env)], env[self.b % len(env)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.kind.startswith("no_grad ")):
            kind = self.kind.removeprefix("no_grad ")
            if kind == "view":
                env.append(VIEWS[self.name](a))
            elif kind == "value":
                env.append(VALUES[self.name](a, b))
            elif kind == "metadata":
                METADATA[self.name](a)
            else:
                WRITES[self.name](a, b)
                if self.name in ("mul", "copy") and a.shape == b.shape and not torch._is_functional_tensor(a):
                    if reads_what_it_writes(a, b):
                        raise UnseenOverlap(OVERLAP)


# How often an operator of a user's own counts the writes of its arguments is its own affair.
OPAQUE_WRITES = frozenset({"bumped", "moved"})


@dataclass(frozen=True)
class RandomProgram:
    inputs: tuple[tuple[str, str, int], ...]  # (kind, view, of which input) of each input
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __call__(self, *inputs: torch.Tensor, ask: bool = False) -> list[torch.Tensor]:
        """Runs the program; with `ask` every tensor is asked for its history after every instruction."""
        env = list(inputs)
        for instruction in self.instructions:
            instruction.run(env)
            for t in env if ask else ():
                with contextlib.suppress(RuntimeError):  # a view of a shape that may not be written to
                    _ = t.grad_fn
        return [env[i % len(env)] for i in self.outputs]

    def make_inputs(self, again: Sequence[torch.Tensor] = ()) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Leaves (those of an earlier call `again`), and inputs made of them."""
        leaves: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        earlier = iter(again)
        for kind, view, of in self.inputs:
            if kind == "alias" and inputs:
                inputs.append(VIEWS[view](inputs[of % len(inputs)]))
                continue
            leaf = next(earlier, None)
            if leaf is None:
                leaf = torch.randn(4, 4, dtype=torch.float64, requires_grad=kind not in ("plain", "part"))
            leaves.append(leaf)
            value = leaf * 1 if kind.startswith("inner") else leaf
            inputs.append(VIEWS[view](value) if kind.endswith("part") else value)
        return leaves, inputs


index = st.integers(0, 11)
instructions = st.one_of(
    st.builds(Instruction, st.just("view"), st.sampled_from(sorted(VIEWS)), index, index),
    st.builds(Instruction, st.just("no_grad view"), st.sampled_from(sorted(VIEWS)), index, index),
    st.builds(Instruction, st.just("value"), st.sampled_from(sorted(VALUES)), index, index),
    st.builds(Instruction, st.just("write"), st.sampled_from(sorted(WRITES)), index, index),
    st.builds(Instruction, st.just("no_grad write"), st.sampled_from(sorted(WRITES)), index, index),
    st.builds(Instruction, st.just("metadata"), st.sampled_from(sorted(METADATA)), index, index),
)
inputs = st.tuples(
    st.sampled_from(["plain", "part", "leaf", "inner", "inner part", "alias"]), st.sampled_from(sorted(VIEWS)), index
)
programs = st.builds(
    RandomProgram,
    st.lists(inputs, min_size=1, max_size=3).map(tuple),
    st.lists(instructions, min_size=1, max_size=7).map(tuple),
    st.lists(index, min_size=1, max_size=3).map(tuple),
)


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def history(t: torch.Tensor) -> Any:
    """`grad_fn`, or "refused" where autograd refuses to say it: of a view whose base was written to behind its back."""
    try:
        return t.grad_fn
    except RuntimeError:
        return "refused"


def has_history(t: torch.Tensor) -> Any:
    """`requires_grad`, but for views made under no_grad: those repeat what their base says and lead nowhere."""
    found = history(t)
    return found if found == "refused" else found is not None or (t.requires_grad and not t._is_view())


def is_end(t: torch.Tensor) -> bool:
    """Whether a backward may start here."""
    return t.requires_grad and history(t) not in (None, "refused")


def observe(function: Callable[..., Any], program: RandomProgram, grad: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    leaves, inputs = program.make_inputs()
    before = [t._version for t in inputs]
    opaque_writes = any(i.name in OPAQUE_WRITES for i in program.instructions)
    with torch.set_grad_enabled(grad):
        outputs = list(function(*inputs))
    seen = [*outputs, *inputs]
    storages = [t.untyped_storage().data_ptr() for t in seen]
    facts = {
        "identity": [a is b for a in seen for b in seen],
        "aliasing": [a == b for a in storages for b in storages],
        "metadata": [(t.shape, strides(t), t.storage_offset(), has_history(t)) for t in seen],
        "values": [t.detach().clone() for t in seen],
        "versions": [
            t._version - v if not opaque_writes else t._version > v for t, v in zip(inputs, before, strict=True)
        ],
    }
    ends = [t for t in seen if is_end(t)]
    needing = [t for t in leaves if t.requires_grad and history(t) is None]
    # By name: `backward` would also run what leads to none of them, and raise where that needs what was written over.
    found = (
        torch.autograd.grad(sum((t * t).sum() for t in ends), needing, allow_unused=True) if ends and needing else ()
    )
    facts["gradients"] = list(found)
    if grad:
        facts["accumulated"], facts["gradients' aliasing"] = accumulated(function, program, leaves)
    return facts


def accumulated(
    function: Callable[..., Any], program: RandomProgram, leaves: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], list[bool]]:
    """The gradients that several calls and backwards add up in the leaves, scaled in place, and which share memory."""
    for _ in range(ROUNDS):
        if any(history(leaf) is not None for leaf in leaves):
            break  # what was written to it has a history, whose backward runs once
        same, inputs = program.make_inputs(leaves)
        outputs = list(function(*inputs))
        ends = [t for t in (*outputs, *inputs) if is_end(t)]
        needing = [t for t in same if t.requires_grad and history(t) is None]
        if ends and needing:
            torch.autograd.backward([sum((t * t).sum() for t in ends)], inputs=needing)
    gradients = [leaf.grad if leaf.is_leaf else None for leaf in leaves]
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(0.5)  # as clipping does: one that two leaves share would be halved twice
    places = [None if g is None else g.untyped_storage().data_ptr() for g in gradients]
    return gradients, [a is not None and a == b for a in places for b in places]


def strides(t: torch.Tensor) -> list[int | None]:
    """Without those of dims of one element, along which nobody steps."""
    return [step if size != 1 else None for size, step in zip(t.shape, t.stride(), strict=True)]


def compare(eager: dict[str, Any], ours: dict[str, Any]) -> None:
    for what in ("identity", "aliasing", "metadata", "versions", "gradients' aliasing"):
        assert ours.get(what) == eager.get(what), f"{what}: {ours.get(what)} instead of {eager.get(what)}"
    for what in ("values", "gradients", "accumulated"):
        for i, (a, b) in enumerate(zip(eager.get(what, ()), ours.get(what, ()), strict=True)):
            assert (a is None) == (b is None), f"{what} {i}: {b} instead of {a}"
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what} {i}: {m}")


SEVERAL_VIEWS = "This view is the output of a function that returns multiple views"
NO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"


def in_eager(function: Callable[..., Any], program: RandomProgram, grad: bool) -> Any:
    """What a program does, or the error that it raises."""
    try:
        return observe(function, program, grad)
    except (RuntimeError, IndexError) as error:
        return error


def judge(program: RandomProgram, grad: bool, seen: Counter[str], refusals: Counter[str] | None = None) -> None:
    """Counts the outcome, and the reason of a refusal. Raises AssertionError if the two differ."""
    eager, asked = in_eager(program, program, grad), False
    if isinstance(eager, Exception) and NO_LEAF in str(eager):
        # Eager takes a view that was written through another one for a leaf, until somebody asks for its history.
        asking = in_eager(functools.partial(program, ask=True), program, grad)
        asked = not isinstance(asking, Exception)
        eager = asking if asked else eager
    compiled = aot_function(program, fw_compiler=identity)
    try:
        ours = observe(compiled, program, grad)
    except AotAutogradError as error:
        seen["refused"] += 1
        if refusals is not None:
            refusals[f"{type(error).__name__}: {error}".split("\n")[0]] += 1
        return
    except (RuntimeError, IndexError):
        assert isinstance(eager, Exception), "raises where eager does not"
        seen["both raise"] += 1
        return
    if isinstance(eager, Exception) and SEVERAL_VIEWS in str(eager):
        # What is known of an input is not of which operator it is a view.
        refused = [history == "refused" for *_, history in ours["metadata"]]
        assert any(refused), f"eager raises {eager}"
        seen["runs where eager forbids to write one of several views"] += 1
        return
    if isinstance(eager, Exception):
        # A functional program has no memory in which a source and a destination could overlap.
        assert OVERLAP in str(eager), f"eager raises {eager}"
        seen["runs where eager's memory overlaps"] += 1
        return
    for place, (a, b) in enumerate(zip(eager["metadata"], ours["metadata"], strict=True)):
        if a[-1] == "refused" and b[-1] is False:
            # A view made under no_grad, of an input whose memory another input shares that was given another shape.
            eager["metadata"][place] = b if a[:-1] == b[:-1] and not grad else a
    compare(eager, ours)
    seen["equal to eager asked for histories" if asked else "equal"] += 1


def test_a_view_written_through_another_one_is_no_leaf() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        part = y[::2]
        part[0] = x.sum()
        return part.mul_(0.5) if torch._is_functional_tensor(part) else (part.grad_fn, part.mul_(0.5))[1]

    inputs = lambda: (torch.arange(3.0, requires_grad=True), torch.ones(4, 4))
    (x, y), (x2, y2) = inputs(), inputs()
    out, expected = aot_function(program, fw_compiler=identity)(x, y), program(x2, y2)
    assert torch.equal(out, expected) and torch.equal(y, y2)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad, x2.grad)


def test_a_view_of_another_shape_is_not_lost_where_an_operator_of_its_own_writes() -> None:
    """Autograd would take the view again in its first shape, and the backward raise."""
    program = RandomProgram(
        inputs=(("inner part", "unsqueezed", 0),),
        instructions=(
            Instruction("view", "diagonal", 0, 0),
            Instruction("metadata", "swapped", 1, 0),
            Instruction("no_grad write", "bumped", 0, 0),
            Instruction("view", "every_second", 1, 0),
            Instruction("value", "total", 2, 0),
        ),
        outputs=(3,),
    )
    seen: Counter[str] = Counter()
    judge(program, True, seen)
    assert seen.total() == 1


@pytest.mark.parametrize("change", METADATA)
def test_a_view_of_another_shape_follows_later_writes_to_its_base(change: str) -> None:
    """The program changes the shape, the caller writes: the view takes its history again from its base."""

    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = torch.arange(12.0, dtype=torch.float64).view(3, 4).requires_grad_()
        base = leaf * 1
        view = base.narrow(0, 0, 2)
        function(view)
        base.mul_(3)
        return [view.detach(), *torch.autograd.grad(view.square().sum(), leaf)]

    expected = gradients(METADATA[change])
    for found, wanted in zip(gradients(aot_function(METADATA[change], fw_compiler=identity)), expected, strict=True):
        assert found.shape == wanted.shape and torch.equal(found, wanted)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("write", ["write add", "metadata swapped", "no_grad write mul"])
@pytest.mark.parametrize("view", ["view flat", "no_grad view flat", "view unbound", "no_grad view split"])
@pytest.mark.parametrize("first", ["inner", "leaf", "plain"])
def test_views_of_a_base_that_is_written_to(first: str, view: str, write: str, grad: bool) -> None:
    """Eager runs many of them, and refuses to say their history: whoever uses those in grad mode is told."""
    instructions = tuple(Instruction(*text.rsplit(" ", 1), 0, 0) for text in (view, write))
    program = RandomProgram(inputs=((first, "same", 0),), instructions=instructions, outputs=(1,))
    seen: Counter[str] = Counter()
    judge(program, grad, seen)
    assert seen.total() == 1 and not seen["refused"]


def test_random_programs(request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--programs", default=None) or 2000
    seen: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count <= 2000,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(programs, st.booleans())
    def run(program: RandomProgram, grad: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judge(program, grad, seen)

    run()
    print(f"\nrandom programs: {dict(seen)}")
    assert seen["equal"] > 0.5 * count
    assert seen["refused"] < 0.1 * count
