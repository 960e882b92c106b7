"""Deep models are built of equal layers: what is made of a kernel is made once for all kernels of its form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

from primtorch.frozen import record
from torchinductor.ir.body import Body
from torchinductor.ir.forms import Form, Numbers
from torchinductor.ir.kernel import Kernel, Stage
from torchinductor.ir.operations import Operation

MadeT = TypeVar("MadeT")
Given = ParamSpec("Given")
MOST = 1024  # forms, of which some kilobytes each are kept
_NAMELESS = ("indices", "faults", "scans")  # what a body has found out of itself, whatever its names are


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


def kernels_by_form(make: Callable[Given, Sequence[Kernel]]) -> Callable[Given, Sequence[Kernel]]:
    """The same where kernels are made, of one kernel or of several: what was made of others of their forms, which have
    as much in common, under the names of these.

    What it gives depends on what it is given alone. It has no reductions but theirs, their origins in order, and where
    kernels and buffers are new, the first kernel's name and what tells them apart.
    """
    known: dict[Hashable, tuple[list[Kernel], list[_Model]]] = {}

    @wraps(make)
    def get(*args: Given.args, **kwargs: Given.kwargs) -> Sequence[Kernel]:
        kernels = [value for value in args if isinstance(value, Kernel)]
        further = tuple([value for value in args if not isinstance(value, Kernel)])
        content = (*[kernel.form.content for kernel in kernels], _common(kernels), further, *kwargs.items())
        found = known.get(content)
        if found is None:
            made = make(*args, **kwargs)
            _keep(known, content, (list(map(_alone, kernels)), [_Model.of(result) for result in made]))
            return made
        models, results = found
        names = _Renaming(models, kernels)
        return [names.apply(result) for result in results]

    return get


def _common(kernels: Sequence[Kernel]) -> Hashable:
    """Which names of several kernels are the same."""
    if len(kernels) == 1:
        return None
    numbers, forms = Numbers(), [kernel.form for kernel in kernels]
    buffers = tuple([numbers.buffer(name) for form in forms for name in form.buffers])
    return buffers, tuple([numbers.key(name) for form in forms for name in form.keys])


@record
class _Model:
    """What was made of kernels, as it is made of others of their forms.

    Attributes:
        named: of each stage, the places of the operations that say a name.
    """

    kernel: Kernel
    named: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(made: Kernel) -> _Model:
        ops = [enumerate(stage.body.ops) for stage in made.stages]
        named = [tuple([at for at, op in of_stage if type(op).renamed is not Operation.renamed]) for of_stage in ops]
        return _Model(_alone(made), tuple(named))


class _Renaming:
    """From the names of kernels to those of others of their forms; see `ir.operations.Names`."""

    def __init__(self, old: Sequence[Kernel], new: Sequence[Kernel]) -> None:
        self._old, self._new = old[0].name, new[0].name
        self._buffers: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        for one, other in zip(old, new, strict=True):
            self._buffers.update(zip(one.form.buffers, other.form.buffers, strict=True))
            self._keys.update(zip(one.form.keys, other.form.keys, strict=True))
        self._known = new[0].buffers
        self._origins = tuple([origin for kernel in new for origin in kernel.origins])

    def own(self, name: str) -> str:
        """A name that was made of the first kernel's."""
        return self._new + name.removeprefix(self._old)

    def buffer(self, name: str) -> str:
        found = self._buffers.get(name)
        return self.own(name) if found is None else found

    def key(self, key: str) -> str:
        return self._keys[key]

    def apply(self, model: _Model) -> Kernel:
        """What was made of the ones, as it is of the others."""
        made = model.kernel
        form = made.form
        stages = [
            Stage(stage.kind, self._body(stage.body, named))
            for stage, named in zip(made.stages, model.named, strict=True)
        ]
        added = [made.buffers[name] for name in form.buffers if name not in self._buffers]
        workspaces = {self.own(buffer.name): replace(buffer, name=self.own(buffer.name)) for buffer in added}
        found = replace(
            made,
            name=self.own(made.name),
            stages=tuple(stages),
            buffers={**self._known, **workspaces} if workspaces else self._known,
            origins=self._origins,
            local=frozenset(map(self.buffer, made.local)),
            rows=tuple(map(self.buffer, made.rows)),
            in_place=tuple((self.buffer(written), self.buffer(read)) for written, read in made.in_place),
        )
        # As it would find out itself, whenever it is asked.
        buffers, keys = tuple(map(self.buffer, form.buffers)), tuple(map(self.key, form.keys))
        vars(found)["form"] = Form(form.content, buffers, keys)
        for name in ("reads", "writes", "arguments"):
            vars(found)[name] = tuple(map(self.buffer, getattr(made, name)))
        return found

    def _body(self, body: Body, named: Sequence[int]) -> Body:
        ops = list(body.ops)
        for place in named:
            ops[place] = ops[place].renamed(self)
        found, known = Body(tuple(ops)), vars(body)
        vars(found).update((name, known[name]) for name in _NAMELESS if name in known)
        return found


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
