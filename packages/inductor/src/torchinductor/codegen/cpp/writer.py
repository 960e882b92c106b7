"""Writes a planned kernel as a C++ function: its arguments, its frame of parallel loops, its stages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchinductor.codegen.cpp.expressions import STORAGE, index_text, symbol_text
from torchinductor.codegen.cpp.handler import CppHandler, Names
from torchinductor.codegen.cpp.plan import Layout
from torchinductor.codegen.cpp.rows import row_elements
from torchinductor.codegen.naming import PLACEHOLDER
from torchinductor.indexing import product
from torchinductor.ir import Body, Indirect, Kernel, by_form
from torchinductor.ops import Fault

_DECLARES_ARRAY = re.compile(r"\s*(?:float|double|bool|[iu]\d+)\b.*\[").match  # values that are read are constants


@by_form
def write(kernel: Kernel) -> str:
    """The text of a planned kernel: a function named PLACEHOLDER with the C ABI of kernels."""
    layout, names = kernel.laid_out(Layout), Names(kernel)
    checks = any(stage.body.faults for stage in kernel.stages)
    lines = [
        f'extern "C" int {PLACEHOLDER}(void* const* buffers, const i64* symbols) {{',
        *(f"  {line}" for line in arguments(kernel)),
        *(["  int bad = 0;"] if checks else []),
        *(f"  {line}" for line in empty_checks(kernel, [stage.body for stage in kernel.stages])),
    ]
    depth = 1
    if layout.frame and layout.parallel is not None:
        clause = f" if ({layout.parallel})" if layout.parallel else ""
        clause += " reduction(|:bad)" if checks else ""
        collapse = f" collapse({len(layout.frame)})" if len(layout.frame) > 1 else ""
        lines.append(f"  #pragma omp parallel for schedule(static){collapse}{clause}")
    for loop in layout.frame:
        lines.append("  " * depth + loop.head)
        depth += 1
    if layout.frame:
        depth -= 1
    body: list[str] = []
    for stage in kernel.stages:
        handler = CppHandler(kernel, names, stage)
        stage.body.replay(handler)
        body += handler.text.write()
    indent = "  " * depth
    inside = [*_rows(kernel, layout, names), *body]
    if any(map(_DECLARES_ARRAY, inside)):
        lines.insert(1, "  ALIGNED_FRAME")
    lines.append(f"{indent}{{")
    lines += [f"{indent}  {line}" for line in inside]
    lines.append(f"{indent}}}")
    lines.append(f"  return {'bad' if checks else '0'};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def arguments(kernel: Kernel) -> list[str]:
    """The declarations of a kernel's pointers and size symbols."""
    lines = []
    written = set(kernel.writes)
    shared = {name for pair in kernel.in_place for name in pair}
    for position, name in enumerate(kernel.arguments):
        kind = STORAGE[kernel.buffers[name].dtype]
        const = "" if name in written else "const "
        alone = "" if name in shared else " __restrict"
        lines.append(f"{const}{kind}*{alone} p{position} = ({const}{kind}*)buffers[{position}];")
    for position, symbol in enumerate(kernel.symbols):
        lines.append(f"const i64 {symbol_text(symbol)} = symbols[{position}];")
    return lines


def _rows(kernel: Kernel, layout: Layout, names: Names) -> list[str]:
    """Arrays for what one iteration of the frame keeps for itself."""
    count = row_elements(kernel, layout)
    kinds = {name: STORAGE[kernel.buffers[name].dtype] for name in kernel.rows}
    return [f"{kind} {names.pointer[name]}[{count}] __attribute__((aligned(64)));" for name, kind in kinds.items()]


def empty_checks(kernel: Kernel, bodies: Sequence[Body]) -> list[str]:
    """What bodies index by loaded values is not empty: there is no place that a wrong index could be moved to."""
    indices = (op for body in bodies for op in body.of(Indirect))
    sizes = dict.fromkeys(op.size for op in indices if not (op.size.as_int() or 0) > 0)
    total = index_text(product(a.size for a in kernel.axes), {})
    return [f"if ({index_text(size, {})} <= 0 && {total} > 0) return {Fault.INDEX.value};" for size in sizes]
