"""The generated pages are what would be generated now, and every example of theirs runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import torchcompile
import torchinductor
from primtorch.supported import minor
from primtorch.testing import assert_as_accurate

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"


def run(*command: str | Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPILE_")}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=EXAMPLES, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def of_pages() -> bool:
    """Whether the torch that runs is the one that the pages are generated with: another has other operators."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return pinned is not None and minor(torch.__version__) == minor(pinned[1])


EXAMPLE_NAMES = (
    "backend_dynamo.py", "backend_autograd.py", "backend_prims.py", "backend_codegen.py", "function_transforms.py",
    "training_step.py", "control_flow.py", "quantized_weights.py", "gaussian_process.py",
    "python_in_the_graph.py", "sliding_window.py", "two_backends.py", "cpp_program/run.py",
)  # fmt: skip


@pytest.mark.skipif(not of_pages(), reason="the pages are generated with the torch of constraints.txt")
def test_generated_pages_are_fresh() -> None:
    run(ROOT / "tools" / "docs.py", "--check")


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_examples_run(name: str) -> None:
    run(EXAMPLES / name)


@pytest.mark.parametrize(("page", "told"), [("export", "float32[?, 3]"), ("attention", "tensor([")])
def test_a_page_runs(page: str, told: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    assert told in run(tmp_path / "example.py")


TUTORIALS = ("index", "tutorials/users", "tutorials/libraries", "tutorials/vendors")


def test_tutorials_run(tmp_path: Path) -> None:
    """The blocks of a page are one program; the pages' programs run one after the other, in one process."""
    programs = []
    for page in TUTORIALS:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        program = "".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        for written in ("report.html", "profile.html"):
            program = program.replace(f'"{written}"', f'"{tmp_path / written}"')
        programs.append(tmp_path / f"{Path(page).name}.py")
        programs[-1].write_text(program)
    told = run("-c", "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]", *programs)
    assert "graphs captured" in told and "what to do: remove the call" in told
    assert "</html>" in (tmp_path / "report.html").read_text() and "</html>" in (tmp_path / "profile.html").read_text()


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"(?s)^```.*?^```", "", page.read_text(), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"(?m)^#+ (.+)$", text))
    return {"-".join(heading.split()) for heading in plain}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?s)```.*?```|`[^`]*`", "", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if "://" in target:
            continue
        leads = (page.parent / target).resolve() if target else page
        assert leads.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(leads), f"{page}: {target}#{anchor}"


def test_the_site_has_every_page() -> None:
    named = set(re.findall(r"(?m): ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text()))
    assert named == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def test_the_demo_runs(tmp_path: Path) -> None:
    told = run(EXAMPLES / "demo.py", "--steps", "8", "--tokens", "3", "--report", tmp_path)
    assert re.search("ran eagerly, twice or differently +│ nothing", told), told
    assert (tmp_path / "index.html").exists()


@pytest.fixture(scope="module")
def third_backend() -> Iterator[ModuleType]:
    """The example back end in the place of the C++ one."""
    spec = importlib.util.spec_from_file_location("backend_codegen", EXAMPLES / "backend_codegen.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = torchinductor.codegen_for("cpu")
    torchinductor.register_codegen("cpu", module.PythonBackend())
    yield module
    torchinductor.register_codegen("cpu", before)


def scatter(x: torch.Tensor) -> torch.Tensor:
    place = torch.tensor([0, 3, 3, 1], device=x.device)
    return torch.zeros(5, x.shape[1], dtype=x.dtype).index_add(0, place, x[:4])


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x: (x.sin() * 2 + x.abs().sqrt()).clamp(-1, 1),
    "softmax": lambda x: x.softmax(-1),
    "column_sum": lambda x: x.sum(0),
    "mean_of_all": lambda x: x.mean(),
    "variance": lambda x: x.var(0, keepdim=True),
    "argmax": lambda x: x.argmax(1).float(),
    "cumsum": lambda x: x.cumsum(1),
    "cummax": lambda x: x.cummax(0).values,
    "pad_and_cat": lambda x: torch.cat([F.pad(x, (1, 2)), F.pad(x.flip(0), (0, 3), value=2.0)]),
    "transposed": lambda x: x.t().contiguous() + 1,
    "where": lambda x: torch.where(x > 0, x, x.exp()),
    "gather": lambda x: x[torch.tensor([2, 0, 2])],
    "scatter": scatter,
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[1],)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_third_backend(name: str, dtype: torch.dtype, third_backend: ModuleType) -> None:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    x = torch.randn(6, 7).to(dtype).requires_grad_()
    compiled = torchcompile.compile(lambda x: program(x), fullgraph=True, options={"strict": True})
    wide = x.detach().double().requires_grad_()
    results = {"found": compiled(x), "eager": program(x), "exact": program(wide)}
    assert_as_accurate(**results, what=name)
    if results["exact"].requires_grad:
        seed = torch.randn_like(results["eager"])
        ends = {"found": x, "eager": x, "exact": wide}
        gradients = {who: torch.autograd.grad(r, ends[who], seed.to(r.dtype))[0] for who, r in results.items()}
        assert_as_accurate(**gradients, what=f"gradient of {name}")


def test_third_backend_with_symbolic_sizes(third_backend: ModuleType) -> None:
    compiled = torchcompile.compile(lambda x: x.softmax(-1).sum(0), dynamic=True, fullgraph=True)
    for rows, columns in ((3, 5), (7, 4), (2, 9)):
        x = torch.randn(rows, columns)
        assert_as_accurate(compiled(x), x.softmax(-1).sum(0), x.double().softmax(-1).sum(0))
