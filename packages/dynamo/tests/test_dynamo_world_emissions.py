"""Log records and warnings of captured programs: the same, from the same lines, at every call, and around breaks."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torchdynamo

_log = logging.getLogger(__name__)
Said = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torchdynamo.reset()


class Collector(logging.Handler):
    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        where = (record.pathname, record.lineno, record.funcName, getattr(record, "kind", None))
        self.said.append((record.name, record.levelname, record.getMessage(), *where))


@contextmanager
def collected(action: str = "always") -> Iterator[Said]:
    """What is logged and warned inside, with the places."""
    said: Said = []
    handler = Collector(said)
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter(action)  # type: ignore[arg-type]
        warnings.showwarning = lambda m, c, f, n, *rest: said.append((c, str(m), f, n))
        try:
            yield said
        finally:
            _log.removeHandler(handler)


class Held:
    def __init__(self) -> None:
        self.n = 1
        self.items = ["a"]

    def __repr__(self) -> str:
        return f"Held({self.n})"


def plain(x: torch.Tensor, s: Held) -> Any:
    _log.info("called with %s", x.shape)
    _log.debug("nobody hears %s", s.items)
    _log.warning("now")
    _log.log(logging.ERROR, "level %d of %s", 3, "three", extra={"kind": "k"})
    return x + 1


def of_state(x: torch.Tensor, s: Held) -> Any:
    _log.info("items %s, n %d", s.items, s.n)
    s.items.append("b")
    s.n += 1
    _log.info("%s now has %s", s, len(s.items))
    _log.debug("%s is not heard", s)
    _log.info("by name %(a)s", {"a": s.n})
    return x * s.n


def inner(x: torch.Tensor, level: int) -> Any:
    _log.info("from the caller", stacklevel=level)
    warnings.warn("from the caller, too", FutureWarning, stacklevel=level)
    return x * 2


def by_stack_level(x: torch.Tensor, s: Held) -> Any:
    return inner(inner(inner(x, 1), 2), 3)


def with_tensors(x: torch.Tensor, s: Held) -> Any:
    _log.debug("not heard: %s", x)
    y = x * 2
    _log.info("heard: %s", y.sum())
    return y + 1


def filtered(x: torch.Tensor, s: Held) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("nobody hears it", stacklevel=1)
        x = x + 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="quiet")
        warnings.warn("quiet", stacklevel=1)
        warnings.warn("loud", DeprecationWarning, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = x * 2
    warnings.warn(UserWarning("at last"), stacklevel=1)
    return x


def caught(x: torch.Tensor, s: Held) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.warn("raised", stacklevel=1)
    except UserWarning as error:
        _log.info("caught %s", str(error))
        x = x + len(str(error))
    return x


def around_breaks(x: torch.Tensor, s: Held) -> Any:
    _log.info("before")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="quiet")
        warnings.warn("quiet", stacklevel=1)
        s.items.append("seen")
        torchdynamo.graph_break()
        warnings.warn("quiet still", stacklevel=1)
        warnings.warn("inside", stacklevel=1)
        x = x * 2
    _log.info("after %s", s.items)
    return x


def order_of_prints(x: torch.Tensor, s: Held) -> Any:
    x = x + 1
    _log.info("one")
    _log.handlers[0].emit(logging.makeLogRecord({"msg": "by hand"}))  # through a break or not: in its place
    _log.info("two")
    return x * 2


def leaves_by_exception(x: torch.Tensor, s: Held) -> Any:
    _log.info("starting")
    s.n += 1
    warnings.warn("about to fail", stacklevel=1)
    x = x * s.n
    if s.n > 0:
        raise ValueError(f"failed {s.n}")
    return x


def handles_exceptions(x: torch.Tensor, s: Held) -> Any:
    try:
        x = x + {}["missing"]
    except KeyError:
        _log.exception("went wrong")
        x = x + 1
    finally:
        _log.info("cleaned")
    return x


def questions(x: torch.Tensor, s: Held) -> Any:
    if _log.isEnabledFor(logging.INFO) and not _log.isEnabledFor(logging.DEBUG):
        x = x + 1
    log = logging.getLogger(f"{__name__}.child")
    log.warning("from the child at level %d", log.getEffectiveLevel())
    return x, log is logging.getLogger(log.name), log.hasHandlers()


def by_adapter(x: torch.Tensor, s: Held) -> Any:
    adapter = logging.LoggerAdapter(_log, {"kind": "adapted"})
    adapter.info("through an adapter")
    return x + 1


PROGRAMS = (
    (plain, 0), (of_state, 0), (by_stack_level, 0), (with_tensors, 1), (filtered, 0), (caught, 0),
    (around_breaks, 2), (order_of_prints, None), (leaves_by_exception, None), (handles_exceptions, None),
    (questions, 0), (by_adapter, 0),
)  # fmt: skip


def outcome(program: Callable[..., Any], x: torch.Tensor, state: Held) -> Any:
    try:
        return program(x, state)
    except Exception as error:
        return type(error), str(error)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(alike, a, b)) if isinstance(a, tuple) else bool(a == b)


@pytest.mark.parametrize(("program", "breaks"), PROGRAMS, ids=lambda v: getattr(v, "__name__", ""))
def test_said_as_in_eager(program: Callable[..., Any], breaks: int | None) -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    expected_state, state = Held(), Held()
    for call in range(3):
        x = torch.full((2, 3), float(call))
        with collected() as expected:
            wanted = outcome(program, x, expected_state)
        with collected() as said:
            got = outcome(compiled, x, state)
        expected = [_relative(one) for one in expected]
        said = [_relative(one) for one in said]
        assert said == expected, f"call {call}"
        assert alike(got, wanted) and vars(state) == vars(expected_state)
    assert not torchdynamo.stats().fallbacks
    if breaks is not None:
        assert sum(count for count, _, _ in torchdynamo.stats().breaks) == breaks, torchdynamo.stats().breaks


def _relative(said: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the line of this file that calls the program, which differs between the two calls."""
    lines = range(outcome.__code__.co_firstlineno, outcome.__code__.co_firstlineno + 5)
    return tuple("the call" if part in lines else part for part in said)


