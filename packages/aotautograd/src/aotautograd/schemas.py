"""Every record that crosses a boundary inside this package, or between it and a compiler."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from primtorch import graph_text
from primtorch.frozen import record
from primtorch.own_derivatives import FunctionBackward
from primtorch.printing import value_text
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import FloatExpr, IntExpr, ShapeEnv

ForwardKind: TypeAlias = Literal["updated_input", "value", "symbol"]
Values: TypeAlias = Sequence[Any]
"""The values of a call, one after the other: tensors where the program's metadata says so, numbers, or whatever else a
program takes and gives."""
Compiled = Callable[..., Values]
Compiler = Callable[
    [torch.fx.GraphModule, list[Any]], Compiled
]  # (graph, example inputs) -> flat inputs to flat outputs
Dump = Callable[[str, str], None]  # (file name, text)


class Begun(Protocol):
    """A graph that is being compiled. A call waits for it, and gives what its compiler does.

    Attributes:
        apart: whether other processes are at work on it, so that this one can do something else meanwhile.
    """

    @property
    def apart(self) -> bool:
        """See above."""
        ...

    def __call__(self) -> Compiled: ...


@runtime_checkable
class BeginningCompiler(Protocol):
    """A `Compiler` that can be asked to begin, and be waited for later. One that leaves a forward to other processes is
    asked for the likely backward meanwhile."""

    def begin(self, graph: torch.fx.GraphModule, inputs: list[Any], /) -> Begun:
        """Raises what the compiler does."""
        ...


Opset = Literal["prims", "core_aten"]

# node.meta key: a `History`, or a `FunctionResult`, where the value's history is not the operators' that made it
HISTORY = "history"
FOUND = "found"  # of a joint graph: what its trace came to know of the data's numbers, where it did (`ShapeEnv.found`)
UNSEEN = "unseen"  # of a joint graph: the user's lines of a write of which autograd recorded nothing
STAND_IN = "stand_in"  # node.meta key of a node that a pass has taken out: the node of the same value
REGION = "region"  # node.meta key of both halves of a region's call: its `RegionCall`
PHASE = "phase"  # node.meta key: "forward" or "backward", the half of the program that recorded the node


@record
class SymbolSource:
    """A symbol that no SymInt input carries: it is the size of dimension `dim` of input `input`."""

    name: str
    input: int
    dim: int


@record
class ViewStep:
    """One view operator to replay. Sizes in `args` are ints or SymInts; the base is passed first."""

    op: Callable[..., object]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()


@record
class InputInfo:
    """What the program does with one tensor input."""

    index: int  # place among the flat inputs of the program
    requires_grad: bool
    is_leaf: bool
    mutates_data: bool = False
    mutation_in_grad_mode: bool = False  # autograd saw the write: the write-back is differentiable
    version_bumps: int = 0  # how often eager would have incremented `_version`
    metadata_steps: tuple[ViewStep, ...] = ()  # views of the input that have the sizes and strides it is given in place
    metadata_under_no_grad: bool = False  # autograd is not told of that change
    written_last: bool = False  # behind all that autograd keeps of the program

    @property
    def mutates_metadata(self) -> bool:
        """Whether the program gives the input other sizes or strides in place."""
        return bool(self.metadata_steps)


class OutputKind(enum.Enum):
    """How one flat output of the program is made from what the compiled forward returns."""

    VALUE = "value"  # forward output `slot`, as it is
    VIEW_OF_VALUE = "view_of_value"  # `steps` replayed on forward output `slot`
    INPUT = "input"  # input `slot` itself
    VIEW_OF_INPUT = "view_of_input"  # `steps` replayed on input `slot`, after write-back
    CONSTANT = "constant"  # `value`


@record
class OutputInfo:
    """How the wrapper makes one flat output of the program: `slot` and `steps` mean what `kind` says."""

    kind: OutputKind
    slot: int = -1
    steps: tuple[ViewStep, ...] = ()
    value: object = None
    requires_grad: bool = False  # of a view: whether it was taken in grad mode and has a history
    outside_history: int = 0  # of a view with history: how many of the first steps were taken under no_grad
    history: int = (
        -1
    )  # of a view: the forward output whose history it has in place of a view's: an autograd function made it
    apart: bool = False  # of a value with such a history: whether it is a tensor of its own, and no view to autograd
    stale: bool = False  # of a view: its base was written to behind it, and autograd refuses to say its history
    same_as: int | None = None  # an earlier output that is the very same object


@record
class ForwardOutput:
    """One value that the functional forward graph returns (before the saved ones)."""

    kind: ForwardKind
    input: int | None  # for updated_input: index of the input that the wrapper writes it to
    requires_grad: bool
    tangent: int | None  # place among the tangents of the joint graph


@record
class GradientInfo:
    """How the gradient of one input is made of what the backward returns and of the tangents as they came."""

    source: Literal["result", "tangent"]
    slot: int  # of the backward's results, or of the tangents
    steps: tuple[ViewStep, ...] = ()
    cloned: bool = False  # autograd keeps a copy as `.grad`: when it does, somebody else still holds the gradient


@record
class Assumption:
    """What a trace took for granted of the data: it holds for inputs that give the same value."""

    node: str  # of the traced graph
    kind: Literal["value", "shape"]  # the number in a tensor of one element, or the sizes of a tensor
    value: Any
    stack: tuple[UserFrame, ...] = ()  # the user's lines that asked


@record
class KeptMemory:
    """The caller's memory that eager's autograd keeps for the backward, so that a write to it makes the backward raise.
    Any other the caller may overwrite before the backward."""

    inputs: frozenset[int]  # flat inputs of the program
    outputs: frozenset[int]  # places among the forward outputs


@dataclass(frozen=True, slots=True)
class ProgramMetadata:
    """The readable table of a program's mutations, aliases and gradients."""

    num_inputs: int  # flat inputs of the program
    placeholders: tuple[int | SymbolSource, ...]  # for each placeholder of the forward: flat input or derived symbol
    inputs: tuple[InputInfo, ...]  # tensor inputs only
    outputs: tuple[OutputInfo, ...]
    forward_outputs: tuple[ForwardOutput, ...]
    tangents: tuple[int, ...]  # for each tangent: the forward output it belongs to
    gradients: tuple[int, ...]  # flat inputs that the backward leads to
    # for each of them: the tangents from which autograd comes to that input, be it with a gradient or without
    led_to_by: tuple[tuple[int, ...], ...] = ()
    # for each tangent: those of other results that are computed from its result
    leading: tuple[tuple[int, ...], ...] = ()
    # for each tangent: those (itself among them) behind whose backward eager's autograd refuses its own
    refused_behind: tuple[frozenset[int], ...] = ()
    made_gradients: tuple[GradientInfo, ...] = ()  # how each of them is made of what the joint graph returns
    complex_inputs: tuple[int, ...] = ()  # flat inputs that may come lazily conjugated
    symbol_places: tuple[tuple[str, int, int | None], ...] = ()  # symbol, flat input, dimension (None: itself)
    number_slots: tuple[tuple[str, int], ...] = ()  # symbol that no input gives, forward output that is its value
    assumptions: tuple[Assumption, ...] = ()
    enables_grad: bool = False  # called without grad mode, it turns it on itself for some of what it returns
    kept: KeptMemory | None = None  # None: of no backward

    @property
    def num_placeholders(self) -> int:
        """How many inputs the forward graph has."""
        return len(self.placeholders)

    @property
    def needs_backward(self) -> bool:
        """Whether the gradient of any input is computed."""
        return bool(self.gradients)

    def __str__(self) -> str:
        rows = ["inputs"]
        for i in self.inputs:
            marks = [
                name
                for name, on in (
                    ("requires_grad", i.requires_grad),
                    ("data written", i.mutates_data),
                    ("metadata changed", i.mutates_metadata),
                    ("differentiable write", i.mutation_in_grad_mode),
                )
                if on
            ]
            rows.append(f"  {i.index:4d}  {', '.join(marks) or '-'}")
        rows.append("outputs")
        for k, o in enumerate(self.outputs):
            views = "".join(
                f" -> {getattr(s.op, '__name__', s.op)}{' (no_grad)' if n < o.outside_history else ''}"
                for n, s in enumerate(o.steps)
            )
            same = f" (is output {o.same_as})" if o.same_as is not None else ""
            grad = (" requires_grad" if o.requires_grad else "") + (" stale" if o.stale else "")
            rows.append(f"  {k:4d}  {o.kind.value} {o.slot if o.slot >= 0 else repr(o.value)}{views}{grad}{same}")
        rows.append("forward returns")
        for k, f in enumerate(self.forward_outputs):
            to = f" to input {f.input}" if f.input is not None else ""
            tangent = f", tangent {f.tangent}" if f.tangent is not None else ""
            rows.append(f"  {k:4d}  {f.kind}{to}{tangent}")
        rows.append(f"gradients for inputs {list(self.gradients)}")
        for place, tangents in zip(self.gradients, self.led_to_by, strict=True):
            if len(tangents) < len(self.tangents):
                rows.append(f"  {place:4d}  of tangents {list(tangents)} alone")
        for place, made in zip(self.gradients, self.made_gradients, strict=True):
            views = "".join(f" -> {getattr(s.op, '__name__', s.op)}" for s in made.steps)
            if made.source == "tangent" or views or self.gradients[made.slot : made.slot + 1] != (place,):
                rows.append(f"  {place:4d}  {made.source} {made.slot}{views}")
        if self.assumptions:
            rows.append("holds for inputs with")
        for a in self.assumptions:
            where = f"  # {a.stack[-1]}" if a.stack else ""
            rows.append(f"  {a.kind} of {a.node} = {a.value}{where}")
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class JointGraph:
    """Forward and backward in one functional ATen graph.

    Placeholders: those of the forward, then the tangents. Outputs: `forward_outputs`, then one gradient for each entry
    of `metadata.gradients` (None where there is none, or where it is made of another result or a tangent: see
    `metadata.made_gradients`), then what such gradients are views of.

    Attributes:
        guard: from the forward's placeholders to the tensors of `metadata.assumptions`.
        failing: tangents whose backward raises, whatever the data, and what: the program overwrote what a derivative
            reads. The gradients are those of the other tangents.
        totals: for each tangent to whose result others lead, the node of the sum of it and of what they lead to.
        kept_bytes: what eager's autograd keeps beside inputs; symbolic sizes by their hints. None: nobody has counted.
    """

    module: torch.fx.GraphModule
    metadata: ProgramMetadata
    guard: torch.fx.GraphModule | None = None
    failing: Mapping[int, RuntimeError] = field(default_factory=dict)
    totals: Mapping[int, torch.fx.Node] = field(default_factory=dict)
    kept_bytes: int | None = None

    @property
    def num_forward_outputs(self) -> int:
        """How many of the graph's results are the forward's; the gradients follow them."""
        return len(self.metadata.forward_outputs)

    def print(self) -> str:
        """The graph as Python text, with shapes and the user's lines as comments."""
        return graph_text(self.module, "joint")


