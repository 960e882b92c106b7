"""The page of the architecture: the packages' rooms as the import contracts have them, and where what is added goes.

What a room is for is the first paragraph of its docstring; which rooms it may import is `ROOMS` in
tools/check/contracts.py. A place that the page names has to be there.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "check"))

from contracts import MAY_IMPORT, ROOMS  # noqa: E402

FOLDERS = {  # package -> its sources
    path.name: path
    for path in sorted((ROOT / "packages").glob("*/src/*"))
    if path.is_dir() and (path / "__init__.py").exists()
}


@dataclass(frozen=True)
class Place:
    """Where something is added: a file or folder below packages/, a name that stands in it, and what to write there."""

    path: str
    name: str
    what: str


# In the order of the pipeline.
PLACES: dict[str, tuple[Place, ...]] = {
    "an opcode": (
        Place(
            "dynamo/src/torchdynamo/interpreter",
            "@opcode(",
            "a method of its name, in the `opcodes_` file of its kind",
        ),
    ),
    "a call that the graph takes": (
        Place("dynamo/src/torchdynamo/calls/calls.py", "_RULES", "a row: the callable, and what a call of it means"),
    ),
    "a call that leaves the graph": (
        Place("dynamo/src/torchdynamo/graph/leaving.py", "_TABLE", "the callable, in the row of its reason"),
    ),
    "a break reason": (
        Place("dynamo/src/torchdynamo/reasons.py", "REASONS", "its id, explanation and remedy; `make docs`"),
    ),
    "another event of the ledger": (
        Place("dynamo/src/torchdynamo/events.py", "KINDS", "a `Kind`, in the lowest package that tells it"),
    ),
    "a guard kind": (
        Place("dynamo/src/torchdynamo/schemas.py", "class GuardKind", "its name and what it compares"),
        Place("dynamo/src/torchdynamo/guards/failure.py", "_CHECKS", "what it compares, in Python"),
        Place("dynamo/cpp/guard_tree.cpp", "case Kind::", "the same, in the tree that is asked at each call"),
        Place("dynamo/cpp/guard_build.cpp", "kind_names", "its name, and its payload as the tree holds it"),
        Place("dynamo/src/torchdynamo/kept/rows.py", "_OF_VALUES", "what its payload is, for guards that are kept"),
    ),
    "ambient state (what a context manager sets)": (
        Place("primtorch/src/primtorch/ambient.py", "AMBIENT", "its reader and its writer"),
    ),
    "an ATen operator": (
        Place(
            "primtorch/src/primtorch/operators",
            "Family",
            "its rule, formula, refusals and samples, in its family's file",
        ),
    ),
    "an operator that functionalization or the recorder must take in a way of its own": (
        Place("aotautograd/src/aotautograd/special_operators.py", "def ", "a rule under its overloads"),
    ),
    "a prim": (
        Place("primtorch/src/primtorch/prims", "Prim", "its record, with a meta, a reference and samples"),
        Place("inductor/src/torchinductor/lowering", "@", "its rule into loop IR, unless it is elementwise"),
        Place("inductor/src/torchinductor/codegen/cpp", "handler", "its C++ text"),
        Place("inductor/src/torchinductor/codegen/triton", "handler", "its Triton text"),
    ),
    "a graph pass": (
        Place("aotautograd/src/aotautograd/passes.py", "def ", "on joint graphs of ATen overloads, before the cut"),
        Place("compile/src/torchcompile/passes.py", "def ", "on captured graphs, before they are differentiated"),
    ),
    "a partitioner": (Place("aotautograd/src/aotautograd/partitioners.py", "Partition", "a `Partitioner`"),),
    "a fusion rule": (
        Place("inductor/src/torchinductor/scheduling", "def ", "what may share a kernel, or become one reduction"),
    ),
    "a kernel template": (
        Place("inductor/src/torchinductor/ir/template.py", "TemplateKind", "its kind, and what of the graph it holds"),
        Place("inductor/src/torchinductor/codegen/triton/templates.py", "PLANNERS", "its layout and its text"),
    ),
    "a kind of operation of the loop IR": (
        Place("inductor/src/torchinductor/ir/operations.py", "class ", "its record"),
        Place("inductor/src/torchinductor/ir/verify.py", "def ", "the rules that it keeps"),
    ),
    "a back end": (
        Place("inductor/src/torchinductor/codegen", "Backend", "a `CodegenBackend`: loop IR to source, source to code"),
        Place("compile/src/torchcompile/backends.py", "NAMED", "its name, for `compile(backend=...)`"),
    ),
    "how graphs are shared out among back ends": (
        Place("compile/src/torchcompile/mixture/placement.py", "def ", "who gets an operator"),
    ),
    "an instruction of compiled programs": (
        Place("inductor/src/torchinductor/program.py", "class ", "its record"),
        Place("inductor/src/torchinductor/executor.py", "def ", "what it does, in Python"),
        Place("inductor/cpp/executor.cpp", "Opcode", "the same in C++"),
    ),
    "an option": (Place("compile/src/torchcompile/options.py", "CompileOptions", "a field with its doc; `make docs`"),),
    "a report column": (Place("compile/src/torchcompile/report.py", "Report", "a field, and where it is shown"),),
    "a supported release of torch or Python": (
        Place("primtorch/src/primtorch/supported.py", "TORCH", "its number; `make check` names the rest"),
    ),
}


def purpose(package: str, room: str) -> str:
    """The first paragraph of a room's docstring."""
    folder = FOLDERS[package]
    path = folder / room / "__init__.py" if (folder / room).is_dir() else folder / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def rooms() -> str:
    """For each package its rooms: what belongs there, below what it may import."""
    parts = []
    for package, allowed in MAY_IMPORT.items():
        from_ours = ", ".join(f"`{name}`" for name in MAY_IMPORT if name in allowed) or "no other package of ours"
        parts.append(f"### {package}\n\n{purpose(package, '')} It imports {from_ours}.")
        if package not in ROOMS:
            continue
        rows = ["| layer | room | what belongs there |", "|---|---|---|"]
        for place, layer in enumerate(ROOMS[package]):
            for room in filter(None, layer):
                is_folder = (FOLDERS[package] / room).is_dir()
                rows.append(f"| {place} | `{room}{'/' if is_folder else ''}` | {purpose(package, room)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def places() -> str:
    """Where what is added goes. SystemExit where the page would name what is not there."""
    rows = ["| to add | go to | and write |", "|---|---|---|"]
    for what, steps in PLACES.items():
        for place in steps:
            path = ROOT / "packages" / place.path
            files = [path] if path.is_file() else sorted(path.glob("*.py"))
            if not any(place.name in file.read_text() for file in files):
                raise SystemExit(f"tools/architecture.py: there is no {place.name!r} in packages/{place.path}")
            rows.append(f"| {what} | [{place.path}](../packages/{place.path}) | {place.what} |")
            what = ""
    return "\n".join(rows)


def page(template: str) -> str:
    """The page of a template with lines {{rooms}} and {{places}}."""
    return template.replace("{{rooms}}", rooms()).replace("{{places}}", places())
