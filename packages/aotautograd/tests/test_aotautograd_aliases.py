"""Mutations, views and aliases: values, gradients, relations and version counters are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotautograd import aot_function, aot_module
from aotautograd.errors import UnsupportedAlias, UnsupportedMutation

Program = Callable[..., Any]


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def leaves(*shapes: tuple[int, ...], grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(s, dtype=torch.float64, requires_grad=grad) for s in shapes]


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def flat(outputs: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


def check(program: Program, make: Callable[[], list[torch.Tensor]], *, non_leaf: bool = False, calls: int = 2) -> None:
    """Runs `program` eagerly and compiled on equal inputs and compares everything that a caller can observe."""
    compiled = aot_function(program, fw_compiler=identity)
    for call in range(calls):
        runs = []
        for f in (program, compiled):
            torch.manual_seed(call)
            inputs = make()
            args = [t * 1 if non_leaf and t.is_floating_point() else t for t in inputs]
            outputs = flat(f(*args))
            differentiable = [o for o in (*outputs, *args) if o.requires_grad and o.grad_fn is not None]
            relations = [same_storage(a, b) for a in (*outputs, *args) for b in (*outputs, *args)]
            identities = [a is b for a in (*outputs, *args) for b in (*outputs, *args)]
            facts = [(o.shape, o.stride(), o.storage_offset(), o.dtype, o.requires_grad) for o in (*outputs, *args)]
            versions = [a._version for a in args]
            values = [o.detach().clone() for o in (*outputs, *args)]
            if differentiable:
                sum(o.sin().sum() for o in differentiable).backward()
            grads = [t.grad if t.is_leaf else None for t in inputs]
            runs.append((relations, identities, facts, values, grads, versions))
        eager, ours = runs
        assert ours[0] == eager[0], "aliasing"
        assert ours[1] == eager[1], "identity"
        assert ours[2] == eager[2], "metadata"
        assert ours[5] == eager[5], "version counters of inputs"
        for a, b in zip(eager[3], ours[3], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        for a, b in zip(eager[4], ours[4], strict=True):
            assert (a is None) == (b is None), "a gradient that should be None, or the other way round"
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def one_view(x, y):
    return (x * y).view(-1)


def view_of_input(x, y):
    return x.view(-1), x * y


def views_of_one_value(x, y):
    z = x * y
    return z, z.view(-1), z[0], z.t()


def views_without_their_base(x, y):
    z = x * y
    return z[0], z[1]


def split_views(x, y):
    return (*(x * y).split(2), *x.unbind(1))


def input_itself(x, y):
    return x, y, x + y, x


def same_output_twice(x, y):
    z = x + y
    return z, z


def equal_but_distinct(x, y):
    return x + y, x + y


def detached(x, y):
    z = x * y
    return z, z.detach(), x.detach()


def view_under_no_grad(x, y):
    with torch.no_grad():
        v = x.view(-1)
    return v, x * y


def view_of_view_under_no_grad(x, y):
    with torch.no_grad():
        v, u = x.t(), (x * y).view(-1)
    return v.unbind(0)[1], v[1:].unsqueeze(0), u[2:]


def part_of_copy_of_part(x, y):
    z = x[1:].clone()
    z[1:].add_(y.sum())
    return z


def copy_over_copy(x, y):
    z, w = x[1].clone(), y[1:].clone()
    z.view_as(z).copy_(y[0])
    w.copy_(x[1:])
    return z, w


def copy_of_written_part(x, y):
    z, w = x.detach()[1:], y.detach()[1:].clone()
    z[0] = 1
    u, v = z.clone(), z.clone()
    u[1:].zero_()
    z.add_(w)
    return u, v


def part_under_no_grad_of_value(x, y):
    z = x * y
    with torch.no_grad():
        v = z.diagonal()
    return v.unsqueeze(0), v


def in_place_on_value(x, y):
    z = x * y
    z.add_(1).mul_(x)
    return z


def in_place_on_view(x, y):
    z = x * y
    z[0].mul_(2)
    z.view(-1)[3:].add_(1)
    return z, z[0]


def clone_output(x, y):
    return x.clone(), y.contiguous()


def write_input(x, y):
    x.mul_(2)
    x.add_(y)
    return x * y


def write_input_and_return(x, y):
    x.add_(y)
    return x, x.view(-1), x[0]


def write_view_of_input(x, y):
    x[0].mul_(3)
    x.t()[1].add_(y[0, 0])
    return x.sum()


def write_detached(x, y):
    x.detach().mul_(2)
    return x * y


def write_input_with_input(x, y):
    x.copy_(y)
    return y * 2


def transpose_input(x, y):
    x.t_()
    return x.sum() * y


def no_outputs_written(x, y):
    x.zero_()
    return y.sum()


def constant_outputs(x, y):
    return x * y, torch.ones(3, dtype=torch.float64), 3, None


def integer_outputs(x, y):
    return x.argmax(), (x > y), x.max(0)


PURE = [
    one_view, view_of_input, views_of_one_value, views_without_their_base, split_views, input_itself, same_output_twice,
    equal_but_distinct, detached, view_under_no_grad,
    view_of_view_under_no_grad, part_of_copy_of_part, copy_over_copy, part_under_no_grad_of_value, in_place_on_value, in_place_on_view, clone_output, constant_outputs,
    integer_outputs,
]  # fmt: skip
WRITING = [
    write_input, write_input_and_return, write_view_of_input, write_detached, write_input_with_input, transpose_input,
    no_outputs_written, copy_of_written_part,
]  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("program", PURE)
def test_views_of_leaves(program: Program, grad: bool) -> None:
    check(program, lambda: leaves((4, 4), (4, 4), grad=grad))


@pytest.mark.parametrize("program", PURE + WRITING)
def test_non_leaf_inputs(program: Program) -> None:
    check(program, lambda: leaves((4, 4), (4, 4)), non_leaf=True)


@pytest.mark.parametrize("program", WRITING)
def test_writes_without_grad(program: Program) -> None:
    check(program, lambda: leaves((4, 4), (4, 4), grad=False))


@pytest.mark.parametrize("program", WRITING)
def test_buffer_becomes_differentiable(program: Program) -> None:
    check(program, lambda: leaves((4, 4), grad=False) + leaves((4, 4)))


@pytest.mark.parametrize("program", PURE + WRITING)
def test_no_grad(program: Program) -> None:
    with torch.no_grad():
        check(program, lambda: leaves((4, 4), (4, 4)))


def test_parameter_written_under_no_grad() -> None:
    def program(x, y):
        z = x * y
        with torch.no_grad():
            y.mul_(0.5)
        return z * 2

    check(program, lambda: leaves((4, 4), grad=False) + leaves((4, 4), grad=False))


def test_leaf_write_raises_what_eager_raises() -> None:
    def program(x):
        return x.mul_(2)

    with pytest.raises(RuntimeError, match="leaf Variable"):
        aot_function(program, fw_compiler=identity)(*leaves((3,)))


SHARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached": torch.Tensor.detach,
    "part": lambda x: x[1:],
    "detached part": lambda x: x[1:].detach(),
}


def write_first(x, y, w):
    x.mul_(w)
    return y * 2


def write_second(x, y, w):
    y.mul_(w[0])
    return x * 2


def view_first_write_second(x, y, w):
    with torch.no_grad():
        v = y[1:]
    x[0] = w.sum()
    return v + 1


@pytest.mark.parametrize("program", [write_first, write_second, view_first_write_second])
@pytest.mark.parametrize("name", SHARED)
def test_a_write_gives_its_history_to_views_of_one_base_alone(name: str, program: Program) -> None:
    def make() -> list[torch.Tensor]:
        x, w = leaves((4, 4), grad=False), leaves((4, 4))
        return [*x, SHARED[name](x[0]), *w]

    if name == "detached part" and program is write_second:  # no input that this one is a view of holds all memory
        with pytest.raises(UnsupportedAlias, match="not views of one dense tensor"):
            aot_function(program, fw_compiler=identity)(*make())
    elif name == "part" and program is view_first_write_second:
        for function in (program, aot_function(program, fw_compiler=identity)):
            with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
                function(*make())
    else:
        check(program, make)


WRITTEN_IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: x.sin_(),
    "fill": lambda x: x.fill_(2.0),
    "item": lambda x: x.__setitem__(0, 1.0),
    "transposed": lambda x: x.t().add_(1),
    "part": lambda x: x[1:].mul_(3),
    "detached": lambda x: x.detach().mul_(3),
    "scan": lambda x: x.cumsum_(0),
    "flag": lambda x: torch.nn.functional.relu(x, inplace=True),
    "positional flag": lambda x: torch.nn.functional.leaky_relu(x, 0.1, True),
    "out": lambda x: torch.add(x, 1, out=x),
    "augmented": lambda x: x.__iadd__(1),
    "sort": lambda x: x.copy_(x.sort(0).values),
}
LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[::2],
    "columns": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "transposed rows": lambda x: x[::2].t(),
    "value": lambda x: x.t() * 1,
}
READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "clone": lambda x: (x.clone(), x.t().contiguous(), x.t().reshape(-1)),
    "view": lambda x: (x.unsqueeze(0), x[0], x),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("layout", LAID_OUT)
@pytest.mark.parametrize("write", WRITTEN_IN_PLACE)
def test_a_written_tensor_keeps_its_layout(write: str, layout: str, read: str) -> None:
    def program(x: torch.Tensor) -> Any:
        if layout == "value":
            x = x.t() * 1
        WRITTEN_IN_PLACE[write](x)
        return READ[read](x)

    def make() -> list[torch.Tensor]:
        x = torch.randn(4, 4, dtype=torch.float64)
        return [x if layout == "value" else LAID_OUT[layout](x)]

    check(program, make)


def view_before_the_change(x, y):
    z = x.sin()
    z.unsqueeze_(0)
    part = z.view_as(z)
    z.transpose_(0, -1)
    return part, z * 1


def flat_before_the_change(x, y):
    part = x.view(-1)
    x.t_()
    return part.view(-1) * y.view(-1), part


def kept_in_its_new_shape(x, y):
    x.unsqueeze_(0).transpose_(0, -1)
    return x.sin() * y


def kept_beside_its_old_shape(x, y):
    x.t_()
    z = x * x
    z.t_()
    z.unsqueeze_(0)
    return z, x.t() * y


def kept_unchanged(x, y):
    x.squeeze_()
    return x * x * y


def written_in_its_new_shape(x, y):
    z = x * 2
    row = z[0]
    z.t_()
    z.mul_(y)
    row.add_(1)
    return z, row, z.t_()


def part_written_in_its_new_shape(x, y):
    z = x * y
    part = z[1:]
    part.t_()
    part.mul_(2)
    part[0] = y.sum()
    return z, part, part.t()


def strided_in_place(x, y):
    z = x * y
    row = z[0]
    z.as_strided_((2, 3), (1, 2))
    z.mul_(2)
    return z, row, torch.stack([z, z * 1])


def detached_in_its_new_shape(x, y):
    z = x * y
    z.t_()
    z.detach_()
    return z.add_(1), z * y


def changed_back(x, y):
    x.t_()
    z = x.sin()
    x.t_()
    return z, x


CHANGED_SHAPES = [
    view_before_the_change, flat_before_the_change, kept_in_its_new_shape, kept_beside_its_old_shape, kept_unchanged,
    written_in_its_new_shape, part_written_in_its_new_shape, strided_in_place, detached_in_its_new_shape,
]  # fmt: skip


@pytest.mark.parametrize("program", CHANGED_SHAPES)
def test_shapes_that_change_in_place(program: Program) -> None:
    check(program, lambda: leaves((4, 4), (4, 4)), non_leaf=True)
    check(program, lambda: leaves((4, 4), (4, 4), grad=False))


def change_and_write(x, y):
    x.t_().mul_(y)
    return x


@pytest.mark.parametrize("program", [*(p for p in CHANGED_SHAPES if p is not flat_before_the_change), change_and_write])
def test_shapes_that_change_in_place_without_histories(program: Program) -> None:
    with torch.no_grad():
        check(program, lambda: leaves((4, 4), (4, 4)), non_leaf=True)
        check(program, lambda: leaves((4, 4), (4, 4)))


def test_a_shape_of_which_autograd_does_not_know_is_refused_with_grad_mode_on() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.t_()
        with torch.enable_grad():
            return x * 2

    with torch.no_grad(), pytest.raises(UnsupportedMutation, match="another shape in place under no_grad"):
        aot_function(program, fw_compiler=identity)(*leaves((4, 4)))


def test_a_derivative_that_reads_an_input_of_another_shape_raises_as_in_eager() -> None:
    for function in (changed_back, aot_function(changed_back, fw_compiler=identity)):
        z, _ = function(*(x * 1 for x in leaves((4, 4), (4, 4))))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("name", ["leaf", "view of a leaf", "one of several views", "view under no_grad"])
def test_a_shape_that_autograd_does_not_let_change(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(name != "view under no_grad"):
            z = {"leaf": x, "view of a leaf": x[:2]}.get(name)
            if z is None:
                z = (x.unbind(0) if name == "one of several views" else (x.view(-1),))[0]
        return z.unsqueeze_(0)

    def make() -> torch.Tensor:
        (x,) = leaves((4, 4))
        return x if "leaf" in name else x * 1

    for function in (program, aot_function(program, fw_compiler=identity)):
        with pytest.raises(RuntimeError, match="leaf Variable|modified inplace"):
            function(make())


def test_another_storage_behind_another_shape_is_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.t_()
        x.data = torch.ones(2, dtype=x.dtype)
        return x * 2

    with pytest.raises(UnsupportedMutation, match="another storage"):
        aot_function(program, fw_compiler=identity)(*leaves((4, 4), grad=False))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def doubled(x: torch.Tensor) -> Any:
    return Doubled.apply(x)


def test_a_function_of_the_users_takes_a_tensor_in_its_new_shape() -> None:
    graph = torch.fx.Graph()
    value = graph.call_method("sin", (graph.placeholder("x"),))
    graph.call_method("t_", (value,))
    graph.output((graph.call_function(doubled, (value,)), value))
    module = torch.fx.GraphModule({}, graph)
    runs = []
    for function in (module, aot_module(module, leaves((3, 3)), fw_compiler=identity)):
        torch.manual_seed(0)
        (x,) = leaves((3, 3))
        twice, value = function(x)
        (twice * torch.arange(9.0).view(3, 3)).sum().backward()
        runs.append((twice, value, x.grad))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_a_function_of_the_users_in_a_callable_is_not_called_with_the_old_shape() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        z = x * 1
        z.t_()
        with torch.no_grad():
            z.sin()
        return doubled(z)

    with pytest.raises(UnsupportedMutation, match=r"autograd\.Function takes"):
        aot_function(program, fw_compiler=identity)(*leaves((3, 3)))
