"""Programs of operators that torch's C++ runs with its tensors' sizes as numbers, written over sizes of any kind.

`aten.matmul`, and what calls it in C++ (`linear` without a bias, the plain form of attention), ends as products of
matrices before anything of ours is asked. Up to torch 2.12 it reads sizes as numbers on its way: each symbol would be
fixed. So do `cross_entropy` with probabilities as targets and the derivative of `trace`, and in all versions `kron` and
the derivative of `fake_quantize_per_channel_affine`. Fakes with symbols bear a dispatch key of their own there, and for
that key the operators are the programs below. The key lies above autocast and autograd, which see the operators that a
program is made of.

Composites that read memory refuse fakes by themselves, for nothing is allocated; of a tensor over symbols torch takes
the number of elements for 0, and its kernel would follow a null pointer. They are refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F

from primtorch.ambient import without_onednn
from primtorch.errors import DataDependentValue
from primtorch.fake.symbolic_programs import PROGRAMS
from primtorch.fake.symbolic_writes import symbolic_writes
from primtorch.layout import broadcast
from primtorch.once import once
from primtorch.spec import Size

_FIRST_OVER_SYMBOLS: Final = (2, 13)  # the version of torch whose own program reads no numbers
_KEY: Final = "TESTING_ONLY_GenericWrapper"  # a key that torch has and registers nothing for
# Composites of torch that read or write memory on their own: batch sizes of packed sequences among others.
_OVER_MEMORY: Final = (
    "gru.data", "lstm.data", "rnn_tanh.data", "rnn_relu.data", "quantized_gru.data", "quantized_lstm.data",
    "_pack_padded_sequence_backward", "_saturate_weight_to_fp16", "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix", "fbgemm_pack_quantized_matrix.KN", "fbgemm_linear_fp16_weight",
    "_sobol_engine_draw", "_sobol_engine_ff_", "_sobol_engine_scramble_", "_sobol_engine_initialize_state_",
)  # fmt: skip
_libraries: list[torch.library.Library] = []  # a library takes back what it registered when it goes


@once
def symbolic_keys() -> torch._C.DispatchKeySet:
    """The dispatch keys that a fake over symbols bears beside those of its device."""
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    # The operator by which transforms call autograd functions is none of a library.
    call = torch.autograd.function.custom_function_call  # type: ignore[attr-defined]  # imported there
    call.fallthrough(torch._C._dispatch_key_parse(_KEY))
    if torch.__version__ < _FIRST_OVER_SYMBOLS:  # type: ignore[operator]  # a TorchVersion compares with tuples
        aten.impl("matmul", matmul, _KEY)
        aten.impl("cross_entropy_loss", _cross_entropy, _KEY)
        aten.impl("trace", _trace, _KEY)
    aten.impl("fake_quantize_per_channel_affine_cachemask_backward", _fake_quantize_backward, _KEY)
    aten.impl("kron", kron, _KEY)
    for name in _RESAMPLING:
        aten.impl(f"{name}.vec", _resampling(getattr(torch.ops.aten, name).default), _KEY)
    for name, program in PROGRAMS.items():
        aten.impl(name, _or_torch(name, program), _KEY)
    for name in _OVER_MEMORY:
        aten.impl(name, _refused(name.partition(".")[0]), _KEY)
    for name, program in symbolic_writes(lambda: torch._C._ExcludeDispatchKeyGuard(symbolic_keys())):
        aten.impl(name.removeprefix("aten::"), program, _KEY)
    _libraries.extend((every, aten))
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))


def _or_torch(name: str, program: Callable[..., object]) -> Callable[..., object]:
    """The program, and torch's own for calls that it leaves."""
    operator, _, overload = name.partition(".")
    own = getattr(getattr(torch.ops.aten, operator), overload or "default")

    def run(*args: object, **kwargs: object) -> object:
        found = program(*args, **kwargs)
        if found is not NotImplemented:
            return found
        with torch._C._ExcludeDispatchKeyGuard(symbolic_keys()):
            return own(*args, **kwargs)

    return run


def _refused(name: str) -> Callable[..., object]:
    """The program of an operator that reads memory, of which fakes have none. Raises DataDependentValue."""

    def program(*args: object, **kwargs: object) -> object:
        raise DataDependentValue(
            f"{name}()", "its kernel reads a tensor's memory", "Keep this call out of the compiled region."
        )

    return program


