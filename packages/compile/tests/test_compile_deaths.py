"""What ends the process that meets it is a finding like others: its stage, its operator, and a file that dies of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import proc_files  # tools/check
import pytest
import torch
from planted_faults import FAULTS, Planted, death_by, is_named, minified, planted, says_again, shown_by

import torchcompile
from primtorch.testing import assert_as_accurate
from torchcompile.faults import children, stages
from torchcompile.faults.children import ChildFailed, Death, in_child
from torchdynamo.errors import CaptureDied
from torchinductor.codegen.cpp.backend import CppBackend

OPTIONS: dict[str, Any] = {"cache": None}
pytestmark = [
    pytest.mark.expected_eager(...),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses a GPU cannot be forked"),
]


def forked() -> set[int]:
    """Processes, ended ones too, that are this one's: forks of it alone, and no compilers that wait for work."""
    own = proc_files.said("self", "cmdline")
    return {child for child in proc_files.children("self") if proc_files.said(child, "cmdline") in (own, "")}


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No zombie, no open file, no folder of a child's."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before, others = len(os.listdir("/proc/self/fd")), forked()
    yield
    assert not forked() - others
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the lines of /dev/null, which redirection may open
    assert not list(scratch.glob("torchcompile-child-*"))


def block(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(x.sin() @ x.cos().T).tanh()
    return hidden.softmax(-1).exp().sum(0)


def shares(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.sin(), -1).exp()


SLICE = (
    "kernels: erf's writes to null",
    "rule of sigmoid's gradient divides by zero",
    "joint: the trace aborts at tanh's gradient",
)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in SLICE], ids=lambda fault: fault.name)
def test_a_script_that_dies_is_reduced(fault: Planted, tmp_path: Path) -> None:
    found = minified(fault, tmp_path)
    assert is_named(fault, str(found.fault)) and f"crashes: {fault.dies}" in str(found.fault), found
    assert found.lines <= 10 and found.path is not None
    assert says_again(fault, found.path)
    assert not death_by(found.path) and not shown_by(found.path)  # without the fault the file runs


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.dies and f.name not in SLICE], ids=lambda fault: fault.name)
def test_other_scripts_that_die_are_reduced(fault: Planted, tmp_path: Path) -> None:
    test_a_script_that_dies_is_reduced(fault, tmp_path)


def _faulty(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, where: str = "") -> None:
    """Kernels in which one text is another."""
    generate = CppBackend.generate

    def faulty(self: Any, *args: Any) -> Any:
        made = generate(self, *args)
        text = made.text.replace(right, wrong) if where in made.text else made.text
        return type(made)(text, made.meta, made.origins)

    monkeypatch.setattr(CppBackend, "generate", faulty)


NULL = "(*(volatile float*)0 = 1.0f)*"


@pytest.mark.parametrize("options", [{"verify": True}, {"minify_on_error": True}])
def test_a_program_whose_kernel_would_end_it_goes_on(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _faulty(monkeypatch, "ferf(", f"{NULL}ferf(")
    x = torch.randn(4, 3)
    compiled = torchcompile.compile(block, options={**OPTIONS, **options, "dump": str(tmp_path)})
    with pytest.warns(UserWarning, match=r"stage kernels: crashes: SIGSEGV") as told:
        torch.testing.assert_close(compiled(x), block(x))
    said = str(told[0].message)
    if "verify" in options:
        assert "the first operator that fails is gelu" in said and __file__ in said
    else:
        assert "reduced to 1 operators" in said
        assert "first operator that fails is gelu" in (tmp_path / "minified_kernels_gelu.py").read_text()


def test_a_capture_that_would_end_the_program_is_told() -> None:
    (fault,) = (f for f in FAULTS if f.dies and f.stage == "capture")
    x, told = torch.randn(4, 3, requires_grad=True), f"capture crashes: {fault.dies}"
    with planted(fault):
        compiled = torchcompile.compile(shares, options={**OPTIONS, "minify_on_error": True})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), shares(x))
        (event,) = torchcompile.report().events
        assert event.kind.id == "capture_fault" and told in event.detail and __file__ in event.where
        for asks in ({"options": {"strict": True}}, {"fullgraph": True}):
            options = {**OPTIONS, "minify_on_error": True, **asks.pop("options", {})}  # type: ignore[dict-item]
            with pytest.raises(CaptureDied, match=told):
                torchcompile.compile(shares, options=options, **asks)(x)  # type: ignore[arg-type]
        with pytest.raises(torchcompile.WrongResult, match=rf"(?s)stage capture.*{told}.*softmax"):
            torchcompile.compile(shares, options={**OPTIONS, "verify": True})(x)


