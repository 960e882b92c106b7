"""The gradients of a convolution as convolutions, of which autograd takes any derivative.

Torch's formula for a derivative of them takes strides, padding and dilation as plain numbers, and no symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from primtorch.spec import Size

aten = torch.ops.aten
Gradients = tuple[torch.Tensor | None, ...]


def convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[Size] | None,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    output_padding: Sequence[Size],
    groups: Size,
    output_mask: Sequence[bool],
) -> Gradients:
    """The gradients of `x`, the weight and the bias; None where `output_mask` has False."""
    numbers = itertools.chain(stride, padding, dilation, output_padding, (groups,))
    if x.is_complex() or all(type(number) is int for number in numbers):
        window = (stride, padding, dilation, transposed, output_padding, groups)
        found: Gradients = aten.convolution_backward.default(grad, x, weight, bias_sizes, *window, output_mask)
        return found
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        of_x = _of_image(grad, x, weight, stride, padding, dilation, transposed, groups)
    if output_mask[1]:
        image, filters = (grad, x) if transposed else (x, grad)
        of_weight = _of_weight(image, filters, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        of_bias = grad.sum((0, *range(2, grad.dim())))
    return of_x, of_weight, of_bias


def _of_image(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    transposed: bool,
    groups: Size,
) -> torch.Tensor:
    """Each element of the gradient goes to those that it was computed from, by the weights that they had."""
    rest = [0] * len(stride)
    if not transposed:  # what the last window leaves over
        reached = (
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
        )
        rest = [size - end for size, end in zip(x.shape[2:], reached, strict=True)]
    found = aten.convolution.default(grad, weight, None, stride, padding, dilation, not transposed, rest, groups)
    return _cropped(found, x.shape[2:]) if transposed else found


def _of_weight(
    image: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    groups: Size,
) -> torch.Tensor:
    """The sum over samples and windows of an image's element by a window's: a convolution of the image, samples for
    channels, by what the windows have. Neighbours of a weight are `dilation` apart there, and windows `stride`."""
    spatial = range(3, 1 + image.dim())
    image = image.unflatten(1, (groups, image.shape[1] // groups)).permute(2, 1, 0, *spatial).flatten(1, 2)
    windows = windows.unflatten(1, (groups, windows.shape[1] // groups)).permute(1, 2, 0, *spatial).flatten(0, 1)
    found = aten.convolution.default(image, windows, None, dilation, padding, stride, False, [0] * len(stride), groups)
    return _cropped(found.transpose(0, 1), weight.shape[2:])


def _cropped(t: torch.Tensor, spatial: Sequence[Size]) -> torch.Tensor:
    """Without what lies behind these sizes."""
    for dim, size in enumerate(spatial, 2):
        t = t.narrow(dim, 0, size)
    return t
