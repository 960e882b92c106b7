"""Gradients of depthwise filters as a template: what is one, that programs share lines out, binaries, values."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from filter_gradient_cases import CASES, LEFT, Case
from interpreted import replies

import primtorch
from torchinductor import InductorOptions, TritonBackend, begin_early, compile_graph
from torchinductor.codegen.base import generated
from torchinductor.cost import bytes_of
from torchinductor.ir import FilterGradient, Kernel, loops_of, verify_kernels
from torchinductor.lowering.context import ExternCall, Operation
from torchinductor.source import on_device, planned_operations

pytest.importorskip("triton")

from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.filter_gradient import CHANNELS, TILES, _channels_of_a_tile  # noqa: E402
from torchinductor.codegen.triton.plan import Layout  # noqa: E402
from torchinductor.codegen.triton.resources import resources_of  # noqa: E402

BF16 = torch.bfloat16
LARGE = Case(128, 72, (56, 56), (5, 5), (2, 2), (2, 2), dtype=BF16)


def planned(case: Case) -> list[Operation]:
    gm = primtorch.lower(primtorch.trace(case.program, *case.inputs()))
    return planned_operations(gm, "cuda", InductorOptions(verify=True))


@pytest.mark.parametrize("name", CASES)
def test_filters_of_each_channel_are_sums_of_ours(name: str) -> None:
    found = planned(CASES[name])
    verify_kernels(found)
    assert sum(isinstance(o, FilterGradient) for o in found) == 1
    assert not any(isinstance(o, ExternCall) for o in found)


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_the_library(name: str) -> None:
    found = planned(LEFT[name])
    assert sum(isinstance(o, ExternCall) for o in found) == 1
    assert not any(isinstance(o, FilterGradient) for o in found)


def test_gradient_and_image_are_read_once_and_the_programs_sums_are_few() -> None:
    partial, ends = planned(LARGE)
    assert isinstance(partial, FilterGradient) and isinstance(ends, Kernel)
    programs = partial.loops.laid_out(Layout).grid.as_int()
    assert programs is not None and 0.8 * TILES[25].programs <= programs <= TILES[25].programs
    gradient, image, filters = (t.numel() * 2 for t in LARGE.inputs())
    moved = [bytes_of(loops_of(o)) for o in (partial, ends)]
    (sums,) = partial.writes
    assert moved[0] == {sums: moved[1][sums], partial.gradient.buffer: gradient, partial.image.buffer: image}
    assert moved[1].keys() == {sums, *ends.writes} and moved[1][ends.writes[0]] == filters
    assert moved[0][sums] < 0.2 * (gradient + image)


def begun_early(monkeypatch: pytest.MonkeyPatch, gm: torch.fx.GraphModule) -> list[str]:
    """The texts that are handed to the builders of a joint graph's kernels before it is cut."""
    begun: list[str] = []
    monkeypatch.setattr(TritonBackend, "begin", lambda _, sources, options: begun.extend(s.text for s in sources))
    assert begin_early(gm, InductorOptions(verify=True)) == len(begun)
    return begun


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.sliced])
def test_their_texts_are_known_before_what_stands_around_them_is_fused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(gradient: torch.Tensor, image: torch.Tensor, filters: torch.Tensor) -> list[torch.Tensor]:
        """Twice what the case asks for, of operands that other kernels make."""
        made = [case.program(gradient * k, image.sigmoid(), filters) for k in (2, 3)]
        return [part * 2 for parts in made for part in parts]

    case = CASES[name]
    gm = on_device(primtorch.lower(primtorch.trace(program, *case.inputs())), torch.device("cuda"))
    (text,) = begun_early(monkeypatch, gm)
    written = [generated(o, InductorOptions()).text for o in planned_operations(gm) if isinstance(o, FilterGradient)]
    assert written == [text, text]


@pytest.mark.parametrize("name", LEFT)
def test_of_others_nothing_is_begun_early(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = primtorch.lower(primtorch.trace(LEFT[name].program, *LEFT[name].inputs()))
    assert not begun_early(monkeypatch, on_device(gm, torch.device("cuda")))


def test_a_device_that_builds_by_itself_begins_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not begun_early(monkeypatch, primtorch.lower(primtorch.trace(LARGE.program, *LARGE.inputs())))


def test_a_device_without_the_design_asks_its_library() -> None:
    case = CASES["three by three"]
    gm = primtorch.lower(primtorch.trace(case.program, *case.inputs()))
    compiled = compile_graph(gm)  # the C++ back end has none
    assert [part.generated for part in compiled.program.parts] == [False]


@pytest.mark.parametrize("channels", [1, 7, 8, 16, 24, 32, 72, 96, 120, 144, 184, 200, 240, 672, 960, 1152])
def test_few_channels_of_a_tile_are_none(channels: int) -> None:
    block = _channels_of_a_tile(channels)
    assert block <= CHANNELS and block & (block - 1) == 0
    assert block == 8 or (-channels % block) * 8 <= channels


@pytest.mark.parametrize("arch", [80, 90])
def test_sums_fit_the_registers(arch: int, tmp_path: Path) -> None:
    cases = [LARGE, Case(64, 64, (112, 112), (3, 3), (2, 2), (1, 1), dtype=BF16)]
    cases += [] if arch == 80 else [Case(64, 960, (7, 7), (5, 5), padding=(2, 2), dtype=BF16)]
    sources = [generated(planned(case)[0], InductorOptions()).meta for case in cases]  # type: ignore[arg-type]
    compiler = TritonCompiler(arch, tmp_path, workers=2)
    binaries = compiler.compile(sources)
    compiler.close()
    for binary in binaries:
        taken = resources_of(binary)
        assert not taken.spilled and taken.registers <= 200, taken
        text = (tmp_path / f"{binary.key}.ptx").read_text()
        assert "ld.global.b32" in text  # two neighbouring channels at a time


def test_values_in_the_interpreter() -> None:
    found = replies("filter_gradient_worker.py")
    assert [reply["case"] for reply in found] == [*CASES, *LEFT, "any number"]
    for reply in found:
        assert reply.get("made") == (reply["case"] not in LEFT), reply
        assert reply["error"] <= reply["limit"], reply


def test_random_convolutions_in_the_interpreter() -> None:
    found = replies("filter_gradient_worker.py", "--random", str(random.randrange(10**6)), "16")
    assert not [reply for reply in found if "failure" in reply or reply["error"] > reply["limit"]], found
    assert sum(int(reply["made"]) for reply in found) > 3
