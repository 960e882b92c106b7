"""Lowers a graph of prims, node by node, to buffers and operations on them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeGuard, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from primtorch.attention import FlexAttention, FlexAttentionDerivative
from primtorch.effects import is_foreign
from primtorch.frozen import record
from primtorch.higher_order import HigherOrder
from primtorch.layout import is_channels_last
from primtorch.memory import memory_of
from primtorch.prims import Prim
from primtorch.schemas import DONATED, UPDATES, UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import Definition, FloatExpr, ShapeEnv, float_expr_of, shape_env_of
from primtorch.symbolic.expr import IntExpr
from primtorch.symbolic.relation import BoolExpr, Connective, Relation
from torchinductor.errors import InductorError
from torchinductor.indexing import as_expr, contiguous_strides, exprs, many_times, product
from torchinductor.ir import Buffer, Template, compute_dtype
from torchinductor.lowering import attention, depthwise, gather, pointwise, reductions, views, window
from torchinductor.lowering.aten_calls import aten_call
from torchinductor.lowering.context import (
    Context,
    Flat,
    OperandLayout,
    Operation,
    ScalarRead,
    ViewRef,
    flattened,
    order_like,
    plain_traits,
    refuse,
    same_order,
)
from torchinductor.lowering.matmul import PRODUCTS
from torchinductor.lowering.padding import FACTORS, aligned_product, products_of, realize_for_products
from torchinductor.lowering.values import Lazy, Rule, Strided, TensorValue
from torchinductor.schemas import DeviceTraits, InductorOptions

RULES: Mapping[str, Rule] = {
    **pointwise.RULES,
    **views.RULES,
    **reductions.RULES,
    **gather.RULES,
    **window.RULES,
}
OPERANDS: Mapping[str, OperandLayout] = {
    "attention": "exact",  # fused kernels want the rows of a bias aligned, and ATen pads them for it
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), "any"),  # their results are row-major whatever they are given
    **dict.fromkeys(  # they refuse rows that do not begin at multiples of 16 bytes, and ask for columns that are dense
        ("_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), "exact"
    ),
}
"""What of eager's layout the operands of an ATen call keep, by the name of the prim or operator or the prim's family.
Elsewhere the order of the dims decides the result's strides (a convolution of channels-last images is channels-last):
"order"."""


Requirement: TypeAlias = tuple[BoolExpr, tuple[UserFrame, ...]]  # and the lines that ask for it
Returned: TypeAlias = ViewRef | IntExpr | FloatExpr | float | None


@record
class GraphInput:
    """A placeholder: a tensor's buffer, or the symbol of a number (None for an int that no size depends on)."""

    name: str
    buffer: str | None
    symbol: str | None


@record
class Lowered:
    """A graph as buffers and operations in order."""

    inputs: tuple[GraphInput, ...]
    outputs: tuple[Returned, ...]
    buffers: dict[str, Buffer]
    operations: tuple[Operation, ...]
    constants: dict[str, torch.Tensor]
    by_reference: tuple[tuple[str, tuple[UserFrame, ...]], ...]  # prims that have no rule, and the user's lines
    definitions: Mapping[str, Definition]  # of symbols that are computed from the inputs'
    requirements: tuple[Requirement, ...]  # of numbers that the data tells
    updates: Mapping[str, str]  # buffer of a result -> that of the input which it replaces
    multiples: frozenset[tuple[IntExpr, IntExpr]] = frozenset()  # sizes, and what they are whole numbers of times
    donated: frozenset[str] = frozenset()  # buffers of inputs that may be written over where nobody else holds them


