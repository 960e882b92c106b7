"""What one process compiled is saved, and another runs it without a compiler, or is told why not."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile
import torchdynamo
from torchcompile import ArtifactError, ArtifactMismatch, InvalidArgument
from torchcompile.artifacts.identity import digest_of
from torchcompile.artifacts.schemas import FORMAT

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("script", ["artifact_train", "artifact_sizes"])
def test_what_is_saved_runs_and_trains_without_a_compiler(script: str, tmp_path: Path) -> None:
    """A vision transformer; programs whose sizes are symbols, at sizes that were not met before they were saved."""
    for number, stage in enumerate(("save", "load")):
        settings = {"TORCHCOMPILE_CACHE": str(tmp_path / stage), "PYTHONHASHSEED": str(number + 1)}
        done = subprocess.run(
            [sys.executable, str(HERE / f"{script}.py"), stage, str(tmp_path)],
            env={**os.environ, **settings}, capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    assert not list((tmp_path / "load").rglob("*.so"))


SOURCE = """
import torch


def scale(x):
    return x * {factor}


def program(x):
    return scale(x).sin() + 1


class Net(torch.nn.Module):
    def forward(self, x):
        return program(x)
"""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], types.ModuleType]:
    """A user's module, with a number in its source."""

    def write(factor: int, above: int = 0) -> types.ModuleType:
        module = types.ModuleType("artifact_program")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile("\n" * above + SOURCE.format(factor=factor), "artifact_program.py", "exec"), module.__dict__)
        return module

    return write


@pytest.fixture
def saved(written: Callable[[int], types.ModuleType], tmp_path: Path) -> Path:
    compiled = torchcompile.compile(written(2).program)
    compiled(torch.ones(3))
    torchcompile.save(compiled, tmp_path / "program")
    torchcompile.reset()
    return tmp_path / "program"


class Layer(nn.Module):
    """A layer with a break in it, and a function that is called behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.linear(x).sin()
        torchcompile.graph_break()
        return behind(found)


def behind(x: torch.Tensor) -> torch.Tensor:
    torchcompile.graph_break()
    return x.cos() * 2


@pytest.mark.expected_eager("graph_break")
def test_breaks_within_what_is_called(tmp_path: Path) -> None:
    """What goes on behind a break is no other source."""
    model, x = nn.Sequential(Layer(), nn.Tanh(), Layer()), torch.randn(2, 3)
    compiled = torchcompile.compile(model)
    compiled(x).sum().backward()
    torchcompile.save(compiled, tmp_path / "program")
    torchcompile.reset()
    loaded = torchcompile.load(tmp_path / "program", copy.deepcopy(model))
    found = loaded(x)
    found.sum().backward()
    torch.testing.assert_close(found, model(x))
    assert {event.kind.id for event in torchcompile.report().events} <= {"graph_break", "recompiled"}


def test_what_is_loaded_is_not_captured(saved: Path, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards come with the file: a call that they let through is the one that was captured."""
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(saved.parent / "another"))
    module = written(2)
    loaded = torchcompile.load(saved, module.program)
    torch.testing.assert_close(loaded(torch.ones(3)), module.program(torch.ones(3)))
    assert torchdynamo.stats().found == 1
    with pytest.raises(ArtifactMismatch, match="is not in"):
        loaded(torch.ones(3, dtype=torch.float64))
    torchcompile.reset()
    module = written(2, above=3)  # on other lines it is captured: what is kept tells of them
    loaded = torchcompile.load(saved, module.program)
    torch.testing.assert_close(loaded(torch.ones(3)), module.program(torch.ones(3)))
    assert torchdynamo.stats().found == 0


