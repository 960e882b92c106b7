"""Functions and modules captured as one graph: values, gradients, structure, guards, side effects."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import torchdynamo


class Graphs:
    """A backend that runs graphs as they were captured, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    @property
    def calls(self) -> int:
        return sum(node.op.startswith("call") for graph in self.graphs for node in graph.graph.nodes)


def captured(function: Any, **options: Any) -> tuple[Any, Graphs]:
    graphs = Graphs()
    options.setdefault("fullgraph", True)
    options.setdefault("strict", True)
    return torchdynamo.optimize(graphs, options=torchdynamo.CaptureOptions(**options))(function), graphs


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_plain_function_is_one_graph() -> None:
    def f(x, y):
        return torch.relu(x) + y * 2

    g, graphs = captured(f)
    x, y = torch.randn(3, 4), torch.randn(4)
    same(g(x, y), f(x, y))
    same(g(y, y), f(y, y))
    assert len(graphs.graphs) == 2  # another shape, another version
    same(g(x, y), f(x, y))
    assert len(graphs.graphs) == 2


def test_keyword_and_star_arguments() -> None:
    def f(x, *rest, scale=2.0, **named):
        for r in rest:
            x = x + r
        return x * scale + sum(named.values())

    g, graphs = captured(f)
    x = torch.randn(3)
    for _ in range(2):
        same(g(x, x, x, scale=3.0, b=x), f(x, x, x, scale=3.0, b=x))
        same(g(x), f(x))
    assert len(graphs.graphs) == 2


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.norm = nn.BatchNorm1d(2)
        self.scale = 3

    def forward(self, x):
        return self.norm(self.layers(x)) * self.scale


def test_a_module_trains_and_evaluates() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    g, graphs = captured(model)
    x = torch.randn(5, 4)
    g(x).sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    running = model.norm.running_mean.clone()
    model.zero_grad()
    model.norm.reset_running_stats()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        same(got[name], p.grad)
    same(running, model.norm.running_mean)
    assert int(model.norm.num_batches_tracked) == 1
    model.eval()
    same(g(x), model(x))
    model.scale = 4
    same(g(x), model(x))
    assert len(graphs.graphs) == 3


def test_side_effects_are_replayed() -> None:
    class Holder:
        def __init__(self) -> None:
            self.count = 0
            self.seen = []
            self.table = {}

    def f(h, x):
        h.count += 1
        h.seen.append(x * 2)
        h.table["last"] = h.count
        h.table.setdefault("first", x)
        return x + h.count

    g, _ = captured(f, recompile_limit=100)
    a, b = Holder(), Holder()
    for _ in range(3):
        x = torch.randn(2)
        same(g(a, x), f(b, x))
    assert (a.count, len(a.seen), a.table.keys()) == (b.count, len(b.seen), b.table.keys())
    for left, right in zip(a.seen, b.seen, strict=True):
        same(left, right)


def test_results_of_many_kinds() -> None:
    Pair = collections.namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Record:
        value: Any
        names: list

    def f(x):
        y = x + 1
        shared = [y]
        return {
            "tuple": (y, 1, "a"),
            "pair": Pair(y, x),
            "record": Record(y, shared),
            "ordered": collections.OrderedDict(a=y, b=None),
            "shared": shared,
            "max": torch.max(x, 0),
            "set": {1, 2},
            "slice": slice(1, None),
            "closure": lambda z: z + y,
        }

    g, _ = captured(f)
    x = torch.randn(3)
    got, want = g(x), f(x)
    assert got["pair"].right is x and type(got["pair"]) is Pair
    assert got["record"].names is got["shared"] and got["shared"][0] is got["tuple"][0]
    same(got["closure"](x), want["closure"](x))
    same(got["max"].values, want["max"].values)
    assert (got["set"], got["slice"], got["tuple"][1:]) == (want["set"], want["slice"], want["tuple"][1:])


def test_globals_and_cells_are_guarded_and_written() -> None:
    total = 0

    def f(x):
        nonlocal total
        total += 1
        return x * total

    g, _ = captured(f, recompile_limit=100)
    x = torch.randn(2)
    for step in range(1, 4):
        same(g(x), x * step)
        assert total == step


def test_no_grad_and_autocast_regions() -> None:
    def f(x, w):
        with torch.no_grad():
            y = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            z = x @ w
        return y, z, x @ w

    g, graphs = captured(f)
    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    got, want = g(x, w), f(x, w)
    for a, b in zip(got, want, strict=True):
        same(a, b)
        assert a.requires_grad is b.requires_grad and a.dtype is b.dtype
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_hooks_run() -> None:
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda module, args, out: out * 2)
    g, graphs = captured(model)
    x = torch.randn(2, 3)
    same(g(x), model(x))


def test_dynamic_sizes_after_the_first_change() -> None:
    def f(x):
        return x.reshape(-1) * x.shape[0]

    g, graphs = captured(f)
    for n in (3, 4, 5, 6, 17):
        x = torch.randn(n, 2)
        same(g(x), f(x))
    assert len(graphs.graphs) == 2


