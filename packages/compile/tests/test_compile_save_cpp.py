"""What is saved for C++ computes what eager computes, from C++ without Python; or is refused with what differs."""

from __future__ import annotations

import copy
import random
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.cpp_extension import include_paths, library_paths

import torchcompile
import torchinductor
from primtorch.building import compiler
from primtorch.testing import assert_as_accurate
from torchcompile import ArtifactError, Dim, InvalidArgument
from torchinductor._C import LoadError, SavedProgram

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, f: Callable[..., Any], *inputs: object, **given: Any) -> SavedProgram:
    torchcompile.save_cpp(torchcompile.export(f, *inputs, **given), folder)
    return SavedProgram(str(folder))


def as_accurate(found: Any, f: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """Held to eager in float64; strides are eager's where they mean anything."""
    exactly = copy.deepcopy(f).double() if isinstance(f, nn.Module) else f
    with torch.no_grad():
        eager, exact = f(*inputs), exactly(*(t.double() if t.is_floating_point() else t for t in inputs))
    eager, exact = (value[0] if isinstance(value, tuple) else value for value in (eager, exact))
    assert_as_accurate(found, eager, exact)
    assert (
        all(a == b or n < 2 for n, a, b in zip(eager.shape, found.stride(), eager.stride(), strict=True))
        or not eager.numel()
    )


# -- from C++ --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, linked to torch and to nothing of Python."""
    program = tmp_path_factory.mktemp("built") / "saved_program"
    folders = (*library_paths(), str(Path(torchinductor.library_path()).parent))
    command = [
        *compiler(),
        "-O1",
        "-std=c++20",
        "-Wall",
        str(HERE / "saved_program.cpp"),
        "-o",
        str(program),
        "-pthread",
    ]
    command += [f"-I{path}" for path in (torchinductor.include_path(), *include_paths())]
    command += [flag for path in folders for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    subprocess.run([*command, "-ltorchinductor", "-ltorch_cpu", "-ltorch", "-lc10"], check=True, timeout=300)
    return program


def run(runner: Path, folder: Path) -> tuple[int, str]:
    done = subprocess.run([runner, folder], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, done.stdout


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).softmax(-1)  # type: ignore[no-any-return]


def test_a_program_runs_from_cpp(runner: Path, tmp_path: Path) -> None:
    model, folder = Mlp().eval(), tmp_path / "mlp"
    exported = torchcompile.export(model, torch.randn(3, 8), dynamic_shapes={"x": {0: Dim("rows", min=2, max=64)}})
    torchcompile.save_cpp(exported, folder)
    status, told = run(runner, folder)
    assert status == 0
    assert told.splitlines() == [
        "x Float [-1, 8]",
        "result [2, 4] 0",
        "result [5, 4] 0",
        "none: the program takes 1 inputs, not 0",
        "dtype: input 0 (x) is of dtype Double, expected Float",
        "size: input 0 (x) has size 7 at dim 1, expected 8",
        "range: 2 <= x.shape[0] <= 64 does not hold",
        "strides: x.stride(0) == 8 does not hold",
        "undefined: input 0 (x) is an undefined tensor",
        "address: input 0 (x) lies at an address that is no multiple of 4",
        "inference 1",
        "gradients 0",
        "threads 1",
        "python 0",
    ]
    for rows in (2, 5):
        result = torch.frombuffer(bytearray((folder / f"result{rows}").read_bytes()), dtype=torch.float32).view(rows, 4)
        as_accurate(result, model, (torch.arange(rows * 8.0).view(rows, 8) / (rows * 8),))


def test_a_torn_or_foreign_folder_is_refused_from_cpp(runner: Path, tmp_path: Path) -> None:
    torchcompile.save_cpp(torchcompile.export(Mlp().eval(), torch.randn(3, 8)), tmp_path / "mlp")
    (tmp_path / "mlp" / "tensors.bin").write_bytes((tmp_path / "mlp" / "tensors.bin").read_bytes()[:-8])
    status, told = run(runner, tmp_path / "mlp")
    assert status == 3 and "tensors.bin is torn" in told
    status, told = run(runner, tmp_path / "nowhere")
    assert status == 3 and "nowhere/program.bin cannot be read" in told


# -- values ----------------------------------------------------------------------------------------


def conv(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3, dtype=x.dtype), stride=2, padding=1).relu().mean((2, 3))


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2)


