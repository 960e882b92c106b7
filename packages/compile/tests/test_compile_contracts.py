"""The checks of `tools/check/contracts.py`: imports among a package's rooms, that a fallback is told, docstrings."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "check" / "contracts.py"


@pytest.fixture(scope="module")
def contracts() -> Any:
    spec = importlib.util.spec_from_file_location("contracts", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("torchdynamo.calls.calls", "torchdynamo.outside.outside.Outside", True),
        ("torchdynamo.calls.calls", "torchdynamo.calls.emissions.Emissions", True),
        ("torchdynamo.outside.outside", "torchdynamo._C.Entry", True),
        ("torchdynamo", "torchdynamo.api.optimize", True),
        ("torchdynamo.outside.outside", "torchdynamo.calls.calls.Calls", False),
        ("torchdynamo.graph.recorder", "torchdynamo.capture", False),
        ("torchdynamo.guards.failure", "torchdynamo.calls.calls.Calls", False),  # of one layer
        ("torchdynamo.unheard_of", "torchdynamo.errors.InternalError", False),
    ],
)
def test_imports_among_rooms_go_one_way(contracts: Any, module: str, imported: str, allowed: bool) -> None:
    assert (not list(contracts.out_of_order("torchdynamo", module, imported))) is allowed


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        ("return gm.forward", False),
        ("return agreed(run_graph(gm, inputs), gm)", False),
        ("why = str(error); return run_agreed(gm, inputs)", False),
        ("toolchain.not_compiled(title, error); return run_agreed(gm, inputs)", True),
        ("ledger.add(Event(KIND, title, str(error))); return gm.forward", True),
        ("return None", True),
        ("raise", True),
    ],
)
def test_eager_in_the_place_of_what_failed_is_told(contracts: Any, handler: str, told: bool) -> None:
    program = f"def f():\n    try:\n        return compile()\n    except Exception as error:\n        {handler}\n"
    assert list(contracts.untold(ast.parse(program))) == ([] if told else [4])


@pytest.mark.parametrize(
    ("program", "silent"),
    [
        ("def f(): ...", ["f"]),
        ("def _f(): ...", []),
        ("def f():\n    'What it gives.'", []),
        ("class A:\n    'It.'\n    def f(self): ...", ["A.f"]),
        ("class A:\n    'It.'\n    def f(self):\n        'F.'\nclass B(A):\n    'It.'\n    def f(self): ...", []),
        ("class _A:\n    def f(self):\n        'F.'\nclass B(_A):\n    'It.'\n    def f(self): ...", []),
        ("if x:\n    def f(): ...", ["f"]),
        ("def f():\n    'It.'\n    def g(): ...", []),
        ("class A:\n    'It.'\n    @opcode(since=(3, 12))\n    def NOP(self): ...", []),
        ("@RULES.interprets(len)\ndef f(): ...", []),
        ("@overload\ndef f(): ...", []),
    ],
)
def test_what_is_public_says_what_it_gives(contracts: Any, program: str, silent: list[str]) -> None:
    tree = ast.parse(program)
    assert [name for name, _ in contracts.Documentation([tree]).missing(tree)] == silent
