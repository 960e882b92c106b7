"""What a back end makes of a kernel is made once for all kernels of its form: a layer's are the next layer's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

from torchinductor.ir import Kernel

MadeT = TypeVar("MadeT")
MOST = 1024  # forms, of which some kilobytes each are kept


def by_form(make: Callable[[Kernel], MadeT]) -> Callable[[Kernel], MadeT]:
    """`make`, asked once for each form (`Kernel.form`). What it gives is nobody's to change, depends on the kernel
    alone, and says nothing of its names."""
    made: dict[Hashable, MadeT] = {}

    @wraps(make)
    def get(kernel: Kernel) -> MadeT:
        form = kernel.form
        found = made.get(form)
        if found is None:
            found = make(kernel)
            if len(made) >= MOST:
                made.clear()
            made[form] = found
        return found

    return get
