"""The backward reads a result as the caller gets it.

Eager's results have strides of their own: a softmax of a channels-last image is by rows. In prims that is a copy at the
graph's end of a value that lies as its operands do. Where the backward reads that value, the forward would keep it
beside the copy, and the backward would read it across its gradients, which lie as the result does. A result that
eager keeps for its backward is kept here too: nobody may write to it.
"""

from __future__ import annotations

from torch import fx

from aotautograd.partitioners import is_backward
from aotautograd.passes import output_values
from aotautograd.schemas import JointGraph
from primtorch import prims


def read_returned_copies(joint: JointGraph) -> None:
    """Gives the backward of a joint graph of prims, in place, the copies that the caller gets of what it reads."""
    kept = joint.metadata.kept
    results = output_values(joint.module.graph)[: joint.num_forward_outputs]
    for place, (result, info) in enumerate(zip(results, joint.metadata.forward_outputs, strict=True)):
        if kept is None or place not in kept.outputs or info.kind != "value" or not _is_copy(result):
            continue
        assert isinstance(result, fx.Node)
        source = result.args[0]
        if not isinstance(source, fx.Node) or source.op != "call_function" or source in results:
            continue
        readers = [user for user in source.users if is_backward(user)]
        if readers:
            source.append(result)
        for reader in readers:
            reader.replace_input_with(source, result)


def _is_copy(result: object) -> bool:
    return isinstance(result, fx.Node) and result.target is prims.copy_strided and not is_backward(result)
