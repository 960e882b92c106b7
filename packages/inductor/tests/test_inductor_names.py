"""Names of generated functions: what is computed, one name for one text, in every graph."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

import primtorch
from primtorch.symbolic.expr import IntExpr
from torchinductor import InductorOptions, compile_graph, generate_source
from torchinductor.codegen.base import generated
from torchinductor.codegen.naming import described, name_of
from torchinductor.codegen.triton.compiler import TritonCompiler
from torchinductor.indexing import number, variable
from torchinductor.ir import Recorder
from torchinductor.ops import ELEMENTWISE
from torchinductor.source import planned_operations

X, Y = torch.linspace(-1, 1, 64 * 48).reshape(64, 48), torch.ones(64, 48)
PLACES = torch.arange(64) % 7

PROGRAMS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], str]] = {
    "softmax": (lambda x: x.softmax(-1), (X,), r"amax_sub_exp_sum|amax_exp_sum|amax_sum_exp"),
    "layer_norm": (lambda x: F.layer_norm(x, (48,)), (X,), r"sum_.*rsqrt|moments"),
    "gelu": (lambda x: F.gelu(x), (X,), "erf"),
    "sum": (lambda x: x.sum(-1), (X,), "sum"),
    "argmax": (lambda x: x.argmax(-1), (X,), "argmax"),
    "cumsum": (lambda x: x.cumsum(-1), (X,), "cumsum"),
    "gather": (lambda x, at: x[at] * 2, (X, PLACES), "gather"),
    "scatter": (lambda x, y, at: x.index_add(0, at, y), (X, Y, PLACES), "scatter_add"),
    "relu_backward": (lambda x, y: torch.where(x <= 0, 0.0, y), (X, Y), "where"),
    "compare": (lambda x, y: x <= y, (X, Y), "le"),
    "cast": (lambda x: x.to(torch.float64), (X,), "cast"),
    "copy": (lambda x: x.t().contiguous(), (X,), "copy"),
    "dropout": (lambda x: F.dropout(x, 0.5, True), (X,), "random"),
}
"""A program, its inputs, and what the name of one of its kernels begins with, or has in it."""


def graph_of(program: Callable[..., object], *inputs: object) -> fx.GraphModule:
    return primtorch.lower(primtorch.trace(program, *inputs))


def triton_names(gm: fx.GraphModule) -> dict[str, str]:
    """The text of each kernel for CUDA by its function's name."""
    texts = generate_source(gm, "cuda").values()
    return {re.findall(r"^def (\w+)\(", text, re.M)[-1]: text for text in texts}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_name_tells_what_is_computed(name: str) -> None:
    program, inputs, wanted = PROGRAMS[name]
    gm = graph_of(program, *inputs)
    made = triton_names(gm)
    parts = [
        part for part in compile_graph(gm, inputs, InductorOptions(cache_dir=None)).program.parts if part.generated
    ]
    names = [part.function for part in parts]
    for found in (*made, *names):
        assert found.isidentifier() and found.isascii() and len(found) <= 60
    for function in (made, names):
        assert any(re.search(rf"({wanted})_", found) for found in function), function
    assert all(re.search(r"_(flat|rows|tiled|reduction|bundle)_[0-9a-f]{8}$", found) for found in made)


def blocks(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two equal blocks, that products keep apart, and a third that differs in one number."""
    for _ in range(2):
        x = (x @ y).softmax(-1) * 2
    return x, (x @ y).softmax(-1) * 3


def test_kernels_of_equal_text_are_one_function() -> None:
    x = torch.ones(48, 48)
    compiled = compile_graph(graph_of(blocks, x, x), (x, x), InductorOptions(cache_dir=None))
    first, second, third = [part.function for part in compiled.program.parts if part.generated]
    assert first == second != third and len(set(compiled.program.kernels)) == len(compiled.program.kernels) == 2
    assert first.rpartition("_")[0] == third.rpartition("_")[0]
    (text,) = compiled.sources.values()
    assert sorted(re.findall(r"^extern \"C\" int (\w+)\(", text, re.M)) == sorted({first, third})


def test_other_graphs_give_equal_kernels_equal_names() -> None:
    """Which is what makes a cache on disk find them."""
    alone = triton_names(graph_of(lambda x, y: F.gelu(x) * y, X, Y))
    among = triton_names(graph_of(lambda z, b, a: (z.softmax(-1), F.gelu(a) * b), X[0], Y, X))
    assert alone.items() <= among.items() and len(among) > len(alone)


def test_libraries_export_the_names(tmp_path: Path) -> None:
    options = InductorOptions(cache_dir=str(tmp_path))
    program = compile_graph(graph_of(lambda x: x.softmax(-1), X), (X,), options).program
    (part,) = (part for part in program.parts if part.generated)
    (file,) = tmp_path.rglob("*.so")
    assert ctypes.cast(getattr(ctypes.CDLL(str(file)), part.function), ctypes.c_void_p).value == program.kernels[0]


def test_binaries_have_the_names() -> None:
    pytest.importorskip("triton")
    graph = graph_of(lambda x: x.softmax(-1), X)
    sources = [generated(o, InductorOptions()).meta for o in planned_operations(graph, "cuda")]
    compiler = TritonCompiler(90)
    try:
        for source, binary in zip(sources, compiler.compile(sources), strict=True):
            assert binary.record["name"] == source.name and source.name.encode() in binary.code
    finally:
        compiler.close()


def body_of(ops: list[str], index: IntExpr) -> Recorder:
    recorder = Recorder({"i0": number(8)})
    value = recorder.load("a", index, torch.float32)
    for op in ops:
        value = recorder.apply(op, *[value] * ELEMENTWISE[op].arity)
    recorder.store("b", index, value)
    return recorder


def test_names_are_short() -> None:
    recorder = body_of(
        sorted((n for n, op in ELEMENTWISE.items() if op.result == "same"), key=len)[-9:], variable("i0")
    )
    recorder.reduce("moments", "k", 0)
    recorder.store("c", variable("i0"), 0, "amax")
    title = described([recorder.body()], "reduction")
    name = name_of(title, "text")
    assert len(name) <= 60 and title.endswith("_reduction") and name != name_of(title, "other")
    assert described([]) == "copy" and described([], "matmul", otherwise="") == "matmul"