def test_dynamic_from_the_start() -> None:
    def f(x, y):
        return torch.cat([x, y], 0).sum(-1) / x.size(0)

    g, graphs = captured(f, dynamic=True)
    for n, m in ((3, 4), (5, 6), (7, 2)):
        x, y = torch.randn(n, m), torch.randn(n + 1, m)
        same(g(x, y), f(x, y))
    assert len(graphs.graphs) == 1


def test_a_break_in_the_middle() -> None:
    def f(x):
        y = x + 1
        torchdynamo.graph_break()
        return y * 2

    g, graphs = captured(f, fullgraph=False)
    x = torch.randn(3)
    for _ in range(2):
        same(g(x), f(x))
    assert len(graphs.graphs) == 2


def test_a_branch_on_data() -> None:
    def f(x):
        y = x * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    g, graphs = captured(f, fullgraph=False)
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3)):
        same(g(x), f(x))
    assert len(graphs.graphs) == 3


def test_item_and_loop_with_breaks() -> None:
    def f(x, names):
        out = []
        for name in names:
            x = x + 1
            out.append((name, x.sum().item()))
        return out, x

    g, graphs = captured(f, fullgraph=False)
    x = torch.zeros(2)
    for _ in range(2):
        got, want = g(x, ["a", "b", "c"]), f(x, ["a", "b", "c"])
        assert got[0] == want[0]
        same(got[1], want[1])


def test_fullgraph_explains_itself() -> None:
    def inner(x):
        print("no")
        return x

    def f(x):
        return inner(x + 1)

    g, _ = captured(f)
    with pytest.raises(torchdynamo.Unsupported, match="print") as error:
        g(torch.ones(2))
    text = str(error.value)
    assert "in inner" in text and "in f" in text and "what to do" in text


def test_exceptions_of_the_program_are_its_own() -> None:
    def f(x, flag):
        if flag:
            raise KeyError("mine")
        return x + 1

    g, _ = captured(f)
    x = torch.ones(2)
    with pytest.raises(KeyError, match="mine"):
        g(x, True)
    same(g(x, False), x + 1)


def test_explain_and_export() -> None:
    def f(x):
        y = F.gelu(x)
        print(end="")
        return y + 1

    found = torchdynamo.explain(f)(torch.ones(2))
    assert len(found.graphs) == 2 and [b.reason for b in found.breaks] == ["print"]
    assert "print" in str(found)
    exported = torchdynamo.export(lambda x: x * 2)(torch.ones(2))
    same(exported(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="does not fit"):
        exported(torch.ones(3, 3))


def test_inputs_that_share_memory_are_not_written_apart() -> None:
    def f(x, y):
        x.add_(1)
        return x + y

    g, graphs = captured(f, fullgraph=False)
    ours, theirs = torch.zeros(4), torch.zeros(4)
    for cut in (lambda t: (t[:2], t[2:]), lambda t: (t[:3], t[1:]), lambda t: (t[:2], t[2:])):
        same(g(*cut(ours)), f(*cut(theirs)))
        same(ours, theirs)
    x = torch.zeros(3)
    same(g(x, x), torch.full((3,), 2.0))


def test_interrupt_during_capture_restores_everything() -> None:
    def backend(graph, inputs):
        raise KeyboardInterrupt

    def f(x):
        with torch.no_grad():
            return x * 2

    g = torchdynamo.optimize(backend)(f)
    with pytest.raises(KeyboardInterrupt):
        g(torch.ones(2))
    assert torch.is_grad_enabled() and torch._C._len_torch_function_stack() == 0
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_a_break_in_a_called_function_goes_on_in_it_and_in_its_caller() -> None:
    def inner(x):
        y = x.sin()
        print(end="")
        return y.cos()

    def f(x):
        return inner(x + 1) * 2

    g, graphs = captured(f, fullgraph=False)
    x = torch.randn(3)
    for _ in range(2):
        same(g(x), f(x))
    assert [len(list(graph.graph.nodes)) for graph in graphs.graphs] == [4, 4]  # two calls in each


class Kinds(enum.IntFlag):
    A = 1
    B = 2
    C = 4


def test_flags_without_a_name_of_their_own_are_numbers_of_the_graph() -> None:
    @torchdynamo.optimize(lambda graph, inputs: graph.forward, options=torchdynamo.CaptureOptions(fullgraph=True))
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (Kinds.A | Kinds.C) + x.sum(Kinds(0)) * Kinds.B

    assert torch.equal(program(torch.ones(2, 3)), torch.full((2, 3), 9.0))


@pytest.mark.parametrize("shapes", [((3,), (5, 3)), ((4, 1, 3), (2, 3)), ((), (2,))])
def test_the_common_shape_of_two_is_one_of_symbols(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """`torch._C._infer_size`, by which torch's distributions broadcast."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.expand(torch._C._infer_size(x.shape, y.shape)) * 2

    compiled = torchdynamo.optimize(
        lambda graph, inputs: graph.forward, options=torchdynamo.CaptureOptions(dynamic=True, fullgraph=True)
    )(program)
    for longer in (0, 2):
        x, y = (torch.randn(tuple(size + longer * (size > 1) for size in shape)) for shape in shapes)
        assert torch.equal(compiled(x, y), program(x, y))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        compiled(torch.ones(3), torch.ones(4))
