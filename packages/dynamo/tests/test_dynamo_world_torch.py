"""Questions about dtypes, devices, modes and numpy in captured programs."""

from __future__ import annotations

import ast
import copy
import inspect
import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from world_cases import Case, case, cases_of, check

import torchdynamo
from torchdynamo.graph.torch_functions import HANDED_ON_IN_PART


@case(lambda: {"dtype": torch.float32, "device": torch.device("cpu")})
def dtypes_and_devices(x: torch.Tensor, s: dict[str, Any]) -> Any:
    dtype, device = s["dtype"], s["device"]
    s["dtype"] = torch.float64 if dtype is torch.float32 else torch.float32
    eps = torch.finfo(dtype).eps + torch.finfo(x.dtype).tiny
    found = [dtype.is_floating_point, dtype.itemsize, torch.iinfo(torch.int32).max, device.type, device == torch.device("cpu"),
             device.index, str(device), x.device == device, torch.promote_types(dtype, torch.int8), torch.result_type(x, 2),
             torch.can_cast(torch.int32, dtype), x.is_cuda, x.dtype in (torch.float32, torch.float16), torch.get_default_dtype(),
             dtype.to_real(), torch.is_floating_point(x), x.is_floating_point(), x.layout, torch.is_complex(x), str(dtype)]  # fmt: skip
    return x.to(dtype) * eps + torch.finfo(dtype).min, found, torch.ones(2, dtype=dtype, device=device)


@case()
def modes(x: torch.Tensor, _: Any) -> Any:
    found = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    with torch.no_grad():
        found.append(torch.is_grad_enabled())
        y = x * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(torch.get_autocast_dtype("cpu"))
        z = x @ x.T
    return y, z, found


@case()
def compiling(x: torch.Tensor, _: Any) -> Any:
    branch = 0.0 if torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.jit.is_tracing() else 0.0
    return x + branch


@case()
def tensor_questions(x: torch.Tensor, _: Any) -> Any:
    return x + 1, [x.dim(), x.ndim, x.numel(), x.nelement(), x.element_size(), x.stride(), x.stride(0), x.is_contiguous(), x.storage_offset(),
                   x.requires_grad, x.is_leaf, x.grad is None, len(x), x.size(-1), x.shape[0] * 2, torch.is_tensor(x), isinstance(x, torch.Tensor),
                   torch.numel(x), x.T.shape, type(x) is torch.Tensor, x.is_sparse, x.itemsize, x.nbytes]  # fmt: skip


@case()
def tensors_in_python(x: torch.Tensor, _: Any) -> Any:
    rows = list(x)
    first, second = x
    a, b = torch.chunk(x, 2), torch.split(x, [1, 1])
    values, indices = x.max(dim=1)
    found = x.sort(dim=0)
    return (
        rows[0] + second,
        a[0] + b[1],
        values,
        indices,
        found.values,
        x in [x],
        [x] == [x],
        sum(rows),
        x[..., None].shape,
        first is second,
    )


@case(lambda: {"k": 2})
def indexing(x: torch.Tensor, s: dict[str, int]) -> Any:
    k = s["k"]
    s["k"] = k - 1
    y = x.clone()
    y[0] = k
    y[:, 1:] += 1
    y[y > 1] = 0.5
    index = torch.tensor([1, 0])
    return y, x[index], x[:, k], x[-1, ::2], x[None, ..., 0], x[[0, 1], [1, 2]], x[torch.arange(2) == 1]


@case(lambda: {"w": torch.ones(3), "l": [1, [2]]})
def deep_copies(x: torch.Tensor, s: dict[str, Any]) -> Any:
    one, two = copy.deepcopy(s), copy.deepcopy([x, x, s["w"]])
    one["w"] += 1
    one["l"][1].append(x.shape[0])
    s["l"].append(4)
    return (
        one,
        two[0] is two[1],
        two[2] is s["w"],
        two,
        copy.copy(s)["w"] is s["w"],
    )


@case(lambda: {"w": torch.ones(4)}, breaks=2)
def deep_copies_that_share_memory(x: torch.Tensor, s: dict[str, Any]) -> Any:
    a, b = copy.deepcopy((s["w"], s["w"][:2]))
    b += 1
    return x + a.sum(), a


def _numpy(x: torch.Tensor) -> Any:
    return x.numpy()


@case()
def tensor_to_numpy(x: torch.Tensor, _: Any) -> Any:
    a = x.numpy()
    return x + 1, a


@case(lambda: np.array([1.0, 2.0, 3.0]))
def numpy_array_given(x: torch.Tensor, a: np.ndarray) -> Any:
    return x * 2, a.shape


@case()
def numpy_constants(x: torch.Tensor, _: Any) -> Any:
    return x * np.pi + np.inf, np.float32 is not None


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_variables
        return g * w, g * x


