"""Programs for GPUs as text and back, for an architecture that is not here: the record that is read is the one written,
its kernels are those that were built, and files of another GPU are refused by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchcompile
import torchinductor
from primtorch.symbolic import IntExpr
from torchcompile import ArtifactMismatch
from torchcompile.artifacts import archive
from torchcompile.shelf import _RECORDS
from torchinductor import Binaries, CompiledGraph, InductorOptions, TritonBackend, register_codegen
from torchinductor.program import TritonCall
from torchinductor.source import on_device

pytest.importorskip("triton")

from torchinductor.codegen.triton.compiler import Server, TritonCompiler  # noqa: E402


@pytest.fixture
def hopper() -> Iterator[TritonBackend]:
    backend = TritonBackend(90)
    register_codegen("cuda", backend)
    yield backend
    register_codegen("cuda", TritonBackend())


def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product, sums by rows and by columns, sizes in numbers."""
    scores = torch.softmax(F.gelu(x @ w), -1)
    return scores / x.shape[0] + scores.sum(0)


def drop_and_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Random numbers, atomic additions, copies."""
    at = torch.arange(x.shape[0], device=x.device) // 2
    return torch.zeros_like(x).index_add(0, at, F.dropout(x, 0.5)).t() @ x + w.sum()


@pytest.fixture
def halves(
    hopper: TritonBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[CompiledGraph]]:
    """Forward and backward of a program as they would be compiled for the GPU."""

    def compiled(program: Callable[..., torch.Tensor], dynamic: bool) -> list[CompiledGraph]:
        graphs: list[torch.fx.GraphModule] = []
        compile_graph = torchinductor.compile_graph
        keep = lambda gm, *args, **more: (graphs.append(gm), compile_graph(gm, *args, **more))[1]
        options = InductorOptions(cache_dir=str(tmp_path / "built"), native_executor=False)
        with monkeypatch.context() as patched:
            patched.setattr(torchinductor, "compile_graph", keep)
            run = torchcompile.compile(program, dynamic=dynamic, options={"cache": None})
            run(torch.randn(6, 8, requires_grad=True), torch.randn(8, 8)).sum().backward()
        return [compile_graph(on_device(gm, torch.device("cuda")), (), options) for gm in graphs]

    return compiled


@pytest.mark.parametrize(
    ("program", "dynamic"), [(attend, True), (drop_and_scatter, False)], ids=["symbols", "numbers"]
)
def test_a_record_for_a_gpu_is_read_as_it_was_written(
    program: Callable[..., torch.Tensor],
    dynamic: bool,
    halves: Callable[..., list[CompiledGraph]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = halves(program, dynamic)
    assert len(compiled) == 2
    for graph in compiled:
        assert graph.kept is not None and torchinductor.devices_of(graph.kept) == {"cuda"}
        calls = [item for item in graph.program.instructions if isinstance(item, TritonCall)]
        sizes = [size for call in calls for size in call.grid if isinstance(size, IntExpr)]
        assert calls and any(size.symbols() for size in sizes) is dynamic
        text = _RECORDS.text(graph.kept)
        read = _RECORDS.value(text)
        assert read == graph.kept and _RECORDS.text(read) == text
        files = torchinductor.binaries_of(read, InductorOptions(cache_dir=str(tmp_path / "built")))
        assert files is not None and {Path(name).suffix for name in files} == {".cubin", ".json"}
        assert all(archive._KERNEL.fullmatch(archive.kernel_entry(name)) for name in files)
        assert not any(
            TritonCompiler(80).key(launcher.source) in " ".join(files) for launcher in graph.program.launchers
        )
        with monkeypatch.context() as patched:
            patched.setattr(Server, "_started", lambda self: pytest.fail("a kernel is compiled"))
            options = InductorOptions(binaries=Binaries(files), native_executor=False)
            loaded = torchinductor.load_graph(read, options)
            assert torchinductor.binaries_of(read, options) == files
        assert str(loaded.program) == str(graph.program) and loaded.program.definitions == graph.program.definitions
        assert [launcher.source for launcher in loaded.program.launchers] == [
            launcher.source for launcher in graph.program.launchers
        ]
        assert loaded.stats.cache_misses == 0 and loaded.stats.memory == graph.stats.memory


@pytest.mark.parametrize(
    ("gpu", "here"),
    [("NVIDIA H200 (sm_90, 132 multiprocessors)", "sm_90"), ("sm_80", "sm_90"), ("sm_90", "")],
    ids=["another model", "another architecture", "none here"],
)
def test_a_file_of_another_gpu_is_refused_by_name(
    gpu: str, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    file = tmp_path / "program"
    compiled = torchcompile.compile(program)
    compiled(torch.ones(3))
    torchcompile.save(compiled, file)
    with zipfile.ZipFile(file) as held:
        content: dict[str, Any] = {name: held.read(name) for name in held.namelist()}
    manifest = json.loads(content["manifest.json"])
    others = TritonBackend.facts(TritonBackend(90)) | {"GPU": gpu}
    manifest["record"][2] += [{"record": ["Fact", name, value]} for name, value in others.items()]
    manifest["record"][7] = ["cuda"]
    content["manifest.json"] = json.dumps(manifest)
    with zipfile.ZipFile(file, "w") as out:
        for name, text in content.items():
            out.writestr(name, text)
    monkeypatch.setattr(TritonBackend, "facts", lambda self: others | {"GPU": here})
    with pytest.raises(ArtifactMismatch, match="GPU: ") as raised:
        torchcompile.load(file, program)
    assert list(raised.value.differences) == [("GPU", gpu, here)]
    assert f"{gpu} there, {here or 'none'} here" in str(raised.value)
    monkeypatch.setattr(TritonBackend, "facts", lambda self: others)
    torch.testing.assert_close(torchcompile.load(file, program)(torch.ones(3)), program(torch.ones(3)))
