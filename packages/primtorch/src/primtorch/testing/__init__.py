"""Samples of every prim, the kit that tells whether a backend computes them, and judges of rounded results."""

from primtorch.testing.accuracy import assert_as_accurate, double_precision
from primtorch.testing.conformance import Report, check_case, conformance, parameters
from primtorch.testing.samples import Case, cases

__all__ = [
    "Case",
    "Report",
    "assert_as_accurate",
    "cases",
    "check_case",
    "conformance",
    "double_precision",
    "parameters",
]
