"""Loop IR kernels of every shape that the Triton back end plans, with eager references.

Used by the interpreter's tests on small sizes and by tools/bench/gpu_kernels.py on large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ZERO, contiguous_strides, dot, exprs, number, variable
from torchinductor.ir import Axis, Buffer, Kernel, Recorder, Stage

CUDA = torch.device("cuda", 0)
Tensors = dict[str, torch.Tensor]
BodyFunction = Callable[[Recorder], None]


@dataclass(frozen=True)
class Case:
    """Kernels run in order over named buffers; `eager` computes the outputs from the inputs, in any precision.

    Errors are relative to the outputs, or to `scale` of the inputs, where sums may cancel."""

    name: str
    kernels: tuple[Kernel, ...]
    inputs: Callable[[str], Tensors]
    outputs: tuple[str, ...]
    eager: Callable[..., Sequence[torch.Tensor]]
    bytes_moved: int = 0
    zeroed: tuple[str, ...] = ()
    exact: bool = False
    buffers: dict[str, Buffer] = field(default_factory=dict)
    scale: Callable[..., Sequence[torch.Tensor]] | None = None


class Builder:
    """Buffers and kernels of one case."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.kernels: list[Kernel] = []

    def buffer(self, name: str, dtype: torch.dtype, *shape: int, strides: Sequence[int] | None = None) -> Buffer:
        sizes = exprs(shape)
        steps = contiguous_strides(sizes) if strides is None else exprs(strides)
        self.buffers[name] = Buffer(name, dtype, CUDA, sizes, steps)
        return self.buffers[name]

    def kernel(self, axes: dict[str, tuple[int, bool]], *stages: tuple[str, BodyFunction]) -> None:
        loops = tuple(Axis(name, number(size), inner) for name, (size, inner) in axes.items())
        recorded = []
        for kind, body in stages:
            recorder = Recorder({a.name: a.size for a in loops})
            body(recorder)
            recorded.append(Stage(kind, recorder.body()))  # type: ignore[arg-type]
        self.kernels.append(Kernel(f"kernel_{len(self.kernels)}", CUDA, loops, tuple(recorded), self.buffers))

    def at(self, name: str, *index: str | int | IntExpr) -> IntExpr:
        buffer = self.buffers[name]
        found = [variable(i) if isinstance(i, str) else number(i) if isinstance(i, int) else i for i in index]
        return dot(found, buffer.strides)

    def load(self, r: Recorder, name: str, *index: str | int | IntExpr, mask: int | None = None) -> int:
        return r.load(name, self.at(name, *index), self.buffers[name].dtype, mask)

    def store(self, r: Recorder, name: str, value: int, *index: str | int | IntExpr, mode: str = "set") -> None:
        r.store(name, self.at(name, *index), value, mode)  # type: ignore[arg-type]


F32, I64 = torch.float32, torch.int64


def constant(r: Recorder, value: float, dtype: torch.dtype = F32) -> int:
    return r.constant(value, dtype)


