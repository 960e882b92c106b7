"""The closed set of primitive operators: every prim is an attribute of this module, and an entry of `PRIMS`.

Conventions: elementwise operands are tensors of one shape and one dtype, or Python numbers; nothing promotes or
broadcasts; dims are non-negative; reduced-precision arithmetic is spelt out as conversions around float32.
"""

from primtorch.prims import elementwise, indexing, opaque, reduction, tensors, window
from primtorch.prims.elementwise import *  # noqa: F403
from primtorch.prims.indexing import *  # noqa: F403
from primtorch.prims.opaque import *  # noqa: F403
from primtorch.prims.record import Prim as Prim
from primtorch.prims.reduction import *  # noqa: F403
from primtorch.prims.tensors import *  # noqa: F403
from primtorch.prims.window import *  # noqa: F403

SET_VERSION = 5

PRIMS: dict[str, Prim] = {
    prim.name: prim
    for module in (elementwise, tensors, reduction, indexing, window, opaque)
    for prim in vars(module).values()
    if isinstance(prim, Prim)
}
