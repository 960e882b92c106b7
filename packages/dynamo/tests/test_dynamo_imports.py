"""Imports within captured programs: a module's own code runs once, for real, and no part of it is captured."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo.stats import TOTAL

# What the imported module's own code does, which capture is to see nothing of.
MODULE = """
import dataclasses
import torch

kinds = []

def twice(t):
    kinds.append(type(t).__name__)
    return t * 2

@dataclasses.dataclass
class Record:
    value: int = 1

first = twice(torch.ones(2))
"""
# How a program imports it: statements that bind `module`, behind what is executed once.
WAYS = {
    "import": ("", "import {0} as module"),
    "import of a submodule": ("", "import {0}.part\n    module = sys.modules['{0}.part']"),
    "from": ("", "from {0} import part as module"),
    "from a submodule": ("", "from {0}.part import twice, kinds, first, Record\n    module = sys.modules['{0}.part']"),
    "import_module": ("", "module = importlib.import_module('{0}')"),
    "relative import_module": ("import {0}", "module = importlib.import_module('.part', '{0}')"),
    "__import__": ("", "module = __import__('{0}')"),
    "__import__ from": ("", "module = __import__('{0}', fromlist=('part',)).part"),
    "behind a break": ("", "torchdynamo.graph_break()\n    import {0} as module"),
    "with a handler": ("", "try:\n        import {0} as module\n    except ImportError:\n        raise"),
    "an attribute of a lazy module": (
        "lazy = types.ModuleType('lazy')\nlazy.__getattr__ = lambda name: importlib.import_module(name)",
        "module = lazy.{0}",
    ),
    "from a lazy module": (
        "lazy = sys.modules['{0}_lazy'] = types.ModuleType('{0}_lazy')\nlazy.__path__ = []\n"
        "lazy.__getattr__ = lambda name: importlib.import_module(name)",
        "from {0}_lazy import {0} as module",
    ),
    "loaded by its specification": (
        "",
        "spec = importlib.util.find_spec('{0}')\n    module = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)",
    ),
    "in a function that breaks": (
        "def load():\n    torchdynamo.graph_break()\n    import {0}\n    return {0}",
        "module = load()",
    ),
    "in a function that runs for real": (
        "@torchdynamo.skip_frame\ndef load():\n    import {0}\n    return {0}",
        "module = load()",
    ),
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A package that nobody has imported yet."""
    name = f"imported_{request.node.callspec.indices['way']}"
    (tmp_path / name).mkdir()
    for file in ("__init__.py", "part.py"):
        (tmp_path / name / file).write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for loaded in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[loaded]


def _program(way: str, package: str) -> Callable[[torch.Tensor], Any]:
    once, statements = (part.format(package) for part in WAYS[way])
    text = f"{once}\ndef program(x):\n    y = x + 1\n    {statements}\n    return module.twice(y), module\n"
    namespace: dict[str, Any] = {"torchdynamo": torchdynamo, "sys": sys, "types": types, "__name__": "importing"}
    exec("import importlib\nimport importlib.util\n" + text, namespace)
    return namespace["program"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
def test_the_code_of_a_module_is_no_part_of_the_program(way: str, package: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    program = _program(way, package)
    compiled = torchdynamo.optimize(backend)(program)
    x = torch.tensor([1.0, 2.0])
    for _ in range(3):
        result, module = compiled(x)
        assert result.tolist() == [4.0, 6.0]
        assert type(module.first) is torch.Tensor and set(module.kinds) == {"Tensor"}
    wanted = program(x)[1]
    assert wanted.__name__ == module.__name__ and (wanted is module or way == "loaded by its specification")
    marked = {"disabled", "disabled_function"}
    told = [event for event in TOTAL.events if event.kind.id not in {"import", "recompiled", "graph_break"} | marked]
    assert not told, told
    for graph in graphs:
        assert not [node for node in graph.graph.nodes if node.target is torch.ones]


def test_an_import_of_what_is_loaded_is_a_read() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        import math
        from collections import abc

        assert abc is not None
        return x * math.pi

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    torch.testing.assert_close(compiled(torch.ones(2)), program(torch.ones(2)))
    assert not TOTAL.events
    other = types.ModuleType("math")
    other.pi = 2.0  # type: ignore[attr-defined]
    loaded = sys.modules["math"]
    sys.modules["math"] = other
    try:
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        sys.modules["math"] = loaded


def test_what_is_not_installed_is_told_to_the_program() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            import not_installed_anywhere  # type: ignore[import-not-found]
        except ModuleNotFoundError as error:
            return x * len(str(error.name))
        return not_installed_anywhere.twice(x)  # type: ignore[no-any-return]

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    assert compiled(torch.ones(2)).tolist() == program(torch.ones(2)).tolist()
    assert not TOTAL.events
    sys.modules["not_installed_anywhere"] = found = types.ModuleType("not_installed_anywhere")
    found.twice = lambda x: x * 2  # type: ignore[attr-defined]
    try:
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        del sys.modules["not_installed_anywhere"]