class History(enum.Enum):
    """What autograd has recorded of a value, as a derivative of the derivative sees it."""

    NONE = "none"  # made under no_grad, or detached
    WRITTEN = "written"  # written under no_grad, or detached in place: that of the value before


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A call of a user's module that applies an autograd function: its results' history is that function's backward.
    Or of such a backward (`FunctionBackward`): their history is that of its operators as eager runs them.

    Attributes:
        args: what it was given, with the nodes of tensors.
        draws: whether its forward takes random numbers: it is not to be run again.
        given: what that forward made, for a call that is resumed behind it (`own_derivatives.AppliedFunction`).
    """

    target: Callable[..., object]
    args: tuple[object, ...]
    draws: bool
    given: tuple[object, ...] = ()

    @property
    def __name__(self) -> str:
        return "function_backward" if isinstance(self.target, FunctionBackward) else "autograd_function"

    def __call__(self, *args: object) -> object:
        return self.target(*args)


@record
class FunctionResult:
    """One of the tensors that a call gives; `path` leads to it through tuples and lists. It is empty for an operator
    with an effect, which the call has among others."""

    call: FunctionCall
    path: tuple[int, ...]


@record
class SavedReport:
    """What the forward keeps for the backward."""

    tensors: int
    symbols: int
    bytes: int  # of tensors that are not inputs; symbolic sizes by their hints
    input_tensors: int
    recomputed_nodes: int

    def __str__(self) -> str:
        sizes = f" and {self.symbols} sizes" if self.symbols else ""
        kept = f"kept for backward: {self.tensors} tensors{sizes}, {self.input_tensors} of them inputs"
        return f"{kept}; {self.bytes} bytes beside inputs; {self.recomputed_nodes} operations run again in backward"


@dataclass(frozen=True, slots=True)
class Partition:
    """The two halves. The forward returns `forward_outputs`, then saved tensors, then saved SymInts; the backward takes
    saved SymInts, saved tensors, tangents, and returns what the joint graph does behind the forward's values."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_saved_tensors: int
    num_saved_symbols: int
    report: SavedReport
    saved_names: tuple[str, ...] = ()  # of the joint graph's nodes, for each saved tensor
    metadata: ProgramMetadata | None = None

    @property
    def tangent_names(self) -> tuple[str, ...]:
        """Placeholders of the backward: those behind what is saved."""
        names = tuple(n.name for n in self.backward.graph.nodes if n.op == "placeholder")
        return names[self.num_saved_symbols + self.num_saved_tensors :]

    @property
    def saved_placeholders(self) -> tuple[str, ...]:
        """Placeholders of the backward for the saved tensors."""
        names = tuple(n.name for n in self.backward.graph.nodes if n.op == "placeholder")
        return names[self.num_saved_symbols : self.num_saved_symbols + self.num_saved_tensors]

    @property
    def saved_values(self) -> tuple[torch.fx.Node, ...]:
        """What the forward returns for the saved tensors: a placeholder where that is an input itself, and no copy."""
        output = next(iter(reversed(self.forward.graph.nodes)))
        returned: tuple[torch.fx.Node, ...] = output.args[0]
        first = len(returned) - self.num_saved_tensors - self.num_saved_symbols
        return tuple(returned[first : first + self.num_saved_tensors])

    def __iter__(self) -> Iterator[torch.fx.GraphModule]:
        return iter((self.forward, self.backward))

    def table(self) -> str:
        """The program's mutations, aliases and gradients, and each value that is kept for the backward."""
        rows = [str(self.metadata)] if self.metadata is not None else []
        rows.append(str(self.report))
        output = next(iter(reversed(self.forward.graph.nodes)))
        returned: tuple[torch.fx.Node, ...] = output.args[0]
        for node in returned[len(returned) - self.num_saved_tensors - self.num_saved_symbols :]:
            what = "  an input" if node.op == "placeholder" else ""
            rows.append(f"  {node.name}: {value_text(node.meta['val'])}{what}")
        return "\n".join(rows)


