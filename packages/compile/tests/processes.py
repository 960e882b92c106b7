"""Processes that talk to each other over gloo: started once, given one program after the other.

A program is a function of a module that the processes can import, with plain arguments; all ranks run it, and what they
return comes back in the order of the ranks. Nothing waits without a bound: collectives have a timeout, and a program
that takes longer than its own is ended with its processes; the next program gets new ones.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

AVAILABLE = dist.is_available() and dist.is_gloo_available()
_COLLECTIVE = datetime.timedelta(seconds=30)
_START = 90.0  # seconds in which the processes import torch and meet
# Forked from one process that has imported torch, and has no threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.device_mesh", "torchcompile"])


class ProgramFailed(AssertionError):
    """What a rank raised, with its traceback, or how long it took."""


class Processes:
    """Use as a context manager: at its end the processes are gone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._running: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def run(self, program: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What `program(*args)` returns in each rank.

        Raises:
            ProgramFailed: a rank raised, died or was not done in time. All processes are ended.
        """
        if not self._running:
            self._start()
        try:
            for _, connection in self._running:
                connection.send((program, args))
            return self._answers(time.monotonic() + timeout, f"{getattr(program, '__name__', program)}{args}")
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.count):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, self.count, port, there), daemon=True)
            process.start()
            there.close()
            self._running.append((process, here))
        try:
            self._answers(time.monotonic() + _START, "the start")
        except BaseException:
            self._end()
            raise

    def _answers(self, deadline: float, what: str) -> list[Any]:
        """One from each rank; the first that failed explains the others, which wait for it."""
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            waiting = {rank: c for rank, (_, c) in enumerate(self._running) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ProgramFailed(f"{what}: ranks {sorted(waiting)} were not done in time")
            for rank, connection in waiting.items():
                if connection not in ready:
                    continue
                try:
                    good, answer = connection.recv()
                except EOFError:
                    raise ProgramFailed(f"{what}: rank {rank} died") from None
                if not good:
                    raise ProgramFailed(f"{what}: rank {rank} raised\n{answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(self.count)]

    def _end(self) -> None:
        for process, connection in self._running:
            process.kill()
            process.join(10)
            connection.close()
        self._running.clear()


def _serve(rank: int, count: int, port: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    try:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, timeout=_COLLECTIVE)
        parent.send((True, None))
        while True:
            program, args = parent.recv()
            parent.send((True, program(*args)))
    except EOFError:
        pass
    except BaseException:
        parent.send((False, traceback.format_exc()))
    os._exit(0)  # gloo's threads may still be ending, which would abort the interpreter's own end
