"""In what eager's kernels differ between devices, where results tell it: a table of facts by name.

A formula or a rule asks for the fact that it is about, and not for a device: `Fact.KEEPS_MEMORY_FORMATS.on(x.device)`.
"""

from __future__ import annotations

from enum import Enum

import torch


class Fact(Enum):
    """What holds for one type of device, and for no other.

    Attributes:
        says: what it says of eager's kernels there.
        device_type: where it holds.
    """

    # --- how results lie -----------------------------------------------------------------------
    KEEPS_MEMORY_FORMATS = "shuffles, pads with what is there, unpooling and group norms keep channels-last", "cpu"
    ROLLS_BY_CAT = "pieces of a roll are joined by cat, which keeps channels-last where none of them is empty", "cpu"
    BATCH_NORM_KEEPS_ROWS_FIRST = "of a tensor that is contiguous in several formats a batch norm takes rows", "cpu"
    CASTS_BEFORE_IT_LOOKS = "TensorIterator casts operands of another dtype before it looks at strides", "cpu"
    LOG_SIGMOID_BY_ROWS = "log_sigmoid writes by rows", "cpu"
    LAPACK_LEAVES_COLUMNS = "V^H and eigenvectors are column-major, as LAPACK leaves them", "cpu"
    CONVOLVES_BY_SEVERAL_LIBRARIES = "convolutions go to one of several libraries, by sizes and threads", "cpu"
    # --- what is kept beside a result ----------------------------------------------------------
    KEEPS_NARROW_STATISTICS = "mean and rstd have the input's dtype, unless parameters have another", "cpu"
    KEEPS_NO_STATISTICS_IN_EVAL = "a batch norm that does not train keeps empty statistics", "cpu"
    KEEPS_EXP_OF_LOG_SIGMOID = "log_sigmoid keeps exp(-|x|) for its backward, other devices nothing", "cpu"
    KEEPS_WHAT_BAGS_NEED = "an embedding bag keeps the bags of indices unless sums are fast, and sizes by bag", "cpu"
    # --- how it computes -----------------------------------------------------------------------
    ROUNDS_NUMBERS = "numbers of a sum are rounded to the dtype of its tensors", "cpu"
    ROUNDS_POWERS_OF_BFLOAT16 = "powers of bfloat16 by a number round at each step", "cpu"
    DEVIATIONS_IN_DOUBLE = "a batch norm's deviations are computed in float64", "cpu"
    FUSED_GELU_IS_TANH = "gelu behind a fused product is that by tanh", "cuda"
    AUTOCASTS_TO_SECOND_DTYPE = "autocast operators take the second of their switches and dtypes", "cpu"
    TRANSFORMS_ALL_DIMS_AT_ONCE = "a Fourier transform is of all dims at once; on others of three at a time", "cpu"
    TRANSFORMS_BY_MKL = "Fourier transforms are MKL's, in builds that have it", "cpu"
    LSTSQ_BY_GELSY = "least squares are solved by gelsy where no driver is named", "cpu"
    ATTENDS_RAGGED_BY_LOOPS = "attention of ragged heads is torch's own code over padded tensors", "cpu"
    NAMES_FIRST_PLANE = "channels-last windows of volumes whose maximum is the lowest value name the first plane", "cpu"
    # --- what it refuses, or takes -------------------------------------------------------------
    REFUSES_NO_INDICES = "indexing by nothing but empty places raises", "cpu"
    READS_VECTORS_OF_BATCH_NORM = "parameters of a batch norm have one dim", "cpu"
    REFUSES_LONG_OUTPUT_PADDING = "the padding of a transposed convolution's result is bounded", "cpu"
    SETS_ONE_ELEMENT_UNCHECKED = "a fill of one element in 16 bits does not look whether it overflows", "cpu"
    MULTIPLIES_UINT8 = "products of int8 take uint8 on the left", "cpu"
    DIVISION_BY_ZERO_RAISES = "whole numbers over zero raise", "cpu"

    def __init__(self, says: str, device_type: str) -> None:
        self.says = says
        self.device_type = device_type

    def on(self, device: torch.device) -> bool:
        """Whether it holds for the kernels of a device."""
        return device.type == self.device_type
