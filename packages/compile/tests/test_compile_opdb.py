"""A slice of torch.testing's operator database through the default back end; `tools/compile_opdb.py` runs all of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

TOOL = Path(__file__).resolve().parents[3] / "tools" / "compile_opdb.py"
FEW = ("addcmul", "amax", "logcumsumexp", "slice_scatter", "floor_divide")
OF_WRITES_AND_LAYOUTS = ("linalg.matrix_rank", "polygamma_n_1", "logit", "chalf", "householder_product", "lu_unpack")
OF_LISTS_AND_SYMBOLS = ("split_with_sizes_copy", "unbind_copy", "expand_as", "sinc", "addmv", "addr")
OF_EMPTY_INDICES_AND_FIXED_SYMBOLS = (
    "gather",
    "_upsample_bilinear2d_aa",
    "trace",
    "lu",
    "masked.sum",
    "ihfftn",
    "norm_legit",
)
MORE = (
    "add",
    "sub",
    "mul",
    "div",
    "cum",
    "max",
    "min",
    "scatter",
    "index",
    "stack",
    "norm",
    "softmax",
    "where",
    "view",
)


BORDERS = ("nn.functional.pad.reflect", "nn.functional.pad.replicate")


def run(folder: Path, samples: int, only: tuple[str, ...], dtypes: tuple[str, ...], *kinds: str) -> None:
    state = folder / "state.jsonl"
    arguments = ["--samples", str(samples), "--only", *only, "--dtypes", *dtypes, "--state", str(state)]
    subprocess.run([sys.executable, str(TOOL), *arguments], check=True, capture_output=True, cwd=folder)
    results = [json.loads(line) for line in state.read_text().splitlines()]
    assert sum(found.get("right", 0) for r in results for found in r["counts"].values()) > 10
    bad = [(r["name"], *failure) for r in results for failure in r["failures"] if failure[0].startswith(kinds)]
    assert not bad, bad


def test_a_few_operators(tmp_path: Path) -> None:
    run(tmp_path, 1, FEW, ("float32",), "wrong")


def test_lists_of_results_and_writes_with_symbols(tmp_path: Path) -> None:
    run(tmp_path, 1, OF_LISTS_AND_SYMBOLS, ("float32",), "wrong", "refused", "listed", "right across")


def test_writes_and_the_layout_of_library_results(tmp_path: Path) -> None:
    run(tmp_path, 1, OF_WRITES_AND_LAYOUTS, ("float32",), "wrong", "refused", "listed", "right across")


def test_empty_indices_and_symbols_that_guards_fix(tmp_path: Path) -> None:
    run(tmp_path, 3, OF_EMPTY_INDICES_AND_FIXED_SYMBOLS, ("float32",), "wrong", "refused", "listed", "right across")


def test_kernels_for_a_gpu_in_the_interpreter() -> None:
    """Sizes that are symbols stand in other texts of indices there than in C++."""
    pytest.importorskip("triton")
    seed = random.randrange(1 << 30)
    names = {opdb_name(op) for op in op_db if torch.float32 in op.supported_dtypes("cpu")}
    drawn = ["fft.fftshift", "roll", *BORDERS, *random.Random(seed).sample(sorted(names), 12)]
    worker = [sys.executable, str(Path(__file__).with_name("interpreted_opdb.py")), *drawn]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(worker, check=True, capture_output=True, text=True, env=environment)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["name"] for r in results} >= {"fft.fftshift", "roll", *BORDERS}
    assert not [(r["name"], *f) for r in results for f in r["failures"] if f[0].startswith("wrong")], f"seed {seed}"


def opdb_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@pytest.mark.slow
def test_more_operators(tmp_path: Path) -> None:
    run(tmp_path, 3, MORE, (), "wrong")


JUDGED = """
import types
import torch
import aot_opdb

number = torch.tensor(0.37, dtype=torch.bfloat16, requires_grad=True)
sample = types.SimpleNamespace(input=number, args=(), kwargs={})
wide = torch.tensor([0.3, 0.4, -0.5], dtype=torch.bfloat16, requires_grad=True)
vector = types.SimpleNamespace(input=wide, args=(), kwargs={})


def program(x):
    return x / torch.linalg.vector_norm(x)


def gradient_off_by(sample, off):
    args, kwargs, leaves = aot_opdb.fresh(sample)
    outputs, (gradient,) = aot_opdb.observe(program, args, kwargs, leaves)
    return (outputs, [gradient]), (outputs, [gradient + off])


aot_opdb.judged(program, sample, *gradient_off_by(sample, 0.0059))
for given, off in ((sample, 0.25), (vector, torch.tensor([0.0, 0.25, 0.0]))):
    try:
        aot_opdb.judged(program, given, *gradient_off_by(given, off))
    except AssertionError as error:
        print(error)
"""


def test_what_cancels_to_nothing_is_judged_by_other_rounding_errors_of_eager() -> None:
    """The derivative of a number over its norm is 0, of terms that are not: eager's is exact by luck."""
    done = subprocess.run(
        [sys.executable, "-c", JUDGED], check=True, capture_output=True, text=True, cwd=TOOL.parent, timeout=120
    )
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["gradients", "gradients"]
