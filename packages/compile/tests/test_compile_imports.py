"""What a process loads before its first call, and with it: no more than capture and kernels for the CPU take."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("primtorch", "aotautograd", "torchdynamo", "torchinductor", "torchdistributed", "torchcompile")

# What is not loaded (unless torch itself loads it) until somebody asks for what it is for.
ABSENT = {
    "rich": "tables and the live line, which are for a terminal or whoever prints a report",
    "jinja2": "a report's page",
    "pygments": "the user's code on that page",
    "torchcompile.page.filled": "the page",
    "matplotlib": "pictures of benchmarks",
    "networkx": "an oracle in tests and checks: partitions are cut by a flow of our own",
    "sympy": "an oracle in tests: sizes are polynomials of our own",
    "triton": "kernels for a GPU, which processes of their own build",
    "torch._dynamo": "the compiler that this one stands beside; it alone takes longer to load than all of this",
    "torch._inductor": "likewise",
    "torch._functorch.aot_autograd": "likewise",
    "torch.fx.experimental.symbolic_shapes": "likewise, with sympy",
    "torch.fx.experimental.proxy_tensor": "likewise",
    "torch.distributed.fsdp": "a program that shards says so by importing it",
    "torch.distributed.tensor": "likewise",
    "torch.utils.cpp_extension": "building our extensions, once after they are installed, and setuptools with it",
    "setuptools": "likewise",
    "unittest": "tests",
    "pytest": "tests",
}
# What a first call loads because it compiles: not the import, and no call whose program is on disk.
TO_COMPILE = ("primtorch.operators.elementwise", "primtorch.operators.attention")

PROGRAM = """
import gc, sys
import torch

getattr(gc, sys.argv[1])()
known = set(sys.modules)
import torchcompile
assert gc.isenabled() == (sys.argv[1] == "enable")  # as the program has it

def program(x):
    return (x.sin() + 1).sum()

def loaded():
    print(*(set(sys.modules) - known))

loaded()
x = torch.zeros(3, requires_grad=True)
torchcompile.compile(program)(x).backward()
assert torch.equal(x.grad, torch.ones(3)), x.grad
loaded()
"""


def loaded(folder: Path, collector: str = "enable") -> list[set[str]]:
    """What a process has loaded beside torch, after the import and after a first call."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(folder / "cache")}
    env.pop("TORCHCOMPILE_CHECK_KERNELS", None)  # under which nothing is kept
    command = [sys.executable, str(program), collector]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.smoke
def test_what_is_rarely_needed_is_not_loaded(tmp_path: Path) -> None:
    imported, called = loaded(tmp_path)
    assert {name: why for name, why in ABSENT.items() if name in imported | called} == {}
    assert not imported & set(TO_COMPILE) and called >= set(TO_COMPILE)
    again = loaded(tmp_path, "disable")  # the program is on disk
    assert not again[1] & {*TO_COMPILE, *ABSENT}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_public_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert {*getattr(module, "__all__", ())} <= {*dir(module)}
    assert not [name for name in module.__all__ if getattr(module, name) is None]


def test_names_that_are_loaded_late_are_what_a_package_says() -> None:
    page = importlib.import_module("torchcompile.page")
    assert all(callable(getattr(page, name)) for name in ("render", "render_profile"))
    with pytest.raises(AttributeError, match=r"module 'torchcompile.page' has no attribute 'nothing'"):
        page.nothing  # noqa: B018
