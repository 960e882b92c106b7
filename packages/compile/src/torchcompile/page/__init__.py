"""One HTML page of what happened to a program: self-contained, without scripts, light or dark, at any width.

`contents` says what the page is made of, `listing` puts graphs, breaks and kernels beside the user's lines, `timeline`
lays out when each stage ran, `tables` computes kernels' rows, `filled` fills the templates.
"""

from typing import TYPE_CHECKING

from primtorch.late import late
from torchcompile.page.contents import Contents
from torchcompile.page.tables import PartRow, part_rows

if TYPE_CHECKING:
    from torchcompile.page.filled import render, render_profile

_FILLED = "torchcompile.page.filled"  # needs jinja2 and pygments
__getattr__ = late(__name__, {"render": _FILLED, "render_profile": _FILLED})

__all__ = ["Contents", "PartRow", "part_rows", "render", "render_profile"]
