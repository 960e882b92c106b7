"""A graph that stands for a function: where its inputs come from in a call, what has to hold, what the results are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from primtorch.calls import Leaf, Measure, Number, Result, State
from primtorch.frozen import record
from primtorch.schemas import UserFrame
from primtorch.symbolic.expr import Program
from torchdynamo.arrays.values import TensorAt, array_of, same_layout
from torchdynamo.exported.structure import Structure, flatten
from torchdynamo.guards.failure import tensor_mismatch
from torchdynamo.guards.guard_table import print_guards
from torchdynamo.guards.memory_guards import overlapping
from torchdynamo.guards.shape_program import run_program, same_constant
from torchdynamo.schemas import Guard, TensorGuard
from torchdynamo.sources import Source


@record
class Constant:
    """The same at each call."""

    value: object


@record
class ArrayOf:
    """A NumPy array, or scalar, that has a tensor's memory.

    Attributes:
        tensor: where that is from.
        flipped: dims that the array has in the opposite order.
        strides: in bytes, where they are not the tensor's: of dims of which no second element is read.
    """

    tensor: Leaf | State | Result
    flipped: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    writeable: bool = True
    scalar: bool = False

    def of(self, tensor: torch.Tensor) -> object:
        """The array that has this tensor's memory.

        Raises:
            ValueError: the strides lead elsewhere than the tensor's.
        """
        if self.scalar:
            return tensor.numpy()[()]
        array: Any = array_of(tensor, self.flipped, None, self.writeable)
        if self.strides is None:
            return array
        if not same_layout(array.shape, self.strides, array.strides):
            raise ValueError(f"strides {self.strides} of an array of shape {array.shape} and strides {array.strides}")
        return array_of(tensor, self.flipped, self.strides, self.writeable)


Reference = Leaf | State | Result | Constant | Number | ArrayOf


@record
class Relation:
    """What has to hold between numbers of a call."""

    program: Program
    symbols: Mapping[str, Measure]
    text: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state of the process under which the function was captured."""

    grad_enabled: bool
    inference_mode: bool
    default_dtype: torch.dtype
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def now() -> Surroundings:
        """That of this thread."""
        on = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
        return Surroundings(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            tuple((device, torch.get_autocast_dtype(device)) for device in on),
        )


_AUTOCAST_DEVICES = ("cpu", "cuda")


@record
class Checks:
    """What has to hold of a call.

    Attributes:
        names: of the leaves, as the program says them.
        tensors: metadata, by the leaf.
        constants: leaves that have to be what they were.
        relations: between sizes.
        same, different: leaves that are one object, and that are not.
        arrays: leaves that are NumPy arrays, with the dims in which they are read backwards: the graph has tensors for
            them, of the same memory.
        written, others: graph inputs whose memory the graph writes to, and those that must not overlap it.
    """

    names: tuple[str, ...] = ()
    tensors: Mapping[int, TensorGuard] = field(default_factory=dict)
    constants: Mapping[int, object] = field(default_factory=dict)
    relations: tuple[Relation, ...] = ()
    same: tuple[tuple[int, int], ...] = ()
    different: tuple[tuple[int, int], ...] = ()
    written: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    surroundings: Surroundings = field(default_factory=Surroundings.now)
    arrays: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def as_tensors(self, leaves: Sequence[object]) -> list[object]:
        """The leaves with a tensor for each array; None for what is no such array."""
        found = list(leaves)
        for index, flipped in self.arrays.items():
            try:
                found[index] = TensorAt(frozenset(flipped))(leaves[index])
            except (TypeError, ValueError):  # torch cannot have its memory
                found[index] = None
        return found

    def failure(
        self, leaves: Sequence[object], given: Sequence[object], state: Mapping[str, torch.Tensor]
    ) -> str | None:
        """The first that does not hold, or None. `given`: the leaves as the graph is given them."""
        now = Surroundings.now()
        if now != self.surroundings:
            return f"ambient state changed: it is {now}, was {self.surroundings}"
        for index, guard in self.tensors.items():
            leaf = given[index]
            if not isinstance(leaf, torch.Tensor):
                found = type(leaves[index]).__name__
                expected = "an array of writable memory, laid out as it was" if index in self.arrays else "a tensor"
                return f"{self.names[index]} is a {found}, expected {expected}"
            mismatch = tensor_mismatch(leaf, guard)
            if mismatch is not None:
                return f"tensor {self.names[index]} has {mismatch}"
        for index, value in self.constants.items():
            if leaves[index] is not value and not same_constant(leaves[index], value):
                return f"{self.names[index]} is {leaves[index]!r}, was {value!r}"
        for relation in self.relations:
            numbers = {name: measure.read(_at(measure.of, given, state)) for name, measure in relation.symbols.items()}
            if not run_program(relation.program, numbers):
                return f"{relation.text} does not hold for {numbers}"
        for pairs, same in ((self.same, True), (self.different, False)):
            for a, b in pairs:
                if (leaves[a] is leaves[b]) is not same:
                    told = "are not" if same else "are"
                    return f"{self.names[a]} and {self.names[b]} {told} the same object"
        return None


