"""Operators that a recorder does not take as they come: one rule each, found by its overloads."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Argument

from aotautograd.errors import AotAutogradError, UnsupportedMutation, user_location
from aotautograd.functionalize import has_size
from aotautograd.recorder import Call, Recorder, special
from primtorch.fake import FakeTensor, propagate
from primtorch.layout import memory_order
from primtorch.memory import returns_alias

aten = torch.ops.aten


@special(aten.native_batch_norm.default)
def _record_batch_norm(recorder: Recorder, call: Call) -> object:
    """native_batch_norm in training mode writes its running statistics, which its schema does not say."""
    x, weight, bias, mean, var, training, momentum, eps = call.args
    if not training or mean is None:
        return NotImplemented
    functional = aten._native_batch_norm_legit_functional.default
    results = functional(x, weight, bias, mean, var, training, momentum, eps)
    recorder.record(functional, call.node_args, call.node_kwargs, results)
    for statistic, value in ((mean, results[3]), (var, results[4])):
        old = recorder.node_of[id(statistic)]
        if old.op == "call_function" and returns_alias(old.target):
            raise UnsupportedMutation(
                "batch_norm in training mode updates running statistics that are a view of another tensor",
                recorder.stack,
            )
        recorder.node_of[id(statistic)] = recorder.node_of[id(value)]
        recorder.written.add(id(statistic))
    return tuple(results[:3])


@special(aten.lift_fresh.default)
def _record_fresh(recorder: Recorder, call: Call) -> object:
    """`torch.tensor(data)` is memory of its own at every call, and the graph holds the data once: a copy of that, which
    a pass drops where nobody gets it."""
    out = propagate(recorder.fake_mode, call.func, call.args, call.kwargs)
    recorder.record(aten.clone.default, call.node_args, {}, out)
    return out


@special(aten._conj.default, aten._conj_physical.default)
def _record_conjugate(recorder: Recorder, call: Call) -> object:
    """A derivative may conjugate a number that the program multiplied by: it is no tensor of the graph yet."""
    number = call.node_args[0]
    if not isinstance(number, (int, float, complex)):
        return NotImplemented
    args = (complex(number).conjugate(),)
    kwargs: dict[str, Argument] = {"dtype": torch.complex128}
    out = aten.scalar_tensor.default(*args, **kwargs)
    recorder.record(aten.scalar_tensor.default, args, kwargs, out)
    return out


@special(aten._local_scalar_dense.default)
def _record_item(recorder: Recorder, call: Call) -> object:
    """A number or a truth value taken out of a tensor. A number stays a symbol, unless a branch asks for it."""
    tensor, values = call.args[0], recorder.values
    number = not (tensor.is_complex() or tensor.dtype is torch.bool)
    if recorder.answers:
        return recorder.answer(torch.Tensor.item, tensor, "Tensor.item()")
    if number and not recorder.fix_sizes:
        return NotImplemented
    if isinstance(tensor, FakeTensor) and tensor.memory.constant is not None:
        return NotImplemented
    if number and recorder.phase == "backward":
        raise recorder.reads_data("Tensor.item()")  # its value in the example would be that of every call
    if recorder.deriving():
        return _check_truth(recorder, tensor, call.node_args[0])
    return NotImplemented if values is None else values.assume(call.node_args[0], "value")


@special(aten.equal.default, aten.allclose.default)
def _record_equal(recorder: Recorder, call: Call) -> object:
    """Whether two tensors are equal, or close: a comparison in the graph, and its value."""
    x, y = call.args[:2]
    if x.dtype != y.dtype or (recorder.values is None and not recorder.deriving()):
        return NotImplemented
    if call.func is aten.equal.default and x.shape != y.shape:
        return False
    with recorder:
        alike = aten.eq.Tensor(x, y) if call.func is aten.equal.default else torch.isclose(*call.args, **call.kwargs)
        every = alike.all()
    node = recorder.node_of[id(every)]
    if recorder.deriving():
        return _check_truth(recorder, every, node)
    return recorder.values.assume(node, "value")  # type: ignore[union-attr]


@special(aten.index.Tensor)
def _record_index(recorder: Recorder, call: Call) -> object:
    """Where sizes are those of the example, a mask's is known without the tensor that it indexes: that of `nonzero`."""
    tensor, indices = call.args
    if not recorder.fix_sizes or not any(i is not None and i.dtype is torch.bool for i in indices):
        return NotImplemented
    with recorder:
        columns = [
            column
            for i in indices
            for column in (i.nonzero().unbind(1) if i is not None and i.dtype is torch.bool else (i,))
        ]
        return call.func(tensor, columns)


