"""Graphs that several back ends share: values and gradients are eager's, whoever takes whatever."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from protocol_programs import BATCH, WIDTH, RandomNet
from torch import fx
from torch.utils import _pytree as pytree

import torchcompile
from primtorch.symbolic import expr_of
from torchcompile import Capability
from torchcompile.backends import REGISTERED
from torchcompile.mixture.placement import NoBackend

Run = Callable[..., Sequence[Any]]


@pytest.fixture
def register() -> Iterator[Callable[..., list[fx.GraphModule]]]:
    """Registers a back end by name; gives the list of the pieces that it is given from then on."""
    names: list[str] = []

    def add(
        name: str, capability: Capability | None, run_of: Callable[[fx.GraphModule], Run] | None = None
    ) -> list[Any]:
        pieces: list[fx.GraphModule] = []

        def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Run:
            pieces.append(gm)
            return run_of(gm) if run_of is not None else held_to_its_inputs(gm)

        torchcompile.register_backend(backend, name=name, capability=capability)
        names.append(name)
        return pieces

    torchcompile.reset()
    yield add
    for name in names:
        REGISTERED.remove(name)


def held_to_its_inputs(gm: fx.GraphModule) -> Run:
    """Runs a piece in eager, and refuses inputs that are not what the graph says of them."""
    nodes = gm.graph.find_nodes(op="placeholder", sort=True)

    def run(*inputs: Any) -> Sequence[Any]:
        symbols = {str(n.meta["val"]): v for n, v in zip(nodes, inputs, strict=True) if not isinstance(v, torch.Tensor)}
        for node, value in zip(nodes, inputs, strict=True):
            spec = node.meta["val"]
            if isinstance(value, torch.Tensor):
                shape = tuple(expr_of(size).evaluate(symbols) for size in spec.shape)
                assert (value.dtype, tuple(value.shape)) == (spec.dtype, shape), node
        result: Sequence[Any] = gm.forward(*inputs)
        return result

    return run


def drawn_capability(seed: int, stage: str) -> Capability:
    """Which nodes are taken is drawn: by operator, or node by node."""
    chance = random.Random(seed)
    part, by_operator = chance.choice((0.2, 0.5, 0.8)), chance.random() < 0.5
    minimum, border = chance.choice((1, 1, 2, 4)), chance.choice((0.0, 0.0, 1.0))

    def supports(node: fx.Node) -> bool:
        text = str(node.target) if by_operator else node.name
        return zlib.crc32(f"{seed} {text}".encode()) % 1000 < part * 1000

    return Capability(supports, cost=chance.choice((0.5, 1.0)), border=border, minimum=minimum, stage=stage)  # type: ignore[arg-type]


def step(model: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Results and gradients of one step of training."""
    torch.manual_seed(0)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = [r for r in pytree.tree_leaves(model(*leaves)) if isinstance(r, torch.Tensor)]
    sum((r * r).sum() for r in results if r.requires_grad).backward()
    return [*results, *(leaf.grad for leaf in leaves)]


@pytest.mark.expected_eager("print", "tensor_to_number")
@pytest.mark.parametrize("stage", ["prims", "aten"])
@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_random_nets_among_random_back_ends(register: Any, stage: str, seed: int) -> None:
    register("one", drawn_capability(2 * seed, stage))
    register("two", drawn_capability(2 * seed + 1, stage))
    plain, net = RandomNet(seed).double(), RandomNet(seed).double()
    net.load_state_dict(plain.state_dict())
    options = {"strict": True, "eager_random": True}
    compiled = torchcompile.compile(net, backend=["one", "two", "eager"], options=options)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for _ in range(2):
        torch.testing.assert_close(step(compiled, [x]), step(plain, [x]))
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    torch.testing.assert_close(net.state_dict(), plain.state_dict())
    assert not torchcompile.report().mended and len({p.backend for p in torchcompile.report().pieces}) > 1


def compiled(program: Callable[..., Any], backend: Any, **given: Any) -> Callable[..., Any]:
    return torchcompile.compile(program, backend=backend, fullgraph=True, options={"strict": True}, **given)


def got(name: str) -> list[str]:
    """The operators that a back end got, each as often as it occurs."""
    pieces = [p for p in torchcompile.report().pieces if p.backend == name]
    return sorted(operator for p in pieces for operator, count in p.operators for _ in range(count))


def test_forward_and_backward_are_shared_out_by_declared_operators(register: Any) -> None:
    pieces = register("mine", Capability({"mm", "tanh"}))

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w).softmax(-1) @ v).square().mean()

    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 3), (3, 5), (5, 2))]
    for mine, other in zip(step(compiled(program, ["mine", "inductor"]), tensors), step(program, tensors), strict=True):
        torch.testing.assert_close(mine, other)
    assert Counter(got("mine"))["prims.mm"] == 6 and set(got("mine")) == {"prims.mm", "prims.tanh"}
    assert {n.target.name for gm in pieces for n in gm.graph.nodes if n.op == "call_function"} == {"mm", "tanh"}
    assert "mine" in str(torchcompile.report())


