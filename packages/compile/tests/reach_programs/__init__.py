"""PyTorch's language, a program for each part of it: what capture takes whole, and what breaks it.

A program is a function of float64 tensors whose gradients are asked for where it says so. `tools/reach.py` runs them
here and under torch.compile, and writes docs/reach.md. A module for each theme adds its programs to the table.
"""

from . import (  # noqa: F401, I001  (the order of the page)
    higher_order,
    derivatives,
    arrays,
    subclasses,
    attention,
    data,
    iteration,
    classes,
    contexts,
    random_numbers,
    quantised,
)
from .record import PARTS, Part

__all__ = ["PARTS", "Part"]
