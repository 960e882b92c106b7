"""Safe graph capture from unmodified Python by a PEP 523 frame hook."""

from __future__ import annotations

from primtorch.communication import collective_of
from primtorch.flattenings import register_flattening
from torchdynamo._C import CompiledCallable
from torchdynamo.api import (
    allow_in_graph,
    assume_constant_result,
    disable,
    disallow_in_graph,
    error_on_graph_break,
    graph_break,
    is_compiling,
    mark_dynamic,
    mark_static,
    mark_unbacked,
    maybe_mark_dynamic,
    new_ledger,
    optimize,
    reset,
    set_stance,
    skip_frame,
    stats,
    substitute_in_graph,
)
from torchdynamo.errors import (
    InternalError,
    NotExportable,
    RecompileLimitExceeded,
    SizeNotDynamic,
    TorchDynamoError,
    UnsafeArchive,
    Unsupported,
)
from torchdynamo.explain import Explanation, explain, explain_guards
from torchdynamo.export import Dim, export
from torchdynamo.exported.archive import load, save
from torchdynamo.exported.program import Exported
from torchdynamo.kept.frames import KeptFrames
from torchdynamo.schemas import CaptureOptions

__version__ = "0.1.0"

__all__ = [
    "CaptureOptions", "CompiledCallable", "Dim", "Explanation", "Exported", "InternalError", "KeptFrames",
    "NotExportable",
    "RecompileLimitExceeded", "SizeNotDynamic", "TorchDynamoError", "UnsafeArchive", "Unsupported", "allow_in_graph",
    "assume_constant_result", "collective_of", "disable", "disallow_in_graph", "error_on_graph_break", "explain",
    "explain_guards", "export", "graph_break", "is_compiling", "load", "mark_dynamic", "mark_static", "mark_unbacked",
    "maybe_mark_dynamic", "new_ledger", "optimize", "register_flattening", "reset", "save", "set_stance", "skip_frame",
    "stats", "substitute_in_graph",
]  # fmt: skip