def test_pieces_do_not_wait_for_each_other(register: Any) -> None:
    """Of two sums that the same back end takes, one is read by what the other reads: they are two pieces."""
    register("mine", Capability({"exp", "sin"}))

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.exp().cos().sin() + x.exp().sin()

    x = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(compiled(program, ["mine", "inductor"])(x), program(x))
    pieces = [(p.backend, [name for name, _ in p.operators]) for p in torchcompile.report().pieces]
    assert pieces == [
        ("mine", ["prims.exp", "prims.sin"]), ("inductor", ["prims.cos"]), ("mine", ["prims.sin"]),
        ("inductor", ["prims.add"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("declared", "pieces"),
    [
        ({}, 2),
        ({"minimum": 2}, 1),
        ({"cost": 0.5, "border": 0.75}, 1),
        ({"cost": 0.5, "border": 0.25}, 2),
        ({"cost": 2.0}, 0),
        ({"cost": lambda node: 2.0 if node.target.name == "exp" else 0.5, "border": 0.75}, 1),
    ],
)
def test_small_pieces_go_to_the_next_back_end(register: Any, declared: dict[str, Any], pieces: int) -> None:
    register("mine", Capability({"exp", "sin", "cos"}, **declared))

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sum(0) / x.shape[0]).sin().cos()

    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(compiled(program, ["mine", "inductor"])(x), program(x))
    assert sum(p.backend == "mine" for p in torchcompile.report().pieces) == pieces


def test_what_nobody_takes_is_an_error_with_operator_and_line(register: Any) -> None:
    register("mine", Capability({"aten::mm"}, stage="aten"))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.erf(x @ x)

    with pytest.raises(
        NoBackend, match=rf"mine takes aten.erf.default .*{__file__}:{program.__code__.co_firstlineno + 1}"
    ):
        torchcompile.compile(program, backend="mine")(torch.randn(3, 3))


@pytest.mark.parametrize("stage", ["prims", "aten"])
def test_symbolic_sizes_writes_and_random_draws(register: Any, stage: str) -> None:
    register("one", drawn_capability(3, stage))
    register("two", Capability({"mul", "sum"}, stage=stage))  # type: ignore[arg-type]

    def program(x: torch.Tensor, count: torch.Tensor) -> Any:
        y = torch.cat([x, x.sin() * x.shape[0]]).cumsum(0) * x[: x.shape[0] // 2].sum(0)
        count += 1
        return F.dropout(y, 0.5).reshape(-1, 2), y.t(), torch.randn_like(x) * count

    options = {"strict": True, "eager_random": True}
    run = torchcompile.compile(program, backend=["one", "two", "inductor"], dynamic=True, options=options)
    counts = [torch.zeros(()), torch.zeros(())]
    for size in (6, 9, 6):
        x, results = torch.randn(size, 4, dtype=torch.float64), []
        for each, count in zip((run, program), counts, strict=True):
            torch.manual_seed(1)
            results.append(each(x, count))
        torch.testing.assert_close(results[0], results[1])
    assert counts[0] == 3


def test_draws_keep_their_order(register: Any) -> None:
    """The generator of the prims gives each draw the numbers that it gives when inductor has the whole graph."""
    register("mine", Capability({"mul", "random_uniform", "random_seed"}))

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.dropout((F.dropout(x) * 2).exp()) + torch.rand_like(x)

    results = []
    for backend in ("inductor", ["mine", "inductor"]):
        torch.manual_seed(2)
        results.append(compiled(program, backend)(torch.ones(6, 5)))
    torch.testing.assert_close(results[0], results[1])


CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "strides": (lambda t: t.t().contiguous().t(), "piece_mended"),
    "shape": (lambda t: t.reshape(-1), "graph_raised"),
    "dtype": (torch.Tensor.double, "graph_raised"),
    "kind": (lambda t: 1.0, "graph_raised"),
}


@pytest.mark.filterwarnings("ignore:ran")
@pytest.mark.expected_eager("piece_mended", "graph_raised")
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_back_end_gives_is_held_to_the_graph(register: Any, what: str) -> None:
    change, told = CHANGES[what]
    register("mine", Capability({"exp"}), lambda gm: lambda *given: [change(result) for result in gm.forward(*given)])

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.exp().sin()

    x = torch.randn(4, 3)
    found = torchcompile.compile(program, backend=["mine", "inductor"])(x)
    torch.testing.assert_close(found, program(x))
    assert found[0].is_contiguous()
    (event,) = torchcompile.report().surprises
    assert event.kind.id == told and "back end 'mine'" in event.detail and "exp" in event.detail


@pytest.mark.expected_eager("piece_mended")
def test_two_results_in_one_memory_become_two(register: Any) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.sin()

    register("mine", Capability({"exp", "sin"}), lambda gm: lambda x: [x.zero_(), x])
    with pytest.warns(UserWarning, match="memory of another"):
        first, second = torchcompile.compile(program, backend="mine")(torch.randn(3))
    first.add_(1)
    assert torch.equal(second, torch.zeros(3))


def test_errors_of_a_registered_back_end_are_the_callers(register: Any) -> None:
    def refuse(gm: fx.GraphModule) -> Run:
        raise LookupError("no such unit")

    register("mine", Capability({"exp"}), refuse)
    with pytest.raises(LookupError, match="no such unit"):
        torchcompile.compile(torch.exp, backend=["mine", "inductor"])(torch.randn(3))


def test_what_a_mixture_does_not_take(register: Any) -> None:
    register("plain", None)
    register("prims", Capability({"exp"}))
    register("aten", Capability({"exp"}, stage="aten"))
    for backend, message in (
        (["plain", "inductor"], "does not say what it takes"),
        (["prims", "aten"], "graphs of one stage"),
        (["prims", "prims"], "each once"),
        (["nobody"], "names of back ends"),
        ([], "at least one"),
    ):
        with pytest.raises(torchcompile.InvalidArgument, match=message):
            torchcompile.compile(torch.exp, backend=backend)
    with pytest.raises(torchcompile.InvalidArgument, match="CUDA graphs"):
        torchcompile.compile(torch.exp, backend=["prims"], mode="reduce-overhead")
    for wrong in (
        {"supports": {"expp"}},
        {"supports": "exp"},
        {"supports": (), "cost": -1.0},
        {"supports": (), "minimum": 0},
    ):
        with pytest.raises(torchcompile.InvalidArgument):
            Capability(**wrong)