def doctored(file: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(file) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    change(held)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    return file


def other(fact: str) -> Callable[[dict[str, bytes]], None]:
    """A fact of the manifest as another machine might have it."""

    def change(held: dict[str, bytes]) -> None:
        manifest = json.loads(held["manifest.json"])
        facts = manifest["record"][2]
        for row in facts:
            if row["record"][1] == fact:
                row["record"][2] = "another one"
        held["manifest.json"] = json.dumps(manifest).encode()

    return change


@pytest.mark.parametrize("fact", ["torch", "Python", "torchcompile", "system", "processor features", "threads"])
def test_another_machine_is_named(fact: str, saved: Path, written: Any) -> None:
    with pytest.raises(ArtifactMismatch, match=fact) as raised:
        torchcompile.load(doctored(saved, other(fact)), written(2).program)
    assert [what for what, _, _ in raised.value.differences] == [fact]


def test_a_changed_source_is_named_and_lines_are_none(saved: Path, written: Any) -> None:
    with pytest.raises(ArtifactMismatch, match=r"artifact_program\.scale") as raised:
        torchcompile.load(saved, written(3).program)
    assert [what for what, _, _ in raised.value.differences] == ["artifact_program.scale"]
    moved = torchcompile.load(saved, written(2, above=7).program)
    torch.testing.assert_close(moved(torch.ones(3)), torch.full((3,), 2.0).sin() + 1)


@pytest.mark.expected_eager("not_in_artifact")
def test_what_does_not_fit_is_compiled_where_that_is_asked_for(saved: Path, written: Any) -> None:
    found = torchcompile.load(saved, written(3).program, recompile=True)
    torch.testing.assert_close(found(torch.ones(3)), torch.full((3,), 3.0).sin() + 1)
    assert [event.kind.id for event in torchcompile.report().events] == ["not_in_artifact"]
    torchcompile.reset()
    shapes = torchcompile.load(saved, written(2).program, recompile=True)
    for size in (3, 5):
        torch.testing.assert_close(shapes(torch.ones(size)), torch.full((size,), 2.0).sin() + 1)
    assert "not_in_artifact" in {event.kind.id for event in torchcompile.report().events}


def test_a_call_that_was_not_saved_is_refused(saved: Path, written: Any) -> None:
    program = torchcompile.load(saved, written(2).program)
    with pytest.raises(ArtifactMismatch, match="is not in"):
        program(torch.ones(3, requires_grad=True))
    torch.testing.assert_close(program(torch.ones(3)), torch.full((3,), 2.0).sin() + 1)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def turn_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def replace_a_kernel(file: Path) -> None:
    doctored(file, lambda held: held.update({name: b"x" for name in held if name.startswith("kernels/")}))


def add_a_file(file: Path) -> None:
    doctored(file, lambda held: held.update({"../out.so": b"x"}))


def write_a_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps(print))


@pytest.mark.parametrize(
    "spoil", [cut, turn_a_byte, replace_a_kernel, add_a_file, write_a_pickle], ids=lambda spoil: spoil.__name__
)
def test_a_torn_file_is_refused(spoil: Callable[[Path], None], saved: Path, written: Any) -> None:
    spoil(saved)
    with pytest.raises(ArtifactError) as raised:
        torchcompile.load(saved, written(2).program)
    assert not isinstance(raised.value, ArtifactMismatch)


@pytest.mark.parametrize("fields", ["as now", "one more", "one less"])
@pytest.mark.parametrize("recompile", [False, True])
def test_a_file_of_another_format_is_named(fields: str, recompile: bool, saved: Path, written: Any) -> None:
    """Whatever another release has in its manifest: it is no torn file."""

    def change(held: dict[str, bytes]) -> None:
        manifest = json.loads(held["manifest.json"])
        manifest["record"][1] += 1
        if fields == "one more":
            manifest["record"].append({"unheard": {"of": 1}})
            held["weights/0"] = b"x"
        elif fields == "one less":
            del manifest["record"][4]
        held["manifest.json"] = json.dumps(manifest).encode()

    with pytest.raises(ArtifactMismatch, match=rf"format {FORMAT + 1}, and this release .* reads {FORMAT}") as raised:
        torchcompile.load(doctored(saved, change), written(2).program, recompile=recompile)
    assert raised.value.differences == (("format", str(FORMAT + 1), str(FORMAT)),)


