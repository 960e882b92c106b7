"""Contracts of packages/: who may import whom, what nobody may, no cycles, none of ours inside a function, the order of
a package's rooms; where an error is caught and eager runs in the place of what failed, the ledger is told; and what is
public says in a docstring what it gives.

python tools/check/contracts.py       (exit status 1 and one line a finding when a contract is broken)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]

# package -> the first-party packages that it may import
MAY_IMPORT: dict[str, frozenset[str]] = {
    "primtorch": frozenset(),
    "aotautograd": frozenset({"primtorch"}),
    "torchdynamo": frozenset({"primtorch"}),
    "torchinductor": frozenset({"primtorch"}),
    "torchdistributed": frozenset({"torchdynamo", "aotautograd"}),
    "torchcompile": frozenset({"primtorch", "aotautograd", "torchdynamo", "torchinductor", "torchdistributed"}),
}

# package -> its rooms (folders, and files at the top) in layers: a room imports from the layers above its own, and from
# other files of itself. "" is the package's own `__init__`. `tools/architecture.py` draws them.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "primtorch": (
        ("building", "frozen", "nodes"),
        ("forks",),
        ("first_use", "late", "withheld"),
        (
            "schemas",
            "spec",
            "supported",
            "extensions",
            "once",
            "ambient",
            "dispatch_mode",
            "effects",
            "files",
            "interrupts",
            "placement",
            "samples",
        ),
        ("arguments", "call_forms", "out_arguments", "warned", "flattenings"),
        ("errors", "ledger", "promotion", "families"),
        ("higher_order", "records"),
        ("body_transforms",),
        ("control_flow",),
        ("symbolic",),
        ("layout", "calls", "eager_kernels", "environment"),
        ("attention", "wrappers"),
        ("prims",),
        ("builder",),
        ("operators",),
        ("fake",),
        ("histories", "own_derivatives"),
        ("unseen_writes",),
        ("tracing",),
        ("decompose", "functionalize", "memory", "printing", "interpret", "reference", "testing"),
        ("traced_bodies",),
        ("lower", "functional_forms", "coverage", "derived", "random_state", "packed", "communication", "pullbacks"),
        ("verify", "trace", "quantised", "__main__"),
        ("",),
    ),
    "aotautograd": (
        ("convolutions",),
        (
            "schemas",
            "events",
            "versions",
            "history",
            "draws",
            "eager_errors",
            "symbolic_numbers",
            "max_flow",
            "differentiable",
        ),
        ("errors", "replay", "present_views", "outlines"),
        ("inputs", "overlap"),
        ("gradients", "layouts"),
        ("functionalize", "runtime"),
        ("analysis",),
        ("passes",),
        ("lowering", "in_place", "missing_tangents", "partitioners", "stages"),
        ("kept_values", "other_sizes", "given_sizes", "flattened", "compilers", "returned"),
        ("first_backward",),
        ("recompute", "double_backward", "unseen_writes", "assumptions", "eager_compiler", "wrappers"),
        ("recorder", "behind", "maxima"),
        ("special_operators", "nested_regions", "backward", "own_functions"),
        ("higher_order",),
        ("untraced_derivatives",),
        ("joint",),
        ("api",),
        ("",),
    ),
    "torchdynamo": (
        ("errors", "handed_on", "torch_compilers_marks"),
        ("marks", "size_marks", "sources"),
        ("schemas", "events"),
        ("interpreter", "watchers", "stance"),
        ("reasons",),
        ("stats", "graph"),
        ("arrays",),
        ("outside",),
        ("calls", "guards"),
        ("emit",),
        ("after_break",),
        ("capture_world",),
        ("capture",),
        ("function",),
        ("convert",),
        ("api",),
        ("explain",),
        ("exported",),
        ("export", "kept"),
        ("",),
    ),
    "torchinductor": (
        ("program",),
        ("errors", "ops", "indexing", "schemas", "cache"),
        ("ir", "events", "cuda_graphs"),
        ("lowering", "executor"),
        ("ownership", "native", "cost", "layouts", "kept_rows", "early"),
        ("scheduling", "parts", "convolutions"),
        ("codegen",),
        ("emit", "spliced", "source", "program_file"),
        ("compile",),
        ("",),
    ),
    "torchdistributed": (
        ("errors",),
        ("agreement", "buckets", "compilations", "simulate"),
        ("planning", "replicas", "split"),
        ("explained", "rounds"),
        ("",),
    ),
    "torchcompile": (
        ("known_values",),
        ("errors", "events", "signature", "passes", "dumps", "store", "progress"),
        ("torch_options", "moved", "faults", "journal", "capability", "never_slower"),
        ("page",),
        ("options", "report", "profiling", "module"),
        ("kept_backward",),
        ("shelf",),
        ("backends",),
        ("mixture",),
        ("api",),
        ("torch_backend", "health", "artifacts"),
        ("__main__",),
        ("",),
    ),
}


# The incumbent's compiler: modules that nothing under packages/ imports or calls.
FORBIDDEN: tuple[str, ...] = (
    "functorch",
    "torch._decomp",
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch._meta_registrations",
    "torch._prims",
    "torch._prims_common",
    "torch._refs",
    "torch._subclasses",
    "torch.compile",
    "torch.export",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
    "torch.jit",
)


@dataclass(frozen=True)
class Import:
    """One imported dotted name. `in_function`: not at module top; `typing_only`: under `if TYPE_CHECKING`."""

    name: str
    line: int
    in_function: bool
    typing_only: bool


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[parts.index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import statement below `tree`, relative ones made absolute."""

    def absolute(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        drop = node.level - 1 if is_package else node.level
        base = module.split(".")[: len(module.split(".")) - drop]
        return ".".join([*base, *([node.module] if node.module else [])])

    def walk(node: ast.AST, in_function: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, in_function, typing_only) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = absolute(child)
                yield from (
                    Import(f"{base}.{alias.name}", child.lineno, in_function, typing_only) for alias in child.names
                )
            yield from walk(child, inside, typing)

    return walk(tree, False, False)


def dotted_uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names such as `torch._dynamo.reset` that occur as attribute chains, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                parts.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name):
                yield ".".join([base.id, *reversed(parts)]), node.lineno


