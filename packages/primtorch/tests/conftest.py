"""Makes this folder's own modules importable from its tests, and torchvision importable beside a CPU build of torch."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

if not torch.version.cuda:
    # A torchvision wheel for CUDA cannot load its operators here, and then fails at import while it describes them.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in (
        "roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool "
        "_ps_roi_pool_backward nms qnms qroi_align deform_conv2d _deform_conv2d_backward"
    ).split():
        try:
            torch._C._dispatch_find_schema_or_throw(f"torchvision::{_name}", "")
        except RuntimeError:
            _library.define(f"{_name}(Tensor x) -> Tensor")
