"""Writes a bundle: each program runs one of the kernels, as its number says."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torchinductor.codegen.naming import described
from torchinductor.indexing import number
from torchinductor.ir import Bundle, Kernel

from .expressions import POINTER_TYPES
from .marks import arguments_of, marked
from .plan import Layout
from .writer import Form, TritonSource, body_of, written_out

_FLAT_BLOCK, _FLAT_WARPS = 1024, 4
OWN = "\0"  # where a function that has no name yet says that it may take numbers


def key_of(kernel: Kernel) -> Hashable | None:
    """Kernels of the same number of threads go together: lines over everything, and short rows."""
    layout = kernel.laid_out(Layout)
    if layout.wide or any(kernel.buffers[name].dtype not in POINTER_TYPES for name in kernel.arguments):
        return None
    if layout.walk is not None:
        return None
    if layout.shape == "flat":
        return "flat"
    return ("rows", layout.warps) if layout.shape == "reduction" and layout.persistent else None


def as_part(kernel: Kernel) -> Kernel:
    """The kernel as it runs beside others: lines have the same number of threads."""
    layout = kernel.laid_out(Layout)
    if layout.shape != "flat":
        return kernel
    return replace(kernel, layout=replace(layout, x_block=_FLAT_BLOCK, warps=_FLAT_WARPS))


def programs(bundle: Bundle) -> list[int]:
    """How many programs each kernel has."""
    return [_programs(as_part(part)) for part in bundle.parts]


def _programs(part: Kernel) -> int:
    return part.laid_out(Layout).grid.as_int() or 0


def write_bundle(bundle: Bundle) -> TritonSource:
    """The source: a function for each kernel that differs, and one that calls them. Raises Unsupported."""
    signature: list[tuple[str, str]] = []
    functions: dict[str, str] = {}
    alike: dict[tuple[str, tuple[str, ...], int], list[list[str]]] = {}  # pointers of the kernels that are one function
    parts = [as_part(part) for part in bundle.parts]
    for part, count in zip(parts, map(_programs, parts), strict=True):
        own = [f"p{i}" for i in range(len(part.arguments))]
        lines = [line for line in body_of(part) if not line.startswith("pid = ")]
        text = "\n".join(["    " + line for line in lines])
        called = functions.setdefault(f"({', '.join(['pid', *own])}{OWN}):\n{text}\n", f"part{len(functions)}")
        given = [f"p{len(signature) + i}" for i in range(len(own))]
        kinds = tuple(POINTER_TYPES[part.buffers[b].dtype] for b in part.arguments)
        signature += zip(given, kinds, strict=True)
        alike.setdefault((called, kinds, count), []).append(given)
    calls: list[str] = []
    begun = 0
    for (called, _, count), pointers in alike.items():
        calls += _calls(called, begun, count, pointers)
        begun += count * len(pointers)
    layout = parts[0].laid_out(Layout)
    made = tuple(
        (part, f"@triton.jit\ndef {part}{body.replace(OWN, arguments_of(part), 1)}") for body, part in functions.items()
    )
    title = described((stage.body for part in bundle.parts for stage in part.stages), "bundle")
    body = "\n".join(["    pid = tl.program_id(0)", *calls]) + "\n"
    form = Form(title, tuple(signature), layout.warps, body, made)
    name, text = written_out(form)
    written = tuple(i for i, name in enumerate(bundle.arguments) if name in bundle.writes)
    grid = (number(begun), number(1), number(1))
    arguments = bundle.arguments
    return TritonSource(
        name, text, form.parameters, layout.warps, layout.stages, grid, arguments, (), written, form=form
    )


def _calls(called: str, begun: int, count: int, pointers: Sequence[Sequence[str]]) -> list[str]:
    """The programs from `begun` on run a function, `count` of them for each list of pointers.

    It is called in one place, with the pointers that a program chooses: each call would be compiled for itself, and a
    layer's sums are the next layer's."""
    first, many, own = marked(begun, "c"), marked(count, "c"), arguments_of(called)
    lines = [f"    if (pid >= {first}) & (pid < {marked(begun + count * len(pointers), 'c')}):"]
    if len(pointers) == 1:
        return [*lines, f"        {called}({', '.join([f'pid - {first}', *pointers[0]])}{own})"]
    lines.append(f"        part = (pid - {first}) // {many}")
    chosen = [f"q{i}" for i in range(len(pointers[0]))]
    for name, (chief, *others) in zip(chosen, zip(*pointers, strict=True), strict=True):
        lines.append(f"        {name} = {chief}")
        lines += [f"        {name} = tl.where(part == {k}, {other}, {name})" for k, other in enumerate(others, 1)]
    return [*lines, f"        {called}({', '.join([f'pid - {first} - part * {many}', *chosen])}{own})"]
