"""The code generation back end for CUDA devices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch

from primtorch import forks
from torchinductor._C import TritonKernel
from torchinductor.codegen.base import Building, Built, CodegenBackend, KernelSource, Planner
from torchinductor.errors import BuildFailed
from torchinductor.indexing import variable
from torchinductor.ir import Bundle, Kernel, Template, TemplateKind
from torchinductor.program import Instruction, Size, TritonCall
from torchinductor.schemas import AdditionRates, ColumnSums, DeviceTraits, InductorOptions, ProductRates

from .bundles import key_of, programs, write_bundle
from .compiler import Binary, TritonCompiler, triton_version
from .families import share_sources
from .plan import PERSISTENT_LIMIT, WALK_COLUMNS, WALK_SUMS, WALK_WARPS, Layout
from .split import split_reductions
from .templates import PLANNERS, split_template, write_template
from .writer import TritonSource, write


class TritonLauncher:
    """A loaded kernel. The C++ executor launches `handle`; calling the object does the same from Python."""

    def __init__(self, source: TritonSource, binary: Binary) -> None:
        record = binary.record
        if record["scratch_bytes"]:
            raise BuildFailed(f"kernel {binary.key} asks for {record['scratch_bytes']} bytes of scratch memory")
        self.source = source
        self.written = source.written
        # "a": a pointer that must be a multiple of 16; "l" and "i": 64 and 32 bits.
        parameters = "".join(
            "a" if kind.startswith("*") else "l" if "64" in kind else "i" for _, kind in source.signature
        )
        self.handle = TritonKernel(
            binary.code, record["name"], parameters, record["scratch"], record["warps"], 32, record["shared"]
        )

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int], grid: Sequence[int]) -> None:
        """Launches on the current stream of the tensors' device."""
        device = tensors[0].device
        pointers = [t.data_ptr() for t in tensors]
        if any(p % 16 for p in pointers):
            raise ValueError(f"{self.source.name} takes tensors that start at multiples of 16 bytes")
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            self.handle.launch(device.index or 0, stream, grid, [*pointers, *symbols])


