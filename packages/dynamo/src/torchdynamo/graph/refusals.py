"""Which of the errors that a program handles are worded by what stands in for its tensors."""

from __future__ import annotations

import os

import primtorch
from primtorch.fake import FakeTensor

_FORMULAS = os.path.dirname(primtorch.__file__) + os.sep


def is_worded_here(error: BaseException) -> bool:
    """Whether an error has its type from eager, but its words from a formula of shapes, or the name of a fake tensor.

    Shapes are refused where eager refuses them; which sizes the text names, and how, is for eager to say.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    by_formula = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_FORMULAS)
    return by_formula or any(isinstance(part, str) and FakeTensor.__name__ in part for part in error.args)
