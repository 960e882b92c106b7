"""What a forked process finds of the threads of the process that it was made of: free locks, ended blocks, own folders."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from primtorch import forks
from primtorch.ledger import LEDGER
from primtorch.once import cached_property, once
from primtorch.symbolic import ShapeEnv
from primtorch.withheld import COLLECTOR

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def of_child(run: Callable[[], bool], seconds: float = 20.0) -> bool:
    """What a forked process says, in time."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if run() else 1
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@contextmanager
def in_a_thread(block: AbstractContextManager[object]) -> Iterator[None]:
    """A block that another thread is in."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with block:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def test_locks_of_other_threads_are_free() -> None:
    plain, several = forks.lock(), forks.rlock()
    with in_a_thread(plain), in_a_thread(several):
        assert of_child(lambda: plain.acquire(timeout=1) and several.acquire(timeout=1))
        assert not plain.acquire(timeout=0.01)  # here they are held


def test_a_lock_of_the_thread_that_forks_stays_held() -> None:
    held = forks.rlock()

    def child() -> bool:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(held.acquire(timeout=0.05)))
        thread.start()
        thread.join()
        held.release()
        return free == [False] and held.acquire(timeout=1)

    with held:
        assert of_child(child)


def test_what_is_made_once_and_what_is_told_are_not_waited_for() -> None:
    begun = threading.Event()

    @once
    def slow() -> int:
        if not begun.is_set():
            begun.set()
            time.sleep(1)
        return 3

    thread = threading.Thread(target=slow)
    thread.start()
    begun.wait()
    with in_a_thread(LEDGER._lock):
        assert of_child(lambda: slow() == 3 and isinstance(LEDGER.events, (list, tuple)))
    thread.join()


def test_what_an_object_keeps_is_not_waited_for() -> None:
    begun = threading.Event()

    @dataclass(frozen=True)
    class Kept:
        number: int

        @cached_property
        def slow(self) -> list[int]:
            if not begun.is_set():
                begun.set()
                time.sleep(1)
            return [self.number]

    one = Kept(1)
    thread = threading.Thread(target=lambda: one.slow)
    thread.start()
    begun.wait()
    assert of_child(lambda: one.slow == [1] and Kept(2).slow == [2])
    kept = one.slow
    thread.join()
    assert one.slow is kept and one.__dict__["slow"] is kept and isinstance(Kept.slow, cached_property)


def test_a_switch_that_another_thread_holds_off_is_as_the_program_has_it() -> None:
    assert gc.isenabled()
    with in_a_thread(COLLECTOR.off()):
        assert not gc.isenabled() and of_child(gc.isenabled)
        with COLLECTOR.off():
            assert of_child(lambda: not gc.isenabled())
    assert gc.isenabled()

    def own_block() -> bool:
        with COLLECTOR.off():
            return of_child(lambda: not gc.isenabled() and COLLECTOR.read())

    assert own_block() and gc.isenabled()


def test_a_trial_of_another_thread_is_over() -> None:
    env = ShapeEnv()
    size = env.symbol(6, "size")
    with in_a_thread(env.trial({"s0": 9})):
        assert env.taken.values

        def child() -> bool:
            with env.trial({"s0": 5}) as asked:
                assert bool(size < 7) and len(asked) == 1
            return not env.taken.values and not env.guards and bool(size < 7)

        assert of_child(child)
    assert not env.taken.values and not env.guards


def test_a_folder_is_one_processs() -> None:
    folder = forks.ScratchFolder("forks-")
    (folder.path / "file").write_text("here")
    here = folder.path

    def child() -> bool:
        own = folder.path
        (own / "file").write_text("there")
        folder.remove()
        return own != here and not own.exists()

    assert of_child(child)
    assert (here / "file").read_text() == "here"
    folder.remove()
    assert not here.exists()


def test_a_forked_process_that_ends_as_any_other_leaves_the_folder(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom primtorch import forks\nfolder = forks.ScratchFolder('forks-')\nhere = folder.path\n"
        "child = os.fork()\nif child == 0:\n    sys.exit()\nos.waitpid(child, 0)\nassert here.exists()\nprint(here)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=120)
    assert not Path(done.stdout.strip()).exists()


def test_a_pipe_that_is_being_closed_is_not_held_open() -> None:
    """A thread has let go of its file, and the system has not closed it yet: the forked process has it open."""
    with forks.process(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cat:
        assert cat.stdin is not None
        being_closed = os.dup(cat.stdin.fileno())
        number = cat.stdin.fileno()
        cat.stdin.close()
        os.dup2(being_closed, number)  # as it is in between
        os.close(being_closed)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.close(number)
        try:
            assert cat.wait(20) == 0
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_pipes_to_other_processes_are_held_open_by_one_process() -> None:
    """Many forks beside threads that start processes and talk to them: each is read to its end."""
    stop, wrong = threading.Event(), []

    def talk() -> None:
        while not stop.is_set():
            with forks.process(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cat:
                said, _ = cat.communicate("said " * 100, timeout=20)
                if said != "said " * 100:
                    wrong.append(said)

    threads = [threading.Thread(target=talk) for _ in range(2)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(30):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        time.sleep(0.005)
    begun = time.monotonic()
    stop.set()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert not wrong and took < 20


def test_what_another_thread_imports_is_imported_in_a_fork(tmp_path: Path) -> None:
    """Python's lock of a module that is half imported would be held in the fork by nobody who lets go of it."""
    (tmp_path / "rarely").mkdir()
    (tmp_path / "rarely" / "__init__.py").write_text(
        "from primtorch.late import late\n__getattr__ = late(__name__, {'answer': 'rarely.used'})\n"
    )
    (tmp_path / "rarely" / "used.py").write_text(
        "import time\nimport begun\nbegun.event.set()\ntime.sleep(1)\nanswer = 42\n"
    )
    (tmp_path / "begun.py").write_text("import threading\nevent = threading.Event()\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, threading\nimport begun, rarely\n"
        "thread = threading.Thread(target=lambda: rarely.answer)\nthread.start()\nbegun.event.wait()\n"
        "child = os.fork()\nsignal.alarm(60)\nfine = rarely.answer == 42 and not hasattr(rarely, 'question')\n"
        "if child == 0:\n    os._exit(not fine)\n"
        "thread.join()\nassert fine and os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, str(program)], timeout=120, check=True)
