"""Which stage is at fault: each one's graph is run in turn, and held to eager.

All of it runs in a child, so that a stage or a kernel that dies, or never ends, is a finding like others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchcompile.faults.children import Death, Teller, in_child, possible
from torchcompile.faults.judge import Judge, apart
from torchcompile.faults.schemas import GRAPH_STAGES, Compile, Finding, Program, Stage

SILENCE = 300.0  # seconds that a stage may take
_EAGER = "eager"


def observe(
    program: Program,
    compilers: Mapping[Stage, Compile],
    stages: Sequence[Stage] = GRAPH_STAGES,
    seconds: float | None = None,
) -> Finding | None:
    """The first of these stages at fault; None where all are right, or where eager refuses the program as well, or dies
    of it.

    Args:
        seconds: that a stage may take; None: `SILENCE`.
    """
    found = look_at(program, compilers, stages, seconds)
    return None if isinstance(found, Death) else found


def look_at(
    program: Program, compilers: Mapping[Stage, Compile], stages: Sequence[Stage], seconds: float | None = None
) -> Finding | Death | None:
    """See `observe`; how eager dies, where it does."""
    if not possible():
        return _observe(program, compilers, stages, lambda stage: None)

    def look(tell: Teller) -> tuple[str, str, str] | None:
        found = _observe(program, compilers, stages, tell.at)
        return None if found is None else (found.stage, found.kind, found.what)

    found = in_child(look, SILENCE if seconds is None else seconds)
    if isinstance(found, Death):
        stage = next((stage for stage in stages if stage == found.at), None)
        return found if stage is None else Finding(stage, found.kind, found.what)
    return None if found is None else Finding(*found)


def _observe(
    program: Program, compilers: Mapping[Stage, Compile], stages: Sequence[Stage], at: Callable[[str], None]
) -> Finding | None:
    at(_EAGER)
    with apart():
        try:
            judge = Judge(program)
        except Exception:  # whatever it is, it is the program's
            return None
        for stage in stages:
            if stage not in compilers:
                continue
            at(stage)
            try:
                difference = judge.difference(compilers[stage](program.module, list(program.inputs)))
            except Exception as error:
                return Finding(stage, type(error).__name__, str(error).partition("\n")[0])
            if difference is not None:
                return Finding(stage, "wrong", difference)
    return None
