"""The call itself: what it accepts, what it says of bad input, and that a compiled model still is the model."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]


class Net(nn.Module):
    """Two layers and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)
        self.label = "net"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("bad", [3, "x", None.__class__, nn.Linear, [nn.Linear(1, 1)], torch.ones(300, 300)])
def test_what_cannot_be_compiled_is_told(bad: object) -> None:
    with pytest.raises(torchcompile.NotCompilable, match=r"nn\.Module") as caught:
        torchcompile.compile(bad)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("kind", [classmethod, property, functools.partialmethod, functools.cached_property])
def test_what_a_class_makes_functions_of_is_refused_with_the_way_to_write_it(kind: Callable[..., object]) -> None:
    with pytest.raises(torchcompile.NotCompilable, match=f"@{kind.__name__} above @torchcompile.compile"):
        torchcompile.compile(kind(lambda self: self))


def test_a_static_method_is_compiled_within_its_class() -> None:
    class Owner:
        @torchcompile.compile(fullgraph=True, backend="eager")
        @staticmethod
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.randn(3)
    assert torch.equal(Owner.twice(x), x * 2) and torch.equal(Owner().twice(x), x * 2)


@pytest.mark.expected_eager(...)
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("made", [torch.jit.script, lambda f: torch.jit.trace(f, torch.ones(2))])
def test_scripted_functions_are_calls_of_c_code(made: Callable[..., Any]) -> None:
    function, x = made(scripted), torch.randn(2)
    compiled = torchcompile.compile(function, options={"strict": True})  # an error of capture is one
    assert torch.equal(compiled(x), scripted(x))


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, r"unknown mode 'fast'; known: .*default"),
        ({"backend": "inducter"}, r"known: aot_eager, eager, inductor\. Did you mean 'inductor'\?"),
        ({"backend": 3}, "callable"),
        ({"options": {"dmp": "x"}}, r"unknown option 'dmp'; known: .*dump.*Did you mean 'dump'"),
        ({"options": {"recompile_limit": "many"}}, "takes int"),
        ({"options": {"on_recompile": "shout"}}, "known: continue, eager, error, warn"),
        ({"options": 3}, "mapping"),
        ({"dynamic": "yes"}, "True, False or None"),
        ({"fullgraph": "no"}, "fullgraph is True or False, not 'no'"),
        ({"disable": "no"}, "disable is True or False, not 'no'"),
        ({"recompile_limit": 0}, "at least 1"),
    ],
)
def test_bad_settings_are_told(settings: dict[str, object], message: str) -> None:
    with pytest.raises(torchcompile.InvalidArgument, match=message):
        torchcompile.compile(Net(), **settings)


