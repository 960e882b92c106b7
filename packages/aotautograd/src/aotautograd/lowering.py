"""Brings a joint graph into a smaller set of operators."""

from __future__ import annotations

from dataclasses import replace

from aotautograd.schemas import Dump, JointGraph, Opset
from primtorch.lower import lower


def lower_joint(joint: JointGraph, opset: Opset, dump: Dump | None = None) -> JointGraph:
    """The same joint graph in prims or core ATen. Every node keeps its phase."""
    return replace(joint, module=lower(joint.module, opset, dump=dump))
