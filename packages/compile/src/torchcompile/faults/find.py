"""The fault of a captured graph: its stage, its first operator, what shows it alone, and the file that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx
from torch._ops import OpOverload

from primtorch import graph_text
from primtorch.ledger import own_line
from primtorch.prims import Prim
from torchcompile.faults.edit import plain
from torchcompile.faults.judge import apart
from torchcompile.faults.reduce import BELOW, Progress, Reduction, Shows, first_difference
from torchcompile.faults.schemas import Compile, Fault, Finding, Makers, Program, Stage
from torchcompile.faults.stages import observe
from torchcompile.faults.standalone import Standalone, ambient_blocks, standalone, write

_PATIENCE = 15.0  # seconds for a part of what hangs


@dataclass(frozen=True)
class Reproducer:
    """A fault, and the file that shows it, if a file can: `program` holds no objects of the user's."""

    fault: Fault
    program: Program
    path: Path | None

    @property
    def lines(self) -> int:
        """Operators that are left."""
        return len(self.program.calls)


def locate(program: Program, makers: Makers, finding: Finding) -> Fault:
    """The first operator of a program that differs, where a stage is known to be at fault."""
    with apart():
        reduction = Reduction(_shows(makers.up_to, finding), tries=40, seconds=120.0)
        start = reduction.accepts(plain, program) or program
        found = first_difference(start, reduction)
        if found is None:
            return Fault(finding, "")
        return fault_at(finding, found[0], found[1])


def _shows(compilers: Mapping[Stage, Compile], finding: Finding) -> Shows:
    seconds = _PATIENCE if finding.kind == "hangs" else None
    return lambda program: finding.is_like(observe(program, compilers, (finding.stage,), seconds))


def fault_at(finding: Finding, program: Program, name: str) -> Fault:
    """A finding at one of the program's nodes."""
    (node,) = (node for node in program.module.graph.nodes if node.name == name)
    stack = node.meta.get("stack") or ()
    return Fault(finding, operator_of(node), (), _line_of(program, name), own_line(stack))


def operator_of(node: fx.Node) -> str:
    """What a node calls, without the module that it is in."""
    if isinstance(node.target, (OpOverload, Prim)):
        return str(node.target) if isinstance(node.target, OpOverload) else node.target.name
    text: str = node._pretty_print_target(node.target)
    return text.rpartition(".")[2]


def _line_of(program: Program, name: str) -> str:
    lines = (line.strip() for line in graph_text(program.module).splitlines())
    return next((line.partition("  #")[0].strip() for line in lines if line.startswith(f"{name} = ")), name)


def minify(program: Program, makers: Makers, folder: Path, progress: Progress) -> Reproducer | None:
    """Reduces a program that is wrong or fails, and writes the file that shows it. None where it is right."""
    blocks = ambient_blocks()
    finding = observe(program, makers.up_to)
    if finding is None:
        return None
    progress(str(finding) if finding.kind != "wrong" else f"stage {finding.stage}: wrong: {finding.what}")
    with apart():
        shows = _shows(makers.up_to, finding)
        fault = locate(program, makers, finding)
        smallest = Reduction(shows, progress)(program)
        alone = standalone(smallest, shows)
        if alone is not None:
            smallest = alone.program()
        finding = observe(smallest, makers.up_to) or finding
        fault = _of_smallest(replace(fault, finding=finding), smallest)
        fault = replace(fault, below=_below(smallest, makers, finding))
    in_file = alone is not None and _is_plain(alone) and makers.named is not None
    path = write(folder, alone, fault, blocks, makers.named) if in_file else None  # type: ignore[arg-type]
    return Reproducer(fault, smallest, path)


def _of_smallest(fault: Fault, program: Program) -> Fault:
    """The operators that are left name the fault, where it is not one alone."""
    calls = program.calls
    if not calls:
        return fault
    names = [operator_of(node) for node in calls]
    if fault.operator in names and len(names) > 1:
        return fault
    named = fault_at(fault.finding, program, calls[-1].name)
    several = " ".join(dict.fromkeys(names))
    return replace(named, operator=several if len(several) < 60 else named.operator)


def _is_plain(found: Standalone) -> bool:
    """Whether its text is all of it."""
    return not any(node.op in ("call_module", "get_attr") for node in found.module.graph.nodes)


def _below(program: Program, makers: Makers, finding: Finding) -> tuple[str, ...]:
    """The operators of the graphs that the stage was given which show the fault by themselves."""
    alone, names = makers.alone.get(finding.stage), list[str]()
    for given in makers.given(finding.stage, program) if alone is not None else ():
        assert alone is not None
        shows = _shows({finding.stage: alone}, finding)
        if shows(given):
            smallest = Reduction(shows, steps=BELOW, tries=100, seconds=60.0)(given)
            names += map(operator_of, smallest.calls)
    return tuple(dict.fromkeys(names))
