"""The rules of the loop IR, as a check of one kernel."""

from __future__ import annotations

from collections.abc import Iterable

from torchinductor.errors import InductorError
from torchinductor.ir.bundle import Bundle
from torchinductor.ir.by_form import by_form
from torchinductor.ir.kernel import Kernel, Stage
from torchinductor.ir.operations import Apply, Indirect, Load, Part, Reduce, ReduceColumn, Scan, Store
from torchinductor.ir.template import PROLOGUE, Template
from torchinductor.ops import ELEMENTWISE


def verify_kernels(operations: Iterable[object]) -> None:
    """Raises InductorError where one of the kernels or templates among the operations breaks a rule."""
    for operation in operations:
        if isinstance(operation, Kernel):
            verify(operation)
        elif isinstance(operation, Bundle):
            verify_bundle(operation)
        elif isinstance(operation, Template):
            verify(operation.loops)
            if operation.kind == "matmul":
                verify_template(operation)


def verify(kernel: Kernel) -> None:
    """Raises InductorError where a kernel breaks a rule:

    * axes have distinct names, and inner stages stand only in kernels with inner axes;
    * an operation takes as many values as it has operands, of earlier operations of its stage that have one;
    * every buffer is known, and loaded as what it is;
    * an index is over the axes that its stage runs over, size symbols, and indirect indices that came before it there;
    * reductions and scans stand in inner stages, a key is reduced once, and carried by later stages only; a reduction
      that is about another comes after it, in the same stage or a later one; only stages of columns carry what is
      accumulated over the outer axes, and they carry nothing else;
    * a buffer lies in the place of another only where both are of one element type.
    """
    _is_sound(kernel)


@by_form
def _is_sound(kernel: Kernel) -> bool:
    names = [axis.name for axis in kernel.axes]
    if len(set(names)) != len(names):
        _fail(kernel, "two axes of one name")
    carried: dict[str, int] = {}
    for number, stage in enumerate(kernel.stages):
        _verify_stage(kernel, stage, number, carried)
    for written, read in kernel.in_place:
        if kernel.buffers[written].dtype != kernel.buffers[read].dtype:
            _fail(kernel, f"{written} lies over {read}, of another type")
    return True


def verify_bundle(bundle: Bundle) -> None:
    """Raises InductorError where a bundle's kernels break a rule, or touch what another of them writes."""
    for part in bundle.parts:
        verify(part)
        others = {name for other in bundle.parts if other is not part for name in other.writes}
        if not others.isdisjoint(part.arguments) or part.device != bundle.device:
            _fail(part, "bundled with kernels that it has to wait for")


def verify_template(template: Template) -> None:
    """Raises InductorError where a template, whose loops are sound, is not of a template's form:

    * one inner axis; the first stage is an inner one that sums up one product, all others are outer;
    * both factors are multiplied in one type, vary over the inner axis, and are computed by what a prologue may hold;
    * some outer axis belongs to the left factor alone, and another one to the right factor alone;
    * what is stored, in each iteration to another place, the factors do not read.
    """
    loops = template.loops
    if len(loops.inner) != 1 or [s.kind for s in loops.stages] != ["inner", *["outer"] * (len(loops.stages) - 1)]:
        _fail(loops, "the stages of a template")
    body = loops.stages[0].body
    (total,) = sums if len(sums := list(body.of(Reduce))) == 1 else (None,)
    factors = body.ops[total.value] if total is not None and total.kind == "sum" else None
    if not isinstance(factors, Apply) or factors.op != "mul" or any(True for _ in body.of(Store)):
        _fail(loops, "a template's first stage is not a sum of products")
    left, right = template.operands
    if left.dtype != right.dtype:
        _fail(loops, f"a product of {left.dtype} by {right.dtype}")
    for operand in (left, right):
        if template.depth.name not in operand.axes:
            _fail(loops, "a factor does not vary over the inner axis")
        if not all(isinstance(op, PROLOGUE) for op in operand.prologue.ops):
            _fail(loops, "a prologue holds more than it may")
        if operand.prologue.reads & set(loops.writes):
            _fail(loops, "a template stores to what it multiplies")
    if not template.rows or not template.columns:
        _fail(loops, "a template without rows or without columns")
    names = {axis.name for axis in loops.outer}
    if any(not names <= op.index.symbols() for epilogue in template.epilogue for op in epilogue.of(Store)):
        _fail(loops, "a template stores several results to one place")


def _fail(kernel: Kernel, text: str) -> None:
    raise InductorError(f"malformed kernel: {text}\n{kernel}")


def _verify_stage(kernel: Kernel, stage: Stage, number: int, carried: dict[str, int]) -> None:
    body, others = stage.body, {axis.name for axis in kernel.axes} - {axis.name for axis in kernel.walked(stage.kind)}
    if stage.kind != "outer" and not kernel.inner:
        name = "an inner stage" if stage.kind == "inner" else "a stage of columns"
        _fail(kernel, f"{name} without an inner axis")
    if stage.kind != "inner" and (body.reduces or body.scans):
        _fail(kernel, f"a reduction in a stage of kind {stage.kind}")
    across = {op.key for op in kernel.column_reductions}
    if body.carries & across if stage.kind != "columns" else body.carries - across:
        _fail(kernel, f"{sorted(body.carries)} carried to a stage of kind {stage.kind}")
    if body.carries - carried.keys():
        _fail(kernel, f"{sorted(body.carries - carried.keys())} carried before they are reduced")
    jumps = {op.symbol for op in body.of(Indirect)}
    defined: set[str] = set()
    for position, op in enumerate(body.ops):
        if any(a >= position for a in op.operands):
            _fail(kernel, f"operation {position} uses a later value")
        for expr in op.indices:
            used = expr.symbols()
            if used & others:
                _fail(kernel, f"a stage of kind {stage.kind} indexes by an axis that it does not run over: {expr}")
            if used & jumps - defined:
                _fail(kernel, f"an index comes before what it names: {expr}")
        match op:
            case Indirect():
                defined.add(op.symbol)
            case Reduce() | ReduceColumn() if op.key in carried:
                _fail(kernel, f"{op.key} is reduced twice")
            case ReduceColumn():
                carried[op.key] = number
            case Reduce():
                if (op.about is None) == (op.kind in ("sum_exp", "moments")):
                    _fail(kernel, f"reduction {op.kind} of {op.key} about {op.about}")
                if op.about is not None and op.about not in carried:
                    _fail(kernel, f"{op.key} is about {op.about}, which is not reduced before it")
                carried[op.key] = number
            case Apply() if len(op.args) != ELEMENTWISE[op.op].arity:
                _fail(kernel, f"operation {position}, {op.op}, of {len(op.args)} operands")
            case Part() if not isinstance(body.ops[op.whole], Scan):
                _fail(kernel, f"operation {position} takes a part of what has none")
    for op in body.accesses:
        if op.buffer not in kernel.buffers:
            _fail(kernel, f"unknown buffer {op.buffer}")
        if isinstance(op, Load) and op.dtype != kernel.buffers[op.buffer].dtype:
            _fail(kernel, f"{op.buffer} is loaded as {op.dtype}")