def lower_graph(
    gm: fx.GraphModule,
    options: InductorOptions,
    takes: Callable[[Template], bool] = refuse,
    compile_bodies: Callable[[fx.Node], Callable[..., object]] | None = None,
    traits_of: Callable[[torch.device], DeviceTraits] = plain_traits,
) -> Lowered:
    """`takes` says of a template whether the back end of its device makes it; `compile_bodies` gives the callable that
    a node which calls an operator over graphs becomes; `traits_of` says what is cheap on a device.

    Raises:
        LoweringError: a node has no rule.
    """
    ctx = Context(options, takes, traits_of)
    values: dict[fx.Node, object] = {}
    inputs: list[GraphInput] = []
    outputs: tuple[Returned, ...] = ()
    for node in gm.graph.nodes:
        ctx.node = node
        match node.op:
            case "placeholder":
                values[node] = _placeholder(ctx, node, inputs)
            case "get_attr":
                values[node] = _constant(ctx, gm, node)
            case "output":
                outputs = _outputs(ctx, node, values)
            case "call_function" if isinstance(node.target, (FlexAttention, FlexAttentionDerivative)):
                args = tuple(_plain(_given(arg, values)) for arg in node.args)
                values[node] = attention.lowered(ctx, node.target, args, node.meta["val"], run_inline)
            case "call_function" if isinstance(node.target, HigherOrder):
                if compile_bodies is None:
                    raise ctx.fail("an operator over graphs, and nobody compiles them")
                args = tuple(_plain(_given(arg, values)) for arg in node.args)
                values[node] = _extern(ctx, compile_bodies(node), args, {}, node.meta["val"], "exact")
            case "call_function":
                values[node] = _call(ctx, node, values)
            case _:
                raise ctx.fail(f"a prims graph has no {node.op} nodes")
    env, given = _environment(gm), {item.symbol for item in inputs}
    updates = _updates(gm.meta.get(UPDATES, {}), inputs, outputs)
    return Lowered(
        tuple(inputs),
        outputs,
        ctx.buffers,
        tuple(ctx.operations),
        ctx.constants,
        tuple(ctx.by_reference),
        _definitions(env, given) if env is not None else {},
        _requirements(env) if env is not None else (),
        updates,
        env.multiples() if env is not None else frozenset(),
        frozenset(f"in_{n.name}" for n in gm.graph.find_nodes(op="placeholder") if n.meta.get(DONATED)),
    )


def run_inline(ctx: Context, gm: fx.GraphModule, inputs: Sequence[object]) -> list[object]:
    """What a graph of 0-d tensors gives, computed wherever it is read. Raises attention.NotInline."""
    values: dict[fx.Node, object] = {}
    given = iter(inputs)
    before, outer = len(ctx.operations), ctx.node
    ctx.inline, results = True, []
    try:
        for node in gm.graph.nodes:
            ctx.node = node
            match node.op:
                case "placeholder":
                    values[node] = next(given)
                case "get_attr":
                    values[node] = _constant(ctx, gm, node)
                case "output":
                    results = [values[item] if isinstance(item, fx.Node) else item for item in node.args[0]]
                case _:
                    args = tuple(_plain(_given(arg, values)) for arg in node.args)
                    found = attention.at_positions(node, args)
                    values[node] = attention.remembered(_call(ctx, node, values) if found is None else found)
            if len(ctx.operations) > before:
                raise attention.NotInline(str(node.target))
    finally:
        ctx.inline, ctx.node = False, outer
        del ctx.operations[before:]
    return results


def _updates(places: Mapping[int, int], inputs: Sequence[GraphInput], outputs: Sequence[Returned]) -> Mapping[str, str]:
    """The results that replace inputs, by their buffers: those that nothing else of what is returned looks at."""
    returned = Counter(value.buffer for value in outputs if isinstance(value, ViewRef))
    found: dict[str, str] = {}
    for result, given in places.items():
        value, buffer = outputs[result], inputs[given].buffer
        if isinstance(value, ViewRef) and buffer is not None and returned[value.buffer] == 1 and not returned[buffer]:
            found[value.buffer] = buffer
    return found


