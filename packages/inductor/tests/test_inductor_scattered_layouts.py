"""What values are scattered into lies where its reader wants it: nobody lays it out in one order and copies it to another.
What can be gathered from few places is not scattered."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import primtorch
from torchinductor import InductorOptions, compile_graph

Tensor = torch.Tensor
Program = Callable[[Tensor], Tensor]

PROGRAMS: dict[str, Program] = {
    "global max pool": lambda x: F.adaptive_max_pool2d(x, 1),
    "max pool to 3": lambda x: F.adaptive_max_pool2d(x, 3),
    "bilinear to half": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bilinear to 5": lambda x: F.interpolate(x, (5, 4), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, (5, 4), mode="bicubic"),
    "nearest to 5": lambda x: F.interpolate(x, (5, 4), mode="nearest"),
    "rows picked": lambda x: x[:, :, torch.tensor([3, 0, 3, 1])],
    "gathered": lambda x: x.flatten(2).gather(2, x.flatten(2).argsort(2)[..., :7] % 5),
}
GATHERED = ("global max pool", "bilinear to half", "bilinear to 5")
LAYOUTS = {"by rows": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_scattered_where_they_stay(name: str, layout: str) -> None:
    seed = random.randrange(1 << 20)
    torch.manual_seed(seed)
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64).to(memory_format=LAYOUTS[layout])
    result = PROGRAMS[name](x)
    tangent = torch.empty_like(result).normal_()

    def gradient(x: Tensor, tangent: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(PROGRAMS[name](leaf), leaf, tangent)[0]

    gm = primtorch.lower(primtorch.trace(gradient, x, tangent))
    compiled = compile_graph(gm, [x, tangent], InductorOptions())
    found, expected = compiled(x, tangent)[0], gradient(x, tangent)
    assert isinstance(found, Tensor) and found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, msg=lambda m: f"seed {seed}: {m}")
    if name not in ("rows picked", "gathered"):  # of which eager's gradient is by rows, whatever the layout
        kernels = re.findall(r"^ *// (\w+)$", "\n".join(compiled.sources.values()), re.MULTILINE)
        assert ("scatter_add" in kernels or "index_put" in kernels) == (name not in GATHERED)
        copies = [part.name for part in compiled.stats.parts if re.fullmatch(r"copy_strided_\d+", part.name)]
        assert not copies, copies  # of kernels that only copy