def test_under_strict_the_death_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _faulty(monkeypatch, "ferf(", f"{NULL}ferf(")
    with pytest.raises(torchcompile.CompilerDied, match="stage kernels: crashes: SIGSEGV"):
        torchcompile.compile(block, options={**OPTIONS, "verify": True, "strict": True})(torch.randn(4, 3))


def test_a_kernel_of_one_shape_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of other sizes stay compiled, and the file keeps the size."""
    _faulty(monkeypatch, "sinf(", f"{NULL}sinf(", where="35")
    compiled = torchcompile.compile(
        lambda x: (x.exp() + 1).sin().cos(),
        dynamic=False,
        options={**OPTIONS, "minify_on_error": True, "dump": str(tmp_path)},
    )
    for size in (3, 7, 5):
        x = torch.randn(size, 5)
        with pytest.warns(UserWarning, match="SIGSEGV") if size == 7 else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x), (x.exp() + 1).sin().cos())
    assert "torch.randn((7, 5))" in (tmp_path / "minified_kernels_sin.py").read_text()


def test_a_kernel_of_a_backward_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _faulty(monkeypatch, "cosf(", f"{NULL}cosf(")  # of sin's derivative
    x = torch.rand(3, 5, requires_grad=True)  # not far from zero: what exp rounds counts exp(x) times in the slope
    compiled = torchcompile.compile(
        lambda x: x.exp().sin(), options={**OPTIONS, "minify_on_error": True, "dump": str(tmp_path)}
    )
    with pytest.warns(UserWarning, match="stage kernels: crashes: SIGSEGV"):
        compiled(x).sum().backward()
    eager, exact = (t.exp().cos().mul(t.exp()) for t in (x.detach(), x.detach().double()))
    assert_as_accurate(x.grad, eager, exact)
    path = tmp_path / "minified_kernels_sin.py"
    assert death_by(path) == "SIGSEGV"


def _rule_of_gelu(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    module: Any = sys.modules["primtorch.lower"]
    right = module.decompositions
    gelu = torch.ops.aten.gelu.default
    monkeypatch.setattr(module, "decompositions", lambda *args: {**right(*args), gelu: run})


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda *args, **named: time.sleep(1000), "hangs: nothing for 2 s"),
        (lambda *args, **named: os._exit(3), "exits: status 3"),
    ],
    ids=["hangs", "exits"],
)
def test_what_never_ends_or_leaves_is_told(run: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SILENCE", 2.0)
    monkeypatch.setattr("torchcompile.faults.find._PATIENCE", 2.0)
    _rule_of_gelu(monkeypatch, run)
    x = torch.randn(4, 3)
    compiled = torchcompile.compile(lambda x: torch.nn.functional.gelu(x.sin()), options={**OPTIONS, "verify": True})
    with pytest.warns(UserWarning, match=rf"(?s)stage prims: {told}.*first operator that fails is gelu"):
        torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x.sin()))


SCRIPT = """
import ctypes
import torch
import torchcompile

{own}

def step(x):
    return {call}

x = torch.randn(4)
torchcompile.compile(step)(x)
{after}
"""
OPERATOR = """
@torch.library.custom_op("deaths::segfault", mutates_args=())
def segfault(x: torch.Tensor) -> torch.Tensor:
    ctypes.string_at(0)
    return x.clone()

