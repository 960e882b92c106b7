"""The disk cache under concurrent writers, unwritable folders, damage and interruption; and a machine without a compiler."""

import logging
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from prim_graphs import build

from primtorch.files import is_trusted
from torchinductor import BuildFailed, CompilerMissing, InductorOptions, compile_graph
from torchinductor.cache import DiskCache, turn
from torchinductor.codegen.cpp.build import compiler_version, find_compiler

pytestmark = pytest.mark.usefixtures("double")

WORKER = """
    import sys, torch
    sys.path.insert(0, {tests!r})
    from prim_graphs import build
    from torchinductor import InductorOptions, compile_graph
    x = torch.arange(1000.0, dtype=torch.float64)
    gm = build(lambda p, t: p.mul(p.exp(p.neg(t)), {factor}), x)
    print("ready", flush=True)
    sys.stdin.readline()
    compiled = compile_graph(gm, (), InductorOptions(cache_dir={folder!r}))
    torch.testing.assert_close(compiled(x)[0], torch.exp(-x) * {factor})
    print("right", compiled.stats.cache_misses)
"""


def worker(folder, factor):
    text = textwrap.dedent(WORKER).format(tests=os.path.dirname(__file__), folder=str(folder), factor=factor)
    return subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compiled_sin(folder, factor=1.0, **options):
    x = torch.linspace(0, 1, 50)
    gm = build(lambda p, t: p.mul(p.sin(t), factor), x)
    compiled = compile_graph(gm, (), InductorOptions(cache_dir=None if folder is None else str(folder), **options))
    torch.testing.assert_close(compiled(x)[0], x.sin() * factor)
    return compiled.stats


