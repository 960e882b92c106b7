"""What one process compiled is found by the next: no trace, no lowering; and nothing wrong is found."""

from __future__ import annotations

import errno
import gc
import math
import os
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import aotautograd.api
import torchcompile
import torchinductor.compile
from primtorch.ledger import LEDGER
from torchcompile.__main__ import main
from torchcompile.moved import export_cache, import_cache
from torchcompile.store import Entry, Store
from torchinductor.codegen.cpp.backend import CppBackend
from torchinductor.schemas import DeviceTraits, ProductRates


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Work:
    """Counts traces and lowerings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traced = self.lowered = 0
        trace, lower = aotautograd.api.trace_joint, torchinductor.compile.lower_graph

        def tracing(*args: Any) -> Any:
            self.traced += 1
            return trace(*args)

        def lowering(*args: Any) -> Any:
            self.lowered += 1
            return lower(*args)

        monkeypatch.setattr(aotautograd.api, "trace_joint", tracing)
        monkeypatch.setattr(torchinductor.compile, "lower_graph", lowering)

    def of(self, run: Callable[[], object]) -> tuple[int, int]:
        """(traces, lowerings) of a run with nothing compiled in this process."""
        torchcompile.reset()
        before = self.traced, self.lowered
        run()
        return self.traced - before[0], self.lowered - before[1]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.first(x)).relu()
        return self.last(hidden), hidden


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def inference() -> None:
    model, x = net().eval(), torch.randn(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(torchcompile.compile(model)(x), model(x))


def training() -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 6)
    results = []
    for wrap in (torchcompile.compile, lambda model: model):
        model = net()
        step, found = wrap(model), []
        for _ in range(2):
            out, hidden = step(x)
            out.square().mean().backward()
            found.append((out.detach(), hidden.detach(), model.norm.running_mean.clone()))
        results.append((found, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*results)


def autocast() -> None:
    """Casts are the graph's; the backward runs outside, and its casts are those of the forward."""
    torch.manual_seed(1)
    x, results = torch.randn(4, 6), []
    for wrap in (torchcompile.compile, lambda model: model):
        model = net()
        with torch.autocast("cpu", torch.bfloat16):
            out, hidden = wrap(model)(x)
        assert out.dtype == torch.bfloat16
        (out.float().square().mean() + hidden.mean()).backward()
        results.append((out.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1.6e-2, atol=1e-2)


def writes() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x[1:], (y * 2).t()

    given = [(torch.ones(3, 4), torch.arange(6.0).reshape(2, 3)) for _ in range(2)]
    found, expected = torchcompile.compile(program)(*given[0]), program(*given[1])
    torch.testing.assert_close((found, given[0]), (expected, given[1]))
    assert found[0]._base is given[0][0] and found[1].stride() == expected[1].stride()


def random_numbers() -> None:
    program = torchcompile.compile(lambda x: torch.nn.functional.dropout(x, 0.5))
    torch.manual_seed(3)
    first = program(torch.ones(64))
    torch.manual_seed(3)
    torch.testing.assert_close(program(torch.ones(64)), first)
    assert 8 < int((first == 0).sum()) < 56 and set(first.tolist()) == {0.0, 2.0}


def sizes() -> None:
    """Symbols that inputs carry, that are computed, and that the data tells; the compilation tells sizes apart."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pooled = torch.nn.functional.max_pool1d(x, 2)
        return pooled * pooled / (x.shape[0] / 3), x[1:].t(), (x > 0).nonzero()

    compiled = torchcompile.compile(program, dynamic=True)
    for size in ((3, 2), (5, 3), (4, 8), (6, 12)):
        given = [torch.linspace(-1, 1, math.prod(size)).reshape(size).requires_grad_() for _ in range(2)]
        found = [
            (*out, *torch.autograd.grad(out[0].sum(), x))
            for out, x in zip((compiled(given[0]), program(given[1])), given, strict=True)
        ]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "run", [inference, training, autocast, writes, random_numbers, sizes], ids=lambda run: run.__name__
)
def test_nothing_is_traced_or_lowered_again(run: Callable[[], None], cache: Path, work: Work) -> None:
    cold = work.of(run)
    assert min(cold) > 0 and work.of(run) == (0, 0)


def test_more_than_was_compiled_is_compiled(cache: Path, work: Work) -> None:
    """Other tangents, for which nothing is traced, and derivatives of the backward, which are traced."""

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * w).sin(), (x + w).exp()

    def use(which: tuple[int, ...], second: bool = False) -> None:
        found = []
        for run in (torchcompile.compile(program), program):
            x, w = (torch.linspace(0.1, 1, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
            results = run(x, w)
            total = sum(results[i].square().sum() for i in which)
            gradients = torch.autograd.grad(total, (x, w), create_graph=second)
            if second:
                gradients = torch.autograd.grad(gradients[0].square().sum(), (x, w))
            found.append(gradients)
        torch.testing.assert_close(*found)

    assert work.of(lambda: use((0,)))[0] == 1
    assert work.of(lambda: use((0,))) == (0, 0)
    assert work.of(lambda: use((0, 1))) == (0, 1) and not LEDGER.events
    assert work.of(lambda: use((0, 1))) == (0, 0)
    assert work.of(lambda: use((1,))) == (0, 1)
    assert work.of(lambda: use((1,), second=True))[0] >= 1


REGIONS = hasattr(torch.compiler, "nested_compile_region")  # not in every torch
region: Any = getattr(torch.compiler, "nested_compile_region", lambda function: function)


@region  # type: ignore[untyped-decorator]
def part(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).exp()


@region  # type: ignore[untyped-decorator]
def tied(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.sin()
    return half, half * 2


Backward = Callable[[torch.Tensor], torch.Tensor]
BACKWARDS: dict[str, Backward] = {
    "plain": lambda x: (x * x).sin(),
    "written": lambda x: x.clone().mul_(2).sin_().cumsum(1),
    "a constant": lambda x: x.index_put((torch.tensor([0, 0]),), x[:2], accumulate=True).exp(),
    "no number": lambda x: torch.where(x > 0, x.exp(), x * float("nan")),
    "infinite": lambda x: torch.where(x > 0, x.exp(), x * float("inf")),
    "regions": lambda x: part(part(x)) + part(x),
    "a region in a region": region(lambda x: part(x) * x),
    "several results of one operator": lambda x: torch.var_mean(x.sort(1)[0], 0)[0],
    "sizes of the data": lambda x: x[x > 0].exp(),
    "draws": lambda x: torch.nn.functional.dropout(x, 0.5) * x,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "numbers": lambda x: x * math.sin(x.shape[0]) / float(x.shape[1] ** 0.5),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_is_compiled_behind_a_forward_that_was_found(
    name: str, dynamic: bool, cache: Path, work: Work
) -> None:
    """Where another process called no backward, and none but one without some results."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return BACKWARDS[name](x), x * 3

    def use(which: tuple[int, ...]) -> None:
        found = []
        for run in (torchcompile.compile(program, dynamic=dynamic, options={"strict": True}), program):
            x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
            torch.manual_seed(0)
            results = run(x)
            found.append(None)
            if which:
                (found[-1],) = torch.autograd.grad(sum(results[i].sum() for i in which), x)
        if name != "draws":
            torch.testing.assert_close(*found, equal_nan=True)

    assert work.of(lambda: use(()))[0] == 1
    for which in ((0,), (0, 1), (1,)):
        traced, lowered = work.of(lambda which=which: use(which))  # type: ignore[misc]
        assert not traced and lowered
        assert work.of(lambda which=which: use(which)) == (0, 0)  # type: ignore[misc]


@pytest.mark.skipif(not REGIONS, reason="this torch has no nested_compile_region")
def test_what_the_ledger_was_told_is_told_again(cache: Path, work: Work) -> None:
    """By a stage that has no ledger of the function's own."""
    for _ in range(2):
        assert work.of(lambda: torchcompile.compile(lambda x: tied(x))(torch.ones(3, requires_grad=True)))[0] == 1
        assert [event.kind.id for event in torchcompile.report().events] == ["region_in_place"]


def test_operators_of_our_own_are_kept(cache: Path, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a program calls where a device wants rows that the program's have not."""
    rates = ProductRates(alignment=16, aligned=1e9, unaligned=1e3, bandwidth=1e9)
    monkeypatch.setattr(CppBackend, "traits", DeviceTraits(products=rates))
    x, w = torch.randn(256, 24).bfloat16(), torch.randn(517, 24).bfloat16()
    with torch.no_grad():
        expected = x @ w.t()
        for cold in (1, 0):
            found: list[torch.Tensor] = []
            run = lambda found=found: found.append(torchcompile.compile(lambda x, w: x @ w.t())(x, w))
            assert work.of(run)[0] == cold
            torch.testing.assert_close(found[0], expected)
            calls = [str(part.name) for graph in torchcompile.report().graphs for part in graph.parts]
            assert any("odd_product" in name for name in calls), calls


def casts() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def attends() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def is_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("state", [casts, attends, is_deterministic], ids=lambda state: state.__name__)
def test_a_late_backward_is_under_the_state_of_the_forward(
    state: Callable[[], AbstractContextManager[None]], cache: Path, work: Work
) -> None:
    """Which is another one where the backward is called; in a process that finds nothing, the forward is traced."""

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = torch.nn.functional.scaled_dot_product_attention(x, x @ w, x, is_causal=True)
        return (mixed @ w).sin(), x.index_put((torch.tensor([0, 0]),), x[:2], accumulate=True).exp()

    def use(which: tuple[int, ...]) -> None:
        found = []
        for run in (torchcompile.compile(program), program):
            x = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8).repeat(2, 1, 1, 1).requires_grad_()
            w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
            with state():
                results = run(x, w)
            found.append(
                torch.autograd.grad(sum(results[i].float().square().sum() for i in which), (x, w), allow_unused=True)
            )
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)

    assert work.of(lambda: use((0, 1)))[0] == 1
    assert work.of(lambda: use((0,))) == (0, 1)
    assert work.of(lambda: use((0,))) == (0, 0)


