"""Whatever runs eagerly, twice or differently is in the report, and is an error of `fullgraph=True`."""

from __future__ import annotations

import gc
import html
import itertools
import linecache
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ledger_programs import CASES, ELSEWHERE, Case

import torchcompile
import torchcompile.events
import torchdynamo
import torchdynamo.events
from primtorch.ledger import LEDGER, REFUSED, Effect, Event, Kind, Ledger, kinds
from torchcompile.events import TABLES

KINDS = {kind.id: kind for table in TABLES for kind in table.values()}

pytestmark = [
    pytest.mark.warm,
    pytest.mark.expected_eager(...),
    pytest.mark.filterwarnings("ignore:ran differently", "ignore:fallback to eager"),
]


def run(case: Case, fullgraph: bool) -> None:
    compiled = torchcompile.compile(
        case.program, backend=case.backend, options=case.options, dynamic=case.dynamic, fullgraph=fullgraph
    )
    for arguments in case.calls:
        case.run(compiled, arguments)


def test_every_kind_has_a_program() -> None:
    assert sum(map(len, TABLES)) == len(KINDS), "two tables have a kind of one name"
    assert KINDS.keys() == CASES.keys() | ELSEWHERE.keys()
    for kind in KINDS.values():
        assert kind.explanation and kind.remedy and not kind.explanation.endswith("."), kind


@pytest.mark.parametrize("kind", CASES)
def test_a_kind_is_told(kind: str) -> None:
    case = CASES[kind]
    run(case, fullgraph=False)
    report = torchcompile.report()
    events = [event for event in report.events if event.kind is KINDS[kind]]
    assert events, report
    place = case.place()
    if place is not None:
        found = [(event.line.file, event.line.line) for event in events if event.line is not None]
        assert place in found, (place, found)
    text, page = " ".join(str(report).split()), html.unescape(report.html())
    for event in events:
        assert event.count >= 1 and event.what
        assert event.effect.value.capitalize() in text
        for part in (kind, event.what, event.where, event.kind.explanation, event.kind.remedy):
            assert part in page, part
    unclean = any(event.effect in REFUSED | {Effect.RERUN} for event in report.events)
    assert report.clean == (report.captured > 0 and not unclean)


@pytest.mark.parametrize("kind", CASES)
def test_fullgraph_refuses_a_kind(kind: str) -> None:
    case = CASES[kind]
    refused = KINDS[case.whole or kind]
    if refused.effect not in REFUSED:
        run(case, fullgraph=True)
        assert refused in {event.kind for event in torchcompile.report().events}
        return
    with pytest.raises(torchdynamo.errors.TorchDynamoError) as raised:
        run(case, fullgraph=True)
    text = str(raised.value)
    assert f"[{refused.id}]" in text and refused.explanation in text and refused.remedy in text, text
    assert not [event for event in torchcompile.report().events if event.effect in REFUSED]
    place = case.place()
    if place is not None and case.whole is None:
        assert f'File "{place[0]}", line {place[1]}' in text, text


def test_a_clean_report_is_clean() -> None:
    assert not torchcompile.report().clean  # nothing was captured
    torchcompile.compile(lambda x: x + 1)(torch.ones(3))
    report = torchcompile.report()
    assert report.clean and not report.events and not report.ran_eagerly
    torchcompile.reset()
    assert not torchcompile.report().clean


def test_events_outlive_what_they_happened_to() -> None:
    run(CASES["print"], fullgraph=False)
    assert [event.kind.id for event in torchcompile.report().breaks] == ["print"]
    torchcompile.reset()
    assert not torchcompile.report().events and not LEDGER.events


# -- the ledger itself --------------------------------------------------------------------------

A = Kind("a", "a happens", "avoid it", Effect.FALLBACK)
B = Kind("b", "b happens", "bear it", Effect.PLAIN)


def test_a_ledger_is_bounded_and_counts_what_it_does_not_keep() -> None:
    ledger = Ledger(limit=3)
    for number in range(10):
        for _ in range(2):
            ledger.add(Event(A, "f", str(number)))
    ledger.add(Event(B, "g"))
    assert [(event.what, event.detail[:1], event.count) for event in ledger.events] == [
        ("f", "0", 2), ("f", "1", 2), ("f", "2", 2), ("", "m", 14), ("g", "", 1),
    ]  # fmt: skip
    ledger.clear()
    assert ledger.events == ()
    ledger.add(Event(A, "f", "9"))
    assert [event.detail for event in ledger.events] == ["9"]


def test_events_go_up_the_chain_and_a_refused_one_nowhere() -> None:
    top = Ledger()
    asking = Ledger(top, lambda event: ValueError(event.kind.id))
    asking.add(Event(B, "g"))
    with pytest.raises(ValueError, match="a") as raised:
        asking.add(Event(A, "f"), KeyError("why"))
    assert isinstance(raised.value.__cause__, KeyError)
    assert asking.events == top.events == (Event(B, "g"),)


def test_a_ledger_loses_nothing_under_threads() -> None:
    top = Ledger(limit=8)
    each = 500

    def write(number: int) -> None:
        own = Ledger(top)
        for step in range(each):
            own.add(Event(A, f"f{number % 2}", str(step % 16)))
            top.events  # noqa: B018

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(event.count for event in top.events) == 8 * each


def test_a_kind_is_in_its_table_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        kinds(A, B, A)


def test_compiled_functions_on_threads_tell_the_same() -> None:
    compiled = torchcompile.compile(CASES["print"].program, backend="eager")
    threads = [threading.Thread(target=compiled, args=(torch.ones(3),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {event.kind.id for event in torchcompile.report().ran_eagerly} == {"print"}


# -- what stays in the process ------------------------------------------------------------------


def generated_files() -> Iterator[str]:
    return (name for name in linecache.cache if name.startswith("<torchdynamo "))


@pytest.mark.usefixtures("collector_of_new_objects")
def test_generated_code_leaves_the_line_cache_with_the_code() -> None:
    torchcompile.reset()
    gc.collect()
    before = set(generated_files())
    for number in range(5):
        compiled = torchcompile.compile(_adds(number), backend="eager")
        compiled(torch.ones(3))
    assert set(generated_files()) - before
    del compiled
    gc.collect()
    torchcompile.reset()
    assert len(set(generated_files()) - before) == 0


def _adds(number: int) -> Any:
    return lambda x: x + number


def test_a_report_of_many_events_prints() -> None:
    for number, kind in itertools.product(range(4), KINDS.values()):
        LEDGER.add(Event(kind, "[bold]f", f"[/] {number}"))
    text = str(torchcompile.report())
    assert "[bold]f" in text and all(kind in text for kind in ("print", "capture_fault"))
