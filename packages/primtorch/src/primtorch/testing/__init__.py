"""Samples of every prim, and the kit that tells whether a backend computes them."""

from primtorch.testing.conformance import Report, check_case, conformance, parameters
from primtorch.testing.samples import Case, cases

__all__ = ["Case", "Report", "cases", "check_case", "conformance", "parameters"]
