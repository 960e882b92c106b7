"""The autograd node of a compiled program behaves as a node of PyTorch's own: memory, hooks, threads, errors."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, save_on_cpu, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from aotautograd import AotAutogradError, aot_function, aot_module, min_cut, run_graph

COMPILERS = {"boxed": run_graph, "plain": lambda gm, inputs: gm}


@pytest.fixture(params=COMPILERS)
def compiler(request: pytest.FixtureRequest) -> Any:
    return COMPILERS[request.param]


@pytest.fixture
def no_collector(collector_of_new_objects: None) -> Iterator[None]:
    """What is freed here is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def net(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w + b).exp().sin()


def compiled_net(**options: Any) -> Callable[..., torch.Tensor]:
    return aot_function(net, **{"fw_compiler": run_graph, **options})


def net_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return leaf(3, 4), leaf(4, 4), leaf(4)


# -- what Python sees ----------------------------------------------------------------------------


def test_looks_like_a_node(compiler: Any) -> None:
    x, w, b = net_inputs()
    node = compiled_net(fw_compiler=compiler)(x, w, b).grad_fn
    assert node.name() == type(node).__name__ == "CompiledProgramBackward"
    assert [f.variable is t for (f, _), t in zip(node.next_functions, (x, w, b), strict=True)] == [True] * 3
    assert all(isinstance(t, torch.Tensor) for t in node.saved_tensors)
    assert node.metadata == {}
    assert node.requires_grad


def test_derivatives_by_finite_differences(compiler: Any) -> None:
    f = compiled_net(fw_compiler=compiler)
    inputs = net_inputs()
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_profiler_sees_both_halves() -> None:
    f = compiled_net()
    f(*net_inputs()).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        f(*net_inputs()).sum().backward()
    names = {e.name for e in trace.events()}
    assert "CompiledProgram" in names
    assert any("CompiledProgramBackward" in name for name in names)


# -- what is kept, and for how long ----------------------------------------------------------------


def test_saved_tensors_are_freed_by_the_backward(compiler: Any, no_collector: None) -> None:
    f = compiled_net(fw_compiler=compiler)
    out = f(*net_inputs())
    saved = [weakref.ref(t) for t in out.grad_fn.saved_tensors]
    assert sum(not r().requires_grad for r in saved) == 2
    loss = out.sum()
    del out
    loss.backward()
    assert [r() for r in saved if r() is not None and not r().requires_grad] == []
    with pytest.raises(RuntimeError, match="second time"):
        loss.grad_fn.next_functions[0][0].saved_tensors  # noqa: B018


def test_activations_are_freed_within_a_boxed_backward(no_collector: None) -> None:
    alive: list[int] = []
    saved: list[weakref.ref[torch.Tensor]] = []

    def backward_compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(args: list[Any]) -> Any:
            results = gm(*args)
            args.clear()
            alive.append(sum(r() is not None and not r().requires_grad for r in saved))
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    out = compiled_net(bw_compiler=backward_compiler)(*net_inputs())
    saved += [weakref.ref(t) for t in out.grad_fn.saved_tensors]
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert alive[0] > 0 and alive[1] == 0


@pytest.mark.parametrize("program", [lambda x: x.tanh(), lambda x: (x * 2).tanh().view(-1), lambda x: x * x])
def test_no_reference_cycles(program: Callable[..., Any], compiler: Any, no_collector: None) -> None:
    f = aot_function(program, fw_compiler=compiler)
    x = leaf(3, 3) * 1  # no leaf: nothing but this test and the graph hold it
    out = f(x)
    refs = [weakref.ref(x), weakref.ref(out), *(weakref.ref(t) for t in out.grad_fn.saved_tensors)]
    out.sum().backward(retain_graph=True)
    del out, x
    assert [r() for r in refs if r() is not None] == []


