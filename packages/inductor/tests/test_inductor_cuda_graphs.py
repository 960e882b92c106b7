"""Replaying programs: what is read in place, what is copied, and that no held result is overwritten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from primtorch.ledger import Event, Ledger
from torchinductor.cuda_graphs import MAX_GRAPHS, MAX_RECORDINGS, GraphedProgram, refusal
from torchinductor.events import NOT_REPLAYED, passed_by
from torchinductor.indexing import number
from torchinductor.program import (
    Alloc,
    AtenCall,
    KernelCall,
    Output,
    Program,
    ReadScalar,
    Slot,
    SymbolInput,
    TensorInput,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
F32 = torch.float32


class Tape:
    """A device whose graphs write again into the results of the run that they recorded."""

    def __init__(self) -> None:
        self.current: int | None = 7

    def stream(self) -> int | None:
        return self.current

    def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
        outputs = run()

        def replay() -> None:
            for old, new in zip(outputs, run(), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        return replay, outputs


def tensors(*names: str) -> tuple[TensorInput, ...]:
    size = (number(4),)
    return tuple(TensorInput(n, i, F32, CUDA, size, (number(1),)) for i, n in enumerate(names))


def program(*inputs: TensorInput | SymbolInput) -> Program:
    return Program(tuple(inputs), (), 8, (), (Output(()),))


def graphed(run: Callable[[list[Any]], list[Any]], *names: str) -> GraphedProgram:
    return GraphedProgram(program(*tensors(*names)), run, Tape())


def scaled(inputs: list[Any]) -> list[Any]:
    x, w = inputs
    return [x * w, 3, None]


def test_the_third_call_replays_and_moving_inputs_are_copied() -> None:
    run = graphed(scaled, "x", "w")
    w = torch.arange(4.0)
    keep = []
    for step in range(6):
        x = torch.full((4,), float(step))
        keep.append(x)  # so that the next one lies elsewhere
        result = run([x, w])
        assert result[1:] == [3, None]
        assert torch.equal(result[0], x * w)
        del result
    assert (run.runs.recorded, run.runs.replayed, dict(run.runs.plain)) == (1, 5, {"first call": 1})
    w.add_(1)  # read in place
    assert torch.equal(run([keep[2], w])[0], keep[2] * w)


def test_calls_without_the_graph_are_told() -> None:
    ledger = Ledger()
    run = GraphedProgram(program(*tensors("x", "w")), scaled, Tape(), functools.partial(passed_by, ledger, "graph_0"))
    x, w = torch.ones(4), torch.ones(4)
    held = [run([x, w])[0] for _ in range(4)]
    assert ledger.events == (Event(NOT_REPLAYED, "graph_0", "a result of the last replay is still held", (), 2),)
    assert len(held) == 4


def test_a_held_result_is_not_overwritten() -> None:
    run = graphed(scaled, "x", "w")
    xs, w = [torch.full((4,), float(i)) for i in range(6)], torch.ones(4)
    held = [run([x, w])[0] for x in xs]
    assert all(torch.equal(h, x) for h, x in zip(held, xs, strict=True))
    assert run.runs.plain["a result of the last replay is still held"] == 4
    view = held[1][1:]
    del held
    run([xs[0], w])
    assert torch.equal(view, torch.ones(3))  # a view holds it too
    del view
    run([xs[0], w])
    assert run.runs.replayed == 2


def test_a_result_that_a_loop_holds_is_copied_from_then_on() -> None:
    """`out = model(x)` lets go of the last result when the call has returned."""
    run = graphed(scaled, "x", "w")
    x, w = torch.ones(4), torch.full((4,), 2.0)
    for step in range(8):
        x.fill_(step)
        out = run([x, w])
        assert torch.equal(out[0], x * 2)
    held = run([x, w])[0]
    x.zero_()
    run([x, w])
    assert torch.equal(held, torch.full((4,), 14.0))
    assert run.runs.plain == {"first call": 1, "a result of the last replay is still held": 1}


def test_results_in_one_memory_are_not_copied_apart() -> None:
    def both(given: list[Any]) -> list[Any]:
        whole = given[0] * 2
        return [whole, whole[1:]]

    run = graphed(both, "x")
    x = torch.ones(4)
    for _ in range(6):
        out = run([x])
        assert out[0].untyped_storage().data_ptr() == out[1].untyped_storage().data_ptr()
    assert run.runs.plain["a result of the last replay is still held"] == 2


def test_inputs_that_moved_only_once_are_read_in_place_again() -> None:
    """A backward's: its forward runs as it is, then gives it what a replay writes."""
    run = graphed(scaled, "x", "w")
    before, x, w = torch.ones(4), torch.full((4,), 3.0), torch.ones(4)
    run([before, w])
    for _ in range(5):
        x.add_(1)
        assert torch.equal(run([x, w])[0], x)
    (state,) = run._states.values()
    assert not state.copied and (run.runs.recorded, run.runs.replayed) == (2, 5)  # type: ignore[union-attr]
    others = [torch.full((4,), float(k)) for k in range(30)]  # here and there: the recordings have an end
    for k in range(30):
        given = others[k // 2]
        assert torch.equal(run([given, w])[0], given)
    assert run.runs.recorded <= MAX_RECORDINGS


def test_an_input_that_moves_late_is_recorded_again() -> None:
    run = graphed(scaled, "x", "w")
    x, w = torch.ones(4), torch.full((4,), 2.0)
    for _ in range(3):
        run([x, w])
    other = torch.full((4,), 5.0)
    assert torch.equal(run([other, w])[0], other * w)
    assert torch.equal(run([x, w])[0], x * w)
    assert run.runs.recorded == 2 and run.runs.replayed == 4


def test_results_that_are_inputs_are_the_callers_own() -> None:
    run = graphed(lambda given: [given[0], given[0] + given[1]], "x", "w")
    w, keep = torch.ones(4), []
    for step in range(4):
        keep.append(torch.full((4,), float(step)))
        same, total = run([keep[-1], w])
        assert same is keep[-1] and torch.equal(total, keep[-1] + 1)
        del same, total
    assert run.runs.replayed == 3


def test_a_view_of_a_moving_input_refuses_the_graph() -> None:
    run = graphed(lambda given: [given[0][1:]], "x")
    keep = [torch.randn(4) for _ in range(4)]
    for x in keep:
        assert torch.equal(run([x])[0], x[1:])
    assert run.runs.plain["a result is a view of an input that moves"] == 3


def test_expanded_inputs_are_copied() -> None:
    run = graphed(scaled, "x", "w")
    w, keep = torch.ones(4), []
    for step in range(4):
        keep.append(torch.full((1,), float(step)).expand(4))
        assert torch.equal(run([keep[-1], w])[0], keep[-1])
    assert run.runs.replayed == 3


def test_one_graph_a_size_and_a_stream() -> None:
    device = Tape()
    run = GraphedProgram(program(SymbolInput("n", "s0")), lambda given: [torch.full((given[0],), 1.0)], device)
    for size in [*range(MAX_GRAPHS + 2)] * 3:
        assert run([size])[0].shape == (size,)
    assert run.runs.recorded == MAX_GRAPHS and run.runs.plain["too many sizes or streams"] == 6
    device.current = None
    run([1])
    assert run.runs.plain["the caller is recording a graph"] == 1


def test_a_failed_recording_is_a_reason() -> None:
    class Broken(Tape):
        def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], object], list[Any]]:
            raise RuntimeError("operation not permitted")

    run = GraphedProgram(program(*tensors("x", "w")), scaled, Broken())
    for _ in range(3):
        assert torch.equal(run([torch.ones(4), torch.ones(4)])[0], torch.ones(4))
    assert run.runs.plain["recording failed: operation not permitted"] == 2


