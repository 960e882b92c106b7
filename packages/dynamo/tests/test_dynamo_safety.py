"""Capture keeps out of the way: threads, forks, deep recursion, tracers of code that is not compiled, its own faults."""

from __future__ import annotations

import logging
import os
import pdb
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo
from torchdynamo import CaptureOptions, capture_world


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    chosen = CaptureOptions(**{"strict": True, **options})
    return torchdynamo.optimize(lambda graph, inputs: graph.forward, options=chosen)(function)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def with_a_break(x: torch.Tensor) -> torch.Tensor:
    y = helper(x)
    torchdynamo.graph_break()
    return helper(y) + 1


# -- threads -------------------------------------------------------------------------------------


def test_eight_threads_compile_and_call_one_function_and_change_what_it_reads() -> None:
    """Each thread has an object of its own, whose state it changes; the function, its class and its net are shared."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)

    class State:
        def __init__(self, scale: float) -> None:
            self.scale, self.steps = scale, 0

    def program(x: torch.Tensor, state: State) -> torch.Tensor:
        state.steps += 1
        y = net(x) * state.scale
        torchdynamo.graph_break()
        return y + state.steps

    shared, wrong = compiled(program, recompile_limit=1000), []
    barrier = threading.Barrier(8)
    interval = sys.getswitchinterval()

    def work(seed: int) -> None:
        mine, theirs = State(seed / 4), State(seed / 4)
        barrier.wait()
        for step in range(12):
            x = torch.full((2 + step % 2, 4), float(seed))
            try:
                if step % 4 == 3:
                    mine.scale = theirs.scale = step / 8
                got, want = shared(x, mine), program(x, theirs)
                if not torch.equal(got, want) or mine.steps != theirs.steps:
                    wrong.append((seed, step))
            except Exception:
                wrong.append((seed, step, traceback.format_exc()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert not torchdynamo.api.owner_of(shared).stats.fallbacks


# -- fork ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_goes_on_with_what_was_compiled_and_compiles_more() -> None:
    function = compiled(with_a_break)
    x = torch.ones(3)
    assert torch.equal(function(x), with_a_break(x))

    def child() -> bool:
        fresh = compiled(lambda t: helper(t) - 1)
        again = [torch.equal(function(torch.ones(n)), with_a_break(torch.ones(n))) for n in (3, 4, 5)]
        return all(again) and torch.equal(fresh(x), torch.ones(3))

    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = 0 if child() else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(function(torch.ones(6)), with_a_break(torch.ones(6)))


# -- recursion -----------------------------------------------------------------------------------


def down(x: torch.Tensor, depth: int) -> torch.Tensor:
    return x if depth == 0 else down(x + 1, depth - 1)


def endless(x: torch.Tensor) -> torch.Tensor:
    return endless(x + 1)


def breaks_on_the_way_down(x: torch.Tensor, depth: int) -> torch.Tensor:
    torchdynamo.graph_break()
    return x if depth == 0 else breaks_on_the_way_down(x + 1, depth - 1) * 1


def test_recursion_is_followed_and_its_limit_holds() -> None:
    x, limit = torch.zeros(2), sys.getrecursionlimit()
    assert torch.equal(compiled(down)(x, 150), x + 150)
    assert torch.equal(compiled(breaks_on_the_way_down)(x, 12), x + 12)
    function = compiled(endless, strict=False)
    for _ in range(2):
        with pytest.raises(RecursionError):
            function(x)
    assert sys.getrecursionlimit() == limit
    assert torch.equal(compiled(helper)(x), x)


def test_a_compiled_function_that_calls_itself_for_real_stops_at_the_limit() -> None:
    def again(x: torch.Tensor) -> torch.Tensor:
        torchdynamo.graph_break()
        return holder[0](x)

    holder = [compiled(again, strict=False)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        with pytest.raises(RecursionError):
            holder[0](torch.ones(1))
    finally:
        sys.setrecursionlimit(limit)


# -- tracers -------------------------------------------------------------------------------------


def plain(n: int) -> int:
    total = 0
    for k in range(n):
        total += k
    return total


def lines_of_plain(calls: Callable[[], Any]) -> list[int]:
    """Lines of `plain` that a tracer of the kind of debuggers and coverage sees, relative to its first."""
    seen: list[int] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not plain.__code__:
            return None
        if event == "line":
            seen.append(frame.f_lineno - plain.__code__.co_firstlineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        calls()
    finally:
        sys.settrace(before)
    return seen


def test_tracers_see_code_that_is_not_compiled() -> None:
    function, x = compiled(with_a_break), torch.ones(2)

    def calls() -> None:
        plain(2)
        assert torch.equal(function(x), with_a_break(x))  # compiled under a tracer
        plain(1)
        assert torch.equal(function(x), with_a_break(x))
        plain(1)

    loop = [1, 2, 3]
    want = lines_of_plain(lambda: [plain(2), plain(1), plain(1)])
    assert lines_of_plain(calls) == want and want[: len(loop)] == loop
    assert lines_of_plain(calls) == want


def test_a_function_called_across_a_break_is_traced() -> None:
    marked: Any = torchdynamo.disable(plain)
    function = compiled(lambda x: helper(x) + marked(3))
    seen = [lines_of_plain(lambda: function(torch.ones(1))) for _ in range(2)]
    assert seen[0] == seen[1] == lines_of_plain(lambda: plain(3))


def test_profilers_see_code_that_is_not_compiled() -> None:
    function, x = compiled(with_a_break), torch.ones(2)
    events: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code is plain.__code__:
            events.append(event)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        for _ in range(2):
            assert torch.equal(function(x), with_a_break(x))
            plain(1)
    finally:
        sys.setprofile(before)
    assert events == ["call", "return"] * 2


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of 3.12")
def test_monitoring_sees_code_that_is_not_compiled() -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = next(number for number in range(6) if monitoring.get_tool(number) is None)
    function, x, lines = compiled(with_a_break), torch.ones(2), []
    monitoring.use_tool_id(tool, "test")
    try:
        monitoring.register_callback(tool, monitoring.events.LINE, lambda code, line: lines.append(line))
        monitoring.set_local_events(tool, plain.__code__, monitoring.events.LINE)
        for _ in range(2):
            assert torch.equal(function(x), with_a_break(x))
            lines.clear()
            assert plain(1) == 0
            assert [line - plain.__code__.co_firstlineno for line in lines][:2] == [1, 2]
        monitoring.set_local_events(tool, with_a_break.__code__, monitoring.events.LINE)
        fresh = compiled(with_a_break)  # its own code is instrumented where it is captured
        assert torch.equal(fresh(x), with_a_break(x))
        lines.clear()
        with_a_break(x)
        assert len(lines) == 3
    finally:
        monitoring.set_local_events(tool, plain.__code__, 0)
        monitoring.set_local_events(tool, with_a_break.__code__, 0)
        monitoring.free_tool_id(tool)


def test_a_debugger_stops_in_code_that_is_not_compiled(tmp_path: Any) -> None:
    script = tmp_path / "commands"
    script.write_text("where\ncontinue\n")
    output = tmp_path / "output"
    function, x = compiled(with_a_break), torch.ones(2)
    function(x)
    with open(script) as commands, open(output, "w") as shown:
        debugger = pdb.Pdb(stdin=commands, stdout=shown, nosigint=True, readrc=False)
        debugger.use_rawinput = False
        debugger.runcall(lambda: [function(x), plain(1)])
    assert torch.equal(function(x), with_a_break(x))
    assert "test_dynamo_safety" in output.read_text()


# -- faults of capture ---------------------------------------------------------------------------


class Fault(Exception):
    """Raised inside of capture by a test."""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture fails at every binary operation of tensors."""

    def binary(self: Any, op: str, a: Any, b: Any) -> Any:
        raise Fault("as if a rule were wrong")

    monkeypatch.setattr(capture_world.CaptureWorld, "binary", binary)