def test_written_input_makes_no_cycle(no_collector: None) -> None:
    f = aot_function(lambda x, y: (x.mul_(y), x * y)[1], fw_compiler=run_graph)
    x, y = leaf(3) * 1, leaf(3)
    refs = [weakref.ref(x), weakref.ref(f(x, y))]
    assert x.grad_fn is not None
    del x
    assert [r() for r in refs] == [None, None]


def test_node_keeps_no_input_that_nothing_reads(no_collector: None) -> None:
    f = aot_function(lambda x, y: x + y.relu().sum(), fw_compiler=run_graph)
    x = leaf(3, 3) * 1
    ref = weakref.ref(x)
    out = f(x, leaf(2))
    del x
    assert ref() is None
    out.sum().backward()


def test_inputs_are_let_go_by_the_backward(no_collector: None) -> None:
    x, w, b = net_inputs()
    inner, addend = x * 1, b * 1  # saved, and held for derivatives of the backward
    refs = [weakref.ref(inner), weakref.ref(addend)]
    loss = compiled_net()(inner, w, addend).sum()
    del inner, addend
    assert all(r() is not None for r in refs)
    loss.backward()
    assert [r() for r in refs] == [None, None]


def test_gradients_are_handed_over_not_copied() -> None:
    given: list[int] = []

    def backward_compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            results = gm(*args)
            given.extend(g.data_ptr() for g in results)
            return results

        return run

    inputs = net_inputs()
    compiled_net(bw_compiler=backward_compiler)(*inputs).sum().backward()
    assert [t.grad.data_ptr() for t in inputs] == given


def test_long_chains_are_deleted_without_recursion() -> None:
    f = aot_function(lambda x: x.sin(), fw_compiler=run_graph)
    x = leaf(2)
    for _ in range(20_000):
        x = f(x)
    del x


# -- hooks -------------------------------------------------------------------------------------------


def test_saved_tensor_hooks_see_what_is_saved(compiler: Any) -> None:
    f = compiled_net(fw_compiler=compiler)
    x, w, b = net_inputs()
    expected = torch.autograd.grad(net(x, w, b).sum(), (x, w, b))
    packed: list[torch.Tensor] = []
    unpacked: list[int] = []

    def pack(t: torch.Tensor) -> Any:
        packed.append(t)
        return len(packed) - 1

    def unpack(i: int) -> torch.Tensor:
        unpacked.append(i)
        return packed[i].clone()

    with saved_tensors_hooks(pack, unpack):
        out = f(x, w, b)
    assert len(packed) == len(f(x, w, b).grad_fn.saved_tensors)
    assert not unpacked
    for a, e in zip(torch.autograd.grad(out.sum(), (x, w, b)), expected, strict=True):
        torch.testing.assert_close(a, e)
    assert sorted(unpacked) == list(range(len(packed)))


def test_hooks_that_offload() -> None:
    x, w, b = net_inputs()
    with save_on_cpu():
        out = compiled_net()(x, w, b)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (x, w, b)), torch.autograd.grad(net(x, w, b).sum(), (x, w, b))
    )


