"""Checks a release tag such as `inductor-v0.2.0` against that package's pyproject.toml; prints PACKAGE and VERSION.
Or rehearses a release: all six distributions into a local index, from there into a fresh environment, a training step.

python tools/release.py TAG
python tools/release.py --notes PACKAGE        prints what its CHANGELOG.md says of its version: the release's notes
python tools/release.py --rehearse FOLDER      the environment that runs this gives torch, and needs pip and hatchling
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"
FOLDERS = ("primtorch", "aotautograd", "dynamo", "inductor", "distributed", "compile")
MOST_SECONDS = 7200  # of a step: C++ extensions take minutes, and half an hour beside other work on two processors
SMOKE = """
import torch, torchcompile

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
compiled = torchcompile.compile(model, fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, losses = torch.ones(5, 4), []
for _ in range(3):
    optimizer.zero_grad()
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
assert losses[2] < losses[0] and torchcompile.report().kernels, losses
print(f"torchcompile {torchcompile.__version__} at {torchcompile.__file__}, torch {torch.__version__}: losses {losses}")
"""


def parse_tag(tag: str) -> tuple[str, str]:
    """(package folder, version) of a tag; exits with a message that says what is wrong with it."""
    match = re.fullmatch(r"([a-z]+)-v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)
    known = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
    if match is None or match[1] not in known:
        raise SystemExit(f"tag {tag!r} is not PACKAGE-vVERSION with one of the packages {', '.join(known)}")
    package, version = match[1], match[2]
    declared = project(package)["version"]
    if declared != version:
        raise SystemExit(f"tag {tag!r} says {version}, packages/{package}/pyproject.toml says {declared}")
    return package, version


def project(package: str) -> dict[str, str]:
    """What a package's pyproject.toml declares."""
    found: dict[str, str] = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    return found


def notes(package: str) -> str:
    """The part of a package's changelog that is about its version; exits where there is none."""
    version = project(package)["version"]
    text = (PACKAGES / package / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {re.escape(version)}\b.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise SystemExit(f"packages/{package}/CHANGELOG.md says nothing of {version}")
    return f"{project(package)['name']} {version}\n\n{found[1].strip()}\n"


def rehearse(folder: Path) -> None:
    """Builds, indexes, installs and runs; exits where one of them fails."""
    index, environment = folder / "simple", folder / "environment"
    for made in (folder / "sources", folder / "dist", index, environment):
        shutil.rmtree(made, ignore_errors=True)
    for package in FOLDERS:
        print(f"== {package}: notes of {len(notes(package).splitlines()) - 2} lines, wheel", flush=True)
        source = folder / "sources" / package  # a copy: building leaves nothing in the working tree
        shutil.copytree(PACKAGES / package, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.so"))
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder / "dist",
            source,
        )
    write_index(folder / "dist", index)
    print("== a fresh environment, with what is installed here but for the six", flush=True)
    python = fresh_environment(environment, folder / "others")
    asked = f"{project('compile')['name']}=={project('compile')['version']}"
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", python, "install", "-q", "--no-cache-dir")
    run(*pip, "--index-url", index.as_uri(), asked)
    print("== a training step; the first import compiles the C++ extensions", flush=True)
    script = folder / "smoke.py"
    script.write_text(SMOKE)
    start = time.perf_counter()
    run(python, script)
    print(f"== {time.perf_counter() - start:.0f} s", flush=True)
    run(python, "-m", "torchcompile", "verify")


def write_index(wheels: Path, index: Path) -> None:
    """A simple index (PEP 503) of these wheels, which pip reads from its folder as from a server."""
    names = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        place = index / name
        place.mkdir(parents=True)
        shutil.copy(wheel, place)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        link = f'<a href="{html.escape(wheel.name)}#sha256={digest}">{html.escape(wheel.name)}</a>'
        (place / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>\n")
        names.append(f'<a href="{name}/">{name}</a>')
    (index / "index.html").write_text(f"<!DOCTYPE html><html><body>{' '.join(names)}</body></html>\n")


def fresh_environment(folder: Path, others: Path) -> Path:
    """Its Python. It finds the packages of the environment that runs this by links to them, but for the six."""
    modules = "primtorch|aotautograd|torch(compile|dynamo|inductor|distributed)"
    ours = re.compile(rf"_*(editable__.*|compile(_[a-z]+)?[-.].*|{modules})|.*[.]pth")
    shutil.rmtree(others, ignore_errors=True)
    others.mkdir(parents=True)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not ours.fullmatch(path.name):
            (others / path.name).symlink_to(path)
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{others.resolve()}\n")
    return folder / "bin" / "python"


def run(*command: str | Path) -> None:
    """Runs a command with nothing of this checkout on its path; exits where it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], env=environment, check=False, timeout=MOST_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--rehearse", folder]:
            rehearse(Path(folder).resolve())
        case ["--notes", package] if package in FOLDERS:
            print(notes(package), end="")
        case [tag] if not tag.startswith("-"):
            print("PACKAGE={}\nVERSION={}".format(*parse_tag(tag)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
