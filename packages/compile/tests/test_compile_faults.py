"""`options={"verify": True}`: a compiled graph that computes something else than eager is told, with its first operator."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, Planted, is_named, minified, planted, shown_by, verified
from torch import nn

import torchcompile
from torchcompile import events
from torchcompile.__main__ import main
from torchcompile.faults.judge import Judge
from torchcompile.faults.schemas import Program
from torchinductor.codegen.cpp.backend import CppBackend

VERIFY = {"verify": True, "cache": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).sin()
        return hidden.exp().cos().sum(-1)


class Cancelled(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sum() - 4095,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagers_error_is_that_beside_the_inputs_where_it_is_none_by_luck(dtype: torch.dtype) -> None:
    """Whole numbers add up to 4096 exactly, and what cancels leaves nothing to measure the errors of others by."""
    program = Program(
        torch.fx.symbolic_trace(Cancelled()), (torch.full((16,), 256.0, dtype=dtype, requires_grad=True),)
    )
    off = torch.finfo(dtype).eps * 2048
    judge, state = Judge(program), torch.get_rng_state()
    assert judge.difference(lambda x: (x.sum() - 4095 + off,)) is None
    assert "output, result 0: off by" in str(judge.difference(lambda x: (x.sum() - 4095 + 64 * off,)))
    assert "gradient of an input, result 0" in str(judge.difference(lambda x: (x.detach().sum() - 4095 + x.sum() * 0,)))
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_right_passes() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.nn.functional.dropout(x, 0.5) if x.shape[0] == 2 else x.softmax(-1)

    model, x = Net(), torch.randn(3, 6)
    torch.testing.assert_close(torchcompile.compile(model, options=VERIFY)(x), model(x))
    for rows in (2, 3):
        given = torch.ones(rows, 4)
        torchcompile.compile(writes, options=VERIFY)(given)
        assert given.eq(2).all()  # the comparison ran on copies
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    torchcompile.compile(lambda x: x.sin(), options=VERIFY)(x)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("right", "wrong", "grad", "operator"),
    [
        ("fexp", "sinf", False, "exp"),
        ("cosf", "fexp", False, "cos"),
        ("sinf", "fexp", False, "sin"),
        ("cosf", "fexp", True, "sin"),  # whose derivative it is
    ],
)
def test_the_first_wrong_operator_is_named(
    right: str, wrong: str, grad: bool, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the text of the kernels: one operation is another."""
    generate = CppBackend.generate

    def faulty(self: Any, *args: Any) -> Any:
        source = generate(self, *args)
        return type(source)(source.text.replace(f"{right}(", f"{wrong}("), source.meta, source.origins)

    monkeypatch.setattr(CppBackend, "generate", faulty)
    told = rf"first operator that differs is {operator} = [^\n]*\n  {__file__}"
    with torch.set_grad_enabled(grad), pytest.raises(torchcompile.WrongResult, match=told):
        torchcompile.compile(Net(), options=VERIFY)(torch.randn(3, 6))


# -- planted faults: the rest of the table is `make faults` ------------------------------------

SLICE = (
    "rule of gelu raises",
    "rule of softmax forgets a factor",
    "joint: tanh's derivative is dropped",
    "joint: the trace raises at softmax",
    "capture: a stale global",
)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in SLICE], ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_and_reduced(fault: Planted, tmp_path: Path) -> None:
    found = minified(fault, tmp_path)
    assert is_named(fault, str(found.fault)), found
    assert found.lines <= 10 and found.path is not None
    with planted(fault):
        assert shown_by(found.path)
    assert not shown_by(found.path)  # without the fault the file runs


def test_a_call_that_a_wrong_guard_lets_through_is_told(tmp_path: Path) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "guards: an attribute's is missing")
    assert is_named(fault, verified(fault, tmp_path))


@pytest.mark.expected_eager(...)
def test_an_error_of_a_stage_writes_its_reproducer(tmp_path: Path) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "rule of gelu raises")
    options = {"minify_on_error": True, "dump": str(tmp_path), "cache": None}
    x = torch.randn(3, 4)
    with planted(fault):
        compiled = torchcompile.compile(lambda x: torch.nn.functional.gelu(x.sin()).cos(), options=options)
        with pytest.warns(UserWarning, match=r"reduced to 1 operators: .*minified_prims_gelu\.py"):
            found = compiled(x)
        assert torch.equal(found, torch.nn.functional.gelu(x.sin()).cos())
        assert "planted" in shown_by(tmp_path / "minified_prims_gelu.py")


def flawed(gm: Any, inputs: Any) -> Any:
    """A back end that computes tanh wrong, and has no cosine."""
    names = [node.target for node in gm.graph.nodes if node.op == "call_method"]
    if "cos" in names:
        raise NotImplementedError("no cosine")
    return lambda *values: [found * 1.01 if "tanh" in names else found for found in gm.forward(*values)]