def test_hooks_that_give_back_another_layout() -> None:
    """The backward was compiled for the strides that the forward gave: columns here."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).t().sin().exp()

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.t().contiguous().t() if t.dim() == 2 else t

    inputs = leaf(5, 7), leaf(7, 4)
    expected = torch.autograd.grad(program(*inputs).sum(), inputs)
    with saved_tensors_hooks(lambda t: t, rows):
        out = aot_function(program, fw_compiler=held_to_layouts)(*inputs)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), expected)


def held_to_layouts(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """Runs a graph on what lies as the graph says."""
    strides = [n.meta["val"].stride() for n in module.graph.nodes if n.op == "placeholder"]

    class Held(type(run_graph(module, inputs))):  # type: ignore[misc]
        def __call__(self, given: list[torch.Tensor]) -> Any:
            assert [t.stride() for t in given] == strides
            return super().__call__(given)

    return Held(module)


def test_an_output_that_is_saved_goes_through_the_hooks(no_collector: None) -> None:
    f = aot_function(lambda x: x.tanh(), fw_compiler=run_graph)
    x = leaf(3)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        out = f(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 1 - x.tanh() ** 2)


def test_double_backward_through_hooks() -> None:
    x, w, b = net_inputs()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        out = compiled_net()(x, w, b)
    (ours,) = torch.autograd.grad(torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum(), w)
    (expected,) = torch.autograd.grad(torch.autograd.grad(net(x, w, b).sum(), x, create_graph=True)[0].sum(), w)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    f = compiled_net()
    x, w, b = net_inputs()
    out = checkpoint(f, x, w, b, use_reentrant=reentrant)
    out.sum().backward()
    torch.testing.assert_close([t.grad for t in (x, w, b)], list(torch.autograd.grad(net(x, w, b).sum(), (x, w, b))))


def test_hooks_of_the_node() -> None:
    x, w, b = net_inputs()
    out = compiled_net()(x, w, b)
    log: list[str] = []
    out.grad_fn.register_prehook(lambda grads: log.append("before") or (grads[0] * 2,))
    out.grad_fn.register_hook(lambda given, received: log.append(f"after {len(given)} {len(received)}"))
    out.register_hook(lambda g: log.append("tensor"))
    out.retain_grad()
    out.sum().backward()
    assert log == ["tensor", "before", "after 3 1"]
    torch.testing.assert_close(w.grad, torch.autograd.grad(net(x, w, b).sum() * 2, w)[0])
    torch.testing.assert_close(out.grad, torch.ones_like(out))


class ByOne(torch.autograd.Function):
    """A derivative that gives the second argument None."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * 2, None


