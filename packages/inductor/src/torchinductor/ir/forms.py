"""Forms of kernels: what kernels have in common that do the same, each to memory of its own.

Deep models are built of equal layers. What is made of a kernel is made once for all kernels of its form, and given to
the others under their names (`by_form`, `kernels_by_form`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from torchinductor.ir.body import Body

if TYPE_CHECKING:
    from torchinductor.ir.kernel import Kernel

MadeT = TypeVar("MadeT")
Further = ParamSpec("Further")
MOST = 1024  # forms, of which some kilobytes each are kept


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel apart from its names.

    Attributes:
        content: equal for kernels that do the same.
        buffers, keys: the names of its buffers and of its reductions, in the order in which it first has them.
    """

    content: Hashable
    buffers: tuple[str, ...]
    keys: tuple[str, ...]


class Numbers:
    """Names by number, in the order in which they are first met: see `ir.operations.Names`."""

    __slots__ = ("buffers", "keys")

    def __init__(self) -> None:
        self.buffers: dict[str, int] = {}
        self.keys: dict[str, int] = {}

    def buffer(self, name: str) -> int:
        return self.buffers.setdefault(name, len(self.buffers))

    def key(self, key: str) -> int:
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
    content = (flags, kernel.axes, tuple(stages), tuple(memory), rows, local, over)
    return Form(content, tuple(numbers.buffers), tuple(numbers.keys))


class _Renaming:
    """From the names of a kernel to those of another of its form; see `ir.operations.Names`."""

    def __init__(self, old: Kernel, new: Kernel) -> None:
        self._old, self._new = old.name, new.name
        self._buffers = dict(zip(old.form.buffers, new.form.buffers, strict=True))
        self._keys = dict(zip(old.form.keys, new.form.keys, strict=True))

    def own(self, name: str) -> str:
        """A name that was made of the kernel's own."""
        return self._new + name.removeprefix(self._old)

    def buffer(self, name: str) -> str:
        found = self._buffers.get(name)
        return self.own(name) if found is None else found

    def key(self, key: str) -> str:
        return self._keys[key]

    def apply(self, made: Kernel, of: Kernel) -> Kernel:
        """What was made of the one kernel, as it is of the other."""
        stages = [
            replace(stage, body=Body(tuple([op.renamed(self) for op in stage.body.ops]))) for stage in made.stages
        ]
        added = [made.buffers[name] for name in made.form.buffers if name not in self._buffers]
        workspaces = {self.own(buffer.name): replace(buffer, name=self.own(buffer.name)) for buffer in added}
        found = replace(
            made,
            name=self.own(made.name),
            stages=tuple(stages),
            buffers={**of.buffers, **workspaces} if workspaces else of.buffers,
            origins=of.origins,
            local=frozenset(map(self.buffer, made.local)),
            rows=tuple(map(self.buffer, made.rows)),
            in_place=tuple((self.buffer(written), self.buffer(read)) for written, read in made.in_place),
        )
        form = made.form
        vars(found)["form"] = replace(
            form, buffers=tuple(map(self.buffer, form.buffers)), keys=tuple(map(self.key, form.keys))
        )
        return found


def by_form(make: Callable[[Kernel], MadeT]) -> Callable[[Kernel], MadeT]:
    """`make`, asked once for each form. What it gives is nobody's to change, depends on the kernel alone, and says
    nothing of its names."""
    known: dict[Hashable, MadeT] = {}

    @wraps(make)
    def get(kernel: Kernel) -> MadeT:
        content = kernel.form.content
        found = known.get(content)
        if found is None:
            found = make(kernel)
            _keep(known, content, found)
        return found

    return get


def kernels_by_form(
    make: Callable[Concatenate[Kernel, Further], Sequence[Kernel]],
) -> Callable[Concatenate[Kernel, Further], Sequence[Kernel]]:
    """The same where it gives kernels: what was made of another kernel of the form, under this one's names.

    It depends on the kernel and on what is further given alone, has no reductions that the kernel has not, and names
    kernels and buffers that it makes by the kernel's name and what they are.
    """
    known: dict[Hashable, tuple[Kernel, Sequence[Kernel]]] = {}

    @wraps(make)
    def get(kernel: Kernel, *args: Further.args, **kwargs: Further.kwargs) -> Sequence[Kernel]:
        content = (kernel.form.content, args, tuple(kwargs.items()))
        found = known.get(content)
        if found is None:
            made = make(kernel, *args, **kwargs)
            _keep(known, content, (_alone(kernel), [_alone(result) for result in made]))
            return made
        model, results = found
        names = _Renaming(model, kernel)
        return [names.apply(result, kernel) for result in results]

    return get


def _alone(kernel: Kernel) -> Kernel:
    """The kernel with what is known of its own buffers: others are of its graph, which is not to be kept for it."""
    form = kernel.form
    alone = replace(kernel, buffers={name: kernel.buffers[name] for name in form.buffers if name in kernel.buffers})
    vars(alone)["form"] = form
    return alone


def _keep(known: dict[Hashable, MadeT], content: Hashable, made: MadeT) -> None:
    if len(known) >= MOST:
        known.clear()
    known[content] = made
