"""The designs that templates are made by, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchinductor.codegen.base import Planner
from torchinductor.ir import Kernel, Template, TemplateKind

from .attention import plan_attention, write_attention
from .filter_gradient import plan_filter_gradient, split_filter_gradient, write_filter_gradient
from .matmul import plan, write_matmul
from .writer import TritonSource

PLANNERS: Mapping[TemplateKind, Planner] = {
    "matmul": plan,
    "attention": plan_attention,
    "filter_gradient": plan_filter_gradient,
}
"""Which layout a template gets."""

_SPLITTERS: Mapping[TemplateKind, Callable[[Template], list[Kernel | Template]]] = {
    "filter_gradient": split_filter_gradient
}

_WRITERS: Mapping[TemplateKind, Callable[[Template], TritonSource]] = {
    "matmul": write_matmul,
    "attention": write_attention,
    "filter_gradient": write_filter_gradient,
}


def split_template(template: Template) -> list[Kernel | Template]:
    """What does a planned template's work, in order."""
    return _SPLITTERS[template.kind](template) if template.kind in _SPLITTERS else [template]


def write_template(template: Template) -> TritonSource:
    """The source of a planned template."""
    return _WRITERS[template.kind](template)