def _environment(gm: fx.GraphModule) -> ShapeEnv | None:
    """That of the symbolic numbers in a graph; None where it has none."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return next((shape_env_of(v) for v in values if isinstance(v, (torch.SymInt, torch.SymFloat))), None)


def _definitions(env: ShapeEnv, given: set[str | None]) -> Mapping[str, Definition]:
    """How the numbers that no input gives are computed."""
    found = {name: definition for name, definition in env.definitions.items() if name not in given}
    return {name: _simplified(definition, env) for name, definition in found.items()}


def _requirements(env: ShapeEnv) -> tuple[Requirement, ...]:
    """What was taken for granted of whole numbers that the data tells: kernels reach into memory by it. Each is told
    with the lines that asked for it first, if any did."""
    found: dict[BoolExpr, tuple[UserFrame, ...]] = {}
    for assumed in env.assumptions:
        if _is_of_integers(assumed.expr):
            condition = env.under_given_names(assumed.expr)
            found[condition] = found.get(condition) or assumed.stack
    return tuple(found.items())


def _is_of_integers(condition: BoolExpr) -> bool:
    if isinstance(condition, Connective):
        return _is_of_integers(condition.left) and _is_of_integers(condition.right)
    return isinstance(condition, Relation)


def _simplified(definition: Definition, env: ShapeEnv) -> Definition:
    """Without the symbols that guards have fixed since it was made: no input gives these."""
    args = tuple(env.simplify(arg) if isinstance(arg, IntExpr) else arg for arg in definition.args)
    return replace(definition, args=args)


def _placeholder(ctx: Context, node: fx.Node, inputs: list[GraphInput]) -> object:
    meta = node.meta["val"]
    if isinstance(meta, torch.SymFloat):
        inputs.append(GraphInput(node.name, None, str(meta)))
        return float_expr_of(meta)
    if isinstance(meta, (int, torch.SymInt, float, type(None))) or not hasattr(meta, "dtype"):
        expr = as_expr(meta) if isinstance(meta, torch.SymInt) else None
        names = expr.symbols() if expr is not None else set()
        inputs.append(GraphInput(node.name, None, str(expr) if len(names) == 1 and str(expr) in names else None))
        return meta if expr is None else expr
    buffer = Buffer(f"in_{node.name}", meta.dtype, torch.device(meta.device), exprs(meta.shape), exprs(meta.stride()))
    ctx.buffers[buffer.name] = buffer
    inputs.append(GraphInput(node.name, buffer.name, None))
    return ctx.strided(buffer)


def _constant(ctx: Context, gm: fx.GraphModule, node: fx.Node) -> object:
    value: object = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    buffer = Buffer(f"const_{node.name}", value.dtype, value.device, exprs(value.shape), exprs(value.stride()))
    ctx.buffers[buffer.name] = buffer
    ctx.constants[buffer.name] = value
    return ctx.strided(buffer)


def _outputs(ctx: Context, node: fx.Node, values: Mapping[fx.Node, object]) -> tuple[Returned, ...]:
    """What the graph returns: the graph says which results lie in one memory, and which in an input's. A rule may give
    its operand as it is where the prim makes a new value, and that has to be copied here."""
    returned = node.args[0]
    items = returned if isinstance(returned, (tuple, list)) else (returned,)
    result: list[Returned] = []
    laid: dict[fx.Node, TensorValue] = {}  # a node that is returned twice is laid out once
    owners = {
        value.data.buffer: item
        for item, value in values.items()
        if item.op != "call_function" and isinstance(value, TensorValue) and isinstance(value.data, Strided)
    }
    for item in items:
        value = values[item] if isinstance(item, fx.Node) else item
        ctx.node = item if isinstance(item, fx.Node) else node  # what is stored for it bears its name
        if isinstance(value, TensorValue):
            strides = exprs(item.meta["val"].stride()) if "val" in item.meta else None  # type: ignore[union-attr]
            exact = laid.get(item)  # type: ignore[arg-type]
            if exact is None:
                exact = laid[item] = value if strides is None else ctx.realize_exactly(value, strides)  # type: ignore[index]
            owner = memory_of(item)  # type: ignore[arg-type]
            if owners.setdefault(ctx.realize(exact).buffer, owner) is not owner:
                exact = ctx.copy(exact)
            result.append(ctx.reference(exact))
        else:
            result.append(as_expr(value) if isinstance(value, torch.SymInt) else cast("Returned", value))
    return tuple(result)


def _call(ctx: Context, node: fx.Node, values: Mapping[fx.Node, object]) -> object:
    meta = node.meta.get("val")
    if isinstance(meta, (int, torch.SymInt)) and not isinstance(meta, bool) and not isinstance(node.target, Prim):
        return as_expr(meta)  # size arithmetic: the value is in the meta
    if isinstance(meta, torch.SymFloat) and not isinstance(node.target, Prim):
        return float_expr_of(meta)
    kwargs = {name: _given(arg, values) for name, arg in node.kwargs.items()}
    args = tuple([_argument(arg, values) for arg in node.args])
    if node.target is operator.getitem:
        return cast("Sequence[object]", args[0])[cast("int", args[1])]
    if node.target is torch.ops.aten.clone.default and _is_plain(args, kwargs, meta):  # what is kept beside a result
        return _copied(ctx, args[0], meta)
    if isinstance(node.target, OpOverload):  # a call of itself: it has no rule, or lowering was told to keep it whole
        operands = "exact" if is_foreign(node.target) else OPERANDS.get(node.target._opname, "order")
        return _extern(ctx, node.target, args, kwargs, meta, operands)
    if not isinstance(node.target, Prim):
        raise ctx.fail(f"{node.target} is not a prim")
    prim = node.target
    if prim.name == "local_scalar":
        return _read_scalar(ctx, cast("TensorValue", args[0]), meta)
    if prim.name == "device_put":
        return _device_put(ctx, cast("TensorValue", args[0]), cast("TensorSpec", meta))
    rule = RULES.get(prim.name)
    if ctx.inline and prim.name == "index":
        args = attention.without_wrapping(args)
    if prim.name in PRODUCTS:
        made = PRODUCTS[prim.name](ctx, *args, **kwargs)
        if made is not None:
            return made
    if prim.name in FACTORS:
        product_ = aligned_product(ctx, prim, args, kwargs, meta)
        if product_ is not None:
            return product_
    if prim.name == "convolution" and args[2] is None:
        windowed = depthwise.depthwise(ctx, args[0], args[1], *args[3:])  # type: ignore[arg-type]
        if windowed is not None:
            _hint(windowed, meta)
            _realize_shared(ctx, node, windowed)
            return windowed
    if prim.name == "convolution_backward":
        return _convolution_backward(ctx, node, prim, args, kwargs, meta)
    if prim.name == "convolution" and _bias_apart(ctx, args):
        biased = _biased_convolution(ctx, prim, args, kwargs, meta)
        _realize_shared(ctx, node, biased)
        return biased
    if prim.name in gather.SCATTERS and _needs_order(ctx, meta):
        return _opaque(ctx, prim, args, kwargs, meta)
    dtypes = _dtypes(args, meta)
    if prim.name == "bitcast" and any(map(_is_float8, dtypes)):
        return _extern(ctx, torch.ops.aten.view.dtype, args, kwargs, meta)
    if prim.family == "view" and _is_matrix_of_points(node, args[0]):
        ctx.realize(
            cast("TensorValue", args[0])
        )  # else what makes it has a matrix's loops, and joins no sums of images
    if rule is None or any(map(_is_complex, dtypes)) or (prim.family != "view" and any(map(_is_float8, dtypes))):
        return _opaque(ctx, prim, args, kwargs, meta)
    try:
        result = rule(ctx, *args, **kwargs)
    except InductorError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ctx.fail(f"{type(error).__name__}: {error}") from error
    _hint(result, meta)
    _follow(node, prim, result, args)
    _realize_shared(ctx, node, result)
    return result


def _is_plain(args: tuple[object, ...], kwargs: Mapping[str, object], meta: object) -> bool:
    """Whether the argument of a copy is a value that kernels read and write."""
    if len(args) != 1 or not isinstance(args[0], TensorValue) or kwargs:
        return False
    return not any(_is_complex(dtype) or _is_float8(dtype) for dtype in _dtypes(args, meta))


def _copied(ctx: Context, value: object, meta: object) -> TensorValue:
    """The value in memory of its own, laid out as the meta says: it may be written beside what made it."""
    copied = views.copy_strided(ctx, cast("TensorValue", value), meta.stride())  # type: ignore[attr-defined]
    _hint(copied, meta)
    return copied


def _bias_apart(ctx: Context, args: tuple[object, ...]) -> bool:
    """Whether a convolution's bias, its third argument, is better added by a kernel of ours."""
    return (
        isinstance(args[2], TensorValue) and not args[2].dtype.is_complex and ctx.traits_of(args[2].device).biases_apart
    )


