"""docs/migration.md, row by row: what a user of torch.compile writes, or what the page says to write instead."""

from __future__ import annotations

import functools
import operator
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import fx, nn

import torchcompile
from primtorch.supported import minor
from torchcompile.backends import REGISTERED

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "migration.md"
X = torch.linspace(-1, 1, 4)
Row = Callable[[], object]
ROWS: dict[str, Row] = {}

# No kernels are built where the row is not about them.
plain = functools.partial(torchcompile.compile, backend="eager", fullgraph=True)


def row(*names: str) -> Callable[[Row], Row]:
    def note(test: Row) -> Row:
        for name in names:
            ROWS[name] = test
        return test

    return note


def same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def refused(what: Callable[[], object], *words: str) -> None:
    with pytest.raises(torchcompile.InvalidArgument) as caught:
        what()
    assert all(word in str(caught.value) for word in words), caught.value


def graphs_of(program: Callable[..., Any], *inputs: Any) -> list[fx.GraphModule]:
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    same(torchcompile.compile(program, backend=keep)(*inputs), program(*inputs))
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


# -- torch.compile and its arguments ------------------------------------------------------------


@row("`torch.compile(model)`", "`torch.compiler.compile`")
def compiles() -> None:
    model = Net()
    compiled = torchcompile.compile(model, backend="eager")
    same(compiled(X), model(X))
    assert isinstance(compiled, Net) and list(compiled.state_dict()) == ["linear.weight", "linear.bias"]


@row("`@torch.compile`, `@torch.compile(...)`")
def decorates() -> None:
    @torchcompile.compile(backend="eager", fullgraph=True)
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * (2 if torchcompile.is_compiling() else 3)

    same(program(X), X.sin() * 2)


@row("`@torch.compile` on a module class")
def decorates_a_class() -> None:
    @torchcompile.compile(backend="eager")
    class Own(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if torchcompile.is_compiling() else 3)

    model = Own()
    same(model(X), model.linear(X).relu() * 2)


@row("`model.compile()`, `nn.Module.compile(...)`")
def in_place() -> None:
    model = Net()
    torchcompile.compile_in_place(model, backend="eager", name="net")
    same(model(X), model.linear(X).relu())
    assert torchcompile.report().captured == 1


@row("`model._orig_mod`")
def original() -> None:
    model = Net()
    compiled = torchcompile.compile(model, backend="eager")
    compiled.linear.weight.data.zero_()
    assert compiled == model and model.linear.weight.count_nonzero() == 0


@row("`fullgraph=True`")
def full_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torchcompile.graph_break()
        return x + 1

    with pytest.raises(RuntimeError, match="graph_break"):
        plain(program)(X)


@row("`dynamic=True`, `False`, `None`")
def dynamic() -> None:
    for given, graphs in ((True, 1), (False, 3), (None, 2)):
        torchcompile.reset()
        program = torchcompile.compile(lambda x: x * 2, backend="eager", dynamic=given)
        for size in (3, 4, 5):
            same(program(torch.ones(size)), torch.ones(size) * 2)
        assert torchcompile.report().captured == graphs


