"""Builds the C++ extensions in place, for a checkout that is used without being installed.

python tools/build_extensions.py [aotautograd] [dynamo] [inductor]
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def build(name: str) -> Path:
    """Runs the function that the package's own build hook runs; returns the extension module's path."""
    script = PACKAGES / name / "hatch_build.py"
    spec = importlib.util.spec_from_file_location(f"hatch_build_{name}", script)
    if spec is None or spec.loader is None:
        raise ImportError(f"no build script at {script}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target: Path = module.build_in_place()
    return target


def main(names: list[str]) -> None:
    for name in names or ["aotautograd", "dynamo", "inductor"]:
        if not any((PACKAGES / name / "cpp").glob("*.cpp")):
            print(f"{name}: no C++ sources")
            continue
        start = time.perf_counter()
        print(f"{name}: {build(name)} ({time.perf_counter() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