def _check_truth(recorder: Recorder, tensor: torch.Tensor, node: fx.Node) -> object:
    """A derivative that asks for a truth value checks its arguments (that of svd does). What depends on gradients has
    no value ahead of time: it is taken for true, and the backward raises where it is not."""
    if tensor.dtype is not torch.bool:
        return NotImplemented
    name = type(torch._C._current_autograd_node()).__name__
    message = f"a condition that {name} checks does not hold: the gradient is not defined for these inputs"
    recorder.record(aten._assert_async.msg, (node, message + user_location(recorder.stack)), {}, None)
    return True


@special(aten.view_as_real.default)
def _record_real_view(recorder: Recorder, call: Call) -> object:
    """A graph conjugates lazily where the program did, and such a tensor has no view as real numbers."""
    node = call.node_args[0]
    while node.target is not aten._conj.default:
        if not (isinstance(node, fx.Node) and node.op == "call_function" and returns_alias(node.target)):
            return NotImplemented
        node = node.args[0]
    plain = aten.resolve_conj.default(call.args[0])
    out = call.func(plain)
    resolved = recorder.record(aten.resolve_conj.default, call.node_args, {}, plain)
    recorder.record(call.func, (resolved,), {}, out)
    return out


@special(getattr(aten.random, "from"))
def _record_drawn_between(recorder: Recorder, call: Call) -> object:
    """`random_(from, to)`: the overload's name is a word of Python, which no text can call; another draws alike."""
    (x, low, high, *_), generator = call.args, call.kwargs.get("generator")
    if high is None or generator is not None:
        return NotImplemented
    return recorder.__torch_dispatch__(aten.randint_like.low_dtype, (), (x, low, high))


@special(aten.bernoulli.p)
def _record_draw(recorder: Recorder, call: Call) -> object:
    """What functionalization makes of `x.bernoulli_(p)`, which goes through the elements of x as they lie in memory.
    This operator goes through them row by row, and no program asks for it of such a tensor (`InPlaceCalls`)."""
    order = memory_order(call.args[0])
    if order is None:
        return NotImplemented
    back = sorted(range(len(order)), key=order.__getitem__)
    laid_out = recorder.__torch_dispatch__(aten.permute.default, (), (call.args[0], order))
    drawn = recorder.__torch_dispatch__(call.func, (), (laid_out, *call.args[1:]), call.kwargs)
    return recorder.__torch_dispatch__(aten.permute.default, (), (drawn, back))


@special(
    aten._sparse_coo_tensor_unsafe.default,
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten.sparse_coo_tensor.indices_size,
)
def _refuse_sparse(recorder: Recorder, call: Call) -> object:
    raise AotAutogradError(
        f"{call.func} makes a sparse tensor, and values of a graph are dense; without sparse=True the gradient is, too",
        recorder.stack,
    )


@special(aten._embedding_bag_backward.default)
def _refuse_sparse_bag(recorder: Recorder, call: Call) -> object:
    return _refuse_sparse(recorder, call) if call.args[_BAG_IS_SPARSE] else NotImplemented


_BAG_IS_SPARSE = [a.name for a in aten._embedding_bag_backward.default._schema.arguments].index("sparse")


@special(aten.resize.default, aten.resize_.default, aten.resize_as.default)
def _record_resize(recorder: Recorder, call: Call) -> object:
    """To the size that a tensor has: nothing. Programs of operators ask for it of the tensor that out= gives them."""
    tensor, wanted = call.args[:2]
    if id(tensor) in recorder.node_of and has_size(tensor, wanted):
        return recorder.with_strides(tensor, tensor.stride())
    raise UnsupportedMutation(
        "a tensor is resized in the graph, and a functional graph has no memory to resize; "
        "make a new tensor of that size, or keep the call out of the compiled region",
        recorder.stack,
    )