@case(lambda: torch.ones(3, requires_grad=True))
def autograd_functions_made_in_the_program(x: torch.Tensor, w: torch.Tensor) -> Any:
    def scale(a: torch.Tensor) -> torch.Tensor:
        return a * 3

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, factor: float) -> Any:
            ctx.factor = factor
            return scale(a)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
            return scale(g) * ctx.factor, None

    class Further(Inner):
        pass

    return Inner.apply(x * w, 2.0), Further.apply(w, 0.5), Further.__mro__[1] is Inner


@case(lambda: {"table": torch.ones(3)})
def parameters_without_gradient(x: torch.Tensor, s: dict[str, Any]) -> Any:
    p = torch.nn.Parameter(s["table"], requires_grad=False)
    s["kept"] = torch.nn.Parameter(x * 2, False)
    found = [
        type(p) is torch.nn.Parameter,
        isinstance(p, torch.nn.Parameter),
        p.requires_grad,
        type(p + 1) is torch.Tensor,
    ]
    return x + p, found, p, p


@case(lambda: torch.ones(3, requires_grad=True), breaks=1)
def parameters_made(x: torch.Tensor, w: torch.Tensor) -> Any:
    p = torch.nn.Parameter(w.softmax(-1))
    return x * p, p


@case(lambda: torch.ones(3, requires_grad=True))
def older_spellings(x: torch.Tensor, w: torch.Tensor) -> Any:
    variable = torch.autograd.Variable(torch.zeros(2, 3).type(x.type()))
    variable[0] = 1
    apart = torch.autograd.Variable(w * 2)
    n = x.shape[0]
    made = [torch.FloatTensor([1, 2, 3]), torch.Tensor(n, 3).zero_(), torch.LongTensor([[1], [2]]), torch.Tensor((1, 2.5)),
            torch.ByteTensor(2).fill_(1), torch.Tensor(x.size()).fill_(0.5), torch.DoubleTensor(), torch.BoolTensor([True])]  # fmt: skip
    made.append(x.lt(0).type(torch.DoubleTensor).type(torch.LongTensor))
    return x + variable, apart, x * w + apart, Scaled.apply(x, w.expand(2, 3)), x + made[0], made


@case(lambda: torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(3))}))
def parameter_dicts(x: torch.Tensor, p: Any) -> Any:
    return x * p["a"], list(p.keys()), "a" in p, len(p)


@case(lambda: torch.nn.ModuleList([torch.nn.Identity(), torch.nn.ReLU()]))
def module_lists(x: torch.Tensor, layers: Any) -> Any:
    for i, layer in enumerate(layers):
        x = layer(x) + i
    return (
        x,
        len(layers),
        [type(m).__name__ for m in layers[1:]],
        layers[-1].training,
        isinstance(layers[0], torch.nn.Module),
    )


def test_what_a_storage_says_is_asked_at_each_call() -> None:
    """Nobody guards what lies in an object of torch's C code: its methods run in the program, not once at capture."""
    resizable, fixed = torch.zeros(3), torch.from_numpy(np.zeros(3, np.float32))
    held = types.SimpleNamespace(storage=resizable.untyped_storage())

    def says(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        storage = held.storage
        return x + 1, [storage.resizable(), storage.nbytes(), storage.is_shared(), storage.data_ptr()]

    compiled = torchdynamo.optimize(lambda graph, _: graph.forward)(says)
    for change in (
        lambda: None,
        lambda: resizable.resize_(9),
        lambda: setattr(held, "storage", fixed.untyped_storage()),
    ):
        change()
        assert compiled(torch.ones(2))[1] == says(torch.ones(2))[1]


def test_modules_are_made_where_another_compiler_counts_them() -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(2))  # from now on, in the whole process
    check(Case(module_lists, lambda: torch.nn.ModuleList([torch.nn.Identity(), torch.nn.ReLU()]), 0, 3))


@case(lambda: torch.arange(6.0).reshape(2, 3))
def weighted_losses(x: torch.Tensor, weight: Any) -> Any:
    weight += 1
    losses = F.l1_loss, F.mse_loss, F.huber_loss
    return [loss(x, x * 2 + 1, weight=weight, reduction=how) for loss in losses for how in ("mean", "sum", "none")]


def test_functions_that_tell_a_mode_a_part_of_their_arguments() -> None:
    """What torch's own hand-over to function modes leaves out would be missing in the graph."""
    found = set()
    for module, owner in ((F, F), (torch.functional, torch.functional), (torch._tensor, torch.Tensor)):
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if getattr(getattr(call, "func", None), "id", "") != "handle_torch_function":
                    continue
                given = call.args[2:]
                if any(isinstance(part, ast.Starred) for part in given) or any(k.arg is None for k in call.keywords):
                    continue
                names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
                told = {*names[: len(given)], *(k.arg for k in call.keywords)}
                if {*names, *(a.arg for a in function.args.kwonlyargs)} - told:
                    found.add(getattr(owner, function.name))
    assert found <= HANDED_ON_IN_PART, found


@pytest.mark.parametrize("found", cases_of(__name__))
def test_torch(found: Case) -> None:
    check(found)