def out_of_order(package: str, module: str, imported: str) -> Iterator[str]:
    """What is wrong with the place of an import in the order of the package's rooms."""
    layers = {room: place for place, layer in enumerate(ROOMS[package]) for room in layer}
    here, there = (f"{name}.".split(".")[1] for name in (module, imported))
    if here != there and not there.startswith("_") and layers.get(there, -1) >= layers.get(here, -1):
        yield f"{here or package} may not import {package}.{there}: it comes later in ROOMS"


# What runs a graph or a function by PyTorch's own kernels, and what tells the ledger of it.
RUNS_EAGERLY = frozenset({"forward", "run_graph", "run_agreed", "as_written", "_plain"})
TELLS = frozenset({"add", "not_compiled", "fault", "_plain", "_tell"})


def _names(trees: Iterable[ast.AST]) -> Iterator[str]:
    for node in (found for tree in trees for found in ast.walk(tree)):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield node.id if isinstance(node, ast.Name) else node.attr


def untold(tree: ast.AST) -> Iterator[int]:
    """Lines of handlers of errors that give back what runs eagerly, and tell nobody."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            parts = [part for statement in node.body for part in ast.walk(statement)]
            given = (part.value for part in parts if isinstance(part, ast.Return) and part.value is not None)
            called = (part.func for part in parts if isinstance(part, ast.Call))
            told = {getattr(function, "attr", getattr(function, "id", "")) for function in called}
            if RUNS_EAGERLY.intersection(_names(given)) and not told & TELLS:
                yield node.lineno


# Packages of which all that is public has a docstring.
DOCUMENTED = tuple(MAY_IMPORT)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Methods that torch.autograd.Function documents.
AUTOGRAD_METHODS = frozenset({"forward", "backward", "setup_context", "vmap", "jvp"})
# What Python documents: by these decorators a function is an instruction of its, or one of its built-in functions.
PYTHONS_OWN = ("opcode", "RULES.interprets")


def definitions(body: Iterable[ast.stmt], owner: str = "") -> Iterator[tuple[str, Definition]]:
    """(class, definition) of what stands in a module or in its classes: not what functions define for themselves."""
    for node in body:
        if isinstance(node, Definition):
            yield owner, node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, node.name)
        elif isinstance(node, ast.If):
            yield from definitions([*node.body, *node.orelse], owner)


class Documentation:
    """Which methods have a docstring, of all classes by name: an override is said by its base."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.bases: dict[str, set[str]] = {}
        self.said: set[tuple[str, str]] = set()
        for tree in trees:
            for owner, node in definitions(tree.body):
                if isinstance(node, ast.ClassDef):
                    heads = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                    self.bases.setdefault(node.name, set()).update(ast.unparse(h).split(".")[-1] for h in heads)
                elif ast.get_docstring(node):
                    self.said.add((owner, node.name))

    def inherited(self, owner: str, name: str) -> bool:
        """Whether a base of the class, however far up, says what the method gives."""
        bases = self.bases.get(owner, set()) - {owner}
        if "Function" in bases and name in AUTOGRAD_METHODS:
            return True
        return any((base, name) in self.said or self.inherited(base, name) for base in bases)

    def missing(self, tree: ast.Module) -> Iterator[tuple[str, int]]:
        """Public names of a module that say nothing, with their lines. Overloads are said by what they overload."""
        for owner, node in definitions(tree.body):
            hidden = node.name.startswith("_") or owner.startswith("_")
            marks = [ast.unparse(mark).partition("(")[0] for mark in node.decorator_list]
            elsewhere = any(mark.endswith("overload") or mark in PYTHONS_OWN for mark in marks)
            if not (hidden or elsewhere or ast.get_docstring(node) or self.inherited(owner, node.name)):
                yield f"{owner}.{node.name}".lstrip("."), node.lineno


