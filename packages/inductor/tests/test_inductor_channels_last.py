"""Convolutions that get channels-last images: few conversions, at the edges alone, and eager's values and strides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import primtorch
from primtorch.layout import is_channels_last
from torchinductor import CppBackend, InductorOptions, codegen_for, compile_graph, register_codegen
from torchinductor.convolutions import arrange_convolutions
from torchinductor.layouts import channels_last_convolutions
from torchinductor.schemas import DeviceTraits

WANTS = lambda device: DeviceTraits(channels_last=True)  # noqa: E731
Tensor = torch.Tensor


def normalise(x: Tensor) -> Tensor:
    return F.batch_norm(x.float(), None, None, training=True).to(x.dtype)


def block(x: Tensor, grow: Tensor, deep: Tensor, shrink: Tensor) -> Tensor:
    """An inverted residual with a gate, as mobile networks have it."""
    y = F.hardswish(normalise(F.conv2d(x, grow)))
    y = F.relu(normalise(F.conv2d(y, deep, padding=1, groups=deep.shape[0])))
    y = y * torch.sigmoid(y.mean((2, 3), keepdim=True))
    return x + normalise(F.conv2d(y, shrink))


def pooled(x: Tensor, grow: Tensor, deep: Tensor, shrink: Tensor) -> Tensor:
    return block(F.max_pool2d(block(x, grow, deep, shrink), 2), grow, deep, shrink).flatten(2).mean(2)


def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = pooled(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def viewed(x: Tensor, grow: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """A result in another's memory."""
    y = F.conv2d(x, grow)
    return y, y.flatten(2)


def strided(x: Tensor, grow: Tensor, *_: Tensor) -> Tensor:
    """What looks at memory."""
    y = F.conv2d(x, grow)
    return y.as_strided((5, 7), (7, 1)) + y.permute(0, 2, 3, 1).sum()


def images(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 6, 10), (24, 8, 1, 1), (24, 1, 3, 3), (8, 24, 1, 1))
    return tuple(torch.randn(s, generator=draw).to(torch.bfloat16).to(dtype) / 2 for s in shapes)


def laid_out(program: object, *inputs: Tensor) -> tuple[fx.GraphModule, bool]:
    gm = primtorch.lower(primtorch.trace(program, *inputs))  # type: ignore[arg-type]
    return gm, channels_last_convolutions(gm, WANTS)


def names(gm: fx.GraphModule) -> Counter[str]:
    return Counter(getattr(node.target, "name", "") for node in gm.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("program", "copies"),
    # The image on its way in, results (of 1 x 1 filters the strides alone), what is looked at.
    [(block, 2), (pooled, 1), (gradients, 5), (strided, 2)],
)
def test_conversions_at_the_edges_alone(program: object, copies: int) -> None:
    inputs = images()
    before = names(primtorch.lower(primtorch.trace(program, *inputs)))["copy_strided"]
    gm, changed = laid_out(program, *inputs)
    assert changed
    assert names(gm)["copy_strided"] - before <= copies
    for node in gm.graph.nodes:
        if getattr(node.target, "name", "") in ("convolution", "convolution_backward"):
            image = node.args[0].meta["val"]
            assert is_channels_last(image.shape, image.stride())


@pytest.mark.parametrize("program", [block, pooled, gradients, strided])
def test_values_and_strides_are_eagers(program: object) -> None:
    inputs = images()
    gm, _ = laid_out(program, *inputs)
    found = compile_graph(gm, inputs, InductorOptions())(*inputs)
    flat = lambda out: out if isinstance(out, tuple) else (out,)  # noqa: E731
    eager, truth = flat(program(*inputs)), flat(program(*images(torch.float64)))  # type: ignore[operator]
    for ours, theirs, true in zip(found, eager, truth, strict=True):
        assert ours.stride() == theirs.stride()
        limit = 2 * (theirs.double() - true).norm() + 1e-2 * true.norm()
        assert (ours.double() - true).norm() <= limit


@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        (viewed, images()),
        (block, images(torch.float64)),  # no unit for matrices takes these
        # More is converted than convolved: eager returns what is computed from the image in many copies.
        (lambda x, *w: tuple(F.conv2d(x, w[0])[:, :8] + k for k in range(8)), images()),
    ],
    ids=["results that share memory", "64 bits", "all edges"],
)
def test_programs_that_stay(program: object, inputs: tuple[Tensor, ...]) -> None:
    before = primtorch.lower(primtorch.trace(program, *inputs)).graph  # type: ignore[arg-type]
    gm, changed = laid_out(program, *inputs)
    assert not changed and len(gm.graph.nodes) == len(before.nodes)


@pytest.mark.parametrize("allowed", [False, True])
def test_float32_images_where_they_may_be_rounded(allowed: bool) -> None:
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        gm, changed = laid_out(block, *images(torch.float32))
    assert changed == allowed
    for node in gm.graph.nodes:
        if getattr(node.target, "name", "") == "convolution":
            image = node.args[0].meta["val"]
            assert is_channels_last(image.shape, image.stride()) == allowed


def arranged(program: object, *inputs: Tensor) -> tuple[fx.GraphModule, bool]:
    gm = primtorch.lower(primtorch.trace(program, *inputs))  # type: ignore[arg-type]
    return gm, arrange_convolutions(gm, WANTS)


def biased(x: Tensor, grow: Tensor, deep: Tensor, shrink: Tensor) -> Tensor:
    bias = shrink[0, :, 0, 0]
    return F.conv2d(F.relu(F.conv2d(x, grow, bias)), shrink, bias[:8]) + x


