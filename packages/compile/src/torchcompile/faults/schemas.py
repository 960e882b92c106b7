"""Records of this room: what is examined, and what is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from primtorch.frozen import record
from primtorch.schemas import UserFrame
from primtorch.symbolic import float_expr_of, hint_of, shape_env_of
from torchcompile.faults.children import DEATHS
from torchinductor.program import Value

# In the order in which a program meets them. A stage is at fault where what it gives differs from eager and what the
# one before it gives does not.
#   capture   the FX graph, run by eager's own operators, against the function as it was written
#   guards    compiled code that serves a call which it was not made for
#   joint     the forward and backward graphs of ATen operators, run by eager's own
#   prims     the lowered graphs, run by the prims' references
#   kernels   the compiled programs
#   backend   what a back end of the caller's own makes of a captured graph, in the place of the three above
Stage: TypeAlias = Literal["capture", "guards", "joint", "prims", "kernels", "backend"]
GRAPH_STAGES: tuple[Stage, ...] = ("joint", "prims", "kernels", "backend")

Run: TypeAlias = Callable[..., Sequence[object]]
Compile: TypeAlias = Callable[[fx.GraphModule, list[Value]], Run]


@record
class Program:
    """A graph, and inputs that it is run on: tensors, and numbers where its sizes are symbols.

    Attributes:
        described: its nodes' metadata hold for parts of it, too: it is a graph of a stage of ours, for these inputs.
    """

    module: fx.GraphModule
    inputs: tuple[Value, ...]
    described: bool = False

    @classmethod
    def of(cls, module: fx.GraphModule, examples: Sequence[object]) -> Program:
        """A captured graph on its examples; symbols are the numbers that they were."""
        return cls(module, tuple(map(_number, examples)))

    @property
    def calls(self) -> list[fx.Node]:
        """Its operators, in order."""
        return [node for node in self.module.graph.nodes if node.op.startswith("call")]


def _number(value: Any) -> Value:
    if isinstance(value, torch.SymInt):
        return hint_of(value)
    env = shape_env_of(value) if isinstance(value, torch.SymFloat) else None
    if env is None:
        return value  # type: ignore[no-any-return]
    return float_expr_of(value).evaluate(
        {name: info.hint for name, info in env.symbols.items() if info.hint is not None}
    )


@dataclass(frozen=True, slots=True)
class Named:
    """A back end as a file names it: what is imported for it, and the expression; "" is the default one."""

    imported: str = ""
    expression: str = ""


@dataclass(frozen=True)
class Makers:
    """How the stages are run apart.

    Attributes:
        up_to: what a captured graph becomes if the stages up to this one work on it.
        given: the graphs that a stage is given of a captured one, with what they are run on: forward, backward.
        alone: what the stage by itself makes of such a graph.
        named: the back end, for a file; None where no file can name it.
    """

    up_to: Mapping[Stage, Compile]
    given: Callable[[Stage, Program], Sequence[Program]] = lambda stage, program: ()
    alone: Mapping[Stage, Compile] = field(default_factory=dict)
    named: Named | None = Named()


@record
class Finding:
    """What is wrong with a program, and in which stage.

    Attributes:
        kind: "wrong" for a result, how a process ended of it ("crashes", "hangs", "exits"), else the exception's type.
        what: the difference, the signal, or the exception's message.
    """

    stage: Stage
    kind: str
    what: str

    def is_like(self, other: Finding | None) -> bool:
        """Whether the other is the same fault, as far as can be told."""
        if other is None or (other.stage, other.kind) != (self.stage, self.kind):
            return False
        return self.kind != "crashes" or other.what == self.what

    @property
    def ends(self) -> bool:
        """Whether a process that meets it ends, or never does."""
        return self.kind in DEATHS

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.what if self.kind == 'wrong' else f'{self.kind}: {self.what}'}"


@record
class Fault:
    """A finding with its place.

    Attributes:
        operator: the first that differs, as the captured graph names it; "" where the parts are right, one by one.
        below: the operators of the stage's own input that show it alone: ATen's for prims, prims for kernels.
        line: the operator's line of the graph.
        frame: the user's line.
    """

    finding: Finding
    operator: str
    below: tuple[str, ...] = ()
    line: str = ""
    frame: UserFrame | None = None

    @property
    def stage(self) -> Stage:
        """The stage that computes something else than eager, or fails."""
        return self.finding.stage

    def row(self) -> list[object]:
        """It as JSON writes it; see `of`."""
        frame = None if self.frame is None else [self.frame.file, self.frame.line, self.frame.function]
        found = self.finding
        return [[found.stage, found.kind, found.what], self.operator, list(self.below), self.line, frame]

    @classmethod
    def of(cls, row: list[Any]) -> Fault:
        """A fault by its row."""
        found, operator, below, line, frame = row
        return cls(Finding(*found), operator, tuple(below), line, None if frame is None else UserFrame(*frame))

    def __str__(self) -> str:
        wrong = self.finding.kind == "wrong"
        rows = [str(self.finding)]
        if self.operator:
            rows.append(f"the first operator that {'differs' if wrong else 'fails'} is {self.line or self.operator}")
        elif not self.finding.ends:
            rows.append("each of its parts is right where every value is given out: it is an effect of what is fused")
        if self.below:
            rows.append(f"  of it: {', '.join(self.below)}")
        if self.frame is not None:
            rows.append(f"  {self.frame.file}:{self.frame.line} in {self.frame.function}")
        return "\n".join(rows)