@pytest.mark.parametrize("state", [casts, is_deterministic], ids=lambda state: state.__name__)
def test_a_late_trace_is_under_the_state_of_the_forward(
    state: Callable[[], AbstractContextManager[None]], cache: Path, work: Work
) -> None:
    """That of a derivative of the backward."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = x @ w
        return product.index_put((torch.tensor([0, 0]),), product[:2], accumulate=True)

    def use(second: bool) -> None:
        found = []
        for run in (torchcompile.compile(program), program):
            x, w = (torch.linspace(0.1, 1, 64).reshape(8, 8).requires_grad_() for _ in range(2))
            with state():
                result = run(x, w)
            gradients = torch.autograd.grad(result.float().square().sum(), (x, w), create_graph=second)
            found.append(torch.autograd.grad(gradients[0].square().sum(), (x, w)) if second else gradients)
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)

    assert work.of(lambda: use(False))[0] == 1
    assert work.of(lambda: use(True))[0] >= 1


@pytest.mark.parametrize("name", ["sizes turn out equal", "a size of data alone"])
def test_sizes_are_told_apart_as_they_were(name: str, cache: Path, work: Work) -> None:
    """Found again, and traced for the gradients of some inputs alone, which were not compiled."""
    place = torch.tensor([[0, 1], [1, 0], [2, 2]])
    programs: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "sizes turn out equal": (
            lambda x, src: x.scatter(1, place, src), (torch.rand(3, 5).double(), torch.rand(3, 2).double())
        ),
        "a size of data alone": (
            lambda x, y: (x * y).masked_select(x > 0), (torch.tensor(2.0).double(), torch.tensor(3.0).double())
        ),
    }  # fmt: skip
    program, tensors = programs[name]

    def use(second: bool) -> None:
        found = []
        for run in (torchcompile.compile(program, dynamic=True, options={"strict": True}), program):
            given = [tensor.clone().requires_grad_() for tensor in tensors]
            gradients = torch.autograd.grad(run(*given).square().sum(), given, create_graph=second)
            found.append(torch.autograd.grad(gradients[0].square().sum(), given[0]) if second else gradients)
        torch.testing.assert_close(*found)

    for second in (False, False, True):
        work.of(lambda second=second: use(second))  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: (m, torch.randn(5, 6), {}),
        lambda m: (m.double(), torch.randn(4, 6).double(), {}),
        lambda m: (m, torch.randn(6, 4).t(), {}),
        lambda m: (m.train(), torch.randn(4, 6), {}),
        lambda m: (m, torch.randn(4, 6), {"options": {"precision": "eager"}}),
        lambda m: (m, torch.randn(4, 6), {"dynamic": True}),
        lambda m: (m, torch.randn(4, 6), {"options": {"verify": True}}),
    ],
    ids=["size", "dtype", "strides", "another graph", "options", "symbols", "every stage is asked for"],
)
def test_another_program_is_compiled(change: Callable[[Net], Any], cache: Path, work: Work) -> None:
    work.of(inference)

    def other() -> None:
        model, x, settings = change(net().eval())
        with torch.no_grad():
            torchcompile.compile(model, **settings)(x)

    assert work.of(other)[0] == 1


@pytest.mark.usefixtures("collector_of_new_objects")
def test_no_tensor_is_held(cache: Path) -> None:
    """What is found on the disk keeps no parameter of the program alive, for all that it may be traced again."""
    for _ in range(2):
        model = net()
        parameter = weakref.ref(model.first.weight)
        compiled = torchcompile.compile(model)
        compiled(torch.randn(4, 6))[0].sum().backward()
        torchcompile.reset()
        del model, compiled
        gc.collect()
        assert parameter() is None


def test_functions_of_the_program_are_not_kept(cache: Path, work: Work) -> None:
    @torchcompile.allow_in_graph
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    for _ in range(2):
        assert work.of(lambda: torchcompile.compile(lambda x: own(x) + 1)(torch.ones(3)))[0] == 1


def spoil_text(path: Path) -> None:
    path.write_text(path.read_text()[:-7])


def spoil_hash(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def lend(path: Path) -> None:
    path.chmod(0o622)


@pytest.mark.parametrize("spoil", [spoil_text, spoil_hash, lend], ids=lambda spoil: spoil.__name__)
def test_torn_and_foreign_entries_are_left_out(
    spoil: Callable[[Path], None], cache: Path, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    work.of(inference)
    for path in (cache / "programs").glob("*.program"):
        spoil(path)
    assert work.of(inference)[0] == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # of the frame, of the outline
    assert "programs" in caplog.text


def test_a_folder_that_others_write_to_is_not_used(cache: Path, work: Work, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "programs").mkdir(parents=True)
    (cache / "programs").chmod(0o777)
    for _ in range(2):
        assert work.of(inference)[0] == 1
    assert not list((cache / "programs").iterdir()) and "not yours alone" in caplog.text


def test_old_entries_go_first_and_nothing_of_the_user(cache: Path, work: Work) -> None:
    store = Store(str(cache))
    for age, name in enumerate("abc"):
        store.keep(name * 40, "x" * 100)
        os.utime(cache / "programs" / f"{name * 40}.program", times=(1e9 + age, 1e9 + age))
    precious = [cache / name for name in ("notes.txt", "results.json", "library.so", "programs/mine.program")]
    for path in precious:
        path.write_text("mine")
        os.utime(path, times=(1e9, 1e9))
    assert [entry.path.stem[0] for entry in store.evict(most_bytes=400, most_days=1e6)] == ["a"]
    assert [entry.path.stem[0] for entry in store.evict()] == ["c", "b"]
    store.clear()
    assert all(path.exists() for path in precious)


def test_a_full_disk_leaves_nothing_half_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(str(cache))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        store.keep("a" * 40, "x")
    assert "No space left" in caplog.text and not list((cache / "programs").iterdir())
    killed = [cache / "programs" / "tmpab3_x9zq.tmp", cache / f"{'b' * 40}k3_x.tmp", cache / "mine.tmp"]
    for path in killed:
        path.write_text("half")
        os.utime(path, times=(1e9, 1e9))
    begun = cache / "programs" / "tmpnew4_x9z.tmp"
    begun.write_text("half")
    store.clear()
    assert [path.exists() for path in (*killed, begun)] == [False, False, True, True]


def test_what_another_process_deletes_meanwhile_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(cache))
    for name in "ab":
        store.keep(name * 40, "x")
    lists = Store.entries

    def late(self: Store) -> list[Entry]:
        found = lists(self)
        (cache / "programs" / f"{'a' * 40}.program").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Store, "entries", late)
    assert export_cache(store, cache / "file.zip") == 1
    assert import_cache(Store(str(cache / "there")), cache / "file.zip") == 1
    walk = list(os.walk(cache / "programs"))
    monkeypatch.setattr(
        os, "walk", lambda folder: [(where, held, [*files, f"{'c' * 40}.so"]) for where, held, files in walk]
    )
    assert [entry.path.name for entry in lists(store)] == [f"{'b' * 40}.program"]


def test_commands_say_what_is_wrong_on_one_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file = Store(str(cache)), tmp_path / f"{'long name ' * 12}.zip"
    store.keep("a" * 40, "x" * 1000)
    assert main(["cache", "list"]) == 0
    assert f"programs/{'a' * 40}.program" in capsys.readouterr().out  # not folded: it is no terminal
    assert main(["cache", "export", str(file)]) == 0
    (tmp_path / "text").write_text("text")
    torn = bytearray(file.read_bytes())
    torn[len(torn) // 3] ^= 0xFF
    (tmp_path / "torn").write_bytes(torn)
    for arguments, told in (
        (["cache", "--folder", str(tmp_path / "text"), "list"], "is no folder"),
        (["cache", "--folder", str(tmp_path / "there"), "import", str(tmp_path / "text")], "text cannot be imported: "),
        (["cache", "--folder", str(tmp_path / "there"), "import", str(tmp_path / "torn")], "torn cannot be imported: "),
        (["cache", "--folder", str(tmp_path / "there"), "import", str(file) + "x"], "No such file"),
        (["cache", "export", str(tmp_path / "nowhere" / file.name)], "No such file"),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error
    assert not Store(str(tmp_path / "there")).entries()


def test_the_cache_moves(cache: Path, work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work.of(training)
    file, there = tmp_path / "cache.zip", tmp_path / "there"
    assert main(["cache", "list"]) == 0 and ".program" in capsys.readouterr().out
    assert main(["cache", "export", str(file)]) == 0
    assert main(["cache", "--folder", str(there), "import", str(file)]) == 0
    os.environ["TORCHCOMPILE_CACHE"] = str(there)
    assert work.of(training) == (0, 0)
    assert main(["cache", "clear"]) == 0 and not Store(str(there)).entries()
    for name in ("../out.so", "/out.so", "programs/run.sh", "programs/run.so"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, "x")
        assert main(["cache", "import", str(file)]) == 1
        assert name in capsys.readouterr().err.replace("\n", "")


PROGRAM = """
import torch
import torchcompile
import torchinductor.compile
import aotautograd.api
import sys

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
if sys.argv[1] != "cold":
    aotautograd.api.trace_joint = torchinductor.compile.lower_graph = None
