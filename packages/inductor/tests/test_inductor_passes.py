"""The compiling process leaves out passes of Triton's: binaries are those of all passes, kernels with products keep all."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import filter_gradient_cases
import pytest
import template_cases
import torch
from device_cases import gradients, normalise
from test_inductor_bundles import graph_of, sequence
from triton_kernel_set import small_cases

import primtorch
from torchinductor import InductorOptions
from torchinductor.codegen.base import generated
from torchinductor.ir import Bundle
from torchinductor.scheduling.bundles import bundle
from torchinductor.source import planned_operations

pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.nvidia import compiler as nvidia_compiler  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from torchinductor.codegen.triton import worker  # noqa: E402
from torchinductor.codegen.triton.bundles import key_of, write_bundle  # noqa: E402
from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.split import split_reductions  # noqa: E402
from torchinductor.codegen.triton.writer import TritonSource, write  # noqa: E402

BF16 = torch.bfloat16
OPTIONS = InductorOptions(templates=True)
PLAIN = {"builtin.module", "tt.func", "tt.load", "arith.addf", "tt.store", "tt.return"}


def of_program(program, *inputs: torch.Tensor) -> list[TritonSource]:  # type: ignore[no-untyped-def]
    """The sources that a program becomes on a GPU."""
    operations = planned_operations(primtorch.lower(primtorch.trace(program, *inputs)), "cuda", OPTIONS)
    return [generated(operation, OPTIONS).meta for operation in operations]  # type: ignore[arg-type, misc]


def bundled() -> TritonSource:
    kernels = sequence(3)
    return write_bundle(next(op for op in bundle(graph_of(kernels), kernels, key_of) if isinstance(op, Bundle)))


@cache
def loops() -> list[TritonSource]:
    """Flat kernels, rows, tiles, reductions in one tile and in several, scans."""
    return [write(part) for case in small_cases() for kernel in case.kernels for part in split_reductions(kernel)]


@cache
def templates() -> list[TritonSource]:
    """Matrix products, and what is joined to them."""
    cases = [template_cases.CASES[name] for name in ("bias, gelu, residual", "the same in halves")]
    return [source for case in cases for source in of_program(case.program, *case.inputs()) if "tl.dot" in source.text]


@cache
def others() -> list[TritonSource]:
    """Sums of columns beside those of rows, a depthwise filter's gradient, kernels that share a launch."""
    norm = [torch.empty(shape, dtype=BF16) for shape in ((4096, 512), (512,), (512,), (4096, 512))]
    filters = filter_gradient_cases.CASES["three by three"]
    return [*of_program(gradients(normalise), *norm), *of_program(filters.program, *filters.inputs()), bundled()]


_BY_TRITON = """
import json, sys
from pathlib import Path
from triton._C.libtriton import llvm
from torchinductor.codegen.triton import worker
whole = llvm.link_extern_libs
def link(module, libraries):
    whole(module, [str(Path(worker.__file__).with_name("approximations.ll"))])
    whole(module, libraries)
llvm.link_extern_libs = link
worker.driver = lambda: worker.by_triton
for line in sys.stdin:
    worker.compile_source(json.loads(line))
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_binaries_are_those_of_all_passes(arch: int, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    checked = next(source for source in loops() if "tl.device_assert" in source.text)
    sources = [checked, *random.Random(seed).sample(loops(), 8), *templates(), *others()]
    compiler = TritonCompiler(arch, tmp_path / "ours", workers=1)
    keys = [binary.key for binary in compiler.compile(sources)]
    compiler.close()
    whole = tmp_path / "whole"
    whole.mkdir()
    requests = [
        compiler._request(key, source) | {"target": str(whole / key), "source": str(whole / f"{key}.py")}
        for key, source in zip(keys, sources, strict=True)
    ]
    run_python(_BY_TRITON, requests, tmp_path)
    for key, source in zip(keys, sources, strict=True):
        for suffix in ("cubin", "json"):
            files = [folder / f"{key}.{suffix}" for folder in (compiler.folder, whole)]
            assert files[0].read_bytes() == files[1].read_bytes(), f"{suffix} of {source.text}"


def run_python(text: str, requests: Sequence[object], folder: Path) -> str:
    """What a process prints that is given requests as the compiling one is."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DISABLE_LINE_INFO": "1"}
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    ran = subprocess.run([sys.executable, "-c", text], input=lines, text=True, check=True, env=environment, stdout=-1)
    return ran.stdout