def sigmoid_chain(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    for name in ("x", "y", "out"):
        b.buffer(name, dtype, n, d)

    def body(r: Recorder) -> None:
        x, y = b.load(r, "x", "i0", "i1"), b.load(r, "y", "i0", "i1")
        s = r.apply("sigmoid", r.apply("add", r.apply("mul", x, constant(r, 1.7)), y))
        b.store(r, "out", r.apply("add", r.apply("tanh", r.apply("mul", s, x)), y), "i0", "i1")

    b.kernel({"i0": (n, False), "i1": (d, False)}, ("outer", body))
    return Case(
        "pointwise_chain",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d), "y": rand(dtype, dev, n, d)},
        ("out",),
        lambda x, y: (torch.sigmoid(x * 1.7 + y).mul(x).tanh() + y,),
        3 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def rand(dtype: torch.dtype, device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def softmax(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("out", dtype, n, d)

    def highest(r: Recorder) -> None:
        r.reduce("amax", "m", b.load(r, "x", "i0", "i1"))

    def shifted(r: Recorder) -> int:
        return r.apply("exp", r.apply("sub", b.load(r, "x", "i0", "i1"), r.carried("m", F32)))

    def total(r: Recorder) -> None:
        r.reduce("sum", "s", shifted(r))

    def divide(r: Recorder) -> None:
        b.store(r, "out", r.apply("div", shifted(r), r.carried("s", F32)), "i0", "i1")

    b.kernel({"i0": (n, False), "i1": (d, True)}, ("inner", highest), ("inner", total), ("inner", divide))
    return Case(
        f"softmax_{d}",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d)},
        ("out",),
        lambda x: (torch.softmax(x, -1),),
        2 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def layer_norm(n: int, d: int, dtype: torch.dtype, vocabulary: int = 0) -> Case:
    """Layer norm; with a vocabulary, of embedding(ids) + x, where the ids' loads are indirect."""
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("out", dtype, n, d)
    b.buffer("w", dtype, d)
    b.buffer("b", dtype, d)
    if vocabulary:
        b.buffer("table", dtype, vocabulary, d)
        b.buffer("ids", I64, n)

    def value(r: Recorder) -> int:
        x = b.load(r, "x", "i0", "i1")
        if not vocabulary:
            return x
        row = r.indirect(b.load(r, "ids", "i0"), number(vocabulary))
        return r.apply("add", b.load(r, "table", row, "i1"), x)

    def mean_stage(r: Recorder) -> None:
        r.reduce("sum", "s", value(r))

    def mean(r: Recorder) -> int:
        return r.apply("mul", r.carried("s", F32), constant(r, 1 / d))

    def variance_stage(r: Recorder) -> None:
        centred = r.apply("sub", value(r), mean(r))
        r.reduce("sum", "q", r.apply("mul", centred, centred))

    def normalise(r: Recorder) -> None:
        variance = r.apply("mul", r.carried("q", F32), constant(r, 1 / d))
        scale = r.apply("rsqrt", r.apply("add", variance, constant(r, 1e-5)))
        y = r.apply("mul", r.apply("sub", value(r), mean(r)), scale)
        y = r.apply("add", r.apply("mul", y, b.load(r, "w", "i1")), b.load(r, "b", "i1"))
        b.store(r, "out", y, "i0", "i1")

    b.kernel(
        {"i0": (n, False), "i1": (d, True)}, ("inner", mean_stage), ("inner", variance_stage), ("inner", normalise)
    )

    def inputs(dev: str) -> Tensors:
        found = {"x": rand(dtype, dev, n, d), "w": rand(dtype, dev, d), "b": rand(dtype, dev, d)}
        if vocabulary:
            found["table"] = rand(dtype, dev, vocabulary, d)
            found["ids"] = torch.randint(0, vocabulary, (n,), device=dev)
        return found

    def eager(x, w, b, table=None, ids=None):  # type: ignore[no-untyped-def]
        return (F.layer_norm(x if table is None else F.embedding(ids, table) + x, (d,), w, b),)

    moved = (3 if vocabulary else 2) * n * d * dtype.itemsize
    name = "embedding_add_ln" if vocabulary else f"layer_norm_{d}"
    return Case(name, tuple(b.kernels), inputs, ("out",), eager, moved, buffers=b.buffers)


def row_moments(n: int, d: int, dtype: torch.dtype) -> Case:
    """Mean and variance of rows; the mean is stored before the squares about it are added up."""
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("mean", dtype, n)
    b.buffer("var", dtype, n)

    def mean(r: Recorder) -> int:
        return r.apply("mul", r.carried("s", F32), constant(r, 1 / d))

    def squares(r: Recorder) -> None:
        centred = r.apply("sub", b.load(r, "x", "i0", "i1"), mean(r))
        r.reduce("sum", "q", r.apply("mul", centred, centred))

    b.kernel(
        {"i0": (n, False), "i1": (d, True)},
        ("inner", lambda r: r.reduce("sum", "s", b.load(r, "x", "i0", "i1"))),
        ("outer", lambda r: b.store(r, "mean", mean(r), "i0")),
        ("inner", squares),
        ("outer", lambda r: b.store(r, "var", r.apply("mul", r.carried("q", F32), constant(r, 1 / d)), "i0")),
    )
    return Case(
        "row_moments",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d) + 3},
        ("mean", "var"),
        lambda x: (x.mean(1), x.var(1, correction=0)),
        n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def rms_norm_residual(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    for name in ("x", "res", "out", "sum"):
        b.buffer(name, dtype, n, d)
    b.buffer("w", dtype, d)

    def added(r: Recorder) -> int:
        total = r.apply("add", b.load(r, "x", "i0", "i1"), b.load(r, "res", "i0", "i1"))
        return r.to_dtype(total, dtype, F32)

    def squares(r: Recorder) -> None:
        b.store(r, "sum", added(r), "i0", "i1")
        r.reduce("sum", "q", r.apply("mul", added(r), added(r)))

    def scaled(r: Recorder) -> None:
        mean = r.apply("mul", r.carried("q", F32), constant(r, 1 / d))
        scale = r.apply("rsqrt", r.apply("add", mean, constant(r, 1e-6)))
        y = r.apply("mul", b.load(r, "sum", "i0", "i1"), scale)
        b.store(r, "out", r.apply("mul", y, b.load(r, "w", "i1")), "i0", "i1")

    b.kernel({"i0": (n, False), "i1": (d, True)}, ("inner", squares), ("inner", scaled))

    def eager(x, res, w):  # type: ignore[no-untyped-def]
        h = x + res
        scale = torch.rsqrt(h.to(torch.promote_types(h.dtype, F32)).pow(2).mean(-1, keepdim=True) + 1e-6).to(h.dtype)
        return h * scale * w, h

    return Case(
        "rms_norm_residual",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d), "res": rand(dtype, dev, n, d), "w": rand(dtype, dev, d)},
        ("out", "sum"),
        eager,
        4 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def bias_gelu_residual(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    for name in ("x", "res", "out"):
        b.buffer(name, dtype, n, d)
    b.buffer("bias", dtype, d)

    def body(r: Recorder) -> None:
        x = r.apply("add", b.load(r, "x", "i0", "i1"), b.load(r, "bias", "i1"))
        cube = r.apply("mul", r.apply("mul", x, x), x)
        inner = r.apply(
            "mul", r.apply("add", x, r.apply("mul", cube, constant(r, 0.044715))), constant(r, 0.7978845608028654)
        )
        gate = r.apply("add", r.apply("tanh", inner), constant(r, 1.0))
        y = r.apply("mul", r.apply("mul", x, constant(r, 0.5)), gate)
        b.store(r, "out", r.apply("add", y, b.load(r, "res", "i0", "i1")), "i0", "i1")

    b.kernel({"i0": (n, False), "i1": (d, False)}, ("outer", body))
    return Case(
        "bias_gelu_residual",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d), "bias": rand(dtype, dev, d), "res": rand(dtype, dev, n, d)},
        ("out",),
        lambda x, bias, res: (F.gelu(x + bias, approximate="tanh") + res,),
        3 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def column_sum(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("out", dtype, d)
    b.kernel(
        {"i1": (d, False), "i0": (n, True)},
        ("inner", lambda r: r.reduce("sum", "s", b.load(r, "x", "i0", "i1"))),
        ("outer", lambda r: b.store(r, "out", r.carried("s", F32), "i1")),
    )
    return Case(
        "col_sum",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d)},
        ("out",),
        lambda x: (x.sum(0),),
        n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def window_moments(sizes: tuple[int, int, int, int], channels: int, dtype: torch.dtype) -> Case:
    """Mean and variance of channels, read window by window: of four inner loops no two can be one."""
    rows, high, columns, wide = sizes
    b = Builder()
    # In memory: rows of windows, rows in a window, columns of windows, columns in one. Read: a window at a time.
    b.buffer("x", dtype, rows, high + 1, columns, wide + 1, channels)
    b.buffer("mean", F32, channels)
    b.buffer("var", F32, channels)
    count = rows * high * columns * wide

    def value(r: Recorder) -> int:
        return b.load(r, "x", "i0", "i2", "i1", "i3", "c")

    def mean(r: Recorder) -> int:
        return r.apply("mul", r.carried("s", F32), constant(r, 1 / count))

    def squares(r: Recorder) -> None:
        centred = r.apply("sub", value(r), mean(r))
        r.reduce("sum", "q", r.apply("mul", centred, centred))

    def store(r: Recorder) -> None:
        b.store(r, "mean", mean(r), "c")
        b.store(r, "var", r.apply("mul", r.carried("q", F32), constant(r, 1 / count)), "c")

    b.kernel(
        {"c": (channels, False), "i0": (rows, True), "i1": (columns, True), "i2": (high, True), "i3": (wide, True)},
        ("inner", lambda r: r.reduce("sum", "s", value(r))),
        ("inner", squares),
        ("outer", store),
    )

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = x[:, :high, :, :wide].flatten(0, 3)
        return inside.mean(0), inside.var(0, correction=0)

    return Case(
        "window_moments",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, rows, high + 1, columns, wide + 1, channels) + 2},
        ("mean", "var"),
        eager,
        count * channels * dtype.itemsize,
        buffers=b.buffers,
    )


