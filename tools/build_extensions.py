"""Builds the C++ extensions in place, for a checkout that is used without being installed.

python tools/build_extensions.py [aotautograd] [dynamo] [inductor]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"
sys.path.insert(0, str(PACKAGES / "primtorch" / "src"))

from primtorch.building import build_in_place  # noqa: E402 - of this checkout


def main(names: list[str]) -> None:
    for name in names or ["aotautograd", "dynamo", "inductor"]:
        if not any((PACKAGES / name / "cpp").glob("*.cpp")):
            print(f"{name}: no C++ sources")
            continue
        start = time.perf_counter()
        print(f"{name}: {build_in_place(PACKAGES / name)} ({time.perf_counter() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
