"""Checks a release tag such as `inductor-v0.2.0` against that package's pyproject.toml; prints PACKAGE and VERSION.

python tools/release.py TAG
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def parse_tag(tag: str) -> tuple[str, str]:
    """(package folder, version) of a tag; exits with a message that says what is wrong with it."""
    match = re.fullmatch(r"([a-z]+)-v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)
    known = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
    if match is None or match[1] not in known:
        raise SystemExit(f"tag {tag!r} is not PACKAGE-vVERSION with one of the packages {', '.join(known)}")
    package, version = match[1], match[2]
    declared = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]["version"]
    if declared != version:
        raise SystemExit(f"tag {tag!r} says {version}, packages/{package}/pyproject.toml says {declared}")
    return package, version


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print("PACKAGE={}\nVERSION={}".format(*parse_tag(sys.argv[1])))
