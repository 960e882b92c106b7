"""A program as a folder that C++ runs without Python: `include/torchinductor/program.h` loads it.

    program.bin     what is described below
    tensors.bin     the memories of constants and parameters, one after the other
    *.so            the kernels as built

`program.bin` begins with `TCPROGRM`, the format's number, and the length and CRC-32 of what follows. An integer has
eight bytes, little-endian; a float is an integer of its 64 bits; a text or a list begins with its length; a flag is 0
or 1.

    torch, machine, processor features    a process that differs in these, or lacks one, is refused
    memories        of each: where it begins in tensors.bin, its length, its CRC-32
    tensors         of each: its memory, dtype, sizes, strides, offset
    libraries       of each: the file's name and CRC-32
    slots, symbols  of the program: how many
    calls           of a builder (`_CALLS`): the name, and what the table says
    the call        `CallSignature`, field by field

The reader (program_file.cpp) checks every length, every index and every sum, and executes nothing of `program.bin`. The
kernels are machine code: a folder is as much to be trusted as a program.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch

from primtorch.building import library_of
from primtorch.calls import MEASURES, Leaf, Measure, Number, Result
from primtorch.files import appearing
from primtorch.prims import PRIMS
from primtorch.symbolic import SCALAR_OPS, UNARY_OPS
from primtorch.symbolic.expr import Program as Steps
from primtorch.symbolic.float_expr import float_bits
from torchinductor import _C
from torchinductor._C import Builder
from torchinductor.cache import DiskCache
from torchinductor.codegen.cpp.build import built_file, compile_library, file_of
from torchinductor.errors import NotForCpp
from torchinductor.native import encode
from torchinductor.program import AtenCall, KernelCall, Program, TensorInput, TritonCall
from torchinductor.schemas import InductorOptions

FORMAT = 2
_MAGIC = b"TCPROGRM"
T = TypeVar("T")
_ALIGNED = 64  # bytes: where memories begin in their file


def include_path() -> str:
    """The folder of headers for C++ programs: `#include <torchinductor/program.h>`."""
    return str(Path(__file__).parent / "include")


def library_path() -> str:
    """The file of the library that C++ programs link, for the torch that runs: `libtorchinductor.so`."""
    return str(library_of(Path(str(_C.__file__)), "torchinductor"))


KINDS = ("tensor", "int", "float")


@dataclass(frozen=True, slots=True)
class CallInput:
    """An input of a call. Of a tensor that the program reads: its dtype, and sizes and strides, -1 where one varies."""

    name: str
    kind: str  # one of KINDS
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallSignature:
    """A call of a program from C++.

    Attributes:
        measures: the numbers that a call tells, which programs over them call ("sym", place).
        relations: what has to hold of them, and what that says.
        feeds: of each input of the program: an input of the call, a number, or a tensor that is kept with the program.
        same, different, apart: pairs of inputs that are one tensor, that are not, and that share no memory.
        written: tensors that get new values, and the output that each is given.
        met: outputs that say whether a condition holds; `conditions` are the user's lines.
        results: what the call gives; other values than these are given as they are.
    """

    inputs: tuple[CallInput, ...]
    measures: tuple[Measure, ...]
    relations: Mapping[Steps, str]
    feeds: tuple[Leaf | Number | torch.Tensor, ...]
    results: tuple[Leaf | Result | Number | object, ...]
    same: tuple[tuple[int, int], ...] = ()
    different: tuple[tuple[int, int], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    written: tuple[tuple[Leaf | torch.Tensor, int], ...] = ()
    met: tuple[int, ...] = ()
    conditions: str = ""


def write_program(
    folder: str | os.PathLike[str],
    program: Program,
    sources: Iterable[str],
    signature: CallSignature,
    options: InductorOptions,
) -> None:
    """Writes a program for CPUs. Each file appears whole, `program.bin` last.

    Args:
        sources: the translation units of its kernels, as `CompiledGraph.sources` has them.
        options: those that it was compiled with.

    Raises:
        NotForCpp: it calls what only Python runs, or holds what has no form in a file.
        BuildFailed: a kernel that is no longer in the cache could not be built again.
        OSError: the folder cannot be written.
    """
    _refuse(program)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = _Tensors()
    calls = _calls(program, signature, tensors)
    call = _call(signature, tensors)
    libraries = [_copied(source, target, options) for source in sources]
    memories = _appearing(target / "tensors.bin", tensors.write)
    body = b"".join(
        (
            _text(torch.__version__.partition("+")[0]),
            _text(platform.machine()),
            _list(map(_text, processor_features())),
            memories,
            _list(tensors.rows),
            _list(_text(name) + _integer(crc) for name, crc in libraries),
            calls,
            call,
        )
    )
    head = _MAGIC + _integer(FORMAT) + _integer(len(body)) + _integer(zlib.crc32(body))
    _appearing(target / "program.bin", lambda stream: stream.write(head + body))


def _refuse(program: Program) -> None:
    """Raises NotForCpp with the operator and the user's line where a program needs Python."""
    frames = {part.position: part.frames for part in program.parts}
    for place, instruction in enumerate(program.instructions):
        why = None
        if isinstance(instruction, AtenCall):
            why, name = _why_python(instruction.op), _name(instruction.op)
        elif isinstance(instruction, TritonCall):
            why, name = "is a kernel for a GPU, and C++ programs are for CPUs as yet", instruction.name
        if why is not None:
            at = "".join(f"\n  {frame}" for frame in frames.get(place, ())[-1:])
            raise NotForCpp(f"{name} cannot run without Python: it {why}{at}")