def test_consume_empties_the_list() -> None:
    given = [torch.ones(4), torch.ones(4)]
    graphed(scaled, "x", "w").consume(given)
    assert given == []


def extended(*instructions: Any, inputs: tuple[Any, ...] | None = None) -> Program:
    return Program(tensors("x") if inputs is None else inputs, (), 8, (), (*instructions, Output(())))


@pytest.mark.parametrize(
    ("reason", "instructions"),
    [
        ("allocates on cpu", (Alloc(1, (), (), F32, CPU),)),
        ("kernels for the CPU", (KernelCall(0, (), (), "k"),)),
        ("reads a number", (ReadScalar("u0", 0),)),
        ("calls Python", (AtenCall(len, (), (), ()),)),
        ("depends on data", (AtenCall(torch.ops.aten.nonzero.default, (Slot(0),), (), (1,)),)),
        ("an input is written", (AtenCall(torch.ops.aten.zero_.default, (Slot(0),), (), (None,)),)),
    ],
)
def test_programs_that_cannot_be_graphs(reason: str, instructions: tuple[Any, ...]) -> None:
    found = refusal(extended(*instructions))
    assert found is not None and reason in found


def test_programs_that_can_be_graphs() -> None:
    call = AtenCall(torch.ops.aten.zero_.default, (Slot(1),), (), (None,))
    assert refusal(extended(Alloc(1, (), (), F32, CUDA), call)) is None
    cpu = TensorInput("x", 0, F32, CPU, (), ())
    assert refusal(extended(inputs=(cpu,))) == "input x is on cpu"