def test_the_level_is_asked_at_each_call() -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(plain)
    compiled(torch.ones(2), Held())
    with collected() as said:
        compiled(torch.ones(2), Held())
        assert len(said) == 3
        _log.setLevel(logging.ERROR)
        compiled(torch.ones(2), Held())
        assert len(said) == 4
        _log.setLevel(logging.DEBUG)
        compiled(torch.ones(2), Held())
        assert len(said) == 8
    assert torchdynamo.stats().recompiles == 0


@pytest.mark.parametrize("action", ["default", "once", "module", "ignore", "error"])
def test_filters_of_the_caller_hold(action: str) -> None:
    def program(x: torch.Tensor, s: Held) -> Any:
        s.n += 1
        warnings.warn("said by the filters' rule", stacklevel=1)
        s.n += 1
        return x * 2

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    with collected():
        compiled(torch.ones(2), Held())
    globals().pop("__warningregistry__", None)
    found = []
    for run in (program, compiled):
        state = Held()
        with collected(action) as said:
            results = [outcome(run, torch.ones(2), state) for _ in range(3)]
        found.append((said, state.n, [type(result) for result in results]))
        globals().pop("__warningregistry__", None)
    assert found[0] == found[1]


@functools.lru_cache(None)
def warn_once(text: str) -> None:
    _log.warning(text)


@functools.cache
def noted(n: int) -> int:
    _log.info("noted %d", n)
    return n * 2


def test_what_a_cache_says_is_said_once() -> None:
    @torchdynamo.optimize(lambda graph, inputs: graph.forward)
    def program(x: torch.Tensor, n: int) -> Any:
        warn_once("careful")
        return x * noted(n)

    with collected() as said:
        for n in (1, 1, 2, 1):
            assert torch.equal(program(torch.ones(2), n), torch.ones(2) * n * 2)
    assert [one[2] for one in said] == ["careful", "noted 1", "noted 2"]


_noted: list[int] = []


@functools.cache
def remembered(n: int) -> int:
    _noted.append(n)
    return n * 2


def test_what_a_cached_function_writes_is_written_once() -> None:
    @torchdynamo.optimize(lambda graph, inputs: graph.forward)
    def program(x: torch.Tensor, n: int) -> Any:
        return x * remembered(n)

    for n in (1, 1, 2, 1):
        assert torch.equal(program(torch.ones(2), n), torch.ones(2) * n * 2)
    assert _noted == [1, 2]


def test_filters_are_as_before_when_capture_ends() -> None:
    @torchdynamo.optimize(lambda graph, inputs: graph.forward)
    def program(x: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = x + 1
            torchdynamo.graph_break()
            return x * 2

    before = list(warnings.filters)
    for _ in range(3):
        program(torch.ones(2))
        assert warnings.filters == before


def test_collected_warnings_are_the_program_s_own() -> None:
    def program(x: torch.Tensor) -> Any:
        x = x + 1
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.warn("collected", stacklevel=1)
        return x * len(found), [str(one.message) for one in found]

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for _ in range(3):
        assert alike(compiled(torch.ones(2))[0], program(torch.ones(2))[0])
        assert compiled(torch.ones(2))[1] == ["collected"]
