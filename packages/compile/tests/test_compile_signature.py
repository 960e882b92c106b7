"""Equal graphs are compiled once, and only graphs that are equal in all that compiled code relies on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile
import torchdynamo
from primtorch.schemas import UPDATES, UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv
from torchcompile.signature import program_form, signature

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]


def signatures(function: Callable[..., Any], *calls: tuple[Any, ...], **settings: Any) -> list[Any]:
    """Those of the graphs of `calls`, captured anew for each."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.append(signature(gm))
        return gm.forward

    for call in calls:
        torchcompile.reset()
        torchcompile.compile(function, backend=backend, fullgraph=True, **settings)(*call)
    return found


def test_a_recapture_that_does_not_show_in_the_graph_compiles_nothing() -> None:
    state = {"calls": 0}

    def program(x: torch.Tensor) -> torch.Tensor:
        state["seen"] = True
        return x.sin() * 2 if "first" in state else x.sin() * 2

    compiled = torchcompile.compile(program, options={"strict": True}, fullgraph=True)
    x = torch.randn(4)
    compiled(x)
    state["first"] = 1
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    report = torchcompile.report()
    assert sum(event.count for event in report.recompiles) == 1
    assert report.captured == 1


def test_what_is_known_of_sizes_tells_graphs_apart() -> None:
    """Both graphs are `x[:m] * 2`; the first holds where x is longer, and gives m elements."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, bool]:
        longer = x.shape[0] > y.shape[0]
        return x[: y.shape[0]] * 2, longer

    compiled = torchcompile.compile(program, dynamic=True, fullgraph=True, options={"strict": True})
    for n, m in ((8, 5), (3, 6), (9, 4), (4, 9)):
        x, y = torch.randn(n), torch.randn(m)
        torch.testing.assert_close(compiled(x, y), program(x, y))
    assert torchcompile.report().captured == 2


def test_neither_the_example_nor_the_line_that_asked_does() -> None:
    def program(x: torch.Tensor, here: bool) -> torch.Tensor:
        if here:
            assert x.shape[0] > 3
        else:
            assert x.shape[0] > 3
        return x * 2

    first, second = signatures(program, (torch.randn(4), True), (torch.randn(9), False), dynamic=True)
    assert first == second


def test_functions_that_take_over_an_address_are_told_apart() -> None:
    def made(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return torchdynamo.allow_in_graph(lambda x: x * factor)

    runs = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        runs.append(signature(gm))
        return gm.forward

    for factor in range(20):
        one = made(float(factor))
        torchcompile.compile(lambda x, one=one: one(x), backend=backend, fullgraph=True)(torch.ones(3))
        del one
        torchcompile.reset()
    assert len(set(runs)) == 20


def test_graphs_with_objects_among_the_arguments_are_never_equal() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.rand, (3,))
    graph.output((node,))
    gm = torch.fx.GraphModule({}, graph)
    assert signature(gm) is not None
    node.kwargs = {"generator": torch.Generator()}
    assert signature(gm) is None


def test_ambient_state_tells_graphs_apart() -> None:
    program = lambda x: x + torch.zeros(3)
    (plain,) = signatures(program, (torch.ones(3),))
    found = [plain]
    for device in ("cpu", "meta"):
        with torch.device(device):
            found += signatures(program, (torch.ones(3),))
    with torch.no_grad():
        found += signatures(program, (torch.ones(3),))
    assert len(set(found)) == 4


def _graph(
    names: str = "ab",
    target: Any = torch.ops.aten.add.Tensor,
    operands: tuple[int, int] = (0, 1),
    alpha: object = 1,
    spec: TensorSpec | None = None,
    line: int = 7,
    results: tuple[int, ...] = (2,),
) -> torch.fx.GraphModule:
    """A sum of two placeholders, or something near it."""
    graph, spec = torch.fx.Graph(), spec or TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"))
    nodes = [graph.placeholder(name) for name in names]
    nodes.append(graph.call_function(target, tuple(nodes[place] for place in operands), {"alpha": alpha}))
    nodes[-1].meta["stack"] = (UserFrame("user.py", line, "forward"),)
    for node in nodes:
        node.meta["val"] = spec
    graph.output([nodes[place] for place in results])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_names_alone_do_not_tell_programs_apart() -> None:
    form = program_form(_graph())
    assert form is not None
    assert form == program_form(_graph("xy"))
    cpu = torch.device("cpu")
    others = [
        _graph(target=torch.ops.aten.sub.Tensor),
        _graph(operands=(1, 0)),
        _graph(operands=(0, 0)),
        _graph(alpha=1.0),
        _graph(alpha=True),
        _graph(spec=TensorSpec((2, 3), (1, 2), torch.float32, cpu)),
        _graph(spec=TensorSpec((2, 3), (3, 1), torch.float64, cpu)),
        _graph(spec=TensorSpec((2, 3), (3, 1), torch.float32, cpu, 1)),
        _graph(spec=TensorSpec((2, 3), (3, 1), torch.float32, torch.device("meta"))),
        _graph(line=8),
        _graph(results=(2, 2)),
        _graph(names="abc"),
    ]
    forms = [form, *map(program_form, others)]
    assert len(set(forms)) == len(forms)
    with torch.no_grad():
        assert program_form(_graph()) != form


def test_a_program_that_its_text_does_not_show_is_like_no_other() -> None:
    size = ShapeEnv().symbol(4, "x.shape[0]")
    assert program_form(_graph(spec=TensorSpec((size, 3), (3, 1), torch.float32, torch.device("cpu")))) is None
    holding = _graph()
    next(node for node in holding.graph.nodes if node.op == "call_function").kwargs = {"alpha": object()}
    assert program_form(holding) is None
    written = _graph()
    written.meta[UPDATES] = {0: 1}
    assert program_form(written) is None