@row('`mode="default"`, `"reduce-overhead"`, `"max-autotune"`, `"max-autotune-no-cudagraphs"`')
def modes() -> None:
    for mode in (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        same(plain(lambda x: x * 2, mode=mode)(X), X * 2)
    refused(lambda: plain(lambda x: x, mode="max-autotun"), "'max-autotune'")


@row("`options={...}`")
def options() -> None:
    from torchcompile.options import resolve

    for name, value, ours, expected in (
        ("max_autotune", True, "tune_products", True),
        ("triton.cudagraphs", True, "cuda_graphs", True),
        ("fallback_random", True, "eager_random", True),
        ("emulate_precision_casts", True, "precision", "eager"),
        ("trace.enabled", True, "dump", "torchcompile_dump"),
        ("trace.debug_dir", "here", "dump", "here"),
        ("force_disable_caches", True, "cache", None),
        ("activation_memory_budget", 0.5, "memory_budget", 0.5),
        ("epilogue_fusion", True, "templates", False),
        ("shape_padding", True, "templates", False),
    ):
        assert getattr(resolve(None, {name: value}), ours) == expected, name
    refused(lambda: plain(abs, options={"freezing": True}), "freezing", "inputs of compiled code")
    refused(lambda: plain(abs, options={"epilogue_fusio": True}), "'epilogue_fusion'")
    assert resolve("max-autotune", {"cuda_graphs": False}) == resolve("max-autotune-no-cudagraphs", None)


@row('`options={"guard_filter_fn": ...}`, `torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe` and the like')
def guard_filters() -> None:
    refused(lambda: plain(abs, options={"guard_filter_fn": lambda guards: guards}), "every guard is checked")


@row("`name=...`")
def names() -> None:
    torchcompile.reset()
    program = torchcompile.compile(lambda x: x * 2, name="my step")
    program(X)
    assert [graph.title for graph in torchcompile.report().graphs] == ["my_step_graph_0"]


@row("`disable=True`")
def disabled() -> None:
    model = Net()
    assert torchcompile.compile(model, disable=True) is model


@row("`recompile_limit=...`, `torch._dynamo.config.recompile_limit`")
def recompile_limit() -> None:
    program = torchcompile.compile(lambda x, flag: x * flag, backend="eager", recompile_limit=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flag in (True, False, "3"):
            same(program(X, flag == "3"), X * (flag == "3"))
    assert [e.kind.id for e in torchcompile.report().fallbacks] == ["recompile_limit"]


@row("`isolate_recompiles=...`")
def isolated() -> None:
    same(plain(lambda x: x * 2, isolate_recompiles=True)(X), X * 2)


@row("`shapes_spec=...`")
def shapes() -> None:
    spec: Any = object()
    refused(lambda: torchcompile.compile(abs, shapes_spec=spec), "mark_dynamic")


# -- back ends ----------------------------------------------------------------------------------


@row('`backend="inductor"`, `"eager"`, `"aot_eager"`, a callable')
def named_backends() -> None:
    model = Net()
    for backend in (None, "eager", "aot_eager", lambda gm, inputs: gm.forward):
        same(torchcompile.compile(lambda x: x * 2, backend=backend, fullgraph=True)(X), X * 2)
    same(torchcompile.compile(model, backend="aot_eager")(X), model(X))


@row("`backend=` a name of torch's registry, of an installed package")
def torchs_backends() -> None:
    model = Net()
    compiled = torchcompile.compile(model, backend="aot_eager_decomp_partition")
    for rows in (3, 5, 6):
        x = torch.randn(rows, 4)
        compiled(x).sum().backward()
        same(compiled(x), model(x))
    refused(lambda: torchcompile.compile(model, backend="cudagraphs", dynamic=True), "leave dynamic out")
    marked = torch.randn(9, 4)
    torchcompile.mark_dynamic(marked, 0)
    refused(lambda: compiled(marked), "leave their marks out")
    refused(lambda: torchcompile.compile(model, backend="cudagraph"), "'cudagraphs'")


@row('`torch._dynamo.register_backend`, `torch.compile(model, backend="mine")`')
def registered() -> None:
    @torchcompile.register_backend(tags=("debug",))
    def mine(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *values: [value * 3 for value in gm.forward(*values)]

    same(plain(lambda x: x * 2, backend="mine")(X), X * 6)
    assert "mine" in torchcompile.list_backends() and "mine" not in torchcompile.list_backends(exclude_tags=["debug"])
    refused(lambda: torchcompile.register_backend(mine, name="inductor"), "own")
    REGISTERED.remove("mine")


@row("`torch.compiler.list_backends`")
def listed() -> None:
    assert {"aot_eager", "eager", "inductor"} <= set(torchcompile.list_backends())


@row("`torch.compiler.set_default_backend`, `get_default_backend`")
def default_backend() -> None:
    assert plain(lambda x: x * 2).__wrapped__(X) is not None


# -- marks on functions -------------------------------------------------------------------------


@row("`torch.compiler.disable`")
def disable() -> None:
    for mark in (torchcompile.disable, torch.compiler.disable):
        torchcompile.reset()

        @mark(reason="talks to a server")
        def apart(x: torch.Tensor) -> torch.Tensor:
            return x + (1 if torchcompile.is_compiling() else 2)

        same(torchcompile.compile(lambda x, apart=apart: apart(x) * 2, backend="eager")(X), (X + 2) * 2)
        (event,) = torchcompile.report().breaks
        assert event.kind.id == "disabled" and "talks to a server" in event.detail


@row("`torch.compiler.allow_in_graph`")
def allowed() -> None:
    for mark in (torchcompile.allow_in_graph, torch.compiler.allow_in_graph):

        @mark
        def fused(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 2

        (graph,) = graphs_of(lambda x, fused=fused: fused(x) + 1, X)
        assert fused in [node.target for node in graph.graph.nodes]


@row("`torch._dynamo.disallow_in_graph`")
def disallowed() -> None:
    from torchdynamo.marks import put_stand_in

    torchcompile.disallow_in_graph(torch.erf)
    assert len(graphs_of(lambda x: torch.erf(x + 1) * 2, X)) == 2
    put_stand_in(torch.erf, None)


@row("`torch.compiler.substitute_in_graph`")
def substituted() -> None:
    def index(values: list[int], value: int, /) -> int:
        return [i for i, held in enumerate(values) if held == value][0]

    torchcompile.substitute_in_graph(operator.indexOf)(index)
    (graph,) = graphs_of(lambda x: x * operator.indexOf([1, 2, 3], 3), X)
    torchcompile.substitute_in_graph(operator.indexOf, remove=True)(index)


@row("`torch.compiler.assume_constant_result`")
def constant() -> None:
    for mark in (torchcompile.assume_constant_result, torch.compiler.assume_constant_result):
        values = [2, 3]
        taken = mark(lambda values=values: values.pop(0))
        program = plain(lambda x, taken=taken: x * taken())
        same([program(X), program(X)], [X * 2, X * 2])


@row("`torch.compiler.nested_compile_region`")
def region() -> None:
    @torch.compiler.nested_compile_region
    def part(x: torch.Tensor) -> torch.Tensor:
        return x.cos() * 2

    same(plain(lambda x: part(x) + part(x))(X), X.cos() * 4)


@row("`torch._dynamo.graph_break`")
def broken() -> None:
    for call in (torchcompile.graph_break, torch._dynamo.graph_break):

        def program(x: torch.Tensor, call: Callable[[], None] = call) -> torch.Tensor:
            x = x + 1
            call()
            return x * 2

        assert len(graphs_of(program, X)) == 2


@row("`torch._dynamo.error_on_graph_break`")
def errors_on_break() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torchcompile.error_on_graph_break(True):
            torchcompile.graph_break()
        return x

    with pytest.raises(RuntimeError, match="graph_break"):
        torchcompile.compile(program, backend="eager")(X)


@row("`torch.compiler.is_compiling`, `is_dynamo_compiling`, `is_exporting`")
def compiling() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        asked = (torchcompile.is_compiling(), torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling())
        return x * (sum(asked) + 10 * torch.compiler.is_exporting())

    same((program(X), plain(program)(X)), (X * 0, X * 3))


@row("`torch.compiler.cudagraph_mark_step_begin`")
def step_begin() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        torchcompile.cudagraph_mark_step_begin()
        return x + 1

    same(plain(program)(X), X + 1)


@row("`torch.compiler.wrap_numpy`")
def numpy_functions() -> None:
    def program(array: Any) -> Any:
        return numpy.sin(array) * 2

    numpy.testing.assert_allclose(plain(program)(X.numpy()), program(X.numpy()), rtol=1e-6)
    torch.testing.assert_close(plain(torch.compiler.wrap_numpy(program))(X), X.sin() * 2)


# -- sizes --------------------------------------------------------------------------------------


@row(
    "`torch._dynamo.mark_dynamic`",
    "`torch._dynamo.maybe_mark_dynamic`",
    "`torch._dynamo.decorators.mark_unbacked`",
)
def dynamic_marks() -> None:
    for mark in (
        torchcompile.mark_dynamic, torchcompile.maybe_mark_dynamic, torchcompile.mark_unbacked,
        torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic, torch._dynamo.decorators.mark_unbacked,
    ):  # fmt: skip
        torchcompile.reset()
        program = plain(lambda x: x * 2)
        for size in (3, 4):
            x = torch.ones(size)
            mark(x, 0)
            same(program(x), x * 2)
        assert torchcompile.report().captured == 1


@row("`torch._dynamo.mark_static`")
def static_marks() -> None:
    for mark in (torchcompile.mark_static, torch._dynamo.mark_static):
        torchcompile.reset()
        program = plain(lambda x: x * 2, dynamic=True)
        for size in (3, 4):
            x = torch.ones(size)
            mark(x, 0)
            same(program(x), x * 2)
        assert torchcompile.report().captured == 2


# -- the process --------------------------------------------------------------------------------


@row("`torch.compiler.set_stance`")
def stances() -> None:
    for set_stance in (torchcompile.set_stance, torch.compiler.set_stance):
        program = torchcompile.compile(lambda x: x * (2 if torchcompile.is_compiling() else 3), backend="eager")
        same(program(X), X * 2)
        with set_stance("force_eager"):
            same(program(X), X * 3)
        with set_stance("eager_on_recompile"):
            same((program(X), program(X.double())), (X * 2, X.double() * 3))
        with set_stance("fail_on_recompile"):
            same(program(X), X * 2)
            with pytest.raises(RuntimeError, match="fail_on_recompile"):
                program(X.double())
        same((program(X), program(X.double())), (X * 2, X.double() * 2))
    assert "stance" in {event.kind.id for event in torchcompile.report().events}
    for set_stance in (torchcompile.set_stance, torch.compiler.set_stance):
        with set_stance("aot_eager_then_compile"):
            before = torchcompile.report().captured
            torchcompile.compile(lambda x: x.sin() * 3)(torch.randn(2))
            assert torchcompile.report().captured == before + 1
    with torchcompile.set_stance("eager_then_compile"):
        program = torchcompile.compile(lambda x: x * (2 if torchcompile.is_compiling() else 3), backend="eager")
        same((program(X), program(X)), (X * 3, X * 2))
    with torchcompile.set_stance("default", skip_guard_eval_unsafe=True):  # taken: guards are checked all the same
        same((program(X), program(X[:3])), (X * 2, X[:3] * 2))
    with pytest.raises(ValueError, match="force_eager"):
        torchcompile.set_stance("eager")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compile\(model, backend=...\)"):
        torchcompile.set_stance(force_backend="eager")


@row("`torch.compiler.reset`, `torch._dynamo.reset`")
def resets() -> None:
    plain(lambda x: x * 2)(X)
    torchcompile.reset()
    assert torchcompile.report().captured == 0


@row("`torch._dynamo.explain`")
def explained() -> None:
    model = Net()
    for target in (model, torchcompile.compile(model, backend="eager")):
        found = torchcompile.explain(target)(X)
        assert len(found.graphs) == 1 and not found.breaks
    assert len(torchcompile.explain(plain(lambda x: x * 2))(X).graphs) == 1


@row("`torch.export.export`, `torch._dynamo.export`")
def exported() -> None:
    model = Net()
    same(torchcompile.export(model, X)(X), model(X))


@row("`torch._inductor.aoti_compile_and_package`, `AOTIModelPackageLoader`")
def saved_for_cpp() -> None:
    model = Net()
    with tempfile.TemporaryDirectory() as folder:
        torchcompile.save_cpp(torchcompile.export(model, X), folder)
        assert (Path(folder) / "program.bin").is_file()


@row("`torch._dynamo.optimize(backend)`", "`torch._dynamo.run`")
def optimized() -> None:
    program = plain(lambda x: x * 2)
    same(program(X), X * 2)
    with torchcompile.set_stance("eager_on_recompile"):
        same((program(X), program(X.double())), (X * 2, X.double() * 2))


@row("`TORCHDYNAMO_REPRO_LEVEL`, `TORCHINDUCTOR_` minifiers", '`TORCHDYNAMO_REPRO_AFTER="dynamo"`, `"aot"`')
def compared() -> None:
    same(torchcompile.compile(lambda x: x * 2, options={"verify": True})(X), X * 2)


@row("`TORCH_LOGS`, `torch._logging.set_logs`", "`torch._dynamo.utils.counters`")
def reported() -> None:
    torchcompile.reset()
    plain(lambda x: x * 2)(X)
    assert "graphs captured" in str(torchcompile.report())


@row("`torch.compiler.save_cache_artifacts`, `load_cache_artifacts`", "`torch.compiler.load_compiled_function`")
def saved() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        environment.delenv(
            "TORCHCOMPILE_CHECK_KERNELS", raising=False
        )  # this package's tests set it; nothing is kept then
        compiled = torchcompile.compile(program, fullgraph=True, options={"cache": folder})
        same(compiled(X), X * 2)
        torchcompile.save(compiled, f"{folder}/program")
        same(torchcompile.load(f"{folder}/program", program)(X), X * 2)


@row(
    "`torch.compiler.set_enable_guard_collectives`",
    "`torch.compiler.config`, `torch._dynamo.config`, `torch._inductor.config`",
    "`torch._dynamo.config.suppress_errors`",
)
def answered_in_words() -> None:
    same(plain(lambda x: x * 2, options={"strict": True, "recompile_limit": 3})(X), X * 2)


# -- torch.compile itself -----------------------------------------------------------------------

BY_ENTRY_POINT = """
import torch
import torchcompile

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
for attempt in (torch.compile(model, backend="torchcompile"), model):
    if attempt is model:
        expected = model(torch.ones(5, 4))
        model.compile(backend="torchcompile")
    for rows in (3, 5, 6):
        x = torch.randn(rows, 4)
        model.zero_grad()
        attempt(x).sum().backward()
        found = [p.grad for p in model.parameters()]
        again = torch.autograd.grad(model[1](model[0](x)).sum(), list(model.parameters()))
        torch.testing.assert_close(found, list(again))
torch.testing.assert_close(model(torch.ones(5, 4)), expected)
report = torchcompile.report()
assert report.kernels > 0 and not report.ran_eagerly, report
"""


@row('`torch.compile(model, backend="torchcompile")`, `model.compile(backend="torchcompile")`')
def by_entry_point(folder: Path | None = None) -> None:
    from torchcompile.torch_backend import torchcompile_backend

    points = tomllib.loads((ROOT / "packages/compile/pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {"torch_dynamo_backends": {"torchcompile": "torchcompile.torch_backend:torchcompile_backend"}}
    graph = fx.symbolic_trace(nn.Linear(4, 4))
    same(torchcompile_backend(graph, [X], options={"epilogue_fusion": True})(X), graph(X))


def test_torch_finds_the_entry_point(tmp_path: Path) -> None:
    """In another process, in which the package is installed as an index would install it."""
    info = tmp_path / "torchcompile_entry-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchcompile-entry\nVersion: 0.1\n")
    points = tomllib.loads((ROOT / "packages/compile/pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{BY_ENTRY_POINT}")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


# -- the page -----------------------------------------------------------------------------------


def rows_of_page() -> list[str]:
    tables = PAGE.read_text().partition("## Options by torch's names")[0]
    return re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)


def test_page_and_rows_agree() -> None:
    assert sorted(rows_of_page()) == sorted(ROWS)


PINNED = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.skipif(
    PINNED is None or minor(torch.__version__) != minor(PINNED[1]), reason="another torch has other names"
)
def test_every_option_of_torch_compile_is_taken_or_answered() -> None:
    """Whatever its inductor has a setting for: no row is needed for one that means nothing here."""
    from torch._inductor import config

    names = [name for name in config.get_config_copy() if not name.startswith("_")]
    assert len(names) > 100
    for name in names:
        try:
            torchcompile.compile(lambda x: x, options={name: config.get_config_copy()[name]})
        except torchcompile.InvalidArgument as error:
            assert re.search(r"torch.compile|Did you mean", str(error)), error
    for name in ("ipex", "onnxrt"):
        with pytest.raises(torchcompile.InvalidArgument, match="import the package that registers it"):
            torchcompile.compile(lambda x: x, backend=name)


def test_page_names_all_of_torch_compiler() -> None:
    text = PAGE.read_text()
    assert [name for name in torch.compiler.__all__ if name not in text] == []


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    ROWS[name]()
