"""Loop IR: buffers, recorded bodies, and kernels made of stages over one iteration space.

A `Kernel` iterates over `axes`. Axes that are not `inner` are its outer, parallel loops; the inner ones are looped over
inside each outer iteration (a reduction's or a scan's loops). Its `stages` run in order, each for one outer iteration:

* an "outer" stage runs its body once (pointwise over the outer axes);
* an "inner" stage runs its body for every point of the inner axes; `reduce` in it accumulates, and the result is
  `carried` to the stages after it;
* a "columns" stage runs its body for every point of the inner axes, once for all outer iterations (or for each part of
  them, where an axis says into how many they are dealt). What an inner stage accumulates with `reduce_column` over the
  outer iterations is carried to it.

So softmax is: inner(reduce amax), inner(reduce sum of exp), inner(store); layer norm the same with outer stages for
what is stored a row. A pointwise kernel is one outer stage. Loads in a stage see the stores of the stages before it in
the same outer iteration, and of the same stage at the same point.

A `Bundle` is several planned kernels that one launch runs beside each other.

A `Template` is a kernel of a form that a back end makes by a design of its own: a matrix product, say.
"""

from primtorch.promotion import REDUCED_PRECISION, compute_dtype
from torchinductor.ir.attention import Attention
from torchinductor.ir.body import OF_PLACES, Body, Recorder
from torchinductor.ir.bundle import Bundle
from torchinductor.ir.by_form import by_form, kernels_by_form
from torchinductor.ir.filter_gradient import FilterGradient
from torchinductor.ir.kernel import Axis, Buffer, Kernel, Stage, StageKind, space, space_index
from torchinductor.ir.operations import (
    Apply,
    Bitcast,
    Carried,
    Constant,
    IndexExpr,
    Indirect,
    Load,
    Op,
    Part,
    RandomBits,
    Reduce,
    ReduceColumn,
    Replay,
    Require,
    Scan,
    Store,
    ToDtype,
    closure_of,
    slice_of,
)
from torchinductor.ir.template import Operand, Region, Template, TemplateKind, loops_of
from torchinductor.ir.verify import verify, verify_kernels

__all__ = [
    "OF_PLACES",
    "REDUCED_PRECISION",
    "Apply",
    "Attention",
    "Axis",
    "Bitcast",
    "Body",
    "Buffer",
    "Bundle",
    "Carried",
    "Constant",
    "FilterGradient",
    "IndexExpr",
    "Indirect",
    "Kernel",
    "Load",
    "Op",
    "Operand",
    "Part",
    "RandomBits",
    "Recorder",
    "Reduce",
    "ReduceColumn",
    "Region",
    "Replay",
    "Require",
    "Scan",
    "Stage",
    "StageKind",
    "Store",
    "Template",
    "TemplateKind",
    "ToDtype",
    "by_form",
    "closure_of",
    "compute_dtype",
    "kernels_by_form",
    "loops_of",
    "slice_of",
    "space",
    "space_index",
    "verify",
    "verify_kernels",
]
