"""A back end that runs generated Triton kernels in Triton's interpreter on CPU tensors (needs TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime.interpreter import TensorHandle

from torchinductor.codegen.base import Built, CodegenBackend, KernelSource
from torchinductor.codegen.triton.backend import TritonBackend
from torchinductor.codegen.triton.bundles import key_of, programs, write_bundle
from torchinductor.codegen.triton.families import share_sources
from torchinductor.codegen.triton.marks import number_of
from torchinductor.codegen.triton.plan import Layout
from torchinductor.codegen.triton.split import split_reductions
from torchinductor.codegen.triton.templates import split_template, write_template
from torchinductor.codegen.triton.writer import write
from torchinductor.indexing import variable
from torchinductor.ir import Bundle, Kernel, Template
from torchinductor.program import Instruction, TritonCall
from torchinductor.schemas import InductorOptions

FOLDER = tempfile.TemporaryDirectory(prefix="triton-interpreter-")


def load(text: str, name: str) -> Any:
    """The kernel function of a source; it must stand in a file, because Triton reads it back."""
    file = Path(FOLDER.name) / f"kernel_{len(list(Path(FOLDER.name).iterdir()))}.py"
    file.write_text(text.replace("tl.device_assert(", "device_assert("))  # the interpreter's own checks nothing
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.m = Libdevice()
    module.device_assert = device_assert
    return getattr(module, name)


def device_assert(condition: Any, message: str) -> None:
    if not np.all(condition.handle.data):
        raise IndexError(message)


class Libdevice:
    """libdevice by torch's own functions: the interpreter has none."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = TORCH_NAMES.get(name) or getattr(torch, name, None) or getattr(torch.special, name)

        def call(*operands: Any) -> Any:
            arrays = np.broadcast_arrays(*(o.handle.data for o in operands))
            result = function(*(torch.from_numpy(np.array(a)) for a in arrays)).numpy()
            first = max(operands, key=lambda o: o.handle.data.size)
            return tl.core.tensor(TensorHandle(result, first.handle.dtype), first.type)

        return call


TORCH_NAMES: dict[str, Callable[..., Any]] = {
    "fast_dividef": torch.div,
    "fast_expf": torch.exp,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "nearbyint": torch.round,
    "normcdfinv": torch.special.ndtri,
}


class InterpreterBackend(CodegenBackend):
    templates = TritonBackend.templates
    traits = TritonBackend.traits

    def legalize(self, kernel: Kernel, options: InductorOptions) -> list[Kernel]:
        return split_reductions(kernel)

    def legalize_template(self, template: Template, options: InductorOptions) -> list[Kernel | Template]:
        return split_template(template)

    def generate(self, kernel: Kernel, options: InductorOptions) -> KernelSource:
        source = write(kernel)
        return KernelSource(source.text, source, kernel.origins)

    def generate_template(self, template: Template, options: InductorOptions) -> KernelSource:
        source = write_template(template)
        return KernelSource(source.text, source, template.loops.origins)

    def bundle_key(self, kernel: Kernel) -> Hashable | None:
        return key_of(kernel)

    def generate_bundle(self, bundle: Bundle, options: InductorOptions) -> KernelSource:
        source = write_bundle(bundle)
        return KernelSource(source.text, source, bundle.origins)

    def bundle_instruction(
        self, bundle: Bundle, source: KernelSource, handle: int, slots: tuple[int, ...]
    ) -> Instruction:
        return TritonCall(handle, (sum(programs(bundle)), 1, 1), slots, source.meta.numbers, source.meta.name)

    def share(self, sources: Sequence[KernelSource], options: InductorOptions) -> list[KernelSource]:
        return share_sources(sources, options.shared_kernels)

    def build(self, sources: Sequence[KernelSource], options: InductorOptions) -> Built:
        def launcher(function: Any, kinds: Sequence[str]) -> Any:
            def launch(tensors: Sequence[Any], symbols: Sequence[int], grid: Sequence[int]) -> None:
                numbers = [number_of(cell, kind) for cell, kind in zip(symbols, kinds[len(tensors) :], strict=True)]
                if all(grid):
                    function[tuple(grid)](*tensors, *numbers)

            return launch

        launchers = tuple(launcher(load(s.text, s.meta.name), [kind for _, kind in s.meta.signature]) for s in sources)
        return Built(launchers=launchers, files={f"{i}.py": s.text for i, s in enumerate(sources)})

    def instruction(self, kernel: Kernel, source: KernelSource, handle: int, slots: tuple[int, ...]) -> Instruction:
        symbols = tuple(variable(name) for name in source.meta.symbols)
        given = (*symbols, *source.meta.numbers)
        return TritonCall(handle, (kernel.laid_out(Layout).grid, 1, 1), slots, given, source.meta.name)
