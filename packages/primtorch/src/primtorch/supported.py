"""The torch and Python releases that this stack is tested with: the one list, which everything else follows.

`primtorch` warns where another torch runs. The packages' metadata, the test matrix and the README are held to the list
by tools/check/versions.py, which reads this file without importing torch.
"""

from __future__ import annotations

import warnings

# The newest patch of each minor release of torch, and the releases of Python; each with each is tested.
TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
PYTHON = ("3.11", "3.12", "3.13")


class UntestedTorch(UserWarning):
    """The torch that runs is none that this stack was tested with."""


def minor(release: str) -> tuple[int, int]:
    """`(2, 13)` of "2.13.0+cpu"."""
    first, second = release.split(".")[:2]
    return int(first), int(second)


def warn_if_untested(running: str) -> None:
    """Warns once a process (at the import of primtorch, which every package imports) where `running` is untested."""
    oldest, newest = minor(TORCH[0]), minor(TORCH[-1])
    if not oldest <= minor(running) <= newest:
        span = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        warnings.warn(
            f"torch {running} is outside of the releases that this compiler stack was tested with ({span}): what it "
            f"does not know there may run eagerly or fail. To be sure, install a tested one "
            f"(pip install torch=={TORCH[-1]}), or a release of this stack that lists yours.",
            UntestedTorch,
            stacklevel=2,
        )