@pytest.mark.expected_eager("not_in_artifact")
def test_an_option_of_another_release_is_named(saved: Path, written: Any) -> None:
    def change(held: dict[str, bytes]) -> None:
        manifest = json.loads(held["manifest.json"])
        manifest["record"][4]["dict"].append(["unheard_of", True])
        held["manifest.json"] = json.dumps(manifest).encode()

    doctored(saved, change)
    with pytest.raises(ArtifactMismatch, match="option unheard_of: True there, none here"):
        torchcompile.load(saved, written(2).program)
    found = torchcompile.load(saved, written(2).program, recompile=True)
    torch.testing.assert_close(found(torch.ones(3)), torch.full((3,), 2.0).sin() + 1)
    assert "unheard_of" in torchcompile.report().events[0].detail


def test_a_file_of_the_other_kind_is_named(saved: Path, written: Any, tmp_path: Path) -> None:
    """With a model for an exported graph, without one for a compiled model."""
    with pytest.raises(ArtifactError, match=r"torchcompile.load\(file, model\)"):
        torchcompile.load(saved)
    torchcompile.save(torchcompile.export(written(2).program, torch.ones(3)), tmp_path / "exported")
    with pytest.raises(ArtifactError, match="is an exported graph, which needs no model"):
        torchcompile.load(tmp_path / "exported", written(2).program)


def test_what_has_no_form_in_a_file_is_named(tmp_path: Path) -> None:
    @torchcompile.allow_in_graph
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    cases = {
        "nothing has been compiled": lambda: torchcompile.compile(lambda x: x + 1),
        "functions or operators of the program's own": lambda: called(torchcompile.compile(lambda x: own(x) + 1)),
        "cache=None": lambda: called(torchcompile.compile(lambda x: x + 1, options={"cache": None})),
        "back end 'inductor'": lambda: called(torchcompile.compile(lambda x: x + 1, backend="aot_eager")),
    }
    for message, make in cases.items():
        with pytest.raises(ArtifactError, match=message):
            torchcompile.save(make(), tmp_path / "file")
    for given in (nn.Linear(2, 2), len, lambda x: x):
        with pytest.raises(InvalidArgument):
            torchcompile.save(given, tmp_path / "file")
    assert not list(tmp_path.glob("file*"))


def called(program: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    program(torch.ones(3))
    return program


def test_a_loaded_program_is_saved_and_copied(saved: Path, written: Any, tmp_path: Path) -> None:
    module = written(2)
    for kind in (module.program, module.Net()):
        first = torchcompile.compile(kind)
        first(torch.ones(3))
        for _ in range(2):
            torchcompile.save(first, tmp_path / "again")
            first = torchcompile.load(tmp_path / "again", kind)
            torch.testing.assert_close(first(torch.ones(3)), torch.full((3,), 2.0).sin() + 1)


def test_modules_compiled_in_place_are_saved(written: Any, tmp_path: Path) -> None:
    model = written(2).Net()
    torchcompile.compile_in_place(model)
    model(torch.ones(3))
    torchcompile.save(model, tmp_path / "file")
    assert torchcompile.load(tmp_path / "file", written(2).Net())(torch.zeros(3)).tolist() == [1.0] * 3


def test_a_compiled_module_is_pickled_and_copied() -> None:
    """What is saved by pickle is the plain model."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    compiled, x = torchcompile.compile(model), torch.randn(5, 3)
    compiled(x).sum().backward()
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    copies = [torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(compiled)), copy.deepcopy(compiled)]
    expected = copy.deepcopy(model)(x)
    for one in copies:
        assert type(one).__name__ == "Sequential" and one[0].weight is not model[0].weight
        torch.testing.assert_close(one(x), expected)
    assert [type(one) is nn.Sequential for one in copies] == [True, True, False]


def test_code_is_compared_by_what_it_does() -> None:
    def made(text: str, file: str = "a.py") -> str:
        return digest_of(compile(text, file, "exec").co_consts[0])

    first = made("def f(x):\n return x in {'a', 'b', 'c'} or (lambda y: y + 1)(x)")
    assert first == made("\n\n\ndef f(x):\n\n return x in {'c', 'b', 'a'} or (lambda y: y + 1)(x)", "b.py")
    for text in ("y + 2", "y + 1.0", "y - 1", "y + True"):
        assert first != made(f"def f(x):\n return x in {{'a', 'b', 'c'}} or (lambda y: {text})(x)")
    assert made("def f(): return 0.0") != made("def f(): return -0.0")