def is_forbidden(name: str) -> bool:
    return any(name == banned or name.startswith(banned + ".") for banned in FORBIDDEN)


def findings(root: Path) -> Iterator[str]:
    files = sorted((root / "packages").glob("*/src/**/*.py"))
    modules = {module_name(path): path for path in files}
    extensions = {module_name(path) for path in (root / "packages").glob("*/src/**/*.pyi")}  # they import none of ours
    for package, layers in ROOMS.items():
        placed = {f"{package}.{room}".removesuffix(".") for layer in layers for room in layer}
        rooms = {
            ".".join(name.split(".")[:2]) for name in modules if name.split(".")[0] == package and "._" not in name
        }
        yield from (f"ROOMS: there is no {name}" for name in sorted(placed - modules.keys()))
        yield from (f"{name} has no place in ROOMS" for name in sorted(rooms - placed))
    graph: networkx.DiGraph = networkx.DiGraph()
    trees = {module: ast.parse(path.read_text(), str(path)) for module, path in modules.items()}
    documentation = Documentation(trees.values())
    for module, path in modules.items():
        package = module.split(".")[0]
        where = path.relative_to(root)
        tree = trees[module]
        if package in DOCUMENTED and not module.rpartition(".")[2].startswith("_"):
            silent = documentation.missing(tree)
            yield from (f"{where}:{line}: {name} says in no docstring what it gives" for name, line in silent)
        yield from (f"{where}:{line}: eager in the place of what failed, untold" for line in untold(tree))
        for found in imports_of(tree, module, path.name == "__init__.py"):
            first = found.name.split(".")[0]
            if is_forbidden(found.name):
                yield f"{where}:{found.line}: forbidden import of {found.name}"
            if first in MAY_IMPORT:
                if first != package and first not in MAY_IMPORT[package]:
                    yield f"{where}:{found.line}: {package} may not import {first}"
                if found.in_function and not found.typing_only:
                    yield f"{where}:{found.line}: first-party import inside a function: {found.name}"
            if first == package in ROOMS:
                yield from (f"{where}:{found.line}: {fault}" for fault in out_of_order(package, module, found.name))
            compiled = any(found.name == name or found.name.startswith(name + ".") for name in extensions)
            if first == package and not found.typing_only and not compiled:
                target = found.name if found.name in modules else found.name.rpartition(".")[0]
                if target in modules and target != module:
                    graph.add_edge(module, target)
        # Names that a table compares with are strings or sit in `sys.modules`; an attribute chain is a use.
        for name, line in dotted_uses(tree):
            if is_forbidden(name) and package != "torchdynamo":
                yield f"{where}:{line}: use of {name}"
    for component in networkx.strongly_connected_components(graph):
        if len(component) > 1:
            yield f"import cycle: {' <-> '.join(sorted(component))}"


def main() -> int:
    found = list(findings(ROOT))
    print("\n".join(found) if found else "contracts hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
