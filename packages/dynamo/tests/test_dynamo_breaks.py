"""Programs that leave the graph at every kind of instruction and region: compiled goes on and gives what eager gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from primtorch.ledger import LEDGER
from torchdynamo.api import owner_of


def run_both(program: Callable[..., Any], *args: Any) -> tuple[Any, Any, int]:
    """Eager's result, compiled's of a second call, graphs made."""
    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    compiled = torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(strict=True))(program)
    expected = program(*copy.deepcopy(args))
    for _ in range(2):
        found = compiled(*copy.deepcopy(args))
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
    return expected, found, len(graphs)


class Doubled:
    """A context manager that swallows divisions by zero."""

    def __init__(self) -> None:
        self.entered = 1

    def __enter__(self) -> Doubled:
        self.entered += 1
        return self

    def __exit__(self, kind: Any, *rest: Any) -> bool:
        self.entered += 1
        return kind is ZeroDivisionError


def in_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x + 1
        print("", end="")
        y = y * 2
    return y + x


def in_try(x: torch.Tensor) -> torch.Tensor:
    try:
        y = x + 1
        v = y.sum().item()
        z = y * v
        if v * v >= 0:
            raise ValueError("taken")
    except ValueError:
        z = z + 1
    return z + 1


def call_raises_in_try(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    try:
        int(y.abs().sum() / 0)
    except OverflowError as error:
        return y * len(error.args)
    return y


def boolean_mask(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y[y > 1]
    return z * 2


def inference_region(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = x * 2
        z = y + 1
    return z.sum() + x


def autocast_region(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ x
        print("", end="")
        b = a @ x
    return b.float() @ x


def formatted(x: torch.Tensor) -> torch.Tensor:
    text = f"{x.sum():.3f}{x[0]!r}"
    return x + len(text)


def loop_over_rows(x: torch.Tensor) -> torch.Tensor:
    result = x
    for row in x:
        if row.sum() > 0:
            result = result + 1
        else:
            result = result - 1
    return result


def unpacked(x: torch.Tensor) -> torch.Tensor:
    first, second = (x > -10).nonzero().tolist()[1]
    return x * first + second


def nested_regions(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    with torch.no_grad():
        try:
            values = y.tolist()
            y = y + len(values)
        finally:
            y = y * 2
    return y


def swallowing_manager(x: torch.Tensor) -> torch.Tensor:
    manager = Doubled()
    y = x
    with manager as inner:
        y = x * inner.entered
        y = y + int(y.abs().sum() * 0)
        y = y / (inner.entered - 2) if inner.entered > 2 else y * (1 // 0)
    return y + manager.entered


def metadata_write(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.data = torch.zeros(3)
    return y + 1


def compared(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    if x.sum().item() < 1e9 and not (x > 1e9).any():
        y = y * 3
    return y


def views_of_dicts(x: torch.Tensor) -> Any:
    table = {"a": x, "b": x + 1}
    total = x
    for name, value in table.items():
        if value.sum() > -1e9:
            total = total + value * len(name)
    return total, list(table.values())


def item_then_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    before = y.sum().item()
    y += 1
    y *= 2
    return y - before


PROGRAMS = [
    in_no_grad, in_try, call_raises_in_try, boolean_mask, inference_region, autocast_region, formatted, loop_over_rows,
    unpacked, nested_regions, swallowing_manager, metadata_write, compared, views_of_dicts, item_then_in_place,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_goes_on_after_its_breaks(program: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    expected, found, _ = run_both(program, torch.randn(4, 4))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_rest_of_a_with_block_is_compiled() -> None:
    *_, graphs = run_both(in_no_grad, torch.randn(4, 4))
    assert graphs == 2


def test_layers_dropped_at_random() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                if torch.rand([]) < 0.5:
                    continue
                x = layer(x) + index
            return x

    net, x = Net(), torch.randn(2, 4)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=torchdynamo.CaptureOptions(strict=True))(net)
    for seed in range(12):
        torch.manual_seed(seed)
        expected = net(x)
        torch.manual_seed(seed)
        assert torch.equal(compiled(x), expected), f"seed {seed}"


def test_iterators_of_the_caller_are_not_advanced_by_capture() -> None:
    @torchdynamo.optimize(lambda gm, inputs: gm.forward)
    def total(x: torch.Tensor, numbers: Any) -> torch.Tensor:
        for number in numbers:
            x = x + number
        return x

    assert torch.equal(total(torch.zeros(1), iter([1, 2, 3])), torch.tensor([6.0]))
    assert torch.equal(total(torch.zeros(1), (n for n in [1, 2])), torch.tensor([3.0]))


def test_statistics_count_after_a_reset_and_split_seconds() -> None:
    import time

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        time.sleep(0.2)
        return gm.forward

    compiled = torchdynamo.optimize(backend)(lambda x: x + 1)
    compiled(torch.ones(2))
    torchdynamo.reset()
    assert torchdynamo.stats().graphs == 0
    compiled(torch.ones(2))
    stats = torchdynamo.stats()
    assert stats.graphs == 1
    assert stats.seconds < 0.2 <= stats.backend_seconds


def test_a_fault_of_capture_is_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdynamo.interpreter import operators

    def faulty(world: Any, op: str, a: Any, b: Any) -> Any:
        raise KeyError("interpreter")

    def program(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * (n % 7)

    monkeypatch.setattr(operators, "binary", faulty)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    assert torch.equal(compiled(torch.ones(2), 3), torch.full((2,), 3.0))
    [found] = torchdynamo.stats().fallbacks
    assert found.kind.id == "capture_fault" and "program" in found.what
    assert "KeyError" in found.detail and "test_dynamo_breaks.py" in found.where
    strict = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=torchdynamo.CaptureOptions(strict=True))(
        program
    )
    with pytest.raises(torchdynamo.InternalError):
        strict(torch.ones(2), 3)


def test_an_error_of_the_program_is_no_fault() -> None:
    def program(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * (1 // n)

    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=torchdynamo.CaptureOptions(strict=True))(
        program
    )
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiled(torch.ones(2), 0)
    assert torch.equal(compiled(torch.ones(2), 1), torch.ones(2))


def test_a_fault_of_code_generation_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdynamo import function

    def faulty(*args: Any) -> Any:
        raise ValueError("no such instruction")

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        return y + 1

    monkeypatch.setattr(function, "make_resume", faulty)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), program(torch.ones(2)))
    assert [event.detail for event in owner_of(compiled).stats.fallbacks] == ["ValueError: no such instruction"]
    strict = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=torchdynamo.CaptureOptions(strict=True))(
        program
    )
    with pytest.raises(torchdynamo.InternalError, match="no such instruction"):
        strict(torch.ones(2))


def test_what_the_back_end_raises_reaches_the_user() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise ValueError("cannot compile this")

    with pytest.raises(ValueError, match="cannot compile this"):
        torchdynamo.optimize(backend)(lambda x: x + 1)(torch.ones(2))


def test_a_called_function_may_break_often() -> None:
    """Each break within it has a continuation of the caller's to itself: no limit of versions is met."""
    text = "def helper(x):\n" + "".join(f"    x = x + {i}\n    print(end='')\n" for i in range(14)) + "    return x\n"
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    helper = namespace["helper"]

    def program(x: torch.Tensor) -> torch.Tensor:
        return helper(x) * 2

    expected, found, graphs = run_both(program, torch.ones(2))
    assert torch.equal(found, expected) and graphs == 15