def kron(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each dim of the result is one of `x` outside and one of `y` inside."""
    rank = max(x.dim(), y.dim())
    outer, inner = ((1,) * (rank - t.dim()) + tuple(t.shape) for t in (x, y))
    view = torch.ops.aten._unsafe_view
    product = view(x, [size for one in outer for size in (one, 1)]) * view(y, [s for one in inner for s in (1, one)])
    joined: torch.Tensor = view(product, [a * b for a, b in zip(outer, inner, strict=True)])
    return joined


# What `interpolate` calls: torch's own programs take sizes, and products of sizes with factors, as numbers.
_RESAMPLING: Final = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
_EXACT: Final = 2**10
"""A factor that is a fraction with so small a denominator times any size is an exact float64."""


def _resampling(resample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The overload of a resampling with a size or factors, by the one with a size and a factor for each dim."""

    def program(
        x: torch.Tensor, size: Sequence[Size] | None, *rest: bool | Sequence[float] | None, **named: object
    ) -> torch.Tensor:
        *align, factors = (*rest, *(named.pop(name) for name in ("align_corners", "scale_factors") if name in named))
        if (size is None) == (factors is None):
            raise RuntimeError("Must specify exactly one of output_size and scale_factors")
        spatial = x.shape[2:]
        if size is None:
            assert isinstance(factors, Sequence)
            if len(factors) != len(spatial):
                raise RuntimeError("expected as many scale_factors as there are spatial dims")
            size = [_multiple(one, factor) for one, factor in zip(spatial, factors, strict=True)]
        scales = factors if isinstance(factors, Sequence) else (None,) * len(spatial)
        resampled: torch.Tensor = resample(x, size, *align, *scales)
        return resampled

    return program


def _multiple(size: Size, factor: float) -> Size:
    """The whole part of a size times a factor; where no quotient of integers says it, of the size as a number."""
    top, bottom = float(factor).as_integer_ratio()
    if isinstance(size, int) or bottom > _EXACT:
        return int(int(size) * factor)
    return size * top // bottom if bottom > 1 else size * top


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.matmul` of two tensors by the operators that eager comes to, in their order."""
    if x.dim() == 0 or y.dim() == 0:
        raise RuntimeError(f"both arguments to matmul need to be at least 1D, but they are {x.dim()}D and {y.dim()}D")
    x, y = _autocast(x), _autocast(y)
    match x.dim(), y.dim():
        case 1, 1:
            return x.dot(y)
        case 2, 1:
            return x.mv(y)
        case 1, 2:
            return x.unsqueeze(0).mm(y).squeeze_(0)
        case 2, 2:
            return x.mm(y)
        case ((1 | 2), _):
            if _folds(y.mT, x, x_is_large=False):
                return _folded_left(x, y)
        case _, (1 | 2):
            if _folds(x, y, x_is_large=True):
                return _folded(x, y)
        case 3, 3 if x.shape[0] != y.shape[0]:  # one of them is broadcast: it is a matrix
            if x.shape[0] == 1:
                return matmul(x.squeeze(0), y)
            if y.shape[0] == 1:
                return matmul(x, y.squeeze(0))
    return _batched(x, y)


def _matmul_into(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Torch's own program writes to a view of `out` and asks whether that is a copy, which is not to be seen on fakes:
    each has a storage of its own."""
    result = torch.matmul(x, y)
    if out is None:
        return result
    torch.ops.aten.view_copy.out(result, result.shape, out=out)
    return out


def lstm(*args: Any, **kwargs: Any) -> object:
    """`torch.lstm` by operators that have derivatives of their own: oneDNN's keeps a workspace for the backward, whose
    size it alone knows."""
    packed = isinstance(args[1], torch.Tensor)  # batch sizes come behind the data
    trains = args[7] if packed else args[6]
    with without_onednn() if trains or torch.is_grad_enabled() else nullcontext():
        return torch.lstm(*args, **kwargs)


def _interpolate(x: torch.Tensor, size: Size | Sequence[Size] | None = None, *rest: object, **named: object) -> object:
    """`interpolate` to sizes that are symbols, also of a tensor that has none and bears no key for them."""
    sizes = size if isinstance(size, Sequence) else (size,)
    if not symbolic_keys() or not any(isinstance(one, torch.SymInt) for one in sizes):
        return F.interpolate(x, size, *rest, **named)  # type: ignore[arg-type]
    with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse(_KEY)):
        return F.interpolate(x, size, *rest, **named)  # type: ignore[arg-type]


# What to call in the place of a function of torch wherever sizes may be symbols.
PROGRAMS_OVER_SYMBOLS: dict[object, Callable[..., object]] = {F.interpolate: _interpolate}
# What to call on fakes in the place of a function of torch whose own program does not run on them.
PROGRAMS_FOR_FAKES: dict[object, Callable[..., object]] = {
    torch.matmul: _matmul_into,
    torch.linalg.matmul: _matmul_into,
    torch.lstm: lstm,
    **PROGRAMS_OVER_SYMBOLS,
}


def _fake_quantize_backward(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Torch's own program compares the numbers of elements, as numbers."""
    return gradient * mask


def _cross_entropy(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    of_probabilities = target.is_floating_point() and ignore_index < 0 and tuple(scores.shape) == tuple(target.shape)
    some = scores.dim() > 0 and not any(size == 0 for size in scores.shape)
    if of_probabilities and some and not torch.is_autocast_enabled(scores.device.type):
        return cross_entropy_of_probabilities(scores, target, weight, reduction, label_smoothing)
    with torch._C._ExcludeDispatchKeyGuard(symbolic_keys()):
        loss: torch.Tensor = torch.ops.aten.cross_entropy_loss.default(
            scores, target, weight, reduction, ignore_index, label_smoothing
        )
    return loss


def cross_entropy_of_probabilities(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, label_smoothing: float
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of targets with a probability for each class, by eager's operators.

    Args:
        scores, target: (batch, classes, ...) or (classes,), no size 0.
        reduction: 0: none, 1: the mean over all but the classes, 2: the sum.
    """
    dim = 0 if scores.dim() == 1 else 1
    classes = scores.shape[dim]
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != classes):
        raise RuntimeError(
            "cross_entropy: weight tensor should be defined either for all "
            f"{int(classes)} classes or no classes but got weight tensor of shape: {list(weight.shape)}"
        )
    logs = scores.log_softmax(dim, scores.dtype)
    if label_smoothing > 0.0:
        aten = torch.ops.aten
        target = aten.add.Scalar(aten.mul.Scalar(target, 1 - label_smoothing), label_smoothing / classes)
    if weight is not None and scores.dim() > 1:
        weight = weight.view([1, classes] + [1] * (scores.dim() - 2))
    product = logs * target if weight is None else logs * target * weight
    if reduction == 0:
        return -product.sum(dim)
    total = -product.sum()
    if reduction == 2:
        return total
    mean: torch.Tensor = torch.ops.aten.div.Scalar(total, _count(scores.shape) // classes)
    return mean


def _trace(x: torch.Tensor) -> torch.Tensor:
    """By operators whose derivatives ask for no number of elements."""
    if x.dim() == 2:
        return x.diagonal().sum()
    with torch._C._ExcludeDispatchKeyGuard(symbolic_keys()):
        return x.trace()  # the error


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """In the precision that autocast gives to products of matrices."""
    device = x.device.type
    if not x.is_floating_point() or x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _folds(large: torch.Tensor, small: torch.Tensor, *, x_is_large: bool) -> bool:
    """Whether the leading dims of the large tensor become one: where that copies nothing, or spares the gradient of the
    small one its batch dims."""
    if small.requires_grad:
        return True
    if small.dim() == 2 and not x_is_large:  # its result would have to be transposed, and copied for it
        return False
    shape, strides = large.shape, large.stride()
    if any(size == 0 for size in shape):
        return True
    return all(strides[d] == strides[d + 1] * shape[d + 1] for d in range(large.dim() - 2))


def _folded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of many dims by a matrix or a vector: one product of matrices."""
    rows = x.shape[:-1]
    flat = x.reshape(_count(rows), x.shape[-1])
    if y.dim() == 1:
        return _unsafe_view(flat.mv(y), rows)
    return _unsafe_view(flat.mm(y), (*rows, y.shape[1]))


def _folded_left(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A matrix or a vector by many dims: (y' x')'."""
    if x.dim() == 1:
        return _folded(y.mT, x)
    return _folded(y.mT, x.t()).mT.contiguous()


def _batched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Products of matrices, one for each place of the broadcast leading dims."""
    batch = broadcast(tuple(x.shape[:-2]), tuple(y.shape[:-2]))
    count = _count(batch)
    rows = x.shape[-2:-1]  # empty for a vector, as is the number of columns
    columns = y.shape[-1:] if y.dim() > 1 else ()
    inner = y.shape[-2:-1] if y.dim() > 1 else y.shape
    left = x.expand(*batch, *(rows or (1,)), x.shape[-1]).reshape(count, *(rows or (1,)), x.shape[-1])
    right = y.expand(*batch, *inner, *columns).reshape(count, *inner, *columns)
    if not columns:
        product = left.bmm(right.unsqueeze(2)).squeeze(-1)
    else:
        product = left.bmm(right)
    return _unsafe_view(product, (*batch, *rows, *columns))


def _unsafe_view(x: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor:
    """A view that autograd takes for a result of its own, so that the program may write to it."""
    viewed: torch.Tensor = torch.ops.aten._unsafe_view.default(x, list(shape))
    return viewed


def _count(sizes: Sequence[Size]) -> Size:
    return math.prod(sizes)