def _biased_convolution(
    ctx: Context, prim: Prim, args: tuple[object, ...], kwargs: dict[str, object], meta: object
) -> TensorValue:
    """The convolution by ATen, and its bias, which has an element for each channel, where the result is read."""
    bias = cast("TensorValue", args[2])
    images = depthwise.depthwise(ctx, args[0], args[1], *args[3:])  # type: ignore[arg-type]
    if images is None:
        images = cast("TensorValue", _opaque(ctx, prim, (*args[:2], None, *args[3:]), kwargs, meta))
    channels = views.reshape(ctx, bias, (bias.shape[0], *(1 for _ in images.shape[2:])))
    result = RULES["add"](ctx, images, views.expand(ctx, channels, images.shape))
    _hint(result, meta)
    return cast("TensorValue", result)


def _is_matrix_of_points(node: fx.Node, value: object) -> bool:
    """Whether a view of images that are not stored yet, or of filters of a point, leads to matrix products as
    `torchinductor.convolutions` writes them."""
    if not isinstance(value, TensorValue) or not isinstance(value.data, Lazy) or len(value.shape) != 4:
        return False
    source = cast("fx.Node", node.args[0]).meta["val"]
    if node.target.name == "permute":  # type: ignore[union-attr]
        as_rows = tuple(cast("Sequence[int]", node.args[1])) == (0, 2, 3, 1)
        fits = as_rows and is_channels_last(tuple(source.shape), tuple(source.stride()))
    else:
        fits = node.target.name == "reshape" and tuple(source.shape[2:]) == (1, 1)  # type: ignore[union-attr]
    return fits and value.hint is not None and _leads_to_product(node)


