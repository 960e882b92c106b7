"""How much memory a program takes, counted from its instructions."""

import torch

from torchinductor.program import Alloc, Free, View


def bytes_at_peak(compiled):
    """The most bytes that the program's own allocations hold at once. A view keeps the memory that it looks at."""
    storage_of, users, size, now, peak = {}, {}, {}, 0, 0
    for at, instruction in enumerate(compiled.program.instructions):
        match instruction:
            case Alloc(dst, shape, _, dtype, _):
                storage_of[dst], users[at] = at, 1
                size[at] = dtype.itemsize * torch.Size(shape).numel()
                now += size[at]
            case View(dst, src) if src in storage_of:
                storage_of[dst] = storage_of[src]
                users[storage_of[src]] += 1
            case Free(slot) if slot in storage_of:
                storage = storage_of.pop(slot)
                users[storage] -= 1
                now -= size[storage] if users[storage] == 0 else 0
        peak = max(peak, now)
    return peak
