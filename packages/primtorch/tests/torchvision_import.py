"""torchvision, imported also where its compiled operators cannot be loaded.

A wheel of torchvision for CUDA does not load its operators beside a CPU build of torch, and then fails at import while
it describes them. Its models do without: once the operators are declared, it imports. Where the operators are there, to
declare them again would end the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

OPERATORS = (
    "roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool "
    "_ps_roi_pool_backward nms qnms qroi_align deform_conv2d _deform_conv2d_backward"
)
_declared: list[torch.library.Library] = []  # which would take back its operators when it goes


def import_torchvision() -> None:
    """Imports torchvision where it is installed, with operators that are only declared where they do not load."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):  # operator torchvision::nms does not exist
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in OPERATORS.split():
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)
        importlib.import_module("torchvision")