def bias_gradients(x: Tensor, grow: Tensor, deep: Tensor, shrink: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, grow, deep, shrink)]
    out = biased(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (leaves[0], leaves[1], leaves[3]))


def first_gradients(x: Tensor, grow: Tensor, deep: Tensor, shrink: Tensor) -> tuple[Tensor, ...]:
    """Gradients that are the graph's results as they come, of images that are channels-last."""
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    return torch.autograd.grad(F.conv2d(x, grow.detach().requires_grad_()).square().sum(), x)


@pytest.mark.parametrize("size", [(6, 10), (1, 1), (1, 5)])
@pytest.mark.parametrize("program", [block, pooled, gradients, strided, biased, bias_gradients, first_gradients])
def test_filters_of_one_point_are_matrix_products(program: object, size: tuple[int, int]) -> None:
    if min(size) < 2 and program in (pooled, gradients):
        pytest.skip("nothing to pool")
    inputs, exact = images(), images(torch.float64)
    inputs, exact = ((x[0][..., : size[0], : size[1]].contiguous(), *x[1:]) for x in (inputs, exact))
    gm, changed = arranged(program, *inputs)
    assert changed
    for node in gm.graph.nodes:
        if getattr(node.target, "name", "") in ("convolution", "convolution_backward"):
            assert node.args[-1] != 1 or node.args[1].meta["val"].shape[2:] != (1, 1)
    found = compile_graph(gm, inputs, InductorOptions())(*inputs)
    flat = lambda out: out if isinstance(out, tuple) else (out,)  # noqa: E731
    eager, truth = flat(program(*inputs)), flat(program(*exact))  # type: ignore[operator]
    for ours, theirs, true in zip(found, eager, truth, strict=True):
        assert ours.stride() == theirs.stride() and ours.dtype is theirs.dtype
        limit = 2 * (theirs.double() - true).norm() + 1e-2 * true.norm()
        assert (ours.double() - true).norm() <= limit


def test_a_product_of_points_copies_nothing() -> None:
    inputs = images()
    kept, made = laid_out(gradients, *inputs)[0], arranged(gradients, *inputs)[0]
    copies = [names(gm)["copy_strided"] for gm in (kept, made)]
    assert copies[1] <= copies[0]
    assert names(made)["mm"] >= 4 and not names(made)["convolution_backward"] > 2


@pytest.mark.parametrize(
    "program",
    [
        lambda x, grow, deep, shrink: F.conv2d(x, grow, stride=2),
        lambda x, grow, deep, shrink: F.conv2d(x, grow, padding=1),
        lambda x, grow, deep, shrink: F.conv2d(x, grow[:, :4], groups=2),
        lambda x, grow, deep, shrink: F.conv_transpose2d(x, shrink),
    ],
    ids=["strided", "padded", "in groups", "transposed"],
)
def test_other_filters_of_one_point_stay(program: object) -> None:
    x, *filters = images()
    inputs = (x.contiguous(memory_format=torch.channels_last), *filters)
    gm, _ = arranged(program, *inputs)
    assert names(gm)["convolution"] == 1 and not names(gm)["mm"]


class Wants(CppBackend):
    traits = replace(CppBackend.traits, channels_last=True, biases_apart=True)


@pytest.fixture
def a_device_that_wants_them() -> Iterator[None]:
    own = codegen_for("cpu")
    register_codegen("cpu", Wants())
    yield
    register_codegen("cpu", own)


DEPTHWISE = [
    # kernel, stride, padding, dilation, size
    (3, 1, 1, 1, (6, 10)),
    (3, 2, 1, 1, (7, 9)),
    (3, 2, 1, 1, (6, 10)),
    (5, 2, 2, 1, (9, 12)),
    (5, 1, 0, 1, (9, 7)),
    (3, 1, 2, 2, (8, 6)),
    (3, 3, 2, 2, (11, 7)),
    ((1, 3), (2, 1), (0, 1), 1, (5, 6)),
    (2, 1, 2, 1, (3, 4)),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "size"), DEPTHWISE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_filter_for_each_channel_is_a_window_of_ours(
    dtype: torch.dtype,
    kernel: int | tuple[int, int],
    stride: object,
    padding: object,
    dilation: int,
    size: tuple[int, int],
    bias: bool,
    a_device_that_wants_them: None,
) -> None:
    seed = torch.seed() % 2**31
    draw = torch.Generator().manual_seed(seed)
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    shapes = [(2, 8, *size), (8, 1, height, width), *[(8,)] * bias]
    inputs = [torch.randn(s, generator=draw).to(dtype) for s in shapes]
    inputs[0] = inputs[0].contiguous(memory_format=torch.channels_last)

    def program(*given: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in given]
        out = F.conv2d(leaves[0] * 2, *leaves[1:], *[None] * (2 - len(leaves[1:])), stride, padding, dilation, 8)  # type: ignore[arg-type]
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    gm = primtorch.lower(primtorch.trace(program, *inputs))
    made = compile_graph(gm, inputs, InductorOptions())
    found = made(*inputs)
    eager, truth = program(*inputs), program(*[t.double() for t in inputs])
    for ours, theirs, true in zip(found, eager, truth, strict=True):
        assert ours.stride() == theirs.stride(), seed
        limit = 2 * (theirs.double() - true).norm() + 2 * torch.finfo(dtype).eps * true.norm()
        assert (ours.double() - true).norm() <= limit, seed
    calls = [part.name for part in made.program.parts if not part.generated]
    assert not any(name.endswith("convolution") for name in calls), calls