@pytest.mark.parametrize("own", [True, False])
def test_a_back_end_of_the_callers_own_is_held_to_eager(own: bool, tmp_path: Path) -> None:
    backend = (lambda gm, inputs: flawed(gm, inputs)) if own else flawed
    x = torch.randn(3, 4)

    def compiled(program: Any, **options: Any) -> Any:
        return torchcompile.compile(program, backend=backend, options={"cache": None, "dump": str(tmp_path), **options})

    torch.testing.assert_close(compiled(lambda x: x.sin().exp(), verify=True)(x), x.sin().exp())
    with pytest.raises(torchcompile.WrongResult, match=r"stage backend(.|\n)*tanh = sin.tanh\(\)"):
        compiled(lambda x: x.sin().tanh().exp(), verify=True)(x)
    with pytest.raises(torchcompile.WrongResult, match=r"(?s)reduced to 1 operators(.*no file can)?"):
        compiled(lambda x: x.sin().tanh().exp(), verify=True, minify_on_error=True)(x)
    with pytest.raises(NotImplementedError, match="no cosine") as raised:
        compiled(lambda x: x.sin().cos().exp(), minify_on_error=True)(x)
    assert "reduced to 1 operators" in raised.value.__notes__[0]
    files = sorted(path.name for path in tmp_path.glob("minified*.py"))
    assert files == ([] if own else ["minified_backend_cos.py", "minified_backend_tanh.py"])
    for name in files:
        assert f"from {__name__} import flawed" in (tmp_path / name).read_text()


@pytest.mark.parametrize("backend", ["torch.eager", "eager", "aot_eager"])
def test_other_back_ends_are_held_to_eager(backend: str) -> None:
    model, x = Net(), torch.randn(3, 6)
    torch.testing.assert_close(torchcompile.compile(model, backend=backend, options=VERIFY)(x), model(x))


RIGHT = """
import sys
import torch
import torchcompile

print("arguments", sys.argv[1:])
torch.manual_seed(3)
torchcompile.compile(torch.nn.Linear(3, 3))(torch.randn(2, 3))
torchcompile.compile(torch.nn.Dropout())(torch.randn(2, 3))
torch.set_default_dtype(torch.float64)
"""


def test_a_script_without_a_fault_leaves_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    before = torch.get_rng_state(), sys.argv, list(sys.path), sys.modules["__main__"], torch.get_default_dtype()
    assert main(["minify", "--folder", str(tmp_path), str(tmp_path / "right.py"), "--steps", "3"]) == 0
    shown = capfd.readouterr().out
    assert "['--steps', '3']" in shown and "2 calls and graphs could not be held to eager: it draws random" in shown
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (sys.argv, sys.path, sys.modules["__main__"], torch.get_default_dtype()) == before[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["right.py"]


class Box:
    """A class of the program's own."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class Sub(torch.Tensor):
    pass


def refuses(x: torch.Tensor) -> torch.Tensor:
    if x.ndim:
        raise ValueError("a number at a time")
    return x


X = torch.ones(3)
GLOBAL_BOX = Box(X)
NOT_VERIFIED: list[tuple[Any, Any, str, list[str]]] = [
    # program, argument, why, whether the call, its graph or both are left out
    (lambda x: torch.nn.functional.dropout(x), X, "it draws random numbers", ["call", "graph"]),
    (lambda box: box.held.sin(), Box(X), f"it reaches an object of class {__name__}.Box", ["call"]),
    (lambda x: x.sin() * GLOBAL_BOX.held, X, f"it reaches an object of class {__name__}.Box", ["call"]),
    (lambda x: x.sin(), X.as_subclass(Sub), f"it takes a tensor of class {__name__}.Sub", ["call"]),
    (lambda x: Box(x.sin()), X, f"it gives an object of class {__name__}.Box, which is not compared", ["call"]),
    (refuses, X, "eager raises ValueError", ["call"]),
    (
        lambda x: torch.linalg.inv(x.new_zeros(2, 2)),
        X,
        f"eager raises {torch.linalg.LinAlgError.__name__}",
        ["call", "graph"],
    ),
    (lambda x: x.sin(), X, "", []),
]


@pytest.mark.expected_eager(...)  # what raises runs again
@pytest.mark.parametrize(
    ("program", "given", "why", "left_out"), NOT_VERIFIED, ids=[str(i) for i in range(len(NOT_VERIFIED))]
)
def test_what_is_not_verified_is_told(program: Any, given: Any, why: str, left_out: list[str]) -> None:
    compiled = torchcompile.compile(program, options=VERIFY)
    torchcompile.reset()
    for _ in range(2):
        with contextlib.suppress(ValueError, torch.linalg.LinAlgError):
            compiled(given)
    told = [event for event in torchcompile.report().events if event.kind is events.NOT_VERIFIED]
    assert {event.detail for event in told} == ({why} if why else set())
    found = {"graph" if event.what.startswith("graph_") else "call": event for event in told}
    assert sorted(found) == left_out and all(event.line is not None for event in told)
    if "call" in found:
        assert found["call"].count == 2  # each call


def test_verified_calls_leave_state_as_one_call_does() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    other = copy.deepcopy(model)
    compiled, calls, x = torchcompile.compile(model, options=VERIFY), [], torch.randn(5, 4)

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    compiled(x).sum().backward()
    other(x).sum().backward()
    torch.testing.assert_close(list(model.state_dict().values()), list(other.state_dict().values()))
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    torch.testing.assert_close(torchcompile.compile(noted, options=VERIFY)(x), x + 1)
    assert calls == [1]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), other(x), atol=1e-2, rtol=1e-2)
