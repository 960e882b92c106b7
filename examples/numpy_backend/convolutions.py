"""Convolutions as one matrix product for each element of the kernel."""

import itertools

import numpy as np


def _grouped(weight, groups):
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])


def _taps(kernel, out, stride, dilation):
    """For each kernel element: its index, and the part of the padded image that it meets."""
    for tap in itertools.product(*map(range, kernel)):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, s, n in zip(tap, dilation, stride, out, strict=True)
            ),
        )


def _padded(x, padding):
    return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])


def _split(x, groups):
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def correlate(x, weight, stride, padding, dilation, groups):
    """(N, C, *image) and (O, C/groups, *kernel) -> (N, O, *out)."""
    x = _split(_padded(x, padding), groups)
    kernel = weight.shape[2:]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[3:], kernel, stride, dilation, strict=True)]
    w = _grouped(weight, groups)
    total = np.zeros((x.shape[0], groups, w.shape[1], *out), x.dtype)
    for tap, part in _taps(kernel, out, stride, dilation):
        total += np.einsum("ngc...,goc->ngo...", x[(..., *part)], w[(..., *tap)])
    return total.reshape(x.shape[0], weight.shape[0], *out)


def spread(x, weight, stride, padding, dilation, groups, size):
    """The transpose of correlate for its image of spatial `size`: (N, O, *out) and the weight -> (N, C, *size)."""
    w, g = _grouped(weight, groups), _split(x, groups)
    image = np.zeros(
        (x.shape[0], groups, w.shape[2], *(n + 2 * p for n, p in zip(size, padding, strict=True))), x.dtype
    )
    for tap, part in _taps(weight.shape[2:], x.shape[2:], stride, dilation):
        image[(..., *part)] += np.einsum("ngo...,goc->ngc...", g, w[(..., *tap)])
    inner = tuple(slice(p, p + n) for n, p in zip(size, padding, strict=True))
    return image[(..., *inner)].reshape(x.shape[0], groups * w.shape[2], *size)


def weight_gradient(x, grad, kernel, stride, padding, dilation, groups):
    """Of correlate(x, weight) for the weight, given the gradient of its result."""
    x, g = _split(_padded(x, padding), groups), _split(grad, groups)
    made = np.zeros((groups, g.shape[2], x.shape[2], *kernel), x.dtype)
    for tap, part in _taps(kernel, grad.shape[2:], stride, dilation):
        patch = x[(..., *part)]
        flat = (*patch.shape[:3], -1)
        made[(..., *tap)] = np.einsum("ngcs,ngos->goc", patch.reshape(flat), g.reshape((*g.shape[:3], -1)))
    return made.reshape(groups * g.shape[2], x.shape[2], *kernel)


def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    if transposed:
        size = [
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1
            for n, s, p, d, k, e in zip(
                x.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=True
            )
        ]
        out = spread(x, weight, stride, padding, dilation, groups, size)
    else:
        out = correlate(x, weight, stride, padding, dilation, groups)
    return out if bias is None else out + bias.reshape(-1, *(1,) * (x.ndim - 2))


def convolution_backward(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    kernel = weight.shape[2:]
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = (
            correlate(grad, weight, stride, padding, dilation, groups)
            if transposed
            else spread(grad, weight, stride, padding, dilation, groups, x.shape[2:])
        )
        grad_x = grad_x[tuple(slice(n) for n in x.shape)]
    if output_mask[1]:
        image, result = (grad, x) if transposed else (x, grad)
        grad_weight = weight_gradient(image, result, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad.sum((0, *range(2, grad.ndim)))
    return grad_x, grad_weight, grad_bias
