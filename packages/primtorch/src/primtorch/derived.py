"""Shape propagation from rules: an operator without a formula has the metadata that its decomposition computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from primtorch.builder import as_spec
from primtorch.decompose import Builder, Results, TakenWhole, Value, decompositions
from primtorch.decompose.devices import placed
from primtorch.fake import register_fallback
from primtorch.families import Formula
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import expr_of
from primtorch.symbolic.expr import symbol
from primtorch.symbolic.sym_node import node_of


def formula_from_rule(op: OpOverload) -> Formula | None:
    """A formula that runs the operator's rule on a scratch graph, and reads the results' descriptors off it.

    Shapes and dtypes are the operator's; strides are those of the last prim, which eager may lay out otherwise. It
    takes the operator's arguments, with anything in the place of tensors that says its metadata, and gives a
    `TensorSpec` or a tuple of them. None where the operator has no rule.
    """
    rule = decompositions().get(op)
    if rule is None:
        return None

    def formula(*args: object, **kwargs: object) -> object:
        graph = fx.Graph()
        builder = Builder(graph)

        def place_symbols(sizes: Iterable[Size]) -> None:
            for size in sizes:
                if not isinstance(size, torch.SymInt):
                    continue
                for name in expr_of(size).symbols():
                    if name not in builder.symbol_nodes:
                        node = builder.symbol_nodes[name] = graph.placeholder(name)
                        node.meta["val"] = node_of(size).env.size(symbol(name))

        def value(leaf: object) -> object:
            if isinstance(leaf, torch.SymInt):
                place_symbols((leaf,))
                return leaf
            if not isinstance(leaf, _TENSORS):
                return leaf
            place_symbols((*leaf.shape, *leaf.stride(), leaf.storage_offset()))
            return builder.result(graph.placeholder("x"), as_spec(leaf))

        given, options = (pytree.tree_map(value, tree) for tree in (args, kwargs))
        if not isinstance(rule, TakenWhole):
            given, options = placed(builder, op, given, options, None)
        return _described(rule(builder, *given, **options))

    formula.__name__ = op.name()
    return formula


_TENSORS = (torch.Tensor, TensorSpec)


def _described(result: object) -> object:
    if isinstance(result, Value):
        return result.spec
    if isinstance(result, Results):
        return result.vals
    if isinstance(result, tuple | list):
        return type(result)([_described(part) for part in result])
    return result


register_fallback(formula_from_rule)
