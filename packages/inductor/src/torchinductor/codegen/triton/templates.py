"""The designs that templates are made by, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchinductor.codegen.base import Planner
from torchinductor.ir import Template, TemplateKind

from .attention import plan_attention, write_attention
from .matmul import plan, write_matmul
from .writer import TritonSource

PLANNERS: Mapping[TemplateKind, Planner] = {"matmul": plan, "attention": plan_attention}
"""Which layout a template gets."""

_WRITERS: Mapping[TemplateKind, Callable[[Template], TritonSource]] = {
    "matmul": write_matmul,
    "attention": write_attention,
}


def write_template(template: Template) -> TritonSource:
    """The source of a planned template."""
    return _WRITERS[template.kind](template)