def indexed(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return x[where].cumsum(0) + torch.cat((x, x)).sum()


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.t()).float().sin()


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "conv": (conv, lambda: (torch.randn(2, 3, 9, 9),)),
    "attention": (attention, lambda: (torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8))),
    "indexed": (indexed, lambda: (torch.randn(7, 3), torch.randint(0, 7, (4,)))),
    "item of a tensor": (lambda x: x[0] + x[:, 1].sum() - x[..., None].mean(), lambda: (torch.randn(4, 3),)),
    "operators of Python": (lambda x: -x + (x * 2 - 1) / (3 - x % 2) // 1, lambda: (torch.rand(4),)),
    "sizes of data": (lambda x: x[x > 0].cumsum(0), lambda: (torch.randn(9),)),
    "0-d": (lambda x: x.exp() * 2, lambda: (torch.randn(()),)),
    "empty": (lambda x: torch.cat((x, x.cos())), lambda: (torch.empty(0, 4),)),
    "strides": (lambda x: x.sum(1) - x.t()[0][: x.shape[0]].mean(), lambda: (torch.randn(6, 5).t(),)),
    "broadcast": (lambda x, y: (x / y).tanh(), lambda: (torch.randn(3, 1).expand(3, 4), torch.rand(4) + 1)),
    "lstm": (nn.LSTM(4, 5), lambda: (torch.randn(3, 2, 4),)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("aten_graph", [False, True])
def test_values_are_eagers(case: str, aten_graph: bool, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    f, make = CASES[case]
    inputs = make()
    program = saved(tmp_path, f, *inputs, aten_graph=aten_graph)
    as_accurate(program(list(inputs))[0], f, inputs)


def test_autocast_is_what_it_was(tmp_path: Path) -> None:
    x = torch.randn(5, 8)
    assert torch.allclose(saved(tmp_path / "in", autocast, x)([x])[0], autocast(x), atol=0.1)  # x @ x.t() has 8 bits
    model = Mlp().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        program, expected = saved(tmp_path / "around", model, x), model(x)
    assert torch.allclose(program([x])[0], expected, atol=1e-2) and program([x])[0].dtype == expected.dtype


def test_results_are_leaf_by_leaf(tmp_path: Path) -> None:
    weight = torch.randn(3)

    def f(x: torch.Tensor, factor: float, names: list[str]) -> dict[str, Any]:
        return {names[0]: x * factor, "x": x, "rows": x.shape[0], "half": x.shape[0] / 2, "none": None, "w": weight}

    program = saved(tmp_path, f, torch.randn(4, 3), 2.0, ["out"], dynamic_shapes={"x": {0: "rows"}})
    x = torch.randn(7, 3)
    out, same, rows, half, none, kept = program([x])
    assert torch.equal(out, x * 2) and same is x and (rows, half, none) == (7, 3.5, None) and torch.equal(kept, weight)


def test_inputs_are_written(tmp_path: Path) -> None:
    def f(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, 0] = x
        return cache.sum(1)

    for aten_graph in (False, True):
        program = saved(tmp_path / str(aten_graph), f, torch.randn(5), torch.randn(5, 3), aten_graph=aten_graph)
        x, cache = torch.randn(5), torch.randn(5, 3)
        expected_cache = cache.clone()
        expected = f(x, expected_cache)
        assert torch.allclose(program([x, cache])[0], expected) and torch.equal(cache, expected_cache)
        whole = torch.randn(15)
        with pytest.raises(
            ValueError, match=r"input \d \(\w+\) and input \d \(\w+\) share memory that the program writes"
        ):
            program([whole[:5], whole.view(5, 3)])


def test_statistics_go_on(tmp_path: Path) -> None:
    """What a module in training writes to is the program's own from then on."""
    model = nn.BatchNorm1d(3)
    program = saved(tmp_path, model, torch.randn(4, 3))
    fresh = nn.BatchNorm1d(3)
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.allclose(program([x])[0], fresh(x), atol=1e-5)
    fresh.eval()
    assert model.num_batches_tracked == 0 and torch.equal(model.running_mean, torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("aten_graph", [False, True])
def test_sizes_of_data_are_those_of_the_call(aten_graph: bool, tmp_path: Path) -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].cumsum(0) * 2

    program = saved(tmp_path, positive, torch.ones(4), aten_graph=aten_graph)
    for x in (torch.tensor([1.0, -1, 2, 0]), -torch.ones(4), torch.arange(4.0)):
        assert torch.equal(program([x])[0], positive(x))


def test_numbers_out_of_tensors_are_those_of_the_call(tmp_path: Path) -> None:
    def scaled(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = rows.item()
        torch._check(count >= 0)
        return x[:count] * x.sum().item(), x.new_ones(count)

    program = saved(tmp_path, scaled, torch.ones(4), torch.tensor(2), dynamic=True)
    for rows in (0, 1, 3):
        inputs = torch.randn(5), torch.tensor(rows)
        for found, eager in zip(program(list(inputs)), scaled(*inputs), strict=True):
            torch.testing.assert_close(found, eager)
    line = scaled.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=rf"^{__file__}:{line}: a number that the data told is refused: u\d >= 0"):
        program([torch.randn(5), torch.tensor(-1)])


def test_random_numbers_and_conditions(tmp_path: Path) -> None:
    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    program, x = saved(tmp_path / "drawn", drawn, torch.randn(100)), torch.ones(100)
    assert set(program([x])[0].tolist()) == {0.0, 2.0} and not torch.equal(program([x])[0], program([x])[0])

    def conditioned(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0)
        return x * 2

    program = saved(tmp_path / "asserted", conditioned, torch.ones(3))
    assert torch.equal(program([torch.ones(3)])[0], torch.full((3,), 2.0))
    with pytest.raises((RuntimeError, AssertionError)):
        program([-torch.ones(3)])


def test_memory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Of what a kernel reads and of what an operator of ATen's does; empty tensors have none, and need none."""
    x = torch.randn(4, 3)
    program = saved(tmp_path / "program", lambda x, y: (x.sin(), y @ y.t()), x, x.clone())
    given_back, shortened = torch.randn(4, 3), torch.randn(4, 3)
    given_back.untyped_storage().resize_(0)
    shortened.untyped_storage().resize_(40)
    for wrong in (given_back, shortened, torch._efficientzerotensor((4, 3))):
        for inputs in ([wrong, x], [x, wrong]):
            with pytest.raises(
                ValueError, match=r"input \d \(\w\) has no memory, or less than its sizes and strides say"
            ):
                program(inputs)
    parts = torch.randn(9, 3)
    torch.testing.assert_close(program([parts[2:6], parts[5:]])[0], parts[2:6].sin())
    nothing = saved(tmp_path / "nothing", lambda x: x.sin(), torch.empty(0, 3))
    assert nothing([torch.empty(0, 3)])[0].shape == (0, 3)


def test_an_index_out_of_bounds_raises(tmp_path: Path) -> None:
    program = saved(tmp_path, lambda x, i: x[i] + 1, torch.randn(4), torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="out of bounds"):
        program([torch.randn(4), torch.tensor([1, 4])])


# -- refusals --------------------------------------------------------------------------------------


@torch.library.custom_op("save_cpp_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def calls_python(x: torch.Tensor) -> torch.Tensor:
    return halved(x) + 1


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


def test_what_needs_python_is_refused_with_the_line(tmp_path: Path) -> None:
    line = r"(.|\n)*test_compile_save_cpp.py\", line \d+, in "
    for aten_graph in (False, True):
        exported = torchcompile.export(calls_python, torch.randn(3), aten_graph=aten_graph)
        told = rf"save_cpp_tests.halved.default cannot run without Python: it is an operator that Python defines{line}calls_python"
        with pytest.raises(ArtifactError, match=told):
            torchcompile.save_cpp(exported, tmp_path)
    with pytest.raises(ArtifactError, match=rf"cond cannot run without Python{line}branches"):
        torchcompile.save_cpp(torchcompile.export(branches, torch.randn(3)), tmp_path)


def test_what_was_asked_of_sizes_is_checked_however_often_it_is_saved(tmp_path: Path) -> None:
    def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(2, -1).sum(0) + y.reshape(-1)

    exported = torchcompile.export(halves, torch.randn(6), torch.randn(3, 1), dynamic=True)
    for folder in ("first", "second"):
        torchcompile.save_cpp(exported, tmp_path / folder)
        program = SavedProgram(str(tmp_path / folder))
        x, y = torch.randn(10), torch.randn(5, 1)
        torch.testing.assert_close(program([x, y])[0], halves(x, y))
        for wrong in ([torch.randn(9), y], [torch.randn(8), y]):
            with pytest.raises(ValueError, match="does not hold"):
                program(wrong)
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("*/program.bin")))
    assert first == second


def test_other_things_are_refused(tmp_path: Path) -> None:
    exported = torchcompile.export(torch.sin, torch.randn(3))
    torchcompile.save(exported, tmp_path / "file")
    with pytest.raises(ArtifactError, match="loaded from a file"):
        torchcompile.save_cpp(torchcompile.load(tmp_path / "file"), tmp_path / "folder")
    with pytest.raises(InvalidArgument, match="save_cpp takes what torchcompile.export gave"):
        torchcompile.save_cpp(torch.sin, tmp_path / "folder")  # type: ignore[arg-type]
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        torchcompile.save_cpp(exported, tmp_path / "taken")


def test_what_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = torchcompile.export(torch.sin, torch.randn(3))
    monkeypatch.setattr(torchinductor.program_file, "processor_features", lambda: ["avx2048", "fpu9"])
    monkeypatch.setattr(torchinductor.program_file.platform, "machine", lambda: "pdp11")
    monkeypatch.setattr(torch, "__version__", "1.0.0+cpu")
    torchcompile.save_cpp(exported, tmp_path)
    with pytest.raises(
        LoadError, match=r"does not fit: torch: 1.0.0 there, \S+ here; machine: pdp11 there, .*avx2048 fpu9"
    ):
        SavedProgram(str(tmp_path))


def test_torn_files_are_refused(tmp_path: Path) -> None:
    model = Mlp().eval()
    torchcompile.save_cpp(torchcompile.export(model, torch.randn(3, 8)), tmp_path)
    for path in sorted(tmp_path.iterdir()):
        if not path.is_file():
            continue
        whole = path.read_bytes()
        for torn in (b"", whole[: len(whole) // 2], whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
            path.write_bytes(torn)
            with pytest.raises(LoadError, match=f"{path.name} is (torn|no program)"):
                SavedProgram(str(tmp_path))
        path.write_bytes(whole)
    program = tmp_path / "program.bin"
    whole = program.read_bytes()
    program.write_bytes(whole[:8] + struct.pack("<q", 3) + whole[16:])
    with pytest.raises(LoadError, match="is of format 3; this library reads format 2"):
        SavedProgram(str(tmp_path))
    program.write_bytes(whole)
    SavedProgram(str(tmp_path))


def test_wrong_fields_under_a_right_sum_are_refused_or_harmless(tmp_path: Path) -> None:
    """Each length and index is checked: a file that was made to mislead loads, or is refused, and nothing else."""
    torchcompile.save_cpp(torchcompile.export(Mlp().eval(), torch.randn(3, 8), dynamic=True), tmp_path)
    program, seed = tmp_path / "program.bin", random.randrange(1 << 30)
    print(f"seed {seed}")
    draw, whole = random.Random(seed), program.read_bytes()
    head, body, refused = whole[:16], whole[32:], 0
    for _ in range(400):
        place = draw.randrange(len(body) - 8)
        new = struct.pack("<q", draw.choice((-1, 0, 1, 7, 1 << 20, 1 << 40, (1 << 63) - 1, -(1 << 63))))
        changed = body[:place] + new + body[place + 8 :]
        program.write_bytes(head + struct.pack("<qq", len(changed), zlib.crc32(changed)) + changed)
        try:
            SavedProgram(str(tmp_path))
        except LoadError:
            refused += 1
    assert refused > 200