def _at(place: Leaf | State, leaves: Sequence[object], state: Mapping[str, torch.Tensor]) -> object:
    return leaves[place.index] if isinstance(place, Leaf) else state[place.name]


@record
class Signature:
    """What a call looks like.

    Attributes:
        parameters: that may be passed by position or by name, in order.
        takes, gives: the structure of (args, kwargs), and of the result.
        results: the leaves of the result.
    """

    parameters: tuple[str, ...]
    takes: Structure
    gives: Structure
    results: tuple[Reference, ...]

    def leaves(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
        """The leaves of a call.

        Raises:
            ValueError: it is put together otherwise.
        """
        leaves, structure = flatten(in_order(self.parameters, args, kwargs))
        if structure != self.takes:
            raise ValueError(
                f"the exported graph does not fit this call: it takes {self.takes.text()}, not {structure.text()}"
            )
        return leaves


def in_order(
    parameters: Sequence[str], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """A call with what has a place passed by it, and names sorted."""
    named = dict(sorted(kwargs.items()))
    for name in parameters[len(args) :]:
        if name not in named:
            break
        args = (*args, named.pop(name))
    return args, named


@dataclass(frozen=True, slots=True)
class Exported:
    """One whole graph of a function, with what it relies on; unpacks as (graph, guards).

    Attributes:
        graph: its placeholders are numbers first, then tensors; one of torch's functions, or of ATen's operators.
        guards: all that capture took for granted of the call, of modules, globals and the process.
        feeds: what each placeholder is given.
        state: tensors that the function reads from elsewhere, by name: those of the program itself, not copies.
        checks: what of the guards speaks of a call. What else was read (flags of modules, globals) is what it was.
        symbols: the numbers that a call tells.
        assertions: the user's stack at each condition that the graph takes for met; `met` are its results that say so.
        written: graph inputs that get new values, which follow the graph's other results (of ATen's operators).
        written_apart: those of them whose histories stay what they are.
        inputs: the source of each placeholder, for a graph of this process; one from a file has none, and no guards.
        text: the guards as text.
    """

    graph: fx.GraphModule
    guards: tuple[Guard, ...]
    signature: Signature
    feeds: tuple[Reference, ...]
    state: Mapping[str, torch.Tensor]
    checks: Checks
    symbols: Mapping[str, Measure]
    met: tuple[Result, ...] = ()
    assertions: tuple[tuple[UserFrame, ...], ...] = ()
    written: tuple[int, ...] = ()
    written_apart: tuple[int, ...] = ()
    inputs: tuple[Source, ...] = ()
    text: str = ""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.graph, self.guards))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the graph as the function.

        Raises:
            ValueError: a guard does not hold, or the arguments are put together otherwise.
            AssertionError: a condition on data that the program raises without.
        """
        with torch._C.DisableTorchFunctionSubclass():
            leaves = self.signature.leaves(args, kwargs)
            read = self.checks.as_tensors(leaves)
            why = self.checks.failure(leaves, read, self.state)
            if why is not None:
                raise ValueError(f"the exported graph does not fit this call: {why}")
            numbers = {name: m.read(_at(m.of, read, self.state)) for name, m in self.symbols.items()}
            given = [self._value(feed, read, numbers, ()) for feed in self.feeds]
            self._refuse_overlap(given)
        results = tuple(self.graph(*self._apart(given)))
        for place, value in zip(self.written, results[len(results) - len(self.written) :], strict=True):
            with torch.set_grad_enabled(torch.is_grad_enabled() and place not in self.written_apart):
                given[place].copy_(value)
        if not all(bool(self._value(met, leaves, numbers, results)) for met in self.met):
            lines = dict.fromkeys(f"{place[-1].file}:{place[-1].line}" for place in self.assertions if place)
            raise AssertionError(f"a condition that the program raises without is not met: {', '.join(lines)}")
        found = (self._value(result, leaves, numbers, results) for result in self.signature.results)
        return self.signature.gives.build(found)

    def _value(
        self, of: Reference, leaves: Sequence[object], numbers: Mapping[str, int | float], results: Sequence[object]
    ) -> Any:
        match of:
            case Leaf(index=index):
                return leaves[index]
            case State(name=name):
                return self.state[name]
            case Result(index=index):
                return results[index]
            case Constant(value=value):
                return value
            case Number(program=program):
                return run_program(program, numbers)
            case ArrayOf(tensor=tensor):
                return of.of(self._value(tensor, self.checks.as_tensors(leaves), numbers, results).detach())

    def _apart(self, given: Sequence[Any]) -> list[Any]:
        """What the graph takes: of tensors that get new values copies, where autograd may keep the old ones."""
        kept = set(self.written) if torch.is_grad_enabled() else set()
        return [value.clone() if place in kept else value for place, value in enumerate(given)]

    def _refuse_overlap(self, given: Sequence[object]) -> None:
        checks = self.checks
        if not checks.written:
            return
        found = overlapping([given[i] for i in checks.written], [given[i] for i in checks.others])
        if found is not None:
            raise ValueError("the exported graph does not fit this call: memory that it writes to is shared")

    def print_guards(self) -> str:
        """The guards as text, a line for each."""
        return self.text or print_guards(self.guards)
