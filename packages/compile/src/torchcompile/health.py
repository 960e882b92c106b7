"""Whether this machine can compile: what is installed, and a small model trained for a few steps beside eager."""

from __future__ import annotations

import copy
import platform
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

import aotautograd._C
import torchdynamo._C
import torchinductor._C
from primtorch.frozen import record
from primtorch.supported import TORCH, minor
from torchcompile.api import compile, report, reset
from torchcompile.options import resolve
from torchinductor import CompilerMissing
from torchinductor.codegen.cpp.build import compiler_version, find_compiler

DISTRIBUTIONS = (
    "compile", "compile-primtorch", "compile-aotautograd", "compile-dynamo", "compile-inductor", "compile-distributed"
)  # fmt: skip


@record
class Finding:
    """One line of the answer. `remedy`: what to do where it is not well, "" where it is."""

    what: str
    found: str
    remedy: str = ""

    @property
    def well(self) -> bool:
        """Whether nothing has to be done."""
        return not self.remedy


def findings() -> Iterator[Finding]:
    """What a user has to know, one thing after the other: the last ones compile and run."""
    known = minor(torch.__version__) in set(map(minor, TORCH))
    yield Finding("Python", platform.python_version())
    yield Finding("torch", torch.__version__, "" if known else f"install a tested one: {', '.join(TORCH)}")
    yield _packages()
    yield from map(_extension, (aotautograd._C, torchdynamo._C, torchinductor._C))
    yield _compiler()
    yield _cache()
    yield Finding("GPU", _gpu())
    if torch.cuda.is_available():
        yield _triton()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    yield from map(_training, devices)


def _packages() -> Finding:
    """The six belong together: what one hands to the next changes with their versions."""
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed: a checkout on the path"
    alike = len(set(found.values())) == 1
    text = found[DISTRIBUTIONS[0]] if alike else ", ".join(f"{name} {version}" for name, version in found.items())
    remedy = "" if alike else f"pip install --upgrade {' '.join(DISTRIBUTIONS)}"
    return Finding("this stack", text, remedy)


def _extension(module: ModuleType) -> Finding:
    """Importing it has built it, where it was not."""
    return Finding(module.__name__, str(module.__file__))


def _cache() -> Finding:
    folder = resolve(None, None).cache
    if folder is None:
        return Finding("cache", "none: every process compiles anew")
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("cache", folder)
    except OSError as error:
        return Finding(
            "cache", f"{folder}: {error}", "name another folder by TORCHCOMPILE_CACHE or options={'cache': ...}"
        )


def _compiler() -> Finding:
    try:
        return Finding("C++ compiler", compiler_version(find_compiler(None)))
    except CompilerMissing as error:
        return Finding("C++ compiler", "none", str(error))


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use: kernels are made for the CPU"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _triton() -> Finding:
    try:
        return Finding("Triton", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return Finding("Triton", "none", "pip install triton: without it no kernels are made for the GPU")


def _training(device: str) -> Finding:
    """Three steps of a small model, compiled with every stage checked, and in eager."""
    what = f"training on {device}"
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
    eager = eager.to(device)
    plain = copy.deepcopy(eager)
    reset()
    try:
        compiled = compile(plain, fullgraph=True, options={"verify": True, "strict": True})
        inputs = torch.randn(4, 8, device=device)
        for model in (eager, compiled):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
    except Exception as error:
        return Finding(what, f"{type(error).__name__}: {error}".partition("\n")[0], "report it with this text")
    difference = max(
        float((a - b).detach().abs().max()) for a, b in zip(eager.parameters(), plain.parameters(), strict=True)
    )
    kernels = report().kernels
    if difference > 1e-5 or not kernels:
        return Finding(what, f"{kernels} kernels, weights differ by {difference:.1e}", "report it with this text")
    return Finding(what, f"{kernels} kernels, as eager does")
