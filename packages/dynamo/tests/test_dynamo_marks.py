"""What users say about their functions: breaks asked for, functions disabled, allowed or constant, breaks as errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo.api import owner_of


class Compiled:
    """A compiled program, its graphs and its breaks."""

    def __init__(self, program: Callable[..., Any], **options: Any) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        wrap = torchdynamo.optimize(self.backend, options=torchdynamo.CaptureOptions(strict=True, **options))
        self.run = wrap(program)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    @property
    def calls(self) -> list[int]:
        return [sum(node.op.startswith("call") for node in graph.graph.nodes) for graph in self.graphs]

    @property
    def breaks(self) -> list[tuple[str, str]]:
        return [(found.reason, found.detail) for found in owner_of(self.run).stats.break_details]


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.cos() + 1


def helper_of_helper(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * 2


X = torch.randn(4)


def test_a_break_that_is_asked_for() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torchdynamo.graph_break()
        return y + 1

    compiled = Compiled(program)
    for _ in range(2):
        torch.testing.assert_close(compiled.run(X), X.sin() + 1, rtol=0, atol=0)
    assert compiled.calls == [1, 1] and [reason for reason, _ in compiled.breaks] == ["graph_break"]


@pytest.mark.parametrize("recursive", [True, False])
def test_a_disabled_function_runs_as_it_is(recursive: bool) -> None:
    seen: list[bool] = []

    @torchdynamo.disable(recursive=recursive, reason="looks at the process")
    def apart(x: torch.Tensor) -> torch.Tensor:
        seen.append(torchdynamo.is_compiling())
        return helper_of_helper(x)

    def program(x: torch.Tensor) -> torch.Tensor:
        return apart(x.sin()) + 1

    compiled = Compiled(program)
    for _ in range(2):
        torch.testing.assert_close(compiled.run(X), (X.sin().cos() + 1) * 2 + 1, rtol=0, atol=0)
    assert seen == [False, False]
    assert [detail.rpartition(": ")[2] for _, detail in compiled.breaks] == ["looks at the process"]
    assert compiled.calls == ([1, 1] if recursive else [1, 3, 1])


def test_a_disabled_function_behind_a_function_that_runs_for_real() -> None:
    @torchdynamo.disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    def called_by_sorted(x: torch.Tensor) -> Any:
        return apart(x).sum().item()

    def program(x: torch.Tensor) -> torch.Tensor:
        return sorted([x, x + 1], key=called_by_sorted)[0]

    compiled = Compiled(program)
    torch.testing.assert_close(compiled.run(X), sorted([X, X + 1], key=called_by_sorted)[0], rtol=0, atol=0)
    assert all(node.target is not torch.cos for graph in compiled.graphs for node in graph.graph.nodes)
    assert "cos" not in "".join(graph.code for graph in compiled.graphs)


@pytest.mark.parametrize("disable", [torchdynamo.disable, torch.compiler.disable], ids=["ours", "another's"])
def test_a_disabled_function_that_code_which_runs_for_real_calls(disable: Callable[..., Any]) -> None:
    @disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    def rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for row in x.unbind():
            yield apart(row)

    def program(x: torch.Tensor) -> torch.Tensor:
        for row in rows(x):
            torchdynamo.graph_break()
            x = x + row
        return x

    compiled = Compiled(program)
    torch.testing.assert_close(compiled.run(X), program(X), rtol=0, atol=0)
    assert "cos" not in "".join(graph.code for graph in compiled.graphs)
    told = [e for e in owner_of(compiled.run).stats.ledger.events if e.kind.id == "disabled_function"]
    assert [event.frames[0].file for event in told] == [__file__]


def test_a_disabled_module_and_what_cannot_be_marked() -> None:
    inner = torchdynamo.disable(torch.nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x.sin()).cos()

    compiled = Compiled(program)
    torch.testing.assert_close(compiled.run(X), inner(X.sin()).cos(), rtol=0, atol=0)
    assert compiled.calls == [1, 1] and [reason for reason, _ in compiled.breaks] == ["disabled"]
    assert torchdynamo.optimize(compiled.backend)(inner) is inner
    for wrong in (torch.nn.Linear, 3):
        with pytest.raises(TypeError, match="to mark"):
            torchdynamo.disable(wrong)


def test_skip_frame_leaves_one_function_out() -> None:
    @torchdynamo.skip_frame
    def loop(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    compiled = Compiled(lambda x: loop(x.sin()) * 3)
    torch.testing.assert_close(compiled.run(X), (X.sin().cos() + 1) * 3, rtol=0, atol=0)
    assert compiled.calls == [1, 2, 1]


def test_an_allowed_function_is_one_node() -> None:
    @torchdynamo.allow_in_graph
    def fused(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.sin() * scale + x

    compiled = Compiled(lambda x: fused(x, 2.0) + 1)
    torch.testing.assert_close(compiled.run(X), X.sin() * 2.0 + X + 1, rtol=0, atol=0)
    assert [node.target for node in compiled.graphs[0].graph.nodes if node.op == "call_function"][0] is fused


def test_a_constant_result_is_computed_once() -> None:
    calls: list[Any] = []

    @torchdynamo.assume_constant_result
    def table(size: int) -> torch.Tensor:
        calls.append(size)
        print(end="")
        return torch.arange(size, dtype=torch.float32)

    @torchdynamo.assume_constant_result
    def width(x: Any) -> int:
        return 4

    compiled = Compiled(lambda x: x + table(4) * width("any"))
    for _ in range(3):
        torch.testing.assert_close(compiled.run(X), X + torch.arange(4.0) * 4, rtol=0, atol=0)
    assert calls == [4] and len(compiled.graphs) == 1 and not compiled.breaks
    broken = Compiled(lambda x: x + width(x + 1))
    torch.testing.assert_close(broken.run(X), X + 4, rtol=0, atol=0)
    assert [reason for reason, _ in broken.breaks] == ["constant_result"]


def test_breaks_are_errors_in_a_region() -> None:
    def program(x: torch.Tensor, strict: bool) -> torch.Tensor:
        x = x.sin()
        print(end="")
        with torchdynamo.error_on_graph_break():
            x = x + 1
            with torchdynamo.error_on_graph_break(False):
                print(end="")
                x = x * 2
            x = x - 1
            if strict:
                print(end="")
        print(end="")
        return x

    compiled = Compiled(program)
    for _ in range(2):
        torch.testing.assert_close(compiled.run(X, False), (X.sin() + 1) * 2 - 1, rtol=0, atol=0)
    assert len(compiled.breaks) == 3
    with pytest.raises(torchdynamo.Unsupported, match=r"print(.|\n)*test_dynamo_marks"):
        compiled.run(X, True)

    @torchdynamo.error_on_graph_break()
    def whole(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x + 1

    with pytest.raises(torchdynamo.Unsupported):
        Compiled(lambda x: whole(x)).run(X)
    torch.testing.assert_close(whole(X), X + 1, rtol=0, atol=0)  # outside of capture it says nothing


def test_another_compilers_marks_mean_the_same() -> None:
    def apart(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    disabled = torch.compiler.disable(apart)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x + (1 if torch.compiler.is_compiling() else 2)
        torch._dynamo.graph_break()
        return disabled(x) * 2

    compiled = Compiled(program)
    torch.testing.assert_close(compiled.run(X), ((X + 1).cos() + 1) * 2, rtol=0, atol=0)
    assert [reason for reason, _ in compiled.breaks] == ["graph_break", "disabled"]
    assert compiled.calls == [1, 1]


class Marked:
    """Methods of every kind under marks."""

    gain = 3.0

    @torchdynamo.disable(reason="method")
    def apart(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    @staticmethod
    @torchdynamo.disable
    def static(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    @classmethod
    @torchdynamo.skip_frame
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return helper(x) * cls.gain

    @torchdynamo.error_on_graph_break()
    def whole(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x

    @torchdynamo.allow_in_graph
    def one_node(x: torch.Tensor) -> torch.Tensor:  # type: ignore[misc]  # noqa: N805
        return x.sin() + 1


def test_marks_on_methods() -> None:
    marked = Marked()

    def program(x: torch.Tensor) -> torch.Tensor:
        return marked.of_class(marked.static(marked.apart(x.sin()) + 1).cos()) + 2

    compiled = Compiled(program)
    for _ in range(2):
        torch.testing.assert_close(compiled.run(X), program(X), rtol=0, atol=0)
    assert [reason for reason, _ in compiled.breaks] == ["disabled"] * 3
    nodes = Compiled(lambda x: Marked.one_node(x) * 2)
    torch.testing.assert_close(nodes.run(X), (X.sin() + 1) * 2, rtol=0, atol=0)
    assert nodes.calls == [2]
    with pytest.raises(torchdynamo.Unsupported):
        Compiled(lambda x: marked.whole(x) + 1).run(X)


def test_a_function_is_disabled_where_it_is_called() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = torchdynamo.disable(helper_of_helper)(x)
        return x + 1

    def local(x: torch.Tensor) -> torch.Tensor:
        @torchdynamo.disable
        def apart(y: torch.Tensor) -> torch.Tensor:
            return y * 2 if y.sum() > -1e9 else y

        return apart(x.sin()) + 1

    try:
        for case in (program, local):
            compiled = Compiled(case)
            for _ in range(2):
                torch.testing.assert_close(compiled.run(X), case(X), rtol=0, atol=0)
    finally:
        from torchdynamo.marks import _MARKS

        _MARKS.pop(helper_of_helper, None)


def test_is_compiling_through_breaks_and_called_functions() -> None:
    seen: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(torchdynamo.is_compiling())
        torchdynamo.graph_break()
        seen.append(torchdynamo.is_compiling())
        return x + (1 if torchdynamo.is_compiling() else 100)

    compiled = Compiled(lambda x: inner(inner(x)))
    for _ in range(2):
        seen.clear()
        torch.testing.assert_close(compiled.run(X), X + 1 + 1, rtol=0, atol=0)
        assert seen == [True] * 4
    seen.clear()
    torch.testing.assert_close(inner(X), X + 100, rtol=0, atol=0)
    assert seen == [False] * 2


def test_a_region_of_errors_spans_called_functions_and_ends_by_an_exception() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x + 1

    def program(x: torch.Tensor, within: bool) -> torch.Tensor:
        try:
            with torchdynamo.error_on_graph_break():
                x = breaks(x) if within else x * 2
                raise ValueError("out")
        except ValueError:
            x = breaks(x)
        return x

    compiled = Compiled(program)
    for _ in range(2):
        torch.testing.assert_close(compiled.run(X, False), X * 2 + 1, rtol=0, atol=0)
    with pytest.raises(torchdynamo.Unsupported, match="breaks"):
        compiled.run(X, True)


def test_a_break_that_is_asked_for_under_fullgraph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torchdynamo.graph_break()
        return x + 1

    with pytest.raises(torchdynamo.Unsupported, match=r"graph_break(.|\n)*remove the call(.|\n)*test_dynamo_marks"):
        Compiled(program, fullgraph=True).run(X)
    torch.testing.assert_close(program(X), X + 1, rtol=0, atol=0)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].detach() * 5


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


@pytest.mark.parametrize("function", [Cubed.apply, torch.sin], ids=["apply", "of C"])
@pytest.mark.parametrize("mark", [torchdynamo.disable, torchdynamo.skip_frame])
def test_what_others_call_too_is_marked_where_it_is_called_apart(mark: Any, function: Any) -> None:
    marked = mark(function)

    def program(x: torch.Tensor) -> torch.Tensor:
        return marked(x * 2).cos()

    def others(x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x.sin()) + 1

    torchdynamo.reset()
    for run, marks in ((others, 0), (program, 1)):
        compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(run)
        x = torch.rand(3, requires_grad=True)
        gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (run, compiled)]
        assert torch.equal(*gradients)
        assert [kind for _, kind, _ in torchdynamo.stats().breaks].count("disabled") == marks
