"""Forward and backward graphs of any differentiable PyTorch program, ahead of time."""

from aotautograd.api import aot_function, aot_module, partition, trace_joint
from aotautograd.eager_compiler import run_graph
from aotautograd.errors import AotAutogradError
from aotautograd.partitioners import default_partition
from aotautograd.recompute import min_cut
from aotautograd.schemas import JointGraph, Partition, ProgramMetadata

__all__ = [
    "AotAutogradError",
    "JointGraph",
    "Partition",
    "ProgramMetadata",
    "aot_function",
    "aot_module",
    "default_partition",
    "min_cut",
    "partition",
    "run_graph",
    "trace_joint",
]

__version__ = "0.1.0"
