"""Kernels that several graphs have in common are built once, and found by every process, whichever graph comes first."""

import ctypes
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from prim_graphs import build

from torchinductor import InductorOptions, binaries_of, compile_graph, load_graph
from torchinductor.codegen.cpp.build import file_of

pytestmark = pytest.mark.usefixtures("double")


def sine(p, x):
    return p.mul(p.sin(x), 2.0)


def both(p, x, y):
    return sine(p, x), p.mul(p.cos(y), 3.0)


def options(folder, **given):
    return InductorOptions(cache_dir=None if folder is None else str(folder), **given)


def compiled_sine(folder, **given):
    x = torch.linspace(0, 1, 50)
    compiled = compile_graph(build(sine, x), (), options(folder, **given))
    torch.testing.assert_close(compiled(x)[0], x.sin() * 2)
    return compiled


def check_both(compiled):
    x, y = torch.linspace(0, 1, 50), torch.linspace(-1, 1, 70)
    for found, wanted in zip(compiled(x, y), (x.sin() * 2, y.cos() * 3), strict=True):
        torch.testing.assert_close(found, wanted)
    return compiled.stats.cache_hits, compiled.stats.cache_misses


def compiled_both(folder, **given):
    graph = build(both, torch.linspace(0, 1, 50), torch.linspace(-1, 1, 70))
    return compile_graph(graph, (), options(folder, **given))


OTHER = """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_default_dtype(torch.float64)
    from test_inductor_libraries import check_both, compiled_both
    print(check_both(compiled_both({folder!r})))
"""


def hits_and_misses_of_another_process(folder):
    text = textwrap.dedent(OTHER).format(tests=os.path.dirname(__file__), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=100)
    return done.stdout.strip()


def indices(folder):
    return {path: json.loads(path.read_text()) for path in folder.rglob("*.json") if path.read_text()[0] == "["}


@pytest.mark.parametrize("cached", [True, False])
def test_a_kernel_of_an_earlier_graph_is_not_built_again(tmp_path, cached):
    folder = tmp_path if cached else None
    compiled_sine(folder)
    assert check_both(compiled_both(folder)) == (1, 1)
    assert check_both(compiled_both(folder)) == (2, 0)
    shown = compiled_both(folder).sources["kernels.cpp"]
    assert "sin(" in shown and "cos(" in shown  # all of the graph's, wherever they lie


def test_another_process_finds_kernels_that_lie_in_units_of_several_graphs(tmp_path):
    compiled_sine(tmp_path)
    check_both(compiled_both(tmp_path))
    assert len(list(tmp_path.rglob("*.so"))) == 2
    assert hits_and_misses_of_another_process(tmp_path) == "(2, 0)"
    assert len(list(tmp_path.rglob("*.so"))) == 2


@pytest.mark.parametrize("spoil", ["cut", "kernels", "outside", "library gone"])
def test_an_index_that_does_not_hold_is_not_followed(tmp_path, spoil):
    compiled_sine(tmp_path)
    check_both(compiled_both(tmp_path))
    ((path, rows),) = indices(tmp_path).items()
    match spoil:
        case "cut":
            path.write_text(path.read_text()[:-4])
        case "kernels":
            path.write_text(json.dumps([[rows[0][0], [0, 1]]]))
        case "outside":
            path.write_text(json.dumps([["../../" + rows[0][0], rows[0][1]], rows[1]]))
        case "library gone":
            next(tmp_path.rglob(f"{rows[0][0]}.so")).unlink()
    assert hits_and_misses_of_another_process(tmp_path) == "(0, 1)"
    assert hits_and_misses_of_another_process(tmp_path) == "(1, 0)"


def test_a_kernel_whose_file_is_gone_is_built_again(tmp_path):
    compiled_sine(tmp_path)
    (library,) = tmp_path.rglob("*.so")
    library.unlink()
    assert check_both(compiled_both(tmp_path)) == (0, 1)
    assert compiled_sine(tmp_path).stats.cache_hits == 1  # in the unit that was built for both


def test_another_folder_and_another_compiler_have_kernels_of_their_own(tmp_path):
    compiled_sine(tmp_path / "one")
    assert check_both(compiled_both(tmp_path / "two")) == (0, 1)
    compiled_sine(tmp_path / "three")
    assert check_both(compiled_both(tmp_path / "three", cxx="g++ -O2")) == (0, 1)


def test_what_is_taken_along_are_units_of_the_graphs_own(tmp_path):
    compiled_sine(tmp_path)
    compiled = compiled_both(tmp_path)
    files = binaries_of(compiled.kept, options(tmp_path))
    assert list(files) == [file_of(compiled.sources["kernels.cpp"])]
    (library,) = map(ctypes.CDLL, map(str, files.values()))
    assert all(hasattr(library, source.meta) for _, sources in compiled.kept.sources for source in sources)
    assert check_both(load_graph(compiled.kept, options(tmp_path))) == (1, 0)
    for path in (*tmp_path.rglob("*.so"), *tmp_path.rglob("*.json")):
        path.unlink()
    assert binaries_of(compiled.kept, options(tmp_path)) is None
