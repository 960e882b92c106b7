"""Fake tensors and the shape propagation of every operator."""

from __future__ import annotations

from primtorch.fake.composites import PROGRAMS_FOR_FAKES, PROGRAMS_OVER_SYMBOLS, lstm
from primtorch.fake.table import formula_of, op_key, register_fallback, register_formula
from primtorch.fake.tensor import ASKED, METADATA, FakeMode, FakeTensor, propagate, symbolic_strides, wants_sizes
from primtorch.families import Formula

__all__ = [
    "ASKED",
    "METADATA",
    "PROGRAMS_FOR_FAKES",
    "PROGRAMS_OVER_SYMBOLS",
    "FakeMode",
    "FakeTensor",
    "Formula",
    "formula_of",
    "lstm",
    "op_key",
    "propagate",
    "register_fallback",
    "register_formula",
    "symbolic_strides",
    "wants_sizes",
]