class TritonBackend(CodegenBackend):
    """Generates Triton kernels. `arch` (90 for sm_90) is the current device's where it is not given."""

    templates: ClassVar[Mapping[TemplateKind, Planner]] = MappingProxyType(PLANNERS)
    builds_apart: ClassVar[bool] = True
    # A float32 value that goes to memory and comes back costs as much as some hundred operations on it do meanwhile.
    # On an H200 the three products of GPT-2's vocabulary of 50,257 with 8,192 tokens took 30.6 ms as they are, and
    # about 5 ms at a multiple of 8.
    traits: ClassVar[DeviceTraits] = DeviceTraits(
        recomputed=96,
        heavy=8,
        held=PERSISTENT_LIMIT,
        tiny_product=1 << 16,
        # cuDNN's kernels for tensor cores take no other order: it copies before and behind them. In MobileNetV3, the
        # depthwise ones by rows took 66 of 105 ms of an H200, those of channels-last images about 10.
        channels_last=True,
        # In ConvNeXt's inference, 40 additions of ATen's took 0.9 of 10.0 ms.
        biases_apart=True,
        ordered_stores=False,
        products=ProductRates(alignment=16, aligned=380e12, unaligned=62e12, bandwidth=4e12),
        # The gradient of T5's relative positions, 2^20 values a head into 32 rows of 8 heads, half of them into one
        # row, took 9.5 ms of an H200, which has 132 * 2048 threads with some values each: two heads at a time.
        # A comparison, choice and addition are some four instructions of 132 * 128 lanes at 1.7 GHz.
        columns=ColumnSums(WALK_COLUMNS, WALK_SUMS, programs=WALK_WARPS // 8, rows=2048, least=2 << 20),
        additions=AdditionRates(waiting=2.2e-9, under_way=2**21, comparisons=5e12, cache=5e12),
    )

    def __init__(self, arch: int | None = None) -> None:
        self._arch = arch
        self._compilers: dict[tuple[int, str | None], TritonCompiler] = {}
        self._lock = forks.lock()

    def foresee(self, options: InductorOptions) -> None:
        """Starts the compiling process in the background; it is ready about a second later."""
        if torch.cuda.is_initialized() and torch.cuda.is_available():
            self.compiler(options).start()

    def warm(self, options: InductorOptions) -> None:
        """The same, unless the cache likely has what will be asked for."""
        self.compiler(options).start_if_empty()

    def legalize(self, kernel: Kernel, options: InductorOptions) -> list[Kernel]:
        """Planned kernels that do the kernel's work in order; their `buffers` hold the workspaces that they added."""
        return list(split_reductions(kernel))

    def legalize_template(self, template: Template, options: InductorOptions) -> list[Kernel | Template]:
        """One that sums up over many programs is their sums and the end of these."""
        return split_template(template)

    def generate(self, kernel: Kernel, options: InductorOptions) -> KernelSource:
        """Raises `expressions.Unsupported` for what Triton has no text for."""
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

    def share(self, sources: Sequence[KernelSource], options: InductorOptions) -> list[KernelSource]:
        """With `InductorOptions.shared_kernels`, kernels of one family have one text (`families.py`)."""
        return share_sources(sources, options.shared_kernels)

    def build(self, sources: Sequence[KernelSource], options: InductorOptions) -> Built:
        return self.begin(sources, options).finish()

    def begin(self, sources: Sequence[KernelSource], options: InductorOptions) -> Building:
        metas: list[TritonSource] = [source.meta for source in sources]
        compiling = self.compiler(options).begin(metas, options.binaries)

        def finish() -> Built:
            binaries = compiling.finish()
            launchers = tuple(TritonLauncher(m, b) for m, b in zip(metas, binaries, strict=True))
            files = {f"{meta.name}.py": meta.text for meta in metas}
            hits = sum(b.hit for b in binaries)
            return Built(launchers=launchers, files=files, cache_hits=hits, cache_misses=len(binaries) - hits)

        return Building(finish, compiling.apart)

    def binaries(self, sources: Sequence[KernelSource], options: InductorOptions) -> Mapping[str, Path] | None:
        compiler, found = self.compiler(options), {}
        for source in sources:
            files = compiler.files(source.meta, options.binaries)
            if files is None:
                return None
            found.update(files)
        return found

    def facts(self) -> Mapping[str, str]:
        """The current GPU's; without one, that of the architecture that was given."""
        gpu = f"sm_{self._arch}" if self._arch is not None else ""
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            gpu = f"{found.name} (sm_{found.major}{found.minor}, {found.multi_processor_count} multiprocessors)"
        versions = f"{torch.version.cuda or 'none'}, cuDNN {torch.backends.cudnn.version() or 'none'}"
        return {"GPU": gpu, "CUDA": versions, "Triton": triton_version()}

    def instruction(self, kernel: Kernel, source: KernelSource, handle: int, slots: tuple[int, ...]) -> Instruction:
        meta: TritonSource = source.meta
        grid: tuple[Size, Size, Size] = (kernel.laid_out(Layout).grid, 1, 1)  # kernels of equal text may differ in it
        symbols = tuple(variable(name) for name in meta.symbols)
        return TritonCall(handle, grid, slots, (*symbols, *meta.numbers), meta.name)

    def bundle_instruction(
        self, bundle: Bundle, source: KernelSource, handle: int, slots: tuple[int, ...]
    ) -> Instruction:
        return TritonCall(handle, (sum(programs(bundle)), 1, 1), slots, source.meta.numbers, source.meta.name)

    def compiler(self, options: InductorOptions) -> TritonCompiler:
        """The compiler for the current device and the options' cache folder."""
        arch = self._arch
        if arch is None:
            major, minor = torch.cuda.get_device_capability()
            arch = 10 * major + minor
        with self._lock:
            found = self._compilers.get((arch, options.cache_dir))
            if found is None:
                folder = Path(options.cache_dir) / "triton" if options.cache_dir is not None else None
                found = self._compilers[arch, options.cache_dir] = TritonCompiler(arch, folder)
            return found