def _leads_to_product(node: fx.Node) -> bool:
    """Whether a node, or a view of it, is a factor of a matrix product."""
    users = [user for user in node.users if isinstance(user.target, Prim)]
    return any(u.target.name in FACTORS or (u.target.family == "view" and _leads_to_product(u)) for u in users)  # type: ignore[union-attr]


def _convolution_backward(
    ctx: Context, node: fx.Node, prim: Prim, args: tuple[object, ...], kwargs: dict[str, object], meta: object
) -> object:
    """The gradients of a convolution, by ATen but for those of a depthwise one that are kernels of ours."""
    *operands, mask = args
    parts, settings = cast("Sequence[object]", meta), (*operands[:3], *operands[4:])
    wanted = list(cast("Sequence[bool]", mask))
    made: list[object] = [None] * 3
    for place, rule in enumerate((depthwise.image_gradient, depthwise.filter_gradient)):
        if wanted[place]:
            made[place] = rule(ctx, *settings)  # type: ignore[arg-type]
    left = [asked and found is None for asked, found in zip(wanted, made, strict=True)]
    if left == [False, False, True]:
        made[2], left[2] = _summed_up(ctx, cast("TensorValue", operands[0])), False
    if any(left):
        metas = [part if asked else None for part, asked in zip(parts, left, strict=True)]
        called = cast("Sequence[object]", _opaque(ctx, prim, (*operands, tuple(left)), kwargs, metas))
        made = [theirs if ours is None else ours for ours, theirs in zip(made, called, strict=True)]
    for part in node.users:
        value = made[cast("int", part.args[1])]
        if isinstance(value, TensorValue) and isinstance(value.data, Lazy):
            _hint(value, parts[cast("int", part.args[1])])
            _realize_shared(ctx, part, value)
    return tuple(made)


def _summed_up(ctx: Context, images: TensorValue) -> TensorValue:
    """The sum over all images and places, rounded once: a bias's gradient."""
    places = (0, *range(2, len(images.shape)))
    wide = pointwise.convert_element_type(ctx, images, compute_dtype(images.dtype))
    total = RULES["sum"](ctx, wide, places, False)
    return pointwise.convert_element_type(ctx, cast("TensorValue", total), images.dtype)


