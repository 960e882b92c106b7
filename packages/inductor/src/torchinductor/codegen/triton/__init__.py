"""Triton kernels for CUDA devices: `plan` lays loops over programs, `writer` writes text, `compiler` builds it."""

from torchinductor.codegen.triton.backend import TritonBackend, TritonLauncher
from torchinductor.codegen.triton.expressions import Unsupported

__all__ = ["TritonBackend", "TritonLauncher", "Unsupported"]
