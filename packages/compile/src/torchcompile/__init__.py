"""torchcompile.compile(model): the whole compiler stack behind one call."""

from torchcompile.api import compile, compile_in_place, export, list_backends, report, reset
from torchcompile.errors import CompileError, InvalidArgument, NotCompilable
from torchcompile.options import CompileOptions
from torchcompile.report import Report
from torchdynamo import Dim, Exported, load, save

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CompileOptions",
    "Dim",
    "Exported",
    "InvalidArgument",
    "NotCompilable",
    "Report",
    "compile",
    "compile_in_place",
    "export",
    "list_backends",
    "load",
    "report",
    "reset",
    "save",
]
