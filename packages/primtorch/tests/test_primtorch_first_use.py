"""An extension is built at its first use, once for all processes of a user, and whoever cannot build it is told what to do."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from primtorch import building, extensions, first_use

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C"};
__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit__C() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", 42);
    return module;
}
"""
PROGRAM = "import sys; from primtorch.extensions import load; print(load(sys.argv[1], sys.argv[2]).answer)"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `_C` of an installed package, with a cache folder and a compiler that counts its calls."""
    folder = tmp_path / "site" / "package" / "_C"
    (folder / "cpp").mkdir(parents=True)
    (folder / "cpp" / "module.cpp").write_text(SOURCE)
    counting = tmp_path / "counting"
    counting.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {building.compiler()[0]} "$@"\n')
    counting.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("CXX", str(counting))
    return folder


def calls(package: Path) -> int:
    return len((package.parents[2] / "calls").read_text().splitlines())


def processes(package: Path, count: int) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, "package._C", str(package)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload,no-any-return]


def test_processes_build_once(package: Path) -> None:
    told = ""
    for process in processes(package, 2):
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0 and out == "42\n", error
        told += error
    assert told.count("building its C++ extension for torch-") == 2  # begun and done
    assert calls(package) == 2  # compiled and linked
    assert extensions.load("package._C", str(package)).answer == 42
    assert calls(package) == 2
    (package / "cpp" / "module.cpp").write_text(SOURCE.replace("42", "43"))
    assert extensions.load("package._C", str(package)).answer == 43
    builds = list((package.parents[2] / "caches" / "torchcompile" / "extensions").iterdir())
    assert len(builds) == 2 and all(stat.S_IMODE(build.stat().st_mode) == 0o700 for build in builds)
    assert {path.suffix for build in builds for path in build.iterdir()} == {".so", ""}  # the library, and the lock


def test_a_package_with_headers_is_a_library_too(package: Path) -> None:
    """Of all but module.cpp, beside the extension, and without a link to Python."""
    (package.parent / "include").mkdir()
    (package.parent / "include" / "answer.h").write_text("int answer();")
    (package / "cpp" / "answer.cpp").write_text(
        '#include <answer.h>\n__attribute__((visibility("default"))) int answer() { return 43; }'
    )
    built = Path(str(extensions.load("package._C", str(package)).__file__))
    library = building.library_of(built, "package")
    assert calls(package) == 4  # two compiled, two linked
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "python" not in "".join(line.partition("=>")[0] for line in needed.splitlines())
    (package.parent / "include" / "answer.h").write_text("int answer();  // another one")
    assert extensions.load("package._C", str(package)).__file__ != str(built)


@pytest.mark.parametrize("what", ["no compiler", "not C++", "no headers", "folder", "others may write"])
def test_what_cannot_be_built_says_what_to_do(package: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "no compiler": "no C\\+\\+ compiler \\(looked for nothing-there\\).*apt-get install g\\+\\+.*CXX",
        "not C++": "does not compile the C\\+\\+ extension(.|\n)*module.cpp",
        "no headers": "no /nowhere/Python.h: install Python's headers",
        "folder": "cannot be made .*XDG_CACHE_HOME",
        "others may write": "others may write to it.*chmod 700",
    }
    match what:
        case "no compiler":
            monkeypatch.setenv("CXX", "nothing-there")
        case "not C++":
            (package / "cpp" / "module.cpp").write_text("no C++")
        case "no headers":
            monkeypatch.setattr(building.sysconfig, "get_path", lambda name: "/nowhere")
        case "folder":
            (package.parents[2] / "caches").write_text("a file")
        case _:
            made = first_use._folder()
            monkeypatch.setattr(first_use, "_key", lambda files: "key")
            folder = made / f"package-{building.build_of(Path()).parent.name}-key"
            folder.mkdir(parents=True)
            os.chmod(folder, 0o777)
    with pytest.raises(ImportError, match=f"package._C, the C\\+\\+ extension, was not built .*{told[what]}"):
        extensions.load("package._C", str(package))


def test_who_waits_for_too_long_is_told(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "WAIT", 0.2)
    with first_use._alone(package / "lock", "package"):
        with pytest.raises(building.NotBuilt, match="another process holds .*lock for more than"):
            with first_use._alone(package / "lock", "package"):
                pass
