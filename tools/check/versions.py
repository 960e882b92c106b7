"""Holds everything that states a version to primtorch/supported.py, and the three build hooks to one text.

python tools/check/versions.py             (exit status 1 and one line a finding where they differ)
python tools/check/versions.py --releases  prints the supported releases of torch, oldest first
python tools/check/versions.py --ends      prints the oldest and the newest of them
python tools/check/versions.py --matrix    prints the torch and Python releases as JSON, for the test matrix
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def supported(root: Path = ROOT) -> ModuleType:
    """primtorch/supported.py, by its path: neither primtorch nor torch need be installed."""
    path = root / "packages" / "primtorch" / "src" / "primtorch" / "supported.py"
    spec = spec_from_file_location("supported", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def span(first: str, last: str) -> str:
    """`>=2.11,<2.15` of "2.11.0" and "2.14.1"."""
    major, newest = last.split(".")[:2]
    return f">={'.'.join(first.split('.')[:2])},<{major}.{int(newest) + 1}"


def findings(root: Path) -> Iterator[str]:
    known = supported(root)
    torch, python = f"torch{span(known.TORCH[0], known.TORCH[-1])}", span(known.PYTHON[0], known.PYTHON[-1])
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        where, declared = path.relative_to(root), tomllib.loads(path.read_text())
        required = [*declared["build-system"]["requires"], *declared["project"]["dependencies"]]
        for requirement in required:
            if re.match(r"torch\b", requirement) and requirement != torch:
                yield f"{where}: requires {requirement}, supported is {torch}"
        if declared["project"]["requires-python"] != python:
            yield f"{where}: requires-python is not {python}"
    ends = [".".join(release.split(".")[:2]) for release in (known.TORCH[0], known.TORCH[-1])]
    sentence = f"Python {known.PYTHON[0]} to {known.PYTHON[-1]}, torch {ends[0]} to {ends[1]}."
    if sentence not in (root / "README.md").read_text():
        yield f"README.md: does not say {sentence!r}"
    pinned = re.search(r"^torch==(.+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    if pinned is None or pinned[1] not in known.TORCH:
        yield f"constraints.txt: pins none of torch {', '.join(known.TORCH)}"
    tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    if tools["mypy"]["python_version"] != known.PYTHON[0]:
        yield f"pyproject.toml: mypy checks another Python than the oldest, {known.PYTHON[0]}"
    if tools["ruff"]["target-version"] != "py" + known.PYTHON[0].replace(".", ""):
        yield f"pyproject.toml: ruff checks another Python than the oldest, {known.PYTHON[0]}"
    workflow = root / ".github" / "workflows" / "release.yml"
    if f"python: {json.dumps(known.PYTHON)}" not in workflow.read_text():
        yield f"{workflow.relative_to(root)}: does not build for Python {', '.join(known.PYTHON)}"


def main(arguments: list[str]) -> int:
    known = supported()
    if arguments == ["--releases"]:
        print(*known.TORCH)
    elif arguments == ["--ends"]:
        print(known.TORCH[0], known.TORCH[-1])
    elif arguments == ["--matrix"]:
        print(json.dumps({"torch": known.TORCH, "python": known.PYTHON}))
    elif arguments:
        raise SystemExit(__doc__)
    else:
        found = list(findings(ROOT))
        print("\n".join(found) if found else f"one range of versions: torch {', '.join(known.TORCH)}")
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