Partitioner = Callable[[JointGraph], Partition]


@dataclass(frozen=True, eq=False)
class TracedRegion:
    """A part of a program, traced for all calls with operands that are alike.

    Attributes:
        joint: of ATen's operators; the two graphs were cut out of it.
        forward: gives the joint's forward values, then what is kept and is neither an operand nor one of them.
        backward: takes numbers, what is kept and tangents; gives the gradients. None where there is no backward.
        kept: for each kept tensor the place of the result that it is, or of the operand p as -1 - p.
        names: of the joint's nodes, by the places of results behind the forward values.
        numbers: places of the operands that are numbers which the backward takes.
        tangents: placeholders of the backward.
        gradients: for each gradient of the joint its place among the backward's results; None for None.
        without_history: places of results behind the forward values that no derivative passes.
    """

    joint: JointGraph
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None = None
    kept: tuple[int, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()
    tangents: tuple[torch.fx.Node, ...] = ()
    gradients: tuple[int | None, ...] = ()
    without_history: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class RegionCall:
    """One call of a region: its forward's node and its backward's have this in common. `body`: as it was captured."""

    region: TracedRegion
    body: torch.fx.GraphModule


Example: TypeAlias = TensorSpec | IntExpr | FloatExpr | int | float
"""What a placeholder stands for."""


@record
class Outline:
    """What the run time reads of a traced program beside its compiled graphs. Symbolic numbers in it, those of metadata
    included, are expressions (see `outlines.spelt`).

    Attributes:
        reads: places of the forward's inputs that a derivative of the backward may read.
        forward, backward: name and value of each placeholder.
        saved: the forward's placeholder that each saved tensor is, "" where it is computed.
        symbols: how many numbers are saved.
    """

    metadata: ProgramMetadata
    reads: frozenset[int] = frozenset()
    forward: tuple[tuple[str, Example], ...] = ()
    backward: tuple[tuple[str, Example], ...] = ()
    saved_names: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    symbols: int = 0


@record
class BackwardOutline:
    """What the run time asks of a backward without some tangents, where no other backward ran before it. Symbolic
    numbers in it are expressions.

    Attributes:
        zeros, made_gradients: see `BackwardPlan`.
        needs: the saved tensors that it reads, those to keep behind it, and whether it cannot run.
    """

    zeros: tuple[int, ...]
    made_gradients: tuple[GradientInfo, ...]
    needs: tuple[tuple[int, ...], tuple[int, ...], bool]


@record
class BackwardGraph:
    """The backward of a traced program, of which one is made for whatever tangents are missing.

    Attributes:
        behind: for each of its results, the tangents that lead to it (see `tangents_behind`).
    """

    module: torch.fx.GraphModule
    behind: tuple[frozenset[int], ...]


@record
class Shelved:
    """A program that was compiled before. `backward` gives None for missing tangents that were not met then; it is
    compiled from `graph` for these."""

    outline: Outline
    forward: Compiled  # or what runs where there is no backward
    backward: Callable[[tuple[int, ...]], tuple[BackwardOutline, Compiled] | None]
    graph: Callable[[ShapeEnv | None], BackwardGraph]


class Shelf(Protocol):
    """Where one program's compiled form is kept for other processes."""

    def find(self) -> Shelved | None:
        """What was kept."""

    def keep(self, outline: Outline, graph: BackwardGraph | None, forward: Compiled) -> None:
        """Keeps the forward, as the compiler gave it, and the graph of its backward, where there is one."""

    def keep_backward(self, missing: tuple[int, ...], outline: BackwardOutline, backward: Compiled) -> None:
        """Keeps the backward without some tangents."""


@record
class CallPlan:
    """How a call of a program finds its compiled forward's inputs. C++ reads it."""

    forward: Compiled
    boxed: bool  # the forward takes one list of its inputs, which it may empty
    flat_inputs: int
    places: tuple[tuple[int, int], ...]  # (flat input, dimension or -1 for itself); empty: the flat inputs as they are
    conjugated: tuple[int, ...]  # flat inputs that may come lazily conjugated


@record
class TangentLayout:
    """The memory layout that a backward was compiled for; None where it is symbolic."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None


# Places in HistoryPlan.held that are no saved tensor
UNHELD = -2  # a derivative does not read it, or the program wrote it
HELD = -1  # the autograd node holds it


@record
class GradientSource:
    """How a run makes a gradient; C++ reads it."""

    from_tangent: bool  # else from what the compiled backward returned
    slot: int
    views: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] | None  # of that, by the kept sizes
    cloned: bool  # where it would become `.grad` itself, a copy does


@record
class BackwardPlan:
    """A compiled backward without some tangents. C++ reads it."""

    compiled: Compiled
    boxed: bool
    zeros: tuple[int, ...]  # of the missing tangents, those that it takes as zeros
    sources: tuple[GradientSource, ...]


@record
class GradientSet:
    """Gradients that the same tangents lead to, by their places. C++ reads it."""

    tangents: tuple[int, ...]  # in order
    gradients: tuple[int, ...]
    stage: int = 0  # where any has another than 0, a backward gives a `stages.StagedRun`
    follows: int = -1  # the number of the set of the same tangents whose turn is before; -1: there is none


@record
class HistoryPlan:
    """What connects a call's outputs to the compiled backward. C++ reads it."""

    backward: Callable[[Sequence[int]], BackwardPlan]  # for missing tangents
    # (missing tangents, tangents of earlier runs) -> the saved tensors that it reads, those to keep behind it, and
    # whether an earlier run has freed what it reads
    needs: Callable[[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int], bool]]
    # (forward's inputs, saved tensors, tangents with zeros for missing ones, missing tangents) -> results, sources
    gradients: Callable[[Values, Values, Values, Sequence[int]], tuple[Values, Sequence[GradientSource]]]
    # The same with two more arguments, where hooks of some results see what comes to them from others: the numbers of
    # these, whose tangents are the sums; and of one of them to give what comes to it from others, a tensor, or None.
    cut: Callable[[Values, Values, Values, Sequence[int], Sequence[int], int | None], object]
    apart: Callable[[object], bool] | None  # whether a tangent is for `gradients`, under whatever grad mode
    # (flat inputs, forward's values), where a hook raised as tensors were kept: writes what eager has written by then
    interrupted: Callable[[Values, Values], None] | None
    leading: tuple[tuple[int, ...], ...]  # for each tangent: those of results that are computed from its result
    layouts: Callable[[Sequence[int]], Sequence[tuple[Sequence[int], Sequence[int]]]]  # of the tangents, by kept sizes
    differentiable: tuple[int, ...]  # flat input of each gradient
    sets: tuple[GradientSet, ...] | None  # None: one tangent leads to all gradients
    outputs: tuple[str, ...]  # "symbol", "constant" or "differentiable" for each value that is not kept
    tangents: tuple[int, ...]  # for each tangent, its place among the differentiable outputs
    expected: tuple[TangentLayout, ...]  # for each tangent
    # for each input of the forward: UNHELD, HELD, or the number of the saved tensor that it is, or whose value it has
    held: tuple[int, ...]
    saved: int  # tensors that are kept; sizes come behind them
