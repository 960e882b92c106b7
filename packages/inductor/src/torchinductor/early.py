"""What of a program can be compiled before it is cut in two and fused: templates that nothing around them changes.

Builders in other processes have nothing to do until the forward is lowered, which for a large network is as long as
they work then. Gradients of depthwise filters are the kernels that take them longest, and the backward's last ones.
Their text follows from one node of the joint graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from operator import getitem

from torch import fx

from primtorch import prims
from torchinductor.indexing import exprs

_FILTERS = (False, True, False)  # the results of `convolution_backward` that are asked for


def filter_gradients(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A graph for each form of convolution in a joint graph whose filters have a gradient: it computes that alone, of
    inputs that lie in memory as the node's operands do. Convolutions of one group are left out, which no template
    makes."""
    seen: set[Hashable] = set()
    for node in gm.graph.find_nodes(op="call_function", target=prims.convolution_backward):
        groups, asked = node.args[-2], any(user.args[1] == 1 for user in node.users)
        if asked and groups != 1 and (form := _form(node)) not in seen:
            seen.add(form)
            yield _alone(node)


def _form(node: fx.Node) -> Hashable:
    """What equal kernels have in common: operands of one type, shape and strides, and the settings."""
    values = [operand.meta["val"] for operand in node.args if isinstance(operand, fx.Node)]
    specs = [(value.dtype, exprs(value.shape), exprs(value.stride())) for value in values]
    return (*specs, repr([argument for argument in node.args if not isinstance(argument, fx.Node)]))


def _alone(node: fx.Node) -> fx.GraphModule:
    graph = fx.Graph()

    def given(operand: fx.Node) -> fx.Node:
        placeholder = graph.placeholder(operand.name)
        placeholder.meta = {"val": operand.meta["val"]}
        return placeholder

    inputs = {operand: given(operand) for operand in node.all_input_nodes}
    copied = graph.node_copy(node, inputs.__getitem__)
    copied.args = (*copied.args[:-1], _FILTERS)
    result = graph.call_function(getitem, (copied, 1))
    result.meta = {**node.meta, "val": node.meta["val"][1]}
    graph.output((result,))
    return fx.GraphModule({}, graph)