def test_backends_are_listed() -> None:
    assert torchcompile.list_backends() == ["aot_eager", "eager", "inductor"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_every_backend_trains(backend: str) -> None:
    torch.manual_seed(0)
    eager = Net()
    model = torchcompile.compile(copy.deepcopy(eager), backend=backend, fullgraph=True)
    x = torch.randn(5, 8)
    for candidate in (eager, model):
        candidate(x).square().sum().backward()
    torch.testing.assert_close(model(x), eager(x))
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(model.norm.running_mean, eager.norm.running_mean)
    assert model.norm.num_batches_tracked == eager.norm.num_batches_tracked


def test_a_backend_of_ones_own() -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        seen.append((gm, example_inputs))
        return gm.forward

    function = torchcompile.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.randn(3)
    assert torch.equal(function(x), x.sin() + 1)
    ((gm, inputs),) = seen
    assert isinstance(gm, torch.fx.GraphModule)
    assert len(inputs) == 1


def test_a_compiled_module_is_the_model() -> None:
    model = Net()
    compiled = torchcompile.compile(model)
    assert isinstance(compiled, Net)
    assert isinstance(compiled, nn.Module)
    assert repr(compiled) == repr(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert compiled.label == "net"
    assert list(compiled.parameters())[0] is list(model.parameters())[0]
    assert compiled.__doc__ == model.__doc__
    compiled.eval()
    assert not model.training
    assert not compiled.norm.training
    compiled.label = "renamed"
    assert model.label == "renamed"
    compiled.load_state_dict(Net().state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x), model(x))
    compiled.train()
    assert compiled(x).requires_grad


def test_train_and_eval_give_their_own_results() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled = torchcompile.compile(model)
    x = torch.ones(64, 4)
    dropped = (compiled(x) == 0).float().mean()
    assert 0.3 < dropped < 0.7
    compiled.eval()
    torch.testing.assert_close(compiled(x), model[0](x))


def test_copies_and_pickles() -> None:
    compiled = torchcompile.compile(Net().eval())
    x = torch.randn(2, 8)
    duplicate = copy.deepcopy(compiled)
    assert duplicate.first.weight is not compiled.first.weight
    torch.testing.assert_close(duplicate(x), compiled(x))
    restored = pickle.loads(pickle.dumps(compiled))
    assert type(restored) is Net
    torch.testing.assert_close(restored(x), compiled(x))


def test_decorator_with_and_without_settings() -> None:
    @torchcompile.compile
    def plain(x: torch.Tensor) -> torch.Tensor:
        "Doubles."
        return x * 2

    @torchcompile.compile(fullgraph=True, dynamic=True)
    def with_settings(x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return x * scale

    x = torch.randn(4)
    assert torch.equal(plain(x), x * 2)
    assert torch.equal(with_settings(x), x * 3.0)
    assert torch.equal(with_settings(x, scale=0.5), x * 0.5)
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Doubles."


def test_disable_gives_the_object_back() -> None:
    model = Net()
    assert torchcompile.compile(model, disable=True) is model


def test_fullgraph_error_names_line_reason_and_remedy() -> None:
    def chatty(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("y is", y)
        return y * 2

    with pytest.raises(Exception, match="print") as caught:
        torchcompile.compile(chatty, fullgraph=True)(torch.randn(3))
    text = str(caught.value)
    assert "test_compile_api.py" in text
    assert "in chatty" in text


@pytest.mark.expected_eager("print")
def test_a_break_is_counted_and_the_result_is_eagers(capsys: pytest.CaptureFixture[str]) -> None:
    def chatty(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("y is here")
        return y * 2

    x = torch.randn(3)
    assert torch.equal(torchcompile.compile(chatty)(x), (x + 1) * 2)
    assert capsys.readouterr().out == "y is here\n"
    report = torchcompile.report()
    [broke] = report.breaks
    assert broke.count == 1 and "test_compile_api.py" in broke.where and broke.kind.id == "print"


def test_report_prints_and_reset_clears() -> None:
    torchcompile.compile(lambda x: x.exp())(torch.randn(3))
    report = torchcompile.report()
    assert report.captured == 1
    assert report.kernels == 1
    assert "generated kernels" in str(report)
    assert "<table>" in report.html_tables() and "</html>" in report.html()
    torchcompile.reset()
    assert torchcompile.report().captured == 0


def test_eagers_own_random_numbers() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 4), nn.Dropout(0.3))
    x = torch.randn(6, 8)

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        net.zero_grad()
        out = model(x)
        out.sum().backward()
        return [out.detach(), net[0].weight.grad.clone(), torch.rand(2)]

    expected = step(net)
    compiled = torchcompile.compile(net, options={"eager_random": True, "strict": True})
    for a, b in zip(expected, step(compiled), strict=True):
        torch.testing.assert_close(b, a)


# -- in place ---------------------------------------------------------------------------------


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(count)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_modules_are_compiled_in_place(backend: str) -> None:
    model = blocks(5)
    twin = copy.deepcopy(model)
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    assert torchcompile.compile_in_place(*model, fullgraph=True, backend=backend, options={"strict": True}) is None
    for _ in range(3):
        x = torch.randn(3, 8)
        for one in (model, twin):
            one.zero_grad()
            one(x).square().sum().backward()
        torch.testing.assert_close(model(x), twin(x))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == keys
    # Of five blocks the first has an input without gradient, the others are equal.
    assert torchcompile.report().captured == 2


def test_hooks_of_a_module_compiled_in_place_run() -> None:
    model = blocks(1)[0]
    torchcompile.compile_in_place(model, fullgraph=True, options={"strict": True})
    x = torch.randn(3, 8)
    plain = model(x)
    handle = model.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(model(x), plain * 2)
    handle.remove()
    model.eval()
    torch.testing.assert_close(model(x), plain)


def test_what_was_compiled_in_place_copies_pickles_and_goes_back() -> None:
    model = blocks(2)
    torchcompile.compile_in_place(model, options={"strict": True})
    x = torch.randn(3, 8)
    expected = model(x)
    assert torchcompile.report().captured == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected)
    within = torchcompile.compile(nn.Sequential(model, nn.Tanh()), fullgraph=True, options={"strict": True})
    torch.testing.assert_close(within(x), expected.tanh())
    torchcompile.reset()
    torchcompile.compile_in_place(model, disable=True)
    torch.testing.assert_close(model(x), expected)
    assert torchcompile.report().captured == 0


def test_in_place_takes_modules_alone() -> None:
    model = blocks(1)
    with pytest.raises(torchcompile.NotCompilable, match=r"compile_in_place takes nn\.Module objects"):
        torchcompile.compile_in_place(model, torch.sin)
    assert model._compiled_call_impl is None


COMPILING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "compile": lambda x: torchcompile.compile(lambda y: y * 3, backend="aot_eager")(x + 1) + 1,
    "report": lambda x: x * 2 + (torchcompile.report() is None),
    "torch.compile": lambda x: torch.compile(lambda y: y * 3, backend="eager")(x + 1) + 1,
}


@pytest.mark.expected_eager("compiler")
@pytest.mark.parametrize("name", COMPILING)
def test_a_compiler_that_the_program_calls_is_no_part_of_it(name: str) -> None:
    program, x = COMPILING[name], torch.randn(3)
    torch.testing.assert_close(torchcompile.compile(program, backend="aot_eager")(x), program(x))
    assert {event.kind.id for event in torchcompile.report().events} == {"compiler"}


def test_a_class_that_is_compiled_already_is_compiled_anew_and_so_is_a_derived_one() -> None:
    """A cell of a notebook is run again; a class is derived from a compiled one."""

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Derived(Doubled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Called:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.randn(3)
    for kind in (Doubled, Derived, Called):
        for settings in ({}, {"dynamic": True}, {"backend": "eager"}):
            assert torchcompile.compile(kind, **settings) is kind
            assert torch.equal(kind()(x), x * 2 + (kind is Derived))
        torchcompile.reset()
        assert torch.equal(kind()(x), x * 2 + (kind is Derived))