compiled = torchcompile.compile(model, options={"strict": True})
x = torch.randn(3, 4)
compiled(x).square().sum().backward()
torch.testing.assert_close(compiled(x), model(x))
resized = torchcompile.compile(model, dynamic=True)
for rows in (3, 5, 4):
    x = torch.randn(rows, 4)
    found = resized(x)
    torch.testing.assert_close(found, model(x))
    found.sum().backward()
assert not torchcompile.report().fallbacks
"""


def test_a_second_process_is_warm(cache: Path, tmp_path: Path) -> None:
    """Also one of a machine that has no compiler, to which the folder was moved."""
    (tmp_path / "program.py").write_text(PROGRAM)
    moved = str(tmp_path / "moved")
    for seed, stage in enumerate(("cold", "warm", "bare")):
        settings = {"PYTHONHASHSEED": str(seed + 1)}
        if stage == "bare":
            assert main(["cache", "export", str(tmp_path / "cache.zip")]) == 0
            assert main(["cache", "--folder", moved, "import", str(tmp_path / "cache.zip")]) == 0
            settings |= {"PATH": "/nowhere", "TORCHCOMPILE_CACHE": moved}
        done = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), stage],
            env={name: value for name, value in {**os.environ, **settings}.items() if name != "CXX"},
            capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]


def test_verify_says_that_this_machine_can(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 0
    told = capsys.readouterr().out
    assert torch.__version__ in told and "as eager does" in told and "NOT" not in told
