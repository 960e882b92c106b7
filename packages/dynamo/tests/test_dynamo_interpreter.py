"""The interpreter against CPython: the same program natively and in `PlainWorld`."""

import contextlib
import dis
import functools
import importlib.util
import inspect
import itertools
import math
import pathlib
import subprocess
import sys

import pytest

from torchdynamo.interpreter import NULL, Escape, Interpreter, PlainWorld
from torchdynamo.interpreter.coverage import report
from torchdynamo.interpreter.iterators import EnumerateIterator
from torchdynamo.interpreter.protocol import Stop

_PATH = pathlib.Path(__file__).with_name("interpreter_corpus.py")
_SPEC = importlib.util.spec_from_file_location("interpreter_corpus", _PATH)
corpus = importlib.util.module_from_spec(_SPEC)
sys.modules["interpreter_corpus"] = corpus
_SPEC.loader.exec_module(corpus)


@pytest.mark.parametrize("fn", corpus.PROGRAMS, ids=lambda fn: fn.__name__)
def test_program(fn):
    expected = fn()
    interpreter = Interpreter(PlainWorld())
    assert interpreter.run(fn) == expected
    assert not interpreter.frames
    assert interpreter.exc_state.value is None


def test_every_instruction_is_handled_or_listed():
    assert [name for name, state in report().items() if state == "MISSING"] == []


class _Break(Escape):
    pass


class _BreakingWorld(PlainWorld):
    """Ends capture when the program calls `stop`."""

    def call(self, fn, args, kwargs):
        if fn is stop:
            raise _Break
        return super().call(fn, args, kwargs)


def stop():
    return "stopped natively"


def _guarded(log):
    with contextlib.suppress(BaseException):
        try:
            log.append("before")
            stop()
        except BaseException:
            log.append("swallowed")
        finally:
            log.append("finally")


def _root(items):
    log, total = [], 0
    for index, item in enumerate(items):
        total += item
        if index == 2:
            _guarded(log)
    return log, total


def test_an_escape_passes_all_handlers_and_names_its_frames():
    interpreter = Interpreter(_BreakingWorld())
    log = []
    with pytest.raises(_Break) as caught:
        interpreter.run(_guarded, log)
    assert log == ["before"]
    assert [position.function for position in caught.value.positions] == ["_guarded"]
    assert not interpreter.frames


def test_a_root_frame_stops_before_the_instruction_that_broke():
    interpreter = Interpreter(_BreakingWorld())
    frame = interpreter.root_frame(_root, [[1, 2, 3, 4]])
    with pytest.raises(_Break) as caught:
        frame.run()
    assert [position.function for position in caught.value.positions] == ["_root", "_guarded"]
    assert caught.value.positions[0].line == _root.__code__.co_firstlineno + 5
    again = Interpreter(_BreakingWorld())
    assert len(caught.value.path) == 2
    replay = again.root_frame(_root, [[1, 2, 3, 4]])
    with pytest.raises(Stop) as stopped:
        replay.run(caught.value.path[:1])
    assert stopped.value.frames == [replay]
    offset = replay.decoded.offsets[replay.index]
    assert offset == frame.offset
    names = dict(zip(replay.decoded.local_names, replay.fast, strict=True))
    assert names["log"] == [] and names["total"] == 6 and names["index"] == 2
    loop, *call = replay.stack
    assert isinstance(loop, EnumerateIterator) and loop.count == 3 and loop.iterator.index == 3
    assert NULL in call and _guarded in call and call[-1] is names["log"]
    assert dis.opname[_root.__code__.co_code[offset]] in ("CALL", "PRECALL")


def test_a_root_frame_that_returns():
    frame = Interpreter(PlainWorld()).root_frame(_root, [[1, 2, 3, 4]])
    assert frame.run() == (["before", "finally"], 10)


class _CountingWorld(PlainWorld):
    def __init__(self):
        self.leaves = []

    def call_leaf(self, fn, args, kwargs):
        self.leaves.append(fn)
        return super().call_leaf(fn, args, kwargs)


def _callbacks():
    def mark(value):
        math.sqrt(4)
        return value

    generator = (mark(i) for i in range(2))
    return (
        list(map(mark, [1])), list(generator), sorted([2, 1], key=mark), max([1, 2], key=mark),
        functools.reduce(lambda a, b: mark(a + b), [1, 2, 3]), list(itertools.accumulate([1, 2], lambda a, b: mark(b))),
        functools.partial(mark, 1)(), [*filter(mark, [1])], dict(zip(map(mark, "a"), [1])),
    )  # fmt: skip


def test_python_code_behind_c_functions_is_interpreted():
    world = _CountingWorld()
    assert Interpreter(world).run(_callbacks) == _callbacks()
    assert world.leaves.count(math.sqrt) == 1 + 2 + 2 + 2 + 2 + 1 + 1 + 1 + 1


def test_async_programs_are_not_interpreted():
    async def make():
        return 1

    made = Interpreter(PlainWorld()).run(make)
    assert inspect.iscoroutine(made)
    made.close()


def test_other_pythons(installed_python):
    script = _PATH.with_name("interpreter_other_python.py")
    ran = subprocess.run([installed_python, "-W", "ignore", str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
