"""Loop IR, fusion and code generation for PyTorch graphs: C++/OpenMP and Triton."""

from torchinductor.codegen.base import (
    Built,
    CodegenBackend,
    KernelSource,
    codegen_for,
    facts_of,
    foresee,
    register_codegen,
    walks_windows,
)
from torchinductor.codegen.cpp.backend import CppBackend
from torchinductor.codegen.triton.backend import TritonBackend
from torchinductor.compile import (
    BegunGraph,
    CompiledGraph,
    KeptConstant,
    KeptGraph,
    begin_early,
    begin_graph,
    binaries_of,
    builds_apart,
    choose_kept_layouts,
    choose_layouts,
    compile_graph,
    devices_of,
    kept_constant,
    load_graph,
)
from torchinductor.errors import BuildFailed, CompilerMissing, InductorError, LoweringError, NotForCpp, UnknownDevice
from torchinductor.native import label_of
from torchinductor.program import Part
from torchinductor.program_file import (
    CallInput,
    CallSignature,
    include_path,
    library_path,
    write_program,
)
from torchinductor.schemas import NO_MEMORY, Account, Binaries, GraphStats, InductorOptions, Memory
from torchinductor.source import generate_source

__version__ = "0.1.0"

__all__ = [
    "NO_MEMORY",
    "Account",
    "BegunGraph",
    "Binaries",
    "BuildFailed",
    "Built",
    "CallInput",
    "CallSignature",
    "CodegenBackend",
    "CompiledGraph",
    "CompilerMissing",
    "CppBackend",
    "GraphStats",
    "InductorError",
    "InductorOptions",
    "KeptConstant",
    "KeptGraph",
    "KernelSource",
    "LoweringError",
    "Memory",
    "NotForCpp",
    "Part",
    "TritonBackend",
    "UnknownDevice",
    "begin_early",
    "begin_graph",
    "binaries_of",
    "builds_apart",
    "choose_kept_layouts",
    "choose_layouts",
    "codegen_for",
    "compile_graph",
    "devices_of",
    "facts_of",
    "foresee",
    "generate_source",
    "include_path",
    "kept_constant",
    "label_of",
    "library_path",
    "load_graph",
    "register_codegen",
    "walks_windows",
    "write_program",
]

register_codegen("cpu", CppBackend())
register_codegen("cuda", TritonBackend())
