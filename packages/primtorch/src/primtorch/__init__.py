"""A closed set of primitive operators for PyTorch: decompositions, fake tensors, symbolic sizes."""

import torch

from primtorch.supported import warn_if_untested

warn_if_untested(torch.__version__)  # before the imports that another torch may break

# isort: split
from primtorch.withheld import COLLECTOR

with COLLECTOR.off():  # nearly all that is made here lives as long as the process: it would walk through it for nothing
    from primtorch.decompose import decompositions
    from primtorch.derived import formula_from_rule
    from primtorch.interpret import interpret
    from primtorch.lower import lower
    from primtorch.printing import graph_text
    from primtorch.trace import trace
    from primtorch.verify import verify

__version__ = "0.1.0"
__all__ = ["decompositions", "formula_from_rule", "graph_text", "interpret", "lower", "trace", "verify"]
