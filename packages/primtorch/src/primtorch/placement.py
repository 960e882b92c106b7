"""Where a tensor is made that an operator makes out of nothing."""

from __future__ import annotations

import torch

_CPU = torch.device("cpu")


def resolved_device(device: torch.device | str | None) -> torch.device:
    """The device with an index where its type has several, as a tensor made there says it; the default one for None."""
    if device is None:
        return torch.get_default_device() if torch.get_default_device() is not None else _CPU
    found = torch.device(device)
    if found.index is None and found.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return found
