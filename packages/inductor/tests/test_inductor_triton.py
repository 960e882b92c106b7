"""Generated Triton kernels: values in Triton's interpreter, binaries for two GPU generations without a GPU, the cache."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import replies
from triton_kernel_set import CUDA, Builder, Case, large_cases, small_cases

from primtorch.symbolic.expr import symbol
from torchinductor.codegen.triton.backend import TritonLauncher
from torchinductor.codegen.triton.compiler import TritonCompiler
from torchinductor.codegen.triton.expressions import Unsupported
from torchinductor.codegen.triton.plan import Layout, planned
from torchinductor.codegen.triton.split import split_reductions
from torchinductor.codegen.triton.writer import TritonSource, write
from torchinductor.errors import BuildFailed
from torchinductor.indexing import contiguous_strides, number, variable
from torchinductor.ir import Axis, Buffer, Kernel, Recorder, Stage

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> TritonCompiler:
    return TritonCompiler(90, tmp_path_factory.mktemp("triton"), workers=2)


def test_values_in_the_interpreter() -> None:
    seed = str(random.randrange(10**6))
    found = replies("triton_interpret_worker.py", seed)
    assert [r["case"] for r in found] == [c.name for c in small_cases()]
    for reply in found:
        limit = 6e-3 if reply["case"] == "swiglu" else 2e-6  # swiglu runs in bfloat16, which the interpreter truncates
        assert reply.get("error", 1.0) <= limit, f"seed {seed}: {reply}"


def test_every_kernel_compiles_for_sm90(compiler: TritonCompiler) -> None:
    sources = [write(planned(k)) for case in (*small_cases(), *large_cases()) for k in case.kernels]
    binaries = compiler.compile(sources)
    assert all(b.code[:4] == b"\x7fELF" and not b.record["scratch_bytes"] for b in binaries)
    again = compiler.compile(sources)
    assert all(b.hit for b in again) and [b.key for b in again] == [b.key for b in binaries]
    for source, binary in zip(sources, binaries, strict=True):
        launcher = TritonLauncher(source, binary)
        assert len(launcher.handle.parameters) == len(source.buffers) + len(source.symbols)


def test_reductions_compile_for_sm80(tmp_path: Path) -> None:
    sources = [write(planned(k)) for case in small_cases() for k in case.kernels if k.inner][:6]
    compiler = TritonCompiler(80, tmp_path, workers=1)
    assert len({b.key for b in compiler.compile(sources)}) == len({s.text for s in sources})
    compiler.close()


def symbolic_kernel(op: str = "add", dtype: torch.dtype = torch.float32) -> Kernel:
    """out[i, j] = op(x[i, j], w[j]) of symbolic sizes."""
    sizes = (symbol("s0"), symbol("s1"))
    buffers = {n: Buffer(n, dtype, CUDA, sizes, contiguous_strides(sizes)) for n in ("x", "out")}
    buffers["w"] = Buffer("w", dtype, CUDA, sizes[1:], (number(1),))
    axes = (Axis("i0", sizes[0]), Axis("i1", sizes[1]))
    recorder = Recorder({a.name: a.size for a in axes})
    index = variable("i0") * sizes[1] + variable("i1")
    value = recorder.apply(op, recorder.load("x", index, dtype), recorder.load("w", variable("i1"), dtype))
    recorder.store("out", index, value)
    return Kernel("k", CUDA, axes, (Stage("outer", recorder.body()),), buffers)


def test_symbolic_sizes_are_arguments(compiler: TritonCompiler) -> None:
    source = write(planned(symbolic_kernel()))
    assert source.symbols == ("s0", "s1") and source.signature[-2:] == (("s0", "i64"), ("s1", "i64"))
    assert source.grid[0].evaluate({"s0": 3, "s1": 1000}) == 3
    compiler.compile([source])


def test_what_triton_lacks_is_refused() -> None:
    with pytest.raises(Unsupported, match="nextafter"):
        write(planned(symbolic_kernel("nextafter", torch.int64)))


def test_integer_loops_compile(compiler: TritonCompiler) -> None:
    compiler.compile(
        [
            write(planned(symbolic_kernel(op, kind)))
            for op in ("gcd", "lcm", "pow")
            for kind in (torch.int64, torch.uint8)
        ]
    )


_AS_TRITON_LINKS = """
import json, sys
from torchinductor.codegen.triton.worker import compile_source
compile_source(json.load(sys.stdin))
"""


@pytest.mark.parametrize(
    "value",
    [
        "m.fast_expf(x)",
        "m.fast_dividef(x, 1 + m.fast_expf(-x))",
        "tl.rsqrt(x) + m.fast_expf(x)",
        "tl.rsqrt(x) * m.erf(x)",
    ],
)
def test_functions_that_are_one_instruction_are_libdevice_s(
    compiler: TritonCompiler, tmp_path: Path, value: str
) -> None:
    text = f"""import triton
import triton.language as tl
from triton.language.extra import libdevice as m


@triton.jit
def kernel(p0, p1):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    x = tl.load(p0 + i)
    tl.store(p1 + i, {value})