def _needs_order(ctx: Context, meta: object) -> bool:
    """Whether what is written to one place several times has to arrive in an order that the device does not keep."""
    return ctx.options.deterministic and not ctx.traits_of(torch.device(meta.device)).ordered_stores  # type: ignore[attr-defined]


def _given(arg: Argument, values: Mapping[fx.Node, object]) -> object:
    """An argument with the values in the nodes' places."""
    found: object = fx.map_arg(arg, lambda node: cast("Argument", values[node]))
    return found


def _argument(arg: Argument, values: Mapping[fx.Node, object]) -> object:
    """An argument of a prim with the values in the nodes' places, as rules take it."""
    kind = type(arg)
    if kind is fx.Node:
        value = values[arg]  # type: ignore[index]
        return value if type(value) is TensorValue else _plain(value)
    return arg if kind in _ATOMS else _plain(_given(arg, values))


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


def _plain(arg: object) -> object:
    """SymInts and SymFloats in arguments as expressions; FX's immutable lists as tuples."""
    if isinstance(arg, torch.SymInt):
        return as_expr(arg)
    if isinstance(arg, torch.SymFloat):
        return float_expr_of(arg)
    if isinstance(arg, (tuple, list)):
        return tuple(_plain(a) for a in arg)
    return arg


def _dtypes(args: tuple[object, ...], meta: object) -> set[torch.dtype]:
    """Those of the operands and the results."""
    found = {value.dtype for value in args if isinstance(value, TensorValue)}
    for value in args:
        if type(value) is tuple:
            found |= _dtypes(value, None)
    if _is_list(meta):
        return found.union(m.dtype for m in flattened(meta) if hasattr(m, "dtype"))
    if hasattr(meta, "dtype"):
        found.add(meta.dtype)
    return found


def _is_complex(dtype: torch.dtype) -> bool:
    return dtype.is_complex