def full_mean_variance(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("var", F32)
    b.buffer("mean", F32)

    def mean(r: Recorder) -> int:
        return r.apply("mul", r.carried("s", F32), constant(r, 1 / (n * d)))

    def squares(r: Recorder) -> None:
        centred = r.apply("sub", b.load(r, "x", "i0", "i1"), mean(r))
        r.reduce("sum", "q", r.apply("mul", centred, centred))

    def store(r: Recorder) -> None:
        b.store(r, "mean", mean(r))
        b.store(r, "var", r.apply("mul", r.carried("q", F32), constant(r, 1 / (n * d - 1))))

    b.kernel(
        {"i0": (n, True), "i1": (d, True)},
        ("inner", lambda r: r.reduce("sum", "s", b.load(r, "x", "i0", "i1"))),
        ("inner", squares),
        ("outer", store),
    )
    return Case(
        "full_mean_var",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d) + 1},  # errors are relative: a mean near zero is all rounding
        ("var", "mean"),
        lambda x: torch.var_mean(x.to(torch.promote_types(x.dtype, F32))),
        n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def transpose_scale(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("out", dtype, d, n)
    b.kernel(
        {"i0": (d, False), "i1": (n, False)},
        (
            "outer",
            lambda r: b.store(r, "out", r.apply("mul", b.load(r, "x", "i1", "i0"), constant(r, 2.0)), "i0", "i1"),
        ),
    )
    return Case(
        "transpose_add",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d)},
        ("out",),
        lambda x: ((x.t() * 2).contiguous(),),
        2 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def cross_entropy(n: int, vocabulary: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("logits", dtype, n, vocabulary)
    b.buffer("target", I64, n)
    b.buffer("row", F32, n)
    b.buffer("out", F32)

    def total(r: Recorder) -> None:
        shifted = r.apply("sub", b.load(r, "logits", "i0", "i1"), r.carried("m", F32))
        r.reduce("sum", "s", r.apply("exp", shifted))

    def loss(r: Recorder) -> None:
        picked = b.load(r, "logits", "i0", r.indirect(b.load(r, "target", "i0"), number(vocabulary)))
        normaliser = r.apply("add", r.apply("log", r.carried("s", F32)), r.carried("m", F32))
        b.store(r, "row", r.apply("sub", normaliser, picked), "i0")

    b.kernel(
        {"i0": (n, False), "i1": (vocabulary, True)},
        ("inner", lambda r: r.reduce("amax", "m", b.load(r, "logits", "i0", "i1"))),
        ("inner", total),
        ("outer", loss),
    )
    b.kernel(
        {"i0": (n, True)},
        ("inner", lambda r: r.reduce("sum", "s", b.load(r, "row", "i0"))),
        ("outer", lambda r: b.store(r, "out", r.apply("mul", r.carried("s", F32), constant(r, 1 / n)))),
    )
    return Case(
        "cross_entropy",
        tuple(b.kernels),
        lambda dev: {
            "logits": rand(dtype, dev, n, vocabulary),
            "target": torch.randint(0, vocabulary, (n,), device=dev),
        },
        ("out",),
        lambda logits, target: (F.cross_entropy(logits.to(torch.promote_types(logits.dtype, F32)), target),),
        n * vocabulary * dtype.itemsize,
        buffers=b.buffers,
    )


def rope(batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("q", dtype, batch * heads, length, width)
    b.buffer("cos", dtype, length, width)
    b.buffer("sin", dtype, length, width)
    b.buffer("out", dtype, batch * heads, length, width)
    half = number(width // 2)

    def body(r: Recorder) -> None:
        i2 = variable("i2")
        low = r.apply("lt", r.index_expr(i2, I64), r.index_expr(half, I64))
        high = r.apply("logical_not", low)
        second = b.load(r, "q", "i0", "i1", i2 + half, mask=low)
        first = b.load(r, "q", "i0", "i1", i2 - half, mask=high)
        rotated = r.apply("where", low, r.apply("neg", second), first)
        q = r.apply("mul", b.load(r, "q", "i0", "i1", i2), b.load(r, "cos", "i1", i2))
        b.store(r, "out", r.apply("add", q, r.apply("mul", rotated, b.load(r, "sin", "i1", i2))), "i0", "i1", i2)

    b.kernel({"i0": (batch * heads, False), "i1": (length, False), "i2": (width, False)}, ("outer", body))
    shape = (batch * heads, length, width)

    def eager(q, cos, sin):  # type: ignore[no-untyped-def]
        return (q * cos + torch.cat((-q[..., width // 2 :], q[..., : width // 2]), -1) * sin,)

    return Case(
        "rope",
        tuple(b.kernels),
        lambda dev: {
            "q": rand(dtype, dev, *shape),
            "cos": rand(dtype, dev, *shape[1:]),
            "sin": rand(dtype, dev, *shape[1:]),
        },
        ("out",),
        eager,
        2 * batch * heads * length * width * dtype.itemsize,
        buffers=b.buffers,
    )


def batch_norm_relu(n: int, c: int, area: int, dtype: torch.dtype) -> Case:
    b = Builder()
    b.buffer("x", dtype, n, c, area)
    b.buffer("out", dtype, n, c, area)
    for name in ("w", "b"):
        b.buffer(name, F32, c)
    count = n * area

    def mean(r: Recorder) -> int:
        return r.apply("mul", r.carried("s", F32), constant(r, 1 / count))

    def squares(r: Recorder) -> None:
        centred = r.apply("sub", b.load(r, "x", "i0", "i1", "i2"), mean(r))
        r.reduce("sum", "q", r.apply("mul", centred, centred))

    def normalise(r: Recorder) -> None:
        scale = r.apply(
            "rsqrt", r.apply("add", r.apply("mul", r.carried("q", F32), constant(r, 1 / count)), constant(r, 1e-5))
        )
        y = r.apply("mul", r.apply("sub", b.load(r, "x", "i0", "i1", "i2"), mean(r)), scale)
        y = r.apply("add", r.apply("mul", y, b.load(r, "w", "i1")), b.load(r, "b", "i1"))
        b.store(r, "out", r.apply("relu", y), "i0", "i1", "i2")

    b.kernel(
        {"i1": (c, False), "i0": (n, True), "i2": (area, True)},
        ("inner", lambda r: r.reduce("sum", "s", b.load(r, "x", "i0", "i1", "i2"))),
        ("inner", squares),
        ("inner", normalise),
    )
    return Case(
        "batch_norm_relu_train",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, c, area), "w": rand(F32, dev, c), "b": rand(F32, dev, c)},
        ("out",),
        lambda x, w, b: (F.relu(F.batch_norm(x, None, None, w.to(x.dtype), b.to(x.dtype), True)),),
        3 * n * c * area * dtype.itemsize,
        buffers=b.buffers,
    )


def max_pool(images: int, side: int, dtype: torch.dtype) -> Case:
    """relu, then a 3x3 window of stride 2 with padding 1."""
    b = Builder()
    half = (side + 1) // 2
    b.buffer("x", dtype, images, side, side)
    b.buffer("out", dtype, images, half, half)

    def body(r: Recorder) -> None:
        best = constant(r, float("-inf"))
        for dy in range(3):
            for dx in range(3):
                row = variable("i1") * number(2) + number(dy - 1)
                column = variable("i2") * number(2) + number(dx - 1)
                inside = r.apply("bitwise_and", _within(r, row, side), _within(r, column, side))
                value = r.apply("relu", b.load(r, "x", "i0", row, column, mask=inside))
                value = r.apply("where", inside, value, constant(r, float("-inf")))
                best = r.apply("maximum", best, value)
        b.store(r, "out", best, "i0", "i1", "i2")

    b.kernel({"i0": (images, False), "i1": (half, False), "i2": (half, False)}, ("outer", body))
    return Case(
        "maxpool",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, images, side, side)},
        ("out",),
        lambda x: (F.max_pool2d(F.relu(x), 3, 2, 1),),
        images * (side * side + half * half) * dtype.itemsize,
        buffers=b.buffers,
    )


def _within(r: Recorder, index: IntExpr, size: int) -> int:
    value = r.index_expr(index, I64)
    low = r.apply("ge", value, r.index_expr(ZERO, I64))
    return r.apply("bitwise_and", low, r.apply("lt", value, r.index_expr(number(size), I64)))


def swiglu(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    for name in ("gate", "up", "out"):
        b.buffer(name, dtype, n, d)

    def body(r: Recorder) -> None:
        g = b.load(r, "gate", "i0", "i1")
        b.store(
            r, "out", r.apply("mul", r.apply("mul", g, r.apply("sigmoid", g)), b.load(r, "up", "i0", "i1")), "i0", "i1"
        )

    b.kernel({"i0": (n, False), "i1": (d, False)}, ("outer", body))
    return Case(
        "swiglu",
        tuple(b.kernels),
        lambda dev: {"gate": rand(dtype, dev, n, d), "up": rand(dtype, dev, n, d)},
        ("out",),
        lambda gate, up: (F.silu(gate) * up,),
        3 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def _dropped(b: Builder, r: Recorder) -> int:
    """An element of x times 1 / 0.9, or 0 for one in ten."""
    bits = r.random_bits(b.load(r, "seed"), dot((variable("i0"), variable("i1")), b.buffers["x"].strides), 0)
    uniform = r.to_dtype(r.apply("shift_right", bits, r.constant(8, I64)), F32, I64)
    keep = r.apply("ge", r.apply("mul", uniform, constant(r, 2.0**-24)), constant(r, 0.1))
    return r.apply("where", keep, r.apply("mul", b.load(r, "x", "i0", "i1"), constant(r, 1 / 0.9)), constant(r, 0.0))


def dropout_add(n: int, d: int, dtype: torch.dtype) -> Case:
    b = Builder()
    for name in ("x", "y", "out"):
        b.buffer(name, dtype, n, d)
    b.buffer("seed", I64)

    def body(r: Recorder) -> None:
        b.store(r, "out", r.apply("add", _dropped(b, r), b.load(r, "y", "i0", "i1")), "i0", "i1")

    b.kernel({"i0": (n, False), "i1": (d, False)}, ("outer", body))

    def eager(x, y, seed):  # type: ignore[no-untyped-def]
        keep = philox_uniform(seed, n * d).view(n, d) >= 0.1
        return (torch.where(keep, x / 0.9, 0) + y,)

    return Case(
        "dropout_add",
        tuple(b.kernels),
        lambda dev: {
            "x": rand(dtype, dev, n, d),
            "y": rand(dtype, dev, n, d),
            "seed": torch.tensor(2**40 + 77, device=dev),
        },
        ("out",),
        eager,
        3 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def dropout_centred(n: int, d: int, dim: int, dtype: torch.dtype, turned: bool = False) -> Case:
    """Dropout without its mean along a dim; `turned`: stored in the order of columns, without a mean."""
    b = Builder()
    b.buffer("x", dtype, n, d)
    b.buffer("out", dtype, *((d, n) if turned else (n, d)))
    b.buffer("seed", I64)

    def centred(r: Recorder) -> None:
        mean = r.apply("mul", r.carried("s", F32), constant(r, 1 / (n, d)[dim]))
        b.store(r, "out", r.apply("sub", _dropped(b, r), mean), "i0", "i1")

    if turned:
        b.kernel(
            {"i0": (n, False), "i1": (d, False)}, ("outer", lambda r: b.store(r, "out", _dropped(b, r), "i1", "i0"))
        )
    else:
        axes = {"i0": (n, dim == 0), "i1": (d, dim == 1)}
        total = ("inner", lambda r: r.reduce("sum", "s", _dropped(b, r)))
        b.kernel(dict(sorted(axes.items(), key=lambda axis: axis[1][1])), total, ("inner", centred))

    def eager(x, seed):  # type: ignore[no-untyped-def]
        dropped = torch.where(philox_uniform(seed, n * d).view(n, d) >= 0.1, x / 0.9, 0)
        return (dropped.T.contiguous() if turned else dropped - dropped.mean(dim, keepdim=True),)

    return Case(
        f"dropout_{'turned' if turned else 'centred'}_{n}_{d}_{dim}",
        tuple(b.kernels),
        lambda dev: {"x": rand(dtype, dev, n, d), "seed": torch.tensor(2**40 + 77, device=dev)},
        ("out",),
        eager,
        2 * n * d * dtype.itemsize,
        buffers=b.buffers,
    )


def philox_uniform(seed: torch.Tensor, count: int) -> torch.Tensor:
    """Philox4x32-10 in 64-bit integers: key = the seed's halves, element i is word i % 4 of counter i // 4."""
    mask = 0xFFFFFFFF
    i = torch.arange((count + 3) // 4, dtype=I64, device=seed.device)
    c0, c1, c2, c3 = i & mask, i >> 32, torch.zeros_like(i), torch.zeros_like(i)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        (h0, l0), (h1, l1) = _wide_product(c0, 0xD2511F53), _wide_product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return (torch.stack((c0, c1, c2, c3), 1).view(-1)[:count] >> 8).to(torch.float32) * 2.0**-24


def _wide_product(a: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a 32x32-bit product, without overflowing 64 signed bits."""
    low, high = a * (factor & 0xFFFF), a * (factor >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF


def scatter_rows(n: int, d: int, rows: int) -> Case:
    """The gradient of an embedding: out[ids[i], j] += x[i, j]."""
    b = Builder()
    b.buffer("x", F32, n, d)
    b.buffer("ids", I64, n)
    b.buffer("out", F32, rows, d)

    def body(r: Recorder) -> None:
        row = r.indirect(b.load(r, "ids", "i0"), number(rows))
        b.store(r, "out", b.load(r, "x", "i0", "i1"), row, "i1", mode="add")

    b.kernel({"i0": (n, False), "i1": (d, False)}, ("outer", body))
    return Case(
        "scatter_add",
        tuple(b.kernels),
        lambda dev: {"x": rand(F32, dev, n, d), "ids": torch.randint(0, rows, (n,), device=dev)},
        ("out",),
        lambda x, ids: (torch.zeros(rows, d, dtype=x.dtype, device=x.device).index_add_(0, ids, x),),
        (n + rows) * d * 4,
        zeroed=("out",),
        buffers=b.buffers,
    )


def running_sum(n: int, d: int) -> Case:
    b = Builder()
    b.buffer("x", F32, n, d)
    b.buffer("out", F32, n, d)
    b.kernel(
        {"i0": (n, False), "i1": (d, True)},
        ("inner", lambda r: b.store(r, "out", r.scan("sum", b.load(r, "x", "i0", "i1"))[0], "i0", "i1")),
    )
    return Case(
        f"cumsum_{d}",
        tuple(b.kernels),
        lambda dev: {"x": rand(F32, dev, n, d)},
        ("out",),
        lambda x: (x.cumsum(1),),
        2 * n * d * 4,
        buffers=b.buffers,
        scale=lambda x: (x.abs().cumsum(1) / 16,),  # 2e-6 of it is a unit in the last place of all that is summed
    )


def arg_max(n: int, d: int) -> Case:
    b = Builder()
    b.buffer("x", F32, n, d)
    b.buffer("out", I64, n)
    b.kernel(
        {"i0": (n, False), "i1": (d, True)},
        ("inner", lambda r: r.reduce("argmax", "k", b.load(r, "x", "i0", "i1"), r.index_expr(variable("i1"), I64))),
        ("outer", lambda r: b.store(r, "out", r.carried("k", I64), "i0")),
    )

    def inputs(dev: str) -> Tensors:
        x = torch.randint(0, 50, (n, d), device=dev).float()  # ties: the first one wins
        x[0, d // 2] = float("nan")
        return {"x": x}

    return Case(
        f"argmax_{d}",
        tuple(b.kernels),
        inputs,
        ("out",),
        lambda x: (x.argmax(1),),
        n * d * 4,
        exact=True,
        buffers=b.buffers,
    )


def reversed_rows(n: int, d: int) -> Case:
    """out[i, j] = x[n - 1 - i, j], the row by a computed index; tiles reach past the end of both."""
    b = Builder()
    b.buffer("x", F32, n, d)
    b.buffer("out", F32, n, d)

    def body(r: Recorder) -> None:
        place = r.apply("sub", r.constant(n - 1, I64), r.index_expr(variable("i0"), I64))
        b.store(r, "out", b.load(r, "x", r.indirect(place, number(n)), "i1"), "i0", "i1")

    b.kernel({"i0": (n, False), "i1": (d, False)}, ("outer", body))
    inputs = lambda dev: {"x": rand(F32, dev, n, d)}  # noqa: E731
    return Case(
        "reversed_rows", tuple(b.kernels), inputs, ("out",), lambda x: (x.flip(0),), 2 * n * d * 4, buffers=b.buffers
    )


def small_cases() -> list[Case]:
    """Every kernel at sizes that the interpreter runs quickly: odd ones, so that masks matter."""
    bf, f32 = torch.bfloat16, F32
    return [
        reversed_rows(8, 5),
        sigmoid_chain(7, 13, f32),
        softmax(5, 37, f32),
        softmax(3, 20000, f32),
        layer_norm(5, 37, f32),
        layer_norm(2, 17000, f32),
        layer_norm(4, 64, f32, vocabulary=11),
        row_moments(3, 17000, f32),
        rms_norm_residual(5, 40, f32),
        bias_gelu_residual(3, 300, f32),
        bias_gelu_residual(3, 512, f32),
        column_sum(70, 33, f32),
        column_sum(1021, 33, f32),
        window_moments((6, 6, 6, 8), 64, f32),
        window_moments((5, 7, 9, 11), 40, f32),
        full_mean_variance(211, 101, f32),
        full_mean_variance(128, 256, f32),
        batch_norm_relu(30, 4, 625, f32),
        full_mean_variance(11, 13, f32),
        transpose_scale(50, 70, f32),
        cross_entropy(5, 41, f32),
        cross_entropy(3, 17000, f32),
        rope(1, 2, 5, 8, f32),
        batch_norm_relu(3, 4, 25, f32),
        max_pool(2, 9, f32),
        swiglu(9, 11, bf),
        dropout_add(9, 50, f32),
        dropout_centred(5, 64, 1, f32),
        dropout_centred(5, 37, 1, f32),
        dropout_centred(2, 17000, 1, f32),
        dropout_centred(36, 40, 0, f32),
        dropout_centred(50, 72, 0, f32, turned=True),
        scatter_rows(13, 20, 5),
        running_sum(3, 50),
        running_sum(2, 17000),
        arg_max(4, 33),
        arg_max(2, 17000),
    ]


def large_cases() -> list[Case]:
    """The sizes of the copy roofline table, in bfloat16."""
    bf = torch.bfloat16
    n, d = 16384, 4096
    return [
        sigmoid_chain(n, d, bf),
        softmax(n, d, bf),
        layer_norm(n, d, bf),
        rms_norm_residual(n, d, bf),
        bias_gelu_residual(n, d, bf),
        column_sum(n, d, bf),
        full_mean_variance(n, d, bf),
        transpose_scale(n, d, bf),
        cross_entropy(4096, 50304, bf),
        layer_norm(n, d, bf, vocabulary=50304),
        rope(8, 32, 2048, 128, bf),
        batch_norm_relu(64, 64, 112 * 112, bf),
        max_pool(64 * 64, 112, bf),
        swiglu(n, d, bf),
        dropout_add(n, d, bf),
        scatter_rows(n, d, 50304),
        running_sum(n, d),
        arg_max(n, d),
    ]
