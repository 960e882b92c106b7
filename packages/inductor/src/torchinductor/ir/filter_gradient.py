"""The gradient of a depthwise convolution's filters as a template: sums for all taps from what is read once.

A filter's element (y, x) is the sum, over all elements of the gradient of its channel, of these times the image's
element that the tap fell on. As plain loops each tap would read both; a design of its own keeps a sum for each tap.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchinductor.ir.kernel import Axis
from torchinductor.ir.template import Region, Template


@dataclass(frozen=True, kw_only=True)
class FilterGradient(Template):
    """Sums over lines of the gradient (of all images, one after the other) and the places of a line: its loops are
    outer ones over the taps' rows, their columns and the channels, inner ones over lines and places.

    Attributes:
        gradient: of the results, (images, channels, height, width).
        image: what was convolved, of as many channels.
        kernel, stride, padding, dilation: of height and width.
    """

    gradient: Region
    image: Region
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def channels(self) -> Axis:
        """The axis of the channels."""
        return self.loops.outer[-1]

    @property
    def lines(self) -> Axis:
        """The axis of the lines, or of those of a part."""
        return self.loops.inner[0]

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.image.shape))
        kernel, stride = ("x".join(map(str, pair)) for pair in (self.kernel, self.stride))
        return f"template {self.kind}: of {kernel} taps, by {stride}, on {sizes}\n{self.loops}"
