"""Which stage is at fault: each one's graph is run in turn, and held to eager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchcompile.faults.judge import Judge, apart
from torchcompile.faults.schemas import GRAPH_STAGES, Compile, Finding, Program, Stage


def observe(
    program: Program, compilers: Mapping[Stage, Compile], stages: Sequence[Stage] = GRAPH_STAGES
) -> Finding | None:
    """The first of these stages at fault; None where all are right, or where eager refuses the program as well."""
    with apart():
        try:
            judge = Judge(program)
        except Exception:  # whatever it is, it is the program's
            return None
        for stage in stages:
            if stage not in compilers:
                continue
            try:
                difference = judge.difference(compilers[stage](program.module, list(program.inputs)))
            except Exception as error:
                return Finding(stage, type(error).__name__, str(error).partition("\n")[0])
            if difference is not None:
                return Finding(stage, "wrong", difference)
    return None