def _name(op: Callable[..., object]) -> str:
    """An operator's own, or that of the prim whose reference a function is."""
    return next((f"prims.{prim.name}" for prim in PRIMS.values() if prim.reference is op), str(op))


# Where the dispatcher finds a kernel for tensors on a CPU, and what says where an operator is defined.
_ON_CPU = ("debug", "CPU", "BackendSelect", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def _why_python(op: Callable[..., object]) -> str | None:
    """Why a call is one of Python; None for an operator of C++."""
    if not isinstance(op, torch._ops.OpOverload):
        return "is no operator of the dispatcher, but a function of Python"
    for line in torch._C._dispatch_dump(op.name()).splitlines():
        key, _, where = line.partition(": registered at ")
        if key.partition(":")[0].partition("[")[0].strip() in _ON_CPU and re.search(r"\.py:\d+", where):
            return "is an operator that Python defines"
    return None


def _calls(program: Program, signature: CallSignature, tensors: _Tensors) -> bytes:
    """The calls of a builder that a program is, with the tensors that are kept with it as constants."""
    fed = list(zip(program.inputs, signature.feeds, strict=True))
    kept = [(i.slot, t) for i, t in fed if isinstance(i, TensorInput) and isinstance(t, torch.Tensor)]
    inputs = tuple(item for item, feed in fed if not isinstance(feed, torch.Tensor))
    functions = {program.kernels[i.kernel]: i.name for i in program.instructions if isinstance(i, KernelCall)}
    writer = ProgramWriter(functions, tensors)
    whole = replace(program, inputs=inputs, constants=(*program.constants, *kept))
    encode(whole, cast(Builder, writer), lambda expected, text: None, "program")
    return _integer(program.num_slots) + _integer(len(program.symbols)) + writer.content()


# -- fields ----------------------------------------------------------------------------------------


def _integer(value: int) -> bytes:
    return struct.pack("<q", value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _integer(len(encoded)) + encoded


def _list(items: Iterable[bytes]) -> bytes:
    found = list(items)
    return _integer(len(found)) + b"".join(found)


def _integers(values: Iterable[int]) -> bytes:
    return _list(map(_integer, values))


def _dtype(dtype: torch.dtype) -> bytes:
    return _text(str(dtype).removeprefix("torch."))


def _optional_dtype(dtype: torch.dtype | None) -> bytes:
    return _integer(0) if dtype is None else _integer(1) + _dtype(dtype)


def _size(size: tuple[bool, int]) -> bytes:
    return _integer(size[0]) + _integer(size[1])


def _sizes(sizes: Sequence[tuple[bool, int]]) -> bytes:
    return _list(map(_size, sizes))


def _steps(steps: Iterable[tuple[str, int | str | float]]) -> bytes:
    """A size program: of each step its name, and an integer."""
    return _list(_text(op) + _integer(float_bits(float(n)) if op == "fconst" else int(n)) for op, n in steps)


def _destination(item: Any) -> bytes:
    if item is None:
        return _text("drop")
    tag, of = item
    return _text(tag) + (_list(map(_destination, of)) if tag == "list" else _integer(of))


# -- the calls of a builder ------------------------------------------------------------------------


class ProgramWriter:
    """Takes the calls of a `Builder`, by `_CALLS`, and is their bytes."""

    def __init__(self, functions: Mapping[int, str], tensors: _Tensors) -> None:
        self.functions = functions
        self.tensors = tensors
        self.values = 0
        self.calls: list[bytes] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        fields = _CALLS.get(name)
        if fields is None:
            raise NotForCpp(f"a program that calls for {name!r} cannot run without Python")

        def write(*given: object) -> int:
            self.calls.append(_text(name) + b"".join(encoder(self, given[place]) for place, encoder in fields))
            self.values += name == "value"
            return self.values - 1

        return write

    def content(self) -> bytes:
        """The calls that were taken, as a list of the file."""
        return _list(self.calls)

    def plain(self, value: object) -> bytes:
        """A value as it comes: its kind, and what that takes."""
        if isinstance(value, (list, tuple)):
            return _text("list") + _list(map(self.plain, value))
        if isinstance(value, torch.Tensor):
            return _text("tensor") + _integer(self.tensors.add(value))
        if isinstance(value, torch.device) and value.type == "cpu":
            return _text("cpu")
        if value is None:
            return _text("none")
        for kind, (name, encoder) in _PLAIN.items():
            if type(value) is kind:
                return _text(name) + encoder(value)
        raise NotForCpp(f"a {type(value).__name__} among the arguments of an operator has no form in a file: {value!r}")

    def argument(self, tagged: tuple[str, Any]) -> bytes:
        """An argument of an operator: fixed, a list, or the number of what a call gives."""
        tag, of = tagged
        if tag == "fixed":
            return _text(tag) + self.plain(of)
        return _text(tag) + (_list(map(self.argument, of)) if tag == "list" else _integer(of))


# Values of enumerations, by their numbers in C++.
_LAYOUTS: Mapping[str, int] = {
    "strided": 0, "sparse_coo": 1, "sparse_csr": 2, "_mkldnn": 3, "sparse_csc": 4, "sparse_bsr": 5, "sparse_bsc": 6,
}  # fmt: skip
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)

_PLAIN: Mapping[type, tuple[str, Callable[[Any], bytes]]] = {
    bool: ("bool", _integer),
    int: ("int", _integer),
    float: ("float", lambda v: _integer(float_bits(v))),
    complex: ("complex", lambda v: _integer(float_bits(v.real)) + _integer(float_bits(v.imag))),
    str: ("text", _text),
    torch.dtype: ("dtype", _dtype),
    torch.layout: ("int", lambda v: _integer(_LAYOUTS[str(v).removeprefix("torch.")])),
    torch.memory_format: ("int", lambda v: _integer(_MEMORY_FORMATS.index(v))),
}
Field = tuple[int, Callable[[ProgramWriter, Any], bytes]]


def _as(encoder: Callable[[Any], bytes]) -> Callable[[ProgramWriter, object], bytes]:
    return lambda writer, value: encoder(value)


_NUMBER, _TEXT, _NUMBERS, _OF_SIZES = _as(_integer), _as(_text), _as(_integers), _as(_sizes)
_DTYPE, _TYPE_IF_ANY, _OF_SIZE = _as(_dtype), _as(_optional_dtype), _as(_size)
_FUNCTION = lambda writer, address: _text(writer.functions[address])
_TENSOR = lambda writer, tensor: _integer(writer.tensors.add(tensor))
_ARGUMENTS = lambda writer, arguments: _list(map(writer.argument, arguments))
_DESTINATIONS = _as(lambda items: _list(map(_destination, items)))

# Of each call of a builder that C++ can make: which of its arguments are written, in which order, and how.
_CALLS: Mapping[str, tuple[Field, ...]] = {
    "input_tensor": ((0, _TEXT), (1, _NUMBER), (2, _DTYPE), (4, _NUMBER)),
    "input_symbol": ((0, _TEXT), (1, _NUMBER)),
    "constant": ((0, _NUMBER), (1, _TENSOR)),
    "value": ((0, _as(_steps)), (1, _NUMBER)),
    "label": ((0, _TEXT),),
    "alloc": ((5, _TEXT), (0, _NUMBER), (1, _OF_SIZES), (2, _OF_SIZES), (3, _DTYPE)),
    "free": ((1, _TEXT), (0, _NUMBER)),
    "view": ((6, _TEXT), (0, _NUMBER), (1, _NUMBER), (2, _OF_SIZES), (3, _OF_SIZES), (4, _OF_SIZE), (5, _TYPE_IF_ANY)),
    "kernel": ((3, _TEXT), (0, _FUNCTION), (1, _NUMBERS), (2, _OF_SIZES)),
    "aten": ((5, _TEXT), (0, _TEXT), (1, _TEXT), (2, _ARGUMENTS), (3, _DESTINATIONS), (4, _NUMBERS)),
    "read_scalar": ((3, _TEXT), (0, _NUMBER), (1, _NUMBER), (2, _NUMBERS)),
    "require": ((1, _TEXT), (0, _NUMBER), (2, _TEXT)),
    "expect": ((3, _TEXT), (0, _NUMBER), (1, _OF_SIZES), (2, _OF_SIZES)),
    "output_none": (),
    "output_slot": ((0, _NUMBER),),
    "output_size": ((0, _OF_SIZE),),
    "output_float": ((0, _as(lambda v: _integer(float_bits(v)))),),
    "output_float_value": ((0, _NUMBER),),
}


# -- tensors and kernels ---------------------------------------------------------------------------


class _Tensors:
    """Tensors of a program; those that share memory share it in the file."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.memories: dict[int, torch.UntypedStorage] = {}  # by what they are in C++, in their order in the file
        self._places: dict[int, int] = {}
        self._known: dict[int, tuple[int, torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """The place of a tensor.

        Raises:
            NotForCpp: it is no plain tensor on the CPU.
        """
        if id(tensor) in self._known:
            return self._known[id(tensor)][0]
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            told = "conjugated or negated lazily" if tensor.is_conj() or tensor.is_neg() else f"on {tensor.device}"
            raise NotForCpp(f"a {tensor.layout} tensor {told} belongs to the program, which holds plain ones on CPUs")
        storage = tensor.untyped_storage()
        self.memories.setdefault(storage._cdata, storage)
        place = self._places.setdefault(storage._cdata, len(self._places))
        where = _integers(tensor.shape) + _integers(tensor.stride()) + _integer(int(tensor.storage_offset()))
        self.rows.append(_integer(place) + _dtype(tensor.dtype) + where)
        self._known[id(tensor)] = len(self.rows) - 1, tensor
        return len(self.rows) - 1

    def write(self, stream: BinaryIO) -> bytes:
        """Writes the memories, and gives where they are."""
        rows = []
        for storage in self.memories.values():
            stream.write(bytes(-stream.tell() % _ALIGNED))
            content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
            rows.append(_integer(stream.tell()) + _integer(content.nbytes) + _integer(zlib.crc32(content)))
            stream.write(content)
        return _list(rows)


def _copied(source: str, folder: Path, options: InductorOptions) -> tuple[str, int]:
    """The library of a translation unit in a folder: its name and CRC-32."""
    name = file_of(source)
    found = built_file(source, DiskCache(options.cache_dir), options.cxx, options.binaries)
    if found is None:  # a cache that could not be written to
        with tempfile.TemporaryDirectory() as work:
            found = Path(work) / name
            compile_library(source, found, options.cxx)
            content = found.read_bytes()
    else:
        content = found.read_bytes()
    _appearing(folder / name, lambda stream: stream.write(content))
    return name, zlib.crc32(content)


def _appearing(path: Path, write: Callable[[BinaryIO], T]) -> T:
    """Writes a file, which appears whole; gives what `write` gives."""
    with appearing(path) as stream:
        return write(stream)


# What a compiler may make instructions of. Others speak of the machine, and differ between virtual ones of a kind.
_INSTRUCTIONS = re.compile(
    r"pni|s?sse\w*|avx\w*|fma4?|f16c|bmi\d|abm|popcnt|movbe|adx|v?aes|sha\w*|gfni|v?pclmulqdq|amx_\w+|xop|tbm"
)


def processor_features() -> list[str]:
    """Those of this processor that kernels may use, as /proc/cpuinfo calls them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    found = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    arm = platform.machine() not in ("x86_64", "AMD64")
    return sorted(feature for feature in found if arm or _INSTRUCTIONS.fullmatch(feature))


# -- the call --------------------------------------------------------------------------------------


def _call(signature: CallSignature, tensors: _Tensors) -> bytes:
    values = ProgramWriter({}, tensors)
    floats = {place for place, m in enumerate(signature.measures) if signature.inputs[_place(m)].kind == "float"}
    pairs = lambda found: _list(_integer(a) + _integer(b) for a, b in found)
    return b"".join(
        (
            _list(map(_input, signature.inputs)),
            _list(map(_measure, signature.measures)),
            _list(_steps(holds) + _text(said) for holds, said in signature.relations.items()),
            pairs(signature.same),
            pairs(signature.different),
            pairs(signature.apart),
            _list(
                _integer(1) + _integer(feed.index) if isinstance(feed, Leaf) else _integer(0) + _steps(feed.program)
                for feed in signature.feeds
                if not isinstance(feed, torch.Tensor)
            ),
            _list(_written(to, tensors) + _integer(output) for to, output in signature.written),
            _integers(signature.met),
            _text(signature.conditions),
            _list(_result(result, values, floats) for result in signature.results),
        )
    )


def _place(measure: Measure) -> int:
    """The input that tells a number. What a kept tensor tells is a constant of programs."""
    assert isinstance(measure.of, Leaf)
    return measure.of.index


def _measure(measure: Measure) -> bytes:
    return _integer(list(MEASURES).index(measure.kind)) + _integer(_place(measure)) + _integer(measure.dim)


def _written(to: Leaf | torch.Tensor, tensors: _Tensors) -> bytes:
    if isinstance(to, Leaf):
        return _integer(1) + _integer(to.index)
    return _integer(0) + _integer(tensors.add(to))


def _input(item: CallInput) -> bytes:
    found = _text(item.name) + _integer(KINDS.index(item.kind))
    if item.kind != "tensor":
        return found
    if item.dtype is None:
        return found + _integer(0)
    return found + _integer(1) + _dtype(item.dtype) + _integers(item.sizes) + _integers(item.strides)


def _result(result: object, values: ProgramWriter, floats: Collection[int]) -> bytes:
    match result:
        case Result(index=index):
            return _integer(0) + _integer(index)
        case Leaf(index=index):
            return _integer(1) + _integer(index)
        case Number(program=steps):
            return _integer(3 if _gives_float(steps, floats) else 2) + _steps(steps)
    if not isinstance(result, (bool, int, float, complex, str, torch.Tensor, type(None))):
        raise NotForCpp(f"a {type(result).__name__} among the results has no form in a file: {result!r}")
    return _integer(4) + values.plain(result)


_TO_FLOATS = frozenset(op.name for op in SCALAR_OPS.values() if op.gives == "float")  # of size programs
_UNARY = frozenset({"neg", "not", "defined", *UNARY_OPS})


def _gives_float(steps: Steps, floats: Collection[int]) -> bool:
    """Whether a size program gives a float, where the measures at `floats` are floats."""
    stack: list[bool] = []
    kept: dict[object, bool] = {}
    for op, argument in steps:
        if op == "keep":
            kept[argument] = stack[-1]
        elif op == "kept":
            stack.append(kept[argument])
        elif op in ("const", "fconst"):
            stack.append(op == "fconst" or isinstance(argument, float))
        elif op == "sym":
            stack.append(argument in floats)
        else:
            del stack[len(stack) - (1 if op in _UNARY else 2) :]
            stack.append(op in _TO_FLOATS)
    return stack[-1]