_PIPELINES = """
import json, sys
from torchinductor.codegen.triton import worker
worker.choose_passes()
whole = worker.Manager.run
def run(manager, module, name):
    whole(manager, module, name)
    print(manager.get_pipeline_str())
worker.Manager.run = run
for line in sys.stdin:
    worker.compile_source(json.loads(line))
    print("end")
"""


def test_only_kernels_with_products_run_their_passes(tmp_path: Path) -> None:
    compiler = TritonCompiler(90, tmp_path, workers=1)
    requests = [compiler._request(source.name, source) for source in (loops()[0], templates()[0])]
    flat, product = run_python(_PIPELINES, requests, tmp_path).split("end\n")[:2]
    for name in ("tritongpu-accelerate-matmul", "tritongpu-optimize-dot-operands", "tritongpu-pipeline"):
        assert name in product and name not in flat
    assert "tritongpu-coalesce" in flat and flat.count("canonicalize") < product.count("canonicalize")


NAMES = [*worker.CONCERNS, "ttgpuir.coalesce", *worker.TIDY, "ttgpuir.reorder_instructions", *worker.TIDY]


@pytest.mark.parametrize("operation", ["tt.dot", "tt.descriptor_load", "ttng.tc_gen5_mma", "tt.call", "new.operation"])
def test_what_is_not_known_keeps_all_passes(operation: str) -> None:
    assert worker.chosen(NAMES, PLAIN | {operation}) == list(range(len(NAMES)))


def test_passes_run_where_there_is_what_they_are_about() -> None:
    def left(*operations: str) -> list[str]:
        return [NAMES[place] for place in worker.chosen(NAMES, PLAIN | {*operations})]

    straight = ["ttgpuir.coalesce", "ttgpuir.reorder_instructions", *worker.TIDY]
    assert left() == straight
    about = ["ttgpuir.combine_tensor_select_and_if", "convert.scf_to_cf"]
    assert left("scf.if", "scf.yield") == [*about, *straight]
    looping = [name for name, operations in worker.CONCERNS.items() if "scf.for" in operations]
    assert left("scf.for") == [*looping, "ttgpuir.coalesce", *worker.TIDY, *straight[1:]]


def test_what_follows_itself_runs_once() -> None:
    names = ["ttgpuir.remove_layout_conversions", "ttgpuir.accelerate_matmul", "ttgpuir.remove_layout_conversions"]
    assert worker.chosen(names, PLAIN) == [0]
    assert worker.chosen(names, PLAIN | {"tt.dot"}) == [0, 1, 2]


def test_another_triton_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.driver() is worker.by_stages
    with monkeypatch.context() as patch:
        patch.setattr(knobs.compilation, "dump_ir", True)
        assert worker.driver() is worker.by_triton
    with monkeypatch.context() as patch:
        patch.setattr(ASTSource, "make_ir", lambda self, options: None)
        assert worker.driver() is worker.by_triton
    with monkeypatch.context() as patch:
        patch.setattr(ir, "module", object)
        worker.choose_passes()
        assert isinstance(nvidia_compiler.ir, ModuleType)


def test_where_a_function_ends() -> None:
    text = "@jit\ndef one(a,\n    b\n):\n    # a\n\n    return a\n\n\n@jit\ndef two():\n    pass\n"
    lines = text.splitlines(keepends=True)
    assert worker.block(lines, inspect.getblock)[:7] == inspect.getblock(lines) == lines[:7]
    assert worker.block(lines[9:], inspect.getblock) == lines[9:]
    assert worker.block(["    def f():\n", "        pass\n", "x\n"], inspect.getblock) == [
        "    def f():\n",
        "        pass\n",
    ]
