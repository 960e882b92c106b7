"""Matrix products as templates: what joins them, the rules of their form, binaries without a GPU, interpreted values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import replies
from template_cases import CASES, Case
from test_inductor_symbolic import symbolic

import primtorch
from torchinductor import InductorOptions, TritonBackend, generate_source
from torchinductor.codegen.base import legalized, takes
from torchinductor.codegen.triton.compiler import TritonCompiler
from torchinductor.codegen.triton.matmul import plan
from torchinductor.codegen.triton.plan import Layout
from torchinductor.errors import InductorError
from torchinductor.ir import Apply, Body, Kernel, Reduce, Stage, Store, Template, verify_kernels
from torchinductor.lowering.context import ExternCall, Operation
from torchinductor.lowering.graph import Lowered, lower_graph
from torchinductor.scheduling.in_place import write_in_place
from torchinductor.scheduling.schedule import schedule
from torchinductor.source import on_device

ON = InductorOptions(templates=True, verify=True)
CUDA = torch.device("cuda")


def lowered(case: Case, options: InductorOptions = ON) -> Lowered:
    gm = primtorch.lower(primtorch.trace(case.program, *case.inputs()))
    return lower_graph(on_device(gm, CUDA), options, takes)


def operations(name: str) -> list[Operation]:
    return schedule(lowered(CASES[name]), ON)


def templates(name: str) -> list[Template]:
    return [op for op in operations(name) if isinstance(op, Template)]


@pytest.mark.parametrize("name", CASES)
def test_what_a_program_becomes(name: str) -> None:
    found = operations(name)
    assert (
        tuple(sum(isinstance(op, kind) for op in found) for kind in (Template, Kernel, ExternCall)) == CASES[name].made
    )


def test_products_are_calls_unless_asked_for() -> None:
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        case = CASES[name]
        off = lowered(case, InductorOptions())
        assert not any(isinstance(op, Template) for op in off.operations)
        gm = primtorch.lower(primtorch.trace(case.program, *case.inputs()))
        cpu = lower_graph(gm, ON, takes)  # its back end offers none
        assert not any(isinstance(op, Template) for op in cpu.operations)


def test_the_parts_of_a_template() -> None:
    (template,) = templates("casts of operands")
    left, right = template.operands
    assert left.dtype == right.dtype == torch.float16 and template.total.dtype == torch.float32
    assert [axis.size.as_int() for axis in (*template.rows, *template.columns, template.depth)] == [70, 33, 40]
    assert len(template.epilogue) == 1 and template.epilogue[0].carries == {template.total.key}
    assert template.reads == ("in_a_1", "in_b_1") or len(template.reads) == 2
    assert str(template).startswith("template matmul: 70 x 33 x 40 in float16, float16, float32\nkernel ")


def test_a_batch_by_one_matrix_is_one_product() -> None:
    (template,) = templates("bmm by one matrix")
    assert not template.batch and [axis.size.as_int() for axis in template.rows] == [60]
    (template,) = templates("bmm")
    assert len(template.batch) == 1


def test_a_result_that_only_the_epilogue_reads_is_not_stored() -> None:
    assert [len(t.writes) for name in ("bias, gelu, residual", "two results", "several readers") for t in templates(name)] == [
        1, 2, 2,
    ]  # fmt: skip


def test_a_result_lies_over_what_the_epilogue_reads_last() -> None:
    graph = lowered(CASES["over an operand that dies"])
    found = write_in_place(graph, [part for op in schedule(graph, ON) for part in legalized(op, ON)])  # type: ignore[arg-type]
    first, second = found
    assert isinstance(second, Template) and second.in_place == ((second.writes[0], first.writes[0]),)  # type: ignore[union-attr]


def test_sizes_may_be_symbols() -> None:
    specs = lambda n, m: [((n, 40), torch.float32), ((40, m), torch.float32), ((n, m), torch.float32)]  # noqa: E731
    gm = symbolic(lambda p, n, m, x, w, r: p.add(p.mm(x, w), r), (70, 33), specs)
    (text,) = generate_source(gm, "cuda", ON).values()
    assert "tiles_y = " in text and "s0: i64, s1: i64" in text


# ---- rules ----------------------------------------------------------------------------------------------------------


def bad_stage(template: Template, number: int, change: Callable[[Stage], Stage]) -> Template:
    stages = list(template.loops.stages)
    stages[number] = change(stages[number])
    return replace(template, loops=replace(template.loops, stages=tuple(stages)))


def without(body: Body, kind: type) -> Body:
    return Body(tuple(op for op in body.ops if not isinstance(op, kind)))


def as_maximum(stage: Stage) -> Stage:
    return Stage(
        "inner", Body(tuple(replace(op, kind="amax") if isinstance(op, Reduce) else op for op in stage.body.ops))
    )


def of_one_operand(stage: Stage) -> Stage:
    ops = (replace(op, args=op.args[:1]) if isinstance(op, Apply) and op.op == "mul" else op for op in stage.body.ops)
    return replace(stage, body=Body(tuple(ops)))


def in_one_row(stage: Stage) -> Stage:
    ops = tuple(replace(op, index=op.index - op.index) if isinstance(op, Store) else op for op in stage.body.ops)
    return Stage("outer", Body(ops))


BROKEN: dict[str, tuple[Callable[[Template], Template], str]] = {
    "no sum": (
        lambda t: bad_stage(t, 0, lambda s: Stage("inner", without(s.body, Reduce))),
        "carried before they are reduced",
    ),
    "a factor": (lambda t: bad_stage(t, 0, of_one_operand), "mul, of 1 operands"),
    "a maximum": (lambda t: bad_stage(t, 0, as_maximum), "not a sum of products"),
    "an inner epilogue": (lambda t: bad_stage(t, 1, lambda s: Stage("inner", s.body)), "the stages of a template"),
    "one place": (lambda t: bad_stage(t, 1, in_one_row), "to one place"),
    "outer axes only": (
        lambda t: replace(t, loops=replace(t.loops, axes=tuple(replace(a, inner=False) for a in t.loops.axes))),
        "an inner stage without an inner axis",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rules(name: str) -> None:
    (template,) = templates("addmm")
    verify_kernels([template])
    broken, reason = BROKEN[name]
    with pytest.raises(InductorError, match=reason):
        verify_kernels([broken(template)])


# ---- binaries and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 90])
def test_every_template_compiles(arch: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    backend = TritonBackend(arch)
    names = list(CASES) if arch == 90 else ["bias, gelu, residual", "the same in halves"]
    planned = [plan(template) for name in names for template in templates(name)]
    sources = [backend.generate_template(t, ON).meta for t in planned if t is not None]
    compiler = TritonCompiler(arch, tmp_path, workers=2)
    binaries = compiler.compile(sources)
    compiler.close()
    assert all(b.code[:4] == b"\x7fELF" and not b.record["scratch_bytes"] for b in binaries)
    assert len(sources) == len(planned) > 1


def test_halves_are_multiplied_on_tensor_cores_from_shared_memory(tmp_path: Path) -> None:
    """What a prologue widens and the product narrows again must cost no conversion."""
    pytest.importorskip("triton")
    case = Case(torch.mm, ((1536, 256), (256, 1536)), dtype=torch.float16)
    (template,) = (op for op in schedule(lowered(case), ON) if isinstance(op, Template))
    planned = plan(template)
    assert planned is not None and planned.loops.laid_out(Layout).x_block == 128
    compiler = TritonCompiler(90, tmp_path, workers=1)
    (binary,) = compiler.compile([TritonBackend(90).generate_template(planned, ON).meta])
    compiler.close()
    text = (tmp_path / f"{binary.key}.ptx").read_text()
    assert "wgmma.mma_async" in text and "cp.async" in text


def test_values_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = replies("template_worker.py")
    assert [reply["case"] for reply in found] == list(CASES)
    for reply in found:
        assert reply.get("error", 1.0) <= 2 * float(reply.get("eager", 0.0)) + 1e-15, reply


def test_random_programs_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = replies("template_worker.py", "--random", str(random.randrange(10**6)), "12")
    assert not [reply for reply in found if "failure" in reply]
    assert all(int(reply["templates"]) for reply in found)
