"""torchcompile.compile(model): the whole compiler stack behind one call."""

from primtorch.withheld import COLLECTOR

with COLLECTOR.off():  # nearly all that is made here lives as long as the process: it would walk through it for nothing
    from torchcompile.api import compile, compile_in_place, explain, export, list_backends, profile, report, reset
    from torchcompile.artifacts.cpp import save_cpp
    from torchcompile.artifacts.loading import load
    from torchcompile.artifacts.saving import save
    from torchcompile.backends import register_backend
    from torchcompile.capability import Capability
    from torchcompile.errors import (
        ArtifactError,
        ArtifactMismatch,
        CompileError,
        CompilerDied,
        InvalidArgument,
        NotCompilable,
        WrongResult,
    )
    from torchcompile.options import CompileOptions
    from torchcompile.profiling import Profile
    from torchcompile.report import Report
    from torchdynamo import (
        Dim,
        Exported,
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
        register_flattening,
        set_stance,
        substitute_in_graph,
    )
    from torchdynamo.marks import cudagraph_mark_step_begin

__version__ = "0.1.0"

__all__ = [
    "ArtifactError", "ArtifactMismatch", "Capability", "CompileError", "CompileOptions", "CompilerDied", "Dim",
    "Exported", "InvalidArgument", "NotCompilable", "Profile", "Report", "WrongResult", "allow_in_graph",
    "assume_constant_result", "compile", "compile_in_place", "cudagraph_mark_step_begin", "disable",
    "disallow_in_graph", "error_on_graph_break", "explain", "export", "graph_break", "is_compiling", "list_backends",
    "load", "mark_dynamic", "mark_static", "mark_unbacked", "maybe_mark_dynamic", "profile", "register_backend",
    "register_flattening", "report", "reset", "save", "save_cpp", "set_stance", "substitute_in_graph",
]  # fmt: skip