def fails_in_capture(x: torch.Tensor, log: list[int]) -> torch.Tensor:
    log.append(1)
    y = x.sin()
    return y + len(log)


def test_a_fault_of_capture_runs_eagerly_and_is_counted_and_logged(
    faulty: None, caplog: pytest.LogCaptureFixture
) -> None:
    function = compiled(fails_in_capture, strict=False)
    x, mine, theirs = torch.ones(2), [0], [0]
    with caplog.at_level(logging.WARNING, logger="torchdynamo"):
        for _ in range(3):
            assert torch.equal(function(x, mine), fails_in_capture(x, theirs)) and mine == theirs
    line = fails_in_capture.__code__.co_firstlineno + 3
    [record] = caplog.records
    for text in ("fails_in_capture", "Fault: as if a rule were wrong", f"{__file__}:{line}", "runs eagerly"):
        assert text in record.getMessage(), text
    [fallback] = torchdynamo.api.owner_of(function).stats.fallbacks
    assert (fallback.what, fallback.where, fallback.count) == ("fails_in_capture", f"{__file__}:{line}", 3)
    assert fallback in torchdynamo.stats().fallbacks


def test_a_fault_of_capture_is_raised_under_strict(faulty: None) -> None:
    line = fails_in_capture.__code__.co_firstlineno + 3
    with pytest.raises(torchdynamo.InternalError, match=f'File "{__file__}", line {line}') as raised:
        compiled(fails_in_capture)(torch.ones(2), [0])
    assert isinstance(raised.value.__cause__, Fault)


def test_a_fault_of_the_back_end_is_the_users_to_see() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise Fault("no such device")

    with pytest.raises(Fault, match="no such device"):
        torchdynamo.optimize(backend)(helper)(torch.ones(2))
    assert torch.is_grad_enabled() and torch._C._len_torch_function_stack() == 0
