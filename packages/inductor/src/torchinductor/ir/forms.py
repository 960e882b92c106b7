"""Forms of kernels: what kernels have in common that do the same, each to memory of its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from primtorch.frozen import record

if TYPE_CHECKING:
    from torchinductor.ir.kernel import Kernel


class Content:
    """All that a kernel does, as a key: its parts are gone through once for their hash, and not at all to find out that
    it is itself."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Content) and self._hash == other._hash and self._parts == other._parts
        )


@record
class Form:
    """A kernel apart from its names.

    Attributes:
        content: equal for kernels that do the same.
        buffers, keys: the names of its buffers and of its reductions, in the order in which it first has them.
    """

    content: Content
    buffers: tuple[str, ...]
    keys: tuple[str, ...]


class Numbers:
    """Names by number, in the order in which they are first met: see `ir.operations.Names`."""

    __slots__ = ("buffers", "keys")

    def __init__(self) -> None:
        self.buffers: dict[str, int] = {}
        self.keys: dict[str, int] = {}

    def buffer(self, name: str) -> int:
        """A buffer's number."""
        return self.buffers.setdefault(name, len(self.buffers))

    def key(self, key: str) -> int:
        """A reduction's number."""
        return self.keys.setdefault(key, len(self.keys))


def form_of(kernel: Kernel) -> Form:
    """The form of a kernel whose layout, if it has one, has a hash."""
    numbers = Numbers()
    stages = [(stage.kind, tuple([op.unnamed(numbers) for op in stage.body.ops])) for stage in kernel.stages]
    rows = tuple(map(numbers.buffer, kernel.rows))
    local = frozenset(map(numbers.buffer, kernel.local))
    over = tuple((numbers.buffer(written), numbers.buffer(read)) for written, read in kernel.in_place)
    known = (kernel.buffers.get(name) for name in numbers.buffers)
    memory = [None if found is None else (found.dtype, found.shape, found.strides) for found in known]
    flags = kernel.device, kernel.scatters, kernel.layout
    content = Content(flags, kernel.axes, tuple(stages), tuple(memory), rows, local, over)
    return Form(content, tuple(numbers.buffers), tuple(numbers.keys))
