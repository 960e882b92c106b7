"""One HTML page of what happened to a program: self-contained, without scripts, light or dark, at any width.

`contents` says what the page is made of, `listing` puts graphs, breaks and kernels beside the user's lines, `timeline`
lays out when each stage ran, `tables` computes kernels' rows, `render` fills the templates.
"""

from torchcompile.page.contents import Contents
from torchcompile.page.render import render, render_profile
from torchcompile.page.tables import PartRow, part_rows

__all__ = ["Contents", "PartRow", "part_rows", "render", "render_profile"]
