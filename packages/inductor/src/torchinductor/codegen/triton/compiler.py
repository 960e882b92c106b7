"""Turns Triton sources into binaries: a disk cache keyed by content, and worker processes for what it lacks."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torchinductor.errors import BuildFailed

from .writer import TritonSource

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel: `record` is the worker's JSON."""

    key: str
    code: bytes
    record: dict[str, Any]
    hit: bool


class Worker:
    """One compiling process. Starts at its first request; a process that dies is replaced at the next one."""

    def __init__(self, scratch: Path) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._scratch = scratch

    def compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply; an "error" entry when the kernel did not compile."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TRITON_CACHE_DIR": str(self._scratch), "TRITON_INTERPRET": "0"},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"error": f"the compiling process ended with status {self._process.wait()}"}
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


class TritonCompiler:
    """Compiles sources for one GPU architecture (90 for sm_90). Safe to call from several threads and processes."""

    def __init__(self, arch: int, folder: Path | None = None, workers: int | None = None) -> None:
        self.arch = arch
        self._temporary = tempfile.TemporaryDirectory(prefix="torchinductor-triton-")
        atexit.register(self.close)
        self.folder = folder or Path(self._temporary.name)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers = [
            Worker(Path(self._temporary.name) / "triton") for _ in range(workers or min(16, os.cpu_count() or 1))
        ]
        for worker in self._workers:
            self._idle.put(worker)
        self._lock = threading.Lock()

    def key(self, source: TritonSource) -> str:
        """What the binary depends on."""
        parts = (source.text, source.name, source.signature, source.warps, source.stages, self.arch, version("triton"))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def compile(self, sources: Sequence[TritonSource]) -> list[Binary]:
        """Binaries in the sources' order. Raises BuildFailed with the source's file when Triton refuses one."""
        with ThreadPoolExecutor(max_workers=max(1, min(len(sources), len(self._workers)))) as pool:
            return list(pool.map(self._one, sources))

    def _one(self, source: TritonSource) -> Binary:
        key = self.key(source)
        found = self._read(key)
        if found is not None:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{key}.py"
        fresh = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        fresh.write_text(source.text)
        fresh.replace(file)
        request = {
            "source": str(file),
            "name": source.name,
            "signature": source.signature,
            "warps": source.warps,
            "stages": source.stages,
            "arch": self.arch,
            "asserts": "tl.device_assert" in source.text,
            "target": str(self.folder / key),
        }
        worker = self._idle.get()
        try:
            reply = worker.compile(request)
        finally:
            self._idle.put(worker)
        if "error" in reply:
            raise BuildFailed(
                f"Triton could not compile {file}: {reply['error']}\n{reply.get('trace', '')}{source.text}"
            )
        built = self._read(key)
        if built is None:
            raise BuildFailed(f"the compiled kernel {self.folder / key}.cubin disappeared")
        return Binary(key, built.code, built.record, hit=False)

    def _read(self, key: str) -> Binary | None:
        """The record is written last, so a kernel that has one is whole."""
        try:
            record = json.loads((self.folder / f"{key}.json").read_bytes())
            return Binary(key, (self.folder / f"{key}.cubin").read_bytes(), record, hit=True)
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def close(self) -> None:
        """Ends the workers and removes the temporary folder."""
        for worker in self._workers:
            worker.close()
        self._temporary.cleanup()
