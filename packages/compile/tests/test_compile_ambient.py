"""Programs that change the ambient state: results, gradients and the state afterwards are eager's."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import ambient_blocks
import pytest
import torch
from ambient_blocks import Make
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchcompile
import torchdynamo
from aotautograd import aot_module
from primtorch import ambient

BACKENDS = ("eager", "aot_eager", "inductor")

# By what programs leave a graph that change the state, look at it in the midst of a block or raise there.
pytestmark = pytest.mark.expected_eager(
    "ambient_state", "c_function", "disabled", "disabled_function", "disabled_overrides", "exception",
    "forward_derivatives", "function_mode", "function_transform", "generator", "graph_break", "graph_raised", "loop",
    "program_raised", "random_state", "rebuild", "tensor_to_number", "unsplit_frame", "unstarted_generator",
    "unsupported_read", "within_operator",
)  # fmt: skip


def evaluated(x: torch.Tensor, w: torch.Tensor) -> Any:
    total = 0.0
    with torch.no_grad():
        for row in x:
            total += (row * w).sum().item()
    return w * total


@torch.no_grad()
def decorated(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = (x * w).sum()
    return y + 1 if y.item() > 0 else y


def scaled_by_a_number(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.no_grad():
        largest = y.abs().max().item()
    return y / largest


def enabled_within(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.no_grad():
        plain = x * 2
        with torch.enable_grad():
            y, view, written = w * plain, w.view(-1, 1), x.clone()
            written.mul_(w)
    return y, view, written, plain


def left_off(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    torch.set_grad_enabled(False)
    z = y * w
    torchdynamo.graph_break()
    return y, z, z * w


def default_device(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.device("meta"):
        shape = torch.ones(2).new_empty(4).shape
        torchdynamo.graph_break()
        at = torch.ones(shape, device=x.device)
        on_meta = torch.zeros(3).device.type == "meta"
    return at * x.sum() + on_meta, torch.ones(1) + w.sum()


PROGRAMS: tuple[Callable[..., Any], ...] = (
    evaluated, decorated, scaled_by_a_number, enabled_within, left_off, default_device,
)  # fmt: skip


def _outcome(program: Callable[..., Any], grad: bool) -> tuple[list[torch.Tensor], list[Any], bool]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, dtype=torch.float64, generator=generator)
    w = torch.rand(3, dtype=torch.float64, generator=generator).requires_grad_()
    try:
        torch.set_grad_enabled(grad)
        results = program(x, w)
        left = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    results = list(results) if isinstance(results, tuple) else [results]
    grads: list[Any] = []
    for result in results:
        if result.requires_grad:
            grads.append(torch.autograd.grad(result.sum(), w, retain_graph=True)[0])
    return results, grads, left


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_as_eager(program: Callable[..., Any], backend: str, grad: bool) -> None:
    wanted, wanted_grads, wanted_left = _outcome(program, grad)
    compiled = torchcompile.compile(program, backend=backend)
    for _ in range(2):
        results, grads, left = _outcome(compiled, grad)
        assert left is wanted_left
        assert [r.requires_grad for r in results] == [r.requires_grad for r in wanted]
        torch.testing.assert_close(results, wanted)
        torch.testing.assert_close(grads, wanted_grads)


def test_what_another_thread_sets_while_a_program_is_compiled() -> None:
    """It stays; what the program sets is undone behind capture and trace, and done where the program runs."""
    before = torch.get_float32_matmul_precision()
    flash = torch.backends.cuda.flash_sdp_enabled()

    def set_elsewhere() -> None:
        thread = threading.Thread(target=torch.set_float32_matmul_precision, args=("high",))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            set_elsewhere()
            return gm.forward

        with ambient.preserved():
            compiled = aot_module(gm, inputs, fw_compiler=backend)
        assert torch.get_float32_matmul_precision() == "high"
        return compiled

    def program(x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x).sin()

    x = torch.rand(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    try:
        torchcompile.compile(program, backend=compiler)(x).sum().backward()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.flash_sdp_enabled() == flash
    finally:
        torch.set_float32_matmul_precision(before)


# -- every block that torch has ----------------------------------------------------------------

SEEN: list[dict[str, Any]] = []


@torchdynamo.disable
def look() -> None:
    """Breaks the graph, and notes the ambient state there."""
    SEEN.append(_shown(ambient.snapshot()))


def plain(x: torch.Tensor, w: torch.Tensor, make: Make) -> Any:
    with make():
        y = (x * w).sin() + torch.ones(3, dtype=x.dtype)
    return y, y * w


def broken(x: torch.Tensor, w: torch.Tensor, make: Make) -> Any:
    with make():
        y = (x * w).sin()
        look()
        y = y + torch.ones(3, dtype=x.dtype)
    return y, y * w


def leaves(x: torch.Tensor, w: torch.Tensor, make: Make) -> Any:
    with make():
        y = (x * w).sin()
        raise LookupError(y.shape)


def caught(x: torch.Tensor, w: torch.Tensor, make: Make) -> Any:
    y = x * w
    try:
        with make():
            y = y.sin()
            look()
            raise LookupError(y.shape)
    except LookupError:
        y = y * w
    look()
    return (y,)


def in_a_generator(x: torch.Tensor, w: torch.Tensor, make: Make) -> Any:
    def rows() -> Any:
        with make():
            for row in x:
                yield row * w

    total = w
    for row in rows():
        total = total + row
    look()
    return (total,)


def nested(x: torch.Tensor, w: torch.Tensor, make: Make) -> Any:
    with torch.no_grad(), make():
        y = x * w
        with make(), torch.enable_grad():
            look()
            z = y * w
        look()
    return y, z, z * w


SHAPES = (plain, broken, leaves, caught, in_a_generator, nested)


def _shown(values: Any) -> dict[str, Any]:
    """Modes by their classes: each run has its own."""
    shown = dict(zip((state.name for state in ambient.AMBIENT), values, strict=True))
    for name in ("function modes", "dispatch modes"):
        shown[name] = [type(mode) for mode in shown[name]]
    shown["saved-tensors hooks"] = [part is None for part in shown["saved-tensors hooks"]]
    return shown


def _run(program: Callable[..., Any], make: Make, size: int) -> dict[str, Any]:
    """All that shows of a call: results, gradients, the exception, the state within, and what it leaves changed."""
    generator = torch.Generator().manual_seed(size)
    x = torch.rand(size, 3, dtype=torch.float64, generator=generator)
    w = torch.rand(3, dtype=torch.float64, generator=generator).requires_grad_()
    SEEN.clear()
    before = ambient.snapshot()
    found: dict[str, Any] = {"raised": None, "results": [], "gradients": []}
    try:
        found["results"] = list(program(x, w, make))
    except (LookupError, RuntimeError) as error:
        found["raised"] = type(error), str(error).partition("\n")[0]
    found["within"], found["left"] = list(SEEN), ambient.changed(before)
    ambient.restore(before)
    try:
        for result in found["results"]:
            if result.requires_grad:
                found["gradients"] += torch.autograd.grad(result.sum(), w, retain_graph=True)
    except (AssertionError, RuntimeError) as error:
        found["raised"] = type(error), str(error).partition("\n")[0]
    found["requires_grad"] = [result.requires_grad for result in found["results"]]
    found["inference"] = [result.is_inference() for result in found["results"]]
    return found


def _compare(name: str, shape: Callable[..., Any], backend: str) -> None:
    make = ambient_blocks.BLOCKS[name]
    compiled = torchcompile.compile(shape, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (2, 2, 4):
            wanted = _run(shape, make, size)
            found = _run(compiled, make, size)
            for part in ("raised", "within", "left", "requires_grad", "inference"):
                assert found[part] == wanted[part], (part, found[part], wanted[part])
            torch.testing.assert_close(found["results"], wanted["results"])
            torch.testing.assert_close(found["gradients"], wanted["gradients"])
    faults = [event for event in torchdynamo.stats().events if event.kind.id == "capture_fault"]
    assert not faults, faults


CASES = [(name, shape, backend) for name in ambient_blocks.BLOCKS for shape in SHAPES for backend in BACKENDS]


def test_every_block_of_torch_is_known() -> None:
    """A block that a new version of torch brings has to be entered in the table, or left out for a reason."""
    assert not ambient_blocks.listed().keys() - ambient_blocks.BLOCKS.keys() - ambient_blocks.LEFT_OUT.keys()


def test_some_blocks_by_chance() -> None:
    seed = random.randrange(1 << 30)
    for name, shape, backend in random.Random(seed).sample(CASES, 12):
        try:
            _compare(name, shape, backend)
        except BaseException as error:
            error.add_note(f"{name}, {shape.__name__}, {backend} (seed {seed})")
            raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "backend"), CASES, ids=[f"{name}-{shape.__name__}-{backend}" for name, shape, backend in CASES]
)
def test_each_block(name: str, shape: Callable[..., Any], backend: str) -> None:
    _compare(name, shape, backend)
