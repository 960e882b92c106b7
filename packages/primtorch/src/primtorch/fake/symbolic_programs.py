"""Programs, over sizes of any kind, of operators and derivatives that torch's C++ runs over sizes as numbers.

Each is made of eager's operators in eager's order, so that results round alike. `composites.py` says for whom they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from primtorch.layout import broadcast
from primtorch.spec import Size

Tensor = torch.Tensor
aten = torch.ops.aten


def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Blocks along the diagonal of zeros."""
    for t in tensors:
        if t.dim() > 2:
            raise RuntimeError(f"torch.block_diag: Input tensors must have 2 or fewer dimensions, not {t.dim()}")
    if not tensors:
        return torch.empty(1, 0)
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    blocks = [t.expand(1, 1) if t.dim() == 0 else t.unsqueeze(0) if t.dim() == 1 else t for t in tensors]
    widths = [block.shape[1] for block in blocks]
    rows = []
    for number, block in enumerate(blocks):
        beside = [block.new_zeros(block.shape[0], width, dtype=dtype) for width in widths]
        beside[number] = block.to(dtype)
        rows.append(torch.cat(beside, 1))
    return torch.cat(rows)


def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`gather` of tensors that are broadcast along the other dims."""
    if indices.dtype is not torch.int64:
        raise RuntimeError("torch.take_along_dim(): dtype of indices should be Long")
    if dim is None:
        return x.view(-1).gather(0, indices.view(-1))
    if x.dim() != indices.dim():
        raise RuntimeError(
            "torch.take_along_dim(): input and indices should have the same number of dimensions, "
            f"but got {x.dim()} dimensions for input, and {indices.dim()} dimensions for indices"
        )
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    if x.dim() == 0:
        return x.gather(dim, indices)
    at = dim % rank

    def with_size(shape: Sequence[Size], size: Size) -> tuple[Size, ...]:
        return (*shape[:at], size, *shape[at + 1 :])

    places = broadcast(with_size(x.shape, indices.shape[at]), tuple(indices.shape))
    values = broadcast(with_size(indices.shape, x.shape[at]), tuple(x.shape))
    return x.broadcast_to(values).gather(at, indices.broadcast_to(places))


def masked_select_backward(grad: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """The gradient's elements where the mask is set, one after the other."""
    shape = broadcast(tuple(x.shape), tuple(mask.shape))
    return torch.zeros_like(x.expand(shape)).masked_scatter(mask, grad)


def unsafe_chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """Pieces of equal sizes but for the last. How many there are is a number."""
    if x.dim() == 0 or chunks <= 0:
        raise RuntimeError(f"chunk expects a tensor with dims and chunks to be greater than 0, got: {chunks}")
    size = x.shape[dim]
    part = (size + chunks - 1) // chunks
    if isinstance(part, int) and part == 0:
        return list(aten.unsafe_split_with_sizes.default(x, [0] * chunks, dim))
    return list(aten.unsafe_split.Tensor(x, part, dim))


