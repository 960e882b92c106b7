"""What eager refuses, fakes refuse with the same type of error, before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from primtorch.fake import FakeMode, formula_of
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv

a, b, row, cube = torch.randn(4, 6), torch.randn(5, 6), torch.randn(6), torch.randn(2, 4, 6)
image, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
ints, mask = torch.arange(4), torch.ones(4, 6, dtype=torch.bool)
elsewhere = torch.randn(4, 6, device="meta")
aten = torch.ops.aten

# Operator and what is wrong with the call -> the call.
CALLS: dict[str, Callable[..., Any]] = {
    "add: shapes": lambda a, b: torch.add(a, b),
    "add: devices": lambda a, elsewhere: torch.add(a, elsewhere),
    "add: float alpha for integers": lambda ints: torch.add(ints, ints, alpha=0.5),
    "sub: booleans": lambda mask: mask - mask,
    "neg: booleans": lambda mask: -mask,
    "bitwise_and: floats": lambda a: a & a,
    "bitwise_not: floats": lambda a: ~a,
    "add_: broadcast would grow": lambda row, a: row.clone().add_(a),
    "mul_: float into integers": lambda ints: ints.clone().mul_(0.5),
    "where: shapes": lambda mask, b: torch.where(mask, b, b),
    "mm: shapes": lambda a, b: torch.mm(a, b),
    "mm: rank": lambda a, cube: torch.mm(a, cube),
    "mm: dtypes": lambda a: torch.mm(a, a.t().double()),
    "bmm: rank": lambda a, cube: torch.bmm(cube, a),
    "bmm: shapes": lambda cube: torch.bmm(cube, cube),
    "addmm: shapes": lambda a, b, row: torch.addmm(row, a, b),
    "matmul: shapes": lambda a, b: a @ b,
    "linear: shapes": lambda a, image: F.linear(a, image[0, 0]),
    "dot: rank": lambda a, row: torch.dot(row, a),
    "sum: dim": lambda a: a.sum(2),
    "sum: dim twice": lambda a: a.sum((0, 0)),
    "mean: integers": lambda ints: ints.mean(),
    "amax: dim": lambda a: a.amax(-3),
    "argmax: dim": lambda a: a.argmax(5),
    "softmax: dim": lambda a: a.softmax(2),
    "cumsum: dim": lambda a: a.cumsum(2),
    "topk: k": lambda a: a.topk(7),
    "kthvalue: k": lambda a: a.kthvalue(7),
    "sort: dim": lambda a: a.sort(2),
    "view: size": lambda a: a.view(5, 5),
    "view: strides": lambda a: a.t().view(24),
    "reshape: size": lambda a: a.reshape(7, -1),
    "expand: size": lambda a: a.expand(5, 6),
    "permute: rank": lambda a: a.permute(0, 1, 2),
    "permute: twice": lambda a: a.permute(0, 0),
    "transpose: dim": lambda a: a.transpose(0, 2),
    "t: rank": lambda cube: cube.t(),
    "unsqueeze: dim": lambda a: a.unsqueeze(4),
    "squeeze: dim": lambda a: a.squeeze(2),
    "select: index": lambda a: a.select(0, 4),
    "narrow: length": lambda a: a.narrow(0, 2, 3),
    "split: sizes": lambda a: a.split([1, 2]),
    "unbind: dim": lambda a: a.unbind(2),
    "flip: dim": lambda a: a.flip(2),
    "roll: dims": lambda a: a.roll((1, 2), 0),
    "diagonal: dims": lambda a: a.diagonal(0, 1, 1),
    "cat: shapes": lambda a, image: torch.cat([a, image[0, 0]]),
    "cat: rank": lambda a, cube: torch.cat([a, cube]),
    "cat: nothing": lambda a: torch.cat([]),
    "stack: shapes": lambda a, b: torch.stack([a, b]),
    "gather: rank": lambda a, ints: a.gather(0, ints),
    "gather: sizes": lambda a: a.gather(0, torch.zeros(2, 9, dtype=torch.int64)),
    "gather: dtype of indices": lambda a: a.gather(0, a),
    "scatter: dtypes": lambda a: a.scatter(0, torch.zeros(2, 2, dtype=torch.int64), a.double()),
    "index_select: rank": lambda a: a.index_select(0, torch.zeros(2, 2, dtype=torch.int64)),
    "index_select: dtype of indices": lambda a, row: a.index_select(0, row),
    "index_add: shapes": lambda a, b, ints: a.index_add(0, ints, b),
    "index: too many": lambda a, ints: a[ints, ints, ints],
    "index: shapes": lambda a, ints: a[ints, torch.arange(3)],
    "index: mask's shape": lambda b, mask: b[mask],
    "masked_fill: mask's dtype": lambda a: a.masked_fill(a, 0.0),
    "embedding: rank": lambda row, ints: F.embedding(ints, row),
    "embedding: dtype of indices": lambda a, row: F.embedding(row, a),
    "conv2d: channels": lambda image: F.conv2d(image, torch.randn(4, 2, 3, 3)),
    "conv2d: kernel too large": lambda image: F.conv2d(image, torch.randn(4, 3, 9, 9)),
    "conv2d: rank": lambda a, kernel: F.conv2d(a, kernel),
    "conv2d: dtypes": lambda image, kernel: F.conv2d(image, kernel.double()),
    "conv2d: bias": lambda image, kernel, row: F.conv2d(image, kernel, row),
    "max_pool2d: padding": lambda image: F.max_pool2d(image, 2, padding=2),
    "max_pool2d: rank": lambda a: F.max_pool2d(a, 2),
    "avg_pool2d: too small": lambda image: F.avg_pool2d(image, 20),
    "layer_norm: shape": lambda a: F.layer_norm(a, (5,)),
    "group_norm: groups": lambda image: F.group_norm(image, 2),
    "batch_norm: one value": lambda image: F.batch_norm(image[:1, :, 0, 0], None, None, training=True),
    "nll_loss: shapes": lambda b, ints: F.nll_loss(b, ints),
    "nll_loss: dtype of targets": lambda a, ints: F.nll_loss(a, ints.float()),
    "cross_entropy: shapes": lambda b, ints: F.cross_entropy(b, ints),
    "tril: rank": lambda row: row.tril(),
    "trace: rank": lambda cube: cube.trace(),
    "cholesky: not square": lambda a: torch.linalg.cholesky(a),
    "inv: not square": lambda a: torch.linalg.inv(a),
    "solve: shapes": lambda b, image: torch.linalg.solve(image[0, 0], b),
    "arange: step": lambda: torch.arange(0, 4, 0),
    "zeros: negative size": lambda: torch.zeros(-1),
    "eye: negative size": lambda: torch.eye(-2),
    "dropout: probability": lambda a: F.dropout(a, 1.5),
    "pad: too much": lambda image: F.pad(image, (9, 9), mode="reflect"),
    "pixel_shuffle: channels": lambda image: F.pixel_shuffle(image, 2),
    "out: dtype": lambda a, ints: torch.add(a, a, out=torch.empty(4, 6, dtype=torch.int64)),
}


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:  # any type: it is what is compared
        return error
    return None


@pytest.mark.parametrize("symbolic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("name", list(CALLS))
def test_fakes_refuse_what_eager_refuses(name: str, symbolic: bool) -> None:
    call = CALLS[name]
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    real = [globals()[n] for n in names]
    expected = raised(lambda: call(*real))
    assert expected is not None
    env = ShapeEnv()
    mode = FakeMode(env)
    fakes = [
        mode.from_tensor(
            t, dynamic={d: env.symbol(s, f"{n}[{d}]") for d, s in enumerate(t.shape)} if symbolic else None
        )
        for n, t in zip(names, real, strict=True)
    ]
    with mode:
        error = raised(lambda: call(*fakes))
    assert type(error) is type(expected), f"eager: {expected!r}\nfake: {error!r}"


ELSEWHERE = (
    # What only data tell.
    "out of bounds for dimension",
    "probability tensor contains",
    "invalid multinomial distribution",
    "weights cannot be negative",
)
OUTSIDE = {
    "gaussian_nll_loss",  # Python that looks at the data before it looks at the shapes
    "histogramdd",  # an operator of several outputs of computed number
}


def test_error_samples_of_the_operator_database() -> None:
    """Of the calls that eager refuses for what they look like, at least 99 in 100 are refused alike."""
    good, wrong = 0, []
    for op in op_db:
        if op.error_inputs_func is None or op.name.removeprefix("nn.functional.") in OUTSIDE:
            continue
        for sample in (error.sample_input for error in op.error_inputs("cpu")):
            real = (sample.input, *sample.args)
            expected = raised(lambda: op(*real, **sample.kwargs))
            if expected is None or any(words in str(expected) for words in ELSEWHERE):
                continue
            mode = FakeMode(ShapeEnv())

            def fake(x: Any) -> Any:
                return mode.from_tensor(x) if isinstance(x, torch.Tensor) and x.layout is torch.strided else x

            args, kwargs = pytree.tree_map(fake, (real, sample.kwargs))
            with mode:
                error = raised(lambda: op(*args, **kwargs))
            if type(error) is type(expected):
                good += 1
            else:
                wrong.append(f"{op.name}: eager {expected!r}, fake {error!r}"[:300])
    assert good > 500 and len(wrong) <= 0.01 * (good + len(wrong)), "\n".join(wrong)


def described(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TensorSpec:
    strides = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape, strides, dtype, torch.device(device))


here, there = described(4, 4), described(4, 4, device="cuda:0")
batch, batch_there = described(2, 4, 4), described(2, 4, 4, device="cuda:0")
places = described(4, device="cuda:0", dtype=torch.int64)
DEVICES = {
    "add": (aten.add.Tensor, here, there),
    "mul": (aten.mul.Tensor, there, here),
    "where": (aten.where.self, described(4, 4, dtype=torch.bool), there, here),
    "mm": (aten.mm.default, here, there),
    "addmm": (aten.addmm.default, here, here, there),
    "bmm": (aten.bmm.default, batch, batch_there),
    "cat": (aten.cat.default, [here, there]),
    "embedding": (aten.embedding.default, here, places),
    "index_select": (aten.index_select.default, here, 0, places),
    "gather": (aten.gather.default, here, 0, described(4, 4, device="cuda:0", dtype=torch.int64)),
    "scatter": (aten.scatter.src, here, 0, described(4, 4, device="cuda:0", dtype=torch.int64), here),
    "convolution": (aten.convolution.default, described(1, 3, 8, 8), described(4, 3, 3, 3, device="cuda:0"), None,
                    [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "layer_norm": (aten.native_layer_norm.default, here, [4], described(4, device="cuda:0"), None, 1e-5),
    "nll_loss": (aten.nll_loss_forward.default, here, places, None, 1, -100),
    "stack": (aten.stack.default, [here, there]),
    "stack: numbers": (aten.stack.default, [described(), described(device="cuda:0")]),
    "take": (aten.take.default, here, places),
    "put": (aten.put.default, there, places, described(4)),
    "index: the CPU's by another's": (aten.index.Tensor, here, [places]),
    "index_put: values": (aten.index_put.default, there, [places], described(4, 4)),
    "masked_fill: mask": (aten.masked_fill.Scalar, there, described(4, 4, dtype=torch.bool), 1.0),
    "masked_scatter": (aten.masked_scatter.default, there, described(4, 4, device="cuda:0", dtype=torch.bool), here),
    "add_: written on the CPU": (aten.add_.Tensor, described(), described(device="cuda:0")),
    "block_diag": (aten.block_diag.default, [here, there]),
    "cholesky_solve": (aten.cholesky_solve.default, here, there),
    "linalg_solve": (aten._linalg_solve_ex.default, here, there),
    "max_unpool": (aten.max_unpool2d.default, described(1, 2, 2), described(1, 2, 2, device="cuda:0", dtype=torch.int64),
                   [4, 4]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(DEVICES))
def test_two_devices_are_refused(name: str) -> None:
    op, *args = DEVICES[name]
    with pytest.raises(RuntimeError, match="device"):
        formula_of(op)(*args)


# What is on the CPU beside another device, and eager takes -> the device of the result.
MIXED = {
    "add": ("cuda", aten.add.Tensor, there, described()),
    "div": ("cuda", aten.div.Tensor, described(), there),
    "add_": ("cuda", aten.add_.Tensor, there, described()),
    "where": ("cuda", aten.where.self, described(4, 4, device="cuda:0", dtype=torch.bool), there, described()),
    "masked_fill": ("cuda", aten.masked_fill.Tensor, there, described(4, 4, device="cuda:0", dtype=torch.bool),
                    described()),
    "mse_loss": ("cuda", aten.mse_loss.default, there, described()),
    "index": ("cuda", aten.index.Tensor, there, [described(4, dtype=torch.int64)]),
    "index_put": ("cuda", aten.index_put.default, there, [described(4, dtype=torch.int64)], described()),
    "copy_": ("cuda", aten.copy_.default, there, here),
    "copy_: to the CPU": ("cpu", aten.copy_.default, here, there),
    "select_scatter": ("cuda", aten.select_scatter.default, there, described(4), 0, 0),
    "bernoulli": ("cuda", aten.bernoulli.Tensor, there, here),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MIXED))
def test_what_eager_takes_from_the_cpu_is_taken(name: str) -> None:
    device, op, *args = MIXED[name]
    assert formula_of(op)(*args).device.type == device


NUMBERS = [3, -1, 127, 128, -128, -129, 255, 256, -255, -256, 2**15, 2**31, 2**63 - 1, 65504.0, 65505.0, 3.4e38, 3.5e38,
           -1e39, 1.7e308, 0.5, float("inf"), float("nan")]  # fmt: skip
STORES = {
    "full": lambda x, n: torch.full(x.shape, n, dtype=x.dtype),
    "full, inferred": lambda x, n: torch.full((2,), n),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full(x.shape, n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "index_fill": lambda x, n: x.index_fill(0, torch.arange(min(len(x), 2)), n),
    "pad": lambda x, n: torch.ops.aten.constant_pad_nd(x, [1, 1], n),
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n, dtype=x.dtype),
    "clamp": lambda x, n: x.clamp(max=n),
    "clamp_min": lambda x, n: torch.clamp_min(x, n),
    "where": lambda x, n: torch.where(x > 0, x, n),
}
HELD = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
        torch.int64]  # fmt: skip


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_numbers_that_a_dtype_cannot_hold(name, dtype):
    def told(x, number):
        try:
            return STORES[name](x, number).dtype
        except RuntimeError as error:
            return str(error)

    for size in (3, 1, 0):
        real = torch.ones(size).to(dtype)
        for number in NUMBERS:
            mode = FakeMode()
            with mode:
                ours = told(mode.from_tensor(real), number)
            assert ours == told(real, number), (size, number)