def libraries(folder):
    """Whatever files there are, but for what the compiler said of itself."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".json")


def test_second_compilation_hits(tmp_path):
    assert compiled_sin(tmp_path).cache_misses == 1
    stats = compiled_sin(tmp_path)
    assert (stats.cache_hits, stats.cache_misses) == (1, 0)
    assert [p.suffix for p in libraries(tmp_path)] == [".so"]


def test_two_processes_at_once(tmp_path):
    both = [worker(tmp_path, 2.5) for _ in range(2)]
    for process in both:
        assert process.stdout.readline().strip() == "ready"
    outputs = [process.communicate("go\n", timeout=60)[0] for process in both]
    assert all(process.returncode == 0 for process in both)
    assert sorted(outputs) == ["right 0\n", "right 1\n"]  # one builds, the other waits and loads
    assert [p.suffix for p in libraries(tmp_path)] == [".so"]


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(200)])
def test_damaged_entry_is_built_again(tmp_path, content):
    def run():
        return worker(tmp_path, 3.5).communicate("go\n", timeout=60)[0].split("\n")[1]

    assert run() == "right 1"
    (entry,) = libraries(tmp_path)
    entry.write_bytes(content)
    assert run() == "right 1"
    assert run() == "right 0"


def test_folder_that_cannot_be_written_warns_once(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING, "torchinductor.cache"):
        compiled_sin(blocked / "cache")
        compiled_sin(blocked / "cache", 2.0)
    assert len([r for r in caplog.records if "cannot be written" in r.getMessage()]) == 1


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_machine_code_that_others_can_write_is_not_loaded(what, tmp_path):
    folder = tmp_path / "cache"

    def run():
        return worker(folder, 4.5).communicate("go\n", timeout=60)[0].split("\n")[1]

    assert [run(), run()] == ["right 1", "right 0"]
    for path in libraries(folder):
        if what == "file":
            path.chmod(0o777)
        elif what == "link":
            path.rename(path.with_suffix(".elsewhere"))
            path.symlink_to(path.with_suffix(".elsewhere"))
    if what == "folder":
        folder.chmod(0o777)
    assert run() == "right 1"
    assert run() == ("right 1" if what == "folder" else "right 0")  # built anew in their place


def test_a_folder_that_others_can_write_is_told_once(tmp_path, caplog):
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "torchinductor.cache"):
        for _ in range(2):
            assert DiskCache(str(tmp_path)).folder is None
    (record,) = caplog.records
    assert "is not used: it belongs to another user, or everybody can write to it" in record.getMessage()


def test_another_users_files_are_not_trusted(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("x")
    assert is_trusted(file)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert is_trusted(file) == (owner == 0)  # the system's are everybody's to read


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder_is_still_read(tmp_path):
    folder = tmp_path / "cache"
    compiled_sin(folder, 5.0)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert compiled_sin(folder, 5.0).cache_hits == 1
    finally:
        folder.chmod(stat.S_IRWXU)


def test_interrupt_leaves_the_cache_sound(tmp_path):
    process = worker(tmp_path, 7.5)
    assert process.stdout.readline().strip() == "ready"
    process.stdin.write("go\n")
    process.stdin.flush()
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    after = worker(tmp_path, 7.5)
    assert after.communicate("go\n", timeout=60)[0].split("\n")[1].startswith("right")


def test_no_compiler_is_one_clear_error(tmp_path):
    with pytest.raises(CompilerMissing, match="no C\\+\\+ compiler found.*install one"):
        compiled_sin(tmp_path, 11.0, cxx="a-compiler-that-is-not-there")


@pytest.mark.parametrize("change", ["compiler", "next on PATH"])
def test_a_compiler_is_asked_for_its_version_once_until_its_files_change(tmp_path, monkeypatch, change):
    asked, path = tmp_path / "asked", os.environ["PATH"]
    for folder in ("wrappers", "compilers"):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "g++"
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo {folder} | tee -a {asked} && exit\nPATH={path} exec g++ "$@"\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/wrappers:{tmp_path}/compilers:{path}")

    def misses_of_a_new_process():
        for known in (find_compiler, compiler_version):
            known.cache_clear()
        return compiled_sin(tmp_path / "cache").cache_misses

    try:
        assert [misses_of_a_new_process() for _ in range(3)] == [1, 0, 0]
        assert len(asked.read_text().split()) == 1
        os.utime(tmp_path / ("wrappers" if change == "compiler" else "compilers") / "g++", ns=(0, 1))
        assert [misses_of_a_new_process() for _ in range(2)] == [0, 0]  # it says what it said before
        assert len(asked.read_text().split()) == 2
    finally:
        for known in (find_compiler, compiler_version):
            known.cache_clear()


def test_refused_source_names_the_compiler(tmp_path):
    false = tmp_path / "c++"
    false.write_text("#!/bin/sh\necho 'error: no' >&2\nexit 1\n")
    false.chmod(0o755)
    with pytest.raises(BuildFailed, match="error: no"):
        compiled_sin(tmp_path / "cache", 13.0, cxx=str(false))
    assert libraries(tmp_path / "cache") == []


HOLDER = """
    import sys, time, pathlib
    from torchinductor.cache import turn
    with turn(pathlib.Path({path!r})):
        print("taken", flush=True)
        time.sleep(60)
"""


def test_a_turn_ends_with_its_process_and_is_not_waited_for_too_long(tmp_path, caplog):
    path = tmp_path / "ab" / "kernel.so"
    text = textwrap.dedent(HOLDER).format(path=str(path))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline().strip() == "taken"
        began = time.monotonic()
        with caplog.at_level(logging.WARNING), turn(path, seconds=0.1):
            assert "takes more than 0 s to make" in caplog.text
        holder.kill()
        holder.wait()
    with turn(path, seconds=60):
        assert time.monotonic() - began < 30
    assert list(path.parent.iterdir()) == []


def test_published_files_appear_whole(tmp_path):
    cache = DiskCache(str(tmp_path))
    written = cache.temporary("ab" + "0" * 38, ".so")
    assert cache.find("ab" + "0" * 38, ".so") is None
    written.write_text("content")
    assert cache.publish(written, "ab" + "0" * 38, ".so").read_text() == "content"
