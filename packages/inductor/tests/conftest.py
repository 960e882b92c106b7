"""Modules that several tests share stand beside them. With TRITON_INTERPRET=1, CPU graphs run as interpreted Triton kernels."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton_interpreter import InterpreterBackend

    import torchinductor

    torchinductor.register_codegen("cpu", InterpreterBackend())
