"""What a person sees of a program: its graphs as Python with the passes that made them, and its table."""

from __future__ import annotations

import keyword
from typing import Any

import pytest
import torch

from aotautograd import aot_function, min_cut, partition, trace_joint
from aotautograd.eager_compiler import run_graph
from primtorch import graph_text


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def program(x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> Any:
    buffer.add_(x.shape[0])
    hidden = (x @ weight).sin()
    return hidden.square().mean(), hidden, hidden[0], x.t()


def inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 3), torch.randn(3, 3, requires_grad=True), torch.zeros(3)]


@pytest.mark.parametrize(
    ("opset", "lowering"),
    [(None, ""), ("prims", ", lower to prims, simplify"), ("core_aten", ", lower to core_aten, simplify")],
)
def test_every_graph_is_python_and_says_which_passes_made_it(opset: Any, lowering: str) -> None:
    texts: dict[str, str] = {}
    compiled = aot_function(
        program, fw_compiler=identity, decompositions=opset, partitioner=min_cut(), dump=texts.__setitem__
    )
    x, weight, buffer = inputs()
    loss, *_ = compiled(x, weight, buffer)
    loss.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    gradient.sum().backward()
    for text in texts.values():
        compile(text, "graph", "exec")
    made_by = {name: text.splitlines()[0] for name, text in texts.items()}
    assert made_by["joint.py"] == f"# made by trace_joint, simplify{lowering}"
    assert made_by["forward.py"] == made_by["backward.py"] == f"# made by trace_joint, simplify{lowering}, min_cut(1)"
    assert made_by["backward_without_1.py"] == f"{made_by['backward.py']}, without_tangents"
    assert made_by["gradients_joint.py"] == made_by["joint.py"]
    assert all(line.startswith("# made by trace_joint") for line in made_by.values())


def test_graphs_in_hand_say_it_too() -> None:
    joint = trace_joint(program, inputs())
    assert joint.print().startswith("# made by trace_joint\ndef joint(")
    assert graph_text(partition(joint).forward).startswith("# made by trace_joint, default_partition\ndef forward(")


def test_one_table_has_writes_aliases_gradients_and_saved_tensors() -> None:
    table = partition(trace_joint(program, inputs())).table()
    assert [line.strip() for line in table.splitlines()] == [
        "inputs",
        "0  -",
        "1  requires_grad",
        "2  data written",
        "outputs",
        "0  value 1 requires_grad",
        "1  value 2 requires_grad",
        "2  view_of_value 2 -> select.int requires_grad",
        "3  view_of_input 0 -> t.default",
        "forward returns",
        "0  updated_input to input 2",
        "1  value, tangent 0",
        "2  value, tangent 1",
        "gradients for inputs [1]",
        "kept for backward: 3 tensors, 1 of them inputs; 96 bytes beside inputs; 0 operations run again in backward",
        "sin_default: f32[4, 3]",
        "mm_default: f32[4, 3]",
        "primals_0: f32[4, 3]  an input",
    ]


def test_no_operator_of_a_traced_graph_has_a_word_of_python_for_its_name() -> None:
    """Graphs run as the text of themselves: `aten.random.from(...)` is none."""
    words = {
        getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), schema.overload_name)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and keyword.iskeyword(schema.overload_name)
    }
    functional = {overload for overload in words if not overload._schema.is_mutable}
    assert functional == {getattr(torch.ops.aten.random, "from")}
    for program in (
        lambda x: torch.empty_like(x).random_(-3, 9),
        lambda x: getattr(torch.ops.aten.random, "from")(x, -3, 9),
        lambda x: getattr(torch.ops.aten.random_, "from")(x.clone(), 0, 2**40),
    ):
        torch.manual_seed(0)
        wanted = program(torch.zeros(100))
        torch.manual_seed(0)
        torch.testing.assert_close(
            aot_function(program, fw_compiler=run_graph)(torch.zeros(100)), wanted, rtol=0, atol=0
        )