@segfault.register_fake
def _(x):
    return torch.empty_like(x)
"""


@pytest.mark.parametrize(
    ("own", "call", "after", "told"),
    [
        (
            OPERATOR,
            "segfault(x).sin()",
            "",
            r"SIGSEGV \(crashes\) in eager's own run of a function that it compiles, at \S+dies.py:9",
        ),
        ("", "x.sin()", "ctypes.string_at(0)", r"SIGSEGV \(crashes\) in its own code, at \S+dies.py:13"),
    ],
    ids=["eager", "script"],
)
def test_a_death_that_is_not_ours(own: str, call: str, after: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(SCRIPT.format(own=textwrap.dedent(own), call=call, after=after))
    command = [sys.executable, "-m", "torchcompile", "minify", "--folder", str(tmp_path), str(script)]
    wide = {**os.environ, "COLUMNS": "1000"}  # so that no path is broken
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=wide)
    said = " ".join(ended.stdout.split())
    assert ended.returncode == 1 and "it is no fault of torchcompile's" in said, ended
    assert re.search(told, said), said
    assert not list(tmp_path.glob("minified*"))


# -- children ----------------------------------------------------------------------------------


def test_children_tell_what_they_give_and_how_they_died() -> None:
    heard: list[str] = []

    def talks(tell: Any) -> Any:
        for number in range(3):
            tell.progress(f"{number}" * 70_000)  # more than a pipe holds
        return {"a": [1, None, "é"]}

    def dies(tell: Any) -> Any:
        tell.at("here")
        os.kill(os.getpid(), signal.SIGFPE)

    assert in_child(talks, 20.0, heard.append) == {"a": [1, None, "é"]}
    assert [(text[0], len(text)) for text in heard] == [("0", 70_000), ("1", 70_000), ("2", 70_000)]
    died = in_child(dies, 20.0)
    assert isinstance(died, Death) and (died.kind, died.what, died.at) == ("crashes", "SIGFPE", "here")
    with pytest.raises(ChildFailed, match="ValueError: no"):
        in_child(lambda tell: (_ for _ in ()).throw(ValueError("no")), 20.0)


def test_a_child_beside_threads_that_hold_pools_and_locks() -> None:
    """Eager's and the compiled program's pools of OpenMP have threads here, which the child has not."""
    before = torch.get_num_threads()
    stop = threading.Event()
    torch.set_num_threads(4)
    big = torch.randn(1 << 20, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x.exp()).sum()

    try:
        other = threading.Thread(target=lambda: [torch.randn(1 << 18).exp().sum() for _ in iter(stop.is_set, True)])
        other.start()
        compiled = torchcompile.compile(step, options=OPTIONS)
        compiled(big).backward()
        for _ in range(5):
            found = in_child(
                lambda tell: (compiled(big).backward(), (big @ big).item(), torch.get_num_threads())[2], 30.0
            )
            assert found == 1
    finally:
        stop.set()
        other.join()
        torch.set_num_threads(before)


def test_an_interrupt_of_the_parent_ends_the_child(tmp_path: Path) -> None:
    pids: list[str] = []

    def told(text: str) -> None:
        pids.append(text)
        raise KeyboardInterrupt

    def waits(tell: Any) -> None:
        tell.progress(str(os.getpid()))
        time.sleep(1000)

    with pytest.raises(KeyboardInterrupt):
        in_child(waits, 60.0, told)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids[0]), 0)


def test_a_process_in_a_group_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are the parent's: graphs are examined where they are."""
    monkeypatch.setattr(children.dist, "is_initialized", lambda: True)
    assert not children.possible()


def test_a_death_in_eager_is_said_before_it_comes(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(SCRIPT.format(own=OPERATOR, call="segfault(x).sin()", after=""))
    named = {**os.environ, "TORCHCOMPILE_VERIFY": "1"}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=named)
    assert ended.returncode == -signal.SIGSEGV
    assert "eager's own run of it crashes: SIGSEGV" in ended.stderr, ended