def stft(
    signal: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Spectra of frames; a frame for each hop, however long the signal is."""
    hop = n_fft // 4 if hop_length is None else hop_length
    length = n_fft if win_length is None else win_length
    if align_to_window or return_complex is None or not _is_framed(signal, n_fft, hop, length, window):
        return NotImplemented
    assert window is not None
    if length < n_fft:
        left = (n_fft - length) // 2
        window = aten.constant_pad_nd.default(window, [left, n_fft - length - left])
    rows = signal.unsqueeze(0) if signal.dim() == 1 else signal
    count = 1 + (rows.shape[1] - n_fft) // hop
    batch, step = rows.stride()
    frames = rows.as_strided((rows.shape[0], count, n_fft), (batch, hop * step, step)) * window
    if frames.is_complex():
        if onesided:
            return NotImplemented
        spectra = aten._fft_c2c.default(frames, [2], int(normalized), True)
    else:
        spectra = aten._fft_r2c.default(frames, [2], int(normalized), onesided is None or onesided)
    spectra = spectra.transpose(1, 2)
    spectra = spectra.squeeze(0) if signal.dim() == 1 else spectra
    return spectra if return_complex else torch.view_as_real(spectra)


def _is_framed(signal: Tensor, n_fft: int, hop: int, length: int, window: Tensor | None) -> bool:
    """Whether the signal has a frame, there is a window (of a missing one eager warns), and the numbers are what eager
    takes."""
    fits = signal.dim() in (1, 2) and signal.numel() != 0 and (signal.is_floating_point() or signal.is_complex())
    numbers = all(isinstance(one, int) for one in (n_fft, hop, length))
    if not fits or not numbers or not (0 < length <= n_fft and hop > 0) or signal.shape[-1] < n_fft:
        return False
    return window is not None and window.dim() == 1 and tuple(window.shape) == (length,)


def multi_dot(tensors: Sequence[Tensor]) -> Any:
    """Products of matrices, in the cheapest order."""
    ranks = [t.dim() for t in tensors]
    if len(tensors) < 2 or any(r != 2 for r in ranks[1:-1]) or any(r not in (1, 2) for r in ranks):
        return NotImplemented
    first, last = tensors[0], tensors[-1]
    matrices = [first if ranks[0] == 2 else first.unsqueeze(0), *tensors[1:-1]]
    matrices.append(last if ranks[-1] == 2 else last.unsqueeze(1))
    product = _cheaper_order(matrices)
    product = product if ranks[-1] == 2 else product.squeeze(1)
    return product if ranks[0] == 2 else product.squeeze(0)


def _cheaper_order(matrices: Sequence[Tensor]) -> Tensor:
    if len(matrices) == 2:
        return matrices[0].mm(matrices[1])
    if len(matrices) > 3:
        return _cheapest_order(matrices)
    a, b, c = matrices
    from_left = a.shape[0] * b.shape[1] * (a.shape[1] + c.shape[1])
    from_right = b.shape[0] * c.shape[1] * (a.shape[0] + b.shape[1])
    return a.mm(b.mm(c)) if from_left > from_right else a.mm(b).mm(c)


def _cheapest_order(matrices: Sequence[Tensor]) -> Tensor:
    """Each span of factors is cut where its two parts and their product take the fewest multiplications; of equal cuts
    the first. Which that is, is asked of the sizes."""
    sides = [*(m.shape[0] for m in matrices), matrices[-1].shape[1]]
    count = len(matrices)
    costs: dict[tuple[int, int], Size] = {(i, i): 0 for i in range(count)}
    cuts: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for first in range(count - length):
            last, least = first + length, None
            for cut in range(first, last):
                product = sides[first] * sides[cut + 1] * sides[last + 1]
                cost = costs[first, cut] + costs[cut + 1, last] + product
                if least is None or cost < least:
                    least, cuts[first, last] = cost, cut
            assert least is not None
            costs[first, last] = least

    def multiplied(first: int, last: int) -> Tensor:
        if first == last:
            return matrices[first]
        cut = cuts[first, last]
        return multiplied(first, cut).mm(multiplied(cut + 1, last))

    return multiplied(0, count - 1)


def gradient(
    x: Tensor,
    *,
    spacing: float | Sequence[float] | None = None,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> Any:
    """Differences of neighbours along each dim, over the distance between them."""
    rank = x.dim()
    given = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    if not rank or edge_order not in (1, 2) or any(not -rank <= d < rank for d in given):
        return NotImplemented
    dims = [d % rank for d in given]
    steps = spacing if isinstance(spacing, Sequence) else [1 if spacing is None else spacing] * len(dims)
    if len(set(dims)) != len(dims) or len(steps) != len(dims) or any(x.shape[d] <= edge_order for d in dims):
        return NotImplemented
    return [_differences(x, d, step, edge_order) for d, step in zip(dims, steps, strict=True)]


def _differences(x: Tensor, dim: int, step: float, edge_order: int) -> Tensor:
    def part(start: int, end: int | None = None) -> Tensor:
        found: Tensor = aten.slice.Tensor(x, dim, start, end)
        return found

    inner = (part(2) - part(0, -2)) / step / 2
    if edge_order == 1:
        first, last = (part(1, 2) - part(0, 1)) / step, (part(-1) - part(-2, -1)) / step
    else:  # by the parabola through the three elements at the end
        first = (-1.5 * part(0, 1) + 2 * part(1, 2) - 0.5 * part(2, 3)) / step
        last = (0.5 * part(-3, -2) - 2 * part(-2, -1) + 1.5 * part(-1)) / step
    return torch.cat([first, inner, last], dim)


PROGRAMS: Final[dict[str, Callable[..., object]]] = {
    "block_diag": block_diag,
    "take_along_dim": take_along_dim,
    "masked_select_backward": masked_select_backward,
    "unsafe_chunk": unsafe_chunk,
    "stft": stft,
    "linalg_multi_dot": multi_dot,
    "gradient.scalarint": gradient,
    "gradient.scalararray": gradient,
    "gradient.array": gradient,
    "gradient.scalarrayint": gradient,
    "gradient.scalarrayarray": gradient,
}
"""By overload. NotImplemented of one: torch's own program sees to the call."""
