"""Fake tensors and the shape propagation of every operator."""

from __future__ import annotations

from primtorch.fake.composites import matmul_into
from primtorch.fake.table import formula_of, op_key, register_fallback, register_formula
from primtorch.fake.tensor import FakeMode, FakeTensor, propagate, symbolic_strides, wants_sizes
from primtorch.families import Formula

__all__ = [
    "FakeMode",
    "FakeTensor",
    "Formula",
    "formula_of",
    "matmul_into",
    "op_key",
    "propagate",
    "register_fallback",
    "register_formula",
    "symbolic_strides",
    "wants_sizes",
]