"""
    signature = (("p0", "*fp32"), ("p1", "*fp32"))
    source = TritonSource("kernel", text, signature, 4, 1, (number(4), number(1), number(1)), ("a", "b"), (), (1,))
    compiler.compile([source])
    request = compiler._request("whole", source) | {"target": str(tmp_path / "whole"), "source": str(tmp_path / "k.py")}
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _AS_TRITON_LINKS]
    subprocess.run(command, input=json.dumps(request), text=True, check=True, env=environment)
    ours, whole = (
        Counter(re.findall(r"^\t(?:@%p\d+ )?([a-z][\w.]*)", file.read_text(), re.M))
        for file in (compiler.folder / f"{compiler.key(source)}.ptx", tmp_path / "whole.ptx")
    )
    assert ours == whole and ours.keys() & {"ex2.approx.ftz.f32", "rsqrt.approx.ftz.f32"}


def test_a_refused_kernel_shows_its_source(compiler: TritonCompiler) -> None:
    source = write(planned(symbolic_kernel()))
    broken = type(source)(
        **{f: getattr(source, f) for f in source.__slots__} | {"text": source.text + "    nonsense()\n"}
    )
    with pytest.raises(BuildFailed, match="nonsense"):
        compiler.compile([broken])
    compiler.compile([source])  # the worker lives on


def layouts(cases: list[Case]) -> dict[str, tuple[str, bool]]:
    plans = {c.name: planned(c.kernels[0]).laid_out(Layout) for c in cases}
    return {name: (p.shape, p.persistent) for name, p in plans.items()}


def test_layouts() -> None:
    found = layouts(large_cases())
    assert found["pointwise_chain"] == ("flat", False)
    assert found["bias_gelu_residual"] == ("rows", False)
    assert found["transpose_add"] == ("tiled", False)
    assert found["softmax_4096"] == ("reduction", True)
    assert found["cross_entropy"] == ("reduction", False)
    assert planned(large_cases()[0].kernels[0]).axes[0].size.as_int() == 16384 * 4096  # merged into one axis


def test_offsets_are_wide_only_when_needed() -> None:
    assert not planned(small_cases()[0].kernels[0]).laid_out(Layout).wide
    assert planned(symbolic_kernel()).laid_out(Layout).wide


def loops(name: str) -> list[int]:
    """How many loops each kernel of a case has, after splitting."""
    case = next(case for case in (*large_cases(), *small_cases()) if case.name == name)
    return [write(k).text.count("for r0 in") for kernel in case.kernels for k in split_reductions(kernel)]


def test_a_sum_is_cut_along_several_loops_where_each_is_short() -> None:
    (kernel,) = next(case.kernels for case in small_cases() if case.name == "window_moments")
    first = split_reductions(kernel)[0]
    assert first.name.endswith("_0") and len(first.inner) == 3  # the first loop is taken apart, the next one cut


def test_a_looped_softmax_and_a_variance_read_their_values_once() -> None:
    assert loops("cross_entropy")[0] == 1
    assert len(loops("batch_norm_relu_train")) == 3  # chunks' moments, their joining, the normalising
    assert len(loops("full_mean_var")) == 2
    (kernel,) = next(case.kernels for case in small_cases() if case.name == "row_moments")
    assert write(planned(kernel)).text.count("for r0 in") == 1  # what is stored between them keeps none apart


def test_dropout_uses_every_word_of_a_block() -> None:
    case = next(c for c in large_cases() if c.name == "dropout_add")
    assert "_philox_line(t" in write(planned(case.kernels[0])).text


@pytest.mark.parametrize(
    ("name", "before", "waits"),
    [
        ("pointwise_chain", "x", 0),  # one thread loads an element and stores what it makes of it
        ("softmax_37", "x", 1),  # the passes before load it too
        ("softmax_20000", "x", 1),
    ],
)
def test_threads_wait_before_they_store_over_what_others_load(
    compiler: TritonCompiler, name: str, before: str, waits: int
) -> None:
    case = next(c for c in small_cases() if c.name == name)
    (kernel,) = case.kernels
    assert "tl.debug_barrier()" not in write(planned(kernel)).text
    source = write(planned(replace(kernel, in_place=(("out", before),))))
    compiler.compile([source])
    text = source.text
    assert text.count("tl.debug_barrier()") == waits
    assert waits == 0 or text.index("tl.debug_barrier()") < text.index("tl.store(")
    in_loops = [line for line in text.splitlines() if line.startswith("        tl.debug_barrier")]
    assert not in_loops


@pytest.mark.parametrize(("size", "uses", "waits"), [(4096, True, 0), (4096, False, 1), (8, True, 0), (8, False, 1)])
def test_a_store_waits_for_loads_that_it_does_not_come_of(size: int, uses: bool, waits: int) -> None:
    """out = y (+ x), kept = sin(x), and out lies where x does: another thread may still have to load x."""
    b = Builder()
    for name in ("x", "y", "out", "kept"):
        b.buffer(name, torch.float32, size)

    def body(r: Recorder) -> None:
        x, y = b.load(r, "x", "i0"), b.load(r, "y", "i0")
        b.store(r, "kept", r.apply("sin", x), "i0")
        b.store(r, "out", r.apply("add", x, y) if uses else y, "i0")

    b.kernel({"i0": (size, False)}, ("outer", body))
    (kernel,) = b.kernels
    assert write(planned(replace(kernel, in_place=(("out", "x"),)))).text.count("tl.debug_barrier()") == waits


def test_a_store_of_rows_waits_for_the_threads_that_share_a_row() -> None:
    """total = row + sum(x), where total lies where row does: each thread of a row's loads it."""
    b = Builder()
    b.buffer("x", torch.float32, 16, 200)
    b.buffer("row", torch.float32, 16)
    b.buffer("total", torch.float32, 16)

    def add(r: Recorder) -> None:
        b.store(r, "total", r.apply("add", b.load(r, "row", "i0"), r.carried("s", torch.float32)), "i0")

    b.kernel(
        {"i0": (16, False), "i1": (200, True)},
        ("inner", lambda r: r.reduce("sum", "s", b.load(r, "x", "i0", "i1"))),
        ("outer", add),
    )
    lines = write(planned(replace(b.kernels[0], in_place=(("total", "row"),)))).text.splitlines()
    assert "tl.debug_barrier()" in lines[-2] and "tl.store(" in lines[-1]
