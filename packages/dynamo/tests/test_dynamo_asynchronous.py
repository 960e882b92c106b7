"""What the interpreter calls of itself in the middle of a program is not captured, told or counted."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo.stats import TOTAL

Calls = list[str]


def _work(calls: Calls) -> None:
    """What would be a graph, if it were part of the program."""
    calls.append(type(torch.ones(2).add(1)).__name__)


class _Object:
    itself: object = None


def _collected(calls: Calls) -> Callable[[], None]:
    def callback(phase: str, info: dict[str, int]) -> None:
        _work(calls)

    def happens() -> None:
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)

    return happens


def _collected_at_any_allocation(calls: Calls) -> Callable[[], None]:
    def callback(phase: str, info: dict[str, int]) -> None:
        _work(calls)

    def happens() -> None:
        thresholds = gc.get_threshold()
        gc.callbacks.append(callback)
        gc.set_threshold(1, *thresholds[1:])
        try:
            held = _Object(), _Object(), _Object()
            del held
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(callback)

    return happens


def _finalized(calls: Calls, cycle: bool) -> Callable[[], None]:
    class Ends(_Object):
        def __del__(self) -> None:
            _work(calls)

    def happens() -> None:
        made = Ends()
        made.itself = made if cycle else None
        del made
        gc.collect()

    return happens


def _reference_died(calls: Calls, method: bool) -> Callable[[], None]:
    class Cache:
        def forget(self, reference: Any) -> None:
            _work(calls)

    def forget(reference: Any) -> None:
        _work(calls)

    callback = Cache().forget if method else forget

    def happens() -> None:
        made = _Object()
        reference = weakref.ref(made, callback)
        del made
        assert reference() is None

    return happens


def _signalled(calls: Calls, way: str) -> Callable[[], None]:
    class Handler:
        def __call__(self, number: int, frame: types.FrameType | None) -> None:
            _work(calls)

        def method(self, number: int, frame: types.FrameType | None) -> None:
            _work(calls)

    def function(number: int, frame: types.FrameType | None) -> None:
        _work(calls)

    handler = {"function": function, "method": Handler().method, "object": Handler()}[way]

    def happens() -> None:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    return happens


def _traced(calls: Calls, install: Callable[[Any], None], read: Callable[[], Any]) -> Callable[[], None]:
    def tracer(frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name == "_traced_function":
            _work(calls)
            return line
        return None

    def line(frame: types.FrameType, event: str, argument: object) -> Any:
        _work(calls)

    def happens() -> None:
        before = read()
        install(tracer)
        try:
            _traced_function()
        finally:
            install(before)

    return happens


@torchdynamo.skip_frame
def _traced_function() -> int:
    return 1


WAYS: dict[str, Callable[[Calls], Callable[[], None]]] = {
    "a collection": _collected,
    "a collection at any allocation": _collected_at_any_allocation,
    "a finalizer": functools.partial(_finalized, cycle=False),
    "a finalizer in a collection": functools.partial(_finalized, cycle=True),
    "a weak reference": functools.partial(_reference_died, method=False),
    "a weak reference and a method": functools.partial(_reference_died, method=True),
    "a signal": functools.partial(_signalled, way="function"),
    "a signal and a method": functools.partial(_signalled, way="method"),
    "a signal and an object": functools.partial(_signalled, way="object"),
    "a tracer": functools.partial(_traced, install=sys.settrace, read=sys.gettrace),
    "a profiler": functools.partial(_traced, install=sys.setprofile, read=sys.getprofile),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_the_interpreter_calls_is_no_part_of_the_program(way: str) -> None:
    calls: Calls = []
    happens = torchdynamo.skip_frame(WAYS[way](calls))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        happens()
        return y * 2

    compiled = torchdynamo.optimize(backend)(program)
    for _ in range(3):
        calls.clear()
        assert compiled(torch.tensor([1.0, 2.0])).tolist() == [4.0, 6.0]
        assert set(calls) == {"Tensor"}
    told = {event.kind.id for event in TOTAL.events} - {"graph_break", "disabled", "disabled_function"}
    assert not told, TOTAL.events
    assert not [node for graph in graphs for node in graph.graph.nodes if node.target is torch.ones]