def _is_float8(dtype: torch.dtype) -> bool:
    """Kernels neither read nor write it; ATen converts it."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _opaque(ctx: Context, prim: Prim, args: tuple[object, ...], kwargs: dict[str, object], meta: object) -> object:
    """Runs a prim by ATen, or by its reference where no overload computes it."""
    operands = OPERANDS.get(prim.name) or OPERANDS.get(prim.family, "order")
    call = aten_call(prim, args, kwargs)
    if call is not None:
        return _extern(ctx, *call, meta, operands)
    ctx.by_reference.append((prim.name, ctx.frames()))
    return _extern(ctx, prim.reference, args, kwargs, meta, operands)


def _extern(
    ctx: Context,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    meta: object,
    operands: OperandLayout = "order",
) -> object:
    single = not _is_list(meta)
    metas = [meta] if single else list(flattened(meta))
    nested = _is_list(meta) and any(map(_is_list, meta))
    if isinstance(function, OpOverload) and len(function._schema.returns) > 1 and nested:
        function = Flat(function)
    results = iter(ctx.extern(function, args, kwargs, metas, operands))
    return _nested(meta, results)


def _is_list(meta: object) -> TypeGuard[Sequence[object]]:
    return isinstance(meta, (tuple, list))


def _nested(meta: object, results: Iterator[object]) -> object:
    """The results in the shape of what describes them."""
    return tuple(_nested(part, results) for part in meta) if _is_list(meta) else next(results)


def _device_put(ctx: Context, value: TensorValue, meta: TensorSpec) -> TensorValue:
    """A copy to another device. What is computed from no memory is computed where it is wanted."""
    if isinstance(value.data, Lazy) and not value.reads:
        return TensorValue(value.shape, value.dtype, torch.device(meta.device), value.data, value.hint)
    copied = _extern(ctx, torch.ops.aten._to_copy.default, (value,), {"device": meta.device}, meta)
    return cast("TensorValue", copied)


def _read_scalar(ctx: Context, value: TensorValue, meta: object) -> IntExpr | FloatExpr:
    if not isinstance(meta, (torch.SymInt, torch.SymFloat)):
        raise ctx.fail("a data-dependent number that is neither an integer nor a float")
    number = as_expr(meta) if isinstance(meta, torch.SymInt) else float_expr_of(meta)
    ctx.operations.append(ScalarRead(ctx.new_name("read"), str(number), ctx.reference(value)))
    return number


def _hint(result: object, meta: object) -> None:
    """Tells values the strides that eager would give them."""
    if isinstance(result, tuple) and _is_list(meta):
        for part, part_meta in zip(result, meta, strict=True):
            _hint(part, part_meta)
    elif isinstance(result, TensorValue) and hasattr(meta, "stride"):
        result.hint = exprs(meta.stride())


def _follow(node: fx.Node, prim: Prim, result: object, args: Sequence[object]) -> None:
    """Tells a value that eager would lay out row by row the order of what it is computed from, where nobody sees it in
    memory: reading channels-last images row by row, and these again to channels-last ones, is slow."""
    if not isinstance(result, TensorValue) or not isinstance(result.data, Lazy) or prim.family == "view":
        return
    rank = len(result.shape)
    if rank < 3 or result.hint is None or not same_order(result.shape, result.hint, contiguous_strides(result.shape)):
        return
    if _wanted_in_memory(node):
        return
    for operand in (value for a in args for value in (a if isinstance(a, (tuple, list)) else (a,))):
        order = None
        if isinstance(operand, TensorValue) and len(operand.shape) == rank:
            order = order_like(result.shape, operand)
        if order is not None:
            result.order = None if same_order(result.shape, order, result.hint) else order
            return


# Operations and loads of a value that several nodes read, up to which it is computed again for each of them.
_CHEAP = 10


def _large_reads(ctx: Context, value: TensorValue) -> int:
    """The number of buffers that a value loads whose size is like its own: a weight for each channel is not one."""
    whole = product(value.shape)
    return sum(1 for name in value.reads if not many_times(whole, product(ctx.buffers[name].shape), 8))


def _realize_shared(ctx: Context, node: fx.Node, result: object) -> None:
    """Stores what several nodes read and what has grown large; the rest is computed where it is read."""
    if ctx.inline:
        return
    if isinstance(result, tuple):  # its parts are what other nodes read
        parts = [(user, result[cast("int", user.args[1])]) for user in node.users if user.target is operator.getitem]
    else:
        parts = [(node, result)]
    for reader, part in parts:
        if isinstance(part, TensorValue) and not isinstance(part.data, Strided):
            _realize_if_shared(ctx, reader, part)


def _realize_if_shared(ctx: Context, node: fx.Node, value: TensorValue) -> None:
    data = cast("Lazy", value.data)
    shared = len(node.users) > 1 and _is_dear(ctx, node, value)
    if shared or data.cost > ctx.options.max_body // 4 or len(data.reads) > ctx.options.max_buffers // 3:
        if value.narrower is None or _wanted_in_memory(node):
            realize_for_products(ctx, node, value)
        else:
            ctx.store(value)


def _is_dear(ctx: Context, node: fx.Node, value: TensorValue) -> bool:
    """Whether a value that several nodes read is to be stored for them."""
    reads = _large_reads(ctx, value)
    # What is made of no memory, or of little, is as large as any value once it is stored.
    cheap = _CHEAP if reads else max(_CHEAP, ctx.traits_of(value.device).recomputed)
    products = products_of(node)  # these want it in memory anyway
    return value.heavy or value.cost > cheap or reads > 1 or any(True for _ in products)


def _wanted_in_memory(node: fx.Node) -> bool:
    """Whether a node's value, or a view of it, is a result of the graph or a call's operand: these want its dtype."""
    for user in node.users:
        if isinstance(user.target, Prim):
            if user.target.name in FACTORS or user.target.name not in RULES:
                return True
            if user.target.family == "view" and _wanted_in_memory(user):
                return True
        elif user.target is not torch.ops.aten.clone.default:  # a kernel reads what it copies
            return True
    return False