def test_functions_with_long_jumps_go_on() -> None:
    lines = "".join(f"            y = y + {i}\n" for i in range(150))
    text = (
        "def program(x):\n    y = x\n    for i in range(2):\n        print(end='')\n        try:\n"
        f"            print(end='')\n{lines}            if y.sum() < 0: continue\n{lines}"
        "        except ValueError:\n            y = y * 2\n    return y\n"
    )
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    expected, found, _ = run_both(namespace["program"], torch.ones(2))
    assert torch.equal(found, expected)


def test_what_launches_kernels_over_memory_leaves_the_graph() -> None:
    """Functions of the jiterator ask no mode: they would be given the fakes of capture for tensors."""
    jitted = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")

    def program(x: torch.Tensor) -> object:
        y = x + 1
        try:
            return jitted(y)
        except AssertionError as error:  # eager's, where there is no GPU
            return str(error)

    place = "cuda" if torch.cuda.is_available() else "cpu"
    torchdynamo.reset()
    expected, found, _ = run_both(program, torch.ones(3, device=place))
    assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found
    assert "c_function" in {event.kind.id for event in LEDGER.events}


def _called_for_real(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@torchdynamo.skip_frame
def _runs_as_it_is(functions: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    for function in functions:
        x = function(x)
    return x


def _calls(functions: list[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    return _runs_as_it_is(functions, x)


@pytest.mark.parametrize("kept", [False, True])
def test_what_broken_code_calls_is_captured_however_many_programs_were_compiled_before(kept: bool) -> None:
    alive, x = [], torch.ones(2)
    for number in range(70):
        graphs: list[Any] = []

        def backend(gm: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(gm)
            return gm.forward

        compiled = torchdynamo.optimize(backend)(_calls)
        torch.testing.assert_close(compiled([_called_for_real], x), _called_for_real(x))
        assert len(graphs) == 1, f"program {number}"
        alive += [compiled] * kept


def test_functions_that_are_made_anew_without_end_run_as_they_are_and_that_is_told() -> None:
    def added(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x + number

    torchdynamo.reset()
    compiled, x = torchdynamo.optimize(lambda gm, inputs: gm.forward)(_calls), torch.ones(2)
    for number in range(70):
        torch.testing.assert_close(compiled([added(number), _called_for_real], x), (x + number).sin() + 1)
    stats = torchdynamo.stats()
    events = [event for event in stats.fallbacks if event.kind.id == "recompile_limit"]
    assert [(event.what.rpartition(".")[2], event.count) for event in events] == [("<lambda>", 1)]
    assert stats.graphs == 65