def under_no_grad(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = b.exp()
    return (x @ w) * scale


HOOKED = {
    "all": net,
    "one unused": lambda x, w, b: (x @ w).tanh(),
    "two unused": lambda x, w, b: w.sin() * 2,
    "for an index": lambda x, w, b: (x @ w).tanh()[:, b.argmax()],
    "detached": lambda x, w, b: (x @ w) * b.detach(),
    "under no_grad": under_no_grad,
    "overwritten": lambda x, w, b: torch.zeros_like(x).add(b).copy_(x @ w),
    "shared": lambda x, w, b: x.sum() + w.sum(),
    "None of a derivative": lambda x, w, b: ByOne.apply(x @ w, b),
    "None and a gradient": lambda x, w, b: ByOne.apply(x @ w, b) + w.sum(),
    "recomputed": lambda x, w, b: checkpoint(lambda y: (y @ w).tanh(), x, use_reentrant=False),
    "recomputed by reentry": lambda x, w, b: checkpoint(lambda y: (y @ w).tanh(), x, use_reentrant=True),
    "returned as it is": lambda x, w, b: (b, (x * 2).sum()),
}


def calls_of_hooks(program: Callable[..., Any], inputs: Sequence[torch.Tensor], step: Any) -> list[str]:
    """Every hook that a backward calls on the inputs or the nodes that accumulate for them, and what it is given."""
    called: list[str] = []

    def note(what: str) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            none = [g is None for g in pytree.tree_leaves(given)] if "node" in what or "tensor" in what else ""
            called.append(f"{what} {none}")

        return hook

    nodes = [get_gradient_edge(t).node for t in inputs]  # they live as long as somebody holds them
    for name, t, node in zip("xwb", inputs, nodes, strict=True):
        t.register_hook(note(f"tensor {name}"))
        t.register_post_accumulate_grad_hook(note(f"accumulated {name}"))
        node.register_hook(note(f"node {name}"))
        node.register_prehook(note(f"before node {name}"))
    outputs = pytree.tree_leaves(program(*inputs))
    step(sum(o.sum() for o in outputs), inputs)
    return sorted(called)


STEPS: dict[str, Callable[[torch.Tensor, Sequence[torch.Tensor]], Any]] = {
    "backward": lambda loss, inputs: loss.backward(),
    "create_graph": lambda loss, inputs: loss.backward(create_graph=True),
    "grad": lambda loss, inputs: torch.autograd.grad(loss, inputs, allow_unused=True),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_run_where_autograd_comes_by(name: str, step: str) -> None:
    if name == "recomputed by reentry" and step == "grad":
        pytest.skip("eager refuses")
    x, w, b = net_inputs()
    twins = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    program = HOOKED[name]
    expected = calls_of_hooks(program, twins, STEPS[step])
    assert calls_of_hooks(aot_function(program, fw_compiler=run_graph), (x, w, b), STEPS[step]) == expected


def test_a_history_that_leads_to_no_input() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, dtype=x.dtype, requires_grad=True) * (x @ w + b).detach()

    inputs = net_inputs()
    out = aot_function(program, fw_compiler=run_graph)(*inputs)
    assert out.requires_grad
    out.sum().backward()
    assert all(t.grad is None for t in inputs)


# -- which gradients are asked for -----------------------------------------------------------------------


def test_only_the_inputs_asked_for_get_gradients() -> None:
    x, w, b = net_inputs()
    seen: list[str] = []
    for name, t in zip("xwb", (x, w, b), strict=True):
        t.register_hook(lambda g, name=name: seen.append(name))
    out = compiled_net()(x, w, b)
    (found,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(found, torch.autograd.grad(net(x, w, b).sum(), w)[0])
    assert set(seen) == {"w"}
    assert x.grad is None and w.grad is None


def halves(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = x.sin()
    return hidden @ w, hidden @ v, torch.cat([hidden, x]).exp()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("decompositions", [None, "core_aten"])
def test_unused_outputs_cost_nothing(used: tuple[int, ...], order: int, decompositions: Any) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backward_compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm

    example = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    f = aot_module(halves, example, fw_compiler=run_graph, bw_compiler=backward_compiler, decompositions=decompositions)

    def gradients(program: Callable[..., Any]) -> list[torch.Tensor | None]:
        outputs = program(*example)
        total = sum(outputs[i].sum() for i in used)
        first = torch.autograd.grad(total, example, create_graph=order == 2, allow_unused=True)
        if order == 1:
            return list(first)
        return list(
            torch.autograd.grad(sum(g.pow(2).sum() for g in first if g is not None), example, allow_unused=True)
        )

    torch.testing.assert_close(gradients(f), gradients(halves))
    if order == 1:
        names = {n.name for n in graphs[0].graph.nodes if n.op == "placeholder"}
        assert {n for n in names if n.startswith("tangents")} == {f"tangents_{i}" for i in used}


def test_unused_output_that_is_not_finite() -> None:
    """Autograd does not run what no gradient reaches: no 0 * inf."""
    f = aot_function(lambda x: (x.sqrt(), x * 2), fw_compiler=run_graph)
    x = torch.zeros(3, requires_grad=True)
    f(x)[1].sum().backward()
    assert x.grad.tolist() == [2.0] * 3


def test_no_gradient_at_all() -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return None

    x, w, b = net_inputs()
    Cut.apply(compiled_net()(x, w, b)).sum().backward()
    assert x.grad is None and w.grad is None


def test_nothing_requires_a_gradient_at_a_call() -> None:
    f = aot_module(lambda *args: [net(*args)], list(net_inputs()), fw_compiler=run_graph)
    inputs = net_inputs()
    assert f(*(t.detach() for t in inputs))[0].grad_fn is None
    with torch.no_grad():
        assert f(*inputs)[0].grad_fn is None
    with torch.inference_mode():
        assert f(*inputs)[0].is_inference()
    assert f(*inputs)[0].grad_fn is not None


# -- errors --------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


@pytest.mark.parametrize("threaded", [False, True])
def test_errors_of_a_backward_keep_their_type(threaded: bool) -> None:
    def backward_compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            raise OwnError("in the backward")

        return run

    out = compiled_net(bw_compiler=backward_compiler)(*net_inputs())
    found: list[BaseException] = []

    def body() -> None:
        try:
            out.sum().backward()
        except OwnError as error:
            found.append(error)

    if threaded:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    else:
        body()
    assert str(found[0]) == "in the backward"
    assert found[0].__traceback__ is not None


def test_errors_of_compilers_reach_the_caller() -> None:
    def failing(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise OwnError("no code")

    with pytest.raises(OwnError, match="no code"):
        compiled_net(bw_compiler=failing)(*net_inputs()).sum().backward()


@pytest.mark.parametrize(
    ("results", "match"),
    [(lambda r: r[:1], "1 gradients instead of 3"), (lambda r: [1.0, *r[1:]], "float"), (lambda r: 3, "no sequence")],
)
def test_wrong_results_of_a_backward(results: Callable[[Any], Any], match: str) -> None:
    backward_compiler = lambda gm, inputs: lambda *args: results(gm(*args))
    with pytest.raises((RuntimeError, TypeError), match=match):
        compiled_net(bw_compiler=backward_compiler)(*net_inputs()).sum().backward()


def test_a_modified_saved_tensor_is_found_as_in_eager() -> None:
    def message(f: Callable[..., torch.Tensor]) -> str:
        x, w, b = net_inputs()
        out = f(x, w, b)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError) as error:
            out.sum().backward()
        return str(error.value)

    start = "one of the variables needed for gradient computation has been modified by an inplace operation"
    for text in (message(net), message(compiled_net())):
        assert text.startswith(start)
        assert "DoubleTensor [4, 4]" in text and "at version 1; expected version 0" in text


def test_inference_tensors_cannot_be_saved() -> None:
    with torch.inference_mode():
        x = torch.randn(3, 4, dtype=torch.float64)
    _, w, b = net_inputs()
    for f in (net, compiled_net()):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            f(x, w, b)


def test_forward_mode_is_refused() -> None:
    x, w, b = net_inputs()
    f = compiled_net()
    f(x, w, b)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(AotAutogradError, match="forward-mode"):
            f(dual.requires_grad_(), w, b)
        f(x, w, b).sum().backward()  # others are as ever


def test_transforms_are_refused() -> None:
    example = torch.randn(3, 4)
    for requires_grad in (True, False):
        f = aot_module(lambda x: [x.sin()], [example.clone().requires_grad_(requires_grad)], fw_compiler=run_graph)
        for transform in (torch.func.grad(lambda x: f(x)[0].sum()), torch.vmap(lambda x: f(x)[0])):
            with pytest.raises(AotAutogradError, match=r"torch\.func"):
                transform(torch.randn(3, 4))


def test_number_of_inputs_is_checked() -> None:
    f = aot_module(lambda x: [x.sin()], [leaf(3)], fw_compiler=run_graph)
    with pytest.raises(AotAutogradError, match="1 inputs got 2"):
        f(leaf(3), leaf(3))


def test_anomaly_mode_shows_the_call() -> None:
    f = aot_function(lambda x: x.sqrt() * 0, fw_compiler=run_graph)
    with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        out = f(torch.zeros(3, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="'CompiledProgramBackward' returned nan values"):
            out.backward()
    assert any(__file__ in str(w.message) for w in caught)


# -- threads ---------------------------------------------------------------------------------------------


def test_threads_share_a_program() -> None:
    f = compiled_net()
    wrong: list[Any] = []

    def body(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(20):
                x, w, b = (
                    torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_()
                    for s in ((3, 4), (4, 4), (4,))
                )
                ours = torch.autograd.grad(f(x, w, b).sum(), (x, w, b))
                torch.testing.assert_close(ours, torch.autograd.grad(net(x, w, b).sum(), (x, w, b)))
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=body, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sys.setswitchinterval(interval)
    assert wrong == []


def test_threads_run_the_backward_of_one_graph() -> None:
    x, w, b = net_inputs()
    out = compiled_net()(x, w, b).sum()
    threads = [threading.Thread(target=lambda: out.backward(retain_graph=True)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.testing.assert_close(w.grad, 8 * torch.autograd.grad(net(x, w, b).sum(), w)[0])


# -- what compilers may return -------------------------------------------------------------------------------


def test_a_compiler_may_return_one_tensor_twice() -> None:
    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            first, second, *saved = gm(*args)
            return (first, first, *saved)  # equal values: a compiler may merge them

        return run

    f = aot_module(lambda x: [x * 2, x * 2], [leaf(3)], fw_compiler=compiler, bw_compiler=run_graph)
    x = leaf(3)
    a, b = f(x)
    assert a is not b
    (a.sum() + 2 * b.sum()).backward()
    assert x.grad.tolist() == [6.0] * 3


def test_a_compiler_may_return_an_input() -> None:
    f = aot_module(
        lambda x: [x * 1],
        [leaf(3)],
        fw_compiler=lambda gm, inputs: lambda *args: (args[0], *gm(*args)[1:]),
        bw_compiler=run_graph,
    )
    x = leaf(3)
    (out,) = f(x)
    assert out is not x and x.is_leaf
    out.sum().backward()
    assert x.grad.tolist() == [1.0] * 3


def test_a_compiler_may_return_a_list_of_views() -> None:
    f = aot_module(
        lambda x: [(x * 2).view(-1)],
        [leaf(2, 2)],
        fw_compiler=lambda gm, inputs: lambda *args: [v[:] if isinstance(v, torch.Tensor) else v for v in gm(*args)],
        bw_compiler=run_graph,
    )
    x = leaf(2, 2)
    (out,) = f(x)
    out.mul_(3)  # as the caller of a program may
    out.sum().backward()
    assert x.grad.tolist() == [[6.0] * 2] * 2


# -- derivatives of derivatives -------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", [None, min_cut(), min_cut(0.0)])
def test_derivatives_after_the_inputs_went_away(partitioner: Any, no_collector: None) -> None:
    options = {"partitioner": partitioner} if partitioner else {}

    def third(f: Callable[..., torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        value = f(start * 2, start.t() * 1, start[0]).sum()  # the graph alone holds these
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, start, create_graph=True)
            value = grad.pow(2).sum()
        return grad

    start = leaf(3, 3)
    torch.testing.assert_close(third(compiled_net(**options), start), third(net, start))


def test_gradient_of_a_part_with_create_graph_keeps_none() -> None:
    f = aot_function(halves, fw_compiler=run_graph)
    x, w, v = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    (f(x, w, v)[0] ** 2).sum().backward(create_graph=True)
    assert v.grad is None and w.grad is not None and w.grad.requires_grad
    w.grad = x.grad = None


# -- devices ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """The backward runs in the engine's thread for the device, on the stream of the forward."""
    x, w, b = (t.detach().cuda().requires_grad_() for t in net_inputs())
    streams: list[Any] = []
    threads: list[int] = []

    def backward_compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            streams.append(torch.cuda.current_stream())
            threads.append(threading.get_ident())
            return gm(*args)

        return run

    f = compiled_net(bw_compiler=backward_compiler)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = f(x, w, b).sum()
    torch.cuda.current_stream().wait_stream(side)
    found = torch.autograd.grad(loss, (x, w, b))
    assert streams == [side]
    assert threads != [threading.get_ident()]
    torch.testing.assert_close(found, torch.autograd.grad(net(x, w, b).sum(), (x, w, b)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_freed() -> None:
    f = aot_function(lambda x, w: (x @ w).tanh().sum(), fw_compiler=run_graph)
    x, w = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda", requires_grad=True)
    f(x, w).backward()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        w.grad = None
        loss = f(x, w)
        loss.backward()
    assert torch.cuda.memory_allocated() - before <= 512  # the last loss
