"""Records that cross the package's boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeAlias

from primtorch.frozen import record
from primtorch.ledger import LEDGER, Ledger
from torchinductor.program import Part

Dump: TypeAlias = Callable[[str, str], None]
"""Is given (file name, text)."""
Watch: TypeAlias = Callable[[str, int, int], None]
"""Is told what is under way: the stage, how many kernels it is done with, and of how many."""


@dataclass(frozen=True, slots=True, eq=False)
class Binaries:
    """Kernels that came with a program: files by a name that is a hash of what they were built from, whatever built
    them, with the suffix of their kind."""

    files: Mapping[str, Path]

    def find(self, name: str) -> Path | None:
        """The built library of that name, or None."""
        return self.files.get(name)


@dataclass(frozen=True, slots=True)
class InductorOptions:
    """How a graph is compiled. Built once at the API and passed on."""

    # Round where eager rounds: every operation on bfloat16 and float16 rounds its result, not only the store.
    round_like_eager: bool = False
    # Fuse kernels; off, each operation is its own kernel.
    fuse: bool = True
    # The folder of the disk cache; None for no disk cache (kernels are then built in a temporary folder).
    cache_dir: str | None = None
    # Kernels that were built elsewhere, which are asked for first.
    binaries: Binaries | None = None
    # C++ compiler; None to look for g++, c++, clang++.
    cxx: str | None = None
    # Loop iterations below which a CPU kernel stays on one thread.
    parallel_grain: int = 32768
    # Operations that one fused kernel may have, and buffers that it may touch.
    max_body: int = 256
    max_buffers: int = 32
    # Allocate a dead buffer's memory again for a new one of the same size.
    reuse_buffers: bool = True
    # Run programs with the C++ executor; off, with the Python reference executor.
    native_executor: bool = True
    # Replay programs for an NVIDIA GPU as CUDA graphs (`cuda_graphs.py` says when and how).
    cuda_graphs: bool = False
    # Generate matrix products where a back end has a template for them; off, they are calls of ATen.
    templates: bool = False
    # Kernels for a GPU that differ in sizes, strides and other numbers alone are one kernel that is given these, and is
    # compiled once; off, each is compiled for itself, its numbers being constants.
    shared_kernels: bool = True
    # Time ATen's call and several kernels of cuBLASLt for each matrix product on an NVIDIA GPU, where it is first run,
    # and take the fastest from then on, in other processes too.
    tune_products: bool = False
    # What kernels would add in an order of chance (a GPU, by atomic operations) is a call of ATen, which keeps one
    # under `torch.use_deterministic_algorithms(True)`.
    deterministic: bool = False
    # Check every kernel after every pass, not only after the last one.
    verify: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """Who is told of a compilation, and by which name.

    Attributes:
        title: what the ledger and profilers call the graph.
        ledger: is told of what runs otherwise than planned, now and at each call.
        dump: is given the text of each stage.
        watch: is told what is under way.
    """

    title: str = "graph"
    ledger: Ledger = LEDGER
    dump: Dump | None = None
    watch: Watch | None = None


@record
class ProductRates:
    """What a device makes of matrix products of 16-bit numbers: floating-point operations and bytes a second."""

    alignment: int  # bytes that rows should start and end at multiples of
    aligned: float
    unaligned: float
    bandwidth: float


@record
class AdditionRates:
    """What additions to places that indices tell cost where a device makes them by atomic operations, in seconds and a
    second, and what it costs to compare indices instead."""

    waiting: float  # an addition's, for another one at its place
    under_way: int  # additions at one time
    comparisons: float  # values compared, chosen and added
    cache: float  # bytes that are read again


@record
class ColumnSums:
    """What a program that goes through rows can keep of the sums of their columns, and when it is to."""

    columns: int  # of the widest row that it holds
    sums: int  # 32-bit numbers
    programs: int  # that the rows are dealt out to, each with sums of its own
    rows: int  # from which on they are enough
    least: int  # bytes that are not read a second time


@record
class DeviceTraits:
    """What is cheap and what is dear on a type of device: fusion, padding and layouts are decided by it."""

    # Operations up to which a kernel computes a value again rather than store it for itself and load it.
    recomputed: int = 12
    # What a transcendental function, or a load at a computed place, counts as there; None: never made again.
    heavy: int | None = None
    # Up to which length what a stage has loaded of a row is at hand in the next; None: any, there is a cache.
    held: int | None = None
    # Whether matrices get margins, and when; None: never.
    products: ProductRates | None = None
    # Multiplications of a product of matrices up to which it is a kernel of ours: its launch costs the host less than a
    # call of a library.
    tiny_product: int = 0
    # Whether convolutions of images for units of matrices (16-bit numbers, TF32) want these channels-last.
    channels_last: bool = False
    # Whether a convolution's bias is added by a kernel of its own anyhow, which may as well be one of ours.
    biases_apart: bool = False
    # Whether a pooling's gradient by rows is added up window by window, rather than gathered by each position.
    walks_windows: bool = False
    # How often a square root is repeated for it to be stored before: a kernel for it costs less. None: never for that.
    repeated_roots: int | None = None
    # Whether what is written to one place by several iterations arrives in the loop's order.
    ordered_stores: bool = True
    # Sums of columns in the kernels that go through the rows; None: they are kernels of their own.
    columns: ColumnSums | None = None
    # Whether additions to few places are made without atomic operations, and when; None: never.
    additions: AdditionRates | None = None
    _hash: int = field(init=False, repr=False, compare=False)  # each form of kernels that are joined asks for it

    def __post_init__(self) -> None:
        compared = [getattr(self, part.name) for part in fields(self) if part.compare]
        object.__setattr__(self, "_hash", hash(tuple(compared)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a call of a program takes beside its inputs, at the sizes of the example.

    Attributes:
        peak: of what it has made, at once.
        results: of what it returns, inputs left out; a forward's hold what its backward reads.
        inputs: of what it is given.
    """

    peak: int = 0
    results: int = 0
    inputs: int = 0


NO_MEMORY = Memory()


@dataclass(frozen=True, slots=True)
class GraphStats:
    """What became of one graph.

    Attributes:
        nodes, kernels, aten_calls: how many there are.
        seconds: of each stage of the compilation, by its name.
        cache_hits, cache_misses: kernels that were found built, and that were built.
        memory: of a call. `parts`: what takes time in it.
    """

    nodes: int
    kernels: int
    aten_calls: int
    seconds: dict[str, float] = field(default_factory=dict)
    cache_hits: int = 0
    cache_misses: int = 0
    memory: Memory = NO_MEMORY
    parts: tuple[Part, ...] = ()
